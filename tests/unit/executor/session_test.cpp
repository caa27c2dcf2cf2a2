// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/executor_fixture.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT
using executor::SessionState;

TEST_CASE("pull: an iteration begins, allocates, ends; nothing ephemeral is left") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device);
  auto runtime = open_runtime(options_of(setup));
  auto session = open_session(*runtime, need("a", 8 * kMiB, 16 * kMiB));
  CHECK(session->info().state == SessionState::kResident);
  const auto weights = session->alloc(memory::Kind::kModel, 4 * kMiB, 0);
  REQUIRE(weights.ok());
  for (int i = 0; i < 5; ++i) {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    const auto scratch = (*iteration)->alloc(10 * kMiB, 0);
    REQUIRE(scratch.ok());
    auto stream = (*iteration)->stream();
    REQUIRE(stream.ok());
    REQUIRE((*stream)->fill(*scratch, 7, 10 * kMiB).ok());
    REQUIRE(enqueue(**stream, 1'000'000).ok());
    CHECK(session->info().ephemeral_bytes >= 10 * kMiB);
    CHECK(runtime->check() == "");
    REQUIRE((*iteration)->end().ok());
    CHECK((*iteration)->end().code() == GPUSHARE_INVALID_STATE);
    CHECK((*iteration)->alloc(1, 0).status().code() == GPUSHARE_INVALID_STATE);
    CHECK(session->info().ephemeral_bytes == 0);
    CHECK(runtime->check().empty());
  }
  REQUIRE(runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
  const auto info = session->info();
  CHECK(info.iterations_done == 5);
  CHECK(info.persistent_bytes == 4 * kMiB);
  if (std::string(setup.device).starts_with("sim")) CHECK(info.service_ns >= 5'000'000);
  REQUIRE(session->close().ok());
  CHECK(session->close().code() == GPUSHARE_INVALID_STATE);
  CHECK(session->begin(0).status().code() == GPUSHARE_INVALID_STATE);
  const auto after = runtime->info();
  REQUIRE(after.ok());
  CHECK(after->persistent_bytes == 0);
  CHECK(after->promised_bytes == 0);
  CHECK(after->lanes == 0);
  CHECK(after->iterations_done == 5);
  const base::Status closed = runtime->close();
  INFO(closed.to_string());
  CHECK(closed.ok());
  CHECK(runtime->info().status().code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("push: iterations run in order and tickets tell their outcome") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device);
  auto runtime = open_runtime(options_of(setup));
  auto session = open_session(*runtime, need("push", 0, 16 * kMiB));
  std::vector<int> order;
  std::vector<std::shared_ptr<executor::Ticket>> tickets;
  for (int i = 0; i < 20; ++i) {
    auto work = work_of([&order, i](const std::shared_ptr<executor::Iteration>& iteration) {
      order.push_back(i);
      const auto block = iteration->alloc(kMiB, 0);
      if (!block.ok()) return block.status();
      const auto stream = iteration->stream();
      if (!stream.ok()) return stream.status();
      if (iteration->end().code() != GPUSHARE_INVALID_STATE) return base::Status(GPUSHARE_INTERNAL, "ended");
      return enqueue(**stream, 1000);
    });
    auto ticket = session->submit(work);
    REQUIRE(ticket.ok());
    CHECK(work == nullptr);
    tickets.push_back(*ticket);
  }
  for (const auto& ticket : tickets) CHECK(ticket->wait(GPUSHARE_NO_TIMEOUT).ok());
  REQUIRE(order.size() == 20);
  for (int i = 0; i < 20; ++i) CHECK(order[static_cast<size_t>(i)] == i);
  CHECK(session->info().iterations_done == 20);
  REQUIRE(session->close().ok());
  CHECK(runtime->close().ok());
}

// The threads of the process. Those that have been joined may take a moment to be gone.
std::set<std::string> threads_now() {
  std::set<std::string> out;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    out.insert(task.path().filename().string());
  return out;
}

TEST_CASE(
    "lanes get the thread for submitted iterations with the first submission, also those that open later") {
  const std::set<std::string> outside = threads_now();
  const auto has_threads = [&](size_t count) {
    for (int round = 0; round < 12'000; ++round) {
      const std::set<std::string> now = threads_now();
      const auto is_new = [&](const std::string& thread) { return !outside.contains(thread); };
      if (static_cast<size_t>(std::count_if(now.begin(), now.end(), is_new)) == count) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  };
  auto runtime = open_runtime(options_of(kSetups[2]));  // sim: its streams have no threads
  std::vector<std::shared_ptr<executor::Session>> sessions;
  const auto open = [&] {
    sessions.push_back(open_session(*runtime, need("s" + std::to_string(sessions.size()), 0, 2 * kMiB)));
    auto iteration = sessions.back()->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    REQUIRE((*iteration)->end().ok());
  };
  const auto submit = [&](executor::Session& session) {
    auto work = work_of([](const std::shared_ptr<executor::Iteration>&) { return base::ok_status(); });
    const auto ticket = session.submit(work);
    REQUIRE(ticket.ok());
    CHECK((*ticket)->wait(GPUSHARE_NO_TIMEOUT).ok());
  };
  open();
  open();
  REQUIRE(runtime->info()->lanes == 2);
  CHECK(has_threads(1 + 2));  // one that carries out decisions, and each lane's reaper
  submit(*sessions[1]);
  CHECK(has_threads(1 + 4));
  submit(*sessions[0]);
  open();
  REQUIRE(runtime->info()->lanes == 3);
  CHECK(has_threads(1 + 6));
  for (const auto& session : sessions) submit(*session);
  CHECK(has_threads(1 + 6));
  CHECK(runtime->close().ok());
}

TEST_CASE("a session that throws ends alone; what it queued is cancelled; its lane goes on") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device);
  auto options = options_of(setup);
  options.max_lanes = 1;
  auto runtime = open_runtime(std::move(options));
  auto strict = need("bad", 2 * kMiB, 16 * kMiB);
  strict.fail_on_error = true;
  auto bad = open_session(*runtime, strict);
  auto good = open_session(*runtime, need("good", 2 * kMiB, 16 * kMiB));
  CHECK(runtime->info()->lanes == 1);
  REQUIRE(bad->alloc(memory::Kind::kModel, kMiB, 0).ok());
  auto throwing = work_of([](const std::shared_ptr<executor::Iteration>& iteration) -> base::Status {
    (void)iteration->alloc(kMiB, 0);
    throw std::runtime_error("diverged");
  });
  auto never = work_of([](const auto&) { return base::Status(); });
  auto first = bad->submit(throwing);
  REQUIRE(first.ok());
  auto second = bad->submit(never);
  if (second.ok())
    CHECK((*second)->wait(GPUSHARE_NO_TIMEOUT).code() == GPUSHARE_CANCELLED);
  else
    CHECK(second.status().code() == GPUSHARE_INVALID_STATE);
  const base::Status outcome = (*first)->wait(GPUSHARE_NO_TIMEOUT);
  CHECK(outcome.code() == GPUSHARE_CALLBACK_FAILED);
  CHECK(outcome.message().find("diverged") != std::string::npos);
  auto fine = work_of([](const auto& iteration) { return iteration->alloc(kMiB, 0).status(); });
  auto third = good->submit(fine);
  REQUIRE(third.ok());
  CHECK((*third)->wait(GPUSHARE_NO_TIMEOUT).ok());
  CHECK(bad->info().state == SessionState::kFailed);
  CHECK(bad->info().status.code() == GPUSHARE_CALLBACK_FAILED);
  CHECK(bad->begin(0).status().code() == GPUSHARE_INVALID_STATE);
  CHECK(good->info().state == SessionState::kResident);
  REQUIRE(bad->close().ok());
  CHECK(runtime->info()->persistent_bytes == 0);
  CHECK(runtime->check().empty());
  REQUIRE(good->close().ok());
  CHECK(runtime->close().ok());
}

TEST_CASE("a pulled iteration that fails ends its session with the code given") {
  auto runtime = open_runtime(options_of(kSetups[0]));
  const auto code_after = [&](int32_t code) {
    auto session = open_session(*runtime, need("f", 0, kMiB));
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    REQUIRE((*iteration)->fail({code, "because"}).ok());
    const auto info = session->info();
    CHECK(info.state == SessionState::kFailed);
    CHECK(info.iterations_done == 0);
    CHECK(info.status.message().find("because") != std::string::npos);
    REQUIRE(session->close().ok());
    return info.status.code();
  };
  CHECK(code_after(GPUSHARE_DEVICE_OUT_OF_MEMORY) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(code_after(GPUSHARE_INVALID_ARGUMENT) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(code_after(GPUSHARE_TIMED_OUT) == GPUSHARE_CALLBACK_FAILED);
  CHECK(code_after(12345) == GPUSHARE_CALLBACK_FAILED);
  CHECK(runtime->close().ok());
}

TEST_CASE("two sessions in one lane take turns") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device);
  auto options = options_of(setup);
  options.max_lanes = 1;
  auto runtime = open_runtime(std::move(options));
  std::atomic<int> inside{0};
  std::vector<std::shared_ptr<executor::Session>> sessions;
  for (int t = 0; t < 3; ++t)
    sessions.push_back(open_session(*runtime, need("s" + std::to_string(t), 0, 8 * kMiB)));
  const auto loop = [&](executor::Session* session) {
    for (int i = 0; i < 50; ++i) {
      auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
      if (!iteration.ok()) return false;
      if (inside.fetch_add(1) != 0) return false;
      const auto block = (*iteration)->alloc(4 * kMiB, 0);
      const auto stream = (*iteration)->stream();
      const bool worked = block.ok() && stream.ok() && enqueue(**stream, 10'000).ok();
      inside.fetch_sub(1);
      if (!(*iteration)->end().ok() || !worked) return false;
    }
    return session->close().ok();
  };
  bool results[3] = {};
  {
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t)
      threads.emplace_back([&, t] { results[t] = loop(sessions[static_cast<size_t>(t)].get()); });
    for (std::thread& thread : threads) thread.join();
  }
  for (const bool result : results) CHECK(result);
  CHECK(runtime->info()->iterations_done == 150);
  CHECK(runtime->close().ok());
}

TEST_CASE("misuse of begin is told, and timeouts lose no turn") {
  auto options = options_of(kSetups[0]);
  options.max_lanes = 1;
  auto runtime = open_runtime(std::move(options));
  auto a = open_session(*runtime, need("a", 0, kMiB));
  auto b = open_session(*runtime, need("b", 0, kMiB));
  auto iteration = a->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  CHECK(a->begin(0).status().code() == GPUSHARE_INVALID_STATE);
  CHECK(b->begin(0).status().code() == GPUSHARE_TIMED_OUT);
  CHECK(b->begin(GPUSHARE_NO_TIMEOUT).status().code() == GPUSHARE_INVALID_STATE);  // would wait for itself
  CHECK(a->close().code() == GPUSHARE_INVALID_STATE);
  CHECK(runtime->close().code() == GPUSHARE_INVALID_STATE);
  int32_t timed = 0;
  bool turn_came = false;
  std::thread([&] { timed = b->begin(1'000'000).status().code(); }).join();
  CHECK(timed == GPUSHARE_TIMED_OUT);
  std::thread other([&] {
    auto turn = b->begin(GPUSHARE_NO_TIMEOUT);
    turn_came = turn.ok() && (*turn)->end().ok();
  });
  while (b->info().iterations_queued == 0) std::this_thread::yield();
  REQUIRE((*iteration)->end().ok());
  other.join();
  CHECK(turn_came);
  CHECK(runtime->info()->switches == 1);
  REQUIRE(runtime->close().ok());
  CHECK(a->close().code() == GPUSHARE_INVALID_STATE);
  CHECK(a->begin(0).status().code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("a switch is the lane's next session, though the lane was closed between") {
  auto options = options_of(kSetups[0], "fifo");
  auto runtime = open_runtime(std::move(options));
  for (int i = 0; i < 3; ++i) {
    auto session = open_session(*runtime, need("s", kMiB, kMiB));
    for (int step = 0; step < 2; ++step) {
      auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
      REQUIRE(iteration.ok());
      REQUIRE((*iteration)->end().ok());
    }
    REQUIRE(session->close().ok());
    CHECK(runtime->info()->lanes == 0);
  }
  CHECK(runtime->info()->switches == 2);
  CHECK(runtime->close().ok());
}

TEST_CASE("cancel and close reach a thread that waits to begin") {
  const bool by_close = GENERATE(false, true);
  auto options = options_of(kSetups[0]);
  options.max_lanes = 1;
  auto runtime = open_runtime(std::move(options));
  auto a = open_session(*runtime, need("a", 0, kMiB));
  auto b = open_session(*runtime, need("b", 0, kMiB));
  auto iteration = a->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  int32_t code = 0;
  std::thread waiter([&] { code = b->begin(GPUSHARE_NO_TIMEOUT).status().code(); });
  while (b->info().iterations_queued == 0) std::this_thread::yield();
  REQUIRE((by_close ? b->close() : b->cancel()).ok());
  waiter.join();
  CHECK(code == (by_close ? GPUSHARE_INVALID_STATE : GPUSHARE_CANCELLED));
  if (!by_close) {
    CHECK(b->info().state == SessionState::kCancelled);
    CHECK(b->alloc(memory::Kind::kModel, 1, 0).status().code() == GPUSHARE_CANCELLED);
    CHECK(b->wait_admitted(0).code() == GPUSHARE_CANCELLED);
  }
  // The one that has its turn may be cancelled too: the iteration goes on to its end.
  REQUIRE(a->cancel().ok());
  CHECK((*iteration)->alloc(kMiB / 2, 0).ok());
  CHECK((*iteration)->end().ok());
  CHECK(a->begin(0).status().code() == GPUSHARE_CANCELLED);
  REQUIRE(a->close().ok());
  CHECK(runtime->close().ok());
}

TEST_CASE("a closed session refuses what sets it, and says how long it had waited to be let in") {
  auto options = options_of(kSetups[2]);
  options.capacity_bytes = 64 * kMiB;
  auto runtime = open_runtime(std::move(options));
  auto in = open_session(*runtime, need("in", 40 * kMiB, 4 * kMiB)),
       out = open_session(*runtime, need("out", 40 * kMiB, 4 * kMiB));
  auto iteration = in->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  const auto stream = (*iteration)->stream();
  REQUIRE(stream.ok());
  REQUIRE(enqueue(**stream, 5'000'000).ok());
  REQUIRE((*iteration)->end().ok());
  REQUIRE(runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
  REQUIRE(out->info().state == SessionState::kQueued);
  for (const auto& session : {out, in}) {
    REQUIRE(session->close().ok());
    CHECK(session->set_priority(1).code() == GPUSHARE_INVALID_STATE);
    CHECK(session->set_weight(2).code() == GPUSHARE_INVALID_STATE);
    CHECK(session->set_remaining(1).code() == GPUSHARE_INVALID_STATE);
    CHECK(session->set_target_slowdown(0.1).code() == GPUSHARE_INVALID_STATE);
    CHECK(session->allow_paging().code() == GPUSHARE_INVALID_STATE);
    CHECK(session->gate().status().code() == GPUSHARE_INVALID_STATE);
  }
  CHECK(in->info().queued_ns == 0);
  CHECK(out->info().queued_ns >= 5'000'000);
  CHECK(runtime->close().ok());
}

TEST_CASE("admission: refused, queued, admitted when another leaves") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device);
  auto options = options_of(setup);
  options.capacity_bytes = 128 * kMiB;
  auto runtime = open_runtime(std::move(options));
  CHECK(runtime->open_session(need("huge", 100 * kMiB, 100 * kMiB)).status().code() ==
        GPUSHARE_EXCEEDS_CAPACITY);
  auto a = open_session(*runtime, need("a", 60 * kMiB, 40 * kMiB));
  auto refused = need("b", 60 * kMiB, 10 * kMiB);
  refused.allow_queueing = false;
  const auto no = runtime->open_session(refused);
  CHECK(no.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(no.status().message().find("'b'") != std::string::npos);
  auto b = open_session(*runtime, need("b", 60 * kMiB, 10 * kMiB));
  CHECK(b->info().state == SessionState::kQueued);
  CHECK(b->wait_admitted(0).code() == GPUSHARE_TIMED_OUT);
  CHECK(b->begin(0).status().code() == GPUSHARE_TIMED_OUT);
  bool allocated = false;
  std::thread waiter([&] { allocated = b->alloc(memory::Kind::kModel, 50 * kMiB, 0).ok(); });
  REQUIRE(a->close().ok());
  waiter.join();
  CHECK(allocated);
  CHECK(b->info().state == SessionState::kResident);
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

TEST_CASE("undeclared need: many sessions open at once, each is profiled, then promised what it used") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device);
  auto runtime = open_runtime(options_of(setup));
  std::vector<std::shared_ptr<executor::Session>> sessions;
  for (int i = 0; i < 4; ++i) {
    sessions.push_back(open_session(*runtime, {}));
    REQUIRE(sessions.back()->alloc(memory::Kind::kModel, 3 * kMiB, 0).ok());
  }
  for (int round = 0; round < 3; ++round) {
    for (const auto& session : sessions) {
      auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
      REQUIRE(iteration.ok());
      const auto block = (*iteration)->alloc(24 * kMiB, 0);
      INFO(block.status().to_string());
      REQUIRE(block.ok());
      REQUIRE((*iteration)->end().ok());
      CHECK(runtime->check().empty());
    }
  }
  for (const auto& session : sessions) {
    const auto info = session->info();
    CHECK(info.promised_ephemeral_bytes >= 24 * kMiB);
    CHECK(info.promised_ephemeral_bytes <= 27 * kMiB + 4 * kMiB);
    CHECK(info.promised_persistent_bytes >= 3 * kMiB);
    CHECK(info.promised_persistent_bytes <= 8 * kMiB);
  }
  CHECK(runtime->close().ok());
}

TEST_CASE("undeclared need: sessions that become ready together are profiled one after the other") {
  auto runtime = open_runtime(options_of(kSetups[0], "pack"));
  auto first = open_session(*runtime, {});
  auto iteration = first->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  std::atomic<int> inside{0}, most_inside{0};
  std::vector<std::shared_ptr<executor::Session>> others = {open_session(*runtime, {}),
                                                            open_session(*runtime, {})};
  std::vector<base::Status> outcomes(others.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < others.size(); ++i)
    threads.emplace_back([&, i] {
      auto own = others[i]->begin(GPUSHARE_NO_TIMEOUT);
      outcomes[i] = own.status();
      if (!own.ok()) return;
      most_inside = std::max(most_inside.load(), ++inside);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // were both let in, they would meet here
      const auto block = (*own)->alloc(60 * kMiB, 0);
      outcomes[i] = block.status();
      --inside;
      const base::Status ended = (*own)->end();
      if (outcomes[i].ok()) outcomes[i] = ended;
    });
  for (const auto& session : others)
    while (session->info().iterations_queued == 0) std::this_thread::yield();
  REQUIRE((*iteration)->end().ok());  // now both are ready
  for (std::thread& thread : threads) thread.join();
  for (const base::Status& outcome : outcomes) {
    INFO(outcome.to_string());
    CHECK(outcome.ok());
  }
  CHECK(most_inside == 1);
  CHECK(runtime->close().ok());
}

TEST_CASE("undeclared need: profiles one after another leave bytes for a session that grows") {
  auto options = options_of({"host?total_bytes=1073741824", memory::Layout::kVirtual}, "pack");
  options.max_lanes = 8;
  auto runtime = open_runtime(std::move(options));
  const auto grows = open_session(*runtime, need("grows", 0, 2 * kMiB));
  auto growing = grows->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(growing.ok());
  std::atomic<bool> go{false};
  std::vector<std::shared_ptr<executor::Session>> sessions;
  for (int i = 0; i < 6; ++i) {
    sessions.push_back(open_session(*runtime, {}));
    auto iteration = sessions.back()->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    REQUIRE((*iteration)->alloc(kMiB, 0).ok());
    auto stream = (*iteration)->stream();
    REQUIRE(stream.ok());
    // The lane gives back what was taken for the profile when the device is done with the iteration.
    REQUIRE((*stream)
                ->launch_host([](void* flag) { static_cast<std::atomic<bool>*>(flag)->wait(false); }, &go)
                .ok());
    REQUIRE((*iteration)->end().ok());
  }
  const auto block = (*growing)->alloc(16 * kMiB, 0);
  INFO(block.status().to_string());
  CHECK(block.ok());
  go = true;
  go.notify_all();
  CHECK((*growing)->end().ok());
  CHECK(runtime->close().ok());
}

}  // namespace
