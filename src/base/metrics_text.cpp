// SPDX-License-Identifier: Apache-2.0
#include "base/metrics_text.hpp"

#include "base/status.hpp"
#include "base/utf8.hpp"

namespace gpushare::base {

void MetricsText::family(const char* name, const char* help, const char* type) {
  name_ = name;
  text_ += format("# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

void MetricsText::sample(const Labels& labels, double value) {
  sample_of("", labels, value);
}

void MetricsText::buckets(const Labels& labels, std::span<const double> bounds,
                          std::span<const uint64_t> counts, double sum) {
  Labels with_bound = labels;
  with_bound.emplace_back("le", "");
  double total = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    total += static_cast<double>(counts[i]);
    with_bound.back().second = i < bounds.size() ? format("%g", bounds[i]) : "+Inf";
    sample_of("_bucket", with_bound, total);
  }
  sample_of("_sum", labels, sum);
  sample_of("_count", labels, total);
}

void MetricsText::sample_of(const char* suffix, const Labels& labels, double value) {
  text_ += name_;
  text_ += suffix;
  char separator = '{';
  for (const auto& [name, content] : labels) {
    text_ += separator;
    text_ += name;
    text_ += "=\"";
    for (const char each : to_utf8(content)) {
      if (each == '\\' || each == '"') text_ += '\\';
      if (each == '\n')
        text_ += "\\n";
      else
        text_ += each;
    }
    text_ += '"';
    separator = ',';
  }
  if (separator == ',') text_ += '}';
  text_ += format(" %.17g\n", value);
}

}  // namespace gpushare::base
