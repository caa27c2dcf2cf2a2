// shared_file.hpp: the memory file behind memory that other processes may map, and its owner's mapping of it.
//
// The owner maps the file once, for writing, before any other process can have it. Exporting the file for reading seals
// it with F_SEAL_FUTURE_WRITE. From then on the owner's mapping is the only way to write it: no process of any user,
// root included, can map the file for writing or write to it, however it opens the file again (/proc/self/fd). The
// seals of the size keep an importer from turning another's access into a bus error.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.hpp"

namespace gpushare::device {

class SharedFile {
 public:
  // A file of `bytes` zeros. Errors: IO_ERROR, HOST_OUT_OF_MEMORY.
  static base::Result<std::shared_ptr<SharedFile>> create(uint64_t bytes);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  int number() const { return number_; }
  uint64_t bytes() const { return bytes_; }
  // The owner's mapping; the same for as long as the file lives.
  char* pages() const { return pages_; }
  // Seals the file so that others can only read it, or so that they can write it; false if it was sealed the other way
  // before, which cannot be undone. Errors: IO_ERROR (a kernel before Linux 5.1).
  base::Result<bool> seal(bool read_only);
  // A new open file with the rights of O_RDONLY or O_RDWR, the caller's. Errors: IO_ERROR.
  base::Result<int> open_again(int mode) const;
  // Maps [offset, offset + bytes) at `target` for reading and writing, in place of what is mapped there. False: errno
  // says why.
  bool map_at(char* target, uint64_t bytes, uint64_t offset) const;

  // Whether `descriptor` has the seals that seal() sets on the size.
  static bool is_shared(int descriptor);

 private:
  SharedFile(int number, char* pages, uint64_t bytes) : number_(number), pages_(pages), bytes_(bytes) {}

  const int number_;
  char* const pages_;
  const uint64_t bytes_;
  bool sealed_ = false, read_only_ = false;
};

}  // namespace gpushare::device
