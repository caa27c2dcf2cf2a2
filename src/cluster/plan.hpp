// plan.hpp: a document in, the decisions of one or several schedulers out.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cluster/kinds.hpp"

namespace gpushare::cluster {

struct PlanOptions {
  std::vector<std::string> schedulers;  // empty: the kind's default. For kinds that choose a scheduler
  std::vector<std::string> objectives;  // empty: the kind's default. For kinds that choose an objective
  std::vector<std::string> choices;     // either, for callers that do not know the kind; before the other two
  // For solve_ms, which is 0 without it: this folder has no clock.
  std::function<uint64_t()> now_ns;
  // Told before each choice: its name, its index, and how many there are.
  std::function<void(const std::string&, size_t, size_t)> progress;
};

// {"version", "kind", "results": [{"scheduler" or "objective", "solve_ms", ...}]}, one entry a choice. A choice that the
// kind does not have, or that needs what the document lacks, is in "errors": [{"scheduler" or "objective", "error"}].
// Errors: MALFORMED_INPUT (the document; the message has path, value and what is allowed), INVALID_ARGUMENT (no choice
// is possible: that of the first).
// `known` are the kinds there are: kinds(), or sim::all_cluster_kinds() with those that are played on virtual time.
base::Result<OrderedJson> plan(std::string_view document, const PlanOptions& options,
                               const std::vector<const Kind*>& known = kinds());

// Plays the document through with noise, once by each of `options.schedulers` or `options.choices`. The result has
// "seed" beside the fields of plan's. `spans`, unless null, gets what the last of them did. Errors: as plan's.
base::Result<OrderedJson> run(std::string_view document, const PlanOptions& options, const PlayOptions& play,
                              const std::vector<const Kind*>& known = kinds(),
                              std::vector<PlaySpan>* spans = nullptr);

// The published JSON Schema of documents and results of those kinds.
std::string schema(const std::vector<const Kind*>& known = kinds());

}  // namespace gpushare::cluster
