// Bytes that can be had again from host memory, which stay for speed alone unless a session wants them now: caches, and
// sessions that are spare.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/units.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {
namespace {

// Other users' processes report these numbers. The limits keep sums of prices finite.
constexpr double kMostLinkNsPerByte = 1e6, kMostWorthNs = 1e30;

double requests_at(const CacheRecord& cache, uint64_t now_ns) {
  return decayed(cache.requests, cache.requested_ns, now_ns);
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

// Caches rank by class. A cache ranks above the caches that rest on it, because those have to go first.
Claim Scheduler::Impl::claim_of(const CacheRecord& cache, uint64_t now_ns) const {
  uint32_t rank = 2 * spare_rank(cache.cls);
  for (const auto& other : caches)
    if (other->first_part == cache.id && other->held) rank = std::max(rank, 2 * spare_rank(other->cls) + 1);
  return {cache.bytes, rank, cache.restore_ns * requests_at(cache, now_ns)};
}

void Scheduler::Impl::stand_in_line(CacheRecord& cache) {
  if (std::exchange(cache.waiting, true)) std::erase(cache_line, &cache);
  const auto behind = std::find_if(cache_line.begin(), cache_line.end(), [&](const CacheRecord* other) {
    return served_before({cache.cls, Use::kCache}, {other->cls, Use::kCache});
  });
  cache_line.insert(behind, &cache);
}

// The session for which a waiting cache asks. When that has gone, it is the best of the others that want the cache, and
// the cache stands in line by the class of that one.
const SessionRecord* Scheduler::Impl::wanter(CacheRecord& cache) {
  if (const SessionRecord* by = find(cache.wanted_by); by != nullptr) return by;
  std::erase_if(cache.wanters, [this](SessionId id) { return find(id) == nullptr; });
  const SessionRecord* best = nullptr;
  for (const SessionId id : cache.wanters)
    if (const SessionRecord* other = find(id); best == nullptr || other->bytes_cls < best->bytes_cls)
      best = other;
  if (best == nullptr) return nullptr;
  cache.wanted_by = best->view.id;
  if (std::exchange(cache.cls, best->bytes_cls) != best->bytes_cls) stand_in_line(cache);
  return best;
}

bool Scheduler::Impl::hold_waiting(uint64_t now_ns) {
  while (!cache_line.empty()) {
    CacheRecord& front = *cache_line.front();
    (void)wanter(front);
    if (&front != cache_line.front()) continue;
    // A first part may stand behind what rests on it: it moves back when its session goes, and forward again when
    // another one comes.
    CacheRecord* first = find_cache(front.first_part);
    CacheRecord& cache = first != nullptr && first->waiting ? *first : front;
    if (cache.dropping) return true;
    if (cache.bytes <= free_bytes()) {
      cache.waiting = false;
      cache.held = true;
      cache.claim.promise(cache.bytes);
      std::erase(cache_line, &cache);
      actions.push_back({ActionKind::kFillCache, kNoLane, cache.id, cache.bytes});
      continue;
    }
    // Bytes on their way out count as free here, so that no more goes than is needed.
    const auto stays = [](const auto&) { return false; };
    const uint64_t used = promised_without(stays);
    const uint64_t free = capacity.target_bytes - std::min(capacity.target_bytes, used);
    if (cache.bytes <= free) return true;
    return make_room({Why::kAllocation, now_ns, wanter(cache), cache.bytes - free}, std::nullopt) ||
           evicting > 0;
  }
  return false;
}

// For a session that found no place although the books have room, because the free bytes are in pieces or other
// programs use them. The session waits until something is freed, and caches may be the only thing left to free.
void Scheduler::Impl::drop_caches(uint64_t bytes, uint64_t now_ns) {
  const Ask ask{Why::kPieces, now_ns, nullptr, bytes};
  if (const auto victims = who_gives(ask, who_may_give(ask))) evict(*victims, now_ns);
}

base::Status Scheduler::add_cache(uint64_t id, uint64_t bytes, double restore_ns, uint64_t first_part) {
  if (id == 0 || impl_->sessions.contains(id) || impl_->find_cache(id) != nullptr)
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("the cache's id %llu is 0 or in use", static_cast<unsigned long long>(id))};
  const CacheRecord* first = impl_->find_cache(first_part);
  if (first_part != 0 && (first == nullptr || first->first_part != 0))
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("the first part %llu is no cache, or has a first part itself",
                         static_cast<unsigned long long>(first_part))};
  const uint64_t most = impl_->options.capacity_bytes;
  if (bytes > most - (first == nullptr ? 0 : first->bytes))
    return {GPUSHARE_EXCEEDS_CAPACITY,
            base::format("%s do not fit: the capacity is %s", base::format_bytes(bytes).c_str(),
                         base::format_bytes(most).c_str())};
  auto cache = std::make_unique<CacheRecord>();
  cache->claim = ClaimNode(impl_->tree.caches);
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
  if (cache->dropping) --impl_->evicting;
  if (CacheRecord* first = impl_->find_cache(cache->first_part); first != nullptr)
    for (uint64_t left = cache->users; left > 0; --left) (void)impl_->remove_user(*first);
  std::erase(impl_->cache_line, cache);
  std::erase_if(impl_->actions, [id](const Action& action) { return action.session == id; });
  std::erase_if(impl_->caches, [cache](const auto& each) { return each.get() == cache; });
  impl_->gave_back();
  impl_->freed(now_ns);
}

bool Scheduler::Impl::add_user(CacheRecord& cache, SessionId session, uint64_t now_ns) {
  cache.requests = requests_at(cache, now_ns) + 1;
  cache.requested_ns = now_ns;
  ++cache.users;
  const bool waits = !cache.held || cache.dropping;
  const SessionRecord* by = find(session);
  if (by != nullptr) {
    std::erase_if(cache.wanters, [&](SessionId other) { return other == session || find(other) == nullptr; });
    cache.wanters.push_back(session);
  }
  // While it waits, it waits for the session of the best class that wants it.
  if (cache.waiting && (by == nullptr || by->bytes_cls > cache.cls)) return false;
  const SessionClass before = cache.cls;
  cache.wanted_by = session;
  if (by != nullptr) cache.cls = by->bytes_cls;
  if (!waits || (cache.waiting && cache.cls == before)) return false;
  stand_in_line(cache);
  return true;
}

bool Scheduler::Impl::remove_user(CacheRecord& cache) {
  if (cache.users == 0 || --cache.users > 0) return false;
  cache.wanters.clear();
  if (std::exchange(cache.waiting, false)) std::erase(cache_line, &cache);
  return true;
}

void Scheduler::want_cache(uint64_t id, SessionId session, uint64_t now_ns) {
  CacheRecord* cache = impl_->find_cache(id);
  if (cache == nullptr) return;
  CacheRecord* first = impl_->find_cache(cache->first_part);
  const bool first_waits = first != nullptr && impl_->add_user(*first, session, now_ns);
  if (impl_->add_user(*cache, session, now_ns) || first_waits) impl_->admit_waiting(now_ns);
}

void Scheduler::unwant_cache(uint64_t id, uint64_t now_ns) {
  CacheRecord* cache = impl_->find_cache(id);
  if (cache == nullptr || cache->users == 0) return;
  CacheRecord* first = impl_->find_cache(cache->first_part);
  const bool first_free = first != nullptr && impl_->remove_user(*first);
  if (!impl_->remove_user(*cache) && !first_free) return;
  if (impl_->residents == 0 && impl_->evicting == 0)  // nothing else is left that would be freed
    for (const SessionId waiting : impl_->blocked)
      if (const SessionRecord* blocked = impl_->find(waiting); blocked != nullptr && blocked->blocked) {
        impl_->drop_caches(blocked->persistent_bytes + blocked->ephemeral_bytes, now_ns);
        break;
      }
  impl_->admit_waiting(now_ns);
}

void Scheduler::cache_dropped(uint64_t id, uint64_t now_ns) {
  CacheRecord* cache = impl_->find_cache(id);
  if (cache == nullptr || !cache->held) return;
  if (std::exchange(cache->dropping, false)) --impl_->evicting;
  cache->held = false;
  cache->claim.promise(0);
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
  return impl_->tree.caches.promised();
}

void Scheduler::set_link(double ns_per_byte) {
  if (!(ns_per_byte > 0 && ns_per_byte <= kMostLinkNsPerByte)) return;
  impl_->link_ns_per_byte = ns_per_byte;
  impl_->options.page_out_ns_per_byte = impl_->options.page_in_ns_per_byte = ns_per_byte;
}

double Scheduler::link_ns_per_byte() const {
  return impl_->link_ns_per_byte;
}

// ---- spare sessions ---------------------------------------------------------------------------------------------

void Scheduler::Impl::forget_worth(SessionRecord& session) {
  if (session.worth_ns) --spares;
  session.worth_ns.reset();
  touch(session);
}

bool Scheduler::set_spare(SessionId id, std::optional<double> worth_ns, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || (session->worth_ns && session->goes_out())) return false;
  impl_->forget_worth(*session);
  if (!worth_ns || session->ready) {
    impl_->coordinate(now_ns);
    return true;
  }
  ++impl_->spares;
  session->worth_ns = std::isnan(*worth_ns) ? 0 : std::clamp(*worth_ns, 0.0, kMostWorthNs);
  session->worth_since_ns = now_ns;
  impl_->touch(*session);
  impl_->coordinate(now_ns);
  impl_->admit_waiting(now_ns);
  return true;
}

bool Scheduler::is_spare(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  return session != nullptr && session->worth_ns.has_value();
}

std::vector<SessionId> Scheduler::dropping() const {
  std::vector<SessionId> out;
  if (impl_->spares == 0 || impl_->evicting == 0) return out;
  for (const auto& [id, session] : impl_->sessions)
    if (session->worth_ns && session->goes_out()) out.push_back(id);
  return out;
}

}  // namespace gpushare::sched
