// CUDA graphs in iterations, on the stand-in for the driver: graphs captured inside one, graphs launched as one,
// allocations between, and captures that nobody ended. See docs/design/device-cuda.md.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "executor/serving/iteration_batch.hpp"
#include "executor/serving/request_server.hpp"
#include "executor/serving/step_server.hpp"
#include "support/executor_fixture.hpp"
#include "unit/device/cuda/standin_support.hpp"

using namespace gpushare;
using namespace gpushare::test;
using namespace standin_test;  // NOLINT(google-build-using-namespace)

namespace {

constexpr memory::Layout kLayouts[] = {memory::Layout::kVirtual, memory::Layout::kContiguous};

// A runtime on the stand-in with one lane, and the primary context current to this thread: the user's side.
struct Graphs {
  explicit Graphs(memory::Layout layout) {
    executor::RuntimeOptions options =
        options_of({"cuda:0?driver=" GPUSHARE_CUDA_STANDIN "&total_bytes=268435456", layout});
    options.max_lanes = 1;
    runtime = open_runtime(std::move(options));
    REQUIRE(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
    REQUIRE(cuCtxPushCurrent_v2(context) == CUDA_SUCCESS);
  }
  ~Graphs() {
    CHECK(runtime->check() == "");
    CHECK(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
    const base::Status closed = runtime->close();
    INFO(closed.to_string());
    CHECK(closed.ok());
    check_clean();
  }
  static CUstream native(executor::Iteration& iteration) {
    return static_cast<CUstream>(*(*iteration.stream())->native());
  }
  static void begin_capture(CUstream stream, int mode = CU_STREAM_CAPTURE_MODE_GLOBAL) {
    REQUIRE(cuStreamBeginCapture_v2(stream, mode) == CUDA_SUCCESS);
  }
  // The first byte of `address` as work on the iteration's stream finds it. Waits.
  static int byte_at(executor::Iteration& iteration, memory::Address address) {
    const auto stream = *iteration.stream();
    uint8_t value = 0;
    REQUIRE(stream->copy(reinterpret_cast<uintptr_t>(&value), address, 1, GPUSHARE_COPY_DEVICE_TO_HOST).ok());
    REQUIRE(stream->synchronize().ok());
    return value;
  }
  static std::shared_ptr<executor::Iteration> begin(executor::Session& session) {
    auto iteration = session.begin(GPUSHARE_NO_TIMEOUT);
    INFO(iteration.status().to_string());
    REQUIRE(iteration.ok());
    return *iteration;
  }

  std::shared_ptr<executor::Runtime> runtime;
  CUcontext context = nullptr;
};

void must_end(executor::Iteration& iteration) {
  const base::Status ended = iteration.end();
  INFO(ended.to_string());
  REQUIRE(ended.ok());
}

}  // namespace

TEST_CASE("a graph is captured in an iteration, with allocations and frees between, and launched in it") {
  for (const memory::Layout layout : kLayouts) {
    Graphs on(layout);
    const auto session = open_session(*on.runtime, need("graph", 4 * kMiB, 8 * kMiB));
    const auto beside = open_session(*on.runtime, need("beside", 2 * kMiB, 4 * kMiB));
    const auto result = session->alloc(memory::Kind::kModel, kMiB, 0);
    REQUIRE(result.ok());
    const auto iteration = on.begin(*session);
    const CUstream stream = on.native(*iteration);
    on.begin_capture(stream);
    // Ephemeral blocks keep their addresses until they are freed or the iteration ends.
    const auto first = iteration->alloc(kMiB, 0);
    REQUIRE(first.ok());
    REQUIRE(cuMemsetD8Async(*first, 7, kMiB, stream) == CUDA_SUCCESS);
    REQUIRE(cuMemcpyDtoDAsync_v2(*result, *first, kMiB, stream) == CUDA_SUCCESS);
    // Memory that is freed while the stream captures may serve the next block: both uses are in the graph, in this order.
    REQUIRE(on.runtime->free(*first).ok());
    const auto second = iteration->alloc(kMiB, 0);
    REQUIRE(second.ok());
    REQUIRE(cuMemsetD8Async(*second, 9, kMiB, stream) == CUDA_SUCCESS);
    // Other sessions and persistent blocks are not disturbed, nor do they disturb.
    const auto theirs = beside->alloc(memory::Kind::kModel, kMiB, 0);
    REQUIRE(theirs.ok());
    REQUIRE(beside->free(*theirs).ok());
    const CUgraphExec exec = end_capture(stream);
    for (int i = 0; i < 3; ++i) {
      REQUIRE(cuMemsetD8Async(*result, 0, kMiB, stream) == CUDA_SUCCESS);
      REQUIRE(cuGraphLaunch(exec, stream) == CUDA_SUCCESS);
      CHECK(on.byte_at(*iteration, *result) == 7);
      CHECK(on.byte_at(*iteration, *second) == 9);
    }
    must_end(*iteration);
    REQUIRE(cuGraphExecDestroy(exec) == CUDA_SUCCESS);
    REQUIRE(session->close().ok());
    REQUIRE(beside->close().ok());
  }
}

TEST_CASE("a graph over persistent blocks is an iteration, in turn with another session's") {
  for (const memory::Layout layout : kLayouts) {
    Graphs on(layout);
    struct Job {
      std::shared_ptr<executor::Session> session;
      memory::Address block = 0;
      CUgraphExec exec = nullptr;
    } jobs[2];
    for (int j = 0; j < 2; ++j) {
      Job& job = jobs[j];
      job.session = open_session(*on.runtime, need("job" + std::to_string(j), 4 * kMiB, 2 * kMiB));
      job.block = *job.session->alloc(memory::Kind::kFramework, kMiB, 0);
      const auto iteration = on.begin(*job.session);
      on.begin_capture(on.native(*iteration), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
      REQUIRE(cuMemsetD8Async(job.block, static_cast<unsigned char>(10 + j), kMiB, on.native(*iteration)) ==
              CUDA_SUCCESS);
      job.exec = end_capture(on.native(*iteration));
      must_end(*iteration);
    }
    for (int i = 0; i < 20; ++i) {
      const Job& job = jobs[i % 2];
      const auto iteration = on.begin(*job.session);
      // Work of the iteration's own beside the graph's: its ephemeral blocks never overlap the graph's memory.
      const auto scratch = iteration->alloc(kMiB, 0);
      REQUIRE(scratch.ok());
      REQUIRE(cuMemsetD8Async(*scratch, 99, kMiB, on.native(*iteration)) == CUDA_SUCCESS);
      REQUIRE(cuGraphLaunch(job.exec, on.native(*iteration)) == CUDA_SUCCESS);
      CHECK(on.byte_at(*iteration, job.block) == 10 + i % 2);
      must_end(*iteration);
    }
    REQUIRE(on.runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
    for (Job& job : jobs) {
      CHECK(job.session->info().iterations_done == 11);
      CHECK(job.session->info().service_ns > 0);
      REQUIRE(job.session->close().ok());
      REQUIRE(cuGraphExecDestroy(job.exec) == CUDA_SUCCESS);
    }
  }
}

TEST_CASE(
    "an iteration that ends in a capture is abandoned, or fails its session alone, and the lane goes on") {
  const bool strict = GENERATE(false, true);
  for (const memory::Layout layout : kLayouts) {
    Graphs on(layout);
    auto options = need("careless", 2 * kMiB, 4 * kMiB);
    options.fail_on_error = strict;
    const auto careless = open_session(*on.runtime, options);
    const auto beside = open_session(*on.runtime, need("beside", 2 * kMiB, 4 * kMiB));
    const auto iteration = on.begin(*careless);
    on.begin_capture(on.native(*iteration));
    const auto block = iteration->alloc(kMiB, 0);
    REQUIRE(block.ok());
    REQUIRE(cuMemsetD8Async(*block, 1, kMiB, on.native(*iteration)) == CUDA_SUCCESS);
    const base::Status ended = iteration->end();
    const executor::SessionInfo info = careless->info();
    CHECK(ended.ok() == strict);  // of a session that has failed, the lane's news are good
    CHECK(info.state == (strict ? executor::SessionState::kFailed : executor::SessionState::kResident));
    const base::Status& told = strict ? info.status : ended;
    CHECK(told.code() == GPUSHARE_INVALID_STATE);
    INFO(told.to_string());
    CHECK(told.message().find("its stream captured a CUDA graph") != std::string::npos);
    CHECK(info.iterations_done == 0);
    if (!strict) must_end(*on.begin(*careless));
    REQUIRE(careless->close().ok());
    for (int i = 0; i < 3; ++i) {
      const auto next = on.begin(*beside);
      const auto theirs = next->alloc(kMiB, 0);
      REQUIRE(theirs.ok());
      REQUIRE(cuMemsetD8Async(*theirs, 5, kMiB, on.native(*next)) == CUDA_SUCCESS);
      CHECK(on.byte_at(*next, *theirs) == 5);
      must_end(*next);
    }
    REQUIRE(beside->close().ok());
  }
}

TEST_CASE("a pushed iteration that throws in the middle of a capture is abandoned alone") {
  Graphs on(memory::Layout::kVirtual);
  const auto careless = open_session(*on.runtime, need("careless", 2 * kMiB, 4 * kMiB));
  const auto beside = open_session(*on.runtime, need("beside", 2 * kMiB, 4 * kMiB));
  const CUcontext context = on.context;
  std::unique_ptr<executor::Work> work = work_of([context](const auto& iteration) -> base::Status {
    if (cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) return {GPUSHARE_UNKNOWN, "push"};
    const int begun =
        cuStreamBeginCapture_v2(Graphs::native(*iteration), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    if (cuCtxPopCurrent_v2(nullptr) != CUDA_SUCCESS || begun != CUDA_SUCCESS)
      return {GPUSHARE_UNKNOWN, "begin"};
    throw std::runtime_error("planted");
  });
  const auto ticket = careless->submit(work);
  REQUIRE(ticket.ok());
  const base::Status outcome = (*ticket)->wait(GPUSHARE_NO_TIMEOUT);
  INFO(outcome.to_string());
  CHECK(outcome.code() == GPUSHARE_CALLBACK_FAILED);
  CHECK(outcome.message().find("planted") != std::string::npos);
  const auto next = on.begin(*beside);
  const auto block = next->alloc(kMiB, 0);
  REQUIRE(block.ok());
  REQUIRE((*next->stream())->fill(*block, 5, kMiB).ok());
  CHECK(on.byte_at(*next, *block) == 5);
  must_end(*next);
  must_end(*on.begin(*careless));
  REQUIRE(careless->close().ok());
  REQUIRE(beside->close().ok());
}

// Nothing tells when a capturing stream is done with memory, so none is taken from it.
TEST_CASE("memory of a lane stays where it is while its stream captures a graph") {
  Graphs on(memory::Layout::kVirtual);
  const uint64_t e = 16 * kMiB;
  const auto session = open_session(*on.runtime, need("graph", 8 * kMiB, e));
  REQUIRE(session->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
  auto iteration = on.begin(*session);
  REQUIRE(iteration->alloc(4 * kMiB, 0).ok());
  const auto kept = iteration->alloc(2 * kMiB, 0);
  REQUIRE(kept.ok());
  REQUIRE(iteration->keep(*kept).ok());
  must_end(*iteration);
  // Nothing is left for the lane to grow by, of P neither.
  REQUIRE(session->alloc(memory::Kind::kModel, 6 * kMiB, 0).ok());
  const auto info = on.runtime->info();
  REQUIRE(info.ok());
  const auto other =
      open_session(*on.runtime, need("other", info->capacity_bytes - info->promised_bytes, 2 * kMiB));
  iteration = on.begin(*session);
  const CUstream stream = on.native(*iteration);
  on.begin_capture(stream);
  const auto all = iteration->alloc(e, 0);
  INFO(all.status().to_string());
  CHECK(all.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  REQUIRE(cuGraphExecDestroy(end_capture(stream)) == CUDA_SUCCESS);
  const auto again = iteration->alloc(e, 0);
  INFO(again.status().to_string());
  CHECK(again.ok());
  must_end(*iteration);
  REQUIRE(other->close().ok());
  REQUIRE(session->close().ok());
}

TEST_CASE("a batch or a step that ends in a capture fails alone, and its queue goes on") {
  Graphs on(memory::Layout::kVirtual);
  const auto session = open_session(*on.runtime, need("served", 2 * kMiB, 4 * kMiB));
  std::atomic<bool> careless{true};
  const CUcontext context = on.context;
  const auto work = [&careless, context](executor::Iteration& iteration) -> base::Status {
    if (!careless) return {};
    if (cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) return {GPUSHARE_UNKNOWN, "push"};
    const int begun = cuStreamBeginCapture_v2(Graphs::native(iteration), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    if (cuCtxPopCurrent_v2(nullptr) != CUDA_SUCCESS || begun != CUDA_SUCCESS)
      return {GPUSHARE_UNKNOWN, "begin"};
    return {};
  };
  const auto batches = executor::RequestServer::start({});
  REQUIRE(batches.ok());
  const auto batch = [&](const sched::slo::Batch&, const std::shared_ptr<executor::Iteration>& iteration,
                         executor::BatchReport&) { return work(*iteration); };
  REQUIRE((*batches)->add_model({}, executor::run_as_iterations(session, batch)).ok());
  const auto steps = executor::StepServer::start(
      "fifo", {}, session,
      [&](const std::shared_ptr<executor::Iteration>& iteration, executor::RunningStep& step) {
        std::fill(step.done.begin(), step.done.end(), uint8_t{1});
        return work(*iteration);
      });
  REQUIRE(steps.ok());
  for (uint64_t id = 1; id <= 3; ++id) {
    std::atomic<int32_t> of_batch{-1}, of_step{-1};
    sched::slo::Request request;
    request.id = id;
    request.deadline_ns = base::host_now_ns() + 3'600'000'000'000;
    const base::Status taken = (*batches)->submit(
        request, [&](const executor::RequestOutcome& outcome) { of_batch = outcome.status; });
    INFO(id << ": " << taken.to_string());
    REQUIRE(taken.ok());
    while (of_batch < 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    sched::slo::StepRequest sequence;
    sequence.id = id;
    REQUIRE((*steps)
                ->submit(
                    sequence,
                    [&](const sched::slo::StepEvent& event) {
                      if (event.ended) of_step = event.status;
                    },
                    nullptr)
                .ok());
    while (of_step < 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(of_batch == (careless ? GPUSHARE_INVALID_STATE : GPUSHARE_OK));
    CHECK(of_step == (careless ? GPUSHARE_INVALID_STATE : GPUSHARE_OK));
    careless = false;
  }
  REQUIRE(session->close().ok());
  // Now it has ended.
  std::atomic<int32_t> last{-1};
  sched::slo::StepRequest sequence;
  sequence.id = 9;
  const auto answer = [&](const sched::slo::StepEvent& event) {
    if (event.ended) last = event.status;
  };
  REQUIRE((*steps)->submit(sequence, answer, nullptr).ok());
  while (last < 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(last == GPUSHARE_INVALID_STATE);
  CHECK((*steps)->submit(sequence, {}, nullptr).code() == GPUSHARE_INVALID_STATE);
  CHECK((*steps)->stop().ok());
  CHECK((*batches)->stop().ok());
}

TEST_CASE("what cannot be part of a graph is refused while the stream captures, and works after") {
  for (const memory::Layout layout : kLayouts) {
    Graphs on(layout);
    const auto session = open_session(*on.runtime, need("graph", 4 * kMiB, 8 * kMiB));
    const auto side = on.runtime->create_stream(0);
    REQUIRE(side.ok());
    const auto iteration = on.begin(*session);
    const auto stream = *iteration->stream();
    const auto block = iteration->alloc(kMiB, 0);
    REQUIRE(block.ok());
    on.begin_capture(on.native(*iteration));
    const auto elsewhere = static_cast<CUstream>(*(*side)->native());
    on.begin_capture(elsewhere);
    for (const base::Status& refused : {stream->launch_host([](void*) {}, nullptr), stream->synchronize(),
                                        on.runtime->record_use(*block, **side)}) {
      INFO(refused.to_string());
      CHECK(refused.code() == GPUSHARE_INVALID_STATE);
      CHECK(refused.message().find("captures a CUDA graph") != std::string::npos);
    }
    REQUIRE(cuGraphExecDestroy(end_capture(elsewhere)) == CUDA_SUCCESS);
    // A use on a stream that does not capture is not concerned.
    CHECK(on.runtime->record_use(*block, **side).ok());
    REQUIRE(cuGraphExecDestroy(end_capture(on.native(*iteration))) == CUDA_SUCCESS);
    std::atomic<int> runs{0};
    REQUIRE(stream->launch_host([](void* n) { ++*static_cast<std::atomic<int>*>(n); }, &runs).ok());
    REQUIRE(stream->synchronize().ok());
    CHECK(runs == 1);
    must_end(*iteration);
    REQUIRE((*side)->release().ok());
    REQUIRE(session->close().ok());
  }
}
