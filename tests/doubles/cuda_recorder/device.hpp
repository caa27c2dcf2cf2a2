// device.hpp: one device for all processes of a test. RECORDER_DEVICE names a file that they all map; without it there
// is no device, and work is only counted. See recorder.h for the control interface, device.cpp for the model.
//
// A machine of several devices (RECORDER_DEVICES) has a page for each.
//
// Threads: every function may be called from any thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace recorder::device {

extern int g_on;  // 0: not asked yet, 1: there is none, 2: there is one
bool ask();
// Whether this process has a device. The first call opens the page.
inline bool on() {
  return __builtin_expect(__atomic_load_n(&g_on, __ATOMIC_RELAXED) != 1, 0) && ask();
}

enum class Kind : uint8_t { compute, copy, record, wait, host };

// A piece of work of known cost, as a stream gets it and as graphs keep it.
struct Work {
  Kind kind = Kind::compute;
  uint16_t width_percent = 100;  // of the device, for compute
  uint64_t cost_ns = 0;          // alone on the device
  int wait_stream = 0;           // wait: for that op of that stream of this process, of the same device
  uint64_t wait_number = 0;
};

// Devices that this process sees, and the number of each one's bus.
constexpr int kMostDevices = 8;
int count();
unsigned bus_of(int device);
std::string path_of(int device);

// A stream of this process is a small number; the first of each device is its legacy default stream.
constexpr int kStreams = 64;  // of a device
inline int device_of(int stream) {
  return stream / kStreams;
}
int open_stream(bool blocking, int priority, int device);
void close_stream(int stream);  // may be given to another once its work is done
// Enqueues; the number of the op, from 1, in the order of the process's calls. Waits while the process has 1,024 ops
// pending, as a driver does.
uint64_t publish(int stream, const Work& work);
// Whether the op has completed, and when on the device clock.
bool completed(int stream, uint64_t number, uint64_t* out_end_ns);
void wait(int stream, uint64_t number);
// The newest op of the stream, or of all streams; 0: none.
uint64_t newest(int stream);
void wait_all(int device);
// A host op of `stream` has been reached, and holds the stream until it is released.
bool reached(int stream, uint64_t number);
void release(int stream, uint64_t number);
void pause_ns(uint64_t device_ns);  // of the calling thread

// Notes the bytes that this process has in use; with `checked`, refuses (and notes nothing) where the device has not so many.
bool set_memory(int device, uint64_t bytes, bool checked);
uint64_t total_bytes(int device);
uint64_t used_bytes(int device);  // of all processes

uint64_t setting_kernel_ns();
uint64_t copy_cost_ns(uint64_t bytes, bool inside_device);

}  // namespace recorder::device
