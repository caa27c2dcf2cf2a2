// Workers that break the protocol, lie, or do not read; and a device that fails. The daemon goes on.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>

#include "daemon_fixture.hpp"
#include "device/registry.hpp"
#include "support/bytes.hpp"

using namespace gpushare;
using namespace gpushare::test;
using daemon::bytes_of;

namespace {

// A connection that says what it likes.
struct Raw {
  explicit Raw(const Daemon& daemon) {
    auto connected = daemon::connect_to(daemon.options.socket);
    REQUIRE(connected.ok());
    socket = std::move(*connected);
  }
  void send(std::span<const std::byte> message, std::span<const int> descriptors = {}) {
    REQUIRE_OK(daemon::send_message(socket.get(), message, descriptors));
  }
  // The next reply's code; -1 once the daemon has closed the connection.
  int32_t answer(std::vector<daemon::Descriptor>* out_descriptors = nullptr) {
    std::array<std::byte, sizeof(daemon::Reply) + 1> buffer;
    for (;;) {
      const auto message = daemon::receive_message(socket.get(), buffer, out_descriptors);
      if (message.status().code() == GPUSHARE_NOT_READY) {
        REQUIRE_OK(daemon::wait_readable(socket.get(), base::Deadline::after(30'000'000'000)));
        continue;
      }
      if (!message.ok()) return -1;
      const auto reply = daemon::parse_reply(*message);
      REQUIRE(reply.ok());
      last = *reply;
      return reply->code;
    }
  }
  daemon::Descriptor socket;
  daemon::Reply last;
};

void check_serves(Daemon& daemon, const std::string& path, const std::vector<std::string>& contents) {
  const auto worker = daemon.attach("check", path);
  REQUIRE_OK(worker->begin(30'000'000'000));
  CHECK(contents_of(*worker) == contents);
  REQUIRE_OK(worker->end());
}

}  // namespace

TEST_CASE("messages that are none close their connection and nothing else") {
  Daemon daemon;
  std::vector<std::string> contents;
  const std::string path = daemon.model("m.safetensors", {1000, 2000}, &contents);
  const daemon::EndRequest request = daemon::make_end(5);
  const std::vector<std::byte> good(bytes_of(request).begin(), bytes_of(request).end());
  {
    Raw raw(daemon);
    raw.send(std::span(good).first(1));
    CHECK(raw.answer() == GPUSHARE_MALFORMED_INPUT);
    CHECK(raw.answer() == -1);
  }
  {
    Raw raw(daemon);
    std::vector<std::byte> huge(100'000, std::byte{0x7f});
    raw.send(huge);
    CHECK(raw.answer() == GPUSHARE_MALFORMED_INPUT);
    CHECK(raw.answer() == -1);
  }
  {
    Raw raw(daemon);
    auto newer = good;
    newer[offsetof(daemon::Header, version)] = std::byte{9};
    raw.send(newer);
    CHECK(raw.answer() == GPUSHARE_UNSUPPORTED);
    CHECK(raw.last.header.sequence == 5);
    CHECK(raw.answer() == -1);
  }
  {
    // Descriptors that nobody asked for are closed: many of them use up nothing.
    Raw raw(daemon);
    int ends[2];
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    daemon::Descriptor read_end(ends[0]);
    {
      const daemon::Descriptor write_end(ends[1]);
      const int sent[] = {write_end.get()};
      raw.send(good, sent);
      CHECK(raw.answer() == GPUSHARE_INVALID_STATE);
    }
    char byte = 0;
    CHECK(read(read_end.get(), &byte, 1) == 0);  // the end: no copy of the write end is left
  }
  daemon.wait_for([](const auto& status) { return status.refused == 3; });
  check_serves(daemon, path, contents);
}

TEST_CASE("requests out of order are refused") {
  Daemon daemon;
  std::vector<std::string> contents;
  const std::string path = daemon.model("m.safetensors", {1000, 2000}, &contents);
  Raw raw(daemon);
  raw.send(bytes_of(daemon::make_begin(1, 0)));
  CHECK(raw.answer() == GPUSHARE_INVALID_STATE);
  raw.send(bytes_of(daemon::make_end(2)));
  CHECK(raw.answer() == GPUSHARE_INVALID_STATE);
  raw.send(bytes_of(daemon::make_attach(3, "raw", "relative", 0, 0)));
  CHECK(raw.answer() == GPUSHARE_INVALID_ARGUMENT);
  raw.send(bytes_of(daemon::make_attach(4, "raw", path, 0, 0)));
  std::vector<daemon::Descriptor> descriptors;
  CHECK(raw.answer(&descriptors) == GPUSHARE_OK);
  CHECK(descriptors.size() == 2);
  raw.send(bytes_of(daemon::make_attach(5, "raw", path, 0, 0)));
  CHECK(raw.answer() == GPUSHARE_INVALID_STATE);
  raw.send(bytes_of(daemon::make_begin(6, UINT64_MAX)));
  CHECK(raw.answer() == GPUSHARE_OK);
  raw.send(bytes_of(daemon::make_begin(7, UINT64_MAX)));
  CHECK(raw.answer() == GPUSHARE_INVALID_STATE);
  // A second request before the first one's reply ends the connection, and with it the turn.
  Raw waiting(daemon);
  waiting.send(bytes_of(daemon::make_attach(1, "waiting", path, 0, 0)));
  CHECK(waiting.answer() == GPUSHARE_OK);
  waiting.send(bytes_of(daemon::make_begin(2, UINT64_MAX)));
  waiting.send(bytes_of(daemon::make_begin(3, UINT64_MAX)));
  CHECK(waiting.answer() == GPUSHARE_INVALID_STATE);
  CHECK(waiting.answer() == -1);
  raw.socket = {};
  check_serves(daemon, path, contents);
}

TEST_CASE("a worker that does not read its replies is left") {
  Daemon daemon;
  std::vector<std::string> contents;
  const std::string path = daemon.model("m.safetensors", {1000, 2000}, &contents);
  Raw raw(daemon);
  // Until the daemon's side is full it answers; then it closes, and this side learns of it.
  for (uint32_t i = 0; i < 1'000'000; ++i) {
    const base::Status sent = daemon::send_message(raw.socket.get(), bytes_of(daemon::make_end(i)));
    if (sent.code() == GPUSHARE_UNAVAILABLE) break;
    if (sent.code() == GPUSHARE_QUEUE_FULL) std::this_thread::yield();
    REQUIRE(i < 999'999);
  }
  check_serves(daemon, path, contents);
}

TEST_CASE("what a worker gets cannot be turned against the daemon or other workers") {
  Daemon daemon;
  std::vector<std::string> contents;
  const std::string path = daemon.model("m.safetensors", {1000, 70'000}, &contents);
  Raw raw(daemon);
  raw.send(bytes_of(daemon::make_attach(1, "raw", path, 0, 100)));
  std::vector<daemon::Descriptor> attached, granted;
  CHECK(raw.answer(&attached) == GPUSHARE_OK);
  raw.send(bytes_of(daemon::make_begin(2, UINT64_MAX)));
  CHECK(raw.answer(&granted) == GPUSHARE_OK);
  REQUIRE(attached.size() == 2);
  REQUIRE(granted.size() == 2);
  // No file may shrink or grow; the table and the model may not be written.
  for (const auto* files : {&attached, &granted}) {
    for (const daemon::Descriptor& file : *files) {
      CHECK(ftruncate(file.get(), 0) != 0);
      CHECK(ftruncate(file.get(), 1 << 30) != 0);
    }
  }
  CHECK(mmap(nullptr, kGranule, PROT_READ | PROT_WRITE, MAP_SHARED, granted[0].get(), 0) == MAP_FAILED);
  CHECK(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, attached[1].get(), 0) == MAP_FAILED);
  CHECK(write(granted[0].get(), "x", 1) < 0);
  CHECK(fallocate(granted[0].get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) != 0);
  // The board is its own: whatever it writes there, the daemon goes on.
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, attached[0].get(), 0);
  REQUIRE(page != MAP_FAILED);
  std::memset(page, 0xff, 4096);
  munmap(page, 4096);
  // The region holds this model and zeros behind it, nothing else.
  const auto* region = static_cast<const char*>(
      mmap(nullptr, raw.last.region_bytes, PROT_READ, MAP_SHARED, granted[0].get(), 0));
  REQUIRE(region != MAP_FAILED);
  raw.send(bytes_of(daemon::make_end(3)));
  CHECK(raw.answer() == GPUSHARE_OK);
  check_serves(daemon, path, contents);
  CHECK(test::all_are(region + raw.last.image_bytes, raw.last.region_bytes - raw.last.image_bytes, 0));
  munmap(const_cast<char*>(region), raw.last.region_bytes);
}

TEST_CASE("an old mapping never shows another worker's model") {
  // Room for one model: the second worker's load drops the first one's region while it is still mapped.
  Daemon daemon(2 * kGranule);
  std::vector<std::string> contents_a, contents_b;
  const std::string path_a = daemon.model("a.safetensors", {100'000}, &contents_a);
  const std::string path_b = daemon.model("b.safetensors", {100'000}, &contents_b);
  Raw raw(daemon);
  raw.send(bytes_of(daemon::make_attach(1, "raw", path_a, 0, 0)));
  CHECK(raw.answer() == GPUSHARE_OK);
  raw.send(bytes_of(daemon::make_begin(2, UINT64_MAX)));
  std::vector<daemon::Descriptor> granted;
  CHECK(raw.answer(&granted) == GPUSHARE_OK);
  const auto* region =
      static_cast<const char*>(mmap(nullptr, 2 * kGranule, PROT_READ, MAP_SHARED, granted[0].get(), 0));
  daemon.wait_for([](const auto& status) { return status.models[0].state == "resident"; });
  raw.send(bytes_of(daemon::make_end(3)));
  CHECK(raw.answer() == GPUSHARE_OK);
  check_serves(daemon, path_b, contents_b);
  CHECK(daemon.status().drops == 1);
  CHECK(std::memcmp(region, contents_a[0].data(), contents_a[0].size()) == 0);
  munmap(const_cast<char*>(region), 2 * kGranule);
}

TEST_CASE("other users are refused") {
  if (geteuid() != 0) return;  // only root can become somebody else
  Daemon daemon;
  const auto try_as_nobody = [&]() -> int {
    const pid_t child = fork();
    if (child == 0) {
      if (setgid(65534) != 0 || setuid(65534) != 0) _exit(100);
      const auto connected = daemon::connect_to(daemon.options.socket);
      if (!connected.ok()) _exit(connected.status().code() == GPUSHARE_UNAVAILABLE ? 1 : 2);
      std::array<std::byte, sizeof(daemon::Reply) + 1> buffer;
      (void)daemon::wait_readable(connected->get(), base::Deadline::after(30'000'000'000));
      const auto message = daemon::receive_message(connected->get(), buffer);
      const auto reply =
          message.ok() ? daemon::parse_reply(*message) : base::Result<daemon::Reply>(message.status());
      _exit(reply.ok() && reply->code == GPUSHARE_UNAVAILABLE ? 3 : 4);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
  };
  chmod(std::filesystem::path(daemon.options.socket).parent_path().c_str(), 0755);
  CHECK(try_as_nobody() == 1);  // by the socket's mode
  REQUIRE(chmod(daemon.options.socket.c_str(), 0666) == 0);
  CHECK(try_as_nobody() == 3);  // by its credentials, whatever the mode
  CHECK(daemon.status().refused == 1);
}

// ---- a device that fails: the host's ops with some of them failing on demand -----------------------------------

namespace {

std::atomic<int> g_create_fails{0}, g_map_fails{0}, g_export_fails{0}, g_copy_fails{0};
bool takes(std::atomic<int>& count) {
  return count.load() > 0 && count.fetch_sub(1) == 1;  // the count-th call fails
}

void register_failing_host() {
  static const bool done = [] {
    static const gpushare_backend_ops* host = device::find_backend("host");
    static gpushare_backend_ops ops = *host;
    ops.name = "failing_host";
    ops.phys_create_shared = [](gpushare_backend_device* device, uint64_t bytes,
                                gpushare_backend_memory** out) {
      return takes(g_create_fails) ? GPUSHARE_DEVICE_OUT_OF_MEMORY
                                   : host->phys_create_shared(device, bytes, out);
    };
    ops.va_map = [](gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes,
                    gpushare_backend_memory* memory, uint64_t offset) {
      return takes(g_map_fails) ? GPUSHARE_DEVICE_OUT_OF_MEMORY
                                : host->va_map(device, address, bytes, memory, offset);
    };
    ops.phys_export = [](gpushare_backend_device* device, gpushare_backend_memory* memory, uint32_t access,
                         int32_t* out) {
      return takes(g_export_fails) ? GPUSHARE_IO_ERROR : host->phys_export(device, memory, access, out);
    };
    ops.copy_async = [](gpushare_backend_stream* stream, uint64_t to, uint64_t from, uint64_t bytes,
                        uint32_t kind) {
      return takes(g_copy_fails) ? GPUSHARE_UNKNOWN : host->copy_async(stream, to, from, bytes, kind);
    };
    return device::register_backend(&ops).ok();
  }();
  REQUIRE(done);
}

}  // namespace

TEST_CASE("a failing device fails the turn that asked, and the next one may succeed") {
  register_failing_host();
  Daemon daemon(16 * kGranule, [](auto& options) {
    options.device = "failing_host?total_bytes=67108864&granularity=65536";
  });
  const uint64_t free_bytes = daemon.status().device_free_bytes;
  std::vector<std::string> contents;
  const std::string path = daemon.model("m.safetensors", {1000, 2000, 3000, 100'000}, &contents);
  const auto bystander = daemon.attach("bystander", path);
  const auto worker = daemon.attach("one", path, 1000);
  const auto fails = [&](std::atomic<int>& fault, int at_call, int32_t code) {
    fault = at_call;
    const base::Status begun = worker->begin(30'000'000'000);
    INFO(begun.to_string());
    CHECK(begun.code() == code);
    CHECK_FALSE(worker->in_turn());
    fault = 0;
  };
  fails(g_create_fails, 1, GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(daemon.status().resident_bytes == 0);
  CHECK(daemon.status().device_free_bytes == free_bytes);
  fails(g_map_fails, 1, GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(daemon.status().device_free_bytes == free_bytes);
  fails(g_copy_fails, 1, GPUSHARE_UNKNOWN);
  CHECK(daemon.status().device_free_bytes == free_bytes);
  fails(g_export_fails, 1, GPUSHARE_IO_ERROR);  // the region is loading by then and stays
  daemon.wait_for([](const auto& status) { return status.models[0].state == "resident"; });
  fails(g_create_fails, 1, GPUSHARE_DEVICE_OUT_OF_MEMORY);  // scratch memory
  fails(g_export_fails, 2, GPUSHARE_IO_ERROR);              // scratch memory
  CHECK(daemon.status().resident_bytes == 2 * kGranule);
  fails(g_map_fails, 1, GPUSHARE_DEVICE_OUT_OF_MEMORY);  // in the worker: the turn goes back
  daemon.wait_for([](const auto& status) { return status.resident_bytes == 2 * kGranule; });
  REQUIRE_OK(bystander->begin());
  CHECK(contents_of(*bystander) == contents);
  REQUIRE_OK(bystander->end());
  REQUIRE_OK(worker->begin());
  CHECK(contents_of(*worker) == contents);
  REQUIRE_OK(worker->end());
}
