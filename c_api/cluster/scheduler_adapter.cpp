// SPDX-License-Identifier: Apache-2.0
#include "c_api/cluster/scheduler_adapter.hpp"

#include <algorithm>
#include <exception>
#include <type_traits>
#include <vector>

#include "c_api/cluster/guard.hpp"

using namespace gpushare;
using namespace gpushare::capi_cluster;
using cluster::Action;

struct gpushare_cluster_actions {
  std::vector<Action>* list = nullptr;  // null outside of ticks
  size_t most_devices = 0;              // of a job: the widest gang
};

namespace gpushare::capi_cluster {
namespace {

// Each thread has one object. It outlives the tick, so that a scheduler which keeps the pointer gets an error.
thread_local gpushare_cluster_actions t_actions;

class Adapter final : public cluster::Scheduler {
 public:
  explicit Adapter(const gpushare_cluster_scheduler_ops* ops) : ops_(*ops) {
    if (ops_.begin != nullptr) ask("begin", ops_.begin);
  }
  void device_changed(cluster::DeviceIndex device, const cluster::DeviceInfo& info, bool up,
                      double now_s) override {
    ask("device_changed", ops_.device_changed, device, info.memory_bytes, info.speed, up ? 1 : 0, now_s);
  }
  void arrived(cluster::JobId job, const cluster::JobInfo& info, double now_s) override {
    const gpushare_cluster_job_info out = {
        sizeof(out),    info.gang,           info.name.c_str(),   info.config.c_str(),
        info.arrival_s, info.work_s,         info.memory_bytes,   info.guaranteed ? 1 : 0,
        info.priority,  info.demands.data(), info.demands.size(), info.weight};
    widest_ = std::max<size_t>(widest_, info.gang);
    ask("arrived", ops_.arrived, job, &out, now_s);
  }
  void observed(cluster::JobId job, double attained_s, double remaining_s, double slowdown,
                double now_s) override {
    if (ops_.observed != nullptr)
      ask("observed", ops_.observed, job, attained_s, remaining_s, slowdown, now_s);
  }
  void finished(cluster::JobId job, double now_s) override { ask("finished", ops_.finished, job, now_s); }
  double tick(double now_s, std::vector<Action>& actions) override {
    // A tick may run another simulation on this thread.
    struct Restore {
      ~Restore() { t_actions = before; }
      const gpushare_cluster_actions before = t_actions;
    } restore;
    t_actions = {&actions, widest_};
    const double next = ask("tick", ops_.tick, now_s, &t_actions);
    return next >= 0 ? next : cluster::kNever;  // also for what is no number
  }

 private:
  template <class Function, class... Arguments>
  GPUSHARE_CATCHES_FORCED_UNWIND std::invoke_result_t<Function, void*, Arguments...> ask(
      const char* which, Function function, Arguments... arguments) const {
    const auto threw = [&](const char* what) {
      return CallbackThrew(base::format("scheduler '%s': %s threw: %s", ops_.name, which, what));
    };
    try {
      return function(ops_.context, arguments...);
    } catch (const base::ForcedUnwind&) {
      throw;
    } catch (const std::exception& error) {
      throw threw(error.what());
    } catch (...) {
      throw threw("no std::exception");
    }
  }

  const gpushare_cluster_scheduler_ops ops_;
  size_t widest_ = 0;
};

}  // namespace

base::Status check_scheduler(const gpushare_cluster_scheduler_ops* ops) {
  const auto refused = [](const std::string& why) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "scheduler: " + why);
  };
  if (ops == nullptr) return refused("the table is null");
  if (ops->struct_size < GPUSHARE_CLUSTER_SCHEDULER_OPS_V1_SIZE || ops->struct_size > kMaxStructSize)
    return refused(base::format("struct_size %u is not allowed; %zu to %u are", ops->struct_size,
                                static_cast<size_t>(GPUSHARE_CLUSTER_SCHEDULER_OPS_V1_SIZE), kMaxStructSize));
  if (ops->abi_version != GPUSHARE_CLUSTER_SCHEDULER_ABI_VERSION)
    return refused(base::format("abi_version %u is not allowed; this library has %u", ops->abi_version,
                                GPUSHARE_CLUSTER_SCHEDULER_ABI_VERSION));
  if (ops->name == nullptr || *ops->name == '\0') return refused("it has no name");
  for (const char* at = ops->name; *at != '\0'; ++at)
    if (*at == ',') return refused("a name has no comma");
  const struct {
    const char* name;
    bool there;
  } functions[] = {{"device_changed", ops->device_changed != nullptr},
                   {"arrived", ops->arrived != nullptr},
                   {"finished", ops->finished != nullptr},
                   {"tick", ops->tick != nullptr}};
  for (const auto& function : functions)
    if (!function.there) return refused(base::format("'%s' lacks %s", ops->name, function.name));
  return {};
}

std::unique_ptr<cluster::Scheduler> adapt_scheduler(const gpushare_cluster_scheduler_ops* ops) {
  return std::make_unique<Adapter>(ops);
}

}  // namespace gpushare::capi_cluster

namespace {

// `fill` makes the action complete, or says why there is none.
template <class Fill>
int32_t append(gpushare_cluster_actions* actions, Action::Kind kind, uint32_t job, Fill fill) {
  return guard([&]() -> base::Status {
    if (actions == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "actions is null"};
    if (actions->list == nullptr)
      return {GPUSHARE_INVALID_ARGUMENT, "actions are valid during their tick only"};
    Action action;
    action.kind = kind;
    action.job = job;
    GPUSHARE_RETURN_IF_ERROR(fill(action));
    actions->list->push_back(std::move(action));
    return {};
  });
}

}  // namespace

extern "C" {

int32_t gpushare_cluster_actions_place(gpushare_cluster_actions* actions, uint32_t job,
                                       const uint32_t* devices, uint32_t device_count,
                                       int32_t opportunistic) {
  return append(actions, Action::Kind::kPlace, job, [&](Action& action) -> base::Status {
    if (devices == nullptr && device_count > 0) return {GPUSHARE_INVALID_ARGUMENT, "devices is null"};
    if (device_count > actions->most_devices)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("device_count %u is not allowed: the widest job has %zu", device_count,
                           actions->most_devices)};
    action.devices.assign(devices, devices + device_count);
    action.opportunistic = opportunistic != 0;
    return {};
  });
}

int32_t gpushare_cluster_actions_pause(gpushare_cluster_actions* actions, uint32_t job) {
  return append(actions, Action::Kind::kPause, job, [](Action&) { return base::Status(); });
}

int32_t gpushare_cluster_actions_resize(gpushare_cluster_actions* actions, uint32_t job,
                                        int32_t opportunistic) {
  return append(actions, Action::Kind::kResize, job, [&](Action& action) {
    action.opportunistic = opportunistic != 0;
    return base::Status();
  });
}

int32_t gpushare_cluster_actions_reject(gpushare_cluster_actions* actions, uint32_t job, const char* reason) {
  return append(actions, Action::Kind::kReject, job, [&](Action& action) {
    if (reason != nullptr) action.reason = reason;
    return base::Status();
  });
}

}  // extern "C"
