// Contexts of processes: promised as long as the process lives, in room that sessions make for them. The messages are said
// by hand; unit_lanes_cuda has contexts of the driver's stand-in.
// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/units.hpp"
#include "client/remote_authority.hpp"
#include "support/random.hpp"
#include "unit/daemon/raw_process.hpp"
#include "unit/daemon/service_sessions.hpp"

using namespace gpushare;
using namespace gpushare::test;
using client::MessageType;

namespace {

// The daemon's answer to the question.
int32_t claim_context(const RawProcess& process, uint64_t bytes) {
  REQUIRE(process.say(client::make_session_message(MessageType::kContext, 0, bytes, 9)));
  return client::fields_of<client::Reply>(process.answer()).code;
}

client::DeviceStatus device_of(const SharedService& shared) {
  return shared.status().devices[0];
}

// Another process with a context, and no session.
struct Other {
  Other(const SharedService& shared, uint64_t bytes) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
      const auto socket = client::connect_to(shared.options.socket);
      const auto hello = client::make_message<MessageType::kHello>();
      const auto context = client::make_session_message(MessageType::kContext, 0, bytes);
      const bool said = socket.ok() && client::send_message(socket->get(), client::bytes_of(hello)).ok() &&
                        client::send_message(socket->get(), client::bytes_of(context)).ok();
      (void)!write(ends[1], said ? "y" : "n", 1);
      for (;;) pause();
    }
    close(ends[1]);
    char said = 'n';
    REQUIRE(read(ends[0], &said, 1) == 1);
    close(ends[0]);
    CHECK(said == 'y');
  }
  ~Other() {
    kill(pid, SIGKILL);
    (void)waitpid(pid, nullptr, 0);
  }
  Other(const Other&) = delete;
  Other& operator=(const Other&) = delete;
  pid_t pid = 0;
};

}  // namespace

TEST_CASE(
    "a process's context is promised until the process is dead, by whatever connections, or says that it is "
    "gone") {
  const SharedService shared;
  RawProcess first(shared), second(shared);
  REQUIRE(first.hello() == GPUSHARE_OK);
  REQUIRE(second.hello() == GPUSHARE_OK);
  CHECK(claim_context(first, 8 * kMiB) == GPUSHARE_OK);
  CHECK(claim_context(second, 6 * kMiB) == GPUSHARE_OK);  // the same context of the driver
  CHECK(device_of(shared).promised_bytes == 8 * kMiB);
  CHECK(device_of(shared).context_bytes == 8 * kMiB);
  {
    const Other other(shared, 12 * kMiB);
    eventually([&] { return device_of(shared).promised_bytes == 20 * kMiB; });
    uint64_t sum = 0;
    for (const auto& process : shared.status().processes) sum += process.context_bytes;
    CHECK(sum == 26 * kMiB);
  }
  eventually([&] { return device_of(shared).promised_bytes == 8 * kMiB; });
  // The process lives: who closes a connection keeps the context.
  first.socket = {};
  second.socket = {};
  eventually([&] { return is_owing(shared); });
  CHECK(device_of(shared).promised_bytes == 8 * kMiB);
  // Its next connection has the context, and those before are forgotten.
  RawProcess third(shared);
  REQUIRE(third.hello() == GPUSHARE_OK);
  CHECK(shared.status().processes.size() == 1);
  CHECK(device_of(shared).promised_bytes == 8 * kMiB);
  third.tell(MessageType::kContext, 0, 3 * kMiB);
  CHECK(device_of(shared).promised_bytes == 3 * kMiB);
  // A process that tells its context anew has told that of its closed connections.
  RawProcess fourth(shared);
  REQUIRE(fourth.hello() == GPUSHARE_OK);
  third.socket = {};
  eventually([&] { return is_owing(shared); });
  fourth.tell(MessageType::kContext, 0, 2 * kMiB);
  CHECK(device_of(shared).promised_bytes == 2 * kMiB);
  CHECK(shared.status().processes.size() == 1);
  fourth.tell(MessageType::kContext, 0, 0);
  CHECK(device_of(shared).promised_bytes == 0);
}

TEST_CASE(
    "a context is refused where contexts leave no room for it, and never believed to be most of the device") {
  const SharedService shared;
  const Other other(shared, 12 * kMiB);
  eventually([&] { return device_of(shared).promised_bytes == 12 * kMiB; });
  RawProcess raw(shared);
  REQUIRE(raw.hello() == GPUSHARE_OK);
  REQUIRE_OK(client::set_service_capacity(shared.options.socket, "", 16 * kMiB));
  CHECK(claim_context(raw, 5 * kMiB) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(device_of(shared).promised_bytes == 12 * kMiB);
  CHECK(claim_context(raw, 4 * kMiB) == GPUSHARE_OK);
  // What has come is there, whoever is asked.
  raw.tell(MessageType::kContext, 0, UINT64_MAX);
  const auto device = device_of(shared);
  CHECK(device.promised_bytes == 28 * kMiB);  // of 64 MiB a quarter
  CHECK(device.effective_capacity_bytes == 28 * kMiB);
  CHECK(device.capacity_bytes == 16 * kMiB);
}

TEST_CASE("sessions make room for contexts, and one that cannot be beside its process's own is refused") {
  const SharedService shared;
  const auto runtime = SharedService::open();
  const auto session = open_session(*runtime, "session", 52 * kMiB, kMiB);
  void* const block = alloc(*session, 8 * kMiB);
  fill(*session, block, 8 * kMiB, 5);
  const uint64_t alone = device_of(shared).promised_bytes;
  RawProcess raw(shared);
  REQUIRE(raw.hello() == GPUSHARE_OK);
  raw.tell(MessageType::kContext, 0, 14 * kMiB);
  eventually([&] { return device_of(shared).promised_bytes == 14 * kMiB; });
  CHECK(session->info().state == executor::SessionState::kPagedOut);
  CHECK(device_of(shared).effective_capacity_bytes == 64 * kMiB);
  CHECK(raw.call(arrive(1, 51 * kMiB)) == GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(raw.call(arrive(1, 50 * kMiB)) == GPUSHARE_OK);
  raw.tell(MessageType::kLeave, 1);
  raw.tell(MessageType::kContext, 0, kMiB);  // code was unloaded
  const auto iteration = begin(*session);
  CHECK(all_are(block, 8 * kMiB, 5));
  REQUIRE_OK(iteration->end());
  CHECK(device_of(shared).promised_bytes == alone + kMiB);
  REQUIRE_OK(session->close());
  REQUIRE_OK(runtime->close());
}

TEST_CASE(
    "a context beside which a session that is there could never run is refused; one that comes all the same "
    "is named") {
  const SharedService shared;
  const auto runtime = SharedService::open();
  const auto session = open_session(*runtime, "large", 52 * kMiB, kMiB);
  const uint64_t needs = device_of(shared).promised_bytes;
  RawProcess raw(shared);
  REQUIRE(raw.hello() == GPUSHARE_OK);
  REQUIRE(raw.say(client::make_session_message(MessageType::kContext, 0, 14 * kMiB, 9)));
  const auto refused = client::fields_of<client::Reply>(raw.answer());
  CHECK(refused.code == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  INFO(client::text_of(refused.text));
  const std::string named = "session 'large' needs " + base::format_bytes(needs);
  CHECK(client::text_of(refused.text).find(named) != std::string::npos);
  CHECK(session->info().state == executor::SessionState::kResident);
  CHECK(claim_context(raw, 4 * kMiB) == GPUSHARE_OK);
  raw.tell(MessageType::kContext, 0, 14 * kMiB);
  base::Status ran;
  std::thread runs([&] {
    const auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    ran = iteration.ok() ? (*iteration)->end() : iteration.status();
  });
  eventually([&] {
    const auto now = shared.status();
    return now.sessions[0].waits_for.find("contexts of processes have 14.00 MiB") != std::string::npos;
  });
  raw.tell(MessageType::kContext, 0, kMiB);
  runs.join();
  CHECK_OK(ran);
  REQUIRE_OK(session->close());
  REQUIRE_OK(runtime->close());
}

TEST_CASE("whatever processes say of contexts, the books hold and others go on") {
  const SharedService shared;
  INFO("seed " << seed());
  Random random(seed());
  const auto runtime = SharedService::open();
  const auto session = open_session(*runtime, "bystander", 8 * kMiB, kMiB);
  void* const block = alloc(*session, 8 * kMiB);
  fill(*session, block, 8 * kMiB, 3);
  std::vector<std::unique_ptr<RawProcess>> raw(4);
  for (int i = 0; i < 2000; ++i) {
    std::unique_ptr<RawProcess>& process = raw[uniform(random, 0, 3)];
    if (process == nullptr) {
      process = std::make_unique<RawProcess>(shared);
      REQUIRE(process->hello() == GPUSHARE_OK);
    }
    const uint64_t bytes = uniform(random, 0, 3) == 0 ? random() : uniform(random, 0, 20 * kMiB);
    if (uniform(random, 0, 1) != 0)
      (void)claim_context(*process, bytes);
    else
      process->tell(MessageType::kContext, uniform(random, 0, 1), bytes);
    if (uniform(random, 0, 9) == 0) process.reset();
    if (uniform(random, 0, 19) == 0)
      REQUIRE_OK(client::set_service_capacity(shared.options.socket, "",
                                              uniform(random, 0, 1) * 32 * kMiB));  // 0: all
    if (i % 50 != 0) continue;
    const auto device = device_of(shared);
    CHECK(device.promised_bytes <= device.effective_capacity_bytes);
    CHECK(device.context_bytes <= 16 * kMiB);
    const auto iteration = begin(*session);
    CHECK(all_are(block, 8 * kMiB, 3));
    REQUIRE_OK(iteration->end());
  }
  REQUIRE_OK(session->close());
  REQUIRE_OK(runtime->close());
}

TEST_CASE("a daemon that is replaced hears of contexts before it promises their bytes") {
  SharedService shared;
  client::RemoteOptions options;
  options.socket = shared.options.socket;
  auto authority = client::RemoteAuthority::open(options);
  REQUIRE(authority.ok());
  std::atomic<int> news{0};
  (*authority)->set_on_change([&] { ++news; });
  REQUIRE_OK((*authority)->claim_context(8 * kMiB));
  CHECK(device_of(shared).promised_bytes == 8 * kMiB);
  shared.service.reset();
  shared.start();
  eventually([&] {
    (void)(*authority)->take_actions();
    return (*authority)->standing().ok() && device_of(shared).promised_bytes == 8 * kMiB;
  });
  (*authority)->stop();
}
