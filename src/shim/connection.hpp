// connection.hpp: the socket to the daemon, and what this side knows of its session.
// Threads: the session's own (session.cpp), or the one that joins before it begins. say() and tell() may be called from any thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "client/lease.hpp"
#include "client/wire.hpp"

namespace gpushare::shim {

inline constexpr uint64_t kSession = 1;  // the process's number of its only session

// What the daemon has asked for and did not get yet.
enum class Paging : uint8_t { nothing, out, in };

// The connection. Emptied in a child of fork like the gate (Turn), by `process`.
struct Session {
  int process;
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
  bool slow;             // after its last work it did not come back within kPatienceNs
  bool waiter_runs;      // the thread of wait_for_contexts
  uint32_t waiter_word;  // a futex, of the thread
  uint64_t turn_began_ns, accounted_ns, looked_ns, told_ns;
};
extern Session g_session;

struct Incoming {
  alignas(8) char bytes[client::kMaxMessageBytes + 64];
  size_t size;
  int descriptor;
  client::MessageType type() const {
    return static_cast<client::MessageType>(client::fields_of<client::Header>(bytes, size).type);
  }
};

// False: the daemon does not take it.
bool say_bytes(const void* message, size_t bytes);
template <class T>
bool say(const T& message) {
  return say_bytes(&message, sizeof message);
}
// A message about the session.
bool tell(client::MessageType type, uint64_t value = 0);
// 1: a message; 0: none has come; -1: the daemon is gone, or sends nonsense.
int receive(int socket, Incoming* out);
void note_event(const Incoming& message);
// Waits for a message of that type; events are noted. False: it did not come.
bool await(client::MessageType type, Incoming* out, uint64_t timeout_ns);

// What the group may hold, or without a limit what it holds.
uint64_t bytes_to_promise();
enum class Outcome { joined, absent, refused };
// Connects and declares the process. `out_why` says what was wrong, and is empty where simply nobody is there.
Outcome connect_daemon(char* out_why, size_t size);
void disconnect();

}  // namespace gpushare::shim
