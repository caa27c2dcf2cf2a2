// ranges.hpp: elastic ranges of processes that share a device. A session reports the bytes of its ranges that their
// owner can be asked for; the daemon treats them as one range. A session that finds no room, and no range to ask in its
// own process, asks here. The daemon asks other sessions by the rules of sched::ElasticRanges, with each owner's
// deadline. A session that does not answer keeps the bytes and counts as opportunistic until it gives some back. The
// session that asked is told the name of the silent one. The daemon withholds bytes that were given for a wait from
// other sessions with ranges for a while. Otherwise an owner that wants the bytes back at once would be faster than the
// waiting process, which must wake up first.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/status.hpp"
#include "client/protocol.hpp"
#include "daemon/user_limits.hpp"
#include "sched/elastic.hpp"
#include "sched/scheduler.hpp"

namespace gpushare::daemon {

struct Claim;
struct RemoteSession;
struct Request;

// Used by the service's thread alone.
class Ranges {
 public:
  Ranges(sched::Scheduler& scheduler, LogLimit& log_limit, uint64_t capacity_bytes);
  void set(RemoteSession& session, const client::RangeHas& message);
  // The reply: whether bytes are on the way, and the sessions that did not answer since the last time. An allocation asks
  // ranges of opportunistic sessions alone.
  void ask(RemoteSession& session, const sched::RoomAsk& ask, const Request& request);
  // The bytes that they may give to the session.
  uint64_t can_give(const RemoteSession& session, bool commit) const;
  void answer(const RemoteSession& session, uint64_t bytes);
  void close(RemoteSession& session, bool leaves);  // leaves: the session goes, too
  // OK if the session, which may have ranges, can grow by `bytes`. Errors: DEVICE_OUT_OF_MEMORY.
  base::Status may_grow(const RemoteSession& session, uint64_t bytes, uint64_t now_ns) const;
  void grew(const RemoteSession& session, uint64_t bytes);
  // The class of the claim's session, or the lower one while a range of it is silent. A group has the
  // class on its page, which then is that of each member, else the best class of its members.
  // True: the class, or that of a member, is another one now.
  bool refresh_class(Claim& claim, uint64_t now_ns);
  bool expire(uint64_t now_ns);  // true if a session is silent
  uint64_t next_deadline_ns() const { return elastic_.next_deadline_ns(); }

 private:
  struct Range {
    RemoteSession* session = nullptr;
    uint64_t want = 0;  // the number of its wait; 0: it does not wait
    uint64_t asked_ns = 0;
    bool commit = true;       // it waits, or is to wait, for a commit
    uint64_t since = 0;       // the first number of its wait, which orders it among the waits of others
    uint64_t room_bytes = 0;  // the most that was free during its wait
    // Bytes given for its wait, and until when others do not get them.
    uint64_t kept_bytes = 0, kept_until_ns = 0;
    std::string silent;  // the sessions that did not answer, for its next reply
  };
  Range& open(RemoteSession& session, uint64_t answer_ns, double price_ns_per_byte);
  void end_wait(Range& range);
  void tell_waits() const;
  // The bytes that were given for waits that come before the session, so that it does not get them.
  uint64_t kept_from(const Range& range, uint64_t now_ns) const;

  sched::Scheduler& scheduler_;
  LogLimit& log_limit_;
  const uint64_t capacity_bytes_;
  sched::ElasticRanges elastic_;
  std::map<sched::RangeId, Range> ranges_;
  sched::RangeId next_range_ = 1;
  uint64_t next_want_ = 1;
};

}  // namespace gpushare::daemon
