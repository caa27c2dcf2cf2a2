// page.hpp: the file of the shared device, as all processes map it: a ring of ops for each process, and the state of
// the device. device.cpp says how it is used.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>

#include <cerrno>
#include <cstdint>
#include <string>

#include "device.hpp"
#include "shim/words.hpp"

struct flock;

namespace recorder::device {

using gpushare::shim::load, gpushare::shim::store;

constexpr int kProcesses = 32;
constexpr uint64_t kRing = 1024;
constexpr uint64_t kScale =
    1024;  // remaining work is kept in parts of a nanosecond, so that sharing rounds nothing away

struct Op {
  Work work;
  int stream;
  uint64_t released_ns;  // host: when its function had run; 0: it has not
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
  uint64_t
      switched_ns;  // time slices: until then the engine changes from one process to another and runs nothing
  int32_t copy_process, copy_stream;  // -1: the copy engine is free
  uint64_t switches;
  uint64_t busy_ns;
  ProcessState process[kProcesses];
};
struct Settings {
  uint64_t capacity_bytes, side_by_side, slice_ns, switch_ns, kernel_ns, copy_ns, copy_bytes_per_s,
      fill_bytes_per_s, dilation;
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

uint64_t host_ns();
inline uint64_t device_ns(const Page& page) {
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

bool lock_byte(int file, int command, int at, struct flock* out_lock);

struct Mapped {
  Page* page = nullptr;
  int file = -1;
};
// Maps the page of that path, and makes it if there is none. A file is opened once in a process and stays open: closing it would
// give up the process's lock.
Mapped open_page(const std::string& path, const char* settings, bool make);

// simulation.cpp, with the page locked: brings the device up to now. `own`: the number of this process's slot, -1:
// none. `look`: processes that have ended leave the device now, and not only every millisecond.
const State& catch_up(Page& page, int file, int own, bool look);
void copy_state(const Page& page, State* to);

}  // namespace recorder::device
