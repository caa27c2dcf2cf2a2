// Lanes that sessions of several processes share: one memory for all, touched by who has the turn; growth, paging, blocks that
// a session keeps, a daemon that is replaced, another user. Built twice: on the host device, and over the cuda
// backend on the stand-in for its driver.
// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "unit/daemon/lane_jobs.hpp"
#include "unit/daemon/raw_connection.hpp"

using namespace gpushare;
using namespace gpushare::test;
using client::MessageType;

TEST_CASE("sessions of several processes have their ephemeral memory together, each in its turn") {
  const Shared shared;
  {
    Job a("a", 2 * kMiB, 20 * kMiB), b("b", 2 * kMiB, 20 * kMiB), c("c", 2 * kMiB, 12 * kMiB);
    eventually([&] { return shared.promised() == 26 * kMiB; });  // where private lanes would have 58
    CHECK(shared.status().devices[0].lanes == 1);
    std::vector<std::thread> threads;
    std::vector<base::Status> outcomes(3);
    Job* const jobs[] = {&a, &b, &c};
    for (size_t i = 0; i < 3; ++i)
      threads.emplace_back([&, i] {
        for (int step = 0; step < 20 && outcomes[i].ok(); ++step)
          outcomes[i] = jobs[i]->run(static_cast<uint8_t>(50 * i + static_cast<size_t>(step)), 4 * kMiB);
      });
    for (std::thread& thread : threads) thread.join();
    for (const base::Status& outcome : outcomes) CHECK_OK(outcome);
    for (const Job* job : jobs) CHECK(job->runtime->check() == "");
  }
  eventually([&] { return shared.promised() == 0; });
}

TEST_CASE("42 models in 42 processes are resident together") {
  const Shared shared([](auto& options) { options.capacity_bytes = 128 * kMiB; });
  std::vector<std::unique_ptr<Job>> jobs;
  for (int i = 0; i < 42; ++i) jobs.push_back(std::make_unique<Job>("model", 2 * kMiB, 24 * kMiB));
  const auto now = shared.status();
  CHECK(now.devices[0].resident == 42);
  CHECK(now.devices[0].promised_bytes == 108 * kMiB);
  for (size_t i = 0; i < jobs.size(); ++i) CHECK_OK(jobs[i]->run(static_cast<uint8_t>(i), kMiB));
}

TEST_CASE("sessions of a group with a limit on its memory have ephemeral memory of their own") {
  const Shared shared;
  Job apart("apart", 2 * kMiB, 8 * kMiB);
  setenv("GPUSHARE_GROUP", "ab12", 1);
  setenv("GPUSHARE_MEMORY", "24MiB", 1);
  Job a("a", 2 * kMiB, 8 * kMiB), b("b", 2 * kMiB, 8 * kMiB);
  unsetenv("GPUSHARE_MEMORY");
  setenv("GPUSHARE_GROUP", "cd34", 1);
  Job other("other", 2 * kMiB, 8 * kMiB);  // a group without one
  unsetenv("GPUSHARE_GROUP");
  CHECK(shared.promised() == 32 * kMiB);  // 2 + 8 of apart, 10 each of a and b, 2 of other
  uint8_t value = 0;
  for (Job* job : {&a, &other, &apart, &b}) CHECK_OK(job->run(++value, 8 * kMiB));
}

TEST_CASE("a shared lane grows inside an iteration, and gives back what nobody needs") {
  const Shared shared;
  Job small("small", 2 * kMiB, 2 * kMiB);
  {
    Job large("large", 2 * kMiB, 4 * kMiB);
    eventually([&] { return shared.promised() == 8 * kMiB; });
    const auto iteration = large.begin();
    const auto stream = iteration->stream();
    REQUIRE(stream.ok());
    const auto first = iteration->alloc(4 * kMiB, 0), more = iteration->alloc(9 * kMiB, 0);
    INFO(more.status().to_string());
    REQUIRE(more.ok());
    REQUIRE_OK((*stream)->fill(*first, 1, 4 * kMiB));
    REQUIRE_OK((*stream)->fill(*more, 2, 9 * kMiB));
    CHECK_OK(Job::is_all(**stream, *first, 4 * kMiB, 1));
    CHECK(shared.promised() >= 4 * kMiB + 13 * kMiB);
    CHECK(iteration->alloc(60 * kMiB, 0).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    REQUIRE_OK(iteration->end());
    CHECK_OK(small.run(3));
  }
  // Once what had a turn before has ended. On a GPU a process sees that when it looks, as at its next iteration.
  eventually([&] {
    CHECK_OK(small.run(4));
    return shared.promised() == 4 * kMiB;
  });
  Job other("other", 2 * kMiB, 40 * kMiB);
  CHECK_OK(other.run(5));
  CHECK_OK(small.run(6));
}

TEST_CASE("paging between processes that share a lane") {
  const Shared shared([](auto& options) { options.policy = "priority"; });
  Job low("low", 30 * kMiB, 8 * kMiB, 0);
  CHECK_OK(low.run(1));
  {
    Job high("high", 30 * kMiB, 16 * kMiB, 10);
    CHECK_OK(high.run(2));
    CHECK(low.session->info().state == executor::SessionState::kPagedOut);
    eventually([&] { return shared.promised() == 46 * kMiB; });
  }
  CHECK_OK(low.run(3));
  eventually([&] { return shared.promised() == 38 * kMiB; });
}

TEST_CASE("work on other streams ends with an iteration in a shared lane") {
  const Shared shared;
  Job job("job", 2 * kMiB, 4 * kMiB);
  const auto iteration = job.begin();
  const auto block = iteration->alloc(kMiB, 0);
  REQUIRE(block.ok());
  auto side = job.runtime->create_stream(0);
  REQUIRE(side.ok());
  std::atomic<bool> done{false};
  REQUIRE_OK((*side)->launch_host(
      [](void* data) {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        static_cast<std::atomic<bool>*>(data)->store(true);
      },
      &done));
  REQUIRE_OK(job.runtime->record_use(*block, **side));
  REQUIRE_OK(iteration->end());
  CHECK(done);
}

TEST_CASE("a session that keeps a block of a shared lane has a lane of its own from then on") {
  Shared shared;
  Job a("a", 4 * kMiB, 8 * kMiB), b("b", 4 * kMiB, 8 * kMiB);
  CHECK_OK(a.run(1));
  CHECK_OK(b.run(2));
  CHECK(shared.promised() == 16 * kMiB);
  memory::Address kept[2] = {};
  {
    const auto iteration = a.begin();
    for (uint8_t i = 0; i < 2; ++i) {
      const auto block = iteration->alloc(2 * kMiB, 0);
      REQUIRE(block.ok());
      kept[i] = *block;
      REQUIRE_OK((*iteration->stream())->fill(kept[i], 7 + i, 2 * kMiB));
      REQUIRE_OK(iteration->keep(kept[i]));
      REQUIRE_OK(iteration->keep(kept[i]));
    }
    CHECK(shared.promised() == 24 * kMiB);
    REQUIRE_OK(iteration->end());
  }
  eventually(
      [&] { return shared.promised() == 24 * kMiB; });  // 4 + 8 of a, 4 of b, and the lane that b is in
  CHECK_OK(b.run(3, 8 * kMiB));
  CHECK_OK(a.run(4, 8 * kMiB));  // all of its E, beside the blocks
  CHECK_OK(b.run(5, 8 * kMiB));
  const auto holds = [&] {
    const auto iteration = a.begin();
    for (uint8_t i = 0; i < 2; ++i) CHECK_OK(Job::is_all(**iteration->stream(), kept[i], 2 * kMiB, 7 + i));
    REQUIRE_OK(iteration->end());
  };
  holds();
  SECTION("until the blocks are freed, and after that") {
    for (const memory::Address block : kept) REQUIRE_OK(a.runtime->free(block));
    CHECK_OK(a.run(6, 8 * kMiB));
    CHECK_OK(b.run(7, 8 * kMiB));
    CHECK(shared.promised() == 24 * kMiB);
  }
  SECTION("also under a new daemon") {
    shared.service.reset();
    shared.start();
    eventually([&] { return b.run(6, 8 * kMiB).ok(); });
    eventually([&] { return a.run(7, 8 * kMiB).ok(); });
    holds();
    eventually([&] { return shared.promised() == 24 * kMiB; });
  }
  SECTION("also when it grows") {
    const auto iteration = a.begin();
    const auto large = iteration->alloc(12 * kMiB, 0);
    INFO(large.status().to_string());
    REQUIRE(large.ok());
    REQUIRE_OK((*iteration->stream())->fill(*large, 9, 12 * kMiB));
    REQUIRE_OK(iteration->end());
    CHECK_OK(b.run(8, 8 * kMiB));
    holds();
  }
  CHECK(a.runtime->check() == "");
  CHECK(b.runtime->check() == "");
}

TEST_CASE("a lane of its own is refused where the device has no room for it: nothing is lost") {
  const Shared shared;
  Job a("a", 4 * kMiB, 30 * kMiB), b("b", 20 * kMiB, 2 * kMiB);
  CHECK_OK(b.run(1));
  const uint64_t before = shared.promised();
  {
    const auto iteration = a.begin();
    const auto block = iteration->alloc(2 * kMiB, 0);
    REQUIRE(block.ok());
    const base::Status kept = iteration->keep(*block);
    CHECK(kept.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    CHECK(kept.message().find("shares its lane with other processes; keeping a block of it") !=
          std::string::npos);
    REQUIRE_OK(iteration->end());
  }
  CHECK(shared.promised() == before);
  CHECK_OK(a.run(2, 30 * kMiB));
  CHECK_OK(b.run(3));
  CHECK(a.runtime->check() == "");
}

TEST_CASE("a new daemon hears of sessions that shared a lane, also while one runs in it") {
  Shared shared;
  Job a("a", 4 * kMiB, 8 * kMiB), b("b", 4 * kMiB, 8 * kMiB);
  CHECK_OK(a.run(1));
  const auto block = b.session->alloc(memory::Kind::kModel, 4 * kMiB, 0);
  REQUIRE(block.ok());
  const auto under_way = b.begin();
  const auto stream = under_way->stream();
  REQUIRE(stream.ok());
  REQUIRE_OK((*stream)->fill(*block, 7, 4 * kMiB));
  const auto scratch = under_way->alloc(8 * kMiB, 0);
  REQUIRE(scratch.ok());
  REQUIRE_OK((*stream)->fill(*scratch, 2, 8 * kMiB));
  shared.service.reset();
  shared.start();
  eventually([&] { return a.run(3).ok(); });  // in memory of the new daemon's
  CHECK(shared.status().processes.size() == 1);
  CHECK_OK(Job::is_all(**stream, *scratch, 8 * kMiB, 2));
  REQUIRE_OK(under_way->end());
  eventually([&] { return b.run(4).ok(); });
  CHECK_OK(a.run(5));
  eventually([&] { return shared.promised() == 16 * kMiB; });
  const auto again = b.begin();
  CHECK_OK(Job::is_all(**again->stream(), *block, 4 * kMiB, 7));
  REQUIRE_OK(again->end());
}

TEST_CASE(
    "a new daemon has the capacity that it is told, also where sessions of the one before hold most of it") {
  Shared shared([](auto& options) {
    options.devices = {kWholeDevice};
    options.capacity_bytes = 900 * kMiB;
  });
  Job a("a", 600 * kMiB, 16 * kMiB);
  CHECK_OK(a.run(1));
  shared.service.reset();
  shared.start();
  eventually([&] { return a.run(2).ok(); });
  CHECK(shared.status().devices[0].capacity_bytes == 900 * kMiB);
  // The iteration may have had the turn of the daemon before: until the session has arrived again nothing is promised to it.
  eventually([&] { return a.runtime->check().empty(); });
}

TEST_CASE("who does not say that it shares a lane has E of its own") {
  const Shared shared;
  Job a("a", 2 * kMiB, 8 * kMiB);
  RawConnection raw(shared);
  REQUIRE(raw.say(client::make_message<MessageType::kHello>()));
  CHECK(client::fields_of<client::Welcome>(raw.next({MessageType::kWelcome})).code == GPUSHARE_OK);
  auto arrive = client::make_message<MessageType::kArrive>(1);
  arrive.session = 1;
  arrive.ephemeral_bytes = 8 * kMiB;
  arrive.flags = client::kMayQueue;
  REQUIRE(raw.say(arrive));
  auto reply = client::fields_of<client::Reply>(raw.next({MessageType::kReply, MessageType::kLaneHere}));
  CHECK(reply.header.type == static_cast<uint16_t>(MessageType::kReply));
  CHECK((reply.value & client::kSharesLane) == 0);
  CHECK(shared.promised() == 18 * kMiB);
  // A need that fits only without the rounding to pieces is not shared either.
  raw.tell(MessageType::kLeave, 1);
  arrive.flags |= client::kMayShareLane;
  arrive.ephemeral_bytes = 64 * kMiB - 1;
  REQUIRE(raw.say(arrive));
  reply = client::fields_of<client::Reply>(raw.next({MessageType::kReply}));
  CHECK(reply.code == GPUSHARE_OK);
  CHECK(reply.value != (reply.value & ~client::kSharesLane));
}

TEST_CASE("lanes are shared where one session at a time has the device") {
  daemon::ServiceOptions options;
  options.socket = "/tmp/gpushare-lanes-" + std::to_string(getpid());
  options.devices = {"host"};
  options.share_lanes = true;
  options.max_lanes = 2;
  CHECK(daemon::Service::start(options).status().code() == GPUSHARE_INVALID_ARGUMENT);
}

#ifndef GPUSHARE_CUDA_STANDIN  // a descriptor of the driver is no file to read
TEST_CASE("another user's processes have a lane of their own") {
  if (geteuid() != 0) return;
  const Shared shared([](auto& options) { options.all_users = true; });
  REQUIRE(chmod(shared.folder.c_str(), 0755) == 0);
  Job mine("mine", 2 * kMiB, 8 * kMiB);
  CHECK_OK(mine.run(0x5a));
  RawConnection raw(shared);  // another process of this user: the same memory
  const auto first_piece = [](int socket, client::Descriptor* out) {
    const auto say = [&](const auto& message) {
      return client::send_message(socket, client::bytes_of(message)).ok();
    };
    auto arrive = client::make_message<MessageType::kArrive>(1);
    arrive.session = 1;
    arrive.ephemeral_bytes = 8 * kMiB;
    arrive.flags = client::kMayShareLane;
    if (!say(client::make_message<MessageType::kHello>()) || !say(arrive)) return false;
    std::vector<std::byte> buffer(client::kMaxMessageBytes + 64);
    for (;;) {
      std::vector<client::Descriptor> descriptors;
      if (!client::wait_readable(socket, base::Deadline::after(kLong)).ok()) return false;
      const auto message = client::receive_message(socket, buffer, &descriptors);
      if (message.status().code() == GPUSHARE_NOT_READY) continue;
      if (!message.ok() || !client::check_message(*message, client::Side::kDaemon).ok()) return false;
      if (*client::check_message(*message, client::Side::kDaemon) != MessageType::kLaneHere) continue;
      if (descriptors.size() != 1) return false;
      *out = std::move(descriptors.front());
      return true;
    }
  };
  // The byte at the start of the memory, and which file it is.
  const auto look = [](const client::Descriptor& piece, struct stat* out) {
    unsigned char byte = 0xff;
    if (fstat(piece.get(), out) != 0 || pread(piece.get(), &byte, 1, 0) != 1) return -1;
    return static_cast<int>(byte);
  };
  client::Descriptor piece;
  REQUIRE(first_piece(raw.socket.get(), &piece));
  struct stat ours {};
  CHECK(look(piece, &ours) == 0x5a);  // a process of the same user can read what another left
  const pid_t child = fork();
  if (child == 0) {
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(100);
    auto connected = client::connect_to(shared.options.socket);
    client::Descriptor theirs;
    struct stat about {};
    if (!connected.ok() || !first_piece(connected->get(), &theirs)) _exit(1);
    if (look(theirs, &about) != 0) _exit(2);
    if (about.st_ino == ours.st_ino && about.st_dev == ours.st_dev) _exit(3);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK_OK(mine.run(1));
}
#endif
