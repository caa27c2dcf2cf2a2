// wire.hpp: the messages on the daemon's socket as they are in memory: types, fields, sizes. Without any of the
// project's libraries or the C++ runtime, for src/shim; protocol.hpp has the rules and the checks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gpushare::client {

inline constexpr uint32_t kProtocolMark = 0x47505353;  // "GPSS"
// Both sides must have the same major version. A minor version may add types of messages, never change one: neither side sends a
// type that the other's minor version (in Hello and Welcome) lacks.
inline constexpr uint16_t kProtocolMajor = 1;
inline constexpr uint16_t kProtocolMinor = 0;

// The messages: name, fields, kind, and the name of the function that handles it. The kind says who sends a message and about
// what: the process about itself (CALL) or about one of its sessions (EVENT), the daemon in answer or about an image (ANSWER) or
// about a session (NEWS). The first is type 1.
#define GPUSHARE_MESSAGES(X)                               \
  X(Hello, Hello, CALL, hello)                             \
  X(Welcome, Welcome, ANSWER, welcome)                     \
  X(Reply, Reply, ANSWER, reply)                           \
  X(Arrive, Arrive, CALL, arrive)                          \
  X(Need, Need, EVENT, need)                               \
  X(Room, Room, EVENT, room)                               \
  X(StatusRequest, StatusRequest, CALL, status_request)    \
  X(Ready, SessionMessage, EVENT, ready)                   \
  X(NotReady, SessionMessage, EVENT, not_ready)            \
  X(Returned, SessionMessage, EVENT, returned)             \
  X(Wake, SessionMessage, EVENT, wake)                     \
  X(AllowPaging, SessionMessage, EVENT, allow_paging)      \
  X(Leave, SessionMessage, EVENT, leave)                   \
  X(Unplaced, SessionMessage, EVENT, unplaced)             \
  X(PageDone, SessionMessage, EVENT, page_done)            \
  X(PageOutFailed, SessionMessage, EVENT, page_out_failed) \
  X(RoomUsed, SessionMessage, EVENT, room_used)            \
  X(SetPriority, SessionMessage, EVENT, set_priority)      \
  X(SetWeight, SessionMessage, EVENT, set_weight)          \
  X(SetRemaining, SessionMessage, EVENT, set_remaining)    \
  X(Granted, SessionMessage, NEWS, granted)                \
  X(Wanted, SessionMessage, NEWS, wanted)                  \
  X(Admit, SessionMessage, NEWS, admit)                    \
  X(PageOut, SessionMessage, NEWS, page_out)               \
  X(PageIn, SessionMessage, NEWS, page_in)                 \
  X(RoomMade, SessionMessage, NEWS, room_made)             \
  X(SetClass, SessionMessage, EVENT, set_class)            \
  X(ImageOpen, ImageOpen, EVENT, image_open)               \
  X(ImageClose, SessionMessage, CALL, image_close)         \
  X(ImageUnmapped, SessionMessage, CALL, image_unmapped)   \
  X(ImageOpened, ImageOpened, ANSWER, image_opened)        \
  X(ImageHere, SessionMessage, ANSWER, image_here)         \
  X(ImageGone, SessionMessage, ANSWER, image_gone)         \
  X(SetCapacity, SetCapacity, CALL, set_capacity)          \
  X(SetSpare, SessionMessage, EVENT, set_spare)            \
  X(SetLink, SessionMessage, EVENT, set_link)              \
  X(RangeHas, RangeHas, EVENT, range_has)                  \
  X(RangeAnswer, SessionMessage, EVENT, range_answer)      \
  X(RangeGive, SessionMessage, NEWS, range_give)           \
  X(RangeGiven, SessionMessage, NEWS, range_given)         \
  X(LaneHere, SessionMessage, NEWS, lane_here)             \
  X(CountsAs, SessionMessage, NEWS, counts_as)             \
  X(Limit, SessionMessage, NEWS, limit)                    \
  X(SetCap, SessionMessage, EVENT, set_cap)                \
  X(Context, SessionMessage, CALL, context)                \
  X(PagePart, SessionMessage, EVENT, page_part)            \
  X(TurnBack, SessionMessage, NEWS, turn_back)             \
  X(SetWorth, Worth, EVENT, set_worth)                     \
  X(GateOpen, SessionMessage, EVENT, gate_open)            \
  X(WorkBegan, Work, EVENT, work_began)                    \
  X(WorkEnded, Work, EVENT, work_ended)                    \
  X(GateAsks, SessionMessage, NEWS, gate_asks)

enum class MessageType : uint16_t {
  kNone,
#define GPUSHARE_TYPE(name, fields, kind, handler) k##name,
  GPUSHARE_MESSAGES(GPUSHARE_TYPE)
#undef GPUSHARE_TYPE
};

struct Header {
  uint32_t mark = kProtocolMark;
  uint16_t major = kProtocolMajor;
  uint16_t type = 0;
  uint32_t bytes = 0;  // of the whole message
  uint32_t sequence = 0;
};

// Flags of Hello: the process shares the memory of leases with the others of its user, passes turns on, and
// waits by the lease's bell (lease.hpp).
inline constexpr uint16_t kPassesTurns = 1;

struct Hello {
  Header header;
  uint16_t minor = kProtocolMinor;
  uint16_t flags = 0;
  uint16_t reserved[2] = {};
  uint64_t instance =
      0;  // a number that the runtime chose; it uses the number again after the connection broke
  char device[256] = {};  // which of the daemon's devices; empty = the first
  char program[64] = {};  // for people
  // With an empty `device`: asks for the device with this PCI address (domain << 16 | bus << 8 | device << 3 |
  // function). A daemon whose devices have no addresses gives its first one.
  uint64_t pci_address = 0;
};

struct Welcome {
  Header header;
  int32_t code = 0;  // a code of status.h; unless it is OK, only `text` counts
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
inline constexpr uint32_t kRunning = 4;        // declared to a new daemon while an iteration is under way
inline constexpr uint32_t kClaimsNothing = 8;  // no other session makes room for it
// The session has memory and turns of its own, and shares only the limits of its group with the group's
// other sessions.
inline constexpr uint32_t kOwnClaim = 16;
// Another daemon knew the session, which was within its group's limits there.
inline constexpr uint32_t kKnownBefore = 32;
// The process maps its session's ephemeral memory from pieces that the daemon sends, and gives the turn back
// only when all work in them is done. The Reply says whether the daemon does so.
inline constexpr uint32_t kMayShareLane = 64;
// An opportunistic session that counts as guaranteed while there is room. Has an effect where the daemon has a
// coordinator.
inline constexpr uint32_t kMayUpgrade = 128;
// With kMayPage (kAlternates): under every policy the session takes turns with sessions that wait for
// memory. Without kMayPage (kNeverPages): the session can never be paged out.
inline constexpr uint32_t kAlternates = 256, kNeverPages = 512;

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
  // Sessions of one user with the same number other than 0 are a group. They share memory, weight, priority and turns,
  // as the first of them declares. With kOwnClaim: the sessions of all users with this number share the limits below.
  uint64_t group = 0;
  // Since 1.5, with kOwnClaim: the limits of the group, as its first such session declares them.
  uint64_t group_memory_bytes =
      0;  // the most that its sessions need together, waiting ones included; 0 = no limit
  // The weight that its sessions divide while they use the device; 0 = each has its own weight.
  double group_weight = 0;
  // The bytes with which the session can still run, the rest being in host memory; 0 = all of them.
  uint64_t least_bytes = 0;
  // The part of the device's time that the sessions of the group, or of the connection, get at most together, also
  // while no other session wants the device: above 0, at most 1; 0 = no cap. The first session that names a cap sets
  // it.
  double cap = 0;
};

struct Need {
  Header header;
  uint64_t session = 0;
  uint64_t persistent_bytes = 0;
  uint64_t ephemeral_bytes = 0;
};

// Bytes that a session misses, and who is asked for them: sched::RoomAsk. The Reply says whether they give; from kRanges, its
// `value` is 1 while bytes are on the way, and its `text` names the sessions that have not answered since the last Reply. 0 bytes
// of kRanges end the wait, without a Reply. What else was asked for is there with RoomMade.
struct Room {
  Header header;
  uint64_t session = 0;
  uint64_t bytes = 0;
  uint64_t elsewhere_bytes = 0;
  uint32_t from = 0;    // sched::Giver: kSpare, kRanges or kSessions
  uint32_t commit = 0;  // 1: for an elastic range
};

// Every other message of one session. Meaning of `value`: Returned 1 if the session is
// ready again; LaneHere the bytes of the lane's next piece, whose descriptor comes with it; SetPriority the priority;
// SetClass the class; SetWeight the bits of a double; SetCap likewise, 1: none; SetRemaining nanoseconds; SetSpare the
// bits of a double, its worth in nanoseconds, below 0: it is not spare any more; SetLink the bits of a double,
// nanoseconds a byte; CountsAs the class; Limit the bytes, 0: none; Context (of the process: `session` is 0) the bytes that
// its contexts and other libraries have of the device; else 0. A Context with a sequence is a question, which the daemon
// may refuse: the process then closes its context. A PageOut of a spare session may be
// answered by Leave.
//
// PagePart: bytes of a page-out that goes in parts. With its first part, of 0 bytes or more, a session of a group says
// that from now on it gets no blocks on the device. If the rest cannot follow, the session says PageOutFailed and stays
// as it is until PageIn. An Admit then means that the session may run as it is, because the bytes that went have been
// promised to others. TurnBack: another session needs the bytes of this one's page-in. The session answers Unplaced if
// it gives the page-in up; otherwise its PageDone is under way. A session of a group ends its page-in at once and says
// PageDone.
struct SessionMessage {
  Header header;
  uint64_t session = 0;
  uint64_t value = 0;
};

// The bytes of a session's elastic ranges for which their owner can be asked. RangeGive: bytes that others ask of them.
// RangeAnswer: bytes that are given in all, or UINT64_MAX. RangeGiven: something has changed for a session that asked.
struct RangeHas {
  Header header;
  uint64_t session = 0;
  uint64_t bytes = 0;
  uint64_t answer_ns = 0;  // time to answer
  double price_ns_per_byte = 0;
};

// What the session's next iteration wins if it begins by `until_ns` (CLOCK_MONOTONIC), see Authority::set_worth. Sent
// before the Ready or the Returned that asks for the iteration's turn; that message may follow later.
struct Worth {
  Header header;
  uint64_t session = 0;
  double worth = 0;  // 0, or anything but a finite number above 0: no worth is known any more
  uint64_t until_ns = 0;
};

// An iteration of a guaranteed session has begun, or ended, on the device. Said while the page of leases says `watched`; the end of
// each iteration whose begin was said. GateOpen, a SessionMessage: launches of an opportunistic session go through a gate, which
// reads its slot (base/gate_slot.hpp) in the session's lease. GateAsks, a SessionMessage, is the answer, and comes again whenever it
// changes: value 1 where the device has guaranteed sessions; 0: launches need not ask.
struct Work {
  Header header;
  uint64_t session = 0;
  uint64_t at_ns = 0;      // CLOCK_MONOTONIC
  uint64_t device_ns = 0;  // of WorkEnded: 0 = not measured, or it failed
  double target = 0;       // slowdown that the session accepts from opportunistic ones; 0 = the default
};

// Opens the image of a model for a session. The daemon reads the file as its own user.
struct ImageOpen {
  Header header;
  uint64_t session = 0;
  uint64_t image = 0;         // the process's number of it
  uint64_t iteration_ns = 0;  // the expected length of an iteration; 0 = as long as the load
  char path[4096] = {};       // absolute
};

struct ImageOpened {
  Header header;
  uint64_t image = 0;
  uint64_t image_bytes = 0;
  uint64_t region_bytes = 0;  // bytes of the memory that comes with ImageHere
  int32_t code = 0;           // a code of status.h; unless it is OK, only `text` counts
  uint32_t layers = 0;
  char text[512] = {};
};

// ImageHere, ImageClose, ImageUnmapped, ImageGone are SessionMessages: `value` is the image's number. In ImageHere,
// `session` is the number of bytes in its first descriptor; the rest of the region is in a second descriptor.

struct SetCapacity {
  Header header;
  uint64_t bytes = 0;  // 0 = all that the daemon began with
  char device[256] = {};
};

struct StatusRequest {
  Header header;
};

struct Reply {
  Header header;
  int32_t code = 0;
  uint32_t value =
      0;  // of Arrive: the session's slot in the page of leases, and kSharesLane if E is of a shared lane
  char text[512] = {};
};

// The session's lane is shared: E is memory of the daemon, sent by LaneHere before the Admit, the PageIn or the Reply
// to the Need that promises it. The process maps the pieces that begin below E. It has unmapped the others when it says
// that E is less, that the session is paged out, or that it has gone.
inline constexpr uint32_t kSharesLane = 1u << 31;

// The largest message.
inline constexpr size_t kMaxMessageBytes = sizeof(ImageOpen);

// The table as values.
enum class Side : uint8_t { kProcess, kDaemon };
struct MessageKind {
  const char* name;
  uint32_t bytes;  // exactly
  Side from;
};
inline constexpr Side kFromCALL = Side::kProcess, kFromEVENT = Side::kProcess, kFromANSWER = Side::kDaemon,
                      kFromNEWS = Side::kDaemon;
inline constexpr MessageKind kMessages[] = {{"message of no type", 0, Side::kProcess},
#define GPUSHARE_KIND(name, fields, kind, handler) {#name, sizeof(fields), kFrom##kind},
                                            GPUSHARE_MESSAGES(GPUSHARE_KIND)
#undef GPUSHARE_KIND
};
inline constexpr uint16_t kMessageTypes = sizeof(kMessages) / sizeof(kMessages[0]);

// What is wrong with a message. This is the one check of both sides and of preloaded programs.
enum class MessageFault : uint8_t { kNone, kShort, kMark, kVersion, kType, kSize, kSide };
inline MessageFault fault_of(const void* message, size_t bytes, Side from) {
  Header header;
  if (bytes < sizeof(header)) return MessageFault::kShort;
  std::memcpy(&header, message, sizeof(header));
  if (header.mark != kProtocolMark) return MessageFault::kMark;
  if (header.major != kProtocolMajor) return MessageFault::kVersion;
  if (header.type == 0 || header.type >= kMessageTypes) return MessageFault::kType;
  const MessageKind& kind = kMessages[header.type];
  if (bytes != kind.bytes || header.bytes != kind.bytes) return MessageFault::kSize;
  return kind.from == from ? MessageFault::kNone : MessageFault::kSide;
}

// The fields of each type.
template <MessageType kType>
struct FieldsOf;
#define GPUSHARE_FIELDS(name, fields, kind, handler) \
  template <>                                        \
  struct FieldsOf<MessageType::k##name> {            \
    using Type = fields;                             \
  };
GPUSHARE_MESSAGES(GPUSHARE_FIELDS)
#undef GPUSHARE_FIELDS

// An empty message of a type.
template <MessageType kType>
typename FieldsOf<kType>::Type make_message(uint32_t sequence = 0) {
  typename FieldsOf<kType>::Type out{};
  out.header.type = static_cast<uint16_t>(kType);
  out.header.bytes = sizeof(out);
  out.header.sequence = sequence;
  return out;
}
// Likewise for those whose type is known only at run time.
inline SessionMessage make_session_message(MessageType type, uint64_t session, uint64_t value = 0,
                                           uint32_t sequence = 0) {
  SessionMessage out;
  out.header.type = static_cast<uint16_t>(type);
  out.header.bytes = sizeof(out);
  out.header.sequence = sequence;
  out.session = session;
  out.value = value;
  return out;
}
// The fields of a message that was checked, or of its beginning.
template <class T>
T fields_of(const void* message, size_t bytes) {
  T out{};
  std::memcpy(static_cast<void*>(&out), message, bytes < sizeof(T) ? bytes : sizeof(T));
  return out;
}

}  // namespace gpushare::client
