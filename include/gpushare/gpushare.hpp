// gpushare.hpp: the C++ API: header-only, C++17, standard library only, RAII over the C ABI of gpushare.h. It
// adds no binary boundary of its own: everything inline, in namespace gpushare.
//
// Ownership: each class owns one handle, is move-only, and gives it back when destroyed (errors on that path are dropped; call
//   close() to see them). Default-constructed objects are empty.
// Errors: methods throw gpushare::Error with the status and the message of the failing call. Destructors never throw.
// Threads: as the C function behind each method. An object itself must not be moved or destroyed while another thread uses it.
// Units: sizes in bytes, times in std::chrono durations.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_GPUSHARE_HPP_
#define GPUSHARE_GPUSHARE_HPP_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "gpushare/gpushare.h"

// In front of catch (...): pthread_cancel and pthread_exit unwind a thread by an exception that must not be swallowed.
#if defined(__GLIBCXX__)
#include <cxxabi.h>
#define GPUSHARE_RETHROW_THREAD_END     \
  catch (const abi::__forced_unwind&) { \
    throw;                              \
  }
#else
#define GPUSHARE_RETHROW_THREAD_END
#endif

namespace gpushare {

using Address = gpushare_device_address;
using Nanoseconds = std::chrono::nanoseconds;

// "Wait for ever" for every method that takes a timeout.
inline constexpr Nanoseconds no_timeout = Nanoseconds::max();

// The exception of a failing call: status() is a GPUSHARE_* code, what() the message.
class Error : public std::runtime_error {
 public:
  Error(int32_t status, const std::string& message) : std::runtime_error(message), status_(status) {}
  int32_t status() const noexcept { return status_; }
  const char* status_name() const noexcept { return gpushare_status_name(status_); }

 private:
  int32_t status_;
};

// Throws Error if `status` is not OK, with the calling thread's last error message.
inline void check(int32_t status) {
  if (status != GPUSHARE_OK) throw Error(status, gpushare_last_error_message());
}

enum class Class : uint32_t {
  guaranteed = GPUSHARE_CLASS_GUARANTEED,
  opportunistic = GPUSHARE_CLASS_OPPORTUNISTIC
};
inline constexpr Class guaranteed = Class::guaranteed;
inline constexpr Class opportunistic = Class::opportunistic;

enum class Kind : uint32_t {
  model = GPUSHARE_KIND_MODEL,
  framework = GPUSHARE_KIND_FRAMEWORK,
  ephemeral = GPUSHARE_KIND_EPHEMERAL
};

enum class Layout : uint32_t {
  automatic = GPUSHARE_LAYOUT_AUTO,
  contiguous = GPUSHARE_LAYOUT_CONTIGUOUS,
  virtual_memory = GPUSHARE_LAYOUT_VIRTUAL
};

namespace detail {

inline uint64_t timeout_ns(Nanoseconds timeout) {
  if (timeout == no_timeout) return GPUSHARE_NO_TIMEOUT;
  return timeout.count() < 0 ? 0 : static_cast<uint64_t>(timeout.count());
}

// One owned handle with its release function.
template <class T, int32_t (*Release)(T)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T handle) : handle_(handle) {}
  Handle(Handle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      reset();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { reset(); }

  T get() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return handle_ != nullptr; }
  T release() noexcept { return std::exchange(handle_, nullptr); }
  void reset() noexcept {
    if (handle_ != nullptr) (void)Release(std::exchange(handle_, nullptr));
  }
  // Keeps the handle where the call is refused with INVALID_STATE, for example inside a function that the object called.
  void close() {
    if (handle_ == nullptr) return;
    const int32_t status = Release(handle_);
    if (status != GPUSHARE_INVALID_STATE) handle_ = nullptr;
    check(status);
  }

 private:
  T handle_ = nullptr;
};

template <class T>
uint64_t bytes_of(size_t count) {
  static_assert(std::is_trivially_copyable_v<T>, "device memory holds trivially copyable types only");
  if (count > std::numeric_limits<uint64_t>::max() / sizeof(T))
    throw Error(GPUSHARE_INVALID_ARGUMENT, "count times element size overflows 64 bits");
  return static_cast<uint64_t>(count) * sizeof(T);
}

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace detail

// A stream, borrowed (a lane's, from Iteration::stream) or owned (SideStream).
class Stream {
 public:
  Stream() = default;
  explicit Stream(gpushare_stream handle) : handle_(handle) {}
  gpushare_stream get() const noexcept { return handle_; }
  // The device's own handle, e.g. static_cast<CUstream>(stream.native()).
  void* native() const {
    void* out = nullptr;
    check(gpushare_stream_get_native(handle_, &out));
    return out;
  }
  void synchronize() const { check(gpushare_stream_synchronize(handle_)); }
  // Runs `function` in stream order. On the host device kernels run this way. If it throws on a lane's stream,
  // its iteration fails with CALLBACK_FAILED and the exception's message: the ticket says so, or the session's next
  // begin_iteration(). If it throws on a side stream, the next synchronize() of that stream fails so.
  template <class F>
  void launch_host(F function) const {
    auto owned = std::make_unique<F>(std::move(function));
    check(gpushare_stream_launch_host(
        handle_,
        [](void* user_data) {
          const std::unique_ptr<F> body(static_cast<F*>(user_data));
          (*body)();
        },
        owned.get()));
    (void)owned.release();
  }
  void copy_to_device(Address destination, const void* source, uint64_t bytes) const {
    check(gpushare_stream_copy(handle_, destination, reinterpret_cast<uintptr_t>(source), bytes,
                               GPUSHARE_COPY_HOST_TO_DEVICE));
  }
  void copy_to_host(void* destination, Address source, uint64_t bytes) const {
    check(gpushare_stream_copy(handle_, reinterpret_cast<uintptr_t>(destination), source, bytes,
                               GPUSHARE_COPY_DEVICE_TO_HOST));
  }
  void copy_on_device(Address destination, Address source, uint64_t bytes) const {
    check(gpushare_stream_copy(handle_, destination, source, bytes, GPUSHARE_COPY_DEVICE_TO_DEVICE));
  }
  void fill(Address address, uint8_t value, uint64_t bytes) const {
    check(gpushare_stream_fill(handle_, address, value, bytes));
  }
  // Work of a known cost, on simulating devices.
  void work(Nanoseconds duration, float demand = 1.0F, uint32_t work_class = 0) const {
    gpushare_backend_work work{};
    work.struct_size = sizeof work;
    work.work_class = work_class;
    work.duration_ns = detail::timeout_ns(duration);
    work.demand = demand;
    check(gpushare_stream_work(handle_, &work));
  }

 private:
  gpushare_stream handle_ = nullptr;
};

// A stream that the caller owns, outside all lanes. Destruction waits for its work.
class SideStream : public Stream {
 public:
  SideStream() = default;
  explicit SideStream(gpushare_stream handle) : Stream(handle), owned_(handle) {}

 private:
  detail::Handle<gpushare_stream, gpushare_stream_release> owned_;
};

// One iteration of a session. Memory allocated through it is gone when it ends, at no cost. Destruction ends
// the iteration, also while an exception is unwinding: its memory goes back, and the session goes on. In a session that was
// opened with fail_on_error an exception that unwinds past the iteration ends the session; no other session is affected.
class Iteration {
 public:
  Iteration() = default;
  explicit Iteration(gpushare_iteration handle, bool owned = true, bool fail_on_error = false)
      : handle_(handle),
        owned_(owned),
        fail_on_error_(fail_on_error),
        exceptions_(std::uncaught_exceptions()) {}
  Iteration(Iteration&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)),
        owned_(other.owned_),
        fail_on_error_(other.fail_on_error_),
        exceptions_(other.exceptions_) {}
  Iteration& operator=(Iteration&& other) noexcept {
    if (this != &other) {
      finish();
      handle_ = std::exchange(other.handle_, nullptr);
      owned_ = other.owned_;
      fail_on_error_ = other.fail_on_error_;
      exceptions_ = other.exceptions_;
    }
    return *this;
  }
  ~Iteration() { finish(); }

  gpushare_iteration get() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return handle_ != nullptr; }

  Address alloc_bytes(uint64_t bytes, uint64_t alignment_bytes = 0) {
    Address out = 0;
    check(gpushare_iteration_alloc(handle_, bytes, alignment_bytes, &out));
    return out;
  }
  // `count` elements of T, gone when the iteration ends.
  template <class T>
  T* alloc(size_t count) {
    return detail::pointer<T>(alloc_bytes(detail::bytes_of<T>(count), 0));
  }
  // The block outlives the iteration and counts as persistent.
  void keep(const void* block) { keep(static_cast<Address>(reinterpret_cast<uintptr_t>(block))); }
  void keep(Address block) { check(gpushare_iteration_keep(handle_, block)); }
  Stream stream() const {
    gpushare_stream out = nullptr;
    check(gpushare_iteration_get_stream(handle_, &out));
    return Stream(out);
  }
  void end() {
    if (handle_ != nullptr && owned_) check(gpushare_iteration_end(std::exchange(handle_, nullptr)));
  }
  void fail(int32_t status, const char* message = nullptr) {
    if (handle_ != nullptr && owned_)
      check(gpushare_iteration_fail(std::exchange(handle_, nullptr), status, message));
  }

 private:
  void finish() noexcept {
    if (handle_ == nullptr || !owned_) return;
    if (fail_on_error_ && std::uncaught_exceptions() > exceptions_)
      (void)gpushare_iteration_fail(handle_, GPUSHARE_CALLBACK_FAILED, "an exception left the iteration");
    else
      (void)gpushare_iteration_end(handle_);
    handle_ = nullptr;
  }
  gpushare_iteration handle_ = nullptr;
  bool owned_ = true;
  bool fail_on_error_ = false;
  int exceptions_ = 0;
};

// The outcome of a submitted iteration.
class Ticket {
 public:
  Ticket() = default;
  explicit Ticket(gpushare_ticket handle) : handle_(handle) {}
  explicit operator bool() const noexcept { return static_cast<bool>(handle_); }
  // Waits until the iteration's device work has finished. Throws the error that the iteration failed with.
  void get() const { check(gpushare_ticket_wait(handle_.get(), GPUSHARE_NO_TIMEOUT)); }
  // False when the timeout passed first.
  bool wait_for(Nanoseconds timeout) const {
    const int32_t status = gpushare_ticket_wait(handle_.get(), detail::timeout_ns(timeout));
    if (status == GPUSHARE_TIMED_OUT) return false;
    check(status);
    return true;
  }

 private:
  detail::Handle<gpushare_ticket, gpushare_ticket_release> handle_;
};

// Zero means "not declared" for every need: gpushare then profiles the first iterations.
struct SessionOptions {
  std::string name{};
  Class cls = Class::guaranteed;
  uint64_t persistent_bytes = 0;
  uint64_t ephemeral_bytes = 0;
  Nanoseconds remaining{0};
  uint64_t iterations_total = 0;
  uint64_t quota_bytes = 0;
  int32_t priority = 0;
  double weight = 1.0;
  bool allow_queueing = true;
  bool allow_spill = false;
  bool plan_iterations = false;
  bool fail_on_error = false;  // an iteration that fails ends the session; else the iteration is abandoned
  uint32_t compute_units = 0;  // units that only its lane uses; 0 = the lane shares the device
  uint64_t least_bytes =
      0;  // for a coordinator (Runtime::set_coordination), as is the next; 0 = all of its need
  bool may_upgrade = false;
};

namespace detail {

// Points into `options`.
inline gpushare_session_params session_params(const SessionOptions& options) {
  gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
  params.session_class = static_cast<uint32_t>(options.cls);
  params.name = options.name.empty() ? nullptr : options.name.c_str();
  params.persistent_bytes = options.persistent_bytes;
  params.ephemeral_bytes = options.ephemeral_bytes;
  params.remaining_ns = detail::timeout_ns(options.remaining);
  params.iterations_total = options.iterations_total;
  params.quota_bytes = options.quota_bytes;
  params.priority = options.priority;
  params.flags = (options.allow_queueing ? uint32_t{GPUSHARE_SESSION_ALLOW_QUEUEING} : 0U) |
                 (options.allow_spill ? uint32_t{GPUSHARE_SESSION_ALLOW_SPILL} : 0U) |
                 (options.may_upgrade ? uint32_t{GPUSHARE_SESSION_MAY_UPGRADE} : 0U) |
                 (options.fail_on_error ? uint32_t{GPUSHARE_SESSION_FAIL_ON_ERROR} : 0U);
  params.weight = options.weight;
  params.plan_iterations = options.plan_iterations ? 1 : 0;
  params.compute_units = options.compute_units;
  params.least_bytes = options.least_bytes;
  return params;
}

}  // namespace detail

// One job. Closing waits for its running iteration and returns all its memory.
class Session {
 public:
  Session() = default;
  explicit Session(gpushare_session handle, bool fail_on_error = false)
      : handle_(handle), fail_on_error_(fail_on_error) {}
  gpushare_session get() const noexcept { return handle_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(handle_); }
  void close() { handle_.close(); }
  void cancel() { check(gpushare_session_cancel(get())); }
  // False when the timeout passed first.
  bool wait_admitted(Nanoseconds timeout = no_timeout) {
    const int32_t status = gpushare_session_wait_admitted(get(), detail::timeout_ns(timeout));
    if (status == GPUSHARE_TIMED_OUT) return false;
    check(status);
    return true;
  }

  Address alloc_bytes(Kind kind, uint64_t bytes, uint64_t alignment_bytes = 0) {
    Address out = 0;
    check(gpushare_session_alloc(get(), static_cast<uint32_t>(kind), bytes, alignment_bytes, &out));
    return out;
  }
  // `count` elements of T that live until freed or until the session closes.
  template <class T>
  T* alloc_model(size_t count) {
    return detail::pointer<T>(alloc_bytes(Kind::model, detail::bytes_of<T>(count)));
  }
  template <class T>
  T* alloc_framework(size_t count) {
    return detail::pointer<T>(alloc_bytes(Kind::framework, detail::bytes_of<T>(count)));
  }

  // Waits for the session's turn in its lane.
  Iteration begin_iteration() {
    gpushare_iteration out = nullptr;
    check(gpushare_iteration_begin(get(), GPUSHARE_NO_TIMEOUT, &out));
    return Iteration(out, true, fail_on_error_);
  }
  // Empty when the timeout passed first.
  std::optional<Iteration> begin_iteration(Nanoseconds timeout) {
    gpushare_iteration out = nullptr;
    const int32_t status = gpushare_iteration_begin(get(), detail::timeout_ns(timeout), &out);
    if (status == GPUSHARE_TIMED_OUT) return std::nullopt;
    check(status);
    return Iteration(out, true, fail_on_error_);
  }
  // Queues `function(Iteration&)`, which runs on the lane's thread in the session's turn. An exception that
  // leaves it abandons the iteration, or ends the session under fail_on_error; the ticket reports CALLBACK_FAILED.
  template <class F>
  Ticket run(F function) {
    auto owned = std::make_unique<F>(std::move(function));
    gpushare_ticket ticket = nullptr;
    check(gpushare_session_submit(
        get(),
        [](void* user_data, gpushare_iteration handle) -> int32_t {
          Iteration iteration(handle, /*owned=*/false);
          (*static_cast<F*>(user_data))(iteration);
          return GPUSHARE_OK;
        },
        owned.get(), [](void* user_data) { delete static_cast<F*>(user_data); }, &ticket));
    (void)owned.release();
    return Ticket(ticket);
  }

  gpushare_session_info info() const {
    gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
    check(gpushare_session_get_info(get(), &info));
    return info;
  }
  // Says in a sentence what the session's next iteration waits for. The text is for people.
  std::string explain_wait() const {
    char text[1024];
    check(gpushare_session_explain_wait(get(), text, sizeof text));
    return text;
  }
  void set_priority(int32_t priority) { check(gpushare_session_set_priority(get(), priority)); }
  void set_weight(double weight) { check(gpushare_session_set_weight(get(), weight)); }
  // Changes the quota; 0 = none. A quota below what the session has is a target: see
  // gpushare_session_set_quota.
  void set_quota(uint64_t bytes) { check(gpushare_session_set_quota(get(), bytes)); }
  void set_remaining(Nanoseconds remaining) {
    check(gpushare_session_set_remaining(get(), detail::timeout_ns(remaining)));
  }

 private:
  detail::Handle<gpushare_session, gpushare_session_close> handle_;
  bool fail_on_error_ = false;
};

class Policy;  // policy.hpp

struct RuntimeOptions {
  std::string device = "auto";
  std::string policy = "fair";
  std::shared_ptr<Policy> custom_policy{};  // overrides `policy`
  std::string custom_policy_name = "custom";
  std::string lane_finder{};        // empty: as the policy says, else "salus"
  std::string interference_file{};  // of what was measured: read when opened, written when closed
  uint64_t capacity_bytes = 0;
  Layout layout = Layout::automatic;
  uint32_t max_lanes = 0;
  uint32_t enqueue_depth = 0;
  uint64_t spill_limit_bytes = 0;
  uint64_t spill_move_bytes = 0;
  uint64_t spill_move_ns = 0;
  double spill_move_loss = 0;
  bool record_timeline = false;
  bool record_allocations = false;
  gpushare_progress_fn on_progress = nullptr;
  void* on_progress_user_data = nullptr;
};

namespace detail {

// The caller, or the call that is given the table, owns what `release` frees.
inline gpushare_policy_ops policy_ops(const std::shared_ptr<Policy>& policy, const std::string& name);

}  // namespace detail

// One device's worth of gpushare. Sessions must be destroyed before it, or their methods throw.
class Runtime {
 public:
  Runtime() = default;
  explicit Runtime(gpushare_runtime handle) : handle_(handle) {}

  // Opens the device and starts the runtime.
  static Runtime open(const RuntimeOptions& options = {}) {
    gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
    params.layout = static_cast<uint32_t>(options.layout);
    params.device = options.device.c_str();
    params.capacity_bytes = options.capacity_bytes;
    params.policy = options.policy.c_str();
    if (!options.lane_finder.empty()) params.lane_finder = options.lane_finder.c_str();
    if (!options.interference_file.empty()) params.interference_file = options.interference_file.c_str();
    params.max_lanes = options.max_lanes;
    params.enqueue_depth = options.enqueue_depth;
    params.spill_limit_bytes = options.spill_limit_bytes;
    params.spill_move_bytes = options.spill_move_bytes;
    params.spill_move_ns = options.spill_move_ns;
    params.spill_move_loss = options.spill_move_loss;
    params.record = (options.record_timeline ? uint32_t{GPUSHARE_RECORD_TIMELINE} : 0U) |
                    (options.record_allocations ? uint32_t{GPUSHARE_RECORD_ALLOCATIONS} : 0U);
    params.on_progress = options.on_progress;
    params.on_progress_user_data = options.on_progress_user_data;
    gpushare_policy_ops ops{};
    if (options.custom_policy) {
      ops = detail::policy_ops(options.custom_policy, options.custom_policy_name);
      params.policy_ops = &ops;
    }
    gpushare_runtime out = nullptr;
    check(gpushare_runtime_open(&params, &out));
    return Runtime(out);
  }

  gpushare_runtime get() const noexcept { return handle_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(handle_); }
  void close() { handle_.close(); }

  Session open_session(const SessionOptions& options = {}) {
    const gpushare_session_params params = detail::session_params(options);
    gpushare_session out = nullptr;
    check(gpushare_session_open(get(), &params, &out));
    return Session(out, options.fail_on_error);
  }

  // Allocates for the iteration that has the lane of `stream`, else for the innermost open iteration of this
  // thread.
  Address alloc_bytes(Kind kind, uint64_t bytes, Stream stream = {}, uint64_t alignment_bytes = 0) {
    Address out = 0;
    check(gpushare_memory_alloc(get(), stream.get(), static_cast<uint32_t>(kind), bytes, alignment_bytes,
                                &out));
    return out;
  }
  void free(Address block) { check(gpushare_memory_free(get(), block)); }
  void free(const void* block) { free(static_cast<Address>(reinterpret_cast<uintptr_t>(block))); }
  void record_use(Address block, Stream stream) {
    check(gpushare_memory_record_use(get(), block, stream.get()));
  }
  gpushare_block_info block_info(Address block) const {
    gpushare_block_info info = GPUSHARE_BLOCK_INFO_INIT;
    check(gpushare_memory_get_info(get(), block, &info));
    return info;
  }

  SideStream create_stream(int32_t priority = 0) {
    gpushare_stream out = nullptr;
    check(gpushare_stream_create(get(), priority, &out));
    return SideStream(out);
  }
  gpushare_runtime_info info() const {
    gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
    check(gpushare_runtime_get_info(get(), &info));
    return info;
  }
  // The measured times of sessions alone and beside each other (policy "pack", or with an interference_file).
  std::vector<gpushare_interference> interference() const {
    std::vector<gpushare_interference> out;
    for (uint32_t index = 0;; ++index) {
      gpushare_interference entry = GPUSHARE_INTERFERENCE_INIT;
      const int32_t status = gpushare_runtime_get_interference(get(), index, &entry);
      if (status == GPUSHARE_NOT_FOUND) return out;
      check(status);
      out.push_back(entry);
    }
  }
  void set_policy(const std::string& name) {
    check(gpushare_runtime_set_policy(get(), name.c_str(), nullptr));
  }
  void set_policy(const std::shared_ptr<Policy>& policy, const std::string& name = "custom") {
    const gpushare_policy_ops ops = detail::policy_ops(policy, name);
    check(gpushare_runtime_set_policy(get(), nullptr, &ops));
  }
  // Changes the capacity; 0 = as the runtime was opened. A capacity below the promised bytes is a target: see
  // gpushare_runtime_set_capacity.
  void set_capacity(uint64_t bytes) { check(gpushare_runtime_set_capacity(get(), bytes)); }
  // A coordinator decides which sessions run, in which class and with how many bytes. Zeros are the defaults: see
  // gpushare_runtime_set_coordination.
  void set_coordination(uint32_t max_guaranteed, uint32_t max_opportunistic,
                        Nanoseconds long_wait = Nanoseconds{0}) {
    gpushare_coordination_params params = GPUSHARE_COORDINATION_PARAMS_INIT;
    params.max_guaranteed = max_guaranteed;
    params.max_opportunistic = max_opportunistic;
    params.long_wait_ns = detail::timeout_ns(long_wait);
    check(gpushare_runtime_set_coordination(get(), &params));
  }
  // No coordinator decides from now on.
  void clear_coordination() { check(gpushare_runtime_set_coordination(get(), nullptr)); }
  // Sets a function that is called when an allocation is about to fail. It frees something and returns nonzero
  // to have the allocation tried again. `user_data` must stay valid until the runtime is closed.
  void set_out_of_memory_callback(gpushare_out_of_memory_fn function, void* user_data) {
    check(gpushare_runtime_set_out_of_memory_callback(get(), function, user_data));
  }
  // Waits until the work enqueued on every lane has finished, but not for submitted iterations that have not
  // had their turn yet. Returns false if the timeout passed first.
  bool synchronize(Nanoseconds timeout = no_timeout) {
    const int32_t status = gpushare_runtime_synchronize(get(), detail::timeout_ns(timeout));
    if (status == GPUSHARE_TIMED_OUT) return false;
    check(status);
    return true;
  }
  // Waits until every iteration submitted before has run or was given up, then like synchronize(). Returns
  // false if the timeout passed first.
  bool drain(Nanoseconds timeout = no_timeout) {
    const int32_t status = gpushare_runtime_drain(get(), detail::timeout_ns(timeout));
    if (status == GPUSHARE_TIMED_OUT) return false;
    check(status);
    return true;
  }
  // Opens in Perfetto. Needs record_timeline.
  void write_timeline(const std::string& path) const {
    check(gpushare_runtime_write_timeline(get(), path.c_str()));
  }
  // Opens in PyTorch's memory_viz.
  void write_snapshot(const std::string& path, uint32_t format = GPUSHARE_SNAPSHOT_PICKLE) const {
    check(gpushare_runtime_write_snapshot(get(), path.c_str(), format));
  }
  void write_allocation_log(const std::string& path) const {
    check(gpushare_runtime_write_allocation_log(get(), path.c_str()));
  }
  // Figures in Prometheus' text format. Sessions may come between the question for the size and the answer: then it is asked again.
  std::string metrics() const {
    std::string text;
    for (;;) {
      uint64_t size = 0;
      const int32_t status =
          gpushare_runtime_write_metrics(get(), text.empty() ? nullptr : &text[0], text.size(), &size);
      if (status == GPUSHARE_INVALID_ARGUMENT && size > text.size()) {
        text.resize(size + size / 4);
        continue;
      }
      check(status);
      text.resize(size - 1);
      return text;
    }
  }

 private:
  detail::Handle<gpushare_runtime, gpushare_runtime_close> handle_;
};

// The library's version, "1.0.0"; the header's is GPUSHARE_VERSION_STRING.
inline std::string version() {
  return gpushare_version_string();
}
// The same as a number to compare with GPUSHARE_VERSION.
inline uint32_t version_number() {
  return gpushare_version();
}

// Sends log lines of `level` and more severe ones to `function`; null: to stderr. Process-wide.
inline void set_log(gpushare_log_fn function, void* user_data = nullptr,
                    int32_t level = GPUSHARE_LOG_WARNING) {
  check(gpushare_log_set(function, user_data, level));
}

// Adds a backend to the process: a table, or a plug-in at an absolute path.
inline void register_backend(const gpushare_backend_ops& ops) {
  check(gpushare_backend_register(&ops));
}
inline void load_backend(const std::string& absolute_path) {
  check(gpushare_backend_load(absolute_path.c_str()));
}

// The devices of this machine, unusable ones included (their `status` and `reason` say why).
inline std::vector<gpushare_device_info> devices() {
  uint32_t count = 0;
  check(gpushare_device_count(&count));
  std::vector<gpushare_device_info> out;
  for (uint32_t i = 0; i < count; ++i) {
    gpushare_device_info info = GPUSHARE_DEVICE_INFO_INIT;
    check(gpushare_device_get_info(i, &info));
    out.push_back(info);
  }
  return out;
}

}  // namespace gpushare

#include "gpushare/allocator.hpp"
#include "gpushare/bulk.hpp"
#include "gpushare/gate.hpp"
#include "gpushare/heap.hpp"
#include "gpushare/loader.hpp"
#include "gpushare/policy.hpp"
#include "gpushare/range.hpp"
#include "gpushare/serving.hpp"
#include "gpushare/shared_image.hpp"
#include "gpushare/steps.hpp"

#endif  // GPUSHARE_GPUSHARE_HPP_
