// SPDX-License-Identifier: Apache-2.0
#include "cli/charts.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/status.hpp"
#include "base/utf8.hpp"
#include "cli/report_style.hpp"

namespace gpushare::cli {
namespace {

constexpr double kWidth = 760;
constexpr double kLeft = 58;
constexpr double kRight = 14;
constexpr double kTop = 14;
constexpr double kTopWithHeading = 26;
constexpr double kBottomText = 44;
constexpr double kBottomBare = 10;

// Maps values to the plot's rectangle.
struct Frame {
  double left, top, width, height;
  double x_min, x_max, y_max;
  bool log_x;

  double x(double value) const {
    double share = 0;
    if (log_x)
      share = (std::log(std::max(value, x_min)) - std::log(x_min)) / (std::log(x_max) - std::log(x_min));
    else
      share = (value - x_min) / (x_max - x_min);
    return left + width * std::clamp(share, 0.0, 1.0);
  }
  double y(double value) const { return top + height * (1 - std::clamp(value / y_max, 0.0, 1.0)); }
};

std::string coordinates(double x, double y) {
  return base::format("%.1f %.1f", x, y);
}

// Leaves out points that would not move the pen.
std::string path_of(const Frame& frame, const std::vector<ChartPoint>& points, bool steps,
                    const char* first = "M") {
  std::string out;
  double last_y = -1;
  double last_x = -1;
  for (size_t i = 0; i < points.size(); ++i) {
    const double x = frame.x(points[i].x);
    const double y = frame.y(points[i].y);
    if (i == 0) {
      out += first + coordinates(x, y);
    } else {
      const bool last = i + 1 == points.size();
      const bool straight =
          std::abs(y - last_y) < 0.05 && !last && std::abs(frame.y(points[i + 1].y) - y) < 0.05;
      if (straight) continue;
      if (steps && std::abs(y - last_y) >= 0.05) out += "L" + coordinates(x, last_y);
      if (std::abs(x - last_x) >= 0.05 || std::abs(y - last_y) >= 0.05) out += "L" + coordinates(x, y);
    }
    last_x = x;
    last_y = y;
  }
  return out;
}

std::string text(double x, double y, const char* css, const std::string& content, const char* more = "") {
  return base::format("<text class=\"%s\" x=\"%.1f\" y=\"%.1f\"%s>", css, x, y, more) + escape_html(content) +
         "</text>";
}

std::string rule(double x1, double y1, double x2, double y2, const char* css) {
  return base::format("<line class=\"%s\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>", css, x1, y1, x2,
                      y2);
}

}  // namespace

std::vector<double> ticks(double low, double high, size_t wanted, bool whole) {
  const double span = high - low;
  if (!(span > 0) || !std::isfinite(span) || wanted == 0) return {low};
  const double rough = span / static_cast<double>(wanted);
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * power >= rough * 0.999) {
      step = factor * power;
      break;
    }
  if (whole) step = std::max(1.0, std::round(step));
  std::vector<double> out;
  for (double k = std::ceil(low / step - 1e-9); k * step <= high + step * 1e-9; ++k) out.push_back(k * step);
  return out;
}

std::vector<double> log_ticks(double low, double high) {
  std::vector<double> out;
  if (!(low > 0) || !(high > low)) return out;
  const double decades = std::log10(high / low);
  const int last = static_cast<int>(std::ceil(std::log10(high)));
  for (int power = static_cast<int>(std::floor(std::log10(low))); power <= last; ++power)
    for (const double factor : {1.0, 2.0, 5.0}) {
      if (decades > 4 && factor != 1.0) continue;
      const double value = factor * std::pow(10.0, power);
      if (value >= low * 0.9999 && value <= high * 1.0001) out.push_back(value);
    }
  return out;
}

std::string tick_text(double value) {
  if (std::abs(value) < 1e-12) return "0";
  return base::format("%.6g", value);
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : base::to_utf8(text)) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (static_cast<unsigned char>(c) >= 0x20 || c == '\n' || c == '\t')
      out += c;
  }
  return out;
}

std::string policy_key(const std::vector<std::string>& policies) {
  std::string out = "<ul class=\"key\">";
  for (size_t i = 0; i < policies.size(); ++i)
    out += base::format(
               "<li><svg viewBox=\"0 0 30 12\" aria-hidden=\"true\"><path class=\"line s%zu\" d=\"M0 "
               "6H30\"/></svg>",
               i % kReportStyles) +
           escape_html(policies[i]) + "</li>";
  return out + "</ul>";
}

std::string html_table(const std::vector<std::string>& titles,
                       const std::vector<std::vector<std::string>>& rows) {
  std::string out = "<div class=\"scroll\"><table><thead><tr>";
  for (const std::string& title : titles) out += "<th scope=\"col\">" + escape_html(title) + "</th>";
  out += "</tr></thead><tbody>";
  for (const auto& row : rows) {
    out += "<tr>";
    for (size_t i = 0; i < row.size(); ++i)
      out += (i == 0 ? "<th scope=\"row\">" : "<td>") + escape_html(row[i]) + (i == 0 ? "</th>" : "</td>");
    out += "</tr>";
  }
  return out + "</tbody></table></div>";
}

std::string draw(const Chart& chart, const std::string& id) {
  const double top = chart.heading.empty() ? kTop : kTopWithHeading;
  const double bottom = chart.x_axis_text ? kBottomText : kBottomBare;
  Frame frame{
      kLeft,       top,        kWidth - kLeft - kRight, chart.height - top - bottom, chart.x_min, chart.x_max,
      chart.y_max, chart.log_x};
  if (!(frame.x_max > frame.x_min)) frame.x_max = frame.x_min + 1;
  if (!(frame.y_max > 0)) frame.y_max = 1;
  if (frame.log_x && !(frame.x_min > 0)) frame.log_x = false;
  const double right = frame.left + frame.width;
  const double floor = frame.top + frame.height;

  std::string out = base::format("<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-labelledby=\"%s-t %s-d\">",
                                 kWidth, chart.height, id.c_str(), id.c_str());
  out += "<title id=\"" + id + "-t\">" + escape_html(chart.title) + "</title><desc id=\"" + id + "-d\">" +
         escape_html(chart.description) + "</desc>";

  // Grid and numbers.
  const size_t rows = chart.height < 160 ? 4 : 5;
  for (const double value : ticks(0, frame.y_max, rows, chart.y_whole)) {
    const double y = frame.y(value);
    out += rule(frame.left, y, right, y, value == 0 ? "axis" : "grid");
    const std::string number = chart.y_percent ? tick_text(value * 100) + "%" : tick_text(value);
    out += text(frame.left - 8, y + 4, "num", number, " text-anchor=\"end\"");
  }
  const std::vector<double> across =
      frame.log_x ? log_ticks(frame.x_min, frame.x_max) : ticks(frame.x_min, frame.x_max, 8);
  for (const double value : across) {
    const double x = frame.x(value);
    out += rule(x, floor, x, floor + 4, "axis");
    if (chart.x_axis_text) out += text(x, floor + 18, "num", tick_text(value), " text-anchor=\"middle\"");
  }
  if (chart.x_axis_text)
    out += text(frame.left + frame.width / 2, floor + 36, "label", chart.x_label, " text-anchor=\"middle\"");
  if (!chart.y_label.empty()) {
    const double middle = frame.top + frame.height / 2;
    out += text(14, middle, "label", chart.y_label,
                base::format(" text-anchor=\"middle\" transform=\"rotate(-90 14 %.1f)\"", middle).c_str());
  }
  if (!chart.heading.empty()) out += text(frame.left, 15, "heading", chart.heading);

  for (const ChartArea& area : chart.areas) {
    if (area.points.empty()) continue;
    std::string path = path_of(frame, area.points, /*steps=*/true);
    if (area.base.empty()) {
      path += "L" + coordinates(frame.x(area.points.back().x), floor) + "L" +
              coordinates(frame.x(area.points.front().x), floor);
    } else {
      // The lower edge, drawn backwards, stepping down where the upper edge steps up.
      double last_y = frame.y(area.base.back().y);
      path += "L" + coordinates(frame.x(area.base.back().x), last_y);
      for (size_t i = area.base.size() - 1; i-- > 0;) {
        const double y = frame.y(area.base[i].y);
        if (std::abs(y - last_y) < 0.05 && i > 0) continue;
        path += "L" + coordinates(frame.x(area.base[i + 1].x), last_y) + "L" +
                coordinates(frame.x(area.base[i + 1].x), y);
        if (i == 0) path += "L" + coordinates(frame.x(area.base[i].x), y);
        last_y = y;
      }
    }
    out += "<path class=\"" + area.css_class + "\" d=\"" + path + "Z\"><title>" + escape_html(area.label) +
           "</title></path>";
  }
  if (chart.reference > 0 && chart.reference <= frame.y_max) {
    const double y = frame.y(chart.reference);
    out += rule(frame.left, y, right, y, "reference");
    out += text(right, y - 5, "num", chart.reference_label, " text-anchor=\"end\"");
  }
  for (const ChartLine& line : chart.lines) {
    if (line.points.empty()) continue;
    const bool is_dot = line.points.size() == 1;  // a path of one point would not be seen
    out += base::format("<path class=\"line s%zu%s\" d=\"", line.style, is_dot ? " dot" : "") +
           path_of(frame, line.points, line.steps) + (is_dot ? "h0" : "") + "\"><title>" +
           escape_html(line.label) + "</title></path>";
  }
  return out + "</svg>";
}

}  // namespace gpushare::cli
