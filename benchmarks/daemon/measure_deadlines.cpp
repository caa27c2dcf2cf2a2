// measure_deadlines [seconds of a run, 10] [rounds, 3]: a server of requests with deadlines beside another process of the same
// daemon, on the host device. Prints the table of benchmarks/results/serving-decisions.md.
//
// Each request takes 5 ms of the device alone: they are not batched, which would hide a wait. Requests come at random and have 40 ms.
// The server runs alone, beside a training loop of 10 ms an iteration, and beside a second server with three times the requests that
// the device bears; with and without
// telling the daemon what its batches are worth (Session::set_worth). Weights are equal. Work on the device sleeps, so that other
// programs on the machine disturb little: run it at real-time priority. The processes are this program again, see main().
// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "daemon/service.hpp"
#include "executor/runtime.hpp"
#include "executor/serving/iteration_work.hpp"
#include "executor/serving/request_server.hpp"
#include "own_process.hpp"

namespace {

using namespace gpushare;  // NOLINT(google-build-using-namespace)

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kRequestMs = 5, kSloMs = 40;

[[noreturn]] void fail(const char* what, const base::Status& status) {
  std::fprintf(stderr, "measure_deadlines: %s: %s\n", what, status.to_string().c_str());
  std::exit(1);
}

void work_on_device(void* duration_ns) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(*static_cast<uint64_t*>(duration_ns)));
}

base::Status enqueue(executor::Iteration& iteration, uint64_t& duration_ns) {
  GPUSHARE_ASSIGN_OR_RETURN(const auto stream, iteration.stream());
  return stream->launch_host(&work_on_device, &duration_ns);
}

std::shared_ptr<executor::Session> open_session(const char* name,
                                                std::shared_ptr<executor::Runtime>& runtime) {
  executor::RuntimeOptions options;
  options.device = "shared";
  auto opened = executor::Runtime::open(std::move(options));
  if (!opened.ok()) fail("open", opened.status());
  runtime = *opened;
  executor::SessionOptions wanted;
  wanted.name = name;
  wanted.persistent_bytes = wanted.ephemeral_bytes = 1 << 20;
  auto session = runtime->open_session(wanted);
  if (!session.ok()) fail("open_session", session.status());
  return *session;
}

// Prints "ready", begins at a line of stdin, and prints the share of requests in time. `load`: of the device.
int serve(double seconds, double load, bool tells, uint64_t seed) {
  std::shared_ptr<executor::Runtime> runtime;
  const auto session = open_session("server", runtime);
  auto server = executor::RequestServer::start({});
  if (!server.ok()) fail("start", server.status());
  sched::slo::ModelSpec model;
  model.batch_sizes = {1};
  const auto run = [&](const sched::slo::Batch& batch, executor::BatchReport& report) -> base::Status {
    uint64_t duration_ns = kRequestMs * kMs;
    if (tells) (void)session->set_worth(batch.worth.cost, batch.worth.until_ns, report.waiting);
    base::Status outcome;
    const executor::IterationFunction batch_work =
        [&](const std::shared_ptr<executor::Iteration>& iteration) {
          report.started_ns = base::host_now_ns();
          return enqueue(*iteration, duration_ns);
        };
    const base::Status ran =
        executor::run_as_iteration(*session, report.server, "batch", batch_work, outcome);
    return ran.ok() ? outcome : ran;
  };
  if (const auto added = (*server)->add_model(model, run); !added.ok()) fail("add_model", added.status());
  for (int i = 0; i < 64; ++i) (void)(*server)->observe({}, kRequestMs * kMs);
  std::puts("ready");
  std::fflush(stdout);
  (void)std::getchar();
  std::mt19937_64 random(seed);
  std::exponential_distribution<double> gap(load / static_cast<double>(kRequestMs * kMs));  // a nanosecond
  std::atomic<size_t> in_time{0};
  size_t offered = 0;
  const uint64_t begin_ns = base::host_now_ns(), counted_ns = begin_ns + 1'000'000'000;
  const auto end_ns = begin_ns + static_cast<uint64_t>(seconds * 1e9);
  for (double at_ns = static_cast<double>(begin_ns); at_ns < static_cast<double>(end_ns);
       at_ns += gap(random)) {
    const auto arrival_ns = static_cast<uint64_t>(at_ns);
    const uint64_t now_ns = base::host_now_ns();
    if (arrival_ns > now_ns) std::this_thread::sleep_for(std::chrono::nanoseconds(arrival_ns - now_ns));
    sched::slo::Request request;
    request.id = offered + (uint64_t{1} << 40);
    request.arrival_ns = arrival_ns;
    request.deadline_ns = arrival_ns + kSloMs * kMs;
    const bool counts = arrival_ns >= counted_ns;  // by then the neighbour is at work, too
    offered += 1;
    (void)(*server)->submit(request, [&in_time, counts](const executor::RequestOutcome& outcome) {
      if (counts && outcome.status == GPUSHARE_OK && outcome.finished_ns <= outcome.deadline_ns) ++in_time;
    });
  }
  const double counted = static_cast<double>(offered) * (seconds - 1) / seconds;
  (void)(*server)->stop();
  const executor::SessionInfo info = session->info();
  std::printf("%.4f %.4f\n", static_cast<double>(in_time.load()) / counted,
              static_cast<double>(info.service_ns) / (seconds * 1e9));
  return 0;
}

// Prints "ready", begins at a line of stdin, and prints the iterations a second.
int train(double seconds) {
  std::shared_ptr<executor::Runtime> runtime;
  const auto session = open_session("training", runtime);
  std::puts("ready");
  std::fflush(stdout);
  (void)std::getchar();
  const auto end_ns = base::host_now_ns() + static_cast<uint64_t>(seconds * 1e9);
  uint64_t duration_ns = 10 * kMs, iterations = 0;
  for (; base::host_now_ns() < end_ns; ++iterations) {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    if (!iteration.ok()) fail("begin", iteration.status());
    if (const base::Status put = enqueue(**iteration, duration_ns); !put.ok()) fail("enqueue", put);
    if (const base::Status ended = (*iteration)->end(); !ended.ok()) fail("end", ended);
  }
  (void)runtime->synchronize(GPUSHARE_NO_TIMEOUT);
  std::printf("%.4f %.4f\n", static_cast<double>(iterations) / seconds,
              static_cast<double>(session->info().service_ns) / (seconds * 1e9));
  return 0;
}

struct Player : benchmarks::OwnProcess {
  explicit Player(std::vector<std::string> words) : OwnProcess(std::move(words)) {
    char line[64];
    if (std::fgets(line, sizeof(line), out) == nullptr) std::exit(1);
  }
  void go() {
    std::fputc('\n', in);
    std::fflush(in);
  }
  // Its figure, and its part of the device.
  std::pair<double, double> end() {
    double figure = 0, part = 0;
    if (std::fscanf(out, "%lf %lf", &figure, &part) != 2) std::exit(1);
    int status = 0;
    waitpid(pid, &status, 0);
    return {figure, part};
  }
};

void measure(const std::string& seconds, int rounds) {
  std::puts(
      "| load of the server | beside | tells | in time, by round | the server's part of the device | the "
      "neighbour's |\n"
      "|---|---|---|---|---|---|");
  for (const char* load : {"0.3", "0.45"})
    for (const char* beside : {"nobody", "training", "overloaded server"})
      for (const bool tells : {false, true}) {
        if (beside[0] == 'n' && tells) continue;
        std::string by_round;
        double part = 0, others = 0;
        for (int round = 0; round < rounds; ++round) {
          Player server({"serve", seconds, load, tells ? "1" : "0", std::to_string(round + 1)});
          std::unique_ptr<Player> neighbour;
          if (beside[0] == 't')
            neighbour = std::make_unique<Player>(std::vector<std::string>{"train", seconds});
          if (beside[0] == 'o')
            neighbour = std::make_unique<Player>(std::vector<std::string>{
                "serve", seconds, "3", tells ? "1" : "0", std::to_string(100 + round)});
          if (neighbour != nullptr) neighbour->go();
          server.go();
          const auto [in_time, its_part] = server.end();
          by_round += base::format("%s%.3f", round == 0 ? "" : ", ", in_time);
          part += its_part / rounds;
          if (neighbour != nullptr) others += neighbour->end().second / rounds;
        }
        std::printf("| %s | %s | %s | %s | %.2f | %.2f |\n", load, beside, tells ? "yes" : "no",
                    by_round.c_str(), part, others);
        std::fflush(stdout);
      }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string role = argc > 1 ? argv[1] : "";
  if (role == "serve" && argc == 6)
    return serve(std::atof(argv[2]), std::atof(argv[3]), argv[4][0] == '1',
                 std::strtoull(argv[5], nullptr, 10));
  if (role == "train" && argc == 3) return train(std::atof(argv[2]));
  char folder[] = "/tmp/gpushare-XXXXXX";
  if (mkdtemp(folder) == nullptr) return 1;
  daemon::ServiceOptions options;
  options.socket = std::string(folder) + "/socket";
  options.devices = {"host?total_bytes=268435456&granularity=65536"};
  options.policy = "fair";
  setenv("GPUSHARE_SOCKET", options.socket.c_str(), 1);
  auto service = daemon::Service::start(options);
  if (!service.ok()) fail("daemon", service.status());
  measure(role.empty() ? "10" : role, argc > 2 ? std::max(1, std::atoi(argv[2])) : 3);
  service->reset();
  std::filesystem::remove_all(folder);
  return 0;
}
