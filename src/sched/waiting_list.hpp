// waiting_list.hpp: the waiting sessions, in the policy's order, with an index that finds those that fit.
// Other folders do not include it.
//
// The list is a sequence of chunks of up to kMostEntries sessions. A chunk knows the least need of its
// sessions, so a search skips the chunks in which nobody fits, and it adds one overtaking to all its sessions
// at once. With n sessions a change costs O(n / kMostEntries + kMostEntries), which is a few microseconds at
// 100,000. A balanced tree would search faster, and be slower in all that happens here below some 10,000.
//
// The policy's order is asked only when a session is inserted. A custom policy's `before` may be no order at
// all: the session is then somewhere in the list, and nothing else happens.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "sched/policy.hpp"

namespace gpushare::sched {

struct SessionRecord;

class WaitingList {
 public:
  static constexpr size_t kMostEntries = 256;

  struct Position {
    size_t chunk = 0;
    size_t index = 0;
    auto operator<=>(const Position&) const = default;
  };

  // Bytes that can be promised to a newcomer. It fits if P <= persistent_bytes and P + E <= total_bytes.
  struct Room {
    bool any = false;  // false: nobody fits, whatever it needs
    uint64_t persistent_bytes = 0;
    uint64_t total_bytes = 0;
    bool holds(uint64_t persistent, uint64_t total) const {
      return any && persistent <= persistent_bytes && total <= total_bytes;
    }
  };

  // The part of a chunk that a search reads; kept in the session's record as well.
  struct Chunk;

  WaitingList();
  ~WaitingList();

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  // Inserts the session by the policy's order, after its equals. Its count of overtakings begins at
  // SessionRecord::overtaken.
  Position insert(SessionRecord& session, const Policy& policy);
  // Removes the session at `position` and returns the position of the next. Stores the count of overtakings in the
  // session.
  Position erase(Position position);
  void erase(SessionRecord& session) { erase(position_of(session)); }
  // The session's `blocked` or `claiming` has changed.
  void update(SessionRecord& session);

  Position begin() const { return {0, 0}; }
  Position end() const { return {chunks_.size(), 0}; }
  Position next(Position position) const;
  SessionRecord& at(Position position) const;
  Position position_of(const SessionRecord& session) const;
  // All, in order.
  std::vector<SessionRecord*> sessions() const;

  // The first session from `from` on that fits into `room` and is not blocked, or that is to be considered in any case
  // (it claims, or it wants compute units for itself); end() if there is none.
  Position first_fit(Position from, const Room& room) const;
  // The first session from `from` on that has been overtaken `most` times; end() if there is none.
  Position first_overtaken(Position from, uint32_t most) const;
  // True if a session ahead of `position` claims, or has been overtaken `most` times (0: no limit).
  bool barred(Position position, uint32_t most) const;
  bool any_claims() const;
  // Notes that one more session has been admitted past all that are ahead of `position`.
  void overtake(Position position);

 private:
  void refresh(Chunk& chunk);
  void renumber(size_t from);

  std::vector<std::unique_ptr<Chunk>> chunks_;  // none is empty
  size_t size_ = 0;
};

}  // namespace gpushare::sched
