// measure_two_jobs [seconds of work of the longer job, 6] [rounds, 7]: the two jobs of AntMan's tables 1 and 2 on the
// host device, with real bytes and real work, scaled down. Prints the tables of benchmarks/results/antman-host.md
// (scripts/experiments/antman_host).
//
// Job A (3.5 of 32 GB, opportunistic) is there first. Job B (30 GB, guaranteed) comes when A has done 26 of its 43
// minutes, and has 91.1 minutes of work. Both are threads of one process, or processes of a daemon. A round runs each
// job alone, each way once, and each job alone again; times are told in the paper's minutes, as multiples of the job's
// time alone in the same round. A job reads and writes all its bytes as it goes and checks each of them at its end. The
// processes are this program again, see main().
// SPDX-License-Identifier: Apache-2.0
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <gpushare/gate.hpp>
#include <gpushare/gpushare.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "line_process.hpp"

namespace gs = gpushare;
namespace {

using namespace gs::benchmarks;  // NOLINT
constexpr uint64_t kMiB = uint64_t{1} << 20;
// 4 MiB for each of the paper's GB.
constexpr const char* kDevice = "host?total_bytes=268435456&granularity=65536";
constexpr uint64_t kCapacity = 128 * kMiB, kEphemeral = kMiB, kBlock = kMiB;
constexpr uint64_t kBytesA = 14 * kMiB, kBytesB = 120 * kMiB;
constexpr double kMinutesA = 43.0, kMinutesB = 91.1, kArrival = 26;
constexpr size_t kSliceWords = (256 << 10) / 8;
// The slowdown that B accepts, as in the simulator's table: AntMan's B loses 0.7 min while A does its last 17.
constexpr double kTarget = 0.05;
constexpr double kGuess = 100e-6;  // of a kernel, in s, until it was measured

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

enum class Way { preempt, fifo, pack, ours };
constexpr const char* kWays[] = {"preempt", "fifo", "pack", "ours"};
const char* name_of(Way way) {
  return kWays[static_cast<size_t>(way)];
}

// One kernel adds 1 to each word of the next slice, which it sets to 1 at first, and computes for a while: some 80 us.
struct Kernels {
  std::vector<uint64_t*> slices;
  uint64_t next = 0;
  double sum = 1;
  void run() {
    uint64_t* const words = slices[next % slices.size()];
    if (next++ < slices.size())
      std::fill_n(words, kSliceWords, 1);
    else
      for (size_t i = 0; i < kSliceWords; ++i) words[i] += 1;
    double x = sum;
    for (int i = 0; i < 20'000; ++i) x = x * 0.999999 + 1e-3;
    sum = x;
  }
  bool whole() const {
    for (size_t s = 0; s < slices.size(); ++s) {
      const uint64_t visits = next / slices.size() + (s < next % slices.size() ? 1 : 0);
      if (visits == 0) continue;
      for (size_t i = 0; i < kSliceWords; ++i)
        if (slices[s][i] != visits) return false;
    }
    return true;
  }
};

struct Outcome {
  double began = 0, ended = 0;
  bool done = false;  // all its work, and all its bytes as they should be
};

struct JobSpec {
  bool is_a = true;
  Way way = Way::ours;
  uint64_t kernels = 0;
  uint64_t tells_at = UINT64_MAX;  // calls `reached` after so many kernels
};

gs::SessionOptions options_of(const JobSpec& job) {
  gs::SessionOptions out;
  out.name = job.is_a ? "A" : "B";
  out.persistent_bytes = (job.is_a ? kBytesA : kBytesB) - kEphemeral;
  out.ephemeral_bytes = kEphemeral;
  out.allow_queueing = job.way != Way::pack;
  if (job.way == Way::ours && job.is_a) {
    out.cls = gs::opportunistic;
    out.allow_spill = out.may_upgrade = true;
    out.least_bytes = kBytesA / 4;
  }
  return out;
}

// Runs one job in a session of `runtime`. `gated`: its launches go through a gate. Ends early, undone, when `stop` is set.
Outcome run_job(gs::Runtime& runtime, const JobSpec& job, bool gated, double estimate_s,
                const std::atomic<bool>& stop, const std::function<void()>& reached) {
  Outcome out;
  out.began = now_s();
  gs::Session session;
  try {
    session = runtime.open_session(options_of(job));
    session.wait_admitted();
  } catch (const gs::Error&) {
    return out;  // refused
  }
  std::unique_ptr<gs::Gate> gate;
  if (gated) gate = std::make_unique<gs::Gate>(session);
  Kernels kernels;
  const uint64_t bytes = (job.is_a ? kBytesA : kBytesB) - kEphemeral;
  for (uint64_t at = 0; at < bytes; at += kBlock) {
    auto* const words = reinterpret_cast<uint64_t*>(session.alloc_bytes(gs::Kind::model, kBlock));
    for (size_t s = 0; s < kBlock / 8; s += kSliceWords) kernels.slices.push_back(words + s);
  }
  const auto estimate = std::chrono::nanoseconds(static_cast<int64_t>(estimate_s * 1e9));
  // Short iterations: B has thousands beside A, as in the paper, and the time that the controller learns in is a small part.
  const int each = job.is_a ? 4 : 8;
  for (uint64_t launched = 0; launched < job.kernels && !stop;) {
    gs::Iteration iteration = session.begin_iteration();
    const gs::Stream stream = iteration.stream();
    for (int i = 0; i < each && launched < job.kernels && !stop; ++i, ++launched) {
      if (gate) gate->enter(stream, estimate);
      stream.launch_host([&kernels] { kernels.run(); });
    }
    stream.synchronize();
    iteration.end();
    if (launched >= job.tells_at && launched < job.tells_at + static_cast<uint64_t>(each)) reached();
  }
  const bool done = !stop;
  out.ended = now_s();
  const gs::Iteration iteration = session.begin_iteration();  // blocks do not move in it
  out.done = done && kernels.whole();
  if (done && !out.done) give_up(std::string("job ") + (job.is_a ? "A" : "B") + " lost bytes");
  return out;
}

gs::Runtime open_runtime(Way way) {
  gs::RuntimeOptions options;
  options.device = kDevice;
  options.capacity_bytes = kCapacity;
  options.policy = way == Way::fifo ? "fifo" : "pack";
  gs::Runtime runtime = gs::Runtime::open(options);
  if (way == Way::ours) {
    runtime.set_coordination(1, 4);
    gs::set_target_slowdown(runtime, kTarget);
  }
  return runtime;
}

struct Pair {
  Outcome a, b;
};

struct Work {
  uint64_t a = 0, b = 0;  // kernels
  double kernel_s = 0;
  uint64_t arrival() const { return static_cast<uint64_t>(static_cast<double>(a) * kArrival / kMinutesA); }
};

Pair run_threads(Way way, const Work& work) {
  gs::Runtime runtime = open_runtime(way);
  Pair out;
  std::atomic<bool> here{false}, stop_a{false}, never{false};
  std::thread a([&] {
    const JobSpec job{true, way, work.a, work.arrival()};
    out.a = run_job(runtime, job, way == Way::ours, work.kernel_s, stop_a, [&] {
      stop_a = way == Way::preempt;
      here = true;
      here.notify_all();
    });
  });
  here.wait(false);
  out.b = run_job(runtime, {false, way, work.b, UINT64_MAX}, false, work.kernel_s, never, [] {});
  a.join();
  return out;
}

Outcome run_alone(bool is_a, const Work& work) {
  gs::Runtime runtime = open_runtime(Way::fifo);
  const std::atomic<bool> never{false};
  return run_job(runtime, {is_a, Way::fifo, is_a ? work.a : work.b, UINT64_MAX}, false, work.kernel_s, never,
                 [] {});
}

// ---- processes

struct Process : LineProcess {
  using LineProcess::LineProcess;
  Outcome outcome() {
    Outcome told;
    int done = 0;
    if (std::sscanf(line().c_str(), "%lf %lf %d", &told.began, &told.ended, &done) != 3) return {};
    told.done = done != 0;
    return told;
  }
};

// job a|b WAY KERNELS TELLS_AT
int job_process(char** argv) {
  JobSpec job;
  job.is_a = *argv[2] == 'a';
  job.way = static_cast<Way>(std::find(kWays, kWays + 4, std::string(argv[3])) - kWays);
  job.kernels = std::strtoull(argv[4], nullptr, 10);
  job.tells_at = std::strtoull(argv[5], nullptr, 10);
  gs::Runtime runtime = open_shared();
  say("ready");
  if (std::getchar() == EOF) return 1;
  const std::atomic<bool> never{false};
  const Outcome out = run_job(runtime, job, false, 0, never, [] { say("reached"); });
  std::printf("%.6f %.6f %d\n", out.began, out.ended, out.done ? 1 : 0);
  return 0;
}

int daemon_process(char** argv) {
  const Way way = argv[2] == std::string("ours")   ? Way::ours
                  : argv[2] == std::string("fifo") ? Way::fifo
                                                   : Way::pack;
  std::vector<std::string> words = {"--device", kDevice, "--capacity", "128MiB",
                                    "--lanes",  "2",     "--policy",   way == Way::fifo ? "fifo" : "pack"};
  if (way == Way::ours) words.emplace_back("--coordinate");
  become_daemon(std::move(words));
  return 1;
}

Pair run_processes(Way way, const Work& work) {
  LineProcess daemon({"daemon", name_of(way)});
  Pair out;
  {
    Process a({"job", "a", name_of(way), std::to_string(work.a), std::to_string(work.arrival())});
    Process b({"job", "b", name_of(way), std::to_string(work.b), std::to_string(UINT64_MAX)});
    a.expect("ready");
    b.expect("ready");
    a.go();
    a.expect("reached");
    b.go();
    if (way == Way::preempt) kill(a.pid, SIGKILL);
    out.a = a.outcome();
    out.b = b.outcome();
  }
  kill(daemon.pid, SIGTERM);
  return out;
}

Outcome run_process_alone(bool is_a, const Work& work) {
  LineProcess daemon({"daemon", "fifo"});
  Outcome out;
  {
    Process job({"job", is_a ? "a" : "b", "fifo", std::to_string(is_a ? work.a : work.b),
                 std::to_string(UINT64_MAX)});
    job.expect("ready");
    job.go();
    out = job.outcome();
  }
  kill(daemon.pid, SIGTERM);
  return out;
}

// ---- tables

std::string cell(const std::vector<double>& minutes, size_t failed) {
  if (minutes.empty()) return "failed";
  char text[96];
  std::snprintf(text, sizeof text, "%.1f (%.1f to %.1f)", quantile(minutes, 0.5), quantile(minutes, 0.25),
                quantile(minutes, 0.75));
  return text + (failed > 0 ? ", failed " + std::to_string(failed) + " times" : std::string());
}

// Against the paper's minutes. Where the job alone differs from itself by more than 3% in the quartiles, nothing is decided.
const char* verdict(const std::vector<double>& minutes, const std::vector<double>& alone, double printed) {
  if (minutes.empty()) return "failed";
  if (quantile(alone, 0.75) - quantile(alone, 0.25) > 2 * 0.03 * quantile(alone, 0.5)) return "not decided";
  if (quantile(minutes, 0.75) <= printed) return "no later";
  return quantile(minutes, 0.25) > printed ? "later" : "not decided";
}

struct Row {
  std::vector<double> a, b;
  size_t a_failed = 0, b_failed = 0;
  void add(std::vector<double>& to, size_t& failed, const Outcome& outcome, double minute_s) {
    if (outcome.done)
      to.push_back((outcome.ended - outcome.began) / minute_s);
    else
      ++failed;
  }
};

void measure(bool processes, const Work& work, int rounds) {
  Row rows[4], alone;
  const auto pair = processes ? run_processes : run_threads;
  const auto single = processes ? run_process_alone : run_alone;
  const auto seconds = [&](bool is_a) {
    const Outcome out = single(is_a, work);
    if (!out.done) give_up("a job alone failed");
    return out.ended - out.began;
  };
  for (int round = 0; round < rounds; ++round) {
    const double a = seconds(true), b = seconds(false);
    Pair results[4];
    for (const Way way : {Way::preempt, Way::fifo, Way::pack, Way::ours})
      results[static_cast<size_t>(way)] = pair(way, work);
    const double a_again = seconds(true), b_again = seconds(false);
    alone.a.push_back(kMinutesA * a_again / a);
    alone.b.push_back(kMinutesB * b_again / b);
    const double minute_a = (a + a_again) / 2 / kMinutesA, minute_b = (b + b_again) / 2 / kMinutesB;
    for (size_t way = 0; way < 4; ++way) {
      rows[way].add(rows[way].a, rows[way].a_failed, results[way].a, minute_a);
      rows[way].add(rows[way].b, rows[way].b_failed, results[way].b, minute_b);
    }
    std::fprintf(stderr, "%s: round %d of %d\n", processes ? "processes" : "threads", round + 1, rounds);
  }
  constexpr const char *kPrintedA[] = {"failed", "43.0", "43.1", "43.9"},
                       *kPrintedB[] = {"91.1", "108.2", "failed", "91.8"};
  std::printf(
      "<!-- %s -->\n| way | A, min: printed | A: measured | B, min: printed | B: measured "
      "|\n|---|---|---|---|---|\n",
      processes ? "two processes" : "one process");
  std::printf("| alone, and alone again | 43.0 | %s | 91.1 | %s |\n", cell(alone.a, 0).c_str(),
              cell(alone.b, 0).c_str());
  for (size_t way = 0; way < 4; ++way)
    std::printf("| %s | %s | %s | %s | %s |\n", kWays[way], kPrintedA[way],
                cell(rows[way].a, rows[way].a_failed).c_str(), kPrintedB[way],
                cell(rows[way].b, rows[way].b_failed).c_str());
  std::printf("\nOurs against AntMan's minutes: A %s, B %s. %d rounds.\n<!-- end -->\n",
              verdict(rows[3].a, alone.a, 43.9), verdict(rows[3].b, alone.b, 91.8), rounds);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string first = argc > 1 ? argv[1] : "6";
  if (first == "job" && argc == 6) return job_process(argv);
  if (first == "daemon" && argc == 3) return daemon_process(argv);
  const double b_seconds = std::atof(first.c_str());
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 7;
  if (!(b_seconds > 0) || rounds < 1) give_up("usage: measure_two_jobs [seconds] [rounds]");
  char folder[] = "/tmp/gpushare-two-jobs-XXXXXX";
  if (mkdtemp(folder) == nullptr) give_up("mkdtemp");
  setenv("GPUSHARE_SOCKET", (std::string(folder) + "/socket").c_str(), 1);
  Work work;
  const auto set_work = [&](double kernel_s) {
    work.kernel_s = kernel_s;
    work.b = static_cast<uint64_t>(b_seconds / kernel_s);
    work.a = static_cast<uint64_t>(b_seconds * kMinutesA / kMinutesB / kernel_s);
  };
  set_work(kGuess);
  // How long a kernel takes on this machine now, in a job that is alone.
  const Outcome alone = run_alone(true, work);
  set_work((alone.ended - alone.began) / static_cast<double>(work.a));
  measure(false, work, rounds);
  measure(true, work, rounds);
  std::filesystem::remove_all(folder);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "measure_two_jobs: %s\n", error.what());
  return 1;
}
