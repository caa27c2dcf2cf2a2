// SPDX-License-Identifier: Apache-2.0
#include "cluster/mix_division.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "cluster/never.hpp"
#include "cluster/solve/shares.hpp"

namespace gpushare::cluster {
namespace {

constexpr int64_t kQuarters = 4;  // of a device
constexpr double kSlack =
    0.005;                       // of a part's worth: what is below the static partition's by more is avoided
constexpr double kPerLoss = 10;  // how much more a part's loss weighs than another's gain
constexpr double kMargin = 1.1;  // trials may take so much longer than they are expected to
constexpr const char* kOurs = "gpushare";

// Divides at one moment. Parts do not know each other's slices but by what the trials leave to the training jobs.
class Divider {
 public:
  Divider(const MixParts& parts, const Moment& moment) : parts_(parts), moment_(moment) {
    for (const size_t part : moment.parts) (part == kServices ? services_ : rest_).push_back(part);
  }

  // Services have no history: their requests are played as at the start, on the devices of these slices.
  Outcome play(size_t part, const Slices& slices, const std::string& scheduler) const {
    if (part == kServices) {
      Slices own(kMixParts);
      for (const Slice& slice : slices[part])
        if (is_up(slice.device)) own[part].push_back(slice);
      Knowledge known = moment_.known;
      known.no_failures |= !known.everything;
      return parts_.play(part, {{0, own}}, kNever, scheduler, known, nullptr);
    }
    const double end_s = part == kTraining ? trials_end(parts_, moment_, slices) : kNever;
    return parts_.play(part, course_with(slices), end_s, scheduler, moment_.known, nullptr);
  }

  double worth(size_t part, const Slices& slices, const std::string& scheduler = kOurs) const {
    if (moment_.overdue[part]) return std::log(std::max(amount_of(slices[part]), 1e-9));
    return play(part, slices, scheduler).worth;
  }

  // The parts of devices that are up, in devices.
  double amount_of(const std::vector<Slice>& slices) const {
    double amount = 0;
    for (const Slice& slice : slices)
      if (is_up(slice.device)) amount += slice.part;
    return amount;
  }

  bool is_up(size_t device) const {
    return std::find(moment_.up.begin(), moment_.up.end(), device) != moment_.up.end();
  }

  Course course_with(const Slices& slices) const {
    Course course = moment_.before;
    course.push_back({moment_.known.now_s, slices});
    return course;
  }

  // The devices that are up, those that the part has before the others.
  std::vector<size_t> order(size_t part) const {
    std::vector<size_t> devices = moment_.up;
    if (moment_.held.empty()) return devices;
    const std::vector<Slice>& own = moment_.held[part];
    std::stable_partition(devices.begin(), devices.end(), [&](size_t device) {
      return std::any_of(own.begin(), own.end(), [&](const Slice& slice) { return slice.device == device; });
    });
    return devices;
  }

  Slices in_turn() const {
    Slices slices(kMixParts);
    std::vector<size_t> free = moment_.up;
    const auto take = [&](size_t part, size_t device) {
      slices[part].push_back({device, 1});
      std::erase(free, device);
    };
    if (!services_.empty() && !free.empty()) {
      for (const Slice& slice : moment_.held[kServices])
        if (is_up(slice.device)) take(kServices, slice.device);
      if (slices[kServices].empty()) take(kServices, free.front());
    }
    while (!rest_.empty() && !free.empty())
      for (const size_t part : rest_) {
        const std::vector<size_t> own_first = order(part);
        const auto device = std::find_if(own_first.begin(), own_first.end(), [&](size_t each) {
          return std::find(free.begin(), free.end(), each) != free.end();
        });
        if (device != own_first.end()) take(part, *device);
      }
    return slices;
  }

  std::optional<Slices> to_one() const {
    for (const size_t part : moment_.parts) {
      Slices slices = alone(part, count() * kQuarters);
      // At least one more job or trial ends, or retraining and services reach more.
      const double gain = play(part, slices, kOurs).worth - play(part, moment_.held, kOurs).worth;
      if (gain > (part == kTrials || part == kTraining ? -kPerUnended / 2 : 0)) return slices;
    }
    return std::nullopt;
  }

  // So many quarters of these devices, from the first one on.
  static std::vector<Slice> first(int64_t quarters, const std::vector<size_t>& devices) {
    std::vector<Slice> slices;
    for (int64_t q = 0; q < quarters; q += kQuarters)
      slices.push_back({devices[static_cast<size_t>(q / kQuarters)],
                        double(std::min(kQuarters, quarters - q)) / kQuarters});
    return slices;
  }

  Slices alone(size_t part, int64_t quarters) const {
    Slices slices(kMixParts);
    slices[part] = first(quarters, order(part));
    return slices;
  }

  // The worth of every part on every number of whole devices.
  std::vector<ValueTable> by_devices(const std::string* schedulers) const {
    std::vector<ValueTable> tables;
    for (const size_t part : moment_.parts) {
      ValueTable table{1, {}};
      for (size_t n = 1; n + moment_.parts.size() <= moment_.up.size() + 1; ++n)
        table.value.push_back(
            worth(part, alone(part, static_cast<int64_t>(n) * kQuarters), schedulers[part]));
      tables.push_back(std::move(table));
    }
    return tables;
  }

  // Sets the value of each part in the partition into whole devices that divide_whole takes. Less is a loss.
  void set_floors(const std::string* specialists) {
    floors_.assign(kMixParts, kWorst);
    if (moment_.up.size() < moment_.parts.size()) return;  // there is no such partition
    const std::vector<ValueTable> tables = by_devices(specialists);
    const auto units = maximise_sum(tables, count());
    for (size_t i = 0; i < moment_.parts.size(); ++i)
      floors_[moment_.parts[i]] = tables[i].value[size_t((*units)[i] - 1)] - kSlack;
    partition_ = whole(*units);
  }

  // The parts have so many whole devices, in order.
  Slices whole(const std::vector<int64_t>& units) const {
    Slices slices(kMixParts);
    size_t next = 0;
    for (size_t i = 0; i < moment_.parts.size(); ++i)
      for (int64_t n = 0; n < units[i]; ++n) slices[moment_.parts[i]].push_back({moment_.up[next++], 1});
    return slices;
  }

  double weighed(size_t part, double worth) const {
    return worth - kPerLoss * std::max(0.0, floors_[part] - worth);
  }

  double total(const Slices& slices) const {
    double sum = 0;
    for (const size_t part : moment_.parts) sum += weighed(part, worth(part, slices));
    return sum;
  }

  std::optional<Slices> best(bool may_keep) {
    set_values();
    std::optional<Slices> best;
    double greatest = -1e300;
    if (may_keep) {
      best = moment_.held;
      greatest = total(moment_.held);
    }
    // Values are of devices in order; where devices differ, a part may get others in the end. So the partition is
    // offered too.
    if (partition_) {
      const double sum = total(*partition_);
      if (best ? sum > greatest : sum > kWorst) {
        best = partition_;
        greatest = sum;
      }
    }
    const bool services = !services_.empty();
    for (int64_t n = services ? 1 : 0; n <= (services ? count() : 0); ++n) {
      std::vector<int64_t> left(parts_.devices().size(), 0);
      for (const size_t device : moment_.up) left[device] = kQuarters;
      Slices slices(kMixParts);
      double sum = 0;
      if (services) {
        slices[kServices] = first(n * kQuarters, order(kServices));
        const Outcome placed = play(kServices, slices, kOurs);
        if (!placed.error.empty()) continue;
        sum = weighed(kServices, placed.worth);
        leave(placed, slices[kServices], left);
      }
      if (!fill(left, slices)) continue;
      for (const size_t part : rest_) sum += weighed(part, worth(part, slices));
      if (best && sum <= greatest) continue;
      greatest = sum;
      best = std::move(slices);
    }
    return best;
  }

 private:
  int64_t count() const { return static_cast<int64_t>(moment_.up.size()); }

  // Sets the value of every part at every number of quarters.
  void set_values() {
    values_.assign(kMixParts, {});
    for (const size_t part : rest_)
      for (int64_t q = 1; q <= count() * kQuarters; ++q) {
        // A guaranteed job on a part of a device would run slower than it was promised.
        const bool possible = part != kTraining || q % kQuarters == 0;
        values_[part].push_back(possible ? weighed(part, worth(part, alone(part, q))) : kWorst);
      }
  }

  // The value of training jobs on `own` quarters, to which the whole devices of the trials' come later.
  double training_beside(int64_t own, int64_t trials) {
    if (trials < kQuarters || own % kQuarters != 0 || own + trials > count() * kQuarters)
      return values_[kTraining][size_t(own - 1)];
    const auto [at, added] = handed_over_.emplace(std::pair(own, trials), 0);
    if (!added) return at->second;
    Slices slices(kMixParts);
    for (const Slice& slice : first(own + trials, order(kTraining)))
      slices[static_cast<int64_t>(slices[kTraining].size()) < own / kQuarters ? kTraining : kTrials]
          .push_back(slice);
    return at->second = weighed(kTraining, worth(kTraining, slices));
  }

  // The best division of so many quarters among the rest, in its order: every one is looked at. Training jobs, the last
  // part, get no more than the `whole` devices that nobody has a part of. Equal divisions: the one that leaves the
  // least. Empty if there is none.
  std::vector<int64_t> divide(int64_t quarters, int64_t whole) {
    std::vector<int64_t> units(kMixParts, 0), chosen;
    double most = -1e300;
    int64_t idle = 0;
    const std::function<void(size_t, int64_t)> next = [&](size_t i, int64_t left) {
      const auto others = static_cast<int64_t>(rest_.size() - i) - 1;
      if (others > 0) {
        for (int64_t q = 1; q <= left - others; ++q) {
          units[rest_[i]] = q;
          next(i + 1, left - q);
        }
        return;
      }
      units[rest_[i]] = rest_[i] == kTraining ? std::min(left / kQuarters, whole) * kQuarters : left;
      if (units[rest_[i]] == 0) return;
      double sum = 0;
      for (const size_t part : rest_)
        sum += part == kTraining ? training_beside(units[part], units[kTrials])
                                 : values_[part][size_t(units[part] - 1)];
      const int64_t unused = left - units[rest_[i]];
      if (sum < most || (sum == most && unused >= idle)) return;
      most = sum;
      idle = unused;
      chosen = units;
    };
    if (!rest_.empty()) next(0, quarters);
    return chosen;
  }

  // Sets what placed services leave of their devices.
  void leave(const Outcome& placed, const std::vector<Slice>& slices, std::vector<int64_t>& left) const {
    for (const Slice& slice : slices) {
      double used = 0, memory = 0;
      for (const auto& placement : placed.result.at("placements"))
        if (placement.at("device").get<std::string>() == parts_.devices()[slice.device].id) {
          used += placement.at("share_percent").get<double>() / 100;
          memory += placement.at("memory_percent").get<double>() / 100;
        }
      left[slice.device] = std::max<int64_t>(
          0, static_cast<int64_t>(std::floor((1 - std::max(used, memory)) * kQuarters + 1e-9)));
    }
  }

  // Gives the rest their slices of the quarters that are left. False: they are too few, or training jobs would get a
  // part of a device.
  bool fill(std::vector<int64_t>& left, Slices& slices) {
    int64_t quarters = 0;
    for (const int64_t q : left) quarters += q;
    if (quarters < static_cast<int64_t>(rest_.size())) return false;
    const std::vector<int64_t> units = divide(quarters, std::count(left.begin(), left.end(), kQuarters));
    if (units.empty() && !rest_.empty()) return false;
    // Whole devices first, to the parts with the most quarters; what is left of devices fills the remainders.
    std::vector<std::pair<int64_t, size_t>> by_need;
    for (const size_t part : rest_) by_need.emplace_back(-units[part], part);
    std::sort(by_need.begin(), by_need.end(), [](const auto& a, const auto& b) {
      const bool first_a = a.second == kTraining, first_b = b.second == kTraining;  // needs whole ones
      return first_a != first_b ? first_a : a < b;
    });
    for (const auto& [minus, part] : by_need) {
      const std::vector<size_t> devices = order(part);
      for (int64_t need = -minus; need > 0;) {
        // The device whose free part is the greatest that is needed whole, else the smallest that holds the remainder.
        size_t chosen = left.size();
        for (const size_t d : devices) {
          if (left[d] == 0) continue;
          if (chosen == left.size()) {
            chosen = d;
            continue;
          }
          const bool fits = left[d] <= need, fitted = left[chosen] <= need;
          if (fits != fitted ? fits : (fits ? left[d] > left[chosen] : left[d] < left[chosen])) chosen = d;
        }
        if (chosen == left.size()) break;
        const int64_t taken = std::min(need, left[chosen]);
        slices[part].push_back({chosen, double(taken) / kQuarters});
        left[chosen] -= taken;
        need -= taken;
      }
    }
    return std::all_of(slices[kTraining].begin(), slices[kTraining].end(),
                       [](const Slice& slice) { return slice.part == 1; });
  }

  const MixParts& parts_;
  const Moment& moment_;
  std::vector<size_t> services_, rest_;
  std::vector<double> floors_;
  std::optional<Slices> partition_;                            // of which they are
  std::vector<std::vector<double>> values_;                    // [part][quarters - 1]
  std::map<std::pair<int64_t, int64_t>, double> handed_over_;  // (own quarters, the trials' quarters)
};

}  // namespace

std::optional<Slices> divide_whole(const MixParts& parts, const Moment& moment,
                                   const std::string* schedulers) {
  if (moment.up.size() < moment.parts.size()) return std::nullopt;
  const Divider divider(parts, moment);
  return divider.whole(*maximise_sum(divider.by_devices(schedulers), static_cast<int64_t>(moment.up.size())));
}

std::optional<Slices> divide_shared(const MixParts& parts, const Moment& moment,
                                    const std::string* specialists, bool may_keep) {
  Divider divider(parts, moment);
  divider.set_floors(specialists);
  return divider.best(may_keep);
}

Slices divide_in_turn(const MixParts& parts, const Moment& moment) {
  return Divider(parts, moment).in_turn();
}

std::optional<Slices> divide_to_one(const MixParts& parts, const Moment& moment) {
  return Divider(parts, moment).to_one();
}

double trials_end(const MixParts& parts, const Moment& moment, const Slices& slices) {
  if (moment.trials_ended_s) return *moment.trials_ended_s;
  if (slices[kTrials].empty() || moment.overdue[kTrials]) return kNever;
  const Divider divider(parts, moment);
  const double end_s = parts.end_of(kTrials, divider.play(kTrials, slices, kOurs));
  const double now_s = moment.known.now_s;
  return moment.known.everything ? end_s : now_s + (end_s - now_s) * kMargin;
}

}  // namespace gpushare::cluster
