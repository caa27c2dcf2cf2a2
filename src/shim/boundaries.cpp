// SPDX-License-Identifier: Apache-2.0
#include "shim/boundaries.hpp"

#include "shim/device.hpp"
#include "shim/gate.hpp"
#include "shim/pattern.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {
namespace {

struct Launches {
  uint32_t busy;
  LaunchPattern pattern;
};
Launches g_launches[kSeats];

// The seat of the calling thread's context; -1: nothing is measured there.
int measured_seat() {
  if (load(gate().open) == 1) return -1;
  int seat = static_cast<int>(load(gate().first)) - 1;
  if (load(gate().seats) > 1) {
    void* context = nullptr;
    real(kEntry_cuCtxGetCurrent, &context);
    if (context == nullptr) return -1;
    seat = seat_of(place_of_context(reinterpret_cast<uint64_t>(context), true));
  }
  return seat >= 0 && phase_now(seat) == Phase::quantum ? seat : -1;
}

Result waited(Result result) {
  if (result != kSuccess) return result;
  if (const int seat = measured_seat(); seat >= 0) note_boundary(seat);
  return result;
}

// A program that asks once, to learn whether memory can be used again, has not waited for anything.
Result asked(Result result) {
  constexpr Result kNotReady = 600;
  const int seat = measured_seat();
  if (seat < 0) return result;
  if (result == kNotReady)
    store(turn(seat).polled, 1);
  else if (result == kSuccess && __atomic_exchange_n(&turn(seat).polled, 0U, __ATOMIC_RELAXED) != 0)
    note_boundary(seat);
  return result;
}

}  // namespace

void note_launch(int seat, uint64_t signature) {
  Launches& launches = g_launches[seat];
  if (__atomic_exchange_n(&launches.busy, 1U, __ATOMIC_ACQUIRE) != 0) return;
  const bool begins = launches.pattern.next(signature);
  store(launches.busy, 0);
  if (begins) note_boundary(seat);
}

void note_boundary(int seat) {
  Turn& now = turn(seat);
  const uint64_t budget_ns = load(now.budget_ns);
  if (budget_ns == UINT64_MAX) return;
  // Work in flight counts by its estimate: some of the work that a program has waited for may not be counted yet.
  const uint64_t used_ns = load(now.used_ns) + load(now.in_flight_ns);
  const uint64_t before_ns = __atomic_exchange_n(&now.boundary_ns, used_ns, __ATOMIC_RELAXED);
  const uint64_t iteration_ns = used_ns - (before_ns < used_ns ? before_ns : used_ns);
  if (used_ns >= budget_ns / 2 && used_ns + iteration_ns > budget_ns) store(now.over, 1);
}

}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

extern "C" {
#define GPUSHARE_WAIT(name, parameters, arguments, then) \
  Result gpushare_hook_##name parameters {               \
    return then(real arguments);                         \
  }
GPUSHARE_WAIT(cuCtxSynchronize, (), (kEntry_cuCtxSynchronize), waited)
GPUSHARE_WAIT(cuCtxSynchronize_v2, (P a), (kEntry_cuCtxSynchronize_v2, a), waited)
GPUSHARE_WAIT(cuStreamSynchronize, (P a), (kEntry_cuStreamSynchronize, a), waited)
GPUSHARE_WAIT(cuStreamSynchronize_ptsz, (P a), (kEntry_cuStreamSynchronize_ptsz, a), waited)
GPUSHARE_WAIT(cuEventSynchronize, (P a), (kEntry_cuEventSynchronize, a), waited)
GPUSHARE_WAIT(cuEventQuery, (P a), (kEntry_cuEventQuery, a), asked)
GPUSHARE_WAIT(cuStreamQuery, (P a), (kEntry_cuStreamQuery, a), asked)
GPUSHARE_WAIT(cuStreamQuery_ptsz, (P a), (kEntry_cuStreamQuery_ptsz, a), asked)
}
