// context.cpp: contexts and modules. A context brings a process into the books; its own memory, and that of modules, is measured.
// SPDX-License-Identifier: Apache-2.0
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstring>

#include "shim/books.hpp"
#include "shim/device.hpp"
#include "shim/driver.hpp"
#include "shim/gate.hpp"
#include "shim/graphs.hpp"
#include "shim/move.hpp"
#include "shim/nvml.hpp"
#include "shim/process.hpp"
#include "shim/session.hpp"
#include "shim/settings.hpp"
#include "shim/small_heap.hpp"
#include "shim/spill.hpp"
#include "shim/table.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {
namespace {

// From a context to the place of its device, and to the context to whose memory its own belongs. Lossy: the driver is
// asked again for an entry that was pushed out.
struct Known {
  uint64_t context;
  uint64_t place;
  uint64_t owner;
};
constexpr int kKnown = 64;
Known g_known[kKnown];
// From the ordinal of a device to its place, plus 1.
int g_places[kDevices * 4];

Known& known(uint64_t context) {
  return g_known[(context >> 4 ^ context >> 12) % kKnown];
}

// An error of the program's own call. The driver itself reports it to the program.
bool is_callers_mistake(Result result) {
  return result == kNotInitialized || result == kDeinitialized || result == kNoDevice ||
         result == kInvalidDevice;
}

// The books cannot tell this device from others: its memory is not counted, or is refused. The log says so once a device.
int uncounted(int ordinal, const char* why, int result) {
  static uint64_t said = 0;
  group();  // reads the settings
  const bool closed = load_settings().fails_closed;
  const uint64_t bit = uint64_t{1} << (ordinal % (kDevices * 4));
  if ((__atomic_fetch_or(&said, bit, __ATOMIC_RELAXED) & bit) == 0)
    log_line("process %d: device %d: %s (%d), so its memory cannot be counted: %s",
             static_cast<int>(getpid()), ordinal, why, result,
             closed ? "under a limit none is given (GPUSHARE_SHIM_FAIL=closed)" : "no limit holds there");
  return closed ? kUncounted : -1;
}

}  // namespace

int place_of(int ordinal) {
  if (ordinal < 0 || ordinal >= kDevices * 4) return -1;
  int place = __atomic_load_n(&g_places[ordinal], __ATOMIC_RELAXED);
  if (place != 0) return place - 1;
  char address[32] = "";
  const Result result = real(kEntry_cuDeviceGetPCIBusId, &address[0], 32, ordinal);
  if (is_callers_mistake(result)) return -1;
  if (result != kSuccess) return uncounted(ordinal, "cuDeviceGetPCIBusId failed", result);
  place = place_of_device(address);
  if (place < 0) return uncounted(ordinal, "the group has more devices than there are places", kDevices);
  __atomic_store_n(&g_places[ordinal], place + 1, __ATOMIC_RELAXED);
  return place;
}

int ordinal_of(int place) {
  for (int ordinal = 0; ordinal < kDevices * 4; ++ordinal)
    if (__atomic_load_n(&g_places[ordinal], __ATOMIC_RELAXED) == place + 1) return ordinal;
  return -1;
}

int only_place() {
  static int known = -2;  // not asked yet
  int place = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (__builtin_expect(place != -2, 1)) return place;
  int count = 0;
  if (real(kEntry_cuDeviceGetCount, &count) != kSuccess || count == 0) return -1;
  place = count == 1 ? place_of(0) : -1;
  if (count != 1 || is_counted(place)) __atomic_store_n(&known, place, __ATOMIC_RELAXED);
  return place;
}

namespace {

// A context may come by a call that this library does not know of, as those of graphics interfaces and the private
// functions of the runtime. The process joins the daemon then, and what the context takes is measured. False: it is refused.
bool join_at_first_sight(const Current& context, int ordinal) {
  const int seat = seat_of(context.place);
  if (phase_now(seat) != Phase::none) return true;
  if (!join_daemon(seat)) return false;
  if (!know_context(context.context, seat)) return false;
  uint64_t overhead = 0;
  if (limited() && !measure_overhead(ordinal, &overhead)) set_overhead(context.place, overhead);
  return true;
}

__attribute__((noinline)) Current ask_of(uint64_t asked, bool is_current) {
  Current found;
  found.context = green_of(asked).primary;
  int ordinal = -1;
  {
    const InContext there(is_current ? 0 : asked);
    if (real(kEntry_cuCtxGetDevice, &ordinal) != kSuccess) return found;
  }
  found.place = place_of(ordinal);
  if (!is_counted(found.place)) return found;  // asked again next time
  if (!join_at_first_sight(found, ordinal)) {
    found.place = kUncounted;
    return found;
  }
  Known& row = known(asked);
  __atomic_store_n(&row.context, uint64_t{0}, __ATOMIC_SEQ_CST);
  __atomic_store_n(&row.place, static_cast<uint64_t>(found.place), __ATOMIC_SEQ_CST);
  __atomic_store_n(&row.owner, found.context, __ATOMIC_SEQ_CST);
  __atomic_store_n(&row.context, asked, __ATOMIC_SEQ_CST);
  return found;
}

inline Current known_at(uint64_t asked, bool is_current) {
  const Known& row = known(asked);
  // The rest is written before the context, and a row is never changed to another place of the same context.
  if (load(row.context) == asked) {
    const uint64_t place = load(row.place);
    Current found;
    found.context = load(row.owner);
    if (load(row.context) == asked) {
      found.place = static_cast<int>(place);
      return found;
    }
  }
  return ask_of(asked, is_current);
}

}  // namespace

Current current() {
  void* context = nullptr;
  if (real(kEntry_cuCtxGetCurrent, &context) != kSuccess || context == nullptr) return {};
  return known_at(reinterpret_cast<uint64_t>(context), true);
}

int place_of_context(uint64_t context, bool is_current) {
  return known_at(context, is_current).place;
}

void forget_context(uint64_t context) {
  Known& row = known(context);
  uint64_t expected = context;
  __atomic_compare_exchange_n(&row.context, &expected, uint64_t{0}, false, __ATOMIC_ACQ_REL,
                              __ATOMIC_RELAXED);
  forget_small(context);
  drop_context(context);
  forget_ranges(context);
  settle_all_graphs();
}

namespace {

// The bytes that the process has on the device beyond its blocks. `ask` tells all that it has. False: that is not known.
template <class Ask>
bool overhead_now(int place, uint64_t kept, uint64_t* out_bytes, Ask ask) {
  // Another thread may free a block between the two figures, and its bytes would then be taken for overhead. So the
  // figures are read again.
  const auto count = [&] { return counted_here(place) - range_bytes(place, Lies::away) + kept; };
  uint64_t used = 0, before = 0, counted = count();
  int looks = 0;
  do {
    before = counted;
    if (!ask(&used)) return false;
    counted = count();
  } while (counted != before && ++looks < 8);
  if (counted < before) counted = before;
  *out_bytes = used > counted ? used - counted : 0;
  return true;
}

// The addresses of the devices on which the process has a context, by place, and the process whose thread looks at them.
char g_addresses[kDevices][32];
int g_looks = 0;
uint64_t g_looked_ns[kDevices];  // when what the process has of the device was asked for last
uint32_t g_owed = 0;             // a futex; 1: a module has come since that was not measured

// A runtime loads hundreds of libraries when a program starts, and an answer of NVML takes as long as several of them. So
// modules that come within kLookNs of a look are measured by the thread, kLookNs after that look.
constexpr uint64_t kLookNs = 100'000'000;
bool put_off(int ordinal) {
  const int place = place_of(ordinal);
  if (!is_counted(place) || load(g_looks) != getpid() || load(g_addresses[place][0]) == 0) return false;
  const uint64_t looked_ns = load(g_looked_ns[place]);
  if (looked_ns == 0 || host_ns() - looked_ns >= kLookNs) return false;
  if (__atomic_exchange_n(&g_owed, 1U, __ATOMIC_ACQ_REL) == 0)
    syscall(SYS_futex, &g_owed, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  return true;
}

// Contexts grow after they were made: by a kernel that needs more local memory, by one that is loaded at its first
// launch. No call tells of that, so it is measured again and again.
void* look_again(void*) {
  for (;;) {
    const timespec pause = timespec_of(static_cast<uint64_t>(load_settings().look_ms) * 1'000'000);
    if (load(g_owed) == 0) syscall(SYS_futex, &g_owed, FUTEX_WAIT_PRIVATE, 0, &pause, nullptr, 0);
    if (load(g_owed) != 0) {
      const timespec rest = timespec_of(kLookNs);
      nanosleep(&rest, nullptr);
      store(g_owed, 0);
    }
    for (int place = 0; place < kDevices; ++place) {
      if (load(g_addresses[place][0]) == 0) continue;
      store(g_looked_ns[place], host_ns());
      uint64_t bytes = 0;
      // A block that moves is on the device twice for a moment, so a figure from that time says nothing.
      const uint64_t holds = ended_holds();
      if (holds != kHeld &&
          overhead_now(place, kept_by_pools(place), &bytes,
                       [place](uint64_t* out) { return ask_process_bytes(g_addresses[place], out); }) &&
          ended_holds() == holds)
        set_overhead(place, bytes);
    }
  }
  return nullptr;
}

void look_from_now_on(int place, const char* address) {
  if (!limited() || load_settings().look_ms == 0) return;
  if (load(g_addresses[place][0]) == 0) {
    std::memcpy(&g_addresses[place][1], address + 1, sizeof g_addresses[place] - 1);
    store(g_addresses[place][0], address[0]);
  }
  const int own = getpid();  // a child of fork has not got the thread
  if (__atomic_exchange_n(&g_looks, own, __ATOMIC_ACQ_REL) != own && !start_thread(look_again, nullptr))
    store(g_looks, 0);  // the next context or module tries again
}

}  // namespace

bool measure_overhead(int ordinal, uint64_t* out_bytes, uint64_t kept) {
  char address[32] = "";
  const int place = place_of(ordinal);
  uint64_t bytes = 0;
  if (out_bytes != nullptr) *out_bytes = 0;
  if (place == kUncounted) return !limited();
  if (place < 0 || real(kEntry_cuDeviceGetPCIBusId, &address[0], 32, ordinal) != kSuccess) return true;
  const uint64_t began_ns = host_ns();
  if (!overhead_now(place, kept, &bytes, [&](uint64_t* out) { return nvml_process_bytes(address, out); }))
    return true;
  if (out_bytes != nullptr) *out_bytes = bytes;
  store(g_looked_ns[place], began_ns);
  if (!note_overhead(place, bytes)) return false;
  look_from_now_on(place, address);
  note_kept(place, kept);  // the rest is in what was measured
  return true;
}

namespace {

// After a context was made on a device: the process has a slot from now on, and its overhead is known. False: it does not fit.
bool context_fits(int ordinal) {
  uint64_t overhead = 0;
  if (measure_overhead(ordinal, &overhead)) return true;
  const int place = place_of(ordinal);
  if (place == kUncounted) return false;  // said already
  log_line(
      "process %d is refused a context on device %d: it needs %llu bytes of its own, the limit is %llu and "
      "the group holds %llu",
      static_cast<int>(getpid()), ordinal, static_cast<unsigned long long>(overhead),
      static_cast<unsigned long long>(limit_bytes(place)),
      static_cast<unsigned long long>(held_bytes(place)));
  return false;
}

// The process is a session of the device's daemon, or works alone there; false: it must get no context.
bool join_device(I ordinal) {
  const int place = place_of(static_cast<int>(ordinal));
  char address[32] = "";
  if (place < 0 && is_callers_mistake(real(kEntry_cuDeviceGetPCIBusId, &address[0], 32, ordinal)))
    return true;  // the driver will say so
  return join_daemon(seat_of(place));
}
bool know_context_of(I ordinal, uint64_t context) {
  if (know_context(context, seat_of(place_of(static_cast<int>(ordinal))))) return true;
  log_line(
      "process %d is refused a context on device %u: it has %d already, and work in more could not be "
      "watched",
      static_cast<int>(getpid()), ordinal, kContexts);
  return false;
}

// The primary context of each device, as cuDevicePrimaryCtxRetain gave it.
uint64_t g_primary[kDevices * 4];

// Measures the devices on which a module may have come: the current context's, or with `all` each on which the process has
// a primary context. At once, or soon by the thread.
bool fits_after_load(bool all, bool at_once) {
  int now = -1;
  void* context = nullptr;
  const auto measure = [&](int ordinal) {
    return (!at_once && put_off(ordinal)) || measure_overhead(ordinal);
  };
  // A library may be loaded while no context is current.
  const bool is_current = real(kEntry_cuCtxGetCurrent, &context) == kSuccess && context != nullptr &&
                          real(kEntry_cuCtxGetDevice, &now) == kSuccess;
  bool fits = !is_current || measure(now);
  for (int ordinal = 0; all && ordinal < kDevices * 4; ++ordinal)
    if (ordinal != now && load(g_primary[ordinal]) != 0) fits = measure(ordinal) && fits;
  return fits;
}

// A module is loaded in the current context, a library in all.
Result after_load(Result result, int unload, void* const* out_module) {
  const bool library = unload == kEntry_cuLibraryUnload;
  if (result != kSuccess || !limited() || fits_after_load(library, false)) return result;
  real(unload, *out_module);
  fits_after_load(library, true);
  return kOutOfMemory;
}

// cuCtxCreate: the process is a session of the daemon first. The context is current afterwards.
template <class... A>
Result create(int entry, I ordinal, P out_context, A... more) {
  if (!join_device(ordinal)) return kOutOfMemory;
  const Result result = real(entry, out_context, more...);
  if (result != kSuccess) return result;
  group();
  if (context_fits(static_cast<int>(ordinal)) &&
      know_context_of(ordinal, reinterpret_cast<uint64_t>(*static_cast<void**>(out_context))))
    return result;
  real(kEntry_cuCtxDestroy_v2, *static_cast<void**>(out_context));
  measure_overhead(static_cast<int>(ordinal));
  return kOutOfMemory;
}

Result destroy(int entry, P context) {
  // The device of a context that is not current can be asked for only since CUDA 13: else its overhead stays noted
  // until the next measurement.
  int ordinal = -1;
  void* now = nullptr;
  if (real(kEntry_cuCtxGetCurrent, &now) != kSuccess || now != context ||
      real(kEntry_cuCtxGetDevice, &ordinal) != kSuccess)
    ordinal = -1;
  leave_small(reinterpret_cast<uint64_t>(context));
  forget_gate(reinterpret_cast<uint64_t>(context));
  const Result result = real(entry, context);
  if (result != kSuccess) return result;
  forget_context(reinterpret_cast<uint64_t>(context));
  if (ordinal >= 0) measure_overhead(ordinal);
  return result;
}

// A reference to the primary context, which the gate has forgotten, has gone; perhaps it was the last.
void left_primary(I ordinal, uint64_t primary) {
  uint32_t flags = 0;
  int active = 0;
  if (real(kEntry_cuDevicePrimaryCtxGetState, ordinal, &flags, &active) != kSuccess || active != 0) {
    if (primary != 0) know_context_of(ordinal, primary);  // somebody else retains it
    return;
  }
  store(g_primary[ordinal], 0);
  if (primary != 0) forget_context(primary);
  measure_overhead(static_cast<int>(ordinal));
}

Result leave_primary(int entry, I ordinal) {
  const uint64_t primary = ordinal < kDevices * 4 ? load(g_primary[ordinal]) : 0;
  leave_small(primary);
  if (primary != 0) forget_gate(primary);
  const Result result = real(entry, ordinal);
  if (result == kSuccess && ordinal < kDevices * 4) left_primary(ordinal, primary);
  return result;
}

}  // namespace
void forget_primaries_in_child() {
  std::memset(g_primary, 0, sizeof g_primary);
}

}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

extern "C" {

Result gpushare_hook_cuCtxCreate(P a, I b, I c) {
  return create(kEntry_cuCtxCreate, c, a, b, c);
}
Result gpushare_hook_cuCtxCreate_v2(P a, I b, I c) {
  return create(kEntry_cuCtxCreate_v2, c, a, b, c);
}
Result gpushare_hook_cuCtxCreate_v3(P a, P b, I c, I d, I e) {
  return create(kEntry_cuCtxCreate_v3, e, a, b, c, d, e);
}
Result gpushare_hook_cuCtxCreate_v4(P a, P b, I c, I d) {
  return create(kEntry_cuCtxCreate_v4, d, a, b, c, d);
}
Result gpushare_hook_cuCtxDestroy(P a) {
  return destroy(kEntry_cuCtxDestroy, a);
}
Result gpushare_hook_cuCtxDestroy_v2(P a) {
  return destroy(kEntry_cuCtxDestroy_v2, a);
}

// The current context's device reaches memory of the other's from now on; that of blocks that move too.
Result gpushare_hook_cuCtxEnablePeerAccess(P other, I flags) {
  const Result result = real(kEntry_cuCtxEnablePeerAccess, other, flags);
  if (result == kSuccess) reach(place_of_context(reinterpret_cast<uint64_t>(other), false), current().place);
  return result;
}

// A larger stack, heap or buffer of the device's own makes the context grow at once or at the next launch.
Result gpushare_hook_cuCtxSetLimit(I limit, L value) {
  const Result result = real(kEntry_cuCtxSetLimit, limit, value);
  int ordinal = -1;
  uint64_t overhead = 0;
  if (result != kSuccess || !limited() || real(kEntry_cuCtxGetDevice, &ordinal) != kSuccess ||
      measure_overhead(ordinal, &overhead))
    return result;
  set_overhead(place_of(ordinal), overhead);  // it is there already: other memory is refused instead
  return result;
}

// Counted references: only when the last is gone is the context.
Result gpushare_hook_cuCtxDetach(P a) {
  leave_small(reinterpret_cast<uint64_t>(a));
  const Result result = real(kEntry_cuCtxDetach, a);
  uint32_t version = 0;
  if (result == kSuccess && real(kEntry_cuCtxGetApiVersion, a, &version) != kSuccess)
    forget_context(reinterpret_cast<uint64_t>(a));
  return result;
}

Result gpushare_hook_cuDevicePrimaryCtxRetain(P out_context, I ordinal) {
  if (!join_device(ordinal)) return kOutOfMemory;
  const Result result = real(kEntry_cuDevicePrimaryCtxRetain, out_context, ordinal);
  if (result != kSuccess || out_context == nullptr) return result;
  group();
  const auto context = reinterpret_cast<uint64_t>(*static_cast<void**>(out_context));
  if (!know_context_of(ordinal, context)) {
    real(kEntry_cuDevicePrimaryCtxRelease_v2, ordinal);
    return kOutOfMemory;
  }
  if (ordinal >= kDevices * 4 ||
      __atomic_exchange_n(&g_primary[ordinal], context, __ATOMIC_ACQ_REL) == context)
    return result;
  if (context_fits(static_cast<int>(ordinal))) return result;
  store(g_primary[ordinal], 0);
  forget_gate(context);
  real(kEntry_cuDevicePrimaryCtxRelease_v2, ordinal);
  measure_overhead(static_cast<int>(ordinal));
  return kOutOfMemory;
}
// A green context retains its device's primary context.
Result gpushare_hook_cuGreenCtxCreate(P out_green, P resources, I ordinal, I flags) {
  if (!join_device(ordinal)) return kOutOfMemory;
  const Result result = real(kEntry_cuGreenCtxCreate, out_green, resources, ordinal, flags);
  if (result != kSuccess || out_green == nullptr) return result;
  group();
  void *const made = *static_cast<void**>(out_green), *context = nullptr, *primary = nullptr;
  if (!context_fits(static_cast<int>(ordinal))) {
    real(kEntry_cuGreenCtxDestroy, made);
    measure_overhead(static_cast<int>(ordinal));
    return kOutOfMemory;
  }
  if (real(kEntry_cuCtxFromGreenCtx, &context, made) != kSuccess || context == nullptr ||
      ordinal >= kDevices * 4)
    return result;
  // The primary context is active, so retaining it only tells which it is.
  if (real(kEntry_cuDevicePrimaryCtxRetain, &primary, ordinal) != kSuccess) return result;
  real(kEntry_cuDevicePrimaryCtxRelease_v2, ordinal);
  if (know_context_of(ordinal, reinterpret_cast<uint64_t>(primary)) &&
      know_green({reinterpret_cast<uint64_t>(context), reinterpret_cast<uint64_t>(primary),
                  static_cast<int32_t>(ordinal)}))
    return result;
  real(kEntry_cuGreenCtxDestroy, made);
  return kOutOfMemory;
}
Result gpushare_hook_cuGreenCtxDestroy(P green) {
  void* context = nullptr;
  if (real(kEntry_cuCtxFromGreenCtx, &context, green) != kSuccess) context = nullptr;
  const Green known = green_of(reinterpret_cast<uint64_t>(context));
  if (known.ordinal < 0) return real(kEntry_cuGreenCtxDestroy, green);
  leave_small(known.primary);
  forget_gate(known.context);
  forget_gate(known.primary);
  // The work in flight of these contexts has no events any more.
  const auto ordinal = static_cast<I>(known.ordinal);
  store(turn(seat_of(place_of(known.ordinal))).unmeasured, 1);
  const Result result = real(kEntry_cuGreenCtxDestroy, green);
  if (result == kSuccess) {
    forget_context(known.context);
    left_primary(ordinal, known.primary);
  } else {
    know_context_of(ordinal, known.primary);
    know_green(known);
  }
  return result;
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
