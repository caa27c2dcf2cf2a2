// SPDX-License-Identifier: Apache-2.0
#include "cli/top_view.hpp"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <tuple>
#include <type_traits>

#include "base/units.hpp"
#include "base/utf8.hpp"
#include "cli/output.hpp"
#include "cluster/json.hpp"
#include "daemon/metrics.hpp"

namespace gpushare::cli {
namespace {

// An object of the line's fields. Times are seconds here; what there is none of is null.
template <class Line>
cluster::OrderedJson object_of(const Line& line) {
  cluster::OrderedJson out;
  Line::for_each_field(line, [&](const std::string& name, const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, uint64_t>) {
      if (name.ends_with("_ns")) {
        out[name.substr(0, name.size() - 2) + "s"] = static_cast<double>(value) / 1e9;
        return;
      }
    }
    out[name] = value;
  });
  return out;
}

template <class Line>
cluster::OrderedJson array_of(const std::vector<Line>& lines) {
  auto out = cluster::OrderedJson::array();
  for (const Line& line : lines) out.push_back(object_of(line));
  return out;
}

std::string devices_text(const client::ServiceStatus& status) {
  std::string out;
  for (const client::DeviceStatus& device : status.devices)
    out += base::format(
        "device %s, policy %s, up %s: %s of %s promised to %llu sessions, %llu wait for memory\n"
        "turns %llu, taken back after the lease %llu\n",
        device.device.c_str(), device.policy.c_str(), base::format_duration_ns(status.uptime_ns).c_str(),
        base::format_bytes(device.promised_bytes).c_str(), base::format_bytes(device.capacity_bytes).c_str(),
        static_cast<unsigned long long>(device.resident), static_cast<unsigned long long>(device.waiting),
        static_cast<unsigned long long>(device.turns), static_cast<unsigned long long>(device.cut_off));
  for (const client::DeviceStatus& device : status.devices)
    if (device.max_guaranteed > 0)
      out +=
          base::format("device %s: a coordinator lets %llu guaranteed and %llu opportunistic sessions run\n",
                       device.device.c_str(), static_cast<unsigned long long>(device.max_guaranteed),
                       static_cast<unsigned long long>(device.max_opportunistic));
  for (const client::DeviceStatus& device : status.devices)
    if (device.context_bytes > 0)
      out += base::format("device %s: contexts of processes have %s of what is promised\n",
                          device.device.c_str(), base::format_bytes(device.context_bytes).c_str());
  for (const client::DeviceStatus& device : status.devices)
    if (device.effective_capacity_bytes > device.capacity_bytes)
      out += base::format("device %s: %s are promised, more than the capacity, and fall at boundaries\n",
                          device.device.c_str(), base::format_bytes(device.effective_capacity_bytes).c_str());
  return out;
}

std::string user_name(uint64_t uid) {
  passwd entry{};
  passwd* found = nullptr;
  char buffer[4096];
  if (getpwuid_r(static_cast<uid_t>(uid), &entry, buffer, sizeof buffer, &found) != 0 || found == nullptr)
    return std::to_string(uid);
  return found->pw_name;
}

// The words that the process was started with; empty where it has ended.
std::string command_of(uint64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
  std::string words{std::istreambuf_iterator<char>(file), {}};
  while (!words.empty() && words.back() == '\0') words.pop_back();
  std::replace(words.begin(), words.end(), '\0', ' ');
  return words;
}

double memory_of(const TopRow& row) {
  const client::SessionStatus& s = row.session;
  return static_cast<double>(s.held_bytes != 0 ? s.held_bytes : s.persistent_bytes + s.ephemeral_bytes);
}

void sort_rows(std::vector<TopRow>& rows, TopSort sort) {
  std::stable_sort(rows.begin(), rows.end(), [sort](const TopRow& a, const TopRow& b) {
    switch (sort) {
      case TopSort::kShareNow:
        return a.share_now > b.share_now;
      case TopSort::kShare:
        return a.session.share > b.session.share;
      case TopSort::kMemory:
        return memory_of(a) > memory_of(b);
      case TopSort::kPid:
        return a.session.pid < b.session.pid;
      case TopSort::kName:
        return a.session.name < b.session.name;
    }
    return false;
  });
}

std::string bytes_or_dash(uint64_t bytes) {
  return bytes == 0 ? "-" : base::format_bytes(bytes);
}

std::string group_name(uint64_t group) {
  return group == 0 ? "-" : base::format("%08llx", static_cast<unsigned long long>(group & 0xffffffff));
}

// A column of the table of sessions. Where the terminal is narrow, those of the highest rank go first. The column of the
// device is there where the daemon has several devices.
struct Column {
  const char* title;
  Table::Align align;
  int rank;
  std::string (*cell)(const TopRow&);
};
constexpr const char* kDeviceTitle = "device";
const Column kColumns[] = {
    {"session", Table::Align::kLeft, 0, [](const TopRow& r) { return r.session.name; }},
    {"pid", Table::Align::kRight, 0, [](const TopRow& r) { return std::to_string(r.session.pid); }},
    {kDeviceTitle, Table::Align::kLeft, 1, [](const TopRow& r) { return r.session.device; }},
    {"user", Table::Align::kLeft, 3, [](const TopRow& r) { return r.user; }},
    {"group", Table::Align::kLeft, 6, [](const TopRow& r) { return group_name(r.session.group); }},
    {"state", Table::Align::kLeft, 0, [](const TopRow& r) { return r.session.state; }},
    {"class", Table::Align::kLeft, 7, [](const TopRow& r) { return r.session.cls; }},
    {"weight", Table::Align::kRight, 5, [](const TopRow& r) { return base::format("%g", r.session.weight); }},
    {"cap", Table::Align::kRight, 8,
     [](const TopRow& r) {
       return r.session.cap > 0 ? base::format("%g%%", 100 * r.session.cap) : std::string("-");
     }},
    {"now", Table::Align::kRight, 0,
     [](const TopRow& r) { return base::format("%.1f%%", 100 * r.share_now); }},
    {"share", Table::Align::kRight, 1,
     [](const TopRow& r) { return base::format("%.1f%%", 100 * r.session.share); }},
    {"service", Table::Align::kRight, 9,
     [](const TopRow& r) { return base::format_duration_ns(r.session.service_ns); }},
    {"iterations", Table::Align::kRight, 9,
     [](const TopRow& r) { return std::to_string(r.session.iterations); }},
    {"persistent", Table::Align::kRight, 2,
     [](const TopRow& r) { return base::format_bytes(r.session.persistent_bytes); }},
    {"ephemeral", Table::Align::kRight, 4,
     [](const TopRow& r) { return base::format_bytes(r.session.ephemeral_bytes); }},
    {"held", Table::Align::kRight, 4, [](const TopRow& r) { return bytes_or_dash(r.session.held_bytes); }},
    {"held by", Table::Align::kLeft, 8,
     [](const TopRow& r) { return r.session.held_by.empty() ? std::string("-") : r.session.held_by; }},
    {"spilled", Table::Align::kRight, 6,
     [](const TopRow& r) { return bytes_or_dash(r.session.spilled_bytes); }},
    {"pinned", Table::Align::kRight, 8,
     [](const TopRow& r) { return bytes_or_dash(r.session.pinned_bytes); }},
    {"owed", Table::Align::kRight, 9, [](const TopRow& r) { return bytes_or_dash(r.session.owed_bytes); }},
    {"limit", Table::Align::kRight, 10, [](const TopRow& r) { return bytes_or_dash(r.session.limit_bytes); }},
    {"container", Table::Align::kLeft, 10,
     [](const TopRow& r) { return r.container.empty() ? std::string("-") : r.container; }},
    {"waits for", Table::Align::kLeft, 11, [](const TopRow& r) { return r.session.waits_for; }},
    {"command", Table::Align::kLeft, 12, [](const TopRow& r) { return r.command; }},
};
constexpr int kMostRank = 12;

size_t code_points(std::string_view text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char each) { return (static_cast<unsigned char>(each) & 0xc0) != 0x80; }));
}

// At most `width` characters of the line.
std::string cut(const std::string& line, size_t width) {
  if (width == 0 || code_points(line) <= width) return line;
  size_t end = 0;
  for (size_t seen = 0; end < line.size(); ++end)
    if ((static_cast<unsigned char>(line[end]) & 0xc0) != 0x80 && ++seen > width) break;
  return line.substr(0, end);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

// The part that a terminal of so many lines shows without scrolling: the cursor stands behind the last line.
std::string first_lines(const std::string& text, size_t height) {
  size_t end = 0;
  for (size_t seen = 1; end < text.size(); ++end)
    if (text[end] == '\n' && ++seen > height && height > 0) break;
  return text.substr(0, end);
}

const char* colour_of(const std::string& state) {
  if (state == "turn" || state == "idle") return "\033[32m";
  if (state == "overdue") return "\033[31m";
  if (state == "queued" || state == "paged_out" || state == "paging") return "\033[33m";
  return nullptr;
}

// The command is cut to what is left of the line, if that is enough to be read.
constexpr size_t kLeastCommand = 12;

std::string sessions_text(const std::vector<TopRow>& rows, size_t devices, const TopLook& look) {
  std::vector<std::string> lines;
  for (int most = kMostRank; most >= 0; --most) {
    const auto shown = [&](const Column& column) {
      return column.rank <= most && (column.title != kDeviceTitle || devices > 1);
    };
    Table table;
    for (const Column& column : kColumns)
      if (shown(column)) table.add_column(column.title, column.align);
    for (const TopRow& row : rows) {
      std::vector<std::string> cells;
      for (const Column& column : kColumns)
        if (shown(column)) cells.push_back(column.cell(row));
      table.add_row(std::move(cells));
    }
    lines = lines_of(table.to_string());
    const size_t needed = most == kMostRank
                              ? lines.front().size() - std::string("command").size() + kLeastCommand
                              : code_points(lines[1]);
    if (look.width == 0 || needed <= look.width) break;
  }
  std::string out;
  for (size_t i = 0; i < lines.size(); ++i) {
    const char* colour = look.colours && i >= 2 ? colour_of(rows[i - 2].session.state) : nullptr;
    const std::string line = cut(lines[i], look.width);
    out += colour != nullptr ? colour + line + "\033[0m\n" : line + '\n';
  }
  return out;
}

bool matches(const TopRow& row, const std::string& filter) {
  return filter.empty() || std::any_of(std::begin(kColumns), std::end(kColumns), [&](const Column& column) {
           return column.cell(row).find(filter) != std::string::npos;
         });
}

std::string processes_text(const client::ServiceStatus& status) {
  std::string out;
  if (!status.processes.empty()) {
    Table table;
    for (const char* title : {"pid", "uid"}) table.add_column(title, Table::Align::kRight);
    const bool several = status.devices.size() > 1;
    if (several) table.add_column(kDeviceTitle, Table::Align::kLeft);
    for (const char* title : {"program", "state"}) table.add_column(title, Table::Align::kLeft);
    for (const char* title : {"sessions", "context"}) table.add_column(title, Table::Align::kRight);
    for (const client::ProcessStatus& process : status.processes) {
      std::vector<std::string> cells{std::to_string(process.pid), std::to_string(process.uid)};
      if (several) cells.push_back(process.device);
      cells.insert(cells.end(), {process.program, process.state, std::to_string(process.sessions),
                                 bytes_or_dash(process.context_bytes)});
      table.add_row(std::move(cells));
    }
    out += '\n' + table.to_string();
  }
  return out;
}

std::string images_text(const client::ServiceStatus& status) {
  std::string out;
  if (!status.images.empty()) {
    Table table;
    for (const char* title : {"image", "state"}) table.add_column(title, Table::Align::kLeft);
    for (const char* title : {"bytes", "first layers kept", "layers there", "loads", "sessions"})
      table.add_column(title, Table::Align::kRight);
    for (const client::ImageStatus& image : status.images)
      table.add_row({image.path, image.state, base::format_bytes(image.bytes),
                     base::format_bytes(image.kept_bytes),
                     base::format("%llu of %llu", static_cast<unsigned long long>(image.arrived),
                                  static_cast<unsigned long long>(image.layers)),
                     std::to_string(image.loads), std::to_string(image.sessions)});
    out += '\n' + table.to_string();
  }
  return out;
}

}  // namespace

std::vector<TopRow> top_rows(const client::ServiceStatus& now, const client::ServiceStatus& before) {
  // A preloaded program is session 1 of each device that it uses.
  std::map<std::tuple<std::string, uint64_t, uint64_t>, uint64_t> served;
  for (const client::SessionStatus& session : before.sessions)
    served[{session.device, session.pid, session.session}] = session.service_ns;
  std::map<uint64_t, TopRow> processes;
  for (const client::ProcessStatus& process : now.processes) {
    TopRow& row = processes[process.pid];
    row.uid = process.uid;
    row.user = user_name(process.uid);
    row.command = command_of(process.pid);
    if (row.command.empty()) row.command = process.program;
    row.container = daemon::container_of(process.pid);
  }
  const uint64_t between_ns = now.uptime_ns - std::min(now.uptime_ns, before.uptime_ns);
  std::vector<TopRow> out;
  for (const client::SessionStatus& session : now.sessions) {
    TopRow row = processes[session.pid];
    row.session = session;
    const auto found = served.find({session.device, session.pid, session.session});
    if (found != served.end() && between_ns > 0)
      row.share_now = static_cast<double>(session.service_ns - std::min(session.service_ns, found->second)) /
                      static_cast<double>(between_ns);
    out.push_back(std::move(row));
  }
  return out;
}

std::string top_text(const client::ServiceStatus& status, std::vector<TopRow> rows, const TopLook& look) {
  sort_rows(rows, look.sort);
  std::erase_if(rows, [&](const TopRow& row) { return !matches(row, look.filter); });
  std::string out = look.head.empty() ? "" : cut(look.head, look.width) + "\n\n";
  for (const std::string& line : lines_of(devices_text(status))) out += cut(line, look.width) + '\n';
  if (!rows.empty()) out += '\n' + sessions_text(rows, status.devices.size(), look);
  for (const std::string& line : lines_of(processes_text(status) + images_text(status)))
    out += cut(line, look.width) + '\n';
  return first_lines(out, look.height);
}

nlohmann::ordered_json top_json(const client::ServiceStatus& status, const std::vector<TopRow>& rows,
                                const std::string& socket) {
  cluster::OrderedJson out = cluster::object({{"socket", socket}});
  out.update(object_of(status));
  out["devices"] = array_of(status.devices);
  out["processes"] = array_of(status.processes);
  out["sessions"] = cluster::OrderedJson::array();
  for (const TopRow& row : rows) {
    cluster::OrderedJson line = object_of(row.session);
    if (row.session.lane == UINT64_MAX) line["lane"] = nullptr;
    if (row.session.cap == 0) line["cap"] = nullptr;
    line["share_now"] = row.share_now;
    line["uid"] = row.uid;
    line["user"] = row.user;
    line["command"] = row.command;
    line["container"] = row.container;
    out["sessions"].push_back(std::move(line));
  }
  out["images"] = array_of(status.images);
  out["refusals"] = array_of(status.refusals);
  return out;
}

}  // namespace gpushare::cli
