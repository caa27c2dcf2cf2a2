// work.cpp: streams, events, launches, copies and graphs on the shared device (device.hpp). Without one each of these
// only records.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "recorder.hpp"

RECORDER_API gpushare::shim::Result cuGraphInstantiateWithFlags(void* out_exec, void* graph, uint64_t flags);

using namespace recorder;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

namespace recorder {
namespace {

constexpr Result kInvalidHandle = 400, kNotReady = 600, kDone = kSuccess;

struct Graph {
  std::vector<device::Work> nodes;
  bool captures = false;
};
struct Stream {
  int number = -1;
  int priority = 0;
  uint32_t flags = 0;
  uint64_t context = 0;
  Graph* capture = nullptr;
};
struct Event {
  int device = 0;
  int stream = -1;  // of its last record; -1: never recorded
  uint64_t number = 0;
  bool ended = false;
  uint64_t end_ns = 0;
  Graph* captured_in = nullptr;
};
struct Function {
  std::string name;
  device::Work work;
  bool per_block = false, by_argument = false;
};
struct HostFunction {
  int stream;
  uint64_t number;
  std::function<void()> run;
};

// Objects of this process, by handle. Ended objects are forgotten. A child of fork keeps handles; as with the driver,
// they mean nothing there.
struct World {
  std::mutex mutex;
  Stream legacy[device::kMostDevices];
  World() {
    for (int device = 0; device < device::kMostDevices; ++device)
      legacy[device] = {device * device::kStreams, 0, 0};
  }
  std::unordered_map<const void*, std::unique_ptr<Stream>> streams;
  std::unordered_map<const void*, std::unique_ptr<Event>> events;
  std::unordered_map<const void*, std::unique_ptr<Graph>> graphs;
  std::unordered_map<const void*, std::vector<device::Work>> execs;
  std::map<std::string, std::unique_ptr<Function>> functions;
  std::unordered_map<const void*, Function*> by_handle;
  std::deque<HostFunction> host_functions;
  bool host_thread = false;
};
World& world() {
  static auto* all = new World;
  return *all;
}

struct PerThread {
  Stream stream;
  ~PerThread() {
    if (stream.number >= 0) device::close_stream(stream.number);
  }
};

// Null: no such stream.
Stream* stream_of(P handle, bool per_thread) {
  const auto value = reinterpret_cast<uint64_t>(handle);
  World& w = world();
  if (value == 2 || (value == 0 && per_thread)) {
    thread_local PerThread of_devices[device::kMostDevices];
    PerThread& own = of_devices[current_device()];
    if (own.stream.number < 0) own.stream.number = device::open_stream(true, 0, current_device());
    return own.stream.number < 0 ? nullptr : &own.stream;
  }
  if (value <= 1) return &w.legacy[current_device()];
  const std::lock_guard lock(w.mutex);
  const auto it = w.streams.find(handle);
  return it == w.streams.end() ? nullptr : it->second.get();
}
Event* event_of(P handle) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  const auto it = w.events.find(handle);
  return it == w.events.end() ? nullptr : it->second.get();
}
template <class T>
T* at(P pointer) {
  return static_cast<T*>(pointer);
}

Result enqueue(Stream* stream, const device::Work& work, uint64_t* out_number = nullptr) {
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capture != nullptr) {
    const std::lock_guard lock(world().mutex);
    stream->capture->nodes.push_back(work);
    return kSuccess;
  }
  const uint64_t number = device::publish(stream->number, work);
  if (out_number != nullptr) *out_number = number;
  return kSuccess;
}
void wait_for(const Stream& stream) {
  if (const uint64_t number = device::newest(stream.number); number != 0) device::wait(stream.number, number);
}

// ---- kernels ------------------------------------------------------------------------------------------------------------------------

Function parse(const std::string& name) {
  Function function;
  function.name = name;
  function.work.cost_ns = device::setting_kernel_ns();
  function.by_argument = name.find("_arg") != std::string::npos;
  function.per_block = name.find("_per_block") != std::string::npos;
  for (size_t at = name.find('_'); at != std::string::npos; at = name.find('_', at + 1)) {
    const char* begin = name.c_str() + at + 1;
    char* end = nullptr;
    if (*begin == 'w') {
      const unsigned long width = std::strtoul(begin + 1, &end, 10);
      if (end != begin + 1 && width >= 1 && width <= 100)
        function.work.width_percent = static_cast<uint16_t>(width);
      continue;
    }
    const uint64_t value = std::strtoull(begin, &end, 10);
    if (end == begin) continue;
    const uint64_t unit = std::strncmp(end, "ns", 2) == 0   ? 1
                          : std::strncmp(end, "us", 2) == 0 ? 1'000
                          : std::strncmp(end, "ms", 2) == 0 ? 1'000'000
                                                            : 0;
    if (unit != 0) function.work.cost_ns = value * unit;
  }
  return function;
}
Result find_function(P out_function, P name) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  auto& function = w.functions[at<const char>(name)];
  if (function == nullptr) {
    function = std::make_unique<Function>(parse(at<const char>(name)));
    w.by_handle[function.get()] = function.get();
  }
  *at<void*>(out_function) = function.get();
  return kSuccess;
}
device::Work kernel(P handle, uint64_t blocks, P parameters) {
  World& w = world();
  device::Work work;
  const std::lock_guard lock(w.mutex);
  const auto it = w.by_handle.find(handle);
  if (it == w.by_handle.end()) {
    work.cost_ns = device::setting_kernel_ns();
    return work;
  }
  const Function& function = *it->second;
  work = function.work;
  if (function.by_argument && parameters != nullptr) work.cost_ns = **at<uint64_t*>(parameters);
  if (function.per_block) work.cost_ns *= blocks;
  return work;
}
Result launch(P function, uint64_t blocks, P handle, P parameters, bool per_thread) {
  Stream* stream = stream_of(handle, per_thread);
  if (stream != nullptr && device::device_of(stream->number) != current_device()) return kInvalidHandle;
  return enqueue(stream, kernel(function, blocks, parameters));
}
// CUlaunchConfig: grid, block and shared memory (7 words), the stream.
Result launch_by(P config, P function, P parameters, bool per_thread) {
  const auto* words = at<uint32_t>(config);
  void* stream = nullptr;
  std::memcpy(&stream, at<char>(config) + 32, sizeof stream);
  return launch(function, uint64_t{words[0]} * words[1] * words[2], stream, parameters, per_thread);
}

// ---- host functions
// -----------------------------------------------------------------------------------------------------------------

void run_host_functions() {
  World& w = world();
  for (;;) {
    HostFunction next{};
    {
      const std::lock_guard lock(w.mutex);
      const auto it = std::find_if(w.host_functions.begin(), w.host_functions.end(),
                                   [](const HostFunction& f) { return device::reached(f.stream, f.number); });
      if (it != w.host_functions.end()) {
        next = std::move(*it);
        w.host_functions.erase(it);
      } else if (w.host_functions.empty()) {
        w.host_thread = false;
        return;
      }
    }
    if (next.run) {
      next.run();
      device::release(next.stream, next.number);
    } else {
      device::pause_ns(0);
    }
  }
}
Result host_function(P handle, bool per_thread, std::function<void()> run) {
  Stream* stream = stream_of(handle, per_thread);
  uint64_t number = 0;
  device::Work work;
  work.kind = device::Kind::host;
  if (stream != nullptr && stream->capture != nullptr) return kNotSupported;
  const Result result = enqueue(stream, work, &number);
  if (result != kSuccess) return result;
  World& w = world();
  const std::lock_guard lock(w.mutex);
  w.host_functions.push_back({stream->number, number, std::move(run)});
  if (!w.host_thread) std::thread(run_host_functions).detach();
  w.host_thread = true;
  return kSuccess;
}

// ---- streams and events
// -------------------------------------------------------------------------------------------------------------

Result destroy_stream(P handle) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  const auto it = w.streams.find(handle);
  if (it == w.streams.end()) return kInvalidHandle;
  device::close_stream(it->second->number);
  w.streams.erase(it);
  return kSuccess;
}
Result synchronize(P handle, bool per_thread) {
  const Stream* stream = stream_of(handle, per_thread);
  if (stream == nullptr) return kInvalidHandle;
  wait_for(*stream);
  return kSuccess;
}
Result query(P handle, bool per_thread) {
  const Stream* stream = stream_of(handle, per_thread);
  if (stream == nullptr) return kInvalidHandle;
  const uint64_t number = device::newest(stream->number);
  return number == 0 || device::completed(stream->number, number, nullptr) ? kDone : kNotReady;
}
Result wait_event(P handle, P event_handle, bool per_thread) {
  Stream* stream = stream_of(handle, per_thread);
  const Event* event = event_of(event_handle);
  if (stream == nullptr || event == nullptr) return kInvalidHandle;
  if (event->captured_in != nullptr) {
    stream->capture = event->captured_in;
    return kSuccess;
  }
  if (event->stream < 0 || event->ended) return kSuccess;
  if (device::device_of(event->stream) != device::device_of(stream->number)) {
    device::wait(event->stream, event->number);  // clocks of two devices: the host waits instead
    return kSuccess;
  }
  device::Work work;
  work.kind = device::Kind::wait;
  work.wait_stream = event->stream;
  work.wait_number = event->number;
  return enqueue(stream, work);
}
Result record(P event_handle, P handle, bool per_thread) {
  Stream* stream = stream_of(handle, per_thread);
  Event* event = event_of(event_handle);
  if (stream == nullptr || event == nullptr) return kInvalidHandle;
  if (event->device != device::device_of(stream->number)) return kInvalidHandle;
  event->captured_in = stream->capture;
  if (stream->capture != nullptr) return kSuccess;
  device::Work work;
  work.kind = device::Kind::record;
  event->ended = false;
  const Result result = enqueue(stream, work, &event->number);
  event->stream = stream->number;
  return result;
}
bool ended(Event& event) {
  if (event.stream < 0 || event.ended) return true;
  event.ended = device::completed(event.stream, event.number, &event.end_ns);
  return event.ended;
}
Result elapsed(P out_milliseconds, P first, P second) {
  Event* begin = event_of(first);
  Event* end = event_of(second);
  if (begin == nullptr || end == nullptr || begin->stream < 0 || end->stream < 0) return kInvalidHandle;
  if (!ended(*begin) || !ended(*end)) return kNotReady;
  const double difference = static_cast<double>(end->end_ns) - static_cast<double>(begin->end_ns);
  *at<float>(out_milliseconds) = static_cast<float>(difference / 1e6);
  return kSuccess;
}

// ---- graphs -------------------------------------------------------------------------------------------------------------------------

P keep(std::unique_ptr<Graph> graph) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  P handle = graph.get();
  w.graphs[handle] = std::move(graph);
  return handle;
}
Result begin_capture(P handle, bool per_thread) {
  Stream* stream = stream_of(handle, per_thread);
  if (stream == nullptr || stream->number % device::kStreams == 0) return kInvalidHandle;
  auto graph = std::make_unique<Graph>();
  graph->captures = true;
  stream->capture = graph.get();
  keep(std::move(graph));
  return kSuccess;
}
Result end_capture(P handle, P out_graph, bool per_thread) {
  Stream* stream = stream_of(handle, per_thread);
  if (stream == nullptr || stream->capture == nullptr) return kInvalidHandle;
  Graph* graph = stream->capture;
  graph->captures = false;
  World& w = world();
  const std::lock_guard lock(w.mutex);
  stream->capture = nullptr;
  for (auto& [key, other] : w.streams)
    if (other->capture == graph) other->capture = nullptr;
  *at<void*>(out_graph) = graph;
  return kSuccess;
}
Result add_kernel(P out_node, P graph, P parameters) {
  // CUDA_KERNEL_NODE_PARAMS: function, grid, block and shared memory (7 words), the parameters.
  const auto* words = at<uint32_t>(parameters);
  void *function = nullptr, *values = nullptr;
  std::memcpy(&function, parameters, sizeof function);
  std::memcpy(&values, at<char>(parameters) + 40, sizeof values);
  const device::Work work = kernel(function, uint64_t{words[2]} * words[3] * words[4], values);
  World& w = world();
  const std::lock_guard lock(w.mutex);
  const auto it = w.graphs.find(graph);
  if (it == w.graphs.end()) return kInvalidHandle;
  it->second->nodes.push_back(work);
  *at<void*>(out_node) = &it->second->nodes;
  return kSuccess;
}
Result launch_graph(P exec, P handle, bool per_thread) {
  std::vector<device::Work> nodes;
  {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    const auto it = w.execs.find(exec);
    if (it == w.execs.end()) return kInvalidHandle;
    nodes = it->second;
  }
  for (const device::Work& node : nodes)
    if (const Result result = enqueue(stream_of(handle, per_thread), node); result != kSuccess) return result;
  return kSuccess;
}

constexpr const char* kNames[] = {
#define GPUSHARE_ENTRY(cls, name, base, version, parameters, arguments) #name,
#define GPUSHARE_NAME(cls, name) #name,
#include "shim/driver_table.inc"
#undef GPUSHARE_ENTRY
#undef GPUSHARE_NAME
};

}  // namespace

Result create_stream(P out_stream, uint32_t flags, int priority) {
  const int number = device::open_stream((flags & 1U) == 0, priority, current_device());
  if (number < 0) return kOutOfMemory;
  auto stream = std::make_unique<Stream>(Stream{number, priority, flags, current_context(), nullptr});
  World& w = world();
  const std::lock_guard lock(w.mutex);
  *at<void*>(out_stream) = stream.get();
  w.streams[stream.get()] = std::move(stream);
  return kSuccess;
}
Result context_of_stream(P handle, uint64_t* out_context) {
  const Stream* stream = stream_of(handle, false);
  if (stream == nullptr) return kInvalidHandle;
  *out_context = stream->context != 0 ? stream->context : current_context();
  return kSuccess;
}
bool is_capturing(P handle, bool per_thread) {
  const Stream* stream = device::on() ? stream_of(handle, per_thread) : nullptr;
  return stream != nullptr && stream->capture != nullptr;
}
void instantiated(P exec, P graph) {
  if (!device::on()) return;
  World& w = world();
  const std::lock_guard lock(w.mutex);
  const auto it = w.graphs.find(graph);
  if (it != w.graphs.end()) w.execs[exec] = it->second->nodes;
}
void exec_destroyed(P exec) {
  if (!device::on()) return;
  World& w = world();
  const std::lock_guard lock(w.mutex);
  w.execs.erase(exec);
}

Result transfer(int entry, const Argument* arguments, int count) {
  const std::string name = kNames[entry];
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (has("cuGraphUpload")) return kSuccess;
  const bool async = has("Async"), per_thread = has("_ptsz") || has("_ptds"), set = has("Memset");
  P handle = nullptr;
  uint64_t bytes = 0;
  for (int i = 0; i < count; ++i) {
    if (arguments[i].kind == 'P' && async) handle = reinterpret_cast<P>(arguments[i].value);
    if (arguments[i].kind == 'L') bytes = arguments[i].value;  // the last number, unless below
  }
  const auto* words = reinterpret_cast<const uint64_t*>(arguments[0].value);
  if (has("Memset2D") || has("D2D8") || has("D2D16") || has("D2D32")) {
    bytes = arguments[3].value * arguments[4].value;
  } else if (has("cuMemcpyBatch")) {
    bytes = 0;
    for (uint64_t i = 0; i < arguments[3].value; ++i)
      bytes += reinterpret_cast<const uint64_t*>(arguments[2].value)[i];
  } else if (has("Batch")) {
    bytes = 0;
  } else if (has("cuMemPrefetch")) {
    bytes = arguments[1].value;
  } else if (has("cuMemcpy2D")) {
    bytes = has("_v2") ? words[14] * words[15] : 0;
  } else if (has("cuMemcpy3D")) {
    bytes = has("_v2") || has("Peer") ? words[22] * words[23] * words[24] : 0;
  }
  if (set) bytes *= has("D32") ? 4 : has("D16") ? 2 : 1;
  const bool inside = set || has("DtoD") || has("AtoA") || has("AtoD") || has("DtoA");
  device::Work work;
  work.kind = inside ? device::Kind::compute : device::Kind::copy;
  work.cost_ns = device::copy_cost_ns(bytes, inside);
  Stream* stream = stream_of(handle, per_thread);
  const Result result = enqueue(stream, work);
  // Fills and copies within the device return before they are done.
  if (result == kSuccess && !async && !inside) wait_for(*stream);
  return result;
}

}  // namespace recorder

#define DEVICE_BODY(name, parameters, ...) \
  RECORDER_API Result name parameters {    \
    RECORDER_NOTE(name, __VA_ARGS__)       \
    if (!device::on()) return kSuccess;
#define WORK_BODY(name, parameters, ...)            \
  RECORDER_API Result name parameters {             \
    g_work.fetch_add(1, std::memory_order_relaxed); \
    RECORDER_NOTE(name, __VA_ARGS__)                \
    if (!device::on()) return kSuccess;

// clang-format off
WORK_BODY(cuLaunchKernel, (P a, I b, I c, I d, I e, I f, I g, I h, P i, P j, P k), a, b, c, d, e, f, g, h, i, j, k)
  return launch(a, uint64_t{b} * c * d, i, j, false); }
WORK_BODY(cuLaunchKernel_ptsz, (P a, I b, I c, I d, I e, I f, I g, I h, P i, P j, P k), a, b, c, d, e, f, g, h, i, j, k)
  return launch(a, uint64_t{b} * c * d, i, j, true); }
WORK_BODY(cuLaunchCooperativeKernel, (P a, I b, I c, I d, I e, I f, I g, I h, P i, P j), a, b, c, d, e, f, g, h, i, j)
  return launch(a, uint64_t{b} * c * d, i, j, false); }
WORK_BODY(cuLaunchCooperativeKernel_ptsz, (P a, I b, I c, I d, I e, I f, I g, I h, P i, P j), a, b, c, d, e, f, g, h, i, j)
  return launch(a, uint64_t{b} * c * d, i, j, true); }
WORK_BODY(cuLaunchKernelEx, (P a, P b, P c, P d), a, b, c, d) return launch_by(a, b, c, false); }
WORK_BODY(cuLaunchKernelEx_ptsz, (P a, P b, P c, P d), a, b, c, d) return launch_by(a, b, c, true); }
WORK_BODY(cuLaunch, (P a), a) return launch(a, 1, nullptr, nullptr, false); }
WORK_BODY(cuLaunchGrid, (P a, I b, I c), a, b, c) return launch(a, uint64_t{b} * c, nullptr, nullptr, false); }
WORK_BODY(cuLaunchGridAsync, (P a, I b, I c, P d), a, b, c, d) return launch(a, uint64_t{b} * c, d, nullptr, false); }
// CUDA_LAUNCH_PARAMS: 64 bytes: function, 7 words, the stream, the parameters.
WORK_BODY(cuLaunchCooperativeKernelMultiDevice, (P a, I b, I c), a, b, c)
  for (I n = 0; n < b; ++n) {
    const char* one = at<char>(a) + 64 * size_t{n};
    void* pointers[8];
    uint32_t grid[3];
    std::memcpy(&pointers[0], one, sizeof pointers);
    std::memcpy(&grid[0], one + 8, sizeof grid);
    if (const Result result = launch(pointers[0], uint64_t{grid[0]} * grid[1] * grid[2], pointers[5], pointers[6], false); result != kSuccess) return result;
  }
  return kSuccess; }
RECORDER_API Result cuGraphLaunch(P a, P b) {
  g_work.fetch_add(1, std::memory_order_relaxed); RECORDER_NOTE(cuGraphLaunch, a, b)
  note_graph_launch(a); return !device::on() ? kSuccess : launch_graph(a, b, false); }
RECORDER_API Result cuGraphLaunch_ptsz(P a, P b) {
  g_work.fetch_add(1, std::memory_order_relaxed); RECORDER_NOTE(cuGraphLaunch_ptsz, a, b)
  note_graph_launch(a); return !device::on() ? kSuccess : launch_graph(a, b, true); }

DEVICE_BODY(cuModuleGetFunction, (P a, P b, P c), a, b, c) return find_function(a, c); }
DEVICE_BODY(cuLibraryGetKernel, (P a, P b, P c), a, b, c) return find_function(a, c); }
DEVICE_BODY(cuKernelGetFunction, (P a, P b), a, b) *at<void*>(a) = b; return kSuccess; }
DEVICE_BODY(cuFuncGetName, (P a, P b), a, b) *at<const char*>(a) = at<Function>(b)->name.c_str(); return kSuccess; }
DEVICE_BODY(cuKernelGetName, (P a, P b), a, b) *at<const char*>(a) = at<Function>(b)->name.c_str(); return kSuccess; }

DEVICE_BODY(cuStreamCreateWithPriority, (P a, I b, I c), a, b, c) return create_stream(a, b, static_cast<int>(c)); }
DEVICE_BODY(cuStreamDestroy, (P a), a) return destroy_stream(a); }
DEVICE_BODY(cuStreamDestroy_v2, (P a), a) return destroy_stream(a); }
DEVICE_BODY(cuStreamQuery, (P a), a) return query(a, false); }
DEVICE_BODY(cuStreamQuery_ptsz, (P a), a) return query(a, true); }
DEVICE_BODY(cuStreamSynchronize, (P a), a) return synchronize(a, false); }
DEVICE_BODY(cuStreamSynchronize_ptsz, (P a), a) return synchronize(a, true); }
DEVICE_BODY(cuStreamWaitEvent, (P a, P b, I c), a, b, c) return wait_event(a, b, false); }
DEVICE_BODY(cuStreamWaitEvent_ptsz, (P a, P b, I c), a, b, c) return wait_event(a, b, true); }
DEVICE_BODY(cuStreamGetPriority, (P a, P b), a, b)
  const Stream* s = stream_of(a, false); if (s == nullptr) return kInvalidHandle; *at<int>(b) = s->priority; return kSuccess; }
DEVICE_BODY(cuStreamGetPriority_ptsz, (P a, P b), a, b)
  const Stream* s = stream_of(a, true); if (s == nullptr) return kInvalidHandle; *at<int>(b) = s->priority; return kSuccess; }
DEVICE_BODY(cuStreamGetFlags, (P a, P b), a, b)
  const Stream* s = stream_of(a, false); if (s == nullptr) return kInvalidHandle; *at<uint32_t>(b) = s->flags; return kSuccess; }
DEVICE_BODY(cuStreamGetFlags_ptsz, (P a, P b), a, b)
  const Stream* s = stream_of(a, true); if (s == nullptr) return kInvalidHandle; *at<uint32_t>(b) = s->flags; return kSuccess; }
DEVICE_BODY(cuLaunchHostFunc, (P a, P b, P c), a, b, c) return host_function(a, false, [=] { reinterpret_cast<void (*)(void*)>(b)(c); }); }
DEVICE_BODY(cuLaunchHostFunc_ptsz, (P a, P b, P c), a, b, c) return host_function(a, true, [=] { reinterpret_cast<void (*)(void*)>(b)(c); }); }
DEVICE_BODY(cuStreamAddCallback, (P a, P b, P c, I d), a, b, c, d)
  return host_function(a, false, [=] { reinterpret_cast<void (*)(void*, Result, void*)>(b)(a, kSuccess, c); }); }
DEVICE_BODY(cuStreamAddCallback_ptsz, (P a, P b, P c, I d), a, b, c, d)
  return host_function(a, true, [=] { reinterpret_cast<void (*)(void*, Result, void*)>(b)(a, kSuccess, c); }); }
RECORDER_API Result cuCtxSynchronize() {
  if (g_armed == kEntry_cuCtxSynchronize) { note(kEntry_cuCtxSynchronize); if (g_result != 0) return g_result; }
  if (device::on()) device::wait_all(current_device());
  pools_synchronized();
  return kSuccess; }
DEVICE_BODY(cuCtxSynchronize_v2, (P a), a) device::wait_all(current_device()); return kSuccess; }

DEVICE_BODY(cuEventCreate, (P a, I b), a, b)
  auto event = std::make_unique<Event>(); event->device = current_device(); World& w = world(); const std::lock_guard lock(w.mutex);
  *at<void*>(a) = event.get(); w.events[event.get()] = std::move(event); return kSuccess; }
DEVICE_BODY(cuEventDestroy, (P a), a) World& w = world(); const std::lock_guard lock(w.mutex); return w.events.erase(a) != 0 ? kDone : kInvalidHandle; }
DEVICE_BODY(cuEventDestroy_v2, (P a), a) World& w = world(); const std::lock_guard lock(w.mutex); return w.events.erase(a) != 0 ? kDone : kInvalidHandle; }
DEVICE_BODY(cuEventRecord, (P a, P b), a, b) return record(a, b, false); }
DEVICE_BODY(cuEventRecord_ptsz, (P a, P b), a, b) return record(a, b, true); }
DEVICE_BODY(cuEventRecordWithFlags, (P a, P b, I c), a, b, c) return record(a, b, false); }
DEVICE_BODY(cuEventRecordWithFlags_ptsz, (P a, P b, I c), a, b, c) return record(a, b, true); }
DEVICE_BODY(cuEventQuery, (P a), a) Event* e = event_of(a); return e == nullptr ? kInvalidHandle : ended(*e) ? kDone : kNotReady; }
DEVICE_BODY(cuEventSynchronize, (P a), a)
  Event* e = event_of(a); if (e == nullptr) return kInvalidHandle;
  if (!ended(*e)) device::wait(e->stream, e->number);
  ended(*e); return kSuccess; }
DEVICE_BODY(cuEventElapsedTime, (P a, P b, P c), a, b, c) return elapsed(a, b, c); }
DEVICE_BODY(cuEventElapsedTime_v2, (P a, P b, P c), a, b, c) return elapsed(a, b, c); }

DEVICE_BODY(cuStreamBeginCapture, (P a), a) return begin_capture(a, false); }
DEVICE_BODY(cuStreamBeginCapture_ptsz, (P a), a) return begin_capture(a, true); }
DEVICE_BODY(cuStreamBeginCapture_v2, (P a, I b), a, b) return begin_capture(a, false); }
DEVICE_BODY(cuStreamBeginCapture_v2_ptsz, (P a, I b), a, b) return begin_capture(a, true); }
DEVICE_BODY(cuStreamEndCapture, (P a, P b), a, b) return end_capture(a, b, false); }
DEVICE_BODY(cuStreamEndCapture_ptsz, (P a, P b), a, b) return end_capture(a, b, true); }
DEVICE_BODY(cuGraphCreate, (P a, I b), a, b) *at<void*>(a) = keep(std::make_unique<Graph>()); return kSuccess; }
DEVICE_BODY(cuGraphDestroy, (P a), a) World& w = world(); const std::lock_guard lock(w.mutex); return w.graphs.erase(a) != 0 ? kDone : kInvalidHandle; }
DEVICE_BODY(cuGraphAddKernelNode, (P a, P b, P c, L d, P e), a, b, c, d, e) return add_kernel(a, b, e); }
DEVICE_BODY(cuGraphAddKernelNode_v2, (P a, P b, P c, L d, P e), a, b, c, d, e) return add_kernel(a, b, e); }
// The other ways of making a graph executable.
DEVICE_BODY(cuGraphInstantiate, (P a, P b, P c, P d, L e), a, b, c, d, e) return cuGraphInstantiateWithFlags(a, b, 0); }
DEVICE_BODY(cuGraphInstantiate_v2, (P a, P b, P c, P d, L e), a, b, c, d, e) return cuGraphInstantiateWithFlags(a, b, 0); }
DEVICE_BODY(cuGraphInstantiateWithParams, (P a, P b, P c), a, b, c) return cuGraphInstantiateWithFlags(a, b, 0); }
DEVICE_BODY(cuGraphInstantiateWithParams_ptsz, (P a, P b, P c), a, b, c) return cuGraphInstantiateWithFlags(a, b, 0); }
// clang-format on
