// Limits of a shared device: those of the environment, of a process and of a group, caps of its time, and its capacity.
// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "support/sanitizers.hpp"
#include "unit/daemon/service_sessions.hpp"

using namespace gpushare;
using namespace gpushare::test;

TEST_CASE("the environment limits the sessions of a shared runtime") {
  SharedService shared;
  setenv("GPUSHARE_MEMORY", "16MiB", 1);
  setenv("GPUSHARE_WEIGHT", "0.5", 1);
  const auto runtime = shared.open();
  auto weight_of = [&](const std::string& name) {
    for (const auto& session : shared.status().sessions)
      if (session.name == name) return session.weight;
    return 0.0;
  };
  executor::SessionOptions options;
  options.name = "first";
  options.quota_bytes = 12 * kMiB;
  options.persistent_bytes = 4 * kMiB;
  options.ephemeral_bytes = 4 * kMiB;
  options.weight = 3;
  auto first = runtime->open_session(options);
  REQUIRE(first.ok());
  eventually([&] { return weight_of("first") == 0.5; });
  options.name = "second";
  options.weight = 1;
  const auto refused = runtime->open_session(options);  // a quota of 12 MiB, where 4 are left
  CHECK(refused.status().code() == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(refused.status().message().find("GPUSHARE_MEMORY allows this runtime 16.00 MiB") !=
        std::string::npos);
  CHECK(refused.status().message().find("leave 4.00 MiB") != std::string::npos);
  options.quota_bytes = 0;
  CHECK(runtime->open_session(options).status().code() == GPUSHARE_QUOTA_EXCEEDED);  // declares 8 MiB
  options.persistent_bytes = kMiB;
  options.ephemeral_bytes = kMiB;
  auto second = runtime->open_session(options);
  REQUIRE(second.ok());
  CHECK((*second)->alloc(memory::Kind::kModel, 5 * kMiB, 0).status().code() == GPUSHARE_QUOTA_EXCEEDED);
  eventually([&] { return weight_of("first") == 0.375 && weight_of("second") == 0.125; });
  REQUIRE_OK((*second)->set_weight(3));
  eventually([&] { return weight_of("first") == 0.25 && weight_of("second") == 0.25; });
  REQUIRE_OK((*first)->close());
  eventually([&] { return weight_of("second") == 0.5; });
  REQUIRE_OK(runtime->close());

  for (const auto& [name, value] : {std::pair("GPUSHARE_MEMORY", "much"), std::pair("GPUSHARE_MEMORY", "0"),
                                    std::pair("GPUSHARE_MEMORY", "16777216"),  // without a unit
                                    std::pair("GPUSHARE_WEIGHT", "0"), std::pair("GPUSHARE_WEIGHT", "x")}) {
    setenv("GPUSHARE_MEMORY", "16MiB", 1);
    setenv("GPUSHARE_WEIGHT", "0.5", 1);
    setenv(name, value, 1);
    executor::RuntimeOptions bad;
    bad.device = "shared";
    const auto status = executor::Runtime::open(std::move(bad)).status();
    CHECK(status.code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(status.message().find(name) != std::string::npos);
  }
  unsetenv("GPUSHARE_MEMORY");
  unsetenv("GPUSHARE_WEIGHT");
}

TEST_CASE("the environment caps the device time of a runtime's sessions, and of a group's") {
  SharedService shared;
  const auto cap_of = [&](const std::string& name) {
    for (const auto& session : shared.status().sessions)
      if (session.name == name) return session.cap;
    return -1.0;
  };
  setenv("GPUSHARE_CAP", "20%", 1);
  const uint64_t began_ns = base::host_now_ns();
  const auto runtime = shared.open();
  const auto first = open_session(*runtime, "first", 2 * kMiB, 2 * kMiB);
  const auto second = open_session(*runtime, "second", 2 * kMiB, 2 * kMiB);
  setenv("GPUSHARE_GROUP", "f00d", 1);
  const auto a = shared.open();
  setenv("GPUSHARE_CAP", "30%", 1);
  const auto b = shared.open();  // the first that came says what the cap is
  const auto of_a = open_session(*a, "a", 2 * kMiB, 2 * kMiB),
             of_b = open_session(*b, "b", 2 * kMiB, 2 * kMiB);
  unsetenv("GPUSHARE_GROUP");
  unsetenv("GPUSHARE_CAP");
  const auto free = shared.open();
  const auto other = open_session(*free, "other", 2 * kMiB, 2 * kMiB);
  for (const char* name : {"first", "second", "a", "b"}) CHECK(cap_of(name) == 0.2);
  CHECK(cap_of("other") == 0);

  // Iterations of two sessions together: the balance at the beginning, a fifth of the time, and one iteration. Nobody
  // else wants the device.
  uint64_t longest_ns = 0,
           before_ns = 0;  // as the device measured them, which a busy machine may hold up in begin or end
  const auto run = [&](executor::Session& session) {
    auto iteration = begin(session);
    const auto stream = iteration->stream();
    REQUIRE(stream.ok());
    REQUIRE_OK((*stream)->launch_host(
        [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }, nullptr));
    REQUIRE_OK((*stream)->synchronize());
    REQUIRE_OK(iteration->end());
  };
  for (int i = 0; i < 20; ++i) {
    run(i % 2 == 0 ? *first : *second);
    uint64_t service_ns = 0;
    for (const auto& session : shared.status().sessions)
      if (session.name == "first" || session.name == "second") service_ns += session.service_ns;
    longest_ns = std::max(longest_ns, service_ns - std::exchange(before_ns, service_ns));
    if (i == 19) CHECK(service_ns > 50'000'000);
    CHECK(service_ns <= (base::host_now_ns() - began_ns) / 5 + 50'000'000 + longest_ns);
  }
  run(*other);  // who has no cap does not wait for it
  REQUIRE_OK(runtime->close());
  REQUIRE_OK(a->close());
  REQUIRE_OK(b->close());
  REQUIRE_OK(free->close());

  for (const char* bad : {"30", "0%", "101%", "x%", "%"}) {
    setenv("GPUSHARE_CAP", bad, 1);
    executor::RuntimeOptions options;
    options.device = "shared";
    const auto status = executor::Runtime::open(std::move(options)).status();
    CHECK(status.code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(status.message().find("GPUSHARE_CAP") != std::string::npos);
  }
  unsetenv("GPUSHARE_CAP");
}

TEST_CASE("processes of a group have the limits of the environment together") {
  SharedService shared;
  setenv("GPUSHARE_MEMORY", "16MiB", 1);
  setenv("GPUSHARE_WEIGHT", "0.5", 1);
  setenv("GPUSHARE_GROUP", "f00d", 1);
  const auto a = shared.open(), b = shared.open(), c = shared.open();
  setenv("GPUSHARE_GROUP", "beef", 1);
  const auto stranger = shared.open();
  const auto first = open_session(*a, "first", 6 * kMiB, 2 * kMiB);
  const auto second = open_session(*b, "second", 2 * kMiB, 2 * kMiB);
  const auto other = open_session(*stranger, "other", 12 * kMiB, 4 * kMiB);  // all of its own group's
  for (const auto& session : shared.status().sessions)
    CHECK(session.group == (session.name == "other" ? 0xbeefu : 0xf00du));

  // Each process has less than 16 MiB; a third one's session would make it more in all together. P and E are rounded up
  // to granules of 2 MiB, and the limit allows for that once.
  const auto refused = c->open_session(need("third", 4 * kMiB, 4 * kMiB)).status();
  CHECK(refused.code() == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(refused.message().find("its group may need 18.00 MiB together") != std::string::npos);
  CHECK(refused.message().find("its sessions need 12.00 MiB already") != std::string::npos);
  CHECK(refused.message().find("GPUSHARE_MEMORY is 16.00 MiB") != std::string::npos);
  (void)alloc(*first, 6 * kMiB);
  (void)alloc(*first, 4 * kMiB);
  CHECK(first->alloc(memory::Kind::kModel, 3 * kMiB, 0).status().code() == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(second->alloc(memory::Kind::kModel, 5 * kMiB, 0).status().code() == GPUSHARE_QUOTA_EXCEEDED);

  // The weight is divided among sessions that use the device; one that has not for a second leaves it to the other.
  const auto weight_of = [&](const std::string& name) {
    for (const auto& session : shared.status().sessions)
      if (session.name == name) return session.weight;
    return 0.0;
  };
  eventually([&] {
    REQUIRE_OK(begin(*first)->end());
    REQUIRE_OK(begin(*second)->end());
    REQUIRE_OK(begin(*other)->end());
    return weight_of("first") == 0.25 && weight_of("second") == 0.25;
  });
  CHECK(weight_of("other") == 0.5);
  eventually([&] {
    REQUIRE_OK(begin(*first)->end());
    REQUIRE_OK(begin(*other)->end());
    return weight_of("first") == 0.5;
  });

  // Another daemon hears of the same group.
  shared.service.reset();
  shared.start();
  for (const auto& each : {first, second})
    eventually([&] {
      auto iteration = each->begin(kLong);
      return iteration.ok() && (*iteration)->end().ok();
    });
  CHECK(second->alloc(memory::Kind::kModel, 5 * kMiB, 0).status().code() == GPUSHARE_QUOTA_EXCEEDED);
  REQUIRE_OK(first->close());
  eventually([&] { return second->alloc(memory::Kind::kModel, 5 * kMiB, 0).ok(); });
  REQUIRE_OK(second->close());
  REQUIRE_OK(other->close());
  for (const auto& runtime : {a, b, c, stranger}) REQUIRE_OK(runtime->close());
  eventually([&] { return shared.status().devices[0].promised_bytes == 0; });

  for (const char* bad : {"0", "x", "12 ", "-1", "12345678901234567"}) {
    setenv("GPUSHARE_GROUP", bad, 1);
    const auto status = SharedService::try_open().status();
    CHECK(status.code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(status.message().find("GPUSHARE_GROUP") != std::string::npos);
  }
  for (const char* name : {"GPUSHARE_MEMORY", "GPUSHARE_WEIGHT", "GPUSHARE_GROUP"}) unsetenv(name);
}

TEST_CASE(
    "another process of the daemon's user changes the capacity of a shared device, another user does not") {
  // ThreadSanitizer ends a child of a process with threads that starts a thread.
  if (test::kThreadSanitizer) return;
  SharedService shared([](daemon::ServiceOptions& options) { options.all_users = true; });
  std::filesystem::permissions(shared.folder,
                               std::filesystem::perms::others_exec | std::filesystem::perms::group_exec,
                               std::filesystem::perm_options::add);
  const auto runtime = shared.open();
  const auto session = open_session(*runtime, "a", 8 * kMiB, 8 * kMiB);
  REQUIRE_OK(session->wait_admitted(kLong));
  // The exit status of a process that asks for `bytes`: the low byte of the status code.
  const auto low = [](int32_t code) { return code & 0xff; };
  const auto asked = [](uint64_t bytes, uid_t user) {
    const pid_t child = fork();
    if (child == 0) {
      if (user != 0 && (setgid(user) != 0 || setuid(user) != 0)) _exit(100);
      const auto opened = SharedService::try_open();
      if (!opened.ok()) _exit(101);
      _exit(static_cast<int>((*opened)->set_capacity(bytes).code()));
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
  };
  CHECK(asked(12 * kMiB, 0) == GPUSHARE_OK);
  auto info = runtime->info();
  CHECK(info->capacity_bytes == 12 * kMiB);
  CHECK(runtime->open_session(need("b", 10 * kMiB, 4 * kMiB)).status().code() == GPUSHARE_EXCEEDS_CAPACITY);
  REQUIRE_OK(session->close());
  eventually([&] { return runtime->info()->effective_capacity_bytes == 12 * kMiB; });
  CHECK(asked(65 * kMiB, 0) == low(GPUSHARE_EXCEEDS_CAPACITY));
  if (geteuid() == 0) CHECK(asked(32 * kMiB, 65534) == low(GPUSHARE_UNAVAILABLE));
  CHECK(runtime->info()->capacity_bytes == 12 * kMiB);
  CHECK_OK(runtime->set_capacity(0));
  eventually([&] { return runtime->info()->capacity_bytes == 64 * kMiB; });  // also without a session
  REQUIRE_OK(open_session(*runtime, "c", 40 * kMiB, 8 * kMiB)->wait_admitted(kLong));
}
