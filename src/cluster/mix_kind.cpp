// SPDX-License-Identifier: Apache-2.0
#include "cluster/mix_kind.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>

#include "cluster/json.hpp"
#include "cluster/solve/shares.hpp"

namespace gpushare::cluster {
namespace {

constexpr size_t kParts = 4;
enum MixPart : size_t { kServices, kRetraining, kTrials, kTraining };
constexpr const char* kPartNames[kParts] = {"services", "retraining", "trials", "training"};
// The figure of a part's result, and whether less of it is better.
constexpr const char* kFigures[kParts] = {"goodput_rps", "mean_accuracy", "makespan_s", "jct_mean_s"};
constexpr bool kLessIsBetter[kParts] = {false, false, true, true};
constexpr size_t kMostDevices = 64;  // an exact division beyond would take minutes
constexpr int64_t kQuarters = 4;     // of a device
constexpr uint64_t kPlanSeed = 0x6770;
constexpr double kSlack =
    0.005;                       // of a part's worth: what is below the static partition's by more is avoided
constexpr double kPerLoss = 10;  // how much more a part's loss weighs than another's gain
constexpr double kMargin = 1.1;  // trials may take so much longer than they are expected to
constexpr double kWorst = -1e9;  // worth of a part that cannot run

using PartKinds = std::array<const Kind*, kParts>;

// A part of the devices: of which device how much.
struct Slice {
  size_t device = 0;
  double part = 1;
  double from_s = 0;
};

// The outcome of a part.
struct Outcome {
  double worth = kWorst;  // logarithm of its figure, greater is better
  OrderedJson result;
  std::string error;
};

// Whether and how the parts are played.
struct Mode {
  bool plan = false;  // as told, without noise
  PlayOptions options;
};

class MixProblem final : public Problem {
 public:
  MixProblem(Fields& document, const std::vector<Device>& devices, const PartKinds& kinds)
      : kinds_(kinds), devices_(devices) {
    if (devices.size() > kMostDevices)
      document.refuse_all(base::format("devices: %zu are more than the %zu that a mix is divided over",
                                       devices.size(), kMostDevices));
    for (size_t part = 0; part < kParts && document.ok(); ++part) {
      document.about(kPartNames[part], "The fields of a document of that kind.");
      if (!document.has(kPartNames[part])) continue;
      document.with(kPartNames[part], [&](Fields& fields) { kinds_[part]->read(fields, devices); });
      if (!document.ok()) return;
      if (const Json* there = document.find(kPartNames[part])) parts_[part] = *there;
      there_.push_back(part);
    }
    document.at_least_one({"services", "retraining", "trials", "training"});
    if (document.ok() && there_.size() > devices.size())
      document.refuse_all(
          base::format("devices: %zu are fewer than the %zu parts", devices.size(), there_.size()));
    document.about("specialists", "Who runs the parts of static.");
    if (document.ok() && document.has("specialists"))
      document.with("specialists", [&](Fields& fields) {
        for (size_t part = 0; part < kParts; ++part) {
          const auto& choices = kinds_[part]->run_choices;
          const auto usual = std::find(choices.begin(), choices.end(), specialists_[part]);
          specialists_[part] =
              choices[fields.one_of_or(kPartNames[part], choices, size_t(usual - choices.begin()))];
        }
      });
  }

  base::Status solve(std::string_view choice, OrderedJson& result) override {
    return decide(choice, {true, {}}, result, nullptr);
  }
  base::Status play(std::string_view choice, const PlayOptions& options, OrderedJson& result,
                    std::vector<PlaySpan>* spans) override {
    return decide(choice, {false, options}, result, spans);
  }

 private:
  using Slices = std::vector<std::vector<Slice>>;  // [part]

  base::Status decide(std::string_view choice, const Mode& mode, OrderedJson& result,
                      std::vector<PlaySpan>* spans) {
    GPUSHARE_ASSIGN_OR_RETURN(Slices slices, choice == "static"     ? whole(mode, specialists_)
                                             : choice == "gpushare" ? shared(told())
                                             : choice == "oracle"   ? shared(mode)
                                                                    : whole(told(), ours_));
    const auto& schedulers = choice == "static" ? specialists_ : ours_;
    double score = 0;
    OrderedJson shares = OrderedJson::object();
    for (const size_t part : there_) {
      std::vector<PlaySpan> own;
      const Outcome outcome =
          run(part, slices[part], schedulers[part], mode, spans == nullptr ? nullptr : &own);
      if (!outcome.error.empty())
        return {GPUSHARE_INVALID_ARGUMENT, std::string(kPartNames[part]) + ": " + outcome.error};
      if (part == kTrials)  // they give their devices when they really end
        for (Slice& slice : slices[kTraining])
          if (slice.from_s > 0) slice.from_s = end_of(outcome);
      score += outcome.worth / double(there_.size());
      result[kFigures[part]] = outcome.result.at(kFigures[part]);
      if (part == kTraining) result["slowdown_p99"] = outcome.result.at("slowdown_p99");
      double amount = 0;
      for (const Slice& slice : slices[part])
        if (slice.from_s == 0) amount += slice.part;
      shares[kPartNames[part]] = amount;
      if (spans != nullptr)
        for (PlaySpan& span : own)
          spans->push_back({std::string(kPartNames[part]) + ", " + span.row, std::move(span.name),
                            span.begin_s, span.end_s});
      OrderedJson inner = object({{"scheduler", schedulers[part]}});
      inner.update(outcome.result);
      result["parts"][kPartNames[part]] = std::move(inner);
    }
    result["score"] = std::exp(score);
    result["devices"] = std::move(shares);
    return {};
  }

  static Mode told() { return {true, {}}; }

  // Plays a part alone on its slices: a slice is a device of so much of the speed and memory.
  Outcome run(size_t part, const std::vector<Slice>& slices, const std::string& scheduler, const Mode& mode,
              std::vector<PlaySpan>* spans) const {
    Outcome outcome;
    std::vector<Device> devices;
    for (const Slice& slice : slices) {
      Device device = devices_[slice.device];
      device.speed *= slice.part;
      device.memory_bytes = static_cast<uint64_t>(static_cast<double>(device.memory_bytes) * slice.part);
      device.from_s = slice.from_s;
      if (mode.plan) device.down.clear();  // nobody knows of failures before they come
      devices.push_back(std::move(device));
    }
    if (devices.empty()) {
      outcome.error = "there is no device for it";
      return outcome;
    }
    base::Status error;
    Fields fields(parts_[part], &error);
    const std::unique_ptr<Problem> problem = kinds_[part]->read(fields, devices);
    base::Status status = error;
    if (status.ok()) {
      PlayOptions options = mode.options;
      if (mode.plan) {  // as told, and with other requests than those that come
        options.noise = 0;
        options.seed = kPlanSeed;
      }
      status = problem->play(scheduler, options, outcome.result, spans);
    }
    if (!status.ok()) {
      outcome.error = status.message();
      return outcome;
    }
    const double figure = outcome.result.at(kFigures[part]).get<double>();
    const double unrun =
        part == kTraining
            ? outcome.result.at("jobs").get<double>() - outcome.result.at("completed").get<double>()
        : part == kTrials ? count_of(outcome.result, "rejected") + count_of(outcome.result, "not_completed")
                          : 0;
    const double log = std::log(std::max(figure, 1e-9));
    // Running all of the part's work comes before any speed: each job or trial that cannot run costs 100.
    outcome.worth = (kLessIsBetter[part] ? -log : log) - 100 * unrun;
    return outcome;
  }

  static double count_of(const OrderedJson& result, const char* list) {
    return result.contains(list) ? double(result.at(list).size()) : 0;
  }

  // The worth of every part on every number of whole devices.
  std::vector<ValueTable> by_devices(const Mode& mode, const std::string* schedulers) const {
    std::vector<ValueTable> tables;
    for (const size_t part : there_) {
      ValueTable table{1, {}};
      for (size_t n = 1; n <= devices_.size() - there_.size() + 1; ++n)
        table.value.push_back(
            run(part, first(static_cast<int64_t>(n) * kQuarters), schedulers[part], mode, nullptr).worth);
      tables.push_back(std::move(table));
    }
    return tables;
  }

  // The value of each part in the partition into whole devices that is expected to be the best, or that is the best where
  // the real course is known. Less is a loss.
  std::vector<double> floors(const Mode& mode) const {
    const std::vector<ValueTable> tables = by_devices(mode, specialists_);
    const auto units = maximise_sum(tables, static_cast<int64_t>(devices_.size()));
    std::vector<double> floor(kParts, kWorst);
    for (size_t i = 0; i < there_.size(); ++i)
      floor[there_[i]] = tables[i].value[size_t((*units)[i] - 1)] - kSlack;
    return floor;
  }

  // The parts in order of document, each in whole devices: every number of devices of every part, then all partitions by dynamic
  // programming. Devices are taken in order.
  base::Result<Slices> whole(const Mode& mode, const std::string* schedulers) const {
    const auto units = maximise_sum(by_devices(mode, schedulers), static_cast<int64_t>(devices_.size()));
    Slices slices(kParts);
    size_t next = 0;
    for (size_t i = 0; i < there_.size(); ++i)
      for (int64_t n = 0; n < (*units)[i]; ++n) slices[there_[i]].push_back({next++, 1, 0});
    return slices;
  }

  // So many quarters from the first device on.
  static std::vector<Slice> first(int64_t quarters) {
    std::vector<Slice> slices;
    for (int64_t q = 0; q < quarters; q += kQuarters)
      slices.push_back(
          {static_cast<size_t>(q / kQuarters), double(std::min(kQuarters, quarters - q)) / kQuarters, 0});
    return slices;
  }

  // Ours. For every number of devices that services may have: they are placed there, what their placements leave of
  // those devices and all others are quarters for the rest, which are divided exactly. Every division is judged by what
  // `mode` says of it: as told, or, for the oracle, what really happens.
  base::Result<Slices> shared(const Mode& mode) const {
    const auto count = static_cast<int64_t>(devices_.size());
    const bool services = std::find(there_.begin(), there_.end(), size_t{kServices}) != there_.end();
    const std::vector<size_t> rest(there_.begin() + (services ? 1 : 0), there_.end());
    const std::vector<double> floor = floors(mode);
    const auto weighed = [&](size_t part, double worth) {
      return worth - kPerLoss * std::max(0.0, floor[part] - worth);
    };
    // Every part at every number of quarters, on devices in order: parts do not know each other's.
    std::vector<std::vector<double>> values(kParts);  // [part][quarters - 1]
    for (const size_t part : rest) {
      for (int64_t q = 1; q <= count * kQuarters; ++q) {
        // A guaranteed job on a part of a device would run slower than it was promised.
        const bool possible = part != kTraining || q % kQuarters == 0;
        values[part].push_back(possible ? weighed(part, run(part, first(q), ours_[part], mode, nullptr).worth)
                                        : kWorst);
      }
    }
    // The worth of training jobs on `own` devices, to which the whole ones of the trials' come later.
    std::map<std::pair<int64_t, int64_t>, double> handed_over;  // (own quarters, the trials' quarters)
    const auto training_beside = [&](int64_t own, int64_t trials) {
      if (trials < kQuarters || own % kQuarters != 0 || own + trials > count * kQuarters)
        return values[kTraining][size_t(own - 1)];
      const auto [at, added] = handed_over.emplace(std::pair(own, trials), 0);
      if (!added) return at->second;
      Slices slices(kParts);
      for (const Slice& slice : first(own + trials))
        slices[static_cast<int64_t>(slice.device) < own / kQuarters ? kTraining : kTrials].push_back(slice);
      hand_over(slices, mode);
      return at->second =
                 weighed(kTraining, run(kTraining, slices[kTraining], ours_[kTraining], mode, nullptr).worth);
    };
    // The best division of so many quarters: every one is looked at.
    const auto divide = [&](int64_t quarters) {
      std::vector<int64_t> units(kParts, 0), chosen;
      double most = -1e300;
      const std::function<void(size_t, int64_t)> next = [&](size_t i, int64_t left) {
        const auto others = static_cast<int64_t>(rest.size() - i) - 1;
        if (others > 0) {
          for (int64_t q = 1; q <= left - others; ++q) {
            units[rest[i]] = q;
            next(i + 1, left - q);
          }
          return;
        }
        units[rest[i]] = left;
        double sum = 0;
        for (const size_t part : rest)
          sum += part == kTraining ? training_beside(units[part], units[kTrials])
                                   : values[part][size_t(units[part] - 1)];
        if (sum <= most) return;
        most = sum;
        chosen = units;
      };
      if (!rest.empty()) next(0, quarters);
      return chosen;
    };
    Slices best;
    double greatest = -1e300;
    for (int64_t n = services ? 1 : 0; n <= (services ? count : 0); ++n) {
      std::vector<int64_t> left(devices_.size(), kQuarters);
      double worth = 0;
      Slices slices(kParts);
      if (services) {
        const Outcome placed = run(kServices, first(n * kQuarters), ours_[kServices], mode, nullptr);
        if (!placed.error.empty()) continue;
        worth = weighed(kServices, placed.worth);
        slices[kServices] = first(n * kQuarters);
        for (int64_t d = 0; d < n; ++d) {
          double used = 0, memory = 0;
          for (const auto& placement : placed.result.at("placements"))
            if (placement.at("device").get<std::string>() == devices_[size_t(d)].id) {
              used += placement.at("share_percent").get<double>() / 100;
              memory += placement.at("memory_percent").get<double>() / 100;
            }
          left[size_t(d)] = std::max<int64_t>(
              0, static_cast<int64_t>(std::floor((1 - std::max(used, memory)) * kQuarters + 1e-9)));
        }
      }
      int64_t quarters = 0;
      for (const int64_t q : left) quarters += q;
      if (quarters < static_cast<int64_t>(rest.size())) continue;
      const std::vector<int64_t> units = divide(quarters);
      // Whole devices first, to the parts with the most quarters; what is left of devices fills the remainders.
      std::vector<std::pair<int64_t, size_t>> order;
      for (const size_t part : rest) order.emplace_back(-units[part], part);
      std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
        const bool first_a = a.second == kTraining, first_b = b.second == kTraining;  // needs whole ones
        return first_a != first_b ? first_a : a < b;
      });
      std::vector<int64_t> free = left;
      for (auto& [minus, part] : order) {
        int64_t need = -minus;
        while (need > 0) {
          // The device whose free part is the greatest that is needed whole, else the smallest that holds the remainder.
          size_t chosen = free.size();
          for (size_t d = 0; d < free.size(); ++d) {
            if (free[d] == 0) continue;
            if (chosen == free.size()) {
              chosen = d;
              continue;
            }
            const bool fits = free[d] <= need, fitted = free[chosen] <= need;
            if (fits != fitted ? fits : (fits ? free[d] > free[chosen] : free[d] < free[chosen])) chosen = d;
          }
          if (chosen == free.size()) break;
          const int64_t taken = std::min(need, free[chosen]);
          slices[part].push_back({chosen, double(taken) / kQuarters, 0});
          free[chosen] -= taken;
          need -= taken;
        }
      }
      if (std::any_of(slices[kTraining].begin(), slices[kTraining].end(),
                      [](const Slice& slice) { return slice.part < 1; }))
        continue;  // services leave too few whole devices
      hand_over(slices, mode);
      for (const size_t part : rest)
        worth += weighed(part, run(part, slices[part], ours_[part], mode, nullptr).worth);
      if (worth <= greatest) continue;
      greatest = worth;
      best = std::move(slices);
    }
    if (best.empty())
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          "devices: what services need leaves nothing for the other parts");
    return best;
  }

  // When the trials have ended, their devices join those of the training jobs.
  void hand_over(Slices& slices, const Mode& mode) const {
    if (slices[kTrials].empty() || slices[kTraining].empty()) return;
    const Outcome trials = run(kTrials, slices[kTrials], ours_[kTrials], mode, nullptr);
    if (!trials.error.empty()) return;
    const double end = end_of(trials) * (mode.plan ? kMargin : 1);
    for (const Slice& slice : slices[kTrials])
      if (slice.part == 1) slices[kTraining].push_back({slice.device, slice.part, end});
  }

  double end_of(const Outcome& trials) const {
    const Json& groups = parts_[kTrials].at("groups");
    double first = groups.empty() ? 0 : groups[0].at("arrival_s").get<double>();
    for (const Json& group : groups) first = std::min(first, group.at("arrival_s").get<double>());
    return first + trials.result.at("makespan_s").get<double>();
  }

  const PartKinds& kinds_;
  const std::vector<Device> devices_;
  Json parts_[kParts];
  std::vector<size_t> there_;
  std::string specialists_[kParts] = {"milp-wsm", "ekya", "dynamic-fluid", "antman"};
  const std::string ours_[kParts] = {"gpushare", "gpushare", "gpushare", "gpushare"};
};

}  // namespace

const Kind& mix_kind(const Kind& training) {
  static const PartKinds parts = {&services_kind(), &retraining_kind(), &trials_kind(), &training};
  static const Kind kind = {
      "mix",
      "scheduler",
      {"static", "gpushare", "gpushare-whole"},
      {"static", "gpushare"},
      {"static", "gpushare", "gpushare-whole", "oracle"},
      {"static", "gpushare"},
      true,
      [](Fields& document, const std::vector<Device>& devices) -> std::unique_ptr<Problem> {
        return std::make_unique<MixProblem>(document, devices, parts);
      },
      true};
  return kind;
}

}  // namespace gpushare::cluster
