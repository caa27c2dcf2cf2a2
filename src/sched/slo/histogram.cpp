// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/histogram.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/units.hpp"

namespace gpushare::sched::slo {
namespace {

constexpr unsigned kSubBits = 5;  // log2(kBucketsPerOctave)
static_assert(Histogram::kBucketsPerOctave == 1u << kSubBits);
constexpr uint64_t kMaxNs = (1ull << 40) - 1;

std::string_view next_word(std::string_view& text) {
  const size_t begin = text.find_first_not_of(" \n");
  if (begin == std::string_view::npos) return {};
  const size_t end = std::min(text.find_first_of(" \n", begin), text.size());
  const std::string_view word = text.substr(begin, end - begin);
  text.remove_prefix(end);
  return word;
}

}  // namespace

Histogram::Histogram(HistogramOptions options) : options_(options) {
  options_.window = std::clamp<size_t>(options_.window, 1, 1u << 20);
  if (!(options_.drift_alpha > 0 && options_.drift_alpha < 1))
    options_.drift_alpha = HistogramOptions().drift_alpha;
}

// Values below 32 have a bucket each; above, an octave is cut into 32 equal parts.
size_t Histogram::bucket_of(uint64_t duration_ns) {
  duration_ns = std::clamp<uint64_t>(duration_ns, 1, kMaxNs);
  if (duration_ns < kBucketsPerOctave) return static_cast<size_t>(duration_ns);
  const unsigned shift = static_cast<unsigned>(std::bit_width(duration_ns)) - 1 - kSubBits;
  return (static_cast<size_t>(shift) << kSubBits) + static_cast<size_t>(duration_ns >> shift);
}

double Histogram::bucket_low_ns(size_t bucket) {
  if (bucket < 2 * kBucketsPerOctave) return static_cast<double>(bucket);
  const size_t shift = (bucket >> kSubBits) - 1;
  return std::ldexp(static_cast<double>((bucket & (kBucketsPerOctave - 1)) + kBucketsPerOctave),
                    static_cast<int>(shift));
}

Histogram::Bucket& Histogram::bucket_at(uint16_t index) {
  const auto at = std::lower_bound(buckets_.begin(), buckets_.end(), index,
                                   [](const Bucket& bucket, uint16_t i) { return bucket.index < i; });
  if (at != buckets_.end() && at->index == index) return *at;
  Bucket fresh;
  fresh.index = index;
  return *buckets_.insert(at, fresh);
}

const Histogram::Bucket& Histogram::bucket_in_use(uint16_t index) const {
  return *std::lower_bound(buckets_.begin(), buckets_.end(), index,
                           [](const Bucket& bucket, uint16_t i) { return bucket.index < i; });
}

void Histogram::push(uint16_t bucket, uint64_t low_ns, uint64_t high_ns) {
  if (held_ == options_.window) {
    drop_oldest(1);
  } else if (held_ == ring_.size()) {
    std::vector<uint16_t> larger(std::min(options_.window, std::max<size_t>(2 * held_, 16)));
    for (size_t i = 0; i < held_; ++i) larger[i] = ring_[position(i)];
    ring_ = std::move(larger);
    oldest_ = 0;
  }
  Bucket& counted = bucket_at(bucket);
  ring_[position(held_)] = bucket;
  ++held_;
  counted.low_ns = counted.count == 0 ? low_ns : std::min(counted.low_ns, low_ns);
  counted.high_ns = counted.count == 0 ? high_ns : std::max(counted.high_ns, high_ns);
  ++counted.count;
  ++version_;
}

void Histogram::drop_oldest(size_t n) {
  for (; n > 0 && held_ > 0; --n) {
    --bucket_at(ring_[oldest_]).count;
    oldest_ = (oldest_ + 1) % ring_.size();
    --held_;
  }
}

void Histogram::record(uint64_t duration_ns) {
  duration_ns = std::clamp<uint64_t>(duration_ns, 1, kMaxNs);
  push(static_cast<uint16_t>(bucket_of(duration_ns)), duration_ns, duration_ns);
  if (options_.drift_samples != 0 && ++since_look_ >= std::max<size_t>(options_.drift_samples / 2, 1))
    look_for_drift();
}

void Histogram::merge(const Histogram& other) {
  if (&other == this) {
    merge(Histogram(other));
    return;
  }
  for (size_t i = 0; i < other.held_; ++i) {
    const uint16_t bucket = other.ring_[other.position(i)];
    const Bucket& from = other.bucket_in_use(bucket);
    push(bucket, from.low_ns, from.high_ns);
  }
}

void Histogram::reset() {
  drop_oldest(held_);
  since_look_ = 0;
  ++version_;
}

void Histogram::keep_newest(size_t n) {
  if (n >= held_) return;
  drop_oldest(held_ - n);
  since_look_ = 0;
  ++version_;
  ++drifts_;
}

// The newest samples against all before them: the greatest distance between the two CDFs, with the usual
// bound.
void Histogram::look_for_drift() {
  since_look_ = 0;
  const size_t fresh = options_.drift_samples;
  if (held_ < 2 * fresh) return;
  const size_t old = held_ - fresh;
  std::vector<uint32_t> newest(buckets_.size());
  for (size_t i = old; i < held_; ++i)
    ++newest[static_cast<size_t>(&bucket_at(ring_[position(i)]) - buckets_.data())];
  const double fresh_count = static_cast<double>(fresh);
  const double old_count = static_cast<double>(old);
  double distance = 0, fresh_cdf = 0, old_cdf = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (buckets_[b].count == 0) continue;
    fresh_cdf += newest[b] / fresh_count;
    old_cdf += (buckets_[b].count - newest[b]) / old_count;
    distance = std::max(distance, std::abs(fresh_cdf - old_cdf));
  }
  const double bound = std::sqrt(-0.5 * std::log(options_.drift_alpha / 2)) *
                       std::sqrt((fresh_count + old_count) / (fresh_count * old_count));
  if (distance <= bound) return;
  drop_oldest(old);
  ++drifts_;
}

Distribution Histogram::distribution(size_t bins) const {
  std::vector<double> edges;
  std::vector<double> weights;
  for (const Bucket& bucket : buckets_) {
    if (bucket.count == 0) continue;
    // From just below the smallest to the largest seen in the bucket: a constant stays a constant.
    const double low = static_cast<double>(bucket.low_ns) - 1;
    const double high = static_cast<double>(bucket.high_ns);
    if (edges.empty()) edges.push_back(low);
    if (low > edges.back()) {
      weights.push_back(0);
      edges.push_back(low);
    }
    weights.push_back(bucket.count);
    edges.push_back(high);
  }
  if (weights.empty()) return {};
  return Distribution::from_bins(edges, weights)->coarsened(bins);
}

std::string Histogram::serialize() const {
  std::string text = base::format("gpushare-histogram 1 %zu %zu", options_.window, held_);
  for (size_t i = 0; i < held_; ++i) text += base::format(" %u", static_cast<unsigned>(ring_[position(i)]));
  return text;
}

base::Result<Histogram> Histogram::parse(std::string_view text, HistogramOptions options) {
  const auto malformed = [](const std::string& what) {
    return base::Status(GPUSHARE_MALFORMED_INPUT, "histogram: " + what);
  };
  if (next_word(text) != "gpushare-histogram") return malformed("does not begin with 'gpushare-histogram'");
  if (next_word(text) != "1") return malformed("only version 1 is known");
  const base::Result<uint64_t> window = base::parse_uint64(next_word(text));
  if (!window.ok() || *window == 0 || *window > (1u << 20))
    return malformed("the window is not a number from 1 to 2^20");
  const base::Result<uint64_t> count = base::parse_uint64(next_word(text));
  if (!count.ok() || *count > *window) return malformed("the count is not a number up to the window");
  options.window = *window;
  Histogram result(options);
  for (uint64_t i = 0; i < *count; ++i) {
    const base::Result<uint64_t> bucket = base::parse_uint64(next_word(text));
    if (!bucket.ok() || *bucket == 0 || *bucket >= kBuckets)
      return malformed(base::format("bucket %llu of %llu is missing or not a number from 1 to %zu",
                                    static_cast<unsigned long long>(i),
                                    static_cast<unsigned long long>(*count), kBuckets - 1));
    const uint64_t low = static_cast<uint64_t>(bucket_low_ns(*bucket));
    const uint64_t high = std::max(low, static_cast<uint64_t>(bucket_low_ns(*bucket + 1)) - 1);
    result.push(static_cast<uint16_t>(*bucket), low, high);
  }
  if (!next_word(text).empty()) return malformed("text after the last bucket");
  return result;
}

}  // namespace gpushare::sched::slo
