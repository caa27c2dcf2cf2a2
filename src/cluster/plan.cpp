// SPDX-License-Identifier: Apache-2.0
#include "cluster/plan.hpp"

#include <algorithm>

namespace gpushare::cluster {
namespace {

template <class Words>
std::string joined(const Words& words) {
  std::string out;
  for (const auto& word : words) out += (out.empty() ? "" : ", ") + std::string(word);
  return out;
}

const Kind* read_kind(Fields& document, const std::vector<const Kind*>& known) {
  std::vector<const char*> names;
  for (const Kind* kind : known) names.push_back(kind->name);
  document.whole("version", kDocumentVersion, kDocumentVersion);
  const std::string name = document.text("kind");
  for (const Kind* kind : known)
    if (name == kind->name) return kind;
  document.refuse("kind", "there are " + joined(names));
  return nullptr;
}

// Which of the kind's choices are wanted.
base::Result<std::vector<std::string>> choose(const Kind& kind, const PlanOptions& options) {
  const bool by_scheduler = std::string_view(kind.chooses) == "scheduler";
  const auto& wanted = !options.choices.empty() ? options.choices
                       : by_scheduler           ? options.schedulers
                                                : options.objectives;
  const auto& foreign = by_scheduler ? options.objectives : options.schedulers;
  if (!foreign.empty())
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("--%s: a document of kind %s has none; it chooses --%s of %s",
                                     by_scheduler ? "objective" : "scheduler", kind.name, kind.chooses,
                                     joined(kind.choices).c_str()));
  if (wanted.empty()) return std::vector<std::string>(kind.defaults.begin(), kind.defaults.end());
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (std::find(kind.choices.begin(), kind.choices.end(), wanted[i]) == kind.choices.end())
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          base::format("--%s: '%s' is not allowed; a document of kind %s has %s, separated by commas",
                       kind.chooses, wanted[i].c_str(), kind.name, joined(kind.choices).c_str()));
    if (std::find(wanted.begin(), wanted.begin() + static_cast<std::ptrdiff_t>(i), wanted[i]) !=
        wanted.begin() + static_cast<std::ptrdiff_t>(i))
      return base::Status(GPUSHARE_INVALID_ARGUMENT, base::format("--%s: '%s' is there twice; name each once",
                                                                  kind.chooses, wanted[i].c_str()));
  }
  return wanted;
}

}  // namespace

base::Result<OrderedJson> plan(std::string_view text, const PlanOptions& options,
                               const std::vector<const Kind*>& known) {
  GPUSHARE_ASSIGN_OR_RETURN(const Json document, parse_document(text));
  base::Status error;
  Fields fields(document, &error);
  const Kind* kind = read_kind(fields, known);
  GPUSHARE_RETURN_IF_ERROR(error);
  GPUSHARE_ASSIGN_OR_RETURN(const std::vector<std::string> choices, choose(*kind, options));
  std::vector<Device> devices;
  if (kind->needs_devices || fields.has("devices")) devices = read_devices(fields);
  GPUSHARE_RETURN_IF_ERROR(error);
  const std::unique_ptr<Problem> problem = kind->read(fields, devices);
  fields.done();
  GPUSHARE_RETURN_IF_ERROR(error);

  OrderedJson results = OrderedJson::array();
  for (size_t i = 0; i < choices.size(); ++i) {
    if (options.progress) options.progress(choices[i], i, choices.size());
    OrderedJson result = {{kind->chooses, choices[i]}, {"solve_ms", 0.0}};
    const uint64_t begin_ns = options.now_ns ? options.now_ns() : 0;
    GPUSHARE_RETURN_IF_ERROR(problem->solve(choices[i], result).with_context(choices[i]));
    if (options.now_ns) result["solve_ms"] = static_cast<double>(options.now_ns() - begin_ns) / 1e6;
    results.push_back(std::move(result));
  }
  return OrderedJson{{"version", kDocumentVersion}, {"kind", kind->name}, {"results", std::move(results)}};
}

}  // namespace gpushare::cluster
