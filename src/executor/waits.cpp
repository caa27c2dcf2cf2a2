// Says in words what waiting calls wait for, and finds waits that could never end.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/units.hpp"
#include "executor/internal.hpp"
#include "executor/waits.hpp"

namespace gpushare::executor {
namespace {

constexpr size_t kMaxHoldersNamed = 3;

bool bound_here(const SessionImpl* session) {
  for (const Binding* binding = thread_bindings(); binding != nullptr; binding = binding->outer)
    if (binding->session.get() == session && IterationImpl::is_open(*binding)) return true;
  return false;
}

std::string quoted(const SessionImpl& session) {
  return "'" + session.name() + "'";
}

base::Status endless(const SessionImpl& session, const std::string& why) {
  return {GPUSHARE_INVALID_STATE, "session " + quoted(session) + " " + why};
}

}  // namespace

uint64_t RuntimeImpl::free_bytes() const {
  const uint64_t capacity_bytes = authority_->capacity().target_bytes;
  return capacity_bytes - std::min(capacity_bytes, authority_->promised_bytes());
}

// The sessions that hold most of the promised bytes.
std::string RuntimeImpl::holders(const SessionImpl& waiting) const {
  std::vector<std::pair<uint64_t, const SessionImpl*>> holders;
  for (const auto& [id, session] : sessions_) {
    if (session.get() == &waiting || !session->placed_ ||
        authority_->state(id) != sched::SessionState::kResident)
      continue;
    holders.emplace_back(session->persistent_promise_ + session->ephemeral_promise_, session.get());
  }
  if (holders.empty()) return "no other session holds memory";
  const size_t named = std::min(holders.size(), kMaxHoldersNamed);
  std::partial_sort(holders.begin(), holders.begin() + static_cast<std::ptrdiff_t>(named), holders.end(),
                    [](const auto& a, const auto& b) {
                      return a.first != b.first ? a.first > b.first : a.second->id() < b.second->id();
                    });
  std::string text = "held by";
  for (size_t i = 0; i < named; ++i) {
    const auto& [bytes, session] = holders[i];
    text += (i == 0 ? " " : ", ") + quoted(*session) + " (" + base::format_bytes(bytes) +
            (session->open_ ? ", in an iteration)" : ")");
  }
  if (holders.size() > named) text += base::format(" and %zu more", holders.size() - named);
  return text;
}

namespace {

std::string explain_admission(const RuntimeImpl& runtime, const SessionImpl& session, const std::string& what)
    GPUSHARE_REQUIRES(books) {
  if (runtime.actions_.decided_for(session))
    return what + ": there is room, and its memory is about to be made ready";
  const sched::Authority& authority = *runtime.authority_;
  if (const std::string why = authority.coordinated_wait(session.id_); !why.empty()) return what + ": " + why;
  if (const std::string why = authority.policy_wait(session.id_); !why.empty())
    return what + ": " + why + "; " + runtime.holders(session);
  if (runtime.actions_.retries())
    return what +
           ": its bytes are promised, but the device does not have them, and it is tried again from "
           "time to time";
  return what + ": it needs " + base::format_bytes(session.persistent_promise_) + " persistent and " +
         base::format_bytes(session.ephemeral_promise_) + " ephemeral; " +
         base::format_bytes(runtime.free_bytes()) + " of " +
         base::format_bytes(authority.capacity().target_bytes) + " can be promised, the rest is " +
         runtime.holders(session);
}

std::string explain_turn(const RuntimeImpl& runtime, const SessionImpl& session) GPUSHARE_REQUIRES(books) {
  if (session.open_)
    return session.iteration_.can_end_.load() != 0 ? "its iteration before is still open"
                                                   : "its submitted iteration before still runs";
  if (runtime.sessions_.waits_for_profiled(session))
    return "session " + quoted(*runtime.sessions_.profiled()) +
           " runs an iteration of unknown need first, with all memory that is free";
  const sched::LaneId id = runtime.authority_->lane_of(session.id_);
  const LaneSlot* lane = runtime.lanes_.find(id);
  if (lane == nullptr || lane->memory.load() == nullptr) return "its lane is being opened";
  if (lane->holder != nullptr)
    return base::format("lane %u is in an iteration of session '%s'", id, lane->holder->name().c_str());
  if (lane->in_flight >= runtime.depth_) {
    const SessionImpl* first = lane->ring[lane->head % lane->ring.size()].session;
    return base::format("lane %u has %u iterations on the device, the limit; the oldest is of session '%s'",
                        id, lane->in_flight, first == nullptr ? "" : first->name().c_str());
  }
  if (runtime.actions_.paused() || runtime.actions_.acting()) return "memory is being moved or opened first";
  return base::format("policy '%s' lets another session of lane %u run first, or none",
                      runtime.authority_->policy_name().c_str(), id);
}

}  // namespace

std::string RuntimeImpl::explain_wait(const SessionImpl& session) const {
  const std::string who = "session " + quoted(session);
  if (session.ended_ || session.torn_down_) return who + " has ended and waits for nothing";
  if (collapsed_ || authority_ == nullptr) return who + " waits for nothing: the runtime takes no more calls";
  if (!session.placed_) return explain_admission(*this, session, who + " waits for admission");
  if (authority_->state(session.id_) == sched::SessionState::kPagedOut)
    return explain_admission(*this, session, who + " waits to come back from host memory");
  if (session.pull_waits_ || !session.pushes_.empty())
    return who + " waits for its turn: " + explain_turn(*this, session);
  if (session.open_) return who + " has an iteration open and waits for nothing";
  if (session.in_flight_ > 0)
    return base::format("%s waits until the device has done %u of its iterations", who.c_str(),
                        session.in_flight_);
  return who + " waits for nothing";
}

base::Status RuntimeImpl::check_wait(const SessionImpl& session) const {
  if (collapsed_ || session.ended_ || thread_bindings() == nullptr) return {};
  const bool resident = session.placed_ && authority_->state(session.id_) == sched::SessionState::kResident;
  return resident ? check_lane_wait(session) : check_memory_wait(session);
}

base::Status RuntimeImpl::check_lane_wait(const SessionImpl& session) const {
  const sched::LaneId id = authority_->lane_of(session.id_);
  const LaneSlot* lane = lanes_.find(id);
  if (lane != nullptr && lane->holder != nullptr && binds_lane(lane))
    return endless(session, base::format("shares lane %u with the iteration that this thread has open: it "
                                         "would wait for itself",
                                         id));
  if (sessions_.waits_for_profiled(session) && bound_here(sessions_.profiled()))
    return endless(session,
                   "waits until session " + quoted(*sessions_.profiled()) +
                       " has run its first iterations, one of which this thread has open: it would wait for "
                       "itself");
  return {};
}

base::Status RuntimeImpl::check_memory_wait(const SessionImpl& session) const {
  if (actions_.busy() || actions_.retries()) return {};
  // Nobody else can make room: it is all held by iterations of this thread. Sessions that queue before it may still leave.
  size_t residents = 0, queued = 0;
  for (const auto& [id, other] : sessions_) {
    if (other.get() == &session) continue;
    if (!other->placed_ || authority_->state(id) != sched::SessionState::kResident) {
      ++queued;
      continue;
    }
    if (!bound_here(other.get())) return {};
    ++residents;
  }
  if (residents == 0 || (queued > 0 && session.persistent_promise_ <= free_bytes())) return {};
  return endless(session,
                 "waits for memory while this thread has an iteration of every session open that holds any: "
                 "it would wait for itself. End those iterations first");
}

base::Status check_wait_for(const Session& session) {
  const auto* impl = dynamic_cast<const SessionImpl*>(&session);
  return impl == nullptr || thread_bindings() == nullptr ? base::Status() : impl->check_wait();
}

base::Status SessionImpl::check_wait() const {
  BooksLock lock(runtime_->mutex_);
  return runtime_->check_wait(*this);
}

std::string SessionImpl::explain_wait() const {
  BooksLock lock(runtime_->mutex_);
  return runtime_->explain_wait(*this);
}

}  // namespace gpushare::executor
