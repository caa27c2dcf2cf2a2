// world.hpp: the state of the stand-in: devices, contexts, streams, events, memory, and the rules that are
// checked.
//
// One lock guards all of it; work runs outside the lock, on one thread a stream. No object is ever
// deallocated, so that a stale handle is recognised for what it is.
//
// Order of accesses. Each op has a number in its stream. A stream knows, for each other stream, up to which
// op its own next op comes after (by event waits); the process knows up to which op it has seen each stream
// finish (by waits, successful queries and host functions). An access races with an earlier one on another
// stream unless one of the two covers it. Both are known when the op is enqueued, so that the verdict does
// not depend on timing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "device/cuda/driver_api.hpp"
#include "standin.h"

namespace standin {

using namespace gpushare::device::cuda::api;  // NOLINT(google-build-using-namespace): the driver's own type
                                              // names

enum : CUresult {
  CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915,
  CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
  CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
  CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
  CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_OPERATING_SYSTEM = 304,
};

using Clock = std::map<uint32_t, uint64_t>;  // stream id -> number of an op
void join(Clock& into, const Clock& from);

struct Context;
struct Stream;
struct Event;
struct Capture;

struct Object {
  std::string born;  // "cuStreamCreate#7"
  std::string died;  // empty while alive
  bool alive() const { return died.empty(); }
};

struct Range {
  uint64_t address;
  uint64_t bytes;
  bool writes;
};

// One piece of work. Copyable: graphs run it many times.
struct Work {
  std::string call;
  std::vector<Range> ranges;
  std::function<void()> run;  // null: nothing to do
  bool host_function = false;
  uint64_t copied_bytes = 0;
  CUresult fails_with = CUDA_SUCCESS;
  Event* records = nullptr;  // its time is stamped
};

struct QueuedOp {
  Work work;
  uint64_t number = 0;
  Clock before;                 // what had finished when it starts, for host functions
  Stream* waits_for = nullptr;  // until that stream has completed `waits_until` ops
  uint64_t waits_until = 0;
  uint64_t ticket = 0;  // its number in the stream's hardware queue, from 1; 0: it needs none
  uint64_t record_stamp = 0;
};

// A hardware queue: ops begin in the order in which they were enqueued, whatever their streams, so that one that has to wait
// holds up all behind it.
struct HardwareQueue {
  uint64_t enqueued = 0;
  uint64_t begun = 0;
};

struct Context : Object {
  int device = 0;
  bool primary = false;
  uint64_t references = 0;
  Context* parent = nullptr;  // of a green context: the primary one
  CUresult error = CUDA_SUCCESS;
  Stream* legacy = nullptr;
  uint64_t host_functions_come = 0;  // in this order they run, one at a time
  uint64_t host_functions_gone = 0;
  unsigned multiprocessors = 0;
  std::vector<HardwareQueue> hardware;  // shared by the streams in turn
  size_t next_hardware = 0;
};

struct Stream : Object {
  uint32_t id = 0;
  HardwareQueue* hardware = nullptr;  // null: their number is not limited
  Context* context = nullptr;
  int priority = 0;
  bool blocking = false;  // waits for the legacy default stream, and it for this one
  bool stopping = false;
  uint64_t enqueued = 0;
  uint64_t completed = 0;
  Clock known;
  std::deque<QueuedOp> queue;
  std::condition_variable work_came;
  std::atomic<uint64_t> rung{0};  // ops that have come
  std::thread thread;
  Capture* capture = nullptr;
};

struct Event : Object {
  Context* context = nullptr;
  bool timing = true;
  Stream* stream = nullptr;  // of the last record; null: never recorded
  uint64_t number = 0;
  uint64_t stamp = 0;  // how often recorded
  Clock after;         // what has finished once it has passed
  uint64_t time_ns = 0;
  Capture* captured_in = nullptr;
  Stream* captured_on = nullptr;
};

struct Graph : Object {
  std::vector<Work> nodes;
};
struct GraphExec : Object {
  std::vector<Work> nodes;
};
struct Capture {
  std::unique_ptr<Graph> graph;
  Stream* origin = nullptr;
  int mode = 0;
  std::thread::id thread;
  bool invalid = false;
  std::set<Stream*> streams;
  std::set<Stream*> unjoined;
};

struct Access {
  uint32_t stream;
  uint64_t number;
  uint64_t begin;
  uint64_t end;
  bool writes;
  std::string call;
};

enum class BlockKind { kDevice, kManaged, kPinned, kMapping };

// The calls that cost time with costs=h100 (control.cpp).
enum class Cost { kCreate, kMap, kSetAccess, kUnmap, kRelease, kContext };

struct Block : Object {
  BlockKind kind = BlockKind::kDevice;
  Context* context = nullptr;
  int device = 0;
  uint64_t bytes = 0;
  uint64_t accounted = 0;
  uint64_t physical = 0;   // kMapping: the handle
  bool accessible = true;  // kMapping: after cuMemSetAccess
  bool writable = true;    // kMapping: by cuMemSetAccess
  std::vector<Access> accesses;
};
struct Reservation : Object {
  uint64_t bytes = 0;
};
// Where the bytes of device addresses are: at addresses of their own, so that the host cannot touch the device's.
struct Storage {
  uint64_t bytes;
  uint64_t address;
};
struct Physical : Object {
  int device = 0;
  uint64_t bytes = 0;
  uint64_t file_offset = 0;
  uint64_t mappings = 0;
  bool released = false;
  int own_file = -1;      // made to be exported, or imported: a memory file of its own
  bool imported = false;  // another handle, perhaps of another process, is accounted for it
  bool on_host = false;   // host memory: not accounted on the device
};

struct Kernel {
  standin_kernel function;
  std::vector<size_t> param_bytes;
  standin_accesses accesses;
};

struct Fault {
  std::string name;
  uint64_t calls_left;
  CUresult result;
  bool asynchronous;
};

struct Device {
  uint64_t used_bytes = 0;   // of whole pages: physical memory, and blocks of half a page or more
  uint64_t small_bytes = 0;  // of the blocks that share pages
  Context* primary = nullptr;
};

struct World {
  std::mutex mutex;
  std::condition_variable progress;  // some stream completed an op

  std::map<std::string, uint64_t> settings;
  bool initialised = false;
  bool held_by_free = false;  // a thread waits in cuMemFree or cuMemFreeHost, and no other call begins
  bool checks_done = false;
  std::vector<Device> devices;
  uint64_t call_number = 0;
  std::map<std::string, uint64_t> calls;
  std::vector<Fault> faults;
  std::deque<std::string> misuses;
  std::map<std::string, Kernel> kernels;

  std::unordered_map<const void*, std::unique_ptr<Context>> contexts;
  std::unordered_map<const void*, std::unique_ptr<Stream>> streams;
  std::unordered_map<const void*, std::unique_ptr<Event>> events;
  std::unordered_map<const void*, std::unique_ptr<Graph>> graphs;
  std::unordered_map<const void*, std::unique_ptr<GraphExec>> graph_execs;
  std::unordered_map<const void*, std::unique_ptr<Object>> modules;
  std::vector<std::unique_ptr<Capture>> captures;
  std::set<Capture*> active_captures;

  Clock observed;
  uint32_t next_stream_id = 1;
  std::map<uint64_t, Block> blocks;
  std::map<uint64_t, Reservation> reservations;
  std::map<uint64_t, Storage> storage;
  std::map<uint64_t, Physical> physicals;
  std::map<uint64_t, std::pair<uint64_t, std::string>> graves;  // begin -> (end, "freed by cuMemFree#3")
  uint64_t next_physical = 1;
  uint64_t pinned_bytes = 0;
  uint64_t cost_ns = 0;
  int memory_file = -1;
  uint64_t memory_file_end = 0;

  uint64_t setting(const char* key) const { return settings.at(key); }
  // Of a device as CUDA shows it: a GPU, or an instance of one.
  uint64_t device_bytes() const {
    return setting("memory_bytes") / std::max<uint64_t>(setting("mig_instances"), 1);
  }
};

World& world();

// The frame of an entry point: takes the lock, counts, and answers what was ordered to fail.
class Call {
 public:
  // `needs_init`: everything but cuInit and what may come before it.
  explicit Call(const char* name, bool needs_init = true);
  CUresult verdict() const { return verdict_; }  // not CUDA_SUCCESS: return it
  std::unique_lock<std::mutex>& lock() { return lock_; }
  const std::string& text() const { return text_; }  // "cuMemFree#45"
  CUresult work_fails_with() const { return work_fails_with_; }

  // Records a misuse by this call and returns `result`.
  CUresult misuse(CUresult result, const std::string& what) const;
  // The current context; null (with verdict() set) if there is none, or the context is poisoned.
  Context* context();
  // The stream of a handle, checked against the current context; null with verdict() set.
  Stream* stream(CUstream handle);
  Event* event(CUevent handle);
  // Refuses (and ends captures) if a capture forbids this kind of call to this thread now.
  bool unsafe_during_capture();

 private:
  std::unique_lock<std::mutex> lock_;
  std::string text_;
  CUresult verdict_ = CUDA_SUCCESS;
  CUresult work_fails_with_ = CUDA_SUCCESS;
  Context* context_ = nullptr;
};

#define STANDIN_ENTRY(name)  \
  standin::Call call(#name); \
  if (call.verdict() != standin::CUDA_SUCCESS) return call.verdict()
#define STANDIN_CONTEXT()                           \
  standin::Context* const context = call.context(); \
  if (context == nullptr) return call.verdict()
#define STANDIN_API extern "C" __attribute__((visibility("default")))

uint64_t now_ns();
// Adds what a call costs to the clock of costs. The lock is held.
void cost(Cost what);
void cost_of_pinning(uint64_t bytes);
// Thread-local: contexts pushed by the calling thread; whether it runs a host function; its capture mode.
std::vector<Context*>& context_stack();
int& host_function_depth();
int& thread_capture_mode();

Context* make_context(const std::string& call, int device);
void end_context(Call& call, Context* context);
// The objects of `context` that are still alive, as text; empty if there are none.
std::string held_by(const Context* context);
void record_misuse(const std::string& call, const std::string& what);

// Streams (streams.cpp).
Stream* make_stream(const std::string& call, Context* context, int priority, bool blocking);
void stop_stream(Call& call, Stream* stream);
// Checks the ranges and enqueues, or adds the work to the capture. The lock is held throughout.
CUresult enqueue(Call& call, Stream* stream, Work work);
// Waits (releasing the lock) until `stream` has completed `number` ops.
void wait_completed(std::unique_lock<std::mutex>& lock, Stream* stream, uint64_t number);
Clock finished_by(const Stream* stream);
void poison(Context* context, CUresult result);
// The context whose error counts: a green context shares its parent's.
Context* root(Context* context);

// Memory (memory.cpp).
// Checks one access of an op about to be enqueued and remembers it. Not CUDA_SUCCESS after a misuse.
CUresult check_access(const Call& call, const Stream* stream, uint64_t number, const Range& range,
                      bool* out_unordered = nullptr);
// Where the host finds the bytes of a device address; the address itself for memory that the host may touch too.
uint64_t storage_of(uint64_t address);
// Whether the whole range lies in pinned memory of ours.
bool is_pinned(uint64_t address, uint64_t bytes);
size_t list_leaks(std::string* out_text);

}  // namespace standin
