// options.hpp: option values that CLI11 passes as text, checked with messages that name the option and what
// is allowed. Most commands declare their options with add(), which checks and stores a value where it is parsed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.hpp"

namespace gpushare::cli {

// INVALID_ARGUMENT "--lanes: 'x' is not allowed; give a whole number from 0 to 64".
base::Status bad_option(const char* option, const std::string& value, const std::string& allowed);

// "a,b,c" to its items; empty ones are kept, to be refused by name.
std::vector<std::string> split_list(const std::string& text);

// "a,b" to names that are all `known`, each once. Errors: INVALID_ARGUMENT naming what there is.
base::Result<std::vector<std::string>> parse_names(const char* option, const std::string& text,
                                                   std::span<const char* const> known);

// From `low` (above it, unless `low_allowed`) to `high`. Errors: INVALID_ARGUMENT.
base::Result<double> parse_number(const char* option, const std::string& text, double low, bool low_allowed,
                                  double high);
// `low` to `high`. Errors: INVALID_ARGUMENT.
base::Result<uint64_t> parse_count(const char* option, const std::string& text, uint64_t high,
                                   uint64_t low = 0);
// A size above 0, with its unit. Errors: INVALID_ARGUMENT.
base::Result<uint64_t> parse_size(const char* option, const std::string& text);

// Parsers for add(), with what is allowed; parse_size is one, too.
inline auto number(double low, bool low_allowed, double high) {
  return [=](const char* option, const std::string& text) {
    return parse_number(option, text, low, low_allowed, high);
  };
}
inline auto count(uint64_t high, uint64_t low = 0) {
  return [=](const char* option, const std::string& text) { return parse_count(option, text, high, low); };
}
inline auto names(std::span<const char* const> known) {
  return [=](const char* option, const std::string& text) { return parse_names(option, text, known); };
}
// Numbers above 0, separated by commas.
inline auto numbers(double high) {
  return [=](const char* option, const std::string& text) -> base::Result<std::vector<double>> {
    std::vector<double> out;
    for (const std::string& word : split_list(text)) {
      GPUSHARE_ASSIGN_OR_RETURN(const double value, parse_number(option, word, 0, false, high));
      out.push_back(value);
    }
    return out;
  };
}
// One of these words.
inline auto one_of(std::vector<std::string> known) {
  return
      [known = std::move(known)](const char* option, const std::string& text) -> base::Result<std::string> {
        std::string all = known.front();
        for (size_t i = 0; i < known.size(); ++i) {
          if (known[i] == text) return text;
          if (i > 0) all += (i + 1 < known.size() ? ", " : " and ") + known[i];
        }
        return bad_option(option, text, "there are " + all);
      };
}

// Declares an option. `out` holds the default and keeps it without the option. A value that `parse` refuses is a usage
// error with the parser's message. An empty one is left to main.cpp, which refuses it for every option.
template <class Out, class Parse>
CLI::Option* add(CLI::App& app, const char* option, Out* out, Parse parse, const char* type,
                 const char* help) {
  const auto take = [=](const std::string& text) {
    if (text.empty()) return;
    auto value = parse(option, text);
    if (!value.ok()) throw CLI::ValidationError(value.status().message());
    *out = static_cast<Out>(*std::move(value));
  };
  return app.add_option_function<std::string>(option, take, help)->type_name(type);
}

}  // namespace gpushare::cli
