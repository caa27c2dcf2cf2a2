// SPDX-License-Identifier: Apache-2.0
#include "cli/policy_choice.hpp"

#include <algorithm>

#include "base/dynamic_library.hpp"
#include "cli/options.hpp"

namespace gpushare::cli {
namespace {

base::Status fill(const PolicyChoice& choice, gpushare_policy_ops* out_ops) {
  *out_ops = {};
  out_ops->struct_size = sizeof(*out_ops);
  const int32_t status = choice.entry(out_ops);
  if (status != GPUSHARE_OK)
    return {status, base::format("policy '%s': " GPUSHARE_POLICY_ENTRY_NAME " answered %s",
                                 choice.name.c_str(), gpushare_status_name(status))};
  return {};
}

base::Result<PolicyChoice> load(const std::string& path) {
  base::Result<base::DynamicLibrary> library = base::DynamicLibrary::open(path);
  if (!library.ok()) return base::Status(GPUSHARE_NOT_FOUND, "--policy: " + library.status().message());
  PolicyChoice choice;
  choice.entry = reinterpret_cast<gpushare_policy_entry>(library->find(GPUSHARE_POLICY_ENTRY_NAME));
  if (choice.entry == nullptr)
    return base::Status(GPUSHARE_MALFORMED_INPUT, "--policy: " + path +
                                                      " has no function " GPUSHARE_POLICY_ENTRY_NAME
                                                      ": it is no gpushare policy");
  const size_t slash = path.rfind('/');
  choice.name = path.substr(slash + 1, path.rfind('.') - slash - 1);
  library->release();
  // Tried once, so that what is wrong with it is told before the work.
  const base::Result<std::unique_ptr<sched::Policy>> policy = choice.make();
  if (!policy.ok())
    return base::Status(GPUSHARE_MALFORMED_INPUT, "--policy: " + path + ": " + policy.status().message());
  if ((*policy)->name() != "custom") choice.name = (*policy)->name();
  return choice;
}

}  // namespace

base::Result<std::unique_ptr<sched::Policy>> PolicyChoice::make() const {
  if (entry == nullptr) return sched::make_policy(name);
  gpushare_policy_ops ops;
  GPUSHARE_RETURN_IF_ERROR(fill(*this, &ops));
  return sched::make_custom_policy(&ops);
}

void PolicyChoice::set_on(Runtime& runtime) const {
  if (entry == nullptr) return;
  gpushare_policy_ops ops;
  const base::Status filled = fill(*this, &ops);
  if (!filled.ok()) throw Error(filled.code(), filled.message());
  const int32_t status = gpushare_runtime_set_policy(runtime.get(), nullptr, &ops);
  if (status != GPUSHARE_OK) throw Error(status, gpushare_last_error_message());
}

base::Result<std::vector<PolicyChoice>> parse_policies(const char* option, const std::string& text) {
  std::vector<PolicyChoice> out;
  const auto known = sched::policy_names();
  std::string all;
  for (const char* name : known) all += std::string(name) + ", ";
  for (const std::string& word : split_list(text)) {
    PolicyChoice choice{word, nullptr};
    if (word.starts_with('/')) {
      GPUSHARE_ASSIGN_OR_RETURN(choice, load(word));
    } else if (std::find(known.begin(), known.end(), word) == known.end()) {
      return bad_option(
          option, word,
          word.find('/') != std::string::npos || word.ends_with(".so")
              ? "give a policy's library by its absolute path"
              : "there are " + all + "and libraries by their absolute path, separated by commas");
    }
    if (std::any_of(out.begin(), out.end(),
                    [&](const PolicyChoice& other) { return other.name == choice.name; }))
      return bad_option(option, word, "name each policy once");
    out.push_back(std::move(choice));
  }
  return out;
}

}  // namespace gpushare::cli
