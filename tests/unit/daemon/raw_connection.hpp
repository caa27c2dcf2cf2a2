// A connection to the daemon that says what it likes, as a process that does not use the library might.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <vector>

#include "support/shared_service.hpp"

namespace gpushare::test {

struct RawConnection {
  explicit RawConnection(const SharedService& shared) {
    auto connected = client::connect_to(shared.options.socket);
    REQUIRE(connected.ok());
    socket = std::move(*connected);
  }
  bool send(std::span<const std::byte> message) const {
    return client::send_message(socket.get(), message).ok();
  }
  template <class Message>
  bool say(const Message& message) const {
    return send(client::bytes_of(message));
  }
  void tell(client::MessageType type, uint64_t session, uint64_t value = 0) const {
    REQUIRE(say(client::make_session_message(type, session, value)));
  }
  // Waits for a message of one of these types and skips all others; its descriptors are added to `descriptors`. Empty
  // once the daemon has closed the connection.
  std::vector<std::byte> next(std::initializer_list<client::MessageType> types,
                              std::vector<client::Descriptor>* descriptors = nullptr) const {
    std::array<std::byte, client::kMaxMessageBytes + 64> buffer;
    for (;;) {
      const auto message = client::receive_message(socket.get(), buffer, descriptors);
      if (message.status().code() == GPUSHARE_NOT_READY) {
        REQUIRE_OK(client::wait_readable(socket.get(), base::Deadline::after(30'000'000'000)));
        continue;
      }
      if (!message.ok()) return {};
      const auto type = client::check_message(*message, client::Side::kDaemon);
      REQUIRE(type.ok());
      if (std::find(types.begin(), types.end(), *type) != types.end())
        return {message->begin(), message->end()};
    }
  }
  client::Descriptor socket;
};

}  // namespace gpushare::test
