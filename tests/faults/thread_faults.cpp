// Threads that end in the middle of things, through the C ABI as a user links it: with an iteration open, by pthread_cancel in a
// call that waits, by pthread_exit in a callback; and calls from where they are refused (log functions, signal handlers) or
// could only wait for themselves. The books stay right, no lock stays held, and the runtime closes.
// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "gpushare/gpushare.h"
#include "support/catch.hpp"
#include "support/sizes.hpp"

using gpushare::test::kMiB;

namespace {

constexpr const char* kDevices[] = {"host", "sim"};

struct Fixture {
  explicit Fixture(const std::string& device, uint32_t max_lanes = 1,
                   gpushare_progress_fn on_progress = nullptr, void* data = nullptr) {
    gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
    params.device = device.c_str();
    params.capacity_bytes = 128 * kMiB;
    params.max_lanes = max_lanes;
    params.on_progress = on_progress;
    params.on_progress_user_data = data;
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
  gpushare_session_info info(gpushare_session session) {
    gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
    REQUIRE(gpushare_session_get_info(session, &info) == GPUSHARE_OK);
    return info;
  }
  // One iteration with a block. Not for failing.
  void run(gpushare_session session) {
    gpushare_iteration iteration = nullptr;
    gpushare_device_address block = 0;
    INFO(gpushare_last_error_message());
    REQUIRE(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK);
    CHECK(gpushare_iteration_alloc(iteration, kMiB / 2, 0, &block) == GPUSHARE_OK);
    CHECK(gpushare_iteration_end(iteration) == GPUSHARE_OK);
  }
  // The bystander still runs, nothing but it is left, and the runtime closes.
  void finish() {
    run(bystander);
    CHECK(gpushare_session_close(bystander) == GPUSHARE_OK);
    gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
    CHECK(gpushare_runtime_get_info(runtime, &info) == GPUSHARE_OK);
    CHECK(info.persistent_bytes == 0);
    CHECK(info.ephemeral_bytes == 0);
    CHECK(info.promised_bytes == 0);
    CHECK(gpushare_runtime_close(runtime) == GPUSHARE_OK);
  }
  gpushare_runtime runtime = nullptr;
  gpushare_session bystander = nullptr;
};

bool last_error_says(const char* what) {
  return std::string(gpushare_last_error_message()).find(what) != std::string::npos;
}

std::string wait_of(gpushare_session session) {
  char text[512] = "";
  CHECK(gpushare_session_explain_wait(session, text, sizeof text) == GPUSHARE_OK);
  return text;
}

void a_moment() {
  std::this_thread::sleep_for(std::chrono::microseconds(200));
}

// A thread that may be cancelled or exit by itself, which std::thread cannot tell.
class Thread {
 public:
  explicit Thread(std::function<void()> body) : body_(std::move(body)) {
    REQUIRE(pthread_create(
                &thread_, nullptr,
                [](void* self) -> void* {
                  static_cast<Thread*>(self)->body_();
                  return nullptr;
                },
                this) == 0);
  }
  pthread_t native() const { return thread_; }
  // True if it was cancelled.
  bool join() {
    void* result = nullptr;
    REQUIRE(pthread_join(thread_, &result) == 0);
    return result == PTHREAD_CANCELED;
  }
  bool cancel() {
    REQUIRE(pthread_cancel(thread_) == 0);
    return join();
  }

 private:
  std::function<void()> body_;
  pthread_t thread_{};
};

[[noreturn]] void end_thread() {
  pthread_exit(nullptr);
}

struct UsesLate {
  std::function<void()> use;
  ~UsesLate() {
    if (use) use();
  }
};
thread_local UsesLate t_late;

}  // namespace

TEST_CASE(
    "iterations begin and end in the destructor of a thread_local that is older than the library's data") {
  Fixture fixture(kDevices[GENERATE(0, 1)]);
  const gpushare_session session = fixture.open("late");
  int32_t failed_begin = GPUSHARE_OK;
  std::string message;
  std::thread([&] {
    t_late.use = [&] {
      fixture.run(session);
      failed_begin = gpushare_iteration_begin(nullptr, 0, nullptr);
      message = gpushare_last_error_message();
    };
    fixture.run(session);
    CHECK(gpushare_iteration_end(nullptr) == GPUSHARE_INVALID_HANDLE);  // the thread's last error is in use
  }).join();
  CHECK(failed_begin == GPUSHARE_INVALID_ARGUMENT);
  CHECK(message.find("out_iteration") != std::string::npos);
  CHECK(fixture.info(session).iterations_done == 2);
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("a thread that exits with an iteration open ends it as failed, and others get their turn") {
  Fixture fixture(kDevices[GENERATE(0, 1)]);
  const gpushare_session session = fixture.open("left open");
  const bool in_destructor = GENERATE(false, true);
  std::atomic<bool> open{false}, leave{false};
  std::thread leaver([&] {
    const auto begin = [&] {
      gpushare_iteration iteration = nullptr;
      gpushare_device_address block = 0;
      CHECK(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK);
      CHECK(gpushare_iteration_alloc(iteration, kMiB / 2, 0, &block) == GPUSHARE_OK);
      open = true;
      while (!leave) a_moment();
    };
    if (in_destructor)
      t_late.use = begin;
    else
      begin();
  });
  while (!open) a_moment();
  std::thread waiter([&] { fixture.run(fixture.bystander); });
  leave = true;
  leaver.join();
  waiter.join();
  const gpushare_session_info info = fixture.info(session);
  CHECK(info.state == GPUSHARE_SESSION_FAILED);
  CHECK(info.status == GPUSHARE_CALLBACK_FAILED);
  CHECK(gpushare_iteration_begin(session, 0, nullptr) == GPUSHARE_INVALID_ARGUMENT);
  gpushare_iteration iteration = nullptr;
  CHECK(gpushare_iteration_begin(session, 0, &iteration) == GPUSHARE_INVALID_STATE);
  CHECK(last_error_says("exited without ending it"));
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("an iteration that another thread has ended is nothing to the thread that exits") {
  Fixture fixture(kDevices[GENERATE(0, 1)]);
  const gpushare_session session = fixture.open("handed over");
  gpushare_iteration iteration = nullptr;
  std::atomic<bool> ended{false};
  std::thread first([&] {
    CHECK(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK);
    std::thread([&] { CHECK(gpushare_iteration_end(iteration) == GPUSHARE_OK); }).join();
    std::thread([&] {
      CHECK(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK);
      ended = true;
      CHECK(gpushare_iteration_end(iteration) == GPUSHARE_OK);
    }).join();
  });
  first.join();
  fixture.run(session);
  CHECK(fixture.info(session).iterations_done == 3);
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("a thread that is cancelled while it waits for its turn loses no turn") {
  Fixture fixture(kDevices[GENERATE(0, 1)]);
  const gpushare_session session = fixture.open("cancelled");
  const bool timed = GENERATE(false, true);
  for (int i = 0; i < 20; ++i) {
    gpushare_iteration held = nullptr;
    REQUIRE(gpushare_iteration_begin(fixture.bystander, GPUSHARE_NO_TIMEOUT, &held) == GPUSHARE_OK);
    std::atomic<bool> begun{false};
    Thread thread([&] {
      gpushare_iteration iteration = nullptr;
      begun = true;
      if (gpushare_iteration_begin(session, timed ? uint64_t{1} << 40 : GPUSHARE_NO_TIMEOUT, &iteration) ==
          GPUSHARE_OK)
        (void)gpushare_iteration_end(iteration);  // the turn was there before it was cancelled
      for (;;) {
        pthread_testcancel();
        a_moment();
      }
    });
    while (!begun) a_moment();
    if (i % 2 == 0) {
      while (wait_of(session).find("lane 0 is in an iteration of session 'bystander'") == std::string::npos)
        a_moment();
      CHECK(thread.cancel());
      CHECK(gpushare_iteration_end(held) == GPUSHARE_OK);
    } else {  // the turn may come at the same moment
      std::thread other([&] { CHECK(gpushare_iteration_end(held) == GPUSHARE_OK); });
      CHECK(thread.cancel());
      other.join();
    }
    CHECK(fixture.info(session).state == GPUSHARE_SESSION_RESIDENT);
    fixture.run(session);
  }
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("threads are cancelled while they wait for a ticket, for admission, for a session's end") {
  Fixture fixture(kDevices[GENERATE(0, 1)]);
  const gpushare_session session = fixture.open("waited for");
  const gpushare_session queued = fixture.open("queued", 125 * kMiB, kMiB, GPUSHARE_SESSION_ALLOW_QUEUEING);
  gpushare_iteration held = nullptr;
  REQUIRE(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &held) == GPUSHARE_OK);
  gpushare_ticket ticket = nullptr;
  const auto nothing = [](void*, gpushare_iteration) -> int32_t { return GPUSHARE_OK; };
  REQUIRE(gpushare_session_submit(session, nothing, nullptr, nullptr, &ticket) == GPUSHARE_OK);
  const std::function<void()> waits[] = {
      [&] { (void)gpushare_ticket_wait(ticket, GPUSHARE_NO_TIMEOUT); },
      [&] { (void)gpushare_session_wait_admitted(queued, GPUSHARE_NO_TIMEOUT); },
      [&] { (void)gpushare_session_close(session); },
  };
  for (const auto& wait : waits) {
    std::atomic<bool> begun{false};
    Thread thread([&] {
      begun = true;
      wait();
    });
    while (!begun) a_moment();
    for (int i = 0; i < 10; ++i) a_moment();
    CHECK(thread.cancel());
  }
  CHECK(gpushare_ticket_wait(ticket, 0) == GPUSHARE_CANCELLED);  // by the close
  CHECK(gpushare_ticket_release(ticket) == GPUSHARE_OK);
  CHECK(gpushare_iteration_end(held) == GPUSHARE_OK);
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  CHECK(gpushare_session_close(queued) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE(
    "a submitted iteration that ends its thread fails its session, and the lane goes on with another "
    "thread") {
  Fixture fixture(kDevices[GENERATE(0, 1)]);
  for (int i = 0; i < 3; ++i) {
    const gpushare_session session = fixture.open("ends its thread");
    gpushare_ticket ticket = nullptr;
    std::atomic<int> released{0};
    const auto fn = [](void*, gpushare_iteration) -> int32_t { end_thread(); };
    const auto release = [](void* data) { ++*static_cast<std::atomic<int>*>(data); };
    REQUIRE(gpushare_session_submit(session, fn, &released, release, &ticket) == GPUSHARE_OK);
    CHECK(gpushare_ticket_wait(ticket, GPUSHARE_NO_TIMEOUT) == GPUSHARE_CALLBACK_FAILED);
    CHECK(last_error_says("ended its thread"));
    CHECK(gpushare_ticket_release(ticket) == GPUSHARE_OK);
    CHECK(gpushare_session_close(session) == GPUSHARE_OK);
    CHECK(released == 1);
    const auto fine = [](void*, gpushare_iteration) -> int32_t { return GPUSHARE_OK; };
    REQUIRE(gpushare_session_submit(fixture.bystander, fine, nullptr, nullptr, &ticket) == GPUSHARE_OK);
    CHECK(gpushare_ticket_wait(ticket, GPUSHARE_NO_TIMEOUT) == GPUSHARE_OK);
    CHECK(gpushare_ticket_release(ticket) == GPUSHARE_OK);
  }
  fixture.finish();
}

TEST_CASE("a host function that ends its thread fails its session, and the stream goes on") {
  const std::string device = kDevices[GENERATE(0, 1)];
  Fixture fixture(device);
  const gpushare_session session = fixture.open("ends its thread");
  // On sim it runs on the thread that waits for the device, which then is this one.
  Thread thread([&] {
    gpushare_iteration iteration = nullptr;
    gpushare_stream stream = nullptr;
    CHECK(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration) == GPUSHARE_OK);
    CHECK(gpushare_iteration_get_stream(iteration, &stream) == GPUSHARE_OK);
    CHECK(gpushare_stream_launch_host(
              stream, [](void*) { end_thread(); }, nullptr) == GPUSHARE_OK);
    (void)gpushare_stream_synchronize(stream);
    (void)gpushare_iteration_end(iteration);
  });
  thread.join();
  CHECK(gpushare_runtime_synchronize(fixture.runtime, GPUSHARE_NO_TIMEOUT) == GPUSHARE_OK);
  const gpushare_session_info info = fixture.info(session);
  CHECK(info.state == GPUSHARE_SESSION_FAILED);
  CHECK(info.status == GPUSHARE_CALLBACK_FAILED);
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("progress functions that end their threads cost no progress") {
  std::atomic<int> calls{0};
  const auto on_progress = [](void* data, const gpushare_progress*) {
    if (++*static_cast<std::atomic<int>*>(data) % 2 == 1) end_thread();
  };
  Fixture fixture(kDevices[GENERATE(0, 1)], 1, on_progress, &calls);
  const gpushare_session session = fixture.open("told about");
  for (int i = 0; i < 6; ++i) {
    Thread thread([&] {
      gpushare_iteration iteration = nullptr;
      // The call stands outside CHECK, which would stop the unwinding.
      const int32_t begun = gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration);
      CHECK(begun == GPUSHARE_OK);
      const int32_t ended = gpushare_iteration_end(iteration);
      CHECK(ended == GPUSHARE_OK);
      (void)gpushare_runtime_synchronize(fixture.runtime, GPUSHARE_NO_TIMEOUT);
    });
    thread.join();
  }
  // Each of these threads may end where it polls the device.
  while (true) {
    std::atomic<uint64_t> done{0};
    Thread([&] {
      gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
      (void)gpushare_session_get_info(session, &info);
      done = info.iterations_done;
    }).join();
    if (done == 6) break;
  }
  Thread([&] { (void)gpushare_session_close(session); }).join();
  Thread([&] { (void)gpushare_runtime_close(fixture.runtime); }).join();
}

TEST_CASE("functions that take a step queue's answers and end their thread keep no request open") {
  Fixture fixture("host");
  const gpushare_session session = fixture.open("serves");
  gpushare_step_queue queue = nullptr;
  const gpushare_step_queue_params params = GPUSHARE_STEP_QUEUE_PARAMS_INIT;
  const auto step = [](void*, gpushare_iteration, const gpushare_step* of) -> int32_t {
    for (uint64_t i = 0; i < of->count; ++i) of->done[i] = of->members[i].tokens == 2;
    return GPUSHARE_OK;
  };
  REQUIRE(gpushare_step_queue_create(session, &params, step, nullptr, nullptr, &queue) == GPUSHARE_OK);
  std::atomic<int> ended{0};
  for (uint64_t id = 0; id < 5; ++id) {
    gpushare_step_request request = GPUSHARE_STEP_REQUEST_INIT;
    request.id = id;
    const auto answer = [](void* data, const gpushare_step_answer* news) {
      if (news->ended != 0) ++*static_cast<std::atomic<int>*>(data);
      end_thread();
    };
    REQUIRE(gpushare_step_queue_submit(queue, &request, answer, &ended) == GPUSHARE_OK);
  }
  CHECK(gpushare_step_queue_drain(queue, GPUSHARE_NO_TIMEOUT) == GPUSHARE_OK);
  CHECK(ended == 5);
  CHECK(gpushare_step_queue_close(queue) == GPUSHARE_OK);
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("a step that ends its thread fails the session, and its queue answers and closes") {
  Fixture fixture("host");
  const gpushare_session session = fixture.open("ends its thread");
  gpushare_step_queue queue = nullptr;
  const gpushare_step_queue_params params = GPUSHARE_STEP_QUEUE_PARAMS_INIT;
  const auto step = [](void*, gpushare_iteration, const gpushare_step*) -> int32_t { end_thread(); };
  REQUIRE(gpushare_step_queue_create(session, &params, step, nullptr, nullptr, &queue) == GPUSHARE_OK);
  std::atomic<int32_t> status{GPUSHARE_OK};
  gpushare_step_request request = GPUSHARE_STEP_REQUEST_INIT;
  const auto answer = [](void* data, const gpushare_step_answer* news) {
    if (news->ended != 0) *static_cast<std::atomic<int32_t>*>(data) = news->status;
  };
  REQUIRE(gpushare_step_queue_submit(queue, &request, answer, &status) == GPUSHARE_OK);
  CHECK(gpushare_step_queue_drain(queue, GPUSHARE_NO_TIMEOUT) == GPUSHARE_OK);
  CHECK(status == GPUSHARE_CALLBACK_FAILED);
  CHECK(fixture.info(session).state == GPUSHARE_SESSION_FAILED);
  CHECK(gpushare_step_queue_close(queue) == GPUSHARE_OK);
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("an out-of-memory function that ends its thread leaves no lock behind") {
  Fixture fixture(kDevices[GENERATE(0, 1)]);
  REQUIRE(gpushare_runtime_set_out_of_memory_callback(
              fixture.runtime, [](void*, uint64_t, uint64_t) -> int32_t { end_thread(); }, nullptr) ==
          GPUSHARE_OK);
  const gpushare_session session = fixture.open("asks for too much");
  Thread thread([&] {
    gpushare_device_address block = 0;
    (void)gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, 127 * kMiB, 0, &block);
    CHECK(false);
  });
  thread.join();
  CHECK(fixture.info(session).state == GPUSHARE_SESSION_RESIDENT);
  fixture.run(session);
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  fixture.finish();
}

namespace {

gpushare_runtime g_runtime = nullptr;
std::atomic<int32_t> g_status{0};
std::atomic<bool> g_message{false};

void ask_runtime() {
  gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
  g_status = gpushare_runtime_get_info(g_runtime, &info);
}

}  // namespace

TEST_CASE("a log function that calls the library is refused") {
  Fixture fixture("host");
  g_runtime = fixture.runtime;
  g_status = -1;
  REQUIRE(gpushare_log_set(
              [](void*, int32_t, const char*) {
                ask_runtime();
                g_message = last_error_says("log function");
                CHECK(gpushare_log_set(nullptr, nullptr, GPUSHARE_LOG_ERROR) == GPUSHARE_INVALID_STATE);
              },
              nullptr, GPUSHARE_LOG_DEBUG) == GPUSHARE_OK);
  // A warning that is written with the library's locks free: an out-of-memory function that throws.
  REQUIRE(gpushare_runtime_set_out_of_memory_callback(
              fixture.runtime, [](void*, uint64_t, uint64_t) -> int32_t { throw 1; }, nullptr) ==
          GPUSHARE_OK);
  gpushare_device_address block = 0;
  CHECK(gpushare_session_alloc(fixture.bystander, GPUSHARE_KIND_MODEL, 127 * kMiB, 0, &block) ==
        GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(g_status == GPUSHARE_INVALID_STATE);
  CHECK(g_message);
  CHECK(gpushare_log_set(nullptr, nullptr, GPUSHARE_LOG_WARNING) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("a signal handler that interrupts a call is refused") {
  Fixture fixture(kDevices[GENERATE(0, 1)]);
  const gpushare_session session = fixture.open("interrupted");
  g_runtime = fixture.runtime;
  g_status = -1;
  struct sigaction action {
  }, before{};
  action.sa_handler = [](int) {
    ask_runtime();
    g_message = last_error_says("signal handler");
  };
  REQUIRE(sigaction(SIGUSR1, &action, &before) == 0);
  gpushare_iteration held = nullptr;
  REQUIRE(gpushare_iteration_begin(fixture.bystander, GPUSHARE_NO_TIMEOUT, &held) == GPUSHARE_OK);
  std::atomic<int32_t> begun{-1};
  Thread thread([&] {
    gpushare_iteration iteration = nullptr;
    begun = gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration);
    if (begun == GPUSHARE_OK) (void)gpushare_iteration_end(iteration);
  });
  while (wait_of(session).find("bystander") == std::string::npos) a_moment();
  REQUIRE(pthread_kill(thread.native(), SIGUSR1) == 0);
  while (g_status == -1) a_moment();
  CHECK(g_status == GPUSHARE_INVALID_STATE);
  CHECK(gpushare_iteration_end(held) == GPUSHARE_OK);
  thread.join();
  CHECK(begun == GPUSHARE_OK);
  CHECK(g_message);
  // Outside of calls it may.
  REQUIRE(raise(SIGUSR1) == 0);
  CHECK(g_status == GPUSHARE_OK);
  REQUIRE(sigaction(SIGUSR1, &before, nullptr) == 0);
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("waiting inside an iteration for a session that only its end could let in is refused") {
  Fixture fixture(kDevices[GENERATE(0, 1)]);
  const gpushare_session queued = fixture.open("queued", 125 * kMiB, kMiB, GPUSHARE_SESSION_ALLOW_QUEUEING);
  gpushare_iteration held = nullptr, never = nullptr;
  gpushare_device_address block = 0;
  gpushare_ticket ticket = nullptr;
  REQUIRE(gpushare_session_submit(
              queued, [](void*, gpushare_iteration) -> int32_t { return GPUSHARE_OK; }, nullptr, nullptr,
              &ticket) == GPUSHARE_OK);
  REQUIRE(gpushare_iteration_begin(fixture.bystander, GPUSHARE_NO_TIMEOUT, &held) == GPUSHARE_OK);
  CHECK(gpushare_iteration_begin(queued, GPUSHARE_NO_TIMEOUT, &never) == GPUSHARE_INVALID_STATE);
  CHECK(last_error_says("would wait for itself"));
  CHECK(gpushare_session_wait_admitted(queued, GPUSHARE_NO_TIMEOUT) == GPUSHARE_INVALID_STATE);
  CHECK(gpushare_session_alloc(queued, GPUSHARE_KIND_MODEL, kMiB, 0, &block) == GPUSHARE_INVALID_STATE);
  CHECK(gpushare_ticket_wait(ticket, GPUSHARE_NO_TIMEOUT) == GPUSHARE_INVALID_STATE);
  // Another thread may wait; and it is told for what.
  std::thread([&] {
    CHECK(gpushare_session_wait_admitted(queued, 1'000'000) == GPUSHARE_TIMED_OUT);
    CHECK(last_error_says("session 'queued' waits for admission: it needs 125.00 MiB persistent"));
    CHECK(last_error_says("held by 'bystander'"));
    CHECK(last_error_says("in an iteration"));
  }).join();
  CHECK(gpushare_iteration_end(held) == GPUSHARE_OK);
  CHECK(gpushare_session_cancel(queued) == GPUSHARE_OK);
  CHECK(gpushare_ticket_release(ticket) == GPUSHARE_OK);
  CHECK(gpushare_session_close(queued) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("waiting inside the first iteration of a session of unknown need for that of another is refused") {
  Fixture fixture(kDevices[GENERATE(0, 1)], 2);
  const gpushare_session first = fixture.open("first", 0, 0), second = fixture.open("second", 0, 0);
  gpushare_iteration held = nullptr, never = nullptr;
  REQUIRE(gpushare_iteration_begin(first, GPUSHARE_NO_TIMEOUT, &held) == GPUSHARE_OK);
  CHECK(gpushare_iteration_begin(second, GPUSHARE_NO_TIMEOUT, &never) == GPUSHARE_INVALID_STATE);
  CHECK(last_error_says("would wait for itself"));
  CHECK(gpushare_iteration_end(held) == GPUSHARE_OK);
  fixture.run(second);
  CHECK(gpushare_session_close(first) == GPUSHARE_OK);
  CHECK(gpushare_session_close(second) == GPUSHARE_OK);
  fixture.finish();
}

TEST_CASE("every wait says what it waits for") {
  Fixture fixture(kDevices[GENERATE(0, 1)]);
  const gpushare_session session = fixture.open("asked about");
  char text[64] = "";
  CHECK(gpushare_session_explain_wait(session, nullptr, 10) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_session_explain_wait(session, text, 0) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(gpushare_session_explain_wait(nullptr, text, sizeof text) == GPUSHARE_INVALID_HANDLE);
  CHECK(gpushare_session_explain_wait(session, text, 8) == GPUSHARE_OK);
  CHECK(std::string(text) == "session");
  CHECK(wait_of(session) == "session 'asked about' waits for nothing");
  gpushare_iteration held = nullptr, never = nullptr;
  REQUIRE(gpushare_iteration_begin(fixture.bystander, GPUSHARE_NO_TIMEOUT, &held) == GPUSHARE_OK);
  CHECK(gpushare_iteration_begin(session, 0, &never) == GPUSHARE_TIMED_OUT);
  CHECK(last_error_says(
      "session 'asked about' waits for its turn: lane 0 is in an iteration of session 'bystander'"));
  gpushare_ticket ticket = nullptr;
  REQUIRE(gpushare_session_submit(
              session, [](void*, gpushare_iteration) -> int32_t { return GPUSHARE_OK; }, nullptr, nullptr,
              &ticket) == GPUSHARE_OK);
  CHECK(gpushare_ticket_wait(ticket, 0) == GPUSHARE_TIMED_OUT);
  CHECK(last_error_says("has not started: session 'asked about' waits for its turn"));
  CHECK(gpushare_iteration_end(held) == GPUSHARE_OK);
  CHECK(gpushare_ticket_wait(ticket, GPUSHARE_NO_TIMEOUT) == GPUSHARE_OK);
  CHECK(gpushare_ticket_release(ticket) == GPUSHARE_OK);
  CHECK(gpushare_session_cancel(session) == GPUSHARE_OK);
  CHECK(wait_of(session) == "session 'asked about' has ended and waits for nothing");
  CHECK(gpushare_session_close(session) == GPUSHARE_OK);
  fixture.finish();
}
