// The daemon's scheduler with the runtimes of this process: turns, memory, paging, and what happens when one side goes.
// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <thread>

#include "unit/daemon/raw_connection.hpp"
#include "unit/daemon/service_sessions.hpp"

using namespace gpushare;
using namespace gpushare::test;

TEST_CASE("a session of a shared runtime trains with state of its own") {
  SharedService shared;
  const auto runtime = shared.open();
  {
    const auto session = open_session(*runtime, "train", 2 * kMiB, 2 * kMiB);
    void* weights = alloc(*session, kMiB);
    std::memset(weights, 1, kMiB);
    for (int step = 2; step < 20; ++step) {
      const auto iteration = begin(*session);
      const auto scratch = iteration->alloc(kMiB / 2, 0);
      REQUIRE(scratch.ok());
      std::memset(reinterpret_cast<void*>(*scratch), step, kMiB / 2);
      CHECK(all_are(weights, kMiB, step - 1));
      std::memset(weights, step, kMiB);
      REQUIRE_OK(iteration->end());
    }
    const auto now = shared.status();
    REQUIRE(now.sessions.size() == 1);
    CHECK(now.sessions[0].name == "train");
    CHECK(now.sessions[0].persistent_bytes == 2 * kMiB);
    CHECK(now.sessions[0].ephemeral_bytes == 2 * kMiB);
    CHECK(now.devices[0].promised_bytes == 4 * kMiB);
    CHECK(now.devices[0].turns < 18);  // alone, it keeps its turn
    CHECK(runtime->check() == "");
    REQUIRE_OK(session->close());
  }
  eventually([&] { return shared.status().devices[0].promised_bytes == 0; });
  REQUIRE_OK(runtime->close());
  eventually([&] { return shared.status().processes.empty(); });
}

TEST_CASE("an undeclared need is profiled, and grows and shrinks across the socket") {
  SharedService shared;
  const auto runtime = shared.open();
  const auto session = open_session(*runtime, "unknown", 0, 0);
  void* weights = alloc(*session, 3 * kMiB);
  std::memset(weights, 7, 3 * kMiB);
  for (int step = 0; step < 6; ++step) {
    const auto iteration = begin(*session);
    const auto scratch = iteration->alloc(4 * kMiB, 0);
    INFO(scratch.status().to_string());
    REQUIRE(scratch.ok());
    std::memset(reinterpret_cast<void*>(*scratch), step, 4 * kMiB);
    REQUIRE_OK(iteration->end());
  }
  CHECK(all_are(weights, 3 * kMiB, 7));
  eventually([&] { return shared.status().devices[0].promised_bytes <= 10 * kMiB; });
  const auto iteration = begin(*session);
  const auto large = iteration->alloc(70 * kMiB, 0);
  CHECK(large.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  REQUIRE_OK(iteration->end());
  CHECK(runtime->check() == "");
  REQUIRE_OK(session->close());
  eventually([&] { return shared.status().devices[0].promised_bytes == 0; });
}

TEST_CASE("turns of two processes never overlap, and both go on") {
  SharedService shared;
  std::atomic<int> inside{0};
  const auto train = [&](const char* name, int iterations) {
    const auto runtime = SharedService::try_open();
    if (!runtime.ok()) return runtime.status();
    const auto session = (*runtime)->open_session(need(name, 2 * kMiB, 2 * kMiB));
    if (!session.ok()) return session.status();
    for (int i = 0; i < iterations; ++i) {
      auto iteration = (*session)->begin(kLong);
      if (!iteration.ok()) return iteration.status();
      const bool alone = ++inside == 1;
      std::this_thread::yield();
      --inside;
      if (!alone) return base::Status(GPUSHARE_INTERNAL, "two had the turn");
      if (auto ended = (*iteration)->end(); !ended.ok()) return ended;
    }
    return base::Status();
  };
  base::Status a, b, c;
  std::thread first([&] { a = train("a", 300); }), second([&] { b = train("b", 300); });
  c = train("c", 300);
  first.join();
  second.join();
  CHECK_OK(a);
  CHECK_OK(b);
  CHECK_OK(c);
  eventually([&] { return shared.status().devices[0].promised_bytes == 0; });
}

TEST_CASE("a process keeps its session to its quota, and what it gives back others are promised") {
  SharedService shared;
  const auto runtime = shared.open();
  const auto session = open_session(*runtime, "quota", 32 * kMiB, 16 * kMiB);
  (void)alloc(*session, 8 * kMiB);
  const uint64_t promised = runtime->info()->promised_bytes;
  REQUIRE_OK(session->set_quota(12 * kMiB));
  const executor::SessionInfo info = session->info();
  CHECK(info.effective_quota_bytes == 12 * kMiB);
  CHECK(info.promised_persistent_bytes + info.promised_ephemeral_bytes <= 16 * kMiB);
  eventually([&] { return runtime->info()->promised_bytes <= promised - 32 * kMiB; });
  CHECK(session->alloc(memory::Kind::kModel, 8 * kMiB, 0).status().code() == GPUSHARE_QUOTA_EXCEEDED);
  const auto iteration = begin(*session);
  CHECK(iteration->alloc(3 * kMiB, 0).ok());
  REQUIRE_OK(iteration->end());
  REQUIRE_OK(session->set_quota(0));
  (void)alloc(*session, 16 * kMiB);
  REQUIRE_OK(session->close());
  REQUIRE_OK(runtime->close());
}

TEST_CASE("submitted iterations take turns with another process's") {
  SharedService shared;
  const auto a = shared.open(), b = shared.open();
  const auto first = open_session(*a, "first", 2 * kMiB, 2 * kMiB),
             second = open_session(*b, "second", 2 * kMiB, 2 * kMiB);
  struct Count : executor::Work {
    explicit Count(std::atomic<int>& count) : count_(count) {}
    base::Status run(const std::shared_ptr<executor::Iteration>&) override {
      ++count_;
      return {};
    }
    std::atomic<int>& count_;
  };
  std::atomic<int> done{0};
  std::vector<std::shared_ptr<executor::Ticket>> tickets;
  for (int i = 0; i < 100; ++i)
    for (const auto& session : {first, second}) {
      std::unique_ptr<executor::Work> work = std::make_unique<Count>(done);
      auto ticket = session->submit(work);
      REQUIRE(ticket.ok());
      tickets.push_back(*ticket);
    }
  for (const auto& ticket : tickets) REQUIRE_OK(ticket->wait(kLong));
  CHECK(done == 200);
}

TEST_CASE("a session waits for memory that another process has") {
  SharedService shared;
  const auto a = shared.open(), b = shared.open();
  const auto large = open_session(*a, "large", 40 * kMiB, 8 * kMiB);
  const auto waiting = open_session(*b, "waiting", 20 * kMiB, 8 * kMiB);
  CHECK(waiting->begin(0).status().code() == GPUSHARE_TIMED_OUT);
  CHECK(waiting->info().state == executor::SessionState::kQueued);
  const auto now = shared.status();
  CHECK(now.sessions[1].state == "queued");
  CHECK(now.sessions[1].waits_for.find("memory") == 0);
  executor::SessionOptions impatient;
  impatient.name = "impatient";
  impatient.persistent_bytes = 20 * kMiB;
  impatient.ephemeral_bytes = 8 * kMiB;
  impatient.allow_queueing = false;
  CHECK(b->open_session(impatient).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  impatient.persistent_bytes = 1ull << 40;
  CHECK(b->open_session(impatient).status().code() == GPUSHARE_EXCEEDS_CAPACITY);
  REQUIRE_OK(large->close());
  REQUIRE_OK(begin(*waiting)->end());
  REQUIRE_OK(waiting->close());
}

TEST_CASE("training is paged out for an inference of another process, and resumes with its state") {
  SharedService shared([](auto& options) { options.policy = "priority"; });
  const auto a = shared.open(), b = shared.open();
  const auto training = open_session(*a, "training", 40 * kMiB, 4 * kMiB, 0);
  void* weights = alloc(*training, 40 * kMiB);
  fill(*training, weights, 40 * kMiB, 42);
  {
    const auto inference = open_session(*b, "inference", 40 * kMiB, 4 * kMiB, 10);
    void* model = alloc(*inference, 40 * kMiB);
    fill(*inference, model, 40 * kMiB, 1);
    CHECK(training->info().state == executor::SessionState::kPagedOut);
    const auto now = shared.status();
    CHECK(now.sessions[0].state == "paged_out");
    CHECK(now.devices[0].promised_bytes == 44 * kMiB);
    REQUIRE_OK(inference->close());
  }
  REQUIRE_OK(begin(*training)->end());
  CHECK(all_are(weights, 40 * kMiB, 42));
  CHECK(a->check() == "");
  REQUIRE_OK(training->close());
}

TEST_CASE("an allocation has a session of another process paged out") {
  SharedService shared([](auto& options) { options.policy = "priority"; });
  const auto a = shared.open(), b = shared.open();
  const auto low = open_session(*a, "low", 30 * kMiB, 2 * kMiB, 0);
  void* kept = alloc(*low, 30 * kMiB);
  fill(*low, kept, 30 * kMiB, 9);
  const auto high = open_session(*b, "high", 20 * kMiB, 2 * kMiB, 10);
  void* large = alloc(*high, 40 * kMiB);
  fill(*high, large, 40 * kMiB, 3);
  CHECK(low->info().state == executor::SessionState::kPagedOut);
  REQUIRE_OK(high->close());
  REQUIRE_OK(begin(*low)->end());
  CHECK(all_are(kept, 30 * kMiB, 9));
}

TEST_CASE("a guaranteed session's allocation waits for the boundary of another process's opportunistic one") {
  SharedService shared([](auto& options) {
    options.policy = "pack";
    options.max_lanes = 3;
  });
  const auto a = shared.open(), b = shared.open(), c = shared.open();
  auto spare = need("low", 30 * kMiB, 2 * kMiB);
  spare.cls = sched::SessionClass::kOpportunistic;
  const auto low = open_session(*a, spare);
  void* kept = alloc(*low, 30 * kMiB);
  fill(*low, kept, 30 * kMiB, 9);
  const auto high = open_session(*b, need("high", 8 * kMiB, 2 * kMiB)),
             too = open_session(*c, need("too", 6 * kMiB, 2 * kMiB));
  REQUIRE_OK(high->wait_admitted(GPUSHARE_NO_TIMEOUT));
  REQUIRE_OK(too->wait_admitted(GPUSHARE_NO_TIMEOUT));
  // An iteration that is longer than the wait for others.
  const auto open = begin(*low);
  std::atomic<bool> large_ok{false}, other_ok{false};
  std::thread large([&] { large_ok = high->alloc(memory::Kind::kModel, 24 * kMiB, 0).ok(); });
  std::thread other([&] { other_ok = too->alloc(memory::Kind::kModel, 16 * kMiB, 0).ok(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK_FALSE(large_ok);
  REQUIRE_OK(open->end());
  large.join();
  other.join();
  CHECK(large_ok);
  CHECK(other_ok);
  CHECK(low->info().state == executor::SessionState::kPagedOut);
  REQUIRE_OK(high->close());
  REQUIRE_OK(too->close());
  REQUIRE_OK(begin(*low)->end());
  CHECK(all_are(kept, 30 * kMiB, 9));
}

TEST_CASE("a turn held for too long goes to the next, and its session goes on later") {
  SharedService shared([](auto& options) { options.lease_ns = 20'000'000; });
  const auto a = shared.open(), b = shared.open();
  const auto slow = open_session(*a, "slow", 2 * kMiB, 2 * kMiB),
             quick = open_session(*b, "quick", 2 * kMiB, 2 * kMiB);
  const auto held = begin(*slow);
  REQUIRE_OK(begin(*quick)->end());
  auto now = shared.status();
  CHECK(now.sessions[0].state == "overdue");
  CHECK(now.devices[0].cut_off == 1);
  CHECK(now.devices[0].promised_bytes == 8 * kMiB);
  REQUIRE_OK(held->end());
  REQUIRE_OK(begin(*slow)->end());
  REQUIRE_OK(begin(*quick)->end());
}

TEST_CASE("a begin that times out gives its turn up") {
  SharedService shared;
  const auto a = shared.open(), b = shared.open();
  const auto first = open_session(*a, "first", 2 * kMiB, 2 * kMiB),
             second = open_session(*b, "second", 2 * kMiB, 2 * kMiB);
  for (int i = 0; i < 20; ++i) {
    const auto held = begin(*first);
    CHECK(second->begin(1'000'000).status().code() == GPUSHARE_TIMED_OUT);
    REQUIRE_OK(held->end());
    REQUIRE_OK(begin(*first)->end());
  }
  REQUIRE_OK(begin(*second)->end());
}

TEST_CASE("without the daemon calls say so; a new one hears of every session, which keeps its state") {
  SharedService shared;
  const auto a = shared.open(), b = shared.open();
  const auto session = open_session(*a, "survivor", 8 * kMiB, 2 * kMiB);
  void* weights = alloc(*session, 8 * kMiB);
  std::memset(weights, 5, 8 * kMiB);
  REQUIRE_OK(begin(*session)->end());
  const auto other = open_session(*b, "other", 8 * kMiB, 2 * kMiB);
  const auto under_way = begin(*other);
  shared.service.reset();
  eventually([&] { return session->begin(0).status().code() == GPUSHARE_UNAVAILABLE; });
  REQUIRE_OK(under_way->end());  // what was begun can be ended
  CHECK(all_are(weights, 8 * kMiB, 5));
  shared.start();
  for (const auto& each : {session, other}) {
    std::optional<base::Status> ended;
    eventually([&] {
      auto iteration = each->begin(kLong);
      if (!iteration.ok()) return false;
      ended = (*iteration)->end();
      return true;
    });
    REQUIRE_OK(*ended);
  }
  CHECK(all_are(weights, 8 * kMiB, 5));
  const auto now = shared.status();
  CHECK(now.devices[0].promised_bytes == 20 * kMiB);
  CHECK(now.sessions.size() == 2);
  REQUIRE_OK(session->close());
  REQUIRE_OK(other->close());
  eventually([&] { return shared.status().devices[0].promised_bytes == 0; });
}

TEST_CASE("a running loop waits while its daemon is replaced, and goes on") {
  const bool share = GENERATE(false, true);
  SharedService shared([share](auto& options) { options.share_lanes = share; });
  setenv("GPUSHARE_DAEMON_WAIT", "600", 1);
  const auto runtime = shared.open();
  const auto session = open_session(*runtime, "loop", 8 * kMiB, 2 * kMiB);
  void* state = alloc(*session, 8 * kMiB);
  fill(*session, state, 8 * kMiB, 5);
  std::atomic<bool> stop{false};
  std::atomic<int> done{0}, failed{GPUSHARE_OK};
  std::thread loop([&] {
    while (!stop && failed == GPUSHARE_OK) {
      const auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
      failed = iteration.ok() ? (*iteration)->end().code() : iteration.status().code();
      ++done;
    }
  });
  for (int replaced = 0; replaced < 3; ++replaced) {
    const int before = done;
    eventually([&] { return done > before + 3 || failed != GPUSHARE_OK; });
    shared.service.reset();
    eventually([&] {  // it begins nothing any more
      const int seen = done;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return done == seen;
    });
    shared.start();
  }
  const int before = done;
  eventually([&] { return done > before + 3 || failed != GPUSHARE_OK; });
  stop = true;
  loop.join();
  CHECK(failed == GPUSHARE_OK);
  CHECK(all_are(state, 8 * kMiB, 5));
  CHECK(runtime->check() == "");
  REQUIRE_OK(session->close());
  REQUIRE_OK(runtime->close());
}

TEST_CASE("growth and admission wait for the next daemon, as long as GPUSHARE_DAEMON_WAIT says") {
  SharedService shared;
  setenv("GPUSHARE_DAEMON_WAIT", "600", 1);
  const auto runtime = shared.open();
  const auto session = open_session(*runtime, "grows", 8 * kMiB, 2 * kMiB);
  REQUIRE_OK(begin(*session)->end());
  shared.service.reset();
  base::Status grown, admitted;
  std::thread grows([&] { grown = session->alloc(memory::Kind::kModel, 20 * kMiB, 0).status(); });
  std::thread arrives([&] {
    const auto late = runtime->open_session(need("late", kMiB, kMiB));
    admitted = late.ok() ? (*late)->wait_admitted(GPUSHARE_NO_TIMEOUT) : late.status();
    if (late.ok() && admitted.ok()) admitted = (*late)->close();
  });
  shared.start();
  grows.join();
  arrives.join();
  CHECK_OK(grown);
  CHECK_OK(admitted);
  REQUIRE_OK(session->close());
  REQUIRE_OK(runtime->close());

  // Nobody comes: the wait ends, and says why.
  setenv("GPUSHARE_DAEMON_WAIT", "0.2", 1);
  const auto brief = shared.open();
  const auto left = open_session(*brief, "left", 8 * kMiB, 2 * kMiB);
  REQUIRE_OK(begin(*left)->end());
  shared.service.reset();
  std::optional<base::Status> over;
  while (!over) {
    const auto iteration = left->begin(GPUSHARE_NO_TIMEOUT);
    if (iteration.ok())
      REQUIRE_OK((*iteration)->end());  // it had not seen yet that the daemon has gone
    else
      over = iteration.status();
  }
  CHECK(over->code() == GPUSHARE_UNAVAILABLE);
  CHECK(over->message().find("has gone") != std::string::npos);
  CHECK(left->alloc(memory::Kind::kModel, 20 * kMiB, 0).status().code() == GPUSHARE_UNAVAILABLE);
  for (const char* const none : {"soon", "-1", "1e10", "nan"}) {
    INFO(none);
    setenv("GPUSHARE_DAEMON_WAIT", none, 1);
    CHECK(SharedService::try_open().status().code() == GPUSHARE_INVALID_ARGUMENT);
  }
}

TEST_CASE(
    "a session that is over but for a block is promised what lives, and the daemon gives others the rest") {
  const SharedService shared;  // 64 MiB
  const auto a = shared.open(), b = shared.open();
  const auto over = open_session(*a, "over", 40 * kMiB, 8 * kMiB);
  void* block = alloc(*over, 3 * kMiB);
  fill(*over, block, 3 * kMiB, 7);
  CHECK(shared.status().devices[0].promised_bytes == 48 * kMiB);
  over->retire();
  eventually([&] { return shared.status().devices[0].promised_bytes <= 4 * kMiB; });  // in granules
  const auto next = open_session(*b, "next", 50 * kMiB, 8 * kMiB);
  REQUIRE_OK(next->wait_admitted(kLong));
  void* all = alloc(*next, 50 * kMiB);
  fill(*next, all, 50 * kMiB, 8);
  CHECK(over->info().state == executor::SessionState::kResident);
  CHECK(all_are(block, 3 * kMiB, 7));
  REQUIRE_OK(a->free(reinterpret_cast<memory::Address>(block)));
  over->retire();
  eventually([&] { return shared.status().devices[0].promised_bytes == 58 * kMiB; });
  CHECK(a->check() == "");
  REQUIRE_OK(over->close());
  REQUIRE_OK(next->close());
}

TEST_CASE("sessions close while there is no daemon") {
  SharedService shared;
  const auto runtime = shared.open();
  const auto session = open_session(*runtime, "orphan", 8 * kMiB, 2 * kMiB);
  REQUIRE_OK(begin(*session)->end());
  shared.service.reset();
  REQUIRE_OK(session->close());
  REQUIRE_OK(runtime->close());
}

TEST_CASE("a session that found no place on the device is tried again, though nobody frees anything") {
  const SharedService shared;
  const RawConnection raw(shared);
  REQUIRE(raw.say(client::make_message<client::MessageType::kHello>()));
  auto arrive = client::make_message<client::MessageType::kArrive>(1);
  arrive.session = 1;
  arrive.persistent_bytes = 4 * kMiB;
  arrive.flags = client::kMayQueue;
  REQUIRE(raw.say(arrive));
  REQUIRE_FALSE(raw.next({client::MessageType::kAdmit}).empty());
  raw.tell(client::MessageType::kUnplaced, 1);  // memory that nobody promised is missing
  CHECK_FALSE(raw.next({client::MessageType::kAdmit}).empty());
  CHECK(shared.status().devices[0].promised_bytes == 4 * kMiB);
}

TEST_CASE("a daemon shares a device once") {
  daemon::ServiceOptions options;
  options.socket = "/tmp/gpushare-twice-" + std::to_string(getpid());
  options.devices = {"host", "host?total_bytes=16777216", "host"};
  options.capacity_bytes = kMiB;
  const auto service = daemon::Service::start(options);
  CHECK(service.status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(service.status().message().find("device 'host' is named twice") != std::string::npos);
  unlink((options.socket + ".lock").c_str());
}

TEST_CASE(
    "a daemon starts at the socket of one that has stopped, though a forked child still has its "
    "descriptors") {
  SharedService shared;
  int pipe_ends[2];
  REQUIRE(pipe(pipe_ends) == 0);
  const pid_t child = fork();
  if (child == 0) {  // as between the fork and the exec of another thread
    char byte;
    close(pipe_ends[1]);
    _exit(read(pipe_ends[0], &byte, 1) == 0 ? 0 : 1);
  }
  REQUIRE(child > 0);
  close(pipe_ends[0]);
  shared.service.reset();
  shared.start();
  CHECK(shared.status().devices.size() == 1);
  close(pipe_ends[1]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("what a shared runtime cannot have is refused") {
  SharedService shared;
  executor::RuntimeOptions options;
  options.device = "shared:nonsense";
  CHECK(executor::Runtime::open(std::move(options)).status().code() == GPUSHARE_NOT_FOUND);
  options = {};
  options.device = "shared";
  options.layout = memory::Layout::kContiguous;
  CHECK(executor::Runtime::open(std::move(options)).status().code() == GPUSHARE_UNSUPPORTED);
  const auto runtime = shared.open();
  CHECK(runtime->set_policy(std::move(*sched::make_policy("fifo"))).code() == GPUSHARE_UNSUPPORTED);
  options = {};
  options.device = "shared";
  options.interference_file = "/tmp/none";
  const base::Status measures = executor::Runtime::open(std::move(options)).status();
  CHECK(measures.code() == GPUSHARE_UNSUPPORTED);
  CHECK(measures.message().find("interference_file") == 0);
  setenv("GPUSHARE_SOCKET", "/nonexistent/socket", 1);
  options = {};
  options.device = "shared";
  CHECK(executor::Runtime::open(std::move(options)).status().code() == GPUSHARE_UNAVAILABLE);
}

TEST_CASE(
    "a session that waits for each of its iterations has its share by weight, and one that hangs loses its "
    "turn") {
  SharedService shared([](daemon::ServiceOptions& options) { options.lease_ns = 50'000'000; });
  const auto a = shared.open(), b = shared.open();
  auto heavy_needs = need("heavy", kMiB, kMiB);
  heavy_needs.weight = 3;
  const auto heavy = a->open_session(heavy_needs);
  REQUIRE(heavy.ok());
  const auto light = open_session(*b, "light", kMiB, kMiB);
  const auto spend = [](executor::Session& session) {
    auto iteration = session.begin(kLong);
    if (!iteration.ok()) return iteration.status();
    const auto stream = (*iteration)->stream();
    if (!stream.ok()) return stream.status();
    const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
    if (auto launched = (*stream)->launch_host(sleep, nullptr); !launched.ok()) return launched;
    if (auto waited = (*stream)->synchronize(); !waited.ok()) return waited;
    return (*iteration)->end();
  };
  std::atomic<bool> stop{false};
  base::Status of_light, of_heavy;
  std::thread other([&] {
    while (of_light.ok() && !stop.load()) of_light = spend(*light);
  });
  // When the turn changes after every iteration it has half of the device. On a busy machine its thread may come too
  // late for its turn, so this is tried until it did not.
  for (double share = 0; of_heavy.ok() && share < 0.65;) {
    const uint64_t before = (*heavy)->info().service_ns, others_before = light->info().service_ns;
    for (int i = 0; i < 30 && of_heavy.ok(); ++i) of_heavy = spend(**heavy);
    const auto spent = static_cast<double>((*heavy)->info().service_ns - before);
    share = spent / (spent + static_cast<double>(light->info().service_ns - others_before));
  }
  stop = true;
  other.join();
  REQUIRE_OK(of_heavy);
  REQUIRE_OK(of_light);
  // Behind the light one, it is left the turn, and hangs in it.
  for (int i = 0; i < 20; ++i) REQUIRE_OK(spend(*light));
  auto hangs = begin(**heavy);
  REQUIRE_OK(spend(*light));
  CHECK(shared.status().devices[0].cut_off > 0);
  REQUIRE_OK(hangs->end());
}
