// SPDX-License-Identifier: Apache-2.0
#include "sim/interference.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "sim/csv.hpp"

namespace gpushare::sim {
namespace {

using Json = nlohmann::json;

base::Status malformed(const std::string& file, const std::string& what) {
  return {GPUSHARE_MALFORMED_INPUT, file + ": " + what};
}

// "('ResNet-18 (batch size 16)', 1)" -> name, if the scale is 1; "" for another scale. False if it has
// another form.
bool parse_key(std::string_view key, std::string_view& name) {
  constexpr std::string_view kHead = "('", kMiddle = "', ";
  if (!key.starts_with(kHead) || !key.ends_with(")")) return false;
  const size_t middle = key.rfind(kMiddle);
  if (middle == std::string_view::npos || middle <= kHead.size()) return false;
  const std::string_view scale =
      key.substr(middle + kMiddle.size(), key.size() - middle - kMiddle.size() - 1);
  if (scale.empty() || scale.find_first_not_of("0123456789") != std::string_view::npos) return false;
  name = scale == "1" ? key.substr(kHead.size(), middle - kHead.size()) : std::string_view();
  return true;
}

bool is_rate(const Json& value) {
  return value.is_number() && std::isfinite(value.get<double>()) && value.get<double>() >= 0;
}

std::string shown(const std::string& key) {
  return "\"" + key.substr(0, 80) + "\"";
}

}  // namespace

base::Result<InterferenceTable> InterferenceTable::parse(std::string_view text, const std::string& file,
                                                         const std::string& device) {
  Json root;
  try {
    root = Json::parse(text.begin(), text.end());
  } catch (const Json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, ..." without the exception's name.
    const std::string_view what = error.what();
    const size_t name = what.find("] ");
    return malformed(file, "not JSON: " + std::string(name == what.npos ? what : what.substr(name + 2)) +
                               "; expected measured pairs as published with Gavel, {\"p100\": {...}}");
  }
  if (!root.is_object()) return malformed(file, "expected an object of devices, {\"p100\": {...}}");
  const auto chosen = root.find(device);
  if (chosen == root.end()) {
    std::string known;
    for (const auto& [name, value] : root.items())
      known.append(known.empty() ? "" : ", ").append(shown(name));
    return base::Status(GPUSHARE_NOT_FOUND, file + ": no device \"" + device + "\"; it has: " + known);
  }
  if (!chosen->is_object()) return malformed(file, shown(device) + " must be an object of configurations");

  InterferenceTable table;
  table.device_ = device;
  for (const auto& [key, row] : chosen->items()) {
    std::string_view name;
    if (!parse_key(key, name))
      return malformed(file, device + ": key " + shown(key) + " must be \"('NAME', GPUS)\"");
    if (!row.is_object()) return malformed(file, device + ": " + shown(key) + " must be an object");
    const auto alone = row.find("null");
    if (alone == row.end() || !is_rate(*alone))
      return malformed(file,
                       device + ": " + shown(key) + " needs \"null\": steps per second alone, a number >= 0");
    if (name.empty() || alone->get<double>() <= 0) continue;
    table.index_.emplace(std::string(name), table.alone_.size());
    table.alone_.push_back(alone->get<double>());
  }
  const size_t n = table.alone_.size();
  if (n > 4096) return malformed(file, base::format("%zu configurations; at most 4096 are allowed", n));
  table.pairs_.assign(n * n, 0);
  for (const auto& [key, row] : chosen->items()) {
    std::string_view name, other_name;
    parse_key(key, name);
    const size_t config = name.empty() ? kNone : table.find(name);
    for (const auto& [other_key, rates] : row.items()) {
      if (other_key == "null") continue;
      if (!parse_key(other_key, other_name))
        return malformed(
            file, device + ": " + shown(key) + ": key " + shown(other_key) + " must be \"('NAME', GPUS)\"");
      if (!rates.is_array() || rates.size() != 2 || !is_rate(rates[0]) || !is_rate(rates[1]))
        return malformed(file, device + ": " + shown(key) + " with " + shown(other_key) +
                                   " must be [steps/s, steps/s], numbers >= 0");
      const size_t other = other_name.empty() ? kNone : table.find(other_name);
      if (config == kNone || other == kNone) continue;
      const double rate = rates[0].get<double>() / table.alone_[config];
      const double other_rate = rates[1].get<double>() / table.alone_[other];
      if (rate <= 0 || other_rate <= 0) continue;
      table.pairs_[config * n + other] =
          std::min(rate, 1.0);  // faster together than alone: noise of the measurement
    }
  }
  return table;
}

base::Result<InterferenceTable> InterferenceTable::read(const std::string& path, const std::string& device) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::string text, read_text(path));
  return parse(text, path, device);
}

}  // namespace gpushare::sim
