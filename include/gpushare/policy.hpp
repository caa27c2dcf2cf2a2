// policy.hpp: policies of the caller's in C++, over policy.h. Included by gpushare.hpp, whose rules hold here too.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_POLICY_HPP_
#define GPUSHARE_POLICY_HPP_

#include <memory>
#include <string>
#include <vector>

#include "gpushare/gpushare.hpp"

namespace gpushare {

// Base class of the caller's own policies: derive from it, override some of the five questions (policy.h), and set
// RuntimeOptions::custom_policy. The scheduler calls the methods with its lock held: they must be quick, must
// not call gpushare and should not throw (an exception counts as "no").
class Policy {
 public:
  static constexpr uint64_t not_now = UINT64_MAX;  // of may_run
  virtual ~Policy() = default;
  virtual bool before(const gpushare_candidate& /*a*/, const gpushare_candidate& /*b*/) { return false; }
  virtual uint64_t may_run(const gpushare_candidate& /*session*/, uint64_t now_ns) { return now_ns; }
  virtual int32_t gives_way(const gpushare_candidate& /*victim*/, const gpushare_candidate& /*other*/) {
    return GPUSHARE_GIVES_WAY_NEVER;
  }
  virtual double share(const gpushare_candidate& session) { return session.weight; }
  virtual int32_t may_join(const gpushare_candidate& /*session*/, uint32_t /*residents*/, bool /*passes*/) {
    return GPUSHARE_JOIN_YES;
  }
  virtual const char* lane_finder() const { return nullptr; }  // read once; null = "salus"
};

namespace detail {

// The policy's answer, or `otherwise` if that throws.
template <class T, class Ask>
T ask_policy(void* user, T otherwise, Ask ask) {
  try {
    return ask(**static_cast<std::shared_ptr<Policy>*>(user));
  }
  GPUSHARE_RETHROW_THREAD_END catch (...) {
    return otherwise;
  }
}

inline gpushare_policy_ops policy_ops(const std::shared_ptr<Policy>& policy, const std::string& name) {
  using Shared = std::shared_ptr<Policy>;
  using Candidate = const gpushare_candidate*;
  gpushare_policy_ops ops{};
  ops.struct_size = sizeof ops;
  ops.name = name.c_str();
  ops.lane_finder = policy->lane_finder();
  ops.user_data = new Shared(policy);
  ops.before = [](void* user, Candidate a, Candidate b) -> int32_t {
    return ask_policy<int32_t>(user, 0, [&](Policy& asked) { return asked.before(*a, *b) ? 1 : 0; });
  };
  ops.may_run = [](void* user, Candidate session, uint64_t now_ns) -> uint64_t {
    return ask_policy<uint64_t>(user, Policy::not_now,
                                [&](Policy& asked) { return asked.may_run(*session, now_ns); });
  };
  ops.gives_way = [](void* user, Candidate victim, Candidate other) -> int32_t {
    return ask_policy<int32_t>(user, 0, [&](Policy& asked) { return asked.gives_way(*victim, *other); });
  };
  ops.share = [](void* user, Candidate session) -> double {
    return ask_policy<double>(user, 0, [&](Policy& asked) { return asked.share(*session); });
  };
  ops.may_join = [](void* user, Candidate session, uint32_t residents, uint32_t passes) -> int32_t {
    return ask_policy<int32_t>(
        user, 0, [&](Policy& asked) { return asked.may_join(*session, residents, passes != 0); });
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
