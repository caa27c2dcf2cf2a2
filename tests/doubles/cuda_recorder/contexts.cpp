// contexts.cpp: devices and contexts. With one device all contexts are one, which every thread has. With several
// (RECORDER_DEVICES) each has a primary context, others can be made, and each thread has a stack of them, empty at
// first.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "recorder.hpp"

RECORDER_API gpushare::shim::Result cuStreamGetCtx(void* stream, void* out_context);

using namespace recorder;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

namespace {

// A context's number tells its device: the primary one, and those made later.
constexpr uint64_t kContext = 0x1000, kOfDevice = 0x100000, kNext = 0x2000;
constexpr Result kInvalidContext = 201, kInUse = 216;
thread_local std::vector<uint64_t> t_contexts;
std::atomic<uint64_t> g_made{0};
std::atomic<uint64_t> g_primary[device::kMostDevices];  // references

bool several() {
  return device::count() > 1;
}
uint64_t primary_of(int device) {
  return kContext + static_cast<uint64_t>(device) * kOfDevice;
}
int device_of_context(uint64_t context) {
  return several() ? static_cast<int>(context / kOfDevice) : 0;
}
bool is_device(I ordinal) {
  return ordinal < static_cast<I>(device::count());
}
uint64_t number(P pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}
void put(P out, uint64_t value) {
  if (out != nullptr) std::memcpy(out, &value, sizeof value);
}

// The green context, current to at most one thread.
constexpr uint64_t kGreen = 0x3000;
std::atomic<int> g_green_holders{0};
struct GreenOfThread {
  bool is_current = false;
  bool make_current(bool now) {
    int none = 0;
    if (now && !is_current && !g_green_holders.compare_exchange_strong(none, 1)) return false;
    if (!now && is_current) g_green_holders = 0;
    is_current = now;
    return true;
  }
  ~GreenOfThread() { make_current(false); }
};
thread_local GreenOfThread t_green;

Result create(P out, I ordinal) {
  if (!is_device(ordinal)) return kInvalidDevice;
  if (!add_context(static_cast<int>(ordinal))) return kOutOfMemory;
  const uint64_t context = primary_of(static_cast<int>(ordinal)) + (several() ? kNext * ++g_made : 0);
  put(out, context);
  if (several()) t_contexts.push_back(context);
  return kSuccess;
}
Result retain(P out, I ordinal) {
  if (!is_device(ordinal)) return kInvalidDevice;
  const int device = static_cast<int>(ordinal);
  if (g_primary[device]++ == 0 && !add_context(device)) {
    --g_primary[device];
    return kOutOfMemory;
  }
  put(out, primary_of(device));
  return kSuccess;
}
void leave(int device) {
  if (g_primary[device] > 0 && --g_primary[device] == 0) forget_context(device);
}

}  // namespace

uint64_t recorder::current_context() {
  if (!several()) return kContext;
  return t_contexts.empty() ? 0 : t_contexts.back();
}
int recorder::current_device() {
  return device_of_context(current_context());
}

// Without a shared device a stream is only its context, in a number of its own.
constexpr uint64_t kStream = uint64_t{1} << 40;
int recorder::device_of_stream(P stream) {
  uint64_t context = 0;
  if (number(stream) > 2) cuStreamGetCtx(stream, &context);
  return context != 0 ? device_of_context(context) : current_device();
}

#define BODY(name, parameters, ...)     \
  RECORDER_API Result name parameters { \
    RECORDER_NOTE(name, __VA_ARGS__)

// clang-format off
BODY(cuStreamCreate, (P a, I b), a, b)
  if (device::on()) return create_stream(a, b, 0);
  put(a, several() ? kStream + current_context() : 0); return kSuccess; }
BODY(cuStreamGetCtx, (P a, P b), a, b)
  if (device::on()) { uint64_t context = 0; const Result result = context_of_stream(a, &context); put(b, context); return result; }
  put(b, number(a) > kStream ? number(a) - kStream : current_context()); return kSuccess; }
BODY(cuDeviceGetCount, (P a), a) *static_cast<int*>(a) = device::count(); return kSuccess; }
BODY(cuDeviceGetPCIBusId, (P a, I b, I c), a, b, c)
  if (std::getenv("RECORDER_NO_ADDRESS") != nullptr) return 999;
  if (!is_device(c)) return kInvalidDevice;
  std::snprintf(static_cast<char*>(a), b, "0000:%02x:00.0", device::bus_of(static_cast<int>(c))); return kSuccess; }
BODY(cuCtxGetCurrent, (P a), a) put(a, t_green.is_current ? kGreen + 1 : current_context()); return kSuccess; }
BODY(cuCtxSetCurrent, (P a), a)
  if (!several()) return t_green.make_current(number(a) == kGreen + 1) ? kSuccess : kInUse;
  if (!t_contexts.empty()) t_contexts.pop_back();
  if (a != nullptr) t_contexts.push_back(number(a));
  return kSuccess; }
BODY(cuCtxPushCurrent_v2, (P a), a) if (several()) t_contexts.push_back(number(a)); return kSuccess; }
BODY(cuCtxPopCurrent_v2, (P a), a)
  if (!several()) return kSuccess;
  if (t_contexts.empty()) return kInvalidContext;
  put(a, t_contexts.back()); t_contexts.pop_back(); return kSuccess; }
BODY(cuCtxGetDevice, (P a), a) if (current_context() == 0) return kInvalidContext; *static_cast<int*>(a) = current_device(); return kSuccess; }
// All green contexts are one, of the first device.
BODY(cuGreenCtxCreate, (P a, P b, I c, I d), a, b, c, d) put(a, kGreen); return retain(nullptr, c); }
BODY(cuCtxFromGreenCtx, (P a, P b), a, b) put(a, number(b) == kGreen ? kGreen + 1 : 0); return kSuccess; }
BODY(cuGreenCtxDestroy, (P a), a) leave(0); return kSuccess; }
BODY(cuCtxCreate_v2, (P a, I b, I c), a, b, c) return create(a, c); }
BODY(cuCtxCreate_v4, (P a, P b, I c, I d), a, b, c, d) return create(a, d); }
// With a context go its blocks, but physical memory stays. With one device any context's end is the end of all blocks.
BODY(cuCtxDestroy_v2, (P a), a)
  drop_context(device_of_context(number(a)), several() ? number(a) : kContext);
  if (!t_contexts.empty() && t_contexts.back() == number(a)) t_contexts.pop_back();
  return kSuccess; }
BODY(cuDevicePrimaryCtxRetain, (P a, I b), a, b) return retain(a, b); }
BODY(cuDevicePrimaryCtxRelease_v2, (I a), a) if (!is_device(a)) return kInvalidDevice; leave(static_cast<int>(a)); return kSuccess; }
BODY(cuDevicePrimaryCtxGetState, (I a, P b, P c), a, b, c) *static_cast<int*>(c) = g_primary[a] > 0; return kSuccess; }
// clang-format on
