// A runtime opens, opens sessions and closes. The questions about all of it are in runtime_report.cpp.
// SPDX-License-Identifier: Apache-2.0
#include "executor/runtime.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <system_error>

#include <absl/cleanup/cleanup.h>

#include "base/cancel.hpp"
#include "base/fork.hpp"
#include "base/host_memory.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "client/remote_authority.hpp"
#include "executor/interference_file.hpp"
#include "executor/internal.hpp"
#include "sched/scheduler.hpp"

namespace gpushare::executor {
namespace {

uint64_t quarter_of_host_memory() {
  const uint64_t bytes = base::host_memory().total_bytes;
  return bytes == UINT64_MAX ? bytes : bytes / 4;
}

}  // namespace

base::Result<std::shared_ptr<Runtime>> Runtime::open(RuntimeOptions options) {
  auto runtime = std::make_shared<RuntimeImpl>();
  GPUSHARE_RETURN_IF_ERROR(runtime->open(std::move(options)));
  // Sessions and streams keep the RuntimeImpl; the last pointer handed out here closes it.
  RuntimeImpl* raw = runtime.get();
  return std::shared_ptr<Runtime>(raw, [runtime = std::move(runtime)](Runtime*) mutable {
    if (runtime->inherited()) {
      // This process was forked from the runtime's: its threads and its device are not here, so it is left alone.
      new std::shared_ptr<RuntimeImpl>(std::move(runtime));
      return;
    }
    runtime->drop();
    runtime.reset();
  });
}

void RuntimeImpl::drop() {
  if (!NoWaitScope::active() && !CallbackScope::active()) {
    // The thread's open iterations end first. Otherwise close() would refuse, and nobody could close the runtime and
    // its threads later.
    for (const Binding* binding = thread_bindings(); binding != nullptr;) {
      const std::shared_ptr<SessionImpl> session = binding->session;
      const bool ours = session->runtime_.get() == this && IterationImpl::is_open(*binding);
      // An ended iteration leaves the list, so the search starts again.
      binding = ours && session->iteration_.end().code() != GPUSHARE_INVALID_STATE ? thread_bindings()
                                                                                   : binding->outer;
    }
  }
  const base::Status status = close();
  BooksLock lock(mutex_);
  if (!status.ok() && (status.code() != GPUSHARE_INVALID_STATE || !closing_))
    base::log(base::kWarning, status.with_context("closing a runtime").to_string());
}

RuntimeImpl::~RuntimeImpl() = default;

// Memory, and what the options say of the runtime.
base::Status RuntimeImpl::open_memory(RuntimeOptions& options) {
  memory::DeviceMemoryOptions memory_options;
  memory_options.capacity_bytes = options.capacity_bytes;
  memory_options.layout = options.layout;
  memory_options.granularity_bytes = options.granularity_bytes;
  memory_options.record_allocations = options.record_allocations;
  memory_options.owner = static_cast<const Runtime*>(this);
  memory_options.spill_limit_bytes =
      options.spill_limit_bytes > 0 ? options.spill_limit_bytes : quarter_of_host_memory();
  if (options.spill_move_bytes > 0) move_budget_.bytes = options.spill_move_bytes;
  if (options.spill_move_ns > 0) move_budget_.ns = options.spill_move_ns;
  if (options.spill_move_loss > 0) spill_move_loss_ = options.spill_move_loss;
  GPUSHARE_ASSIGN_OR_RETURN(memory_, memory::DeviceMemory::open(*device_, memory_options));
  virtual_time_ = device_->can(GPUSHARE_DEVICE_CAP_VIRTUAL_TIME);
  record_timeline_ = options.record_timeline;
  record_allocations_ = options.record_allocations;
  interference_file_ = options.interference_file;
  if (options.enqueue_depth > 0) depth_ = options.enqueue_depth;
  on_progress_ = std::move(options.on_progress);
  return {};
}

base::Result<sched::SchedulerOptions> RuntimeImpl::scheduling(const RuntimeOptions& options) {
  sched::SchedulerOptions scheduling;
  scheduling.capacity_bytes = memory_->capacity_bytes();
  persistent_steps_ = memory_->persistent_steps();
  scheduling.granularity_bytes = granularity_bytes_ = memory_->granularity_bytes();
  scheduling.small_granularity_bytes = persistent_steps_.small;
  scheduling.max_lanes = options.max_lanes > 0 ? options.max_lanes : kMaxLanes;
  scheduling.paging = memory_->can_page();
  scheduling.confirms_lanes = true;
  scheduling.lane_finder = options.lane_finder;
  scheduling.keeps_lag_ns = sched::kKeepsLagNs;
  scheduling.measures = true;
  if (device_->can(GPUSHARE_DEVICE_CAP_PARTITIONS)) {
    GPUSHARE_ASSIGN_OR_RETURN(const gpushare_backend_partition_info partitions, device_->partition_info());
    scheduling.compute_units = partitionable_units_ = partitions.partitionable_units;
    scheduling.granularity_compute_units = granularity_units_ = partitions.granularity_units;
  }
  return scheduling;
}

base::Status RuntimeImpl::make_authority(RuntimeOptions& options,
                                         std::unique_ptr<client::RemoteAuthority> remote) {
  GPUSHARE_ASSIGN_OR_RETURN(const sched::SchedulerOptions scheduling, this->scheduling(options));
  if (shared_ && virtual_time_)
    return {GPUSHARE_UNSUPPORTED, "the daemon serves device " + options.device +
                                      ", whose time is virtual: processes cannot share it"};
  std::unique_ptr<sched::Authority> authority;
  if (remote != nullptr) {
    remote->set_granularity(persistent_steps_);
    const auto context_bytes = device_->context_bytes();
    if (context_bytes.ok()) GPUSHARE_RETURN_IF_ERROR(remote->claim_context(*context_bytes));
    remote->set_unlocked([this](const std::function<void()>& wait) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
      const Unlocked unlocked(mutex_);
      wait();
    });
    authority = std::move(remote);
  } else {
    authority = std::make_unique<sched::Scheduler>(scheduling, std::move(options.policy));
    if (!options.interference_file.empty())
      GPUSHARE_RETURN_IF_ERROR(read_interference(options.interference_file, *authority->measure()));
  }
  {
    BooksLock lock(mutex_);
    authority_ = std::move(authority);
  }
  return {};
}

base::Status RuntimeImpl::open(RuntimeOptions options) {
  if (!watch_forks()) return base::no_memory();
  fork_depth_ = base::fork_depth();
  if (options.max_lanes > kMaxLanes)
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("max_lanes is %u; at most %u are allowed", options.max_lanes, kMaxLanes)};
  if (options.enqueue_depth > kMaxDepth)
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("enqueue_depth is %u; at most %u is allowed", options.enqueue_depth, kMaxDepth)};
  if (options.device == "auto")
    if (const char* named = std::getenv("GPUSHARE_DEVICE"); named != nullptr && *named != '\0')
      options.device = named;
  std::unique_ptr<client::RemoteAuthority> remote;
  if (options.device == kSharedDevice || options.device.rfind(std::string(kSharedDevice) + ":", 0) == 0) {
    GPUSHARE_ASSIGN_OR_RETURN(const EnvironmentLimits limits, EnvironmentLimits::read());
    sessions_.set_limits(limits);
    GPUSHARE_ASSIGN_OR_RETURN(remote, open_shared(&options, limits));
    if (!options.interference_file.empty())
      return {GPUSHARE_UNSUPPORTED,
              "interference_file: on a shared device the daemon measures how sessions slow each other"};
    shared_ = true;
    socket_ = client::default_socket();
    shared_device_ = remote->device();
    ladder_.set_gives_back(true);
    images_ = remote->images();
  } else if (options.policy == nullptr) {
    GPUSHARE_ASSIGN_OR_RETURN(options.policy, sched::make_policy("fair"));
  }
  GPUSHARE_ASSIGN_OR_RETURN(device_, device::Device::open(options.device));
  GPUSHARE_RETURN_IF_ERROR(open_memory(options));
  GPUSHARE_RETURN_IF_ERROR(make_authority(options, std::move(remote)));
  memory_gate_.open();
  sched::Authority* tells = nullptr;  // it calls this runtime from its thread
  absl::Cleanup failed = [&] {
    if (tells != nullptr) tells->stop();
  };
  try {
    {
      BooksLock lock(mutex_);
      tells = authority_.get();
      authority_->set_on_change([this] { authority_changed(); });
    }
    actions_.start();
    std::move(failed).Cancel();
  } catch (const std::system_error& error) {
    return {GPUSHARE_HOST_OUT_OF_MEMORY, std::string("cannot start the runtime's thread: ") + error.what(),
            error.code().value()};
  }
  return {};
}

namespace {

// Under the preload library of `gpushare exec` and of Kubernetes claims the process would be two sessions, which wait
// for each other's turns: its own, and one that counts each call of the driver.
base::Status put_preload_aside(const std::string& device) {
  if (!device.starts_with("cuda")) return {};
  const auto stand_aside = reinterpret_cast<int (*)()>(::dlsym(RTLD_DEFAULT, "gpushare_shim_stand_aside"));
  if (stand_aside == nullptr || stand_aside() != 0) return {};
  return {
      GPUSHARE_INVALID_STATE,
      "the preload library holds this process already: open the runtime on the shared device before anything "
      "else in the process makes a CUDA context"};
}

}  // namespace

// The device, its memory and its policy are the daemon's choice.
base::Result<std::unique_ptr<client::RemoteAuthority>> RuntimeImpl::open_shared(
    RuntimeOptions* options, const EnvironmentLimits& limits) {
  client::RemoteOptions remote;
  remote.socket = client::default_socket();
  remote.group = limits.group;
  remote.group_memory_bytes = limits.memory_bytes;
  remote.group_weight = limits.weight;
  remote.cap = limits.cap;
  remote.private_lanes = limits.private_lanes;
  if (options->device.size() > kSharedDevice.size())
    remote.device = options->device.substr(kSharedDevice.size() + 1);
  if (options->layout == memory::Layout::kContiguous)
    return base::Status(
        GPUSHARE_UNSUPPORTED,
        "a shared device needs the virtual layout, which gives memory back to other processes: "
        "leave layout 0");
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<client::RemoteAuthority> authority,
                            client::RemoteAuthority::open(std::move(remote)));
  GPUSHARE_RETURN_IF_ERROR(put_preload_aside(authority->device()));
  options->device = authority->device();
  options->layout = memory::Layout::kVirtual;
  options->capacity_bytes = authority->capacity_bytes();
  options->max_lanes = 0;
  options->policy.reset();
  return authority;
}

void RuntimeImpl::authority_changed() {
  Outbox outbox(*this);
  Section lock(*this);
  if (closed_ || collapsed_ || authority_ == nullptr) return;
  carry_out(nullptr, outbox);
  ranges_.told();
  if (authority_->standing().ok() && !ladder_.anybody_waits()) return;
  for (const auto& [id, session] : sessions_) {
    tell_turn(*session);
    session->state_changed_.notify_all();
  }
}

base::Status RuntimeImpl::check_open() const {
  if (closing_) return {GPUSHARE_INVALID_STATE, "the runtime is closed"};
  if (!lost_.ok() || authority_ == nullptr) return lost_;
  return authority_->standing();
}

base::Status RuntimeImpl::check_close() const {
  if (NoWaitScope::active() || CallbackScope::active())
    return {GPUSHARE_INVALID_STATE, "a runtime cannot be closed from inside a callback"};
  for (const Binding* binding = thread_bindings(); binding != nullptr; binding = binding->outer)
    if (binding->session->runtime_.get() == this && IterationImpl::is_open(*binding))
      return {GPUSHARE_INVALID_STATE, "the runtime cannot be closed inside the iteration that session '" +
                                          binding->session->name() +
                                          "' has open on this thread: end it first"};
  return {};
}

// Ends all sessions and waits until nothing of them, and nobody inside, is left.
void RuntimeImpl::end_all(Outbox& outbox) {
  for (const auto& session : sessions_.all()) {
    session->closed_ = true;
    end_session(*session, SessionState::kCancelled, {GPUSHARE_CANCELLED, "the runtime was closed"}, outbox);
  }
  carry_out(nullptr, outbox);
  while (!sessions_.empty() && !collapsed_) {
    LaneSlot* busy = nullptr;
    for (LaneSlot* lane : lanes_.opened())
      if (lane->in_flight > 0 && !lane->reaping) busy = lane;
    if (!actions_.acting() && actions_.pending())
      actions_.run(true, outbox);
    else if (busy != nullptr)
      reaper_.reap(*busy, outbox);
    else
      reaper_.wait(actions_.changed(), base::Deadline::after(GPUSHARE_NO_TIMEOUT), outbox);
  }
  actions_.run(true, outbox);
  const auto open = [](const auto& entry) GPUSHARE_REQUIRES(books) { return entry.second->open_; };
  while (collapsed_ && (actions_.acting() || std::any_of(sessions_.begin(), sessions_.end(), open)))
    mutex_.wait(actions_.changed());
  while (has_users()) reaper_.wait(actions_.changed(), base::Deadline::after(GPUSHARE_NO_TIMEOUT), outbox);
  stop_threads_ = true;
  actions_.stop();
  for (const auto& slot : lanes_.all()) {
    if (slot == nullptr) continue;
    slot->worker_wakes.notify_all();
    slot->reaper_wakes.notify_all();
  }
}

// The lanes' threads, streams and partitions, side streams, and memory. Nobody uses them any more.
void RuntimeImpl::give_back(std::vector<std::unique_ptr<LaneSlot>> slots) {
  for (const auto& slot : slots) {
    if (slot == nullptr) continue;
    if (slot->worker.joinable()) slot->worker.join();
    if (slot->reaper.joinable()) slot->reaper.join();
  }
  const std::vector<std::weak_ptr<StreamImpl>> side_streams = side_streams_.take_all();
  if (collapsed_) close_collapsed(slots, side_streams);
  for (const auto& slot : slots) {
    if (slot == nullptr) continue;
    if (slot->stream != nullptr) slot->stream->shut();
    if (slot->partition != nullptr) {
      const base::Status status = device_->destroy_partition(slot->partition);
      if (!status.ok()) base::log(base::kError, status.to_string());
    }
  }
  for (const auto& weak : side_streams)
    if (const auto stream = weak.lock(); stream != nullptr && stream->claim_shut()) stream->shut();
  side_streams_.wait_until_none();  // those that others release now
  memory_.reset();
}

base::Status RuntimeImpl::close() {
  const base::CancellableWaits never(false);
  GPUSHARE_RETURN_IF_ERROR(check_close());
  {
    Outbox outbox(*this);
    Section lock(*this);
    if (closing_) return {GPUSHARE_INVALID_STATE, "the runtime is closed already"};
    closing_ = true;
    end_all(outbox);
  }
  actions_.join();
  sched::Authority* told = nullptr;
  {
    BooksLock lock(mutex_);
    told = authority_.get();  // kept until the end of this function
  }
  told->stop();
  dependents_.close();
  memory_gate_.close();
  std::vector<std::unique_ptr<LaneSlot>> slots;
  std::unique_ptr<sched::Authority> authority;
  std::string interference;
  {
    BooksLock lock(mutex_);
    if (!interference_file_.empty() && !collapsed_) {
      try {
        interference = authority_->measured()->text(unix_seconds());
      } catch (const std::bad_alloc&) {
        base::log(base::kWarning, interference_file_ + " is not written: there is no host memory");
      }
    }
    slots = lanes_.take_all();
    authority.swap(authority_);
    closed_ = true;
  }
  dependents_.closed();
  give_back(std::move(slots));
  actions_.release_device();
  const base::Status status = device_->close();
  // The daemon counts the context for as long as the process lives, unless it hears that the context has gone.
  if (shared_)
    if (const auto left = device_->context_bytes(); left.ok()) authority->set_context_bytes(*left, 0);
  authority.reset();  // and with it the policy
  if (interference.empty()) return status;
  const base::Status written = write_interference(interference_file_, interference);
  return status.ok() ? written : status;
}

bool RuntimeImpl::has_users() const {
  if (staying_ > 0 || reaper_.anybody_synchronizes()) return true;
  for (const auto& slot : lanes_.all())
    if (slot != nullptr && slot->reaping) return true;
  return false;
}

base::Result<std::shared_ptr<Session>> RuntimeImpl::open_session(const SessionOptions& options) {
  const Stay stay(*this);  // the daemon's answer is waited for without the lock
  if (!stay) return base::Status(GPUSHARE_INVALID_STATE, "the runtime is closed");
  // Inside a callback nobody can wait until others have gone.
  const bool may_wait = options.may_claim && !NoWaitScope::active() && !CallbackScope::active();
  for (;;) {
    base::Result<std::shared_ptr<Session>> session = place_session(options, may_wait);
    if (session.status().code() != GPUSHARE_DEVICE_OUT_OF_MEMORY || !may_wait ||
        !drop_to_join(options.persistent_bytes + options.ephemeral_bytes))
      return session;
  }
}

bool RuntimeImpl::wait_for_drops(Outbox& outbox) {
  actions_.collect();
  if (authority_->dropping().empty()) return false;
  for (;;) {
    actions_.run(false, outbox);
    if (collapsed_ || closing_ || authority_ == nullptr) return false;
    const std::vector<sched::SessionId> dropping = authority_->dropping();
    const auto busy = std::find_if(dropping.begin(), dropping.end(),
                                   [&](sched::SessionId id)
                                       GPUSHARE_REQUIRES(books) { return sessions_.find(id) != nullptr; });
    if (busy == dropping.end()) return true;
    const std::shared_ptr<SessionImpl> session = sessions_.find(*busy)->shared_from_this();
    reaper_.wait(session->state_changed_, base::Deadline::after(GPUSHARE_NO_TIMEOUT), outbox);
  }
}

bool RuntimeImpl::drop_to_join(uint64_t bytes) {
  Outbox outbox(*this);
  Section lock(*this);
  if (!check_open().ok() || memory_->layout() == memory::Layout::kVirtual) return false;
  if (free_bytes() < bytes) return false;  // bytes are missing, not only joined pieces
  const bool any = authority_->make_room(
      sched::kNoSession, {sched::Giver::kSpare, std::max<uint64_t>(bytes, 1), UINT64_MAX}, now());
  if (any) (void)wait_for_drops(outbox);
  if (any && authority_ != nullptr) authority_->room_used(sched::kNoSession, now());
  carry_out(nullptr, outbox);
  return any;
}

base::Status RuntimeImpl::check_options(const SessionOptions& options) const {
  if (!std::isfinite(options.weight) || options.weight <= 0)
    return {GPUSHARE_INVALID_ARGUMENT, base::format("weight %g must be finite and above 0", options.weight)};
  if (options.quota_bytes > 0 && (options.persistent_bytes > options.quota_bytes ||
                                  options.ephemeral_bytes > options.quota_bytes - options.persistent_bytes))
    return {GPUSHARE_INVALID_ARGUMENT,
            "session '" + options.name +
                "': persistent_bytes and ephemeral_bytes together are above quota_bytes, " +
                base::format_bytes(options.quota_bytes)};
  if (options.compute_units > 0 && partitionable_units_ == 0)
    return {GPUSHARE_UNSUPPORTED, "session '" + options.name +
                                      "' asks for compute units of its own, which device " + device_->spec() +
                                      " cannot give (capability PARTITIONS): leave compute_units 0"};
  return {};
}

sched::SessionSpec RuntimeImpl::spec_of(const SessionOptions& options, const SessionOptions& complete,
                                        uint64_t id, bool may_wait) const {
  sched::SessionSpec spec;
  spec.id = id;
  spec.name = complete.name;
  spec.named = !options.name.empty();
  spec.cls = options.cls;
  spec.priority = options.priority;
  spec.weight = sessions_.weight_of_newcomer(options.weight);
  spec.persistent_bytes = options.persistent_bytes;
  spec.ephemeral_bytes = options.ephemeral_bytes;
  spec.remaining_ns = options.remaining_ns > 0 ? options.remaining_ns : sched::kUnknown;
  spec.iterations_total = options.iterations_total;
  spec.quota_bytes = complete.quota_bytes;
  spec.compute_units = options.compute_units;
  spec.may_queue = options.allow_queueing;
  spec.may_page = options.may_page;
  // Only what may lie in host memory can be left out.
  spec.least_bytes = options.allow_spill && memory_->has_host_tier() ? options.least_bytes : 0;
  spec.may_upgrade = options.may_upgrade;
  spec.may_claim = options.may_claim && (may_wait || options.allow_queueing);
  return spec;
}

// Asks the scheduler for the session's place, and enters the session where it has one.
base::Status RuntimeImpl::arrive(const std::shared_ptr<SessionImpl>& session, const sched::SessionSpec& spec,
                                 uint64_t time, bool may_wait, Outbox& outbox) {
  // On a shared device the lock is let go for the daemon's answer, and the session may be admitted before arrive() returns.
  if (shared_) sessions_.add(session);
  base::Status arrived = authority_->arrive(spec, time);
  // The session was refused, but spare sessions are on their way out for it.
  while (arrived.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY && may_wait && wait_for_drops(outbox)) {
    arrived = check_open();
    if (arrived.ok()) arrived = authority_->arrive(spec, now());
  }
  if (collapsed_) return arrived;
  if (!shared_ && arrived.ok()) sessions_.add(session);
  if (shared_ && session->torn_down_)
    authority_->leave(spec.id, now());  // it was closed with its runtime meanwhile
  else if (shared_ && arrived.ok())
    sessions_.divide_weight();
  else if (shared_)
    sessions_.erase(*session);
  return arrived;
}

base::Result<std::shared_ptr<Session>> RuntimeImpl::place_session(const SessionOptions& options,
                                                                  bool may_wait) {
  SessionOptions complete = options;
  GPUSHARE_RETURN_IF_ERROR(check_options(options));
  // Code and other libraries' memory have come since the last session. The driver may take its time, so no lock is held.
  const base::Result<uint64_t> context_bytes = shared_ ? device_->context_bytes() : base::Result<uint64_t>(0);
  Outbox outbox(*this);
  Section lock(*this);
  GPUSHARE_RETURN_IF_ERROR(check_open());
  if (shared_ && context_bytes.ok()) authority_->set_context_bytes(*context_bytes, now());
  const uint64_t id = sessions_.next_id();
  if (complete.name.empty())
    complete.name = base::format("session-%llu", static_cast<unsigned long long>(id));
  GPUSHARE_RETURN_IF_ERROR(sessions_.limit_memory(complete));
  const sched::SessionSpec spec = spec_of(options, complete, id, may_wait);
  const uint64_t time = now();
  auto session = std::make_shared<SessionImpl>(shared_from_this(), id, std::move(complete));
  session->arrived_ns_ = time;
  session->persistent_promise_ = options.persistent_bytes;
  session->ephemeral_promise_ = options.ephemeral_bytes;
  // An undeclared need is not claimed from the start: the session would keep all others out until its first
  // iteration came.
  session->profile_left_ = options.ephemeral_bytes == 0 ? kProfileIterations : 0;
  base::Status arrived = arrive(session, spec, time, may_wait, outbox);
  if (collapsed_) return lost_;
  GPUSHARE_RETURN_IF_ERROR(std::move(arrived));
  if (record_timeline_) timeline_.name_session(id, session->name());
  carry_out(nullptr, outbox);
  actions_.run(false, outbox);
  if (collapsed_) return lost_;
  if (session->ended_) {
    // The session could not be placed, or the device was lost meanwhile.
    base::Status why = session->end_state_ == SessionState::kFailed ? session->end_status_ : check_open();
    if (why.ok()) why = {GPUSHARE_CANCELLED, "the runtime was closed"};
    session->closed_ = true;
    return why;
  }
  return std::shared_ptr<Session>(std::move(session));
}

void RuntimeImpl::set_link(double ns_per_byte) {
  BooksLock lock(mutex_);
  if (check_open().ok()) authority_->set_link(ns_per_byte);
}

base::Status RuntimeImpl::set_policy(std::unique_ptr<sched::Policy> policy) {
  if (policy == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "the policy is null"};
  if (shared_)
    return {GPUSHARE_UNSUPPORTED,
            "the policy of a shared device is its operator's choice (gpushare daemon --policy)"};
  Outbox outbox(*this);
  Section lock(*this);
  if (closing_) return {GPUSHARE_INVALID_STATE, "the runtime is closed"};
  if (collapsed_) return lost_;
  authority_->set_policy(std::move(policy), now());
  carry_out(nullptr, outbox);
  return {};
}

base::Status RuntimeImpl::synchronize(uint64_t timeout_ns) {
  return reaper_.synchronize(base::Deadline::after(timeout_ns), timeout_ns == 0);
}

base::Status RuntimeImpl::drain(uint64_t timeout_ns) {
  const base::Deadline deadline = base::Deadline::after(timeout_ns);
  std::vector<std::shared_ptr<TicketImpl>> last;  // of each session
  {
    Section lock(*this);
    GPUSHARE_RETURN_IF_ERROR(check_open());
    for (const auto& [id, session] : sessions_)
      if (auto ticket = session->last_submitted_.lock(); ticket != nullptr) last.push_back(std::move(ticket));
  }
  for (const std::shared_ptr<TicketImpl>& ticket : last) {
    base::Status status = ticket->wait_until(deadline, timeout_ns == 0);
    if (!ticket->done_.load(std::memory_order_acquire)) return status;
  }
  return reaper_.synchronize(deadline, timeout_ns == 0);
}

base::Status RuntimeImpl::set_out_of_memory_function(OutOfMemoryFunction function) {
  {
    BooksLock lock(mutex_);
    if (closing_) return {GPUSHARE_INVALID_STATE, "the runtime is closed"};
  }
  ladder_.set_function(std::move(function));
  return {};
}

base::Result<std::shared_ptr<Stream>> RuntimeImpl::create_stream(int32_t priority) {
  {
    BooksLock lock(mutex_);
    GPUSHARE_RETURN_IF_ERROR(check_open());
  }
  const GatePass pass(memory_gate_.mine());  // keeps the device open
  if (!pass) return base::Status(GPUSHARE_INVALID_STATE, "the runtime is closed");
  const auto& range = device_->info();
  auto made = device_->create_stream(std::clamp(priority, range.priority_highest, range.priority_lowest));
  if (!made.ok()) {
    note(made.status());
    return made.status();
  }
  auto stream = std::make_shared<StreamImpl>(shared_from_this(), std::move(*made), nullptr);
  side_streams_.add(stream);
  return std::shared_ptr<Stream>(std::move(stream));
}

base::Status RuntimeImpl::attach(std::weak_ptr<Dependent> dependent) {
  {
    BooksLock lock(mutex_);
    GPUSHARE_RETURN_IF_ERROR(check_open());
  }
  return dependents_.attach(std::move(dependent), shared_from_this());
}

void RuntimeImpl::destroy_later(std::unique_ptr<Dependent> dependent) noexcept {
  if (!dependents_.let_go(dependent)) return;  // destroyed here
  BooksLock lock(mutex_);  // after this a service thread that has just looked is asleep, and hears the notice
  actions_.wake();
}

}  // namespace gpushare::executor
