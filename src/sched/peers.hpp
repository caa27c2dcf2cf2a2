// peers.hpp: indexes that save the scheduler a look at every session and lane for each turn: the order of the sessions
// that share the device, and for each lane the figures that other lanes ask for. An event marks what it touches, and
// the next question brings that up to date (peers.cpp). Scheduler::check() compares all of it with the sessions
// themselves.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/intrusive/set.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "sched/types.hpp"

namespace gpushare::sched {

struct SessionRecord;

struct ByVirtualTag;
struct ByBegunTag;
using ByVirtualHook = boost::intrusive::set_base_hook<boost::intrusive::tag<ByVirtualTag>>;
using ByBegunHook = boost::intrusive::set_base_hook<boost::intrusive::tag<ByBegunTag>>;

// The sessions of a lane, in the order in which they joined it. Leaving takes constant time, amortised: the place of a
// session that left stays empty until half of the places are empty.
class Members {
 public:
  class Iterator {
   public:
    using iterator_category = std::forward_iterator_tag;
    using value_type = SessionRecord*;
    using difference_type = ptrdiff_t;
    using pointer = SessionRecord* const*;
    using reference = SessionRecord*;
    Iterator() = default;
    Iterator(pointer at, pointer end) : at_(at), end_(end) { skip(); }
    SessionRecord* operator*() const { return *at_; }
    Iterator& operator++() {
      ++at_;
      skip();
      return *this;
    }
    Iterator operator++(int) {
      const Iterator before = *this;
      ++*this;
      return before;
    }
    bool operator==(const Iterator& other) const { return at_ == other.at_; }

   private:
    void skip() {
      while (at_ != end_ && *at_ == nullptr) ++at_;
    }
    pointer at_ = nullptr, end_ = nullptr;
  };
  Iterator begin() const { return {places_.data(), places_.data() + places_.size()}; }
  Iterator end() const { return {places_.data() + places_.size(), places_.data() + places_.size()}; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::vector<SessionRecord*> all() const { return {begin(), end()}; }
  inline void push_back(SessionRecord& session);
  inline void erase(SessionRecord& session);

 private:
  std::vector<SessionRecord*> places_;
  size_t size_ = 0;
};

// What other lanes ask about a lane: figures of its sessions that are ready or have something in flight.
struct Front {
  bool stale = true;
  bool mixed = false;  // sessions that share by weight are of several ranks: they are looked at one by one
  bool any_ready = false;           // of those that share by weight
  uint64_t rank = 0;                // of those that share by weight
  uint64_t best_rank = UINT64_MAX;  // of all; only where ranks are numbers
  double virtual_ns = INFINITY;     // least of those that share by weight
  uint64_t ready_since_ns = 0;      // last, of those that are ready and share by weight
  uint64_t overdue_ns = 0;          // when others no longer wait for what is in flight
  bool operator==(const Front&) const = default;
};

// The first two of all lanes for which a lane may have to wait. Two, so that there is an answer for either of them
// without itself.
struct FirstLanes {
  struct Of {
    LaneId lane = kNoLane;
    double virtual_ns = INFINITY;
    uint64_t until_ns = kUnknown;
    bool operator==(const Of&) const = default;
  };
  uint64_t version = 0, now_ns = 0;  // of the state for which they hold; version 0: none
  Of first, second;
  bool holds(uint64_t of_version, uint64_t at_ns) const { return version == of_version && now_ns == at_ns; }
  const Of& without(LaneId own) const { return first.lane == own ? second : first; }
};

}  // namespace gpushare::sched
