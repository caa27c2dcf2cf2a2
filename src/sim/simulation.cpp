// SPDX-License-Identifier: Apache-2.0
#include "sim/simulation.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <iterator>
#include <queue>
#include <random>
#include <utility>

#include "base/saturate.hpp"
#include "base/units.hpp"

namespace gpushare::sim {

using sched::Action;
using sched::ActionKind;
using sched::kNoSession;
using sched::kUnknown;
using sched::LaneId;
using sched::SessionId;

namespace {

constexpr double kMostTotalNs = 4e18;  // 127 years: sums of times stay far inside 64 bits

// `start_ns` plus so long; kUnknown, a time that never comes, where 64 bits do not hold the sum.
uint64_t after(uint64_t start_ns, double ns) {
  return base::add_saturated(start_ns, base::to_uint64(std::ceil(ns)));
}

struct JobState {
  uint64_t left = 0;  // iterations
  bool started = false;
};

// A run of iterations of one session in one lane.
struct LaneState {
  bool running = false;
  SessionId session = kNoSession;
  SessionId last = kNoSession;   // whose iterations ran before
  SessionId rated = kNoSession;  // for whom rates were computed
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;      // as things are now
  uint64_t count = 0;       // iterations in this run
  double lead_ns = 0;       // switch time before the first
  double iteration_ns = 0;  // alone
  double done_ns = 0;       // of lead + count * iteration, in time alone
  double rate = 1;
  uint64_t told_count = 0;  // of them, reported to the scheduler as finished
  uint64_t told_ns = 0;     // their device time

  double total_ns() const { return lead_ns + static_cast<double>(count) * iteration_ns; }
};

struct Copy {
  uint64_t end_ns;
  SessionId session;
  LaneId lane;
  bool out;
};

// A job whose host begins its next iteration then.
struct Thinking {
  uint64_t until_ns;
  SessionId session;
  bool operator>(const Thinking& other) const {
    return std::pair(until_ns, session) > std::pair(other.until_ns, other.session);
  }
};

class NullSink final : public EventSink {};

}  // namespace

struct Simulation::Impl {
  SimulationOptions options;
  std::vector<Job> jobs;
  std::unique_ptr<sched::Policy> first_policy;
  NullSink null_sink;
  EventSink* sink;
  std::shared_ptr<const InterferenceModel> model;
  std::unique_ptr<sched::Scheduler> scheduler;

  SimulationResult result;
  std::vector<JobState> states;
  std::vector<LaneState> lanes;
  std::deque<Copy> copies;  // one link: ends ascend
  std::priority_queue<Thinking, std::vector<Thinking>, std::greater<>> thinking;
  std::mt19937_64 random;
  uint64_t now = 0;
  uint64_t busy_ns = 0;
  uint64_t resident_bytes = 0;
  uint64_t running_bytes = 0;
  size_t running = 0;
  size_t gone = 0;  // completed or refused
  size_t next_job = 0;
  bool decisions_stale = false;
  bool memory_changed = false;
  bool over_capacity = false;
  bool cancelled = false;
  std::vector<SessionId> beside;

  const Job& job(SessionId id) const { return jobs[id - 1]; }
  JobState& state(SessionId id) { return states[id - 1]; }
  JobResult& outcome(SessionId id) { return result.jobs[id - 1]; }

  base::Status validate() const;
  void prepare();
  uint64_t next_event() const;
  void advance(uint64_t to);
  void arrive(SessionId id);
  void finish_run(LaneId id);
  void report_runs();
  void carry_out();
  void finish_copies();
  void turn_back(SessionId id);
  void wake_thinkers();
  void cut_runs();
  void fill_lanes();
  void dispatch(LaneId id, SessionId session);
  void rate_lanes();
  void account_memory();
  void summarise();
};

base::Status Simulation::Impl::validate() const {
  const auto fail = [](const std::string& what) { return base::Status(GPUSHARE_INVALID_ARGUMENT, what); };
  if (options.capacity_bytes == 0) return fail("capacity_bytes must be above 0");
  if (!(options.host_link_bytes_per_s > 0) || !std::isfinite(options.host_link_bytes_per_s))
    return fail("host_link_bytes_per_s must be finite and above 0");
  if (!(options.jitter >= 0 && options.jitter <= 1)) return fail("jitter must be in [0, 1]");
  if (options.max_picks == 0) return fail("max_picks must be above 0");
  if (jobs.empty()) return fail("there are no jobs");
  double total = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Job& each = jobs[i];
    const std::string who = base::format("job %zu ('%s'): ", i + 1, each.name.substr(0, 80).c_str());
    if (each.iterations == 0) return fail(who + "iterations must be at least 1");
    if (!(each.iteration_ns > 0) || !std::isfinite(each.iteration_ns))
      return fail(who + "iteration_ns must be above 0");
    if (!(each.weight > 0) || !std::isfinite(each.weight)) return fail(who + "weight must be above 0");
    if (!(each.demand >= 0 && each.demand <= 1)) return fail(who + "demand must be in [0, 1]");
    if (i > 0 && each.arrival_ns < jobs[i - 1].arrival_ns)
      return fail(who + "arrives before the job ahead of it");
    total += each.work_ns() + static_cast<double>(each.iterations) * static_cast<double>(each.think_ns);
  }
  total += static_cast<double>(jobs.back().arrival_ns);
  if (!(total <= kMostTotalNs))
    return fail(base::format("arrivals, work and thought come to %g s; at most %g s can be simulated",
                             total * 1e-9, kMostTotalNs * 1e-9));
  return {};
}

void Simulation::Impl::prepare() {
  sched::SchedulerOptions scheduling;
  scheduling.capacity_bytes = options.capacity_bytes;
  scheduling.max_lanes = options.max_lanes;
  scheduling.paging = options.paging;
  scheduling.lane_finder = options.lane_finder;
  scheduling.keeps_lag_ns = options.keeps_lag_ns;
  scheduling.measures = options.measures;
  if (options.interference) {
    model = std::make_shared<InterferenceModel>(jobs, options.table);
  }
  options.table = nullptr;
  result.policy = first_policy->name();
  scheduler = std::make_unique<sched::Scheduler>(scheduling, std::move(first_policy));
  if (model != nullptr && options.tell_policy && !options.measures) scheduler->set_interference(model, 0);
  random.seed(options.seed);
  states.resize(jobs.size());
  result.jobs.resize(jobs.size());
  double iterations = 0, work = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    states[i].left = jobs[i].iterations;
    result.jobs[i].name = jobs[i].name;
    result.jobs[i].arrival_ns = jobs[i].arrival_ns;
    iterations += static_cast<double>(jobs[i].iterations);
    work += jobs[i].work_ns();
  }
  result.quantum_ns = options.quantum_ns;
  if (result.quantum_ns == 0 && iterations > static_cast<double>(options.max_picks))
    result.quantum_ns = static_cast<uint64_t>(work / static_cast<double>(options.max_picks)) + 1;
}

uint64_t Simulation::Impl::next_event() const {
  uint64_t next = next_job < jobs.size() ? jobs[next_job].arrival_ns : kUnknown;
  if (!copies.empty()) next = std::min(next, copies.front().end_ns);
  if (!thinking.empty()) next = std::min(next, thinking.top().until_ns);
  // With nothing running, a time that has passed already would come again for ever.
  const uint64_t look_ns = scheduler->look_again_ns();
  if (running > 0 || look_ns > now) next = std::min(next, std::max(look_ns, now + 1));
  for (const LaneState& lane : lanes)
    if (lane.running) next = std::min(next, lane.end_ns);
  return next;
}

void Simulation::Impl::advance(uint64_t to) {
  const auto passed = static_cast<double>(to - now);
  for (LaneState& lane : lanes)
    if (lane.running) lane.done_ns = std::min(lane.done_ns + passed * lane.rate, lane.total_ns());
  if (running > 0) busy_ns += to - now;
  now = to;
}

void Simulation::Impl::arrive(SessionId id) {
  const Job& each = job(id);
  sched::SessionSpec spec;
  spec.id = id;
  spec.name = each.name;
  spec.cls = each.cls;
  spec.priority = each.priority;
  spec.weight = each.weight;
  spec.persistent_bytes = each.persistent_bytes;
  spec.ephemeral_bytes = each.ephemeral_bytes;
  spec.remaining_ns = static_cast<uint64_t>(std::llround(each.work_ns()));
  spec.iterations_total = each.iterations;
  sink->session({now, id, SessionStep::kArrived, sched::kNoLane, 0, each.name});
  decisions_stale = true;
  const base::Status status = scheduler->arrive(spec, now);
  if (status.ok()) {
    scheduler->ready(id, now);
    return;
  }
  outcome(id).refused = true;
  outcome(id).reason = status.message();
  ++result.refused;
  ++gone;
  sink->session({now, id, SessionStep::kRefused, sched::kNoLane, 0, status.message()});
}

void Simulation::Impl::finish_run(LaneId id) {
  LaneState& lane = lanes[id];
  const SessionId session = lane.session;
  const uint64_t began = lane.start_ns + static_cast<uint64_t>(lane.lead_ns);
  const uint64_t elapsed = now > began ? now - began : 0;
  lane.running = false;
  lane.last = session;
  --running;
  running_bytes -= job(session).ephemeral_bytes;
  memory_changed = true;
  JobResult& done = outcome(session);
  done.service_ns += elapsed;
  done.iterations += lane.count;
  state(session).left -= lane.count;
  sink->iterations(id, session, began, now, lane.count);
  scheduler->finished(session, elapsed - std::min(elapsed, lane.told_ns), now, lane.count - lane.told_count);
  if (state(session).left > 0) {
    if (const uint64_t think_ns = job(session).think_ns; think_ns > 0)
      thinking.push({base::add_saturated(now, think_ns), session});
    else
      scheduler->ready(session, now);
    return;
  }
  scheduler->leave(session, now);
  resident_bytes -= job(session).persistent_bytes;
  done.end_ns = now;
  ++result.completed;
  ++gone;
  decisions_stale = true;
  sink->session({now, session, SessionStep::kLeft});
  if (options.progress && !options.progress(now, gone, jobs.size())) cancelled = true;
}

// Before something that the scheduler decides on: the iterations that runs have completed so far are
// reported, so that service, virtual time and remaining time are what they would be had each iteration been
// dispatched by itself.
void Simulation::Impl::report_runs() {
  for (LaneId id = 0; id < lanes.size(); ++id) {
    LaneState& lane = lanes[id];
    if (!lane.running || lane.count - lane.told_count <= 1 || lane.done_ns <= lane.lead_ns) continue;
    const double progress = (lane.done_ns - lane.lead_ns) / lane.iteration_ns;
    const double slack = 1e-9 * std::max(1.0, progress);
    const double completed = std::floor(progress + slack);
    if (progress - completed <= slack) {  // right at a boundary: the run ends here
      lane.count = std::min(lane.count, static_cast<uint64_t>(completed));
      lane.end_ns = now;
      continue;
    }
    const uint64_t count = std::min(static_cast<uint64_t>(completed), lane.count - 1);
    if (count <= lane.told_count) continue;
    const auto elapsed = static_cast<double>(now - lane.start_ns) - lane.lead_ns;
    const auto until = static_cast<uint64_t>(std::max(0.0, elapsed * static_cast<double>(count) / progress));
    scheduler->progressed(lane.session, until - std::min(until, lane.told_ns), now, count - lane.told_count,
                          lane.count - count);
    lane.told_count = count;
    lane.told_ns = std::max(lane.told_ns, until);
  }
}

void Simulation::Impl::carry_out() {
  for (std::vector<Action> actions = scheduler->take_actions(); !actions.empty();
       actions = scheduler->take_actions()) {
    decisions_stale = memory_changed = true;
    for (const Action& action : actions) {
      const SessionId id = action.session;
      switch (action.kind) {
        case ActionKind::kOpenLane:
          if (action.lane >= lanes.size()) lanes.resize(action.lane + 1);
          sink->lane_opened(now, action.lane, action.bytes);
          break;
        case ActionKind::kResizeLane:
          sink->lane_resized(now, action.lane, action.bytes);
          break;
        case ActionKind::kCloseLane:
          sink->lane_closed(now, action.lane);
          break;
        case ActionKind::kDrop:  // a simulation has nothing that is kept for speed alone
        case ActionKind::kFillCache:
        case ActionKind::kDropCache:
        case ActionKind::kTerms:
        case ActionKind::kMove:
          break;  // its next iteration names the lane
        case ActionKind::kTurnBack:
          turn_back(id);
          break;
        case ActionKind::kAdmit:
          resident_bytes += job(id).persistent_bytes;
          sink->session({now, id, SessionStep::kAdmitted, action.lane});
          break;
        case ActionKind::kPageOut:
        case ActionKind::kPageIn: {
          const bool out = action.kind == ActionKind::kPageOut;
          // A session that has run nothing yet has nothing to copy.
          const uint64_t bytes = state(id).started ? job(id).persistent_bytes : 0;
          if (out) {
            ++outcome(id).page_outs;
            ++result.page_outs;
          } else {
            ++result.page_ins;
            resident_bytes += job(id).persistent_bytes;
          }
          sink->session(
              {now, id, out ? SessionStep::kPagingOut : SessionStep::kPagingIn, action.lane, bytes});
          result.paged_bytes += bytes;
          const uint64_t start = copies.empty() ? now : copies.back().end_ns;
          const double length_ns = static_cast<double>(bytes) / options.host_link_bytes_per_s * 1e9;
          copies.push_back({after(start, length_ns), id, action.lane, out});
          break;
        }
      }
    }
    finish_copies();
  }
}

// Copies behind that of the session come earlier.
void Simulation::Impl::turn_back(SessionId id) {
  auto at = std::find_if(copies.begin(), copies.end(),
                         [id](const Copy& copy) { return copy.session == id && !copy.out; });
  if (at == copies.end()) return;
  uint64_t free_ns = at == copies.begin() ? now : std::prev(at)->end_ns, ended_ns = at->end_ns;
  sink->session({now, id, SessionStep::kPagedOut, at->lane});
  for (at = copies.erase(at); at != copies.end(); ++at) {
    free_ns += at->end_ns - std::exchange(ended_ns, at->end_ns);
    at->end_ns = free_ns;
  }
  resident_bytes -= job(id).persistent_bytes;
  scheduler->unplaced(id, now);
}

void Simulation::Impl::wake_thinkers() {
  for (; !thinking.empty() && thinking.top().until_ns <= now; thinking.pop()) {
    scheduler->ready(thinking.top().session, now);
    decisions_stale = true;
  }
}

void Simulation::Impl::finish_copies() {
  while (!copies.empty() && copies.front().end_ns <= now) {
    const Copy copy = copies.front();
    copies.pop_front();
    decisions_stale = memory_changed = true;
    if (copy.out) resident_bytes -= job(copy.session).persistent_bytes;
    sink->session({now, copy.session, copy.out ? SessionStep::kPagedOut : SessionStep::kPagedIn, copy.lane});
    scheduler->page_done(copy.session, now);
  }
}

// Something happened that may change decisions: runs end at their next iteration boundary.
void Simulation::Impl::cut_runs() {
  for (LaneState& lane : lanes) {
    if (!lane.running || lane.count <= 1) continue;
    const double progress = (lane.done_ns - lane.lead_ns) / lane.iteration_ns;
    const double boundary = std::max(1.0, std::ceil(progress - 1e-9 * std::max(1.0, progress)));
    if (boundary >= static_cast<double>(lane.count)) continue;
    lane.count = static_cast<uint64_t>(boundary);
    lane.end_ns = after(now, (lane.total_ns() - lane.done_ns) / lane.rate);
  }
}

void Simulation::Impl::fill_lanes() {
  // A dispatch in one lane may release another lane, and a session that moved may leave room.
  for (bool more = true; more;) {
    more = false;
    for (LaneId id = 0; id < lanes.size(); ++id) {
      if (lanes[id].running || !scheduler->lane_is_open(id)) continue;
      const auto picked = scheduler->pick(id, now);
      if (!picked) continue;
      dispatch(id, *picked);
      more = true;
    }
    carry_out();
  }
}

void Simulation::Impl::dispatch(LaneId id, SessionId session) {
  LaneState& lane = lanes[id];
  const uint64_t holds_until = scheduler->decision_holds_until(id, now);
  const Job& each = job(session);
  JobState& mine = state(session);
  ++result.picks;
  const double expected_ns = each.iteration_ns / lane.rate;
  const auto iterations_in = [&](uint64_t ns) {
    const double n = std::ceil(static_cast<double>(ns) / expected_ns);
    return n >= static_cast<double>(mine.left) ? mine.left : std::max<uint64_t>(1, static_cast<uint64_t>(n));
  };
  const uint64_t natural = each.think_ns > 0         ? 1
                           : holds_until == kUnknown ? mine.left
                                                     : iterations_in(holds_until - now);
  lane.count = natural;
  if (result.quantum_ns > 0 && each.think_ns == 0) {
    const double grouped = std::floor(static_cast<double>(result.quantum_ns) / expected_ns);
    if (grouped > static_cast<double>(natural)) {
      lane.count = grouped >= static_cast<double>(mine.left) ? mine.left : static_cast<uint64_t>(grouped);
      if (lane.count > natural) result.iteration_group = std::max(result.iteration_group, lane.count);
    }
  }
  lane.running = true;
  lane.session = session;
  lane.start_ns = now;
  lane.iteration_ns = each.iteration_ns;
  if (options.jitter > 0) {
    const double spread = options.jitter / std::sqrt(static_cast<double>(lane.count));
    lane.iteration_ns *= std::max(0.05, 1 + spread * std::normal_distribution<double>()(random));
  }
  lane.done_ns = 0;
  lane.lead_ns = 0;
  lane.told_count = lane.told_ns = 0;
  if (lane.last != session && lane.last != kNoSession) {
    ++result.switches;
    lane.lead_ns = static_cast<double>(options.switch_ns);
  }
  lane.end_ns = kUnknown;
  ++running;
  running_bytes += each.ephemeral_bytes;
  memory_changed = true;
  if (!mine.started) {
    mine.started = true;
    outcome(session).start_ns = now;
  }
  scheduler->dispatched(session, id, now, lane.count);
}

void Simulation::Impl::rate_lanes() {
  bool changed = false;
  for (LaneState& lane : lanes) {
    const SessionId present = lane.running ? lane.session : kNoSession;
    if (lane.rated != present) {
      lane.rated = present;
      changed = true;
    }
  }
  for (size_t i = 0; i < lanes.size(); ++i) {
    LaneState& lane = lanes[i];
    if (!lane.running || (!changed && lane.end_ns != kUnknown)) continue;
    if (changed && model != nullptr) {
      beside.clear();
      for (size_t j = 0; j < lanes.size(); ++j)
        if (j != i && lanes[j].running) beside.push_back(lanes[j].session);
      lane.rate = model->rate(lane.session, beside);
    }
    lane.end_ns = after(now, (lane.total_ns() - lane.done_ns) / lane.rate);
  }
}

void Simulation::Impl::account_memory() {
  if (!memory_changed) return;
  memory_changed = false;
  const uint64_t live = resident_bytes + running_bytes;
  result.peak_bytes = std::max(result.peak_bytes, live);
  result.peak_promised_bytes = std::max(result.peak_promised_bytes, scheduler->promised_bytes());
  const bool over = live > options.capacity_bytes;
  if (over && !over_capacity) ++result.oom;
  over_capacity = over;
  sink->memory(now, scheduler->persistent_bytes(),
               scheduler->promised_bytes() - scheduler->persistent_bytes(), running_bytes);
}

void Simulation::Impl::summarise() {
  std::vector<uint64_t> completions;
  uint64_t first = kUnknown, last = 0;
  double completion = 0, queued = 0, work = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const JobResult& each = result.jobs[i];
    if (each.refused) continue;
    first = std::min(first, each.arrival_ns);
    last = std::max(last, each.end_ns);
    completions.push_back(each.completion_ns());
    completion += static_cast<double>(each.completion_ns());
    queued += static_cast<double>(each.queue_ns());
    work += jobs[i].work_ns();
  }
  if (!completions.empty()) {
    const auto count = static_cast<double>(completions.size());
    std::sort(completions.begin(), completions.end());
    result.makespan_ns = last - first;
    result.completion_mean_ns = completion / count;
    result.queue_mean_ns = queued / count;
    result.completion_p95_ns = completions[static_cast<size_t>(std::ceil(0.95 * count)) - 1];
    result.utilization = static_cast<double>(busy_ns) / static_cast<double>(result.makespan_ns);
    result.work_rate = work / static_cast<double>(result.makespan_ns);
  }
  if (model == nullptr) {
    result.notes.emplace_back("interference: none, lanes do not slow each other");
  } else if (model->jobs_in_table() > 0) {
    result.notes.push_back(
        base::format("interference: measured pairs for %zu of %zu jobs (slowdowns of several add up), "
                     "compute shared by demand for the rest",
                     model->jobs_in_table(), jobs.size()));
  } else {
    result.notes.push_back(
        base::format("interference: modelled; jobs in parallel lanes share compute once their demands exceed "
                     "1 (%.2f where a job states none)",
                     InterferenceModel::kDefaultDemand));
  }
  if (result.iteration_group == 1) result.quantum_ns = 0;  // every decision held longer by itself
  if (result.quantum_ns > 0)
    result.notes.push_back(base::format("iterations run in groups of up to %s, the largest of %llu",
                                        base::format_duration_ns(result.quantum_ns).c_str(),
                                        static_cast<unsigned long long>(result.iteration_group)));
  if (result.refused > 0)
    result.notes.push_back(
        base::format("%llu of %zu jobs could not run alone on the device and were refused: %s",
                     static_cast<unsigned long long>(result.refused), jobs.size(),
                     std::find_if(result.jobs.begin(), result.jobs.end(), [](const JobResult& each) {
                       return each.refused;
                     })->reason.c_str()));
}

Simulation::Simulation(SimulationOptions options, std::vector<Job> jobs,
                       std::unique_ptr<sched::Policy> policy, EventSink* sink)
    : impl_(std::make_unique<Impl>()) {
  impl_->options = std::move(options);
  impl_->jobs = std::move(jobs);
  impl_->first_policy = std::move(policy);
  impl_->sink = sink != nullptr ? sink : &impl_->null_sink;
}

Simulation::~Simulation() = default;

base::Result<SimulationResult> Simulation::run() {
  Impl& sim = *impl_;
  if (sim.first_policy == nullptr)
    return base::Status(GPUSHARE_INVALID_STATE, "a simulation runs once, with a policy");
  GPUSHARE_RETURN_IF_ERROR(sim.validate());
  sim.prepare();
  for (uint64_t next = sim.next_event(); next != kUnknown; next = sim.next_event()) {
    sim.advance(next);
    sim.report_runs();
    for (LaneId id = 0; id < sim.lanes.size(); ++id)
      if (sim.lanes[id].running && sim.lanes[id].end_ns <= sim.now) sim.finish_run(id);
    if (sim.cancelled)
      return base::Status(GPUSHARE_CANCELLED, "the simulation was cancelled by its progress callback");
    sim.finish_copies();
    sim.wake_thinkers();
    while (sim.next_job < sim.jobs.size() && sim.jobs[sim.next_job].arrival_ns <= sim.now)
      sim.arrive(++sim.next_job);
    sim.carry_out();
    if (std::exchange(sim.decisions_stale, false)) sim.cut_runs();
    sim.fill_lanes();
    sim.rate_lanes();
    sim.account_memory();
  }
  const auto runs = [](const LaneState& lane) { return lane.running; };
  if (!sim.copies.empty() || std::any_of(sim.lanes.begin(), sim.lanes.end(), runs))
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        "work under way would end after more nanoseconds than 64 bits hold: the link is too slow, or jobs "
        "slow each other too much");
  if (sim.gone < sim.jobs.size()) {
    const auto waiting = std::find_if(sim.states.begin(), sim.states.end(),
                                      [](const JobState& each) { return each.left > 0; });
    return base::Status(
        GPUSHARE_INVALID_STATE,
        base::format("policy '%s' leaves every lane idle for ever while '%s' and %zu others wait",
                     sim.result.policy.c_str(),
                     sim.jobs[static_cast<size_t>(waiting - sim.states.begin())].name.c_str(),
                     sim.jobs.size() - sim.gone - 1));
  }
  sim.summarise();
  return std::move(sim.result);
}

}  // namespace gpushare::sim
