// protocol.hpp: the messages on the daemon's socket, written and checked here. Each packet is one message of a
// known type. Each side treats messages of the other as possibly broken. Nothing here touches a socket.
//
//   process                                    daemon
//   Hello                          ->
//                                  <-          Welcome + the page of leases (lease_page.hpp)
//   Arrive, Need, Room             ->
//                                  <-          Reply, with the request's sequence
//   Ready, NotReady, Returned, ... ->          (no reply)
//                                  <-          Granted, Wanted, Admit, PageOut, PageIn, RoomMade
//   StatusRequest                  ->          (instead of Hello)
//                                  <-          Reply + a sealed file with the status (status.hpp)
//
// Versions. The major number must be equal. A new minor version may append fields to a message and add types. A
// message says its size: a receiver of an older version ignores the fields at the end that it does not know, a
// receiver of a newer one finds zeros in those that did not come, and neither sends a type that the other's minor
// version lacks. So neighbouring minor versions work together.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "base/status.hpp"

namespace gpushare::client {

inline constexpr uint32_t kProtocolMark = 0x47505353;  // "GPSS"
inline constexpr uint16_t kProtocolMajor = 1;
inline constexpr uint16_t kProtocolMinor = 0;

enum class MessageType : uint16_t {
  kHello = 1,
  kWelcome,
  kReply,
  kArrive,
  kNeed,
  kRoom,
  kStatusRequest,
  // Messages about one session, from the process to the daemon.
  kReady,
  kNotReady,
  kReturned,
  kWake,
  kAllowPaging,
  kLeave,
  kUnplaced,
  kPageDone,
  kPageOutFailed,
  kRoomUsed,
  kSetPriority,
  kSetWeight,
  kSetRemaining,
  // Messages about one session, from the daemon to the process.
  kGranted,
  kWanted,
  kAdmit,
  kPageOut,
  kPageIn,
  kRoomMade,
};

struct Header {
  uint32_t mark = kProtocolMark;
  uint16_t major = kProtocolMajor;
  uint16_t type = 0;
  uint32_t bytes = 0;  // of the whole message
  uint32_t sequence = 0;
};

struct Hello {
  Header header;
  uint16_t minor = kProtocolMinor;
  uint16_t reserved[3] = {};
  uint64_t instance =
      0;  // a number of this runtime's choice: it comes back under it after the connection broke
  char device[256] = {};  // which of the daemon's devices; empty = the first
  char program[64] = {};  // for people
};

struct Welcome {
  Header header;
  int32_t code = 0;  // of status.h; unless it is OK, nothing but text counts
  uint16_t minor = kProtocolMinor;
  uint16_t reserved = 0;
  uint64_t capacity_bytes = 0;
  uint32_t slots = 0;  // in the page of leases
  uint32_t reserved_2 = 0;
  char device[256] = {};  // what the process opens
  char policy[32] = {};
  char text[512] = {};  // why not
};

// Flags of Arrive.
inline constexpr uint32_t kMayQueue = 1, kMayPage = 2;
inline constexpr uint32_t kRunning =
    4;  // declared anew to a restarted daemon while an iteration is under way

struct Arrive {
  Header header;
  uint64_t session = 0;  // the process's number of it
  uint64_t persistent_bytes = 0;
  uint64_t ephemeral_bytes = 0;
  uint64_t remaining_ns = 0;
  uint64_t iterations_total = 0;
  double weight = 1.0;
  int32_t priority = 0;
  uint32_t cls = 0;
  uint32_t flags = 0;
  uint32_t reserved = 0;
  char name[64] = {};
};

struct Need {
  Header header;
  uint64_t session = 0;
  uint64_t persistent_bytes = 0;
  uint64_t ephemeral_bytes = 0;
};

// Room, and every message of one session. Meaning of `value`: Room bytes wanted; Returned 1 if the session is
// ready again; SetPriority the priority; SetWeight the bits of a double; SetRemaining nanoseconds; else 0.
struct SessionMessage {
  Header header;
  uint64_t session = 0;
  uint64_t value = 0;
};

struct StatusRequest {
  Header header;
};

struct Reply {
  Header header;
  int32_t code = 0;
  uint32_t value = 0;  // of Arrive: the session's slot in the page of leases
  char text[512] = {};
};

// The largest message.
inline constexpr size_t kMaxMessageBytes = sizeof(Welcome);

// The type of a message that is complete as its type's first version was. Errors: MALFORMED_INPUT (size, mark, type that
// is none), UNSUPPORTED (major version; names both).
base::Result<MessageType> check_message(std::span<const std::byte> message);
// The fields of a checked message; those that did not come are zero.
template <class T>
T fields_of(std::span<const std::byte> message) {
  T out{};
  std::memcpy(static_cast<void*>(&out), message.data(), std::min(message.size(), sizeof(T)));
  return out;
}
template <class T>
T make_message(MessageType type, uint32_t sequence = 0) {
  T out{};
  out.header.type = static_cast<uint16_t>(type);
  out.header.bytes = sizeof(T);
  out.header.sequence = sequence;
  return out;
}
SessionMessage make_session_message(MessageType type, uint64_t session, uint64_t value = 0,
                                    uint32_t sequence = 0);
// Copies text into a field of fixed size, cut where it does not fit.
void put_text(std::span<char> field, std::string_view text);
// The text of a field, up to its end or its first zero; unprintable bytes become '?'.
std::string text_of(std::span<const char> field);
// The name of a type, for messages to people.
const char* message_name(MessageType type);

// Turns the error that the other side reports into a status. A code that this version does not know becomes
// UNKNOWN, with the code kept as the native one.
base::Status reported(int32_t code, std::string text);

}  // namespace gpushare::client
