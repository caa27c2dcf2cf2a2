// pieces.hpp: memory that somebody else made, in pieces that follow each other: what a lane shared between processes lies in. Each piece is
// a file descriptor, for who maps it to import. Thread-safe: one side adds what it was sent, the other maps it.
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
  // Forgets those that begin at `bytes` or above.
  void cut(uint64_t bytes);
  // False if there is none. The descriptor stays this object's.
  bool get(size_t index, Piece* out_piece) const;

 private:
  mutable Mutex mutex_;
  std::vector<Piece> pieces_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::base
