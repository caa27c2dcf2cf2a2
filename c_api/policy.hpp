// policy.hpp: from a name or a table of the embedder's to a policy object, with the table's one promised call
// of release.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "base/status.hpp"
#include "gpushare/gpushare.h"
#include "sched/policy.hpp"

namespace gpushare::capi {

// `ops` wins over `name`; both null: "fair". If this fails, the table's release has been called already.
base::Result<std::unique_ptr<sched::Policy>> open_policy(const char* name, const gpushare_policy_ops* ops);

// Calls the table's release, if it has one: for calls that fail before they reach open_policy.
void release_policy(const gpushare_policy_ops* ops) noexcept;

}  // namespace gpushare::capi
