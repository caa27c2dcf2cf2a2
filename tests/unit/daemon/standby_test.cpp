// First layers that stay on the device between turns, and what turns teach; what fails after a turn was given, or
// while a model is read.
// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>

#include "daemon_fixture.hpp"
#include "device/registry.hpp"
#include "loader/file.hpp"

using namespace gpushare;
using namespace gpushare::test;
using daemon::bytes_of;

namespace {

// Three granules in the first layer, three in all others: nothing hides the first one's way.
const std::vector<size_t> kLayerSizes = {3 * kGranule, 1000, kGranule, kGranule / 2, kGranule};
constexpr uint64_t kRegion = 6 * kGranule;

void check_within(const daemon::DaemonStatus& status, uint64_t budget_bytes) {
  CHECK(status.standby_bytes <= budget_bytes);
  CHECK(status.resident_bytes + status.standby_bytes <= status.capacity_bytes);
  CHECK(status.device_total_bytes - status.device_free_bytes == status.resident_bytes + status.standby_bytes);
}

}  // namespace

TEST_CASE("first layers stay within the budget, and every turn sees its model's bytes") {
  // Room for one model and so many granules: both prefixes, one, or none.
  for (const uint64_t beside : {uint64_t{6}, uint64_t{3}, uint64_t{0}}) {
    for (const uint64_t budget : {uint64_t{6}, uint64_t{3}, uint64_t{0}}) {
      INFO(beside << " granules beside, budget " << budget);
      Daemon daemon(kRegion + beside * kGranule,
                    [&](auto& options) { options.standby_bytes = budget * kGranule; });
      std::vector<std::string> contents[2];
      std::unique_ptr<daemon::Worker> workers[2];
      for (int i = 0; i < 2; ++i)
        workers[i] = daemon.attach("w" + std::to_string(i), daemon.model(std::to_string(i) + ".safetensors",
                                                                         kLayerSizes, &contents[i]));
      uint32_t kept = 0;
      for (int round = 0; round < 4; ++round) {
        for (int i = 0; i < 2; ++i) {
          REQUIRE_OK(workers[i]->begin());
          kept = workers[i]->arrived_at_begin();
          CHECK(contents_of(*workers[i]) == contents[i]);
          const daemon::DaemonStatus status = daemon.status();
          check_within(status, budget * kGranule);
          REQUIRE_OK(workers[i]->end());
          if (round == 0) continue;
          const bool possible = beside >= 3 && budget >= 3;
          CHECK(kept >= (possible ? 1 : 0));  // more may have come by then
          CHECK(status.standby_bytes == (possible ? 3 * kGranule : 0));
        }
      }
      workers[0].reset();
      workers[1].reset();
      daemon.wait_for([](const auto& status) {
        return status.models.empty() && status.standby_bytes == 0 &&
               status.device_free_bytes == status.device_total_bytes;
      });
    }
  }
}

TEST_CASE("models that nobody uses leave the budget free; one that needs it takes it") {
  // Two fit whole; with a budget the second one's load drops the first one down to its first layers.
  Daemon daemon(2 * kRegion, [](auto& options) { options.standby_bytes = 3 * kGranule; });
  std::vector<std::string> contents;
  const std::string path_a = daemon.model("a.safetensors", kLayerSizes, &contents);
  const std::string path_b = daemon.model("b.safetensors", kLayerSizes);
  const std::string large = daemon.model("large.safetensors", {11 * kGranule});
  const auto a = daemon.attach("a", path_a);
  const auto b = daemon.attach("b", path_b);
  const auto c = daemon.attach("c", large);
  for (daemon::Worker* worker : {a.get(), b.get()}) {
    REQUIRE_OK(worker->begin());
    REQUIRE_OK(worker->wait_layers(0, 5));
    REQUIRE_OK(worker->end());
  }
  CHECK(daemon.status().standby_bytes == 3 * kGranule);
  check_within(daemon.status(), 3 * kGranule);
  REQUIRE_OK(c->begin());  // 11 of 12 granules
  check_within(daemon.status(), 3 * kGranule);
  CHECK(daemon.status().standby_bytes == 0);
  REQUIRE_OK(c->wait_layers(0, 1));
  REQUIRE_OK(c->end());
  REQUIRE_OK(a->begin());
  CHECK(contents_of(*a) == contents);
  REQUIRE_OK(a->end());
}

TEST_CASE("scratch memory goes before first layers") {
  Daemon daemon(kRegion + 4 * kGranule, [](auto& options) { options.standby_bytes = 4 * kGranule; });
  std::vector<std::string> contents;
  const auto a = daemon.attach("a", daemon.model("a.safetensors", kLayerSizes, &contents));
  const auto b = daemon.attach("b", daemon.model("b.safetensors", kLayerSizes), 2 * kGranule);
  for (int round = 0; round < 3; ++round) {
    REQUIRE_OK(a->begin());
    CHECK(contents_of(*a) == contents);
    REQUIRE_OK(a->end());
    REQUIRE_OK(b->begin());
    REQUIRE_OK(b->wait_layers(0, 5));
    const daemon::DaemonStatus status = daemon.status();
    check_within(status, 4 * kGranule);
    CHECK(status.standby_bytes == 0);  // 2 of the 4 are scratch memory, a prefix has 3
    REQUIRE_OK(b->end());
  }
}

TEST_CASE("a worker that kept its mapping of first layers sees its own model and nothing else") {
  Daemon daemon(kRegion + 6 * kGranule, [](auto& options) { options.standby_bytes = 6 * kGranule; });
  std::vector<std::string> contents_a, contents_b;
  const std::string path_a = daemon.model("a.safetensors", kLayerSizes, &contents_a);
  auto socket = daemon::connect_to(daemon.options.socket);
  REQUIRE(socket.ok());
  std::vector<daemon::Descriptor> descriptors;
  const auto ask = [&](std::span<const std::byte> message) {
    descriptors.clear();
    REQUIRE_OK(daemon::send_message(socket->get(), message));
    std::array<std::byte, sizeof(daemon::Reply) + 1> buffer;
    REQUIRE_OK(daemon::wait_readable(socket->get(), base::Deadline::after(30'000'000'000)));
    const auto reply = daemon::parse_reply(*daemon::receive_message(socket->get(), buffer, &descriptors));
    REQUIRE(reply.ok());
    REQUIRE(reply->code == GPUSHARE_OK);
    return *reply;
  };
  (void)ask(bytes_of(daemon::make_attach(1, "raw", path_a, 0, 0)));
  const daemon::Reply turn = ask(bytes_of(daemon::make_begin(2, UINT64_MAX)));
  CHECK(turn.prefix_bytes == 3 * kGranule);
  REQUIRE(descriptors.size() == 2);
  for (const daemon::Descriptor& part : descriptors) {
    CHECK(mmap(nullptr, kGranule, PROT_READ | PROT_WRITE, MAP_SHARED, part.get(), 0) == MAP_FAILED);
    CHECK(ftruncate(part.get(), 0) != 0);
  }
  const auto* kept = static_cast<const char*>(
      mmap(nullptr, turn.prefix_bytes, PROT_READ, MAP_SHARED, descriptors[0].get(), 0));
  REQUIRE(kept != MAP_FAILED);
  daemon.wait_for([](const auto& status) { return status.models[0].state == "resident"; });
  (void)ask(bytes_of(daemon::make_end(3, UINT64_MAX)));  // an iteration longer than the turn: not believed
  CHECK(daemon.status().workers[0].iteration_ns == 0);
  const auto b = daemon.attach("b", daemon.model("b.safetensors", kLayerSizes, &contents_b));
  for (int round = 0; round < 3; ++round) {
    REQUIRE_OK(b->begin());
    CHECK(contents_of(*b) == contents_b);
    REQUIRE_OK(b->end());
    CHECK(std::string(kept, contents_a[0].size()) == contents_a[0]);
    (void)ask(bytes_of(daemon::make_begin(4, UINT64_MAX)));
    (void)ask(bytes_of(daemon::make_end(5)));
  }
  munmap(const_cast<char*>(kept), turn.prefix_bytes);
}

TEST_CASE("turns teach how long an iteration takes") {
  Daemon daemon;
  const std::string path = daemon.model("m.safetensors", kLayerSizes);
  const auto worker = daemon.attach("one", path);
  const auto iteration_ns = [&] { return daemon.status().workers.at(0).iteration_ns; };
  const auto iterate = [&] {
    for (uint32_t layer = 0; layer < 5; ++layer) REQUIRE_OK(worker->wait_layers(layer, layer + 1));
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  };
  REQUIRE_OK(worker->begin());
  REQUIRE_OK(worker->wait_layers(1, 5));  // layer 0 is not asked for: no iteration
  REQUIRE_OK(worker->end());
  CHECK(iteration_ns() == 0);
  REQUIRE_OK(worker->begin());
  iterate();
  iterate();
  REQUIRE_OK(worker->end());
  CHECK(iteration_ns() >= 3'000'000);
  // What it says first is a start, too.
  daemon::WorkerOptions options = daemon.worker_options("two", path);
  options.execute_ns = 1'000'000'000;
  const auto other = *daemon::Worker::attach(options);
  CHECK(daemon.status().workers.at(1).iteration_ns == 1'000'000'000);
  REQUIRE_OK(other->begin());
  for (int i = 0; i < 2; ++i) REQUIRE_OK(other->wait_layers(0, 5));
  REQUIRE_OK(other->end());
  CHECK(daemon.status().workers.at(1).iteration_ns >= 750'000'000);
}

// ---- what fails after a turn was given: events that tell of a failed copy ---------------------------------------

namespace {

std::atomic<bool> g_copies_fail{false};
std::atomic<int> g_creates_to_fail{0};

void register_breaking_host() {
  static const bool done = [] {
    static const gpushare_backend_ops* host = device::find_backend("host");
    static gpushare_backend_ops ops = *host;
    ops.name = "breaking_host";
    ops.event_query = [](gpushare_backend_event* event) {
      return g_copies_fail ? int32_t{GPUSHARE_IO_ERROR} : host->event_query(event);
    };
    ops.phys_create_shared = [](gpushare_backend_device* device, uint64_t bytes,
                                gpushare_backend_memory** out) {
      if (g_creates_to_fail.load() > 0 && g_creates_to_fail.fetch_sub(1) > 0)
        return int32_t{GPUSHARE_DEVICE_OUT_OF_MEMORY};
      return host->phys_create_shared(device, bytes, out);
    };
    return device::register_backend(&ops).ok();
  }();
  REQUIRE(done);
}

}  // namespace

TEST_CASE("a load that fails after the grant fails its turn's waits; the next turn loads anew") {
  register_breaking_host();
  for (const uint64_t budget : {uint64_t{0}, 3 * kGranule}) {
    Daemon daemon(kRegion + 3 * kGranule, [&](auto& options) {
      options.device = "breaking_host?total_bytes=67108864&granularity=65536&copy_gbps=0.004";
      options.standby_bytes = budget;
    });
    const uint64_t free_bytes = daemon.status().device_free_bytes;
    std::vector<std::string> contents[2];
    const auto a = daemon.attach("a", daemon.model("a.safetensors", kLayerSizes, &contents[0]));
    auto b = daemon.attach("b", daemon.model("b.safetensors", kLayerSizes, &contents[1]));
    for (int round = 0; round < 3; ++round) {
      REQUIRE_OK(b->begin());
      CHECK(contents_of(*b) == contents[1]);
      REQUIRE_OK(b->end());
      g_copies_fail = true;
      REQUIRE_OK(a->begin());  // granted, the copies are under way
      daemon.wait_for([](const auto& status) {
        return std::any_of(status.models.begin(), status.models.end(),
                           [](const auto& model) { return model.state == "failed"; });
      });
      g_copies_fail = false;
      const base::Status waited = a->wait_layers(4, 5);
      INFO(waited.to_string());
      if (!waited.ok()) {  // unless all had arrived before the daemon looked
        CHECK(waited.code() == GPUSHARE_IO_ERROR);
        CHECK(waited.message().find("a.safetensors") != std::string::npos);
      }
      REQUIRE_OK(a->end());
      REQUIRE_OK(a->begin());
      CHECK(contents_of(*a) == contents[0]);
      REQUIRE_OK(a->end());
      check_within(daemon.status(), budget);
    }
    b.reset();
    daemon.wait_for([&](const auto& status) {
      return status.workers.size() == 1 && status.device_free_bytes == free_bytes - kRegion;
    });
  }
}

TEST_CASE("a device without room drops first layers before it fails a turn") {
  register_breaking_host();
  Daemon daemon(kRegion + 6 * kGranule, [&](auto& options) {
    options.device = "breaking_host?total_bytes=67108864&granularity=65536";
    options.standby_bytes = 6 * kGranule;
  });
  std::vector<std::string> contents[2];
  const auto a = daemon.attach("a", daemon.model("a.safetensors", kLayerSizes, &contents[0]));
  const auto b = daemon.attach("b", daemon.model("b.safetensors", kLayerSizes, &contents[1]));
  for (daemon::Worker* worker : {a.get(), b.get(), a.get()}) {
    REQUIRE_OK(worker->begin());
    REQUIRE_OK(worker->wait_layers(0, 5));
    REQUIRE_OK(worker->end());
  }
  CHECK(daemon.status().standby_bytes == 3 * kGranule);
  g_creates_to_fail = 1;
  REQUIRE_OK(b->begin());
  CHECK(daemon.status().standby_bytes == 0);
  CHECK(contents_of(*b) == contents[1]);
  REQUIRE_OK(b->end());
  g_creates_to_fail = 2;  // also without them: told to the one that asked
  const base::Status refused = a->begin();
  CHECK(refused.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  g_creates_to_fail = 0;
  REQUIRE_OK(a->begin());
  CHECK(contents_of(*a) == contents[0]);
  REQUIRE_OK(a->end());
}

// ---- what can happen to a file while the daemon reads it --------------------------------------------------------

namespace {

std::atomic<int> g_reads{0};
std::string g_path;

}  // namespace

TEST_CASE("short reads and interruptions are nothing; disk errors and files that change are told") {
  Daemon daemon;
  std::vector<std::string> contents;
  const std::string path = daemon.model("m.safetensors", {1000, 70'000}, &contents);
  g_path = path;
  const auto attach_with = [&](loader::ReadFunction function) {
    g_reads = 0;
    loader::set_read_function(function);
    auto attached = daemon::Worker::attach(daemon.worker_options("w", path));
    // The reader is idle when it has answered.
    loader::set_read_function(nullptr);
    return attached;
  };
  const auto eio = attach_with([](int, void*, size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  });
  CHECK(eio.status().code() == GPUSHARE_IO_ERROR);
  CHECK(eio.status().message().find("m.safetensors") != std::string::npos);
  const auto late_eio = attach_with([](int file, void* out, size_t bytes, off_t offset) -> ssize_t {
    errno = EIO;
    return ++g_reads > 3 ? -1 : pread(file, out, bytes, offset);
  });
  CHECK(late_eio.status().code() == GPUSHARE_IO_ERROR);
  // Replaced by another file of the same size while it is read.
  const auto replaced = attach_with([](int file, void* out, size_t bytes, off_t offset) -> ssize_t {
    if (++g_reads == 5) {  // the header is read twice, in two reads each
      std::filesystem::copy_file(g_path, g_path + ".new");
      std::filesystem::rename(g_path + ".new", g_path);
    }
    return pread(file, out, bytes, offset);
  });
  CHECK(replaced.status().code() == GPUSHARE_IO_ERROR);
  CHECK(replaced.status().message().find("replaced") != std::string::npos);
  const auto cut = attach_with([](int file, void* out, size_t bytes, off_t offset) -> ssize_t {
    return ++g_reads > 3 ? 0 : pread(file, out, bytes, offset);
  });
  CHECK(cut.status().code() == GPUSHARE_MALFORMED_INPUT);
  daemon.wait_for([](const auto& status) { return status.workers.empty(); });
  const auto fine = attach_with([](int file, void* out, size_t bytes, off_t offset) -> ssize_t {
    errno = EINTR;
    return ++g_reads % 3 == 0 ? -1 : pread(file, out, std::min<size_t>(bytes, 997), offset);
  });
  REQUIRE(fine.ok());
  REQUIRE_OK((*fine)->begin());
  CHECK(contents_of(**fine) == contents);
  REQUIRE_OK((*fine)->end());
}
