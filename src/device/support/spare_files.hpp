// spare_files.hpp: files of shared memory that are not in use any more, zeroed and kept for the next memory of their
// size. Fresh pages cost several times as much as the copy that fills them.
//
// A file is kept only if the system confirms that this process alone has it: the system refuses a write lease while any
// other open file of it exists, in another process, in a message on its way, or behind a mapping. So a file that
// another process may still see is never filled with something else.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>

#include "base/mutex.hpp"
#include "device/support/shared_file.hpp"

namespace gpushare::device {

// Thread-safe. Zeroing and closing, which take long, happen on a thread of its own that starts when first needed.
class SpareFiles {
 public:
  SpareFiles() = default;
  ~SpareFiles();
  SpareFiles(const SpareFiles&) = delete;
  SpareFiles& operator=(const SpareFiles&) = delete;

  // A file of `bytes` zeros; null if there is none. It may have been sealed in its earlier life.
  std::shared_ptr<SharedFile> take(uint64_t bytes);
  // Keeps `file` if nobody else has it. A copy that is still under way and holds the file counts too.
  void give(std::shared_ptr<SharedFile> file);
  // Keeps at most `bytes` from now on.
  void limit(uint64_t bytes);

 private:
  struct File {
    std::shared_ptr<SharedFile> file;
    bool keep = false;
  };
  void work();
  void push(File file) GPUSHARE_REQUIRES(mutex_);
  void shrink() GPUSHARE_REQUIRES(mutex_);

  base::Mutex mutex_;
  base::ConditionVariable came_;
  std::deque<File> to_do_ GPUSHARE_GUARDED_BY(mutex_);                         // to zero, or to close
  std::deque<std::shared_ptr<SharedFile>> ready_ GPUSHARE_GUARDED_BY(mutex_);  // oldest first
  uint64_t kept_bytes_ GPUSHARE_GUARDED_BY(mutex_) = 0;  // ready, and on their way to it
  uint64_t limit_bytes_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  bool stop_ GPUSHARE_GUARDED_BY(mutex_) = false;
  std::thread thread_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::device
