// SPDX-License-Identifier: Apache-2.0
#include "cli/model_file.hpp"

#include <cerrno>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "base/units.hpp"
#include "loader/order.hpp"
#include "loader/safetensors.hpp"
#include "sim/csv.hpp"

namespace gpushare::cli {
namespace {

constexpr double kMaxMegabytes = 1e7;  // 10 TB: above any layer, far below where bytes would overflow
constexpr double kMaxExecutionMs = 1e9;

base::Status bad_field(const std::string& file, size_t line, const char* field, const std::string& value,
                       const std::string& allowed) {
  return {GPUSHARE_MALFORMED_INPUT,
          base::format("%s:%zu: %s is '%s'; %s", file.c_str(), line, field, value.c_str(), allowed.c_str())};
}

// The rows below a header that must read exactly so.
base::Result<std::vector<sim::CsvRow>> rows_under(std::string_view text, const std::string& file,
                                                  const std::vector<std::string>& header) {
  GPUSHARE_ASSIGN_OR_RETURN(std::vector<sim::CsvRow> rows, sim::parse_csv(text, file));
  std::string wanted;
  for (const std::string& field : header) wanted += (wanted.empty() ? "" : ",") + field;
  if (rows.empty() || rows.front().fields != header)
    return base::Status(GPUSHARE_MALFORMED_INPUT,
                        base::format("%s:%zu: the header must be '%s'", file.c_str(),
                                     rows.empty() ? size_t{1} : rows.front().line, wanted.c_str()));
  rows.erase(rows.begin());
  for (const sim::CsvRow& row : rows) {
    if (row.fields.size() != header.size())
      return base::Status(GPUSHARE_MALFORMED_INPUT,
                          base::format("%s:%zu: has %zu fields; each line has %zu: %s", file.c_str(),
                                       row.line, row.fields.size(), header.size(), wanted.c_str()));
    if (row.fields[0].empty())
      return bad_field(file, row.line, "layer", "", "give each layer a name or number");
  }
  return rows;
}

base::Result<double> number_field(const std::string& file, const sim::CsvRow& row, size_t index,
                                  const char* field, double high) {
  const base::Result<double> value = base::parse_double(row.fields[index]);
  if (value.ok() && *value >= 0 && *value <= high) return *value;
  return bad_field(file, row.line, field, row.fields[index],
                   base::format("give a number from 0 to %g", high));
}

bool ends_with(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

base::Result<std::vector<ModelLayer>> parse_layer_csv(std::string_view text, const std::string& file) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::vector<sim::CsvRow> rows,
                            rows_under(text, file, {"layer", "type", "megabytes"}));
  std::vector<ModelLayer> layers;
  std::unordered_map<std::string, size_t> line_of;
  for (const sim::CsvRow& row : rows) {
    const auto [entry, fresh] = line_of.emplace(row.fields[0], row.line);
    if (!fresh)
      return bad_field(file, row.line, "layer", row.fields[0],
                       base::format("line %zu has that layer already; name each once", entry->second));
    GPUSHARE_ASSIGN_OR_RETURN(const double megabytes, number_field(file, row, 2, "megabytes", kMaxMegabytes));
    layers.push_back({row.fields[0], static_cast<uint64_t>(std::llround(megabytes * 1048576.0))});
  }
  if (layers.empty())
    return base::Status(GPUSHARE_MALFORMED_INPUT, file + ": has no layers below its header");
  return layers;
}

base::Result<std::vector<ModelLayer>> read_model_layers(const std::string& path) {
  if (ends_with(path, ".csv")) {
    GPUSHARE_ASSIGN_OR_RETURN(const std::string text, sim::read_text(path));
    return parse_layer_csv(text, path);
  }
  if (!ends_with(path, ".safetensors") && !ends_with(path, ".json"))
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        path +
                            ": not a kind of model known here; give a .csv (layer,type,megabytes), a "
                            ".safetensors or a .safetensors.index.json file");
  const auto read = loader::read_model(path);
  if (read.status().native_code() == ENOENT)
    return base::Status(GPUSHARE_NOT_FOUND, read.status().message(), ENOENT);
  if (!read.ok()) return read.status();
  const loader::ModelFiles& model = *read;
  std::vector<ModelLayer> layers;
  for (const loader::Tensor& tensor : model.tensors) layers.push_back({tensor.name, tensor.bytes()});
  if (layers.empty()) return base::Status(GPUSHARE_MALFORMED_INPUT, path + ": has no tensors");
  return layers;
}

base::Status apply_order(std::string_view text, const std::string& file, std::vector<ModelLayer>* layers) {
  std::unordered_map<std::string_view, size_t> index_of;
  for (size_t i = 0; i < layers->size(); ++i) index_of.emplace((*layers)[i].name, i);
  std::vector<bool> named(layers->size(), false);
  std::vector<ModelLayer> ordered;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = text.find('\n');
    std::string_view name = text.substr(0, end);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
    if (!name.empty() && name.back() == '\r') name.remove_suffix(1);
    if (name.empty() || name.front() == '#') continue;
    const auto entry = index_of.find(name);
    if (entry == index_of.end())
      return bad_field(file, line, "layer", std::string(name), "the model has no layer of that name");
    if (named[entry->second])
      return bad_field(file, line, "layer", std::string(name), "name each layer once");
    named[entry->second] = true;
    ordered.push_back((*layers)[entry->second]);
  }
  for (size_t i = 0; i < named.size(); ++i)
    if (!named[i])
      return {GPUSHARE_MALFORMED_INPUT,
              base::format("%s: does not name layer '%s'; all %zu layers of the model need a line",
                           file.c_str(), (*layers)[i].name.c_str(), layers->size())};
  *layers = std::move(ordered);
  return {};
}

void sort_by_names(std::vector<ModelLayer>* layers) {
  std::vector<std::string_view> names;
  for (const ModelLayer& layer : *layers) names.push_back(layer.name);
  std::vector<ModelLayer> sorted;
  for (const size_t i : loader::order_by_name(names)) sorted.push_back((*layers)[i]);
  *layers = std::move(sorted);
}

base::Result<std::vector<double>> parse_execution_times(std::string_view text, const std::string& file,
                                                        const std::vector<ModelLayer>& layers) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::vector<sim::CsvRow> rows,
                            rows_under(text, file, {"layer", "exec_ms"}));
  std::unordered_map<std::string_view, size_t> index_of;
  for (size_t i = 0; i < layers.size(); ++i) index_of.emplace(layers[i].name, i);
  constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();
  std::vector<double> times(layers.size(), kMissing);
  for (const sim::CsvRow& row : rows) {
    const auto entry = index_of.find(row.fields[0]);
    if (entry == index_of.end())
      return bad_field(file, row.line, "layer", row.fields[0], "the model has no layer of that name");
    double& time = times[entry->second];
    if (!std::isnan(time))
      return bad_field(file, row.line, "layer", row.fields[0], "give each layer's time once");
    GPUSHARE_ASSIGN_OR_RETURN(time, number_field(file, row, 1, "exec_ms", kMaxExecutionMs));
  }
  for (size_t i = 0; i < layers.size(); ++i)
    if (std::isnan(times[i]))
      return base::Status(GPUSHARE_MALFORMED_INPUT,
                          base::format("%s: has no line for layer '%s'; all %zu layers of the model need one",
                                       file.c_str(), layers[i].name.c_str(), layers.size()));
  return times;
}

}  // namespace gpushare::cli
