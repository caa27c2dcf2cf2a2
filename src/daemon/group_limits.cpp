// Limits that the sessions of a group have together: memory, part of which preloaded programs lend to the others, and weight.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "base/saturate.hpp"
#include "base/units.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {
namespace {

uint64_t need_of(const Claim& claim) {
  return base::add_saturated(claim.persistent_bytes, claim.ephemeral_bytes);
}

// The preloaded programs of the group, if they count on a page; else null.
Claim* lender_of(const GroupLimits& limits) {
  const auto found = std::find_if(limits.claims.begin(), limits.claims.end(),
                                  [](const Claim* claim) { return claim->page != nullptr; });
  return found != limits.claims.end() ? *found : nullptr;
}

}  // namespace

std::shared_ptr<GroupLimits> SharedDevice::limits_of(const client::Arrive& message) {
  if (message.group == 0) return nullptr;
  std::erase_if(limits_, [](const auto& entry) { return entry.second.expired(); });
  const auto found = limits_.find(message.group);
  if (found != limits_.end()) return found->second.lock();
  if ((message.flags & client::kOwnClaim) == 0) return nullptr;
  auto limits = std::make_shared<GroupLimits>();
  limits->group = message.group;
  limits->memory_bytes = message.group_memory_bytes;
  if (std::isfinite(message.group_weight) && message.group_weight > 0)
    limits->weight = options_.ranks.weight(message.group_weight);
  // Sessions of preloaded programs of the group were here before.
  for (const auto& [id, claim] : claims_)
    if (claim->group == message.group) {
      claim->limits = limits;
      limits->claims.push_back(claim.get());
    }
  limits_[message.group] = limits;
  return limits;
}

base::Status SharedDevice::within(const GroupLimits* limits, const Claim* asks, const std::string& session,
                                  uint64_t more_bytes, uint64_t now_ns) {
  if (limits == nullptr || limits->memory_bytes == 0) return {};
  const uint64_t needed = scheduler_.group_needs(limits->group),
                 wanted = base::add_saturated(needed, more_bytes);
  if (wanted <= limits->memory_bytes) return {};
  Claim* const lender = lender_of(*limits);
  if (lender != nullptr && lender != asks && lend(*lender, wanted - limits->memory_bytes, now_ns)) return {};
  std::string preloaded;
  for (const Claim* claim : limits->claims)
    if (claim->group != 0 && claim != asks)
      preloaded = claim->page != nullptr
                      ? base::format("; its preloaded programs hold %s",
                                     base::format_bytes(claim->page->held_bytes()).c_str())
                      : "; its preloaded programs have been promised " + base::format_bytes(need_of(*claim));
  return {
      GPUSHARE_QUOTA_EXCEEDED,
      base::format("session '%s' needs %s more; its group may need %s together, in all of its processes, and "
                   "its sessions need %s already%s",
                   session.c_str(), base::format_bytes(more_bytes).c_str(),
                   base::format_bytes(limits->memory_bytes).c_str(), base::format_bytes(needed).c_str(),
                   preloaded.c_str())};
}

// Preloaded programs are promised their whole limit, and few hold all of it. The daemon lends the rest to other
// sessions of the group.
bool SharedDevice::lend(Claim& lender, uint64_t bytes, uint64_t now_ns) {
  const GroupPage::Limit limit = lender.page->limit();
  if (bytes > lender.persistent_bytes || bytes > limit.bytes) return false;
  if (!lender.page->set_lent(limit.lent_bytes + bytes)) return false;
  lender.persistent_bytes -= bytes;
  (void)scheduler_.set_need(lender.id, need_of(lender), 0, now_ns);  // less is never refused
  owe(lender);
  return true;
}

void SharedDevice::follow_limit(const Claim& claim) {
  if (kernel_limits_ == nullptr || claim.page == nullptr) return;
  // The bytes that the programs have lent are used in the same group, and so in the same cgroup.
  const GroupPage::Limit limit = claim.page->limit();
  kernel_limits_->set(claim.id, claim.members.front()->process->peer.pid,
                      base::add_saturated(limit.bytes, limit.lent_bytes));
}

uint64_t SharedDevice::left_in(const GroupLimits& limits) const {
  return limits.memory_bytes - std::min(limits.memory_bytes, scheduler_.group_needs(limits.group));
}

// What the group's other sessions no longer need.
uint64_t SharedDevice::loan_to_take_back(const Claim& lender) const {
  const GroupLimits* const limits = lender.limits.get();
  if (limits == nullptr || lender.page == nullptr) return 0;
  const uint64_t lent = lender.page->limit().lent_bytes;
  if (limits->memory_bytes == 0) return lent;
  return std::min(lent, left_in(*limits));
}

bool SharedDevice::take_back_loan(Claim& lender, uint64_t bytes, uint64_t now_ns) {
  const uint64_t before = need_of(lender);
  if (bytes > UINT64_MAX - before) return false;  // the page's processes can write the word
  if (!scheduler_.set_need(lender.id, before + bytes, 0, now_ns).ok()) return false;
  const uint64_t lent = lender.page->limit().lent_bytes;
  if (!lender.page->set_lent(lent - std::min(lent, bytes))) {
    (void)scheduler_.set_need(lender.id, before, 0, now_ns);  // less is never refused
    return false;
  }
  lender.persistent_bytes += bytes;
  return true;
}

uint64_t SharedDevice::left_for_page(const GroupLimits* limits, uint64_t bytes, GroupPage& page,
                                     uint64_t now_ns) const {
  const GroupPage::Limit limit = page.limit();
  const uint64_t all = base::add_saturated(limit.bytes, limit.lent_bytes);
  uint64_t left = all;
  if (limits != nullptr && limits->memory_bytes != 0)
    left = std::min(all, left_in(*limits));
  else if (limits == nullptr && now_ns - began_ns_ < kComeBackNs)
    return bytes;
  if (left == limit.bytes || left == 0) return bytes;
  return page.set_lent(all - left) ? left : bytes;
}

void SharedDevice::divide_weight(const GroupLimits* limits, uint64_t now_ns) {
  if (limits == nullptr || limits->weight == 0) return;
  const auto uses = [now_ns](const Claim* claim) {
    return claim->turn == Claim::Turn::kReady || claim->leased() || now_ns - claim->returned_ns < kUsesNs;
  };
  double sum = 0;
  for (const Claim* claim : limits->claims) sum += uses(claim) ? claim->weight : 0;
  // A resting session gets the weight that it would have beside the working ones; it announces itself when it comes back.
  for (const Claim* claim : limits->claims)
    scheduler_.set_weight(claim->id,
                          limits->weight * claim->weight / (sum + (uses(claim) ? 0 : claim->weight)));
}

}  // namespace gpushare::daemon
