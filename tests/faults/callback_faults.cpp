// Functions of the caller's that throw or call back in, through the C ABI as a user links it: the progress
// function, the out-of-memory function, submitted work, host functions, a custom policy. Each ends with a
// clear status, harms nobody else, and the runtime closes.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>

#include "gpushare/gpushare.h"
#include "support/catch.hpp"
#include "support/sizes.hpp"

using gpushare::test::kMiB;

namespace {

constexpr const char* kDevices[] = {"host", "sim"};

struct Fixture {
  explicit Fixture(const char* device, void (*configure)(gpushare_runtime_params*, void*) = nullptr,
                   void* data = nullptr) {
    gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
    params.device = device;
    params.capacity_bytes = 128 * kMiB;
    if (configure != nullptr) configure(&params, data);
    REQUIRE(gpushare_runtime_open(&params, &runtime) == GPUSHARE_OK);
    bystander = open("bystander");
  }
  gpushare_session open(const char* name, uint64_t persistent_bytes = kMiB, uint64_t ephemeral_bytes = kMiB,
                        uint32_t flags = 0) {
    gpushare_session session = nullptr;
    gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
    params.name = name;
    params.persistent_bytes = persistent_bytes;
    params.ephemeral_bytes = ephemeral_bytes;
    params.flags = flags;
    INFO(gpushare_last_error_message());
    REQUIRE(gpushare_session_open(runtime, &params, &session) == GPUSHARE_OK);
    return session;
  }
  // The bystander still runs, nothing but it is left, and the runtime closes.
  void finish() {
    gpushare_iteration iteration = nullptr;
    gpushare_device_address block = 0;
    CHECK(gpushare_iteration_begin(bystander, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK);
    CHECK(gpushare_iteration_alloc(iteration, kMiB / 2, 0, &block) == GPUSHARE_OK);
    CHECK(gpushare_iteration_end(iteration) == GPUSHARE_OK);
    CHECK(gpushare_session_close(bystander) == GPUSHARE_OK);
    gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
    CHECK(gpushare_runtime_get_info(runtime, &info) == GPUSHARE_OK);
    CHECK(info.persistent_bytes == 0);
    CHECK(info.ephemeral_bytes == 0);
    CHECK(info.promised_bytes == 0);
    CHECK(gpushare_runtime_close(runtime) == GPUSHARE_OK);
  }
  uint32_t state(gpushare_session session) {
    gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
    REQUIRE(gpushare_session_get_info(session, &info) == GPUSHARE_OK);
    return info.state;
  }
  int32_t run(gpushare_session session, gpushare_iteration_fn fn, void* data) {
    gpushare_ticket ticket = nullptr;
    const int32_t submitted = gpushare_session_submit(session, fn, data, nullptr, &ticket);
    if (submitted != GPUSHARE_OK) return submitted;
    const int32_t outcome = gpushare_ticket_wait(ticket, GPUSHARE_NO_TIMEOUT);
    CHECK(gpushare_ticket_release(ticket) == GPUSHARE_OK);
    return outcome;
  }

  gpushare_runtime runtime = nullptr;
  gpushare_session bystander = nullptr;
};

int32_t nothing(void*, gpushare_iteration) {
  return GPUSHARE_OK;
}

// The statuses of a callback's own calls. Catch's macros are for the test's thread only.
struct Seen {
  Fixture* fixture = nullptr;
  gpushare_session session = nullptr;
  std::atomic<int> calls{0};
  std::atomic<int32_t> info{-1}, close{-1}, close_runtime{-1}, synchronize{-1}, begin{-1}, submit{-1},
      ticket{-1};
  gpushare_ticket watched = nullptr;  // of an iteration that cannot end before the caller has returned

  void call_in() {
    gpushare_runtime_info facts = GPUSHARE_RUNTIME_INFO_INIT;
    gpushare_iteration iteration = nullptr;
    info = gpushare_runtime_get_info(fixture->runtime, &facts);
    close_runtime = gpushare_runtime_close(fixture->runtime);
    close = gpushare_session_close(session);
    begin = gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration);
    if (begin == GPUSHARE_OK)
      (void)gpushare_iteration_end(iteration);  // it was its turn: nothing to wait for
    ++calls;
  }
};

TEST_CASE("submitted work that throws is abandoned, or ends its session alone where the owner says so") {
  const char* device = GENERATE(from_range(std::begin(kDevices), std::end(kDevices)));
  Fixture fixture(device);
  for (const bool standard : {true, false}) {
    gpushare_session session = fixture.open("thrower", kMiB, kMiB, GPUSHARE_SESSION_FAIL_ON_ERROR);
    bool flag = standard;
    const int32_t outcome = fixture.run(
        session,
        [](void* data, gpushare_iteration) -> int32_t {
          if (*static_cast<bool*>(data)) throw std::runtime_error("scripted");
          throw 42;
        },
        &flag);
    CHECK(outcome == GPUSHARE_CALLBACK_FAILED);
    CHECK(fixture.state(session) == GPUSHARE_SESSION_FAILED);
    CHECK(gpushare_session_submit(session, nothing, nullptr, nullptr, nullptr) == GPUSHARE_INVALID_STATE);
    CHECK(std::string(gpushare_last_error_message()).find("thrower") != std::string::npos);
    CHECK(gpushare_session_close(session) == GPUSHARE_OK);
    session = fixture.open("goes on");
    const gpushare_iteration_fn throws = [](void*, gpushare_iteration) -> int32_t {
      throw std::runtime_error("scripted");
    };
    for (int i = 0; i < 3; ++i) {
      CHECK(fixture.run(session, throws, nullptr) == GPUSHARE_CALLBACK_FAILED);
      CHECK(fixture.state(session) == GPUSHARE_SESSION_RESIDENT);
      CHECK(fixture.run(session, nothing, nullptr) == GPUSHARE_OK);
    }
    CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  }
  fixture.finish();
}

TEST_CASE("submitted work may call in, and what would wait for itself is refused") {
  const char* device = GENERATE(from_range(std::begin(kDevices), std::end(kDevices)));
  Fixture fixture(device);
  Seen seen;
  seen.fixture = &fixture;
  seen.session = fixture.open("reenters");
  const int32_t outcome = fixture.run(
      seen.session,
      [](void* data, gpushare_iteration iteration) -> int32_t {
        auto& s = *static_cast<Seen*>(data);
        s.call_in();
        s.submit = gpushare_session_submit(s.session, nothing, nullptr, nullptr, nullptr);
        return gpushare_iteration_end(iteration) == GPUSHARE_INVALID_STATE ? GPUSHARE_OK : GPUSHARE_INTERNAL;
      },
      &seen);
  CHECK(outcome == GPUSHARE_OK);
  CHECK(seen.info == GPUSHARE_OK);
  CHECK(seen.close_runtime == GPUSHARE_INVALID_STATE);
  CHECK(seen.close == GPUSHARE_INVALID_STATE);
  CHECK(seen.begin == GPUSHARE_INVALID_STATE);
  CHECK(seen.submit == GPUSHARE_OK);
  CHECK(gpushare_session_close(seen.session) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("a host function in a lane that throws fails its iteration alone; one that calls in cannot wait") {
  const char* device = GENERATE(from_range(std::begin(kDevices), std::end(kDevices)));
  const bool throws = GENERATE(true, false), strict = GENERATE(false, true);
  Fixture fixture(device);
  Seen seen;
  seen.fixture = &fixture;
  seen.session =
      fixture.open("host function", kMiB, kMiB, strict ? uint32_t{GPUSHARE_SESSION_FAIL_ON_ERROR} : 0U);
  gpushare_iteration iteration = nullptr;
  gpushare_stream stream = nullptr;
  REQUIRE(gpushare_iteration_begin(seen.session, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK);
  REQUIRE(gpushare_iteration_get_stream(iteration, &stream) == GPUSHARE_OK);
  const auto function = throws ? [](void*) { throw std::runtime_error("scripted"); } : [](void* data) {
    auto& s = *static_cast<Seen*>(data);
    s.call_in();
    s.synchronize =
        gpushare_runtime_synchronize(s.fixture->runtime, 1);  // refused, not late, although its time is over
    s.ticket = gpushare_ticket_wait(s.watched, 1);
  };
  REQUIRE(gpushare_session_submit(seen.session, nothing, nullptr, nullptr, &seen.watched) == GPUSHARE_OK);
  REQUIRE(gpushare_stream_launch_host(stream, function, &seen) == GPUSHARE_OK);
  REQUIRE(gpushare_iteration_end(iteration) == GPUSHARE_OK);
  CHECK(gpushare_runtime_synchronize(fixture.runtime, GPUSHARE_NO_TIMEOUT) == GPUSHARE_OK);
  (void)gpushare_ticket_wait(seen.watched, GPUSHARE_NO_TIMEOUT);
  CHECK(gpushare_ticket_release(seen.watched) == GPUSHARE_OK);
  if (throws && strict) {
    CHECK(fixture.state(seen.session) == GPUSHARE_SESSION_FAILED);
  } else if (throws) {
    CHECK(fixture.state(seen.session) == GPUSHARE_SESSION_RESIDENT);
    CHECK(gpushare_iteration_begin(seen.session, GPUSHARE_NO_TIMEOUT, &iteration) ==
          GPUSHARE_CALLBACK_FAILED);  // tells it once
    CHECK(std::string(gpushare_last_error_message()).find("threw: scripted") != std::string::npos);
    for (int i = 0; i < 3; ++i) {
      CHECK(gpushare_iteration_begin(seen.session, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK);
      CHECK(gpushare_iteration_end(iteration) == GPUSHARE_OK);
    }
  } else {
    CHECK(fixture.state(seen.session) == GPUSHARE_SESSION_RESIDENT);
    CHECK(seen.calls == 1);
    CHECK(seen.info == GPUSHARE_OK);
    CHECK(seen.close_runtime == GPUSHARE_INVALID_STATE);
    CHECK(seen.close == GPUSHARE_INVALID_STATE);
    CHECK((seen.begin == GPUSHARE_OK || seen.begin == GPUSHARE_INVALID_STATE));
    // OK where the iteration had not ended yet: there was nothing to wait for.
    CHECK((seen.synchronize == GPUSHARE_OK || seen.synchronize == GPUSHARE_INVALID_STATE));
    CHECK(seen.ticket == GPUSHARE_INVALID_STATE);
  }
  CHECK(gpushare_session_close(seen.session) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("a progress function that throws or calls in") {
  const char* device = GENERATE(from_range(std::begin(kDevices), std::end(kDevices)));
  const bool throws = GENERATE(true, false);
  struct Data {
    Seen seen;
    bool throws = false;
    std::atomic<uint64_t> watched{0};  // the session whose iterations count
    std::atomic<bool> inside{false};
    std::atomic<bool> closed{false};
    std::atomic<int> others{0};  // answers that nobody should get, and calls after the close
  } data;
  data.throws = throws;
  const auto configure = [](gpushare_runtime_params* params, void* user) {
    params->on_progress_user_data = user;
    params->on_progress = [](void* user_data, const gpushare_progress* progress) {
      auto& d = *static_cast<Data*>(user_data);
      if (progress->session_id != d.watched || d.inside.exchange(true)) return;
      if (d.closed) ++d.others;
      if (d.throws) {
        ++d.seen.calls;
        d.inside = false;
        throw std::runtime_error("scripted");
      }
      d.seen.call_in();
      for (const auto* code : {&d.seen.close, &d.seen.close_runtime, &d.seen.begin}) {
        const bool refused = *code == GPUSHARE_INVALID_STATE || *code == GPUSHARE_INVALID_HANDLE;
        if (!refused && (code != &d.seen.begin || *code != GPUSHARE_OK)) ++d.others;
      }
      d.inside = false;
    };
  };
  Fixture fixture(device, configure, &data);
  data.seen.fixture = &fixture;
  data.seen.session = fixture.open("progress");
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  REQUIRE(gpushare_session_get_info(data.seen.session, &info) == GPUSHARE_OK);
  data.watched = info.session_id;
  for (int i = 0; i < 3; ++i) CHECK(fixture.run(data.seen.session, nothing, nullptr) == GPUSHARE_OK);
  CHECK(gpushare_runtime_synchronize(fixture.runtime, GPUSHARE_NO_TIMEOUT) == GPUSHARE_OK);
  CHECK(fixture.state(data.seen.session) == GPUSHARE_SESSION_RESIDENT);
  CHECK(gpushare_session_close(data.seen.session) == GPUSHARE_OK);
  data.closed = true;
  fixture.finish();
  CHECK(data.seen.calls > 0);
  CHECK(data.others == 0);
  if (!throws) CHECK(data.seen.info == GPUSHARE_OK);
}

TEST_CASE("an out-of-memory function that throws, allocates again, or closes") {
  const char* device = GENERATE(from_range(std::begin(kDevices), std::end(kDevices)));
  const int what = GENERATE(0, 1, 2);
  struct Data {
    Seen seen;
    int what = 0;
    std::atomic<int32_t> nested{-1};
  } data;
  data.what = what;
  Fixture fixture(device);
  data.seen.fixture = &fixture;
  data.seen.session = fixture.open("hungry", 8 * kMiB, kMiB);
  REQUIRE(gpushare_runtime_set_out_of_memory_callback(
              fixture.runtime,
              [](void* user_data, uint64_t, uint64_t bytes) -> int32_t {
                auto& d = *static_cast<Data*>(user_data);
                ++d.seen.calls;
                if (d.what == 0) throw std::runtime_error("scripted");
                gpushare_device_address block = 0;
                if (d.what == 1)
                  d.nested = gpushare_session_alloc(d.seen.session, GPUSHARE_KIND_MODEL, bytes, 0, &block);
                if (d.what == 2) d.seen.close_runtime = gpushare_runtime_close(d.seen.fixture->runtime);
                return 1;
              },
              &data) == GPUSHARE_OK);
  gpushare_device_address block = 0;
  CHECK(gpushare_session_alloc(data.seen.session, GPUSHARE_KIND_MODEL, 127 * kMiB, 0, &block) ==
        GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(std::string(gpushare_last_error_message()).find("hungry") != std::string::npos);
  CHECK(data.seen.calls >= 1);
  CHECK(data.seen.calls <= 8);
  if (what == 1) CHECK(data.nested == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  if (what == 2) CHECK(data.seen.close_runtime == GPUSHARE_INVALID_STATE);
  CHECK(gpushare_session_alloc(data.seen.session, GPUSHARE_KIND_MODEL, 4 * kMiB, 0, &block) == GPUSHARE_OK);
  CHECK(gpushare_session_close(data.seen.session) == GPUSHARE_OK);
  fixture.finish();
}

// All of its functions misbehave, one way at a time; a built-in policy then takes over.
TEST_CASE("a custom policy that throws, answers nonsense, or calls in") {
  const char* device = GENERATE(from_range(std::begin(kDevices), std::end(kDevices)));
  enum { kThrows, kNonsense, kCallsIn };
  const int how = GENERATE(0, 1, 2);
  struct Data {
    Seen seen;
    int how = 0;
    std::atomic<int> released{0};
    void misbehave() {
      if (how == kThrows) {
        ++seen.calls;
        throw std::runtime_error("scripted");
      }
      if (how == kCallsIn && seen.session != nullptr) seen.call_in();
    }
  } data;
  data.how = how;
  gpushare_policy_ops ops{};
  ops.struct_size = sizeof ops;
  ops.name = "misbehaves";
  ops.user_data = &data;
  ops.may_run = [](void* user_data, const gpushare_candidate*, uint64_t now_ns) -> uint64_t {
    auto& d = *static_cast<Data*>(user_data);
    d.misbehave();
    return d.how == kNonsense ? UINT64_MAX : now_ns;
  };
  ops.before = [](void* user_data, const gpushare_candidate*, const gpushare_candidate*) -> int32_t {
    static_cast<Data*>(user_data)->misbehave();
    return 1;  // of any two, each is before the other
  };
  ops.gives_way = [](void* user_data, const gpushare_candidate*, const gpushare_candidate*) -> int32_t {
    auto& d = *static_cast<Data*>(user_data);
    d.misbehave();
    return d.how == kNonsense ? 77 : GPUSHARE_GIVES_WAY_AT_ONCE;
  };
  ops.share = [](void* user_data, const gpushare_candidate*) -> double {
    auto& d = *static_cast<Data*>(user_data);
    d.misbehave();
    return d.how == kNonsense ? -17 : 1;
  };
  ops.may_join = [](void* user_data, const gpushare_candidate*, uint32_t, uint32_t) -> int32_t {
    auto& d = *static_cast<Data*>(user_data);
    d.misbehave();
    return d.how == kNonsense ? -1 : GPUSHARE_JOIN_YES;
  };
  ops.release = [](void* user_data) {
    auto& d = *static_cast<Data*>(user_data);
    ++d.released;
    if (d.how == kThrows) throw std::runtime_error("scripted");
    d.misbehave();
  };
  Fixture fixture(device);
  data.seen.fixture = &fixture;
  data.seen.session = fixture.open("policed");
  REQUIRE(gpushare_runtime_set_policy(fixture.runtime, nullptr, &ops) == GPUSHARE_OK);
  gpushare_ticket ticket = nullptr;
  REQUIRE(gpushare_session_submit(data.seen.session, nothing, nullptr, nullptr, &ticket) == GPUSHARE_OK);
  // A may_join that throws or answers nonsense lets nobody in.
  gpushare_session large = how == kCallsIn ? fixture.open("large", 100 * kMiB, kMiB) : nullptr;
  if (how == kCallsIn) {
    CHECK(gpushare_ticket_wait(ticket, GPUSHARE_NO_TIMEOUT) == GPUSHARE_OK);
    CHECK(data.seen.calls > 0);
    for (const auto* code : {&data.seen.info, &data.seen.close, &data.seen.close_runtime, &data.seen.begin})
      CHECK(*code == GPUSHARE_INVALID_STATE);
  } else {
    CHECK(gpushare_ticket_wait(ticket, 1'000'000) == GPUSHARE_TIMED_OUT);  // taken as "leave it idle"
  }
  if (large != nullptr) CHECK(gpushare_session_close(large) == GPUSHARE_OK);
  CHECK(gpushare_runtime_set_policy(fixture.runtime, "fair", nullptr) == GPUSHARE_OK);
  CHECK(data.released == 1);
  CHECK(gpushare_ticket_wait(ticket, GPUSHARE_NO_TIMEOUT) == GPUSHARE_OK);
  CHECK(gpushare_ticket_release(ticket) == GPUSHARE_OK);
  CHECK(gpushare_session_close(data.seen.session) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("what goes with submitted work may call in, and may not close the runtime") {
  const char* device = GENERATE(from_range(std::begin(kDevices), std::end(kDevices)));
  const bool runs = GENERATE(true, false);
  Fixture fixture(device);
  struct Data {
    gpushare_runtime runtime = nullptr;
    std::atomic<int> calls{0};
    std::atomic<int32_t> info{-1}, close{-1};
  } data;
  data.runtime = fixture.runtime;
  gpushare_session session = fixture.open("released");
  gpushare_iteration iteration = nullptr;
  if (!runs) REQUIRE(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK);
  REQUIRE(gpushare_session_submit(
              session, nothing, &data,
              [](void* user_data) {
                auto& d = *static_cast<Data*>(user_data);
                gpushare_runtime_info facts = GPUSHARE_RUNTIME_INFO_INIT;
                d.info = gpushare_runtime_get_info(d.runtime, &facts);
                d.close = gpushare_runtime_close(d.runtime);
                ++d.calls;
              },
              nullptr) == GPUSHARE_OK);
  if (!runs) {
    CHECK(gpushare_session_cancel(session) == GPUSHARE_OK);
    CHECK(gpushare_iteration_end(iteration) == GPUSHARE_OK);
  }
  while (data.calls == 0) std::this_thread::yield();
  CHECK(data.info == GPUSHARE_OK);
  CHECK(data.close == GPUSHARE_INVALID_STATE);
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  fixture.finish();
  CHECK(data.calls == 1);
}

// On one lane, and so on one thread: what another session's work did there before is not told as the reason.
TEST_CASE("a code of the work's own has no message of another's") {
  const auto one_lane = [](gpushare_runtime_params* params, void*) { params->max_lanes = 1; };
  Fixture fixture("host", one_lane);
  gpushare_session first = fixture.open("first");
  CHECK(fixture.run(
            first,
            [](void*, gpushare_iteration) -> int32_t {
              return gpushare_session_close(nullptr) == GPUSHARE_INVALID_HANDLE ? GPUSHARE_OK
                                                                                : GPUSHARE_INTERNAL;
            },
            nullptr) == GPUSHARE_OK);
  gpushare_session second = fixture.open("second");
  CHECK(fixture.run(
            second, [](void*, gpushare_iteration) -> int32_t { return GPUSHARE_INVALID_HANDLE; }, nullptr) ==
        GPUSHARE_INVALID_HANDLE);
  const std::string message = gpushare_last_error_message();
  INFO(message);
  CHECK(message.find("function returned INVALID_HANDLE") != std::string::npos);
  CHECK(gpushare_session_close(first) == GPUSHARE_OK);
  CHECK(gpushare_session_close(second) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("a stream that is busy is not waited for in a progress function") {
  struct Data {
    gpushare_stream busy = nullptr;
    std::atomic<bool> go{false};
    std::atomic<int32_t> code{-1};
  } data;
  const auto configure = [](gpushare_runtime_params* params, void* user) {
    params->on_progress_user_data = user;
    params->on_progress = [](void* user_data, const gpushare_progress*) {
      auto& d = *static_cast<Data*>(user_data);
      d.code = gpushare_stream_synchronize(d.busy);
      d.go = true;
    };
  };
  Fixture fixture("host", configure, &data);
  REQUIRE(gpushare_stream_create(fixture.runtime, 0, &data.busy) == GPUSHARE_OK);
  REQUIRE(gpushare_stream_launch_host(
              data.busy,
              [](void* user_data) {
                auto& d = *static_cast<Data*>(user_data);
                for (int i = 0; i < 20000 && !d.go; ++i)
                  std::this_thread::sleep_for(std::chrono::microseconds(100));
              },
              &data) == GPUSHARE_OK);
  CHECK(fixture.run(fixture.bystander, nothing, nullptr) == GPUSHARE_OK);
  while (!data.go) std::this_thread::yield();
  CHECK(data.code == GPUSHARE_INVALID_STATE);
  CHECK(gpushare_stream_synchronize(data.busy) == GPUSHARE_OK);
  CHECK(gpushare_stream_release(data.busy) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("a host function releases no stream, neither its own nor another") {
  struct Data {
    gpushare_stream own = nullptr, other = nullptr;
    std::atomic<int32_t> own_code{-1}, other_code{-1};
  } data;
  Fixture fixture("host");
  for (gpushare_stream* each : {&data.own, &data.other})
    REQUIRE(gpushare_stream_create(fixture.runtime, 0, each) == GPUSHARE_OK);
  REQUIRE(gpushare_stream_launch_host(
              data.own,
              [](void* user_data) {
                auto& d = *static_cast<Data*>(user_data);
                d.own_code = gpushare_stream_release(d.own);
                d.other_code = gpushare_stream_release(d.other);
              },
              &data) == GPUSHARE_OK);
  CHECK(gpushare_stream_synchronize(data.own) == GPUSHARE_OK);
  CHECK(data.own_code == GPUSHARE_INVALID_STATE);
  CHECK(data.other_code == GPUSHARE_INVALID_STATE);
  for (gpushare_stream each : {data.own, data.other}) CHECK(gpushare_stream_release(each) == GPUSHARE_OK);
  fixture.finish();  // the runtime closes without a stream that was left
}

TEST_CASE("a host function in a batch cannot wait for its request queue") {
  struct Data {
    gpushare_request_queue queue = nullptr;
    std::atomic<int32_t> drain{-1}, close{-1}, answer{-1};
  } data;
  Fixture fixture("host");
  gpushare_session session = fixture.open("serving");
  gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
  REQUIRE(gpushare_request_queue_create(fixture.runtime, &params, &data.queue) == GPUSHARE_OK);
  gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
  const uint32_t sizes[] = {1};
  model.batch_sizes = sizes;
  model.batch_size_count = 1;
  uint32_t id = 0;
  REQUIRE(gpushare_request_queue_add_model(
              data.queue, session, &model,
              [](void* user_data, gpushare_iteration iteration, const gpushare_queued_batch*) -> int32_t {
                gpushare_stream stream = nullptr;
                const int32_t code = gpushare_iteration_get_stream(iteration, &stream);
                if (code != GPUSHARE_OK) return code;
                return gpushare_stream_launch_host(
                    stream,
                    [](void* inner) {
                      auto& d = *static_cast<Data*>(inner);
                      d.drain = gpushare_request_queue_drain(d.queue, GPUSHARE_NO_TIMEOUT);
                      d.close = gpushare_request_queue_close(d.queue);
                    },
                    user_data);
              },
              &data, nullptr, &id) == GPUSHARE_OK);
  gpushare_request request = GPUSHARE_REQUEST_INIT;
  request.id = 1;
  request.model = id;
  request.deadline_ns = gpushare_now_ns() + 3'600'000'000'000;
  REQUIRE(gpushare_request_queue_submit(
              data.queue, &request,
              [](void* user_data, const gpushare_request_outcome* outcome) {
                static_cast<Data*>(user_data)->answer = outcome->status;
              },
              &data) == GPUSHARE_OK);
  CHECK(gpushare_request_queue_drain(data.queue, GPUSHARE_NO_TIMEOUT) == GPUSHARE_OK);
  CHECK(data.answer == GPUSHARE_OK);
  CHECK(data.drain == GPUSHARE_INVALID_STATE);
  CHECK(data.close == GPUSHARE_INVALID_STATE);
  CHECK(gpushare_request_queue_close(data.queue) == GPUSHARE_OK);
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  fixture.finish();
}

}  // namespace
