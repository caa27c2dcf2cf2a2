// extern "C" bodies of the reservations in gpushare/cluster.h: the state machine of src/cluster/reservations.hpp behind
// one mutex, with a clock and waiting.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>

#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "c_api/cluster/guard.hpp"
#include "cluster/reservation_document.hpp"
#include "gpushare/cluster.h"

using namespace gpushare;
using namespace gpushare::capi_cluster;
using cluster::ReservationState;

struct gpushare_cluster_table {
  base::Mutex mutex;
  base::ConditionVariable changed;
  cluster::ReservationTable table GPUSHARE_GUARDED_BY(mutex);
};

namespace {

base::Status missing(const char* name) {
  return {GPUSHARE_INVALID_ARGUMENT, std::string(name) + " is null"};
}

// Runs `body` on the table with the lock held, then wakes who waits.
template <class F>
int32_t with_table(gpushare_cluster_table* table, F&& body) {
  return guard([&]() -> base::Status {
    if (table == nullptr) return missing("table");
    base::Status status;
    {
      base::MutexLock lock(table->mutex);
      status = body(table->table, base::host_now_ns());
    }
    table->changed.notify_all();
    return status;
  });
}

// While it lives, the request is remembered. Needs the table's lock, also where an exception ends it.
class Watching {
 public:
  Watching(cluster::ReservationTable& table, uint64_t id) : table_(table), id_(id) { table_.watch(id_); }
  ~Watching() { table_.unwatch(id_); }
  Watching(const Watching&) = delete;
  Watching& operator=(const Watching&) = delete;

 private:
  cluster::ReservationTable& table_;
  const uint64_t id_;
};

// The status and the message of a request that has ended.
base::Status ended(ReservationState state, const std::string& why) {
  switch (state) {
    case ReservationState::kTimedOut:
      return {GPUSHARE_TIMED_OUT, why};
    case ReservationState::kCancelled:
      return {GPUSHARE_CANCELLED, why};
    case ReservationState::kNodeLost:
      return {GPUSHARE_DEVICE_LOST, why};
    default:
      return {GPUSHARE_INVALID_STATE, why};
  }
}

}  // namespace

extern "C" {

int32_t gpushare_cluster_table_create(gpushare_cluster_table** out_table) {
  return guard([&]() -> base::Status {
    if (out_table == nullptr) return missing("out_table");
    *out_table = nullptr;
    *out_table = new gpushare_cluster_table;
    return {};
  });
}

void gpushare_cluster_table_release(gpushare_cluster_table* table) {
  delete table;
}

int32_t gpushare_cluster_table_add_node(gpushare_cluster_table* table, const char* node,
                                        const char* resources) {
  return with_table(table, [&](cluster::ReservationTable& inner, uint64_t now_ns) -> base::Status {
    if (node == nullptr || resources == nullptr) return missing(node == nullptr ? "node" : "resources");
    GPUSHARE_ASSIGN_OR_RETURN(const cluster::Amounts amounts, cluster::read_amounts(resources));
    return inner.add_node(node, amounts, now_ns);
  });
}

int32_t gpushare_cluster_table_lose_node(gpushare_cluster_table* table, const char* node) {
  return with_table(table, [&](cluster::ReservationTable& inner, uint64_t now_ns) -> base::Status {
    if (node == nullptr) return missing("node");
    return inner.lose_node(node, now_ns);
  });
}

int32_t gpushare_cluster_table_set(gpushare_cluster_table* table, const char* owner, const char* name,
                                   double capacity, const char* where) {
  return with_table(table, [&](cluster::ReservationTable& inner, uint64_t now_ns) -> base::Status {
    if (owner == nullptr || name == nullptr || where == nullptr)
      return missing(owner == nullptr ? "owner" : name == nullptr ? "name" : "where");
    GPUSHARE_ASSIGN_OR_RETURN(const cluster::ReservationTable::Where place, cluster::read_where(where));
    return inner.set(owner, name, capacity, place, now_ns);
  });
}

int32_t gpushare_cluster_table_end_owner(gpushare_cluster_table* table, const char* owner) {
  return with_table(table, [&](cluster::ReservationTable& inner, uint64_t now_ns) -> base::Status {
    if (owner == nullptr) return missing("owner");
    inner.end_owner(owner, now_ns);
    return {};
  });
}

int32_t gpushare_cluster_table_status(gpushare_cluster_table* table, char** out_status) {
  return with_table(table, [&](cluster::ReservationTable& inner, uint64_t now_ns) -> base::Status {
    if (out_status == nullptr) return missing("out_status");
    *out_status = nullptr;
    inner.tick(now_ns);
    return give(cluster::write_status(inner), out_status);
  });
}

int32_t gpushare_cluster_table_explain(gpushare_cluster_table* table, const char* request, char** out_text) {
  return with_table(table, [&](cluster::ReservationTable& inner, uint64_t now_ns) -> base::Status {
    if (out_text == nullptr) return missing("out_text");
    *out_text = nullptr;
    if (request == nullptr) return missing("request");
    GPUSHARE_ASSIGN_OR_RETURN(const cluster::ReservationRequest read,
                              cluster::read_reservation(request, now_ns));
    inner.tick(now_ns);
    return give(inner.explain(read), out_text);
  });
}

int32_t gpushare_cluster_reservation_submit(gpushare_cluster_table* table, const char* request,
                                            uint64_t* out_id) {
  return with_table(table, [&](cluster::ReservationTable& inner, uint64_t now_ns) -> base::Status {
    if (out_id == nullptr) return missing("out_id");
    *out_id = 0;
    if (request == nullptr) return missing("request");
    GPUSHARE_ASSIGN_OR_RETURN(cluster::ReservationRequest read, cluster::read_reservation(request, now_ns));
    GPUSHARE_ASSIGN_OR_RETURN(*out_id, inner.acquire(std::move(read), now_ns));
    return {};
  });
}

int32_t gpushare_cluster_reservation_wait(gpushare_cluster_table* table, uint64_t id, uint64_t timeout_ns,
                                          char** out_grant) {
  return guard([&]() -> base::Status {
    if (table == nullptr || out_grant == nullptr) return missing(table == nullptr ? "table" : "out_grant");
    *out_grant = nullptr;
    const base::Deadline deadline = base::Deadline::after(timeout_ns);
    base::Status result;
    {
      base::MutexLock lock(table->mutex);
      const Watching watching(table->table, id);
      while (true) {
        const uint64_t now_ns = base::host_now_ns();
        table->table.tick(now_ns);
        const auto state = table->table.state(id);
        if (!state.ok()) {
          result = state.status();
          break;
        }
        if (*state == ReservationState::kGranted) {
          result = give(cluster::write_grant(*table->table.grant(id)), out_grant);
          break;
        }
        if (*state != ReservationState::kWaiting) {
          result = ended(*state, table->table.explain(id));
          break;
        }
        if (deadline.passed()) {
          result = {GPUSHARE_TIMED_OUT, table->table.explain(id)};
          break;
        }
        const uint64_t next_ns = table->table.next_tick_ns();
        if (deadline.never() && next_ns == UINT64_MAX) {
          table->changed.wait(table->mutex);
          continue;
        }
        auto until = std::chrono::steady_clock::time_point::max();
        if (next_ns != UINT64_MAX)
          until = std::chrono::steady_clock::now() +
                  std::chrono::nanoseconds(next_ns - std::min(next_ns, now_ns));
        if (!deadline.never()) until = std::min(until, deadline.at());
        table->changed.wait_until(table->mutex, until);
      }
    }
    table->changed.notify_all();  // leases may have ended here
    return result;
  });
}

int32_t gpushare_cluster_reservation_cancel(gpushare_cluster_table* table, uint64_t id) {
  return guard([&]() -> base::Status {
    if (table == nullptr) return missing("table");
    base::MutexLock lock(table->mutex);
    GPUSHARE_RETURN_IF_ERROR(table->table.cancel(id, base::host_now_ns()));
    if (!table->table.watched(id)) table->table.forget(id);
    lock.unlock();
    table->changed.notify_all();
    return {};
  });
}

int32_t gpushare_cluster_reservation_release(gpushare_cluster_table* table, uint64_t id) {
  return with_table(table, [&](cluster::ReservationTable& inner, uint64_t now_ns) -> base::Status {
    inner.tick(now_ns);
    const auto state = inner.state(id);
    const base::Status status = inner.release(id, now_ns);
    const bool over = state.ok() && *state != ReservationState::kWaiting;
    if (over) inner.forget(id);
    return status;
  });
}

int32_t gpushare_cluster_reservation_renew(gpushare_cluster_table* table, uint64_t id) {
  return with_table(
      table, [&](cluster::ReservationTable& inner, uint64_t now_ns) { return inner.renew(id, now_ns); });
}

}  // extern "C"
