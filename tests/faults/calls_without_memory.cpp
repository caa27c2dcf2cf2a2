// The host runs out of memory for good, at every allocation in turn, while a program loads, switches, serves and closes
// by the C ABI: every call returns, nothing ends the process, and when there is memory again everything closes and the
// device has all of its bytes. GPUSHARE_TEST_EVERY_ALLOCATION=1 tries each single allocation, else some are left out;
// GPUSHARE_TEST_ALLOCATION=n tries the n-th alone.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "gpushare/allocator.h"
#include "gpushare/bulk.h"
#include "gpushare/gpushare.h"
#include "gpushare/loader.h"
#include "gpushare/range.h"
#include "gpushare/serving.h"
#include "gpushare/steps.h"
#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/sizes.hpp"

using gpushare::test::FailingNew;
using gpushare::test::kMiB;

namespace {

// Owns handles of one run. Those whose closing failed are closed again later.
class Program {
 public:
  Program(const char* device, uint32_t layout) : layout_(layout) {
    gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
    params.device = device;
    params.layout = layout;
    params.capacity_bytes = 48 * kMiB;
    (void)tell(gpushare_runtime_open(&params, &runtime_));
  }

  gpushare_runtime runtime() const { return runtime_; }
  int32_t first_failure() const { return first_failure_; }

  // Every part of the library, in the order of a program that uses all of it. What lacks its handle is left out.
  void run() {
    if (runtime_ == nullptr) return;
    gpushare_session a = session("a"), b = session("b");
    iterations(a);
    iterations(b);
    streams();
    range(b);
    allocator(a);
    models(a, b);
    switcher();
    requests(a);
    steps(a);
    close(a);
  }

  // Closes all that is open, in reverse order, then the runtime. False: something is still open.
  bool close_all() {
    bool closed = true;
    std::vector<std::function<bool()>> left;
    while (!open_.empty()) {
      auto last = std::move(open_.back());
      open_.pop_back();
      if (!last()) left.push_back(std::move(last)), closed = false;
    }
    std::reverse(left.begin(), left.end());
    open_ = std::move(left);
    return closed;
  }
  // The books of the runtime lacked memory: it takes no calls any more, and its bytes go when it closes.
  bool is_useless() const {
    gpushare_session session = nullptr;
    const gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
    const int32_t status = gpushare_session_open(runtime_, &params, &session);
    if (status == GPUSHARE_OK) CHECK(gpushare_session_close(session) == GPUSHARE_OK);
    return status == GPUSHARE_HOST_OUT_OF_MEMORY;
  }
  bool has_bytes() const {
    gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
    REQUIRE(gpushare_runtime_get_info(runtime_, &info) == GPUSHARE_OK);
    return info.persistent_bytes + info.ephemeral_bytes + info.promised_bytes > 0;
  }
  int32_t close_runtime() { return gpushare_runtime_close(runtime_); }

 private:
  bool tell(int32_t status) {
    if (status != GPUSHARE_OK && first_failure_ == GPUSHARE_OK) first_failure_ = status;
    return status == GPUSHARE_OK;
  }
  // The list itself is the test's, so it never lacks memory.
  void later(std::function<bool()> close) { open_.push_back(std::move(close)); }
  void keep(std::function<int32_t()> close) {
    const gpushare::test::Spared mine;
    later([this, close = std::move(close)] {
      const gpushare::test::Spared theirs(false);
      const int32_t status = close();
      return status == GPUSHARE_INVALID_HANDLE || tell(status);  // or it was closed before
    });
  }

  gpushare_session session(const char* name) {
    gpushare_session session = nullptr;
    gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
    params.name = name;
    params.persistent_bytes = 4 * kMiB;
    params.ephemeral_bytes = 2 * kMiB;
    if (tell(gpushare_session_open(runtime_, &params, &session)))
      keep([session] { return gpushare_session_close(session); });
    return session;
  }
  void close(gpushare_session session) {
    if (session != nullptr) (void)tell(gpushare_session_close(session));
  }

  void iterations(gpushare_session session) {
    if (session == nullptr) return;
    gpushare_device_address block = 0, blocks[3] = {};
    // Above the promise, where a lane can grow while its iteration runs.
    const uint64_t last = layout_ == GPUSHARE_LAYOUT_VIRTUAL ? 3 * kMiB : kMiB;
    const uint64_t sizes[3] = {64 << 10, 128 << 10, last};
    (void)tell(gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, 5 * kMiB, 0, &block));
    gpushare_iteration iteration = nullptr;
    if (tell(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration))) {
      gpushare_stream stream = nullptr;
      if (tell(gpushare_iteration_alloc_many(iteration, 3, sizes, 0, blocks)))
        (void)tell(gpushare_iteration_keep(iteration, blocks[0]));
      if (tell(gpushare_iteration_get_stream(iteration, &stream)))
        (void)tell(gpushare_stream_launch_host(
            stream, [](void*) {}, nullptr));
      if (!tell(gpushare_iteration_end(iteration)))
        keep([iteration] { return gpushare_iteration_end(iteration); });
    }
    gpushare_ticket ticket = nullptr;
    if (tell(gpushare_session_submit(
            session,
            [](void*, gpushare_iteration of) -> int32_t {
              gpushare_device_address inside = 0;
              return gpushare_iteration_alloc(of, 1 << 16, 0, &inside);
            },
            nullptr, nullptr, &ticket))) {
      (void)tell(gpushare_ticket_wait(ticket, GPUSHARE_NO_TIMEOUT));
      (void)tell(gpushare_ticket_release(ticket));
    }
    if (block != 0) (void)tell(gpushare_memory_free(runtime_, block));
  }

  void streams() {
    gpushare_stream stream = nullptr;
    if (!tell(gpushare_stream_create(runtime_, 0, &stream))) return;
    keep([stream] { return gpushare_stream_release(stream); });
    (void)tell(gpushare_stream_launch_host(
        stream, [](void*) {}, nullptr));
    (void)tell(gpushare_stream_synchronize(stream));
  }

  void range(gpushare_session session) {
    if (session == nullptr) return;
    gpushare_range range = nullptr;
    gpushare_range_params params = GPUSHARE_RANGE_PARAMS_INIT;
    params.reserved_bytes = 8 * kMiB;
    const int32_t status = gpushare_range_open(session, &params, &range);
    if (status == GPUSHARE_UNSUPPORTED || !tell(status)) return;
    keep([range] { return gpushare_range_close(range); });
    if (tell(gpushare_range_commit(range, 0, 4 * kMiB, 0)))
      (void)tell(gpushare_range_decommit(range, 0, 2 * kMiB));
  }

  void allocator(gpushare_session session) {
    gpushare_allocator allocator = nullptr;
    gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
    if (session == nullptr || !tell(gpushare_allocator_create(runtime_, &params, &allocator))) return;
    keep([allocator] { return gpushare_allocator_release(allocator); });
    gpushare_device_address block = 0;
    (void)tell(gpushare_allocator_set_default_session(allocator, session));
    if (tell(gpushare_allocator_alloc(allocator, 1 << 20, 0, nullptr, &block)))
      (void)tell(gpushare_allocator_free(allocator, block, nullptr));
    (void)tell(gpushare_allocator_alloc(allocator, 1 << 19, 0, nullptr, &block));  // stays
  }

  bool open_loader() {
    if (loader_ != nullptr) return true;
    gpushare_loader_params params = GPUSHARE_LOADER_PARAMS_INIT;
    params.chunk_bytes = 1 << 18;
    if (!tell(gpushare_loader_create(runtime_, &params, &loader_))) return false;
    keep([loader = loader_] { return gpushare_loader_release(loader); });
    return true;
  }
  gpushare_image image(const char* name) {
    static const std::array<char, 3 << 18> bytes{};
    const gpushare_layer_source layers[3] = {
        {"first", bytes.data(), 1 << 16}, {nullptr, bytes.data(), 3 << 18}, {"last", bytes.data(), 1 << 18}};
    gpushare_image image = nullptr;
    if (!open_loader() || !tell(gpushare_image_create(loader_, name, 3, layers, &image))) return nullptr;
    keep([image] { return gpushare_image_release(image); });
    return image;
  }
  void use(gpushare_iteration iteration, gpushare_model model) {
    gpushare_stream stream = nullptr;
    if (!tell(gpushare_iteration_get_stream(iteration, &stream))) return;
    for (uint32_t layer = 0; layer < 3; ++layer)
      (void)tell(gpushare_model_make_usable(model, layer, layer + 1, stream));
    (void)tell(gpushare_model_mark_end(model, stream));
  }

  void models(gpushare_session a, gpushare_session b) {
    const gpushare_image image = this->image("image");
    if (image == nullptr) return;
    static const uint32_t ends[2] = {1, 3};
    gpushare_load_params load = GPUSHARE_LOAD_PARAMS_INIT;
    load.group_ends = ends;
    load.group_count = 2;
    load.on_group = [](void*, uint32_t, uint32_t, uint32_t) {};
    for (const gpushare_session session : {a, b}) {
      gpushare_model model = nullptr;
      if (session == nullptr ||
          !tell(gpushare_session_load(session, image, session == a ? &load : nullptr, &model)))
        continue;
      keep([model] { return gpushare_model_release(model); });
      (void)tell(gpushare_model_wait(model, 2, GPUSHARE_NO_TIMEOUT));
      gpushare_iteration iteration = nullptr;
      for (int round = 0; round < 2; ++round) {
        if (!tell(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration))) continue;
        use(iteration, model);
        if (!tell(gpushare_iteration_end(iteration)))
          keep([iteration] { return gpushare_iteration_end(iteration); });
      }
      if (session == a) (void)tell(gpushare_model_release(model));
    }
  }

  void switcher() {
    const gpushare_image one = image("one"), two = image("two");
    gpushare_switcher switcher = nullptr;
    gpushare_switcher_params params = GPUSHARE_SWITCHER_PARAMS_INIT;
    params.standby_bytes = 2 * kMiB;
    params.keep_bytes = 0;
    if (one == nullptr || two == nullptr || !tell(gpushare_switcher_create(loader_, &params, &switcher)))
      return;
    keep([switcher] { return gpushare_switcher_release(switcher); });
    uint64_t members[2] = {};
    for (int i = 0; i < 2; ++i) {
      gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
      need.ephemeral_bytes = i == 0 ? kMiB : 0;
      (void)tell(gpushare_switcher_add(switcher, &need, i == 0 ? one : two, nullptr, &members[i]));
    }
    for (int round = 0; round < 4; ++round) {
      gpushare_iteration iteration = nullptr;
      gpushare_model model = nullptr;
      uint32_t loaded = 0;
      if (members[round % 2] == 0 ||
          !tell(gpushare_switcher_begin(switcher, members[round % 2], GPUSHARE_NO_TIMEOUT, &iteration, &model,
                                        &loaded)))
        continue;
      use(iteration, model);
      if (!tell(gpushare_iteration_end(iteration)))
        keep([iteration] { return gpushare_iteration_end(iteration); });
    }
    gpushare_switcher_info info = GPUSHARE_SWITCHER_INFO_INIT;
    (void)tell(gpushare_switcher_get_info(switcher, &info));
    if (members[1] != 0) (void)tell(gpushare_switcher_remove(switcher, members[1]));
  }

  void requests(gpushare_session session) {
    gpushare_request_queue queue = nullptr;
    gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
    if (session == nullptr || !tell(gpushare_request_queue_create(runtime_, &params, &queue))) return;
    keep([queue] { return gpushare_request_queue_close(queue); });
    gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
    uint32_t index = 0;
    if (!tell(gpushare_request_queue_add_model(
            queue, session, &model, [](void*, gpushare_iteration, const gpushare_queued_batch*) { return 0; },
            nullptr, nullptr, &index)))
      return;
    for (uint64_t id = 0; id < 3; ++id) {
      gpushare_request request = GPUSHARE_REQUEST_INIT;
      request.id = id;
      request.model = index;
      request.deadline_ns = gpushare_now_ns() + UINT64_C(10'000'000'000);
      ++unanswered_;
      if (!tell(gpushare_request_queue_submit(
              queue, &request,
              [](void* user_data, const gpushare_request_outcome*) {
                --*static_cast<std::atomic<int>*>(user_data);
              },
              &unanswered_)))
        --unanswered_;
    }
    (void)tell(gpushare_request_queue_drain(queue, GPUSHARE_NO_TIMEOUT));
    CHECK(unanswered_ == 0);
    (void)tell(gpushare_request_queue_close(queue));
  }

  void steps(gpushare_session session) {
    gpushare_step_queue queue = nullptr;
    gpushare_step_queue_params params = GPUSHARE_STEP_QUEUE_PARAMS_INIT;
    const auto step = [](void*, gpushare_iteration, const gpushare_step* of) -> int32_t {
      for (uint64_t i = 0; i < of->count; ++i) of->done[i] = of->members[i].tokens == 2;
      return GPUSHARE_OK;
    };
    if (session == nullptr ||
        !tell(gpushare_step_queue_create(session, &params, step, nullptr, nullptr, &queue)))
      return;
    keep([queue] { return gpushare_step_queue_close(queue); });
    for (uint64_t id = 0; id < 3; ++id) {
      gpushare_step_request request = GPUSHARE_STEP_REQUEST_INIT;
      request.id = id;
      request.prompt_tokens = 5;
      ++unanswered_;
      if (!tell(gpushare_step_queue_submit(
              queue, &request,
              [](void* user_data, const gpushare_step_answer* answer) {
                if (answer->ended != 0) --*static_cast<std::atomic<int>*>(user_data);
              },
              &unanswered_)))
        --unanswered_;
    }
    (void)gpushare_step_queue_cancel(queue, 1);  // or it is answered already
    (void)tell(gpushare_step_queue_drain(queue, GPUSHARE_NO_TIMEOUT));
    CHECK(unanswered_ == 0);
    (void)tell(gpushare_step_queue_close(queue));
  }

  const uint32_t layout_;
  gpushare_runtime runtime_ = nullptr;
  gpushare_loader loader_ = nullptr;
  std::atomic<int> unanswered_{0};
  std::vector<std::function<bool()>> open_;  // how to close, in the order of opening
  int32_t first_failure_ = GPUSHARE_OK;
};

// True if an allocation failed. Before the `succeed` allocations, and after them, the host has memory.
bool run(const char* device, uint32_t layout, uint64_t succeed) {
  bool failed = false;
  Program* program = nullptr;
  const gpushare::test::Spared mine;
  {
    const FailingNew failing(succeed, true);
    {
      const gpushare::test::Spared theirs(false);
      std::aligned_storage_t<sizeof(Program), alignof(Program)> static memory;
      program = new (&memory) Program(device, layout);
      program->run();
    }
    (void)program->close_all();
    failed = gpushare::test::failures > 0;
  }
  if (program->runtime() != nullptr) {
    const bool all = program->close_all(), useless = program->is_useless();
    if (!useless) {
      CHECK(all);
      CHECK_FALSE(program->has_bytes());
    }
    const int32_t closed = program->close_runtime();
    INFO(gpushare_last_error_message());
    // A call that memory ran out in may leave a mapping, which the device then gives back and tells of.
    CHECK((closed == GPUSHARE_OK ||
           (failed &&
            std::string(gpushare_last_error_message()).find("they were released") != std::string::npos)));
    CHECK(program->close_all());  // handles are given back also now
  }
  if (!failed) CHECK(program->first_failure() == GPUSHARE_OK);
  program->~Program();
  return failed;
}

}  // namespace

TEST_CASE("a program without memory gets a status from every call and closes") {
  const struct {
    const char* device;
    uint32_t layout;
  } setups[] = {{"host?total_bytes=67108864", GPUSHARE_LAYOUT_VIRTUAL},
                {"sim?total_bytes=67108864", GPUSHARE_LAYOUT_VIRTUAL},
                {"host?total_bytes=67108864", GPUSHARE_LAYOUT_CONTIGUOUS}};
  const bool every = std::getenv("GPUSHARE_TEST_EVERY_ALLOCATION") != nullptr;
  const char* const only = std::getenv("GPUSHARE_TEST_ALLOCATION");
  for (const auto& setup : setups) {
    uint64_t without = 0, with = 0;
    for (uint64_t n = only != nullptr ? std::strtoull(only, nullptr, 10) : 0; without < 2 && n < 100'000;
         n += every ? 1 : 1 + n / 24) {
      INFO(setup.device << ", layout " << setup.layout << ", allocation " << n);
      const bool failed = run(setup.device, setup.layout, n);
      without += failed ? 0 : 1;
      with += failed ? 1 : 0;
      if (only != nullptr) break;
    }
    if (only == nullptr) CHECK(with > 0);
  }
}
