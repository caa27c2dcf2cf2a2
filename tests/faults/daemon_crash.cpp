// Workers killed with SIGKILL at random moments of their lives, while another one works on: the daemon keeps
// serving, the other's bytes stay right, and what was held for the dead comes back.
// GPUSHARE_TEST_CRASHES: how many (100); GPUSHARE_TEST_SEED: which moments.
// SPDX-License-Identifier: Apache-2.0
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdio>
#include <map>

#include "unit/daemon/daemon_fixture.hpp"

extern char** environ;

using namespace gpushare;
using namespace gpushare::test;

namespace {

struct TestModel {
  std::string path;
  uint64_t sum;
};

TestModel make_model(Daemon& daemon, const std::string& name) {
  // The first layer is worth keeping on the device between turns.
  std::vector<size_t> sizes = {2 * kGranule};
  for (int i = 0; i < 20; ++i) sizes.push_back(uniform(daemon.random, 1000, 10'000));
  sizes.push_back(kGranule * 6 - 256 * 22 - [&] {
    size_t sum = 0;
    for (const size_t size : sizes) sum += size;
    return sum;
  }());  // 6 granules in all
  std::vector<std::string> contents;
  TestModel model{daemon.model(name, sizes, &contents), checksum(nullptr, 0)};
  for (const std::string& bytes : contents) model.sum = checksum(bytes.data(), bytes.size(), model.sum);
  return model;
}

pid_t spawn_victim(const Daemon& daemon, const TestModel& model, uint64_t scratch_bytes, int turns) {
  std::vector<std::string> words = {
      GPUSHARE_DAEMON_WORKER,    daemon.options.socket,         model.path,
      std::to_string(model.sum), std::to_string(scratch_bytes), std::to_string(turns)};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t child = 0;
  REQUIRE(posix_spawn(&child, arguments[0], nullptr, nullptr, arguments.data(), environ) == 0);
  return child;
}

size_t open_files() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    // The device keeps some files of shared memory for its next.
    if (!gone && target.find("memfd:gpushare-shared") == std::string::npos) ++count;
  }
  return count;
}

int crashes() {
  return static_cast<int>(number_from("GPUSHARE_TEST_CRASHES", 100));
}

}  // namespace

TEST_CASE("workers die at random moments and nothing is lost") {
  std::printf("seed %llu, %d crashes\n", static_cast<unsigned long long>(seed()), crashes());
  // Room for one model of 6 granules, and for scratch memory or the first layer of the other; a load takes about 8 ms.
  Daemon daemon(8 * kGranule, [](auto& options) {
    options.device += "&copy_gbps=0.05";
    options.standby_bytes = 2 * kGranule;
  });
  const TestModel models[] = {make_model(daemon, "a.safetensors"), make_model(daemon, "b.safetensors")};
  const auto first = daemon.status();
  const size_t files = open_files();

  auto survivor = daemon.attach("survivor", models[0].path);
  std::atomic<bool> stop{false};
  std::atomic<int> turns{0};
  std::string trouble;
  std::thread work([&] {
    const auto turn = [&]() -> base::Status {
      GPUSHARE_RETURN_IF_ERROR(survivor->begin());
      uint64_t sum = checksum(nullptr, 0);
      for (uint32_t i = 0; i < survivor->layers().size(); ++i) {
        GPUSHARE_RETURN_IF_ERROR(survivor->wait_layers(i, i + 1));
        sum = checksum(reinterpret_cast<const void*>(survivor->address(i)), survivor->layers()[i].bytes, sum);
      }
      if (sum != models[0].sum) return {GPUSHARE_INTERNAL, "the survivor's bytes are others"};
      return survivor->end();
    };
    while (!stop.load()) {
      const base::Status status = turn();
      ++turns;
      if (status.ok()) continue;
      trouble = status.to_string();
      return;
    }
  });

  // How long a whole life takes: the moments are drawn from it.
  const auto began = std::chrono::steady_clock::now();
  int status = 0;
  waitpid(spawn_victim(daemon, models[1], 1000, 3), &status, 0);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  const auto life_us = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - began)
          .count());

  std::map<std::string, int> killed_while;
  for (int i = 0; i < crashes(); ++i) {
    const TestModel& model = models[uniform(daemon.random, 0, 1)];
    const pid_t victim = spawn_victim(daemon, model, uniform(daemon.random, 0, 1) * kGranule, 1'000'000);
    std::this_thread::sleep_for(std::chrono::microseconds(uniform(daemon.random, 0, life_us * 5 / 4)));
    std::string state = "starting";
    for (const daemon::WorkerStatus& worker : daemon.status().workers)
      if (worker.name == "victim") state = worker.state;
    ++killed_while[state];
    REQUIRE(kill(victim, SIGKILL) == 0);
    REQUIRE(waitpid(victim, &status, 0) == victim);
    REQUIRE(WIFSIGNALED(status));  // it had no reason to end by itself
    daemon.wait_for([](const auto& now) { return now.workers.size() == 1 && now.models.size() == 1; });
    const daemon::DaemonStatus now = daemon.status();
    INFO("crash " << i << " while " << state);
    CHECK(now.device_total_bytes - now.device_free_bytes == now.resident_bytes + now.standby_bytes);
    CHECK(now.standby_bytes <= 2 * kGranule);
    CHECK(now.resident_bytes <= 6 * kGranule);
    // The survivor goes on.
    const int seen = turns.load();
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (turns.load() < seen + 2 && trouble.empty() && std::chrono::steady_clock::now() < limit)
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    REQUIRE(turns.load() >= seen + 2);
  }
  stop.store(true);
  work.join();
  CHECK(trouble.empty());
  survivor.reset();
  daemon.wait_for([&](const auto& now) {
    return now.workers.empty() && now.models.empty() && now.resident_bytes == 0 &&
           now.device_free_bytes == first.device_free_bytes;
  });
  // The last query's own socket may still be in the daemon's hands.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (open_files() > files && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(open_files() <= files);
  const auto last = daemon.status();
  std::printf("the survivor had %d turns; %llu loads; killed while", turns.load(),
              static_cast<unsigned long long>(last.loads));
  for (const auto& [state, count] : killed_while) std::printf(" %s: %d", state.c_str(), count);
  std::printf("\n");
}
