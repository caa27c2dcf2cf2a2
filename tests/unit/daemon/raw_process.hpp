// A process with sessions on the daemon that says each message by hand.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "sched/room.hpp"
#include "unit/daemon/raw_connection.hpp"

namespace gpushare::test {

struct RawProcess : RawConnection {
  using RawConnection::RawConnection;
  // The next message that is no event; empty once the daemon has closed the connection.
  std::vector<std::byte> answer(std::vector<client::Descriptor>* descriptors = nullptr) const {
    return next({client::MessageType::kReply, client::MessageType::kWelcome}, descriptors);
  }
  int32_t hello(uint16_t flags = 0, uint64_t pci_address = 0) {
    auto message = client::make_message<client::MessageType::kHello>();
    message.flags = flags;
    message.pci_address = pci_address;
    REQUIRE(say(message));
    std::vector<client::Descriptor> descriptors;
    const auto welcome = client::fields_of<client::Welcome>(answer(&descriptors));
    if (descriptors.size() == 1)
      page = *client::LeasePage::open(std::move(descriptors.front()), welcome.slots);
    return welcome.code;
  }
  client::Lease& lease() const { return page->lease(slot); }
  void await(client::LeaseState state) const {
    while (lease().look().state != state) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  void give_back(bool ready_again) {
    REQUIRE(lease().change(lease().look(), client::LeaseState::kFree));
    tell(client::MessageType::kReturned, 1, ready_again ? 1 : 0);
  }
  int32_t call(const client::Arrive& message, int file = -1) {
    REQUIRE(client::send_message(socket.get(), client::bytes_of(message), std::span(&file, file >= 0 ? 1 : 0))
                .ok());
    const auto reply = client::fields_of<client::Reply>(answer());
    slot = reply.value;
    return reply.code;
  }
  std::shared_ptr<client::LeasePage> page;
  uint32_t slot = 0;  // of the last session
};

// Whether the daemon waits for the death of a process whose connection has closed.
inline bool is_owing(const SharedService& shared) {
  const auto processes = shared.status().processes;
  return std::any_of(processes.begin(), processes.end(),
                     [](const auto& each) { return each.state == "owing"; });
}

inline client::Arrive arrive(uint64_t session, uint64_t persistent_bytes, uint64_t group = 0) {
  auto message = client::make_message<client::MessageType::kArrive>(1);
  message.session = session;
  message.persistent_bytes = persistent_bytes;
  message.flags = client::kMayQueue | client::kMayPage;
  message.group = group;
  client::put_text(message.name, "raw");
  return message;
}

// About session 1; of ranges, for a commit.
inline client::Room room_message(sched::Giver from, uint64_t bytes, uint32_t sequence = 1) {
  auto message = client::make_message<client::MessageType::kRoom>(sequence);
  message.session = 1;
  message.bytes = bytes;
  message.from = static_cast<uint32_t>(from);
  message.commit = from == sched::Giver::kRanges ? 1 : 0;
  return message;
}

}  // namespace gpushare::test
