// SPDX-License-Identifier: Apache-2.0
#include "sched/elastic.hpp"

#include <algorithm>
#include <utility>

#include "base/saturate.hpp"

namespace gpushare::sched {

void ElasticRanges::open(RangeId id, const RangeSpec& spec) {
  ranges_[id].spec = spec;
}

void ElasticRanges::close(RangeId id) {
  const auto found = ranges_.find(id);
  if (found == ranges_.end()) return;
  silent_ -= size_t{found->second.silent};
  ranges_.erase(found);
}

void ElasticRanges::set_bytes(RangeId id, uint64_t bytes) {
  const auto found = ranges_.find(id);
  if (found == ranges_.end()) return;
  Record& range = found->second;
  if (bytes < range.bytes) {
    silent_ -= size_t{std::exchange(range.silent, false)};
    range.given_bytes += range.bytes - bytes;
    if (range.given_bytes >= range.asked_bytes) range.gave_all = true;
    if (range.asked && range.still_owed() == 0) range.asked = false;
  }
  range.bytes = bytes;
}

std::vector<RangeRequest> ElasticRanges::ask(RangeId asker, uint64_t want, uint64_t bytes, uint64_t now_ns,
                                             SessionId only, bool lower) {
  const auto asking = ranges_.find(asker);
  if (asking == ranges_.end()) return {};
  const uint64_t coming = on_the_way_bytes(want);
  if (bytes <= coming) return {};
  const uint64_t missing = bytes - coming;
  std::vector<std::pair<RangeId, Record*>> candidates;
  std::vector<Part> parts;
  for (auto& [id, range] : ranges_) {
    if (id == asker || !range.may_give_to(lower ? SessionClass::kOpportunistic : asking->second.spec.cls))
      continue;
    if (range.asked_for == want || (only != kNoSession && range.spec.session != only)) continue;
    candidates.emplace_back(id, &range);
    parts.push_back({range.spec.session, range.bytes});
  }
  std::vector<Claim> claims = ranks_(parts);
  for (size_t i = 0; i < claims.size(); ++i)
    claims[i].price_ns = candidates[i].second->spec.price_ns_per_byte * static_cast<double>(parts[i].bytes);
  // After a silence no range is relied on: each is asked for all that it could give.
  const std::vector<uint64_t> given = give_up(claims, hurried_want_ == want ? UINT64_MAX : missing);
  std::vector<RangeRequest> requests;
  for (const size_t i : giving_order(claims)) {
    auto& [id, of] = candidates[i];
    Record& range = *of;
    const uint64_t part = std::min(missing, given[i]);
    if (part == 0) continue;
    range.asked = true;
    range.asker = asker;
    range.asked_for = want;
    range.asked_bytes = range.owed_bytes = part;
    range.given_bytes = 0;
    range.gave_all = false;
    range.deadline_ns = base::add_saturated(now_ns, range.spec.answer_ns);
    requests.push_back({id, asker, part, range.deadline_ns});
  }
  return requests;
}

void ElasticRanges::answer(RangeId id, uint64_t bytes) {
  const auto found = ranges_.find(id);
  if (found == ranges_.end() || !found->second.asked) return;
  Record& range = found->second;
  if (bytes == kNoAnswer) {
    range.deadline_ns = 0;  // expires at once
    return;
  }
  range.owed_bytes = std::min(bytes, range.owed_bytes);
  if (range.still_owed() == 0) range.asked = false;
}

std::vector<RangeRequest> ElasticRanges::expire(uint64_t now_ns) {
  std::vector<RangeRequest> out;
  for (auto& [id, range] : ranges_) {
    if (!range.asked || range.deadline_ns > now_ns) continue;
    range.asked = false;
    silent_ += size_t{!std::exchange(range.silent, true)};
    hurried_want_ = range.asked_for;
    out.push_back({id, range.asker, range.still_owed(), range.deadline_ns});
  }
  return out;
}

void ElasticRanges::taken(uint64_t want) {
  for (auto& [id, range] : ranges_)
    if (range.asked_for == want && range.gave_all) range.asked_for = 0;
}

void ElasticRanges::withdraw(uint64_t want) {
  for (auto& [id, range] : ranges_)
    if (range.asked && range.asked_for == want) range.asked = false;
}

uint64_t ElasticRanges::can_give(SessionId session, SessionClass cls) const {
  uint64_t sum = 0;
  for (const auto& [id, range] : ranges_)
    if (range.spec.session != session && range.may_give_to(cls)) sum = base::add_saturated(sum, range.bytes);
  return sum;
}

uint64_t ElasticRanges::next_deadline_ns() const {
  uint64_t next = UINT64_MAX;
  for (const auto& [id, range] : ranges_)
    if (range.asked) next = std::min(next, range.deadline_ns);
  return next;
}

uint64_t ElasticRanges::on_the_way_bytes(uint64_t want) const {
  uint64_t sum = 0;
  for (const auto& [id, range] : ranges_)
    if (range.asked && range.asked_for == want) sum = base::add_saturated(sum, range.still_owed());
  return sum;
}

bool ElasticRanges::silent(RangeId id) const {
  const auto found = ranges_.find(id);
  return found != ranges_.end() && found->second.silent;
}

RangeSpec ElasticRanges::of_session(SessionId session, uint64_t* out_bytes) const {
  RangeSpec all;
  all.session = session;
  *out_bytes = 0;
  for (const auto& [id, range] : ranges_) {
    if (range.spec.session != session || range.spec.answer_ns == 0 || range.silent) continue;
    all.price_ns_per_byte = all.answer_ns == 0
                                ? range.spec.price_ns_per_byte
                                : std::min(all.price_ns_per_byte, range.spec.price_ns_per_byte);
    all.answer_ns = std::max(all.answer_ns, range.spec.answer_ns);
    all.cls = range.spec.cls;
    *out_bytes = base::add_saturated(*out_bytes, range.bytes);
  }
  return all;
}

bool ElasticRanges::session_silent(SessionId session) const {
  return silent_ > 0 && std::any_of(ranges_.begin(), ranges_.end(), [session](const auto& each) {
           return each.second.spec.session == session && each.second.silent;
         });
}

}  // namespace gpushare::sched
