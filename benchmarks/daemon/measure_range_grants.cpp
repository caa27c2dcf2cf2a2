// measure_range_grants [grants of each side, 1000] [rounds, 7] [MiB of a grant, 32]: how long a commit of an elastic
// range waits when another range must give the bytes back, through the C ABI on the host device. Prints the table of
// docs/design/elastic.md.
//
// Two sides have room for one of them. Each commits, holds the bytes until it is asked for them, gives them in its
// function at once, and commits again: so every grant but the first takes the bytes from the other side. The sides are
// two threads of one process, or two processes of a daemon. A round measures each way once, in turns. The processes are
// this program again, see main().
// SPDX-License-Identifier: Apache-2.0
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <gpushare/gpushare.hpp>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "line_process.hpp"

namespace gs = gpushare;
namespace {

using namespace gs::benchmarks;  // NOLINT
constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kEphemeral = 2 * kMiB;
constexpr const char* kDevice = "host?total_bytes=536870912";

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

// A thread or process that trades: its session and its range.
class Side {
 public:
  Side(gs::Runtime& runtime, const char* name, uint64_t bytes) : bytes_(bytes) {
    gs::SessionOptions options;
    options.name = name;
    options.ephemeral_bytes = kEphemeral;
    session_ = runtime.open_session(options);
    range_ = gs::Range(session_, {name, bytes, [this](uint64_t, gs::Nanoseconds) { return give(); },
                                  std::chrono::seconds(60), 0});
    granule_ = range_.info().granule_bytes;
  }
  // Trades until `stop`, and keeps the times of the first `grants` commits. Sets `*measured` when it has them.
  void run(size_t grants, const std::atomic<bool>& stop, const std::function<void()>& measured) {
    auto* const bytes = reinterpret_cast<unsigned char*>(range_.info().address);
    for (uint64_t stamp = 1; !stop; ++stamp) {
      std::unique_lock lock(mutex_);
      // Unless it stops: nobody may want the bytes any more.
      given_.wait_for(lock, std::chrono::milliseconds(100), [this] { return !has_; });
      if (has_) continue;
      lock.unlock();
      const uint64_t start = now_ns();
      range_.commit(0, bytes_, std::chrono::seconds(60));
      const uint64_t took = now_ns() - start;
      for (uint64_t at = 0; at < bytes_; at += granule_) bytes[at] = static_cast<unsigned char>(stamp);
      lock.lock();
      has_ = true;
      lock.unlock();
      got_.notify_all();
      if (times_.size() == grants) continue;
      times_.push_back(took);
      if (times_.size() == grants) measured();
    }
    ended_ = true;
    got_.notify_all();
  }
  const std::vector<uint64_t>& times() const { return times_; }
  uint64_t requests() const { return range_.info().requests; }

 private:
  // It may be asked between the end of a commit and the moment at which the bytes are its own.
  uint64_t give() {
    std::unique_lock lock(mutex_);
    got_.wait_for(lock, std::chrono::milliseconds(100), [this] { return has_ || ended_; });
    range_.decommit(0, bytes_);
    has_ = false;
    lock.unlock();
    given_.notify_all();
    return bytes_;
  }

  uint64_t bytes_, granule_ = 0;
  std::mutex mutex_;
  std::condition_variable given_, got_;
  bool has_ = false;
  std::atomic<bool> ended_{false};
  std::vector<uint64_t> times_;
  gs::Session session_;
  gs::Range range_;  // goes first: its function uses the rest
};

// Both sides' lanes, and one grant.
uint64_t capacity_for(uint64_t bytes) {
  return bytes + 2 * kEphemeral;
}

std::vector<uint64_t> run_threads(size_t grants, uint64_t bytes) {
  gs::RuntimeOptions options;
  options.device = kDevice;
  options.capacity_bytes = capacity_for(bytes);
  gs::Runtime runtime = gs::Runtime::open(options);
  Side one(runtime, "one", bytes), two(runtime, "two", bytes);
  std::atomic<bool> stop{false};
  std::atomic<int> left{2};
  const auto measured = [&] { stop = --left == 0; };
  std::thread thread([&] { one.run(grants, stop, measured); });
  two.run(grants, stop, measured);
  thread.join();
  std::vector<uint64_t> out = one.times();
  out.insert(out.end(), two.times().begin(), two.times().end());
  return out;
}

// ---- processes

// side NAME GRANTS BYTES
int side_process(char** argv) {
  gs::Runtime runtime = open_shared();
  Side side(runtime, argv[2], std::strtoull(argv[4], nullptr, 10));
  say("ready");
  if (std::getchar() == EOF) return 1;
  std::atomic<bool> stop{false};
  std::thread stops([&] {
    while (std::getchar() != EOF) {
    }
    stop = true;
  });
  side.run(std::strtoull(argv[3], nullptr, 10), stop, [] { say("measured"); });
  stops.join();
  for (const uint64_t each : side.times()) std::printf("%llu\n", static_cast<unsigned long long>(each));
  return 0;
}

// daemon BYTES
int daemon_process(char** argv) {
  const std::string capacity = std::to_string(capacity_for(std::strtoull(argv[2], nullptr, 10)));
  become_daemon({"--device", kDevice, "--capacity", capacity, "--lanes", "2"});
  return 1;
}

std::vector<uint64_t> run_processes(size_t grants, uint64_t bytes) {
  LineProcess daemon({"daemon", std::to_string(bytes)});
  std::vector<uint64_t> out;
  {
    const std::string many = std::to_string(grants), size = std::to_string(bytes);
    LineProcess one({"side", "one", many, size}), two({"side", "two", many, size});
    for (LineProcess* each : {&one, &two}) each->expect("ready");
    for (LineProcess* each : {&one, &two}) each->go();
    for (LineProcess* each : {&one, &two}) each->expect("measured");
    for (LineProcess* each : {&one, &two}) std::fclose(std::exchange(each->in, std::fopen("/dev/null", "w")));
    for (LineProcess* each : {&one, &two})
      for (std::string line = each->line(); !line.empty(); line = each->line())
        out.push_back(std::strtoull(line.c_str(), nullptr, 10));
  }
  kill(daemon.pid, SIGTERM);
  if (out.size() != 2 * grants) give_up("a process ended early");
  return out;
}

// ---- table

struct Way {
  const char* name;
  std::vector<uint64_t> (*run)(size_t, uint64_t);
  std::vector<double> p50, p90, p99, longest;  // of the rounds, in ms
};

std::string cell(const std::vector<double>& of_rounds) {
  char text[96];
  std::snprintf(text, sizeof text, "%.3g (%.3g to %.3g)", quantile(of_rounds, 0.5), quantile(of_rounds, 0),
                quantile(of_rounds, 1));
  return text;
}

void measure(size_t grants, int rounds, uint64_t bytes) {
  Way ways[] = {{"two threads of one process", run_threads, {}, {}, {}, {}},
                {"two processes of a daemon", run_processes, {}, {}, {}, {}}};
  for (int round = 0; round < rounds; ++round)
    for (Way& way : ways) {
      std::vector<double> ms;
      for (const uint64_t each : way.run(grants, bytes)) ms.push_back(static_cast<double>(each) / 1e6);
      way.p50.push_back(quantile(ms, 0.5));
      way.p90.push_back(quantile(ms, 0.9));
      way.p99.push_back(quantile(ms, 0.99));
      way.longest.push_back(quantile(ms, 1));
      std::fprintf(stderr, "%s: round %d of %d: %.3f ms, p99 %.3f ms\n", way.name, round + 1, rounds,
                   way.p50.back(), way.p99.back());
    }
  std::printf("%zu grants of %llu MiB by each side, %d rounds: ms, median of the rounds (least to most)\n",
              grants, static_cast<unsigned long long>(bytes / kMiB), rounds);
  std::printf("| sides | p50 | p90 | p99 | longest |\n|---|---|---|---|---|\n");
  for (const Way& way : ways)
    std::printf("| %s | %s | %s | %s | %s |\n", way.name, cell(way.p50).c_str(), cell(way.p90).c_str(),
                cell(way.p99).c_str(), cell(way.longest).c_str());
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string first = argc > 1 ? argv[1] : "1000";
  if (first == "side" && argc == 5) return side_process(argv);
  if (first == "daemon" && argc == 3) return daemon_process(argv);
  const size_t grants = std::strtoull(first.c_str(), nullptr, 10);
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 7;
  const uint64_t mib = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 32;
  if (grants < 1 || rounds < 1 || mib < 2 || mib > 400 || mib % 2 != 0)
    give_up("usage: measure_range_grants [grants] [rounds] [MiB]");
  char folder[] = "/tmp/gpushare-range-grants-XXXXXX";
  if (mkdtemp(folder) == nullptr) give_up("mkdtemp");
  setenv("GPUSHARE_SOCKET", (std::string(folder) + "/socket").c_str(), 1);
  measure(grants, rounds, mib * kMiB);
  std::filesystem::remove_all(folder);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "measure_range_grants: %s\n", error.what());
  return 1;
}
