// device.cpp: the shared device. A file, mapped by all processes, holds a ring of ops for each process and the state of
// the device.
//
// The device has no thread and no server: a process that wants its progress locks the page and simulates it up to now. An op runs
// at the time at which it was enqueued or later, never at the time of a look, so a launch of 200 us takes 200 us of the
// device clock on a machine of any load.
//
// Kills: only its process writes a ring, and a simulation writes into a copy of the state that becomes valid with one
// store. A process may end at any instruction. Its slot has a lock on the file (of the kernel, gone with the process),
// which tells the others.
// SPDX-License-Identifier: Apache-2.0
#include "device.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <string>
#include <vector>

#include "page.hpp"
#include "recorder.h"

namespace recorder::device {
namespace {

// This process's part, made by its first call; a child of fork begins anew.
struct Client {
  Page* page = nullptr;
  int device = 0;
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
Client* g_clients[kMostDevices];
std::mutex g_setup;

void fork_child() {
  new (&g_setup) std::mutex;
  for (Client*& each : g_clients) each = nullptr;  // its parent's slot and lock are the parent's
}

Client* attach(int device) {
  const std::string file = path_of(device);
  const char* path = file.c_str();
  const Mapped mapped = open_page(file, std::getenv("RECORDER_DEVICE_SETTINGS"), true);
  if (mapped.page == nullptr) {
    std::fprintf(stderr, "recorder: RECORDER_DEVICE=%s cannot be used\n", path);
    std::abort();
  }
  static bool watches_fork = false;
  if (!watches_fork) pthread_atfork(nullptr, nullptr, fork_child);
  watches_fork = true;
  auto* client = new Client;
  client->device = device;
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

Client& client(int device) {
  Client*& slot = g_clients[device];
  if (Client* made = load(slot)) return *made;
  const std::lock_guard guard(g_setup);
  if (slot == nullptr) store(slot, attach(device));
  return *slot;
}
// For settings, which are the same on all devices.
Client& any_client() {
  for (Client*& slot : g_clients)
    if (Client* made = load(slot)) return *made;
  return client(0);
}
Client& client_of(int stream) {
  return client(device_of(stream));
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
  if (__atomic_load_n(&g_on, __ATOMIC_RELAXED) == 0) {
    const char* path = std::getenv("RECORDER_DEVICE");
    __atomic_store_n(&g_on, path != nullptr && *path != 0 ? 2 : 1, __ATOMIC_RELAXED);
  }
  if (__atomic_load_n(&g_on, __ATOMIC_RELAXED) == 1) return false;
  if (count() == 1) client(0);
  return true;
}

// RECORDER_DEVICES: the buses in base 16, as in "3b,3c".
int count() {
  static const int all = [] {
    const char* list = std::getenv("RECORDER_DEVICES");
    int commas = 0;
    for (const char* at = list != nullptr ? list : ""; *at != 0; ++at) commas += *at == ',';
    return std::min(commas + 1, kMostDevices);
  }();
  return all;
}
unsigned bus_of(int device) {
  const char* list = std::getenv("RECORDER_DEVICES");
  if (list == nullptr) return 0x3b;
  for (; device > 0; --device) list = std::strchr(list, ',') + 1;
  return static_cast<unsigned>(std::strtoul(list, nullptr, 16)) & 0xff;
}

// RECORDER_DEVICE, where RECORDER_DEVICES names the devices with the bus behind it.
std::string path_of(int device) {
  std::string path = std::getenv("RECORDER_DEVICE");
  char bus[8];
  std::snprintf(bus, sizeof bus, ".%02x", bus_of(device));
  return std::getenv("RECORDER_DEVICES") != nullptr ? path + bus : path;
}

int open_stream(bool blocking, int priority, int device) {
  Client& c = client(device);
  const std::lock_guard guard(c.mutex);
  int stream = static_cast<int>(c.slot->streams);
  if (stream == kStreams) {
    if (c.closed.empty()) return -1;
    stream = c.closed.front();
    c.closed.erase(c.closed.begin());
    if (c.newest[stream] != 0) wait(device * kStreams + stream, c.newest[stream]);
  }
  c.slot->traits[stream] = {blocking ? 1 : 0, priority};
  if (stream == static_cast<int>(c.slot->streams)) store(c.slot->streams, static_cast<uint32_t>(stream) + 1);
  return device * kStreams + stream;
}

void close_stream(int stream) {
  Client& c = client_of(stream);
  const std::lock_guard guard(c.mutex);
  c.closed.push_back(stream % kStreams);
}

uint64_t publish(int stream, const Work& work) {
  Client& c = client_of(stream);
  const std::lock_guard guard(c.mutex);
  const uint64_t number = c.slot->published + 1;
  Op& op = c.slot->ring[number % kRing];
  if (number > kRing) {
    wait(c.device * kStreams + op.stream, number - kRing);
    const PageLock lock(*c.page);
    c.ended[(number - kRing) % c.ended.size()] = {number - kRing, op.end_ns};
  }
  op.work = work;
  op.work.wait_stream = work.wait_stream % kStreams;
  op.stream = stream % kStreams;
  op.released_ns = 0;
  op.end_ns = 0;
  op.arrived_ns = device_ns(*c.page);
  c.newest[stream % kStreams] = number;
  store(c.slot->published, number);
  return number;
}

bool completed(int stream, uint64_t number, uint64_t* out_end_ns) {
  Client& c = client_of(stream);
  const PageLock lock(*c.page);
  if (c.self(c.now()).streams[stream % kStreams].completed < number) return false;
  if (out_end_ns == nullptr) return true;
  const Client::Ended& old = c.ended[number % c.ended.size()];
  *out_end_ns = old.number == number ? old.end_ns : c.slot->ring[number % kRing].end_ns;
  return true;
}

void wait(int stream, uint64_t number) {
  Client& c = client_of(stream);
  for (;;) {
    uint64_t needed = 0;
    {
      const PageLock lock(*c.page);
      const State& state = c.now();
      if (c.self(state).streams[stream % kStreams].completed >= number) return;
      needed = needs_ns(c, state, stream % kStreams, number);
    }
    pause_ns(needed);
  }
}

uint64_t newest(int stream) {
  Client& c = client_of(stream);
  const std::lock_guard guard(c.mutex);
  return c.newest[stream % kStreams];
}

void wait_all(int device) {
  Client& c = client(device);
  for (int i = 0; i < static_cast<int>(load(c.slot->streams)); ++i) {
    const int stream = device * kStreams + i;
    if (const uint64_t number = newest(stream); number != 0) wait(stream, number);
  }
}

bool reached(int stream, uint64_t number) {
  Client& c = client_of(stream);
  const PageLock lock(*c.page);
  const StreamState& at = c.self(c.now()).streams[stream % kStreams];
  return at.head == number && at.head_is_host_reached != 0;
}

void release(int stream, uint64_t number) {
  Client& c = client_of(stream);
  store(c.slot->ring[number % kRing].released_ns, std::max<uint64_t>(device_ns(*c.page), 1));
}

void pause_ns(uint64_t device_ns) {
  thread_local bool precise = false;
  if (!precise) prctl(PR_SET_TIMERSLACK, 1000UL);
  precise = true;
  // The wait is bounded, since the work of others may be killed, and not so short that the host does nothing but wait.
  const uint64_t host =
      std::clamp<uint64_t>(device_ns, 20'000, 20'000'000) * any_client().page->settings.dilation;
  const timespec time{static_cast<time_t>(host / 1'000'000'000), static_cast<long>(host % 1'000'000'000)};
  nanosleep(&time, nullptr);
}

bool set_memory(int device, uint64_t bytes, bool checked) {
  Client& c = client(device);
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

uint64_t total_bytes(int device) {
  return client(device).page->settings.capacity_bytes;
}

uint64_t used_bytes(int device) {
  Client& c = client(device);
  const PageLock lock(*c.page);
  const State& state = c.now();
  uint64_t sum = 0;
  for (int p = 0; p < state.processes; ++p)
    if (state.process[p].alive != 0) sum += load(c.page->slots[p].memory_bytes);
  return sum;
}

uint64_t setting_kernel_ns() {
  return any_client().page->settings.kernel_ns;
}

uint64_t copy_cost_ns(uint64_t bytes, bool inside_device) {
  const Settings& settings = any_client().page->settings;
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
  int own = -1;
  for (Client*& slot : g_clients)
    if (const Client* each = load(slot); each != nullptr && each->page == mapped.page) own = each->number;
  const State& state = catch_up(page, mapped.file, own, true);
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
