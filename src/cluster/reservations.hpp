// reservations.hpp: one transactional table of named, counted resources on nodes (ESCHER; thesis 002, chapter 4).
// Policies are expressed as requirements: gang, affinity, anti-affinity, barriers, queues, locks, fair shares, soft
// constraints, load balancing.
//
// The source takes a gang by ghost tasks, time-outs and back-off; here a request takes all that it needs at once or nothing.
// Requests wait in the order of arrival. A request that fits may pass one that does not, at most kMostPasses times.
// After that no request takes resources that the passed one could use, so every request that the nodes can satisfy is
// granted eventually. A request that closes a cycle of owners that wait for each other is refused.
//
// A state machine: no thread, no clock; calls are serialised by the caller and told the time. Cost of a call: O(waiting
// requests x nodes x resources asked) at worst, microseconds for tables of some dozens.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/status.hpp"

namespace gpushare::cluster {

using Amounts = std::map<std::string, double>;  // resource name -> how much of it

// `count` placements, each on one node that has all the needs free at once.
struct Part {
  Amounts needs;
  int count = 1;
  bool apart = false;  // each on a node of its own
  std::string node;    // only on this node; "" : any
};

struct ReservationRequest {
  std::string owner;
  // Ordered: the first that fits is taken. All parts of an alternative are granted at once.
  std::vector<std::vector<Part>> alternatives;
  std::optional<uint64_t> deadline_ns;  // not granted by then: it fails
  std::optional<uint64_t> lease_ns;     // the grant ends so long after it was given or renewed
};

enum class ReservationState { kWaiting, kGranted, kReleased, kTimedOut, kCancelled, kNodeLost, kExpired };

struct Grant {
  int alternative = 0;
  std::vector<std::vector<std::string>> nodes;  // [part][placement]
};

using ReservationId = uint64_t;

class ReservationTable {
 public:
  static constexpr int kMostPasses = 64;
  // Requests that have ended and that nobody has asked about are remembered up to so many; then the one that ended first
  // is forgotten.
  static constexpr size_t kMostEnded = 1024;

  // A node with its own resources ("gpu": 8); a known node gets these capacities. Resources that were set on it before
  // it was lost are set again, and resources that wait for a node like it are set on it.
  base::Status add_node(const std::string& node, const Amounts& resources, uint64_t now_ns);
  // The node's grants end as kNodeLost, whole gangs. Resources set there by needs move to other nodes that satisfy
  // them, or wait for one.
  base::Status lose_node(const std::string& node, uint64_t now_ns);

  // Sets a resource's capacity on the given node, or on `count` nodes that each have `needs` in their capacities (AND)
  // of one of the alternatives (OR, ordered). 0 removes it. A capacity below the granted amount takes nothing away:
  // nothing further is granted until it fits. Errors: ALREADY_EXISTS (the name is another owner's, or a node's own),
  // NOT_FOUND (no such node), EXCEEDS_CAPACITY (fewer nodes than asked satisfy the needs).
  struct Where {
    std::string node;
    std::vector<Amounts> any_of;
    int count = 1;
  };
  base::Status set(const std::string& owner, const std::string& name, double capacity, const Where& where,
                   uint64_t now_ns);

  // A request that is granted at once or waits. Errors: INVALID_ARGUMENT (no alternative, an amount that is not
  // positive), INVALID_STATE (it closes a cycle of waits; the message names the owners).
  base::Result<ReservationId> acquire(ReservationRequest request, uint64_t now_ns);
  base::Status cancel(ReservationId id, uint64_t now_ns);   // of one that waits
  base::Status release(ReservationId id, uint64_t now_ns);  // of one that is granted
  base::Status renew(ReservationId id, uint64_t now_ns);
  // The owner is gone: its grants are released, its waits cancelled, its resources removed.
  void end_owner(const std::string& owner, uint64_t now_ns);
  // Ends leases and waits whose time has come.
  void tick(uint64_t now_ns);
  // When tick() has something to do; UINT64_MAX for never.
  uint64_t next_tick_ns() const;

  base::Result<ReservationState> state(ReservationId id) const;
  const Grant* grant(ReservationId id) const;  // null unless it is granted
  // Forgets a request that has ended.
  void forget(ReservationId id);
  // Somebody waits for the request to be granted or to end: it is remembered until all have called unwatch(), the last of
  // whom forgets a request that has ended.
  void watch(ReservationId id);
  void unwatch(ReservationId id);
  bool watched(ReservationId id) const;
  // The reason why a request is not granted: resources that no node has at all, or that others hold, with their names;
  // or that it would be granted.
  std::string explain(const ReservationRequest& request) const;
  std::string explain(ReservationId id) const;

  struct Level {
    std::string node;
    std::string name;
    double capacity = 0;
    double used = 0;
  };
  std::vector<Level> levels() const;  // every resource of every node
  size_t waiting() const;
  size_t remembered() const { return entries_.size(); }  // requests that wait, are granted, or have ended

 private:
  struct Resource {
    double capacity = 0;
    double used = 0;
    bool own = false;   // of the node itself
    std::string owner;  // who set it
  };
  struct Node {
    bool present = true;
    std::map<std::string, Resource> resources;
  };
  struct Setting {  // a set() call, kept to be replayed
    std::string owner;
    std::string name;
    double capacity;
    Where where;
    std::vector<std::string> on;
  };
  struct Entry {
    ReservationRequest request;
    ReservationState state = ReservationState::kWaiting;
    Grant grant;
    uint64_t expires_ns = UINT64_MAX;
    int passed = 0;
    int watchers = 0;
  };
  using Nodes = std::map<std::string, Node>;

  static bool match(const std::vector<Part>& parts, const Nodes& nodes, bool empty_nodes,
                    std::vector<std::vector<std::string>>* out);
  static std::optional<Grant> fit(const ReservationRequest& request, const Nodes& nodes, bool empty_nodes);
  static void take(Nodes& nodes, const ReservationRequest& request, const Grant& grant, double sign);
  static bool satisfies(const Node& node, const Amounts& needs);
  static bool overlaps(const ReservationRequest& a, const ReservationRequest& b);
  void end(ReservationId id, Entry& entry, ReservationState state);
  void forget_oldest();
  void apply(Setting& setting);
  void clear(const Setting& setting, const std::string& node);
  // The most of each resource that one node has free, or a little more.
  Amounts most_free() const;
  // Whether each alternative needs more of a resource than any node has free.
  static bool hopeless(const ReservationRequest& request, const Amounts& most_free);
  void pump(uint64_t now_ns, ReservationId first = 0);
  std::vector<std::string> cycle_with(const ReservationRequest& request) const;

  Nodes nodes_;
  std::vector<Setting> settings_;
  std::map<ReservationId, Entry> entries_;  // in order of arrival
  std::deque<ReservationId> ended_;         // in the order in which they ended; some are forgotten already
  ReservationId next_ = 1;
};

}  // namespace gpushare::cluster
