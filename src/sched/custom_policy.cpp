// A policy written in C (gpushare_policy_ops) behind the Policy interface.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>

#include "base/calls.hpp"
#include "base/cancel.hpp"
#include "base/log.hpp"
#include "sched/policy.hpp"

namespace gpushare::sched {
namespace {

// The scheduler's lock is held around a policy's functions: gpushare refuses calls from inside.
struct PolicyCall : base::CallScope {
  PolicyCall() : CallScope("a function of a custom policy cannot call gpushare") {}
};

gpushare_candidate to_candidate(const SessionView& view) {
  gpushare_candidate out{};
  out.struct_size = sizeof(out);
  out.session_class = static_cast<uint32_t>(view.cls);
  out.session_id = view.id;
  out.arrival_ns = view.arrival_ns;
  out.ready_since_ns = view.ready_since_ns;
  out.service_ns = view.service_ns;
  out.remaining_ns = view.remaining_ns;
  out.iteration_ns = view.iteration_ns;
  out.iterations_done = view.iterations_done;
  out.persistent_bytes = view.persistent_bytes;
  out.ephemeral_bytes = view.ephemeral_bytes;
  out.priority = view.priority;
  out.weight = view.weight;
  return out;
}

class CustomPolicy final : public Policy {
 public:
  CustomPolicy(const gpushare_policy_ops& ops, std::optional<LaneFinderKind> lane_finder)
      : ops_(ops),
        lane_finder_(lane_finder),
        name_(ops.name != nullptr && ops.name[0] != '\0' ? ops.name : "custom") {}
  ~CustomPolicy() override {
    if (ops_.release == nullptr) return;
    const PolicyCall inside;
    try {
      ops_.release(ops_.user_data);
    } catch (...) {
      base::log(base::kError, "policy '" + name_ + "': release threw; ignored");
    }
  }
  CustomPolicy(const CustomPolicy&) = delete;
  CustomPolicy& operator=(const CustomPolicy&) = delete;

  std::string_view name() const override { return name_; }
  PolicyTraits traits() const override {
    PolicyTraits traits;
    traits.max_lanes = ops_.max_lanes;
    traits.max_residents = ops_.max_residents;
    traits.head_of_line = ops_.head_of_line != 0;
    traits.lane_finder = lane_finder_;
    return traits;
  }
  size_t pick(LaneId lane, std::span<const SessionView> candidates, uint64_t now_ns) override {
    candidates_.clear();
    for (const SessionView& view : candidates) candidates_.push_back(to_candidate(view));
    const auto count = static_cast<uint32_t>(candidates_.size());
    const uint32_t index = guarded<uint32_t>("pick", UINT32_MAX, [&] {
      return ops_.pick(ops_.user_data, lane, candidates_.data(), count, now_ns);
    });
    if (index < count) return index;
    if (index != UINT32_MAX)
      complain(base::format("policy '%s': pick returned %u of %u candidates; the lane stays idle",
                            name_.c_str(), index, count));
    return kIdle;
  }
  bool before(const SessionView& a, const SessionView& b) const override {
    if (ops_.before == nullptr) return a.id < b.id;
    const gpushare_candidate left = to_candidate(a), right = to_candidate(b);
    return guarded<int32_t>("before", 0, [&] { return ops_.before(ops_.user_data, &left, &right); }) != 0;
  }
  bool outranks(const SessionView& waiting, const SessionView& resident) const override {
    if (ops_.outranks == nullptr) return false;
    const gpushare_candidate left = to_candidate(waiting), right = to_candidate(resident);
    return guarded<int32_t>("outranks", 0, [&] { return ops_.outranks(ops_.user_data, &left, &right); }) != 0;
  }

 private:
  template <class T, class Call>
  GPUSHARE_CATCHES_FORCED_UNWIND T guarded(const char* what, T otherwise, Call call) const {
    const PolicyCall inside;
    try {
      return call();
    } catch (const base::ForcedUnwind&) {
      throw;  // through the scheduler, whose books are half done then: its driver must give it up
    } catch (...) {
      complain("policy '" + name_ + "': " + what + " threw; taken as no");
      return otherwise;
    }
  }
  void complain(const std::string& message) const {
    if (complained_) return;  // once: it would repeat at every boundary
    complained_ = true;
    base::log(base::kError, message);
  }

  gpushare_policy_ops ops_;
  std::optional<LaneFinderKind> lane_finder_;
  std::string name_;
  std::vector<gpushare_candidate> candidates_;
  mutable bool complained_ = false;
};

}  // namespace

base::Result<std::unique_ptr<Policy>> make_custom_policy(const gpushare_policy_ops* ops) {
  if (ops == nullptr) return base::Status(GPUSHARE_INVALID_ARGUMENT, "policy_ops is null");
  constexpr size_t kLeast = offsetof(gpushare_policy_ops, pick) + sizeof(gpushare_policy_ops::pick);
  if (ops->struct_size < kLeast)
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        base::format("policy_ops.struct_size is %u; at least %zu is needed (set it to sizeof)",
                     ops->struct_size, kLeast));
  gpushare_policy_ops known{};
  // Only whole fields: from `name` on there are nothing but pointers, and a size may end inside one.
  std::memcpy(&known, ops, std::min<size_t>(ops->struct_size / sizeof(void*) * sizeof(void*), sizeof(known)));
  if (known.pick == nullptr)
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "policy_ops.pick is null; it is mandatory");
  std::optional<LaneFinderKind> lane_finder;
  if (known.lane_finder != nullptr) {
    auto named = lane_finder_named(known.lane_finder);
    if (!named.ok()) return named.status();
    lane_finder = *named;
  }
  return std::unique_ptr<Policy>(std::make_unique<CustomPolicy>(known, lane_finder));
}

}  // namespace gpushare::sched
