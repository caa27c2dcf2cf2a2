// Bytes that can be had again from host memory: they stay for speed alone unless a session wants them now.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/units.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {
namespace {

constexpr double kHalfLifeNs = 60e9;  // of the count of requests

double requests_at(const CacheRecord& cache, uint64_t now_ns) {
  const auto age_ns = static_cast<double>(now_ns - std::min(now_ns, cache.requested_ns));
  return cache.requests * std::exp2(-age_ns / kHalfLifeNs);
}

}  // namespace

CacheRecord* Scheduler::Impl::find_cache(uint64_t id) const {
  for (const auto& cache : caches)
    if (cache->id == id) return cache.get();
  return nullptr;
}

std::vector<CacheRecord*> Scheduler::Impl::droppable() const {
  std::vector<CacheRecord*> out;
  for (const auto& cache : caches)
    if (cache->droppable()) out.push_back(cache.get());
  return out;
}

// Rank 0; 1 if another one, which rests on it, has to go first.
Claim Scheduler::Impl::claim_of(const CacheRecord& cache, uint64_t now_ns) const {
  const bool rested_on = std::any_of(caches.begin(), caches.end(), [&](const auto& other) {
    return other->first_part == cache.id && other->held;
  });
  return {cache.bytes, rested_on ? 1u : 0u, cache.restore_ns * requests_at(cache, now_ns)};
}

WaitingList::Room Scheduler::Impl::cache_room() const {
  WaitingList::Room out = room();
  for (const auto& cache : caches) {
    if (!cache->dropping && !cache->droppable()) continue;
    out.persistent_bytes += cache->bytes;
    out.total_bytes += cache->bytes;
  }
  return out;
}

bool Scheduler::Impl::claim_caches(const SessionRecord& session, uint64_t now_ns) {
  const uint64_t p = session.persistent_bytes, total = p + session.ephemeral_bytes;
  if (!cache_room().holds(p, total)) return false;
  const WaitingList::Room now = room();
  uint64_t dropping = 0;
  for (const auto& cache : caches) dropping += cache->dropping ? cache->bytes : 0;
  const uint64_t missing =
      std::max(p - std::min(p, now.persistent_bytes), total - std::min(total, now.total_bytes));
  if (missing == 0) return false;
  if (missing <= dropping) return true;
  Victims victims{{}, droppable()};
  const auto chosen = choose_victims(std::move(victims), missing - dropping, now_ns, {}, [&] {
    uint64_t freed = 0;
    for (const auto& cache : caches) freed += cache->victim ? cache->bytes : 0;
    return freed >= missing - dropping;
  });
  if (!chosen || chosen->empty()) return false;
  evict(*chosen, now_ns);
  return true;
}

bool Scheduler::Impl::hold_waiting(uint64_t now_ns) {
  while (!cache_line.empty()) {
    CacheRecord& cache = *cache_line.front();
    if (cache.dropping) return true;
    if (cache.bytes <= free_bytes()) {
      cache.waiting = false;
      cache.held = true;
      cache_bytes += cache.bytes;
      cache_line.erase(cache_line.begin());
      actions.push_back({ActionKind::kFillCache, kNoLane, cache.id, cache.bytes});
      continue;
    }
    // What is on its way out counts as there, so that no more goes than is needed.
    const auto stays = [](const auto&) { return false; };
    const uint64_t used = promised_without(stays);
    const uint64_t free = capacity.target_bytes - std::min(capacity.target_bytes, used);
    if (cache.bytes <= free) return true;
    return make_room(find(cache.wanted_by), cache.bytes - free, now_ns) || evicting > 0;
  }
  return false;
}

base::Status Scheduler::add_cache(uint64_t id, uint64_t bytes, double restore_ns, uint64_t first_part) {
  if (id == 0 || impl_->sessions.contains(id) || impl_->find_cache(id) != nullptr)
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("the cache's id %llu is 0 or in use", static_cast<unsigned long long>(id))};
  const uint64_t most = impl_->options.capacity_bytes;
  const CacheRecord* first = impl_->find_cache(first_part);
  if (bytes > most - (first == nullptr ? 0 : first->bytes))
    return {GPUSHARE_EXCEEDS_CAPACITY,
            base::format("%s do not fit: the capacity is %s", base::format_bytes(bytes).c_str(),
                         base::format_bytes(most).c_str())};
  auto cache = std::make_unique<CacheRecord>();
  cache->id = id;
  cache->bytes = impl_->rounded(bytes);
  cache->first_part = first_part;
  cache->restore_ns = std::max(restore_ns, 0.0);
  impl_->caches.push_back(std::move(cache));
  return {};
}

void Scheduler::remove_cache(uint64_t id, uint64_t now_ns) {
  CacheRecord* cache = impl_->find_cache(id);
  if (cache == nullptr) return;
  if (cache->held) impl_->cache_bytes -= cache->bytes;
  if (cache->dropping) --impl_->evicting;
  std::erase(impl_->cache_line, cache);
  std::erase_if(impl_->actions, [id](const Action& action) { return action.session == id; });
  std::erase_if(impl_->caches, [cache](const auto& each) { return each.get() == cache; });
  impl_->gave_back();
  impl_->freed(now_ns);
}

void Scheduler::want_cache(uint64_t id, SessionId session, uint64_t now_ns) {
  CacheRecord* cache = impl_->find_cache(id);
  if (cache == nullptr) return;
  cache->requests = requests_at(*cache, now_ns) + 1;
  cache->requested_ns = now_ns;
  cache->wanted_by = session;
  ++cache->users;
  if (cache->waiting || (cache->held && !cache->dropping)) return;
  cache->waiting = true;
  impl_->cache_line.push_back(cache);
  impl_->admit_waiting(now_ns);
}

void Scheduler::unwant_cache(uint64_t id, uint64_t now_ns) {
  CacheRecord* cache = impl_->find_cache(id);
  if (cache == nullptr || cache->users == 0 || --cache->users > 0) return;
  if (std::exchange(cache->waiting, false)) std::erase(impl_->cache_line, cache);
  impl_->admit_waiting(now_ns);
}

void Scheduler::cache_dropped(uint64_t id, uint64_t now_ns) {
  CacheRecord* cache = impl_->find_cache(id);
  if (cache == nullptr || !cache->held) return;
  if (std::exchange(cache->dropping, false)) --impl_->evicting;
  cache->held = false;
  impl_->cache_bytes -= cache->bytes;
  impl_->gave_back();
  impl_->freed(now_ns);
}

bool Scheduler::cache_held(uint64_t id) const {
  const CacheRecord* cache = impl_->find_cache(id);
  return cache != nullptr && cache->held && !cache->dropping;
}

bool Scheduler::cache_going(uint64_t id) const {
  const CacheRecord* cache = impl_->find_cache(id);
  return cache != nullptr && cache->dropping;
}

uint64_t Scheduler::cached_bytes() const {
  return impl_->cache_bytes;
}

void Scheduler::set_link(double ns_per_byte) {
  if (!std::isfinite(ns_per_byte) || ns_per_byte <= 0) return;
  impl_->options.page_out_ns_per_byte = impl_->options.page_in_ns_per_byte = ns_per_byte;
}

}  // namespace gpushare::sched
