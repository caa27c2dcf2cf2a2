/* gpushare: models shared by processes. Part of the stable C ABI. gpushare.h includes this header, and its
 * contract holds here too.
 *
 * A model daemon (`gpushare model-daemon`) owns a device's memory and the images of models. A worker is a
 * process attached to the daemon; it has one model and takes turns on the device. From begin to end of a
 * turn the model's layers are at fixed addresses. If they are not on the device yet, the daemon sends them
 * while the first layers already execute.
 *
 * The model is read-only: workers of one model share one copy, which may be dropped between turns and is
 * then sent again from the image. A worker writes to its scratch memory, which belongs to it alone and lasts
 * for one turn. Outside a turn an access to the model or to scratch memory faults. All device work that uses
 * them must have finished before the turn ends.
 *
 * When the daemon ends, calls return UNAVAILABLE: detach, and attach anew. When a worker process dies, its
 * turn and its memory are given back. Threads: gpushare_worker_begin and gpushare_worker_end run on one
 * thread at a time (others wait); all other functions may be called from any thread.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_WORKER_H_
#define GPUSHARE_WORKER_H_

#include "gpushare/gpushare.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpushare_worker_s* gpushare_worker; /* this process as a worker of a model daemon */

typedef struct gpushare_worker_params {
  uint32_t struct_size;
  uint32_t reserved;
  const char* socket;     /* path of the daemon's socket */
  const char* name;       /* for status and messages: 1 to 63 bytes of text */
  const char* model;      /* path of a safetensors file or index; the daemon reads it */
  uint64_t iteration_ns;  /* how long an iteration executes. The grouping of layers depends on it;
                             measurements in turns correct it. 0 = as long as the load */
  uint64_t scratch_bytes; /* size of the worker's scratch memory in a turn; 0 = none */
  uint64_t timeout_ns;    /* for attaching, which waits until the daemon has read the model */
} gpushare_worker_params;
#define GPUSHARE_WORKER_PARAMS_INIT \
  { sizeof(gpushare_worker_params), 0, 0, 0, 0, 0, 0, GPUSHARE_NO_TIMEOUT }

typedef struct gpushare_worker_info {
  uint32_t struct_size;
  uint32_t layers;
  uint64_t worker;                         /* the daemon's number for this worker, as `--status --json -`
                                              shows it */
  uint64_t model_bytes;                    /* padding between layers included */
  uint64_t scratch_bytes;                  /* rounded up to the device's granules */
  gpushare_device_address model_address;   /* where layers lie during turns */
  gpushare_device_address scratch_address; /* 0 without scratch memory */
  uint32_t in_turn;                        /* 1 from begin to end */
  uint32_t arrived_at_begin;               /* layers that were on the device when the last turn began */
  char device[256];                        /* the device that this process has opened too */
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
/* Ends the worker's turn if it has one, and detaches. Calls of gpushare_worker_begin and
 * gpushare_worker_wait_layers on other threads return CANCELLED. */
GPUSHARE_API int32_t gpushare_worker_detach(gpushare_worker worker);
/* Waits for the turn, at most timeout_ns (GPUSHARE_NO_TIMEOUT: for ever). Turns are given in the order of
 * the calls. Errors: TIMED_OUT; INVALID_STATE (the worker has the turn already); DEVICE_OUT_OF_MEMORY and
 * other errors of the device; UNAVAILABLE (the daemon has gone). */
GPUSHARE_API int32_t gpushare_worker_begin(gpushare_worker worker, uint64_t timeout_ns);
/* Blocks until layers [first, end) are on the device; work enqueued afterwards on any stream finds them. If
 * they are there already, the call only reads shared memory. Call it in every iteration, beginning with
 * layer 0: the daemon learns from these calls how long iterations take, and plans for that. Errors:
 * TIMED_OUT (also, with the daemon's reason, when the turn was taken away because it outlasted the lease);
 * INVALID_STATE (not in a turn); INVALID_ARGUMENT; UNAVAILABLE; errors of the load. */
GPUSHARE_API int32_t gpushare_worker_wait_layers(gpushare_worker worker, uint32_t first, uint32_t end,
                                                 uint64_t timeout_ns);
/* Gives the turn back. The turn is over whatever this returns. Blocks briefly for the daemon's answer.
 * Errors: INVALID_STATE (the worker has no turn), TIMED_OUT (the turn had been taken away), UNAVAILABLE. */
GPUSHARE_API int32_t gpushare_worker_end(gpushare_worker worker);
/* Sets *out_wanted to 1 while another worker waits for the turn. The worker should then end its turn at the
 * next iteration boundary; after the lease the daemon takes the turn away. The call is cheap enough for
 * every iteration. */
GPUSHARE_API int32_t gpushare_worker_get_wanted(gpushare_worker worker, uint32_t* out_wanted);
/* Errors: INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_worker_get_info(gpushare_worker worker, gpushare_worker_info* out_info);
/* Describes layer `index` in execution order. Errors: INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_worker_get_layer(gpushare_worker worker, uint32_t index,
                                               gpushare_worker_layer* out_layer);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_WORKER_H_ */
