// room.hpp: bytes for a resident session that misses some, for an allocation or for a commit to an elastic range: who is asked
// for them, in which order, and who of those that wait is served first. Drivers and the daemon have no other order. How much
// each of several claims gives is for claims.hpp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "sched/types.hpp"

namespace gpushare::sched {

// Who gives bytes, in the order in which they are asked: first what is there for speed alone, then what gives any part of its
// bytes, then whole sessions. So no bytes that somebody uses are copied as long as bytes that nobody uses are enough.
enum class Giver : uint8_t {
  kSpare,       // spare sessions and caches: they are dropped, which copies nothing
  kHost,        // host memory, for the new block of a session that may spill
  kRanges,      // elastic ranges: their owners give what they miss least
  kBlocks,      // blocks of opportunistic sessions that may lie on the host
  kSessions,    // sessions that the asker outranks, with nothing in flight; page-ins turn back first
  kBoundaries,  // busy opportunistic sessions, at their next boundaries
  kOwner        // a function of the program that owns the session
};
inline constexpr uint8_t kGivers = static_cast<uint8_t>(Giver::kOwner) + 1;

// The question to an authority: Authority::make_room(). It answers for kSpare, kSessions and kBoundaries, and one that decides
// for several processes for kRanges of other processes.
struct RoomAsk {
  Giver from = Giver::kSessions;
  uint64_t bytes = 0;            // that are missing
  uint64_t elsewhere_bytes = 0;  // of kSpare: so many of them come from givers of parts, who are asked next
  bool commit = false;           // it is for an elastic range, else for an allocation
  std::string* out_silent = nullptr;  // of kRanges: who did not answer
};

// What one session misses, on its way from giver to giver.
class Need {
 public:
  // `may_spill`: the block may lie on the host.
  Need(SessionClass cls, bool commit, bool may_spill) : commit_(commit) {
    const bool guaranteed = cls == SessionClass::kGuaranteed;
    if (commit || !may_spill) leave_out(Giver::kHost);
    if (!commit && !guaranteed) leave_out(Giver::kRanges);
    if (!guaranteed) leave_out(Giver::kBlocks);
    if (!guaranteed) leave_out(Giver::kBoundaries);
    if (commit) leave_out(Giver::kOwner);
  }
  bool commit() const { return commit_; }
  bool asks(Giver giver) const { return (left_ >> static_cast<uint8_t>(giver) & 1) != 0; }
  // The next givers give any part: together with kSpare they may be enough.
  bool parts_are_next() const {
    return !asks(Giver::kHost) && (asks(Giver::kRanges) || asks(Giver::kBlocks));
  }
  // Calls `gives` for one giver after another until one gives. False: nobody is left. `of_others`: bytes of others help, which
  // they do not where a limit of the session's own is met.
  template <class Gives>
  bool ask(bool of_others, Gives gives) {
    for (uint8_t at = 0; at < kGivers; ++at) {
      const auto giver = static_cast<Giver>(at);
      if (!asks(giver) || (!of_others && giver != Giver::kHost && giver != Giver::kOwner)) continue;
      if (once(giver)) leave_out(giver);
      if (gives(giver)) return true;
    }
    return false;
  }

 private:
  // Others may take what was given, so the session may ask again. Givers that are asked once have given what they could.
  bool once(Giver giver) const {
    return giver == Giver::kSpare || giver == Giver::kHost || giver == Giver::kBlocks ||
           (giver == Giver::kRanges && !commit_);
  }
  void leave_out(Giver giver) { left_ &= static_cast<uint8_t>(~(1u << static_cast<uint8_t>(giver))); }

  const bool commit_;
  uint8_t left_ = (1u << kGivers) - 1;  // bits, by giver
};

// The use of bytes for which somebody waits, in the order in which they are served.
enum class Use : uint8_t {
  kAllocation,  // it holds an iteration up
  kCommit,      // to an elastic range
  kCache,
  kReturn  // bytes that a session has lent, or uses from the host because its page-out ended in part
};
// A place in a line for room.
struct InLine {
  static constexpr uint64_t kNowhere = UINT64_MAX;
  SessionClass cls = SessionClass::kGuaranteed;
  Use use = Use::kAllocation;
  uint64_t place = kNowhere;  // who came first has the lowest
};
// The class counts first, then the use, then the place.
inline bool served_before(const InLine& a, const InLine& b) {
  return std::tuple(a.cls, a.use, a.place) < std::tuple(b.cls, b.use, b.place);
}

}  // namespace gpushare::sched
