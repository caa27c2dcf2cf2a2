// A process with one session on a shared device, for processes_property.cpp:
//   turn_worker BOARD INDEX NAME PRIORITY P_MIB E_MIB LEAST_US MOST_US ITERATIONS HOW
// runs its iterations one after the other. HOW: "submit" submits all of them at once, so that the session is backlogged
// until the last; "pull" begins and ends each. Prints "ready" once it is admitted and all are submitted. Each iteration
// claims the device on the board while its work is there, and writes its number into its scratch memory. Prints its
// iterations at the end.
// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "executor/runtime.hpp"
#include "property/turn_board.hpp"
#include "support/random.hpp"

using namespace gpushare;

namespace {

test::TurnBoard* g_board = nullptr;
uint64_t g_index = 0;

int fail(const char* what, const base::Status& status) {
  std::fprintf(stderr, "turn_worker: %s: %s\n", what, status.to_string().c_str());
  return 1;
}

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

// Killed ones leave their claim on the board.
bool is_dead(int32_t process) {
  const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
  if (descriptor < 0) return errno == ESRCH;
  pollfd ended{descriptor, POLLIN, 0};
  const bool dead = poll(&ended, 1, 0) == 1;
  close(descriptor);
  return dead;
}

struct Step {
  uint64_t number = 0, work_ns = 0;
  std::atomic<uint64_t>* scratch = nullptr;  // null: it has none
};

void on_device(void* data) {
  const auto* step = static_cast<const Step*>(data);
  test::TurnBoard& board = *g_board;
  test::TurnBoard::Worker& mine = board.worker[g_index];
  const int32_t before = board.holder.exchange(getpid());
  if (before != 0 && !is_dead(before)) ++board.overlaps;
  const uint64_t begin_ns = now_ns();
  if (mine.begun.fetch_add(1) != step->number) ++mine.out_of_order;
  if (const uint64_t at = board.count.load(); at < test::TurnBoard::kMostBegun) {
    test::TurnBoard::Begun& begun = board.order[at];
    begun.worker = g_index;
    for (size_t i = 0; i < test::kTurnWorkers; ++i) {
      begun.service_ns[i] = board.worker[i].service_ns.load();
      begun.backlogged[i] = board.worker[i].backlogged.load();
    }
    board.count = at + 1;  // nobody else is on the device
  }
  if (step->scratch != nullptr) step->scratch->store(g_index << 32 | step->number);
  while (now_ns() - begin_ns < step->work_ns) {
  }
  if (step->scratch != nullptr && step->scratch->load() != (g_index << 32 | step->number)) ++mine.overwritten;
  int32_t self = getpid();
  board.holder.compare_exchange_strong(self, 0);
}

base::Status enqueue(executor::Iteration& iteration, uint64_t ephemeral_bytes, Step* step) {
  if (ephemeral_bytes > 0) {
    GPUSHARE_ASSIGN_OR_RETURN(const memory::Address address, iteration.alloc(ephemeral_bytes, 0));
    step->scratch = reinterpret_cast<std::atomic<uint64_t>*>(address);
  }
  GPUSHARE_ASSIGN_OR_RETURN(const auto stream, iteration.stream());
  return stream->launch_host(&on_device, step);
}

class StepWork final : public executor::Work {
 public:
  StepWork(executor::Session& session, uint64_t ephemeral_bytes, Step* step, bool last)
      : session_(session), ephemeral_bytes_(ephemeral_bytes), step_(step), last_(last) {}
  base::Status run(const std::shared_ptr<executor::Iteration>& iteration) override {
    const uint64_t service_ns = session_.info().service_ns;
    const uint64_t before_ns = g_board->worker[g_index].service_ns.exchange(service_ns);
    test::raise_to(g_board->longest_ns, service_ns - before_ns);
    if (last_) g_board->worker[g_index].backlogged = 0;
    return enqueue(*iteration, ephemeral_bytes_, step_);
  }

 private:
  executor::Session& session_;
  const uint64_t ephemeral_bytes_;
  Step* const step_;
  const bool last_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 11) return 2;
  const auto number = [&](int at) { return std::strtoull(argv[at], nullptr, 10); };
  g_board = test::TurnBoard::map(argv[1]);
  g_index = number(2);
  if (g_board == nullptr || g_index >= test::kTurnWorkers) return 2;
  executor::RuntimeOptions options;
  options.device = "shared";
  options.enqueue_depth = 1;
  auto runtime = executor::Runtime::open(std::move(options));
  if (!runtime.ok()) return fail("open", runtime.status());
  executor::SessionOptions wanted;
  wanted.name = argv[3];
  wanted.priority = std::atoi(argv[4]);
  wanted.weight = static_cast<double>(g_board->worker[g_index].weight.load());
  wanted.persistent_bytes = number(5) << 20;
  wanted.ephemeral_bytes = number(6) << 20;
  const uint64_t iterations = number(9);
  auto session = (*runtime)->open_session(wanted);
  if (!session.ok()) return fail("open_session", session.status());
  test::Random random(test::seed() + g_index);
  std::vector<Step> steps(iterations);
  for (uint64_t i = 0; i < iterations; ++i)
    steps[i] = {i, 1000 * test::uniform(random, number(7), number(8)), nullptr};
  const bool submits = std::string(argv[10]) == "submit";
  std::vector<std::shared_ptr<executor::Ticket>> tickets;
  if (submits) {
    for (uint64_t i = 0; i < iterations; ++i) {
      std::unique_ptr<executor::Work> work =
          std::make_unique<StepWork>(**session, wanted.ephemeral_bytes, &steps[i], i + 1 == iterations);
      auto ticket = (*session)->submit(work);
      if (!ticket.ok()) return fail("submit", ticket.status());
      tickets.push_back(*ticket);
    }
    g_board->worker[g_index].backlogged = 1;
  }
  std::puts("ready");
  std::fflush(stdout);
  for (const auto& ticket : tickets)
    if (const base::Status done = ticket->wait(GPUSHARE_NO_TIMEOUT); !done.ok()) return fail("ticket", done);
  for (Step& step : steps) {
    if (submits) break;
    auto iteration = (*session)->begin(GPUSHARE_NO_TIMEOUT);
    if (!iteration.ok()) return fail("begin", iteration.status());
    if (const base::Status enqueued = enqueue(**iteration, wanted.ephemeral_bytes, &step); !enqueued.ok())
      return fail("enqueue", enqueued);
    if (const base::Status ended = (*iteration)->end(); !ended.ok()) return fail("end", ended);
  }
  if (const base::Status done = (*runtime)->synchronize(GPUSHARE_NO_TIMEOUT); !done.ok())
    return fail("synchronize", done);
  const auto info = (*session)->info();
  std::printf("%llu\n", static_cast<unsigned long long>(info.iterations_done));
  if (const base::Status closed = (*session)->close(); !closed.ok()) return fail("close", closed);
  return 0;
}
