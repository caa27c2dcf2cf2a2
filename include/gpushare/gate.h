/* gpushare: a gate before the launches of opportunistic sessions. Part of the stable C ABI. gpushare.h includes this header,
 * and its contract holds here too.
 *
 * A framework, or whatever launches work for it, asks the gate of a session before each launch. Guaranteed sessions are
 * never held up. While one has an iteration on the device, opportunistic sessions may use a share of the time and have
 * little work in flight: as much as leaves the guaranteed session within its target slowdown, 1% by default. The
 * runtime learns how long its iterations take alone, from the device's clock, and what each share costs them. It pauses
 * opportunistic sessions during the first five iterations, and after a change of the iteration time by a fifth.
 *
 *   const uint32_t* flag; gpushare_gate gate;
 *   gpushare_gate_open(session, &gate);
 *   gpushare_gate_get_flag(gate, &flag);
 *   ... before each launch on `stream`:
 *   if (GPUSHARE_GATE_ENTER(gate, flag, stream, estimated_ns) != GPUSHARE_OK) ... the session has ended
 *
 * Lanes of guaranteed and opportunistic sessions must be able to run at the same time: use the policy "pack". Under
 * "priority" and "fair" turns hold opportunistic sessions back before any gate does, and under "fair" turns do not ask
 * for the class: a guaranteed session waits for an opportunistic one as for any other. Sessions of one runtime see each
 * other; on a shared device those of all processes, except preloaded programs. There a message of the daemon sets the
 * flag, so launches may still pass while the first iteration of a guaranteed session begins; later ones wait.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_GATE_H_
#define GPUSHARE_GATE_H_

#include "gpushare/gpushare.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpushare_gate_s* gpushare_gate; /* what one session's launches go through */

/* Calls gpushare_gate_enter without a timeout, but only if the flag says that the gate has something to decide:
 * otherwise it costs a load and a branch. `flag` comes from gpushare_gate_get_flag. An expression for GCC and Clang. */
#define GPUSHARE_GATE_ENTER(gate, flag, stream, estimated_ns) \
  (__atomic_load_n((flag), __ATOMIC_RELAXED) == 0             \
       ? GPUSHARE_OK                                          \
       : gpushare_gate_enter((gate), (stream), (estimated_ns), GPUSHARE_NO_TIMEOUT))

/* Gives the gate of a session; every call gives a handle to the same gate. The caller releases *out_gate. From the first gate of
 * a runtime on, the iterations of its guaranteed sessions are watched. A guaranteed session's gate is always open.
 * Calls the driver (events). Errors: UNSUPPORTED (a device with virtual time), CANCELLED, INVALID_STATE, DEVICE_LOST.
 * */
GPUSHARE_API int32_t gpushare_gate_open(gpushare_session session, gpushare_gate* out_gate);
/* Gives the handle back. The gate itself lives as long as its session. Threads that read its flag must have stopped. */
GPUSHARE_API int32_t gpushare_gate_release(gpushare_gate gate);

/* Gives the address of the gate's flag, which is zero while a launch need not ask. Read it atomically
 * (GPUSHARE_GATE_ENTER). Valid until gpushare_gate_release of this handle. */
GPUSHARE_API int32_t gpushare_gate_get_flag(gpushare_gate gate, const uint32_t** out_flag);

/* Waits until work that takes about `estimated_ns` alone may be launched. Call it on any thread, before the launch.
 * `stream` is the stream that the work goes to: the gate then records events there, a few at a time, to see when the
 * work is done. If `stream` is null, the caller reports the end of the work by gpushare_gate_done. Work counts as in
 * flight from the return of this call. While nothing is in flight, the gate lets in one launch of any length in two
 * cases: the slowdown that the guaranteed sessions may still suffer covers it, or they pause for longer than usual. Waits
 * for other sessions and for the session's own earlier work, up to timeout_ns; 0 does not wait. Errors: TIMED_OUT,
 * CANCELLED (the session ended), INVALID_STATE (would wait inside a callback; the stream was released), INVALID_HANDLE,
 * DEVICE_LOST. */
GPUSHARE_API int32_t gpushare_gate_enter(gpushare_gate gate, gpushare_stream stream, uint64_t estimated_ns,
                                         uint64_t timeout_ns);
/* Reports the end of work that was let in without a stream; `estimated_ns` is the estimate that it was let in with.
 * Does not block. Any thread. */
GPUSHARE_API int32_t gpushare_gate_done(gpushare_gate gate, uint64_t estimated_ns);

typedef struct gpushare_gate_info {
  uint32_t struct_size;
  uint32_t open;               /* 1: nothing is limited now */
  double share;                /* part of the device's time that the session may use now; 0: it is paused */
  uint64_t in_flight_limit_ns; /* most work that may be in flight; UINT64_MAX: no limit */
  uint64_t in_flight_ns;       /* work that was let in and is not known to be done */
  uint64_t entries;            /* calls of gpushare_gate_enter */
  uint64_t waits;              /* calls that waited for a share */
  uint64_t waited_ns;          /* time that these calls waited */
  /* The guaranteed session that limits most; 0: there is none. On a shared device a number of the daemon's. The rest is
   * about it: */
  uint64_t guaranteed_id;
  uint64_t alone_ns;   /* its iteration alone, on the device */
  uint64_t iterations; /* measured since that was learned */
  uint32_t learning;   /* 1: it runs alone, because its time alone is not known yet */
  uint32_t reserved;
  double slowdown;        /* excess over the time alone, mean of the iterations */
  double slowdown_error;  /* one standard error of it; 1 while nothing is known */
  double target_slowdown; /* the slowdown that the gates keep to */
  double credit;          /* how much it may be slowed at once now, in iterations; below 0 it runs alone */
} gpushare_gate_info;
#define GPUSHARE_GATE_INFO_INIT \
  { sizeof(gpushare_gate_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Reads the gate's present allowance, and the estimates for the guaranteed session that limits most. Does not block.
 * Errors: INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_gate_get_info(gpushare_gate gate, gpushare_gate_info* out_info);

/* Sets the slowdown, over its time alone, that a guaranteed session accepts from opportunistic ones: 0.01 is 1%. 0
 * means the target of the runtime. Takes effect at its next iteration. Does not block. Errors: INVALID_ARGUMENT
 * (outside [0.0001, 10] and not 0; an opportunistic session), CANCELLED, INVALID_STATE. */
GPUSHARE_API int32_t gpushare_session_set_target_slowdown(gpushare_session session, double target_slowdown);
/* Sets the target of the guaranteed sessions that have none of their own. 0 means the default, 0.01. */
GPUSHARE_API int32_t gpushare_runtime_set_target_slowdown(gpushare_runtime runtime, double target_slowdown);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_GATE_H_ */
