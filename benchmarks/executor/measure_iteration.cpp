// This program measures iterations through the C ABI, on the host device.
//
//   measure_iteration loop N        N empty iterations, for counting instructions: the counts of two N, subtracted
//   measure_iteration turns [N, 20000]   two threads that hand one lane to each other at every boundary, beside the same hand-over by a mutex and
//                                   condition variables alone, in interleaved blocks
//
// Read the ratio of `turns`: times differ between machines. SPDX-License-Identifier: Apache-2.0

#include <gpushare/gpushare.h>
#include <sys/resource.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

void require(int32_t status, const char* what) {
  if (status == GPUSHARE_OK) return;
  std::fprintf(stderr, "%s: %s\n", what, gpushare_last_error_message());
  std::exit(1);
}

class Job {
 public:
  Job(gpushare_runtime runtime, const char* name) {
    gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
    params.name = name;
    params.persistent_bytes = 4u << 20;
    params.ephemeral_bytes = 16u << 20;
    require(gpushare_session_open(runtime, &params, &session_), "session_open");
  }
  ~Job() { require(gpushare_session_close(session_), "session_close"); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  gpushare_iteration begin() {
    gpushare_iteration iteration;
    require(gpushare_iteration_begin(session_, GPUSHARE_NO_TIMEOUT, &iteration), "begin");
    return iteration;
  }

 private:
  gpushare_session session_;
};

gpushare_runtime open_runtime(uint32_t lanes) {
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  params.device = "host?total_bytes=268435456";
  params.max_lanes = lanes;
  gpushare_runtime runtime;
  require(gpushare_runtime_open(&params, &runtime), "runtime_open");
  return runtime;
}

void loop(uint64_t count) {
  const gpushare_runtime runtime = open_runtime(0);
  {
    Job job(runtime, "a");
    for (uint64_t i = 0; i < count; ++i) require(gpushare_iteration_end(job.begin()), "end");
  }
  require(gpushare_runtime_close(runtime), "runtime_close");
}

struct Turns {
  double ns = 0;        // wall time of one: the lane goes to the other thread and comes back
  double sleeps = 0;    // of all threads, in one turn (voluntary context switches)
  double switches = 0;  // of the lane, in one iteration of the measured thread; 2 if every boundary was one
};

uint64_t sleeps_so_far() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_nvcsw);
}

// A lane with two sessions, through the C ABI.
class SharedLane {
 public:
  ~SharedLane() {
    jobs_.clear();
    require(gpushare_runtime_close(runtime_), "runtime_close");
  }
  void begin(size_t self) { open_[self] = jobs_[self]->begin(); }
  void end(size_t self) { require(gpushare_iteration_end(open_[self]), "end"); }
  uint64_t switches() {
    gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
    require(gpushare_runtime_get_info(runtime_, &info), "get_info");
    return info.switches;
  }

 private:
  static std::vector<std::unique_ptr<Job>> open_jobs(gpushare_runtime runtime) {
    std::vector<std::unique_ptr<Job>> jobs;
    for (const char* name : {"a", "b"}) jobs.push_back(std::make_unique<Job>(runtime, name));
    return jobs;
  }
  gpushare_runtime runtime_ = open_runtime(1);
  std::vector<std::unique_ptr<Job>> jobs_ = open_jobs(runtime_);
  gpushare_iteration open_[2] = {};
};

// The same hand-over by a mutex and condition variables alone.
class BareLane {
 public:
  void begin(size_t self) {
    std::unique_lock<std::mutex> lock(mutex_);
    waits_[self] = true;
    if (holder_ == kNobody) grant(self);
    changed_[self].wait(lock, [&] { return holder_ == self; });
  }
  void end(size_t self) {
    const size_t other = 1 - self;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      holder_ = kNobody;
      if (!waits_[other]) return;
      grant(other);
    }
    changed_[other].notify_one();
  }
  uint64_t switches() {
    std::lock_guard<std::mutex> lock(mutex_);
    return switches_;
  }

 private:
  static constexpr size_t kNobody = 2;
  void grant(size_t to) {
    holder_ = to;
    waits_[to] = false;
    if (last_ != to) ++switches_;
    last_ = to;
  }
  std::mutex mutex_;
  std::condition_variable changed_[2];
  bool waits_[2] = {false, false};
  size_t holder_ = kNobody, last_ = kNobody;
  uint64_t switches_ = 0;
};

// Each thread ends its iteration only once the other is about to begin one, so nearly every boundary hands the lane
// over. The flag says so until the other's begin has returned, which it cannot before this thread ends its iteration.
template <class Lane>
Turns turns(uint64_t count) {
  Lane lane;
  std::atomic<bool> comes[2] = {false, false};
  std::atomic<bool> stop{false};
  const auto turn = [&](size_t self) {
    comes[self].store(true);
    lane.begin(self);
    comes[self].store(false);
    while (!comes[1 - self].load() && !stop.load()) std::this_thread::yield();
    lane.end(self);
  };
  std::thread other([&] {
    while (!stop.load()) turn(1);
  });
  for (int i = 0; i < 100; ++i) turn(0);
  const uint64_t switches_before = lane.switches(), sleeps_before = sleeps_so_far();
  const auto start = Clock::now();
  for (uint64_t i = 0; i < count; ++i) turn(0);
  const double ns = std::chrono::duration<double, std::nano>(Clock::now() - start).count();
  const double sleeps = static_cast<double>(sleeps_so_far() - sleeps_before);
  const double done = static_cast<double>(std::max<uint64_t>(lane.switches() - switches_before, 1)) / 2;
  stop = true;
  other.join();
  return {ns / done, sleeps / done, 2 * done / static_cast<double>(count)};
}

double median(std::vector<double> of) {
  std::sort(of.begin(), of.end());
  return of[of.size() / 2];
}

void print_turns(uint64_t count) {
  constexpr uint64_t kBlocks = 21;
  std::vector<Turns> all[2];
  std::vector<double> ratios;
  for (uint64_t i = 0; i < kBlocks; ++i) {
    all[0].push_back(turns<BareLane>(count / kBlocks));
    all[1].push_back(turns<SharedLane>(count / kBlocks));
    ratios.push_back(all[1].back().ns / all[0].back().ns);
  }
  for (size_t i = 0; i < 2; ++i) {
    const auto of = [&](double Turns::*member) {
      std::vector<double> values;
      for (const Turns& block : all[i]) values.push_back(block.*member);
      return median(std::move(values));
    };
    std::printf("%-22s %8.1f us a turn, %.2f sleeps a turn, %.2f switches an iteration\n",
                i == 0 ? "mutex and conditions" : "through the C ABI", of(&Turns::ns) / 1e3,
                of(&Turns::sleeps), of(&Turns::switches));
  }
  std::sort(ratios.begin(), ratios.end());
  std::printf("ratio %.2f, quartiles %.2f to %.2f\n", ratios[kBlocks / 2], ratios[kBlocks / 4],
              ratios[3 * kBlocks / 4]);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 20000;
  if (argc > 1 && std::strcmp(argv[1], "loop") == 0) {
    loop(count);
  } else if (argc > 1 && std::strcmp(argv[1], "turns") == 0) {
    print_turns(count);
  } else {
    std::fprintf(stderr, "measure_iteration loop N | turns [N]\n");
    return 2;
  }
  return 0;
}
