// executor: drives one device: sessions, lanes, iterations by pull and by push. It joins decisions
// (sched::Scheduler), bytes (memory::DeviceMemory) and a device (device::Device), and owns all threads except
// memory's solver of placement plans. Calls base, sched, memory, client and device; called by loader and c_api.
// runtime.hpp is the whole interface; the other files of the folder implement it (docs/design/executor.md).
//
// Objects are shared: a holder of a pointer may call the object at any time. After the object was closed, calls
// return INVALID_STATE. All methods may be called from any thread unless they say otherwise. A method blocks
// only if its comment says so. No lock is held while a caller's function runs, except for policies.
//
// Waiting. timeout_ns is host time; GPUSHARE_NO_TIMEOUT waits for ever. On a device with virtual time only a thread
// that waits for the device moves the clock, so a completion is noticed when a thread waits or asks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/figures.hpp"
#include "base/status.hpp"
#include "device/device.hpp"
#include "executor/gate.hpp"
#include "memory/device_memory.hpp"
#include "sched/coordinator.hpp"
#include "sched/measured_interference.hpp"
#include "sched/policy.hpp"

namespace gpushare::executor {

class Iteration;
class LaunchGate;
class Range;
struct RangeOptions;
class Runtime;
class Session;
class SharedImage;
class Stream;
class Ticket;

inline constexpr uint32_t kMaxLanes = 64;
// Name of the device that the daemon shares out; "shared:NAME" asks for one of several. Where "auto" is asked for, the
// environment variable GPUSHARE_DEVICE names the device.
inline constexpr std::string_view kSharedDevice = "shared";
inline constexpr uint32_t kMaxDepth = 64;
inline constexpr uint32_t kMaxQueuedIterations = 65536;  // of one session

// What a progress function is told after an iteration has finished on the device.
struct Progress {
  uint32_t lane = 0;
  uint64_t session_id = 0;
  const char* session_name = "";  // valid during the call
  uint64_t iterations_done = 0;   // of this session
  uint64_t service_ns = 0;        // of this session
  uint64_t device_ns = 0;         // of this iteration
};
// Called on the thread that noticed the end: the thread that ends an iteration, a waiting thread, or a thread of the
// runtime. It may call the runtime but must not wait: calls that would block there return INVALID_STATE. An exception
// is logged and dropped. A thread never calls the function inside itself. Several threads may call it at once, so two
// iterations of a session may be reported in either order.
using ProgressFunction = std::function<void(const Progress&)>;

// Called on the allocating thread when an allocation of `bytes` for `session_id` is about to fail. It returns
// true if it has freed something and the allocation should be tried again. An exception counts as false.
using OutOfMemoryFunction = std::function<bool(uint64_t session_id, uint64_t bytes)>;

inline constexpr double kSpillMoveLoss = 0.004;

struct RuntimeOptions {
  std::string device = "auto";  // as device::Device::open
  memory::Layout layout = memory::Layout::kAuto;
  uint64_t capacity_bytes = 0;            // 0 = nearly all that is free
  uint64_t granularity_bytes = 0;         // as memory::DeviceMemoryOptions
  std::unique_ptr<sched::Policy> policy;  // null = "fair"
  uint32_t max_lanes = 0;                 // 0 = as the policy says, at most kMaxLanes
  uint32_t enqueue_depth = 0;      // iterations of a lane in flight on the device, up to kMaxDepth; 0 = 2
  uint64_t spill_limit_bytes = 0;  // host memory for spilled blocks; 0 = a quarter of what the host has
  uint64_t spill_move_bytes = 0;   // the most that one boundary moves, home or out; 0 = as base::MoveBudget
  uint64_t spill_move_ns = 0;      // the longest time that one boundary moves blocks; 0 likewise
  double spill_move_loss =
      0;  // the part of a session's time that moving its blocks may take; 0 = kSpillMoveLoss
  bool record_timeline = false;
  bool record_allocations = false;
  ProgressFunction on_progress;
  std::optional<sched::LaneFinderKind> lane_finder;  // without: as the policy says
  std::string
      interference_file;  // what was measured: read when the runtime opens, written when it closes; empty = none
};

struct RuntimeInfo {
  memory::Layout layout = memory::Layout::kAuto;  // the one in use
  uint32_t capabilities = 0;
  uint32_t lanes = 0;
  uint32_t sessions_resident = 0;
  uint32_t sessions_queued = 0;
  uint32_t sessions_paged_out = 0;
  uint64_t capacity_bytes = 0;            // the target, where it has been lowered
  uint64_t effective_capacity_bytes = 0;  // the promised bytes, if they are above the target; else the target
  uint64_t promised_bytes = 0;            // never above effective_capacity_bytes
  uint32_t compute_units = 0;             // of the device
  // The compute units that lanes can have for themselves in all, the steps in which they get them, and the units that
  // lanes have now; 0 without partitions.
  uint32_t partitionable_compute_units = 0;
  uint32_t granularity_compute_units = 0;
  uint32_t promised_compute_units = 0;
  uint64_t persistent_bytes = 0;
  uint64_t ephemeral_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t switches = 0;
  uint64_t iterations_done = 0;
  uint64_t paged_out_bytes_total = 0;
  uint64_t paged_in_bytes_total = 0;
  uint64_t paging_ns = 0;       // device time of paging copies
  uint64_t device_busy_ns = 0;  // sum of device time over lanes
  uint64_t now_ns = 0;
  uint64_t link_bytes_per_s = 0;  // measured; 0 = not yet
  std::string device;
  std::string policy;
};

// Numbers as GPUSHARE_SESSION_QUEUED and following.
enum class SessionState : uint32_t { kQueued = 0, kResident = 1, kPagedOut = 2, kCancelled = 3, kFailed = 4 };

// Fields as gpushare_session_params says.
struct SessionOptions {
  std::string name;  // empty = "session-N"
  sched::SessionClass cls = sched::SessionClass::kGuaranteed;
  uint64_t persistent_bytes = 0;  // 0 = unknown
  uint64_t ephemeral_bytes = 0;   // 0 = unknown: profiled
  uint64_t remaining_ns = 0;      // 0 = unknown
  uint64_t iterations_total = 0;  // 0 = unknown
  uint64_t quota_bytes = 0;       // 0 = none
  uint32_t compute_units = 0;     // of its lane alone; 0 = the lane shares the device
  int32_t priority = 0;
  double weight = 1.0;  // finite, > 0
  bool allow_queueing = true;
  bool may_claim =
      true;              // spare sessions (Session::set_spare) make room for it before it is refused or waits
  bool may_page = true;  // false: it is not paged out before allow_paging(), so that filling it need not wait
  bool allow_spill = false;
  bool plan_iterations = false;
  // True: a failing iteration ends the session; false: only the iteration is abandoned.
  bool fail_on_error = false;
  // For a coordinator (Runtime::set_coordination).
  uint64_t least_bytes = 0;  // the bytes with which it can still run, if it may spill; 0 = all
  bool may_upgrade = false;  // an opportunistic session counts as guaranteed while there is room
};

struct SharedImageOptions {
  std::string path;
  uint64_t iteration_ns = 0;  // how long an iteration is likely to execute; 0 = as long as the load
  uint64_t timeout_ns = GPUSHARE_NO_TIMEOUT;
};

struct SessionInfo {
  SessionState state = SessionState::kQueued;
  uint64_t session_id = 0;
  base::Status status;  // why it failed
  uint32_t lane = UINT32_MAX;
  uint32_t compute_units = 0;  // units that its lane has for itself; 0 = the lane shares the device
  uint64_t persistent_bytes = 0;
  uint64_t ephemeral_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t promised_persistent_bytes = 0;
  uint64_t promised_ephemeral_bytes = 0;
  sched::SessionClass cls = sched::SessionClass::kGuaranteed;  // as it counts now
  uint64_t limit_bytes = 0;  // that a coordinator allows it; 0 = no such limit
  uint64_t quota_bytes = 0;  // 0 = none
  // What it is still promised, if that is above its quota; else the quota.
  uint64_t effective_quota_bytes = 0;
  uint64_t promoted_bytes = 0;
  uint64_t spilled_bytes = 0;
  uint64_t home_bytes = 0;  // device memory of spilled blocks that came home
  uint64_t iterations_done = 0;
  uint64_t iterations_queued = 0;
  uint64_t service_ns = 0;
  uint64_t queued_ns = 0;
  uint64_t waited_ns = 0;
  uint64_t room_waited_ns = 0;  // the time that allocations waited for room
  base::IterationCounts histogram;
  uint64_t remaining_ns = UINT64_MAX;
  uint64_t planned_iterations = 0;
};

// A stream of the device, which exists at least as long as this object. Other folders reach the device through it. Hold
// it for short stretches, and do not wait for the runtime meanwhile.
class HeldStream {
 public:
  HeldStream(GatePass pass, const device::Stream& stream) : pass_(std::move(pass)), stream_(&stream) {}
  const device::Stream& operator*() const { return *stream_; }
  const device::Stream* operator->() const { return stream_; }

 private:
  GatePass pass_;
  const device::Stream* stream_;
};

// A stream to enqueue work on: a lane's, or a side stream outside all lanes.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual bool is_lane() const = 0;
  // The session that has the stream's lane, or had it last; null for a side stream, and before the lane's first
  // session. Errors: INVALID_STATE (the runtime is closed).
  virtual base::Result<std::shared_ptr<Session>> owner() const = 0;
  // Every function below fails with INVALID_STATE once the stream was released or the runtime closed.
  virtual base::Result<void*> native() const = 0;
  virtual base::Status synchronize() = 0;  // blocks; in a NoWaitScope: INVALID_STATE unless the work is done
  virtual base::Status launch_host(gpushare_host_function function, void* user_data) = 0;
  virtual base::Status copy(uint64_t destination, uint64_t source, uint64_t bytes, uint32_t kind) = 0;
  virtual base::Status fill(memory::Address address, uint8_t value, uint64_t bytes) = 0;
  virtual base::Status work(const gpushare_backend_work& work) = 0;
  // Waits for the stream's work and destroys the stream. Blocks. INVALID_ARGUMENT for a lane's stream.
  virtual base::Status release() = 0;
  // The device's stream, to record and wait for events. The caller passes the results of calls on it to checked(),
  // after it has let the stream go.
  virtual base::Result<HeldStream> hold() const = 0;
  // Returns `status`. If that is DEVICE_LOST, the runtime takes note: all sessions end.
  virtual base::Status checked(base::Status status) const = 0;
  // The stream's runtime, for comparison only.
  virtual const Runtime* runtime() const = 0;
};

// An object built on a runtime. It holds parts of the runtime's device (events, pinned memory).
class Dependent {
 public:
  virtual ~Dependent() = default;
  // Called when the runtime closes. Its sessions are gone; its streams and its device still exist. The dependent gives
  // its resources back, and returns when no thread uses them any more.
  virtual void runtime_closing() = 0;

 protected:
  // The destructor calls it when the dependent holds nothing of the device any more. Until then a runtime that closes
  // waits.
  void detach() { life_.reset(); }

 private:
  friend class Dependents;
  std::shared_ptr<void> life_;
  std::unique_ptr<Dependent> next_;  // the next in the list of Runtime::destroy_later
};

// While one lives, the calling thread may not wait for any runtime: it runs a function that progress depends
// on (a host function, a callback of a copy). Calls that would block return INVALID_STATE.
class NoWaitScope {
 public:
  NoWaitScope();
  ~NoWaitScope();
  NoWaitScope(const NoWaitScope&) = delete;
  NoWaitScope& operator=(const NoWaitScope&) = delete;
  static bool active();
};

// An iteration of a session, from the grant to its end. A session has one such object and uses it again:
// after end() or fail() it is closed (INVALID_STATE) until the session's next iteration begins, so code that
// hands it out must keep old owners from it.
class Iteration {
 public:
  virtual ~Iteration() = default;
  virtual uint64_t session_id() const = 0;
  // Within the promise: O(1), no driver call, and no lock shared with other lanes. Above the promise: the out-of-memory
  // ladder, which may block. Errors: DEVICE_OUT_OF_MEMORY, QUOTA_EXCEEDED, INVALID_ARGUMENT, INVALID_STATE (not open).
  virtual base::Result<memory::Address> alloc(uint64_t bytes, uint64_t alignment) = 0;
  // Allocates a block for each size from the `served`-th on; the sizes before have their blocks in `out` already. All
  // or none: if one fails, the blocks of all sizes are freed. Errors: as alloc.
  virtual base::Status alloc_many(std::span<const uint64_t> bytes, uint64_t alignment, memory::Address* out,
                                  size_t served) = 0;
  // Makes an ephemeral block persistent. Errors: NOT_FOUND, DEVICE_OUT_OF_MEMORY (the block stays ephemeral),
  // QUOTA_EXCEEDED.
  virtual base::Status keep(memory::Address address) = 0;
  // The lane's stream.
  virtual base::Result<std::shared_ptr<Stream>> stream() = 0;
  // Ends a pulled iteration: its ephemeral blocks return in stream order. Waits for calls on this iteration
  // by other threads. A pushed iteration is ended by the runtime when its function returns: INVALID_STATE.
  // Errors (it is ended all the same): DEVICE_LOST, INVALID_STATE (its stream captured; the session goes on).
  virtual base::Status end() = 0;
  // As end(); the session also ends as failed with `status` (2xx to 4xx; other codes count as CALLBACK_FAILED).
  virtual base::Status fail(base::Status status) = 0;
  // The quick way to the iteration's blocks. Used by the thread that began the iteration, before it ends. Empty where
  // each allocation must be checked.
  virtual memory::LanePass pass() const { return {}; }

  // An object that the code which hands the iteration out keeps here, for as long as the session exists. Used by the
  // thread that began the iteration, before it ends.
  std::shared_ptr<void> wrapper;
};

// The outcome of a submitted iteration.
class Ticket {
 public:
  virtual ~Ticket() = default;
  // Blocks until the device work has finished. Returns OK, what the function returned, CANCELLED, DEVICE_LOST, or
  // TIMED_OUT. INVALID_STATE inside an iteration of the same lane, with a timeout above 0 and no outcome yet.
  virtual base::Status wait(uint64_t timeout_ns) = 0;
};

// The function of a submitted iteration. The runtime destroys it exactly once, with no lock held, when it has run or
// never will. The destructor must not close a runtime.
class Work {
 public:
  virtual ~Work() = default;
  // On the lane's thread, in the session's turn. Anything but OK abandons the iteration (see
  // SessionOptions::fail_on_error); an exception counts as CALLBACK_FAILED.
  virtual base::Status run(const std::shared_ptr<Iteration>& iteration) = 0;
};

// What waits for a session's next iteration: see Session::set_worth.
class WaitingWork {
 public:
  struct Worth {
    double cost = 0;
    uint64_t until_ns = 0;
  };
  virtual ~WaitingWork() = default;
  // Asked when an iteration of the session has ended on the device, with the runtime's lock held, on any thread: calls nothing
  // of the runtime, and takes a moment.
  virtual Worth worth() const noexcept = 0;
};

class Session {
 public:
  virtual ~Session() = default;
  virtual uint64_t id() const = 0;
  virtual const std::string& name() const = 0;
  virtual bool belongs_to(const Runtime& runtime) const = 0;

  // Cancels queued iterations, waits for the running iteration and its device work and, outside of callbacks, until
  // every Work is destroyed, and returns all memory. Blocks. INVALID_STATE from inside one of the session's own
  // iterations on this thread, and when closed already. A close that overlaps another waits for it and then returns
  // INVALID_STATE.
  virtual base::Status close() = 0;
  // True once the session or its runtime was closed, and the session has no memory left.
  virtual bool closed() const = 0;
  // Stops the session at its next boundary. Its memory returns when its last iteration has finished. Does not block.
  virtual base::Status cancel() = 0;
  // Errors: TIMED_OUT, CANCELLED, DEVICE_LOST, or why the session failed.
  virtual base::Status wait_admitted(uint64_t timeout_ns) = 0;
  virtual SessionInfo info() const = 0;
  // One sentence that says what the session's next iteration waits for, and who holds that; or that it waits for nothing.
  virtual std::string explain_wait() const = 0;
  // The limit on the session's live bytes and on its promise; 0: none. If it is lowered below the session's bytes, the
  // session gets nothing new, and its promise falls at its boundaries as it frees.
  virtual base::Status set_quota(uint64_t bytes) = 0;
  virtual base::Status set_priority(int32_t priority) = 0;
  virtual base::Status set_weight(double weight) = 0;
  virtual base::Status set_remaining(uint64_t remaining_ns) = 0;
  // Says that the session's next iteration wins `worth` (requests served, in their costs) if it begins by `until_ns`
  // (base::host_now_ns), and nothing if it begins later. The worth is forgotten when the iteration begins. Among
  // sessions of its rank, in this process and under the daemon also in others, the session goes first when it would win
  // nothing otherwise, within its part of the device (Authority::set_worth). Errors: why the session ended. When that
  // iteration has ended, `waiting` (may be null) says the worth of the iteration after it.
  virtual base::Status set_worth(double worth, uint64_t until_ns,
                                 std::shared_ptr<const WaitingWork> waiting = nullptr) = 0;
  // The target slowdown of a guaranteed session beside opportunistic ones that launch through gates; 0: the runtime's
  // target. INVALID_ARGUMENT for opportunistic sessions.
  virtual base::Status set_target_slowdown(double target) = 0;
  // The launch gate of the session: the same object each time, always open for a guaranteed session. UNSUPPORTED on
  // virtual time.
  virtual base::Result<std::shared_ptr<LaunchGate>> gate() = 0;
  virtual base::Status allow_paging() = 0;
  // Makes the session spare (with a worth) or ordinary again (without one; its next iteration does that too). The bytes
  // of a spare session can be had again, and it stays for speed alone. When another session needs the room, the runtime
  // ends the spare sessions of the least worth, at a boundary and without a copy; close() is left to do. The worth is
  // the time to bring the bytes back times the requests for them; it halves every minute. Errors: CANCELLED (the
  // session has been dropped, or is about to be), and why the session ended.
  virtual base::Status set_spare(std::optional<double> worth_ns) = 0;
  // The counts of the request queue that the session serves, for readers at the daemon. No effect without a daemon, or once the session has ended.
  virtual void note_requests(const base::RequestCounts& counts) = 0;
  // Whether the session was spare and has been dropped, so that its bytes are others' now. Takes no lock.
  virtual bool dropped() const = 0;
  // Says that the session is over, except for blocks that its users still have. From its last iteration on, open or
  // queued, the session is promised no more than the granules in which its blocks lie. Each further call lowers the
  // promise by what was freed since. The session can still allocate, which raises its promise again.
  virtual void retire() = 0;

  // A persistent block. Blocks while the session is queued or paged out. Errors: as gpushare_session_alloc.
  virtual base::Result<memory::Address> alloc(memory::Kind kind, uint64_t bytes, uint64_t alignment) = 0;
  // Frees a persistent block of this session, also while the session is paged out. INVALID_STATE once the session has
  // ended: its blocks went with it.
  virtual base::Status free(memory::Address address) = 0;
  // The session's own stream. As long as it is held, the session's persistent bytes stay on the device, so that the caller can
  // enqueue work on them outside an iteration. That work must come after what the session's stream has been given, because
  // blocks are reused in its order, and must be recorded (Runtime::record_use) before the stream is let go. Blocks while the
  // session is queued or paged out, at most timeout_ns. Errors: as wait_admitted.
  virtual base::Result<HeldStream> hold(uint64_t timeout_ns) = 0;
  // An ephemeral block of the session's open iteration, which any thread may have begun. INVALID_STATE when no
  // iteration is open. Other errors: as Iteration::alloc.
  virtual base::Result<memory::Address> alloc_ephemeral(uint64_t bytes, uint64_t alignment) = 0;
  // The number of the open iteration, different for each iteration; 0 when none is open. `out_pass` (may be null) gets
  // the quick way to the iteration's blocks, as Iteration::pass().
  virtual uint64_t open_iteration(memory::LanePass* out_pass = nullptr) const = 0;
  // The quick way to the session's persistent blocks, while they are on the device, for callers who know `name`. Null
  // where each allocation must be checked.
  virtual memory::HeapDoor* open_door(const void* name) = 0;
  // Makes work that is enqueued on `stream` from now on run after the work already on the session's own stream, so that
  // bytes freed there may be used on `stream`. Does nothing if `stream` is the session's own. The host waits only while
  // `stream` captures a graph. Blocks while the session is queued or paged out with no iteration open. Errors: as hold.
  virtual base::Status order_stream(const Stream& stream) = 0;
  // An elastic range of the session (range.hpp). Blocks while the session is queued. Errors: as gpushare_range_open.
  virtual base::Result<std::shared_ptr<Range>> open_range(RangeOptions options) = 0;
  // Makes SessionInfo::peak_bytes count from now on.
  virtual void reset_peak() = 0;
  // An image that the daemon shares (shared_image.hpp). Waits until the daemon has read the file. Errors: UNSUPPORTED (no shared
  // runtime, or a daemon of another user), TIMED_OUT, UNAVAILABLE (the daemon has gone), EXCEEDS_CAPACITY, those of reading,
  // the device's.
  virtual base::Result<std::shared_ptr<SharedImage>> open_image(const SharedImageOptions& options) = 0;
  // The session's runtime, for comparison only.
  virtual const Runtime* runtime() const = 0;

  // Blocks until it is this session's turn. Binds the calling thread to the iteration until it ends. Errors:
  // TIMED_OUT, CANCELLED, INVALID_STATE (one is open, or another thread waits to begin one; the session has
  // failed: the message says why), DEVICE_LOST.
  virtual base::Result<std::shared_ptr<Iteration>> begin(uint64_t timeout_ns) = 0;
  // Takes `work` only if it succeeds. Errors: CANCELLED, INVALID_STATE, QUEUE_FULL, DEVICE_LOST.
  virtual base::Result<std::shared_ptr<Ticket>> submit(std::unique_ptr<Work>& work) = 0;
};

class Runtime {
 public:
  // Errors: as gpushare_runtime_open. Blocks on the driver.
  static base::Result<std::shared_ptr<Runtime>> open(RuntimeOptions options);
  virtual ~Runtime() = default;

  // Cancels and closes every session, waits for work on the device and for threads that are inside (also in functions
  // of the caller's), joins the runtime's threads, and gives everything back. Blocks. INVALID_STATE from a function
  // that this runtime called, from inside an iteration on this thread, and when closed already. Otherwise returns OK,
  // or what the device says (objects leaked). When the last pointer to an open runtime goes, close() runs too, and its
  // result is dropped.
  virtual base::Status close() = 0;

  // Errors: as gpushare_session_open. Does not wait for admission.
  virtual base::Result<std::shared_ptr<Session>> open_session(const SessionOptions& options) = 0;
  virtual base::Result<RuntimeInfo> info() = 0;
  // The measured interference of sessions; empty where nobody measures. Errors: INVALID_STATE.
  virtual base::Result<std::vector<sched::MeasuredInterference::Entry>> interference() = 0;
  virtual base::Status set_policy(std::unique_ptr<sched::Policy> policy) = 0;
  // As sched::Authority::set_capacity; 0: the capacity with which the runtime was opened. Memory above the capacity
  // goes back to the device (virtual layout). On a shared device it sets the daemon's capacity, for the daemon's user
  // and root only. Errors: EXCEEDS_CAPACITY, UNAVAILABLE, INVALID_STATE.
  virtual base::Status set_capacity(uint64_t bytes) = 0;
  // As sched::Authority::set_coordination; nullopt: no coordinator. Does not block.
  virtual base::Status set_coordination(const std::optional<sched::CoordinatorOptions>& options) = 0;
  // The target slowdown of guaranteed sessions that have none of their own.
  virtual base::Status set_target_slowdown(double target) = 0;
  // Blocks until every lane's enqueued work has finished. Errors: TIMED_OUT, DEVICE_LOST.
  virtual base::Status synchronize(uint64_t timeout_ns) = 0;
  // Blocks until every iteration submitted before the call has run or was given up, and then until synchronize() would
  // return. Only the tickets report the results of these iterations. Errors: as synchronize(); INVALID_STATE as
  // Ticket::wait.
  virtual base::Status drain(uint64_t timeout_ns) = 0;

  // `stream` may be null. Owner: the iteration that has the lane of `stream`, else the innermost open
  // iteration that the calling thread began. kEphemeral when there is none: NOT_FOUND, as for the other
  // kinds.
  virtual base::Result<memory::Address> alloc(const Stream* stream, memory::Kind kind, uint64_t bytes,
                                              uint64_t alignment) = 0;
  // The owner that alloc() would find; null without one.
  virtual std::shared_ptr<Session> owner(const Stream* stream) = 0;
  virtual base::Status free(memory::Address address) = 0;
  // As memory::DeviceMemory::free_at_home; false when the runtime is closed.
  virtual bool free_at_home(memory::Address address, const void* native, base::Status* out_status) = 0;
  virtual base::Status record_use(memory::Address address, const Stream& stream) = 0;
  // As memory::DeviceMemory::pin. The result must go before the runtime closes.
  virtual base::Result<std::shared_ptr<const void>> pin(memory::Address address) = 0;
  virtual base::Result<memory::BlockInfo> find(memory::Address address) = 0;
  // False if no live block begins at `address`, or the runtime is closed.
  virtual bool look_up(memory::Address address, memory::BlockInfo* out_info) = 0;
  // Destroys `dependent` on a thread that may wait for the device: one of the runtime's own, or the one that closes the
  // runtime. For dependents that are dropped inside a NoWaitScope. Does not wait, does not throw.
  virtual void destroy_later(std::unique_ptr<Dependent> dependent) noexcept = 0;
  // Empty: none.
  virtual base::Status set_out_of_memory_function(OutOfMemoryFunction function) = 0;
  // priority: clamped to what the device has.
  virtual base::Result<std::shared_ptr<Stream>> create_stream(int32_t priority) = 0;
  // The stream with a native handle (Stream::native): a lane's or a side stream of this runtime, else a new side stream
  // around it. In the second case the caller made the native stream, and destroys it after its last use here. Errors:
  // UNSUPPORTED (the device has no native streams).
  virtual base::Result<std::shared_ptr<Stream>> adopt_stream(void* native) = 0;
  // The measured time that the link to the device takes for a byte. It is the price of paging. Ignored unless finite
  // and above 0.
  virtual void set_link(double ns_per_byte) = 0;
  // Gives what memory keeps for speed back to the device; returns the bytes. Calls the driver.
  virtual base::Result<uint64_t> trim() = 0;
  // Makes RuntimeInfo::peak_bytes count from now on.
  virtual void reset_peak() = 0;
  // Has `dependent` told when the runtime closes. Dependents are told in the reverse order of their attaching.
  // INVALID_STATE when the runtime has closed.
  virtual base::Status attach(std::weak_ptr<Dependent> dependent) = 0;

  // INVALID_STATE unless recording (events need record_allocations).
  virtual base::Status write_timeline(const std::string& path) = 0;
  virtual base::Result<memory::MemorySnapshot> snapshot() = 0;
  virtual bool records_allocations() const = 0;

  // The device, for tests and faults. Valid until close.
  virtual device::Device& device() = 0;
  // Checks the invariants of scheduler, memory and the executor's own books; empty when they hold. For tests;
  // locks everything.
  virtual std::string check() = 0;
};

}  // namespace gpushare::executor
