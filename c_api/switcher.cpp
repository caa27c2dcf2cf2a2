// Switchers.
// SPDX-License-Identifier: Apache-2.0
#include "loader/switcher.hpp"

#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/loader.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;

namespace {

// The handles of a turn: the iteration's, and the model's that goes with it.
base::Status publish_turn(const loader::Switcher::Turn& turn, gpushare_iteration* out_iteration,
                          gpushare_model* out_model) {
  auto iteration = std::make_shared<capi::IterationObject>(turn.iteration);
  gpushare_model model = nullptr;
  GPUSHARE_RETURN_IF_ERROR(
      capi::publish(std::make_shared<capi::ModelObject>(capi::ModelObject{turn.model, true}), &model));
  iteration->model = model;
  GPUSHARE_RETURN_IF_ERROR(capi::publish(std::move(iteration), out_iteration));
  if (out_model != nullptr) *out_model = model;
  return {};
}

}  // namespace

extern "C" {

int32_t gpushare_switcher_create(gpushare_loader loader, const gpushare_switcher_params* params,
                                 gpushare_switcher* out_switcher) {
  return capi::guard([&]() -> base::Status {
    if (out_switcher == nullptr) return capi::null_argument("out_switcher");
    gpushare_switcher_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    if (read.residency > GPUSHARE_RESIDENCY_WEIGHTED)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("residency is %u, allowed are 0 (least recently used) and 1 (weighted)",
                           read.residency)};
    const auto pin = capi::find(loader);
    if (!pin) return capi::stale(loader);
    loader::SwitcherOptions options;
    options.policy = read.residency == GPUSHARE_RESIDENCY_LRU ? sched::ResidencyPolicy::kLeastRecentlyUsed
                                                              : sched::ResidencyPolicy::kWeighted;
    options.keep_bytes = read.keep_bytes;
    options.standby_bytes = read.standby_bytes;
    GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<loader::Switcher> switcher,
                              loader::Switcher::open(pin.shared(), options));
    return capi::publish(std::move(switcher), out_switcher);
  });
}

int32_t gpushare_switcher_release(gpushare_switcher switcher) {
  return capi::with(switcher, [&](loader::Switcher& of) -> base::Status {
    base::Status status = of.close();
    // Closed with its runtime: giving the handle back is all that is left. Refused from inside its own iteration:
    // the handle stays good.
    if (!status.ok() && !of.closed()) return status;
    return capi::table_of<gpushare_switcher>().remove(switcher) ? base::Status() : capi::stale(switcher);
  });
}

int32_t gpushare_switcher_add(gpushare_switcher switcher, const gpushare_session_params* session,
                              gpushare_image image, const gpushare_load_params* load, uint64_t* out_member) {
  return capi::with(switcher, [&](loader::Switcher& of) -> base::Status {
    if (out_member == nullptr) return capi::null_argument("out_member");
    gpushare_session_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("session", session, &read));
    const auto pin = capi::find(image);
    if (!pin) return capi::stale(image);
    loader::MemberOptions options;
    GPUSHARE_ASSIGN_OR_RETURN(options.session, capi::session_options(read));
    options.image = pin->image;
    GPUSHARE_ASSIGN_OR_RETURN(options.load, capi::read_load_params(load, pin->image->layers().size()));
    GPUSHARE_ASSIGN_OR_RETURN(*out_member, of.add(std::move(options)));
    return {};
  });
}

int32_t gpushare_switcher_remove(gpushare_switcher switcher, uint64_t member) {
  return capi::with(switcher, [&](loader::Switcher& of) { return of.remove(member); });
}

int32_t gpushare_switcher_begin(gpushare_switcher switcher, uint64_t member, uint64_t timeout_ns,
                                gpushare_iteration* out_iteration, gpushare_model* out_model,
                                uint32_t* out_loaded) {
  return capi::with(switcher, [&](loader::Switcher& of) -> base::Status {
    if (out_iteration == nullptr) return capi::null_argument("out_iteration");
    GPUSHARE_ASSIGN_OR_RETURN(const loader::Switcher::Turn turn, of.begin(member, timeout_ns));
    // From here on the iteration must not stay open without a handle.
    base::Status status(GPUSHARE_HOST_OUT_OF_MEMORY, "no host memory for the iteration's handles");
    try {
      status = publish_turn(turn, out_iteration, out_model);
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): status says it
    }
    if (!status.ok()) {
      (void)turn.iteration->end();
      return status;
    }
    if (out_loaded != nullptr) *out_loaded = turn.loaded ? 1 : 0;
    return {};
  });
}

int32_t gpushare_switcher_get_member(gpushare_switcher switcher, uint64_t member,
                                     gpushare_member_info* out_info) {
  return capi::with(switcher, [&](loader::Switcher& of) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const loader::MemberInfo info, of.info(member));
    gpushare_member_info out = GPUSHARE_MEMBER_INFO_INIT;
    out.state = static_cast<uint32_t>(info.state);
    out.device_bytes = info.device_bytes;
    out.loads = info.loads;
    out.iterations = info.iterations;
    out.drops = info.drops;
    out.standby_bytes = info.standby_bytes;
    return capi::write_struct("out_info", out, out_info);
  });
}

int32_t gpushare_switcher_get_info(gpushare_switcher switcher, gpushare_switcher_info* out_info) {
  return capi::with(switcher, [&](loader::Switcher& of) -> base::Status {
    const loader::SwitcherInfo info = of.info();
    gpushare_switcher_info out = GPUSHARE_SWITCHER_INFO_INIT;
    out.active = info.active;
    out.members = info.members;
    out.kept = info.kept;
    out.switches = info.switches;
    out.waiting = info.waiting;
    out.switch_ns = info.switch_ns;
    out.standby_bytes = info.standby_bytes;
    return capi::write_struct("out_info", out, out_info);
  });
}

}  // extern "C"
