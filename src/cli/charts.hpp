// charts.hpp: line and area charts as inline SVG, styled by the page's CSS classes (report.cpp), without
// script or anything external.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace gpushare::cli {

struct ChartPoint {
  double x = 0;
  double y = 0;
};

// A line over time or value. Colour and dashes follow `style`, so that lines differ without colour too.
struct ChartLine {
  std::string label;
  size_t style = 0;
  std::vector<ChartPoint> points;  // ascending x
  bool steps = false;              // holds each value until the next point
};

// The area between two values; `points` are its upper edge, `base` (same x, or empty for 0) its lower one.
struct ChartArea {
  std::string label;
  std::string css_class;
  std::vector<ChartPoint> points;
  std::vector<ChartPoint> base;
};

struct Chart {
  std::string title;        // what a screen reader says first
  std::string description;  // and then: the finding in words
  std::string heading;      // printed inside, top left; may be empty
  std::string x_label;
  std::string y_label;
  double x_min = 0;
  double x_max = 1;
  double y_max = 1;        // from 0
  bool log_x = false;      // x_min > 0 then
  bool y_whole = false;    // ticks at whole numbers only
  bool y_percent = false;  // 0..1 printed as 0%..100%
  double reference = 0;    // a horizontal line with a label; 0 = none
  std::string reference_label;
  std::vector<ChartArea> areas;
  std::vector<ChartLine> lines;
  double height = 280;
  bool x_axis_text = true;  // false: ticks without numbers, for all but the last of a column of charts
};

// One <svg> element. `id` is unique in the page.
std::string draw(const Chart& chart, const std::string& id);

// About `wanted` round numbers from `low` to `high`, both ends included when round: multiples of 1, 2 or 5
// times a power of ten
// (`whole`: at least 1).
std::vector<double> ticks(double low, double high, size_t wanted, bool whole = false);
// The same on a logarithmic axis: 1, 2, 5 in each decade, or the decades alone when there are many.
std::vector<double> log_ticks(double low, double high);

// 1500 -> "1500", 0.25 -> "0.25", 1e7 -> "1e+07": short, for axes.
std::string tick_text(double value);
// For text and attributes of HTML and SVG. Control characters and bytes that are not UTF-8 are dropped or
// replaced.
std::string escape_html(std::string_view text);
// The lines of a chart by their styles: the first is of style 0.
std::string policy_key(const std::vector<std::string>& policies);
// A table that scrolls sideways; the first cell of each row is its heading. Everything is escaped here.
std::string html_table(const std::vector<std::string>& titles,
                       const std::vector<std::vector<std::string>>& rows);

}  // namespace gpushare::cli
