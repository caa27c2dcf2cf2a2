// Invariants 4, 5 and 7 of the architecture page across processes, with real work on the host device: iterations of one
// lane never overlap, none is lost or run twice and a session's order is kept, and backlogged sessions of a device stay
// together by weight under fair: judged by the order of the iterations and by what the daemon has been told, never by time. tests/faults/shared_processes.cpp has the others across processes.
// The processes are turn_worker; some are killed. GPUSHARE_TEST_ROUNDS makes more rounds (4).
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "property/turn_board.hpp"
#include "support/child_process.hpp"
#include "support/random.hpp"
#include "support/shared_service.hpp"

using namespace gpushare;
using namespace gpushare::test;

namespace {

struct TurnWorker : ChildProcess {
  explicit TurnWorker(std::vector<std::string> arguments)
      : ChildProcess(GPUSHARE_TURN_WORKER, std::move(arguments)) {}
  bool was_killed = false;
};

TurnBoard& board_of(const SharedService& shared, const std::string& path) {
  TurnBoard* const board = TurnBoard::map(path.c_str());
  REQUIRE(board != nullptr);
  REQUIRE(path.find(shared.folder) == 0);  // it goes with the folder
  for (auto& worker : board->worker) worker.weight = 1;
  return *board;
}

void all_back(const SharedService& shared) {
  eventually([&] {
    const auto now = shared.status();
    return now.sessions.empty() && now.devices[0].promised_bytes == 0;
  });
}

// The daemon has answered a question, so it has looked at the turn between the two counts of begun iterations.
struct Look {
  uint64_t asked_at = 0, answered_at = 0;
  std::array<uint64_t, kTurnWorkers> service_ns{};
};

// Asks the daemon over and over, from a thread of its own.
class Looks {
 public:
  Looks(const TurnBoard& board, std::string socket)
      : board_(board), socket_(std::move(socket)), thread_([this] { watch(); }) {}
  ~Looks() { (void)stop(); }
  const std::vector<Look>& stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    return looks_;
  }

 private:
  void watch() {
    while (!stop_) {
      Look look;
      for (size_t i = 0; i < kTurnWorkers; ++i) look.service_ns[i] = board_.worker[i].service_ns;
      look.asked_at = board_.count;
      const bool answered = client::query_service(socket_).ok();
      look.answered_at = board_.count;
      if (answered) looks_.push_back(look);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  const TurnBoard& board_;
  const std::string socket_;
  std::atomic<bool> stop_{false};
  std::vector<Look> looks_;
  std::thread thread_;
};

// The iterations of a run, and what fair may do by them. `most` is two of the longest iterations with what is in flight, by the
// least weight.
struct Order {
  const TurnBoard& board;
  const size_t workers;
  const double most;
  uint64_t runner(uint64_t at) const { return board.order[at].worker; }
  double weighted(const auto& service_ns, size_t worker) const {
    return static_cast<double>(service_ns[worker]) / static_cast<double>(board.worker[worker].weight);
  }
  // By how much `worker` is ahead of the one that is furthest behind, of those that had work then; neither counts `but`.
  double lead(const auto& service_ns, size_t worker, uint64_t at, size_t but) const {
    double least = weighted(service_ns, worker);
    for (size_t i = 0; i < workers; ++i)
      if (i != but && board.order[at].backlogged[i] != 0) least = std::min(least, weighted(service_ns, i));
    return weighted(service_ns, worker) - least;
  }
  // The turn went to a session though another was further behind. Whoever had the turn before may have been: it gave it up.
  bool passed_over(uint64_t at) const {
    return at > 0 && runner(at) != runner(at - 1) &&
           lead(board.order[at].service_ns, runner(at), at, runner(at - 1)) > most;
  }
  // The session that ran was ahead, the daemon has looked since, and the session went on all the same. One iteration may
  // have begun, and one more may follow it, before the session sees that its turn is wanted.
  bool kept(const Look& look) const {
    constexpr uint64_t kMore = 3;
    if (look.asked_at == 0 || look.answered_at + kMore > board.count) return false;
    const uint64_t ahead = runner(look.asked_at - 1);
    if (lead(look.service_ns, ahead, look.answered_at + kMore - 1, SIZE_MAX) <= most) return false;
    for (uint64_t at = look.asked_at; at < look.answered_at + kMore; ++at)
      if (runner(at) != ahead) return false;
    return true;
  }
};

}  // namespace

TEST_CASE("processes: iterations never overlap, none is lost or run twice, order is kept") {
  INFO("seed " << seed());
  Random random(seed());
  const bool share_lanes = GENERATE(false, true);
  for (uint64_t round = 0; round < number_from("GPUSHARE_TEST_ROUNDS", 4); ++round) {
    const char* const policies[] = {"fifo", "srtf", "pack", "fair", "priority"};
    const char* policy = policies[uniform(random, 0, 4)];
    CAPTURE(share_lanes, round, policy);
    SharedService shared([&](auto& options) {
      options.policy = policy;
      options.share_lanes = share_lanes;
      options.capacity_bytes = uniform(random, 16, 64) << 20;
      options.lease_ns =
          60'000'000'000;  // nobody is late: an overdue turn may overlap the next in private memory
    });
    const std::string path = shared.folder + "/board";
    TurnBoard& board = board_of(shared, path);
    const uint64_t count = uniform(random, 2, 5);
    const uint64_t iterations = 30;
    std::vector<std::unique_ptr<TurnWorker>> workers;
    for (uint64_t i = 0; i < count; ++i) {
      board.worker[i].weight = uniform(random, 1, 4);
      const auto number = [&](uint64_t least, uint64_t most) {
        return std::to_string(uniform(random, least, most));
      };
      workers.push_back(std::make_unique<TurnWorker>(std::vector<std::string>{
          path, std::to_string(i), "w" + std::to_string(i), number(0, 5), number(0, 6), number(0, 8), "10",
          number(100, 3000), std::to_string(iterations), uniform(random, 0, 1) != 0 ? "submit" : "pull"}));
    }
    if (uniform(random, 0, 1) != 0) {
      TurnWorker& victim = *workers[uniform(random, 0, count - 1)];
      if (uniform(random, 0, 2) != 0) (void)victim.line();
      std::this_thread::sleep_for(std::chrono::microseconds(uniform(random, 0, 20'000)));
      victim.kill();
      victim.was_killed = true;
    }
    for (uint64_t i = 0; i < count; ++i) {
      const TurnBoard::Worker& worker = board.worker[i];
      CAPTURE(i, workers[i]->was_killed);
      if (!workers[i]->was_killed) {
        std::string line = workers[i]->line();
        if (line == "ready\n") line = workers[i]->line();
        CHECK(line == std::to_string(iterations) + "\n");
        CHECK(workers[i]->wait() == 0);
        CHECK(worker.begun == iterations);
      }
      CHECK(worker.out_of_order == 0);
      CHECK(worker.overwritten == 0);
    }
    CHECK(board.overlaps == 0);
    all_back(shared);
  }
}

namespace {

// One run. False: the thread that asks the daemon stood still for most of it, so the looks tell nothing.
bool stays_together(Random& random, bool share_lanes) {
  SharedService shared([&](auto& options) {
    options.policy = "fair";
    options.share_lanes = share_lanes;
    options.lease_ns = 60'000'000'000;
  });
  const std::string path = shared.folder + "/board";
  TurnBoard& board = board_of(shared, path);
  const auto runtime = SharedService::open();
  const auto holder = open_session(*runtime, need("holder", 0, 2 * kMiB));
  auto held = holder->begin(GPUSHARE_NO_TIMEOUT);  // until everybody is backlogged
  REQUIRE(held.ok());
  std::vector<std::unique_ptr<TurnWorker>> workers;
  uint64_t least_weight = 4;
  const uint64_t iterations[] = {60, 60, 60};
  for (uint64_t i = 0; i < 3; ++i) {
    const uint64_t weight = uniform(random, 1, 3);
    board.worker[i].weight = weight;
    least_weight = std::min(least_weight, weight);
    workers.push_back(std::make_unique<TurnWorker>(std::vector<std::string>{
        path, std::to_string(i), "w" + std::to_string(i), "0", "2", "2", "2000",
        std::to_string(uniform(random, 3000, 6000)), std::to_string(iterations[i]), "submit"}));
  }
  for (auto& worker : workers) REQUIRE(worker->line() == "ready\n");
  Looks looks(board, shared.options.socket);
  REQUIRE_OK((*held)->end());
  for (uint64_t i = 0; i < workers.size(); ++i) {
    CHECK(workers[i]->line() == std::to_string(iterations[i]) + "\n");
    CHECK(workers[i]->wait() == 0);
  }
  const std::vector<Look>& seen = looks.stop();
  CAPTURE(board.longest_ns.load(), least_weight, board.count.load(), seen.size());
  CHECK(board.overlaps == 0);
  REQUIRE(board.count == 180);
  const Order order{board, workers.size(),
                    4 * static_cast<double>(board.longest_ns) / static_cast<double>(least_weight)};
  for (uint64_t at = 0; at < board.count; ++at) {
    CAPTURE(at);
    CHECK_FALSE(order.passed_over(at));
  }
  for (const Look& look : seen) {
    CAPTURE(look.asked_at, look.answered_at);
    CHECK_FALSE(order.kept(look));
  }
  REQUIRE_OK(holder->close());
  REQUIRE_OK(runtime->close());
  all_back(shared);
  return seen.size() > 10;
}

}  // namespace

TEST_CASE("processes: service of backlogged sessions under fair stays together by weight") {
  INFO("seed " << seed());
  Random random(seed());
  const bool share_lanes = GENERATE(false, true);
  CAPTURE(share_lanes);
  while (!stays_together(random, share_lanes)) {
  }
}
