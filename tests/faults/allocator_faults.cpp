// Faults in the calls of a framework's allocator (gpushare/allocator.h): host memory that runs out at every allocation
// in turn, driver calls that are refused at their n-th call, on the stand-in for libcuda. A life of allocations, side
// streams, pools, kept blocks and a session that closes with its last block returns from every call; afterwards the
// bystander's block is there, and all memory returns.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <array>
#include <memory>
#include <vector>

#include "framework/allocator.hpp"
#include "standin.h"
#include "support/catch.hpp"
#include "support/executor_fixture.hpp"
#include "support/failing_new.hpp"

namespace {

using namespace gpushare;  // NOLINT(google-build-using-namespace)
using framework::Allocator;
using framework::kNoStream;
using test::FailingNew;
using test::kMiB;
using test::Spared;

const std::string kCuda = std::string("cuda?driver=") + GPUSHARE_CUDA_STANDIN;
constexpr framework::PoolId kPool{7, 1};

struct World {
  explicit World(const std::string& device) {
    executor::RuntimeOptions options = test::options_of({device.c_str(), memory::Layout::kContiguous});
    options.capacity_bytes = 64 * kMiB;
    runtime = test::open_runtime(std::move(options));
    bystander = test::open_session(*runtime, test::need("bystander", 4 * kMiB, 4 * kMiB));
    allocator = std::make_unique<Allocator>(runtime, memory::Kind::kFramework);
    const auto block = bystander->alloc(memory::Kind::kModel, kMiB, 0);
    REQUIRE(block.ok());
    pattern = *block;
    session = test::open_session(*runtime, test::need("victim", 12 * kMiB, 8 * kMiB));
    side = *runtime->create_stream(0);
  }

  // PyTorch's calls in two steps. Every call may fail; the blocks that were allocated are freed at the end.
  void live() {
    const auto take = [&](uint64_t bytes, void* native) {
      const auto block = allocator->alloc(bytes, 512, native);
      if (block.ok()) held.emplace_back(*block, native);
      note(block.status());
    };
    void* const side_native = side->native().ok() ? *side->native() : kNoStream;
    note(allocator->set_default_session(session));
    note(allocator->bind_thread(session));
    note(allocator->adopt_stream(session, side_native));
    take(kMiB, kNoStream);
    take(kMiB, side_native);
    for (int step = 0; step < 2; ++step) {
      auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
      note(iteration.status());
      if (!iteration.ok()) continue;
      open = *iteration;
      const auto lane = open->stream();
      void* const native = lane.ok() && (*lane)->native().ok() ? *(*lane)->native() : kNoStream;
      take(kMiB, native);
      take(2 * kMiB, native);
      take(kMiB, side_native);
      if (!held.empty()) {
        note(allocator->record_use(held.front().first, side_native));
        note(allocator->base(held.front().first).status());
        free_last();
      }
      const bool begun = note(allocator->begin_pool(
          kPool, step == 0 ? framework::PoolFilter() : [](void*) { return true; }));
      take(kMiB, native);
      take(3 * kMiB, native);
      if (begun) {
        note(allocator->end_pool(kPool));
        note(allocator->release_pool(kPool));
      }
      note(allocator->set_fraction(0.9));
      take(kMiB, native);
      note(allocator->set_fraction(1.0));
      note(allocator->keep_all(*open));
      note(open->end());
      open = nullptr;
    }
    note(allocator->info(session.get()).status());
    note(allocator->trim().status());
  }

  // With memory again. `ended`: the session, by what failed.
  void verify() {
    standin_clear_faults();
    if (open != nullptr) (void)open->end();
    (void)allocator->end_pool(kPool);
    while (allocator->release_pool(kPool).ok()) {
    }
    (void)allocator->set_fraction(1.0);
    // A runtime that ran out in the middle of an iteration's end gives all sessions up, and can only be closed.
    const auto probe = runtime->open_session(test::need("probe", 0, kMiB));
    const bool collapsed = probe.status().code() == GPUSHARE_HOST_OUT_OF_MEMORY;
    if (probe.ok()) CHECK((*probe)->close().ok());
    const base::Status closing = allocator->close_session(session);
    while (!held.empty()) free_last();
    if (collapsed) {
      allocator = nullptr;
      CHECK(bystander->begin(0).status().code() == GPUSHARE_HOST_OUT_OF_MEMORY);
      (void)runtime->close();
      return;
    }
    CHECK(closing.ok());
    CHECK((session->closed() || session->info().persistent_bytes == 0));
    CHECK(runtime->find(pattern).ok());
    CHECK(runtime->check().empty());
    (void)side->release();
    CHECK(bystander->close().ok());
    (void)session->close();
    allocator = nullptr;
    const auto info = runtime->info();
    REQUIRE(info.ok());
    CHECK(info->persistent_bytes == 0);
    CHECK(info->ephemeral_bytes == 0);
    CHECK(info->promised_bytes == 0);
    for (const base::Status& failure : failures) {
      INFO(failure.to_string());
      CHECK(failure.code() != GPUSHARE_INTERNAL);
    }
    const base::Status closed = runtime->close();
    INFO(closed.to_string());
    CHECK(closed.ok());
  }

  bool note(const base::Status& status) {
    if (!status.ok()) failures.push_back(status);
    return status.ok();
  }
  void free_last() {
    (void)allocator->free(held.back().first, held.back().second);
    held.pop_back();
  }

  std::shared_ptr<executor::Runtime> runtime;
  std::shared_ptr<executor::Session> bystander, session;
  std::unique_ptr<Allocator> allocator;
  std::shared_ptr<executor::Stream> side;
  std::shared_ptr<executor::Iteration> open;
  memory::Address pattern = 0;
  std::vector<std::pair<memory::Address, void*>> held;
  std::vector<base::Status> failures;
};

// What this thread remembers of the allocator once it has given out a block of an iteration.
const void* word_remembered(Allocator& allocator, executor::Session& session) {
  const auto iteration = session.begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  const auto lane = (*iteration)->stream();
  REQUIRE(lane.ok());
  const auto native = (*lane)->native();
  REQUIRE(native.ok());
  const auto block = allocator.alloc(kMiB, 512, *native);
  REQUIRE(block.ok());
  const void* const word = memory::LaneDoor::last_used().lister;
  CHECK(allocator.free(*block, *native).ok());
  CHECK((*iteration)->end().ok());
  return word;
}

// True if an allocation of the host failed.
bool live_without_memory(uint64_t succeed) {
  const Spared mine;
  World world("host");
  world.held.reserve(64);
  world.failures.reserve(64);
  {
    const FailingNew failing(succeed, false);
    try {
      const Spared caller(false);
      world.live();
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): what guard() makes a status of
    }
  }
  const bool failed = test::failures > 0;
  world.verify();
  return failed;
}

}  // namespace

TEST_CASE("a framework's allocator without host memory returns from every call, and nothing is left") {
  uint64_t with = 0;
  for (uint64_t n = 0, without = 0; without < 2 && n < 2000; n += 1 + n / 16) {
    INFO("allocation " << n);
    const bool failed = live_without_memory(n);
    without += failed ? 0 : 1;
    with += failed ? 1 : 0;
  }
  CHECK(with > 20);
}

TEST_CASE("a framework's allocator whose driver refuses a call: the bystander is unharmed, nothing is left") {
  struct Call {
    const char* name;
    int result;  // CUresult
  };
  for (const Call call :
       {Call{"cuEventCreate", 2}, Call{"cuEventRecord", 999}, Call{"cuStreamWaitEvent", 999}}) {
    uint64_t fired = 0;
    for (uint64_t n = 1; n < 200; n += 1 + n / 4) {
      INFO(call.name << " fails at call " << n);
      World world(kCuda);
      const uint64_t before = standin_calls(call.name);
      standin_fail_call(call.name, n, call.result);
      world.live();
      const bool reached = standin_calls(call.name) - before >= n;
      world.verify();
      if (!reached) break;
      ++fired;
    }
    CHECK(fired > 0);
  }
}

TEST_CASE("the word that threads remember of an allocator is the next one's when that has gone") {
  World world("host");
  const auto word_of = [&world] {
    Allocator allocator(world.runtime, memory::Kind::kFramework);
    return word_remembered(allocator, *world.session);
  };
  const void* const first = word_of();
  CHECK(first != nullptr);
  for (int i = 0; i < 3; ++i) CHECK(word_of() == first);
  world.verify();
}

TEST_CASE("threads use no door of an allocator that has a free to try again, and do once that is done") {
  const auto driver = [library = dlopen(GPUSHARE_CUDA_STANDIN, RTLD_NOW)](const char* name) {
    void* const found = dlsym(library, name);
    REQUIRE(found != nullptr);
    return found;
  };
  const auto begin_capture = reinterpret_cast<int (*)(void*, int)>(driver("cuStreamBeginCapture_v2"));
  const auto end_capture = reinterpret_cast<int (*)(void*, void**)>(driver("cuStreamEndCapture"));
  const auto destroy = reinterpret_cast<int (*)(void*)>(driver("cuGraphDestroy"));
  const auto retain = reinterpret_cast<int (*)(void**, int)>(driver("cuDevicePrimaryCtxRetain"));
  const auto release = reinterpret_cast<int (*)(int)>(driver("cuDevicePrimaryCtxRelease_v2"));
  const auto set_current = reinterpret_cast<int (*)(void*)>(driver("cuCtxSetCurrent"));
  void *graph = nullptr, *context = nullptr;
  REQUIRE(retain(&context, 0) == 0);
  REQUIRE(set_current(context) == 0);
  World world(kCuda);
  Allocator& allocator = *world.allocator;
  const auto* const word =
      static_cast<const memory::LaneDoor::Lister*>(word_remembered(allocator, *world.session));
  REQUIRE(word != nullptr);
  CHECK(word->owner.load() != 0);
  void* const side = *world.side->native();
  REQUIRE(allocator.adopt_stream(world.session, side).ok());
  const auto block = allocator.alloc(kMiB, 512, side);
  REQUIRE(block.ok());
  REQUIRE(begin_capture(side, 0) == 0);
  CHECK(allocator.free(*block, side).ok());
  CHECK(world.runtime->find(*block).ok());
  CHECK(word->owner.load() == 0);
  REQUIRE(end_capture(side, &graph) == 0);
  CHECK(destroy(graph) == 0);
  CHECK(allocator.trim().ok());
  CHECK_FALSE(world.runtime->find(*block).ok());
  CHECK(word->owner.load() != 0);
  world.verify();
  CHECK(set_current(nullptr) == 0);
  CHECK(release(0) == 0);
}
