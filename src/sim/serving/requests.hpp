// sim/serving: deadline-aware serving on virtual time. requests.* makes or reads requests, serving.* drives a
// batcher (src/sched/slo) with them, the same object that the executor drives. May be called from the cli,
// benchmarks and tests; calls sched/slo and base.
//
// requests.hpp: a list of requests, drawn from a synthetic specification or read from a file.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"

namespace gpushare::sim {

struct TimedRequest {
  uint64_t arrival_ns = 0;
  uint32_t application = 0;
  uint64_t execution_ns = 0;          // alone
  uint64_t slo_ns = 0;                // 0: a multiple of the P99 execution time, chosen by the experiment
  std::vector<double> features = {};  // numbers known at its arrival that its execution time may depend on
};

// An execution-time distribution as a mixture of normal modes, one application each, cut below half a unit.
struct Mode {
  double mean_units;
  double sd_units;
  double share = 1;
};

struct SyntheticSpec {
  std::string name;
  std::vector<Mode> modes;
  // If not negative, in place of modes: one application, whose requests have one feature x, evenly between half and
  // twenty and a half, and take x units times a normal factor of mean 1 and this deviation.
  double numeric_sd = -1;
  double unit_ms = 50;
};

// "modes:N" (N = 1..8, the cases of Orloj's table C.2), "bimodal:SD1[/SD2]" (table C.1), "numeric:SD", "static:MS". Errors:
// INVALID_ARGUMENT with what is allowed.
base::Result<SyntheticSpec> parse_synthetic(std::string_view text);

struct ArrivalOptions {
  size_t requests = 4000;
  double rate_per_s = 1;
  double burstiness =
      0;  // coefficient of variation of the rate over periods of about 20 mean gaps; 0 = Poisson
  uint64_t seed = 1;
};

// Requests of the specification, in order of arrival.
std::vector<TimedRequest> draw(const SyntheticSpec& spec, const ArrivalOptions& options);
double mean_execution_ns(const SyntheticSpec& spec);

// CSV with the header arrival_s,application,exec_ms[,slo_ms][,feature...]; applications are any words, numbered in order
// of appearance; up to eight further columns whose names begin with 'feature' are numbers. Or a public trace of language
// models: Azure's of 2023 and 2024 (TIMESTAMP,ContextTokens,GeneratedTokens) and of 2025 (NumImages, too), BurstGPT
// (Timestamp,Model,Request tokens,Response tokens,...) and Mooncake (a JSON object a line). There the execution time is
// made by the rule context * prefill_ms_per_token + generated * decode_ms_per_token, the application is the octave of
// the context length, and the context length the only feature. Of the public traces, requests that failed (BurstGPT: no
// response) and a last line that was cut off are left out; `notes`, unless null, says so. `file` is for messages.
// Errors: MALFORMED_INPUT naming file, line and column; those of read_text.
struct TokenRule {
  double prefill_ms_per_token = 0.25;
  double decode_ms_per_token = 20;
};
base::Result<std::vector<TimedRequest>> parse_requests(std::string_view text, const std::string& file,
                                                       const TokenRule& rule = {},
                                                       std::vector<std::string>* notes = nullptr);
base::Result<std::vector<TimedRequest>> read_requests(const std::string& path, const TokenRule& rule = {},
                                                      std::vector<std::string>* notes = nullptr);

// The q quantile of the execution times, ns; 0 when empty.
double execution_quantile_ns(const std::vector<TimedRequest>& requests, double q);

}  // namespace gpushare::sim
