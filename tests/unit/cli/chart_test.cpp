// Charts as SVG.
// SPDX-License-Identifier: Apache-2.0
#include "cli/charts.hpp"

#include <cmath>
#include <limits>

#include "support/catch.hpp"

using namespace gpushare::cli;

TEST_CASE("ticks are round numbers within the axis", "[cli]") {
  CHECK(ticks(0, 10, 5) == std::vector<double>{0, 2, 4, 6, 8, 10});
  CHECK(ticks(0, 567.7, 8).back() <= 567.7);
  CHECK(ticks(0, 1, 4, /*whole=*/true) == std::vector<double>{0, 1});
  CHECK(ticks(0, 3, 10, /*whole=*/true) == std::vector<double>{0, 1, 2, 3});
  CHECK(ticks(5, 5, 4) == std::vector<double>{5});
  CHECK(ticks(0, std::numeric_limits<double>::infinity(), 4).size() == 1);
  for (const double high : {1e-9, 0.3, 7.0, 12345.0, 1e15}) {
    const auto all = ticks(0, high, 6);
    CHECK(all.size() >= 3);
    CHECK(all.size() <= 14);
    CHECK(all.back() <= high * 1.000001);
  }
}

TEST_CASE("logarithmic ticks", "[cli]") {
  CHECK(log_ticks(1, 100) == std::vector<double>{1, 2, 5, 10, 20, 50, 100});
  CHECK(log_ticks(1, 1e6).size() == 7);
  CHECK(log_ticks(0, 10).empty());
  CHECK(log_ticks(5, 5).empty());
}

TEST_CASE("escaping", "[cli]") {
  CHECK(escape_html("a<b>&\"c\"") == "a&lt;b&gt;&amp;&quot;c&quot;");
  CHECK(escape_html("\xC3\xA9") == "\xC3\xA9");
  CHECK(escape_html("\xC3") == "\xEF\xBF\xBD");
  CHECK(escape_html("\xFFz") == "\xEF\xBF\xBDz");
  CHECK(escape_html(std::string_view("a\0\x01z", 4)) == "az");
}

TEST_CASE("a chart has a title, a description, and only finite numbers", "[cli]") {
  Chart chart;
  chart.title = "Title <1>";
  chart.description = "What it shows";
  chart.x_max = 10;
  chart.y_max = 4;
  chart.lines.push_back({"line", 3, {{0, 0}, {5, 4}, {10, 2}}, true});
  chart.areas.push_back({"area", "busy", {{0, 1}, {5, 3}, {10, 3}}, {}});
  chart.areas.push_back({"upper", "lanes", {{0, 2}, {5, 4}, {10, 4}}, {{0, 1}, {5, 3}, {10, 3}}});
  const std::string svg = draw(chart, "c1");
  CHECK(svg.find("aria-labelledby=\"c1-t c1-d\"") != std::string::npos);
  CHECK(svg.find("Title &lt;1&gt;") != std::string::npos);
  CHECK(svg.find("line s3") != std::string::npos);
  CHECK(svg.find("nan") == std::string::npos);
  CHECK(svg.find("inf") == std::string::npos);
}

TEST_CASE("degenerate charts are drawn all the same", "[cli]") {
  Chart chart;
  chart.x_max = 0;
  chart.y_max = 0;
  chart.log_x = true;
  chart.lines.push_back({"one point", 0, {{0, 0}}, false});
  chart.lines.push_back({"none", 1, {}, false});
  chart.areas.push_back({"none", "busy", {}, {}});
  const std::string svg = draw(chart, "c2");
  CHECK(svg.find("nan") == std::string::npos);
  CHECK(svg.find("inf") == std::string::npos);
  CHECK(svg.rfind("</svg>") == svg.size() - 6);
}

TEST_CASE("a line of one point is drawn as a dot", "[cli]") {
  Chart chart;
  chart.lines.push_back({"alone", 3, {{0.5, 0.5}}, false});
  chart.lines.push_back({"two", 4, {{0, 0}, {1, 1}}, false});
  const std::string svg = draw(chart, "dot");
  CHECK(svg.find("class=\"line s3 dot\" d=\"M402.0 ") != std::string::npos);
  CHECK(svg.find("h0\"><title>alone") != std::string::npos);
  CHECK(svg.find("class=\"line s4\"") != std::string::npos);
}
