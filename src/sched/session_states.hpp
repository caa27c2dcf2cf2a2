// session_states.hpp: the states of a session's bytes, and the one table of how they change. Every write of a state goes
// through it. Other folders do not include it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace gpushare::sched {

// Where the session's persistent bytes are.
enum class Bytes : uint8_t {
  kWaiting,      // nowhere yet: it holds no promise and has no copy on the host
  kResident,     // on the device
  kLeaving,      // on the device until its next boundary, then its page-out begins
  kGoing,        // its page-out is under way
  kOut,          // on the host: it holds no promise
  kComing,       // its page-in is under way
  kTurningBack,  // its page-in is under way, but the driver has been told to give it up
  kGone          // it has left
};
inline constexpr std::array kBytesStates = {Bytes::kWaiting,     Bytes::kResident, Bytes::kLeaving,
                                            Bytes::kGoing,       Bytes::kOut,      Bytes::kComing,
                                            Bytes::kTurningBack, Bytes::kGone};
inline constexpr std::array kBytesNames = {"waiting", "resident", "leaving",      "going",
                                           "out",     "coming",   "turning back", "gone"};

enum class BytesEvent : uint8_t {
  kPlaced,    // the scheduler promised it a place; kAdmit or kPageIn is the action
  kChosen,    // it is to give its bytes up; kTurnBack is the action if it is coming
  kSpared,    // it need not give its bytes up after all
  kStarted,   // its boundary has come; kPageOut or kDrop
  kDone,      // the driver has carried out the page-out or the page-in
  kFailed,    // the driver could not begin the page-out
  kUnplaced,  // the driver found no place for it, or gave its page-in up
  kLeft       // the session has ended
};
inline constexpr std::array kBytesEvents = {BytesEvent::kPlaced,   BytesEvent::kChosen, BytesEvent::kSpared,
                                            BytesEvent::kStarted,  BytesEvent::kDone,   BytesEvent::kFailed,
                                            BytesEvent::kUnplaced, BytesEvent::kLeft};

struct BytesChange {
  Bytes from;
  BytesEvent event;
  Bytes to;
};

// No other change happens.
inline constexpr std::array kBytesTable = {
    BytesChange{Bytes::kWaiting, BytesEvent::kPlaced, Bytes::kResident},
    BytesChange{Bytes::kResident, BytesEvent::kChosen, Bytes::kLeaving},
    BytesChange{Bytes::kResident, BytesEvent::kUnplaced, Bytes::kWaiting},
    BytesChange{Bytes::kLeaving, BytesEvent::kSpared, Bytes::kResident},
    BytesChange{Bytes::kLeaving, BytesEvent::kStarted, Bytes::kGoing},
    BytesChange{Bytes::kLeaving, BytesEvent::kUnplaced, Bytes::kWaiting},
    BytesChange{Bytes::kGoing, BytesEvent::kDone, Bytes::kOut},
    BytesChange{Bytes::kGoing, BytesEvent::kFailed, Bytes::kResident},
    BytesChange{Bytes::kOut, BytesEvent::kPlaced, Bytes::kComing},
    BytesChange{Bytes::kComing, BytesEvent::kDone, Bytes::kResident},
    BytesChange{Bytes::kComing, BytesEvent::kChosen, Bytes::kTurningBack},
    BytesChange{Bytes::kComing, BytesEvent::kUnplaced, Bytes::kOut},
    BytesChange{Bytes::kTurningBack, BytesEvent::kDone, Bytes::kResident},  // it was too late to turn back
    BytesChange{Bytes::kTurningBack, BytesEvent::kUnplaced, Bytes::kOut},
    BytesChange{Bytes::kWaiting, BytesEvent::kLeft, Bytes::kGone},
    BytesChange{Bytes::kResident, BytesEvent::kLeft, Bytes::kGone},
    BytesChange{Bytes::kLeaving, BytesEvent::kLeft, Bytes::kGone},
    BytesChange{Bytes::kGoing, BytesEvent::kLeft, Bytes::kGone},
    BytesChange{Bytes::kOut, BytesEvent::kLeft, Bytes::kGone},
    BytesChange{Bytes::kComing, BytesEvent::kLeft, Bytes::kGone},
    BytesChange{Bytes::kTurningBack, BytesEvent::kLeft, Bytes::kGone},
};

// The row of the table; its size if there is none.
constexpr size_t change_of(Bytes from, BytesEvent event) {
  size_t row = 0;
  while (row < kBytesTable.size() && (kBytesTable[row].from != from || kBytesTable[row].event != event))
    ++row;
  return row;
}
constexpr bool is_listed(Bytes from, BytesEvent event) {
  return change_of(from, event) < kBytesTable.size();
}

// True if its bytes are on their way out, or are to go.
constexpr bool goes_out(Bytes bytes) {
  return bytes == Bytes::kLeaving || bytes == Bytes::kGoing || bytes == Bytes::kTurningBack;
}
constexpr bool comes_in(Bytes bytes) {
  return bytes == Bytes::kComing || bytes == Bytes::kTurningBack;
}
constexpr bool on_device(Bytes bytes) {
  return bytes == Bytes::kResident || bytes == Bytes::kLeaving;
}
// True if it counts in the promised bytes of the device.
constexpr bool has_promise(Bytes bytes) {
  return bytes != Bytes::kWaiting && bytes != Bytes::kOut && bytes != Bytes::kGone;
}

}  // namespace gpushare::sched
