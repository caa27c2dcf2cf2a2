// Workers of a memory daemon.
// SPDX-License-Identifier: Apache-2.0
#include "daemon/worker.hpp"

#include <memory>
#include <string>

#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;

extern "C" {

int32_t gpushare_worker_attach(const gpushare_worker_params* params, gpushare_worker* out_worker) {
  return capi::guard([&]() -> base::Status {
    if (out_worker == nullptr) return capi::null_argument("out_worker");
    gpushare_worker_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    if (read.socket == nullptr) return capi::null_argument("params->socket");
    if (read.name == nullptr) return capi::null_argument("params->name");
    if (read.model == nullptr) return capi::null_argument("params->model");
    daemon::WorkerOptions options;
    options.socket = read.socket;
    options.name = read.name;
    options.path = read.model;
    options.execute_ns = read.iteration_ns;
    options.scratch_bytes = read.scratch_bytes;
    options.timeout_ns = read.timeout_ns;
    GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<daemon::Worker> worker, daemon::Worker::attach(options));
    return capi::publish(std::move(worker), out_worker);
  });
}

int32_t gpushare_worker_detach(gpushare_worker worker) {
  return capi::guard([&]() -> base::Status {
    std::shared_ptr<daemon::Worker> object;
    if (!capi::table_of<gpushare_worker>().remove(worker, &object)) return capi::stale(worker);
    object->detach();
    return {};
  });
}

int32_t gpushare_worker_begin(gpushare_worker worker, uint64_t timeout_ns) {
  return capi::with(worker, [&](daemon::Worker& object) { return object.begin(timeout_ns); });
}

int32_t gpushare_worker_wait_layers(gpushare_worker worker, uint32_t first, uint32_t end,
                                    uint64_t timeout_ns) {
  return capi::with(worker,
                    [&](daemon::Worker& object) { return object.wait_layers(first, end, timeout_ns); });
}

int32_t gpushare_worker_end(gpushare_worker worker) {
  return capi::with(worker, [&](daemon::Worker& object) { return object.end(); });
}

int32_t gpushare_worker_get_wanted(gpushare_worker worker, uint32_t* out_wanted) {
  return capi::with(worker, [&](daemon::Worker& object) -> base::Status {
    if (out_wanted == nullptr) return capi::null_argument("out_wanted");
    *out_wanted = object.turn_wanted() ? 1 : 0;
    return {};
  });
}

int32_t gpushare_worker_get_info(gpushare_worker worker, gpushare_worker_info* out_info) {
  return capi::with(worker, [&](daemon::Worker& object) -> base::Status {
    gpushare_worker_info info = GPUSHARE_WORKER_INFO_INIT;
    info.layers = static_cast<uint32_t>(object.layers().size());
    info.worker = object.id();
    info.model_bytes = object.image_bytes();
    info.scratch_bytes = object.scratch_bytes();
    info.model_address = object.region();
    info.scratch_address = object.scratch();
    info.in_turn = object.in_turn() ? 1 : 0;
    info.arrived_at_begin = object.arrived_at_begin();
    capi::copy_text(info.device, object.device_spec());
    return capi::write_struct("out_info", info, out_info);
  });
}

int32_t gpushare_worker_get_layer(gpushare_worker worker, uint32_t index, gpushare_worker_layer* out_layer) {
  return capi::with(worker, [&](daemon::Worker& object) -> base::Status {
    if (index >= object.layers().size())
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("layer %u asked; there are [0, %zu)", index, object.layers().size())};
    gpushare_worker_layer layer = GPUSHARE_WORKER_LAYER_INIT;
    layer.name = object.layers()[index].name.c_str();
    layer.address = object.address(index);
    layer.bytes = object.layers()[index].bytes;
    return capi::write_struct("out_layer", layer, out_layer);
  });
}

}  // extern "C"
