// The sessions of a runtime, and the limits that the environment sets for them together. The starter of the program (a
// node agent, an operator) sets these limits; the program's sessions then divide a part of the device instead of the
// whole.
// SPDX-License-Identifier: Apache-2.0
#include "executor/session_table.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/units.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {

namespace {

base::Status read_memory(const char* text, EnvironmentLimits& limits) {
  const auto bytes = base::parse_size(text);
  if (!bytes.ok()) return bytes.status().with_context("GPUSHARE_MEMORY");
  if (*bytes == 0) return {GPUSHARE_INVALID_ARGUMENT, "GPUSHARE_MEMORY is 0: unset it for no limit"};
  limits.memory_bytes = *bytes;
  return {};
}

base::Status read_weight(const char* text, EnvironmentLimits& limits) {
  const auto weight = base::parse_double(text);
  if (!weight.ok()) return weight.status().with_context("GPUSHARE_WEIGHT");
  if (*weight <= 0)
    return {GPUSHARE_INVALID_ARGUMENT, std::string("GPUSHARE_WEIGHT is ") + text + "; it must be above 0"};
  limits.weight = *weight;
  return {};
}

base::Status read_cap(const char* text, EnvironmentLimits& limits) {
  const auto cap = base::parse_percent(text);
  if (!cap.ok()) return cap.status().with_context("GPUSHARE_CAP");
  limits.cap = *cap;
  return {};
}

base::Status read_group(const char* text, EnvironmentLimits& limits) {
  const std::string_view digits = text;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), limits.group, 16);
  if (error != std::errc() || end != digits.data() + digits.size() || limits.group == 0)
    return {GPUSHARE_INVALID_ARGUMENT, std::string("GPUSHARE_GROUP is '") + text +
                                           "'; it must be 1 to 16 hexadecimal digits, not all 0"};
  return {};
}

base::Status read_private_lanes(const char* text, EnvironmentLimits& limits) {
  limits.private_lanes = std::string_view(text) == "1";
  if (limits.private_lanes || std::string_view(text) == "0") return {};
  return {GPUSHARE_INVALID_ARGUMENT,
          std::string("GPUSHARE_PRIVATE_LANES is '") + text + "'; it must be 0 or 1"};
}

}  // namespace

base::Result<EnvironmentLimits> EnvironmentLimits::read() {
  static constexpr std::pair<const char*, base::Status (*)(const char*, EnvironmentLimits&)> kVariables[] = {
      {"GPUSHARE_MEMORY", read_memory},
      {"GPUSHARE_WEIGHT", read_weight},
      {"GPUSHARE_CAP", read_cap},
      {"GPUSHARE_GROUP", read_group},
      {"GPUSHARE_PRIVATE_LANES", read_private_lanes}};
  EnvironmentLimits limits;
  for (const auto& [name, read_into] : kVariables)
    if (const char* text = std::getenv(name); text != nullptr && *text != '\0')
      GPUSHARE_RETURN_IF_ERROR(read_into(text, limits));
  return limits;
}

void SessionTable::add(std::shared_ptr<SessionImpl> session) {
  const uint64_t id = session->id();
  ended_.reserve(sessions_.size() + 1);  // the end of a session needs no memory
  sessions_.emplace(id, std::move(session));
  ++queued_;
  divide_weight();
}

void SessionTable::erase(SessionImpl& session) {
  if (profiled_ == &session) profiled_ = nullptr;
  if (sessions_.erase(session.id()) > 0 && ended_.erase(session.id()) == 0) leave_queue(session);
  divide_weight();
}

void SessionTable::leave_queue(SessionImpl& session) {
  if (session.placed_) return;
  --queued_;
  if (std::exchange(session.out_unplaced_, false)) --out_unplaced_;
}

void SessionTable::placed(SessionImpl& session) {
  if (!session.ended_) leave_queue(session);
  session.placed_ = true;
}

void SessionTable::out_unplaced(SessionImpl& session) {
  if (session.placed_ || session.ended_ || std::exchange(session.out_unplaced_, true)) return;
  ++out_unplaced_;
}

void SessionTable::ended(SessionImpl& session) {
  session.ended_ = true;
  if (sessions_.contains(session.id()) && ended_.insert(session.id()).second) leave_queue(session);
}

SessionTable::Counts SessionTable::counts() const {
  const sched::Authority& authority = *runtime_.authority_;
  size_t out = authority.paged_out() - std::min(authority.paged_out(), out_unplaced_);
  for (const uint64_t id : ended_)
    if (out > 0 && authority.state(id) == sched::SessionState::kPagedOut) --out;
  const size_t here = sessions_.size() - ended_.size() - queued_;
  out = std::min(out, here);
  return {static_cast<uint32_t>(queued_), static_cast<uint32_t>(here - out), static_cast<uint32_t>(out)};
}

std::string SessionTable::check() const {
  Counts now;
  for (const auto& [id, session] : sessions_) {
    if (session->ended_) continue;
    if (!session->placed_)
      ++now.queued;
    else
      ++(runtime_.authority_->state(id) == sched::SessionState::kPagedOut ? now.paged_out : now.resident);
  }
  const Counts kept = counts();
  if (now.queued == kept.queued && now.resident == kept.resident && now.paged_out == kept.paged_out)
    return {};
  return base::format(
      "of %zu sessions %u, %u and %u count as queued, resident and paged out; %u, %u and %u are",
      sessions_.size(), kept.queued, kept.resident, kept.paged_out, now.queued, now.resident, now.paged_out);
}

std::vector<std::shared_ptr<SessionImpl>> SessionTable::all() const {
  std::vector<std::shared_ptr<SessionImpl>> all;
  all.reserve(sessions_.size());
  for (const auto& [id, session] : sessions_) all.push_back(session);
  return all;
}

SessionTable::Map SessionTable::take_all() {
  Map all;
  all.swap(sessions_);
  ended_.clear();
  queued_ = out_unplaced_ = 0;
  return all;
}

void SessionTable::refresh_ready(SessionImpl& session) {
  if (runtime_.collapsed_) return;
  // The authority is null once the runtime is closed; then no session is ready.
  sched::Authority* const authority = runtime_.authority_.get();
  // A session is not ready before it has memory, because the scheduler would pick it. The scheduler must know of a
  // paged-out session that wants to run, to bring it back.
  bool wanted = !session.ended_ && !session.open_ && (session.pull_waits_ || !session.pushes_.empty());
  if (wanted && !session.placed_) wanted = authority->state(session.id_) == sched::SessionState::kPagedOut;
  if (wanted && waits_for_profiled(session)) wanted = false;
  if (wanted == session.told_ready_) return;
  session.told_ready_ = wanted;
  wanted ? ++ready_ : --ready_;
  if (wanted)
    authority->ready(session.id_, runtime_.now());
  else
    authority->not_ready(session.id_, runtime_.now());
}

void SessionTable::picked(SessionImpl& session) {
  if (std::exchange(session.told_ready_, false)) --ready_;
}

bool SessionTable::waits_for_profiled(const SessionImpl& session) const {
  return session.profile_left_ > 0 && profiled_ != nullptr && profiled_ != &session;
}

void SessionTable::refresh_unprofiled(const SessionImpl* but) {
  for (const auto& [id, other] : sessions_)
    if (other.get() != but && other->profile_left_ > 0) refresh_ready(*other);
}

void SessionTable::profile_begin(SessionImpl& session, LaneSlot& lane) {
  profiled_ = &session;
  lane.profiling = true;
  refresh_unprofiled(&session);  // others may have become ready together with it, for lanes of their own
}

void SessionTable::profile_ask(SessionImpl& session, LaneSlot& lane) {
  const SessionImpl::NeedTurn alone(session);
  if (profiled_ != &session || session.torn_down_ || runtime_.collapsed_) return;
  sched::Authority& authority = *runtime_.authority_;
  // A quarter of the free bytes stays for persistent blocks that first iterations make (optimizer state). While lanes
  // that were profiled before have not given their bytes back yet, at least a sixteenth stays, so that a session that
  // grows finds some.
  uint64_t coming = 0;
  for (const LaneSlot* each : runtime_.lanes_.opened()) {
    const uint64_t held = authority.lane_bytes(each->id);
    coming += held - std::min(held, each->want_bytes.load());
  }
  const uint64_t granule = runtime_.memory_->granularity_bytes();
  const uint64_t free = runtime_.free_bytes(), stays = base::add_saturated(free, coming) / 16;
  const uint64_t extra = std::min(free / 4 * 3, free - std::min(free, stays)) / granule * granule;
  const uint64_t quota =
      sched::quota_in_granules(session.quota_bytes_.load(std::memory_order_relaxed), granule);
  const uint64_t within_quota = runtime_.lane_beside(quota, session.persistent_promise_);
  const uint64_t wanted =
      std::max(std::min(authority.lane_bytes(lane.id) + extra, within_quota), session.ephemeral_promise_);
  const uint64_t persistent = session.persistent_promise_;
  if (authority.set_need(session.id_, persistent, wanted, runtime_.now()).ok() && !session.torn_down_ &&
      !runtime_.collapsed_)
    session.ephemeral_promise_ = wanted;
}

void SessionTable::profile_end(SessionImpl& session, LaneSlot& lane, uint64_t peak_bytes) {
  profiled_ = nullptr;
  lane.profiling = false;
  --session.profile_left_;
  const auto with_margin = [](uint64_t bytes) { return bytes + bytes / kProfileMarginDivisor; };
  // Blocks of a later iteration may lie in the margin although they would fit below it. A peak inside the margin is
  // therefore no larger need.
  if (peak_bytes > with_margin(session.profile_peak_bytes_)) session.profile_peak_bytes_ = peak_bytes;
  const uint64_t wanted = std::min(with_margin(session.profile_peak_bytes_), session.ephemeral_promise_);
  if (runtime_.authority_->set_need(session.id_, session.persistent_promise_, wanted, runtime_.now()).ok())
    session.ephemeral_promise_ = wanted;
  refresh_unprofiled(nullptr);
}

uint64_t SessionTable::memory_left(const SessionImpl* but) const {
  if (limits_.memory_bytes == 0) return UINT64_MAX;
  uint64_t given = 0;
  for (const auto& [id, session] : sessions_)
    if (session.get() != but) given += session->effective_quota_bytes();
  return limits_.memory_bytes - std::min(limits_.memory_bytes, given);
}

base::Status SessionTable::limit_memory(SessionOptions& options) const {
  if (limits_.memory_bytes == 0) return {};
  const uint64_t left = memory_left(nullptr);
  const uint64_t wanted = options.persistent_bytes + options.ephemeral_bytes;
  if (options.quota_bytes == 0 && left > 0 && wanted >= options.persistent_bytes && wanted <= left) {
    options.quota_bytes = left;
    return {};
  }
  if (options.quota_bytes > 0 && options.quota_bytes <= left) return {};
  return {GPUSHARE_QUOTA_EXCEEDED,
          "session '" + options.name + "' " +
              (options.quota_bytes > 0
                   ? "asks for a quota of " + base::format_bytes(options.quota_bytes)
                   : "declares persistent_bytes and ephemeral_bytes of " + base::format_bytes(wanted)) +
              "; GPUSHARE_MEMORY allows this runtime " + base::format_bytes(limits_.memory_bytes) +
              ", of which the quotas of other sessions leave " + base::format_bytes(left) +
              ". Give each session a quota_bytes that fits, or raise the limit"};
}

double SessionTable::sum_of_weights() const {
  double sum = 0;
  for (const auto& [id, session] : sessions_) sum += session->weight_;
  return sum;
}

double SessionTable::weight_of_newcomer(double own) const {
  return limits_.weight > 0 ? limits_.weight * own / (own + sum_of_weights()) : own;
}

void SessionTable::divide_weight() {
  if (limits_.weight == 0) return;
  const double sum = sum_of_weights();
  for (const auto& [id, session] : sessions_)
    runtime_.authority_->set_weight(id, limits_.weight * session->weight_ / sum);
}

}  // namespace gpushare::executor
