// Processes on one shared device, with real work on the host device: each policy, weights, kills of processes and of the
// daemon. GPUSHARE_TEST_KILLS sets how many are killed (12).
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
#include "support/shared_service.hpp"

using namespace gpushare;
using namespace gpushare::test;

namespace {

// Arguments as session_worker takes them.
struct Worker : ChildProcess {
  explicit Worker(std::vector<std::string> arguments)
      : ChildProcess(GPUSHARE_SESSION_WORKER, std::move(arguments)) {}
};

template <class Condition>
void eventually(Condition&& condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

size_t open_descriptors() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

bool all_back(const SharedService& shared) {
  const auto now = shared.status();
  return now.sessions.empty() && now.devices[0].promised_bytes == 0;
}

}  // namespace

TEST_CASE("processes train to their end under every policy") {
  const char* policy = GENERATE("fifo", "srtf", "pack", "fair", "priority");
  CAPTURE(policy);
  SharedService shared([&](auto& options) {
    options.policy = policy;
    options.capacity_bytes = 16 << 20;
  });
  // More than fit at once: some wait for memory, under srtf and priority some are paged out.
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < 4; ++i)
    workers.push_back(std::make_unique<Worker>(std::vector<std::string>{"w" + std::to_string(i), "1",
                                                                        std::to_string(i), "4", "1", "200",
                                                                        std::to_string(10 + 10 * (3 - i))}));
  for (auto& worker : workers) CHECK(worker->wait() == 0);
  eventually([&] { return all_back(shared); });
}

TEST_CASE("twenty processes share a device that holds a third of them") {
  SharedService shared([](auto& options) { options.capacity_bytes = 16 << 20; });
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < 20; ++i)
    workers.push_back(std::make_unique<Worker>(
        std::vector<std::string>{"w" + std::to_string(i), "1", "0", "2", "1", "100", "10"}));
  for (auto& worker : workers) CHECK(worker->wait() == 0);
  eventually([&] { return all_back(shared); });
}

TEST_CASE("processes that are killed give everything back, and harm nobody") {
  SharedService shared([](auto& options) { options.policy = "priority"; });
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
