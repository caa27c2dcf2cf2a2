// A backend to start yours from: the smallest device that passes the conformance suite. Its memory is the host's, each
// stream is a thread that does one piece of work after another, and it has none of the optional groups (virtual memory,
// modelled work, faults, partitions, ipc, graphs, adopted streams): their ops stay null.
//
//   c++ -std=c++17 -shared -fPIC null_backend.cpp -o libnull_backend.so $(pkg-config --cflags gpushare) -pthread
//   GPUSHARE_CTS_LIBRARY=$PWD/libnull_backend.so GPUSHARE_CTS_SPEC=null GPUSHARE_CTS_EXCUSES=null_excuses.txt
//   gpushare-conformance
//
// To make it yours: rename it, put your driver's calls where memory, streams and events are made and used, and keep the
// frame: what each op checks, which status it gives, and that it says why (fail). backend.h is the contract.
// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace {

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kDefaultBytes = uint64_t{1} << 30;

// ---- errors: each op that fails stores why, for its thread
// ------------------------------------------------------------------------

thread_local gpushare_backend_error g_error{};

int32_t fail(int32_t status, const std::string& message) {
  g_error.status = status;
  g_error.native_code = 0;
  std::snprintf(g_error.message, sizeof g_error.message, "%s", message.c_str());
  return status;
}
int32_t no_handle(const char* what) {
  return fail(GPUSHARE_INVALID_HANDLE, std::string("the ") + what + " is null");
}
int32_t no_output(const char* what) {
  return fail(GPUSHARE_INVALID_ARGUMENT, std::string(what) + " is null");
}
// No exception leaves an op.
template <class F>
int32_t guarded(F body) noexcept {
  try {
    return body();
  } catch (...) {
    return GPUSHARE_HOST_OUT_OF_MEMORY;
  }
}

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

// ---- a stream's progress, which its events share and which may outlive it
// ---------------------------------------------------------

struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t enqueued = 0, done = 0;
  int32_t failure = GPUSHARE_OK;  // sticky
  uint64_t failed_from = 0;       // this piece of work and all behind it

  // OK, NOT_READY or the failure.
  int32_t at(uint64_t piece) const {
    if (done < piece) return GPUSHARE_NOT_READY;
    return failure != GPUSHARE_OK && piece >= failed_from ? failure : GPUSHARE_OK;
  }
};
// Whose work this thread is doing: it must not wait for it.
thread_local const Progress* g_working_for = nullptr;

int32_t answer(int32_t status) {
  return status == GPUSHARE_OK || status == GPUSHARE_NOT_READY
             ? status
             : fail(status, "a host function threw; the work behind it on its stream was dropped");
}
int32_t wait_for(Progress& progress, uint64_t piece) {
  std::unique_lock<std::mutex> lock(progress.mutex);
  if (progress.done < piece && g_working_for == &progress)
    return fail(GPUSHARE_INVALID_STATE, "a host function waits for work behind it on its own stream");
  progress.changed.wait(lock, [&] { return progress.done >= piece; });
  return answer(progress.at(piece));
}

// A point in a stream. `passed_ns` is written before the piece is done.
struct Point {
  std::shared_ptr<Progress> progress;  // null: never recorded
  uint64_t piece = 0;
  std::shared_ptr<std::atomic<uint64_t>> passed_ns;
};

}  // namespace

struct gpushare_backend_device {
  uint64_t total_bytes = kDefaultBytes;
  std::mutex mutex;
  uint64_t used_bytes = 0;
  std::map<uint64_t, uint64_t> blocks;  // address to bytes
  std::set<void*> host_blocks;
  std::set<gpushare_backend_stream*> streams;
  std::set<gpushare_backend_event*> events;
};

struct gpushare_backend_stream {
  gpushare_backend_device* device = nullptr;
  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
  std::deque<std::function<void()>> queue;  // under progress->mutex, as is `ending`
  bool ending = false;
  std::thread thread;

  void work() {
    g_working_for = progress.get();
    std::unique_lock<std::mutex> lock(progress->mutex);
    while (true) {
      progress->changed.wait(lock, [this] { return ending || !queue.empty(); });
      if (queue.empty()) return;
      const std::function<void()> piece = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      bool threw = false;
      try {
        piece();
      } catch (...) {
        threw = true;
      }
      lock.lock();
      ++progress->done;
      if (threw) {
        progress->failure = GPUSHARE_CALLBACK_FAILED;
        progress->failed_from = progress->done;
        progress->done = progress->enqueued;
        queue.clear();
      }
      progress->changed.notify_all();
    }
  }

  // The number of the piece is written to *out_piece, if given.
  int32_t enqueue(std::function<void()> piece, uint64_t* out_piece = nullptr) {
    const std::lock_guard<std::mutex> lock(progress->mutex);
    if (progress->failure != GPUSHARE_OK) return answer(progress->failure);
    queue.push_back(std::move(piece));
    ++progress->enqueued;
    if (out_piece != nullptr) *out_piece = progress->enqueued;
    progress->changed.notify_all();
    return GPUSHARE_OK;
  }
};

struct gpushare_backend_event {
  gpushare_backend_device* device = nullptr;
  uint32_t flags = 0;
  std::mutex mutex;
  Point point;  // of the last record

  Point now() {
    const std::lock_guard<std::mutex> lock(mutex);
    return point;
  }
};

namespace {

using Device = gpushare_backend_device;
using Stream = gpushare_backend_stream;
using Event = gpushare_backend_event;

// ---- device -----------------------------------------------------------------------------------------------------------------------

int32_t probe(uint32_t* out_count) {
  if (out_count == nullptr) return no_output("out_device_count");
  *out_count =
      1;  // yours: without touching the devices; UNAVAILABLE, with the reason, where there is no driver
  return GPUSHARE_OK;
}

int32_t device_open(uint32_t index, const char* options, Device** out_device) {
  return guarded([&]() -> int32_t {
    if (out_device == nullptr) return no_output("out_device");
    if (index != 0) return fail(GPUSHARE_UNAVAILABLE, "there is one null device, null:0");
    auto device = std::make_unique<Device>();
    if (*options != 0) {
      const std::string given = options;
      char* end = nullptr;
      if (given.rfind("memory=", 0) == 0) device->total_bytes = std::strtoull(options + 7, &end, 10);
      if (end == nullptr || *end != 0 || device->total_bytes == 0)
        return fail(GPUSHARE_INVALID_ARGUMENT,
                    "option '" + given + "' of a null device; allowed is memory=BYTES");
    }
    *out_device = device.release();
    return GPUSHARE_OK;
  });
}

int32_t stream_destroy(Stream* stream);
int32_t event_destroy(Event* event);

int32_t device_close(Device* device) {
  if (device == nullptr) return no_handle("device");
  return guarded([&]() -> int32_t {
    const std::unique_ptr<Device> owned(device);
    const size_t streams = device->streams.size(), events = device->events.size(),
                 blocks = device->blocks.size() + device->host_blocks.size();
    for (Stream* stream : device->streams) (void)wait_for(*stream->progress, stream->progress->enqueued);
    while (!device->streams.empty()) (void)stream_destroy(*device->streams.begin());
    while (!device->events.empty()) (void)event_destroy(*device->events.begin());
    for (const auto& block : device->blocks) std::free(reinterpret_cast<void*>(block.first));
    for (void* block : device->host_blocks) std::free(block);
    if (streams + events + blocks == 0) return GPUSHARE_OK;
    return fail(GPUSHARE_INVALID_STATE,
                "closed with " + std::to_string(streams) + " stream(s), " + std::to_string(events) +
                    " event(s) and " + std::to_string(blocks) + " allocation(s) left; release them first");
  });
}

int32_t device_info(Device* device, gpushare_backend_device_info* out_info) {
  if (device == nullptr) return no_handle("device");
  if (out_info == nullptr) return no_output("out_info");
  gpushare_backend_device_info info{};
  info.struct_size = out_info->struct_size;
  info.capabilities = GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE;
  std::snprintf(info.name, sizeof info.name, "null");
  info.total_bytes = device->total_bytes;
  {
    const std::lock_guard<std::mutex> lock(device->mutex);
    info.free_bytes = device->total_bytes - device->used_bytes;
  }
  info.allocation_alignment_bytes = kAlignment;
  info.compute_units = 1;
  std::memcpy(out_info, &info, std::min<size_t>(out_info->struct_size, sizeof info));
  return GPUSHARE_OK;
}

int32_t clock_now(Device* device, uint64_t* out_ns) {
  if (device == nullptr) return no_handle("device");
  if (out_ns == nullptr) return no_output("out_ns");
  *out_ns = now_ns();
  return GPUSHARE_OK;
}

int32_t last_error(gpushare_backend_error* out_error) {
  if (out_error == nullptr)
    return GPUSHARE_INVALID_ARGUMENT;  // not stored: it would hide what the caller asks for
  g_error.struct_size = out_error->struct_size;
  std::memcpy(out_error, &g_error, std::min<size_t>(out_error->struct_size, sizeof g_error));
  return GPUSHARE_OK;
}

// ---- memory -----------------------------------------------------------------------------------------------------------------------

int32_t mem_alloc(Device* device, uint64_t bytes, gpushare_device_address* out_address) {
  if (device == nullptr) return no_handle("device");
  if (out_address == nullptr) return no_output("out_address");
  return guarded([&]() -> int32_t {
    if (bytes == 0) return fail(GPUSHARE_INVALID_ARGUMENT, "an allocation of 0 bytes");
    const std::lock_guard<std::mutex> lock(device->mutex);
    const uint64_t free_bytes = device->total_bytes - device->used_bytes;
    const uint64_t rounded = bytes > free_bytes ? bytes : (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* const block = rounded > free_bytes ? nullptr : std::aligned_alloc(kAlignment, rounded);
    if (block == nullptr)
      return fail(GPUSHARE_DEVICE_OUT_OF_MEMORY, std::to_string(bytes) + " bytes asked for, " +
                                                     std::to_string(free_bytes) + " of " +
                                                     std::to_string(device->total_bytes) + " are free");
    const auto address = reinterpret_cast<uint64_t>(block);
    device->blocks.emplace(address, rounded);
    device->used_bytes += rounded;
    *out_address = address;
    return GPUSHARE_OK;
  });
}

int32_t mem_free(Device* device, gpushare_device_address address) {
  if (device == nullptr) return no_handle("device");
  const std::lock_guard<std::mutex> lock(device->mutex);
  const auto block = device->blocks.find(address);
  if (block == device->blocks.end())
    return fail(GPUSHARE_INVALID_ARGUMENT, "no allocation begins at this address");
  device->used_bytes -= block->second;
  std::free(reinterpret_cast<void*>(block->first));
  device->blocks.erase(block);
  return GPUSHARE_OK;
}

int32_t host_alloc(Device* device, uint64_t bytes, void** out_pointer) {
  if (device == nullptr) return no_handle("device");
  if (out_pointer == nullptr) return no_output("out_pointer");
  return guarded([&]() -> int32_t {
    if (bytes == 0) return fail(GPUSHARE_INVALID_ARGUMENT, "an allocation of 0 bytes");
    const std::lock_guard<std::mutex> lock(device->mutex);
    void* const block = std::malloc(bytes);
    if (block == nullptr)
      return fail(GPUSHARE_HOST_OUT_OF_MEMORY, "no host memory for " + std::to_string(bytes) + " bytes");
    device->host_blocks.insert(block);
    *out_pointer = block;
    return GPUSHARE_OK;
  });
}

int32_t host_free(Device* device, void* pointer) {
  if (device == nullptr) return no_handle("device");
  const std::lock_guard<std::mutex> lock(device->mutex);
  if (device->host_blocks.erase(pointer) == 0)
    return fail(GPUSHARE_INVALID_ARGUMENT, "not a pointer of host_alloc, or freed already");
  std::free(pointer);
  return GPUSHARE_OK;
}

// Whether all bytes lie in one allocation.
bool is_live(Device& device, uint64_t address, uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(device.mutex);
  auto block = device.blocks.upper_bound(address);
  if (block == device.blocks.begin()) return false;
  --block;
  const uint64_t offset = address - block->first;
  return offset <= block->second && bytes <= block->second - offset;
}

// ---- streams ----------------------------------------------------------------------------------------------------------------------

int32_t stream_create(Device* device, int32_t /*priority: ignored without PRIORITIES*/, Stream** out_stream) {
  if (device == nullptr) return no_handle("device");
  if (out_stream == nullptr) return no_output("out_stream");
  return guarded([&]() -> int32_t {
    auto stream = std::make_unique<Stream>();
    stream->device = device;
    const std::lock_guard<std::mutex> lock(device->mutex);
    device->streams.insert(stream.get());
    try {
      stream->thread = std::thread(&Stream::work, stream.get());
    } catch (...) {
      device->streams.erase(stream.get());
      throw;
    }
    *out_stream = stream.release();
    return GPUSHARE_OK;
  });
}

int32_t stream_destroy(Stream* stream) {
  if (stream == nullptr) return no_handle("stream");
  if (g_working_for == stream->progress.get())
    return fail(GPUSHARE_INVALID_STATE, "a host function destroys the stream that runs it");
  {
    const std::lock_guard<std::mutex> lock(stream->progress->mutex);
    stream->ending = true;
    stream->progress->changed.notify_all();
  }
  stream->thread.join();
  {
    const std::lock_guard<std::mutex> lock(stream->device->mutex);
    stream->device->streams.erase(stream);
  }
  delete stream;
  return GPUSHARE_OK;
}

int32_t stream_query(Stream* stream) {
  if (stream == nullptr) return no_handle("stream");
  const std::lock_guard<std::mutex> lock(stream->progress->mutex);
  return answer(stream->progress->failure != GPUSHARE_OK ? stream->progress->failure
                                                         : stream->progress->at(stream->progress->enqueued));
}

int32_t stream_synchronize(Stream* stream) {
  if (stream == nullptr) return no_handle("stream");
  Progress& progress = *stream->progress;
  uint64_t last = 0;
  {
    const std::lock_guard<std::mutex> lock(progress.mutex);
    last = progress.enqueued;
  }
  if (g_working_for == &progress)
    return fail(GPUSHARE_INVALID_STATE, "a host function waits for the stream that runs it");
  const int32_t status = wait_for(progress, last);
  if (status != GPUSHARE_OK) return status;
  const std::lock_guard<std::mutex> lock(progress.mutex);
  return answer(progress.failure);
}

int32_t stream_wait_event(Stream* stream, Event* event) {
  if (stream == nullptr) return no_handle("stream");
  if (event == nullptr) return no_handle("event");
  return guarded([&]() -> int32_t {
    if (stream->device != event->device)
      return fail(GPUSHARE_INVALID_ARGUMENT, "the event is of another device");
    const Point point = event->now();
    if (point.progress == nullptr || point.progress == stream->progress) return stream->enqueue([] {});
    return stream->enqueue([point] {
      std::unique_lock<std::mutex> lock(point.progress->mutex);  // a wait orders, it does not carry failures
      point.progress->changed.wait(lock, [&] { return point.progress->done >= point.piece; });
    });
  });
}

int32_t stream_native(Stream* stream, void** out_native) {
  if (stream == nullptr) return no_handle("stream");
  if (out_native == nullptr) return no_output("out_native");
  *out_native = stream;
  return GPUSHARE_OK;
}

// ---- events -----------------------------------------------------------------------------------------------------------------------

int32_t event_create(Device* device, uint32_t flags, Event** out_event) {
  if (device == nullptr) return no_handle("device");
  if (out_event == nullptr) return no_output("out_event");
  return guarded([&]() -> int32_t {
    if ((flags & ~uint32_t{GPUSHARE_EVENT_TIMING}) != 0)
      return fail(GPUSHARE_INVALID_ARGUMENT, "unknown flags of an event; GPUSHARE_EVENT_TIMING is allowed");
    auto event = std::make_unique<Event>();
    event->device = device;
    event->flags = flags;
    const std::lock_guard<std::mutex> lock(device->mutex);
    device->events.insert(event.get());
    *out_event = event.release();
    return GPUSHARE_OK;
  });
}

int32_t event_destroy(Event* event) {
  if (event == nullptr) return no_handle("event");
  {
    const std::lock_guard<std::mutex> lock(event->device->mutex);
    event->device->events.erase(event);
  }
  delete event;
  return GPUSHARE_OK;
}

int32_t event_record(Event* event, Stream* stream) {
  if (event == nullptr) return no_handle("event");
  if (stream == nullptr) return no_handle("stream");
  return guarded([&]() -> int32_t {
    if (stream->device != event->device)
      return fail(GPUSHARE_INVALID_ARGUMENT, "the event is of another device");
    Point point{stream->progress, 0, std::make_shared<std::atomic<uint64_t>>(0)};
    const int32_t status =
        stream->enqueue([passed_ns = point.passed_ns] { passed_ns->store(now_ns()); }, &point.piece);
    if (status != GPUSHARE_OK) return status;
    const std::lock_guard<std::mutex> lock(event->mutex);
    event->point = std::move(point);
    return GPUSHARE_OK;
  });
}

int32_t event_query(Event* event) {
  if (event == nullptr) return no_handle("event");
  const Point point = event->now();
  if (point.progress == nullptr) return GPUSHARE_OK;
  const std::lock_guard<std::mutex> lock(point.progress->mutex);
  return answer(point.progress->at(point.piece));
}

int32_t event_synchronize(Event* event) {
  if (event == nullptr) return no_handle("event");
  const Point point = event->now();
  return point.progress == nullptr ? int32_t{GPUSHARE_OK} : wait_for(*point.progress, point.piece);
}

int32_t event_elapsed(Event* start, Event* end, uint64_t* out_ns) {
  if (start == nullptr || end == nullptr) return no_handle("event");
  if (out_ns == nullptr) return no_output("out_ns");
  uint64_t passed_ns[2];
  Event* const events[2] = {start, end};
  for (int i = 0; i < 2; ++i) {
    const Point point = events[i]->now();
    if (point.progress == nullptr || (events[i]->flags & GPUSHARE_EVENT_TIMING) == 0)
      return fail(GPUSHARE_INVALID_STATE,
                  "an event was never recorded, or was created without GPUSHARE_EVENT_TIMING");
    const std::lock_guard<std::mutex> lock(point.progress->mutex);
    if (const int32_t status = answer(point.progress->at(point.piece)); status != GPUSHARE_OK) return status;
    passed_ns[i] = point.passed_ns->load();
  }
  if (passed_ns[1] < passed_ns[0]) return fail(GPUSHARE_INVALID_STATE, "`end` passed before `start`");
  *out_ns = passed_ns[1] - passed_ns[0];
  return GPUSHARE_OK;
}

// ---- work -------------------------------------------------------------------------------------------------------------------------

int32_t copy_async(Stream* stream, uint64_t destination, uint64_t source, uint64_t bytes, uint32_t kind) {
  if (stream == nullptr) return no_handle("stream");
  return guarded([&]() -> int32_t {
    if (kind > GPUSHARE_COPY_DEVICE_TO_DEVICE)
      return fail(GPUSHARE_INVALID_ARGUMENT, "unknown kind of copy; 0 to 2 are allowed");
    if (bytes != 0 && (destination == 0 || source == 0))
      return fail(GPUSHARE_INVALID_ARGUMENT, "one side of the copy is null");
    if ((kind != GPUSHARE_COPY_DEVICE_TO_HOST && !is_live(*stream->device, destination, bytes)) ||
        (kind != GPUSHARE_COPY_HOST_TO_DEVICE && !is_live(*stream->device, source, bytes)))
      return fail(GPUSHARE_INVALID_ARGUMENT, "the copy leaves the device's live memory");
    return stream->enqueue([=] {
      if (bytes != 0)
        std::memmove(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), bytes);
    });
  });
}

int32_t fill_async(Stream* stream, gpushare_device_address address, uint8_t value, uint64_t bytes) {
  if (stream == nullptr) return no_handle("stream");
  return guarded([&]() -> int32_t {
    if (!is_live(*stream->device, address, bytes))
      return fail(GPUSHARE_INVALID_ARGUMENT, "the fill leaves the device's live memory");
    return stream->enqueue([=] { std::memset(reinterpret_cast<void*>(address), value, bytes); });
  });
}

int32_t launch_host(Stream* stream, gpushare_host_function function, void* user_data) {
  if (stream == nullptr) return no_handle("stream");
  return guarded([&]() -> int32_t {
    if (function == nullptr) return fail(GPUSHARE_INVALID_ARGUMENT, "the host function is null");
    return stream->enqueue([=] { function(user_data); });
  });
}

}  // namespace

// gpushare_backend_load looks for this function.
extern "C" __attribute__((visibility("default"))) const gpushare_backend_ops* gpushare_backend_entry_v1(
    void) {
  static const gpushare_backend_ops ops = [] {
    gpushare_backend_ops table{};
    table.struct_size = sizeof table;
    table.abi_version = GPUSHARE_BACKEND_ABI_VERSION;
    table.name = "null";
    table.probe = probe;
    table.device_open = device_open;
    table.device_close = device_close;
    table.device_info = device_info;
    table.clock_now = clock_now;
    table.last_error = last_error;
    table.mem_alloc = mem_alloc;
    table.mem_free = mem_free;
    table.host_alloc = host_alloc;
    table.host_free = host_free;
    table.stream_create = stream_create;
    table.stream_destroy = stream_destroy;
    table.stream_query = stream_query;
    table.stream_synchronize = stream_synchronize;
    table.stream_wait_event = stream_wait_event;
    table.stream_native = stream_native;
    table.event_create = event_create;
    table.event_destroy = event_destroy;
    table.event_record = event_record;
    table.event_query = event_query;
    table.event_synchronize = event_synchronize;
    table.event_elapsed = event_elapsed;
    table.copy_async = copy_async;
    table.fill_async = fill_async;
    table.launch_host = launch_host;
    return table;
  }();
  return &ops;
}
