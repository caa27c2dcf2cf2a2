// Settings, faults, misuse records, leaks, and the frame of an entry point.
// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "world.hpp"

namespace standin {
namespace {

// "cuMemAlloc_v2" and "cuMemAlloc" are one entry point to those who count or plant faults.
std::string base_name(const std::string& name) {
  const size_t at = name.rfind("_v");
  return at != std::string::npos && at + 3 == name.size() ? name.substr(0, at) : name;
}

bool set(World& w, const std::string& key, uint64_t value) {
  const auto it = w.settings.find(key);
  if (it == w.settings.end()) return false;
  it->second = value;
  return true;
}

void read_environment(World& w) {
  const char* text = std::getenv("CUDA_STANDIN");
  if (text == nullptr) return;
  std::string rest = text;
  while (!rest.empty()) {
    const std::string pair = rest.substr(0, rest.find(','));
    rest = pair.size() < rest.size() ? rest.substr(pair.size() + 1) : "";
    const size_t equals = pair.find('=');
    const std::string value = equals == std::string::npos ? "" : pair.substr(equals + 1);
    if (value.empty() ||
        !set(w, pair.substr(0, equals), value == "h100" ? 1 : std::strtoull(value.c_str(), nullptr, 10))) {
      std::fprintf(stderr, "cuda stand-in: CUDA_STANDIN has '%s', which is no setting\n", pair.c_str());
      std::abort();
    }
  }
}

// The device's threads and the callers share one lock, and hold it for less than a microsecond. A thread that slept for it would be
// woken some 20 us later, which would be taken for time of the device. Nobody has used the lock yet.
void spin_first(std::mutex& lock) {
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_ADAPTIVE_NP);
  pthread_mutex_init(lock.native_handle(), &kind);
  pthread_mutexattr_destroy(&kind);
}

// Misuses that no test took and objects that nobody released fail the process. _exit, not exit: handlers are
// running.
__attribute__((destructor)) void check_at_exit() {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  if (w.checks_done) return;
  w.checks_done = true;
  std::string text;
  const size_t leaks = w.setting("leaks") != 0 ? list_leaks(&text) : 0;
  if (leaks == 0 && w.misuses.empty()) return;
  std::fflush(stdout);
  std::fprintf(stderr, "cuda stand-in: %zu misuses not expected by the test, %zu objects leaked\n",
               w.misuses.size(), leaks);
  for (const std::string& misuse : w.misuses) std::fprintf(stderr, "  misuse: %s\n", misuse.c_str());
  if (leaks > 0) std::fprintf(stderr, "%s", text.c_str());
  std::fflush(stderr);
  _exit(99);
}

}  // namespace

World& world() {
  static World* instance = [] {
    auto* fresh = new World;
    fresh->settings = {{"devices", 1},
                       {"memory_bytes", 1ull << 30},
                       {"multiprocessors", 132},
                       {"sm_granularity", 8},
                       {"granularity_bytes", 2ull << 20},
                       {"driver_version", 13000},
                       {"other_user_bytes", 0},
                       {"context_bytes", 500ull << 20},
                       {"module_bytes", 64u << 10},
                       {"page_bytes", 2ull << 20},
                       {"fill", 1},
                       {"hidden", 1},
                       {"host_numa_id", 0},
                       {"host_numa_memory", 1},
                       {"host_numa_pools", 1},
                       {"host_memory", 1},
                       {"host_create_fails", 0},
                       {"hardware_queues", 8},
                       {"event_step_ns", 500},
                       {"late_wake_ns", 0},
                       {"doorbell_spin_ns", 0},
                       {"nvml_lists_process", 1},
                       {"nvml_others", 0},
                       {"nvml_hangs", 0},
                       {"hanging_device", 0},
                       {"mig_instances", 0},
                       {"costs", 0},
                       {"copy_bytes_per_s", 0},
                       {"pinned_limit_bytes", 0},
                       {"serial_host_functions", 1},
                       {"frees_hold_lock", 1},
                       {"leaks", 1}};
    read_environment(*fresh);
    spin_first(fresh->mutex);
    fresh->memory_file = memfd_create("cuda-standin", MFD_CLOEXEC);
    return fresh;
  }();
  return *instance;
}

std::vector<Context*>& context_stack() {
  static thread_local std::vector<Context*> stack;
  return stack;
}
int& host_function_depth() {
  static thread_local int depth = 0;
  return depth;
}
int& thread_capture_mode() {
  static thread_local int mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  return mode;
}

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

void cost(Cost what) {
  static constexpr uint64_t kNs[] = {29'000, 8'000, 38'000, 34'000, 23'000, 300'000'000};
  World& w = world();
  if (w.setting("costs") != 0) w.cost_ns += kNs[static_cast<size_t>(what)];
}

void cost_of_pinning(uint64_t bytes) {
  constexpr double kNsAByte = 0.4;
  World& w = world();
  if (w.setting("costs") != 0) w.cost_ns += static_cast<uint64_t>(kNsAByte * static_cast<double>(bytes));
}

void record_misuse(const std::string& call, const std::string& what) {
  World& w = world();
  w.misuses.push_back(call + ": " + what);
  if (std::getenv("CUDA_STANDIN_ABORT") != nullptr) {
    std::fprintf(stderr, "cuda stand-in: misuse: %s\n", w.misuses.back().c_str());
    std::abort();
  }
}

Call::Call(const char* name, bool needs_init) : lock_(world().mutex) {
  World& w = world();
  // A host function's call is refused below; it must not wait for a free that waits for the function.
  if (host_function_depth() == 0) w.progress.wait(lock_, [&] { return !w.held_by_free; });
  const std::string base = base_name(name);
  ++w.calls[base];
  text_ = base + "#" + std::to_string(++w.call_number);
  if (needs_init && !w.initialised) {
    verdict_ = misuse(CUDA_ERROR_NOT_INITIALIZED, "called before cuInit");
    return;
  }
  if (host_function_depth() > 0) {
    verdict_ = misuse(CUDA_ERROR_NOT_PERMITTED, "called from a host function of a stream");
    return;
  }
  for (auto fault = w.faults.begin(); fault != w.faults.end(); ++fault) {
    if (!fault->name.empty() && fault->name != base) continue;
    if (--fault->calls_left > 0) continue;
    (fault->asynchronous ? work_fails_with_ : verdict_) = fault->result;
    w.faults.erase(fault);
    return;
  }
}

CUresult Call::misuse(CUresult result, const std::string& what) const {
  record_misuse(text_, what);
  return result;
}

Context* root(Context* context) {
  return context->parent != nullptr ? context->parent : context;
}

Context* Call::context() {
  if (context_ != nullptr) return context_;
  if (context_stack().empty() || context_stack().back() == nullptr) {
    verdict_ =
        misuse(CUDA_ERROR_INVALID_CONTEXT, "wrong context: no context is current to the calling thread");
    return nullptr;
  }
  Context* context = context_stack().back();
  if (!context->alive()) {
    verdict_ = misuse(CUDA_ERROR_CONTEXT_IS_DESTROYED,
                      "wrong context: the current one was destroyed by " + context->died);
    return nullptr;
  }
  if (root(context)->error != CUDA_SUCCESS) {
    verdict_ = root(context)->error;
    return nullptr;
  }
  context_ = context;
  return context;
}

Stream* Call::stream(CUstream handle) {
  Context* current = context();
  if (current == nullptr) return nullptr;
  if (handle == nullptr || handle == reinterpret_cast<CUstream>(1)) return current->legacy;
  World& w = world();
  const auto it = w.streams.find(handle);
  if (it == w.streams.end()) {
    verdict_ = misuse(CUDA_ERROR_INVALID_HANDLE, "not a stream");
    return nullptr;
  }
  Stream* stream = it->second.get();
  if (!stream->alive()) {
    verdict_ =
        misuse(CUDA_ERROR_INVALID_HANDLE, "use after destroy: the stream was destroyed by " + stream->died);
    return nullptr;
  }
  if (root(stream->context) != root(current)) {
    verdict_ = misuse(CUDA_ERROR_INVALID_HANDLE, "wrong context: the stream of " + stream->born +
                                                     " belongs to the context of " + stream->context->born +
                                                     ", current is that of " + current->born);
    return nullptr;
  }
  return stream;
}

Event* Call::event(CUevent handle) {
  Context* current = context();
  if (current == nullptr) return nullptr;
  World& w = world();
  const auto it = w.events.find(handle);
  if (it == w.events.end()) {
    verdict_ = misuse(CUDA_ERROR_INVALID_HANDLE, "not an event");
    return nullptr;
  }
  Event* event = it->second.get();
  if (!event->alive()) {
    verdict_ =
        misuse(CUDA_ERROR_INVALID_HANDLE, "use after destroy: the event was destroyed by " + event->died);
    return nullptr;
  }
  return event;
}

bool Call::unsafe_during_capture() {
  World& w = world();
  if (thread_capture_mode() == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  bool refused = false;
  for (Capture* capture : w.active_captures) {
    if (capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
    const bool own = capture->thread == std::this_thread::get_id();
    if (!own && (capture->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL ||
                 thread_capture_mode() == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
      continue;
    capture->invalid = true;
    refused = true;
  }
  if (refused) {
    verdict_ = misuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                      "not allowed while a stream captures a graph; the capture is invalid");
  }
  return refused;
}

}  // namespace standin

using standin::world;

STANDIN_API int standin_configure(const char* key, uint64_t value) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return standin::set(world(), key, value) ? 0 : -1;
}

STANDIN_API void standin_fail_call(const char* name, uint64_t at_call, int result) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().faults.push_back({name, std::max<uint64_t>(at_call, 1), result, false});
}

STANDIN_API void standin_fail_work(const char* name, uint64_t at_call, int result) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().faults.push_back({name, std::max<uint64_t>(at_call, 1), result, true});
}

STANDIN_API void standin_poison(int device, int result) {
  standin::World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  if (device >= 0 && static_cast<size_t>(device) < w.devices.size() && w.devices[device].primary != nullptr)
    standin::poison(w.devices[device].primary, result);
}

STANDIN_API void standin_clear_faults(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().faults.clear();
}

STANDIN_API size_t standin_misuse_count(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().misuses.size();
}

STANDIN_API int standin_take_misuse(char* text, size_t size) {
  standin::World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  if (w.misuses.empty()) return 0;
  if (size > 0) std::snprintf(text, size, "%s", w.misuses.front().c_str());
  w.misuses.pop_front();
  return 1;
}

STANDIN_API size_t standin_leaks(char* text, size_t size) {
  std::lock_guard<std::mutex> lock(world().mutex);
  std::string all;
  const size_t count = standin::list_leaks(&all);
  if (size > 0) std::snprintf(text, size, "%s", all.c_str());
  return count;
}

STANDIN_API uint64_t standin_cost_ns(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().cost_ns;
}

STANDIN_API void* standin_storage(uint64_t address) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return reinterpret_cast<void*>(standin::storage_of(address));
}

STANDIN_API uint64_t standin_calls(const char* name) {
  standin::World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  const auto it = w.calls.find(name);
  return it == w.calls.end() ? 0 : it->second;
}

STANDIN_API void standin_register_kernel(const char* name, standin_kernel kernel, const size_t* param_bytes,
                                         size_t param_count, standin_accesses accesses) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().kernels[name] = {kernel, std::vector<size_t>(param_bytes, param_bytes + param_count), accesses};
}
