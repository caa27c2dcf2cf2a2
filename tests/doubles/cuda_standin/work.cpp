// Copies, fills, kernels and graphs.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <memory>

#include "memory.hpp"

using namespace standin;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

namespace standin {
namespace {

struct Side {
  uint64_t address;
  bool device;  // false: a host pointer, of pinned memory of ours or of nobody's
};

CUresult copy(Call& call, CUstream handle, Side destination, Side source, size_t bytes, bool synchronous) {
  Stream* stream = call.stream(handle);
  if (stream == nullptr) return call.verdict();
  if (bytes == 0) return CUDA_SUCCESS;
  Work work;
  if (!source.device || !destination.device) work.copied_bytes = bytes;
  if (source.device || is_pinned(source.address, bytes))
    work.ranges.push_back({source.address, bytes, false});
  if (destination.device || is_pinned(destination.address, bytes))
    work.ranges.push_back({destination.address, bytes, true});
  const bool pageable_source = !source.device && !is_pinned(source.address, bytes);
  const bool pageable_destination = !destination.device && !is_pinned(destination.address, bytes);
  auto* to = reinterpret_cast<char*>(storage_of(destination.address));
  const auto* from = reinterpret_cast<const char*>(storage_of(source.address));
  if (pageable_source && stream->capture == nullptr) {
    // Pageable memory is staged before the call returns: the caller may reuse it at once.
    auto staged = std::make_shared<std::vector<char>>(from, from + bytes);
    work.run = [to, staged] { std::memcpy(to, staged->data(), staged->size()); };
  } else {
    work.run = [to, from, bytes] { std::memmove(to, from, bytes); };
  }
  const bool capturing = stream->capture != nullptr;
  if (synchronous && capturing) {
    stream->capture->invalid = true;
    return call.misuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a synchronous copy on a stream that captures");
  }
  const CUresult result = enqueue(call, stream, std::move(work));
  if (result != CUDA_SUCCESS || capturing || !(synchronous || pageable_destination)) return result;
  const Clock finished = finished_by(stream);
  wait_completed(call.lock(), stream, stream->enqueued);
  join(world().observed, finished);
  return root(stream->context)->error;
}

CUresult fill(Call& call, CUstream handle, CUdeviceptr address, unsigned char value, size_t bytes) {
  Stream* stream = call.stream(handle);
  if (stream == nullptr) return call.verdict();
  if (bytes == 0) return CUDA_SUCCESS;
  Work work;
  work.ranges = {{address, bytes, true}};
  void* const to = reinterpret_cast<void*>(storage_of(address));
  work.run = [to, value, bytes] { std::memset(to, value, bytes); };
  return enqueue(call, stream, std::move(work));
}

struct Module;
struct Function {
  Kernel kernel;
  std::string name;
};
// Found functions live as long as the process, as handles of modules that are gone must be recognised.
std::map<const void*, std::unique_ptr<Function>>& functions() {
  static auto* all = new std::map<const void*, std::unique_ptr<Function>>;
  return *all;
}

// One launch's parameters, copied: the caller's array is gone when the kernel runs.
struct Launch {
  standin_launch launch{};
  std::vector<std::vector<char>> values;
  std::vector<void*> pointers;
};

}  // namespace
}  // namespace standin

STANDIN_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr destination, const void* source, size_t bytes,
                                          CUstream stream) {
  STANDIN_ENTRY(cuMemcpyHtoDAsync);
  return copy(call, stream, {destination, true}, {reinterpret_cast<uint64_t>(source), false}, bytes, false);
}
STANDIN_API CUresult cuMemcpyDtoHAsync_v2(void* destination, CUdeviceptr source, size_t bytes,
                                          CUstream stream) {
  STANDIN_ENTRY(cuMemcpyDtoHAsync);
  return copy(call, stream, {reinterpret_cast<uint64_t>(destination), false}, {source, true}, bytes, false);
}
STANDIN_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr destination, CUdeviceptr source, size_t bytes,
                                          CUstream stream) {
  STANDIN_ENTRY(cuMemcpyDtoDAsync);
  return copy(call, stream, {destination, true}, {source, true}, bytes, false);
}
STANDIN_API CUresult cuMemcpyHtoD_v2(CUdeviceptr destination, const void* source, size_t bytes) {
  STANDIN_ENTRY(cuMemcpyHtoD);
  return copy(call, nullptr, {destination, true}, {reinterpret_cast<uint64_t>(source), false}, bytes, true);
}
STANDIN_API CUresult cuMemcpyDtoH_v2(void* destination, CUdeviceptr source, size_t bytes) {
  STANDIN_ENTRY(cuMemcpyDtoH);
  return copy(call, nullptr, {reinterpret_cast<uint64_t>(destination), false}, {source, true}, bytes, true);
}
STANDIN_API CUresult cuMemcpyDtoD_v2(CUdeviceptr destination, CUdeviceptr source, size_t bytes) {
  STANDIN_ENTRY(cuMemcpyDtoD);
  return copy(call, nullptr, {destination, true}, {source, true}, bytes, false);
}
STANDIN_API CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes,
                                     CUstream stream) {
  STANDIN_ENTRY(cuMemsetD8Async);
  return fill(call, stream, address, value, bytes);
}
STANDIN_API CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t bytes) {
  STANDIN_ENTRY(cuMemsetD8);
  return fill(call, nullptr, address, value, bytes);
}

// ---- kernels
// -------------------------------------------------------------------------------------------------------

using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;

STANDIN_API CUresult cuModuleLoadData(CUmodule* out_module, const void* image) {
  STANDIN_ENTRY(cuModuleLoadData);
  STANDIN_CONTEXT();
  if (image == nullptr) return call.misuse(CUDA_ERROR_INVALID_IMAGE, "the image is null");
  if (!take_memory(context->device, world().setting("module_bytes"))) return CUDA_ERROR_OUT_OF_MEMORY;
  auto owned = std::make_unique<Object>();
  owned->born = call.text();
  *out_module = reinterpret_cast<CUmodule>(owned.get());
  world().modules[owned.get()] = std::move(owned);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuModuleUnload(CUmodule module) {
  STANDIN_ENTRY(cuModuleUnload);
  STANDIN_CONTEXT();
  const auto it = world().modules.find(module);
  if (it == world().modules.end()) return call.misuse(CUDA_ERROR_INVALID_HANDLE, "not a module");
  if (!it->second->alive())
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "double free: unloaded by " + it->second->died);
  it->second->died = call.text();
  give_memory(context->device, world().setting("module_bytes"));
  return CUDA_SUCCESS;
}

// A library is of no context: it takes memory in each primary context that there is.
namespace {
std::vector<int> devices_with_contexts() {
  std::vector<int> out;
  for (size_t i = 0; i < world().devices.size(); ++i)
    if (const Context* primary = world().devices[i].primary; primary != nullptr && primary->alive())
      out.push_back(static_cast<int>(i));
  return out;
}
struct Library : Object {
  std::vector<int> devices;
};
std::map<const void*, std::unique_ptr<Library>>& libraries() {
  static auto* all = new std::map<const void*, std::unique_ptr<Library>>;
  return *all;
}
}  // namespace

STANDIN_API CUresult cuLibraryLoadData(void** out_library, const void* code, void*, void**, unsigned, void*,
                                       void**, unsigned) {
  STANDIN_ENTRY(cuLibraryLoadData);
  if (out_library == nullptr || code == nullptr)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "no image, or no output");
  auto library = std::make_unique<Library>();
  for (const int device : devices_with_contexts()) {
    if (!take_memory(device, world().setting("module_bytes"))) {
      for (const int taken : library->devices) give_memory(taken, world().setting("module_bytes"));
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    library->devices.push_back(device);
  }
  library->born = call.text();
  *out_library = library.get();
  libraries()[library.get()] = std::move(library);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuLibraryUnload(void* library) {
  STANDIN_ENTRY(cuLibraryUnload);
  const auto it = libraries().find(library);
  if (it == libraries().end()) return call.misuse(CUDA_ERROR_INVALID_HANDLE, "not a library");
  if (!it->second->alive())
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "double free: unloaded by " + it->second->died);
  it->second->died = call.text();
  for (const int device : it->second->devices) give_memory(device, world().setting("module_bytes"));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuModuleGetFunction(CUfunction* out_function, CUmodule module, const char* name) {
  STANDIN_ENTRY(cuModuleGetFunction);
  STANDIN_CONTEXT();
  World& w = world();
  const auto it = w.modules.find(module);
  if (it == w.modules.end() || !it->second->alive())
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "not a loaded module");
  const auto kernel = w.kernels.find(name);
  if (kernel == w.kernels.end()) return CUDA_ERROR_NOT_FOUND;
  auto owned = std::make_unique<Function>(Function{kernel->second, name});
  *out_function = reinterpret_cast<CUfunction>(owned.get());
  functions()[owned.get()] = std::move(owned);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                    unsigned block_x, unsigned block_y, unsigned block_z,
                                    unsigned shared_bytes, CUstream stream_handle, void** params,
                                    void** extra) {
  STANDIN_ENTRY(cuLaunchKernel);
  Stream* stream = call.stream(stream_handle);
  if (stream == nullptr) return call.verdict();
  const auto it = functions().find(handle);
  if (it == functions().end()) return call.misuse(CUDA_ERROR_INVALID_HANDLE, "not a function");
  if (grid_x == 0 || grid_y == 0 || grid_z == 0 || block_x == 0 || block_y == 0 || block_z == 0 ||
      static_cast<uint64_t>(block_x) * block_y * block_z > 1024 || extra != nullptr ||
      shared_bytes > (228u << 10))
    return call.misuse(CUDA_ERROR_INVALID_VALUE,
                       "a grid or block of 0, a block above 1024 threads, or extra parameters");
  const Kernel& kernel = it->second->kernel;
  if (params == nullptr && !kernel.param_bytes.empty())
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "kernel " + it->second->name + " has parameters");
  auto launch = std::make_shared<Launch>();
  for (size_t i = 0; i < kernel.param_bytes.size(); ++i) {
    const char* value = static_cast<const char*>(params[i]);
    launch->values.emplace_back(value, value + kernel.param_bytes[i]);
  }
  for (auto& value : launch->values) launch->pointers.push_back(value.data());
  launch->launch = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, launch->pointers.data()};
  Work work;
  if (kernel.accesses != nullptr) {
    kernel.accesses(
        &launch->launch,
        [](void* sink, uint64_t address, uint64_t bytes, int writes) {
          static_cast<std::vector<Range>*>(sink)->push_back({address, bytes, writes != 0});
        },
        &work.ranges);
  }
  work.run = [launch, function = kernel.function] { function(&launch->launch); };
  return enqueue(call, stream, std::move(work));
}

// ---- graphs
// --------------------------------------------------------------------------------------------------------

using CUgraphExec = struct CUgraphExec_st*;

STANDIN_API CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
  STANDIN_ENTRY(cuStreamBeginCapture);
  Stream* stream = call.stream(handle);
  if (stream == nullptr) return call.verdict();
  if (mode < 0 || mode > 2) return call.misuse(CUDA_ERROR_INVALID_VALUE, "unknown mode");
  if (stream->capture != nullptr) return call.misuse(CUDA_ERROR_INVALID_VALUE, "the stream captures already");
  if (stream == stream->context->legacy)
    return call.misuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the default stream cannot capture");
  World& w = world();
  auto capture = std::make_unique<Capture>();
  capture->graph = std::make_unique<Graph>();
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->streams = {stream};
  stream->capture = capture.get();
  w.active_captures.insert(capture.get());
  w.captures.push_back(std::move(capture));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuStreamEndCapture(CUstream handle, CUgraph* out_graph) {
  STANDIN_ENTRY(cuStreamEndCapture);
  Stream* stream = call.stream(handle);
  if (stream == nullptr) return call.verdict();
  Capture* capture = stream->capture;
  if (capture == nullptr || capture->origin != stream)
    return call.misuse(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "the stream began no capture");
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id())
    return call.misuse(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "another thread began the capture");
  World& w = world();
  for (Stream* captured : capture->streams) captured->capture = nullptr;
  w.active_captures.erase(capture);
  *out_graph = nullptr;
  if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!capture->unjoined.empty())
    return call.misuse(CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
                       "the capture forked to a stream that never joined it again");
  capture->graph->born = call.text();
  *out_graph = reinterpret_cast<CUgraph>(capture->graph.get());
  w.graphs[capture->graph.get()] = std::move(capture->graph);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuStreamIsCapturing(CUstream handle, int* status) {
  STANDIN_ENTRY(cuStreamIsCapturing);
  Stream* stream = call.stream(handle);
  if (stream == nullptr) return call.verdict();
  *status = stream->capture == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE
            : stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                       : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  STANDIN_ENTRY(cuThreadExchangeStreamCaptureMode);
  if (mode == nullptr || *mode < 0 || *mode > 2) return call.misuse(CUDA_ERROR_INVALID_VALUE, "unknown mode");
  std::swap(*mode, thread_capture_mode());
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuGraphInstantiateWithFlags(CUgraphExec* out_exec, CUgraph handle,
                                                 unsigned long long flags) {
  STANDIN_ENTRY(cuGraphInstantiateWithFlags);
  World& w = world();
  const auto it = w.graphs.find(handle);
  if (it == w.graphs.end() || !it->second->alive())
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "not a live graph");
  if (flags > 15) return call.misuse(CUDA_ERROR_INVALID_VALUE, "unknown flags");
  auto owned = std::make_unique<GraphExec>();
  owned->born = call.text();
  owned->nodes = it->second->nodes;
  *out_exec = reinterpret_cast<CUgraphExec>(owned.get());
  w.graph_execs[owned.get()] = std::move(owned);
  return CUDA_SUCCESS;
}

// The nodes themselves have no handles.
STANDIN_API CUresult cuGraphGetNodes(CUgraph handle, void** nodes, size_t* count) {
  STANDIN_ENTRY(cuGraphGetNodes);
  const auto it = world().graphs.find(handle);
  if (it == world().graphs.end() || !it->second->alive())
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "not a live graph");
  if (nodes != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  *count = it->second->nodes.size();
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  STANDIN_ENTRY(cuGraphLaunch);
  Stream* stream = call.stream(stream_handle);
  if (stream == nullptr) return call.verdict();
  World& w = world();
  const auto it = w.graph_execs.find(handle);
  if (it == w.graph_execs.end() || !it->second->alive())
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "not a live executable graph");
  for (const Work& node : it->second->nodes) {
    if (const CUresult result = enqueue(call, stream, node); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuGraphDestroy(CUgraph handle) {
  STANDIN_ENTRY(cuGraphDestroy);
  const auto it = world().graphs.find(handle);
  if (it == world().graphs.end()) return call.misuse(CUDA_ERROR_INVALID_HANDLE, "not a graph");
  if (!it->second->alive())
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "double free: destroyed by " + it->second->died);
  it->second->died = call.text();
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuGraphExecDestroy(CUgraphExec handle) {
  STANDIN_ENTRY(cuGraphExecDestroy);
  const auto it = world().graph_execs.find(handle);
  if (it == world().graph_execs.end())
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "not an executable graph");
  if (!it->second->alive())
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "double free: destroyed by " + it->second->died);
  it->second->died = call.text();
  return CUDA_SUCCESS;
}
