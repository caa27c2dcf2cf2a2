// The table of names.
// SPDX-License-Identifier: Apache-2.0
#include "sched/policy.hpp"

#include <array>

namespace gpushare::sched {
namespace {

struct Named {
  const char* name;
  std::unique_ptr<Policy> (*make)();
};
constexpr std::array<Named, 5> kPolicies = {{{"fifo", make_fifo},
                                             {"srtf", make_srtf},
                                             {"pack", make_pack},
                                             {"fair", make_fair},
                                             {"priority", make_priority}}};
constexpr std::array<const char*, 5> kNames = {kPolicies[0].name, kPolicies[1].name, kPolicies[2].name,
                                               kPolicies[3].name, kPolicies[4].name};

}  // namespace

std::span<const char* const> policy_names() {
  return kNames;
}

base::Result<std::unique_ptr<Policy>> make_policy(std::string_view name) {
  std::string known;
  for (const Named& each : kPolicies) {
    if (name == each.name) return each.make();
    known += (known.empty() ? "" : ", ") + std::string(each.name);
  }
  return base::Status(GPUSHARE_NOT_FOUND,
                      "there is no policy '" + std::string(name.substr(0, 64)) + "'; there are: " + known);
}

}  // namespace gpushare::sched
