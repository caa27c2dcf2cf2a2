/* gpushare: images of models that the daemon shares. Part of the stable C ABI. gpushare.h includes this header,
 * and its contract holds here too.
 *
 * On a shared device (runtime parameter `device` = "shared") the daemon reads a model's file once, brings it to the
 * device once, and processes read it there. A session that has opened an image finds it inside its
 * iterations, always at the same addresses. Where the image is not on the device when the session's turn comes,
 * the daemon sends it, and the iteration begins while layers still arrive. Between iterations the daemon may drop
 * the image to make room for others, and sends it again for the session's next turn.
 *
 * An image is read-only: on the host device writing to it is a fault of the process that tries. On a GPU nothing
 * enforces that, so only processes of one user share an image. The daemon reads files as its own user, and refuses images
 * to other users but root.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_SHARED_IMAGE_H_
#define GPUSHARE_SHARED_IMAGE_H_

#include "gpushare/gpushare.h"

#ifdef __cplusplus
extern "C" {
#endif

struct
    gpushare_layer_info; /* loader.h, which includes this header before its own declarations if it comes first */

typedef struct gpushare_shared_image_s*
    gpushare_shared_image; /* an image of the daemon, as one session reads it */

typedef struct gpushare_shared_image_params {
  uint32_t struct_size;
  uint32_t reserved;
  const char* path;      /* of a safetensors file or index; the daemon reads it */
  uint64_t iteration_ns; /* expected execution time of an iteration, for the first load's transmission plan;
                            measured iterations replace it. 0 = as long as the load */
  uint64_t timeout_ns;   /* for opening, which waits until the daemon has read the file */
} gpushare_shared_image_params;
#define GPUSHARE_SHARED_IMAGE_PARAMS_INIT \
  { sizeof(gpushare_shared_image_params), 0, 0, 0, GPUSHARE_NO_TIMEOUT }

/* Opens the image of a model for `session`. Iterations of the session that begin from then on find it. Blocks while the
 * daemon reads the file, at most timeout_ns. The caller owns *out_image and releases it; the image keeps the
 * session. Thread-safe. Errors: UNSUPPORTED (the runtime is not on a shared device; the daemon is another user's;
 * its device cannot share memory), EXCEEDS_CAPACITY (it does not fit the device together with what the session has),
 * TIMED_OUT, UNAVAILABLE (the daemon has gone), HOST_OUT_OF_MEMORY (the daemon's images), IO_ERROR and MALFORMED_INPUT
 * (the file), INVALID_STATE. */
GPUSHARE_API int32_t gpushare_session_open_shared_image(gpushare_session session,
                                                        const gpushare_shared_image_params* params,
                                                        gpushare_shared_image* out_image);
/* Unmaps the image and gives the handle back. Device work that reads it must have finished. Does not block. */
GPUSHARE_API int32_t gpushare_shared_image_release(gpushare_shared_image image);
/* Blocks until layers [first, end) are on the device, at most timeout_ns; work enqueued afterwards on any stream
 * finds them. Layers count from 0 in execution order. Call it inside an iteration of the session, in each, layer by layer
 * or group by group ahead of the work that needs them. A layer that is there costs a look at shared memory. Thread-safe.
 * Errors: TIMED_OUT; INVALID_STATE (the session has no iteration open); INVALID_ARGUMENT (no such layers);
 * UNAVAILABLE (the daemon has gone: release the image, and open it anew once a daemon serves); what the load failed
 * with: the session's next turn tries again. */
GPUSHARE_API int32_t gpushare_shared_image_wait(gpushare_shared_image image, uint32_t first, uint32_t end,
                                                uint64_t timeout_ns);

typedef struct gpushare_shared_image_info {
  uint32_t struct_size;
  uint32_t layers;
  uint64_t bytes;                  /* padding between layers included */
  gpushare_device_address address; /* where layer 0 lies inside iterations */
  uint32_t layers_arrived;         /* number of first layers that this process can read now */
  uint32_t reserved;
} gpushare_shared_image_info;
#define GPUSHARE_SHARED_IMAGE_INFO_INIT \
  { sizeof(gpushare_shared_image_info), 0, 0, 0, 0, 0 }
/* Does not block. Errors: INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_shared_image_get_info(gpushare_shared_image image,
                                                    gpushare_shared_image_info* out_info);
/* Describes layer `layer`, with its address on the device; the name lives as long as the image, execution_ns and group are
 * 0. Does not block. Errors: INVALID_ARGUMENT (no such layer). */
GPUSHARE_API int32_t gpushare_shared_image_get_layer(gpushare_shared_image image, uint32_t layer,
                                                     struct gpushare_layer_info* out_info);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_SHARED_IMAGE_H_ */
