// Two elastic ranges that trade a device back and forth: from several threads of one process, and from two processes of
// a daemon, beside which a third is killed. They trade 1 GiB in slots of 64 MiB, or all of it at once. No byte is lost, nobody
// waits for ever, everybody makes progress. GPUSHARE_TEST_TRADES sets how many commits there are in all (1,000; by
// scripts/soak 100,000).
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stress/trader.hpp"
#include "support/child_process.hpp"
#include "support/executor_fixture.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "support/shared_service.hpp"

using namespace gpushare;
using namespace gpushare::test;

namespace {

// Arguments as range_worker takes them.
struct Worker : ChildProcess {
  explicit Worker(std::vector<std::string> arguments)
      : ChildProcess(GPUSHARE_RANGE_WORKER, std::move(arguments)) {}
  // How often it was asked to give back, once it has ended.
  unsigned long long asked() {
    for (std::string said = line(); !said.empty(); said = line())
      if (said.rfind("asked ", 0) == 0) return std::stoull(said.substr(6));
    FAIL("a worker did not say how often it was asked");
    return 0;
  }
};

}  // namespace

TEST_CASE("two ranges trade 1 GiB back and forth from several threads") {
  const size_t slots = GENERATE(16U, 1U);
  const auto trades = static_cast<int64_t>(number_from("GPUSHARE_TEST_TRADES", kSanitized ? 200 : 1000));
  const uint64_t run_seed = seed();
  CAPTURE(run_seed, slots);
  executor::RuntimeOptions options;
  options.device = "host?total_bytes=2147483648";
  options.capacity_bytes = kGiB + 64 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto one = Trader::open(*runtime, "first", slots, run_seed),
       other = Trader::open(*runtime, "second", slots, run_seed + 1000);
  REQUIRE(one.ok());
  REQUIRE(other.ok());
  Trader &first = **one, &second = **other;
  std::atomic<int64_t> left{trades};
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] { first.run(left, i); });
    threads.emplace_back([&, i] { second.run(left, i); });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(first.failures == 0);
  CHECK(second.failures == 0);
  CHECK(first.commits > 0);
  CHECK(second.commits > 0);
  CHECK(first.info().requests + second.info().requests > 0);
  CHECK(first.info().silences + second.info().silences == 0);
  CHECK(first.info().committed_bytes + second.info().committed_bytes <= kGiB + 64 * kMiB);
  CHECK(runtime->check() == "");
}

TEST_CASE("ranges of two processes trade 1 GiB, and one that is killed leaves its bytes to them") {
  const size_t slots = GENERATE(16U, 1U);
  SharedService shared([](daemon::ServiceOptions& options) {
    options.devices = {"host?total_bytes=2147483648"};
    options.capacity_bytes = kGiB + 64 * kMiB;
  });
  const uint64_t run_seed = seed();
  CAPTURE(run_seed, slots);
  const uint64_t trades = number_from("GPUSHARE_TEST_TRADES", kSanitized ? 200 : 1000);
  const std::string half = std::to_string(trades / 2);
  const std::string parts = std::to_string(slots);
  Worker hoards({"hoards", "16", "0", "1"});
  REQUIRE(hoards.line() == "has bytes\n");  // half of them, for which nobody can ask
  Worker one({"one", parts, half, std::to_string(run_seed)}),
      two({"two", parts, half, std::to_string(run_seed + 1000)});
  if (slots == 1) hoards.kill();  // nobody can have all beside it
  CHECK(one.line() == "has bytes\n");
  CHECK(two.line() == "has bytes\n");
  if (slots > 1) hoards.kill();
  CHECK(one.asked() + two.asked() > 0);
  CHECK(one.wait() == 0);
  CHECK(two.wait() == 0);
  while (!shared.status().sessions.empty() || shared.status().devices[0].promised_bytes != 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
}
