// SPDX-License-Identifier: Apache-2.0
#include "cluster/mix_kind.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "cluster/json.hpp"
#include "cluster/mix_division.hpp"
#include "cluster/never.hpp"

namespace gpushare::cluster {
namespace {

// At so many moments x devices that are up, divisions are searched for: a search takes as long as the first division
// and more, since it plays what was before. Later ones are made without.
constexpr size_t kSearched = 64;

class MixProblem final : public Problem {
 public:
  MixProblem(Fields& document, const std::vector<Device>& devices, const PartKinds& kinds)
      : parts_(document, devices, kinds) {
    document.about("specialists", "Who runs the parts of static.");
    if (document.ok() && document.has("specialists"))
      document.with("specialists", [&](Fields& fields) {
        for (size_t part = 0; part < kMixParts; ++part) {
          const auto& choices = kinds[part]->run_choices;
          const auto usual = std::find(choices.begin(), choices.end(), specialists_[part]);
          specialists_[part] =
              choices[fields.one_of_or(kMixPartNames[part], choices, size_t(usual - choices.begin()))];
        }
      });
  }

  base::Status solve(std::string_view choice, OrderedJson& result) override {
    return decide(choice, {false, 0, true, {}}, result, nullptr);
  }
  base::Status play(std::string_view choice, const PlayOptions& options, OrderedJson& result,
                    std::vector<PlaySpan>* spans) override {
    return decide(choice, {true, 0, false, options}, result, spans);
  }

 private:
  // `truth` is what is played in the end.
  base::Status decide(std::string_view choice, const Knowledge& truth, OrderedJson& result,
                      std::vector<PlaySpan>* spans) {
    const bool shares = choice == "gpushare" || choice == "oracle";
    const bool knows = choice == "static" || choice == "oracle";
    const Moment start = moment_at_start(knows || truth.no_failures ? truth : told(0), knows);
    const std::string* schedulers = choice == "static" ? specialists_ : ours_;
    std::optional<Slices> slices =
        shares ? divide_shared(parts_, start, specialists_, false) : divide_whole(parts_, start, schedulers);
    if (!slices)
      return {GPUSHARE_INVALID_ARGUMENT, "devices: what services need leaves nothing for the other parts"};
    Course course = {{0, std::move(*slices)}};
    if (choice == "gpushare" && !truth.no_failures) divide_anew(truth, course);
    return write(course, schedulers, shares, truth, result, spans);
  }

  static Knowledge told(double now_s) { return {false, now_s, false, {}}; }

  // The devices that are up, or all where what comes is known or too few are up for the parts.
  Moment moment_at_start(const Knowledge& known, bool knows) const {
    Moment moment;
    moment.known = known;
    moment.parts = parts_.there();
    moment.up = up_at(0);
    if (!knows && !known.no_failures && moment.up.size() >= moment.parts.size()) return moment;
    moment.known.no_failures |= !knows;
    moment.up.clear();
    for (size_t d = 0; d < parts_.devices().size(); ++d) moment.up.push_back(d);
    return moment;
  }

  std::vector<size_t> up_at(double at_s) const {
    std::vector<size_t> up;
    for (size_t d = 0; d < parts_.devices().size(); ++d)
      if (is_up(parts_.devices()[d], at_s)) up.push_back(d);
    return up;
  }

  // At each change of devices, what is left of the parts' work is divided over those that are up; while a part has
  // work that it cannot do, also when another one ends, or can do nothing more of its own.
  void divide_anew(const Knowledge& truth, Course& course) const {
    std::vector<double> times;  // of changes after the start
    for (const DeviceChange& change : device_changes(parts_.devices()))
      if (change.at_s > (times.empty() ? 0 : times.back())) times.push_back(change.at_s);
    size_t changes = 0, budget = kSearched;
    Ends ends = ends_of(course, truth);
    Moment moment = moment_at(0, ends, course, truth);
    const auto look_again = [&] {
      ends = ends_of(course, truth);
      moment = moment_at(moment.known.now_s, ends, course, truth);
    };
    // The first division may be of devices that are not up yet.
    if (divide_where_all_stop(moment, course)) look_again();
    while (!moment.parts.empty()) {
      const double change_s = changes < times.size() ? times[changes] : kNever;
      const double at_s = std::min(change_s, next_end_s(moment, ends));
      if (at_s == kNever) return;
      if (at_s == change_s) ++changes;
      const std::vector<size_t> was_up = moment.up;
      moment = moment_at(at_s, ends, course, truth);
      if (divide_at(moment, was_up, budget, course)) look_again();
      if (divide_where_all_stop(moment, course)) look_again();
    }
  }

  // When each part really ends if nothing is divided anew any more; kNever if it does not.
  using Ends = std::array<double, kMixParts>;
  Ends ends_of(const Course& course, const Knowledge& truth) const {
    Ends ends;
    ends.fill(kNever);
    for (const size_t part : parts_.there())
      ends[part] =
          part == kServices
              ? parts_.services_end_s()
              : parts_.end_of(part, parts_.play(part, course, ends[kTrials], ours_[part], truth, nullptr));
    return ends;
  }

  // True: somebody has other devices from then on. A search takes device-moments from `budget`. When too few are
  // left, a change of the services' devices or a part that waits still makes a division necessary.
  bool divide_at(const Moment& moment, const std::vector<size_t>& was_up, size_t& budget,
                 Course& course) const {
    if (moment.up.empty()) return false;
    // Services are placed anew, so that nobody knows any more what the division left of their devices.
    const bool placed_anew = std::any_of(
        moment.held[kServices].begin(), moment.held[kServices].end(),
        [&](const Slice& slice) { return has(was_up, slice.device) != has(moment.up, slice.device); });
    std::optional<Slices> slices = moment.held;
    if (budget >= moment.up.size()) {
      budget -= moment.up.size();
      slices = divide_shared(parts_, moment, specialists_, !placed_anew);
    } else if (placed_anew || somebody_waits(moment)) {
      slices = std::nullopt;
    }
    if (!slices) slices = divide_in_turn(parts_, moment);
    if (*slices == moment.held) give_idle(moment, *slices);
    return divide(moment, std::move(*slices), course);
  }

  // Where no part does anything more with what it has, all devices go to a part that does. True: it has them.
  bool divide_where_all_stop(const Moment& moment, Course& course) const {
    if (moment.up.empty() || std::any_of(moment.parts.begin(), moment.parts.end(), [&](size_t part) {
          return !moment.waits[part] || moment.works_until_s[part] > moment.known.now_s;
        }))
      return false;
    std::optional<Slices> slices = divide_to_one(parts_, moment);
    return slices && divide(moment, std::move(*slices), course);
  }

  // False: these are the slices that the parts have.
  static bool divide(const Moment& moment, Slices slices, Course& course) {
    sort(slices);
    if (slices == moment.held) return false;
    if (course.back().from_s == moment.known.now_s) course.pop_back();
    course.push_back({moment.known.now_s, std::move(slices)});
    return true;
  }

  // Devices of which nobody has a part go to the parts that wait, in turn.
  static void give_idle(const Moment& moment, Slices& slices) {
    std::vector<size_t> waiting;
    for (const size_t part : moment.parts)
      if (moment.waits[part]) waiting.push_back(part);
    if (waiting.empty()) return;
    size_t turn = 0;
    for (const size_t device : moment.up)
      if (std::none_of(slices.begin(), slices.end(), [&](const auto& own) { return has(own, device); }))
        slices[waiting[turn++ % waiting.size()]].push_back({device, 1});
  }

  static void sort(Slices& slices) {
    for (auto& own : slices)
      std::sort(own.begin(), own.end(), [](const Slice& a, const Slice& b) { return a.device < b.device; });
  }

  static bool somebody_waits(const Moment& moment) {
    return !moment.up.empty() && std::any_of(moment.parts.begin(), moment.parts.end(),
                                             [&](size_t part) { return moment.waits[part]; });
  }

  // When the next part ends or does nothing more, if one waits for it; else kNever.
  static double next_end_s(const Moment& moment, const Ends& ends) {
    double next_s = kNever;
    if (!somebody_waits(moment)) return next_s;
    for (const size_t part : moment.parts) {
      next_s = std::min(next_s, ends[part]);
      if (moment.works_until_s[part] > moment.known.now_s)
        next_s = std::min(next_s, moment.works_until_s[part]);
    }
    return next_s;
  }

  static bool has(const std::vector<size_t>& devices, size_t device) {
    return std::find(devices.begin(), devices.end(), device) != devices.end();
  }
  static bool has(const std::vector<Slice>& slices, size_t device) {
    return std::any_of(slices.begin(), slices.end(),
                       [&](const Slice& slice) { return slice.device == device; });
  }

  // Which parts have really ended until then, and what the others have. The work that is left of those is as the
  // document tells: neither the noise of the work that they have done nor that of the rest is known.
  Moment moment_at(double at_s, const Ends& ends, const Course& course, const Knowledge& truth) const {
    Moment moment;
    moment.known = told(at_s);
    moment.before = course;
    moment.up = up_at(at_s);
    if (ends[kTrials] <= at_s) moment.trials_ended_s = ends[kTrials];
    double trials_told_s = ends[kTrials];
    for (const size_t part : parts_.there()) {
      if (ends[part] <= at_s) continue;
      moment.parts.push_back(part);
      if (part == kServices) continue;
      const double told_s =
          parts_.end_of(part, parts_.play(part, course, trials_told_s, ours_[part], moment.known, nullptr));
      if (part == kTrials) trials_told_s = told_s;
      moment.overdue[part] = told_s <= at_s;
      moment.waits[part] = told_s == kNever;
    }
    moment.held = held_by(moment);
    for (const size_t part : moment.parts)
      moment.waits[part] |= std::none_of(moment.up.begin(), moment.up.end(),
                                         [&](size_t device) { return has(moment.held[part], device); });
    Knowledge until_now = truth;
    until_now.until_now = true;
    until_now.now_s = at_s;
    for (const size_t part : moment.parts)
      if (moment.waits[part] && (part == kTrials || part == kTraining)) {
        const double trials_end_s = moment.waits[kTrials] ? kNever : ends[kTrials];
        moment.works_until_s[part] = parts_.last_end_of(
            part, parts_.play(part, course, trials_end_s, ours_[part], until_now, nullptr));
      }
    return moment;
  }

  // The slices of the last division that belong to parts that have not ended.
  static Slices held_by(const Moment& moment) {
    const Slices& last = moment.before.back().slices;
    Slices held(kMixParts);
    for (const size_t part : moment.parts) {
      held[part] = last[part];
      if (part != kTraining || !moment.trials_ended_s) continue;
      for (const Slice& slice : last[kTrials])
        if (slice.part == 1) held[part].push_back(slice);
    }
    sort(held);
    return held;
  }

  // Plays the course, and writes what comes of it.
  base::Status write(const Course& course, const std::string* schedulers, bool hands_over,
                     const Knowledge& truth, OrderedJson& result, std::vector<PlaySpan>* spans) const {
    double score = 0, trials_end_s = kNever;
    for (const size_t part : parts_.there()) {
      std::vector<PlaySpan> own;
      const Outcome outcome =
          parts_.play(part, course, trials_end_s, schedulers[part], truth, spans == nullptr ? nullptr : &own);
      if (!outcome.error.empty())
        return {GPUSHARE_INVALID_ARGUMENT, std::string(kMixPartNames[part]) + ": " + outcome.error};
      // They give their devices when they really end.
      if (part == kTrials && hands_over) trials_end_s = parts_.end_of(part, outcome);
      score += outcome.worth / double(parts_.there().size());
      result[kMixFigures[part]] = outcome.result.at(kMixFigures[part]);
      if (part == kTraining) result["slowdown_p99"] = outcome.result.at("slowdown_p99");
      if (spans != nullptr)
        for (PlaySpan& span : own)
          spans->push_back({std::string(kMixPartNames[part]) + ", " + span.row, std::move(span.name),
                            span.begin_s, span.end_s});
      OrderedJson inner = object({{"scheduler", schedulers[part]}});
      inner.update(outcome.result);
      if (course.size() > 1) without_figures_of_devices(inner);
      result["parts"][kMixPartNames[part]] = std::move(inner);
    }
    result["score"] = std::exp(score);
    result["devices"] = amounts(course.front().slices);
    for (size_t i = 1; i < course.size(); ++i)
      result["divisions"].push_back(
          object({{"at_s", course[i].from_s}, {"devices", amounts(up_slices(course[i]))}}));
    return {};
  }

  // Figures that relate to devices as if the part had them all the time.
  static void without_figures_of_devices(OrderedJson& result) {
    result.erase("utilization");
    result.erase("bound_s");
    if (result.contains("windows"))
      for (OrderedJson& window : result["windows"]) window.erase("floor_out_of_reach");
  }

  Slices up_slices(const Division& division) const {
    Slices slices = division.slices;
    for (auto& own : slices)
      std::erase_if(
          own, [&](const Slice& slice) { return !is_up(parts_.devices()[slice.device], division.from_s); });
    return slices;
  }

  OrderedJson amounts(const Slices& slices) const {
    OrderedJson amounts = OrderedJson::object();
    for (const size_t part : parts_.there()) {
      double amount = 0;
      for (const Slice& slice : slices[part]) amount += slice.part;
      amounts[kMixPartNames[part]] = amount;
    }
    return amounts;
  }

  const MixParts parts_;
  const std::string ours_[kMixParts] = {"gpushare", "gpushare", "gpushare", "gpushare"};
  std::string specialists_[kMixParts] = {"milp-wsm", "ekya", "dynamic-fluid", "antman"};
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
