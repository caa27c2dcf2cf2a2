// Processes on one shared device, with real work on the host device: weights, kills of processes and of the daemon. GPUSHARE_TEST_KILLS sets how many are killed (12).
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/child_process.hpp"
#include "support/model_folder.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "support/shared_service.hpp"
#include "unit/daemon/raw_connection.hpp"

using namespace gpushare;
using namespace gpushare::test;

namespace {

// Arguments as session_worker takes them.
struct Worker : ChildProcess {
  explicit Worker(std::vector<std::string> arguments)
      : ChildProcess(GPUSHARE_SESSION_WORKER, std::move(arguments)) {}
};

size_t open_descriptors() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

bool all_back(const SharedService& shared) {
  const auto now = shared.status();
  return now.sessions.empty() && now.devices[0].promised_bytes == 0;
}

}  // namespace

TEST_CASE("a process that is stopped while it waits goes on when its turn came and went meanwhile") {
  const bool share_lanes = GENERATE(false, true);
  CAPTURE(share_lanes);
  SharedService shared([&](auto& options) {
    options.share_lanes = share_lanes;
    options.lease_ns = 50'000'000;
  });
  Worker first({"first", "1", "0", "2", "1", "5000", "0"}),
      second({"second", "1", "0", "2", "1", "5000", "0"});
  Worker stopped({"stopped", "1", "0", "2", "1", "100", "0"});
  for (Worker* worker : {&first, &second, &stopped}) REQUIRE(worker->line() == "ready\n");
  const auto look = [&] {
    for (const auto& session : shared.status().sessions)
      if (session.name == "stopped") return session;
    return client::SessionStatus{};
  };
  // It waits nearly all the time, so it is mostly stopped there: its turn comes, and goes with the lease.
  for (int seen = 0; seen < 3;) {
    ::kill(stopped.pid(), SIGSTOP);
    std::string state;
    // On a busy machine others exceed the lease, too. Then it is to change lanes, and does not answer.
    eventually([&] {
      state = look().state;
      return state == "overdue" || state == "resting" || state == "paging" || state == "paged_out";
    });
    seen += state == "overdue" ? 1 : 0;
    const uint64_t before = look().iterations;
    ::kill(stopped.pid(), SIGCONT);
    eventually([&] { return look().iterations > before + 2; });
  }
  for (Worker* worker : {&first, &second, &stopped}) worker->tell_to_stop();
  for (Worker* worker : {&first, &second, &stopped}) CHECK(worker->wait() == 0);
  eventually([&] { return all_back(shared); });
}

TEST_CASE("processes whose lane is held up by one that is killed, stopped or silent go on") {
  const std::string end = GENERATE("killed", "stopped", "silent");
  const bool room = GENERATE(true, false);  // for another lane
  CAPTURE(end, room);
  SharedService shared([&](auto& options) {
    options.share_lanes = true;
    // Longer than an iteration of the processes that go on: one that exceeds it does not count. Sanitizers stretch it to 40 ms.
    options.lease_ns = kSanitized ? 1'000'000'000 : 50'000'000;
    options.capacity_bytes = (room ? 32 : 16) << 20;
  });
  const auto look = [&](const std::string& name) {
    for (const auto& session : shared.status().sessions)
      if (session.name == name) return session;
    return client::SessionStatus{};
  };
  std::unique_ptr<Worker> process;
  std::unique_ptr<RawConnection> silent;
  if (end == "silent") {  // it says nothing more after it has asked for a turn
    silent = std::make_unique<RawConnection>(shared);
    REQUIRE(silent->say(client::make_message<client::MessageType::kHello>()));
    auto arrive = client::make_message<client::MessageType::kArrive>(1);
    arrive.session = 1;
    std::strcpy(arrive.name, "holder");
    arrive.persistent_bytes = 2 << 20;
    arrive.ephemeral_bytes = 8 << 20;
    arrive.flags = client::kMayQueue | client::kMayShareLane;
    REQUIRE(silent->say(arrive));
    (void)silent->next({client::MessageType::kAdmit});
    silent->tell(client::MessageType::kReady, 1);
  } else {  // each of its iterations takes a minute
    process =
        std::make_unique<Worker>(std::vector<std::string>{"holder", "1", "0", "2", "8", "60000000", "0"});
    REQUIRE(process->line() == "ready\n");
  }
  eventually([&] { return look("holder").state == "turn"; });
  std::vector<std::unique_ptr<Worker>> others;
  for (const char* name : {"a", "b"})
    others.push_back(
        std::make_unique<Worker>(std::vector<std::string>{name, "1", "0", "2", "8", "100", "0"}));
  for (auto& worker : others) REQUIRE(worker->line() == "ready\n");
  if (end == "killed") process->kill();
  if (end == "stopped") ::kill(process->pid(), SIGSTOP);
  const auto go_on = [&] {
    for (const char* name : {"a", "b"})
      eventually([&, before = look(name).iterations] { return look(name).iterations > before + 20; });
  };
  if (end != "killed" && !room) {
    for (const char* name : {"a", "b"})
      eventually([&] {
        return look(name).waits_for.find("'holder'") != std::string::npos &&
               look(name).waits_for.find("may still run") != std::string::npos;
      });
    CHECK(look("a").iterations == 0);
  } else {
    go_on();
    if (end != "killed") CHECK(shared.status().devices[0].lanes >= 2);
  }
  if (end == "stopped") process->kill();
  if (silent != nullptr) silent->tell(client::MessageType::kLeave, 1);
  go_on();
  for (auto& worker : others) worker->tell_to_stop();
  for (auto& worker : others) CHECK(worker->wait() == 0);
  eventually([&] { return all_back(shared); });
}

TEST_CASE("42 processes are resident together in one lane") {
  SharedService shared([](auto& options) {
    options.capacity_bytes = 128 << 20;
    options.share_lanes = true;
  });
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < 42; ++i)
    workers.push_back(std::make_unique<Worker>(
        std::vector<std::string>{"m" + std::to_string(i), "1", "0", "1", "24", "100", "0"}));
  for (auto& worker : workers) CHECK(worker->line() == "ready\n");
  const auto now = shared.status();
  CHECK(now.devices[0].resident == 42);
  CHECK(now.devices[0].promised_bytes == (42 * 2 + 24) << 20);  // of 1,092 MiB with private lanes
  for (auto& worker : workers) worker->tell_to_stop();
  for (auto& worker : workers) CHECK(worker->wait() == 0);
  eventually([&] { return all_back(shared); });
}

TEST_CASE(
    "random sessions of processes that share a lane, some killed, keep their bytes and the daemon's "
    "promises") {
  Random random(seed());
  INFO("seed " << seed());
  const char* policy = GENERATE("srtf", "fair", "priority");
  CAPTURE(policy);
  SharedService shared([&](auto& options) {
    options.policy = policy;
    options.share_lanes = true;
    options.capacity_bytes = 32 << 20;
  });
  std::vector<std::unique_ptr<Worker>> workers(5);
  const auto number = [&](uint64_t least, uint64_t most) {
    return std::to_string(uniform(random, least, most));
  };
  for (uint64_t i = 0; i < 4 * number_from("GPUSHARE_TEST_KILLS", rounds(12)); ++i) {
    std::unique_ptr<Worker>& worker = workers[uniform(random, 0, workers.size() - 1)];
    if (worker == nullptr)
      worker = std::make_unique<Worker>(std::vector<std::string>{
          "w", number(1, 3), number(0, 9), number(1, 12), number(1, 16), number(10, 500), number(1, 60)});
    else if (uniform(random, 0, 1) != 0)
      worker->kill();
    else
      CHECK(worker->wait() == 0);
    if (worker->pid() < 0) worker.reset();
    const auto now = shared.status();
    CHECK(now.devices[0].promised_bytes <= now.devices[0].capacity_bytes);
    uint64_t persistent_bytes = 0, largest = 0;
    for (const auto& session : now.sessions) {
      if (session.state == "queued" || session.state == "paged_out" || session.state == "paging") continue;
      persistent_bytes += session.persistent_bytes;
      largest = std::max(largest, session.ephemeral_bytes);
    }
    CHECK(persistent_bytes + largest <= now.devices[0].promised_bytes);
  }
  for (auto& worker : workers)
    if (worker != nullptr) CHECK(worker->wait() == 0);
  eventually([&] { return all_back(shared); });
}

TEST_CASE("processes that are killed give everything back, and harm nobody") {
  const bool share_lanes = GENERATE(false, true);
  CAPTURE(share_lanes);
  SharedService shared([&](auto& options) {
    options.policy = "priority";
    options.share_lanes = share_lanes;
  });
  const uint64_t kills = number_from("GPUSHARE_TEST_KILLS", 12);
  INFO("seed " << seed());
  Random random(seed());
  const size_t descriptors = open_descriptors();
  Worker bystander({"bystander", "1", "5", "16", "4", "100", "0"});
  CHECK(bystander.line() == "ready\n");
  for (uint64_t i = 0; i < kills; ++i) {
    // Some outrank the bystander and have it paged out.
    Worker victim({"victim", "1", std::to_string(uniform(random, 0, 9)), "36", "4", "100", "0"});
    if (uniform(random, 0, 3) != 0) (void)victim.line();
    std::this_thread::sleep_for(std::chrono::microseconds(uniform(random, 0, 20'000)));
    if (uniform(random, 0, 3) == 0) {
      shared.service.reset();
      std::this_thread::sleep_for(std::chrono::microseconds(uniform(random, 0, 20'000)));
      shared.start();
    }
    victim.kill();
  }
  bystander.tell_to_stop();
  CHECK(bystander.line() != "");
  CHECK(bystander.wait() == 0);
  eventually([&] { return all_back(shared); });
  if (share_lanes) {  // the daemon has the device open
    shared.service.reset();
    shared.start();
  }
  eventually([&] { return open_descriptors() == descriptors + 2; });  // the pipes of the bystander
}

TEST_CASE("processes that read images are killed, and the others' images stay right") {
  // Room for one image of 5 MiB and the sessions; a load takes about 10 ms, so kills fall into loads too.
  SharedService shared([](auto& options) {
    options.devices = {"host?total_bytes=268435456&granularity=65536&copy_gbps=0.5"};
    options.capacity_bytes = 12 << 20;
  });
  Random random(seed());
  INFO("seed " << seed());
  ModelFolder folder;
  std::string paths[2], sums[2];
  for (int i = 0; i < 2; ++i) {
    std::vector<std::string> contents;
    paths[i] = folder.make(std::string(1, static_cast<char>('a' + i)) + ".safetensors",
                           {1 << 20, 2 << 20, 1 << 20, 1 << 20}, random, &contents);
    uint64_t sum = checksum(nullptr, 0);
    for (const std::string& bytes : contents) sum = checksum(bytes.data(), bytes.size(), sum);
    sums[i] = std::to_string(sum);
  }
  const uint64_t kills = number_from("GPUSHARE_TEST_KILLS", 12);
  Worker bystander({"bystander", "1", "0", "1", "1", "100", "0", paths[0], sums[0]});
  CHECK(bystander.line() == "ready\n");
  for (uint64_t i = 0; i < kills; ++i) {
    const size_t which = uniform(random, 0, 1);
    Worker victim({"victim", "1", "0", "1", "1", "100", "0", paths[which], sums[which]});
    if (uniform(random, 0, 3) != 0) (void)victim.line();
    std::this_thread::sleep_for(std::chrono::microseconds(uniform(random, 0, 40'000)));
    victim.kill();
  }
  bystander.tell_to_stop();
  CHECK(bystander.line() != "");
  CHECK(bystander.wait() == 0);
  eventually([&] { return all_back(shared) && shared.status().images.empty(); });
}

TEST_CASE("a child that keeps the socket open does not keep its dead parent's bytes") {
  SharedService shared;
  Worker parent({"forks", "1", "0", "16", "4", "100", "0"});
  CHECK(parent.line() == "ready\n");
  CHECK(shared.status().processes.size() == 1);
  parent.kill();
  eventually([&] { return all_back(shared); });
}
