// A daemon that answers late, or does not read: only the thread that needs an answer waits for it. Other sessions of the
// process go on, and so do statistics.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <future>
#include <list>
#include <thread>
#include <vector>

#include "client/channel.hpp"
#include "client/lease_page.hpp"
#include "client/wire.hpp"
#include "executor/range.hpp"
#include "support/shared_service.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT
using client::Descriptor;

// Stands between a service and its clients, and passes messages on when it is told to.
class Relay {
 public:
  Relay(std::string service, const std::string& path) : service_(std::move(service)) {
    auto listener = client::Listener::open(path);
    REQUIRE(listener.ok());
    listener_ = std::move(*listener);
    setenv("GPUSHARE_SOCKET", path.c_str(), 1);
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() {
    stop_.store(true);
    thread_.join();
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  void answers_late(bool late) { late_.store(late); }
  void reads_nothing(bool deaf) { deaf_.store(deaf); }
  // Messages of the service that the clients do not have yet.
  size_t held() const { return held_.load(); }

 private:
  struct Message {
    std::vector<std::byte> bytes;
    std::vector<Descriptor> descriptors;
  };
  struct Pair {
    Descriptor client, service;
    std::deque<Message> to_client, to_service;
    bool over = false;
  };

  void run() {
    while (!stop_.load()) {
      client::Peer peer;
      if (auto accepted = client::accept_peer(listener_.get(), &peer); accepted.ok()) {
        auto connected = client::connect_to(service_);
        if (connected.ok()) {
          Pair& pair = pairs_.emplace_back();
          pair.client = std::move(*accepted);
          pair.service = std::move(*connected);
        }
      }
      size_t held = 0;
      for (Pair& pair : pairs_) {
        if (!deaf_.load()) take(pair, pair.client, pair.to_service);
        give(pair, pair.service, pair.to_service);
        take(pair, pair.service, pair.to_client);
        if (!late_.load()) give(pair, pair.client, pair.to_client);
        held += pair.to_client.size();
      }
      held_.store(held);
      pairs_.remove_if([](const Pair& pair) { return pair.over; });
      (void)poll(nullptr, 0, 1);
    }
  }
  static void take(Pair& pair, const Descriptor& from, std::deque<Message>& out) {
    std::byte buffer[client::kMaxMessageBytes + 64];
    for (;;) {
      Message message;
      const auto got = client::receive_message(from.get(), buffer, &message.descriptors);
      if (!got.ok()) {
        pair.over = pair.over || got.status().code() != GPUSHARE_NOT_READY;
        return;
      }
      message.bytes.assign(got->begin(), got->end());
      out.push_back(std::move(message));
    }
  }
  static void give(Pair& pair, const Descriptor& to, std::deque<Message>& messages) {
    while (!messages.empty()) {
      std::vector<int> numbers;
      for (const Descriptor& descriptor : messages.front().descriptors) numbers.push_back(descriptor.get());
      const base::Status sent = client::send_message(to.get(), messages.front().bytes, numbers);
      if (sent.code() == GPUSHARE_QUEUE_FULL) return;
      if (!sent.ok()) pair.over = true;
      messages.pop_front();
    }
  }

  const std::string service_;
  client::Listener listener_;
  std::list<Pair> pairs_;
  std::atomic<bool> late_{false}, deaf_{false}, stop_{false};
  std::atomic<size_t> held_{0};
  std::thread thread_;
};

bool waits(const std::future<base::Status>& call) {
  return call.wait_for(std::chrono::seconds(0)) == std::future_status::timeout;
}

TEST_CASE("an answer of the daemon that comes late stops nobody but the thread that needs it") {
  const SharedService service;
  Relay relay(service.options.socket, service.folder + "/slow");
  auto runtime = SharedService::open();
  auto asks = open_session(*runtime, need("asks", 2 * kMiB, 2 * kMiB));
  auto goes_on = open_session(*runtime, need("goes on", 2 * kMiB, 2 * kMiB));
  auto leaves = open_session(*runtime, need("leaves", 2 * kMiB, 2 * kMiB));
  auto iteration = goes_on->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  relay.answers_late(true);
  auto grown = std::async(std::launch::async,
                          [&] { return asks->alloc(memory::Kind::kModel, 16 * kMiB, 0).status(); });
  eventually([&] { return relay.held() > 0; });
  // The answer is on its way, and cannot come.
  auto opened = std::async(std::launch::async,
                           [&] { return runtime->open_session(need("arrives", kMiB, kMiB)).status(); });
  CHECK((*iteration)->alloc(kMiB, 0).ok());
  CHECK(goes_on->alloc(memory::Kind::kModel, kMiB, 0).ok());
  CHECK_OK((*iteration)->end());
  CHECK(goes_on->info().persistent_bytes == kMiB);
  CHECK(asks->info().promised_persistent_bytes == 2 * kMiB);
  CHECK(runtime->info().ok());
  CHECK(runtime->snapshot().ok());
  CHECK_OK(goes_on->set_priority(3));
  CHECK_OK(goes_on->set_quota(8 * kMiB));
  CHECK_OK(leaves->close());
  CHECK(waits(grown));
  CHECK(waits(opened));
  relay.answers_late(false);
  CHECK_OK(grown.get());
  CHECK_OK(opened.get());
  CHECK(asks->info().promised_persistent_bytes >= 16 * kMiB);
  CHECK(runtime->check() == "");
  CHECK(runtime->close().ok());
}

TEST_CASE("a runtime closes while the daemon's answers are still to come") {
  const SharedService service;
  Relay relay(service.options.socket, service.folder + "/slow");
  auto runtime = SharedService::open();
  auto session = open_session(*runtime, need("grows", 2 * kMiB, 2 * kMiB));
  auto range_of = open_session(*runtime, need("ranges", 2 * kMiB, 2 * kMiB));
  executor::RangeOptions reserved;
  reserved.reserved_bytes = 32 * kMiB;
  auto range = range_of->open_range(reserved);
  REQUIRE(range.ok());
  relay.answers_late(true);
  std::vector<std::future<base::Status>> calls;
  calls.push_back(std::async(std::launch::async,
                             [&] { return session->alloc(memory::Kind::kModel, 16 * kMiB, 0).status(); }));
  calls.push_back(std::async(std::launch::async,
                             [&] { return runtime->open_session(need("arrives", kMiB, kMiB)).status(); }));
  calls.push_back(
      std::async(std::launch::async, [&] { return (*range)->commit(0, 4 * kMiB, GPUSHARE_NO_TIMEOUT); }));
  eventually([&] { return relay.held() >= 3; });
  auto closed = std::async(std::launch::async, [&] { return runtime->close(); });
  eventually([&] { return session->info().state == executor::SessionState::kCancelled; });
  relay.answers_late(false);
  CHECK_FALSE(calls[1].get().ok());
  (void)calls[0].get();  // may have had its answer in time
  (void)calls[2].get();
  CHECK_OK(closed.get());
  eventually([&] { return service.status().sessions.empty(); });
}

TEST_CASE("a daemon that does not read its messages for a while stops nobody, and gets them all") {
  const SharedService service;
  Relay relay(service.options.socket, service.folder + "/slow");
  auto runtime = SharedService::open();
  auto session = open_session(*runtime, need("talks", 2 * kMiB, 2 * kMiB));
  relay.reads_nothing(true);
  constexpr int32_t kMessages = 5000;  // more than the socket takes; the last one asks for 1
  for (int32_t i = 1; i <= kMessages; ++i) {
    const base::Status told = session->set_priority(i - kMessages + 1);
    if (!told.ok()) CHECK_OK(told);
    if (!told.ok()) break;
  }
  CHECK(runtime->info().ok());
  CHECK(session->alloc(memory::Kind::kModel, kMiB, 0).ok());
  relay.reads_nothing(false);
  eventually([&] {
    const auto status = client::query_service(service.options.socket);
    return status.ok() && status->sessions.size() == 1 && status->sessions[0].priority == 1;
  });
  CHECK(runtime->close().ok());
}

}  // namespace

TEST_CASE("a page of leases that another build has laid out is refused, and the error says what to do") {
  const size_t bytes = client::lease_memory_bytes(client::kLeaseSlots);
  const auto open = [](uint64_t mark, size_t size) {
    Descriptor file(memfd_create("leases", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(ftruncate(file.get(), static_cast<off_t>(size)) == 0);
    REQUIRE(pwrite(file.get(), &mark, sizeof mark, 0) == sizeof mark);
    REQUIRE(fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    return client::LeasePage::open(std::move(file), client::kLeaseSlots).status();
  };
  CHECK_OK(open(client::kLeasePageMark, bytes));
  CHECK((client::kLeasePageMark & 0xffffff) == sizeof(client::Lease));
  for (const base::Status& refused :
       {open(client::kLeasePageMark + 64, bytes), open(client::kLeasePageMark, bytes + 64)}) {
    INFO(refused.message());
    CHECK(refused.code() == GPUSHARE_MALFORMED_INPUT);
    CHECK(refused.message().find("from the same release") != std::string::npos);
  }
}
