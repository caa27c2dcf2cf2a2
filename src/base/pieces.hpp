// pieces.hpp: the memory of a lane that processes share: pieces that follow each other, made by another process. Each
// piece is a file descriptor to import. Thread-safe: one thread adds the pieces that arrive, another maps them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/mutex.hpp"

namespace gpushare::base {

class Pieces {
 public:
  struct Piece {
    int descriptor;
    uint64_t offset_bytes, bytes;
  };
  Pieces() = default;
  ~Pieces();
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  void add(int descriptor, uint64_t bytes);  // takes the descriptor
  // Forgets the pieces that begin at `bytes` or above.
  void cut(uint64_t bytes);
  // False if there is none. The descriptor stays this object's.
  bool get(size_t index, Piece* out_piece) const;

 private:
  mutable Mutex mutex_;
  std::vector<Piece> pieces_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::base
