// serving_steps.hpp: continuous batching on virtual time: requests of a language model through a step batcher, the very object that the
// executor's step server drives. A step takes a + b D + p C + r K: D decoding members, C prompt tokens, K tokens whose keys and
// values the decoding members read.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sched/slo/step_batcher.hpp"

namespace gpushare::sim {

struct TimedGeneration {
  uint64_t arrival_ns = 0;
  uint64_t prompt_tokens = 1;
  uint64_t tokens = 1;  // that it generates
};

struct StepCost {
  double step_ns = 0, decode_ns = 0, prefill_ns = 0, read_ns = 0;
  double noise = 0;  // deviation of a factor of each step's duration
};

struct StepServingOptions {
  StepCost cost;
  uint64_t bytes_per_token = 0;
  double first_ns_per_token =
      0;  // a first token is due first_ns + this for each token of the prompt after the arrival
  uint64_t first_ns = 0, token_ns = 0;
  bool tell_tokens = false;  // the batcher is told how many tokens a request will generate
  uint64_t seed = 1;
};

struct StepServingResult {
  uint64_t requests = 0;
  double in_time = 0;       // share whose tokens were all in time
  double in_time_mean = 0;  // share whose first token was in time, and the others on average
  double first_in_time = 0;
  double lost_work = 0;  // share of the tokens processed whose memory was given back
  double busy = 0;       // share of the time
  uint64_t returned = 0;
  sched::slo::StepStats stats;
};

// `requests` in order of arrival.
StepServingResult serve_steps(const std::vector<TimedGeneration>& requests, sched::slo::StepBatcher& batcher,
                              const StepServingOptions& options);

// Reads a public trace: Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens) or Mooncake's lines of JSON (timestamp in ms,
// input_length, output_length), at its own rate. Errors: NOT_FOUND, MALFORMED_INPUT naming the line.
base::Result<std::vector<TimedGeneration>> read_generations(const std::string& path);

}  // namespace gpushare::sim
