// SPDX-License-Identifier: Apache-2.0
#include "device/sim/contention.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "base/units.hpp"

namespace gpushare::device::sim {
namespace {

uint64_t pair_key(uint32_t work_class, uint32_t other) {
  return static_cast<uint64_t>(work_class) << 32 | other;
}

base::Status bad_pair(std::string_view text) {
  return {GPUSHARE_INVALID_ARGUMENT,
          "sim: option pairs: '" + std::string(text) +
              "' is not A:B:RA:RB with classes from 1 and speeds above 0, at most 2"};
}

// "A:B:RA:RB"
struct Pair {
  uint32_t classes[2];
  double speeds[2];
};

base::Result<Pair> parse_pair(std::string_view text) {
  std::array<std::string_view, 4> fields;
  std::string_view rest = text;
  for (size_t i = 0; i < fields.size(); ++i) {
    const size_t colon = rest.find(':');
    if ((colon == std::string_view::npos) != (i + 1 == fields.size())) return bad_pair(text);
    fields[i] = rest.substr(0, colon);
    rest.remove_prefix(std::min(rest.size(), fields[i].size() + 1));
  }
  Pair pair{};
  for (size_t i = 0; i < 2; ++i) {
    const base::Result<uint64_t> work_class = base::parse_uint64(fields[i]);
    const base::Result<double> speed = base::parse_double(fields[i + 2]);
    if (!work_class.ok() || *work_class == 0 || *work_class > UINT32_MAX) return bad_pair(text);
    if (!speed.ok() || *speed <= 0 || *speed > 2) return bad_pair(text);
    pair.classes[i] = static_cast<uint32_t>(*work_class);
    pair.speeds[i] = *speed;
  }
  return pair;
}

}  // namespace

base::Result<ContentionModel> ContentionModel::create(std::string_view mode, double overhead,
                                                      std::string_view pairs) {
  ContentionModel model;
  if (mode != "share" && mode != "none") {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        "sim: option contention is '" + std::string(mode) + "'; allowed is share or none");
  }
  model.sharing_ = mode == "share";
  model.overhead_ = overhead;
  while (!pairs.empty()) {
    const size_t end = std::min(pairs.find(','), pairs.size());
    GPUSHARE_ASSIGN_OR_RETURN(const Pair pair, parse_pair(pairs.substr(0, end)));
    pairs.remove_prefix(std::min(end + 1, pairs.size()));
    model.pairs_[pair_key(pair.classes[0], pair.classes[1])] = pair.speeds[0];
    model.pairs_[pair_key(pair.classes[1], pair.classes[0])] = pair.speeds[1];
  }
  return model;
}

double ContentionModel::pair_speed(const Load& load, const Load& other) const {
  const auto it = pairs_.find(pair_key(load.work_class, other.work_class));
  return it != pairs_.end() ? it->second : 1.0 / std::max(1.0, load.demand + other.demand);
}

void ContentionModel::share(const std::vector<Load>& loads, std::vector<double>* out_speeds) const {
  double left = 1;
  constexpr int32_t kNone = std::numeric_limits<int32_t>::max();
  const double slowdown = 1.0 + overhead_ * static_cast<double>(loads.size() - 1);
  // From the most urgent level to the least; there are few levels, and few works.
  for (int64_t done = std::numeric_limits<int64_t>::min();;) {
    int32_t level = kNone;
    for (const Load& load : loads) {
      if (load.priority > done) level = std::min(level, load.priority);
    }
    if (level == kNone) return;
    double wanted = 0;
    for (const Load& load : loads) wanted += load.priority == level ? load.demand : 0;
    const double speed = wanted <= left ? 1.0 : left / wanted;
    for (size_t i = 0; i < loads.size(); ++i) {
      if (loads[i].priority == level) (*out_speeds)[i] = speed / slowdown;
    }
    left = std::max(0.0, left - wanted);
    done = level;
  }
}

void ContentionModel::speeds(const std::vector<Load>& loads, std::vector<double>* out_speeds) const {
  out_speeds->assign(loads.size(), 1.0);
  if (loads.size() < 2 || !sharing_) return;
  if (pairs_.empty()) {
    share(loads, out_speeds);
    return;
  }
  for (size_t i = 0; i < loads.size(); ++i) {
    for (size_t j = 0; j < loads.size(); ++j) {
      if (i != j) (*out_speeds)[i] *= pair_speed(loads[i], loads[j]);
    }
  }
}

}  // namespace gpushare::device::sim
