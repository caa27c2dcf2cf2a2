// metrics_text.hpp: figures in Prometheus' text format, version 0.0.4: families of samples, each sample with labels. No locks, no threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace gpushare::base {

class MetricsText {
 public:
  using Labels = std::vector<std::pair<const char*, std::string>>;

  // Begins a family; the samples that follow are its own. `name`: snake case, ending with the unit, and counters with "_total".
  void counter(const char* name, const char* help) { family(name, help, "counter"); }
  void gauge(const char* name, const char* help) { family(name, help, "gauge"); }
  // Its samples come by buckets().
  void histogram(const char* name, const char* help) { family(name, help, "histogram"); }
  // Values of labels may hold anything: they are made UTF-8 and escaped. A value that is whole is written whole.
  void sample(const Labels& labels, double value);
  // `counts`: of each bucket alone; the last one has no bound.
  void buckets(const Labels& labels, std::span<const double> bounds, std::span<const uint64_t> counts,
               double sum);

  const std::string& text() const { return text_; }

 private:
  void family(const char* name, const char* help, const char* type);
  void sample_of(const char* suffix, const Labels& labels, double value);

  std::string text_;
  const char* name_ = "";
};

}  // namespace gpushare::base
