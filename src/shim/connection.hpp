// connection.hpp: the socket to the daemon, and what this side knows of its session.
// A process has a connection for each device.
// Threads: the session's own (session.cpp), or the one that joins before it begins. say() and tell() may be called from
// any thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "client/lease.hpp"
#include "client/wire.hpp"
#include "shim/gate.hpp"
#include "shim/settings.hpp"

namespace gpushare::shim {

inline constexpr uint64_t kSession = 1;  // the process's number of the connection's only session

// The move that the daemon has asked for and that is not done yet.
enum class Paging : uint8_t { nothing, out, in };

// A connection. Emptied in a child of fork like the gate, by `process`.
struct Session {
  int process;
  int seat;
  char address[32];  // of the device; empty: it has none
  Options options;   // as the daemon was told last
  int socket;
  client::LeaseMemory* page;
  client::Lease* lease;
  uint64_t instance;
  uint64_t epoch;  // of the turn that this side has; 0: none
  uint64_t told_bytes, asked_bytes;
  uint32_t sequence;
  bool admitted;
  bool lost;
  Paging paging;
  // This daemon sent the process out and says when it may come in. A turn may come before that.
  bool sent_out;
  bool turned_back;       // somebody else needs the room of the page-in that is under way, or was the last
  bool wanted;            // the daemon has said that it wants the turn
  bool slow;              // after its last work it did not come back within kPatienceNs
  uint64_t free_ns;       // device time of this turn before somebody else waited for it
  uint64_t contested_ns;  // when somebody else waited for its turn last
  bool waiter_runs;       // the thread of wait_for_contexts
  uint32_t waiter_word;   // a futex, of the thread
  uint64_t turn_began_ns, accounted_ns, looked_ns, told_ns;
};
extern Session g_sessions[kSeats];

struct Incoming {
  alignas(8) char bytes[client::kMaxMessageBytes + 64];
  size_t size;
  int descriptor;
  client::MessageType type() const {
    return static_cast<client::MessageType>(client::fields_of<client::Header>(bytes, size).type);
  }
};

// `file`: goes with it; -1: none. False: the daemon does not take it.
bool say_bytes(const Session& session, const void* message, size_t bytes, int file = -1);
template <class T>
bool say(const Session& session, const T& message) {
  return say_bytes(session, &message, sizeof message);
}
// A message about the session.
bool tell(const Session& session, client::MessageType type, uint64_t value = 0);
// 1: a message; 0: none has come; -1: the daemon is gone, or sends nonsense.
int receive(int socket, Incoming* out);
void note_event(Session& session, const Incoming& message);
// Waits for a message of that type; events are noted. False: it did not come.
bool await(Session& session, client::MessageType type, Incoming* out, uint64_t timeout_ns);

// The bytes of the device that the group may hold, or without a limit the bytes that it holds.
uint64_t bytes_to_promise(const Session& session);
// Unserved: the daemon does not serve this process or this device. Refused: the daemon has no place for the process, or
// promises it no memory.
enum class Outcome { joined, absent, unserved, refused };
// Connects and declares the process. `out_why` says what was wrong, and is empty if simply no daemon is there.
Outcome connect_daemon(Session& session, char* out_why, size_t size);
void disconnect(Session& session);

}  // namespace gpushare::shim
