// profiler_error.hpp: what to believe of a profiler's accuracies once some of the retrainings have ended.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>

namespace gpushare::cluster {

// Accuracies of a stream's configuration, told apart by name, differ from window to window around a mean; the profiler
// adds an error. Both variances are estimated from what was told and reached, over all streams and configurations, and
// a told accuracy is drawn to the mean of its configuration by as much as they say. A profiler that was always right is
// believed to the letter, and so is what is told of a configuration for the first time.
class ProfilerError {
 public:
  // In place of `told` for a configuration of this window.
  double believed(size_t stream, const std::string& configuration, double told) const;
  // Afterwards: what was told of it; and if it was retrained, instead of that, with the accuracy reached.
  void told(size_t stream, const std::string& configuration, double told);
  void reached(size_t stream, const std::string& configuration, double told, double accuracy);

 private:
  struct History {
    double count = 0, sum = 0, squares = 0;     // as told
    double reached_count = 0, reached_sum = 0;  // as reached
    double reached_told = 0;                    // the sum of what was told of those
  };
  double spread_told() const;  // variance of what is told of a configuration, over windows

  std::map<std::pair<size_t, std::string>, History> histories_;
  double errors_ = 0, error_count_ = 0;  // squares of what was told less what was reached
};

}  // namespace gpushare::cluster
