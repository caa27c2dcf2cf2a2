// serve_host.hpp: `gpushare serve --device host`: the requests in real time on CPU threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "sim/serving/serving.hpp"

namespace gpushare::cli {

// Submits the requests from four threads at their arrival times to a request server in front of a runtime on the host device.
// Every batch is an iteration, its kernel arithmetic for c0 + c1 k max l, or without `arithmetic` a wait for as long, as if a
// device elsewhere worked. All durations are multiplied by `time_scale`; latencies in the result are unscaled again.
// Blocks for as long as the requests last. Errors: those of RequestServer::start; INTERNAL if a request was lost or
// answered twice.
base::Result<sim::ServingResult> serve_on_host(const std::vector<sim::TimedRequest>& requests,
                                               std::string_view policy, const sim::ServingOptions& options,
                                               double time_scale, bool arithmetic = true);

}  // namespace gpushare::cli
