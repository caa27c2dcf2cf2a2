// SPDX-License-Identifier: Apache-2.0
#include "cli/cluster_report.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cli/charts.hpp"
#include "cli/report_style.hpp"
#include "gpushare/version.h"

namespace gpushare::cli {
namespace cluster_page {  // names that other pages and tables have too
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMostRows = 200;    // of a table inside a result
constexpr size_t kMostSpans = 4000;  // of the picture of what ran where
constexpr size_t kMostTracks = 64;

// The figure that a kind is about, and whether less of it is better.
struct Figure {
  const char* kind;
  const char* objective;  // "": all
  const char* field;
  const char* words;
  bool less_is_better;
};
constexpr Figure kFigures[] = {
    {"services", "", "goodput_rps", "requests a second within their deadline", false},
    {"trials", "", "makespan_s", "makespan, seconds", true},
    {"retraining", "", "mean_accuracy", "mean accuracy", false},
    {"shares", "sw", "welfare", "mean utility", false},
    {"shares", "ew", "egalitarian", "least utility", false},
    {"shares", "njc", "fairness", "least utility over that of an equal share", false},
    {"application", "", "p99_ms", "99th percentile of the latency, ms", true},
    {"reservations", "", "wait_mean_s", "mean wait until granted, seconds", true},
    {"training", "", "jct_mean_s", "mean completion, seconds", true},
    {"mix", "", "score", "geometric mean of goodput, accuracy, 1 / makespan and 1 / mean completion", false},
};

std::string cell(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return base::format("%.5g", value.get<double>());
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_null() || (value.is_structured() && value.empty())) return "-";
  if (value.is_structured()) {
    std::string out;
    size_t count = 0;
    for (const auto& [key, item] : value.items()) {
      if (++count > 8) return out + ", ...";
      out += (out.empty() ? "" : ", ") + (value.is_object() ? key + " " : std::string()) + cell(item);
    }
    return out;
  }
  return value.dump();
}

std::string name_of(const Json& result) {
  return cell(result.front());
}

// The finding in words, and every scheduler's figures.
std::string summary(const Json& document) {
  const std::string kind = document.at("kind");
  const Json& results = document.at("results");
  std::string out = "<section aria-labelledby=\"summary\"><h2 id=\"summary\">Schedulers side by side</h2>";
  for (const Figure& figure : kFigures) {
    if (kind != figure.kind || results.empty()) continue;
    if (figure.objective[0] != '\0' && results[0].value("objective", "") != figure.objective) continue;
    const Json* best = nullptr;
    for (const Json& result : results) {
      if (!result.contains(figure.field)) continue;
      if (best == nullptr || (figure.less_is_better ? result[figure.field] < (*best)[figure.field]
                                                    : result[figure.field] > (*best)[figure.field]))
        best = &result;
    }
    if (best == nullptr) continue;
    out += "<p class=\"finding\">" + escape_html(figure.words) + ": <b>" + escape_html(name_of(*best)) +
           "</b> " +
           escape_html((figure.less_is_better ? "has the least, " : "has the most, ") +
                       cell((*best)[figure.field])) +
           ".</p>";
  }
  std::vector<std::string> keys;  // scalars of any result, in order of appearance
  for (const Json& result : results)
    for (const auto& [key, value] : result.items())
      if (!value.is_structured() && std::find(keys.begin(), keys.end(), key) == keys.end())
        keys.push_back(key);
  std::vector<std::vector<std::string>> rows;
  for (const Json& result : results) {
    std::vector<std::string> row;
    for (const std::string& key : keys) row.push_back(result.contains(key) ? cell(result[key]) : "");
    rows.push_back(std::move(row));
  }
  return out + html_table(keys, rows) + "</section>";
}

// The results of the rounds of shares: a chart for each metric, with a line for each scheduler. Each point is the mean
// of some rounds.
std::string series(const Json& document) {
  const Json& results = document.at("results");
  if (results.empty() || !results[0].contains("series") || results[0]["series"].empty()) return "";
  std::vector<std::string> names;
  for (const Json& result : results) names.push_back(name_of(result));
  std::string out =
      "<section aria-labelledby=\"rounds\"><h2 id=\"rounds\">Round by round</h2>" + policy_key(names);
  size_t number = 0;
  for (const auto& [metric, unused] : results[0]["series"][0].items()) {
    Chart chart;
    chart.title = metric + " by round";
    chart.description = "A line a scheduler; each point is the mean of some rounds.";
    chart.heading = metric;
    chart.x_label = "round";
    chart.height = 200;
    for (size_t i = 0; i < results.size(); ++i) {
      const Json& rounds = results[i].at("series");
      const size_t step = std::max<size_t>(1, rounds.size() / 60);
      ChartLine line{names[i], i % kReportStyles, {}, false};
      for (size_t from = 0; from < rounds.size(); from += step) {
        double sum = 0;
        const size_t to = std::min(rounds.size(), from + step);
        for (size_t r = from; r < to; ++r) sum += rounds[r].at(metric).get<double>();
        line.points.push_back({double(from + to) / 2, sum / double(to - from)});
        chart.y_max = std::max(chart.y_max, line.points.back().y);
      }
      chart.x_max = std::max(chart.x_max, double(rounds.size()));
      chart.lines.push_back(std::move(line));
    }
    out += draw(chart, base::format("rounds%zu", number++));
  }
  return out + "</section>";
}

struct Placed {
  const cluster::PlaySpan* span;
  size_t track;  // of its row
};

// The colours of the names in the picture of what ran where. Names that have the most time get one each, in their order
// of appearance, and where names outnumber the colours, the others share the grey one.
class Colours {
 public:
  explicit Colours(const std::vector<Placed>& drawn) {
    std::vector<std::pair<std::string, double>> time;  // in order of appearance
    std::map<std::string, size_t> places;
    for (const auto& [span, track] : drawn) {
      const auto [place, fresh] = places.emplace(span->name, time.size());
      if (fresh) time.emplace_back(span->name, 0);
      time[place->second].second += span->end_s - span->begin_s;
    }
    const bool all = time.size() <= kReportStyles;
    std::vector<size_t> kept(time.size());
    std::iota(kept.begin(), kept.end(), 0);
    std::stable_sort(kept.begin(), kept.end(),
                     [&](size_t a, size_t b) { return time[a].second > time[b].second; });
    if (!all) kept.resize(kReportStyles - 1);
    std::sort(kept.begin(), kept.end());
    for (const size_t i : kept) {
      const size_t next = styles_.size() + (!all && styles_.size() >= kGrey ? 1 : 0);
      styles_.emplace(time[i].first, next);
      names_.push_back(time[i].first);
    }
    others_ = time.size() - names_.size();
  }

  size_t of(const std::string& name) const {
    const auto found = styles_.find(name);
    return found == styles_.end() ? kGrey : found->second;
  }

  std::string key() const {
    std::string out = "<ul class=\"key\">";
    for (const std::string& name : names_) out += entry(of(name), name);
    if (others_ > 0) out += entry(kGrey, base::format("%zu others, with no more time each", others_));
    return out + "</ul>";
  }

 private:
  static constexpr size_t kGrey = 4;  // s4

  static std::string entry(size_t style, const std::string& text) {
    return base::format("<li><span class=\"swatch\" style=\"background:var(--s%zu);opacity:.55\"></span>",
                        style) +
           escape_html(text) + "</li>";
  }

  std::map<std::string, size_t> styles_;
  std::vector<std::string> names_;
  size_t others_ = 0;
};

// Rows of what ran where over time.
std::string picture(const Json& document, const std::vector<cluster::PlaySpan>& spans) {
  if (spans.empty()) return "";
  double end = 0;
  std::map<std::string, std::vector<double>> tracks;  // row -> until when each of its tracks is taken
  std::vector<const cluster::PlaySpan*> order;
  for (const cluster::PlaySpan& span : spans) order.push_back(&span);
  std::stable_sort(order.begin(), order.end(),
                   [](const auto* a, const auto* b) { return a->begin_s < b->begin_s; });
  const size_t shown = std::min(order.size(), kMostSpans);
  std::vector<Placed> placed;
  for (size_t i = 0; i < shown; ++i) {
    std::vector<double>& here = tracks[order[i]->row];
    size_t track = 0;
    while (track < here.size() && here[track] > order[i]->begin_s + 1e-9) ++track;
    if (track == here.size()) here.push_back(0);
    here[track] = order[i]->end_s;
    end = std::max(end, order[i]->end_s);
    placed.push_back({order[i], track});
  }
  std::map<std::string, size_t> first;
  size_t rows = 0;
  for (const auto& [row, here] : tracks) {
    first[row] = rows;
    rows += here.size();
  }
  const size_t drawn = std::min(rows, kMostTracks);
  std::erase_if(placed,
                [&](const Placed& item) { return first[item.span->row] + item.track >= drawn || end <= 0; });
  const Colours colours(placed);
  constexpr double kLeft = 150, kWidth = 690, kRow = 20;
  constexpr double kLetter = 7;  // width of a letter, so that a name is written where it fits
  std::string out =
      base::format("<section aria-labelledby=\"where\"><h2 id=\"where\">What ran where, under %s</h2>",
                   escape_html(name_of(document.at("results").back())).c_str());
  out += colours.key() + base::format(
                             "<svg viewBox=\"0 0 850 %.0f\" role=\"img\" aria-label=\"Rows are devices or "
                             "jobs, time runs to the right\">",
                             double(drawn) * kRow + 30);
  for (const auto& [row, at] : first)
    if (at < drawn)
      out += base::format("<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">", kLeft - 8,
                          double(at) * kRow + 14) +
             escape_html(row.substr(0, 24)) + "</text>";
  for (const Placed& item : placed) {
    const size_t y = first[item.span->row] + item.track;
    const double x = kLeft + kWidth * item.span->begin_s / end;
    const double width = std::max(0.4, kWidth * (item.span->end_s - item.span->begin_s) / end);
    out += base::format(
               "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.0f\" fill=\"var(--s%zu)\" "
               "fill-opacity=\".55\"><title>",
               x, double(y) * kRow + 2, width, kRow - 4, colours.of(item.span->name)) +
           escape_html(base::format("%s, %.6g to %.6g s", item.span->name.c_str(), item.span->begin_s,
                                    item.span->end_s)) +
           "</title></rect>";
    if (width > kLetter * double(item.span->name.size() + 1))
      out += base::format("<text class=\"inside\" x=\"%.2f\" y=\"%.1f\">", x + 4, double(y) * kRow + 14) +
             escape_html(item.span->name) + "</text>";
  }
  for (const double tick : ticks(0, end, 6))
    if (tick <= end)
      out += base::format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s s</text>",
                          kLeft + kWidth * tick / end, double(drawn) * kRow + 20, tick_text(tick).c_str());
  out += "</svg>";
  if (rows > drawn || order.size() > shown)
    out += base::format(
        "<p class=\"soft\">The first %zu of %zu rows, and %zu of %zu stretches; --timeline has all.</p>",
        drawn, rows, shown, order.size());
  return out + "</section>";
}

// One folded table.
std::string folded(const std::string& title, size_t count, const std::vector<std::string>& titles,
                   const std::vector<std::vector<std::string>>& rows) {
  std::string out = "<details><summary>" + escape_html(title) + base::format(" (%zu)</summary>", count) +
                    html_table(titles, rows);
  if (count > rows.size())
    out += base::format("<p class=\"soft\">The first %zu; --json has all.</p>", rows.size());
  return out + "</details>";
}

bool has_rows(const Json& value) {
  return value.is_object() || (value.is_array() && !value.empty() && value[0].is_object());
}

// The tables of what a result holds under `title`: one of the plain values of an object, then those of the lists and
// objects in it. A part of a mix is such an object.
std::string inside(const std::string& title, const Json& value) {
  std::vector<std::vector<std::string>> rows;
  if (value.is_array() && has_rows(value)) {
    std::vector<std::string> titles;
    for (const auto& [key, unused] : value[0].items()) titles.push_back(key);
    for (const Json& item : value) {
      if (rows.size() >= kMostRows) break;
      std::vector<std::string> row;
      for (const std::string& key : titles) row.push_back(item.contains(key) ? cell(item[key]) : "");
      rows.push_back(std::move(row));
    }
    return folded(title, value.size(), titles, rows);
  }
  size_t plain = 0;
  std::string inner;
  for (const auto& [key, item] : value.items()) {
    if (has_rows(item))
      inner += inside(title + ", " + key, item);
    else if (++plain <= kMostRows)
      rows.push_back({key, cell(item)});
  }
  return (plain == 0 ? "" : folded(title, plain, {"name", "value"}, rows)) + inner;
}

// The lists and objects of a result. Its series has charts.
std::string inside(const Json& result) {
  std::string out;
  for (const auto& [key, value] : result.items())
    if (key != "series" && value.is_structured() && !value.empty()) out += inside(key, value);
  return out;
}

}  // namespace

static std::string render(const Json& document, const std::vector<cluster::PlaySpan>& spans) {
  const std::string kind = document.at("kind");
  std::string out =
      "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\"><title>gpushare cluster: " +
      escape_html(kind) + "</title><style>" + kReportStyle +
      "</style></head><body><main><header><h1>Cluster: " + escape_html(kind) +
      "</h1><p class=\"soft\">Played on virtual time; no device took part.</p><ul class=\"facts\">";
  for (const char* fact : {"devices", "layout", "seed"})
    if (document.contains(fact))
      out += "<li>" + std::string(fact) + " <b>" + escape_html(cell(document[fact])) + "</b></li>";
  out += "</ul></header>" + summary(document) + series(document) + picture(document, spans);
  for (const Json& result : document.at("results")) {
    const std::string text = inside(result);
    if (!text.empty())
      out += "<section class=\"folded\"><h2>" + escape_html(name_of(result)) + "</h2>" + text + "</section>";
  }
  if (document.contains("notes") && !document["notes"].empty()) {
    out += "<section><h2>Notes</h2><ul class=\"notes\">";
    for (const Json& note : document["notes"]) out += "<li>" + escape_html(cell(note)) + "</li>";
    out += "</ul></section>";
  }
  return out + "<footer>gpushare " GPUSHARE_VERSION_STRING "</footer></main></body></html>\n";
}

}  // namespace cluster_page

std::string render_cluster_report(const nlohmann::ordered_json& document,
                                  const std::vector<cluster::PlaySpan>& spans) {
  return cluster_page::render(document, spans);
}

}  // namespace gpushare::cli
