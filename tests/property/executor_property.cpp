// The eight invariants of the architecture page under random sessions, policies and failures, on host, sim and
// the cuda backend over the stand-in for its driver, in both layouts; 110,000 steps a backend. One thread drives (so a
// seed repeats the run), pushed iterations run beside it.
//   1 safety and 2 no overlap: Runtime::check(), which also holds that memory has no more than was promised, and
//   info().promised_bytes, with scripted faults of the device too, never above the effective capacity while capacity
//   and quotas change; 3 no ephemeral bytes between iterations; 4 the iterations of a lane never overlap on the device:
//   each claims its lane by host functions in stream order; 5 none lost or run twice, in order; 6 a failing session
//   leaves no bytes and harms no other; 7 fair: backlogged sessions of a lane stay within two of the longest
//   iterations; 8 the device comes back to its first state.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/executor_fixture.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT
using executor::SessionState;

constexpr uint64_t kDefaultSteps = kSanitized ? 6'000 : 110'000;

// The steps for both layouts of a backend together.
uint64_t steps() {
  return number_from("GPUSHARE_EXECUTOR_STEPS", kDefaultSteps);
}

const std::string kCuda = std::string("cuda?total_bytes=268435456&driver=") + GPUSHARE_CUDA_STANDIN;
std::vector<Setup> setups() {
  std::vector<Setup> all(std::begin(kSetups), std::end(kSetups));
  // Small sessions have smaller granules than lanes, as on a large device.
  all.push_back({"host?total_bytes=268435456", memory::Layout::kVirtual, 8 * kMiB});
  all.push_back({kCuda.c_str(), memory::Layout::kVirtual});
  all.push_back({kCuda.c_str(), memory::Layout::kContiguous});
  return all;
}

// Shared with pushed iterations and host functions; nothing in it is a Catch assertion.
struct Ledger {
  std::atomic<uint64_t> overlaps{0};      // device: two iterations of a lane at once
  std::atomic<uint64_t> out_of_order{0};  // pushes of a session
  std::atomic<uint64_t> foreign{0};       // a block that was not its session's
  std::atomic<uint64_t> ran{0};
  std::atomic<uint64_t> dropped{0};
  std::atomic<uint64_t> destroyed{0};
};

// One a lane stream: who is on the device now.
struct LaneClaim {
  std::atomic<uint64_t> holder{0};
};
struct ClaimStep {
  Ledger* ledger;
  LaneClaim* lane;
  uint64_t iteration;
};

struct Job {
  std::shared_ptr<executor::Session> session;
  std::shared_ptr<std::atomic<uint64_t>> last_run = std::make_shared<std::atomic<uint64_t>>(0);
  std::shared_ptr<executor::Iteration> open;
  uint64_t pushed = 0;
  bool dead = false;      // cancelled or failed by us
  bool may_fail = false;  // a failing push is under way
  std::vector<memory::Address> blocks;
  std::vector<std::shared_ptr<executor::Ticket>> tickets;
};

class PropertyWork final : public executor::Work {
 public:
  PropertyWork(Ledger& ledger, std::shared_ptr<std::atomic<uint64_t>> last_run, uint64_t number,
               uint64_t bytes, int how)
      : ledger_(ledger), last_run_(std::move(last_run)), number_(number), bytes_(bytes), how_(how) {
    ++alive;
  }
  ~PropertyWork() override {
    ++ledger_.destroyed;
    if (!ran_) ++ledger_.dropped;
    --alive;
  }
  static inline std::atomic<int64_t> alive{0};
  base::Status run(const std::shared_ptr<executor::Iteration>& iteration) override {
    ran_ = true;
    ++ledger_.ran;
    if (last_run_->exchange(number_) >= number_) ++ledger_.out_of_order;
    const auto block = iteration->alloc(bytes_, 0);
    if (block.ok()) {
      const auto stream = iteration->stream();
      if (stream.ok()) (void)enqueue(**stream, 1000 + bytes_ / 1000);
    }
    if (how_ == 1) return {GPUSHARE_UNKNOWN, "scripted failure"};
    if (how_ == 2) throw std::runtime_error("scripted exception");
    return {};
  }

 private:
  Ledger& ledger_;
  std::shared_ptr<std::atomic<uint64_t>> last_run_;
  uint64_t number_, bytes_;
  int how_;
  bool ran_ = false;
};

class Driver {
 public:
  // `faults`: now and then the device has no memory for one call. A session may then fail at any time, for itself.
  Driver(const Setup& setup, uint64_t seed, bool faults = false)
      : setup_(setup), random_(seed), faults_(faults) {
    executor::RuntimeOptions options = options_of(setup, "fair");
    options.max_lanes = static_cast<uint32_t>(uniform(random_, 1, 4));
    options.enqueue_depth = static_cast<uint32_t>(uniform(random_, 1, 4));
    runtime_ = open_runtime(std::move(options));
    partitions_ = runtime_->device().can(GPUSHARE_DEVICE_CAP_PARTITIONS);
    // Until it is paid back by close_all, the device's first state.
  }
  // Also of a run that failed nothing is left to work on what the next one counts in.
  ~Driver() { runtime_.reset(); }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Stops in the middle, with iterations open and queued.
  void run_to_the_middle() {
    while (failure_.empty() && (PropertyWork::alive < 5 || !has_open())) one_step();
  }
  void run(uint64_t steps) {
    for (uint64_t step = 0; step < steps; ++step) {
      if (faults_ && draw(0, 15) == 0) arm_fault();
      one_step();
      if (step % 64 == 0) check();
      if (!failure_.empty()) {
        INFO(setup_.device << " layout " << static_cast<int>(setup_.layout) << " step " << step);
        FAIL(failure_);
      }
    }
    if (faults_) disarm();
    close_all();
    if (!failure_.empty()) FAIL(failure_);
  }

 private:
  void set_fault(uint32_t kind, uint64_t at_call) {
    gpushare_backend_fault fault{};
    fault.struct_size = sizeof fault;
    fault.kind = kind;
    fault.at_call = at_call;
    expect(runtime_->device().set_fault(fault).ok(), "set_fault failed");
  }
  void arm_fault() {
    static constexpr uint32_t kKinds[] = {GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY, GPUSHARE_FAULT_MAP_FAILS,
                                          GPUSHARE_FAULT_HOST_OUT_OF_MEMORY};
    set_fault(kKinds[draw(0, 2)], draw(1, 4));
  }
  void disarm() { set_fault(GPUSHARE_FAULT_NONE, 0); }
  // Statuses that any call may return after the device refused memory to it, or to the session before.
  bool faulted(int32_t code) const {
    return faults_ && (code == GPUSHARE_DEVICE_OUT_OF_MEMORY || code == GPUSHARE_HOST_OUT_OF_MEMORY);
  }

  void expect(bool holds, const char* what) {
    if (!holds && failure_.empty()) failure_ = what;
  }
  void fail_with(const char* what, const base::Status& status) {
    if (failure_.empty()) failure_ = what + status.to_string();
  }
  uint64_t draw(uint64_t low, uint64_t high) { return uniform(random_, low, high); }

  bool has_open() const {
    return std::any_of(jobs_.begin(), jobs_.end(), [](const Job& job) { return job.open != nullptr; });
  }
  Job* any() { return jobs_.empty() ? nullptr : &jobs_[draw(0, jobs_.size() - 1)]; }

  void one_step() {
    const uint64_t what = draw(0, 99);
    if (what < 4 || jobs_.empty()) {
      open();
    } else if (what < 45) {
      pull(*any());
    } else if (what < 65) {
      push(*any());
    } else if (what < 75) {
      persistent(*any());
    } else if (what < 80) {
      finish_open(*any());
    } else if (what < 84) {
      wait_ticket(*any());
    } else if (what < 86) {
      Job& job = *any();
      if (job.open == nullptr && !job.dead) {
        (void)job.session->cancel();
        job.dead = true;
      }
    } else if (what < 90) {
      close(draw(0, jobs_.size() - 1));
    } else if (what < 92) {
      static const char* const kNames[] = {"fifo", "srtf", "pack", "fair", "priority"};
      auto policy = sched::make_policy(kNames[draw(0, 4)]);
      expect(runtime_->set_policy(std::move(*policy)).ok(), "set_policy failed");
    } else if (what < 93) {
      if (draw(0, 3) != 0) {
        (void)any()->session->set_quota(draw(0, 1) == 0 ? 0 : draw(1, 60) * kMiB);
      } else {
        capacity_bytes_ = draw(0, 1) == 0 ? 0 : draw(16, 200) * kMiB;
        expect(runtime_->set_capacity(capacity_bytes_).ok(), "set_capacity failed");
        check_info();
      }
    } else if (what < 95) {
      Job& job = *any();
      (void)job.session->set_priority(static_cast<int32_t>(draw(0, 5)));
      (void)job.session->set_weight(static_cast<double>(draw(1, 4)));
      (void)job.session->set_remaining(draw(0, 1'000'000));
    } else {
      check_info();
    }
  }

  void open() {
    if (jobs_.size() >= 12) return;
    executor::SessionOptions options;
    options.cls = draw(0, 3) == 0 ? sched::SessionClass::kOpportunistic : sched::SessionClass::kGuaranteed;
    if (draw(0, 3) != 0) options.persistent_bytes = draw(0, 40) * kMiB;
    if (draw(0, 3) != 0) options.ephemeral_bytes = draw(1, 60) * kMiB;
    options.priority = static_cast<int32_t>(draw(0, 3));
    options.weight = static_cast<double>(draw(1, 3));
    options.allow_queueing = draw(0, 4) != 0;
    options.allow_spill = draw(0, 7) == 0;
    options.plan_iterations = draw(0, 3) == 0;
    options.iterations_total = draw(0, 50);
    if (partitions_ && draw(0, 3) == 0) options.compute_units = static_cast<uint32_t>(draw(1, 136));
    auto session = runtime_->open_session(options);
    if (!session.ok()) {
      const int32_t code = session.status().code();
      expect(code == GPUSHARE_DEVICE_OUT_OF_MEMORY || code == GPUSHARE_EXCEEDS_CAPACITY || faulted(code),
             "open failed otherwise");
      return;
    }
    Job job;
    job.session = *session;
    job.may_fail = faults_;
    jobs_.push_back(std::move(job));
  }

  void pull(Job& job) {
    if (job.open != nullptr) {
      work_in(job);
      if (draw(0, 2) != 0) finish_open(job);
      return;
    }
    auto begun = job.session->begin(draw(0, 9) == 0 ? 200'000 : 0);
    if (!begun.ok()) {
      const int32_t code = begun.status().code();
      expect(code == GPUSHARE_TIMED_OUT || code == GPUSHARE_CANCELLED || code == GPUSHARE_INVALID_STATE ||
                 faulted(code),
             "begin failed otherwise");
      if (code == GPUSHARE_CANCELLED) expect(job.dead, "cancelled by nobody");
      return;
    }
    job.open = *begun;
    claim(job);
    work_in(job);
  }

  // Invariant 4: host functions at both ends of what an iteration enqueues.
  void claim(Job& job) {
    const auto stream = job.open->stream();
    if (!stream.ok()) return;
    LaneClaim& lane = lanes_[stream->get()];
    auto step = std::make_unique<ClaimStep>(ClaimStep{&ledger_, &lane, ++claims_});
    const base::Status status = (*stream)->launch_host(
        [](void* data) {
          auto* claimed = static_cast<ClaimStep*>(data);
          if (claimed->lane->holder.exchange(claimed->iteration) != 0) ++claimed->ledger->overlaps;
        },
        step.get());
    if (status.ok()) {
      claim_of_[job.session->id()] = step.get();
      steps_.push_back(std::move(step));
    }
  }
  void unclaim(Job& job) {
    const auto found = claim_of_.find(job.session->id());
    const auto stream = job.open->stream();
    if (found == claim_of_.end() || !stream.ok()) return;
    (void)(*stream)->launch_host(
        [](void* data) {
          auto* claimed = static_cast<ClaimStep*>(data);
          if (claimed->lane->holder.exchange(0) != claimed->iteration) ++claimed->ledger->overlaps;
        },
        found->second);
    claim_of_.erase(found);
  }

  void work_in(Job& job) {
    const uint64_t bytes = draw(0, 19) == 0 ? draw(1, 300 * kMiB) : draw(1, 8 * kMiB);
    const auto block = job.open->alloc(bytes, draw(0, 9) == 0 ? uint64_t{1} << draw(8, 21) : 0);
    if (!block.ok()) {
      const int32_t code = block.status().code();
      const bool ended = job.dead || job.may_fail;
      if (code != GPUSHARE_DEVICE_OUT_OF_MEMORY && code != GPUSHARE_QUOTA_EXCEEDED && !faulted(code) &&
          !(ended && (code == GPUSHARE_INVALID_STATE || code == GPUSHARE_CANCELLED)))
        fail_with("iteration alloc failed: ", block.status());
      return;
    }
    const auto info = runtime_->find(*block);
    expect(info.ok() && info->session == job.session->id(), "a block is not its session's");
    if (draw(0, 15) == 0) {
      const base::Status kept = job.open->keep(*block);
      if (kept.ok()) job.blocks.push_back(*block);
    } else if (draw(0, 3) == 0) {
      expect(runtime_->free(*block).ok(), "free of a live block failed");
      expect(runtime_->free(*block).code() == GPUSHARE_NOT_FOUND, "double free passed");
    }
    const auto stream = job.open->stream();
    if (stream.ok()) (void)enqueue(**stream, draw(100, 100'000));
  }

  void finish_open(Job& job) {
    if (job.open == nullptr) return;
    unclaim(job);
    if (draw(0, 59) == 0) {
      expect(job.open->fail({GPUSHARE_UNKNOWN, "scripted failure"}).ok(), "fail failed");
      expect(job.session->info().state == SessionState::kFailed || job.dead || job.may_fail,
             "fail did not end the session");
      job.dead = true;
    } else {
      expect(job.open->end().ok(), "end failed");
    }
    job.open.reset();
    // Invariant 3, unless a push of the same session has begun already.
    if (job.pushed == 0)
      expect(job.session->info().ephemeral_bytes == 0, "ephemeral bytes between iterations");
  }

  void push(Job& job) {
    const uint64_t fate = draw(0, 199);
    const int how = fate == 0 ? 1 : fate == 1 ? 2 : 0;
    std::unique_ptr<executor::Work> work =
        std::make_unique<PropertyWork>(ledger_, job.last_run, ++job.pushed, draw(1, 4 * kMiB), how);
    ++works_;
    auto ticket = job.session->submit(work);
    if (!ticket.ok()) {
      const int32_t code = ticket.status().code();
      expect(code == GPUSHARE_CANCELLED || code == GPUSHARE_INVALID_STATE || faulted(code),
             "submit failed otherwise");
      expect(work != nullptr, "a refused submit took the work");
      return;
    }
    expect(work == nullptr, "an accepted submit left the work");
    if (how != 0) job.may_fail = true;
    if (job.tickets.size() < 16) job.tickets.push_back(*ticket);
  }

  void wait_ticket(Job& job) {
    if (job.tickets.empty()) return;
    const base::Status status = job.tickets.back()->wait(draw(0, 3) == 0 ? 1'000'000 : 0);
    if (status.code() == GPUSHARE_TIMED_OUT || status.code() == GPUSHARE_INVALID_STATE) return;
    if (!status.ok() && !job.dead && !job.may_fail) {
      fail_with("a ticket failed: ", status);
      failure_ += "; session: " + job.session->info().status.to_string();
    }
    job.tickets.pop_back();
  }

  void persistent(Job& job) {
    // Blocks of a session that has ended are gone, and their addresses others'.
    if (!job.blocks.empty() && !job.dead && !job.may_fail && draw(0, 1) == 0) {
      const base::Status freed = runtime_->free(job.blocks.back());
      if (!freed.ok() && !job.dead && !job.may_fail) {
        fail_with("free of a persistent block failed: ", freed);
        failure_ += "; session: " + job.session->info().status.to_string();
      }
      job.blocks.pop_back();
      return;
    }
    // Only inside an iteration: else the session may be paged out at any time, and the call waits for others to leave, which
    // are this thread's to close.
    if (job.open == nullptr) return;
    const auto block = job.session->alloc(draw(0, 1) == 0 ? memory::Kind::kModel : memory::Kind::kFramework,
                                          draw(1, 6 * kMiB), 0);
    if (block.ok())
      job.blocks.push_back(*block);
    else if (block.status().code() != GPUSHARE_DEVICE_OUT_OF_MEMORY &&
             block.status().code() != GPUSHARE_QUOTA_EXCEEDED && !job.dead && !job.may_fail)
      fail_with("alloc failed: ", block.status());
  }

  void close(size_t index) {
    Job& job = jobs_[index];
    finish_open(job);
    expect(job.session->close().ok(), "close failed");
    const auto info = job.session->info();
    expect(info.persistent_bytes == 0 && info.ephemeral_bytes == 0 && info.spilled_bytes == 0,
           "a closed session has bytes");
    for (const auto& ticket : job.tickets)
      expect(ticket->wait(0).code() != GPUSHARE_TIMED_OUT, "a ticket of a closed session is open");
    jobs_[index] = std::move(jobs_.back());
    jobs_.pop_back();
  }

  void check_info() {
    const auto info = runtime_->info();
    expect(info.ok(), "info failed");
    expect(info->promised_bytes <= info->effective_capacity_bytes, "more promised than there is");
    expect(capacity_bytes_ == 0 || info->capacity_bytes == capacity_bytes_, "another capacity than was set");
    expect(info->effective_capacity_bytes == info->capacity_bytes ||
               info->effective_capacity_bytes == info->promised_bytes,
           "the effective capacity did not fall with the promises");
    expect(info->lanes <= executor::kMaxLanes, "too many lanes");
  }

  void check() {
    std::string wrong = runtime_->check();
    if (!wrong.empty() && failure_.empty()) failure_ = wrong;
    check_info();
    expect(ledger_.overlaps == 0, "iterations of a lane overlap on the device");
    expect(ledger_.out_of_order == 0, "pushed iterations out of order, or twice");
  }

  void close_all() {
    while (!jobs_.empty() && failure_.empty()) close(jobs_.size() - 1);
    if (!failure_.empty()) return;
    const auto info = runtime_->info();
    expect(info->persistent_bytes == 0 && info->ephemeral_bytes == 0, "bytes are left");
    expect(info->promised_bytes == 0 && info->lanes == 0, "promises are left");
    const base::Status closed = runtime_->close();
    if (!closed.ok()) failure_ = "close: " + closed.to_string();  // names leaked objects
    expect(ledger_.destroyed == works_, "a work was lost or destroyed twice");
    expect(ledger_.ran + ledger_.dropped == works_, "a work neither ran nor was dropped");
    expect(ledger_.overlaps == 0, "iterations of a lane overlap on the device");
    expect(ledger_.out_of_order == 0, "pushed iterations out of order, or twice");
  }

  const Setup setup_;
  Random random_;
  const bool faults_;
  std::shared_ptr<executor::Runtime> runtime_;
  std::vector<Job> jobs_;
  std::map<executor::Stream*, LaneClaim> lanes_;
  std::map<uint64_t, ClaimStep*> claim_of_;
  std::vector<std::unique_ptr<ClaimStep>> steps_;
  Ledger ledger_;
  uint64_t works_ = 0, claims_ = 0;
  uint64_t capacity_bytes_ = 0;  // set last
  bool partitions_ = false;
  std::string failure_;
};

TEST_CASE("random sessions, policies and failures keep the invariants") {
  const Setup setup = GENERATE(from_range(setups()));
  const uint64_t seed = test::seed();
  INFO("seed " << seed << ", GPUSHARE_TEST_SEED repeats it");
  constexpr uint64_t kRuns = 8;
  for (uint64_t run = 0; run < kRuns; ++run) Driver(setup, seed + run).run(steps() / kRuns / 2);
}

TEST_CASE(
    "random sessions, policies and failures keep the invariants on a device that has no memory now and "
    "then") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  const uint64_t seed = test::seed();
  INFO("seed " << seed << ", GPUSHARE_TEST_SEED repeats it");
  constexpr uint64_t kRuns = 4;
  for (uint64_t run = 0; run < kRuns; ++run) Driver(setup, seed + run, true).run(steps() / kRuns / 8);
}

TEST_CASE("a run that is given up in its middle leaves nothing behind for the next") {
  const Setup setup = GENERATE(from_range(setups()));
  for (uint64_t run = 0; run < 8; ++run) {
    {
      Driver driver(setup, test::seed() + run);
      driver.run_to_the_middle();
    }
    REQUIRE(PropertyWork::alive == 0);
  }
}

// Not run by default: the device that GPUSHARE_EXECUTOR_SPEC names, for scripts/gpu-suite.
TEST_CASE("named device", "[.]") {
  const char* spec = std::getenv("GPUSHARE_EXECUTOR_SPEC");
  REQUIRE(spec != nullptr);
  const uint64_t seed = test::seed();
  INFO("seed " << seed << ", GPUSHARE_TEST_SEED repeats it");
  for (const memory::Layout layout : {memory::Layout::kVirtual, memory::Layout::kContiguous})
    Driver({spec, layout}, seed).run(steps() / 16);
}

// Invariant 7, on virtual time: sessions of unlike iterations, always backlogged in one lane. With one
// iteration in flight at a time each function knows exactly what everybody has received when it starts.
TEST_CASE("fair: service of backlogged sessions in a lane differs by at most two of the longest iterations") {
  constexpr size_t kMembers = 4;
  constexpr int kIterations = 200;
  Random random(test::seed());
  INFO("seed " << test::seed() << ", GPUSHARE_TEST_SEED repeats it");
  for (int round = 0; round < 10; ++round) {
    executor::RuntimeOptions options = options_of(kSetups[2], "fair");
    options.max_lanes = 1;
    options.enqueue_depth = 1;
    auto runtime = open_runtime(std::move(options));
    struct Shared {
      uint64_t service_ns[kMembers] = {};
      int left[kMembers] = {};
      uint64_t longest_ns = 0, largest_gap_ns = 0, turns_compared = 0;
    } shared;
    // Holds the lane until everything has been submitted.
    auto holder = open_session(*runtime, need("holder", 0, kMiB));
    auto held = holder->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(held.ok());
    std::vector<std::shared_ptr<executor::Session>> members;
    std::shared_ptr<executor::Ticket> last[kMembers];
    for (size_t m = 0; m < kMembers; ++m) {
      members.push_back(open_session(*runtime, need("m", 0, kMiB)));
      shared.left[m] = kIterations;
      const uint64_t mean_ns = uniform(random, 1'000, 2'000'000);
      for (int i = 0; i < kIterations; ++i) {
        const uint64_t length_ns = uniform(random, mean_ns / 2 + 1, mean_ns * 3 / 2);
        shared.longest_ns = std::max(shared.longest_ns, length_ns);
        auto work = work_of([&shared, m, length_ns](const std::shared_ptr<executor::Iteration>& iteration) {
          bool backlogged = true;
          for (const int left : shared.left) backlogged = backlogged && left > 0;
          if (backlogged) {
            ++shared.turns_compared;
            const auto [low, high] = std::minmax_element(shared.service_ns, shared.service_ns + kMembers);
            shared.largest_gap_ns = std::max(shared.largest_gap_ns, *high - *low);
          }
          --shared.left[m];
          shared.service_ns[m] += length_ns;
          const auto stream = iteration->stream();
          return stream.ok() ? enqueue(**stream, length_ns) : stream.status();
        });
        auto ticket = members[m]->submit(work);
        REQUIRE(ticket.ok());
        last[m] = *ticket;
      }
    }
    REQUIRE((*held)->end().ok());
    for (const auto& ticket : last) REQUIRE(ticket->wait(GPUSHARE_NO_TIMEOUT).ok());
    CHECK(shared.turns_compared > 10);
    CHECK(shared.largest_gap_ns <= 2 * shared.longest_ns);
    for (size_t m = 0; m < kMembers; ++m) CHECK(members[m]->info().service_ns == shared.service_ns[m]);
    CHECK(runtime->close().ok());
  }
}

}  // namespace
