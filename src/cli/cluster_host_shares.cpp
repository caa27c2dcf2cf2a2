// SPDX-License-Identifier: Apache-2.0
#include "cli/cluster_host_shares.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <gpushare/gpushare.hpp>
#include <mutex>
#include <random>
#include <system_error>
#include <thread>

#include "base/no_signals.hpp"
#include "base/units.hpp"
#include "cli/host_work.hpp"

namespace gpushare::cli {
namespace {

using cluster::shares::Observed;
using ShareClock = std::chrono::steady_clock;

constexpr size_t kMostShareJobs = 1024;  // a thread each
constexpr double kMostRequestsPerS = 10'000;
constexpr uint64_t kShareBytes = uint64_t{256} << 10;  // of an iteration
// A session that always has work gets its weight. Its thread may wait for a core for so long, and has so much submitted.
constexpr double kAheadMs = 100;
constexpr double kMostAhead = 256;
constexpr double kLeastWeight = 0.01;  // of a job without units
constexpr auto kAskEvery = std::chrono::milliseconds(50);

class HostShares final : public cluster::shares::RealJobs {
 public:
  HostShares(const cluster::shares::RoundsProblem& problem, std::function<bool()> go_on)
      : round_s_(problem.round_s), go_on_(std::move(go_on)) {
    RuntimeOptions options;
    options.device = "host";
    options.policy = "fair";
    options.max_lanes = 1;
    runtime_ = Runtime::open(options);
    for (size_t j = 0; j < problem.jobs.size(); ++j) {
      auto job = std::make_unique<Job>();
      job->work = *problem.jobs[j].work;
      job->slo = problem.jobs[j].job.slo;
      job->load = problem.jobs[j].job.load;
      job->owner = j + 1;
      job->random.seed(problem.seed * 1'000'003 + j);
      SessionOptions session;
      session.name = problem.jobs[j].job.name;
      session.ephemeral_bytes = kShareBytes;
      job->session = runtime_.open_session(session);
      jobs_.push_back(std::move(job));
    }
  }
  ~HostShares() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (auto& job : jobs_) (void)gpushare_session_cancel(job->session.get());
    for (auto& job : jobs_)
      if (job->thread.joinable()) job->thread.join();
  }
  HostShares(const HostShares&) = delete;
  HostShares& operator=(const HostShares&) = delete;

  void start() {
    const base::NoSignals no_signals;
    for (auto& job : jobs_) job->thread = std::thread([this, &job = *job] { work(job); });
  }

  base::Result<std::vector<Observed>> round(const std::vector<int64_t>& units,
                                            const std::vector<double>& loads) override {
    for (size_t j = 0; j < jobs_.size(); ++j) {
      if (jobs_[j]->work.deadline_ms > 0 && loads[j] > kMostRequestsPerS)
        return base::Status(GPUSHARE_INVALID_ARGUMENT,
                            base::format("jobs[%zu]: a load of %g requests a second is more than the %g that "
                                         "come on host",
                                         j, loads[j], kMostRequestsPerS));
      jobs_[j]->session.set_weight(std::max(double(units[j]), kLeastWeight));
    }
    std::unique_lock lock(mutex_);
    for (size_t j = 0; j < jobs_.size(); ++j) {
      jobs_[j]->load = loads[j];
      jobs_[j]->ended = jobs_[j]->in_time = 0;
    }
    const auto begin = ShareClock::now();
    const auto end =
        begin + std::chrono::duration_cast<ShareClock::duration>(std::chrono::duration<double>(round_s_));
    while (ShareClock::now() < end) {
      changed_.wait_until(lock, std::min(end, ShareClock::now() + kAskEvery));
      if (!failure_.empty()) return base::Status(GPUSHARE_INTERNAL, failure_);
      lock.unlock();
      const bool go_on = !go_on_ || go_on_();
      lock.lock();
      if (!go_on) return base::Status(GPUSHARE_CANCELLED, "the run was cancelled");
    }
    const double length_s = std::chrono::duration<double>(ShareClock::now() - begin).count();
    std::vector<Observed> seen;
    for (size_t j = 0; j < jobs_.size(); ++j)
      seen.push_back({units[j], loads[j], performance(*jobs_[j], length_s) / jobs_[j]->slo});
    return seen;
  }

 private:
  struct Job {
    cluster::shares::Work work;
    double slo = 1;
    uint64_t owner = 0;  // of the marks
    Session session;
    std::thread thread;
    std::mt19937_64 random;  // of the thread alone
    // Under mutex_:
    double load = 1;
    uint64_t ended = 0;  // iterations or requests in this round, those that were dropped included
    uint64_t in_time = 0;
    ShareClock::time_point due = ShareClock::time_point::max();  // of the oldest request that has not ended
  };
  struct Running {
    ShareClock::time_point until;
    Ticket ticket;
  };

  // Of the round that ends. Under mutex_.
  static double performance(const Job& job, double length_s) {
    if (job.work.deadline_ms <= 0) return double(job.ended) / length_s;
    if (job.ended > 0) return double(job.in_time) / double(job.ended);
    return ShareClock::now() > job.due ? 0 : 1;  // none ended: the oldest is late, or not yet, or none came
  }

  void work(Job& job) {
    std::string failure;
    try {
      iterate(job);
    } catch (const Error& error) {
      if (error.status() != GPUSHARE_CANCELLED) failure = error.what();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    const std::lock_guard lock(mutex_);
    if (failure_.empty() && !failure.empty()) failure_ = std::move(failure);
    changed_.notify_all();
  }

  // A request whose deadline has passed when its turn comes is dropped: its iteration does nothing.
  // What has ended is counted on the device, because the job's thread may come late to its ticket.
  Running submit(Job& job, ShareClock::time_point until) {
    Running running{until, {}};
    running.ticket = job.session.run([this, &job, until](Iteration& iteration) {
      const Address address = iteration.alloc_bytes(kShareBytes);
      iteration.stream().launch_host([this, &job, until, address] {
        const WorkBlock block{reinterpret_cast<std::byte*>(
                                  static_cast<uintptr_t>(address)),  // NOLINT(performance-no-int-to-ptr)
                              kShareBytes};
        if (ShareClock::now() < until && !work_.run({&block, 1}, job.owner, job.work.iteration_ms * 1e6))
          damaged_ = true;
        ended(job, ShareClock::now() <= until);
      });
    });
    return running;
  }

  // The time from a request to the next one.
  ShareClock::duration gap(Job& job) {
    double load = 0;
    {
      const std::lock_guard lock(mutex_);
      load = job.load;
    }
    const double gap_s = std::exponential_distribution<double>(load)(job.random);
    return std::chrono::duration_cast<ShareClock::duration>(
        std::chrono::duration<double>(std::min(gap_s, 3600.0)));
  }

  void ended(Job& job, bool in_time) {
    const std::lock_guard lock(mutex_);
    ++job.ended;
    if (in_time) ++job.in_time;
  }

  void iterate(Job& job) {
    const bool requests = job.work.deadline_ms > 0;
    const auto deadline = std::chrono::duration_cast<ShareClock::duration>(
        std::chrono::duration<double, std::milli>(job.work.deadline_ms));
    const auto ahead = static_cast<size_t>(std::clamp(kAheadMs / job.work.iteration_ms, 2.0, kMostAhead));
    std::deque<Running> running;
    auto next = ShareClock::now();
    if (requests) next += gap(job);
    while (true) {
      {
        std::unique_lock lock(mutex_);
        if (running.empty() && requests) changed_.wait_until(lock, next, [this] { return stop_; });
        if (stop_) return;
      }
      const auto now = ShareClock::now();
      while (running.size() < ahead && (!requests || next <= now)) {
        running.push_back(submit(job, requests ? next + deadline : ShareClock::time_point::max()));
        if (requests) next += gap(job);
        const std::lock_guard lock(mutex_);
        job.due = running.front().until;
      }
      if (running.empty()) continue;
      running.front().ticket.get();
      if (damaged_) throw std::runtime_error("another job wrote into its memory: please report this");
      running.pop_front();
      const std::lock_guard lock(mutex_);
      job.due = running.empty() ? ShareClock::time_point::max() : running.front().until;
    }
  }

  const double round_s_;
  const std::function<bool()> go_on_;
  const HostWork work_;
  Runtime runtime_;
  std::vector<std::unique_ptr<Job>> jobs_;
  std::atomic<bool> damaged_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::string failure_;
};

}  // namespace

base::Result<std::unique_ptr<cluster::shares::RealJobs>> make_host_shares(
    const cluster::shares::RoundsProblem& problem, std::function<bool()> go_on) {
  if (problem.jobs.size() > kMostShareJobs)
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        base::format("%zu jobs: on host at most %zu, a thread each", problem.jobs.size(), kMostShareJobs));
  try {
    auto jobs = std::make_unique<HostShares>(problem, std::move(go_on));
    jobs->start();
    return std::unique_ptr<cluster::shares::RealJobs>(std::move(jobs));
  } catch (const Error& error) {
    return base::Status(error.status(), error.what());
  } catch (const std::system_error& error) {
    return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY, std::string("no thread for a job: ") + error.what());
  }
}

}  // namespace gpushare::cli
