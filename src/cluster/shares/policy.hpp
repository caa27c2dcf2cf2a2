// src/cluster/shares: dividing units round by round among jobs whose performance is not known (Cilantro; thesis 002,
// chapter 3): the policies, and playing a document's rounds. shares_kind.cpp calls it; it calls cilantro.hpp and
// learn/. No thread, no clock.
//
// policy.hpp: the policies that divide the resource. A policy is told the observations of each job in a round, and
// decides the next round.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "cluster/cilantro.hpp"
#include "cluster/learn/performance.hpp"

namespace gpushare::cluster::shares {

// A job as it is known before the first round.
struct KnownJob {
  double load = 1;  // as declared
  double slo = 1;
  UtilityShape utility = UtilityShape::kLinear;
  std::optional<PerformanceCurve> declared;  // of a job that reports no performance: a profile, or its demand
};

struct Known {
  int64_t capacity = 0;
  int64_t max_step = 1;  // most units by which a share changes from round to round
  ShareObjective objective = ShareObjective::kNoJustifiedComplaints;
  std::vector<KnownJob> jobs;
};

// The observation of one job in one round. The performance is relative to the objective, so 1 meets it.
struct Observed {
  int64_t units = 0;
  double load = 0;
  double performance = 0;
};

class Policy {
 public:
  virtual ~Policy() = default;
  // The shares of the next round; they sum to at most the capacity.
  virtual std::vector<int64_t> decide() = 0;
  virtual void observe(const std::vector<Observed>& jobs) = 0;
  // The policy's bounds of a job's performance; nothing if the policy does not learn it.
  virtual std::optional<PerformanceBounds> bounds(size_t, double /*units*/, double /*load*/) { return {}; }
  // The greatest load it expects of a job, if it forecasts.
  virtual std::optional<double> load_bound(size_t) { return {}; }
};

inline constexpr const char* kPolicies[] = {
    "gpushare", "cilantro", "cilantro-kernel", "cilantro-surface", "oracle",  "fair", "evolutionary",
    "greedy",   "ernest",   "quasar",          "minerva",          "parties", "miad"};

// Null for a name that is none, and for "oracle", which knows what policies are not told: rounds.cpp plays it. The seed
// is of evolutionary and quasar alone.
std::unique_ptr<Policy> make_policy(std::string_view name, const Known& known, uint64_t seed);
std::unique_ptr<Policy> make_learned(std::string_view name, const Known& known);  // learned.cpp
std::unique_ptr<Policy> make_baseline(std::string_view name, const Known& known,
                                      uint64_t seed);  // baselines.cpp

// The units that each job has when all are equal; the remainder goes to earlier jobs.
std::vector<int64_t> equal_shares(int64_t capacity, size_t jobs);

}  // namespace gpushare::cluster::shares
