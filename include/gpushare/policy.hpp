// policy.hpp: policies of the caller's in C++, over policy.h. Included by gpushare.hpp, whose rules hold here too.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_POLICY_HPP_
#define GPUSHARE_POLICY_HPP_

#include <memory>
#include <string>
#include <vector>

#include "gpushare/gpushare.hpp"

namespace gpushare {

// Base class of the caller's own policies: derive from it, override pick, and set
// RuntimeOptions::custom_policy. The scheduler calls the methods with its lock held: they must be quick, must
// not call gpushare and should not throw (an exception counts as "idle").
class Policy {
 public:
  static constexpr uint32_t idle = UINT32_MAX;
  virtual ~Policy() = default;
  virtual uint32_t pick(uint32_t lane, const gpushare_candidate* candidates, uint32_t count,
                        uint64_t now_ns) = 0;
  virtual bool before(const gpushare_candidate& a, const gpushare_candidate& b) {
    return a.session_id < b.session_id;
  }
  virtual bool outranks(const gpushare_candidate& /*waiting*/, const gpushare_candidate& /*resident*/) {
    return false;
  }
  // Limits, read once: 0 = none.
  virtual uint32_t max_lanes() const { return 0; }
  virtual uint32_t max_residents() const { return 0; }
  virtual bool head_of_line() const { return false; }
  virtual const char* lane_finder() const { return nullptr; }  // null = "salus"
};

namespace detail {

inline gpushare_policy_ops policy_ops(const std::shared_ptr<Policy>& policy, const std::string& name) {
  using Shared = std::shared_ptr<Policy>;
  gpushare_policy_ops ops{};
  ops.struct_size = sizeof ops;
  ops.name = name.c_str();
  ops.max_lanes = policy->max_lanes();
  ops.max_residents = policy->max_residents();
  ops.head_of_line = policy->head_of_line() ? 1 : 0;
  ops.lane_finder = policy->lane_finder();
  ops.user_data = new Shared(policy);
  ops.pick = [](void* user, uint32_t lane, const gpushare_candidate* candidates, uint32_t count,
                uint64_t now_ns) -> uint32_t {
    try {
      return (*static_cast<Shared*>(user))->pick(lane, candidates, count, now_ns);
    }
    GPUSHARE_RETHROW_THREAD_END catch (...) {
      return Policy::idle;
    }
  };
  ops.before = [](void* user, const gpushare_candidate* a, const gpushare_candidate* b) -> int32_t {
    try {
      return (*static_cast<Shared*>(user))->before(*a, *b) ? 1 : 0;
    }
    GPUSHARE_RETHROW_THREAD_END catch (...) {
      return a->session_id < b->session_id ? 1 : 0;
    }
  };
  ops.outranks = [](void* user, const gpushare_candidate* waiting,
                    const gpushare_candidate* resident) -> int32_t {
    try {
      return (*static_cast<Shared*>(user))->outranks(*waiting, *resident) ? 1 : 0;
    }
    GPUSHARE_RETHROW_THREAD_END catch (...) {
      return 0;
    }
  };
  ops.release = [](void* user) { delete static_cast<Shared*>(user); };
  return ops;
}

}  // namespace detail

// Names of the built-in policies.
inline std::vector<std::string> policies() {
  std::vector<std::string> out;
  for (uint32_t i = 0; i < gpushare_policy_count(); ++i) out.emplace_back(gpushare_policy_name(i));
  return out;
}

}  // namespace gpushare

#endif  // GPUSHARE_POLICY_HPP_
