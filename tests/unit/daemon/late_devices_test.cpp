// Devices whose driver hangs when they are opened: for the daemon's sizes, and for the memory of shared lanes. It may hang
// later as well, when it is asked what the daemon's context has, or for memory.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <filesystem>
#include <string>
#include <thread>

#include "device/registry.hpp"
#include "unit/daemon/lane_jobs.hpp"
#include "unit/daemon/raw_connection.hpp"

using namespace gpushare;
using namespace gpushare::test;
using client::MessageType;

namespace {

constexpr char kHanging[] = "hanging_host";
std::atomic<int> g_hangs{0};           // whether device_open hangs, and context_bytes if it is supported
std::atomic<int> g_hanging{0};         // threads that are in it
std::atomic<int> g_open{0};            // devices
std::atomic<int> g_memory_hangs{0};    // whether phys_create_shared hangs
std::atomic<int> g_memory_hanging{0};  // threads that are in it
std::atomic<int32_t> g_context{GPUSHARE_UNSUPPORTED};  // what context_bytes returns

std::string hanging_device() {
  static const bool registered = [] {
    static gpushare_backend_ops ops = *device::find_backend("host");
    ops.name = kHanging;
    ops.device_open = [](uint32_t index, const char* options, gpushare_backend_device** out) {
      ++g_hanging;
      g_hangs.wait(1);
      const int32_t code = device::find_backend("host")->device_open(index, options, out);
      g_open += code == GPUSHARE_OK ? 1 : 0;
      --g_hanging;
      return code;
    };
    ops.context_bytes = [](uint32_t, const char*, uint64_t* out_bytes) -> int32_t {
      if (g_context == GPUSHARE_UNSUPPORTED) return g_context;
      ++g_hanging;
      g_hangs.wait(1);
      *out_bytes = 3 * kMiB;
      --g_hanging;
      return g_context;
    };
    ops.phys_create_shared = [](gpushare_backend_device* opened, uint64_t bytes,
                                gpushare_backend_memory** out) {
      ++g_memory_hanging;
      g_memory_hangs.wait(1);
      --g_memory_hanging;
      return device::find_backend("host")->phys_create_shared(opened, bytes, out);
    };
    ops.device_close = [](gpushare_backend_device* opened) {
      const int32_t code = device::find_backend("host")->device_close(opened);
      --g_open;
      return code;
    };
    return device::register_backend(&ops).ok();
  }();
  REQUIRE(registered);
  return std::string(kHanging) + kDeviceOptions;
}

// Lets the driver answer at the latest at the end of a test, so that no thread is left.
struct Hangs {
  Hangs() { g_hangs = 1; }
  ~Hangs() {
    stop();
    while (g_hanging > 0) std::this_thread::yield();
  }
  static void stop() {
    g_hangs = 0;
    g_hangs.notify_all();
  }
};

// A thread that nobody waits for has done with its device.
void all_are_closed() {
  Hangs::stop();
  eventually([] { return g_hanging == 0 && g_open == 0; });
}

// The device has no memory to share until the end of a test at the latest.
struct MemoryHangs {
  MemoryHangs() { g_memory_hangs = 1; }
  ~MemoryHangs() { stop(); }
  static void stop() {
    g_memory_hangs = 0;
    g_memory_hangs.notify_all();
  }
};

client::Welcome hello(const SharedService& shared, const std::string& device) {
  const RawConnection connection(shared);
  auto message = client::make_message<MessageType::kHello>();
  client::put_text(message.device, device);
  REQUIRE(connection.say(message));
  const auto answer = connection.next({MessageType::kWelcome});
  REQUIRE(!answer.empty());
  return client::fields_of<client::Welcome>(answer);
}

// A session that may share a lane arrives.
void arrive(const RawConnection& process) {
  REQUIRE(process.say(client::make_message<MessageType::kHello>()));
  REQUIRE(!process.next({MessageType::kWelcome}).empty());
  auto message = client::make_message<MessageType::kArrive>(1);
  message.session = 1;
  message.persistent_bytes = message.ephemeral_bytes = kMiB;
  message.flags = client::kMayShareLane;
  REQUIRE(process.say(message));
}

}  // namespace

TEST_CASE(
    "a device that hangs when it is opened keeps no other from being served, and is served once it opens") {
  const std::string late = hanging_device();
  const Hangs hangs;
  const SharedService shared([&](auto& options) {
    options.devices.push_back(late);
    options.open_patience_ns = 5'000'000'000;
  });
  CHECK(shared.service->devices().size() == 1);
  const auto runtime = SharedService::open();
  const auto session = open_session(*runtime, need("a", kMiB, kMiB));
  const auto iteration = session->begin(kLong);
  REQUIRE(iteration.ok());
  REQUIRE_OK((*iteration)->end());
  const client::Welcome refused = hello(shared, late);
  CHECK(refused.code == GPUSHARE_UNAVAILABLE);
  CHECK(client::text_of(refused.text).find("has not opened") != std::string::npos);
  Hangs::stop();
  eventually([&] { return hello(shared, late).code == GPUSHARE_OK; });
  CHECK(shared.status().devices.size() == 2);
  CHECK(shared.service->devices().size() == 1);
}

TEST_CASE("a process that names no device comes back to the first one, once it is open, and to no other") {
  const std::string first = hanging_device();
  SharedService shared([&](auto& options) {
    options.devices.insert(options.devices.begin(), first);
    options.open_patience_ns = 5'000'000'000;
  });
  while (hello(shared, first).code != GPUSHARE_OK) std::this_thread::yield();
  setenv("GPUSHARE_DAEMON_WAIT", "600", 1);
  const auto runtime = SharedService::open();
  setenv("GPUSHARE_DAEMON_WAIT", "0", 1);
  const auto session = open_session(*runtime, need("a", kMiB, kMiB));
  const auto devices_of_sessions = [&] {
    std::vector<std::string> devices;
    for (const auto& each : shared.status().sessions) devices.push_back(each.device);
    return devices;
  };
  const std::vector<std::string> before = devices_of_sessions();
  {
    const Hangs hangs;
    shared.service.reset();
    shared.start();
    while (g_hanging == 0) std::this_thread::yield();
    CHECK(hello(shared, "").code == GPUSHARE_UNAVAILABLE);
    CHECK(devices_of_sessions().empty());
  }
  const auto iteration = session->begin(kLong);
  REQUIRE(iteration.ok());
  REQUIRE_OK((*iteration)->end());
  CHECK(devices_of_sessions() == before);
  REQUIRE_OK(session->close());
  REQUIRE_OK(runtime->close());
}

TEST_CASE("a daemon none of whose devices opens says so, and does not start") {
  const std::string late = hanging_device();
  const Hangs hangs;
  char folder[] = "/tmp/gpushare-XXXXXX";
  REQUIRE(mkdtemp(folder) != nullptr);
  daemon::ServiceOptions options;
  options.socket = std::string(folder) + "/socket";
  options.devices = {late};
  options.open_patience_ns = 1;
  const auto started = daemon::Service::start(options);
  while (g_hanging == 0) std::this_thread::yield();
  CHECK(started.status().code() == GPUSHARE_UNAVAILABLE);
  CHECK(started.status().message().find("its driver hangs") != std::string::npos);
  std::filesystem::remove_all(folder);
  all_are_closed();
}

TEST_CASE(
    "a device that hangs when its lanes get memory: sessions have ephemeral memory of their own until it "
    "opens") {
  const std::string device = hanging_device();
  const Shared shared([&](auto& options) { options.devices = {device}; });
  const auto runtime = SharedService::open();
  const auto opened = [&](const char* name) { return runtime->open_session(need(name, 2 * kMiB, 8 * kMiB)); };
  {
    const Hangs hangs;
    base::Result<std::shared_ptr<executor::Session>> session = base::Status();
    std::thread opens([&] { session = opened("a"); });
    while (g_hanging == 0) std::this_thread::yield();
    CHECK(shared.status().devices[0].turns == 0);  // the daemon answers meanwhile
    opens.join();
    REQUIRE_OK(session.status());
    const auto second = opened("b");
    REQUIRE_OK(second.status());
    CHECK(shared.promised() == 20 * kMiB);
    CHECK_OK((*(*session)->begin(kLong))->end());
    CHECK_OK((*second)->close());
    CHECK_OK((*session)->close());
  }
  eventually([&] {
    const auto c = opened("c"), d = opened("d");
    REQUIRE_OK(c.status());
    REQUIRE_OK(d.status());
    const bool together = shared.promised() == 12 * kMiB;
    REQUIRE_OK((*d)->close());
    REQUIRE_OK((*c)->close());
    return together;
  });
  CHECK_OK(runtime->close());
}

TEST_CASE("nobody waits for a driver that hangs when it is asked what the daemon's own context has") {
  const std::string device = hanging_device();
  all_are_closed();  // those of the tests before
  g_context = GPUSHARE_NOT_READY;
  Shared shared([&](auto& options) { options.devices = {device}; });
  const RawConnection process(shared);
  arrive(process);
  REQUIRE(!process.next({MessageType::kReply}).empty());
  REQUIRE(g_open == 1);  // its lane has memory
  const Hangs hangs;
  while (g_hanging == 0) std::this_thread::yield();
  const auto counted = [&] { return shared.status().devices[0].context_bytes; };
  CHECK(counted() == 0);
  g_context = GPUSHARE_OK;
  SECTION("until it answers") {
    Hangs::stop();
    eventually([&] { return counted() == 3 * kMiB; });
  }
  SECTION("when the daemon ends") {
    shared.service.reset();
    CHECK(g_hanging == 1);
    CHECK(g_open == 0);
  }
  g_context = GPUSHARE_UNSUPPORTED;
}

TEST_CASE("a session that is to share no lane makes the daemon open no device") {
  const std::string device = hanging_device();
  all_are_closed();  // those of the tests before
  const Shared shared([&](auto& options) { options.devices = {device}; });
  const auto arrive_in_group = [](const RawConnection& process, uint64_t group, uint64_t group_memory_bytes) {
    REQUIRE(process.say(client::make_message<MessageType::kHello>()));
    REQUIRE(!process.next({MessageType::kWelcome}).empty());
    auto message = client::make_message<MessageType::kArrive>(1);
    message.session = 1;
    message.persistent_bytes = message.ephemeral_bytes = 2 * kMiB;
    message.flags = client::kMayShareLane | client::kOwnClaim;
    message.group = group;
    message.group_memory_bytes = group_memory_bytes;
    REQUIRE(process.say(message));
    const auto answer = process.next({MessageType::kReply});
    REQUIRE(!answer.empty());
    CHECK(client::fields_of<client::Reply>(answer).code == GPUSHARE_OK);
  };
  const RawConnection limited(shared), sharing(shared);
  arrive_in_group(limited, 7, 32 * kMiB);
  CHECK(g_open == 0);
  arrive_in_group(sharing, 0, 0);
  CHECK(g_open == 1);
}

TEST_CASE(
    "a process whose session arrives while the device is opened may close its connection, or end the "
    "daemon") {
  const std::string device = hanging_device();
  Shared shared([&](auto& options) { options.devices = {device}; });
  const Hangs hangs;
  RawConnection stays(shared);
  arrive(stays);
  {
    RawConnection goes(shared);
    arrive(goes);
  }
  while (g_hanging == 0) std::this_thread::yield();
  const auto answer = stays.next({MessageType::kReply});
  REQUIRE(!answer.empty());
  CHECK(client::fields_of<client::Reply>(answer).code == GPUSHARE_OK);
  eventually([&] { return shared.status().processes.size() == 2 && shared.status().sessions.size() == 2; });
  shared.service.reset();
  all_are_closed();
}

TEST_CASE("a daemon that a driver keeps in one call tells once at which device, and goes on if it answers") {
  const std::string device = hanging_device();
  all_are_closed();  // those of the tests before
  std::atomic<int> told{0};
  std::string at;
  const Shared shared([&](auto& options) {
    options.devices = {device};
    options.step_patience_ns = 5'000'000'000;
    options.on_hang = [&](const std::string& name) {
      at = name;
      ++told;
    };
  });
  const MemoryHangs hangs;
  const RawConnection process(shared);
  arrive(process);
  while (g_memory_hanging == 0) std::this_thread::yield();
  eventually([&] { return told == 1; });
  CHECK(at == device);
  MemoryHangs::stop();
  const auto answer = process.next({MessageType::kReply});
  REQUIRE(!answer.empty());
  CHECK(client::fields_of<client::Reply>(answer).code == GPUSHARE_OK);
  CHECK(told == 1);
}
