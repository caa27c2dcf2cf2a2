// SPDX-License-Identifier: Apache-2.0
#include "cluster/plan.hpp"

#include <algorithm>

#include "cluster/json.hpp"

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

base::Status not_there(const Kind& kind, const char* option, const std::string& name,
                       const std::vector<const char*>& there) {
  return {GPUSHARE_INVALID_ARGUMENT,
          base::format("--%s: '%s' is not allowed; a document of kind %s has %s, separated by commas", option,
                       name.c_str(), kind.name, joined(there).c_str())};
}

// Which of `there` are wanted. Names that are not there stay in, if others are.
base::Result<std::vector<std::string>> choose(const Kind& kind, const char* option,
                                              const std::vector<std::string>& wanted,
                                              const std::vector<const char*>& there,
                                              const std::vector<const char*>& defaults) {
  if (wanted.empty()) return std::vector<std::string>(defaults.begin(), defaults.end());
  const bool any = std::any_of(wanted.begin(), wanted.end(), [&](const std::string& name) {
    return std::find(there.begin(), there.end(), name) != there.end();
  });
  for (size_t i = 0; i < wanted.size(); ++i) {
    // Where others are there, it gets an error of its own.
    if (!any || wanted[i].empty()) return not_there(kind, option, wanted[i], there);
    if (std::find(wanted.begin(), wanted.begin() + static_cast<std::ptrdiff_t>(i), wanted[i]) !=
        wanted.begin() + static_cast<std::ptrdiff_t>(i))
      return base::Status(GPUSHARE_INVALID_ARGUMENT, base::format("--%s: '%s' is there twice; name each once",
                                                                  option, wanted[i].c_str()));
  }
  return wanted;
}

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
  return choose(kind, kind.chooses, wanted, kind.choices, kind.defaults);
}

// A document, read.
struct Opened {
  const Kind* kind = nullptr;
  std::vector<Device> devices;  // the problem refers to them
  std::unique_ptr<Problem> problem;
};

// Reads a document; `chosen` is asked as soon as its kind is known, before the work of reading the rest.
template <class Chosen>
base::Status open(std::string_view text, const std::vector<const Kind*>& known, Opened& out,
                  Chosen&& chosen) {
  GPUSHARE_ASSIGN_OR_RETURN(const Json document, parse_document(text));
  base::Status error;
  Fields fields(document, &error);
  out.kind = read_kind(fields, known);
  GPUSHARE_RETURN_IF_ERROR(error);
  GPUSHARE_RETURN_IF_ERROR(chosen(*out.kind));
  out.devices = read_frame(fields, *out.kind);
  GPUSHARE_RETURN_IF_ERROR(error);
  out.problem = out.kind->read(fields, out.devices);
  fields.done();
  return error;
}

// Adds "results", one entry a choice, to a document, and "errors" with those that could not decide it. A choice that
// cannot does not take the others with it; if none can, the first one's error is returned.
template <class Decide>
base::Status decide_all(const Kind& kind, const std::vector<std::string>& choices,
                        const std::vector<const char*>& there, const char* chooses,
                        const PlanOptions& options, OrderedJson& document, Decide&& decide) {
  OrderedJson results = OrderedJson::array(), errors = OrderedJson::array();
  base::Status first;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (options.progress) options.progress(choices[i], i, choices.size());
    OrderedJson result = object({{chooses, choices[i]}, {"solve_ms", 0.0}});
    const uint64_t begin_ns = options.now_ns ? options.now_ns() : 0;
    const bool known = std::find(there.begin(), there.end(), choices[i]) != there.end();
    const base::Status status =
        known ? decide(choices[i], result, i + 1 == choices.size()).with_context(choices[i])
              : not_there(kind, chooses, choices[i], there);
    if (!status.ok()) {
      errors.push_back(object({{chooses, choices[i]}, {"error", status.message()}}));
      if (first.ok()) first = status;
      continue;
    }
    if (options.now_ns) result["solve_ms"] = static_cast<double>(options.now_ns() - begin_ns) / 1e6;
    results.push_back(std::move(result));
  }
  if (results.empty()) return first;
  document["results"] = std::move(results);
  if (!errors.empty()) document["errors"] = std::move(errors);
  return {};
}

}  // namespace

base::Result<OrderedJson> plan(std::string_view text, const PlanOptions& options,
                               const std::vector<const Kind*>& known) {
  Opened opened;
  std::vector<std::string> choices;
  const base::Status status = open(text, known, opened, [&](const Kind& kind) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(choices, choose(kind, options));
    return {};
  });
  GPUSHARE_RETURN_IF_ERROR(status);
  OrderedJson document = object({{"version", kDocumentVersion}, {"kind", opened.kind->name}});
  GPUSHARE_RETURN_IF_ERROR(decide_all(*opened.kind, choices, opened.kind->choices, opened.kind->chooses,
                                      options, document,
                                      [&](const std::string& choice, OrderedJson& result, bool) {
                                        return opened.problem->solve(choice, result);
                                      }));
  return document;
}

base::Result<OrderedJson> run(std::string_view text, const PlanOptions& options, const PlayOptions& play,
                              const std::vector<const Kind*>& known, std::vector<PlaySpan>* spans) {
  Opened opened;
  std::vector<std::string> choices;
  std::vector<const char*> there;
  const base::Status status = open(text, known, opened, [&](const Kind& kind) -> base::Status {
    const bool has_objectives = std::string_view(kind.chooses) == "objective";
    if (!play.objective.empty() && !has_objectives)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("--objective: a document of kind %s has none; it chooses --scheduler of %s",
                           kind.name, joined(kind.run_choices).c_str())};
    if (!play.objective.empty()) {
      GPUSHARE_RETURN_IF_ERROR(
          choose(kind, "objective", {play.objective}, kind.choices, kind.defaults).status());
    }
    const auto& wanted = options.choices.empty() ? options.schedulers : options.choices;
    there = kind.run_choices;
    if (!play.own.empty() && std::string_view(kind.name) != "training")
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("a scheduler of the caller's own plays documents of kind training, not %s",
                           kind.name)};
    for (const PlayOptions::Own& own : play.own) {
      for (const char* name : there)
        if (own.name == name)
          return {GPUSHARE_INVALID_ARGUMENT,
                  "there is a scheduler '" + own.name + "' already; choose another name"};
      there.push_back(own.name.c_str());
    }
    GPUSHARE_ASSIGN_OR_RETURN(choices, choose(kind, "scheduler", wanted, there, kind.run_defaults));
    return {};
  });
  GPUSHARE_RETURN_IF_ERROR(status);
  OrderedJson document =
      object({{"version", kDocumentVersion}, {"kind", opened.kind->name}, {"seed", play.seed}});
  GPUSHARE_RETURN_IF_ERROR(decide_all(*opened.kind, choices, there, "scheduler", options, document,
                                      [&](const std::string& choice, OrderedJson& result, bool last) {
                                        return opened.problem->play(choice, play, result,
                                                                    last ? spans : nullptr);
                                      }));
  return document;
}

}  // namespace gpushare::cluster
