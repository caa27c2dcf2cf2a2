// SPDX-License-Identifier: Apache-2.0
#include "base/pieces.hpp"

#include <unistd.h>

namespace gpushare::base {

Pieces::~Pieces() {
  cut(0);
}

void Pieces::add(int descriptor, uint64_t bytes) {
  MutexLock lock(mutex_);
  const uint64_t offset_bytes = pieces_.empty() ? 0 : pieces_.back().offset_bytes + pieces_.back().bytes;
  pieces_.push_back({descriptor, offset_bytes, bytes});
}

void Pieces::cut(uint64_t bytes) {
  MutexLock lock(mutex_);
  while (!pieces_.empty() && pieces_.back().offset_bytes >= bytes) {
    (void)close(pieces_.back().descriptor);
    pieces_.pop_back();
  }
}

bool Pieces::get(size_t index, Piece* out_piece) const {
  MutexLock lock(mutex_);
  if (index >= pieces_.size()) return false;
  *out_piece = pieces_[index];
  return true;
}

}  // namespace gpushare::base
