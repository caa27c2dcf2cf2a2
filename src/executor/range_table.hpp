// range_table.hpp: the elastic ranges of a runtime, and the waits for memory among them. Other folders do not include it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/flat_hash.hpp"
#include "base/mutex.hpp"
#include "executor/lent_turn.hpp"
#include "sched/elastic.hpp"
#include "sched/room.hpp"

namespace gpushare::executor {

class Outbox;
class RangeImpl;
class RuntimeImpl;
class SessionImpl;

// A commit, or an allocation of a guaranteed session, that waits for room. It is in the runtime's list from its first
// refusal until it has all that it asked for, or gives up.
struct RangeWait {
  SessionImpl* session = nullptr;
  RangeImpl* range = nullptr;  // null: an allocation
  sched::RangeId asker = 0;    // the range's id, or one for this allocation
  uint64_t want = 0;
  uint64_t bytes = 0;
  uint64_t change = 0;  // RangeTable::change() at its last look for room
  uint64_t place = sched::InLine::kNowhere;
  uint64_t since_ns = 0;
  uint64_t asked_ns = 0;    // when `want` was numbered
  uint64_t room_bytes = 0;  // the most that was free after a range gave bytes
  bool made_room = false;
  bool asks_daemon = false;
  std::string silent;  // who did not answer

  bool is_before(const RangeWait& other) const;
};

// range.cpp. Part of the runtime's books: a silent range changes the class of its session, which the scheduler is told.
class RangeTable {
 public:
  explicit RangeTable(RuntimeImpl& runtime);
  sched::RangeId next_id() GPUSHARE_REQUIRES(books) { return next_range_++; }
  void open(RangeImpl& range) GPUSHARE_REQUIRES(books);
  void close(RangeImpl& range) GPUSHARE_REQUIRES(books);
  // Called when the session goes: removes its ranges.
  void forget(const SessionImpl& session) GPUSHARE_REQUIRES(books);
  // Notes the bytes that the range has now.
  void set_bytes(RangeImpl& range, uint64_t committed_bytes) GPUSHARE_REQUIRES(books);
  void answer(const RangeImpl& range, uint64_t bytes) GPUSHARE_REQUIRES(books);
  bool silent(const RangeImpl& range) const GPUSHARE_REQUIRES(books);

  // The bytes that ranges of others may give to the session, for a commit or an allocation.
  uint64_t can_give(const SessionImpl& session, bool commit) const GPUSHARE_REQUIRES(books);
  // The first wait if it is served before `wait`; else null.
  const RangeWait* before(const RangeWait& wait) const GPUSHARE_REQUIRES(books);
  // Waits for wait.bytes of room. The first wait in the line asks ranges to give bytes back. Allocations stand before
  // all commits, and ask only ranges of opportunistic sessions of this process. Sleeps until `deadline`, or until
  // something may have changed since wait.change. False at once if no range is left to ask.
  bool sleep(RangeWait& wait, const base::Deadline& deadline, Outbox& outbox) GPUSHARE_REQUIRES(books);
  // As sleep(), but asks no range.
  void sleep_a_while(const RangeWait& wait, const base::Deadline& deadline, Outbox& outbox)
      GPUSHARE_REQUIRES(books);
  void leave(RangeWait& wait) GPUSHARE_REQUIRES(books);
  // Called when sessions of other processes miss bytes: asks the session's ranges for `bytes`.
  void asked(sched::SessionId session, uint64_t bytes) GPUSHARE_REQUIRES(books);
  // Wakes all waits, because something may have changed for them.
  void told() GPUSHARE_REQUIRES(books) {
    ++change_;
    room_.notify_all();
  }
  uint64_t change() const GPUSHARE_REQUIRES(books) { return change_; }  // a number that each told() changes

 private:
  void keeps_silent(const sched::RangeRequest& request, RangeWait& wait, Outbox& outbox)
      GPUSHARE_REQUIRES(books);
  void refresh_class(SessionImpl& session) GPUSHARE_REQUIRES(books);
  // A request of the daemon for the ranges of a session.
  struct Asked {
    uint64_t want = 0;
    uint64_t had_bytes = 0;
  };
  void tell_daemon(const SessionImpl& session) GPUSHARE_REQUIRES(books);
  void answer_daemon(sched::SessionId session, const Asked& asked) GPUSHARE_REQUIRES(books);

  RuntimeImpl& runtime_;
  sched::ElasticRanges elastic_ GPUSHARE_GUARDED_BY(books);
  std::vector<RangeWait*> waits_ GPUSHARE_GUARDED_BY(books);  // by sched::served_before()
  base::FlatHashMap<sched::RangeId, RangeImpl*> ranges_ GPUSHARE_GUARDED_BY(books);
  base::FlatHashMap<sched::SessionId, Asked> asked_ GPUSHARE_GUARDED_BY(books);
  uint64_t next_range_ GPUSHARE_GUARDED_BY(books) = 1;
  uint64_t next_want_ GPUSHARE_GUARDED_BY(books) = 1;
  uint64_t change_ GPUSHARE_GUARDED_BY(books) = 0;
  base::ConditionVariable room_;  // notified by whoever frees bytes
};

}  // namespace gpushare::executor
