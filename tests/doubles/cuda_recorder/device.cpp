// device.cpp: the shared device. A file, mapped by all processes, holds a ring of ops for each process and the state of the device.
//
// There is no thread and no server: whoever wants to know how far the device is locks the page and simulates it up to now. An op runs
// at the time at which it was enqueued or later, never at the time at which somebody looked, so a launch of 200 us takes 200 us of the
// device clock on a machine of any load.
//
// Kills: only its process writes a ring, and a simulation writes into a copy of the state that becomes valid with one store. A process
// may end at any instruction. Its slot has a lock on the file (of the kernel, gone with the process), which tells the others.
// SPDX-License-Identifier: Apache-2.0
#include "device.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "recorder.h"

namespace recorder::device {
namespace {

constexpr uint32_t kMagic = 0x72646576;
constexpr int kProcesses = 32;
constexpr int kStreams = 64;
constexpr uint64_t kRing = 1024;
constexpr uint64_t kScale =
    1024;  // remaining work is kept in parts of a nanosecond, so that sharing rounds nothing away

struct Op {
  Work work;
  int stream;
  uint32_t released;  // host: its function has run
  uint64_t arrived_ns;
  uint64_t end_ns;  // written by simulations; valid once the stream's state says completed
};
struct StreamTraits {
  int32_t blocking;
  int32_t priority;
};
// Written by its process alone.
struct Slot {
  uint64_t published;  // ops
  uint64_t memory_bytes;
  uint32_t streams;  // that were ever opened
  StreamTraits traits[kStreams];
  Op ring[kRing];
};

struct StreamState {
  uint64_t examined;   // ops of the ring that were looked at for this stream
  uint64_t head;       // number of its first op that has not completed; 0: none known
  uint64_t remaining;  // of the head, scaled
  uint64_t completed;  // number of its last completed op
  uint32_t head_is_host_reached;
};
struct ProcessState {
  int32_t pid;  // 0: never used
  int32_t alive;
  char label[24];
  uint64_t compute_ns, copy_ns;  // of the device's time
  uint64_t kernels, copies;
  uint64_t attached_ns, ended_ns;
  StreamState streams[kStreams];
};
struct State {
  uint64_t now_ns;
  int32_t processes;  // slots that were ever used
  int32_t active;     // time slices: whose turn it is
  uint64_t slice_end_ns;
  int32_t copy_process, copy_stream;  // -1: the copy engine is free
  uint64_t switches;
  uint64_t busy_ns;
  ProcessState process[kProcesses];
};
struct Settings {
  uint64_t capacity_bytes, side_by_side, slice_ns, kernel_ns, copy_ns, copy_bytes_per_s, fill_bytes_per_s,
      dilation;
};
struct Page {
  uint32_t magic;
  uint32_t current;  // which of the states is valid
  uint64_t epoch_ns;
  uint64_t looked_ns;  // when the living were last counted
  Settings settings;
  pthread_mutex_t mutex;
  State states[2];
  Slot slots[kProcesses];
};

template <class T>
T load(const T& value) {
  return __atomic_load_n(&value, __ATOMIC_ACQUIRE);
}
template <class T>
void store(T& value, T to) {
  __atomic_store_n(&value, to, __ATOMIC_RELEASE);
}

uint64_t host_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}
uint64_t device_ns(const Page& page) {
  return (host_ns() - page.epoch_ns) / page.settings.dilation;
}

class PageLock {
 public:
  explicit PageLock(Page& page) : mutex_(&page.mutex) {
    if (pthread_mutex_lock(mutex_) == EOWNERDEAD) pthread_mutex_consistent(mutex_);
  }
  ~PageLock() { pthread_mutex_unlock(mutex_); }
  PageLock(const PageLock&) = delete;
  PageLock& operator=(const PageLock&) = delete;

 private:
  pthread_mutex_t* mutex_;
};

bool lock_byte(int file, int command, int at, struct flock* out_lock) {
  *out_lock = {};
  out_lock->l_type = F_WRLCK;
  out_lock->l_whence = SEEK_SET;
  out_lock->l_start = at;
  out_lock->l_len = 1;
  return fcntl(file, command, out_lock) == 0;
}

// ---- simulation: the page is locked -------------------------------------------------------------------------------------------------

struct Simulation {
  Page& page;
  State& s;

  Op& op(int p, uint64_t number) { return page.slots[p].ring[number % kRing]; }
  int streams(int p) { return static_cast<int>(std::min<uint32_t>(load(page.slots[p].streams), kStreams)); }

  void complete(int p, int i) {
    StreamState& stream = s.process[p].streams[i];
    op(p, stream.head).end_ns = s.now_ns;
    stream.completed = stream.head;
    stream.head = 0;
    stream.head_is_host_reached = 0;
  }

  void find_head(int p, int i, uint64_t published) {
    StreamState& stream = s.process[p].streams[i];
    while (stream.head == 0 && stream.examined < published) {
      const Op& next = op(p, ++stream.examined);
      if (next.stream != i) continue;
      stream.head = stream.examined;
      stream.remaining = next.work.cost_ns * kScale;
    }
  }

  // All that comes before the head of this stream by the order of the driver's calls has completed, and it was enqueued by now.
  bool ready(int p, int i) {
    const ProcessState& process = s.process[p];
    const uint64_t head = process.streams[i].head;
    if (head == 0) return false;
    const Op& first = op(p, head);
    if (first.arrived_ns > s.now_ns) return false;
    // The legacy default stream and those that block wait for one another.
    const Slot& slot = page.slots[p];
    if (i == 0) {
      for (int other = 1; other < streams(p); ++other)
        if (slot.traits[other].blocking != 0 && process.streams[other].head != 0 &&
            process.streams[other].head < head)
          return false;
    } else if (slot.traits[i].blocking != 0 && process.streams[0].head != 0 &&
               process.streams[0].head < head) {
      return false;
    }
    return first.work.kind != Kind::wait ||
           process.streams[first.work.wait_stream].completed >= first.work.wait_number;
  }

  // Completes what needs no time.
  void settle() {
    for (int p = 0; p < s.processes; ++p) {
      if (s.process[p].alive == 0) continue;
      const uint64_t published = load(page.slots[p].published);
      for (bool changed = true; changed;) {
        changed = false;
        for (int i = 0; i < streams(p); ++i) find_head(p, i, published);
        for (int i = 0; i < streams(p); ++i) {
          StreamState& stream = s.process[p].streams[i];
          if (!ready(p, i)) continue;
          const Op& first = op(p, stream.head);
          if (first.work.kind == Kind::host) {
            stream.head_is_host_reached = 1;
            if (load(first.released) == 0) continue;
          } else if (first.work.kind != Kind::record && first.work.kind != Kind::wait &&
                     stream.remaining != 0) {
            continue;
          }
          complete(p, i);
          changed = true;
          find_head(p, i, published);
        }
      }
    }
  }

  struct Running {
    int process, stream;
    uint64_t width;
  };

  // The compute ops of a process that are ready, first those of higher priority, then in the order of the calls.
  void ready_of(int p, std::vector<Running>* out) {
    const size_t begin = out->size();
    for (int i = 0; i < streams(p); ++i)
      if (ready(p, i) && op(p, s.process[p].streams[i].head).work.kind == Kind::compute)
        out->push_back({p, i, op(p, s.process[p].streams[i].head).work.width_percent});
    std::sort(out->begin() + static_cast<std::ptrdiff_t>(begin), out->end(),
              [&](const Running& a, const Running& b) {
                const int first = page.slots[p].traits[a.stream].priority,
                          second = page.slots[p].traits[b.stream].priority;
                return first != second
                           ? first < second
                           : s.process[p].streams[a.stream].head < s.process[p].streams[b.stream].head;
              });
  }

  // What runs now; `out_until` is when that must be thought over.
  void choose(std::vector<Running>* running, uint64_t* out_until) {
    running->clear();
    if (page.settings.side_by_side != 0) {
      for (int p = 0; p < s.processes; ++p)
        if (s.process[p].alive != 0) ready_of(p, running);
      return;
    }
    // Time slices: the processes with work take turns. Nobody waits for one that has none.
    std::vector<Running> own;
    int first = -1, others = 0;
    const bool expired = s.now_ns >= s.slice_end_ns;
    for (int step = 0; step < s.processes; ++step) {
      // The active one is looked at first while its slice lasts, and last when it has ended.
      const int p = (std::max(s.active, 0) + step + (expired ? 1 : 0)) % s.processes;
      if (s.process[p].alive == 0) continue;
      own.clear();
      ready_of(p, &own);
      if (own.empty()) continue;
      if (first < 0) {
        first = p;
        *running = own;
      } else {
        ++others;
      }
    }
    if (first < 0) return;
    if (first != s.active || expired) {
      if (first != s.active) ++s.switches;
      s.active = first;
      s.slice_end_ns = s.now_ns + page.settings.slice_ns;
    }
    if (others > 0) *out_until = std::min(*out_until, s.slice_end_ns);
    // As many as fit beside one another.
    uint64_t width = 0;
    size_t fit = 0;
    while (fit < running->size() && (fit == 0 || width + (*running)[fit].width <= 100))
      width += (*running)[fit++].width;
    running->resize(fit);
  }

  void run(uint64_t to_ns) {
    std::vector<Running> running;
    for (;;) {
      settle();
      if (s.now_ns >= to_ns) return;
      uint64_t until = to_ns;
      choose(&running, &until);
      uint64_t width = 0;
      for (const Running& r : running) width += r.width;
      const uint64_t share = std::max<uint64_t>(width, 100);  // everyone runs at 100 / share of its speed
      for (const Running& r : running) {
        const uint64_t left = s.process[r.process].streams[r.stream].remaining;
        until = std::min(until, s.now_ns + (left * share + 100 * kScale - 1) / (100 * kScale));
      }
      // The copy engine does one copy after another, in the order in which they came.
      if (s.copy_process >= 0 && (s.process[s.copy_process].alive == 0 ||
                                  s.process[s.copy_process].streams[s.copy_stream].head == 0))
        s.copy_process = -1;
      uint64_t oldest = UINT64_MAX;
      for (int p = 0; p < s.processes; ++p) {
        if (s.process[p].alive == 0) continue;
        for (int i = 0; i < streams(p); ++i) {
          const uint64_t head = s.process[p].streams[i].head;
          if (head == 0) continue;
          const Op& first = op(p, head);
          if (first.arrived_ns > s.now_ns) {
            until = std::min(until, first.arrived_ns);
          } else if (s.copy_process < 0 && first.work.kind == Kind::copy && first.arrived_ns < oldest &&
                     ready(p, i)) {
            oldest = first.arrived_ns;
            s.copy_stream = i | p << 16;
          }
        }
      }
      if (s.copy_process < 0 && oldest != UINT64_MAX) {
        s.copy_process = s.copy_stream >> 16;
        s.copy_stream &= 0xffff;
      }
      if (s.copy_process >= 0)
        until = std::min(
            until,
            s.now_ns + (s.process[s.copy_process].streams[s.copy_stream].remaining + kScale - 1) / kScale);
      advance(running, share, std::max(until, s.now_ns + 1) - s.now_ns);
    }
  }

  void advance(const std::vector<Running>& running, uint64_t share, uint64_t elapsed) {
    s.now_ns += elapsed;
    if (!running.empty()) s.busy_ns += elapsed;
    for (const Running& r : running) {
      ProcessState& process = s.process[r.process];
      StreamState& stream = process.streams[r.stream];
      const uint64_t done = elapsed * kScale * 100 / share;
      process.compute_ns += elapsed * r.width / share;
      stream.remaining -= std::min(stream.remaining, done);
      if (stream.remaining == 0) {
        ++process.kernels;
        complete(r.process, r.stream);
      }
    }
    if (s.copy_process < 0) return;
    ProcessState& process = s.process[s.copy_process];
    StreamState& stream = process.streams[s.copy_stream];
    process.copy_ns += elapsed;
    stream.remaining -= std::min(stream.remaining, elapsed * kScale);
    if (stream.remaining != 0) return;
    ++process.copies;
    complete(s.copy_process, s.copy_stream);
    s.copy_process = -1;
  }
};

void copy_state(const Page& page, State* to) {
  const State& from = page.states[page.current];
  std::memcpy(static_cast<void*>(to), &from, offsetof(State, process));
  for (int p = 0; p < from.processes; ++p) {
    const auto streams = std::min<uint32_t>(load(page.slots[p].streams), kStreams);
    std::memcpy(static_cast<void*>(&to->process[p]), &from.process[p],
                offsetof(ProcessState, streams) + streams * sizeof(StreamState));
  }
}

// Brings the device up to now. Processes that have ended leave it.
const State& catch_up(Page& page, int file, int own, bool look) {
  State& next = page.states[1 - page.current];
  copy_state(page, &next);
  const uint64_t now = device_ns(page), host = host_ns();
  look = look || host - page.looked_ns > 1'000'000;
  Simulation simulation{page, next};
  // A process that is found dead has worked until now, as a driver notices it no sooner.
  simulation.run(now);
  if (look) {
    page.looked_ns = host;
    for (int p = 0; p < next.processes; ++p) {
      struct flock lock;
      if (next.process[p].alive == 0 || p == own || !lock_byte(file, F_GETLK, p, &lock) ||
          lock.l_type != F_UNLCK)
        continue;
      next.process[p].alive = 0;
      next.process[p].ended_ns = next.now_ns;
      if (next.copy_process == p) next.copy_process = -1;
    }
  }
  store(page.current, 1 - page.current);
  return next;
}

// ---- this process -------------------------------------------------------------------------------------------------------------------

struct Mapped {
  Page* page = nullptr;
  int file = -1;
};

bool parse_settings(const char* text, Settings* out) {
  struct {
    const char* name;
    uint64_t* value;
  } const names[] = {{"capacity_bytes", &out->capacity_bytes},
                     {"side_by_side", &out->side_by_side},
                     {"slice_ns", &out->slice_ns},
                     {"kernel_ns", &out->kernel_ns},
                     {"copy_ns", &out->copy_ns},
                     {"copy_bytes_per_s", &out->copy_bytes_per_s},
                     {"fill_bytes_per_s", &out->fill_bytes_per_s},
                     {"dilation", &out->dilation}};
  for (const char* at = text; at != nullptr && *at != 0;) {
    const size_t length = std::strcspn(at, "=");
    bool known = false;
    for (const auto& [name, value] : names) {
      if (std::strlen(name) != length || std::strncmp(at, name, length) != 0 || at[length] != '=') continue;
      char* end = nullptr;
      *value = std::strtoull(at + length + 1, &end, 10);
      if (end == at + length + 1 || (*end != 0 && *end != ',')) return false;
      at = *end == ',' ? end + 1 : end;
      known = true;
      break;
    }
    if (!known) return false;
  }
  return out->dilation > 0 && out->slice_ns > 0 && out->copy_bytes_per_s > 0 && out->fill_bytes_per_s > 0;
}

// Maps the page of that path, and makes it if there is none. A file is opened once in a process and stays open: closing it would
// give up the process's lock.
Mapped open_page(const std::string& path, const char* settings, bool make) {
  static std::mutex mutex;
  static auto* known = new std::map<std::string, Mapped>;
  const std::lock_guard guard(mutex);
  Mapped& page = (*known)[path];
  if (page.page != nullptr) return page;
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC | (make ? O_CREAT : 0), 0600);
  if (file < 0) return {};
  struct flock lock;
  if (make && !lock_byte(file, F_SETLKW, kProcesses, &lock)) return {};
  const bool fresh = lseek(file, 0, SEEK_END) < static_cast<off_t>(sizeof(Page));
  if (fresh && (!make || ftruncate(file, sizeof(Page)) != 0)) return {};
  void* memory = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return {};
  auto* mapped = static_cast<Page*>(memory);
  if (mapped->magic != kMagic) {
    if (!make) return {};
    mapped->settings = {uint64_t{80} << 30, 0, 2'000'000, 10'000, 1'000, 25'000'000'000,
                        1'000'000'000'000,  1};
    if (!parse_settings(settings, &mapped->settings)) {
      std::fprintf(stderr, "recorder: RECORDER_DEVICE_SETTINGS=%s cannot be read\n", settings);
      return {};
    }
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&mapped->mutex, &attributes);
    mapped->states[0].copy_process = -1;
    mapped->states[0].active = -1;
    mapped->epoch_ns = host_ns();
    store(mapped->magic, kMagic);
  }
  if (make) {
    lock.l_type = F_UNLCK;
    fcntl(file, F_SETLK, &lock);
  }
  return page = {mapped, file};
}

// This process's part, made by its first call; a child of fork begins anew.
struct Client {
  Page* page = nullptr;
  int file = -1;
  int number = -1;  // of its slot
  Slot* slot = nullptr;
  std::mutex mutex;         // of what follows, and of publishing
  std::vector<int> closed;  // streams that may be given out again
  uint64_t newest[kStreams] = {};
  // When ops ended whose place in the ring was taken by later ones: for events that are asked for long afterwards.
  struct Ended {
    uint64_t number, end_ns;
  };
  std::vector<Ended> ended = std::vector<Ended>(1 << 16);

  // The page must be locked.
  const State& now(bool look = false) { return catch_up(*page, file, number, look); }
  const ProcessState& self(const State& state) const { return state.process[number]; }
};
Client* g_client = nullptr;
std::mutex g_setup;

void fork_child() {
  new (&g_setup) std::mutex;
  g_client = nullptr;  // its parent's slot and lock are the parent's
}

Client* attach() {
  const char* path = std::getenv("RECORDER_DEVICE");
  const Mapped mapped = open_page(path, std::getenv("RECORDER_DEVICE_SETTINGS"), true);
  if (mapped.page == nullptr) {
    std::fprintf(stderr, "recorder: RECORDER_DEVICE=%s cannot be used\n", path);
    std::abort();
  }
  static bool watches_fork = false;
  if (!watches_fork) pthread_atfork(nullptr, nullptr, fork_child);
  watches_fork = true;
  auto* client = new Client;
  Page& page = *mapped.page;
  client->page = mapped.page;
  client->file = mapped.file;
  const PageLock lock(page);
  const State& state = client->now(true);
  // A slot that was never used, else that of the process that ended first.
  int number = state.processes;
  if (number == kProcesses) {
    number = -1;
    for (int p = 0; p < kProcesses; ++p)
      if (state.process[p].alive == 0 &&
          (number < 0 || state.process[p].ended_ns < state.process[number].ended_ns))
        number = p;
  }
  struct flock held;
  if (number < 0 || !lock_byte(client->file, F_SETLK, number, &held)) {
    std::fprintf(stderr, "recorder: more than %d processes use RECORDER_DEVICE=%s\n", kProcesses, path);
    std::abort();
  }
  client->number = number;
  client->slot = &page.slots[number];
  client->slot->published = 0;
  client->slot->memory_bytes = 0;
  client->slot->traits[0] = {1, 0};
  State& next = page.states[1 - page.current];
  std::memset(static_cast<void*>(&page.states[page.current].process[number].streams), 0,
              sizeof next.process[number].streams);
  copy_state(page, &next);
  ProcessState& self = next.process[number];
  std::memset(static_cast<void*>(&self), 0, sizeof self);
  store(client->slot->streams, 1U);
  self.pid = getpid();
  self.attached_ns = next.now_ns;
  self.alive = 1;
  if (const char* label = std::getenv("RECORDER_LABEL"))
    std::snprintf(self.label, sizeof self.label, "%s", label);
  next.processes = std::max(next.processes, number + 1);
  store(page.current, 1 - page.current);
  return client;
}

Client& client() {
  if (Client* made = load(g_client)) return *made;
  const std::lock_guard guard(g_setup);
  if (g_client == nullptr) store(g_client, attach());
  return *g_client;
}

// At least how long the op will need from now on.
uint64_t needs_ns(Client& c, const State& state, int stream, uint64_t number) {
  const StreamState& at = c.self(state).streams[stream];
  if (at.head == 0) return 0;
  uint64_t cost = at.remaining / kScale;
  for (uint64_t n = at.head + 1; n <= number; ++n) {
    const Op& op = c.slot->ring[n % kRing];
    if (op.stream == stream) cost += op.work.cost_ns;
  }
  return cost;
}

}  // namespace

int g_on = 0;

bool ask() {
  if (g_on == 0) {
    const char* path = std::getenv("RECORDER_DEVICE");
    __atomic_store_n(&g_on, path != nullptr && *path != 0 ? 2 : 1, __ATOMIC_RELAXED);
  }
  if (g_on == 1) return false;
  client();
  return true;
}

int open_stream(bool blocking, int priority) {
  Client& c = client();
  const std::lock_guard guard(c.mutex);
  int stream = static_cast<int>(c.slot->streams);
  if (stream == kStreams) {
    if (c.closed.empty()) return -1;
    stream = c.closed.front();
    c.closed.erase(c.closed.begin());
    if (c.newest[stream] != 0) wait(stream, c.newest[stream]);
  }
  c.slot->traits[stream] = {blocking ? 1 : 0, priority};
  if (stream == static_cast<int>(c.slot->streams)) store(c.slot->streams, static_cast<uint32_t>(stream) + 1);
  return stream;
}

void close_stream(int stream) {
  Client& c = client();
  const std::lock_guard guard(c.mutex);
  c.closed.push_back(stream);
}

uint64_t publish(int stream, const Work& work) {
  Client& c = client();
  const std::lock_guard guard(c.mutex);
  const uint64_t number = c.slot->published + 1;
  Op& op = c.slot->ring[number % kRing];
  if (number > kRing) {
    wait(op.stream, number - kRing);
    const PageLock lock(*c.page);
    c.ended[(number - kRing) % c.ended.size()] = {number - kRing, op.end_ns};
  }
  op.work = work;
  op.stream = stream;
  op.released = 0;
  op.end_ns = 0;
  op.arrived_ns = device_ns(*c.page);
  c.newest[stream] = number;
  store(c.slot->published, number);
  return number;
}

bool completed(int stream, uint64_t number, uint64_t* out_end_ns) {
  Client& c = client();
  const PageLock lock(*c.page);
  if (c.self(c.now()).streams[stream].completed < number) return false;
  if (out_end_ns == nullptr) return true;
  const Client::Ended& old = c.ended[number % c.ended.size()];
  *out_end_ns = old.number == number ? old.end_ns : c.slot->ring[number % kRing].end_ns;
  return true;
}

void wait(int stream, uint64_t number) {
  Client& c = client();
  for (;;) {
    uint64_t needed = 0;
    {
      const PageLock lock(*c.page);
      const State& state = c.now();
      if (c.self(state).streams[stream].completed >= number) return;
      needed = needs_ns(c, state, stream, number);
    }
    pause_ns(needed);
  }
}

uint64_t newest(int stream) {
  Client& c = client();
  const std::lock_guard guard(c.mutex);
  return c.newest[stream];
}

void wait_all() {
  Client& c = client();
  for (int stream = 0; stream < static_cast<int>(load(c.slot->streams)); ++stream)
    if (const uint64_t number = newest(stream); number != 0) wait(stream, number);
}

bool reached(int stream, uint64_t number) {
  Client& c = client();
  const PageLock lock(*c.page);
  const StreamState& at = c.self(c.now()).streams[stream];
  return at.head == number && at.head_is_host_reached != 0;
}

void release(uint64_t number) {
  store(client().slot->ring[number % kRing].released, 1U);
}

void pause_ns(uint64_t device_ns) {
  thread_local bool precise = false;
  if (!precise) prctl(PR_SET_TIMERSLACK, 1000UL);
  precise = true;
  // Not for ever, since the work of others may be killed; and not so short that waiting is all that the host does.
  const uint64_t host =
      std::clamp<uint64_t>(device_ns, 20'000, 20'000'000) * client().page->settings.dilation;
  const timespec time{static_cast<time_t>(host / 1'000'000'000), static_cast<long>(host % 1'000'000'000)};
  nanosleep(&time, nullptr);
}

bool set_memory(uint64_t bytes, bool checked) {
  Client& c = client();
  Page& page = *c.page;
  const PageLock lock(page);
  const auto others = [&](const State& state) {
    uint64_t sum = 0;
    for (int p = 0; p < state.processes; ++p)
      if (p != c.number && state.process[p].alive != 0) sum += load(page.slots[p].memory_bytes);
    return sum;
  };
  const auto fits = [&](const State& state) {
    const uint64_t held = others(state);
    return bytes <= page.settings.capacity_bytes && held <= page.settings.capacity_bytes - bytes;
  };
  // Before memory is refused: who is still alive?
  if (checked && !fits(page.states[page.current]) && !fits(c.now(true))) return false;
  store(c.slot->memory_bytes, bytes);
  return true;
}

uint64_t total_bytes() {
  return client().page->settings.capacity_bytes;
}

uint64_t used_bytes() {
  Client& c = client();
  const PageLock lock(*c.page);
  const State& state = c.now();
  uint64_t sum = 0;
  for (int p = 0; p < state.processes; ++p)
    if (state.process[p].alive != 0) sum += load(c.page->slots[p].memory_bytes);
  return sum;
}

uint64_t setting_kernel_ns() {
  return client().page->settings.kernel_ns;
}

uint64_t copy_cost_ns(uint64_t bytes, bool inside_device) {
  const Settings& settings = client().page->settings;
  const uint64_t rate = inside_device ? settings.fill_bytes_per_s : settings.copy_bytes_per_s;
  return settings.copy_ns +
         static_cast<uint64_t>(static_cast<double>(bytes) * 1e9 / static_cast<double>(rate));
}

}  // namespace recorder::device

using namespace recorder::
    device;  // NOLINT(google-build-using-namespace): the control interface has C linkage

extern "C" __attribute__((visibility("default"))) int recorder_device_create(const char* path,
                                                                             const char* settings) {
  return open_page(path, settings, true).page != nullptr ? 0 : -1;
}

extern "C" __attribute__((visibility("default"))) int recorder_device_read(const char* path,
                                                                           recorder_device* out_device,
                                                                           recorder_process* out_processes,
                                                                           int room) {
  const Mapped mapped = open_page(path, nullptr, false);
  if (mapped.page == nullptr) return -1;
  Page& page = *mapped.page;
  const PageLock lock(page);
  const Client* own = load(g_client);
  const State& state =
      catch_up(page, mapped.file, own != nullptr && own->page == mapped.page ? own->number : -1, true);
  *out_device = {state.now_ns, state.busy_ns, state.switches, page.settings.capacity_bytes, 0};
  int count = 0;
  for (int p = 0; p < state.processes; ++p) {
    const ProcessState& from = state.process[p];
    const uint64_t bytes = from.alive != 0 ? load(page.slots[p].memory_bytes) : 0;
    out_device->used_bytes += bytes;
    if (count >= room) continue;
    recorder_process& to = out_processes[count++];
    to = {from.pid,
          from.alive,
          {},
          bytes,
          from.compute_ns,
          from.copy_ns,
          from.kernels,
          from.copies,
          from.attached_ns,
          from.alive != 0 ? 0 : from.ended_ns};
    std::memcpy(to.label, from.label, sizeof to.label);
  }
  return count;
}
