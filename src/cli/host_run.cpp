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

#include "base/units.hpp"
#include "cli/host_work.hpp"
#include "cli/run_options.hpp"
#include "cli/trace_merge.hpp"

namespace gpushare::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Shorter iterations are mostly overhead, of the runtime or of touching their memory: they run as fewer,
// longer ones.
constexpr double kLeastIterationNs = 2e6;
constexpr double kTouchShare = 3;
// What job files that exceed the device are scaled from: the device that the public traces were taken on.
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

  // Blocks until every job has ended. `snapshot_path` may be empty.
  void run(const std::string& snapshot_path, const Progress& progress);

 private:
  struct Running {
    const sim::Job* job = nullptr;
    JobOutcome outcome;
    uint64_t owner = 0;  // of the marks
    Session session;
    gpushare_session handle = nullptr;  // of session, for cancelling while its thread uses it
    std::thread thread;
    std::vector<WorkBlock> model;
    std::atomic<bool> damaged{false};
    bool finished =
        false;  // its last iteration's work is done; under mutex_, as outcome's times are until then
  };

  double now_s() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  void open(Running& running);
  void work_through(Running& running);
  void iterate(Running& running);
  void enqueue(Running& running, Iteration& iteration, uint64_t index);
  void began(Running& running, double at_s);
  void ended(Running& running, double at_s);
  void ran(Running& running, double from_s, double to_s);
  void wait_finished(Running& running);
  void stop() noexcept;
  void drive(const std::string& snapshot_path, const Progress& progress);
  void sample(const std::string& snapshot_path);

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
  uint64_t done_ = 0;
  uint64_t oom_ = 0;
  // Of the sampling thread.
  uint64_t peak_promised_ = 0;
  double snapshot_s_ = -1;
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
  session.persistent_bytes = job.persistent_bytes;
  session.ephemeral_bytes = job.ephemeral_bytes;
  session.remaining = Nanoseconds(static_cast<int64_t>(std::min(job.work_ns(), 9e18)));
  session.iterations_total = job.iterations;
  session.priority = job.priority;
  session.weight = job.weight;
  try {
    running.session = runtime_.open_session(session);
    running.handle = running.session.get();
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
    outcome.state = JobOutcome::State::kFailed;
    outcome.reason = error.what();
    const std::lock_guard lock(mutex_);
    if (is_out_of_memory(error.status())) ++oom_;
  } catch (const std::exception& error) {
    outcome.state = JobOutcome::State::kFailed;
    outcome.reason = error.what();
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
  for (const uint64_t bytes : parts_of(job.persistent_bytes, 8))
    running.model.push_back(block_at(session.alloc_bytes(Kind::model, bytes), bytes));
  for (uint64_t index = 0; index < job.iterations; ++index) {
    Iteration iteration = session.begin_iteration();
    enqueue(running, iteration, index);
    iteration.end();
    running.outcome.iterations = index + 1;
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
  std::vector<WorkBlock> blocks;
  for (const uint64_t bytes : parts_of(job.ephemeral_bytes, 4))
    blocks.push_back(block_at(iteration.alloc_bytes(bytes), bytes));
  const Stream stream = iteration.stream();
  const double target_ns = job.iteration_ns;
  const bool last = index + 1 == job.iterations;
  if (addressable_) {
    stream.launch_host([this, &running, blocks = std::move(blocks), index, last, target_ns] {
      const double from = now_s();
      if (index == 0) began(running, from);
      // Persistent memory: marked by the first iteration, looked through in sixteenths by the others and
      // wholly by the last.
      bool ok = true;
      if (index == 0) HostWork::mark(running.model, running.owner);
      if (index > 0 || last)
        ok = HostWork::marked(running.model, running.owner, last ? 0 : index % 16, last ? 1 : 16);
      ok = work_.run(blocks, running.owner ^ (index << 20), target_ns) && ok;
      if (!ok) running.damaged = true;
      const double to = now_s();
      ran(running, from, to);
      if (last) ended(running, to);
    });
    return;
  }
  // Without a kernel at hand, memory fills are the device's work: as many bytes as take the iteration's time.
  const auto address = [](const WorkBlock& block) {
    return static_cast<Address>(reinterpret_cast<uintptr_t>(block.data));
  };
  const auto value = static_cast<uint8_t>(running.owner);
  if (index == 0) {
    stream.launch_host([this, &running] { began(running, now_s()); });
    for (const WorkBlock& block : running.model) stream.fill(address(block), value, block.bytes);
  }
  double left = target_ns * fill_bytes_per_ns_;
  while (left > 0)
    for (const WorkBlock& block : blocks) {
      stream.fill(address(block), value, block.bytes);
      left -= static_cast<double>(block.bytes);
      if (left <= 0) break;
    }
  if (last) stream.launch_host([this, &running] { ended(running, now_s()); });
}

void HostRun::began(Running& running, double at_s) {
  const std::lock_guard lock(mutex_);
  running.outcome.start_s = at_s;
}

void HostRun::ended(Running& running, double at_s) {
  const std::lock_guard lock(mutex_);
  running.outcome.end_s = at_s;
  running.finished = true;
  changed_.notify_all();
}

void HostRun::ran(Running& running, double from_s, double to_s) {
  const std::lock_guard lock(mutex_);
  running.outcome.service_s += to_s - from_s;
  intervals_.emplace_back(from_s, to_s);
}

void HostRun::sample(const std::string& snapshot_path) {
  const gpushare_runtime_info info = runtime_.info();
  const double at = now_s();
  const auto now = static_cast<uint64_t>(at * 1e9);
  result_.lanes_open.set(now, info.lanes);
  result_.waiting.set(now, info.sessions_queued + info.sessions_paged_out);
  const uint64_t persistent = std::min(info.persistent_bytes, info.promised_bytes);
  result_.persistent_bytes.set(now, static_cast<double>(persistent));
  result_.lane_bytes.set(now, static_cast<double>(info.promised_bytes - persistent));
  result_.live_bytes.set(now, static_cast<double>(info.persistent_bytes + info.ephemeral_bytes));
  // A snapshot takes a while: not more often than a few times a second.
  if (!snapshot_path.empty() && info.promised_bytes > peak_promised_ && at - snapshot_s_ > 0.3) {
    peak_promised_ = info.promised_bytes;
    snapshot_s_ = at;
    runtime_.write_snapshot(snapshot_path, snapshot_path.ends_with(".json")
                                               ? uint32_t{GPUSHARE_SNAPSHOT_JSON}
                                               : uint32_t{GPUSHARE_SNAPSHOT_PICKLE});
  }
}

void HostRun::stop() noexcept {
  for (auto& running : running_)
    if (running->handle != nullptr) (void)gpushare_session_cancel(running->handle);
  for (auto& running : running_)
    if (running->thread.joinable()) running->thread.join();
}

void HostRun::drive(const std::string& snapshot_path, const Progress& progress) {
  start_ = Clock::now();
  const size_t count = plan_.jobs.size();
  for (;;) {
    while (running_.size() < count) {
      const sim::Job& job = plan_.jobs[running_.size()];
      if (static_cast<double>(job.arrival_ns) * 1e-9 > now_s()) break;
      running_.push_back(std::make_unique<Running>());
      running_.back()->job = &job;
      running_.back()->owner = running_.size();
      open(*running_.back());
    }
    sample(snapshot_path);
    std::unique_lock lock(mutex_);
    progress(result_.policy, done_, count, now_s());
    if (running_.size() == count && done_ == count) break;
    changed_.wait_for(lock, kTick);
  }
}

void HostRun::run(const std::string& snapshot_path, const Progress& progress) {
  try {
    drive(snapshot_path, progress);
  } catch (...) {
    stop();
    throw;
  }
  for (auto& running : running_)
    if (running->thread.joinable()) running->thread.join();
  sample({});

  const gpushare_runtime_info info = runtime_.info();
  result_.switches = info.switches;
  result_.peak_bytes = info.peak_bytes;
  result_.paged_bytes = info.paged_out_bytes_total + info.paged_in_bytes_total;
  result_.oom = oom_;
  double first = 0;
  double last = 0;
  for (auto& running : running_) {
    if (result_.jobs.empty()) first = running->outcome.arrival_s;
    last = std::max(last, running->outcome.end_s);
    result_.jobs.push_back(std::move(running->outcome));
  }
  result_.makespan_s = last - first;
  // Where the work is the device's own, its busy time is the best there is, exact for one lane.
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
  const RemoveFiles cleanup(traces);
  for (size_t index = 0; index < options.policies.size(); ++index) {
    RuntimeOptions runtime_options;
    runtime_options.device = options.device;
    runtime_options.policy = options.policies[index];
    runtime_options.capacity_bytes = options.capacity_bytes;
    runtime_options.max_lanes = options.lanes;
    runtime_options.record_timeline = !options.timeline_path.empty();
    try {
      Runtime runtime = Runtime::open(runtime_options);
      const gpushare_runtime_info info = runtime.info();
      const bool addressable = (info.capabilities & GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE) != 0;
      if ((info.capabilities & GPUSHARE_DEVICE_CAP_VIRTUAL_TIME) != 0)
        return base::Status(GPUSHARE_INVALID_ARGUMENT,
                            "--device: simulated devices run as plain 'sim'; set their memory by --capacity");
      if (index == 0) {
        result.device = info.device;
        result.label = addressable ? "host" : "device";
        result.capacity_bytes = info.capacity_bytes;
        plan = plan_for(file.jobs, info.capacity_bytes, work);
        if (!addressable) fill = measure_fill(runtime);
      }
      result.policies.emplace_back();
      PolicyRun& run = result.policies.back();
      run.policy = options.policies[index];
      const std::string snapshot =
          options.snapshot_path.empty() ? "" : policy_path(options.snapshot_path, run.policy, index);
      HostRun(plan, work, runtime, addressable, fill, run).run(snapshot, progress);
      if (!options.timeline_path.empty()) {
        traces.push_back(options.timeline_path + ".part" + std::to_string(index));
        runtime.write_timeline(traces.back());
      }
      runtime.close();
    } catch (const Error& error) {
      // An unknown device is as absent as one without a driver.
      const int32_t code = error.status() == GPUSHARE_NOT_FOUND ? GPUSHARE_UNAVAILABLE : error.status();
      return base::Status(code, base::format("device '%s': %s", options.device.c_str(), error.what()));
    }
  }
  if (!traces.empty())
    GPUSHARE_RETURN_IF_ERROR(merge_traces(traces, options.policies, options.timeline_path));

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
  if (!options.snapshot_path.empty())
    result.notes.push_back(
        base::format("--snapshot: the most promised memory that was seen, looking every %d ms and writing "
                     "every 0.3 s at most.",
                     static_cast<int>(kTick.count())));
  return result;
}

}  // namespace gpushare::cli
