// SPDX-License-Identifier: Apache-2.0
#include "sched/measured_interference.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <optional>
#include <span>
#include <utility>

namespace gpushare::sched {
namespace {

// Sessions that run beside an iteration for less of its time are left out; without one that runs for more, the
// iteration was alone.
constexpr double kBarelyBeside = 1.0 / 16;
// With less time beside others, the slowdown of that time cannot be told from noise.
constexpr double kLeastBeside = 0.25;
constexpr double kMostSlowdown = 64;

constexpr std::string_view kHead = "gpushare interference 1";

// Bytes that would break the lines of the table.
std::string escaped(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == '%' || c == 0x7f)
      out += base::format("%%%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
    else
      out += c;
  }
  return out;
}

std::optional<std::string> unescaped(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    unsigned value = 0;
    if (i + 2 >= text.size()) return std::nullopt;
    const auto [end, error] = std::from_chars(text.data() + i + 1, text.data() + i + 3, value, 16);
    if (error != std::errc() || end != text.data() + i + 3) return std::nullopt;
    out += static_cast<char>(value);
    i += 2;
  }
  if (out.empty()) return std::nullopt;
  return out;
}

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> out;
  for (;;) {
    const size_t end = text.find(at);
    out.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return out;
    text.remove_prefix(end + 1);
  }
}

}  // namespace

double MeasuredInterference::Mean::confidence(double now_ns) const {
  return count * std::exp2(-std::max(0.0, now_ns - at_ns) / static_cast<double>(kHalfLifeNs));
}

void MeasuredInterference::Mean::add(double sample, double weight, double now_ns) {
  const double old = confidence(now_ns);
  value += (sample - value) * weight / (old + weight);
  count = std::min(old + weight, kMostConfidence);
  at_ns = now_ns;
}

size_t MeasuredInterference::kind_named(std::string_view name) {
  size_t oldest = kinds_.size();
  for (size_t i = 0; i < kinds_.size(); ++i) {
    if (!name.empty() && kinds_[i].name == name) return i;
    if (kinds_[i].sessions == 0 && (oldest == kinds_.size() || kinds_[i].used < kinds_[oldest].used))
      oldest = i;
  }
  if (kinds_.size() < kMostKinds || oldest == kinds_.size()) {
    oldest = kinds_.size();
    kinds_.emplace_back();
  } else {
    forget(oldest);
  }
  kinds_[oldest].name = name;
  return oldest;
}

void MeasuredInterference::forget(size_t kind) {
  std::erase_if(pairs_, [kind](const auto& each) {
    return each.first >> 32 == kind || (each.first & UINT32_MAX) == kind;
  });
  kinds_[kind] = {};
}

void MeasuredInterference::arrived(SessionId session, std::string_view name) {
  if (members_.contains(session)) return;
  const size_t kind = kind_named(name);
  ++kinds_[kind].sessions;
  kinds_[kind].used = ++uses_;
  members_[session] = {kind, false};
}

void MeasuredInterference::left(SessionId session) {
  const auto member = members_.find(session);
  if (member == members_.end()) return;
  for (Lane& lane : lanes_) std::erase(lane.flights, session);
  Kind& kind = kinds_[member->second.kind];
  if (--kind.sessions == 0 && kind.name.empty()) forget(member->second.kind);
  members_.erase(member);
}

void MeasuredInterference::advance(uint64_t now_ns) {
  const double passed = now_ns > now_ns_ ? static_cast<double>(now_ns - now_ns_) : 0;
  now_ns_ = std::max(now_ns_, now_ns);
  if (passed <= 0) return;
  for (Lane& lane : lanes_) {
    if (lane.flights.empty()) continue;
    for (const Lane& other : lanes_) {
      if (&other == &lane || other.flights.empty()) continue;
      const size_t kind = members_[other.flights.front()].kind;
      const auto known = std::find_if(lane.beside.begin(), lane.beside.end(),
                                      [kind](const auto& each) { return each.first == kind; });
      if (known == lane.beside.end())
        lane.beside.emplace_back(kind, passed);
      else
        known->second += passed;
    }
  }
}

void MeasuredInterference::dispatched(SessionId session, LaneId lane_id, uint64_t now_ns) {
  if (!members_.contains(session)) return;
  advance(now_ns);
  if (lane_id >= lanes_.size()) lanes_.resize(lane_id + size_t{1});
  Lane& lane = lanes_[lane_id];
  if (lane.flights.empty()) {
    lane.since_ns = now_ns_;
    lane.beside.clear();
  }
  lane.flights.push_back(session);
}

void MeasuredInterference::held_up(SessionId session) {
  if (const auto member = members_.find(session); member != members_.end()) member->second.held_up = 2;
}

void MeasuredInterference::finished(SessionId session, LaneId lane_id, uint64_t device_ns,
                                    uint64_t iterations, uint64_t now_ns) {
  const auto member = members_.find(session);
  if (member == members_.end() || lane_id >= lanes_.size()) return;
  Lane& lane = lanes_[lane_id];
  const auto flight = std::find(lane.flights.begin(), lane.flights.end(), session);
  if (flight == lane.flights.end()) return;
  advance(now_ns);
  const bool held_up = member->second.held_up > 0;
  if (held_up) --member->second.held_up;
  const bool ran = flight == lane.flights.begin() && iterations > 0 && device_ns > 0 && !held_up;
  if (ran && std::exchange(member->second.warm, true)) {
    const size_t index = member->second.kind;
    learn(kinds_[index], index, lane, static_cast<double>(device_ns) / static_cast<double>(iterations),
          static_cast<double>(device_ns), static_cast<double>(now_ns_ - lane.since_ns));
  }
  lane.flights.erase(flight);
  lane.since_ns = now_ns_;
  lane.beside.clear();
}

void MeasuredInterference::learn(Kind& kind, size_t index, const Lane& lane, double iteration_ns,
                                 double device_ns, double wall_ns) {
  const auto now = static_cast<double>(now_ns_);
  double most = 0;
  for (const auto& [other, ns] : lane.beside) most = std::max(most, ns / wall_ns);
  if (lane.beside.empty() || most <= kBarelyBeside) {
    kind.alone.add(iteration_ns, 1, now);
    if (kind.alone.count >= kAloneConfidence) kind.learning = false;
    return;
  }
  // An iteration whose end was noticed late, or that its host held open, says nothing of what ran beside it.
  if (most < kLeastBeside || kind.alone.confidence(now) < kTrusted || device_ns < 0.7 * wall_ns ||
      device_ns > 1.3 * wall_ns)
    return;
  // The slowdown during the part of the iteration, `present`, for which others ran beside it.
  const double present = std::min(1.0, most), slower = std::max(0.0, iteration_ns / kind.alone.value - 1);
  const double rest = present * (1 + slower) - slower;  // > 0 unless the time alone was longer by itself
  const double beside = std::min(rest > 0 ? slower / rest : kMostSlowdown, kMostSlowdown);
  double error = beside, norm = 0;
  for (const auto& [other, ns] : lane.beside) {
    const double part = ns / wall_ns / present;
    if (part <= kBarelyBeside) continue;
    norm += part * part;
    if (const Mean* known = pair(index, other)) error -= part * known->value;
  }
  for (const auto& [other, ns] : lane.beside) {
    const double part = ns / wall_ns / present;
    if (part <= kBarelyBeside) continue;
    Mean& mean = pair_of(index, other);
    mean.add(mean.value + error * part / norm, std::min(1.0, part * part / norm), now);
  }
}

const MeasuredInterference::Mean* MeasuredInterference::pair(size_t kind, size_t beside) const {
  const auto found = pairs_.find(uint64_t{kind} << 32 | beside);
  return found == pairs_.end() ? nullptr : &found->second;
}

double MeasuredInterference::rate(SessionId session, std::span<const SessionId> beside) const {
  const auto member = members_.find(session);
  if (member == members_.end()) return 1;
  double slowdown = 1;
  for (const SessionId id : beside) {
    const auto other = members_.find(id);
    if (other == members_.end()) continue;
    const Mean* known = pair(member->second.kind, other->second.kind);
    if (known != nullptr && known->confidence(static_cast<double>(now_ns_)) >= kTrusted)
      slowdown += std::max(0.0, known->value);
  }
  return 1 / slowdown;
}

uint64_t MeasuredInterference::kind(SessionId session) const {
  const auto member = members_.find(session);
  return member == members_.end() ? kUnknown : member->second.kind;
}

bool MeasuredInterference::wants_alone(SessionId session) const {
  const auto member = members_.find(session);
  if (member == members_.end()) return false;
  const Kind& kind = kinds_[member->second.kind];
  const double confidence = kind.alone.confidence(static_cast<double>(now_ns_));
  return confidence < (kind.learning ? kAloneConfidence : kTrusted);
}

std::vector<MeasuredInterference::Entry> MeasuredInterference::entries() const {
  std::vector<Entry> out;
  const auto now = static_cast<double>(now_ns_);
  const auto add = [&](const std::string& name, const std::string& beside, const Mean& mean, double value) {
    if (mean.count > 0)
      out.push_back({name, beside, value, mean.confidence(now), std::max(0.0, now - mean.at_ns) * 1e-9});
  };
  for (const Kind& kind : kinds_)
    if (!kind.name.empty()) add(kind.name, {}, kind.alone, kind.alone.value);
  for (const auto& [key, mean] : pairs_) {
    const Kind& kind = kinds_[key >> 32];
    const Kind& beside = kinds_[key & UINT32_MAX];
    if (!kind.name.empty() && !beside.name.empty())
      add(kind.name, beside.name, mean, 1 + std::max(0.0, mean.value));
  }
  std::sort(out.begin(), out.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.name, a.beside) < std::pair(b.name, b.beside);
  });
  return out;
}

std::string MeasuredInterference::text(uint64_t unix_s) const {
  std::string out = std::string(kHead) + "\n";
  for (const Entry& entry : entries()) {
    const double measured_s = static_cast<double>(unix_s) - entry.age_s;
    const double count = entry.confidence * std::exp2(entry.age_s * 1e9 / static_cast<double>(kHalfLifeNs));
    if (entry.beside.empty())
      out += "alone\t" + escaped(entry.name);
    else
      out += "pair\t" + escaped(entry.name) + "\t" + escaped(entry.beside);
    out += base::format("\t%.9g\t%.6g\t%.0f\n", entry.value, count, measured_s);
  }
  return out;
}

namespace {

// A line of the file: how long an iteration takes alone, or how much slower it is beside another.
struct Row {
  std::string name, beside;
  double value = 0, count = 0, measured_s = 0;
};

// Reads the last three fields into `row`. Returns what is wrong with them; empty: nothing.
std::string read_numbers(std::span<const std::string_view> fields, Row& row) {
  static constexpr std::pair<const char*, double Row::*> kNumbers[] = {
      {"value", &Row::value}, {"iterations", &Row::count}, {"time", &Row::measured_s}};
  for (size_t i = 0; i < std::size(kNumbers); ++i) {
    const std::string_view field = fields[i];
    double& value = row.*kNumbers[i].second;
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
    if (error != std::errc() || end != field.data() + field.size() || !std::isfinite(value) || value < 0 ||
        value > 1e18)
      return std::string(kNumbers[i].first) + " is '" + escaped(field.substr(0, 80)) +
             "', allowed is 0 to 1e18";
  }
  return {};
}

std::string read_row(std::string_view line, Row& row) {
  const std::vector<std::string_view> fields = split(line, '\t');
  const bool alone = fields[0] == "alone";
  if (fields.size() != (alone ? 5 : 6) || (!alone && fields[0] != "pair"))
    return "expected 'alone', name, ns, iterations, time or 'pair', name, beside, slowdown, "
           "iterations, time, divided by tabs";
  const auto name = unescaped(fields[1]);
  const auto beside = alone ? std::optional<std::string>("") : unescaped(fields[2]);
  if (!name || !beside) return "a name is empty or has a '%' without two hexadecimal digits";
  if (std::string wrong = read_numbers(std::span(fields).last(3), row); !wrong.empty()) return wrong;
  if (!alone && (row.value < 1 || row.value > 1 + kMostSlowdown))
    return base::format("slowdown is %g, allowed is 1 to %g", row.value, 1 + kMostSlowdown);
  if (alone && row.value <= 0) return "an iteration alone takes 0 ns, allowed is more";
  row.name = *name;
  row.beside = *beside;
  return {};
}

}  // namespace

base::Status MeasuredInterference::read(std::string_view text, const std::string& file, uint64_t unix_s) {
  std::vector<Row> rows;
  std::vector<std::string> names;
  size_t number = 0;
  const auto malformed = [&](const std::string& what) {
    return base::Status(GPUSHARE_MALFORMED_INPUT, file + base::format(":%zu: ", number) + what);
  };
  if (text.ends_with('\n')) text.remove_suffix(1);
  for (const std::string_view line : split(text, '\n')) {
    if (number++ == 0) {
      if (line != kHead)
        return malformed("the first line is '" + escaped(line.substr(0, 80)) + "', expected '" +
                         std::string(kHead) + "'");
      continue;
    }
    Row row;
    if (const std::string wrong = read_row(line, row); !wrong.empty()) return malformed(wrong);
    for (const std::string& each : {row.name, row.beside})
      if (!each.empty() && std::find(names.begin(), names.end(), each) == names.end()) names.push_back(each);
    if (names.size() > kMostKinds) return malformed(base::format("more than %zu names", kMostKinds));
    rows.push_back(std::move(row));
  }
  for (const Row& row : rows) {
    const double age_ns = std::max(0.0, static_cast<double>(unix_s) - row.measured_s) * 1e9;
    const Mean mean{row.beside.empty() ? row.value : row.value - 1, std::min(row.count, kMostConfidence),
                    static_cast<double>(now_ns_) - age_ns};
    const size_t kind = kind_named(row.name);
    kinds_[kind].used = ++uses_;
    if (row.beside.empty()) {
      kinds_[kind].alone = mean;
      kinds_[kind].learning = mean.confidence(static_cast<double>(now_ns_)) < kTrusted;
      continue;
    }
    const size_t beside = kind_named(row.beside);
    kinds_[beside].used = ++uses_;
    pair_of(kind, beside) = mean;
  }
  return {};
}

}  // namespace gpushare::sched
