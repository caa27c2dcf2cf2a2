// `gpushare run` on a real device, through the public API alone: one session and one thread a job, iterations
// by pull.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <gpushare/gpushare.hpp>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/no_signals.hpp"
#include "base/units.hpp"
#include "cli/device_use.hpp"
#include "cli/host_work.hpp"
#include "cli/run_options.hpp"
#include "cli/trace_merge.hpp"
#include "memory/snapshot.hpp"
#include "sim/simulation.hpp"

namespace gpushare::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Shorter iterations are mostly overhead, of the runtime or of touching their memory: they run as fewer,
// longer ones.
constexpr double kLeastIterationNs = 2e6;
constexpr double kTouchShare = 3;
// Job files that exceed the device are scaled from this size, that of the device on which the public traces
// were taken.
constexpr uint64_t kReferenceBytes = uint64_t{16} << 30;
constexpr uint64_t kLeastBytes = 64 << 10;
constexpr size_t kMostJobs = 4096;  // a thread each
constexpr auto kTick = std::chrono::milliseconds(10);

struct HostPlan {
  std::vector<sim::Job> jobs;
  std::vector<std::string> notes;
  double total_s = 0;
};

// Fits the jobs to the device: sizes to its memory, iterations to what can be timed.
HostPlan plan_for(const std::vector<sim::Job>& jobs, uint64_t capacity_bytes, const HostWork& work) {
  HostPlan plan{jobs, {}, 0};
  uint64_t largest = 0;
  for (const sim::Job& job : jobs) largest = std::max(largest, job.persistent_bytes + job.ephemeral_bytes);
  if (largest > capacity_bytes) {
    const double scale =
        static_cast<double>(capacity_bytes) / static_cast<double>(std::max(kReferenceBytes, largest));
    for (sim::Job& job : plan.jobs) {
      job.persistent_bytes = static_cast<uint64_t>(static_cast<double>(job.persistent_bytes) * scale);
      job.ephemeral_bytes = static_cast<uint64_t>(static_cast<double>(job.ephemeral_bytes) * scale);
    }
    plan.notes.push_back(
        base::format("memory: the largest job needs %s of %s, so all sizes of the job file were divided by "
                     "%.1f; what fits together is as on "
                     "a device of %s.",
                     base::format_bytes(largest).c_str(), base::format_bytes(capacity_bytes).c_str(),
                     1 / scale, base::format_bytes(std::max(kReferenceBytes, largest)).c_str()));
  }
  size_t grouped = 0;
  for (sim::Job& job : plan.jobs) {
    job.persistent_bytes = std::max(job.persistent_bytes, kLeastBytes);
    job.ephemeral_bytes = std::max(job.ephemeral_bytes, kLeastBytes);
    const double work_ns = job.work_ns();
    plan.total_s += work_ns * 1e-9;
    const double least_ns = std::max(kLeastIterationNs, kTouchShare * work.least_ns(job.ephemeral_bytes));
    if (job.iteration_ns >= least_ns || job.iterations == 1) continue;
    job.iterations = std::max<uint64_t>(1, static_cast<uint64_t>(work_ns / least_ns));
    job.iteration_ns = work_ns / static_cast<double>(job.iterations);
    ++grouped;
  }
  if (grouped > 0)
    plan.notes.push_back(
        base::format("iterations: %zu jobs have iterations too short here to touch all their memory in a "
                     "third of them, or shorter than "
                     "%.0f ms; they run as fewer, longer ones of the same work in all.",
                     grouped, kLeastIterationNs * 1e-6));
  return plan;
}

// One policy's run.
class HostRun {
 public:
  HostRun(const HostPlan& plan, const HostWork& work, Runtime& runtime, bool addressable,
          double fill_bytes_per_ns, PolicyRun& result)
      : plan_(plan),
        work_(work),
        runtime_(runtime),
        addressable_(addressable),
        fill_bytes_per_ns_(fill_bytes_per_ns),
        result_(result) {}

  // Blocks until every job has ended, or all were cancelled because `progress` said so. `snapshot_path` may be empty.
  void run(const std::string& snapshot_path, const Progress& progress);
  bool interrupted() const { return interrupted_; }

 private:
  struct Running {
    const sim::Job* job = nullptr;
    JobOutcome outcome;
    uint64_t owner = 0;  // of the marks, and its number in use_
    Session session;
    gpushare_session handle = nullptr;  // of session, for cancelling while its thread uses it
    std::thread thread;
    std::vector<WorkBlock> model;
    std::vector<DeviceUse::Block> model_use;
    std::atomic<bool> damaged{false};
    bool gone = false;  // its session closes; under mutex_
    bool finished =
        false;  // its last iteration's work is done; under mutex_, as outcome's times are until then
  };

  double now_s() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  void open(Running& running);
  void work_through(Running& running);
  void iterate(Running& running);
  void enqueue(Running& running, Iteration& iteration, uint64_t index);
  // One turn of a job: its blocks, and where and when its work was enqueued. Shared with the functions that run in stream order.
  struct Turn {
    Running* running = nullptr;
    uint64_t index = 0;
    uint64_t lane = 0;
    uint64_t enqueued_ns = 0;
    double began_s = 0;
    std::vector<WorkBlock> blocks;
    std::vector<DeviceUse::Block> use;
  };
  void began(Turn& turn);
  void ended(Turn& turn);
  void see_use(double at_s);
  void wait_finished(Running& running);
  void stop() noexcept;
  void drive(const Progress& progress);
  void sample();
  void write_peak(const std::string& path) const;

  const HostPlan& plan_;
  const HostWork& work_;
  Runtime& runtime_;
  const bool addressable_;
  const double fill_bytes_per_ns_;
  PolicyRun& result_;
  Clock::time_point start_{};
  std::vector<std::unique_ptr<Running>> running_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::vector<std::pair<double, double>> intervals_;  // of iterations
  DeviceUse use_;
  uint64_t done_ = 0;
  uint64_t oom_ = 0;
  bool interrupted_ = false;
  // By number, for functions that run on the device's threads: running_ grows meanwhile.
  std::vector<Running*> running_of_;
};

bool is_out_of_memory(int32_t status) {
  return status == GPUSHARE_DEVICE_OUT_OF_MEMORY || status == GPUSHARE_HOST_OUT_OF_MEMORY ||
         status == GPUSHARE_QUOTA_EXCEEDED;
}

// A need of `bytes` as `parts` blocks that fit it whatever the granule.
std::vector<uint64_t> parts_of(uint64_t bytes, uint64_t parts) {
  constexpr uint64_t kGranule = 256;
  const uint64_t part = bytes / parts / kGranule * kGranule;
  return std::vector<uint64_t>(part == 0 ? 1 : parts, part == 0 ? kGranule : part);
}

// Any number that names the lane of an open iteration.
uint64_t lane_of(const Iteration& iteration) {
  void* native = nullptr;
  (void)gpushare_stream_get_native(iteration.stream().get(), &native);
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(native));
}

WorkBlock block_at(Address address, uint64_t bytes) {
  return {reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address)),
          bytes};  // NOLINT(performance-no-int-to-ptr)
}

void HostRun::open(Running& running) {
  const sim::Job& job = *running.job;
  running.outcome.name = job.name;
  running.outcome.arrival_s = now_s();
  SessionOptions session;
  session.name = job.name;
  session.cls = job.cls == sched::SessionClass::kGuaranteed ? guaranteed : opportunistic;
  session.persistent_bytes = job.declares_persistent ? job.persistent_bytes : 0;
  session.ephemeral_bytes = job.declares_ephemeral ? job.ephemeral_bytes : 0;
  session.remaining = Nanoseconds(static_cast<int64_t>(std::min(job.work_ns(), 9e18)));
  session.iterations_total = job.iterations;
  session.priority = job.priority;
  session.weight = job.weight;
  try {
    running.session = runtime_.open_session(session);
    running.handle = running.session.get();
    const base::NoSignals no_signals;
    running.thread = std::thread([this, &running] { work_through(running); });
    return;
  } catch (const Error& error) {
    running.outcome.state = error.status() == GPUSHARE_EXCEEDS_CAPACITY ? JobOutcome::State::kRefused
                                                                        : JobOutcome::State::kFailed;
    running.outcome.reason = error.what();
  } catch (const std::system_error& error) {
    running.outcome.state = JobOutcome::State::kFailed;
    running.outcome.reason = std::string("no thread for it: ") + error.what();
  }
  const std::lock_guard lock(mutex_);
  ++done_;
}

void HostRun::work_through(Running& running) {
  JobOutcome& outcome = running.outcome;
  try {
    iterate(running);
    if (running.damaged) {
      outcome.state = JobOutcome::State::kFailed;
      outcome.reason = "another job wrote into its memory: please report this";
    }
  } catch (const Error& error) {
    // Nobody but stop() cancels a session.
    const bool interrupted = error.status() == GPUSHARE_CANCELLED;
    outcome.state = interrupted ? JobOutcome::State::kInterrupted : JobOutcome::State::kFailed;
    outcome.reason = interrupted ? "interrupted" : error.what();
    const std::lock_guard lock(mutex_);
    if (is_out_of_memory(error.status())) ++oom_;
  } catch (const std::exception& error) {
    outcome.state = JobOutcome::State::kFailed;
    outcome.reason = error.what();
  }
  {
    const std::lock_guard lock(mutex_);
    running.gone = true;
    use_.model_left(running.owner);
  }
  // Waits for what it still has on the device, which refers to `running`.
  running.session = Session();
  const std::lock_guard lock(mutex_);
  ++done_;
  changed_.notify_all();
}

void HostRun::iterate(Running& running) {
  const sim::Job& job = *running.job;
  Session& session = running.session;
  (void)session.wait_admitted();
  for (const uint64_t bytes : parts_of(job.persistent_bytes, 8)) {
    const Address address = session.alloc_bytes(Kind::model, bytes);
    running.model.push_back(block_at(address, bytes));
    running.model_use.push_back({address, bytes});
  }
  for (uint64_t index = 0; index < job.iterations; ++index) {
    Iteration iteration = session.begin_iteration();
    enqueue(running, iteration, index);
    if (job.think_ns > 0) iteration.stream().synchronize();
    iteration.end();
    running.outcome.iterations = index + 1;
    if (job.think_ns > 0 && index + 1 < job.iterations)
      std::this_thread::sleep_for(std::chrono::nanoseconds(job.think_ns));
  }
  wait_finished(running);
  if (!addressable_) running.outcome.service_s = static_cast<double>(session.info().service_ns) * 1e-9;
}

void HostRun::wait_finished(Running& running) {
  std::unique_lock lock(mutex_);
  while (!running.finished) {
    if (changed_.wait_for(lock, std::chrono::milliseconds(100), [&] { return running.finished; })) return;
    lock.unlock();
    // A device that was lost runs nothing any more.
    const gpushare_session_info info = running.session.info();
    if (info.status != GPUSHARE_OK) throw Error(info.status, "the session failed on the device");
    lock.lock();
  }
}

void HostRun::enqueue(Running& running, Iteration& iteration, uint64_t index) {
  const sim::Job& job = *running.job;
  const auto turn = std::make_shared<Turn>();
  turn->running = &running;
  turn->index = index;
  for (const uint64_t bytes : parts_of(job.ephemeral_bytes, 4)) {
    const Address address = iteration.alloc_bytes(bytes);
    turn->blocks.push_back(block_at(address, bytes));
    turn->use.push_back({address, bytes});
  }
  const Stream stream = iteration.stream();
  turn->lane = lane_of(iteration);
  turn->enqueued_ns = static_cast<uint64_t>(now_s() * 1e9);
  const double target_ns = job.iteration_ns;
  const bool last = index + 1 == job.iterations;
  if (addressable_) {
    stream.launch_host([this, &running, turn, index, last, target_ns] {
      began(*turn);
      // Persistent memory: marked by the first iteration, looked through in sixteenths by the others and
      // wholly by the last.
      bool ok = true;
      if (index == 0) HostWork::mark(running.model, running.owner);
      if (index > 0 || last)
        ok = HostWork::marked(running.model, running.owner, last ? 0 : index % 16, last ? 1 : 16);
      ok = work_.run(turn->blocks, running.owner ^ (index << 20), target_ns) && ok;
      if (!ok) running.damaged = true;
      ended(*turn);
    });
    return;
  }
  // Without a kernel at hand, memory fills are the device's work: as many bytes as take the iteration's time.
  stream.launch_host([this, turn] { began(*turn); });
  const auto value = static_cast<uint8_t>(running.owner);
  if (index == 0)
    for (const DeviceUse::Block& block : running.model_use) stream.fill(block.address, value, block.bytes);
  double left = target_ns * fill_bytes_per_ns_;
  while (left > 0)
    for (const DeviceUse::Block& block : turn->use) {
      stream.fill(block.address, value, block.bytes);
      left -= static_cast<double>(block.bytes);
      if (left <= 0) break;
    }
  stream.launch_host([this, turn] { ended(*turn); });
}

// Told by the device, before the first work of an iteration.
void HostRun::began(Turn& turn) {
  Running& running = *turn.running;
  const std::lock_guard lock(mutex_);
  turn.began_s = now_s();
  if (turn.index == 0) running.outcome.start_s = turn.began_s;
  if (!running.gone)
    use_.model_arrived(running.owner, running.model_use,
                       running.job->persistent_bytes + running.job->ephemeral_bytes);
  use_.work_began(running.owner, turn.lane, turn.use, turn.enqueued_ns,
                  static_cast<uint64_t>(turn.began_s * 1e9));
  see_use(turn.began_s);
}

// Told by the device, behind the last work of an iteration.
void HostRun::ended(Turn& turn) {
  Running& running = *turn.running;
  const std::lock_guard lock(mutex_);
  const double at_s = now_s();
  use_.work_ended(turn.lane, static_cast<uint64_t>(at_s * 1e9));
  see_use(at_s);
  if (addressable_) running.outcome.service_s += at_s - turn.began_s;
  intervals_.emplace_back(turn.began_s, at_s);
  if (turn.index + 1 < running.job->iterations) return;
  running.outcome.end_s = at_s;
  running.finished = true;
  changed_.notify_all();
}

// Bytes in use at this moment; mutex_ is held. Sessions that are paged out hold nothing on the device: nobody tells
// when they went, so they are asked before a peak is believed.
void HostRun::see_use(double at_s) {
  if (use_.is_above_peak()) {
    for (const uint64_t job : use_.jobs()) {
      gpushare_session_info info{};
      info.struct_size = sizeof(info);
      const auto& running = running_of_[job - 1];
      if (running->handle != nullptr && gpushare_session_get_info(running->handle, &info) == GPUSHARE_OK &&
          info.state == GPUSHARE_SESSION_PAGED_OUT)
        use_.model_left(job);
    }
    use_.keep_peak();
  }
  result_.live_bytes.set(static_cast<uint64_t>(at_s * 1e9), static_cast<double>(use_.bytes()));
}

void HostRun::sample() {
  const gpushare_runtime_info info = runtime_.info();
  const auto now = static_cast<uint64_t>(now_s() * 1e9);
  result_.lanes_open.set(now, info.lanes);
  result_.waiting.set(now, info.sessions_queued + info.sessions_paged_out);
  const uint64_t persistent = std::min(info.persistent_bytes, info.promised_bytes);
  result_.persistent_bytes.set(now, static_cast<double>(persistent));
  result_.lane_bytes.set(now, static_cast<double>(info.promised_bytes - persistent));
}

void HostRun::stop() noexcept {
  for (auto& running : running_)
    if (running->handle != nullptr) (void)gpushare_session_cancel(running->handle);
  for (auto& running : running_)
    if (running->thread.joinable()) running->thread.join();
}

void HostRun::write_peak(const std::string& path) const {
  std::vector<std::string> names;
  for (const auto& running : running_) names.push_back(running->outcome.name);
  const base::Status written = memory::write_snapshot(
      use_.peak(runtime_.info().capacity_bytes, names),
      path.ends_with(".json") ? memory::SnapshotFormat::kJson : memory::SnapshotFormat::kPickle, path);
  if (!written.ok()) throw Error(written.code(), written.message());
}

void HostRun::drive(const Progress& progress) {
  start_ = Clock::now();
  const size_t count = plan_.jobs.size();
  for (;;) {
    while (running_.size() < count) {
      const sim::Job& job = plan_.jobs[running_.size()];
      if (static_cast<double>(job.arrival_ns) * 1e-9 > now_s()) break;
      running_.push_back(std::make_unique<Running>());
      running_.back()->job = &job;
      running_.back()->owner = running_.size();
      {
        const std::lock_guard lock(mutex_);
        running_of_.push_back(running_.back().get());
      }
      open(*running_.back());
    }
    sample();
    std::unique_lock lock(mutex_);
    if (running_.size() == count && done_ == count) break;
    const uint64_t done = done_;
    lock.unlock();
    if (!progress(result_.policy, done, count, now_s())) {
      interrupted_ = true;
      break;
    }
    lock.lock();
    if (done_ == done) changed_.wait_for(lock, kTick);
  }
}

void HostRun::run(const std::string& snapshot_path, const Progress& progress) {
  try {
    drive(progress);
    if (interrupted_) stop();
  } catch (...) {
    stop();
    throw;
  }
  for (auto& running : running_)
    if (running->thread.joinable()) running->thread.join();
  // Jobs that had not arrived when the run was interrupted.
  for (size_t index = running_.size(); index < plan_.jobs.size(); ++index) {
    running_.push_back(std::make_unique<Running>());
    running_.back()->outcome.name = plan_.jobs[index].name;
    running_.back()->outcome.state = JobOutcome::State::kInterrupted;
    running_.back()->outcome.reason = "interrupted before it arrived";
  }
  sample();
  use_.keep_peak();
  if (!snapshot_path.empty()) write_peak(snapshot_path);

  const gpushare_runtime_info info = runtime_.info();
  result_.switches = info.switches;
  result_.peak_bytes = use_.peak_bytes();
  result_.most_inside = use_.most_inside();
  result_.most_apart_bytes = use_.most_apart_bytes();
  if (use_.switch_ns() >= 0) result_.switch_s = use_.switch_ns() * 1e-9;
  if (use_.stay_ns() >= 0) result_.stay_s = use_.stay_ns() * 1e-9;
  result_.paged_bytes = info.paged_out_bytes_total + info.paged_in_bytes_total;
  result_.oom = oom_;
  double first = 0;
  double last = 0;
  for (auto& running : running_) {
    if (result_.jobs.empty()) first = running->outcome.arrival_s;
    last = std::max(last, running->outcome.end_s);
    result_.jobs.push_back(std::move(running->outcome));
  }
  result_.makespan_s = std::max(0.0, last - first);  // no job may have ended
  // For work on a real device, the device's busy time is the best figure; it is exact for one lane.
  double covered =
      addressable_ ? 0 : std::min(result_.makespan_s, static_cast<double>(info.device_busy_ns) * 1e-9);
  std::sort(intervals_.begin(), intervals_.end());
  double reached = 0;
  for (const auto& [from, to] : intervals_) {
    result_.lanes_busy.add(static_cast<uint64_t>(from * 1e9), static_cast<uint64_t>(to * 1e9));
    covered += std::max(0.0, to - std::max(from, reached));
    reached = std::max(reached, to);
  }
  result_.utilization = result_.makespan_s > 0 ? std::min(1.0, covered / result_.makespan_s) : 0;
  summarize(result_);
}

// Bytes a nanosecond that the device fills, alone.
double measure_fill(Runtime& runtime) {
  Session session = runtime.open_session(
      {.name = "calibration", .persistent_bytes = 1 << 20, .ephemeral_bytes = uint64_t{64} << 20});
  const uint64_t bytes = uint64_t{60} << 20;
  double best = 1;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto start = Clock::now();
    session
        .run([&](Iteration& iteration) {
          const Address block = iteration.alloc_bytes(bytes);
          for (int k = 0; k < 32; ++k) iteration.stream().fill(block, 0, bytes);
        })
        .get();
    const double ns = std::chrono::duration<double, std::nano>(Clock::now() - start).count();
    best = std::max(best, 32 * static_cast<double>(bytes) / ns);
  }
  return best;
}

// Simulates the jobs as they were run, for comparison: the policies with what the runtime's scheduler had. A lane keeps one
// core busy. If fifo was run, iterations take as long as they did under fifo, where each job was alone. An interrupted
// run is not simulated.
base::Status simulate_beside(const RunOptions& options, const HostPlan& plan, unsigned cores, bool pages,
                             RunResult& result) {
  sim::SimulationOptions simulation;
  simulation.capacity_bytes = result.capacity_bytes;
  simulation.max_lanes = options.lanes;
  if (!options.lane_finder.empty()) {
    GPUSHARE_ASSIGN_OR_RETURN(simulation.lane_finder, sched::lane_finder_named(options.lane_finder));
  }
  simulation.paging = pages;
  simulation.measures = true;  // nobody tells the runtime's policy either: its scheduler measures
  std::vector<sim::Job> jobs = plan.jobs;
  for (sim::Job& job : jobs) job.demand = 1.0 / cores;
  for (const PolicyRun& run : result.policies)
    if (run.policy == "fifo" && run.completed == jobs.size())
      for (size_t k = 0; k < jobs.size(); ++k)
        jobs[k].iteration_ns =
            std::max(1.0, run.jobs[k].service_s * 1e9 / static_cast<double>(jobs[k].iterations));
  for (size_t index = 0; index < result.policies.size() && !result.interrupted; ++index) {
    GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<sched::Policy> policy, options.policies[index].make());
    GPUSHARE_ASSIGN_OR_RETURN(const sim::SimulationResult outcome,
                              sim::Simulation(simulation, jobs, std::move(policy)).run());
    result.policies[index].simulated_makespan_s = static_cast<double>(outcome.makespan_ns) * 1e-9;
    result.policies[index].simulated_jct_mean_s = outcome.completion_mean_ns * 1e-9;
  }
  return {};
}

}  // namespace

base::Result<RunResult> run_measured(const RunOptions& options, const sim::JobFile& file,
                                     const Progress& progress) {
  if (file.jobs.size() > kMostJobs)
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        base::format("%zu jobs would need a thread each; give --limit %zu or less, or --device sim",
                     file.jobs.size(), kMostJobs));
  RunResult result;
  result.notes = file.notes;
  const HostWork work;
  HostPlan plan;
  std::vector<std::string> traces;
  double fill = 1;
  unsigned cores = 1;
  bool pages = false;
  const RemoveFiles cleanup(traces);
  for (size_t index = 0; index < options.policies.size(); ++index) {
    RuntimeOptions runtime_options;
    runtime_options.device = options.device;
    const PolicyChoice& choice = options.policies[index];
    if (choice.entry == nullptr) runtime_options.policy = choice.name;
    runtime_options.capacity_bytes = options.capacity_bytes;
    runtime_options.max_lanes = options.lanes;
    runtime_options.lane_finder = options.lane_finder;
    runtime_options.interference_file = options.interference_file;
    runtime_options.record_timeline = !options.timeline_path.empty();
    try {
      Runtime runtime = Runtime::open(runtime_options);
      choice.set_on(runtime);
      const gpushare_runtime_info info = runtime.info();
      const bool addressable = (info.capabilities & GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE) != 0;
      if ((info.capabilities & GPUSHARE_DEVICE_CAP_VIRTUAL_TIME) != 0)
        return base::Status(GPUSHARE_INVALID_ARGUMENT,
                            "--device: simulated devices run as plain 'sim'; set their memory by --capacity");
      pages = info.layout == GPUSHARE_LAYOUT_VIRTUAL;
      if (index == 0) {
        result.device = info.device;
        result.label = addressable ? "host" : "device";
        result.capacity_bytes = info.capacity_bytes;
        plan = plan_for(file.jobs, info.capacity_bytes, work);
        if (!addressable) fill = measure_fill(runtime);
      }
      result.policies.emplace_back();
      PolicyRun& run = result.policies.back();
      run.policy = choice.name;
      const std::string snapshot =
          options.snapshot_path.empty() ? "" : policy_path(options.snapshot_path, run.policy, index);
      HostRun host(plan, work, runtime, addressable, fill, run);
      host.run(snapshot, progress);
      result.interrupted = host.interrupted();
      for (const gpushare_interference& entry : runtime.interference())
        run.interference.push_back({entry.name, entry.beside, entry.value, entry.confidence});
      cores = addressable ? std::max(1U, std::thread::hardware_concurrency()) : 1;
      if (!options.timeline_path.empty()) {
        traces.push_back(options.timeline_path + ".part" + std::to_string(index));
        runtime.write_timeline(traces.back());
      }
      runtime.close();
      if (result.interrupted) break;
    } catch (const Error& error) {
      // An unknown device is as absent as one without a driver.
      const int32_t code = error.status() == GPUSHARE_NOT_FOUND ? GPUSHARE_UNAVAILABLE : error.status();
      return base::Status(code, base::format("device '%s': %s", options.device.c_str(), error.what()));
    }
  }
  if (!traces.empty()) {
    std::vector<std::string> names;
    for (const PolicyRun& run : result.policies) names.push_back(run.policy);
    GPUSHARE_RETURN_IF_ERROR(merge_traces(traces, names, options.timeline_path));
  }
  GPUSHARE_RETURN_IF_ERROR(simulate_beside(options, plan, cores, pages, result));

  if (result.label == "host")
    result.notes.push_back(
        base::format("real work: every iteration allocates its memory, writes each page, does arithmetic for "
                     "the time the job file gives (calibrated: "
                     "%.0f ns for %zu multiply-adds), and checks that nobody else wrote there. Durations are "
                     "wall time on %u cores; lanes that run "
                     "at once share them.",
                     work.round_ns(), size_t{16} * (HostWork::kPageBytes - 64) / sizeof(float),
                     std::thread::hardware_concurrency()));
  else
    result.notes.push_back(
        base::format("real memory, stand-in work: iterations fill memory on the device for the time the job "
                     "file gives (calibrated: "
                     "%.0f GB/s).",
                     fill));
  result.notes.insert(result.notes.end(), plan.notes.begin(), plan.notes.end());
  if (!result.interrupted)
    result.notes.push_back(base::format(
        "the same simulated: mean completion of the same jobs, sizes and arrivals on virtual time. "
        "Iterations take as long as they did on average in the fifo run, where each job was alone, if "
        "fifo was run, else as long as the file says; %s. Needs that jobs do not declare are simulated "
        "as if they had been.",
        result.label == "host" ? base::format("a lane keeps one of %u cores busy", cores).c_str()
                               : "lanes share the device in equal parts"));
  if (!options.snapshot_path.empty())
    result.notes.emplace_back(
        "--snapshot: all blocks in use at the moment when they were most: models of the jobs on the device, "
        "and the blocks of the "
        "iterations whose work ran.");
  return result;
}

}  // namespace gpushare::cli
