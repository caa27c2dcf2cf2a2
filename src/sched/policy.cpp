// The stateless policies and the table of names. Their state (service, virtual time, remaining) is the
// scheduler's, in the views.
// SPDX-License-Identifier: Apache-2.0
#include "sched/policy.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <tuple>

#include "sched/pack_policy.hpp"

namespace gpushare::sched {
namespace {

template <class Less>
size_t first_by(std::span<const SessionView> candidates, Less less) {
  size_t best = 0;
  for (size_t i = 1; i < candidates.size(); ++i)
    if (less(candidates[i], candidates[best])) best = i;
  return best;
}

// Device time that candidate `picked` can receive before another one that shares with it is behind it in virtual time.
template <class Shares>
uint64_t until_behind(std::span<const SessionView> candidates, size_t picked, Shares shares) {
  double next = INFINITY;
  for (size_t i = 0; i < candidates.size(); ++i)
    if (i != picked && shares(candidates[i])) next = std::min(next, candidates[i].virtual_ns);
  const double gap = (next - candidates[picked].virtual_ns) * candidates[picked].weight;
  if (!(gap < 1e19)) return kUnknown;
  return gap <= 0 ? 0 : static_cast<uint64_t>(gap);
}

// A session that ends within ten stays runs to its end undisturbed; an endless one keeps nobody off for ever.
constexpr uint32_t kFifoStays = 10;

class Fifo final : public Policy {
 public:
  std::string_view name() const override { return "fifo"; }
  PolicyTraits traits() const override {
    return {.max_lanes = 1,
            .max_residents = 1,
            .head_of_line = true,
            .max_overtakes = 0,
            .paging = PagingRule::kNever,
            .stay_factor = kFifoStays};
  }
  size_t pick(LaneId, std::span<const SessionView> candidates, uint64_t) override {
    return first_by(candidates, ahead_in_line);
  }
  uint64_t pick_holds_ns(LaneId, std::span<const SessionView>, size_t) const override { return kUnknown; }
};

class Srtf final : public Policy {
 public:
  std::string_view name() const override { return "srtf"; }
  PolicyTraits traits() const override {
    return {.max_lanes = 1, .paging = PagingRule::kByOrder, .stay_factor = 1, .by_service = true};
  }
  size_t pick(LaneId, std::span<const SessionView> candidates, uint64_t) override {
    return first_by(candidates, [this](const SessionView& a, const SessionView& b) { return before(a, b); });
  }
  bool before(const SessionView& a, const SessionView& b) const override { return rank(a) < rank(b); }
  bool outranks(const SessionView& waiting, const SessionView& resident) const override {
    if (waiting.remaining_ns == kUnknown || resident.remaining_ns == kUnknown)
      return std::pair(waiting.remaining_ns, level(waiting)) <
             std::pair(resident.remaining_ns, level(resident));
    // A session that has run before comes back only for a clear gain, because estimates wobble and each swap
    // costs two copies.
    const uint64_t margin = waiting.service_ns > 0 ? resident.remaining_ns / 64 : 0;
    return waiting.remaining_ns < resident.remaining_ns - margin;
  }
  uint64_t pick_holds_ns(LaneId, std::span<const SessionView> candidates, size_t picked) const override {
    const SessionView& view = candidates[picked];
    if (view.remaining_ns != kUnknown) return view.remaining_ns;  // it only falls further
    return level_end(level(view)) - view.service_ns;
  }

 private:
  // Service in doubling levels from one second up: sessions of unknown length change places rarely.
  static uint32_t level(const SessionView& view) {
    return view.remaining_ns != kUnknown ? 0
                                         : static_cast<uint32_t>(std::bit_width(view.service_ns / kLevelNs));
  }
  static uint64_t level_end(uint32_t level) {
    return level >= 33 ? kUnknown : kLevelNs << level;  // 2^33 s: never
  }
  static std::tuple<uint64_t, uint32_t, uint64_t, SessionId> rank(const SessionView& view) {
    return {view.remaining_ns, level(view), view.in_line, view.id};
  }
  static constexpr uint64_t kLevelNs = 1'000'000'000;
};

class Fair final : public Policy {
 public:
  std::string_view name() const override { return "fair"; }
  PolicyTraits traits() const override {
    return {.paging = PagingRule::kNever, .device_wide = true, .moves = true, .stay_factor = 1};
  }
  size_t pick(LaneId, std::span<const SessionView> candidates, uint64_t) override {
    return first_by(candidates, [](const SessionView& a, const SessionView& b) {
      if (a.virtual_ns != b.virtual_ns) return a.virtual_ns < b.virtual_ns;
      return std::tuple(a.in_flight, a.id) < std::tuple(b.in_flight, b.id);
    });
  }
  uint64_t pick_holds_ns(LaneId, std::span<const SessionView> candidates, size_t picked) const override {
    return until_behind(candidates, picked, [](const SessionView&) { return true; });
  }
};

class Priority final : public Policy {
 public:
  std::string_view name() const override { return "priority"; }
  PolicyTraits traits() const override {
    return {.paging = PagingRule::kByOrder, .moves = true, .protects = true, .stay_factor = 1};
  }
  // Sessions of equal rank share by weight, as under fair.
  size_t pick(LaneId, std::span<const SessionView> candidates, uint64_t) override {
    return first_by(candidates, [](const SessionView& a, const SessionView& b) {
      return std::tuple(a.cls, -int64_t{a.priority}, a.virtual_ns, a.in_flight, a.id) <
             std::tuple(b.cls, -int64_t{b.priority}, b.virtual_ns, b.in_flight, b.id);
    });
  }
  bool before(const SessionView& a, const SessionView& b) const override {
    return std::tuple(a.cls, -int64_t{a.priority}, a.in_line, a.id) <
           std::tuple(b.cls, -int64_t{b.priority}, b.in_line, b.id);
  }
  bool outranks(const SessionView& waiting, const SessionView& resident) const override {
    return std::tuple(waiting.cls, -int64_t{waiting.priority}) <
           std::tuple(resident.cls, -int64_t{resident.priority});
  }
  uint64_t pick_holds_ns(LaneId, std::span<const SessionView> candidates, size_t picked) const override {
    return until_behind(candidates, picked, [&](const SessionView& other) {
      return !outranks(candidates[picked], other) && !outranks(other, candidates[picked]);
    });
  }
};

constexpr std::array<const char*, 5> kNames = {"fifo", "srtf", "pack", "fair", "priority"};

}  // namespace

std::span<const char* const> policy_names() {
  return kNames;
}

base::Result<std::unique_ptr<Policy>> make_policy(std::string_view name) {
  if (name == "fifo") return std::unique_ptr<Policy>(std::make_unique<Fifo>());
  if (name == "srtf") return std::unique_ptr<Policy>(std::make_unique<Srtf>());
  if (name == "pack") return std::unique_ptr<Policy>(std::make_unique<PackPolicy>());
  if (name == "fair") return std::unique_ptr<Policy>(std::make_unique<Fair>());
  if (name == "priority") return std::unique_ptr<Policy>(std::make_unique<Priority>());
  std::string known;
  for (const char* each : kNames) known += (known.empty() ? "" : ", ") + std::string(each);
  return base::Status(GPUSHARE_NOT_FOUND,
                      "there is no policy '" + std::string(name.substr(0, 64)) + "'; there are: " + known);
}

}  // namespace gpushare::sched
