// SPDX-License-Identifier: Apache-2.0
#include "cluster/reservations.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

namespace gpushare::cluster {
namespace {

constexpr double kNeedTolerance = 1e-9;
constexpr int kMostNodeSteps = 20'000;  // of the search for nodes, so that a request cannot stop the table

}  // namespace

bool ReservationTable::satisfies(const Node& node, const Amounts& needs) {
  return std::all_of(needs.begin(), needs.end(), [&](const auto& need) {
    const auto resource = node.resources.find(need.first);
    return resource != node.resources.end() && resource->second.capacity >= need.second - kNeedTolerance;
  });
}

// Nodes for every placement of every part, by depth-first search in the order of the nodes' names. Equal placements of
// a part take nodes in ascending order, so that no permutation is tried twice.
bool ReservationTable::match(const std::vector<Part>& parts, const Nodes& nodes, bool empty_nodes,
                             std::vector<std::vector<std::string>>* out) {
  std::vector<std::pair<const std::string*, const Node*>> list;
  for (const auto& [name, node] : nodes)
    if (node.present) list.emplace_back(&name, &node);
  std::map<std::pair<size_t, std::string>, double> taken;  // by this request
  std::vector<std::vector<size_t>> chosen(parts.size());
  int steps = 0;
  const auto fits = [&](size_t n, const Part& part) {
    if (!part.node.empty() && part.node != *list[n].first) return false;
    return std::all_of(part.needs.begin(), part.needs.end(), [&](const auto& need) {
      const auto resource = list[n].second->resources.find(need.first);
      if (resource == list[n].second->resources.end()) return false;
      const auto already = taken.find({n, need.first});
      const double used =
          (empty_nodes ? 0 : resource->second.used) + (already == taken.end() ? 0 : already->second);
      return used + need.second <= resource->second.capacity + kNeedTolerance;
    });
  };
  const std::function<bool(size_t)> place = [&](size_t p) {
    if (p == parts.size()) return true;
    const Part& part = parts[p];
    if (int(chosen[p].size()) == part.count) return place(p + 1);
    size_t first = 0;
    if (!chosen[p].empty()) first = chosen[p].back() + (part.apart ? 1 : 0);
    for (size_t n = first; n < list.size(); ++n) {
      if (++steps > kMostNodeSteps) return false;
      if (!fits(n, part)) continue;
      for (const auto& [name, amount] : part.needs) taken[{n, name}] += amount;
      chosen[p].push_back(n);
      if (place(p)) return true;
      chosen[p].pop_back();
      for (const auto& [name, amount] : part.needs) taken[{n, name}] -= amount;
    }
    return false;
  };
  if (!place(0)) return false;
  if (out == nullptr) return true;
  out->clear();
  for (const auto& part : chosen) {
    auto& names = out->emplace_back();
    for (size_t n : part) names.push_back(*list[n].first);
  }
  return true;
}

std::optional<Grant> ReservationTable::fit(const ReservationRequest& request, const Nodes& nodes,
                                           bool empty_nodes) {
  for (size_t a = 0; a < request.alternatives.size(); ++a) {
    Grant grant{int(a), {}};
    if (match(request.alternatives[a], nodes, empty_nodes, &grant.nodes)) return grant;
  }
  return std::nullopt;
}

void ReservationTable::take(Nodes& nodes, const ReservationRequest& request, const Grant& grant,
                            double sign) {
  const auto& parts = request.alternatives[size_t(grant.alternative)];
  for (size_t p = 0; p < parts.size(); ++p) {
    for (const std::string& name : grant.nodes[p]) {
      Node& node = nodes[name];
      for (const auto& [resource, amount] : parts[p].needs) {
        const auto at = node.resources.find(resource);
        if (at == node.resources.end()) continue;  // removed while it was held
        at->second.used += sign * amount;
        if (std::abs(at->second.used) < kNeedTolerance) at->second.used = 0;
        if (at->second.used <= 0 && at->second.capacity == 0 && !at->second.own)
          node.resources.erase(at);  // removed meanwhile
      }
    }
  }
}

bool ReservationTable::overlaps(const ReservationRequest& a, const ReservationRequest& b) {
  const auto asks_for = [&](const std::string& name) {
    for (const auto& parts : a.alternatives)
      for (const Part& part : parts)
        if (part.needs.count(name) != 0) return true;
    return false;
  };
  for (const auto& parts : b.alternatives)
    for (const Part& part : parts)
      for (const auto& need : part.needs)
        if (asks_for(need.first)) return true;
  return false;
}

Amounts ReservationTable::most_free() const {
  Amounts most;
  for (const auto& [node_name, node] : nodes_) {
    if (!node.present) continue;
    for (const auto& [name, resource] : node.resources) {
      // A little more than is free, because match() adds what is used and needed, which rounds.
      const double slack = 2 * kNeedTolerance + resource.capacity * 1e-12;
      const double free = resource.capacity - resource.used + slack;
      const auto at = most.emplace(name, free).first;
      at->second = std::max(at->second, free);
    }
  }
  return most;
}

bool ReservationTable::hopeless(const ReservationRequest& request, const Amounts& most_free) {
  const auto lacks = [&](const Part& part) {
    return std::any_of(part.needs.begin(), part.needs.end(), [&](const auto& need) {
      const auto free = most_free.find(need.first);
      return free == most_free.end() || need.second > free->second;
    });
  };
  return std::all_of(request.alternatives.begin(), request.alternatives.end(),
                     [&](const auto& parts) { return std::any_of(parts.begin(), parts.end(), lacks); });
}

void ReservationTable::end(ReservationId id, Entry& entry, ReservationState state) {
  ended_.push_back(id);
  if (entry.state == ReservationState::kGranted) take(nodes_, entry.request, entry.grant, -1);
  entry.state = state;
  entry.expires_ns = UINT64_MAX;
}

// A request that is watched goes to the end of the line: whoever watches it will forget it.
void ReservationTable::forget_oldest() {
  for (size_t left = ended_.size(); ended_.size() > kMostEnded && left > 0; --left) {
    const ReservationId id = ended_.front();
    ended_.pop_front();
    if (watched(id))
      ended_.push_back(id);
    else
      forget(id);
  }
}

void ReservationTable::clear(const Setting& setting, const std::string& node) {
  const auto at = nodes_.find(node);
  if (at == nodes_.end()) return;
  const auto resource = at->second.resources.find(setting.name);
  if (resource == at->second.resources.end() || resource->second.own) return;
  resource->second.capacity = 0;
  if (resource->second.used == 0) at->second.resources.erase(resource);
}

// Puts a setting on as many nodes as it asks for and lacks.
void ReservationTable::apply(Setting& setting) {
  std::erase_if(setting.on, [&](const std::string& node) { return !nodes_[node].present; });
  const auto put = [&](const std::string& name, Node& node) {
    Resource& resource = node.resources[setting.name];
    resource.capacity = setting.capacity;
    resource.owner = setting.owner;
    if (std::find(setting.on.begin(), setting.on.end(), name) == setting.on.end()) setting.on.push_back(name);
  };
  for (const std::string& name : std::vector<std::string>(setting.on)) put(name, nodes_[name]);
  if (!setting.where.node.empty()) {
    const auto at = nodes_.find(setting.where.node);
    if (at != nodes_.end() && at->second.present) put(at->first, at->second);
    return;
  }
  for (const Amounts& needs : setting.where.any_of) {
    for (auto& [name, node] : nodes_) {
      if (int(setting.on.size()) >= setting.where.count) return;
      if (node.present && node.resources.count(setting.name) == 0 && satisfies(node, needs)) put(name, node);
    }
  }
}

base::Status ReservationTable::add_node(const std::string& name, const Amounts& resources, uint64_t now_ns) {
  Node& node = nodes_[name];
  node.present = true;
  for (auto& [resource, state] : node.resources)
    if (state.own && resources.count(resource) == 0) state.capacity = 0;
  for (const auto& [resource, capacity] : resources) {
    if (!(capacity >= 0)) {
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          base::format("node '%s': a capacity of %g of '%s' is not allowed; give 0 or more",
                                       name.c_str(), capacity, resource.c_str()));
    }
    node.resources[resource].capacity = capacity;
    node.resources[resource].own = true;
  }
  for (Setting& setting : settings_) apply(setting);
  pump(now_ns);
  return {};
}

base::Status ReservationTable::lose_node(const std::string& name, uint64_t now_ns) {
  const auto at = nodes_.find(name);
  if (at == nodes_.end() || !at->second.present)
    return base::Status(GPUSHARE_NOT_FOUND, base::format("there is no node '%s'", name.c_str()));
  for (auto& [id, entry] : entries_) {
    if (entry.state != ReservationState::kGranted) continue;
    const bool there = std::any_of(
        entry.grant.nodes.begin(), entry.grant.nodes.end(),
        [&](const auto& nodes) { return std::find(nodes.begin(), nodes.end(), name) != nodes.end(); });
    if (there) end(id, entry, ReservationState::kNodeLost);
  }
  at->second.present = false;
  at->second.resources.clear();
  for (Setting& setting : settings_) apply(setting);
  pump(now_ns);
  return {};
}

base::Status ReservationTable::set(const std::string& owner, const std::string& name, double capacity,
                                   const Where& where, uint64_t now_ns) {
  if (!(capacity >= 0) || where.count < 1)
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        base::format(
            "'%s': a capacity of %g on %d nodes is not allowed; give 0 or more, on at least one node",
            name.c_str(), capacity, where.count));
  if (!where.node.empty() && (nodes_.count(where.node) == 0 || !nodes_[where.node].present))
    return base::Status(GPUSHARE_NOT_FOUND,
                        base::format("'%s': there is no node '%s'", name.c_str(), where.node.c_str()));
  for (const auto& [node_name, node] : nodes_) {
    const auto resource = node.resources.find(name);
    if (resource != node.resources.end() && resource->second.own)
      return base::Status(GPUSHARE_ALREADY_EXISTS,
                          base::format("'%s' is a resource of node '%s' itself; choose another name",
                                       name.c_str(), node_name.c_str()));
  }
  for (const Setting& setting : settings_) {
    if (setting.name == name && setting.owner != owner)
      return base::Status(GPUSHARE_ALREADY_EXISTS,
                          base::format("'%s' is set by owner '%s'; choose another name", name.c_str(),
                                       setting.owner.c_str()));
  }
  // A call for the same node, or without one, replaces the earlier one.
  const auto same = std::find_if(settings_.begin(), settings_.end(), [&](const Setting& setting) {
    return setting.name == name && setting.where.node == where.node;
  });
  Setting setting{owner, name, capacity, where, {}};
  if (same != settings_.end()) {
    setting.on = same->on;
    while (int(setting.on.size()) > where.count) {
      clear(setting, setting.on.back());
      setting.on.pop_back();
    }
  }
  if (capacity == 0) {
    for (const std::string& node : setting.on) clear(setting, node);
    if (same != settings_.end()) settings_.erase(same);
    pump(now_ns);
    return {};
  }
  apply(setting);
  const size_t wanted = where.node.empty() ? size_t(where.count) : 1;
  if (setting.on.size() < wanted && same == settings_.end()) {
    const size_t found = setting.on.size();
    for (const std::string& node : setting.on) clear(setting, node);
    return base::Status(
        GPUSHARE_EXCEEDS_CAPACITY,
        base::format("'%s': %zu nodes satisfy what it needs, %zu are asked", name.c_str(), found, wanted));
  }
  if (same != settings_.end())
    *same = std::move(setting);
  else
    settings_.push_back(std::move(setting));
  pump(now_ns);
  return {};
}

base::Result<ReservationId> ReservationTable::acquire(ReservationRequest request, uint64_t now_ns) {
  if (request.alternatives.empty())
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "a request needs at least one alternative");
  for (const auto& parts : request.alternatives) {
    for (const Part& part : parts) {
      const bool amounts = std::all_of(part.needs.begin(), part.needs.end(), [](const auto& need) {
        return std::isfinite(need.second) && need.second > 0;
      });
      if (!amounts || part.count < 1)
        return base::Status(GPUSHARE_INVALID_ARGUMENT,
                            "a part needs a count of at least 1 and amounts above 0");
    }
  }
  tick(now_ns);
  forget_oldest();
  const ReservationId id = next_++;
  Entry& entry = entries_[id];
  entry.request = std::move(request);
  pump(now_ns, id);  // nothing has become free for the others
  if (entry.state == ReservationState::kWaiting) {
    const auto cycle = cycle_with(entry.request);
    if (!cycle.empty()) {
      std::string names;
      for (const std::string& owner : cycle) names += (names.empty() ? "'" : ", '") + owner + "'";
      entries_.erase(id);
      return base::Status(
          GPUSHARE_INVALID_STATE,
          "waiting for this would never end: the owners " + names +
              " hold what the others of them wait for; release something first, or acquire all at once");
    }
  }
  return id;
}

base::Status ReservationTable::cancel(ReservationId id, uint64_t now_ns) {
  const auto at = entries_.find(id);
  if (at == entries_.end() || at->second.state != ReservationState::kWaiting)
    return base::Status(GPUSHARE_INVALID_STATE,
                        base::format("request %llu does not wait", static_cast<unsigned long long>(id)));
  end(id, at->second, ReservationState::kCancelled);
  pump(now_ns);
  return {};
}

base::Status ReservationTable::release(ReservationId id, uint64_t now_ns) {
  const auto at = entries_.find(id);
  if (at == entries_.end() || at->second.state != ReservationState::kGranted)
    return base::Status(GPUSHARE_INVALID_STATE,
                        base::format("request %llu is not granted", static_cast<unsigned long long>(id)));
  end(id, at->second, ReservationState::kReleased);
  pump(now_ns);
  return {};
}

base::Status ReservationTable::renew(ReservationId id, uint64_t now_ns) {
  tick(now_ns);
  const auto at = entries_.find(id);
  if (at == entries_.end() || at->second.state != ReservationState::kGranted)
    return base::Status(GPUSHARE_INVALID_STATE,
                        base::format("request %llu is not granted", static_cast<unsigned long long>(id)));
  if (at->second.request.lease_ns) at->second.expires_ns = now_ns + *at->second.request.lease_ns;
  return {};
}

void ReservationTable::end_owner(const std::string& owner, uint64_t now_ns) {
  for (auto& [id, entry] : entries_) {
    if (entry.request.owner != owner) continue;
    if (entry.state == ReservationState::kGranted) end(id, entry, ReservationState::kReleased);
    if (entry.state == ReservationState::kWaiting) end(id, entry, ReservationState::kCancelled);
  }
  for (const Setting& setting : settings_)
    if (setting.owner == owner)
      for (const std::string& node : setting.on) clear(setting, node);
  std::erase_if(settings_, [&](const Setting& setting) { return setting.owner == owner; });
  pump(now_ns);
}

void ReservationTable::tick(uint64_t now_ns) {
  bool freed = false;
  for (auto& [id, entry] : entries_) {
    if (entry.state == ReservationState::kGranted && entry.expires_ns <= now_ns) {
      end(id, entry, ReservationState::kExpired);
      freed = true;
    } else if (entry.state == ReservationState::kWaiting && entry.request.deadline_ns &&
               *entry.request.deadline_ns <= now_ns) {
      end(id, entry, ReservationState::kTimedOut);
      freed = true;
    }
  }
  if (freed) pump(now_ns);
}

uint64_t ReservationTable::next_tick_ns() const {
  uint64_t next = UINT64_MAX;
  for (const auto& [id, entry] : entries_) {
    if (entry.state == ReservationState::kGranted) next = std::min(next, entry.expires_ns);
    if (entry.state == ReservationState::kWaiting && entry.request.deadline_ns)
      next = std::min(next, *entry.request.deadline_ns);
  }
  return next;
}

// Grants what fits, in the order of arrival. A request that has been passed too often, and that the nodes could
// satisfy, keeps later ones from the resources that it asks for. Requests before `first` are known not to fit.
void ReservationTable::pump(uint64_t now_ns, ReservationId first) {
  std::vector<Entry*> passed;
  // Only a grant changes it. Most requests that wait are seen to fit nowhere by it, without a search for nodes.
  Amounts free = most_free();
  for (auto& each : entries_) {
    Entry& entry = each.second;
    if (entry.state != ReservationState::kWaiting) continue;
    std::optional<Grant> grant;
    if (each.first >= first && !hopeless(entry.request, free)) grant = fit(entry.request, nodes_, false);
    const bool kept_back = grant && std::any_of(passed.begin(), passed.end(), [&](const Entry* earlier) {
                             return earlier->passed >= kMostPasses &&
                                    overlaps(earlier->request, entry.request) &&
                                    fit(earlier->request, nodes_, true);
                           });
    if (!grant || kept_back) {
      passed.push_back(&entry);
      continue;
    }
    take(nodes_, entry.request, *grant, 1);
    free = most_free();
    entry.state = ReservationState::kGranted;
    entry.grant = std::move(*grant);
    if (entry.request.lease_ns) entry.expires_ns = now_ns + *entry.request.lease_ns;
    for (Entry* earlier : passed)
      if (overlaps(earlier->request, entry.request)) ++earlier->passed;
  }
}

// The owners that could never go on if this request waited: all others are taken to end and give back what they hold,
// one after the other; who still waits then, and holds something, is in a cycle. Empty if the request's owner is not
// among them.
std::vector<std::string> ReservationTable::cycle_with(const ReservationRequest& request) const {
  std::set<std::string> holders;
  for (const auto& [id, entry] : entries_)
    if (entry.state == ReservationState::kGranted) holders.insert(entry.request.owner);
  if (holders.count(request.owner) == 0 || !fit(request, nodes_, true)) return {};
  Nodes nodes = nodes_;
  std::set<std::string> stuck = holders;
  for (bool more = true; more && stuck.count(request.owner) != 0;) {
    more = false;
    for (const std::string& owner : std::set<std::string>(stuck)) {
      const bool waits = std::any_of(entries_.begin(), entries_.end(), [&](const auto& item) {
        const Entry& entry = item.second;
        // A request for what nobody has set yet waits for a signal, not for a holder.
        return entry.state == ReservationState::kWaiting && entry.request.owner == owner &&
               fit(entry.request, nodes, true) && !fit(entry.request, nodes, false);
      });
      if (waits) continue;
      for (const auto& [id, entry] : entries_)
        if (entry.state == ReservationState::kGranted && entry.request.owner == owner)
          take(nodes, entry.request, entry.grant, -1);
      stuck.erase(owner);
      more = true;
    }
  }
  if (stuck.count(request.owner) == 0) return {};
  return {stuck.begin(), stuck.end()};
}

base::Result<ReservationState> ReservationTable::state(ReservationId id) const {
  const auto at = entries_.find(id);
  if (at == entries_.end())
    return base::Status(GPUSHARE_NOT_FOUND,
                        base::format("there is no request %llu", static_cast<unsigned long long>(id)));
  return at->second.state;
}

const Grant* ReservationTable::grant(ReservationId id) const {
  const auto at = entries_.find(id);
  return at == entries_.end() || at->second.state != ReservationState::kGranted ? nullptr : &at->second.grant;
}

void ReservationTable::forget(ReservationId id) {
  const auto at = entries_.find(id);
  if (at == entries_.end()) return;
  if (at->second.state != ReservationState::kWaiting && at->second.state != ReservationState::kGranted)
    entries_.erase(at);
}

void ReservationTable::watch(ReservationId id) {
  if (const auto at = entries_.find(id); at != entries_.end()) ++at->second.watchers;
}

void ReservationTable::unwatch(ReservationId id) {
  const auto at = entries_.find(id);
  if (at != entries_.end() && --at->second.watchers == 0) forget(id);
}

bool ReservationTable::watched(ReservationId id) const {
  const auto at = entries_.find(id);
  return at != entries_.end() && at->second.watchers > 0;
}

std::string ReservationTable::explain(const ReservationRequest& request) const {
  if (fit(request, nodes_, false)) return "it fits now";
  const bool possible = fit(request, nodes_, true).has_value();
  std::string text = possible ? "it fits when holders release: " : "no nodes can satisfy it as they are: ";
  for (size_t a = 0; a < request.alternatives.size(); ++a) {
    if (request.alternatives.size() > 1)
      text += base::format("%salternative %zu: ", a == 0 ? "" : "; ", a + 1);
    const char* between = "";
    for (const Part& part : request.alternatives[a]) {
      for (const auto& [name, amount] : part.needs) {
        double capacity = 0;
        double used = 0;
        double largest = 0;
        for (const auto& [node_name, node] : nodes_) {
          const auto resource = node.resources.find(name);
          if (resource == node.resources.end() || (!part.node.empty() && part.node != node_name)) continue;
          capacity += resource->second.capacity;
          used += resource->second.used;
          largest = std::max(largest, resource->second.capacity - resource->second.used);
        }
        std::set<std::string> owners;
        for (const auto& [id, entry] : entries_) {
          if (entry.state != ReservationState::kGranted) continue;
          for (const Part& held : entry.request.alternatives[size_t(entry.grant.alternative)])
            if (held.needs.count(name) != 0) owners.insert(entry.request.owner);
        }
        text += base::format("%s%d x %g of '%s' asked, %g of %g held", between, part.count, amount,
                             name.c_str(), used, capacity);
        const char* by = " by ";
        for (const std::string& owner : owners) {
          text += by + ("'" + owner + "'");
          by = ", ";
        }
        text += base::format(", at most %g free on one node", largest);
        between = ", ";
      }
    }
  }
  return text;
}

std::string ReservationTable::explain(ReservationId id) const {
  const auto at = entries_.find(id);
  if (at == entries_.end()) return "there is no such request";
  switch (at->second.state) {
    case ReservationState::kWaiting:
      return explain(at->second.request);
    case ReservationState::kGranted:
      return "it is granted";
    case ReservationState::kReleased:
      return "it was released";
    case ReservationState::kTimedOut:
      return "its deadline passed; " + explain(at->second.request);
    case ReservationState::kCancelled:
      return "it was cancelled";
    case ReservationState::kNodeLost:
      return "a node of its grant was lost; " + explain(at->second.request);
    case ReservationState::kExpired:
      return "its lease was not renewed in time";
  }
  return "";
}

std::vector<ReservationTable::Level> ReservationTable::levels() const {
  std::vector<Level> levels;
  for (const auto& [name, node] : nodes_)
    for (const auto& [resource, state] : node.resources)
      levels.push_back({name, resource, state.capacity, state.used});
  return levels;
}

size_t ReservationTable::waiting() const {
  return size_t(std::count_if(entries_.begin(), entries_.end(), [](const auto& item) {
    return item.second.state == ReservationState::kWaiting;
  }));
}

}  // namespace gpushare::cluster
