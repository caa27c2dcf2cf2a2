// policy_choice.hpp: the policies of --policy: built-in names, and policies of the user's own in shared libraries.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gpushare/gpushare.hpp>
#include <memory>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "sched/policy.hpp"

namespace gpushare::cli {

struct PolicyChoice {
  std::string name;                       // a built-in policy's, or what the library calls its own
  gpushare_policy_entry entry = nullptr;  // of a library, which stays loaded; null for built-in policies

  // A new policy for one run. Errors: those of the library's entry, INVALID_ARGUMENT for a bad table.
  base::Result<std::unique_ptr<sched::Policy>> make() const;
  // The same for a runtime. Throws gpushare::Error.
  void set_on(Runtime& runtime) const;
};

// "fifo,/home/me/lottery.so": each policy once. Errors: INVALID_ARGUMENT naming what there is; NOT_FOUND for a library
// that cannot be opened; MALFORMED_INPUT for one without GPUSHARE_POLICY_ENTRY_NAME or whose table is refused.
base::Result<std::vector<PolicyChoice>> parse_policies(const char* option, const std::string& text);

}  // namespace gpushare::cli
