// A policy written in C (gpushare_policy_ops) behind the Policy interface.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstring>

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
  Answers answers() const override {
    return {.before = ops_.before != nullptr,
            .may_run = ops_.may_run != nullptr,
            .gives_way = ops_.gives_way != nullptr,
            .may_join = ops_.may_join != nullptr,
            .lane_finder = lane_finder_};
  }
  bool before(const SessionView& a, const SessionView& b) const override {
    if (ops_.before == nullptr) return false;
    const gpushare_candidate left = to_candidate(a), right = to_candidate(b);
    return asked<int32_t>("before", ops_.before, 0, &left, &right) != 0;
  }
  uint64_t may_run(const SessionView& session, const DeviceView&, uint64_t now_ns) const override {
    if (ops_.may_run == nullptr) return now_ns;
    const gpushare_candidate candidate = to_candidate(session);
    return asked<uint64_t>("may_run", ops_.may_run, kUnknown, &candidate, now_ns);
  }
  GivesWay gives_way(const SessionView& victim, const SessionView& other) const override {
    if (ops_.gives_way == nullptr) return GivesWay::kNever;
    const gpushare_candidate left = to_candidate(victim), right = to_candidate(other);
    const int32_t answer = asked<int32_t>("gives_way", ops_.gives_way, 0, &left, &right);
    return static_cast<GivesWay>(known("gives_way", answer, GPUSHARE_GIVES_WAY_AFTER_LONG_STAY));
  }
  Share share(const SessionView& session) const override {
    if (ops_.share == nullptr) return Policy::share(session);
    const gpushare_candidate candidate = to_candidate(session);
    const double answer = asked<double>("share", ops_.share, GPUSHARE_SHARE_IN_LINE, &candidate);
    if (answer == GPUSHARE_SHARE_WHOLE) return {Share::Kind::kWhole};
    if (answer > 0 && answer <= kMostWeight) return {Share::Kind::kWeighted, answer};
    if (answer != GPUSHARE_SHARE_IN_LINE)
      complain(base::format("policy '%s': share returned %g, which is no weight; taken as in line",
                            name_.c_str(), answer));
    return {Share::Kind::kInLine};
  }
  MayJoin may_join(const SessionView& waiting, const Joining& what) const override {
    if (ops_.may_join == nullptr) return MayJoin::kYes;
    const gpushare_candidate candidate = to_candidate(waiting);
    const auto residents = static_cast<uint32_t>(std::min<size_t>(what.residents, UINT32_MAX));
    const int32_t answer = asked<int32_t>("may_join", ops_.may_join, 0, &candidate, residents,
                                          static_cast<uint32_t>(what.passes));
    return static_cast<MayJoin>(known("may_join", answer, GPUSHARE_JOIN_NOBODY));
  }

 private:
  static constexpr double kMostWeight = 1e300;

  template <class T, class Function, class... Arguments>
  GPUSHARE_CATCHES_FORCED_UNWIND T asked(const char* what, Function function, T otherwise,
                                         Arguments... arguments) const {
    const PolicyCall inside;
    try {
      return function(ops_.user_data, arguments...);
    } catch (const base::ForcedUnwind&) {
      throw;  // through the scheduler, whose books are half done then: its driver must give it up
    } catch (...) {
      complain("policy '" + name_ + "': " + what + " threw; taken as no");
      return otherwise;
    }
  }
  uint32_t known(const char* what, int32_t answer, int32_t most) const {
    if (answer >= 0 && answer <= most) return static_cast<uint32_t>(answer);
    complain(base::format("policy '%s': %s returned %d, which is no answer; taken as no", name_.c_str(), what,
                          static_cast<int>(answer)));
    return 0;
  }
  void complain(const std::string& message) const {
    if (complained_) return;  // once: it would repeat at every boundary
    complained_ = true;
    base::log(base::kError, message);
  }

  gpushare_policy_ops ops_;
  std::optional<LaneFinderKind> lane_finder_;
  std::string name_;
  mutable bool complained_ = false;
};

}  // namespace

base::Result<std::unique_ptr<Policy>> make_custom_policy(const gpushare_policy_ops* ops) {
  if (ops == nullptr) return base::Status(GPUSHARE_INVALID_ARGUMENT, "policy_ops is null");
  constexpr size_t kLeast = offsetof(gpushare_policy_ops, may_join) + sizeof(gpushare_policy_ops::may_join);
  if (ops->struct_size < kLeast)
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        base::format("policy_ops.struct_size is %u; at least %zu is needed (set it to sizeof)",
                     ops->struct_size, kLeast));
  gpushare_policy_ops known{};
  // Only whole fields: from `name` on there are nothing but pointers, and a size may end inside one.
  std::memcpy(&known, ops, std::min<size_t>(ops->struct_size / sizeof(void*) * sizeof(void*), sizeof(known)));
  if (known.reserved != 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "policy_ops.reserved is not 0");
  if (known.before == nullptr && known.may_run == nullptr && known.gives_way == nullptr &&
      known.share == nullptr && known.may_join == nullptr)
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        "policy_ops has none of before, may_run, gives_way, share and may_join: set at least one");
  std::optional<LaneFinderKind> lane_finder;
  if (known.lane_finder != nullptr) {
    auto named = lane_finder_named(known.lane_finder);
    if (!named.ok()) return named.status();
    lane_finder = *named;
  }
  return std::unique_ptr<Policy>(std::make_unique<CustomPolicy>(known, lane_finder));
}

}  // namespace gpushare::sched
