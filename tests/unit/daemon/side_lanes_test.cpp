// Weights and ranks over the lanes of a device whose daemon gives several turns at a time, which no lane alone can hold.
// The counts are of iterations, and leave room for a machine that is late.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <thread>

#include "unit/daemon/service_sessions.hpp"

using namespace gpushare;
using namespace gpushare::test;

namespace {

void nap(void*) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

struct Nap : executor::Work {
  explicit Nap(std::atomic<int>& ended) : ended_(ended) {}
  base::Status run(const std::shared_ptr<executor::Iteration>& iteration) override {
    auto stream = iteration->stream();
    const base::Status status = stream.ok() ? (*stream)->launch_host(&nap, nullptr) : stream.status();
    ++ended_;
    return status;
  }
  std::atomic<int>& ended_;
};

std::vector<std::shared_ptr<executor::Ticket>> submit(executor::Session& session, int count,
                                                      std::atomic<int>& ended) {
  std::vector<std::shared_ptr<executor::Ticket>> tickets;
  for (int i = 0; i < count; ++i) {
    std::unique_ptr<executor::Work> work = std::make_unique<Nap>(ended);
    auto ticket = session.submit(work);
    REQUIRE(ticket.ok());
    tickets.push_back(*ticket);
  }
  return tickets;
}

// The iterations that `less` ends while `more` does 100, side by side in lanes of their own; both always have work.
int ended_meanwhile(const char* policy, const executor::SessionOptions& more_options,
                    const executor::SessionOptions& less_options) {
  SharedService shared([&](auto& options) {
    options.policy = policy;
    options.max_lanes = 2;
  });
  const auto a = shared.open(), b = shared.open();
  const auto less = open_session(*b, less_options), more = open_session(*a, more_options);
  std::atomic<int> of_less{0}, of_more{0};
  // Their lengths are known before anything is counted.
  for (const auto& [session, ended] : {std::pair(less.get(), &of_less), std::pair(more.get(), &of_more)})
    for (const auto& ticket : submit(*session, 5, *ended)) REQUIRE_OK(ticket->wait(kLong));
  const auto rest = submit(*less, 200, of_less);
  const auto tickets = submit(*more, 100, of_more);
  const int before = of_less;
  for (const auto& ticket : tickets) REQUIRE_OK(ticket->wait(kLong));
  const int meanwhile = of_less - before;
  for (const auto& ticket : rest) REQUIRE_OK(ticket->wait(kLong));  // nobody is held back for ever
  return meanwhile;
}

}  // namespace

TEST_CASE("weights hold over lanes of processes, though each session is alone in its lane") {
  auto heavy = need("heavy", 2 * kMiB, 2 * kMiB);
  heavy.weight = 4;
  const int light = ended_meanwhile("fair", heavy, need("light", 2 * kMiB, 2 * kMiB));
  CHECK(light < 60);  // 25 and a few; 100 where each lane goes its own way
}

TEST_CASE("a session of higher rank has the device for itself, though others have lanes of their own") {
  const int low =
      ended_meanwhile("priority", need("high", 2 * kMiB, 2 * kMiB, 1), need("low", 2 * kMiB, 2 * kMiB));
  CHECK(low < 40);  // a few; 100 where each lane goes its own way
}
