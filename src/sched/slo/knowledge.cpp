// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/knowledge.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/saturate.hpp"

namespace gpushare::sched::slo {
namespace {

// Distributions are computed anew after this many new durations or arrivals (the first 64 at once, so that a
// start is quick).
constexpr uint64_t kRefreshEvery = 64;
// Points of the integral that gives the expected longest of several durations.
constexpr size_t kLongestPoints = 64;
// Durations that stand for the shape of a distribution.
constexpr int kShape = 16;
// An application is known once so many of its requests were members of finished batches.
constexpr uint32_t kTried = 4;
// Durations that must be there before the requests of an objective are told apart.
constexpr size_t kToJudge = 8;
// The mix remembers about 512 arrivals.
constexpr double kShareKeep = 1 - 1.0 / 512;

// E[max] of one draw of each: the integral of 1 - product of F.
double expected_longest_ns(std::span<const Distribution* const> members) {
  double low = 0, high = 0;
  for (const Distribution* each : members) {
    low = std::max(low, each->min_ns());
    high = std::max(high, each->max_ns());
  }
  const double step = (high - low) / kLongestPoints;
  double sum = 0;
  for (size_t i = 0; i < kLongestPoints; ++i) {
    double below = 1;
    for (const Distribution* each : members) below *= each->cdf(low + (static_cast<double>(i) + 0.5) * step);
    sum += 1 - below;
  }
  return low + sum * step;
}

// Mean and deviation of the logarithms, by kShape quantiles.
struct Shape {
  double mean = 0, deviation = 0;
};
Shape shape_of(const Distribution& of) {
  Shape shape;
  double square = 0;
  for (int i = 0; i < kShape; ++i) {
    const double logarithm = std::log(std::max(of.quantile_ns((i + 0.5) / kShape), 1.0));
    shape.mean += logarithm / kShape;
    square += logarithm * logarithm / kShape;
  }
  shape.deviation = std::sqrt(std::max(0.0, square - shape.mean * shape.mean));
  return shape;
}

// The fractional part of (i + 1/2) times an irrational number: any count of them is spread evenly over 0 to 1.
constexpr double kGolden = 0.6180339887498949;
double spread(size_t i, double by) {
  const double at = (static_cast<double>(i) + 0.5) * by;
  return at - std::floor(at);
}

Knowledge::Brief brief_of(const Distribution& of, uint64_t version) {
  return {static_cast<float>(of.mean_ns()), static_cast<float>(of.quantile_ns(Knowledge::kLeastQuantile)),
          of.empty() ? 0 : version};
}

// The application of the requests of a name with this objective, where they are told apart; else `whole`.
uint32_t apart(const Knowledge::Model& of, uint32_t number, uint32_t objective, uint32_t whole) {
  const auto known = of.by_objective.find(number);
  if (known == of.by_objective.end()) return whole;
  for (const Knowledge::Objective& each : known->second)
    if (each.number == objective && each.index != Knowledge::Objective::kNotApart) return each.index;
  return whole;
}

// Members that came before their objective was told apart count as of its application.
std::vector<Inference::Part> parts_of(const Knowledge::Model& of,
                                      std::span<const Knowledge::Member> members) {
  std::vector<Inference::Part> parts;
  for (const Knowledge::Member& each : members)
    parts.push_back(
        {each.features.empty() ? apart(of, each.number, each.objective, each.application) : each.application,
         each.objective, 1});
  const auto key = [](const Inference::Part& part) { return std::pair(part.application, part.objective); };
  std::sort(parts.begin(), parts.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  size_t last = 0;
  for (size_t i = 1; i < parts.size(); ++i)
    if (key(parts[i]) == key(parts[last]))
      ++parts[last].count;
    else
      parts[++last] = parts[i];
  parts.resize(last + 1);
  return parts;
}

}  // namespace

base::Result<uint32_t> Knowledge::add_model(const ModelSpec& spec) {
  const auto wrong = [](const std::string& what) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "model: " + what);
  };
  if (!(spec.c0_ns >= 0) || !std::isfinite(spec.c0_ns))
    return wrong(base::format("c0 is %g ns, not a finite number >= 0", spec.c0_ns));
  if (!(spec.c1 > 0) || !std::isfinite(spec.c1))
    return wrong(base::format("c1 is %g, not a finite number > 0", spec.c1));
  if (spec.batch_sizes.empty()) return wrong("no batch sizes");
  for (size_t i = 0; i < spec.batch_sizes.size(); ++i)
    if (spec.batch_sizes[i] == 0 || spec.batch_sizes[i] > 4096 ||
        (i > 0 && spec.batch_sizes[i] <= spec.batch_sizes[i - 1]))
      return wrong(
          base::format("batch size %zu is %u: they must ascend from 1 to 4096", i, spec.batch_sizes[i]));
  Model model;
  model.spec = spec;
  model.pooled = Histogram(options_.histogram);
  model.time = BatchTimeModel(spec.c0_ns, spec.c1);
  if (!spec.learn) model.time.freeze();
  model.inference.tell_c0(spec.c0_ns);
  models_.push_back(std::move(model));
  return static_cast<uint32_t>(models_.size() - 1);
}

uint32_t Knowledge::application(uint32_t model, uint64_t key) {
  Model& of = models_[model];
  const auto known = of.index_of.find(key);
  if (known != of.index_of.end()) return known->second;
  if (of.applications.size() == kMaxApplications) return kMaxApplications - 1;
  const auto index = static_cast<uint32_t>(of.applications.size());
  of.briefs.reserve(of.briefs.size() + 1);
  of.index_of.emplace(key, index);
  of.applications.emplace_back(options_.histogram);
  of.briefs.emplace_back();
  of.fresh_application = true;
  return index;
}

uint32_t Knowledge::objective_of(uint64_t arrival_ns, uint64_t deadline_ns) {
  constexpr double kAnOctave = 4;
  if (deadline_ns == UINT64_MAX || deadline_ns <= arrival_ns) return 0;
  return 1 + static_cast<uint32_t>(
                 std::lround(kAnOctave * std::log2(static_cast<double>(deadline_ns - arrival_ns))));
}

uint32_t Knowledge::classify(uint32_t model, uint32_t number, std::span<const double> features,
                             uint32_t objective) {
  Model& of = models_[model];
  if (features.empty()) {
    return apart(of, number, objective, application(model, number));
  }
  const FeatureModel& known = of.by_features.try_emplace(number, features.size()).first->second;
  if (!known.ready()) return application(model, number);
  const uint32_t class_number = known.class_of(features);
  const uint64_t key = uint64_t{class_number} << 32 | number;
  const bool fresh = !of.index_of.contains(key);
  const uint32_t index = application(model, key);
  if (fresh) of.applications[application(model, number)].divided = true;
  if (!fresh || of.applications[index].histogram.count() > 0) return index;
  first_ns_.clear();
  known.first_durations_ns(class_number, first_ns_);
  for (uint64_t each : first_ns_) record(of, index, each);
  of.applications[index].told = false;
  return index;
}

size_t Knowledge::features(uint32_t model, uint32_t number) const {
  const auto at = models_[model].by_features.find(number);
  return at == models_[model].by_features.end() ? 0 : at->second.features();
}

void Knowledge::arrived(uint32_t model, uint32_t application_index) {
  Model& of = models_[model];
  of.share_unit /= kShareKeep;
  of.applications[application_index].share += of.share_unit;
  ++of.arrivals;
  if (of.share_unit < 1e100) return;
  for (Application& each : of.applications) each.share /= of.share_unit;
  of.share_unit = 1;
}

void Knowledge::observe(uint32_t model, uint32_t number, uint64_t execution_ns) {
  Model& of = models_[model];
  of.infers = false;
  record(of, application(model, number), execution_ns);
  of.pooled.record(execution_ns);
}

void Knowledge::observe_told(uint32_t model, const Member& member, uint64_t execution_ns) {
  models_[model].infers = false;
  observe_member(model, member, execution_ns);
}

void Knowledge::observe_member(uint32_t model, const Member& member, uint64_t execution_ns) {
  Model& of = models_[model];
  // Where times are inferred, an estimate stands for all that were drawn.
  const auto estimated = [&](uint32_t index) { return of.infers && of.applications[index].inferred > 0; };
  if (!estimated(member.application)) record(of, member.application, execution_ns);
  of.pooled.record(execution_ns);
  if (member.features.empty())
    observe_objective(model, member, execution_ns);
  else
    of.by_features.try_emplace(member.number, member.features.size())
        .first->second.observe(member.features, execution_ns);
  // The application keeps the times of its classes: its profile, and what a request of no class is judged by. While it
  // has an estimate of its own, that is of the requests of no class alone.
  const uint32_t whole = application(model, member.number);
  if (whole != member.application && !estimated(whole)) record(of, whole, execution_ns);
}

Knowledge::Objective* Knowledge::entry_of(Model& of, uint32_t number, uint32_t objective) {
  constexpr size_t kMost = 16;  // of an application
  if (objective == 0 || (of.by_objective.size() >= kExactMixture && !of.by_objective.contains(number)))
    return nullptr;
  std::vector<Objective>& all = of.by_objective[number];
  const auto is = [&](const Objective& each) { return each.number == objective; };
  const auto own = std::find_if(all.begin(), all.end(), is);
  if (own != all.end()) return &*own;
  if (all.size() == kMost) return nullptr;
  all.emplace_back().number = objective;
  return &all.back();
}

bool Knowledge::passed_over(uint32_t model, uint32_t number, uint32_t objective) {
  constexpr uint32_t kArrivals = 16;
  constexpr uint64_t kBatches = 4;
  Model& of = models_[model];
  Objective* own = entry_of(of, number, objective);
  if (own == nullptr || own->count >= double{kToJudge}) return false;
  if (own->unseen == 0) own->runs = of.runs;
  own->unseen = std::min(own->unseen + 1, kArrivals);
  if (own->unseen < kArrivals || of.runs - own->runs < kBatches) return false;
  const std::vector<Objective>& all = of.by_objective[number];
  return std::any_of(all.begin(), all.end(),
                     [](const Objective& each) { return each.count >= double{kToJudge}; });
}

void Knowledge::tried(uint32_t model, const Member& member) {
  if (Objective* own = entry_of(models_[model], member.number, member.objective); own != nullptr)
    own->unseen = 0;
}

void Knowledge::observe_objective(uint32_t model, const Member& member, uint64_t execution_ns) {
  constexpr size_t kLast = 32;       // durations that an application begins with, at most
  constexpr double kRemember = 256;  // durations
  constexpr double kLeast = 0.15;    // difference of the mean logarithms
  constexpr double kDeviations = 4;  // of their difference
  Model& of = models_[model];
  Objective* own = entry_of(of, member.number, member.objective);
  if (own == nullptr) return;
  const std::vector<Objective>& all = of.by_objective[member.number];
  own->unseen = 0;
  const double logarithm = std::log(std::max<double>(1, static_cast<double>(execution_ns)));
  own->count += own->count < kRemember ? 1 : 0;
  const double off = logarithm - own->mean;
  own->mean += off / own->count;
  own->variance += (off * (logarithm - own->mean) - own->variance) / own->count;
  if (own->index != Objective::kNotApart || all.size() == 1) return;
  if (own->last.size() < kLast)
    own->last.push_back(execution_ns);
  else
    own->last[own->next++ % kLast] = execution_ns;
  if (own->last.size() < kToJudge || of.applications.size() >= kExactMixture) return;
  double count = 0, mean = 0, square = 0;
  for (const Objective& each : all) {
    if (each.number == own->number) continue;
    count += each.count;
    mean += each.count * each.mean;
    square += each.count * (each.variance + each.mean * each.mean);
  }
  if (count < double{kToJudge}) return;
  mean /= count;
  // A few durations may look more alike than they are: they are taken to vary as the others do.
  const double others = square / count - mean * mean;
  const double variance = own->last.size() < kLast ? std::max(own->variance, others) : own->variance;
  const double error = std::sqrt(variance / own->count + others / count);
  if (std::abs(own->mean - mean) < std::max(kLeast, kDeviations * error)) return;
  own->index = application(model, uint64_t{member.objective | 1u << 31} << 32 | member.number);
  for (uint64_t each : own->last) record(of, own->index, each);
  of.applications[own->index].told = false;
  own->last = {};
  of.inference.move(member.application, own->number, own->index);
}

// Whether the first durations that were measured show that the profile told beforehand is wrong. Where times scatter widely no
// single one contradicts it, but their mean logarithm does.
bool Knowledge::contradicts_profile(Application& application, uint64_t execution_ns) {
  constexpr uint8_t kLeast = 4, kMost = 32;
  constexpr double kLeastOff = 0.3, kDeviations = 4;
  if (!application.told || application.ran == 0 || application.judged >= kMost) return false;
  const double logarithm = std::log(std::max<double>(1, static_cast<double>(execution_ns)));
  application.judged_logarithms += logarithm;
  application.judged_squares += logarithm * logarithm;
  if (++application.judged < kLeast) return false;
  const Shape known = shape_of(application.own);
  const double count = application.judged, mean = application.judged_logarithms / count;
  // One that was slow, such as the first run, shows nothing: the durations then vary more than the profile says.
  const double varied = std::sqrt(std::max(application.judged_squares / count - mean * mean, 0.0));
  const double error = std::max(known.deviation, varied) / std::sqrt(count);
  return std::abs(mean - known.mean) > std::max(kLeastOff, kDeviations * error);
}

// Durations that contradict all that is known of their application, four times in a row, show that what is known no longer
// holds, or never did (a wrong profile told beforehand, a neighbour on the device that came or went): the past is
// forgotten at once, but for its shape, scaled to the new durations. Four samples alone would look much more alike than the
// times are. The statistical test of the histogram needs dozens, and while a wrong estimate refuses requests, each sample
// costs a request. A profile that was told wrong was mostly taken on another device: all others that hardly any batch has
// tried are wrong by as much.
void Knowledge::contradict(Model& of, uint32_t index, uint64_t execution_ns) {
  constexpr uint8_t kInARow = 4;
  constexpr double kBelow = 0.7, kAbove = 1.5;
  Application& application = of.applications[index];
  if (application.own.empty()) return;
  const Distribution& own = application.own;
  const auto took = static_cast<double>(execution_ns);
  if (contradicts_profile(application, execution_ns))
    return replace(of, index, application.judged_logarithms, application.judged);
  const bool below = took<kBelow * own.quantile_ns(kLeastQuantile), above = took> kAbove * own.max_ns();
  if (!(below ? application.far_below : application.far_above)) application.far_logarithms = 0;
  application.far_below = below ? application.far_below + 1 : 0;
  application.far_above = above ? application.far_above + 1 : 0;
  if (!below && !above) return;
  application.far_logarithms += std::log(std::max(took, 1.0));
  if (std::max(application.far_below, application.far_above) >= kInARow)
    replace(of, index, application.far_logarithms, kInARow);
}

// Forgets all but the newest `count` - 1 durations of the application and its shape. The sum of the logarithms of `count` durations,
// the one to be recorded among them, says by how much the shape is scaled.
void Knowledge::replace(Model& of, uint32_t index, double logarithms, uint8_t count) {
  Application& application = of.applications[index];
  const double factor = std::exp(logarithms / count - shape_of(application.own).mean);
  application.histogram.keep_newest(count - size_t{1});
  scale(of, index, factor);
  if (!std::exchange(application.told, false) || of.applications.size() > kExactMixture) return;
  for (uint32_t i = 0; i < of.applications.size(); ++i) {
    Application& other = of.applications[i];
    if (!other.told || other.own.empty() || other.ran >= kTried) continue;
    other.told = false;
    other.histogram.keep_newest(0);
    scale(of, i, factor);
  }
}

// Adds the shape of what is known of the application, times the factor, to its durations.
void Knowledge::scale(Model& of, uint32_t index, double factor) {
  Application& application = of.applications[index];
  for (int i = 0; i < kShape; ++i)
    application.histogram.record(base::to_uint64(factor * application.own.quantile_ns((i + 0.5) / kShape)));
  application.far_below = application.far_above = 0;
  if (!std::exchange(application.due, true)) of.due.push_back(index);
  of.fresh_application = true;
}

void Knowledge::record(Model& of, uint32_t index, uint64_t execution_ns) {
  Application& application = of.applications[index];
  if (application.histogram.count() == 0) application.told = application.ran == 0;
  contradict(of, index, execution_ns);
  application.histogram.record(execution_ns);
  ++of.records;
  ++application.records;
  // While a few durations are all that is known, a few more change it.
  if (of.applications.size() <= kExactMixture && 4 * application.records >= application.histogram.count())
    of.fresh_application = true;
  if (application.histogram.count() <= 4) of.fresh_application = true;
  if (application.due) return;
  // Few applications follow every record, many a sixteenth of theirs: each costs as much to compute.
  const size_t enough = of.applications.size() <= kExactMixture
                            ? 1
                            : std::clamp<size_t>(application.histogram.count() / 16, 1, kRefreshEvery);
  if (application.records < enough && application.drifts == application.histogram.drifts()) return;
  of.due.push_back(index);
  application.due = true;
}

void Knowledge::observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns) {
  Model& of = models_[model];
  of.time.observe(k, static_cast<double>(longest_ns), static_cast<double>(device_ns));
  of.inference.tell_c0(of.time.c0_ns());
}

void Knowledge::count_ran(uint32_t model, std::span<const Member> members) {
  Model& of = models_[model];
  ++of.runs;
  const auto count = [&](uint32_t index) {
    uint32_t& ran = of.applications[index].ran;
    ran = std::min(ran + 1, kTried);
  };
  for (const Member& each : members) {
    count(each.application);
    const auto whole = of.index_of.find(each.number);
    if (whole != of.index_of.end() && whole->second != each.application) count(whole->second);
  }
}

void Knowledge::observe_run(uint32_t model, std::span<const Member> members,
                            std::span<const uint64_t> execution_ns, uint64_t device_ns, bool trial) {
  if (members.empty() || device_ns == 0) return;
  count_ran(model, members);
  bool all = execution_ns.size() == members.size();
  uint64_t longest = 0;
  for (size_t i = 0; i < members.size() && i < execution_ns.size(); ++i) {
    all = all && execution_ns[i] != 0;
    if (execution_ns[i] == 0) continue;
    observe_told(model, members[i], execution_ns[i]);
    longest = std::max(longest, execution_ns[i]);
  }
  if (all)
    observe_batch(model, static_cast<uint32_t>(members.size()), longest, device_ns);
  else if (longest == 0)
    infer_run(model, members, static_cast<double>(device_ns), trial);
}

// Whether a batch whose duration was `ratio` times the expected one is to be left out: it stalled, or the process did. Four
// in a row with one application are no accident, nor are sixteen of any applications: then all times have changed by as much,
// and what is known follows. Four in a row of those with one application, while others ran as expected in between, show that this
// application's times are not what they were taken for.
bool Knowledge::odd(Model& of, std::span<const Member> members, double ratio) {
  constexpr double kFactor = 5, kLeastRatio = 1e-6;
  constexpr uint8_t kInARow = 4;
  constexpr uint32_t kOfAnyInARow = 16;
  if (of.pooled.count() < 2 * kInARow) return false;
  const bool longer = ratio > kFactor, shorter = ratio < 1 / kFactor;
  present_.clear();
  for (const Member& each : members) present_.push_back(each.application);
  std::sort(present_.begin(), present_.end());
  present_.erase(std::unique(present_.begin(), present_.end()), present_.end());
  if (!longer && !shorter) {
    of.odd_runs = 0;
    for (uint32_t each : present_) of.applications[each].odd_runs = 0;
    return false;
  }
  if ((of.odd_logarithm > 0) != longer) of.odd_runs = 0;
  if (of.odd_runs == 0) of.odd_logarithm = 0;
  of.odd_logarithm += std::log(std::max(ratio, kLeastRatio));
  ++of.odd_runs;
  uint8_t most = 0;
  for (uint32_t each : present_) {
    uint8_t& runs = of.applications[each].odd_runs;
    runs = static_cast<uint8_t>(std::min(runs + 1, 255));
    most = std::max(most, runs);
  }
  if (most < kInARow && of.odd_runs < kOfAnyInARow) return true;
  const bool all = of.odd_runs >= kInARow && most <= of.odd_runs;
  if (all) {
    of.time.rescale(std::exp(of.odd_logarithm / of.odd_runs));
    for (uint32_t i = 0; i < of.applications.size(); ++i) {
      Application& each = of.applications[i];
      each.histogram.keep_newest(0);
      each.inferred = 0;
      each.odd_runs = 0;
      if (of.infers && !std::exchange(each.due, true)) of.due.push_back(i);
    }
    of.pooled.keep_newest(0);
    of.inference.rescale(std::exp(of.odd_logarithm / of.odd_runs));
  } else {
    for (uint32_t each : present_)
      if (of.applications[each].odd_runs == most) {
        of.applications[each].histogram.keep_newest(0);
        of.applications[each].inferred = 0;
        of.inference.forget(each);
        of.applications[each].odd_runs = 0;
        if (!of.applications[each].due) of.due.push_back(each);
        of.applications[each].due = true;
      }
  }
  of.odd_runs = 0;
  of.fresh_application = true;
  return false;
}

void Knowledge::infer_run(uint32_t model, std::span<const Member> members, double device_ns, bool trial) {
  refresh(model);
  Model& of = models_[model];
  const auto k = static_cast<uint32_t>(members.size());
  bool known = !of.mix_alone.empty();
  // Told nothing at all, suppose that half of the first batch's time does not depend on its size: who supposes
  // that larger batches gain nothing never tries one. c1 begins in the middle of what it may be: it is a unit of the times, but
  // outside of its range it would bend the line.
  if (!known && of.spec.learn && of.spec.c0_ns == 0 && of.time.c0_ns() == 0)
    of.time = BatchTimeModel(device_ns / 2, of.time.c1() / 4);
  drawn_from_.clear();
  for (const Member& each : members)
    drawn_from_.push_back(&of.alone(each.application));  // the mixture if it is new
  // Nothing is expected of a batch with members of which nothing is known.
  const bool strangers = std::any_of(members.begin(), members.end(), [&](const Member& each) {
    return !of.briefs[each.application].known();
  });
  if (known && !trial) {
    const double expected = expected_longest_ns(drawn_from_);
    double ratio = device_ns / std::max(of.time.duration_ns(k, expected), 1.0);
    if (of.infers) ratio = ratio_of_range(of, k, expected, device_ns);
    // Among many applications most are strangers after all was forgotten. The times of the others bound theirs from
    // below, but for the first batches of the model.
    const bool bounded =
        of.infers && of.applications.size() > kExactMixture && of.runs > kRefreshEvery && ratio < 1;
    if ((!strangers || bounded) && odd(of, members, ratio)) return;
    known = of.pooled.count() > 0;
    if (known && !strangers && !of.infers) of.time.observe(k, expected, device_ns, /*told=*/false);
  }
  // A batch that is shorter than the fixed part shows that its requests are short, however wrong the fixed part is.
  constexpr double kLeastPart = 0.1;
  const double longest = std::max(device_ns - of.time.fixed_ns(k), kLeastPart * device_ns) /
                         std::max(of.time.per_longest(k), 1e-12);
  if (!(longest >= 1)) return;
  // Inference knows no factors by size, which told batches may have left.
  if (of.infers) of.inference.add(parts_of(of, members), device_ns / of.time.factor(k));
  if (k == 1 || !known) {
    for (const Member& each : members) observe_member(model, each, base::to_uint64(longest));
  } else {
    draw_members(of, members, longest);
    // Recording begins after all are drawn, because it may refresh the distributions that drawn_from_ points to.
    for (size_t i = 0; i < k; ++i) observe_member(model, members[i], base::to_uint64(chances_[i]));
  }
  if (!of.infers) return;
  const double factor = of.inference.follow_change();
  if (factor != 1) follow_change(of, factor);
  if (factor != 1 || of.inference.due()) estimate_from_runs(of);
}

// All batches take `factor` times what they took: what was known keeps its shape.
void Knowledge::follow_change(Model& of, double factor) {
  of.time.rescale(factor);
  for (uint32_t each : of.estimated) {
    if (of.applications[each].own.empty()) continue;
    of.applications[each].histogram.keep_newest(0);
    scale(of, each, factor);
  }
}

// The duration over the range of what was expected, 1 within it. Batches whose requests' times nobody tells scatter more
// than one expectation says, and the first ones are too few to call any of them odd.
double Knowledge::ratio_of_range(const Model& of, uint32_t k, double expected_ns, double device_ns) const {
  constexpr size_t kLeast = 16;  // batches
  double least_ns = expected_ns;
  for (const Distribution* each : drawn_from_) least_ns = std::min(least_ns, each->min_ns());
  const double expected = std::max(of.time.duration_ns(k, expected_ns), 1.0);
  if (device_ns > expected) return of.inference.runs() < kLeast ? 1 : device_ns / expected;
  return std::min(1.0, device_ns / std::max(of.time.duration_ns(k, least_ns), 1.0));
}

// Puts the estimates in the place of all durations drawn before. After the first batches, what an application takes
// that ran only beside longer ones is drawn: its estimate would be what these took.
void Knowledge::estimate_from_runs(Model& of) {
  constexpr double kLeastEvents = 0.99;  // about one
  constexpr size_t kBeginning = 16;      // batches
  of.time.set_fixed(of.inference.estimate(of.time.c0_ns(), of.time.c1(), !of.spec.learn));
  if (of.inference.estimates().empty()) return;
  std::vector<uint32_t> before = std::exchange(of.estimated, {});
  for (const Inference::Estimate& each : of.inference.estimates()) {
    if (each.application == Inference::kRare || of.applications[each.application].divided) continue;
    if (each.events < kLeastEvents && of.inference.runs() >= kBeginning) continue;
    Application& application = of.applications[each.application];
    application.histogram.reset();
    // Not in ascending order, which would look like a drift.
    constexpr size_t kStride = 73;
    for (size_t i = 0; i < Inference::kDurations; ++i)
      application.histogram.record(each.durations_ns[i * kStride % Inference::kDurations]);
    application.inferred = std::max<uint64_t>(base::to_uint64(each.members), 1);
    if (!std::exchange(application.due, true)) of.due.push_back(each.application);
    of.estimated.push_back(each.application);
  }
  std::sort(of.estimated.begin(), of.estimated.end());
  for (uint32_t each : before)
    if (!std::binary_search(of.estimated.begin(), of.estimated.end(), each)) draw_again(of, each);
  pool_estimates(of);
  of.records = kRefreshEvery;
}

// An application that is estimated no longer goes on with drawn durations: it keeps as many of the estimated ones as it
// had requests, at most.
void Knowledge::draw_again(Model& of, uint32_t index) {
  Application& application = of.applications[index];
  const auto keep = std::min<size_t>(std::exchange(application.inferred, 0), Inference::kDurations);
  const Distribution known = application.histogram.distribution(options_.bins);
  if (known.empty() || keep == 0) return;
  application.histogram.reset();
  for (size_t i = 0; i < keep; ++i)
    application.histogram.record(base::to_uint64(known.quantile_ns(spread(i, kGolden))));
  if (!std::exchange(application.due, true)) of.due.push_back(index);
}

// Pools durations of all estimates, of each in proportion to its members. The points of a sequence that covers both
// estimates and quantiles evenly (R2, by the powers of the plastic ratio) say which: every tail is there, however many
// estimates there are, and no order looks like a drift.
void Knowledge::pool_estimates(Model& of) {
  constexpr size_t kPooled = 4 * Inference::kDurations;
  constexpr double kFirst = 0.7548776662466927, kSecond = 0.5698402909980532;
  const std::vector<Inference::Estimate>& all = of.inference.estimates();
  std::vector<double> up_to;
  double members = 0;
  for (const Inference::Estimate& each : all) up_to.push_back(members += each.members);
  of.pooled.reset();
  for (size_t i = 0; i < kPooled; ++i) {
    const auto at = std::upper_bound(up_to.begin(), up_to.end(), spread(i, kFirst) * members) - up_to.begin();
    const Inference::Estimate& each = all[std::min(static_cast<size_t>(at), all.size() - 1)];
    of.pooled.record(each.durations_ns[static_cast<size_t>(spread(i, kSecond) * Inference::kDurations)]);
  }
}

// Draws what each member of a batch takes alone, from drawn_from_ into chances_, given what the longest takes.
void Knowledge::draw_members(const Model& of, std::span<const Member> members, double longest) {
  const size_t k = members.size();
  // P(member i is the longest | the longest took this) is in proportion to f_i / F_i there.
  chances_.clear();
  double total = 0;
  for (const Distribution* each : drawn_from_) {
    const double rise = each->cdf(longest * 1.02) - each->cdf(longest * 0.98);
    chances_.push_back((rise + 1e-9) / (each->cdf(longest) + 1e-9));
    total += chances_.back();
  }
  // What no known member explains, one of the unknown took.
  if (total < 1e-3 * static_cast<double>(k))
    for (size_t i = 0; i < k; ++i)
      if (!of.briefs[members[i].application].known()) total += 1 - std::exchange(chances_[i], 1);
  size_t who = 0;
  for (double left = unit_random() * total; who + 1 < k && left >= chances_[who]; ++who)
    left -= chances_[who];
  for (size_t i = 0; i < k; ++i) {
    const double below = drawn_from_[i]->cdf(longest);
    const double took = i == who || below <= 0
                            ? longest
                            : std::min(longest, drawn_from_[i]->quantile_ns(unit_random() * below));
    chances_[i] = std::max(took, 1.0);
  }
}

double Knowledge::unit_random() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return (static_cast<double>(random_ >> 12) + 0.5) * 0x1p-52;
}

bool Knowledge::refresh(uint32_t model) {
  Model& of = models_[model];
  // A new application at once while there are few; among many it can wait for a few records, but for the first.
  const bool first = of.records > 0 && of.mix_alone.empty();
  const bool fresh =
      of.fresh_application && (first || of.applications.size() <= 8 || of.records + of.arrivals >= 16);
  if (!fresh && of.records < kRefreshEvery && of.arrivals < 4 * kRefreshEvery &&
      of.time_version == of.time.version())
    return false;
  of.fresh_application = false;
  of.records = of.arrivals = 0;
  of.time_version = of.time.version();
  ++of.version;
  for (uint32_t index : of.due) {
    Application& each = of.applications[index];
    each.due = false;
    each.records = 0;
    each.drifts = each.histogram.drifts();
    each.own = each.histogram.distribution(options_.bins);
    of.briefs[index] = brief_of(each.own, of.version);
  }
  of.due.clear();
  update_mixture(of);
  return true;
}

void Knowledge::update_mixture(Model& of) {
  if (of.applications.size() <= kExactMixture) {
    std::vector<const Distribution*> parts;
    std::vector<double> shares, equal;
    for (const Application& each : of.applications) {
      if (each.own.empty()) continue;
      parts.push_back(&each.own);
      shares.push_back(each.share / of.share_unit * (1 - kShareKeep) + 1e-9);
      equal.push_back(1);
    }
    of.mix_alone = mixture(parts, shares).coarsened(4 * options_.bins);
    of.equal_alone = mixture(parts, equal).coarsened(4 * options_.bins);
  } else {
    of.mix_alone = of.pooled.distribution(4 * options_.bins);
    of.equal_alone = of.mix_alone;
  }
  of.mix = brief_of(of.mix_alone, of.version);
  of.mean_ns = of.mix_alone.mean_ns();
}

}  // namespace gpushare::sched::slo
