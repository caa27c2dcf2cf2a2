// SPDX-License-Identifier: Apache-2.0
#include "cli/series.hpp"

#include <algorithm>

namespace gpushare::cli {

void Series::set(uint64_t now_ns, double value) {
  if (now_ns > now_ns_) {
    spread(now_ns_, now_ns, value_, /*covers=*/true);
    now_ns_ = now_ns;
  }
  value_ = value;
  max_ = std::max(max_, value);
  // A value that lasts no time still shows in the bucket's maximum.
  while (now_ns / bucket_ns_ >= kBuckets) fold();
  const size_t cell = now_ns / bucket_ns_;
  if (cells_.size() <= cell) cells_.resize(cell + 1);
  cells_[cell].max = std::max(cells_[cell].max, value);
}

void Series::add(uint64_t start_ns, uint64_t end_ns, double value) {
  if (end_ns > start_ns) spread(start_ns, end_ns, value, /*covers=*/false);
}

void Series::spread(uint64_t start_ns, uint64_t end_ns, double value, bool covers) {
  while ((end_ns - 1) / bucket_ns_ >= kBuckets) fold();
  const size_t last = (end_ns - 1) / bucket_ns_;
  if (cells_.size() <= last) cells_.resize(last + 1);
  for (uint64_t at = start_ns; at < end_ns;) {
    const size_t index = at / bucket_ns_;
    const uint64_t stop = std::min(end_ns, (index + 1) * bucket_ns_);
    const double length = static_cast<double>(stop - at);
    cells_[index].integral += value * length;
    if (covers) {
      cells_[index].covered_ns += length;
      cells_[index].max = std::max(cells_[index].max, value);
    }
    at = stop;
  }
}

void Series::fold() {
  for (size_t i = 0; i < cells_.size(); i += 2) {
    Cell merged = cells_[i];
    if (i + 1 < cells_.size()) {
      merged.integral += cells_[i + 1].integral;
      merged.covered_ns += cells_[i + 1].covered_ns;
      merged.max = std::max(merged.max, cells_[i + 1].max);
    }
    cells_[i / 2] = merged;
  }
  cells_.resize((cells_.size() + 1) / 2);
  bucket_ns_ *= 2;
}

std::vector<Series::Bucket> Series::buckets() const {
  std::vector<Bucket> out;
  out.reserve(cells_.size());
  for (const Cell& cell : cells_) {
    const double over = cell.covered_ns > 0 ? cell.covered_ns : static_cast<double>(bucket_ns_);
    const double mean = cell.integral / over;
    out.push_back({mean, std::max(mean, cell.max)});
  }
  return out;
}

}  // namespace gpushare::cli
