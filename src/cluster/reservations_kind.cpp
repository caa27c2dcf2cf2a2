// The kind "reservations": requests for named, counted resources on nodes. Reads the document, asks reservations.hpp, writes the
// result: plan asks the requests one after the other, run plays their arrivals and ends on virtual time.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "cluster/json.hpp"
#include "cluster/kinds.hpp"
#include "cluster/reservation_document.hpp"
#include "cluster/reservations.hpp"

namespace gpushare::cluster {
namespace {

constexpr size_t kMostReservations = 10'000;  // that are played: each event looks at all that wait
constexpr uint64_t kForever = UINT64_MAX;
constexpr const char* kDevice = "gpu";  // the resource that a node has as many of as devices

uint64_t to_ns(double seconds) {
  return static_cast<uint64_t>(std::llround(seconds * 1e9));
}

struct Asked {
  std::string name;
  double arrival_s = 0;
  uint64_t hold_ns = kForever;
  ReservationRequest request;  // its deadline counts from its arrival
};

struct Set {
  std::string owner, name;
  double capacity = 0;
  ReservationTable::Where where;
};

// What became of a request.
struct Fate {
  enum class Kind { kComing, kWaiting, kGranted, kEnded, kRefused };
  Kind kind = Kind::kComing;
  ReservationId id = 0;
  uint64_t start_ns = 0, end_ns = kForever;
  Grant grant;
  std::string reason;
};

class ReservationsProblem final : public Problem {
 public:
  ReservationsProblem(Fields& document, const std::vector<Device>& devices) {
    document.about("devices", "Each is one gpu of its node; a device without a node is a node of its own.");
    document.about("nodes", "Nodes with resources of their own.");
    document.about("resources", "Resources that owners set before the first request.");
    for (const Device& device : devices) nodes_[device.node.empty() ? device.id : device.node][kDevice] += 1;
    document.at_least_one({"devices", "nodes"});
    if (document.has("nodes")) read_nodes(document);
    if (document.has("resources")) read_resources(document);
    read_requests(document);
  }

  base::Status solve(std::string_view, OrderedJson& result) override {
    GPUSHARE_ASSIGN_OR_RETURN(ReservationTable table, table_of());
    std::vector<Fate> fates(asked_.size());
    for (size_t r = 0; r < asked_.size(); ++r) ask(table, r, 0, fates[r]);
    look(table, 0, fates);
    write(table, fates, result);
    return {};
  }

  base::Status play(std::string_view, const PlayOptions&, OrderedJson& result,
                    std::vector<PlaySpan>* spans) override {
    GPUSHARE_ASSIGN_OR_RETURN(ReservationTable table, table_of());
    std::vector<Fate> fates(asked_.size());
    std::vector<size_t> order(asked_.size());
    for (size_t r = 0; r < order.size(); ++r) order[r] = r;
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return asked_[a].arrival_s < asked_[b].arrival_s; });
    for (size_t next = 0;;) {
      const uint64_t now = std::min({next < order.size() ? to_ns(asked_[order[next]].arrival_s) : kForever,
                                     next_end(fates), table.next_tick_ns()});
      if (now == kForever) break;
      table.tick(now);
      release(table, now, fates);
      for (; next < order.size() && to_ns(asked_[order[next]].arrival_s) <= now; ++next)
        ask(table, order[next], now, fates[order[next]]);
      look(table, now, fates);
    }
    write(table, fates, result);
    write_times(fates, result);
    if (spans != nullptr) add_spans(fates, *spans);
    return {};
  }

 private:
  void read_nodes(Fields& document) {
    Fields::Names seen;
    document.each("nodes", 1, [&](Fields& fields, size_t index) {
      Amounts& resources = nodes_[fields.name(seen, index)];
      for (const auto& [name, amount] : fields.named_numbers("resources", kPositive))
        resources[name] = amount;
    });
  }

  void read_resources(Fields& document) {
    document.each("resources", 1, [&](Fields& fields, size_t) {
      Set set;
      set.where = read_place(fields);
      set.owner = fields.text("owner");
      set.name = fields.text("name");
      set.capacity = fields.number("capacity", kPositive);
      sets_.push_back(std::move(set));
    });
  }

  void read_requests(Fields& document) {
    Fields::Names seen;
    document.each("requests", 1, [&](Fields& fields, size_t index) {
      fields.about("arrival_s", "For run.");
      fields.about("hold_s",
                   "For run: how long the request holds what it is granted; for ever unless given.");
      Asked asked;
      asked.request = read_request(fields, 0);
      asked.name = fields.name(seen, index);
      asked.arrival_s = fields.number_or("arrival_s", {0, 1e9, false}, 0);
      if (fields.has("hold_s")) asked.hold_ns = to_ns(fields.number("hold_s", {0, 1e9, false}));
      asked_.push_back(std::move(asked));
    });
    if (asked_.size() > kMostReservations)
      document.refuse("requests", base::format("at most %zu requests are played", kMostReservations));
  }

  base::Result<ReservationTable> table_of() const {
    ReservationTable table;
    for (const auto& [name, resources] : nodes_) GPUSHARE_RETURN_IF_ERROR(table.add_node(name, resources, 0));
    for (size_t i = 0; i < sets_.size(); ++i)
      GPUSHARE_RETURN_IF_ERROR(table.set(sets_[i].owner, sets_[i].name, sets_[i].capacity, sets_[i].where, 0)
                                   .with_context(base::format("resources[%zu]", i)));
    return table;
  }

  void ask(ReservationTable& table, size_t r, uint64_t now, Fate& fate) const {
    ReservationRequest request = asked_[r].request;
    if (request.deadline_ns) *request.deadline_ns += now;
    const base::Result<ReservationId> id = table.acquire(std::move(request), now);
    if (!id.ok()) {
      fate.kind = Fate::Kind::kRefused;
      fate.reason = id.status().message();
      return;
    }
    fate.id = *id;
    fate.kind = Fate::Kind::kWaiting;
    table.watch(*id);
  }

  // Notes what was granted, and what has ended without us.
  void look(ReservationTable& table, uint64_t now, std::vector<Fate>& fates) const {
    for (size_t r = 0; r < fates.size(); ++r) {
      Fate& fate = fates[r];
      if (fate.kind != Fate::Kind::kWaiting && fate.kind != Fate::Kind::kGranted) continue;
      const base::Result<ReservationState> state = table.state(fate.id);
      const bool granted = state.ok() && *state == ReservationState::kGranted;
      if (granted && fate.kind == Fate::Kind::kWaiting) {
        fate.kind = Fate::Kind::kGranted;
        fate.start_ns = now;
        fate.grant = *table.grant(fate.id);
        fate.end_ns = asked_[r].hold_ns < kForever - now ? now + asked_[r].hold_ns : kForever;
      } else if (!granted && state.ok() && *state != ReservationState::kWaiting) {
        const bool late = fate.kind == Fate::Kind::kWaiting;
        if (late) fate.reason = "not granted within deadline_ms";
        if (!late) fate.end_ns = now;  // its lease ended
        fate.kind = late ? Fate::Kind::kRefused : Fate::Kind::kEnded;
        table.unwatch(fate.id);
      }
    }
  }

  static uint64_t next_end(const std::vector<Fate>& fates) {
    uint64_t next = kForever;
    for (const Fate& fate : fates)
      if (fate.kind == Fate::Kind::kGranted) next = std::min(next, fate.end_ns);
    return next;
  }

  static void release(ReservationTable& table, uint64_t now, std::vector<Fate>& fates) {
    for (Fate& fate : fates) {
      if (fate.kind != Fate::Kind::kGranted || fate.end_ns > now) continue;
      if (table.release(fate.id, now).ok())
        table.unwatch(fate.id);  // else its lease has just ended, which look() sees
      else
        continue;
      fate.kind = Fate::Kind::kEnded;
    }
  }

  void write(const ReservationTable& table, const std::vector<Fate>& fates, OrderedJson& result) const {
    OrderedJson placements = OrderedJson::array(), waiting = OrderedJson::array(),
                refused = OrderedJson::array();
    for (size_t r = 0; r < fates.size(); ++r) {
      const Fate& fate = fates[r];
      if (fate.kind == Fate::Kind::kWaiting)
        waiting.push_back(object({{"request", asked_[r].name}, {"reason", table.explain(fate.id)}}));
      else if (fate.kind == Fate::Kind::kRefused)
        refused.push_back(object({{"request", asked_[r].name}, {"reason", fate.reason}}));
      else
        placements.push_back(object({{"request", asked_[r].name},
                                     {"start_s", static_cast<double>(fate.start_ns) / 1e9},
                                     {"alternative", fate.grant.alternative},
                                     {"nodes", fate.grant.nodes}}));
    }
    result["requests"] = asked_.size();
    result["granted"] = placements.size();
    result["placements"] = std::move(placements);
    result["waiting"] = std::move(waiting);
    result["refused"] = std::move(refused);
  }

  void write_times(const std::vector<Fate>& fates, OrderedJson& result) const {
    double sum_s = 0, most_s = 0, end_s = 0;
    size_t granted = 0;
    for (size_t r = 0; r < fates.size(); ++r) {
      if (fates[r].kind != Fate::Kind::kGranted && fates[r].kind != Fate::Kind::kEnded) continue;
      const double wait_s = static_cast<double>(fates[r].start_ns) / 1e9 - asked_[r].arrival_s;
      sum_s += wait_s;
      most_s = std::max(most_s, wait_s);
      if (fates[r].end_ns != kForever) end_s = std::max(end_s, static_cast<double>(fates[r].end_ns) / 1e9);
      ++granted;
    }
    result["wait_mean_s"] = granted > 0 ? std::max(0.0, sum_s / static_cast<double>(granted)) : 0.0;
    result["wait_most_s"] = most_s;
    result["makespan_s"] = end_s;  // the last end of a request that ends
  }

  void add_spans(const std::vector<Fate>& fates, std::vector<PlaySpan>& spans) const {
    double last_s = 0;
    for (const Fate& fate : fates)
      last_s =
          std::max(last_s, static_cast<double>(fate.end_ns == kForever ? fate.start_ns : fate.end_ns) / 1e9);
    for (size_t r = 0; r < fates.size(); ++r)
      for (const auto& part : fates[r].grant.nodes)
        for (const std::string& node : part)
          spans.push_back(
              {"node " + node, asked_[r].name, static_cast<double>(fates[r].start_ns) / 1e9,
               fates[r].end_ns == kForever ? last_s : static_cast<double>(fates[r].end_ns) / 1e9});
  }

  std::map<std::string, Amounts> nodes_;
  std::vector<Set> sets_;
  std::vector<Asked> asked_;
};

}  // namespace

const Kind& reservations_kind() {
  static const Kind kind = {
      "reservations",
      "scheduler",
      {"gpushare"},
      {"gpushare"},
      {"gpushare"},
      {"gpushare"},
      false,
      [](Fields& document, const std::vector<Device>& devices) -> std::unique_ptr<Problem> {
        return std::make_unique<ReservationsProblem>(document, devices);
      }};
  return kind;
}

}  // namespace gpushare::cluster
