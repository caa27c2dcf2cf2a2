// SPDX-License-Identifier: Apache-2.0
#include "reference/serving_bound.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace gpushare::sim {
namespace {

// Values on which a suffix is lowered by an amount, asked for the least from an index on or the greatest up to one.
class SuffixTree {
 public:
  explicit SuffixTree(const std::vector<double>& values)
      : leaves_(std::bit_ceil(std::max<size_t>(values.size(), 1))),
        least_(2 * leaves_, INFINITY),
        greatest_(2 * leaves_, -INFINITY),
        lowered_(2 * leaves_) {
    for (size_t i = 0; i < values.size(); ++i) least_[leaves_ + i] = greatest_[leaves_ + i] = values[i];
    for (size_t node = leaves_ - 1; node > 0; --node) join(node);
  }
  void lower_from(size_t first, double by) { lower(1, 0, leaves_, first, by); }
  double least_from(size_t first) const { return least(1, 0, leaves_, first); }
  double greatest_to(size_t last) const { return greatest(1, 0, leaves_, last); }

 private:
  void join(size_t node) {
    least_[node] = std::min(least_[2 * node], least_[2 * node + 1]) - lowered_[node];
    greatest_[node] = std::max(greatest_[2 * node], greatest_[2 * node + 1]) - lowered_[node];
  }
  void lower(size_t node, size_t begin, size_t end, size_t first, double by) {
    if (end <= first) return;
    if (begin >= first) {
      lowered_[node] += by;
      least_[node] -= by;
      greatest_[node] -= by;
      return;
    }
    const size_t middle = begin + (end - begin) / 2;
    lower(2 * node, begin, middle, first, by);
    lower(2 * node + 1, middle, end, first, by);
    join(node);
  }
  double least(size_t node, size_t begin, size_t end, size_t first) const {
    if (end <= first) return INFINITY;
    if (begin >= first) return least_[node];
    const size_t middle = begin + (end - begin) / 2;
    return std::min(least(2 * node, begin, middle, first), least(2 * node + 1, middle, end, first)) -
           lowered_[node];
  }
  double greatest(size_t node, size_t begin, size_t end, size_t last) const {
    if (begin > last) return -INFINITY;
    if (end <= last + 1) return greatest_[node];
    const size_t middle = begin + (end - begin) / 2;
    return std::max(greatest(2 * node, begin, middle, last), greatest(2 * node + 1, middle, end, last)) -
           lowered_[node];
  }

  size_t leaves_;
  std::vector<double> least_, greatest_, lowered_;
};

}  // namespace

uint64_t most_in_time(const std::vector<TimedRequest>& requests, const ServingOptions& options) {
  const double p99_ns = options.p99_ns > 0 ? options.p99_ns : execution_quantile_ns(requests, 0.99);
  struct Job {
    double arrival_ns, deadline_ns, share_ns;
  };
  std::vector<Job> jobs;
  for (const TimedRequest& request : requests) {
    const double slo_ns =
        request.slo_ns != 0 ? static_cast<double>(request.slo_ns) : options.slo_x_p99 * p99_ns;
    const double per_member = options.c1 * static_cast<double>(request.execution_ns);
    const double largest = std::min(std::floor((slo_ns - options.c0_ns) / per_member + 1e-9),
                                    double(options.batch_sizes.back()));
    if (largest < 1) continue;  // it misses alone and at once
    const auto arrival_ns = static_cast<double>(request.arrival_ns);
    jobs.push_back({arrival_ns, arrival_ns + slo_ns, options.c0_ns / largest + per_member});
  }
  // A later arrival with an earlier deadline gets the later deadline: windows are then in one order, and the bound is
  // only looser.
  std::sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) { return a.arrival_ns < b.arrival_ns; });
  std::vector<double> until, from;
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (i > 0) jobs[i].deadline_ns = std::max(jobs[i].deadline_ns, jobs[i - 1].deadline_ns);
    until.push_back(jobs[i].deadline_ns);
    from.push_back(jobs[i].arrival_ns);
  }
  // The work of jobs h to j must fit between the arrival of h and the deadline of j. With P the sums of work:
  // least over j >= i of (deadline_j - P_j), less the greatest over h <= i of (arrival_h - P_{h-1}), is the room of i.
  SuffixTree ends(until), starts(from);
  std::vector<uint32_t> order(jobs.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return jobs[a].share_ns < jobs[b].share_ns; });
  double in_time = 0;
  for (const uint32_t i : order) {
    const double room = ends.least_from(i) - starts.greatest_to(i);
    const double work = std::min(jobs[i].share_ns, room);
    if (!(work > 0)) continue;
    in_time += work / jobs[i].share_ns;
    ends.lower_from(i, work);
    starts.lower_from(size_t{i} + 1, work);
  }
  return static_cast<uint64_t>(in_time + 1e-6 * static_cast<double>(jobs.size()) + 1e-6);
}

}  // namespace gpushare::sim
