// Runtimes and what they export.
// SPDX-License-Identifier: Apache-2.0
#include "executor/runtime.hpp"

#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/policy.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"
#include "memory/allocation_log.hpp"
#include "memory/snapshot.hpp"

using namespace gpushare;

namespace {

base::Status check_params(const gpushare_runtime_params& params) {
  if (params.layout > GPUSHARE_LAYOUT_VIRTUAL)
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("layout is %u, allowed are 0 (auto), 1 (contiguous), 2 (virtual)", params.layout)};
  if (params.enqueue_depth > executor::kMaxDepth)
    return {GPUSHARE_INVALID_ARGUMENT, base::format("enqueue_depth is %u, allowed are 1 to %u, or 0 for 2",
                                                    params.enqueue_depth, executor::kMaxDepth)};
  if (params.max_lanes > executor::kMaxLanes)
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("max_lanes is %u, allowed are 1 to %u, or 0 for the policy's own limit",
                         params.max_lanes, executor::kMaxLanes)};
  constexpr uint32_t kKnown = GPUSHARE_RECORD_TIMELINE | GPUSHARE_RECORD_ALLOCATIONS;
  if ((params.record & ~kKnown) != 0)
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("record is 0x%x, known bits are 0x%x", params.record, kKnown)};
  return {};
}

gpushare_progress to_c(const executor::Progress& progress) {
  gpushare_progress out{};
  out.struct_size = sizeof out;
  out.lane = progress.lane;
  out.session_id = progress.session_id;
  out.session_name = progress.session_name;
  out.iterations_done = progress.iterations_done;
  out.service_ns = progress.service_ns;
  out.device_ns = progress.device_ns;
  return out;
}

}  // namespace

extern "C" {

int32_t gpushare_runtime_open(const gpushare_runtime_params* params, gpushare_runtime* out_runtime) {
  return capi::guard([&]() -> base::Status {
    gpushare_runtime_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    base::Status status = out_runtime == nullptr ? capi::null_argument("out_runtime") : check_params(read);
    if (!status.ok()) {
      capi::release_policy(read.policy_ops);
      return status;
    }
    executor::RuntimeOptions options;
    if (read.device != nullptr) options.device = read.device;
    options.layout = static_cast<memory::Layout>(read.layout);
    options.capacity_bytes = read.capacity_bytes;
    options.max_lanes = read.max_lanes;
    options.spill_limit_bytes = read.spill_limit_bytes;
    options.spill_move_bytes = read.spill_move_bytes;
    options.spill_move_ns = read.spill_move_ns;
    if (!(read.spill_move_loss >= 0))
      return {
          GPUSHARE_INVALID_ARGUMENT,
          base::format("spill_move_loss is %g; it must be 0 (the default) or above", read.spill_move_loss)};
    options.spill_move_loss = read.spill_move_loss;
    options.enqueue_depth = read.enqueue_depth;
    if (read.interference_file != nullptr) options.interference_file = read.interference_file;
    options.record_timeline = (read.record & GPUSHARE_RECORD_TIMELINE) != 0;
    options.record_allocations = (read.record & GPUSHARE_RECORD_ALLOCATIONS) != 0;
    if (read.on_progress != nullptr) {
      options.on_progress = [fn = read.on_progress,
                             user_data = read.on_progress_user_data](const executor::Progress& progress) {
        const gpushare_progress shown = to_c(progress);
        const base::CallbackCalls may_call;
        fn(user_data, &shown);
      };
    }
    GPUSHARE_ASSIGN_OR_RETURN(options.policy, capi::open_policy(read.policy, read.policy_ops));
    if (read.lane_finder != nullptr) {
      GPUSHARE_ASSIGN_OR_RETURN(options.lane_finder, sched::lane_finder_named(read.lane_finder));
    }
    GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<executor::Runtime> runtime,
                              executor::Runtime::open(std::move(options)));
    return capi::publish(std::move(runtime), out_runtime);
  });
}

int32_t gpushare_runtime_close(gpushare_runtime runtime) {
  return capi::with(runtime, [&](executor::Runtime& of) -> base::Status {
    base::Status status = of.close();
    // Refused from inside a callback: the handle stays good. Any other verdict is that of a closed runtime.
    if (status.code() != GPUSHARE_INVALID_STATE || !of.info().ok())
      capi::table_of<gpushare_runtime>().remove(runtime);
    return status;
  });
}

int32_t gpushare_runtime_get_info(gpushare_runtime runtime, gpushare_runtime_info* out_info) {
  return capi::with(runtime, [&](executor::Runtime& of) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const executor::RuntimeInfo info, of.info());
    gpushare_runtime_info out = GPUSHARE_RUNTIME_INFO_INIT;
    out.layout = static_cast<uint32_t>(info.layout);
    out.capabilities = info.capabilities;
    out.lanes = info.lanes;
    out.sessions_resident = info.sessions_resident;
    out.sessions_queued = info.sessions_queued;
    out.sessions_paged_out = info.sessions_paged_out;
    out.capacity_bytes = info.capacity_bytes;
    out.promised_bytes = info.promised_bytes;
    out.persistent_bytes = info.persistent_bytes;
    out.ephemeral_bytes = info.ephemeral_bytes;
    out.peak_bytes = info.peak_bytes;
    out.switches = info.switches;
    out.iterations_done = info.iterations_done;
    out.paged_out_bytes_total = info.paged_out_bytes_total;
    out.paged_in_bytes_total = info.paged_in_bytes_total;
    out.paging_ns = info.paging_ns;
    out.device_busy_ns = info.device_busy_ns;
    out.now_ns = info.now_ns;
    out.link_bytes_per_s = info.link_bytes_per_s;
    out.compute_units = info.compute_units;
    out.partitionable_compute_units = info.partitionable_compute_units;
    out.granularity_compute_units = info.granularity_compute_units;
    out.promised_compute_units = info.promised_compute_units;
    out.effective_capacity_bytes = info.effective_capacity_bytes;
    capi::copy_text(out.device, info.device);
    capi::copy_text(out.policy, info.policy);
    return capi::write_struct("out_info", out, out_info);
  });
}

int32_t gpushare_runtime_get_interference(gpushare_runtime runtime, uint32_t index,
                                          gpushare_interference* out_entry) {
  return capi::with(runtime, [&](executor::Runtime& of) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const auto entries, of.interference());
    if (index >= entries.size())
      return {GPUSHARE_NOT_FOUND,
              base::format("index %u: the table of interference has %zu entries", index, entries.size())};
    const auto& entry = entries[index];
    gpushare_interference out = GPUSHARE_INTERFERENCE_INIT;
    capi::copy_text(out.name, entry.name);
    capi::copy_text(out.beside, entry.beside);
    out.value = entry.value;
    out.confidence = entry.confidence;
    out.age_s = entry.age_s;
    return capi::write_struct("out_entry", out, out_entry);
  });
}

int32_t gpushare_runtime_set_capacity(gpushare_runtime runtime, uint64_t capacity_bytes) {
  return capi::with(runtime, [&](executor::Runtime& of) { return of.set_capacity(capacity_bytes); });
}

int32_t gpushare_runtime_set_coordination(gpushare_runtime runtime,
                                          const gpushare_coordination_params* params) {
  return capi::with(runtime, [&](executor::Runtime& of) -> base::Status {
    if (params == nullptr) return of.set_coordination(std::nullopt);
    gpushare_coordination_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    if (read.reserved != 0) return {GPUSHARE_INVALID_ARGUMENT, "reserved must be 0"};
    sched::CoordinatorOptions options;
    if (read.max_guaranteed > 0) options.max_guaranteed = read.max_guaranteed;
    if (read.max_opportunistic > 0) options.max_opportunistic = read.max_opportunistic;
    if (read.long_wait_ns > 0) options.long_wait_ns = read.long_wait_ns;
    return of.set_coordination(options);
  });
}

int32_t gpushare_runtime_set_policy(gpushare_runtime runtime, const char* policy,
                                    const gpushare_policy_ops* policy_ops) {
  return capi::guard([&]() -> base::Status {
    const auto pin = capi::find(runtime);
    base::Status status;
    if (!pin) status = capi::stale(runtime);
    if (pin && policy == nullptr && policy_ops == nullptr) status = capi::null_argument("policy");
    if (!status.ok()) {
      capi::release_policy(policy_ops);
      return status;
    }
    GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<sched::Policy> made, capi::open_policy(policy, policy_ops));
    return pin->set_policy(std::move(made));
  });
}

int32_t gpushare_runtime_synchronize(gpushare_runtime runtime, uint64_t timeout_ns) {
  return capi::with_cancellable(runtime, [&](executor::Runtime& of) { return of.synchronize(timeout_ns); });
}

int32_t gpushare_runtime_drain(gpushare_runtime runtime, uint64_t timeout_ns) {
  return capi::with_cancellable(runtime, [&](executor::Runtime& of) { return of.drain(timeout_ns); });
}

int32_t gpushare_runtime_set_out_of_memory_callback(gpushare_runtime runtime, gpushare_out_of_memory_fn fn,
                                                    void* user_data) {
  return capi::with(runtime, [&](executor::Runtime& of) -> base::Status {
    if (fn == nullptr) return of.set_out_of_memory_function({});
    return of.set_out_of_memory_function([fn, user_data](uint64_t session_id, uint64_t bytes) {
      const base::CallbackCalls may_call;
      return fn(user_data, session_id, bytes) != 0;
    });
  });
}

int32_t gpushare_runtime_write_timeline(gpushare_runtime runtime, const char* path) {
  return capi::guard([&]() -> base::Status {
    if (path == nullptr) return capi::null_argument("path");
    const auto pin = capi::find(runtime);
    return pin ? pin->write_timeline(path) : capi::stale(runtime);
  });
}

int32_t gpushare_runtime_write_snapshot(gpushare_runtime runtime, const char* path, uint32_t format) {
  return capi::guard([&]() -> base::Status {
    if (path == nullptr) return capi::null_argument("path");
    if (format > GPUSHARE_SNAPSHOT_JSON)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("format is %u, allowed are 0 (pickle) and 1 (JSON)", format)};
    const auto pin = capi::find(runtime);
    if (!pin) return capi::stale(runtime);
    GPUSHARE_ASSIGN_OR_RETURN(const memory::MemorySnapshot snapshot, pin->snapshot());
    return memory::write_snapshot(
        snapshot,
        format == GPUSHARE_SNAPSHOT_PICKLE ? memory::SnapshotFormat::kPickle : memory::SnapshotFormat::kJson,
        path);
  });
}

int32_t gpushare_runtime_write_allocation_log(gpushare_runtime runtime, const char* path) {
  return capi::guard([&]() -> base::Status {
    if (path == nullptr) return capi::null_argument("path");
    const auto pin = capi::find(runtime);
    if (!pin) return capi::stale(runtime);
    if (!pin->records_allocations())
      return {GPUSHARE_INVALID_STATE,
              "the runtime does not record allocations; open it with GPUSHARE_RECORD_ALLOCATIONS"};
    GPUSHARE_ASSIGN_OR_RETURN(const memory::MemorySnapshot snapshot, pin->snapshot());
    return memory::write_allocation_log(snapshot.events, path);
  });
}

}  // extern "C"
