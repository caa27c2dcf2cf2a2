// SPDX-License-Identifier: Apache-2.0
#include "loader/standby.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "base/log.hpp"
#include "base/without_throwing.hpp"
#include "loader/opened_session.hpp"
#include "sched/claims.hpp"

namespace gpushare::loader {
namespace {

// Requests of a member that nobody has asked for yet: it gets what all others leave.
constexpr double kNeverAsked = 0.01;
// A prefix that is there counts for more, so that members of equal worth do not push each other out in turn: each exchange
// costs a copy.
constexpr double kHeldWorth = 1.25;

struct Wish {
  uint64_t member = 0, bytes = 0;
  double worth = 0;
};

// The members whose wishes are granted: wishes of least worth are left out until the rest is within the budget.
std::vector<uint64_t> grant(std::vector<Wish> wishes, uint64_t budget_bytes) {
  std::erase_if(wishes, [&](const Wish& wish) { return wish.bytes == 0 || wish.bytes > budget_bytes; });
  std::vector<sched::Claim> claims;
  uint64_t bytes = 0;
  for (const Wish& wish : wishes) {
    claims.push_back({wish.bytes, 0, wish.worth});
    bytes += wish.bytes;
  }
  const std::vector<uint64_t> out = sched::give_up(claims, bytes - std::min(bytes, budget_bytes));
  std::vector<uint64_t> members;
  for (size_t i = 0; i < wishes.size(); ++i)
    if (out[i] == 0) members.push_back(wishes[i].member);
  return members;
}

}  // namespace

void Standby::add(uint64_t member, std::shared_ptr<const Image> image, std::vector<double> execution_ms,
                  sched::SessionClass cls) {
  base::RoleLock lock(mutex_, has_entries);
  entries_.try_emplace(member, std::move(image), std::move(execution_ms), cls);
}

void Standby::remove(uint64_t member) {
  Entry* found = nullptr;
  {
    base::RoleLock lock(mutex_, has_entries);
    if (const auto entry = entries_.find(member); entry != entries_.end()) found = &entry->second;
  }
  if (found != nullptr) drop(*found);
  base::RoleLock lock(mutex_, has_entries);
  entries_.erase(member);
}

std::shared_ptr<Model> Standby::prefix(uint64_t member) const {
  base::RoleLock lock(mutex_, has_entries);
  const auto entry = entries_.find(member);
  return entry == entries_.end() || !there(entry->second) ? nullptr : entry->second.model;
}

void Standby::learned(uint64_t member) {
  base::RoleLock lock(mutex_, has_entries);
  if (const auto entry = entries_.find(member); entry != entries_.end()) entry->second.out_of_date = true;
}

void Standby::refresh() noexcept {
  try {
    for (;;) {
      uint64_t member = 0;
      std::shared_ptr<const Image> image;
      std::vector<double> execution_ms;
      {
        base::RoleLock lock(mutex_, has_entries);
        auto entry = entries_.begin();
        while (entry != entries_.end() && !entry->second.out_of_date) ++entry;
        if (entry == entries_.end()) return;
        member = entry->first;
        image = entry->second.image;
        execution_ms = entry->second.execution_ms;
        entry->second.out_of_date = false;
      }
      const PrefixChoice wish = work_out(*image, execution_ms);
      base::RoleLock lock(mutex_, has_entries);
      if (const auto entry = entries_.find(member); entry != entries_.end()) entry->second.fresh = wish;
    }
  } catch (const std::bad_alloc&) {  // the wishes stay as they are, until more is learned
  }
}

std::vector<std::pair<uint64_t, Standby::Entry*>> Standby::entries() {
  base::RoleLock lock(mutex_, has_entries);
  std::vector<std::pair<uint64_t, Entry*>> out;
  for (auto& [id, entry] : entries_) out.emplace_back(id, &entry);
  return out;
}

PrefixChoice Standby::work_out(const Image& image, const std::vector<double>& execution_ms) const {
  const LinkCosts link = loader_.link();
  PrefixLimits limits;
  limits.most_bytes = budget_bytes_;
  limits.copied = &link;
  const auto choice = choose_prefix(
      execution_ms.empty() ? image.profile().costs(link) : layer_costs(image, link, execution_ms),
      link.grouping(), limits);
  return choice.ok() ? *choice : PrefixChoice{};
}

// The held prefix suffices for the present wish: it has at least the wished layers and is at most half as
// large again.
bool Standby::suits(const Entry& entry) {
  return entry.model != nullptr && entry.wish && entry.model->layers() >= entry.wish->layers &&
         entry.bytes <= entry.wish->bytes + entry.wish->bytes / 2;
}

void Standby::update(std::span<const Use> uses) {
  if (budget_bytes_ == 0) return;
  const auto runtime = loader_.runtime().info();
  const bool others_wait = !runtime.ok() || runtime->sessions_queued > 0;
  std::map<uint64_t, Entry*> by_member;
  for (const auto& [id, entry] : entries()) {
    drop_useless(*entry);
    base::RoleLock lock(mutex_, has_entries);
    entry->worth_ns = 0;
    if (entry->fresh) entry->wish = std::exchange(entry->fresh, std::nullopt);
    by_member.emplace(id, entry);
  }
  std::vector<Wish> wishes;
  Entry* active = nullptr;  // and holds a prefix
  uint64_t active_bytes = 0;
  for (const Use& use : uses) {
    const auto found = by_member.find(use.member);
    if (found == by_member.end()) continue;
    Entry& entry = *found->second;
    base::RoleLock lock(mutex_, has_entries);
    if (others_wait && entry.model == nullptr) continue;
    if (!use.away && !(use.active && entry.model != nullptr)) continue;
    if (!entry.wish) {
      lock.unlock();  // it takes milliseconds
      const PrefixChoice wish = work_out(*entry.image, entry.execution_ms);
      lock.lock();
      entry.wish = wish;
    }
    if (entry.wish->layers == 0) continue;
    entry.worth_ns = std::max(use.requests, kNeverAsked) * entry.wish->saves_ms * 1e6;
    const bool held = suits(entry);
    if (use.away) {
      wishes.push_back(
          {use.member, held ? entry.bytes : entry.wish->bytes, entry.worth_ns * (held ? kHeldWorth : 1)});
    } else if (held) {
      active = &entry;
      active_bytes = entry.bytes;
    }
  }
  const std::vector<uint64_t> granted = grant(wishes, budget_bytes_);
  uint64_t left_bytes = budget_bytes_;
  for (const Wish& wish : wishes)
    if (std::find(granted.begin(), granted.end(), wish.member) != granted.end()) left_bytes -= wish.bytes;
  if (active_bytes > left_bytes) active = nullptr;
  std::vector<Entry*> unwanted;
  {
    base::RoleLock lock(mutex_, has_entries);
    for (const auto& [id, entry] : by_member)
      if (entry != active && entry->model != nullptr &&
          (!suits(*entry) || std::find(granted.begin(), granted.end(), id) == granted.end()))
        unwanted.push_back(entry);
  }
  for (Entry* entry : unwanted) drop(*entry);
  for (const uint64_t id : granted) {
    Entry& entry = *by_member.at(id);
    if (has_prefix(entry) || send(id, entry) || active == nullptr) continue;
    drop(*std::exchange(active, nullptr));
    (void)send(id, entry);
  }
  std::vector<std::pair<std::shared_ptr<executor::Session>, double>> worths;
  {
    base::RoleLock lock(mutex_, has_entries);
    for (const auto& [id, entry] : by_member)
      if (entry->session != nullptr) worths.emplace_back(entry->session, entry->worth_ns);
  }
  for (const auto& [session, worth_ns] : worths) (void)session->set_spare(worth_ns);
}

bool Standby::has_prefix(const Entry& entry) const {
  base::RoleLock lock(mutex_, has_entries);
  return entry.model != nullptr;
}

// Dropped for others, ended, or its copies failed.
void Standby::drop_useless(Entry& entry) {
  std::shared_ptr<executor::Session> session;
  std::shared_ptr<Model> model;
  {
    base::RoleLock lock(mutex_, has_entries);
    session = entry.session;
    model = entry.model;
  }
  if (session != nullptr && (session->info().state != executor::SessionState::kResident ||
                             !model->arrived(model->layers() - 1).ok()))
    drop(entry);
}

bool Standby::hold(uint64_t member, bool held) {
  std::shared_ptr<executor::Session> session;
  double worth_ns = 0;
  {
    base::RoleLock lock(mutex_, has_entries);
    const auto entry = entries_.find(member);
    if (entry == entries_.end() || !there(entry->second)) return false;
    session = entry->second.session;
    worth_ns = entry->second.worth_ns;
  }
  return session->set_spare(held ? std::nullopt : std::optional(worth_ns)).ok();
}

// False: there is no room for it.
bool Standby::send(uint64_t member, Entry& entry) {
  executor::SessionOptions options;
  options.name = base::format("standby-%llu", static_cast<unsigned long long>(member));
  options.cls = entry.cls;
  options.priority = INT32_MIN;
  PrefixChoice wish;
  {
    base::RoleLock lock(mutex_, has_entries);
    wish = *entry.wish;
  }
  options.persistent_bytes = wish.bytes;
  options.allow_queueing = options.may_claim = false;
  options.may_page = false;  // before its copies are enqueued, or this thread would wait for its return
  auto opened = OpenedSession::of(loader_.runtime().open_session(options));
  if (!opened.ok()) return false;
  OpenedSession& session = *opened;
  auto model = loader_.load_prefix(session.get(), entry.image, wish.layers);
  if (!model.ok()) {
    base::log(
        base::kWarning,
        model.status().with_context("keeping the first layers of '" + entry.image->name() + "'").to_string());
    return true;
  }
  (void)session->allow_paging();
  base::RoleLock lock(mutex_, has_entries);
  entry.session = session.take();
  entry.model = std::move(*model);
  entry.bytes = wish.bytes;
  return true;
}

void Standby::drop(Entry& entry) noexcept {
  std::shared_ptr<executor::Session> session;
  std::shared_ptr<Model> model;
  {
    base::RoleLock lock(mutex_, has_entries);
    session.swap(entry.session);
    model.swap(entry.model);
    entry.bytes = 0;
  }
  if (model != nullptr) base::without_throwing([&] { (void)model->unload(); });
  if (session != nullptr) base::without_throwing([&] { (void)session->close(); });
}

void Standby::clear() noexcept {
  base::RoleLock lock(mutex_, has_entries);
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    lock.unlock();
    drop(entry->second);
    lock.lock();
  }
}

uint64_t Standby::bytes() const {
  base::RoleLock lock(mutex_, has_entries);
  uint64_t bytes = 0;
  for (const auto& [id, entry] : entries_)
    if (there(entry)) bytes += entry.bytes;
  return bytes;
}

uint64_t Standby::bytes(uint64_t member) const {
  base::RoleLock lock(mutex_, has_entries);
  const auto entry = entries_.find(member);
  return entry == entries_.end() || !there(entry->second) ? 0 : entry->second.bytes;
}

}  // namespace gpushare::loader
