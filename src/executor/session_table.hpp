// session_table.hpp: the sessions of a runtime: by number, which of them are ready, which is profiled, and what the
// environment lets them have together. Other folders do not include it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/flat_hash.hpp"
#include "base/mutex.hpp"
#include "executor/lent_turn.hpp"
#include "executor/runtime.hpp"

namespace gpushare::executor {

class RuntimeImpl;
class SessionImpl;
struct LaneSlot;

// The limits that GPUSHARE_MEMORY, GPUSHARE_WEIGHT and GPUSHARE_CAP set for a runtime on a shared device; 0 = no limit.
// With GPUSHARE_GROUP the daemon also holds all processes of that group to them together.
struct EnvironmentLimits {
  uint64_t memory_bytes = 0;   // the sum of its sessions' quotas
  double weight = 0;           // the sum of its sessions' weights
  double cap = 0;              // the most of the device's time that they get, of 1
  uint64_t group = 0;          // 0 = none
  bool private_lanes = false;  // GPUSHARE_PRIVATE_LANES: no lane is shared with other processes
  static base::Result<EnvironmentLimits> read();
};

// Part of the runtime's books: the scheduler is told which sessions are ready.
class SessionTable {
 public:
  using Map = base::FlatHashMap<uint64_t, std::shared_ptr<SessionImpl>>;

  explicit SessionTable(RuntimeImpl& runtime) : runtime_(runtime) {}
  // Before the runtime is open.
  void set_limits(const EnvironmentLimits& limits) { limits_ = limits; }

  // ---- sessions that are not torn down
  uint64_t next_id() GPUSHARE_REQUIRES(books) { return next_id_++; }
  void add(std::shared_ptr<SessionImpl> session) GPUSHARE_REQUIRES(books);
  void erase(SessionImpl& session) GPUSHARE_REQUIRES(books);
  SessionImpl* find(uint64_t id) const GPUSHARE_REQUIRES(books) {
    const auto found = sessions_.find(id);
    return found == sessions_.end() ? nullptr : found->second.get();
  }
  Map::const_iterator begin() const GPUSHARE_REQUIRES(books) { return sessions_.begin(); }
  Map::const_iterator end() const GPUSHARE_REQUIRES(books) { return sessions_.end(); }
  size_t size() const GPUSHARE_REQUIRES(books) { return sessions_.size(); }
  bool empty() const GPUSHARE_REQUIRES(books) { return sessions_.empty(); }
  // By state, without those that have ended and are torn down later.
  struct Counts {
    uint32_t queued = 0, resident = 0, paged_out = 0;
  };
  Counts counts() const GPUSHARE_REQUIRES(books);
  std::string check() const GPUSHARE_REQUIRES(books);  // for tests; empty when the counts are right
  // What counts() goes by: the session's bytes have their place on the device for the first time; it is paged out before
  // they had one; it has ended.
  void placed(SessionImpl& session) GPUSHARE_REQUIRES(books);
  void out_unplaced(SessionImpl& session) GPUSHARE_REQUIRES(books);
  void ended(SessionImpl& session) GPUSHARE_REQUIRES(books);
  // A copy for callers that end the sessions, which changes the table.
  std::vector<std::shared_ptr<SessionImpl>> all() const GPUSHARE_REQUIRES(books);
  Map take_all() GPUSHARE_REQUIRES(books);  // the runtime closes

  // ---- readiness: tells the scheduler whether the session has an iteration to run, if that has changed
  void refresh_ready(SessionImpl& session) GPUSHARE_REQUIRES(books);
  bool any_ready() const GPUSHARE_REQUIRES(books) { return ready_ > 0; }
  // The scheduler has picked the session, and knows by itself that it is not ready any more.
  void picked(SessionImpl& session) GPUSHARE_REQUIRES(books);

  // ---- the session that runs its first iterations, whose need is not known; null without one
  const SessionImpl* profiled() const GPUSHARE_REQUIRES(books) { return profiled_; }
  // Another session is profiled first.
  bool waits_for_profiled(const SessionImpl& session) const GPUSHARE_REQUIRES(books);
  void profile_begin(SessionImpl& session, LaneSlot& lane) GPUSHARE_REQUIRES(books);
  // For the thread that begins such an iteration: asks for all that may be had for it, and may let the lock go meanwhile.
  void profile_ask(SessionImpl& session, LaneSlot& lane) GPUSHARE_REQUIRES(books);
  void profile_end(SessionImpl& session, LaneSlot& lane, uint64_t peak_bytes) GPUSHARE_REQUIRES(books);

  // ---- what the environment allows
  // The bytes of GPUSHARE_MEMORY that the quotas of all sessions but one leave; UINT64_MAX without the variable.
  uint64_t memory_left(const SessionImpl* but) const GPUSHARE_REQUIRES(books);
  // Gives a session without a quota what the others have left, so that their sum never exceeds the limit.
  base::Status limit_memory(SessionOptions& options) const GPUSHARE_REQUIRES(books);
  // The weight that the scheduler is told for a newcomer of weight `own`.
  double weight_of_newcomer(double own) const GPUSHARE_REQUIRES(books);
  // The sessions divide the weight of the environment in proportion to their own, so that together they have it and no more.
  void divide_weight() GPUSHARE_REQUIRES(books);

 private:
  void leave_queue(SessionImpl& session) GPUSHARE_REQUIRES(books);
  double sum_of_weights() const GPUSHARE_REQUIRES(books);
  void refresh_unprofiled(const SessionImpl* but) GPUSHARE_REQUIRES(books);

  RuntimeImpl& runtime_;
  EnvironmentLimits limits_;
  Map sessions_ GPUSHARE_GUARDED_BY(books);
  size_t queued_ GPUSHARE_GUARDED_BY(books) = 0;        // neither placed nor ended
  size_t out_unplaced_ GPUSHARE_GUARDED_BY(books) = 0;  // of these
  base::FlatHashSet<uint64_t> ended_ GPUSHARE_GUARDED_BY(books);
  uint64_t next_id_ GPUSHARE_GUARDED_BY(books) = 1;
  uint64_t ready_ GPUSHARE_GUARDED_BY(books) = 0;  // those with told_ready_ set
  SessionImpl* profiled_ GPUSHARE_GUARDED_BY(books) = nullptr;
};

}  // namespace gpushare::executor
