// This program measures what an opportunistic session costs a guaranteed one on the host device, through a gate and without one.
//
//   measure_gate [seconds for each case, 20] [memory|compute|bursty ...: guaranteed jobs, all]
//   measure_gate shared [seconds] [kinds]   the same under a daemon (`gpushare daemon --lanes 2 --policy pack` for the host device,
//                                           GPUSHARE_SOCKET): each session in a runtime of its own, as in two processes
//   measure_gate [shared] entries N open|closed   N calls of an open or of a closed gate, for counting instructions
//
// Blocks of iterations alone, with the opportunistic session, and alone again follow each other. The excess of a block
// is its time over the mean of the two beside it; the same between two blocks alone is the machine's own spread. Where
// that spread exceeds the bar of 3% nothing is decided. Work runs on the device's threads and touches 64 MiB a job,
// more than the caches hold. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <gpushare/gate.hpp>
#include <gpushare/gpushare.hpp>
#include <string>
#include <thread>
#include <vector>

namespace gs = gpushare;
namespace {

using Clock = std::chrono::steady_clock;
using Ns = std::chrono::nanoseconds;
constexpr double kBar = 0.03;
constexpr size_t kWords = size_t{64} << 17;  // 64 MiB of 8 bytes

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

enum class Kind { memory, compute, bursty };
const char* name_of(Kind kind) {
  return kind == Kind::memory ? "memory-bound" : kind == Kind::compute ? "compute-bound" : "bursty";
}

// One job's kernels: some 200 us each.
struct Job {
  explicit Job(Kind the_kind) : kind(the_kind), data(kWords, 1) {}
  void kernel() {
    const auto memory = [this] {
      constexpr size_t kSlice = kWords / 256;  // 256 KiB
      for (int s = 0; s < 4; ++s) {
        uint64_t* at = data.data() + (next++ % 256) * kSlice;
        for (size_t i = 0; i < kSlice; ++i) at[i] = at[i] * 3 + 1;
      }
    };
    const auto compute = [this] {
      double x = sum;
      for (int i = 0; i < 100'000; ++i) x = x * 0.999999 + 1e-3;
      sum = x;
    };
    if (kind == Kind::memory || (kind == Kind::bursty && (next / 16) % 2 == 0))
      memory();
    else
      compute(), ++next;
  }
  const Kind kind;
  std::vector<uint64_t> data;
  size_t next = 0;
  double sum = 1;
};

void launch(const gs::Stream& stream, Job& job) {
  stream.launch_host([&job] { job.kernel(); });
}

// How long a kernel takes on this machine now, alone.
Ns kernel_time(Job& job) {
  std::vector<double> times;
  for (int i = 0; i < 64; ++i) {
    const auto start = Clock::now();
    job.kernel();
    times.push_back(seconds_since(start));
  }
  std::nth_element(times.begin(), times.begin() + 32, times.end());
  return Ns(static_cast<int64_t>(times[32] * 1e9));
}

// The opportunistic session's thread: launches while `on`, through the gate if `gated`.
class Opponent {
 public:
  Opponent(gs::Runtime& runtime, Kind kind) : job_(kind), kernel_(kernel_time(job_)) {
    gs::SessionOptions need;
    need.name = "opportunistic";
    need.cls = gs::opportunistic;
    need.persistent_bytes = need.ephemeral_bytes = 1 << 20;
    session_ = runtime.open_session(need);
    thread_ = std::thread([this] { run(); });
  }
  ~Opponent() {
    stop = true;
    on = true;
    thread_.join();
  }
  Opponent(const Opponent&) = delete;
  Opponent& operator=(const Opponent&) = delete;
  std::atomic<bool> on{false}, gated{true}, stop{false};
  std::atomic<uint64_t> kernels{0};
  double alone_kernels_per_s() const { return 1e9 / static_cast<double>(kernel_.count()); }
  gpushare_gate_info info() const { return gate_->info(); }

 private:
  void run() {
    gate_ = std::make_unique<gs::Gate>(session_);
    ready = true;
    while (!stop) {
      if (!on) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        continue;
      }
      gs::Iteration iteration = session_.begin_iteration();
      const gs::Stream stream = iteration.stream();
      for (int i = 0; i < 16 && on && !stop; ++i) {
        if (gated)
          while (on && !stop && !gate_->try_enter(&stream, kernel_, std::chrono::milliseconds(20))) {
          }
        if (!on) break;
        launch(stream, job_);
        if (!gated && i % 4 == 3) stream.synchronize();
        ++kernels;
      }
      stream.synchronize();
      iteration.end();
    }
    session_.close();
  }
  Job job_;
  const Ns kernel_;
  gs::Session session_;
  std::unique_ptr<gs::Gate> gate_;
  std::thread thread_;

 public:
  std::atomic<bool> ready{false};
};

double iterate(gs::Session& session, Job& job) {
  const auto start = Clock::now();
  gs::Iteration iteration = session.begin_iteration();
  const gs::Stream stream = iteration.stream();
  for (int i = 0; i < 50; ++i) launch(stream, job);
  stream.synchronize();
  iteration.end();
  if (job.kind == Kind::bursty) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  return seconds_since(start);
}

double quantile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(part * static_cast<double>(values.size())))];
}

bool shared_device = false;

gs::Runtime open_runtime() {
  gs::RuntimeOptions options;
  options.device = shared_device ? "shared" : "host";
  if (shared_device) return gs::Runtime::open(options);
  options.policy = "pack";
  options.capacity_bytes = 64 << 20;
  return gs::Runtime::open(options);
}

gs::Session open_guaranteed(gs::Runtime& runtime) {
  gs::SessionOptions need;
  need.name = "guaranteed";
  need.persistent_bytes = need.ephemeral_bytes = 1 << 20;
  return runtime.open_session(need);
}

void measure(Kind guaranteed, Kind other, bool gated, double seconds) {
  gs::Runtime runtime = open_runtime();
  gs::Session session = open_guaranteed(runtime);
  Job job(guaranteed);
  gs::Runtime beside = shared_device ? open_runtime() : gs::Runtime();
  Opponent opponent(shared_device ? beside : runtime, other);
  while (!opponent.ready) std::this_thread::yield();
  opponent.gated = gated;
  constexpr int kBlock = 8;
  std::vector<double> excess, spread;
  double before = 0, with = 0, shared_s = 0;
  uint64_t kernels = 0;
  // A quarter of the time is for learning.
  const auto start = Clock::now();
  opponent.on = true;
  while (seconds_since(start) < seconds / 4) iterate(session, job);
  for (int block = 0; seconds_since(start) < seconds; ++block) {
    const bool shared = block % 2 == 1;
    opponent.on = shared;
    const uint64_t kernels_before = opponent.kernels;
    std::vector<double> times;
    for (int i = 0; i < kBlock; ++i) times.push_back(iterate(session, job));
    const double time = quantile(times, 0.5);
    if (shared) {
      with = time;
      for (const double each : times) shared_s += each;
      kernels += opponent.kernels - kernels_before;
      continue;
    }
    if (before > 0) {
      excess.push_back(2 * with / (before + time) - 1);
      spread.push_back(time / before - 1);
    }
    before = time;
  }
  opponent.on = true;
  const double middle = quantile(excess, 0.5), half = (quantile(spread, 0.75) - quantile(spread, 0.25)) / 2;
  const char* verdict = excess.size() < 5 || half > kBar ? "not decided"
                        : middle <= kBar                 ? "within 3%"
                                                         : "above 3%";
  std::printf(
      "| %s | %s | %s | %zu | %+.1f (%+.1f to %+.1f) | %+.1f (%+.1f to %+.1f) | %.0f%% | %s |\n",
      name_of(guaranteed), name_of(other), gated ? "gate" : "no gate", excess.size(), 100 * middle,
      100 * quantile(excess, 0.25), 100 * quantile(excess, 0.75), 100 * quantile(spread, 0.5),
      100 * quantile(spread, 0.25), 100 * quantile(spread, 0.75),
      shared_s == 0 ? 0.0 : 100 * static_cast<double>(kernels) / shared_s / opponent.alone_kernels_per_s(),
      verdict);
  std::fflush(stdout);
}

void entries(uint64_t count, bool open) {
  gs::Runtime runtime = open_runtime();
  gs::Session session = open_guaranteed(runtime);
  gs::SessionOptions need;
  need.cls = gs::opportunistic;
  need.persistent_bytes = need.ephemeral_bytes = 1 << 20;
  gs::Session spare = runtime.open_session(need);
  const gs::Gate gate(spare);
  if (open) {
    const uint32_t* flag = nullptr;
    while (gpushare_gate_get_flag(gate.get(), &flag) == GPUSHARE_OK &&
           __atomic_load_n(flag, __ATOMIC_RELAXED) != 0)
      std::this_thread::yield();                             // until the daemon has answered
    for (uint64_t i = 0; i < count; ++i) gate.enter(Ns(1));  // a load and a branch each
    return;
  }
  // The session is known, its time alone too, and it has been away for longer than usual.
  do {
    const gs::Iteration iteration = session.begin_iteration();
  } while (gate.info().guaranteed_id == 0 || gate.info().learning != 0);
  while (!gate.try_enter(nullptr, Ns(1))) std::this_thread::yield();
  gate.done(Ns(1));
  for (uint64_t i = 0; i < count; ++i) {
    (void)gate.try_enter(nullptr, Ns(1));
    gate.done(Ns(1));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "shared") {
    shared_device = true;
    --argc;
    ++argv;
  }
  if (argc > 1 && std::string(argv[1]) == "entries") {
    entries(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 100'000,
            argc > 3 && std::string(argv[3]) == "open");
    return 0;
  }
  const double seconds = std::atof(argc > 1 ? argv[1] : "20");
  std::printf(
      "| guaranteed | opportunistic | through | pairs | excess, %% (quartiles) | alone against alone, %% | "
      "its work, of alone | verdict |\n"
      "|---|---|---|---|---|---|---|---|\n");
  for (const Kind guaranteed : {Kind::memory, Kind::compute, Kind::bursty}) {
    bool wanted = argc <= 2;
    for (int i = 2; i < argc; ++i) wanted = wanted || std::string(name_of(guaranteed)).rfind(argv[i], 0) == 0;
    if (!wanted) continue;
    for (const Kind other : {Kind::memory, Kind::compute, Kind::bursty})
      for (const bool gated : {true, false}) measure(guaranteed, other, gated, seconds);
  }
  return 0;
}
