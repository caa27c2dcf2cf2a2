// context.cpp: contexts and modules. A context brings a process into the books; its own memory, and that of modules, is measured.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <cstring>

#include "shim/books.hpp"
#include "shim/device.hpp"
#include "shim/driver.hpp"
#include "shim/nvml.hpp"
#include "shim/table.hpp"

namespace gpushare::shim {
namespace {

// Context -> place of its device; lossy: what is pushed out is asked again.
struct Known {
  uint64_t context;
  uint64_t place;
};
constexpr int kKnown = 64;
Known g_known[kKnown];
// Ordinal -> place + 1.
int g_places[kDevices * 4];

Known& known(uint64_t context) {
  return g_known[(context >> 4 ^ context >> 12) % kKnown];
}

}  // namespace

int place_of(int ordinal) {
  if (ordinal < 0 || ordinal >= kDevices * 4) return -1;
  int place = __atomic_load_n(&g_places[ordinal], __ATOMIC_RELAXED);
  if (place != 0) return place - 1;
  char address[32] = "";
  if (real(kEntry_cuDeviceGetPCIBusId, &address[0], 32, ordinal) != kSuccess) return -1;
  place = place_of_device(address);
  if (place >= 0) __atomic_store_n(&g_places[ordinal], place + 1, __ATOMIC_RELAXED);
  return place;
}

int only_place() {
  static int known = -2;  // not asked yet
  int place = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (__builtin_expect(place != -2, 1)) return place;
  int count = 0;
  if (real(kEntry_cuDeviceGetCount, &count) != kSuccess || count == 0) return -1;
  place = count == 1 ? place_of(0) : -1;
  __atomic_store_n(&known, place, __ATOMIC_RELAXED);
  return place;
}

Current current() {
  Current found;
  void* context = nullptr;
  if (real(kEntry_cuCtxGetCurrent, &context) != kSuccess || context == nullptr) return found;
  found.context = reinterpret_cast<uint64_t>(context);
  Known& row = known(found.context);
  // The place is written before the context, and a row is never changed to another place of the same context.
  if (__atomic_load_n(&row.context, __ATOMIC_ACQUIRE) == found.context) {
    const uint64_t place = __atomic_load_n(&row.place, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&row.context, __ATOMIC_ACQUIRE) == found.context) {
      found.place = static_cast<int>(place);
      return found;
    }
  }
  int ordinal = -1;
  if (real(kEntry_cuCtxGetDevice, &ordinal) != kSuccess) return found;
  found.place = place_of(ordinal);
  __atomic_store_n(&row.context, uint64_t{0}, __ATOMIC_SEQ_CST);
  __atomic_store_n(&row.place, static_cast<uint64_t>(found.place), __ATOMIC_SEQ_CST);
  __atomic_store_n(&row.context, found.context, __ATOMIC_SEQ_CST);
  return found;
}

void forget_context(uint64_t context) {
  Known& row = known(context);
  uint64_t expected = context;
  __atomic_compare_exchange_n(&row.context, &expected, uint64_t{0}, false, __ATOMIC_ACQ_REL,
                              __ATOMIC_RELAXED);
  drop_context(context);
}

bool measure_overhead(int ordinal, uint64_t* out_bytes) {
  char address[32] = "";
  const int place = place_of(ordinal);
  uint64_t used = 0;
  *out_bytes = 0;
  if (place < 0 || real(kEntry_cuDeviceGetPCIBusId, &address[0], 32, ordinal) != kSuccess) return true;
  if (!nvml_process_bytes(address, &used)) return true;
  const uint64_t counted = counted_here(place);
  *out_bytes = used > counted ? used - counted : 0;
  return note_overhead(place, *out_bytes);
}

namespace {

// After a context was made on a device: the process has a slot from now on, and its overhead is known. False: it does not fit.
bool context_fits(int ordinal) {
  uint64_t overhead = 0;
  if (measure_overhead(ordinal, &overhead)) return true;
  const int place = place_of(ordinal);
  log_line(
      "process %d is refused a context on device %d: it needs %llu bytes of its own, the limit is %llu and "
      "the group holds %llu",
      static_cast<int>(getpid()), ordinal, static_cast<unsigned long long>(overhead),
      static_cast<unsigned long long>(limit_bytes()), static_cast<unsigned long long>(held_bytes(place)));
  return false;
}

// A module is loaded in the current context.
Result after_load(Result result, int unload, void* const* out_module) {
  int ordinal = -1;
  if (result != kSuccess || !limited() || real(kEntry_cuCtxGetDevice, &ordinal) != kSuccess) return result;
  uint64_t overhead = 0;
  if (measure_overhead(ordinal, &overhead)) return result;
  real(unload, *out_module);
  measure_overhead(ordinal, &overhead);
  return kOutOfMemory;
}

// A context was created with cuCtxCreate: it is current.
Result after_create(Result result, P out_context, I ordinal) {
  if (result != kSuccess) return result;
  group();
  if (context_fits(static_cast<int>(ordinal))) return result;
  real(kEntry_cuCtxDestroy_v2, *static_cast<void**>(out_context));
  uint64_t overhead = 0;
  measure_overhead(static_cast<int>(ordinal), &overhead);
  return kOutOfMemory;
}

Result destroy(int entry, P context) {
  // The device of a context that is not current can be asked for only since CUDA 13: else its overhead stays noted until the next measurement.
  int ordinal = -1;
  void* now = nullptr;
  uint64_t overhead = 0;
  if (real(kEntry_cuCtxGetCurrent, &now) != kSuccess || now != context ||
      real(kEntry_cuCtxGetDevice, &ordinal) != kSuccess)
    ordinal = -1;
  const Result result = real(entry, context);
  if (result != kSuccess) return result;
  forget_context(reinterpret_cast<uint64_t>(context));
  if (ordinal >= 0) measure_overhead(ordinal, &overhead);
  return result;
}

// The primary context of each device, as cuDevicePrimaryCtxRetain gave it.
uint64_t g_primary[kDevices * 4];

Result leave_primary(int entry, I ordinal) {
  const Result result = real(entry, ordinal);
  if (result != kSuccess || ordinal >= kDevices * 4) return result;
  uint32_t flags = 0;
  int active = 0;
  if (real(kEntry_cuDevicePrimaryCtxGetState, ordinal, &flags, &active) != kSuccess || active != 0)
    return result;
  if (const uint64_t context = __atomic_exchange_n(&g_primary[ordinal], uint64_t{0}, __ATOMIC_ACQ_REL))
    forget_context(context);
  uint64_t overhead = 0;
  measure_overhead(static_cast<int>(ordinal), &overhead);
  return result;
}

}  // namespace
}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

extern "C" {

Result gpushare_hook_cuCtxCreate(P a, I b, I c) {
  return after_create(real(kEntry_cuCtxCreate, a, b, c), a, c);
}
Result gpushare_hook_cuCtxCreate_v2(P a, I b, I c) {
  return after_create(real(kEntry_cuCtxCreate_v2, a, b, c), a, c);
}
Result gpushare_hook_cuCtxCreate_v3(P a, P b, I c, I d, I e) {
  return after_create(real(kEntry_cuCtxCreate_v3, a, b, c, d, e), a, e);
}
Result gpushare_hook_cuCtxCreate_v4(P a, P b, I c, I d) {
  return after_create(real(kEntry_cuCtxCreate_v4, a, b, c, d), a, d);
}
Result gpushare_hook_cuCtxDestroy(P a) {
  return destroy(kEntry_cuCtxDestroy, a);
}
Result gpushare_hook_cuCtxDestroy_v2(P a) {
  return destroy(kEntry_cuCtxDestroy_v2, a);
}

// Counted references: only when the last is gone is the context.
Result gpushare_hook_cuCtxDetach(P a) {
  const Result result = real(kEntry_cuCtxDetach, a);
  uint32_t version = 0;
  if (result == kSuccess && real(kEntry_cuCtxGetApiVersion, a, &version) != kSuccess)
    forget_context(reinterpret_cast<uint64_t>(a));
  return result;
}

Result gpushare_hook_cuDevicePrimaryCtxRetain(P out_context, I ordinal) {
  const Result result = real(kEntry_cuDevicePrimaryCtxRetain, out_context, ordinal);
  if (result != kSuccess || out_context == nullptr) return result;
  const auto context = reinterpret_cast<uint64_t>(*static_cast<void**>(out_context));
  if (ordinal >= kDevices * 4 ||
      __atomic_exchange_n(&g_primary[ordinal], context, __ATOMIC_ACQ_REL) == context)
    return result;
  group();
  if (context_fits(static_cast<int>(ordinal))) return result;
  __atomic_store_n(&g_primary[ordinal], uint64_t{0}, __ATOMIC_RELEASE);
  real(kEntry_cuDevicePrimaryCtxRelease_v2, ordinal);
  uint64_t overhead = 0;
  measure_overhead(static_cast<int>(ordinal), &overhead);
  return kOutOfMemory;
}
Result gpushare_hook_cuDevicePrimaryCtxRelease(I a) {
  return leave_primary(kEntry_cuDevicePrimaryCtxRelease, a);
}
Result gpushare_hook_cuDevicePrimaryCtxRelease_v2(I a) {
  return leave_primary(kEntry_cuDevicePrimaryCtxRelease_v2, a);
}
// The context stays, with nothing in it.
Result gpushare_hook_cuDevicePrimaryCtxReset(I a) {
  return leave_primary(kEntry_cuDevicePrimaryCtxReset, a);
}
Result gpushare_hook_cuDevicePrimaryCtxReset_v2(I a) {
  return leave_primary(kEntry_cuDevicePrimaryCtxReset_v2, a);
}

Result gpushare_hook_cuModuleLoad(P a, P b) {
  return after_load(real(kEntry_cuModuleLoad, a, b), kEntry_cuModuleUnload, static_cast<void**>(a));
}
Result gpushare_hook_cuModuleLoadData(P a, P b) {
  return after_load(real(kEntry_cuModuleLoadData, a, b), kEntry_cuModuleUnload, static_cast<void**>(a));
}
Result gpushare_hook_cuModuleLoadDataEx(P a, P b, I c, P d, P e) {
  return after_load(real(kEntry_cuModuleLoadDataEx, a, b, c, d, e), kEntry_cuModuleUnload,
                    static_cast<void**>(a));
}
Result gpushare_hook_cuModuleLoadFatBinary(P a, P b) {
  return after_load(real(kEntry_cuModuleLoadFatBinary, a, b), kEntry_cuModuleUnload, static_cast<void**>(a));
}
Result gpushare_hook_cuLibraryLoadData(P a, P b, P c, P d, I e, P f, P g, I h) {
  return after_load(real(kEntry_cuLibraryLoadData, a, b, c, d, e, f, g, h), kEntry_cuLibraryUnload,
                    static_cast<void**>(a));
}
Result gpushare_hook_cuLibraryLoadFromFile(P a, P b, P c, P d, I e, P f, P g, I h) {
  return after_load(real(kEntry_cuLibraryLoadFromFile, a, b, c, d, e, f, g, h), kEntry_cuLibraryUnload,
                    static_cast<void**>(a));
}
}
