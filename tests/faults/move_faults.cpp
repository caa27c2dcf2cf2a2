// Faults in the middle of moves between device and host memory: a session's blocks go out to a lowered quota and come
// home, a guaranteed session takes their place and leaves, and each kind of fault strikes at each call of that. No byte
// is lost or stale, the books are right, and an error says what happened.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/registry.hpp"
#include "faults/scripted_fault.hpp"
#include "support/bytes.hpp"
#include "support/executor_fixture.hpp"
#include "support/gate.hpp"
#include "support/sanitizers.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

constexpr uint64_t kMovedStep = kSanitized ? 7 : 1;
constexpr uint64_t kPlentyNs = 60'000'000'000;

executor::RuntimeOptions moving_options(const std::string& device) {
  executor::RuntimeOptions options = options_of({device.c_str(), memory::Layout::kVirtual}, "pack");
  options.capacity_bytes = 40 * kMiB;
  options.spill_move_bytes = 8 * kMiB;
  options.spill_move_ns = kPlentyNs;
  options.spill_move_loss = 1e9;  // rests would last longer than the test
  return options;
}

executor::SessionOptions mover_options(const char* name) {
  auto options = need(name, 2 * kMiB, 2 * kMiB);
  options.cls = sched::SessionClass::kOpportunistic;
  options.allow_spill = true;
  return options;
}

class Moves {
 public:
  static constexpr uint64_t kBlockBytes = 5 * kMiB;  // ends in the middle of a granule
  static constexpr int kBlocks = 4;
  static constexpr uint64_t kKeptBytes = 2 * kMiB;  // a granule, so it goes out as well

  explicit Moves(const std::string& device) : runtime_(open_runtime(moving_options(device))) {
    bystander_ = open_session(*runtime_, need("bystander", 4 * kMiB, 2 * kMiB));
    REQUIRE(fill(*bystander_, pattern_ = must(bystander_->alloc(memory::Kind::kModel, 3 * kMiB, 0)), 3 * kMiB,
                 0x5A)
                .ok());
    mover_ = open_session(*runtime_, mover_options("mover"));
    for (int i = 0; i < kBlocks; ++i) {
      blocks_.push_back(must(mover_->alloc(memory::Kind::kModel, kBlockBytes, 0)));
      REQUIRE(fill(*mover_, blocks_.back(), kBlockBytes, value(i)).ok());
    }
    const auto iteration = mover_->begin(kPlentyNs);
    REQUIRE(iteration.ok());
    kept_ = must((*iteration)->alloc(kKeptBytes, 0));
    REQUIRE_OK((*iteration)->keep(kept_));
    REQUIRE_OK((*iteration)->end());
    REQUIRE_OK(fill(*mover_, kept_, kKeptBytes, 0x6B));
    REQUIRE(runtime_->synchronize(GPUSHARE_NO_TIMEOUT).ok());
  }

  executor::Runtime& runtime() { return *runtime_; }
  const std::vector<base::Status>& failures() const { return failures_; }
  bool kept_went() const { return kept_went_; }
  bool failed_with(int32_t code) const {
    return std::any_of(failures_.begin(), failures_.end(), [&](const auto& f) { return f.code() == code; });
  }

  void run() {
    (void)note(mover_->set_quota(8 * kMiB));
    iterate(*mover_, 10);
    (void)note(mover_->set_quota(0));
    iterate(*mover_, 16);
    // Its place is needed, and it is idle: it is paged out, and comes back. Host memory that its moves have left would
    // keep the device from being asked for more.
    (void)runtime_->trim();
    auto guaranteed = runtime_->open_session(need("guaranteed", 2 * kMiB, 2 * kMiB));
    if (note(guaranteed.status())) {
      (void)note((*guaranteed)->alloc(memory::Kind::kModel, 30 * kMiB, 0).status());
      const auto kept = runtime_->find(kept_);
      kept_went_ = kept.ok() && kept->spilled;
      (void)note((*guaranteed)->close());
    }
    iterate(*mover_, 2);
  }

  // A device that is lost keeps no bytes. Else all of them are there, and nothing is left once everybody has gone.
  void verify(bool lost) {
    for (const base::Status& failure : failures_) {
      INFO(failure.to_string());
      CHECK_FALSE(failure.message().empty());
      CHECK(failure.code() != GPUSHARE_INTERNAL);
    }
    CHECK(runtime_->check() == "");
    if (lost) {
      for (executor::Session* session : {bystander_.get(), mover_.get()}) {
        CHECK(session->begin(0).status().code() == GPUSHARE_DEVICE_LOST);
        CHECK(session->info().state == executor::SessionState::kFailed);
      }
    } else {
      CHECK(holds(*bystander_, pattern_, 3 * kMiB, 0x5A));
      // A fault in a move is no failure of the session.
      CHECK(mover_->info().state != executor::SessionState::kFailed);
      for (int i = 0; i < kBlocks; ++i) CHECK(holds(*mover_, blocks_[i], kBlockBytes, value(i)));
      CHECK(holds(*mover_, kept_, kKeptBytes, 0x6B));
      // It still moves, both ways.
      REQUIRE_OK(mover_->set_quota(8 * kMiB));
      iterate(*mover_, 24);
      const auto out = mover_->info();
      CHECK(out.promised_persistent_bytes + out.promised_ephemeral_bytes <= 12 * kMiB);
      REQUIRE_OK(mover_->set_quota(0));
      iterate(*mover_, 40);
      // A kept block whose way home failed stays in host memory until the next page-in.
      const auto kept = runtime_->find(kept_);
      REQUIRE(kept.ok());
      CHECK(mover_->info().spilled_bytes == (kept->spilled ? kKeptBytes : 0));
      for (int i = 0; i < kBlocks; ++i) CHECK(holds(*mover_, blocks_[i], kBlockBytes, value(i)));
      CHECK(holds(*mover_, kept_, kKeptBytes, 0x6B));
      CHECK(runtime_->check() == "");
      CHECK(mover_->close().ok());
      CHECK(bystander_->close().ok());
      const auto info = runtime_->info();
      REQUIRE(info.ok());
      CHECK(info->persistent_bytes == 0);
      CHECK(info->promised_bytes == 0);
    }
    const base::Status closed = runtime_->close();
    INFO(closed.to_string());
    CHECK(closed.ok());
  }

 private:
  static int value(int block) { return 0x11 + 0x22 * block; }
  static memory::Address must(const base::Result<memory::Address>& block) {
    INFO(block.status().to_string());
    REQUIRE(block.ok());
    return *block;
  }
  bool note(const base::Status& status) {
    if (!status.ok()) failures_.push_back(status);
    return status.ok();
  }
  void iterate(executor::Session& session, int times) {
    for (int i = 0; i < times; ++i) {
      auto iteration = session.begin(kPlentyNs);
      if (note(iteration.status())) (void)note((*iteration)->end());
    }
  }
  base::Status fill(executor::Session& session, memory::Address block, uint64_t bytes, int with) {
    GPUSHARE_ASSIGN_OR_RETURN(const auto iteration, session.begin(kPlentyNs));
    GPUSHARE_ASSIGN_OR_RETURN(const auto stream, iteration->stream());
    GPUSHARE_RETURN_IF_ERROR(stream->fill(block, static_cast<uint8_t>(with), bytes));
    return iteration->end();
  }
  static bool holds(executor::Session& session, memory::Address block, uint64_t bytes, int with) {
    auto iteration = session.begin(kPlentyNs);
    INFO(iteration.status().to_string());
    REQUIRE(iteration.ok());
    std::vector<uint8_t> read(bytes);
    const auto stream = (*iteration)->stream();
    REQUIRE_OK((*stream)->copy(reinterpret_cast<uintptr_t>(read.data()), block, bytes,
                               GPUSHARE_COPY_DEVICE_TO_HOST));
    REQUIRE_OK((*stream)->synchronize());
    REQUIRE_OK((*iteration)->end());
    return all_are(read.data(), read.size(), with);
  }

  std::shared_ptr<executor::Runtime> runtime_;
  std::shared_ptr<executor::Session> bystander_, mover_;
  memory::Address pattern_ = 0, kept_ = 0;
  bool kept_went_ = false;
  std::vector<memory::Address> blocks_;
  std::vector<base::Status> failures_;
};

struct MoveFault {
  const char* name;
  uint32_t kind;
  uint64_t at_least;  // calls that the life of the mover has
};
constexpr MoveFault kMoveFaults[] = {
    {"map fails", GPUSHARE_FAULT_MAP_FAILS, 20},
    {"a copy fails", GPUSHARE_FAULT_LAUNCH_FAILS, 12},
    {"host memory is exhausted", GPUSHARE_FAULT_HOST_OUT_OF_MEMORY, 8},
    {"device memory is exhausted", GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY, 1},
};
constexpr const char* kMoveDevices[] = {"host?total_bytes=134217728", "sim?total_bytes=134217728"};

// ---- a device that refuses maps one after the other: what was unmapped cannot be mapped again

constexpr const char* kRefusing = "refusing";
std::atomic<int> g_maps_to_go{-1};  // that succeed; then all are refused. -1: none is

void register_refusing() {
  static const bool done = [] {
    static const gpushare_backend_ops* const real = device::find_backend("host");
    gpushare_backend_ops ops = *real;
    ops.name = kRefusing;
    ops.va_map = [](gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes,
                    gpushare_backend_memory* memory, uint64_t offset) {
      const int to_go = g_maps_to_go.load();
      if (to_go == 0) return static_cast<int32_t>(GPUSHARE_DEVICE_OUT_OF_MEMORY);
      if (to_go > 0) --g_maps_to_go;
      return real->va_map(device, address, bytes, memory, offset);
    };
    return device::register_backend(&ops).ok();
  }();
  REQUIRE(done);
}

}  // namespace

TEST_CASE("a fault at call n of moves out and home, for every n: every byte is in its place") {
  const std::string device = GENERATE(from_range(std::begin(kMoveDevices), std::end(kMoveDevices)));
  const MoveFault fault = GENERATE(from_range(std::begin(kMoveFaults), std::end(kMoveFaults)));
  uint64_t n = 1;
  bool fired = true;
  for (; fired; n += kMovedStep) {
    INFO(device << ": " << fault.name << " at call " << n);
    REQUIRE(n < 2000);
    Moves moves(device);
    // Cached granules would keep the device from being asked.
    (void)moves.runtime().trim();
    arm(moves.runtime(), fault.kind, n);
    moves.run();
    fired = has_fired(moves.runtime(), fault.kind, n);
    if (!fired) {
      for (const base::Status& failure : moves.failures()) UNSCOPED_INFO(failure.to_string());
      CHECK(moves.failures().empty());
      CHECK(moves.kept_went());
    }
    moves.verify(false);
  }
  CHECK(n > fault.at_least);
}

TEST_CASE("the device is lost at enqueue n of moves out and home, for every n") {
  const std::string device = GENERATE(from_range(std::begin(kMoveDevices), std::end(kMoveDevices)));
  uint64_t n = 1;
  for (bool lost = true; lost; n += kMovedStep) {
    INFO(device << ": lost at call " << n);
    REQUIRE(n < 2000);
    Moves moves(device);
    arm(moves.runtime(), GPUSHARE_FAULT_DEVICE_LOST, n);
    moves.run();
    lost = moves.failed_with(GPUSHARE_DEVICE_LOST);
    if (!lost) arm(moves.runtime(), GPUSHARE_FAULT_NONE, 0);
    moves.verify(lost);
  }
  CHECK(n > 12);
}

TEST_CASE(
    "a granule that the device unmaps and maps nowhere fails its session alone, with a message that says "
    "so") {
  register_refusing();
  const bool home = GENERATE(false, true);
  for (int maps = 1; maps < 12; ++maps) {
    CAPTURE(home, maps);
    auto runtime = open_runtime(moving_options(std::string(kRefusing) + "?total_bytes=134217728"));
    auto bystander = open_session(*runtime, need("bystander", 4 * kMiB, 2 * kMiB));
    const auto pattern = bystander->alloc(memory::Kind::kModel, 3 * kMiB, 0);
    REQUIRE(pattern.ok());
    std::memset(reinterpret_cast<void*>(*pattern), 0x5A, 3 * kMiB);
    auto mover = open_session(*runtime, mover_options("mover"));
    const auto block = mover->alloc(memory::Kind::kModel, 16 * kMiB, 0);
    REQUIRE(block.ok());
    const auto iterate = [&](int times) {
      base::Status status;
      for (int i = 0; i < times && status.ok(); ++i) {
        auto iteration = mover->begin(kPlentyNs);
        status = iteration.ok() ? (*iteration)->end() : iteration.status();
      }
      return status;
    };
    std::memset(reinterpret_cast<void*>(*block), 0x66, 16 * kMiB);
    if (home) {
      REQUIRE_OK(mover->set_quota(8 * kMiB));
      REQUIRE_OK(iterate(10));
    }
    REQUIRE_OK(mover->set_quota(home ? 0 : 8 * kMiB));
    g_maps_to_go = maps;
    const base::Status ran = iterate(4);
    g_maps_to_go = -1;
    INFO(ran.to_string());
    if (ran.ok()) {
      // Only windows were refused: it stayed where it was.
      REQUIRE_OK(iterate(30));
      CHECK(all_are(reinterpret_cast<void*>(*block), 16 * kMiB, 0x66));
    } else {
      CHECK(ran.code() == GPUSHARE_INTERNAL);
      CHECK(ran.message().find("mapped no memory behind a granule") != std::string::npos);
      CHECK_FALSE(mover->begin(0).ok());
      CHECK(mover->info().state == executor::SessionState::kFailed);
      CHECK(mover->info().status.code() == GPUSHARE_INTERNAL);
    }
    CHECK(runtime->check() == "");
    (void)mover->close();
    CHECK(all_are(reinterpret_cast<void*>(*pattern), 3 * kMiB, 0x5A));
    REQUIRE_OK(bystander->close());
    CHECK(runtime->info()->promised_bytes == 0);
    // Its bytes serve others.
    auto later = open_session(*runtime, need("later", 36 * kMiB, 2 * kMiB));
    REQUIRE_OK(later->wait_admitted(kPlentyNs));
    REQUIRE(later->alloc(memory::Kind::kModel, 36 * kMiB, 0).ok());
    CHECK(runtime->close().ok());
  }
}

TEST_CASE("a session or its runtime that is closed while its blocks move leaves nothing, and harms nobody") {
  enum class End : uint8_t { kClose, kCancel, kCloseRuntime };
  const End end = GENERATE(End::kClose, End::kCancel, End::kCloseRuntime);
  const bool home = GENERATE(false, true);
  CAPTURE(end, home);
  auto runtime = open_runtime(moving_options("host?total_bytes=134217728&copy_gbps=1"));
  auto bystander = open_session(*runtime, need("bystander", 4 * kMiB, 2 * kMiB));
  const auto pattern = bystander->alloc(memory::Kind::kModel, 3 * kMiB, 0);
  REQUIRE(pattern.ok());
  std::memset(reinterpret_cast<void*>(*pattern), 0x5A, 3 * kMiB);
  auto mover = open_session(*runtime, mover_options("mover"));
  REQUIRE(mover->alloc(memory::Kind::kModel, 20 * kMiB, 0).ok());
  const auto once = [&]() -> base::Status {
    auto iteration = mover->begin(kPlentyNs);
    return iteration.ok() ? (*iteration)->end() : iteration.status();
  };
  if (home) {
    REQUIRE_OK(mover->set_quota(8 * kMiB));
    for (int i = 0; i < 10; ++i) REQUIRE_OK(once());
  }
  // The move waits for what the session's stream has been given, so it is under way when the session ends.
  test::Gate gate;
  {
    auto iteration = mover->begin(kPlentyNs);
    REQUIRE(iteration.ok());
    REQUIRE_OK((*(*iteration)->stream())->launch_host(test::Gate::block, &gate));
    REQUIRE_OK((*iteration)->end());
  }
  REQUIRE_OK(mover->set_quota(home ? 0 : 8 * kMiB));
  base::Status moved;
  std::atomic<bool> begun{false};
  std::thread moving([&] {
    begun = true;
    moved = once();
  });
  while (!begun) std::this_thread::yield();
  std::thread ending([&] {
    if (end == End::kCancel) (void)mover->cancel();
    if (end == End::kClose) (void)mover->close();
    if (end == End::kCloseRuntime) (void)runtime->close();
  });
  // Whichever comes first: all of them wait for the stream.
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  gate.open();
  moving.join();
  ending.join();
  INFO(moved.to_string());
  CHECK(moved.code() != GPUSHARE_INTERNAL);
  if (end != End::kCloseRuntime) {
    (void)mover->close();
    CHECK(all_are(reinterpret_cast<void*>(*pattern), 3 * kMiB, 0x5A));
    CHECK(runtime->check() == "");
    REQUIRE_OK(bystander->close());
    CHECK(runtime->info()->promised_bytes == 0);
    CHECK(runtime->info()->persistent_bytes == 0);
  }
  const base::Status closed = runtime->close();
  INFO(closed.to_string());
  CHECK((closed.ok() || end == End::kCloseRuntime));
}
