// measure_shared_device begin|turn|shares|many|switch|images [rounds]: what sharing a device between processes costs, on the host device.
//   begin   an uncontended begin and end through the daemon, beside one without it
//   turn    the turn passed between two processes that wait for their device work in every iteration, beside bare ping-pongs (futex, socket)
//   shares  device time of processes with weights 2:1:1 and 3:1 under fair, which wait for their device work in every iteration
//   many    42 models in as many processes, and in one, all resident, requests at a low rate: their latency beside one alone
//   switch  training, inference, training between two processes, beside stop-and-start
//   images  two processes whose images the daemon shares, with room for one and a half
// With SHARE_LANES in the environment the daemon has lanes shared.
// Executions take a given time without using a core, as on a GPU. The daemon and the other processes are this program again,
// see main(). `measure_shared_device loop DEVICE ITERATIONS` is for callgrind, with a daemon started before.
// SPDX-License-Identifier: Apache-2.0
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "client/remote_authority.hpp"
#include "client/status.hpp"
#include "own_process.hpp"
#include "roles.hpp"

namespace {

using namespace gpushare;              // NOLINT
using namespace gpushare::benchmarks;  // NOLINT

struct Spread {
  double median, low, high;  // the quartiles
};

Spread spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return {values[n / 2], values[n / 4], values[n - 1 - n / 4]};
}

void print(const char* name, const std::vector<double>& values, const char* unit) {
  const Spread s = spread(values);
  std::printf("%-44s %10.2f %s (quartiles %.2f to %.2f)\n", name, s.median, unit, s.low, s.high);
}

struct Process : OwnProcess {
  using OwnProcess::OwnProcess;
  ~Process() { end(); }
  // Ends its stdin and waits.
  void end() {
    if (in == nullptr) return;
    close_input();
    int status = 0;
    waitpid(pid, &status, 0);
    std::fclose(out);
    in = nullptr;
    if (status != 0) give_up("a process failed", {});
  }
  void close_input() {
    std::fclose(in);
    in = std::fopen("/dev/null", "w");
  }
  std::string line() {
    char text[128];
    if (std::fgets(text, sizeof(text), out) == nullptr) give_up("a process ended", {});
    return text;
  }
  uint64_t number() { return std::strtoull(line().c_str(), nullptr, 10); }
  void go() {
    std::fputc('\n', in);
    std::fflush(in);
  }
};

double ns_each(executor::Session& session, uint64_t iterations) {
  const uint64_t begin_ns = base::host_now_ns();
  loop(session, iterations);
  return static_cast<double>(base::host_now_ns() - begin_ns) / static_cast<double>(iterations);
}

constexpr const char* kSmallDevice = "host?total_bytes=268435456&granularity=65536";

void measure_begin(int rounds) {
  Process daemon({"daemon", kSmallDevice, "fair", std::to_string(64 * kMiB)});
  (void)daemon.line();
  const auto shared = open_runtime("shared"), own = open_runtime(kSmallDevice);
  const auto with = open_session(*shared, "shared", kMiB), without = open_session(*own, "own", kMiB);
  std::vector<double> shared_ns, own_ns, ratio;
  for (int round = 0; round <= rounds; ++round) {
    const double s = ns_each(*with, 20'000), o = ns_each(*without, 20'000);
    if (round == 0) continue;
    shared_ns.push_back(s);
    own_ns.push_back(o);
    ratio.push_back(s / o);
  }
  print("begin + end, uncontended, shared device", shared_ns, "ns");
  print("begin + end, uncontended, own device", own_ns, "ns");
  print("ratio", ratio, "");
}

// play(0) in this process and play(1) in a child of it.
template <class Play>
void play_both(const Play& play) {
  const pid_t child = fork();
  if (child == 0) {
    play(1);
    _exit(0);
  }
  play(0);
  waitpid(child, nullptr, 0);
}

// Passes a token back and forth between two processes; ns a pass.
double futex_pass_ns(int passes) {
  auto* const token = static_cast<std::atomic<uint32_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto play = [&](uint32_t mine) {
    for (int i = 0; i < passes / 2; ++i) {
      while (token->load() != mine) syscall(SYS_futex, token, FUTEX_WAIT, 1 - mine, nullptr, nullptr, 0);
      token->store(1 - mine);
      syscall(SYS_futex, token, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    }
  };
  const uint64_t begin_ns = base::host_now_ns();
  play_both(play);
  munmap(token, 4096);
  return static_cast<double>(base::host_now_ns() - begin_ns) / passes;
}

// The same between processes that sleep for as long as the iterations of `steps` work before they pass the token on: the median time from the
// end of the sleep to the other's return from its wait, in us.
double futex_turn_us(int passes) {
  struct Shared {
    std::atomic<uint32_t> token;
    std::atomic<uint64_t> ended_ns;
  };
  auto* const shared =
      static_cast<Shared*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<double> turns_us;
  const auto play = [&](uint32_t mine) {
    for (int i = 0; i < passes / 2; ++i) {
      bool waited = false;
      while (shared->token.load() != mine) {
        waited = true;
        syscall(SYS_futex, &shared->token, FUTEX_WAIT, 1 - mine, nullptr, nullptr, 0);
      }
      const uint64_t begun_ns = base::host_now_ns(), ended_ns = shared->ended_ns.load();
      if (waited && ended_ns != 0) turns_us.push_back(static_cast<double>(begun_ns - ended_ns) / 1e3);
      std::this_thread::sleep_for(kStep);
      shared->ended_ns.store(base::host_now_ns());
      shared->token.store(1 - mine);
      syscall(SYS_futex, &shared->token, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    }
  };
  play_both(play);
  munmap(shared, 4096);
  return spread(turns_us).median;
}

double socket_pass_ns(int passes) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) give_up("socketpair", {});
  char message[32] = {};
  const uint64_t begin_ns = base::host_now_ns();
  const pid_t child = fork();
  if (child == 0) {
    for (int i = 0; i < passes / 2; ++i)
      if (recv(ends[1], message, sizeof(message), 0) <= 0 || send(ends[1], message, sizeof(message), 0) <= 0)
        _exit(1);
    _exit(0);
  }
  for (int i = 0; i < passes / 2; ++i)
    if (send(ends[0], message, sizeof(message), 0) <= 0 || recv(ends[0], message, sizeof(message), 0) <= 0)
      give_up("socket", {});
  waitpid(child, nullptr, 0);
  close(ends[0]);
  close(ends[1]);
  return static_cast<double>(base::host_now_ns() - begin_ns) / passes;
}

void measure_turn(int rounds) {
  constexpr int kPasses = 4000;
  const auto folder = std::filesystem::temp_directory_path() / ("gpushare-turn-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  const std::string files[] = {folder / "a", folder / "b"};
  std::vector<double> host_us, gap_us, futex_us, turn_us, socket_us, to_futex, to_turn;
  {
    Process daemon({"daemon", kSmallDevice, "fair", std::to_string(64 * kMiB)});
    (void)daemon.line();
    for (int round = 0; round <= rounds; ++round) {
      std::vector<Step> steps;
      {
        Process a({"steps", files[0]}), b({"steps", files[1]});
        (void)a.line();
        (void)b.line();
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
      }
      for (const std::string& file : files) {
        std::ifstream in(file, std::ios::binary);
        for (Step step; in.read(reinterpret_cast<char*>(&step), sizeof(step));) {
          step.who = &file == &files[1] ? 1 : 0;
          steps.push_back(step);
        }
      }
      std::sort(steps.begin(), steps.end(), [](const Step& x, const Step& y) { return x.start < y.start; });
      std::vector<double> host, gap;
      for (size_t i = 1; i < steps.size(); ++i) {
        const Step &before = steps[i - 1], &after = steps[i];
        if (before.who == after.who || before.ended < after.asked)
          continue;  // the turn changed while the other waited
        host.push_back(static_cast<double>(after.begun - before.ended) / 1e3);
        gap.push_back(static_cast<double>(after.start - before.stop) / 1e3);
      }
      const double futex = futex_pass_ns(kPasses) / 1e3, socket = socket_pass_ns(kPasses) / 1e3,
                   turn = futex_turn_us(kPasses / 4);
      if (round == 0 || host.empty()) continue;
      std::printf("round %d: %zu turns of %zu iterations\n", round, host.size(), steps.size());
      host_us.push_back(spread(host).median);
      gap_us.push_back(spread(gap).median);
      futex_us.push_back(futex);
      socket_us.push_back(socket);
      turn_us.push_back(turn);
      to_futex.push_back(host_us.back() / futex);
      to_turn.push_back(host_us.back() / turn);
    }
  }
  std::filesystem::remove_all(folder);
  if (host_us.empty()) give_up("no turn was passed", {});
  std::printf("medians of each round:\n");
  print("a turn: end of one process to begin of other", host_us, "us");
  print("the device idle meanwhile", gap_us, "us");
  print("a pass of a bare futex", futex_us, "us");
  print("the same after as much work", turn_us, "us");
  print("a pass over a bare socket", socket_us, "us");
  print("turn / futex", to_futex, "");
  print("turn / futex after as much work", to_turn, "");
}

// Device time of processes with these weights over 10 s; the largest deviation in points.
double measure_weights(const std::vector<double>& weights) {
  std::vector<std::unique_ptr<Process>> all;
  double sum = 0, worst = 0;
  for (const double weight : weights) {
    all.push_back(std::make_unique<Process>(std::vector<std::string>{"share", std::to_string(weight)}));
    sum += weight;
  }
  for (const auto& each : all) (void)each->line();
  // All are there: the shares of the 10 s from now on.
  const auto service = [] {
    std::vector<std::pair<uint64_t, uint64_t>> out;  // by process
    for (const auto& session : take(client::query_service(client::default_socket()), "status").sessions)
      out.emplace_back(session.pid, session.service_ns);
    return out;
  };
  const auto before = service();
  std::this_thread::sleep_for(std::chrono::seconds(10));
  const auto after = service();
  uint64_t total = 0;
  std::vector<uint64_t> spent(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    for (const auto& [pid, ns] : after) spent[i] += pid == static_cast<uint64_t>(all[i]->pid) ? ns : 0;
    for (const auto& [pid, ns] : before) spent[i] -= pid == static_cast<uint64_t>(all[i]->pid) ? ns : 0;
    total += spent[i];
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    const double percent = 100.0 * static_cast<double>(spent[i]) / static_cast<double>(total);
    std::printf(" %.2f%% (weight %g)", percent, weights[i]);
    worst = std::max(worst, std::abs(percent - 100 * weights[i] / sum));
  }
  std::printf(" of %.2f s device time in 10 s\n", static_cast<double>(total) / 1e9);
  return worst;
}

void measure_shares(int rounds) {
  Process daemon({"daemon", kSmallDevice, "fair", std::to_string(64 * kMiB)});
  (void)daemon.line();
  double worst = 0;
  for (int round = 0; round < rounds; ++round)
    for (const auto& weights : {std::vector<double>{2, 1, 1}, std::vector<double>{3, 1}})
      worst = std::max(worst, measure_weights(weights));
  std::printf("largest deviation %.2f points\n", worst);
}

void measure_many(int rounds) {
  constexpr double kMs = 5, kApartMs = 2000;
  constexpr size_t kModels = 42;
  Process daemon({"daemon", kSmallDevice, "fair", std::to_string(200 * kMiB)});
  (void)daemon.line();
  // Mean latency in ms of processes with so many sessions each, over 10 s.
  const auto play = [&](const char* device, size_t processes, size_t sessions, double apart_ms, int round) {
    std::vector<std::unique_ptr<Process>> all;
    for (size_t i = 0; i < processes; ++i)
      all.push_back(std::make_unique<Process>(std::vector<std::string>{
          "serve", device, std::to_string(sessions), std::to_string(kMs), std::to_string(apart_ms),
          std::to_string(static_cast<size_t>(round) * kModels + i + 1)}));
    for (const auto& each : all) (void)each->line();
    if (device == std::string("shared") &&
        take(client::query_service(client::default_socket()), "status").devices.at(0).resident != processes)
      give_up("not all are resident", {});
    std::this_thread::sleep_for(std::chrono::seconds(10));
    for (const auto& each : all) each->close_input();
    double total_ns = 0, requests = 0;
    for (const auto& each : all) {
      total_ns += static_cast<double>(each->number());
      requests += static_cast<double>(each->number());
    }
    return total_ns / requests / 1e6;
  };
  std::printf("requests of %.0f ms; 42 models, each one request in %.0f ms: the device is busy for %.0f%%\n",
              kMs, kApartMs, 100 * kMs * kModels / kApartMs);
  std::vector<double> alone[2], rare[2], many[2], added[2], ratio[2];
  for (int round = 0; round < rounds; ++round) {
    for (const int own : {0, 1}) {
      const char* device = own != 0 ? kSmallDevice : "shared";
      alone[own].push_back(play(device, 1, 1, kApartMs / 20, round));
      rare[own].push_back(play(device, 1, 1, kApartMs, round));
      many[own].push_back(play(device, own != 0 ? 1 : kModels, own != 0 ? kModels : 1, kApartMs, round));
      added[own].push_back(many[own].back() - alone[own].back());
      ratio[own].push_back(many[own].back() / alone[own].back());
    }
  }
  for (const int own : {0, 1}) {
    std::printf(own != 0 ? "42 sessions of one process with a device of its own\n" : "42 processes\n");
    print("  mean latency, one model alone", alone[own], "ms");
    print("  mean latency, one model alone, as rarely as each of 42", rare[own], "ms");
    print("  mean latency, 42 models resident", many[own], "ms");
    print("  added", added[own], "ms");
    print("  ratio", ratio[own], "");
  }
}

void measure_switch(int rounds) {
  constexpr uint64_t kBytes = 256 * kMiB;
  constexpr double kExecuteMs = 20;
  const std::string device = "host?total_bytes=1073741824&copy_gbps=3", bytes = std::to_string(kBytes),
                    ms = std::to_string(kExecuteMs);
  const auto folder =
      std::filesystem::temp_directory_path() / ("gpushare-shared-" + std::to_string(getpid()));
  const std::string model = folder / "model", state = folder / "state";
  std::filesystem::create_directories(folder);
  std::ofstream(model, std::ios::binary) << std::string(kBytes, 'm');
  const auto ms_between = [](uint64_t from, uint64_t to) { return static_cast<double>(to - from) / 1e6; };
  std::vector<double> alone_answer, answer, resumed, stopped_answer, stopped_resumed;
  {
    // Room for one of the two.
    Process daemon({"daemon", device, "priority", std::to_string(kBytes * 3 / 2)});
    (void)daemon.line();
    Process inference({"infer", "shared", model, ms});
    (void)inference.line();
    const auto ask = [&] {
      const uint64_t asked_ns = base::host_now_ns();
      inference.go();
      return std::pair(asked_ns, inference.number());
    };
    for (int round = 0; round <= rounds; ++round) {
      const auto [asked_ns, answered_ns] = ask();
      if (round > 0) alone_answer.push_back(ms_between(asked_ns, answered_ns));
    }
    Process training({"train", "shared", bytes, ms, "-"});
    (void)training.line();
    for (int round = 0; round <= rounds; ++round) {
      for (int i = 0; i < 3; ++i) (void)training.line();
      const auto [asked_ns, answered_ns] = ask();
      uint64_t trained_ns = 0;
      while (trained_ns < answered_ns) trained_ns = training.number();
      if (round == 0) continue;
      answer.push_back(ms_between(asked_ns, answered_ns));
      resumed.push_back(ms_between(answered_ns, trained_ns));
    }
    training.end();  // checks its state
  }
  for (int round = 0; round <= rounds; ++round) {
    Process training({"train", device, bytes, ms, state});
    for (int i = 0; i < 3; ++i) (void)training.line();
    const uint64_t asked_ns = base::host_now_ns();
    training.end();
    Process inference({"infer", device, model, ms});
    inference.go();
    (void)inference.line();
    const uint64_t answered_ns = inference.number();
    inference.end();
    Process again({"train", device, bytes, ms, state});
    const uint64_t trained_ns = again.number();
    again.end();
    if (round == 0) continue;
    stopped_answer.push_back(ms_between(asked_ns, answered_ns));
    stopped_resumed.push_back(ms_between(answered_ns, trained_ns));
  }
  std::filesystem::remove_all(folder);
  std::printf(
      "training and inference of 256 MiB each, link capped at 3 GB/s, 20 ms an execution, room for one\n");
  print("answer, the device free", alone_answer, "ms");
  print("answer, the device training", answer, "ms");
  print("then until training's next iteration is done", resumed, "ms");
  print("stop-and-start: answer", stopped_answer, "ms");
  print("stop-and-start: then until training's next", stopped_resumed, "ms");
}

// `layers` tensors of equal size; the link is capped at 1.2 GB/s and an iteration executes as long as the load takes.
void measure_images(int rounds) {
  constexpr uint64_t kBytes = 180 * kMiB, kLayers = 60;
  const auto folder =
      std::filesystem::temp_directory_path() / ("gpushare-images-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  std::string files[2];
  for (int which = 0; which < 2; ++which) {
    std::string header = "{";
    for (uint64_t i = 0; i < kLayers; ++i)
      header += (i > 0 ? ",\"" : "\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[)" +
                std::to_string(kBytes / kLayers) + R"(],"data_offsets":[)" +
                std::to_string(i * (kBytes / kLayers)) + "," + std::to_string((i + 1) * (kBytes / kLayers)) +
                "]}";
    header += "}";
    files[which] = folder / (std::to_string(which) + ".safetensors");
    std::ofstream out(files[which], std::ios::binary);
    for (int i = 0; i < 8; ++i) out.put(static_cast<char>(header.size() >> (8 * i)));
    out << header << std::string(kBytes, static_cast<char>('a' + which));
  }
  const double load_ms = static_cast<double>(kBytes) / 1.2e6;
  std::vector<double> there, switched;
  {
    Process daemon({"daemon", "host?total_bytes=1073741824&copy_gbps=1.2", "fair",
                    std::to_string(kBytes * 3 / 2 + 8 * kMiB)});
    (void)daemon.line();
    Process a({"read", files[0], std::to_string(load_ms)}), b({"read", files[1], std::to_string(load_ms)});
    (void)a.line();
    (void)b.line();
    const auto ask = [](Process& process) {
      const uint64_t asked_ns = base::host_now_ns();
      process.go();
      return static_cast<double>(process.number() - asked_ns) / 1e6;
    };
    (void)ask(a);
    for (int round = 0; round < rounds; ++round) {
      switched.push_back(ask(b));
      there.push_back(ask(b));
      switched.push_back(ask(a));
      there.push_back(ask(a));
    }
  }
  std::filesystem::remove_all(folder);
  std::printf(
      "two images of 180 MiB in 60 layers, link capped at 1.2 GB/s, execution as long as the load: %.1f ms\n",
      load_ms);
  print("an iteration, the image on the device", there, "ms");
  print("an iteration, the other's image in its place", switched, "ms");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string role = argc > 1 ? argv[1] : "";
  int code = 0;
  signal(SIGPIPE, SIG_IGN);
  if (run_role(argc, argv, &code)) return code;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 9;
  char folder[] = "/tmp/gpushare-measure-XXXXXX";
  if (rounds < 1 || mkdtemp(folder) == nullptr) return 2;
  setenv("GPUSHARE_SOCKET", (std::string(folder) + "/socket").c_str(), 1);
  if (role == "begin")
    measure_begin(rounds);
  else if (role == "turn")
    measure_turn(rounds);
  else if (role == "shares")
    measure_shares(rounds);
  else if (role == "many")
    measure_many(rounds);
  else if (role == "switch")
    measure_switch(rounds);
  else if (role == "images")
    measure_images(rounds);
  else
    code = 2;
  if (code == 2)
    std::fprintf(stderr, "usage: measure_shared_device begin|turn|shares|many|switch|images [rounds]\n");
  std::filesystem::remove_all(folder);
  return code;
}
