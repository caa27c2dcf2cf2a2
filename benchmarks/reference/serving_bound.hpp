// serving_bound.hpp: how many requests any policy could finish in time at most, told everything beforehand.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "sim/serving/serving.hpp"

namespace gpushare::sim {

// An upper bound on ServingResult::finished_in_time of every policy, clairvoyant ones included. It relaxes the
// problem: a batch may be spread over time and joined by anyone, and costs each member only its least share of
// the batch's time, c0/k + c1 l, where k is the largest batch that the member's deadline bears. The best that
// one device can do is then a preemptive single-machine problem with fractions allowed, whose optimum the
// shortest shares first give (the amounts of work that fit the windows form a polymatroid). O(n log n).
uint64_t most_in_time(const std::vector<TimedRequest>& requests, const ServingOptions& options);

}  // namespace gpushare::sim
