// SPDX-License-Identifier: Apache-2.0
#include "cluster/mix_kind.hpp"

#include <algorithm>
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
    std::optional<Slices> slices = shares ? divide_shared(parts_, start, specialists_, nullptr)
                                          : divide_whole(parts_, start, schedulers);
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
  // work that it cannot do, also when another one ends.
  void divide_anew(const Knowledge& truth, Course& course) const {
    const std::vector<DeviceChange> changes = device_changes(parts_.devices());
    if (changes.empty()) return;
    std::vector<double> times;
    for (const DeviceChange& change : changes)
      if (change.at_s > (times.empty() ? 0 : times.back())) times.push_back(change.at_s);
    // The first division may be of devices that are not up yet.
    const double first_s = next_end_s(moment_at(0, truth, course), truth, course);
    if (first_s < (times.empty() ? kNever : times.front())) times.insert(times.begin(), first_s);
    std::vector<size_t> was_up = up_at(0);
    size_t budget = kSearched;
    for (size_t i = 0; i < times.size();) {
      const Moment moment = moment_at(times[i], truth, course);
      if (have_ended(moment)) return;
      const bool divided = divide_at(moment, was_up, budget, course);
      was_up = moment.up;
      // The next moment takes the place of this one.
      const double next_s = i + 1 < times.size() ? times[i + 1] : kNever;
      times[i] = next_end_s(divided ? moment_at(times[i], truth, course) : moment, truth, course);
      if (times[i] >= next_s || times[i] == kNever) ++i;
    }
  }

  bool have_ended(const Moment& moment) const {
    return moment.parts.empty() ||
           (moment.parts.back() == kServices && moment.known.now_s >= parts_.services_end_s());
  }

  // True: somebody has other devices from then on. A search takes device-moments from `budget`. When too few are
  // left, a change of the services' devices or a part that waits still makes a division necessary.
  bool divide_at(const Moment& moment, const std::vector<size_t>& was_up, size_t& budget,
                 Course& course) const {
    if (moment.up.empty()) return false;
    const Slices& kept = course.back().slices;
    // Services are placed anew, so that nobody knows any more what the division left of their devices.
    const bool placed_anew = std::any_of(
        kept[kServices].begin(), kept[kServices].end(),
        [&](const Slice& slice) { return has(was_up, slice.device) != has(moment.up, slice.device); });
    std::optional<Slices> slices = kept;
    if (budget >= moment.up.size()) {
      budget -= moment.up.size();
      slices = divide_shared(parts_, moment, specialists_, placed_anew ? nullptr : &kept);
      if (!slices) slices = without_services_devices(kept);
    } else if (placed_anew || somebody_waits(moment)) {
      slices = divide_in_turn(parts_, moment);
    }
    if (*slices == kept) return false;
    course.push_back({moment.known.now_s, std::move(*slices)});
    return true;
  }

  static bool somebody_waits(const Moment& moment) {
    return !moment.up.empty() && std::any_of(moment.parts.begin(), moment.parts.end(),
                                             [&](size_t part) { return moment.waits[part]; });
  }

  // When the next part ends, if one waits for it; else kNever.
  double next_end_s(const Moment& moment, const Knowledge& truth, const Course& course) const {
    return somebody_waits(moment) ? first_end_s(moment, truth, course) : kNever;
  }

  // When the next of these parts will have ended.
  double first_end_s(const Moment& moment, const Knowledge& truth, const Course& course) const {
    double first_s = kNever, trials_s = moment.trials_ended_s.value_or(kNever);
    for (const size_t part : moment.parts) {
      if (part == kServices) continue;
      const double end_s =
          parts_.end_of(part, parts_.play(part, course, trials_s, ours_[part], truth, nullptr));
      if (part == kTrials) trials_s = end_s;
      first_s = std::min(first_s, end_s);
    }
    return first_s;
  }

  static bool has(const std::vector<size_t>& devices, size_t device) {
    return std::find(devices.begin(), devices.end(), device) != devices.end();
  }

  // Where too little is up for all parts, services have their devices alone.
  static Slices without_services_devices(Slices slices) {
    for (size_t part = kServices + 1; part < kMixParts; ++part)
      std::erase_if(slices[part], [&](const Slice& slice) {
        return std::any_of(slices[kServices].begin(), slices[kServices].end(),
                           [&](const Slice& own) { return own.device == slice.device; });
      });
    return slices;
  }

  // Which parts have really ended until then. What is left of the others is told by the document: neither the noise
  // of the work that they have done nor that of the rest is known.
  Moment moment_at(double at_s, const Knowledge& truth, const Course& course) const {
    Moment moment;
    moment.known = told(at_s);
    moment.before = course;
    moment.up = up_at(at_s);
    double trials_end_s = kNever, trials_told_s = kNever;
    for (const size_t part : parts_.there()) {
      const auto& slices = course.back().slices[part];
      const bool has_none = std::none_of(slices.begin(), slices.end(),
                                         [&](const Slice& slice) { return has(moment.up, slice.device); });
      if (part == kServices) {  // they never end
        moment.parts.push_back(part);
        moment.waits[part] = has_none;
        continue;
      }
      const auto end_by = [&](const Knowledge& known, double trials_s) {
        return parts_.end_of(part, parts_.play(part, course, trials_s, ours_[part], known, nullptr));
      };
      const double end_s = end_by(truth, trials_end_s);
      const double told_s = end_s <= at_s ? end_s : end_by(moment.known, trials_told_s);
      if (part == kTrials) {
        trials_end_s = end_s;
        trials_told_s = told_s;
        if (end_s <= at_s) moment.trials_ended_s = end_s;
      }
      if (end_s <= at_s) continue;
      moment.parts.push_back(part);
      moment.overdue[part] = told_s <= at_s;
      moment.waits[part] = has_none || told_s == kNever;
    }
    return moment;
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
          object({{"at_s", course[i].from_s}, {"devices", amounts(course[i].slices)}}));
    return {};
  }

  // Figures that relate to devices as if the part had them all the time.
  static void without_figures_of_devices(OrderedJson& result) {
    result.erase("utilization");
    result.erase("bound_s");
    if (result.contains("windows"))
      for (OrderedJson& window : result["windows"]) window.erase("floor_out_of_reach");
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
