// SPDX-License-Identifier: Apache-2.0
#include "sched/op_controller.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/status.hpp"

namespace gpushare::sched {
namespace {

constexpr double kAloneGain = 1.0 / 256, kCostGain = 1.0 / 64;
// Deviations of an iteration's time alone that are taken for noise.
constexpr double kNoise = 3;
// Samples after which a choice is known.
constexpr double kKnownSamples = 4;
// Samples after which a choice is known as one under which no work was done.
constexpr double kKnownWork = 64;
// Shares never tried are taken to be a little better than the line between their neighbours: they come to be tried.
constexpr double kOptimism = 0.95;
constexpr size_t kFirstShare = 2;  // the first that is tried: a sixteenth
// The most credit, in iterations at the target, and half of the most debt. Without a bound on the debt, one delay of
// fifty iterations by the host or anything else would pause the others for a thousand iterations. Costs that a choice
// has again and again are in its mean.
constexpr double kMostIterations = 64;
// Until the error of the time alone is below this part of the target, one iteration of three runs alone.
constexpr double kPrecise = 0.2;
constexpr uint32_t kImpreciseEvery = 3;
// The part of the target that is given away. The rest is for what the first iterations of a choice cost more than was thought.
constexpr double kAim = 0.95;
// About the number of iterations within which a difference between the measured cost and the target is made good.
constexpr double kBalanceIterations = 512;
// The floor looks back over about a thousand iterations.
constexpr double kForget = 0.999;
// Work that may be on the device at once, at least: a few launches.
constexpr uint64_t kLeastInFlightNs = 20'000;
// Credit that may be saved for one long launch, in iterations.
constexpr double kMostSaved = 10'000;
// The cost of a nanosecond of others' work is measured over about the last 20 iterations that ran beside such work. It
// counts as a nanosecond until more than an iteration's time of work was let in.
constexpr double kHarmKept = 0.95, kMostHarm = 8;
// A pause of more iterations than this is an absence: nobody waits for the session's return.
constexpr uint64_t kLongestPause = 32;
// The time alone is doubted after so many iterations whose mean is below it by more than the target and so many standard errors.
constexpr uint64_t kDoubtAfter = 32;
constexpr double kDoubt = 2;
// Beside more opportunistic sessions than this nobody is singled out: a decision would take as long as they have choices.
constexpr size_t kMostSingled = 32;

// One standard error of the mean excess, where that of the time alone is `alone`.
template <class Session>
double error_of_excess(const Session& g, double alone) {
  const auto n = static_cast<double>(g.iterations);
  const double mean = g.excess / n;
  return std::sqrt(std::max(0.0, g.excess_square / n - mean * mean) / n + alone * alone);
}

}  // namespace

double OpController::share_at(size_t index) {
  return index < kFirstShare ? (index == 0 ? 1.0 / 64 : 1.0 / 32) : static_cast<double>(index - 1) / 16;
}

void OpController::Mean::add(double sample, double least_gain) {
  ++count;
  const double gain = std::max(1 / count, least_gain);
  value += gain * (sample - value);
  square += gain * (sample * sample - square);
}

void OpController::Mean::also(double more, double least_gain) {
  if (count > 0) value += std::max(1 / count, least_gain) * more;
}

double OpController::Mean::deviation() const {
  return std::sqrt(std::max(0.0, square - value * value));
}

// One standard error of the time alone, relative to it.
double OpController::error_of(const Guaranteed& g) const {
  const double samples = std::min(g.alone.count, 2 / kAloneGain);
  if (samples < 2 || g.alone.value <= 0) return 1;
  return g.alone.deviation() / g.alone.value / std::sqrt(samples - 1);
}

// The mean cost to choose by.
double OpController::aim_of(const Guaranteed& g) const {
  const double aim = kAim * target_of(g);
  return std::clamp(aim + g.balance / kBalanceIterations, aim / 4, aim * 1.25);
}

void OpController::learn(Guaranteed& g) const {
  g.alone = {};
  g.learn_left = std::max(1U, options_.learn_iterations);
  g.pause_left = g.since_alone = g.odd = 0;
  g.odd_sum = g.credit = g.balance = g.excess = g.excess_square = 0;
  g.iterations = 0;
  // The learned interference is only a guess for the new phase.
  for (auto& [who, curve] : g.curves)
    for (Choice& choice : curve) {
      choice.cost.count = std::min(choice.cost.count, 1.0);
      choice.work.count = std::min(choice.work.count, 1.0);
    }
}

void OpController::arrive(SessionId id, SessionClass cls, double weight, double target_slowdown, bool wants) {
  if (cls == SessionClass::kGuaranteed) {
    Guaranteed& g = guaranteed_[id];
    g.target = target_slowdown;
    g.wanted = {kNoSession, kAlone};
    learn(g);
    ++version_;
    apply();
  } else {
    opportunistic_[id].weight = weight;
    opportunistic_[id].wants = wants;
    if (wants) opportunistic_changed();
  }
}

// An unknown session is there, so nothing runs beside the iterations that are on the device.
void OpController::opportunistic_changed() {
  for (auto& [id, g] : guaranteed_)
    if (g.in_flight > 0) g.wanted = {kNoSession, kAlone};
  apply();
}

void OpController::leave(SessionId id) {
  ++version_;
  guaranteed_.erase(id);
  if (opportunistic_.erase(id) > 0) {
    // The curve of all sessions together was learned with this session.
    for (auto& [other, g] : guaranteed_) {
      g.curves.erase(id);
      g.curves.erase(kNoSession);
    }
  }
  apply();
}

void OpController::set_weight(SessionId id, double weight) {
  const auto found = opportunistic_.find(id);
  if (found != opportunistic_.end()) found->second.weight = weight;
}

void OpController::set_target(SessionId id, double target_slowdown) {
  const auto found = guaranteed_.find(id);
  if (found != guaranteed_.end()) found->second.target = target_slowdown;
}

void OpController::set_wants(SessionId id, bool wants) {
  const auto found = opportunistic_.find(id);
  if (found == opportunistic_.end() || found->second.wants == wants) return;
  found->second.wants = wants;
  if (wants) opportunistic_changed();
}

void OpController::on_device(SessionId id, bool may_be) {
  const auto found = opportunistic_.find(id);
  if (found == opportunistic_.end()) return;
  found->second.on_device = may_be;
  if (may_be) ++on_device_;
}

bool OpController::anyone_on_device() const {
  return std::any_of(opportunistic_.begin(), opportunistic_.end(),
                     [](const auto& each) { return each.second.on_device; });
}

double OpController::let_in_ns() const {
  double work = 0;
  for (const auto& [id, each] : opportunistic_) work += each.work;
  return work;
}

bool OpController::anyone_wants() const {
  return std::any_of(opportunistic_.begin(), opportunistic_.end(),
                     [](const auto& each) { return each.second.wants; });
}

// The share that was in force, summed over time up to now.
double OpController::share_until(uint64_t now_ns) {
  if (now_ns > now_ns_) {
    if (force_.share != kAlone) share_ns_ += share_at(force_.share) * static_cast<double>(now_ns - now_ns_);
    now_ns_ = now_ns;
  }
  return share_ns_;
}

// The device goes on with an iteration of the session, under a choice of its own if there is one.
void OpController::start(Guaranteed& g) {
  if (g.in_flight > 0) g.wanted = decide(g);
  apply();
  g.since_ns = now_ns_;
  g.share_ns = share_ns_;
  g.during = force_;
  g.mixed = false;
  g.beside = anyone_on_device();
  g.seen_on_device = on_device_;
  g.shared = force_.share != kAlone && anyone_wants();
  g.single = force_.who != kNoSession;
}

void OpController::began(SessionId id, uint64_t now_ns) {
  const auto found = guaranteed_.find(id);
  if (found == guaranteed_.end()) return;
  Guaranteed& g = found->second;
  if (g.in_flight++ > 0) return;
  share_until(now_ns);
  const uint64_t paused_ns = now_ns - std::min(now_ns, g.since_ns);
  if (g.last_ns > 0 && paused_ns < kLongestPause * g.last_ns)
    g.pauses[g.pauses_seen++ % g.pauses.size()] = paused_ns;
  for (auto& [other, each] : opportunistic_) each.work = 0;
  start(g);
}

void OpController::finished(SessionId id, uint64_t device_ns, uint64_t now_ns) {
  const auto found = guaranteed_.find(id);
  if (found == guaranteed_.end() || found->second.in_flight == 0) return;
  Guaranteed& g = found->second;
  --g.in_flight;
  share_until(now_ns);
  if (device_ns > 0) {
    g.last_ns = device_ns;
    measure(g, static_cast<double>(device_ns), now_ns);
  }
  for (auto& [other, each] : opportunistic_) each.work = 0;
  start(g);
}

void OpController::measure(Guaranteed& g, double device_ns, uint64_t now_ns) {
  const double work = let_in_ns();
  const bool alone = !was_beside(g) && work == 0;
  if (g.learn_left > 0) {
    if (!alone) return;  // the device is drained first
    // Unreported work may have been on the device when the session came.
    if (g.learn_left < options_.learn_iterations || g.learn_left == 1) g.alone.add(device_ns, kAloneGain);
    if (--g.learn_left == 0 && g.alone.count == 0) g.learn_left = 1;
    return;
  }
  for (auto& [id, each] : opportunistic_) each.total *= kForget;
  const double cost = device_ns / g.alone.value - 1;
  const double target = target_of(g);
  ++g.iterations;
  g.excess += cost;
  g.excess_square += cost * cost;
  // Other sessions cannot make the session faster. So something else held it up while its time alone was learned.
  if (g.iterations >= kDoubtAfter &&
      g.excess / static_cast<double>(g.iterations) + kDoubt * error_of_excess(g, error_of(g)) < -target) {
    learn(g);
    return;
  }
  g.credit = std::min(g.credit + aim_of(g), std::max(kMostIterations * target, g.cap));
  g.balance = std::min(g.balance + kAim * target, kMostIterations * target);
  if (alone && measure_alone(g, device_ns)) return;
  const double elapsed = std::max(1.0, static_cast<double>(now_ns - std::min(now_ns, g.since_ns)));
  if (g.shared || !alone) measure_beside(g, cost, elapsed, work);
  if (g.asked > 0 && g.credit >= g.asked) {
    g.asked = 0;
    ++version_;
  }
}

// True: the session is in a new phase, which is learned.
bool OpController::measure_alone(Guaranteed& g, double device_ns) {
  const double off = std::abs(device_ns / g.alone.value - 1);
  const double noise = g.alone.deviation() / g.alone.value;
  g.since_alone = 0;
  g.alone_due = false;
  if (g.pause_left > 0) --g.pause_left;
  if (off <= std::max(options_.change, kNoise * noise)) {
    g.odd = 0;
    g.odd_sum = 0;
    g.alone.add(device_ns, kAloneGain);
    return false;
  }
  g.odd_sum += device_ns;
  if (++g.odd < 2) {  // one iteration that was disturbed is no phase
    g.pause_left = std::max(g.pause_left, 1U);
    return false;
  }
  const double first = g.odd_sum / g.odd;
  const uint32_t seen = g.odd;
  learn(g);
  g.alone.add(first, kAloneGain);
  g.learn_left = std::max(1U, g.learn_left - std::min(g.learn_left, seen));
  return true;
}

// An iteration during which others were allowed to run, or may have run. Without any work of theirs it says what the choice costs, and
// nothing is charged.
void OpController::measure_beside(Guaranteed& g, double cost, double elapsed_ns, double work_ns) {
  const double noise = g.alone.deviation() / g.alone.value;
  const double cap = std::max(kMostIterations * target_of(g), g.cap);
  const bool ran = was_beside(g) || work_ns > 0;
  double charge = cost;
  if (ran) {
    ++g.since_alone;
    if (work_ns > 0) {
      g.harm_ns *= kHarmKept;
      g.work_ns = g.work_ns * kHarmKept + work_ns;
    }
    g.harm_ns += cost * g.alone.value;
  }
  Pick during = g.during;
  if (g.mixed && !g.single) {  // the mean of the shares that were in force
    const double mean = (share_ns_ - g.share_ns) / elapsed_ns;
    during = {kNoSession, 0};
    while (during.share + 1 < kShares && share_at(during.share + 1) <= mean * 1.2) ++during.share;
    if (mean < share_at(0) / 2) during.share = kAlone;
  }
  if (!g.shared || during.share == kAlone) {
    // The work is left over from the last choice, so the cost is added to that choice's.
    if (g.last.share != kAlone) g.curves[g.last.who][g.last.share].cost.also(cost, kCostGain);
  } else if (!(g.mixed && g.single)) {
    Choice& choice = g.curves[during.who][during.share];
    const bool known = choice.cost.count >= kKnownSamples;
    const double off = std::abs(cost - choice.cost.value);
    // Longer or shorter than this choice explains: a change of phase, or not? Iterations alone will tell.
    if (ran && known && off > std::max(options_.change, kNoise * noise) * (1 + choice.cost.value))
      g.pause_left = std::max(1U, options_.learn_iterations);
    choice.cost.add(cost, kCostGain);
    // An iteration whose cost lies within the noise is charged the mean. A cost that noise does not explain is
    // charged as it is.
    if (known && off <= kNoise * noise) charge = choice.cost.value;
    double weighted = 0;
    for (const auto& [id, each] : opportunistic_) weighted += each.weight * each.work;
    choice.work.add(weighted / elapsed_ns, kCostGain);
    g.last = during;
  }
  if (!ran) return;
  g.credit = std::clamp(g.credit - charge, -2 * cap, cap);
  g.balance -= cost + options_.confidence * error_of(g);
}

void OpController::progressed(SessionId id, uint64_t work_ns) {
  const auto found = opportunistic_.find(id);
  if (found == opportunistic_.end()) return;
  const auto work = static_cast<double>(work_ns);
  found->second.work += work;
  found->second.total += work;
}

// The shares of `who` that may be chosen, with what is known of them or follows from their neighbours.
void OpController::points_of(const Guaranteed& g, SessionId who, double weight,
                             std::vector<Point>& out) const {
  static const Curve kNothing{};
  const double noise = g.alone.value > 0 ? g.alone.deviation() / g.alone.value : 1;
  const auto found = g.curves.find(who);
  const Curve& curve = found == g.curves.end() ? kNothing : found->second;
  size_t below = kShares;  // the last measured
  double below_cost = 0, below_work = 0;
  for (size_t i = 0; i < kShares; ++i) {
    const Choice& choice = curve[i];
    const double share = share_at(i);
    size_t above = i;
    while (above < kShares && curve[above].cost.count == 0) ++above;
    double cost = 0, work = 0;
    if (below < kShares && above < kShares && above != i) {
      const double part = (share - share_at(below)) / (share_at(above) - share_at(below));
      const double above_cost = std::max(0.0, curve[above].cost.value);
      cost = kOptimism * (below_cost + part * (above_cost - below_cost));
      work = below_work + part * (curve[above].work.value - below_work);
    } else if (below < kShares) {
      // A share that was never tried is reached by steps of twice at most.
      if (choice.cost.count == 0 && share > 2 * share_at(below)) break;
      cost = (choice.cost.count > 0 ? 1 : kOptimism) * below_cost * share / share_at(below);
      work = below_work * share / share_at(below);
    } else if (above < kShares && above != i) {
      cost = std::max(0.0, curve[above].cost.value) * share / share_at(above);
      work = curve[above].work.value * share / share_at(above);
    } else {
      if (above != i && i > kFirstShare) break;
      if (above != i && i < kFirstShare) continue;
      cost = share / 16;  // worth a trial; the credit pays for it as if it were expensive
      work = weight * share;
    }
    double need = cost;
    if (choice.cost.count > 0) {
      const double n = choice.cost.count;
      need = std::max(0.0, choice.cost.value);
      // Takes the cost at the low end of its error, so that a choice that looks bad by chance is tried again. A choice
      // that looks good is used, and so measured.
      cost = std::max(0.0, choice.cost.value - noise / std::sqrt(std::min(n, 2 / kCostGain)));
      // A launch may be longer than what the share allows for one iteration, and come in a later one.
      work = choice.work.value <= 0 && n < kKnownWork ? weight * share : choice.work.value;
      below = i;
      below_cost = need;
      below_work = work;
    } else {
      need = std::max(cost, share / 2);  // a trial may cost as much as taking turns
    }
    out.push_back({cost, work * (1 + cost), need, {who, i}});
  }
}

// The opportunistic session that has received least of what the floor gives it, if it is behind.
SessionId OpController::left_behind() const {
  double weights = 0, total = 0;
  for (const auto& [id, each] : opportunistic_) {
    if (!each.wants) continue;
    weights += each.weight;
    total += each.total;
  }
  SessionId least = kNoSession;
  double least_part = options_.floor;
  for (const auto& [id, each] : opportunistic_) {
    if (!each.wants || total <= 0) continue;
    const double part = each.total / total / (each.weight / weights);
    if (part < least_part) {
      least_part = part;
      least = id;
    }
  }
  return least;
}

// What may be chosen, nobody included; nothing if nobody wants.
std::vector<OpController::Point> OpController::points_of_all(const Guaranteed& g) const {
  size_t wanting = 0;
  double weights = 0;
  SessionId last = kNoSession;
  for (const auto& [id, each] : opportunistic_) {
    if (!each.wants) continue;
    ++wanting;
    weights += each.weight;
    last = id;
  }
  if (wanting == 0) return {};
  std::vector<Point> points{{0, 0, 0, {kNoSession, kAlone}}};
  // Beside several guaranteed sessions nobody is singled out: their choices would have to agree.
  const bool only = guaranteed_.size() == 1 && wanting <= kMostSingled;
  const SessionId behind = only && wanting > 1 ? left_behind() : kNoSession;
  if (wanting == 1) {
    points_of(g, last, weights, points);
  } else if (behind != kNoSession) {
    points_of(g, behind, opportunistic_.at(behind).weight, points);
  } else {
    points_of(g, kNoSession, weights, points);
    for (const auto& [id, each] : opportunistic_)
      if (only && each.wants) points_of(g, id, each.weight, points);
  }
  return points;
}

// The points that no mixture of others beats, by their cost.
std::vector<const OpController::Point*> OpController::hull_of(std::vector<Point>& points) {
  std::sort(points.begin(), points.end(), [](const Point& a, const Point& b) {
    return a.cost != b.cost ? a.cost < b.cost : a.work > b.work;
  });
  std::vector<const Point*> hull;
  for (const Point& point : points) {
    if (!hull.empty() && point.work <= hull.back()->work) continue;
    while (hull.size() >= 2) {
      const Point &a = *hull[hull.size() - 2], &b = *hull.back();
      if ((b.work - a.work) * (point.cost - a.cost) > (point.work - a.work) * (b.cost - a.cost)) break;
      hull.pop_back();
    }
    if (hull.size() == 1 && hull.back()->cost >= point.cost) hull.pop_back();
    hull.push_back(&point);
  }
  return hull;
}

OpController::Pick OpController::decide(Guaranteed& g) {
  const Pick alone{kNoSession, kAlone};
  if (g.learn_left > 0 || g.pause_left > 0 || g.credit < 0) return alone;
  std::vector<Point> points = points_of_all(g);
  if (points.empty()) return {kNoSession, kShares - 1};
  const std::vector<const Point*> hull = hull_of(points);
  const double target = target_of(g), aim = aim_of(g);
  size_t low = 0;
  while (low + 1 < hull.size() && hull[low + 1]->cost <= aim) ++low;
  // Iterations alone: many until their time is known, few where the best choice is well within the target.
  uint32_t every = options_.check_every;
  if (error_of(g) > kPrecise * target)
    every = kImpreciseEvery;
  else if (low + 1 == hull.size() && hull[low]->need + 3 * error_of(g) < aim)
    every *= 8;
  g.alone_due = g.since_alone + 1 >= every;
  if (g.alone_due) return alone;
  const auto affordable = [&](const Point& point) { return g.credit >= point.need; };
  for (size_t i = std::min(low + 2, hull.size()); i-- > low;) {
    g.cap = std::max(g.cap, 2 * hull[i]->need);
    if (affordable(*hull[i])) return hull[i]->pick;
  }
  const Point* best = nullptr;
  for (const Point& point : points)
    if (point.cost <= target && affordable(point) && (best == nullptr || point.work > best->work))
      best = &point;
  return best == nullptr ? alone : best->pick;
}

// The choice in force is the least share that any guaranteed session with an iteration on the device wants.
void OpController::apply() {
  Pick force{kNoSession, kShares - 1};
  bool busy = false;
  for (const auto& [id, g] : guaranteed_) {
    if (g.in_flight == 0) continue;
    if (g.wanted.share == kAlone || force.share == kAlone)
      force = {kNoSession, kAlone};
    else if (!busy)
      force = g.wanted;
    else
      force = {kNoSession, std::min(force.share, g.wanted.share)};
    busy = true;
  }
  if (force == force_ && busy == busy_) return;
  for (auto& [id, g] : guaranteed_) {
    if (g.in_flight == 0 || force == force_) continue;
    // Iterations that are on the device have now run under two choices.
    g.mixed = true;
    g.shared = g.shared || (force.share != kAlone && anyone_wants());
    g.single = g.single || force.who != kNoSession;
  }
  force_ = force;
  busy_ = busy;
  ++version_;
}

// What 1 ns of the work that is let in costs the session, at most: less than 1 ns only if that was measured.
double OpController::known_cost(const Guaranteed& g) const {
  const auto curve = g.curves.find(force_.who);
  if (force_.share == kAlone || curve == g.curves.end()) return 1;
  const Mean& cost = curve->second[force_.share].cost;
  if (cost.count < kKnownSamples || g.alone.value <= 0) return 1;
  const double error = g.alone.deviation() / g.alone.value / std::sqrt(std::min(cost.count, 2 / kCostGain));
  return std::clamp((std::max(0.0, cost.value) + error) / share_at(force_.share), 1e-3, 1.0);
}

uint64_t OpController::admits_at(SessionId id, uint64_t work_ns, uint64_t in_flight_ns, uint64_t now_ns) {
  if (!opportunistic_.contains(id)) return now_ns;
  const double work = let_in_ns() + static_cast<double>(work_ns);
  const uint64_t on_device_ns = in_flight_ns + std::min(work_ns, kUnknown - in_flight_ns);
  uint64_t at_ns = now_ns;
  for (auto& [other, g] : guaranteed_) at_ns = std::max(at_ns, admits_at(g, work, on_device_ns, now_ns));
  return at_ns;
}

// Iterations that are to be alone are at hand: no credit pays for work beside them.
bool OpController::measures(const Guaranteed& g) {
  return g.learn_left > 0 || g.pause_left > 0 || g.alone_due;
}

// What a nanosecond of others' work costs the session, as far as that is known.
double OpController::harm_of(const Guaranteed& g) {
  const double alone = g.alone.value;
  return std::clamp((std::max(0.0, g.harm_ns) + alone) / (g.work_ns + alone), 1 / kMostHarm / 16, kMostHarm);
}

uint64_t OpController::admits_at(Guaranteed& g, double work_ns, uint64_t in_flight_ns,
                                 uint64_t now_ns) const {
  if (!measures(g)) {
    const double cost = work_ns * harm_of(g) / g.alone.value;
    if (cost <= g.credit) return now_ns;
    g.cap = std::max(g.cap, std::min(2 * cost, kMostSaved));
    g.asked = g.asked > 0 ? std::min(g.asked, cost) : cost;
  }
  base::GateTerms terms = terms_of(g);
  terms.paid_ns = -1;
  return terms.admits_at(work_ns, 0, in_flight_ns, now_ns);
}

// What one guaranteed session lets in, of all others together.
base::GateTerms OpController::terms_of(const Guaranteed& g) const {
  base::GateTerms terms;
  const double alone = g.alone.value;
  terms.in_flight_ns = static_cast<uint64_t>(alone * std::min(1.0, target_of(g) / 4 / known_cost(g)));
  // Who was away for long waits at most the target of that time when it comes back, and at most one iteration's, or
  // two launches' after a second (GateTerms::in_flight_at).
  terms.away_share = target_of(g);
  terms.away_most_ns = alone;
  terms.since_ns = g.since_ns;
  terms.busy = g.in_flight > 0 ? 1 : 0;
  if (!measures(g)) terms.paid_ns = g.credit * alone / harm_of(g);
  const size_t known = std::min(g.pauses_seen, g.pauses.size());
  const auto end = g.pauses.begin() + static_cast<std::ptrdiff_t>(known);
  const uint64_t least_ns = known == 0 ? 0 : *std::min_element(g.pauses.begin(), end);
  const uint64_t most_ns = known == 0 ? g.last_ns : 2 * *std::max_element(g.pauses.begin(), end);
  terms.back_ns = g.since_ns + least_ns;
  terms.overdue_ns = g.since_ns + std::min(most_ns, kLongestPause * g.last_ns);
  return terms;
}

OpController::Allowance OpController::allowance(SessionId id, uint64_t now_ns, uint64_t work_ns) const {
  const auto found = opportunistic_.find(id);
  if (found == opportunistic_.end() || guaranteed_.empty()) return {};
  uint64_t least_ns = 0;
  for (const auto& [other, g] : guaranteed_) {
    const uint64_t ns = terms_of(g).in_flight_at(now_ns, work_ns);
    least_ns = least_ns == 0 ? ns : std::min(least_ns, ns);
  }
  Allowance allowed;
  allowed.in_flight_ns = std::max(kLeastInFlightNs, least_ns);
  allowed.share = share_of(id);
  return allowed;
}

double OpController::share_of(SessionId id) const {
  if (force_.share == kAlone || (force_.who != kNoSession && force_.who != id)) return 0;
  return share_at(force_.share);
}

// What all guaranteed sessions let in, and of whom readers hear.
base::GateTerms OpController::terms_of_all() const {
  base::GateTerms out;
  out.in_flight_ns = out.back_ns = kUnknown;
  out.paid_ns = out.away_share = out.away_most_ns = std::numeric_limits<double>::infinity();
  double least_credit = 0;
  for (const auto& [id, g] : guaranteed_) {
    const base::GateTerms one = terms_of(g);
    out.in_flight_ns = std::min(out.in_flight_ns, one.in_flight_ns);
    out.busy = std::max(out.busy, one.busy);
    out.paid_ns = std::min(out.paid_ns, one.paid_ns);
    out.away_share = std::min(out.away_share, one.away_share);
    out.away_most_ns = std::min(out.away_most_ns, one.away_most_ns);
    out.since_ns = std::max(out.since_ns, one.since_ns);
    out.back_ns = std::min(out.back_ns, one.back_ns);
    out.overdue_ns = std::max(out.overdue_ns, one.overdue_ns);
    if (out.guaranteed_id != 0 && g.credit >= least_credit) continue;
    out.guaranteed_id = id;
    least_credit = g.credit;
  }
  out.in_flight_ns = std::max(kLeastInFlightNs, out.in_flight_ns);
  const Estimate known = estimate(out.guaranteed_id);
  out.alone_ns = known.alone_ns;
  out.iterations = known.iterations;
  out.learning = known.learning ? 1 : 0;
  out.slowdown = known.slowdown;
  out.error = known.error;
  out.credit = known.credit;
  out.target = known.target;
  return out;
}

void OpController::each_terms(const std::function<void(SessionId, const base::GateTerms&)>& visit) const {
  if (guaranteed_.empty()) {
    for (const auto& [id, each] : opportunistic_) visit(id, {});
    return;
  }
  const base::GateTerms all = terms_of_all();
  const double left_ns = all.paid_ns - let_in_ns();
  double weights = 0;
  for (const auto& [id, each] : opportunistic_) weights += each.wants ? each.weight : 0;
  for (const auto& [id, each] : opportunistic_) {
    base::GateTerms one = all;
    one.share = busy_ && !each.wants ? 0 : share_of(id);  // nobody has reckoned with it
    const bool single = force_.share != kAlone && force_.who == id;
    one.paid_ns = left_ns * (single ? 1 : each.weight / (each.wants ? weights : weights + each.weight));
    visit(id, one);
  }
}

OpController::Estimate OpController::estimate(SessionId id) const {
  Estimate out;
  const auto found = guaranteed_.find(id);
  if (found == guaranteed_.end()) return out;
  const Guaranteed& g = found->second;
  out.alone_ns = static_cast<uint64_t>(g.alone.value);
  out.target = target_of(g);
  out.credit = g.credit;
  out.iterations = g.iterations;
  out.learning = g.learn_left > 0;
  if (g.iterations == 0) return out;
  out.slowdown = g.excess / static_cast<double>(g.iterations);
  out.error = std::min(1.0, error_of_excess(g, error_of(g)));
  return out;
}

std::string OpController::check() const {
  for (const auto& [id, g] : guaranteed_) {
    if (!std::isfinite(g.credit) || !std::isfinite(g.alone.value) || !std::isfinite(g.excess))
      return base::format("session %llu: an estimate is not finite", static_cast<unsigned long long>(id));
    if (g.learn_left > 0 && g.in_flight > 0 && force_.share != kAlone)
      return base::format("session %llu learns, and others run", static_cast<unsigned long long>(id));
    if (g.in_flight > 0 && g.wanted.share == kAlone && force_.share != kAlone)
      return base::format("session %llu is to run alone, and others run",
                          static_cast<unsigned long long>(id));
    if (g.credit > std::max(kMostIterations * target_of(g), g.cap) + 1e-9)
      return base::format("session %llu has more credit than its cap", static_cast<unsigned long long>(id));
  }
  return {};
}

}  // namespace gpushare::sched
