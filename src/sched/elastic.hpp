// elastic.hpp: which elastic ranges are asked to give bytes back when another one waits for memory, and what follows
// from their answers.
//
// A range that waits asks ranges of its own class and of lower classes. They are chosen as all that give bytes up
// (claims.hpp): by class, then by the policy's order of their sessions, then by their owners' price. Silent ranges are
// not asked. A request has a deadline. A range answers by giving the bytes, or by saying how many it will give before
// the deadline: 0 declines. A range that does neither keeps its bytes and is *silent*: its session counts as
// opportunistic, so that it may be paged out, until the range gives bytes again. After a first silence all others are
// asked at once, so a wait sees at most two deadlines pass, however many ranges keep silent.
//
// ElasticRanges only decides: the driver calls the owners and reports their answers. Threads: the driver serialises
// calls. Cost: O(ranges log ranges) for each request.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "sched/authority.hpp"

namespace gpushare::sched {

using RangeId = uint64_t;

struct RangeSpec {
  SessionId session = kNoSession;
  SessionClass cls = SessionClass::kGuaranteed;  // of its session
  uint64_t answer_ns = 0;                        // the time that it has to answer; 0: it cannot be asked
  double price_ns_per_byte = 0;                  // what giving back and restoring a byte costs its owner
};

struct RangeRequest {
  RangeId range = 0;
  RangeId asker = 0;
  uint64_t bytes = 0;
  uint64_t deadline_ns = 0;
};

class ElasticRanges {
 public:
  static constexpr uint64_t kNoAnswer = UINT64_MAX;
  // Authority::claims_on(): how the sessions of the ranges rank.
  using Ranks = std::function<std::vector<Claim>(std::span<const Part>)>;
  explicit ElasticRanges(Ranks ranks) : ranks_(std::move(ranks)) {}

  void open(RangeId id, const RangeSpec& spec);
  // Requests to the closed range lapse. When the range that asked asks again, they go to others.
  void close(RangeId id);
  // Sets the range's bytes. A fall counts for the request that the range has.
  void set_bytes(RangeId id, uint64_t bytes);

  // `asker` lacks `bytes` for its commit. Returns the requests to be delivered now; empty when enough is on its way or
  // no range is left to ask. `want` is the number of the wait: no range is asked twice for one wait, but see taken().
  // `only`: asks only ranges of that session. `lower`: asks only ranges of opportunistic sessions, whatever the asker's
  // class.
  std::vector<RangeRequest> ask(RangeId asker, uint64_t want, uint64_t bytes, uint64_t now_ns,
                                SessionId only = kNoSession, bool lower = false);
  // The owner's answer to its request: the bytes that it gives in all before the deadline, those given already
  // included, or kNoAnswer. Ignored if the request is over.
  void answer(RangeId id, uint64_t bytes);
  // Requests whose deadline has passed or that got kNoAnswer are over. Returns the requests whose range is silent now.
  std::vector<RangeRequest> expire(uint64_t now_ns);
  // Others took room that had come free for the wait. Ranges that gave all that they were asked for may be asked again.
  void taken(uint64_t want);
  // The wait is over. Its requests stand no longer, and no range counts as silent because of them.
  void withdraw(uint64_t want);

  // What ranges of other sessions could give to one of that class: those that ask() would ask.
  uint64_t can_give(SessionId session, SessionClass cls) const;
  // The earliest deadline of a request, UINT64_MAX without one.
  uint64_t next_deadline_ns() const;
  // Bytes that the wait's requests may still bring.
  uint64_t on_the_way_bytes(uint64_t want) const;
  bool silent(RangeId id) const;
  // True if a range of the session is silent.
  bool session_silent(SessionId session) const;
  // The session's ranges that can be asked and are not silent, as one range: the bytes of all, the longest time to
  // answer, the lowest price.
  RangeSpec of_session(SessionId session, uint64_t* out_bytes) const;

 private:
  struct Record {
    RangeSpec spec;
    uint64_t bytes = 0;
    bool silent = false;
    uint64_t asked_for = 0;  // the wait for which it was asked last
    bool gave_all = false;   // whether it gave all that it was asked for then
    // The request that it has now.
    bool asked = false;
    RangeId asker = 0;
    uint64_t asked_bytes = 0;
    uint64_t owed_bytes = 0;   // as asked, then as answered
    uint64_t given_bytes = 0;  // since it was asked
    uint64_t deadline_ns = 0;
    uint64_t still_owed() const { return owed_bytes > given_bytes ? owed_bytes - given_bytes : 0; }
    // It can be asked for one of that class.
    bool may_give_to(SessionClass cls) const {
      return !asked && !silent && bytes > 0 && spec.answer_ns > 0 && spec.cls >= cls;
    }
  };
  Ranks ranks_;
  std::map<RangeId, Record> ranges_;  // ordered: the same decisions every time
  size_t silent_ = 0;                 // silent ranges; mostly none, so that no commit looks through all
  uint64_t hurried_want_ = 0;         // a range was silent for this wait
};

}  // namespace gpushare::sched
