// A daemon for one process that says each message by hand.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "support/shared_service.hpp"

namespace gpushare::test {

// The daemon's end of one process's connection, which says each message by hand. Replies are OK, with slot 0.
struct RawDaemon {
  RawDaemon() {
    char name[] = "/tmp/gpushare-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    folder = name;
    auto opened = client::Listener::open(folder + "/socket");
    REQUIRE(opened.ok());
    listener = std::move(*opened);
    page = *client::LeasePage::create(client::kSharedLeaseSlots);
    setenv("GPUSHARE_SOCKET", (folder + "/socket").c_str(), 1);
    thread = std::thread([this] { serve(); });
  }
  ~RawDaemon() {
    stop = true;
    thread.join();
    listener = {};
    std::filesystem::remove_all(folder);
  }
  void serve() {
    client::Peer peer;
    std::array<std::byte, client::kMaxMessageBytes + 64> buffer;
    while (!stop) {
      if (!socket) {
        auto accepted = client::accept_peer(listener.get(), &peer);
        if (accepted.ok()) socket = std::move(*accepted);
      }
      const auto message =
          socket ? client::receive_message(socket.get(), buffer)
                 : base::Result<std::span<const std::byte>>(base::Status(GPUSHARE_NOT_READY, ""));
      if (!message.ok()) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        continue;
      }
      const auto type = client::check_message(*message, client::Side::kProcess);
      if (!type.ok()) continue;
      if (*type == client::MessageType::kArrive)
        arrive_flags = client::fields_of<client::Arrive>(*message).flags;
      if (*type == client::MessageType::kHello)
        hello_flags = client::fields_of<client::Hello>(*message).flags;
      if (*type == client::MessageType::kWorkBegan) target = client::fields_of<client::Work>(*message).target;
      if (*type == client::MessageType::kSetWorth) {
        const auto message_of = client::fields_of<client::Worth>(*message);
        worth = message_of.worth;
        worth_until_ns = message_of.until_ns;
        ++worths;
        continue;
      }
      answer(*type, client::fields_of<client::SessionMessage>(*message));
    }
  }
  void answer(client::MessageType type, const client::SessionMessage& message) {
    if (type == client::MessageType::kHello) {
      auto welcome = client::make_message<client::MessageType::kWelcome>();
      welcome.capacity_bytes = 64 * kMiB;
      welcome.slots = page->slots();
      client::put_text(welcome.device, "host?total_bytes=268435456&granularity=65536");
      client::put_text(welcome.policy, "srtf");
      const int file = page->file();
      sent_well = sent_well &&
                  client::send_message(socket.get(), client::bytes_of(welcome), std::span(&file, 1)).ok();
      return;
    }
    if (type == client::MessageType::kReady) worth_before_ready = worth.exchange(0);
    if (type == client::MessageType::kContext) context_bytes = message.value;
    if (type == client::MessageType::kPageDone) ++page_done;
    if (type == client::MessageType::kUnplaced) ++unplaced;
    if (type == client::MessageType::kRoomUsed) ++rooms_used;
    if (type == client::MessageType::kGateOpen) ++gate_opens;
    if (type == client::MessageType::kWorkBegan) ++work_begins;
    if (type == client::MessageType::kWorkEnded) ++work_ends;
    if (type == client::MessageType::kArrive) session = message.session;
    if (message.header.sequence != 0)
      send(client::make_message<client::MessageType::kReply>(message.header.sequence));
    if (type == client::MessageType::kArrive) tell(client::MessageType::kAdmit);
    if (type == client::MessageType::kReady) {
      const client::Lease::Word free = page->lease(0).look();
      page->lease(0).extend(UINT64_MAX);
      page->lease(0).set({free.epoch + 1, client::LeaseState::kBusy});
      page->lease(0).bell().ring();
      tell(client::MessageType::kGranted);
    }
  }
  template <class Message>
  void send(const Message& message) {
    sent_well = sent_well && client::send_message(socket.get(), client::bytes_of(message)).ok();
  }
  void tell(client::MessageType type, uint64_t value = 0) {
    send(client::make_session_message(type, session, value));
  }
  std::string folder;
  client::Listener listener;
  client::Descriptor socket;
  std::shared_ptr<client::LeasePage> page;
  std::atomic<uint64_t> session{0};       // the last one
  std::atomic<uint32_t> arrive_flags{0};  // of the last session
  std::atomic<uint32_t> hello_flags{0};
  std::atomic<double> target{-1};          // of the last iteration that began
  std::atomic<uint64_t> context_bytes{0};  // as the process says
  std::atomic<int> page_done{0}, unplaced{0}, rooms_used{0}, worths{0}, gate_opens{0}, work_begins{0},
      work_ends{0};
  // As the last SetWorth said, and what was said before the last Ready.
  std::atomic<double> worth{0}, worth_before_ready{0};
  std::atomic<uint64_t> worth_until_ns{0};
  std::atomic<bool> sent_well{true}, stop{false};
  std::thread thread;
};

}  // namespace gpushare::test
