// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/step_batcher.hpp"

#include <algorithm>
#include <cmath>

#include "base/saturate.hpp"
#include "gpushare/status.h"

namespace gpushare::sched::slo {
namespace {

using base::add_saturated;

constexpr uint64_t kMostBytes = uint64_t{1} << 60;
constexpr uint64_t kMostTokens = uint64_t{1} << 32;
constexpr size_t kMostDrops = 1024;  // in one call: whoever submits waits meanwhile

uint64_t times_saturated(uint64_t a, uint64_t b) {
  return a != 0 && b > UINT64_MAX / a ? UINT64_MAX : a * b;
}

unsigned long long number(uint64_t value) {
  return static_cast<unsigned long long>(value);
}

constexpr size_t kTerms = 4;
using Terms = std::array<double, kTerms>;
using Equations = std::array<std::array<double, kTerms + 1>, kTerms>;

// Solves for the unknowns that are `open`; the others are 0. False if they are not determined.
bool solve(Equations rows, const std::array<bool, kTerms>& open, Terms& out) {
  for (size_t i = 0; i < kTerms; ++i) {
    if (open[i]) continue;
    for (size_t j = 0; j < kTerms; ++j) rows[i][j] = rows[j][i] = 0;
    rows[i][i] = 1;
    rows[i][kTerms] = 0;
  }
  for (size_t i = 0; i < kTerms; ++i) {
    if (!(rows[i][i] > 0)) return false;
    for (size_t j = i + 1; j < kTerms; ++j) {
      const double factor = rows[j][i] / rows[i][i];
      for (size_t k = i; k <= kTerms; ++k) rows[j][k] -= factor * rows[i][k];
    }
  }
  for (size_t i = kTerms; i-- > 0;) {
    out[i] = rows[i][kTerms];
    for (size_t j = i + 1; j < kTerms; ++j) out[i] -= rows[i][j] * out[j];
    out[i] /= rows[i][i];
  }
  return true;
}

}  // namespace

// ---- the model of time ----

StepTime::StepTime(const StepOptions& told)
    : told_{told.step_ns, told.decode_ns, told.prefill_ns, told.read_ns}, value_(told_) {}

void StepTime::observe(const StepWork& work, double took_ns) {
  // The first step pays for what is done once (compilation, page faults), and says nothing of those to come.
  if (seen_++ == 0 || !(took_ns > 0)) return;
  if (const double expected = ns(work); expected > 0)
    margin_ = std::clamp(margin_ + (took_ns > margin_ * expected ? 0.0196 : -0.0004), 1.0, 2.0);
  if (samples_.size() < kWindow)
    samples_.push_back({work, took_ns});
  else
    samples_[next_++ % kWindow] = {work, took_ns};
  if (samples_.size() < 16 || seen_ % 16 == 0) fit();
}

// Least squares of relative errors. Steps that are far from the fit count less in a second pass, so that stalls do not move it. What was told
// counts less, too, where it is off by more than a step: else a figure that is a thousand times too high would make every step look
// far from the fit, and stay.
void StepTime::fit() {
  const double each = 1e-3 * static_cast<double>(samples_.size()) + 0.1;
  for (int pass = 0; pass < 3; ++pass) {
    Equations rows{};
    Terms scale{};
    for (const Sample& sample : samples_) {
      const Terms x{1 / sample.took, sample.work.decoding / sample.took, sample.work.prefill / sample.took,
                    sample.work.read / sample.took};
      double weight = 1;
      if (pass > 0) {
        const double off = std::abs(ns(sample.work) / sample.took - 1);
        weight = std::min(1.0, 0.1 / std::max(off, 1e-9));
      }
      for (size_t i = 0; i < kTerms; ++i) {
        scale[i] += x[i] / static_cast<double>(samples_.size());
        for (size_t j = 0; j < kTerms; ++j) rows[i][j] += weight * x[i] * x[j];
        rows[i][kTerms] += weight * x[i];
      }
    }
    std::array<bool, kTerms> open{};
    for (size_t i = 0; i < kTerms; ++i) {
      open[i] = scale[i] > 0;
      const double off = pass > 0 ? std::max(1.0, scale[i] * std::abs(value_[i] - told_[i])) : 1;
      const double weight = each * scale[i] * scale[i] / (off * off);
      rows[i][i] += weight * (told_[i] > 0 ? 1 : 1e-3);
      rows[i][kTerms] += weight * told_[i];
    }
    Terms found{};
    for (int again = 0; again < static_cast<int>(kTerms); ++again) {
      if (!solve(rows, open, found)) return;
      const auto least = std::min_element(found.begin(), found.end());
      if (*least >= 0) break;
      open[static_cast<size_t>(least - found.begin())] = false;
    }
    for (size_t i = 0; i < kTerms; ++i) value_[i] = scale[i] > 0 ? std::max(found[i], 0.0) : told_[i];
  }
}

// ---- requests ----

uint64_t StepBatcher::Held::due_ns() const {
  if (tokens == 0) return request.first_deadline_ns;
  return add_saturated(first_ns, times_saturated(tokens, request.token_ns));
}

uint64_t StepBatcher::Held::join_bytes() const {
  return add_saturated(request.start_bytes, times_saturated(tokens, request.step_bytes));
}

StepBatcher::StepBatcher(std::string name, const StepOptions& options)
    : name_(std::move(name)), options_(options), memory_(most_memory()), time_(options) {
  next_step_.places = options.max_members;
}

base::Status StepBatcher::check(const StepRequest& request) const {
  const auto wrong = [&](const char* what, uint64_t value, const char* allowed) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("request %llu: %s is %llu, allowed are %s", number(request.id), what,
                                     number(value), allowed));
  };
  if (request.prompt_tokens == 0 || request.prompt_tokens > kMostTokens)
    return wrong("prompt_tokens", request.prompt_tokens, "1 to 2^32");
  if (request.expected_tokens > kMostTokens)
    return wrong("expected_tokens", request.expected_tokens, "up to 2^32");
  if (request.start_bytes > kMostBytes) return wrong("start_bytes", request.start_bytes, "up to 2^60");
  if (request.step_bytes > kMostBytes) return wrong("step_bytes", request.step_bytes, "up to 2^60");
  if (request.token_ns == 0) return wrong("token_ns", 0, "1 and more");
  if (!(request.cost > 0) || !std::isfinite(request.cost))
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("request %llu: cost is %g, allowed are finite numbers above 0", number(request.id),
                         request.cost)};
  return {};
}

base::Status StepBatcher::arrive(const StepRequest& request, uint64_t now_ns) {
  GPUSHARE_RETURN_IF_ERROR(check(request));
  if (held_.contains(request.id))
    return {GPUSHARE_ALREADY_EXISTS, base::format("request %llu is not answered yet", number(request.id))};
  const auto refuse = [this](base::Status status) {
    ++stats_.refused;
    return status;
  };
  if (request.start_bytes + request.step_bytes > most_memory())
    return refuse(
        {GPUSHARE_EXCEEDS_CAPACITY,
         base::format(
             "request %llu needs %llu bytes for its prompt and %llu for its first token; the limit of all "
             "members is %llu: shorten the prompt or raise memory_bytes",
             number(request.id), number(request.start_bytes), number(request.step_bytes),
             number(most_memory()))});
  if (arrivals_.size() >= options_.max_pending)
    return refuse(
        {GPUSHARE_QUEUE_FULL, base::format("request %llu: %zu requests wait, the limit; try again later",
                                           number(request.id), arrivals_.size())});
  if (request.first_deadline_ns < now_ns)
    return refuse(
        {GPUSHARE_TIMED_OUT,
         base::format("request %llu: the deadline of its first token passed %.3f ms ago", number(request.id),
                      static_cast<double>(now_ns - request.first_deadline_ns) / 1e6)});
  auto held = std::make_unique<Held>();
  held->request = request;
  held->request.arrival_ns = std::min(request.arrival_ns, now_ns);  // nothing arrives after it was handed in
  Held& of = *held;
  held_.try_emplace(request.id, std::move(held));
  enqueue(of);
  next_step_.waiting.add(request.cost, request.first_deadline_ns, step_.expected_ns);
  ++stats_.accepted;
  return {};
}

StepBatcher::DeadlineKey StepBatcher::deadline_key(const Held& of) {
  return {of.tokens == 0 ? of.request.first_deadline_ns : kNever, of.request.arrival_ns, of.request.id};
}

void StepBatcher::enqueue(Held& of) {
  of.place = Place::kWaiting;
  deadlines_.insert(deadline_key(of));
  arrivals_.insert({of.request.arrival_ns, of.request.id});
}

void StepBatcher::dequeue(Held& of) {
  deadlines_.erase(deadline_key(of));
  arrivals_.erase({of.request.arrival_ns, of.request.id});
}

void StepBatcher::answer(Held& of, int32_t status, std::optional<DropReason> dropped, uint64_t now_ns) {
  const RequestId id = of.request.id;
  events_.push_back({id, true, status, dropped, of.tokens, now_ns,
                     status == GPUSHARE_OK && of.tokens > 0 ? of.last_due_ns : of.due_ns(), of.late});
  if (status == GPUSHARE_OK)
    ++(of.late ? stats_.late : stats_.in_time);
  else if (dropped == DropReason::kExpired)
    ++stats_.expired;
  else
    ++(status == GPUSHARE_CANCELLED ? stats_.cancelled : stats_.failed);
  held_.erase(id);
}

bool StepBatcher::cancel(RequestId id, uint64_t now_ns) {
  const auto found = held_.find(id);
  if (found == held_.end() || found->second->ends != 0) return false;
  Held& of = *found->second;
  if (of.place == Place::kWaiting) {
    dequeue(of);
    next_step_.waiting.remove(of.request.cost, std::get<0>(deadline_key(of)), step_.expected_ns);
    answer(of, GPUSHARE_CANCELLED, DropReason::kCancelled, now_ns);
  } else if (of.place == Place::kLeaving || (running_ && of.chosen)) {
    of.ends = GPUSHARE_CANCELLED;
  } else {
    leave(of, GPUSHARE_CANCELLED);
  }
  return true;
}

bool StepBatcher::cancel_some(uint64_t now_ns) {
  closing_ = true;
  next_step_.members.clear();
  next_step_.others = {};
  next_step_.waiting.clear();
  const std::vector<Held*> members = members_;
  for (const Held* each : members) cancel(each->request.id, now_ns);
  for (size_t count = 0; !arrivals_.empty() && count < kMostDrops; ++count)
    cancel(arrivals_.begin()->second, now_ns);
  return !arrivals_.empty();
}

base::Status StepBatcher::set_memory(uint64_t bytes) {
  if (bytes > most_memory())
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("a memory limit of %llu bytes is above the queue's memory_bytes, %llu",
                         number(bytes), number(most_memory()))};
  memory_ = bytes;
  return {};
}

void StepBatcher::expire(uint64_t now_ns) {
  for (size_t dropped = 0; expires_ns() < now_ns && dropped < kMostDrops; ++dropped) {
    Held& of = held(std::get<2>(*deadlines_.begin()));
    dequeue(of);
    answer(of, GPUSHARE_TIMED_OUT, DropReason::kExpired, now_ns);
  }
}

// ---- a step ----

StepBatcher::Held* StepBatcher::victim() {
  Held* last = nullptr;
  for (Held* each : members_)
    if (!each->chosen && (last == nullptr || std::pair(each->request.arrival_ns, each->request.id) >
                                                 std::pair(last->request.arrival_ns, last->request.id)))
      last = each;
  return last;
}

void StepBatcher::leave(Held& of, int32_t ends) {
  of.place = Place::kLeaving;
  of.ends = ends;
  members_.erase(std::find(members_.begin(), members_.end(), &of));
  leaving_.push_back(of.request.id);
  bytes_ -= of.bytes;
  planned_bytes_ -= of.bytes;
  of.bytes = 0;
}

void StepBatcher::give_back(Held& member) {
  ++stats_.returned;
  stats_.lost_tokens += member.processed + (member.tokens - member.generated);
  const uint64_t needs = add_saturated(member.join_bytes(), member.request.step_bytes);
  leave(member, needs > most_memory() ? GPUSHARE_DEVICE_OUT_OF_MEMORY : GPUSHARE_OK);
}

// Members grew beyond what was planned for them, or the limit was lowered.
void StepBatcher::keep_within_limit() {
  while (bytes_ > memory_) {
    Held* one = victim();
    if (members_.size() == 1 && bytes_ > most_memory())
      leave(*one, GPUSHARE_DEVICE_OUT_OF_MEMORY);
    else
      give_back(*one);
  }
}

// No member can go on, for want of memory: one makes room for the others.
void StepBatcher::free_the_stuck() {
  if (!step_.members.empty() || members_.empty() || !leaving_.empty()) return;
  Held* one = victim();
  if (members_.size() == 1 && memory_ == most_memory())
    leave(*one, GPUSHARE_DEVICE_OUT_OF_MEMORY);  // nobody else's memory would help
  else
    give_back(*one);
}

bool StepBatcher::choose_for(Held& member, uint64_t bytes, uint64_t prefill) {
  if (member.place != Place::kMember || member.chosen || bytes > room()) return false;
  member.chosen = true;
  member.prefill = prefill;
  planned_bytes_ += bytes;
  step_.members.push_back({member.request.id, prefill, member.processed, member.total(), member.tokens});
  return true;
}

bool StepBatcher::decode(Held& member) {
  if (!member.decodes() || !choose_for(member, member.request.step_bytes, 0)) return false;
  ++decoding_;
  reading_ += member.context();
  return true;
}

bool StepBatcher::prefill(Held& member, uint64_t tokens) {
  const uint64_t left = member.total() - member.processed;
  tokens = std::min(tokens, left);
  if (options_.max_prefill_tokens != 0) tokens = std::min(tokens, options_.max_prefill_tokens - prefilling_);
  if (tokens == 0 || !choose_for(member, tokens == left ? member.request.step_bytes : 0, tokens))
    return false;
  prefilling_ += tokens;
  return true;
}

bool StepBatcher::join(Held& request) {
  const uint64_t bytes = request.join_bytes();
  if (request.place != Place::kWaiting || std::get<0>(deadline_key(request)) < begun_ns_ ||
      members_.size() >= options_.max_members || add_saturated(bytes, request.request.step_bytes) > room())
    return false;
  dequeue(request);
  members_.push_back(&request);
  request.place = Place::kMember;
  request.processed = 0;
  request.generated = request.tokens;
  request.bytes = bytes;
  bytes_ += bytes;
  planned_bytes_ += bytes;
  return true;
}

const Step& StepBatcher::begin_step(uint64_t now_ns) {
  expire(now_ns);
  begun_ns_ = now_ns;
  step_.members.clear();
  step_.left.clear();
  decoding_ = 0;
  prefilling_ = 0;
  reading_ = 0;
  planned_bytes_ = bytes_;
  for (Held* each : members_) each->chosen = false;
  keep_within_limit();
  if (!closing_) choose(now_ns);
  free_the_stuck();
  step_.left.swap(leaving_);
  step_.expected_ns = base::to_uint64(planned_ns());
  step_.worth = worth_of_step();
  foresee_next();
  step_.wake_ns = expires_ns();
  running_ = !step_.empty();
  stats_.most_bytes = std::max(stats_.most_bytes, planned_bytes_);
  return step_;
}

Worth StepBatcher::worth_of_step() {
  Worth worth;
  for (const StepMember& member : step_.members) {
    const Held& of = held(member.id);
    if (of.decodes_after(member.prefill))
      worth.add(of.request.cost, of.due_ns(), step_.expected_ns, begun_ns_);
  }
  return worth;
}

Worth NextStep::worth(uint64_t now_ns, const StepResult& first) const {
  Worth worth;
  const auto add = [&](const Worth& more) {
    if (more.until_ns < now_ns) return;
    worth.cost += more.cost;
    worth.until_ns = std::min(worth.until_ns, more.until_ns);
  };
  add(others);
  size_t ended = 0;
  for (size_t i = 0; i < members.size(); ++i) {
    const bool done = i < first.done.size() && first.done[i] != 0;
    const bool failed = i < first.statuses.size() && first.statuses[i] != GPUSHARE_OK;
    if (first.status != GPUSHARE_OK || done || failed)
      ++ended;
    else
      add(members[i]);
  }
  add(waiting.worth(places + ended, now_ns));
  return worth;
}

void StepBatcher::foresee_next() {
  next_step_.others = {};
  next_step_.members.clear();
  next_step_.waiting.clear();
  if (closing_) return;
  const uint64_t begins_ns = next_begins_ns();
  for (const StepMember& member : step_.members) {
    const Held& of = held(member.id);
    uint64_t due_ns = of.due_ns();
    if (of.decodes_after(member.prefill))  // it gets a token in this step
      due_ns = add_saturated(of.tokens == 0 ? begins_ns : of.first_ns,
                             times_saturated(of.tokens + 1, of.request.token_ns));
    next_step_.members.emplace_back().add(of.request.cost, due_ns, step_.expected_ns, begins_ns);
  }
  for (const Held* each : members_)
    if (!each->chosen)
      next_step_.others.add(each->request.cost, each->due_ns(), step_.expected_ns, begins_ns);
  next_step_.places = options_.max_members - members_.size();
  size_t left = std::min<size_t>(Waiting::kMost, next_step_.places + step_.members.size());
  auto at = deadlines_.lower_bound({add_saturated(begins_ns, step_.expected_ns), 0, 0});
  for (; at != deadlines_.end() && left > 0; ++at, --left)
    next_step_.waiting.add(held(std::get<2>(*at)).request.cost, std::get<0>(*at), step_.expected_ns);
}

void StepBatcher::end_step(const StepResult& result, uint64_t device_ns, uint64_t now_ns) {
  running_ = false;
  ++stats_.steps;
  stats_.busy_ns += device_ns;
  if (result.status == GPUSHARE_OK && !step_.members.empty())
    time_.observe(work(), static_cast<double>(device_ns));
  for (RequestId id : step_.left) {
    Held& of = held(id);
    if (of.ends == GPUSHARE_OK)
      enqueue(of);
    else
      answer(of, of.ends,
             of.ends == GPUSHARE_CANCELLED ? std::optional(DropReason::kCancelled) : std::nullopt, now_ns);
  }
  for (size_t i = 0; i < step_.members.size(); ++i)
    end_member(held(step_.members[i].id), step_.members[i], i, result, now_ns);
}

void StepBatcher::undo_step() {
  running_ = false;
  leaving_.insert(leaving_.begin(), step_.left.begin(), step_.left.end());
  for (const StepMember& member : step_.members) {
    Held& of = held(member.id);
    of.chosen = false;
    if (of.ends != GPUSHARE_OK) leave(of, of.ends);
  }
}

void StepBatcher::end_member(Held& of, const StepMember& member, size_t index, const StepResult& result,
                             uint64_t now_ns) {
  of.chosen = false;
  of.processed += member.prefill;
  stats_.prefilled_tokens += member.prefill;
  int32_t status = result.status;
  if (status == GPUSHARE_OK && index < result.statuses.size()) status = result.statuses[index];
  const bool done = index < result.done.size() && result.done[index] != 0;
  uint64_t bytes = of.bytes;
  if (status == GPUSHARE_OK && of.decodes()) {
    of.last_due_ns = of.due_ns();
    if (now_ns > of.last_due_ns) of.late = true;
    if (of.tokens++ == 0) of.first_ns = now_ns;
    ++stats_.tokens;
    bytes += of.request.step_bytes;
    if (!done && of.ends == GPUSHARE_OK)
      events_.push_back(
          {of.request.id, false, GPUSHARE_OK, std::nullopt, of.tokens, now_ns, of.last_due_ns, of.late});
  }
  if (index < result.bytes.size() && result.bytes[index] != UINT64_MAX)
    bytes = std::min(result.bytes[index], kMostBytes);
  bytes = std::min(bytes, UINT64_MAX - (bytes_ - of.bytes));  // the sum must not wrap
  if (status == GPUSHARE_OK && !done) {
    bytes_ += bytes - of.bytes;
    planned_bytes_ += bytes - of.bytes;
    of.bytes = bytes;
    if (of.ends != GPUSHARE_OK) leave(of, of.ends);
    return;
  }
  bytes_ -= of.bytes;
  planned_bytes_ -= of.bytes;
  members_.erase(std::find(members_.begin(), members_.end(), &of));
  if (status == GPUSHARE_OK)
    mean_tokens_ += (static_cast<double>(of.tokens) - mean_tokens_) / (mean_tokens_ == 0 ? 1 : 64);
  if (of.ends != GPUSHARE_OK)
    answer(of, of.ends, DropReason::kCancelled, now_ns);
  else
    answer(of, status, std::nullopt, now_ns);
}

void StepBatcher::take_events(std::vector<StepEvent>& out) {
  out.insert(out.end(), events_.begin(), events_.end());
  events_.clear();
}

StepStats StepBatcher::stats() const {
  StepStats stats = stats_;
  stats.pending = arrivals_.size();
  stats.members = members_.size();
  stats.bytes = bytes_;
  return stats;
}

}  // namespace gpushare::sched::slo
