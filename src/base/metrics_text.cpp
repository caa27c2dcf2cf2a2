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
  text_ += name_;
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
