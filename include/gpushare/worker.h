/* gpushare: models shared by processes. Part of the stable C ABI; included by gpushare.h, whose contract holds
 * here too.
 *
 * A memory daemon (`gpushare model-daemon`) owns a device's memory and the images of models. A worker is this
 * process's part in it: one model, and turns on the device. From begin to end of a turn the model's layers are
 * at fixed addresses; the daemon fills them while the first ones already execute, if they are not there yet.
 *
 * The model is read-only: workers of one model share one copy, which may be dropped between turns and comes
 * back from the image. What a worker writes goes to its scratch memory, which is its own and lasts for one
 * turn. Outside a turn touching either is a fault. All work of the device that uses them must have finished
 * before the turn ends.
 *
 * A daemon that goes: calls return UNAVAILABLE; detach, and attach anew. A process that dies gives back its
 * turn and its memory. Threads: begin and end are for one thread at a time (others wait); the rest for any.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_WORKER_H_
#define GPUSHARE_WORKER_H_

#include "gpushare/gpushare.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpushare_worker_s* gpushare_worker; /* this process's part in a memory daemon */

typedef struct gpushare_worker_params {
  uint32_t struct_size;
  uint32_t reserved;
  const char* socket;     /* path of the daemon's socket */
  const char* name;       /* for status and messages: 1 to 63 bytes of text */
  const char* model;      /* path of a safetensors file or index; the daemon reads it */
  uint64_t iteration_ns;  /* how long an iteration executes: shapes the groups, and is corrected by what
                             turns show; 0 = as long as the load */
  uint64_t scratch_bytes; /* of the worker's own device memory in a turn; 0 = none */
  uint64_t timeout_ns;    /* of attaching, which waits for the model to be read */
} gpushare_worker_params;
#define GPUSHARE_WORKER_PARAMS_INIT \
  { sizeof(gpushare_worker_params), 0, 0, 0, 0, 0, 0, GPUSHARE_NO_TIMEOUT }

typedef struct gpushare_worker_info {
  uint32_t struct_size;
  uint32_t layers;
  uint64_t worker;                         /* the daemon's number of it, as `--status --json -` shows */
  uint64_t model_bytes;                    /* padding between layers included */
  uint64_t scratch_bytes;                  /* rounded up to the device's granules */
  gpushare_device_address model_address;   /* where layers lie during turns */
  gpushare_device_address scratch_address; /* 0 without scratch memory */
  uint32_t in_turn;                        /* 1 from begin to end */
  uint32_t arrived_at_begin;               /* layers that were on the device when the last turn began */
  char device[256];                        /* opened in this process too */
} gpushare_worker_info;
#define GPUSHARE_WORKER_INFO_INIT                           \
  {                                                         \
    sizeof(gpushare_worker_info), 0, 0, 0, 0, 0, 0, 0, 0, { \
      0                                                     \
    }                                                       \
  }

typedef struct gpushare_worker_layer {
  uint32_t struct_size;
  uint32_t reserved;
  const char* name; /* lives as long as the worker */
  gpushare_device_address address;
  uint64_t bytes;
} gpushare_worker_layer;
#define GPUSHARE_WORKER_LAYER_INIT \
  { sizeof(gpushare_worker_layer), 0, 0, 0, 0 }

/* Attaches to a daemon. Blocks while the daemon reads the model, at most timeout_ns. Give the worker back with
 * gpushare_worker_detach. Errors: UNAVAILABLE (no daemon at the socket: the message says how to start one; or
 * no such device), TIMED_OUT, EXCEEDS_CAPACITY (would not fit the daemon's memory), QUEUE_FULL (as many
 * workers as allowed), HOST_OUT_OF_MEMORY (the daemon's images), IO_ERROR and MALFORMED_INPUT (the model). */
GPUSHARE_API int32_t gpushare_worker_attach(const gpushare_worker_params* params,
                                            gpushare_worker* out_worker);
/* Ends its turn if it has one, and detaches. A begin or a wait that another thread is in returns CANCELLED. */
GPUSHARE_API int32_t gpushare_worker_detach(gpushare_worker worker);
/* Waits for the turn, at most timeout_ns (GPUSHARE_NO_TIMEOUT: for ever). Turns are given in the order in
 * which they are asked for. Errors: TIMED_OUT; INVALID_STATE (has the turn); DEVICE_OUT_OF_MEMORY and what the
 * device can fail with; UNAVAILABLE (the daemon is gone). */
GPUSHARE_API int32_t gpushare_worker_begin(gpushare_worker worker, uint64_t timeout_ns);
/* Ask in every iteration, from layer 0: the daemon learns from it how long iterations take, and plans for that.
 * Blocks until layers [first, end) are on the device; work enqueued afterwards on any stream finds them. If
 * they are there, this is a look at shared memory. Errors: TIMED_OUT (also, with the daemon's reason, when the
 * turn was taken away because it outlasted the lease); INVALID_STATE (not in a turn); INVALID_ARGUMENT;
 * UNAVAILABLE; what a load can fail with. */
GPUSHARE_API int32_t gpushare_worker_wait_layers(gpushare_worker worker, uint32_t first, uint32_t end,
                                                 uint64_t timeout_ns);
/* Gives the turn back. The turn is over whatever this returns. Errors: INVALID_STATE (has none), TIMED_OUT (it
 * had been taken away), UNAVAILABLE. Blocks for the daemon's answer, shortly. */
GPUSHARE_API int32_t gpushare_worker_end(gpushare_worker worker);
/* *out_wanted is 1 while another worker waits for this one's turn: end it at the next iteration boundary, or
 * the daemon takes it after the lease. Cheap enough for every iteration. */
GPUSHARE_API int32_t gpushare_worker_get_wanted(gpushare_worker worker, uint32_t* out_wanted);
/* Errors: INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_worker_get_info(gpushare_worker worker, gpushare_worker_info* out_info);
/* Layer `index` in execution order. Errors: INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_worker_get_layer(gpushare_worker worker, uint32_t index,
                                               gpushare_worker_layer* out_layer);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_WORKER_H_ */
