// SPDX-License-Identifier: Apache-2.0
#include "cli/cluster_host_run.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <gpushare/gpushare.hpp>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/no_signals.hpp"
#include "base/units.hpp"
#include "cli/host_work.hpp"

namespace gpushare::cli {
namespace {

using cluster::Action;
using SteadyClock = std::chrono::steady_clock;

constexpr size_t kMostDevices = 64;  // a runtime each
constexpr size_t kMostClusterJobs = 4096;
constexpr uint64_t kHostBytes = uint64_t{256} << 20;  // of a device
constexpr uint64_t kLeastJobBytes = uint64_t{64} << 10;
constexpr uint64_t kSlackBytes = uint64_t{8}
                                 << 20;  // of a runtime's capacity, for blocks that are rounded up
constexpr double kOpportunisticWeight = 1.0 / 16;

double weight_of(const cluster::JobInfo& info, bool opportunistic) {
  return opportunistic ? info.weight * kOpportunisticWeight : info.weight;
}
constexpr uint64_t kEvidence = 5;  // iterations, of which the first only starts the clock
constexpr double kLookS = 0.02;    // between looks at what was measured
constexpr uint64_t kMostIterations = 20'000'000;

double seconds_between(SteadyClock::time_point from, SteadyClock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

class HostCluster {
 public:
  HostCluster(const std::vector<cluster::JobInfo>& jobs, const std::vector<cluster::Device>& devices,
              cluster::Scheduler& scheduler, const ClusterHostOptions& options)
      : infos_(jobs), devices_(devices), scheduler_(scheduler), options_(options) {}
  ~HostCluster() { stop_all(); }
  HostCluster(const HostCluster&) = delete;
  HostCluster& operator=(const HostCluster&) = delete;

  base::Result<sim::ClusterResult> run(std::vector<std::string>& notes);

 private:
  // A job; what its thread and the driver share is under mutex_.
  struct Job {
    uint64_t owner = 0;             // of the marks
    double iteration_s = 0;         // alone at the first batch size, speed 1
    uint64_t persistent_bytes = 0;  // as scaled
    uint64_t ephemeral_bytes = 0;   // at the first batch size, as scaled
    std::vector<std::vector<std::byte>>
        models;  // in host memory while paused; one for each device, or for all
    std::vector<std::vector<std::byte>> parts;  // what the devices of a divided iteration exchange
    bool on = false;
    bool opportunistic = false;
    std::vector<uint32_t> devices;
    std::vector<Session> sessions;
    std::thread thread;
    double placed_s = 0;
    double attained_s = 0;
    // Under mutex_:
    double done = 0;  // iterations of the first batch size
    double batch = 0;
    bool stop = false;                          // save and leave
    bool ended = false;                         // its thread has nothing more to do
    std::string failure;                        // why it ended, if not well
    uint64_t counted = 0;                       // iterations since its neighbours changed
    double counted_from = 0, counted_done = 0;  // time and `done` after the first of these
    double last_s = 0;
    bool told = false;  // the scheduler was told of this much
  };

  double now_s() const { return seconds_between(start_, SteadyClock::now()); }
  void prepare(std::vector<std::string>& notes);
  void work(Job& job, const cluster::JobInfo& info);
  void iterate(Job& job, const cluster::JobInfo& info);
  void observe(uint32_t job, double now);
  void neighbours_changed(const std::vector<uint32_t>& devices);
  void leave(uint32_t index, double now);
  base::Status stop(const std::vector<uint32_t>& jobs);
  base::Status change_devices(double now);
  base::Status take(const Action& action, double now, size_t& left);
  base::Status place(const Action& action, double now);
  void stop_all() noexcept;

  const std::vector<cluster::JobInfo>& infos_;
  const std::vector<cluster::Device>& devices_;
  cluster::Scheduler& scheduler_;
  const ClusterHostOptions& options_;
  const HostWork work_;
  SteadyClock::time_point start_ = SteadyClock::now();
  std::vector<Runtime> runtimes_;
  std::vector<std::unique_ptr<Job>> jobs_;
  std::vector<std::vector<uint32_t>> here_;
  std::vector<uint64_t> used_bytes_;
  std::vector<double> busy_since_;
  std::vector<uint32_t> nodes_;
  std::vector<bool> up_;
  double busy_s_ = 0;
  sim::ClusterResult result_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

void HostCluster::prepare(std::vector<std::string>& notes) {
  uint64_t largest = 0;
  for (const cluster::Device& device : devices_) largest = std::max(largest, device.memory_bytes);
  const double scale =
      largest <= kHostBytes ? 1 : static_cast<double>(kHostBytes) / static_cast<double>(largest);
  const auto scaled = [&](uint64_t bytes) {
    return static_cast<uint64_t>(static_cast<double>(bytes) * scale);
  };
  if (scale < 1)
    notes.push_back(base::format(
        "memory: sizes of devices and jobs were divided by %.1f, so that a device has at most %s.", 1 / scale,
        base::format_bytes(kHostBytes).c_str()));
  for (const cluster::Device& device : devices_) {
    RuntimeOptions options;
    options.device = "host";
    options.policy = "fair";
    options.max_lanes = 1;
    options.capacity_bytes = scaled(device.memory_bytes) + kSlackBytes;
    runtimes_.push_back(Runtime::open(options));
  }
  for (size_t j = 0; j < infos_.size(); ++j) {
    auto job = std::make_unique<Job>();
    const cluster::JobInfo& info = infos_[j];
    job->owner = j + 1;
    job->iteration_s = info.work_s / static_cast<double>(std::min(info.iterations, kMostIterations));
    job->persistent_bytes = std::max(kLeastJobBytes, scaled(info.memory_bytes - info.ephemeral_bytes));
    job->ephemeral_bytes = std::max(kLeastJobBytes, scaled(info.ephemeral_bytes));
    job->batch = info.batch;
    jobs_.push_back(std::move(job));
  }
  here_.resize(devices_.size());
  used_bytes_.assign(devices_.size(), 0);
  busy_since_.assign(devices_.size(), 0);
  result_.jobs.resize(infos_.size());
  for (size_t j = 0; j < infos_.size(); ++j) {
    result_.jobs[j].arrival_s = infos_[j].arrival_s;
    result_.jobs[j].work_s = infos_[j].work_s;
  }
}

WorkBlock work_block(Address address, uint64_t bytes) {
  return {reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address)),
          bytes};  // NOLINT(performance-no-int-to-ptr)
}

// Waits for all before one's failure is thrown: the others still use what the caller has on its stack.
void end_all(const std::vector<Ticket>& tickets) {
  std::exception_ptr failure;
  for (const Ticket& ticket : tickets) {
    try {
      ticket.get();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

// The thread of a placed job: from its admission until it ends, fails or is told to stop.
void HostCluster::work(Job& job, const cluster::JobInfo& info) {
  std::string failure;
  try {
    iterate(job, info);
  } catch (const Error& error) {
    if (error.status() != GPUSHARE_CANCELLED) failure = error.what();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  const std::lock_guard lock(mutex_);
  job.failure = std::move(failure);
  job.ended = true;
  changed_.notify_all();
}

void HostCluster::iterate(Job& job, const cluster::JobInfo& info) {
  std::vector<Address> models;
  for (Session& session : job.sessions) {
    while (!session.wait_admitted(std::chrono::milliseconds(50))) {
      const std::lock_guard lock(mutex_);
      if (job.stop) return;  // what it had in host memory stays there
    }
    models.push_back(session.alloc_bytes(gpushare::Kind::model, job.persistent_bytes));
  }
  const auto model = [&](size_t d) { return work_block(models[d], job.persistent_bytes); };
  // The persistent memory of a job that begins is marked; that of a job that goes on comes back from host memory.
  for (size_t d = 0; d < job.sessions.size(); ++d) {
    job.sessions[d]
        .run([&](Iteration& iteration) {
          if (job.models.empty())
            iteration.stream().launch_host([&, block = model(d)] { HostWork::mark({&block, 1}, job.owner); });
          else
            iteration.stream().copy_to_device(models[d], job.models[d % job.models.size()].data(),
                                              job.persistent_bytes);
        })
        .get();
  }
  job.models.clear();
  const bool divides = info.divides && job.sessions.size() > 1;
  const double parts = divides ? static_cast<double>(job.sessions.size()) : 1;
  // Each device reads what its neighbour wrote one iteration before, while the neighbour writes what comes after.
  const size_t devices = divides ? job.sessions.size() : 0;
  job.parts.assign(2 * devices, std::vector<std::byte>(job.persistent_bytes));
  const auto part = [&](size_t d, uint64_t of) { return job.parts[of % 2 * devices + d % devices].data(); };
  const double demand =
      info.demands.empty() ? 1 : *std::max_element(info.demands.begin(), info.demands.end());
  const auto total = static_cast<double>(info.iterations);
  std::atomic<bool> damaged{false};
  uint64_t index = 0;
  while (true) {
    double batch = 0;
    {
      const std::lock_guard lock(mutex_);
      if (job.stop || job.done >= total) break;
      batch = job.batch;
    }
    const cluster::JobInfo now = cluster::with_batch(info, batch);
    const double grown = info.batch > 0 ? batch / info.batch : 1;
    const auto ephemeral = static_cast<uint64_t>(static_cast<double>(job.ephemeral_bytes) * grown);
    const double length_s = job.iteration_s * cluster::assumed_iteration_factor(now);
    std::vector<Ticket> tickets;
    double slowest = 1e300;
    for (size_t d = 0; d < job.sessions.size(); ++d) {
      const double speed = devices_[job.devices[d]].speed;
      slowest = std::min(slowest, speed);
      const double target_ns = length_s * demand / speed / parts * 1e9;
      tickets.push_back(job.sessions[d].run([&, d, target_ns, ephemeral, index](Iteration& iteration) {
        const WorkBlock block = work_block(iteration.alloc_bytes(ephemeral), ephemeral);
        if (divides && index > 0)
          iteration.stream().copy_to_device(models[d], part(d + 1, index - 1), job.persistent_bytes);
        iteration.stream().launch_host([&, d, block, target_ns, index] {
          const WorkBlock weights = work_block(models[d], job.persistent_bytes);
          const bool kept = HostWork::marked({&weights, 1}, job.owner, index % 16, 16);
          if (!work_.run({&block, 1}, job.owner ^ (index << 20), target_ns) || !kept) damaged = true;
        });
        if (divides) iteration.stream().copy_to_host(part(d, index), models[d], job.persistent_bytes);
      }));
    }
    end_all(tickets);
    if (damaged) throw std::runtime_error("another job wrote into its memory: please report this");
    std::this_thread::sleep_for(std::chrono::duration<double>(length_s * (1 - demand) / slowest));
    ++index;
    const std::lock_guard lock(mutex_);
    job.done = std::min(total, job.done + 1 / (cluster::iterations_factor(now)));
    job.last_s = now_s();
    if (job.counted++ == 0) {
      job.counted_from = job.last_s;
      job.counted_done = job.done;
    }
  }
  for (size_t d = 0; d < job.sessions.size(); ++d) {
    const WorkBlock block = model(d);
    if (!HostWork::marked({&block, 1}, job.owner))
      throw std::runtime_error("its model is not as it was: please report this");
    bool more = false;
    {
      const std::lock_guard lock(mutex_);
      more = job.done < total;
    }
    if (!more || (divides && d > 0)) continue;  // a divided job's devices all have the same
    job.models.emplace_back(job.persistent_bytes);
    job.sessions[d]
        .run([&](Iteration& iteration) {
          iteration.stream().copy_to_host(job.models[d].data(), models[d], job.persistent_bytes);
        })
        .get();
  }
}

void HostCluster::observe(uint32_t index, double now) {
  Job& job = *jobs_[index];
  double remaining = 0, slowdown = 0, done = 0;
  {
    const std::lock_guard lock(mutex_);
    done = job.done;
    if (job.counted > kEvidence && job.done > job.counted_done) {
      slowdown = (job.last_s - job.counted_from) / ((job.done - job.counted_done) * job.iteration_s);
      job.told = true;
    }
  }
  // The slowdown is relative to the job alone on devices of the same speed.
  double slowest = 1e300;
  for (const uint32_t d : job.devices) slowest = std::min(slowest, devices_[d].speed);
  remaining = (static_cast<double>(infos_[index].iterations) - done) * job.iteration_s;
  scheduler_.observed(index, job.attained_s + now - job.placed_s, std::max(0.0, remaining),
                      slowdown * slowest, now);
}

// The measurements so far of the jobs on these devices belong to other neighbours, so they are dropped.
void HostCluster::neighbours_changed(const std::vector<uint32_t>& devices) {
  const std::lock_guard lock(mutex_);
  for (const uint32_t d : devices)
    for (const uint32_t other : here_[d]) {
      jobs_[other]->counted = 0;
      jobs_[other]->told = false;
    }
}

// The job's thread has ended.
void HostCluster::leave(uint32_t index, double now) {
  Job& job = *jobs_[index];
  if (job.thread.joinable()) job.thread.join();
  job.sessions.clear();
  job.on = false;
  job.attained_s += now - job.placed_s;
  result_.jobs[index].running_s += now - job.placed_s;
  const cluster::JobInfo then = cluster::with_batch(infos_[index], job.batch);
  const std::vector<uint32_t> devices = std::move(job.devices);
  job.devices.clear();
  for (const uint32_t d : devices) {
    here_[d].erase(std::find(here_[d].begin(), here_[d].end(), index));
    used_bytes_[d] -= then.memory_bytes;
    if (here_[d].empty()) busy_s_ += now - busy_since_[d];
    if (options_.want_spans) result_.spans.push_back({index, d, job.placed_s, now});
  }
  neighbours_changed(devices);
}

base::Status HostCluster::place(const Action& action, double now) {
  Job& job = *jobs_[action.job];
  const cluster::JobInfo& info = infos_[action.job];
  const cluster::JobInfo then = cluster::with_batch(info, job.batch);
  const double grown = info.batch > 0 ? job.batch / info.batch : 1;
  job.devices = action.devices;
  job.opportunistic = action.opportunistic;
  job.stop = job.ended = job.told = false;
  job.counted = 0;
  job.placed_s = now;
  SessionOptions session;
  session.name = info.name;
  session.cls = info.guaranteed ? guaranteed : opportunistic;
  session.persistent_bytes = job.persistent_bytes;
  // Sizes that are tried later may need more.
  const double most = info.batch_sizes.empty()
                          ? 1
                          : *std::max_element(info.batch_sizes.begin(), info.batch_sizes.end()) / info.batch;
  session.ephemeral_bytes =
      static_cast<uint64_t>(static_cast<double>(job.ephemeral_bytes) * std::max(grown, most));
  session.iterations_total = info.iterations;
  session.weight = action.share > 0 ? action.share : weight_of(info, action.opportunistic);
  for (const uint32_t d : action.devices) job.sessions.push_back(runtimes_[d].open_session(session));
  for (const uint32_t d : action.devices) {
    if (here_[d].empty()) busy_since_[d] = now;
    here_[d].push_back(action.job);
    used_bytes_[d] += then.memory_bytes;
  }
  neighbours_changed(action.devices);
  job.on = true;
  if (result_.jobs[action.job].start_s < 0) result_.jobs[action.job].start_s = now;
  const base::NoSignals no_signals;
  job.thread = std::thread([this, &job, &info] { work(job, info); });
  return {};
}

base::Status HostCluster::take(const Action& action, double now, size_t& left) {
  const auto wrong = [&](const char* what) {
    return base::Status(
        GPUSHARE_INTERNAL,
        base::format("the scheduler's action on job %u ('%s') is wrong: %s", action.job,
                     action.job < infos_.size() ? infos_[action.job].name.c_str() : "", what));
  };
  if (action.job >= infos_.size() || result_.jobs[action.job].end_s >= 0)
    return wrong("there is no such job");
  Job& job = *jobs_[action.job];
  switch (action.kind) {
    case Action::Kind::kPause:
      break;  // run() has waited for it
    case Action::Kind::kReject:
      if (job.on) return wrong("it runs");
      result_.jobs[action.job].reason = action.reason.empty() ? "rejected" : action.reason;
      ++result_.rejected;
      --left;
      break;
    case Action::Kind::kResize:
      if (!job.on) return wrong("it does not run");
      job.opportunistic = action.opportunistic;
      for (Session& session : job.sessions)
        session.set_weight(weight_of(infos_[action.job], action.opportunistic));
      neighbours_changed(job.devices);
      break;
    case Action::Kind::kReconfigure: {
      const auto& sizes = infos_[action.job].batch_sizes;
      if (!job.on) return wrong("it does not run");
      if (std::find(sizes.begin(), sizes.end(), action.batch) == sizes.end())
        return wrong("the batch size is none of its own");
      const uint64_t before = cluster::with_batch(infos_[action.job], job.batch).memory_bytes;
      const uint64_t after = cluster::with_batch(infos_[action.job], action.batch).memory_bytes;
      for (const uint32_t d : job.devices) used_bytes_[d] += after - before;
      {
        const std::lock_guard lock(mutex_);
        job.batch = action.batch;
      }
      ++result_.reconfigured;
      neighbours_changed(job.devices);
      break;
    }
    case Action::Kind::kPlace: {
      if (job.on) return wrong("it runs already");
      if (infos_[action.job].divides ? action.devices.empty()
                                     : action.devices.size() != infos_[action.job].gang)
        return wrong("the devices are not as many as its gang");
      const uint64_t bytes = cluster::with_batch(infos_[action.job], job.batch).memory_bytes;
      for (size_t i = 0; i < action.devices.size(); ++i) {
        const uint32_t d = action.devices[i];
        if (d >= devices_.size() || std::count(action.devices.begin(), action.devices.end(), d) > 1)
          return wrong("a device is none, or there twice");
        if (!up_[d]) return wrong("a device is not up");
        if (used_bytes_[d] + bytes > devices_[d].memory_bytes) {
          ++result_.oom;
          return wrong("a device has not that much memory left");
        }
      }
      return place(action, now);
    }
  }
  return {};
}

void HostCluster::stop_all() noexcept {
  for (auto& job : jobs_) {
    if (!job->thread.joinable()) continue;
    for (Session& session : job->sessions) (void)gpushare_session_cancel(session.get());
    {
      const std::lock_guard lock(mutex_);
      job->stop = true;
    }
    job->thread.join();
    job->sessions.clear();
  }
}

// The jobs save their models, all at the same time, and leave their devices.
base::Status HostCluster::stop(const std::vector<uint32_t>& jobs) {
  {
    const std::lock_guard lock(mutex_);
    for (const uint32_t j : jobs) jobs_[j]->stop = true;
  }
  for (const uint32_t j : jobs) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return jobs_[j]->ended; });
    }
    leave(j, now_s());
    if (!jobs_[j]->failure.empty())
      return {GPUSHARE_INTERNAL, "job '" + infos_[j].name + "': " + jobs_[j]->failure};
    ++result_.jobs[j].pauses;
  }
  return {};
}

// Devices that go down or come back by now. Their jobs wait again; they keep their models, as if written to a disk until
// the last iteration.
base::Status HostCluster::change_devices(double now) {
  for (uint32_t d = 0; d < devices_.size(); ++d) {
    const bool up = cluster::is_up(devices_[d], now);
    if (up == up_[d]) continue;
    up_[d] = up;
    if (!up) GPUSHARE_RETURN_IF_ERROR(stop(std::vector<uint32_t>(here_[d])));
    scheduler_.device_changed(d, {devices_[d].memory_bytes, devices_[d].speed, nodes_[d]}, up, now);
  }
  return {};
}

base::Result<sim::ClusterResult> HostCluster::run(std::vector<std::string>& notes) {
  prepare(notes);
  start_ = SteadyClock::now();
  nodes_ = cluster::number_nodes(devices_);
  up_.assign(devices_.size(), true);
  for (uint32_t d = 0; d < devices_.size(); ++d)
    scheduler_.device_changed(d, {devices_[d].memory_bytes, devices_[d].speed, nodes_[d]}, true, 0);
  const std::vector<cluster::DeviceChange> changes = cluster::device_changes(devices_);
  size_t next_change = 0;
  size_t next_arrival = 0, left = infos_.size();
  double tick_at = 0;
  std::vector<Action> actions;
  while (left > 0) {
    // Until something has happened: a job ended, one arrives, the scheduler wants to be asked, something was measured.
    double now = now_s();
    const auto changes_now = [&] { return next_change < changes.size() && changes[next_change].at_s <= now; };
    bool happened = now >= tick_at || changes_now();
    std::vector<uint32_t> ended;
    bool any_on = false;
    {
      std::unique_lock lock(mutex_);
      for (uint32_t j = 0; j < jobs_.size(); ++j) {
        if (!jobs_[j]->on) continue;
        any_on = true;
        if (jobs_[j]->ended) ended.push_back(j);
        happened = happened || (jobs_[j]->counted > kEvidence && !jobs_[j]->told);
      }
      const bool arrives = next_arrival < infos_.size() && infos_[next_arrival].arrival_s <= now;
      if (!happened && ended.empty() && !arrives) {
        if (!any_on && next_arrival == infos_.size() && tick_at == cluster::kNever &&
            next_change == changes.size())
          break;  // it leaves the rest waiting
        changed_.wait_for(lock, std::chrono::duration<double>(kLookS));
        lock.unlock();
        if (options_.progress && !options_.progress(now, infos_.size() - left, infos_.size()))
          return base::Status(GPUSHARE_CANCELLED, "the run was cancelled");
        continue;
      }
    }
    now = now_s();
    // Jobs that ran beside each other are observed before one of them leaves.
    for (uint32_t j = 0; j < jobs_.size(); ++j)
      if (jobs_[j]->on) observe(j, now);
    for (const uint32_t j : ended) {
      const std::string failure = jobs_[j]->failure;
      leave(j, now);
      if (!failure.empty())
        return base::Status(GPUSHARE_INTERNAL, "job '" + infos_[j].name + "': " + failure);
      result_.jobs[j].end_s = now;
      scheduler_.finished(j, now);
      --left;
    }
    if (changes_now()) GPUSHARE_RETURN_IF_ERROR(change_devices(now));
    while (changes_now()) ++next_change;
    for (; next_arrival < infos_.size() && infos_[next_arrival].arrival_s <= now; ++next_arrival) {
      cluster::JobInfo told = infos_[next_arrival];
      if (!options_.tell_demands) told.demands = {sim::InterferenceModel::kDefaultDemand};
      scheduler_.arrived(static_cast<uint32_t>(next_arrival), told, now);
    }
    actions.clear();
    const auto begin = SteadyClock::now();
    tick_at = scheduler_.tick(now, actions);
    result_.decision_ms_p99 =
        std::max(result_.decision_ms_p99, seconds_between(begin, SteadyClock::now()) * 1e3);
    ++result_.decisions;
    if (!(tick_at > now)) tick_at = now + kLookS;
    std::vector<uint32_t> pausing;
    for (const Action& action : actions) {
      if (action.kind != Action::Kind::kPause) continue;
      if (action.job >= jobs_.size() || !jobs_[action.job]->on) {
        return base::Status(
            GPUSHARE_INTERNAL,
            base::format("the scheduler's action on job %u is wrong: it does not run", action.job));
      }
      pausing.push_back(action.job);
    }
    GPUSHARE_RETURN_IF_ERROR(stop(pausing));
    for (const Action& action : actions) GPUSHARE_RETURN_IF_ERROR(take(action, now_s(), left));
  }
  for (sim::ClusterJobResult& job : result_.jobs)
    if (job.end_s < 0 && job.reason.empty()) job.reason = "the scheduler never placed it to its end";
  sim::summarize(infos_, devices_.size(), busy_s_, result_);
  result_.predictions = scheduler_.predictions();
  return std::move(result_);
}

}  // namespace

base::Result<sim::ClusterResult> run_cluster_on_host(const std::vector<cluster::JobInfo>& jobs,
                                                     const std::vector<cluster::Device>& devices,
                                                     cluster::Scheduler& scheduler,
                                                     const ClusterHostOptions& options,
                                                     std::vector<std::string>& notes) {
  if (devices.size() > kMostDevices || jobs.size() > kMostClusterJobs)
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        base::format("%zu devices and %zu jobs: on host at most %zu devices, a runtime each, and %zu jobs, "
                     "a thread each",
                     devices.size(), jobs.size(), kMostDevices, kMostClusterJobs));
  try {
    return HostCluster(jobs, devices, scheduler, options).run(notes);
  } catch (const Error& error) {
    return base::Status(error.status(), error.what());
  } catch (const std::system_error& error) {
    return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY, std::string("no thread for a job: ") + error.what());
  }
}

}  // namespace gpushare::cli
