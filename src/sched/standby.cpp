// SPDX-License-Identifier: Apache-2.0
#include "sched/standby.hpp"

#include <algorithm>

namespace gpushare::sched {
namespace {

constexpr double kHeldWorth = 1.25;

double worth_of(const StandbyWish& wish) {
  return wish.held ? wish.worth * kHeldWorth : wish.worth;
}

}  // namespace

std::vector<ModelId> grant_standby(std::span<const StandbyWish> wishes, uint64_t budget_bytes) {
  std::vector<const StandbyWish*> order;
  for (const StandbyWish& wish : wishes)
    if (wish.bytes > 0 && wish.bytes <= budget_bytes && wish.worth > 0) order.push_back(&wish);
  std::sort(order.begin(), order.end(), [](const StandbyWish* a, const StandbyWish* b) {
    const double worth_a = worth_of(*a) / static_cast<double>(a->bytes);
    const double worth_b = worth_of(*b) / static_cast<double>(b->bytes);
    return worth_a != worth_b ? worth_a > worth_b : a->model < b->model;
  });
  std::vector<ModelId> granted;
  uint64_t bytes = 0;
  double worth = 0;
  const StandbyWish* single = nullptr;
  for (const StandbyWish* wish : order) {
    if (single == nullptr || worth_of(*wish) > worth_of(*single)) single = wish;
    if (wish->bytes > budget_bytes - bytes) continue;
    granted.push_back(wish->model);
    bytes += wish->bytes;
    worth += worth_of(*wish);
  }
  if (single != nullptr && worth_of(*single) > worth) granted = {single->model};
  return granted;
}

}  // namespace gpushare::sched
