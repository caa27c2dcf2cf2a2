// cluster.hpp: the C++ API over cluster.h: documents in and out as strings, errors as exceptions. Header-only;
// link libgpushare_cluster.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_CLUSTER_HPP_
#define GPUSHARE_CLUSTER_HPP_

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpushare/cluster.h"

namespace gpushare {

// A call of libgpushare_cluster that failed: its status, and what() as the message of gpushare_cluster_last_error_message.
class ClusterError : public std::runtime_error {
 public:
  explicit ClusterError(int32_t status)
      : std::runtime_error(gpushare_cluster_last_error_message()), status_(status) {}
  int32_t status() const noexcept { return status_; }

 private:
  int32_t status_;
};

namespace detail {

struct ClusterTextFree {
  void operator()(char* text) const noexcept { gpushare_cluster_text_free(text); }
};

inline std::string cluster_text(int32_t status, char* text) {
  const std::unique_ptr<char, ClusterTextFree> owner(text);
  if (status != GPUSHARE_OK) throw ClusterError(status);
  return text;
}

}  // namespace detail

// See gpushare_cluster_schema.
inline std::string cluster_schema() {
  char* text = nullptr;
  const int32_t status = gpushare_cluster_schema(&text);
  return detail::cluster_text(status, text);
}

// See gpushare_cluster_plan. `choices` empty: the kind's default.
inline std::string cluster_plan(const std::string& document, const std::string& choices = {}) {
  char* text = nullptr;
  const int32_t status = gpushare_cluster_plan(document.data(), document.size(),
                                               choices.empty() ? nullptr : choices.c_str(), &text);
  return detail::cluster_text(status, text);
}

// The decisions of a scheduler's tick; see gpushare_cluster_actions. Valid only during that tick.
class ClusterActions {
 public:
  explicit ClusterActions(gpushare_cluster_actions* actions) : actions_(actions) {}
  void place(uint32_t job, const std::vector<uint32_t>& devices, bool opportunistic = false) {
    check(gpushare_cluster_actions_place(actions_, job, devices.data(), uint32_t(devices.size()),
                                         opportunistic));
  }
  void pause(uint32_t job) { check(gpushare_cluster_actions_pause(actions_, job)); }
  void resize(uint32_t job, bool opportunistic) {
    check(gpushare_cluster_actions_resize(actions_, job, opportunistic));
  }
  void reject(uint32_t job, const std::string& reason) {
    check(gpushare_cluster_actions_reject(actions_, job, reason.c_str()));
  }

 private:
  static void check(int32_t status) {
    if (status != GPUSHARE_OK) throw ClusterError(status);
  }
  gpushare_cluster_actions* actions_;
};

// A scheduler of your own for cluster_run; see gpushare_cluster_scheduler_ops. An exception out of one ends the run.
class ClusterScheduler {
 public:
  virtual ~ClusterScheduler() = default;
  virtual const char* name() const = 0;
  virtual void begin() {}
  virtual void device_changed(uint32_t device, uint64_t memory_bytes, double speed, bool up,
                              double now_s) = 0;
  virtual void arrived(uint32_t job, const gpushare_cluster_job_info& info, double now_s) = 0;
  virtual void observed(uint32_t /*job*/, double /*attained_s*/, double /*remaining_s*/, double /*slowdown*/,
                        double /*now_s*/) {}
  virtual void finished(uint32_t job, double now_s) = 0;
  virtual double tick(double now_s, ClusterActions& actions) = 0;

  // Its table; valid while the scheduler lives.
  gpushare_cluster_scheduler_ops ops() {
    gpushare_cluster_scheduler_ops out{};
    out.struct_size = sizeof(out);
    out.abi_version = GPUSHARE_CLUSTER_SCHEDULER_ABI_VERSION;
    out.name = name();
    out.context = this;
    out.begin = [](void* self) { of(self).begin(); };
    out.device_changed = [](void* self, uint32_t device, uint64_t memory_bytes, double speed, int32_t up,
                            double now_s) {
      of(self).device_changed(device, memory_bytes, speed, up != 0, now_s);
    };
    out.arrived = [](void* self, uint32_t job, const gpushare_cluster_job_info* info, double now_s) {
      of(self).arrived(job, *info, now_s);
    };
    out.observed = [](void* self, uint32_t job, double attained_s, double remaining_s, double slowdown,
                      double now_s) { of(self).observed(job, attained_s, remaining_s, slowdown, now_s); };
    out.finished = [](void* self, uint32_t job, double now_s) { of(self).finished(job, now_s); };
    out.tick = [](void* self, double now_s, gpushare_cluster_actions* actions) {
      ClusterActions wrapped(actions);
      return of(self).tick(now_s, wrapped);
    };
    return out;
  }

 private:
  static ClusterScheduler& of(void* self) { return *static_cast<ClusterScheduler*>(self); }
};

// See gpushare_cluster_run. `choices` empty: the kind's default. `own` are schedulers that `choices` may name; they are not kept.
inline std::string cluster_run(const std::string& document, const std::string& choices = {},
                               gpushare_cluster_run_options options = GPUSHARE_CLUSTER_RUN_OPTIONS_INIT,
                               const std::vector<ClusterScheduler*>& own = {}) {
  std::vector<gpushare_cluster_scheduler_ops> tables;
  std::vector<const gpushare_cluster_scheduler_ops*> pointers;
  for (ClusterScheduler* scheduler : own) tables.push_back(scheduler->ops());
  for (const gpushare_cluster_scheduler_ops& table : tables) pointers.push_back(&table);
  if (!own.empty()) {
    options.schedulers = pointers.data();
    options.scheduler_count = pointers.size();
  }
  char* text = nullptr;
  const int32_t status = gpushare_cluster_run(document.data(), document.size(),
                                              choices.empty() ? nullptr : choices.c_str(), &options, &text);
  return detail::cluster_text(status, text);
}

// Reservations; see cluster.h for what requests, places and grants are. Errors are ClusterError. Movable; may be used
// from any thread.
class ReservationTable {
 public:
  ReservationTable() { check(gpushare_cluster_table_create(&table_)); }
  ~ReservationTable() { gpushare_cluster_table_release(table_); }
  ReservationTable(ReservationTable&& other) noexcept : table_(other.table_) { other.table_ = nullptr; }
  ReservationTable& operator=(ReservationTable&& other) noexcept {
    gpushare_cluster_table* const mine = table_;
    table_ = other.table_;
    other.table_ = mine;
    return *this;
  }
  ReservationTable(const ReservationTable&) = delete;
  ReservationTable& operator=(const ReservationTable&) = delete;

  void add_node(const std::string& node, const std::string& resources) {
    check(gpushare_cluster_table_add_node(table_, node.c_str(), resources.c_str()));
  }
  void lose_node(const std::string& node) { check(gpushare_cluster_table_lose_node(table_, node.c_str())); }
  void set(const std::string& owner, const std::string& name, double capacity, const std::string& where) {
    check(gpushare_cluster_table_set(table_, owner.c_str(), name.c_str(), capacity, where.c_str()));
  }
  void end_owner(const std::string& owner) { check(gpushare_cluster_table_end_owner(table_, owner.c_str())); }
  std::string status() const {
    char* text = nullptr;
    const int32_t status = gpushare_cluster_table_status(table_, &text);
    return detail::cluster_text(status, text);
  }
  std::string explain(const std::string& request) const {
    char* text = nullptr;
    const int32_t status = gpushare_cluster_table_explain(table_, request.c_str(), &text);
    return detail::cluster_text(status, text);
  }
  uint64_t submit(const std::string& request) {
    uint64_t id = 0;
    check(gpushare_cluster_reservation_submit(table_, request.c_str(), &id));
    return id;
  }
  std::string wait(uint64_t id, uint64_t timeout_ns = UINT64_MAX) {
    char* text = nullptr;
    const int32_t status = gpushare_cluster_reservation_wait(table_, id, timeout_ns, &text);
    return detail::cluster_text(status, text);
  }
  void cancel(uint64_t id) { check(gpushare_cluster_reservation_cancel(table_, id)); }
  void release(uint64_t id) { check(gpushare_cluster_reservation_release(table_, id)); }
  void renew(uint64_t id) { check(gpushare_cluster_reservation_renew(table_, id)); }

 private:
  static void check(int32_t status) {
    if (status != GPUSHARE_OK) throw ClusterError(status);
  }
  gpushare_cluster_table* table_ = nullptr;
};

}  // namespace gpushare

#endif  // GPUSHARE_CLUSTER_HPP_
