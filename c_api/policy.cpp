// Policies by name and by table.
// SPDX-License-Identifier: Apache-2.0
#include "c_api/policy.hpp"

#include "base/calls.hpp"
#include "c_api/abi.hpp"

namespace gpushare::capi {

void release_policy(const gpushare_policy_ops* ops) noexcept {
  if (ops == nullptr || ops->struct_size < first_size<gpushare_policy_ops>() || ops->release == nullptr)
    return;
  try {
    const base::CallbackCalls may_call;
    ops->release(ops->user_data);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the embedder's exception must not cross the ABI
  }
}

base::Result<std::unique_ptr<sched::Policy>> open_policy(const char* name, const gpushare_policy_ops* ops) {
  if (ops == nullptr) return sched::make_policy(name == nullptr ? "fair" : name);
  gpushare_policy_ops read;
  base::Status status = read_struct("policy_ops", ops, &read);
  if (status.ok()) {
    base::Result<std::unique_ptr<sched::Policy>> policy = sched::make_custom_policy(&read);
    if (policy.ok()) return policy;
    status = policy.status();
  }
  release_policy(ops);
  return status;
}

}  // namespace gpushare::capi

using namespace gpushare;

extern "C" {

uint32_t gpushare_policy_count(void) {
  return static_cast<uint32_t>(sched::policy_names().size());
}

const char* gpushare_policy_name(uint32_t index) {
  return index < sched::policy_names().size() ? sched::policy_names()[index] : nullptr;
}

}  // extern "C"
