// The daemon with workers of this process: turns, what stays on the device, and what is refused.
// SPDX-License-Identifier: Apache-2.0
#include <sys/epoll.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "daemon_fixture.hpp"
#include "support/bytes.hpp"

using namespace gpushare;
using namespace gpushare::test;

namespace {

const std::vector<size_t> kSizes = {100, 5000, 0, 70'000, 1, 300'000, 4096, 33};  // 6 granules

uint64_t granules(const std::vector<size_t>& sizes) {
  uint64_t bytes = 0;
  for (const size_t size : sizes) bytes = (bytes + 255) / 256 * 256 + size;
  return (bytes + kGranule - 1) / kGranule;
}

}  // namespace

TEST_CASE("a worker finds its model's bytes") {
  Daemon daemon;
  std::vector<std::string> contents;
  const std::string path = daemon.model("m.safetensors", kSizes, &contents);
  const auto worker = daemon.attach("one", path);
  REQUIRE(worker->layers().size() == kSizes.size());
  CHECK(worker->layers()[3].name == "t3");
  CHECK(worker->layers()[3].bytes == 70'000);
  for (int turn = 0; turn < 3; ++turn) {
    REQUIRE_OK(worker->begin());
    CHECK(worker->in_turn());
    CHECK((turn == 0 || worker->arrived_at_begin() == kSizes.size()));
    CHECK(contents_of(*worker) == contents);
    REQUIRE_OK(worker->end());
  }
  // The daemon looks at a load some milliseconds after its last layer.
  daemon.wait_for([](const auto& now) { return now.models[0].state == "resident"; });
  const daemon::DaemonStatus status = daemon.status();
  CHECK(status.loads == 1);  // it had room to stay
  CHECK(status.turns == 3);
  REQUIRE(status.workers.size() == 1);
  CHECK(status.workers[0].name == "one");
  CHECK(status.workers[0].state == "attached");
  REQUIRE(status.models.size() == 1);
  CHECK(status.resident_bytes == granules(kSizes) * kGranule);
}

TEST_CASE("two models that fit stay; two that do not take turns on the device") {
  for (const bool fits : {true, false}) {
    const uint64_t need = granules(kSizes) * kGranule;
    Daemon daemon(fits ? 2 * need : 2 * need - kGranule);
    std::vector<std::string> contents_a, contents_b;
    const std::string path_a = daemon.model("a.safetensors", kSizes, &contents_a);
    const std::string path_b = daemon.model("b.safetensors", kSizes, &contents_b);
    const auto a = daemon.attach("a", path_a);
    const auto b = daemon.attach("b", path_b);
    for (int round = 0; round < 4; ++round) {
      for (const bool first : {true, false}) {
        daemon::Worker& worker = first ? *a : *b;
        REQUIRE_OK(worker.begin());
        CHECK(contents_of(worker) == (first ? contents_a : contents_b));
        REQUIRE_OK(worker.end());
      }
    }
    const daemon::DaemonStatus status = daemon.status();
    CHECK(status.loads == (fits ? 2 : 8));
    CHECK(status.drops == (fits ? 0 : 7));
    CHECK(status.resident_bytes == (fits ? 2 : 1) * need);
    CHECK(status.device_total_bytes - status.device_free_bytes == status.resident_bytes);
  }
}

TEST_CASE("workers of one model share its copy") {
  Daemon daemon;
  std::vector<std::string> contents;
  const std::string path = daemon.model("m.safetensors", kSizes, &contents);
  auto a = daemon.attach("a", path);
  const auto b = daemon.attach("b", path);
  for (daemon::Worker* worker : {a.get(), b.get()}) {
    REQUIRE_OK(worker->begin());
    CHECK(contents_of(*worker) == contents);
    REQUIRE_OK(worker->end());
  }
  CHECK(daemon.status().loads == 1);
  a.reset();
  daemon.wait_for([](const auto& status) { return status.workers.size() == 1; });
  REQUIRE_OK(b->begin());
  CHECK(b->arrived_at_begin() == kSizes.size());
  REQUIRE_OK(b->end());
}

TEST_CASE("when all have left nothing is held") {
  Daemon daemon;
  const uint64_t free_bytes = daemon.status().device_free_bytes;
  const std::string path = daemon.model("m.safetensors", kSizes);
  {
    const auto worker = daemon.attach("one", path, 1000);
    REQUIRE_OK(worker->begin());
    CHECK(daemon.status().device_free_bytes == free_bytes - (granules(kSizes) + 1) * kGranule);
  }
  daemon.wait_for([&](const auto& status) {
    return status.workers.empty() && status.models.empty() && status.resident_bytes == 0 &&
           status.device_free_bytes == free_bytes;
  });
}

TEST_CASE("turns go in the order in which they were asked for and never overlap") {
  Daemon daemon;
  const std::string path = daemon.model("m.safetensors", kSizes);
  constexpr int kWorkers = 4, kTurns = 25;
  std::atomic<int> inside{0}, most{0};
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<daemon::Worker>> workers;
  for (int i = 0; i < kWorkers; ++i) workers.push_back(daemon.attach("w" + std::to_string(i), path));
  std::atomic<int> failures{0};
  for (int i = 0; i < kWorkers; ++i) {
    threads.emplace_back([&, i] {
      for (int turn = 0; turn < kTurns; ++turn) {
        if (!workers[static_cast<size_t>(i)]->begin().ok()) ++failures;
        most = std::max(most.load(), ++inside);
        --inside;
        if (!workers[static_cast<size_t>(i)]->end().ok()) ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  CHECK(most == 1);
  CHECK(daemon.status().turns == kWorkers * kTurns);
}

TEST_CASE("a worker is told when its turn is wanted, and a wait for the turn has an end") {
  Daemon daemon;
  const std::string path = daemon.model("m.safetensors", kSizes);
  const auto a = daemon.attach("a", path);
  const auto b = daemon.attach("b", path);
  REQUIRE_OK(a->begin());
  CHECK_FALSE(a->turn_wanted());
  const base::Status late = b->begin(20'000'000);
  CHECK(late.code() == GPUSHARE_TIMED_OUT);
  CHECK(late.message().find("'a'") != std::string::npos);
  CHECK(b->begin(0).code() == GPUSHARE_TIMED_OUT);
  base::Status begun;
  std::thread other([&] { begun = b->begin(); });
  while (!a->turn_wanted()) std::this_thread::yield();
  REQUIRE_OK(a->end());
  other.join();
  REQUIRE_OK(begun);
  CHECK(b->in_turn());
  CHECK_FALSE(b->turn_wanted());
  REQUIRE_OK(b->end());
}

TEST_CASE("scratch memory is the worker's own and lasts for a turn") {
  Daemon daemon;
  const std::string path = daemon.model("m.safetensors", kSizes);
  const auto worker = daemon.attach("one", path, kGranule + 1);
  CHECK(worker->scratch_bytes() == 2 * kGranule);
  for (int turn = 0; turn < 3; ++turn) {
    REQUIRE_OK(worker->begin());
    auto* scratch = reinterpret_cast<char*>(worker->scratch());
    CHECK(test::all_are(scratch, worker->scratch_bytes(), 0));
    std::memset(scratch, 'x', worker->scratch_bytes());
    REQUIRE_OK(worker->end());
  }
  CHECK(daemon.status().resident_bytes == granules(kSizes) * kGranule);
}

TEST_CASE("copies into the model are refused: it is read-only") {
  Daemon daemon;
  std::vector<std::string> contents;
  const std::string path = daemon.model("m.safetensors", kSizes, &contents);
  const auto worker = daemon.attach("one", path);
  REQUIRE_OK(worker->begin());
  REQUIRE_OK(worker->wait_layers(0, 8));
  {
    const auto stream = worker->device().create_stream();
    REQUIRE(stream.ok());
    CHECK(stream->fill(worker->address(3), 1, 100).code() == GPUSHARE_INVALID_ARGUMENT);
  }
  CHECK(contents_of(*worker) == contents);
  REQUIRE_OK(worker->end());
}

TEST_CASE("calls at the wrong moment are refused") {
  Daemon daemon;
  const std::string path = daemon.model("m.safetensors", kSizes);
  const auto worker = daemon.attach("one", path);
  CHECK(worker->end().code() == GPUSHARE_INVALID_STATE);
  CHECK(worker->wait_layers(0, 1).code() == GPUSHARE_INVALID_STATE);
  CHECK_FALSE(worker->turn_wanted());
  REQUIRE_OK(worker->begin());
  CHECK(worker->begin().code() == GPUSHARE_INVALID_STATE);
  CHECK(worker->wait_layers(0, 9).code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(worker->wait_layers(3, 3).code() == GPUSHARE_INVALID_ARGUMENT);
  REQUIRE_OK(worker->end());
}

TEST_CASE("what cannot be attached is refused with the reason, and the daemon goes on") {
  Daemon daemon(4 * kGranule);
  const std::string large = daemon.model("large.safetensors", kSizes);
  const std::string small = daemon.model("small.safetensors", {1000});
  std::ofstream(daemon.folder.file("broken.safetensors")) << "no model";
  const auto refusal = [&](daemon::WorkerOptions options) {
    const auto attached = daemon::Worker::attach(options);
    REQUIRE_FALSE(attached.ok());
    INFO(attached.status().to_string());
    CHECK_FALSE(attached.status().message().empty());
    return attached.status().code();
  };
  CHECK(refusal(daemon.worker_options("x", large)) == GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(refusal(daemon.worker_options("x", daemon.folder.file("absent"))) != GPUSHARE_OK);
  CHECK(refusal(daemon.worker_options("x", daemon.folder.file("broken.safetensors"))) ==
        GPUSHARE_MALFORMED_INPUT);
  CHECK(refusal(daemon.worker_options("", small)) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(refusal(daemon.worker_options(std::string(64, 'n'), small)) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(refusal(daemon.worker_options("x", "")) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(refusal(daemon.worker_options("x", "/" + std::string(5000, 'p'))) == GPUSHARE_INVALID_ARGUMENT);
  daemon::WorkerOptions greedy = daemon.worker_options("x", small);
  greedy.scratch_bytes = 4 * kGranule;
  CHECK(refusal(greedy) == GPUSHARE_EXCEEDS_CAPACITY);
  greedy.scratch_bytes = UINT64_MAX;
  CHECK(refusal(greedy) == GPUSHARE_EXCEEDS_CAPACITY);
  daemon.wait_for([](const auto& status) { return status.workers.empty(); });
  const auto worker = daemon.attach("fine", small);
  REQUIRE_OK(worker->begin());
  REQUIRE_OK(worker->end());
}

TEST_CASE("a file that changed is another model") {
  Daemon daemon;
  const std::string path = daemon.model("m.safetensors", {1000});
  const auto before = daemon.attach("before", path);
  std::vector<std::string> contents;
  daemon.model("m.safetensors", {2000, 3000}, &contents);
  const auto after = daemon.attach("after", path);
  REQUIRE_OK(after->begin());
  CHECK(contents_of(*after) == contents);
  REQUIRE_OK(after->end());
  CHECK(before->layers().size() == 1);
  CHECK(daemon.status().models.size() == 2);
}

TEST_CASE("a worker that keeps the turn while another waits is cut off") {
  Daemon daemon(16 * kGranule, [](auto& options) { options.lease_ns = 30'000'000; });
  std::vector<std::string> contents;
  const std::string path = daemon.model("m.safetensors", kSizes, &contents);
  const auto greedy = daemon.attach("greedy", path, 100);
  const auto other = daemon.attach("other", path);
  REQUIRE_OK(greedy->begin());
  REQUIRE_OK(greedy->wait_layers(0, 8));
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  CHECK(greedy->wait_layers(0, 8).ok());  // nobody waited: the lease does not run
  REQUIRE_OK(other->begin());             // and so this comes back
  CHECK(contents_of(*other) == contents);
  const base::Status cut = greedy->end();
  CHECK(cut.code() == GPUSHARE_TIMED_OUT);
  CHECK(cut.message().find("lease") != std::string::npos);
  CHECK_FALSE(greedy->begin().ok());
  REQUIRE_OK(other->end());
  const daemon::DaemonStatus status = daemon.status();
  CHECK(status.cut_off == 1);
  CHECK(status.workers.size() == 1);
  CHECK(status.resident_bytes == granules(kSizes) * kGranule);  // its scratch memory went with it
}

namespace {
std::atomic<int> g_sleepless{0};  // waits for the next event that would not wait
}  // namespace

// The daemon's, in place of the C library's.
extern "C" int epoll_wait(int epoll, epoll_event* events, int most, int timeout_ms) {
  if (timeout_ms == 0) ++g_sleepless;
  return epoll_pwait(epoll, events, most, timeout_ms, nullptr);
}

TEST_CASE("a lease next to for ever lets the daemon sleep while somebody waits") {
  Daemon daemon(16 * kGranule, [](auto& options) { options.lease_ns = daemon::kNoTimeout - 1; });
  const std::string path = daemon.model("m.safetensors", {1000});
  const auto holder = daemon.attach("holder", path);
  const auto queued = daemon.attach("queued", path);
  REQUIRE_OK(holder->begin());
  base::Status waited;
  g_sleepless = 0;
  std::thread waiter([&] { waited = queued->begin(); });
  daemon.wait_for([](const auto& status) {
    return std::any_of(status.workers.begin(), status.workers.end(),
                       [](const auto& worker) { return worker.state == "waiting"; });
  });
  CHECK(daemon.status().cut_off == 0);
  CHECK(g_sleepless == 0);
  REQUIRE_OK(holder->end());
  waiter.join();
  CHECK(waited.ok());
}

TEST_CASE("a daemon that goes is noticed by whoever calls or sleeps") {
  Daemon daemon(16 * kGranule, [](auto& options) { options.device += "&copy_gbps=0.001"; });
  const std::string path = daemon.model("m.safetensors", {100'000, 200'000});
  const auto holder = daemon.attach("holder", path);
  const auto queued = daemon.attach("queued", path);
  REQUIRE_OK(holder->begin());
  base::Status slept, waited;
  std::thread sleeper([&] { slept = holder->wait_layers(0, 2); });  // 0.3 s of copies
  std::thread waiter([&] { waited = queued->begin(); });
  daemon.wait_for([](const auto& status) {
    return std::any_of(status.workers.begin(), status.workers.end(),
                       [](const auto& worker) { return worker.state == "waiting"; });
  });
  daemon.server.reset();
  sleeper.join();
  waiter.join();
  CHECK((slept.ok() || slept.code() == GPUSHARE_UNAVAILABLE));  // stopping waits for copies under way
  CHECK(waited.code() == GPUSHARE_UNAVAILABLE);
  CHECK(waited.message().find("has gone") != std::string::npos);
  CHECK(holder->end().code() == GPUSHARE_UNAVAILABLE);
  CHECK_FALSE(holder->in_turn());
  CHECK(queued->begin().code() == GPUSHARE_UNAVAILABLE);
  const auto nobody = daemon::Worker::attach(daemon.worker_options("late", path));
  CHECK(nobody.status().code() == GPUSHARE_UNAVAILABLE);
  CHECK(nobody.status().message().find("gpushare model-daemon") != std::string::npos);
  CHECK(daemon::query_status(daemon.options.socket).status().code() == GPUSHARE_UNAVAILABLE);
  daemon.start();
  const auto again = daemon.attach("again", path);
  REQUIRE_OK(again->begin());
  REQUIRE_OK(again->end());
}

TEST_CASE("a wait for layers has an end") {
  Daemon daemon(16 * kGranule, [](auto& options) { options.device += "&copy_gbps=0.001"; });
  const std::string path = daemon.model("m.safetensors", {1000, 300'000});
  daemon::WorkerOptions options = daemon.worker_options("one", path);
  options.execute_ns = 1;  // best sent in one piece, so that nothing is there soon
  const auto worker = *daemon::Worker::attach(options);
  REQUIRE_OK(worker->begin());
  CHECK(worker->wait_layers(0, 2, 1'000'000).code() == GPUSHARE_TIMED_OUT);
  CHECK(worker->wait_layers(1, 2, 0).code() == GPUSHARE_TIMED_OUT);
  REQUIRE_OK(worker->wait_layers(0, 2));
  REQUIRE_OK(worker->end());
}

TEST_CASE("a load that is left goes on, and the next one waits for it") {
  const std::vector<size_t> sizes = {100'000, 200'000};
  Daemon daemon(granules(sizes) * kGranule, [](auto& options) { options.device += "&copy_gbps=0.01"; });
  std::vector<std::string> contents;
  const std::string first = daemon.model("a.safetensors", sizes);
  const std::string second = daemon.model("b.safetensors", sizes, &contents);
  const auto b = daemon.attach("b", second);
  auto a = daemon.attach("a", first);
  REQUIRE_OK(a->begin());
  a.reset();  // in the middle of its load
  REQUIRE_OK(b->begin());
  CHECK(contents_of(*b) == contents);
  REQUIRE_OK(b->end());
  daemon.wait_for([](const auto& status) { return status.models.size() == 1; });
}

TEST_CASE("the socket is its user's alone, one daemon serves it, and a stale one is replaced") {
  Daemon daemon;
  struct stat info {};
  REQUIRE(stat(daemon.options.socket.c_str(), &info) == 0);
  CHECK(S_ISSOCK(info.st_mode));
  CHECK((info.st_mode & 0777) == 0600);
  const auto second = daemon::Server::start(daemon.options);
  CHECK(second.status().code() == GPUSHARE_ALREADY_EXISTS);
  CHECK(daemon.status().workers.empty());  // the first one still serves
  daemon.server.reset();
  CHECK(stat(daemon.options.socket.c_str(), &info) != 0);

  daemon::ServerOptions options = daemon.options;
  options.socket = daemon.folder.file("file");
  std::ofstream(options.socket) << "precious";
  CHECK(daemon::Server::start(options).status().code() == GPUSHARE_ALREADY_EXISTS);
  CHECK(std::filesystem::file_size(options.socket) == 8);
  options.socket = daemon.folder.file(std::string(200, 's'));
  CHECK(daemon::Server::start(options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  options.socket = daemon.folder.file("absent/socket");
  CHECK(daemon::Server::start(options).status().code() == GPUSHARE_IO_ERROR);
}

TEST_CASE("options that cannot work are refused") {
  Daemon daemon;
  const auto code = [&](const std::function<void(daemon::ServerOptions&)>& change) {
    daemon::ServerOptions options = daemon.options;
    options.socket = daemon.folder.file("other");
    change(options);
    return daemon::Server::start(options).status().code();
  };
  CHECK(code([](auto& options) { options.device = "sim"; }) == GPUSHARE_UNSUPPORTED);
  CHECK(code([](auto& options) { options.device = "nonsense"; }) == GPUSHARE_NOT_FOUND);
  CHECK(code([](auto& options) { options.capacity_bytes = 1ull << 40; }) == GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(code([](auto& options) { options.max_workers = 0; }) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(code([](auto& options) { options.lease_ns = 0; }) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(code([](auto& options) { options.link.reset(); }) == GPUSHARE_OK);
}

TEST_CASE("connections that never attach keep nobody out") {
  Daemon daemon(16 * kGranule, [](auto& options) { options.max_workers = 4; });
  const std::string path = daemon.model("m.safetensors", {1000});
  std::vector<daemon::Descriptor> idle;
  for (int i = 0; i < 4; ++i) {
    auto connected = daemon::connect_to(daemon.options.socket);
    REQUIRE(connected.ok());
    idle.push_back(std::move(*connected));
  }
  for (;;) {  // once they have been idle for a while
    if (const auto worker = daemon::Worker::attach(daemon.worker_options("w", path)); worker.ok()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

TEST_CASE("a daemon whose socket was replaced leaves the new one alone") {
  Daemon first;
  const std::string socket = first.options.socket;
  REQUIRE(unlink(socket.c_str()) == 0);
  REQUIRE(unlink((socket + ".lock").c_str()) == 0);
  const auto second = client::Listener::open(socket);
  REQUIRE(second.ok());
  first.server.reset();
  CHECK(access(socket.c_str(), F_OK) == 0);
}

TEST_CASE("no more workers than allowed") {
  Daemon daemon(16 * kGranule, [](auto& options) { options.max_workers = 2; });
  const std::string path = daemon.model("m.safetensors", {1000});
  auto a = daemon.attach("a", path);
  const auto b = daemon.attach("b", path);
  const auto c = daemon::Worker::attach(daemon.worker_options("c", path));
  CHECK(c.status().code() == GPUSHARE_QUEUE_FULL);
  a.reset();
  for (;;) {  // its place is free once the daemon has seen it go
    if (const auto d = daemon::Worker::attach(daemon.worker_options("d", path)); d.ok()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}
