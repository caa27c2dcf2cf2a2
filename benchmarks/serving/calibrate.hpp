// calibrate.hpp: the load, c0 and c1 of a printed case, which the paper does not print.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "base/status.hpp"
#include "sim/serving/serving.hpp"

namespace gpushare::experiments {

// The goals of a calibration, which searches among random points, then near the best:
//   columns      the Clockwork and Nexus columns nearest to the printed, in least squares;
//   achievable   the same among points where Orloj, re-implemented, is within 0.03 of its printed mean. The
//                printed Orloj column tells the load that the device could bear; the first kind ignores it.
enum class Target { kColumns, kAchievable };

struct Calibration {
  std::string name, synthetic;
  Target target = Target::kColumns;
  double load = 1;       // arrival rate x mean execution time alone
  double c0_x_mean = 0;  // c0 over the mean execution time
  double c1 = 1;
  double clockwork_rms = 0, nexus_rms = 0;  // to the printed columns
  double orloj_mean = 0;
};

inline constexpr double kSlos[] = {1.5, 2, 3, 4, 5};

// Finish rates of one policy over the five SLOs.
std::vector<double> finish_rates(const Calibration& at, const char* policy, uint64_t seed, size_t requests);
Calibration calibrate(const std::string& name, Target target, size_t points);

std::string to_csv(const std::vector<Calibration>& all);
base::Result<std::vector<Calibration>> read_csv(const std::string& path);

}  // namespace gpushare::experiments
