// SPDX-License-Identifier: Apache-2.0
#include "loader/grouping.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace gpushare::loader {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Steps of the recurrence, some 5 * 10^7 a second: a model of 8,192 layers is never cut short.
constexpr uint64_t kMostSteps = uint64_t{1} << 26;

base::Status check(std::span<const LayerCost> layers, const GroupingCosts& costs) {
  const auto bad = [](double value) { return !std::isfinite(value) || value < 0; };
  for (size_t i = 0; i < layers.size(); ++i) {
    if (bad(layers[i].transmit_ms) || bad(layers[i].execution_ms))
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("layer %zu: transmit %g ms, execute %g ms; both must be finite and 0 or more", i,
                           layers[i].transmit_ms, layers[i].execution_ms)};
  }
  if (bad(costs.call_overhead_ms) || bad(costs.group_overhead_ms) || bad(costs.link_busy_ms) ||
      bad(costs.lane_busy_ms))
    return {GPUSHARE_INVALID_ARGUMENT, "overheads and busy times must be finite and 0 or more"};
  if (costs.resident_layers > layers.size())
    return {GPUSHARE_INVALID_ARGUMENT, base::format("resident_layers is %u, the model has %zu layers",
                                                    costs.resident_layers, layers.size())};
  return {};
}

// The time at which the lane is free for the first transmitted group: after its present work and the resident prefix.
double lane_start(std::span<const LayerCost> layers, const GroupingCosts& costs) {
  double start = costs.lane_busy_ms;
  if (costs.resident_layers > 0) start += costs.group_overhead_ms;
  for (uint32_t i = 0; i < costs.resident_layers; ++i) start += layers[i].execution_ms;
  return start;
}

// Runs the pipeline of a grouping, calls `visit` with the times of each group; returns when the last is done.
template <class Visit>
base::Result<double> simulate(std::span<const LayerCost> layers, const GroupingCosts& costs,
                              std::span<const uint32_t> ends, Visit visit) {
  GPUSHARE_RETURN_IF_ERROR(check(layers, costs));
  GroupTimes times;
  times.arrived_ms = costs.link_busy_ms;
  times.done_ms = lane_start(layers, costs);
  uint32_t begin = costs.resident_layers;
  for (const uint32_t end : ends) {
    if (end <= begin || end > layers.size())
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          base::format("group ends must ascend from %u to %zu; %u does not", begin, layers.size(), end));
    double execute = 0;
    times.send_ms = times.arrived_ms;
    times.arrived_ms += costs.call_overhead_ms;
    for (uint32_t i = begin; i < end; ++i) {
      times.arrived_ms += layers[i].transmit_ms;
      execute += layers[i].execution_ms;
    }
    times.start_ms = std::max(times.done_ms, times.arrived_ms);
    times.done_ms = times.start_ms + costs.group_overhead_ms + execute;
    visit(times);
    begin = end;
  }
  if (begin != layers.size())
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("the last group ends at layer %u of %zu", begin, layers.size()));
  return times.done_ms;
}

// The rows of the recurrence over one orientation: send_[i], run_[i] of item i, overheads a >= c.
class Rows {
 public:
  Rows(std::vector<double> send, std::vector<double> run, std::vector<uint64_t> bytes, double a, double c,
       uint64_t cap)
      : n_(send.size()),
        a_(a),
        c_(c),
        send_(n_ + 1, 0),
        run_(n_ + 1, 0),
        first_(n_ + 1, 0),
        best_(n_ + 1, kInfinity),
        last_parent_(n_ + 1, kNone),
        last_run_(n_ == 0 ? 0 : run.back()) {
    for (size_t i = 0; i < n_; ++i) {
      send_[i + 1] = send_[i] + send[i];
      run_[i + 1] = run_[i] + run[i];
    }
    // first_[j]: the smallest i such that items i..j-1 may form one group.
    uint64_t sum = 0;
    for (size_t j = 1, i = 0; j <= n_; ++j) {
      sum += bytes[j - 1];
      while (cap > 0 && sum > cap && i + 1 < j) sum -= bytes[i++];
      first_[j] = static_cast<uint32_t>(i);
    }
    best_[0] = 0;
    parents_.reserve(4 * n_);
  }

  // Computes row m = rows so far + 1; false if it improves nothing, and then no later one does.
  bool next_row() {
    ++m_;
    const double shift = static_cast<double>(m_) * (a_ - c_) + c_;
    previous_ = best_;
    bool improved = false;
    size_t i = 0;
    for (size_t j = 1; j <= n_; ++j) {
      const auto arrival = [sent = send_[j], shift, this](size_t k) { return sent - run_[k] + shift; };
      i = std::max<size_t>(i, first_[j]);
      while (i + 1 < j && previous_[i] < arrival(i)) ++i;
      double value = std::max(previous_[i], arrival(i));
      size_t from = i;
      if (i > first_[j]) {
        const double left = std::max(previous_[i - 1], arrival(i - 1));
        if (left < value) {
          value = left;
          from = i - 1;
        }
      }
      if (value < best_[j]) {
        best_[j] = value;
        parents_.push_back({m_, static_cast<uint32_t>(from), last_parent_[j]});
        last_parent_[j] = parents_.size() - 1;
        improved = true;
      }
    }
    return improved;
  }

  uint32_t row() const { return m_; }
  // Makespan without busy times of the best grouping of at most row() groups, counted as row() groups.
  double makespan() const { return best_[n_] + run_[n_] + static_cast<double>(m_) * c_; }
  // No grouping of m groups finishes earlier: everything sent, then the last item executed.
  double bound(uint32_t m) const { return static_cast<double>(m) * a_ + send_[n_] + c_ + last_run_; }

  // Ends of the best grouping of at most `m` groups.
  std::vector<uint32_t> ends(uint32_t m) const {
    std::vector<uint32_t> out;
    for (size_t j = n_; j > 0;) {
      size_t at = last_parent_[j];
      while (parents_[at].row > m) at = parents_[at].before;
      out.push_back(static_cast<uint32_t>(j));
      j = parents_[at].from;
      m = parents_[at].row - 1;
    }
    std::reverse(out.begin(), out.end());
    return out;
  }

 private:
  struct Parent {
    uint32_t row;
    uint32_t from;
    size_t before;  // the improvement of the same item in an earlier row, or kNone
  };
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();
  size_t n_;
  double a_, c_;
  std::vector<double> send_, run_;
  std::vector<uint32_t> first_;
  std::vector<double> best_, previous_;
  // The origin of each improvement of best_[j], the last first. Backtracking needs only that.
  std::vector<size_t> last_parent_;
  std::vector<Parent> parents_;
  double last_run_;
  uint32_t m_ = 0;
};

}  // namespace

base::Result<Grouping> plan_groups(std::span<const LayerCost> layers, const GroupingCosts& costs) {
  GPUSHARE_RETURN_IF_ERROR(check(layers, costs));
  const double lane_free = lane_start(layers, costs);
  const auto sent = layers.subspan(costs.resident_layers);
  const size_t n = sent.size();
  if (n == 0) return Grouping{{}, lane_free};

  const bool reversed = costs.call_overhead_ms < costs.group_overhead_ms;
  std::vector<double> send(n), run(n);
  std::vector<uint64_t> bytes(n);
  for (size_t i = 0; i < n; ++i) {
    const size_t at = reversed ? n - 1 - i : i;
    send[at] = reversed ? sent[i].execution_ms : sent[i].transmit_ms;
    run[at] = reversed ? sent[i].transmit_ms : sent[i].execution_ms;
    bytes[at] = sent[i].bytes;
  }
  double total_execute = 0;
  for (const LayerCost& layer : sent) total_execute += layer.execution_ms;
  const double a = std::max(costs.call_overhead_ms, costs.group_overhead_ms);
  const double c = std::min(costs.call_overhead_ms, costs.group_overhead_ms);
  Rows rows(std::move(send), std::move(run), std::move(bytes), a, c, costs.group_cap_bytes);

  // With busy times: f = max(F + k c + E[n], L + makespan).
  const auto finish = [&](uint32_t groups, double makespan) {
    return std::max(lane_free + groups * costs.group_overhead_ms + total_execute,
                    costs.link_busy_ms + makespan);
  };
  double incumbent = kInfinity;
  uint32_t incumbent_row = 0;
  const auto most_rows = static_cast<uint32_t>(std::max<uint64_t>(1, kMostSteps / n));
  bool cut_short = false;
  // Without overheads nothing beats one layer a group; it needs no search.
  const bool is_free = a == 0;
  while (!is_free && rows.row() < n) {
    cut_short = rows.row() == most_rows;
    if (cut_short) break;
    if (finish(rows.row() + 1, rows.bound(rows.row() + 1)) >= incumbent) break;
    const bool improved = rows.next_row();
    const double value = finish(rows.row(), rows.makespan());
    if (value < incumbent) {
      incumbent = value;
      incumbent_row = rows.row();
    }
    // A row without change is followed by none with one: arrivals only get later.
    if (!improved && incumbent < kInfinity) break;
  }

  Grouping out;
  if (is_free) {
    out.ends = per_layer_groups(layers.size(), costs.resident_layers);
    GPUSHARE_ASSIGN_OR_RETURN(out.makespan_ms, grouping_makespan_ms(layers, costs, out.ends));
    return out;
  }
  out.is_optimal = !cut_short;
  out.ends = rows.ends(incumbent_row);
  if (reversed) {
    // Group ends of the reversed items are group starts of the layers.
    std::vector<uint32_t> ends;
    for (size_t g = out.ends.size(); g-- > 0;)
      ends.push_back(static_cast<uint32_t>(n) - (g == 0 ? 0 : out.ends[g - 1]));
    out.ends = std::move(ends);
  }
  for (uint32_t& end : out.ends) end += costs.resident_layers;
  GPUSHARE_ASSIGN_OR_RETURN(out.makespan_ms, grouping_makespan_ms(layers, costs, out.ends));
  return out;
}

base::Result<double> grouping_makespan_ms(std::span<const LayerCost> layers, const GroupingCosts& costs,
                                          std::span<const uint32_t> ends) {
  return simulate(layers, costs, ends, [](const GroupTimes&) {});
}

base::Result<std::vector<GroupTimes>> group_times(std::span<const LayerCost> layers,
                                                  const GroupingCosts& costs,
                                                  std::span<const uint32_t> ends) {
  std::vector<GroupTimes> out;
  const auto done = simulate(layers, costs, ends, [&](const GroupTimes& times) { out.push_back(times); });
  GPUSHARE_RETURN_IF_ERROR(done.status());
  return out;
}

std::vector<uint32_t> one_shot_groups(size_t layers, uint32_t resident_layers) {
  if (resident_layers >= layers) return {};
  return {static_cast<uint32_t>(layers)};
}

std::vector<uint32_t> per_layer_groups(size_t layers, uint32_t resident_layers) {
  std::vector<uint32_t> ends;
  for (size_t end = resident_layers + size_t{1}; end <= layers; ++end)
    ends.push_back(static_cast<uint32_t>(end));
  return ends;
}

base::Result<std::vector<uint32_t>> best_uniform_groups(std::span<const LayerCost> layers,
                                                        const GroupingCosts& costs) {
  GPUSHARE_RETURN_IF_ERROR(check(layers, costs));
  const uint32_t resident = costs.resident_layers;
  const size_t n = layers.size() - resident;
  // Sums of the first so many transmitted layers, so that a width costs its groups and not its layers.
  std::vector<double> transmit(n + 1, 0), execute(n + 1, 0);
  for (size_t i = 0; i < n; ++i) {
    transmit[i + 1] = transmit[i] + layers[resident + i].transmit_ms;
    execute[i + 1] = execute[i] + layers[resident + i].execution_ms;
  }
  const double lane_free = lane_start(layers, costs);
  size_t best_width = 1;
  double best_makespan = kInfinity;
  for (size_t width = 1; width <= n; ++width) {
    double arrived = costs.link_busy_ms;
    double done = lane_free;
    for (size_t begin = 0; begin < n; begin += width) {
      const size_t end = std::min(n, begin + width);
      arrived += costs.call_overhead_ms + transmit[end] - transmit[begin];
      done = std::max(done, arrived) + costs.group_overhead_ms + execute[end] - execute[begin];
    }
    if (done < best_makespan) {
      best_makespan = done;
      best_width = width;
    }
  }
  std::vector<uint32_t> ends;
  for (size_t end = 0; end < n;) {
    end = std::min(n, end + best_width);
    ends.push_back(resident + static_cast<uint32_t>(end));
  }
  return ends;
}

double makespan_lower_bound_ms(std::span<const LayerCost> layers, const GroupingCosts& costs) {
  const double lane_free = lane_start(layers, costs);
  const auto sent = layers.subspan(costs.resident_layers);
  if (sent.empty()) return lane_free;
  double transmit = 0;
  double execute = 0;
  for (const LayerCost& layer : sent) {
    transmit += layer.transmit_ms;
    execute += layer.execution_ms;
  }
  const double link = costs.link_busy_ms + costs.call_overhead_ms;
  return std::max({link + transmit + costs.group_overhead_ms + sent.back().execution_ms,
                   link + sent.front().transmit_ms + costs.group_overhead_ms + execute,
                   lane_free + costs.group_overhead_ms + execute});
}

}  // namespace gpushare::loader
