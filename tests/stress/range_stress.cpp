// Two elastic ranges that trade a device back and forth: from several threads of one process, and from two processes of a daemon, one of
// which is killed. No byte is lost, nobody waits for ever, everybody makes progress. GPUSHARE_TEST_TRADES sets how many commits there
// are in all (1,000; by scripts/soak 100,000).
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "executor/range.hpp"
#include "support/child_process.hpp"
#include "support/executor_fixture.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "support/shared_service.hpp"

using namespace gpushare;
using namespace gpushare::test;

namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr size_t kSlots = 16;
constexpr uint64_t kSlotBytes = kGiB / kSlots;

uint64_t* word_at(memory::Address address) {
  return reinterpret_cast<uint64_t*>(address);  // NOLINT(performance-no-int-to-ptr)
}

// One side: a range of 1 GiB in slots of 64 MiB, each with a stamp in every granule while it is committed.
class Trader {
 public:
  Trader(executor::Runtime& runtime, const char* name, uint64_t seed) : seed_(seed) {
    session_ = open_session(runtime, need(name, 0, 2 * kMiB));
    executor::RangeOptions options;
    options.name = name;
    options.reserved_bytes = kGiB;
    options.answer_ns = 60'000'000'000;
    options.give_back = [this](uint64_t bytes, uint64_t) { return give(bytes); };
    auto range = session_->open_range(std::move(options));
    REQUIRE(range.ok());
    range_ = *range;
    base_ = range_->info().address;
    granule_ = range_->info().granule_bytes;
  }

  void run(std::atomic<int64_t>& left, uint64_t thread) {
    Random random(seed_ + thread);
    while (left > 0 && failures == 0) {
      Slot& slot = slots_[uniform(random, 0, kSlots - 1)];
      base::MutexLock lock(slot.mutex);
      if (slot.stamp != 0) {
        check(slot);
        if (uniform(random, 0, 3) == 0) drop(slot);
        continue;
      }
      if (!range_->commit(offset(slot), kSlotBytes, GPUSHARE_NO_TIMEOUT).ok()) {
        ++failures;
        return;
      }
      slot.stamp = random() | 1;
      for (uint64_t at = 0; at < kSlotBytes; at += granule_)
        *word_at(base_ + offset(slot) + at) = slot.stamp + at;
      ++commits;
      --left;
    }
  }
  executor::RangeInfo info() const { return range_->info(); }

  std::atomic<uint64_t> commits{0}, failures{0};

 private:
  struct Slot {
    base::Mutex mutex;
    uint64_t stamp = 0;  // 0: not committed
  };
  uint64_t offset(const Slot& slot) const {
    return static_cast<uint64_t>(&slot - slots_.data()) * kSlotBytes;
  }
  void check(const Slot& slot) {
    for (uint64_t at = 0; at < kSlotBytes; at += granule_)
      if (*word_at(base_ + offset(slot) + at) != slot.stamp + at) ++failures;
  }
  void drop(Slot& slot) {
    slot.stamp = 0;
    if (!range_->decommit(offset(slot), kSlotBytes).ok()) ++failures;
  }
  // Gives slots that no thread works on. A slot whose thread waits is left out, or both sides would wait for each other.
  uint64_t give(uint64_t bytes) {
    uint64_t given = 0;
    for (Slot& slot : slots_) {
      if (given >= bytes) break;
      if (!slot.mutex.try_lock()) continue;
      if (slot.stamp != 0) {
        check(slot);
        drop(slot);
        given += kSlotBytes;
      }
      slot.mutex.unlock();
    }
    return given;
  }

  const uint64_t seed_;
  std::shared_ptr<executor::Session> session_;
  std::shared_ptr<executor::Range> range_;
  memory::Address base_ = 0;
  uint64_t granule_ = 0;
  std::array<Slot, kSlots> slots_;
};

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
  const auto trades = static_cast<int64_t>(number_from("GPUSHARE_TEST_TRADES", kSanitized ? 200 : 1000));
  const uint64_t run_seed = seed();
  CAPTURE(run_seed);
  executor::RuntimeOptions options;
  options.device = "host?total_bytes=2147483648";
  options.capacity_bytes = kGiB + 64 * kMiB;
  auto runtime = open_runtime(std::move(options));
  Trader first(*runtime, "first", run_seed), second(*runtime, "second", run_seed + 1000);
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

TEST_CASE("ranges of two processes trade, and one that is killed leaves its bytes to the other") {
  SharedService shared;
  const std::string trades = std::to_string(number_from("GPUSHARE_TEST_TRADES", 1000) / 2);
  Worker one({"one", trades}), two({"two", trades}), hoards({"hoards", "0"});
  CHECK(hoards.line() == "has bytes\n");  // has 40 of 64 MiB now
  hoards.kill();
  CHECK(one.wait() == 0);
  CHECK(two.wait() == 0);
  CHECK(one.asked() + two.asked() > 0);
  while (!shared.status().sessions.empty() || shared.status().devices[0].promised_bytes != 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
}
