// What `gpushare top` shows: columns, widths, order, filter, colours.
// SPDX-License-Identifier: Apache-2.0
#include "cli/top_view.hpp"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <regex>
#include <tuple>

#include "cli/command.hpp"
#include "daemon/metrics.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using cli::TopLook;
using cli::TopRow;

namespace {

client::ServiceStatus two_sessions() {
  client::ServiceStatus status;
  status.uptime_ns = 10'000'000'000;
  client::DeviceStatus device;
  device.device = "host";
  device.policy = "fair";
  status.devices = {device};
  for (const auto& [name, pid, service_ns] :
       {std::tuple("train", 1, uint64_t{6'000'000'000}), std::tuple("serve", 2, uint64_t{2'000'000'000})}) {
    client::SessionStatus session;
    session.name = name;
    session.pid = static_cast<uint64_t>(pid);
    session.device = "host";
    session.state = pid == 1 ? "turn" : "queued";
    session.service_ns = service_ns;
    session.persistent_bytes = pid == 1 ? 1 << 20 : 2 << 20;
    session.share = pid == 1 ? 0.75 : 0.25;
    session.group = 0xabcdef;
    session.cls = "guaranteed";
    status.sessions.push_back(session);
  }
  return status;
}

size_t longest(const std::string& text) {
  size_t most = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    most = std::max(most, end - at);
    at = end + 1;
  }
  return most;
}

}  // namespace

TEST_CASE("top: shares of now are those between two looks") {
  client::ServiceStatus before = two_sessions(), now = two_sessions();
  now.uptime_ns += 1'000'000'000;
  now.sessions[0].service_ns += 250'000'000;
  const std::vector<TopRow> rows = cli::top_rows(now, before);
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].share_now == 0.25);
  CHECK(rows[1].share_now == 0);
  CHECK(cli::top_rows(now, {})[0].share_now == 0);  // it was not there before
  const auto json = cli::top_json(now, rows, "s");
  CHECK(json["sessions"][0]["share_now"] == 0.25);
  CHECK(json["sessions"][0]["lane"] == 0);
}

TEST_CASE(
    "top: a preloaded program on two devices is the same session of both, and each line has its device") {
  client::ServiceStatus before = two_sessions();
  before.devices.push_back(before.devices[0]);
  before.devices[1].device = "cuda:1";
  before.sessions[1] = before.sessions[0];
  before.sessions[1].device = "cuda:1";
  before.sessions[1].service_ns = 1'000'000'000;
  before.processes.resize(2);
  for (size_t i = 0; i < 2; ++i) {
    before.processes[i].pid = before.sessions[0].pid;
    before.processes[i].device = before.devices[i].device;
  }
  client::ServiceStatus now = before;
  now.uptime_ns += 1'000'000'000;
  now.sessions[0].service_ns += 250'000'000;
  now.sessions[1].service_ns += 500'000'000;
  const std::vector<TopRow> rows = cli::top_rows(now, before);
  CHECK(rows[0].share_now == 0.25);
  CHECK(rows[1].share_now == 0.5);
  const auto lines_with = [](const std::string& text, const std::string& word) {
    size_t count = 0;
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
    return count;
  };
  TopLook look;
  look.width = 80;
  const std::string text = cli::top_text(now, rows, look);
  INFO(text);
  CHECK(lines_with(text, "cuda:1") == 3);  // the device, its session, and the process on it
  CHECK(lines_with(cli::top_text(two_sessions(), cli::top_rows(two_sessions(), {}), {}), "host") == 1);
}

TEST_CASE("top: no line is wider than the terminal, and the most important columns stay") {
  const client::ServiceStatus status = two_sessions();
  std::vector<TopRow> rows = cli::top_rows(status, status);
  rows[0].command = std::string(300, 'x');
  for (const size_t width : {30, 60, 80, 120, 200, 400}) {
    TopLook look;
    look.width = width;
    look.head = "sorted by share now   keys: s sort, / filter, q quit";
    const std::string text = cli::top_text(status, rows, look);
    INFO(width << "\n" << text);
    CHECK(longest(text) <= width);
    for (const char* word : {"session", "pid", "now", "train", "queued"})
      CHECK(text.find(word) != std::string::npos);
    CHECK((text.find("xxxxxxxxxxxx") != std::string::npos) == (width >= 200));
  }
  TopLook wide;
  CHECK(longest(cli::top_text(status, rows, wide)) > 300);
}

TEST_CASE("top: order, filter and colours") {
  const client::ServiceStatus status = two_sessions();
  const std::vector<TopRow> rows = cli::top_rows(status, status);
  TopLook look;
  const auto first = [&] {
    const std::string text = cli::top_text(status, rows, look);
    return text.find("train") < text.find("serve") ? "train" : "serve";
  };
  look.sort = cli::TopSort::kShare;
  CHECK(first() == std::string("train"));
  look.sort = cli::TopSort::kMemory;
  CHECK(first() == std::string("serve"));
  look.sort = cli::TopSort::kName;
  CHECK(first() == std::string("serve"));
  look.filter = "queued";
  CHECK(cli::top_text(status, rows, look).find("train") == std::string::npos);
  CHECK(cli::top_text(status, rows, look).find("\033[") == std::string::npos);
  look.colours = true;
  CHECK(cli::top_text(status, rows, look).find("\033[33mserve") != std::string::npos);
}

TEST_CASE("top: no more lines than the terminal has, the first ones") {
  const client::ServiceStatus status = two_sessions();
  const std::vector<TopRow> rows = cli::top_rows(status, status);
  TopLook look;
  look.head = "head";
  const std::string all = cli::top_text(status, rows, look);
  const auto lines = static_cast<size_t>(std::count(all.begin(), all.end(), '\n'));
  REQUIRE(all.substr(0, 5) == "head\n");
  for (const size_t height : {size_t{1}, size_t{5}, lines, lines + 1, lines + 2}) {
    look.height = height;
    const std::string text = cli::top_text(status, rows, look);
    INFO(height << "\n" << text);
    CHECK(all.substr(0, text.size()) == text);
    CHECK(static_cast<size_t>(std::count(text.begin(), text.end(), '\n')) == std::min(height - 1, lines));
  }
}

TEST_CASE("top: its help names every key of its JSON") {
  client::ServiceStatus status = two_sessions();
  status.processes.resize(1);
  status.images.resize(1);
  status.refusals.resize(1);
  const std::string help = cli::make_top_command()->help();
  const std::function<void(const nlohmann::ordered_json&)> look = [&](const nlohmann::ordered_json& value) {
    for (const auto& [key, inside] : value.items()) {
      if (value.is_object() && key != "version") {
        INFO(key);
        CHECK(std::regex_search(help, std::regex("[ {\n]" + key + "[^a-z0-9_]")));
      }
      if (inside.is_structured()) look(inside);
    }
  };
  look(cli::top_json(status, cli::top_rows(status, status), "s"));
}

TEST_CASE("a container's number is found in a cgroup") {
  const std::string number(64, 'a');
  CHECK(daemon::container_in("0::/kubepods.slice/cri-containerd-" + number + ".scope\n") == "aaaaaaaaaaaa");
  CHECK(daemon::container_in("0::/docker/" + number + "\n") == "aaaaaaaaaaaa");
  CHECK(daemon::container_in("0::/user.slice/session-1.scope\n").empty());
  CHECK(daemon::container_in("0::/" + number + "a\n").empty());
  CHECK(daemon::container_in("").empty());
}

TEST_CASE(
    "metrics: a group that holds nothing now has samples of 0, and a session of no such group has none") {
  client::ServiceStatus status = two_sessions();
  status.sessions[0].held_by = "shim";
  const std::string text = daemon::metrics_text(status);
  for (const char* family : {"held", "spilled", "pinned", "owed"}) {
    const auto begins = [&](const std::string& session) {
      return text.find("gpushare_group_" + std::string(family) + "_bytes{device=\"host\",name=\"" +
                       session) != std::string::npos;
    };
    CHECK(begins("train"));
    CHECK_FALSE(begins("serve"));
  }
}

TEST_CASE("metrics: bytes of a session that is paged out") {
  client::ServiceStatus status = two_sessions();
  status.sessions[1].state = "paged_out";
  const std::string text = daemon::metrics_text(status);
  const auto has = [&](const std::string& line) { return std::regex_search(text, std::regex(line)); };
  CHECK(has("gpushare_session_paged_out_bytes\\{[^\n]*name=\"train\"[^\n]*\\} 0\n"));
  CHECK(has("gpushare_session_paged_out_bytes\\{[^\n]*name=\"serve\"[^\n]*\\} 2097152\n"));
}
