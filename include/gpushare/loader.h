/* gpushare: loading models and switching between them. Part of the stable C ABI. gpushare.h includes this
 * header, and its contract holds here too.
 *
 *   plan      a transmission plan: which consecutive layers are sent, and executed, as one group
 *   loader    images in host memory within a byte limit, and the link that they go over
 *   image     a model's layers in host memory, read from files or copied from the caller's
 *   model     an image's layers in a session's memory, usable group by group as they arrive
 *   switcher  one active session and any number on standby
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_LOADER_H_
#define GPUSHARE_LOADER_H_

#include "gpushare/gpushare.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpushare_loader_s* gpushare_loader;     /* images in host memory, and the link they go over */
typedef struct gpushare_image_s* gpushare_image;       /* a model's layers in host memory */
typedef struct gpushare_model_s* gpushare_model;       /* an image's layers in a session's memory */
typedef struct gpushare_switcher_s* gpushare_switcher; /* one active session, others on standby */

/* ---- loading models ---- */

/* A model's layers go from files to an image in host memory, and from there to a session's memory in groups, so
 * that the first layers compute while later ones are on their way (PipeSwitch). */

/* Costs of the link between host and device. */
typedef struct gpushare_link_costs {
  uint32_t struct_size;
  uint32_t known; /* 0: the costs are assumed, because nothing was given or measured yet. Ignored on input */
  uint64_t bytes_per_s;
  uint64_t call_overhead_ns;   /* of each copy, independent of its size */
  uint64_t group_overhead_ns;  /* of making a stream wait for a group and launching work on it */
  uint64_t device_bytes_per_s; /* bandwidth of copies within the device, such as copies of first layers on
                                  standby; 0: unknown, learned from the first such copies */
} gpushare_link_costs;
#define GPUSHARE_LINK_COSTS_INIT \
  { sizeof(gpushare_link_costs), 0, 0, 0, 0, 0 }

typedef struct gpushare_plan_params {
  uint32_t struct_size;
  uint32_t resident_layers; /* how many first layers are on the device already */
  uint64_t link_busy_ns;    /* time until the link is free */
  uint64_t lane_busy_ns;    /* time until the lane is free */
  uint64_t group_cap_bytes; /* upper limit of a group's bytes; a larger layer is a group by itself. 0 = no
                               limit */
} gpushare_plan_params;
#define GPUSHARE_PLAN_PARAMS_INIT \
  { sizeof(gpushare_plan_params), 0, 0, 0, 0 }

/* Computes the plan: which consecutive layers are sent, and executed, as one group so that the last layer is
 * done as early as possible. The result is exact; the time is O(layers * groups). `layer_bytes` and
 * `execution_ns` have `layers` elements; a null execution_ns means that each layer executes as long as its
 * transmission takes. out_ends has room for `layers` elements and receives the exclusive end of each group.
 * Errors: INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_plan_solve(const gpushare_plan_params* params, const gpushare_link_costs* link,
                                         uint32_t layers, const uint64_t* layer_bytes,
                                         const uint64_t* execution_ns, uint32_t* out_ends,
                                         uint32_t* out_groups, uint64_t* out_makespan_ns);

enum {
  GPUSHARE_READ_AUTO =
      0, /* buffered where the page cache has the file, else the way that is faster for its first reads */
  GPUSHARE_READ_BUFFERED = 1, /* plain reads */
  GPUSHARE_READ_DIRECT = 2,   /* reads that bypass the page cache; buffered where the file system refuses
                                 them */
  GPUSHARE_READ_MAPPED = 3    /* fast when cached; if the file is truncated meanwhile, the process ends
                                 (SIGBUS) */
};

typedef struct gpushare_loader_params {
  uint32_t struct_size;
  uint32_t reads_in_flight; /* 1 to 64; 0 = 4 */
  uint64_t limit_bytes;     /* upper limit of host memory for images; 0 = no limit */
  uint64_t chunk_bytes;     /* images consist of pinned chunks of this size, a power of two; 0 = 16 MiB */
  uint64_t read_bytes;      /* size of each read, 4 KiB to 1 GiB; 0 = 8 MiB */
  uint32_t read_path;       /* GPUSHARE_READ_* */
  uint32_t drop_page_cache; /* nonzero: tell the system that a file's pages are not needed again */
  const gpushare_link_costs*
      link; /* given costs are kept; null: costs are assumed at first and corrected by transmissions */
  uint64_t keep_ns; /* chunks of released images are kept so long for the next image; 0 = 10 s,
                       GPUSHARE_NO_TIMEOUT = until the system's memory is short */
} gpushare_loader_params;
#define GPUSHARE_LOADER_PARAMS_INIT \
  { sizeof(gpushare_loader_params), 0, 0, 0, 0, 0, 0, 0, 0 }

/* Creates a loader for `runtime`: a cache of images with a byte limit, from which the least recently used
 * image is evicted first, and a stream for copies. The caller owns *out_loader and releases it. Images,
 * models and switchers made with it keep the parts of it that they need. Errors: INVALID_ARGUMENT,
 * INVALID_STATE (the runtime is closed). */
GPUSHARE_API int32_t gpushare_loader_create(gpushare_runtime runtime, const gpushare_loader_params* params,
                                            gpushare_loader* out_loader);
/* Gives the loader back. Its cache lives on until the last image, model and switcher made with it is given
 * back. This call does not block, unless it gives back the last of these objects: it then waits for copies
 * under way. Inside a function that the device waits for it never blocks; another thread waits for the
 * copies. */
GPUSHARE_API int32_t gpushare_loader_release(gpushare_loader loader);

/* Measures the link with a few copies in a temporary session of at most 32 MiB. Blocks, tens of milliseconds
 * on a fast link. Errors: DEVICE_OUT_OF_MEMORY (no room; give the costs instead), DEVICE_LOST. */
GPUSHARE_API int32_t gpushare_loader_calibrate(gpushare_loader loader);

typedef struct gpushare_loader_info {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t limit_bytes;
  uint64_t images_bytes; /* host memory of images, of whole chunks */
  uint64_t images;
  uint64_t hits; /* opened images that the cache had */
  uint64_t misses;
  uint64_t kept_bytes; /* host memory of chunks that no image has, kept for the next one. Together with
                          images_bytes never more than limit_bytes. They are given back after keep_ns, and all
                          at once while less than 1/16 of the system's memory is available */
  uint64_t keep_ns;    /* as given in gpushare_loader_params, or its default */
} gpushare_loader_info;
#define GPUSHARE_LOADER_INFO_INIT \
  { sizeof(gpushare_loader_info), 0, 0, 0, 0, 0, 0, 0, 0 }
/* Returns what the cache holds, and how often it had an image that was opened. Errors: INVALID_ARGUMENT (bad
 * struct_size). */
GPUSHARE_API int32_t gpushare_loader_get_info(gpushare_loader loader, gpushare_loader_info* out_info);
/* Returns the costs of the link as known now: given, calibrated, or assumed and corrected. Errors:
 * INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_loader_get_link(gpushare_loader loader, gpushare_link_costs* out_link);

/* The order in which the layers of a file are assumed to execute. BYTES: as they lie in the file. NAMES:
 * sorted by name, where numbers in names count as numbers, embeddings and other inputs come first, heads and
 * other outputs last. Writers of files sort by type and name, so the order of the bytes is seldom that of
 * execution. The order by names is a rule of thumb: a wrong guess costs time and nothing else. */
enum { GPUSHARE_ORDER_BY_BYTES = 0, GPUSHARE_ORDER_BY_NAMES = 1 };

typedef struct gpushare_image_params {
  uint32_t struct_size;
  uint32_t order_count;     /* number of names in `order`; 0: order_by decides */
  const char* const* order; /* names of all tensors in execution order */
  const char* checksums;    /* path of a file with lines "CRC32C-in-hex name", verified; null = none */
  uint32_t order_by;        /* GPUSHARE_ORDER_BY_*, for an order_count of 0 */
  uint32_t once; /* nonzero: the image leaves the cache with its last user, and its chunks serve the next */
} gpushare_image_params;
#define GPUSHARE_IMAGE_PARAMS_INIT \
  { sizeof(gpushare_image_params), 0, 0, 0, GPUSHARE_ORDER_BY_BYTES, 0 }

/* Reads a model from a .safetensors file or an index of shards (*.safetensors.index.json), or finds it in
 * the cache. A file that has changed is read anew. `params` may be null. The caller owns *out_image. Blocks
 * on the disk. Errors: IO_ERROR (the native code is errno; also if the file was replaced while it was read),
 * MALFORMED_INPUT (the message names the wrong field or tensor; also if a checksum differs),
 * HOST_OUT_OF_MEMORY (limit_bytes; the message has the numbers), INVALID_ARGUMENT (an order that does not
 * fit the file; not a regular file), INVALID_STATE (the runtime is closed). */
GPUSHARE_API int32_t gpushare_image_open(gpushare_loader loader, const char* path,
                                         const gpushare_image_params* params, gpushare_image* out_image);

/* A layer in the caller's memory. */
typedef struct gpushare_layer_source {
  const char* name;
  const void* data;
  uint64_t bytes;
} gpushare_layer_source;
/* Copies layers, in execution order, into an image. The caller owns *out_image. Errors: HOST_OUT_OF_MEMORY,
 * INVALID_ARGUMENT, INVALID_STATE. */
GPUSHARE_API int32_t gpushare_image_create(gpushare_loader loader, const char* name, uint32_t count,
                                           const gpushare_layer_source* layers, gpushare_image* out_image);
/* Gives the image back; models and switcher members made of it keep it. */
GPUSHARE_API int32_t gpushare_image_release(gpushare_image image);

typedef struct gpushare_image_info {
  uint32_t struct_size;
  uint32_t layers;
  uint64_t bytes;        /* device memory that a session needs for it */
  uint64_t held_bytes;   /* of host memory */
  uint64_t observations; /* measured execution times that its plans rest on */
  uint64_t replans;      /* how often they led to another plan */
} gpushare_image_info;
#define GPUSHARE_IMAGE_INFO_INIT \
  { sizeof(gpushare_image_info), 0, 0, 0, 0, 0 }
/* Errors: INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_image_get_info(gpushare_image image, gpushare_image_info* out_info);
/* Index of the layer `name`. Errors: NOT_FOUND. */
GPUSHARE_API int32_t gpushare_image_find_layer(gpushare_image image, const char* name, uint32_t* out_layer);
/* Reports a measured execution time of layers [first, end) together, for later plans. Errors: INVALID_ARGUMENT.
 */
GPUSHARE_API int32_t gpushare_image_report_execution(gpushare_image image, uint32_t first, uint32_t end,
                                                     uint64_t execution_ns);

typedef struct gpushare_layer_info {
  uint32_t struct_size;
  uint32_t layer;
  const char* name; /* valid while the image or model that was asked exists */
  uint64_t bytes;
  uint64_t offset_bytes;           /* in the image */
  gpushare_device_address address; /* on the device; 0 when an image was asked */
  uint64_t execution_ns;           /* estimate; 0 when nothing was measured */
  uint32_t group;                  /* the group that the layer arrives with; 0 when an image was asked */
  uint32_t arrived;                /* 1: it is on the device */
} gpushare_layer_info;
#define GPUSHARE_LAYER_INFO_INIT \
  { sizeof(gpushare_layer_info), 0, 0, 0, 0, 0, 0, 0, 0 }
/* Describes layer `layer` of the image, counted from 0 in execution order. Errors: INVALID_ARGUMENT (no such
 * layer). */
GPUSHARE_API int32_t gpushare_image_get_layer(gpushare_image image, uint32_t layer,
                                              gpushare_layer_info* out_info);

/* Called when the last byte of a group, layers [first, end), has arrived. Groups are reported in order, on a
 * thread of the device. The function must be quick; calls that would block return INVALID_STATE. */
typedef void (*gpushare_group_fn)(void* user_data, uint32_t group, uint32_t first, uint32_t end);

typedef struct gpushare_load_params {
  uint32_t struct_size;
  uint32_t group_count;       /* number of groups in `group_ends`, for a grouping by the caller; 0 = planned
                                 by the library */
  const uint32_t* group_ends; /* exclusive ends, ascending, the last one being the number of layers */
  const uint64_t*
      execution_ns; /* execution time of each layer, for the plan; null: as measured so far, or as long as the
                     layer's transmission if nothing was measured */
  gpushare_group_fn on_group; /* may be null */
  void* on_group_user_data;   /* valid until the last group has arrived */
  uint32_t no_profile;        /* nonzero: gpushare_model_make_usable does not measure execution times */
  uint32_t reserved;
} gpushare_load_params;
#define GPUSHARE_LOAD_PARAMS_INIT \
  { sizeof(gpushare_load_params), 0, 0, 0, 0, 0, 0, 0 }

/* Allocates a block of kind MODEL in `session` and enqueues the image's copies to it, group by group, on the
 * loader's stream. Returns at once on a RESIDENT session; otherwise waits until it is. `params` may be null.
 * The caller owns *out_model. Errors: as gpushare_session_alloc; INVALID_ARGUMENT (a session of another
 * runtime, an invalid grouping). */
GPUSHARE_API int32_t gpushare_session_load(gpushare_session session, gpushare_image image,
                                           const gpushare_load_params* params, gpushare_model* out_model);

/* Makes layers [first, end) usable on `stream`: work enqueued there from now on finds them on the device.
 * The stream waits for at most one event; the host does not wait. Call it in execution order: the time on
 * the stream from one call to the next is taken as the execution time of the layers. Errors:
 * INVALID_ARGUMENT (no such layers, a stream of another runtime), INVALID_STATE (unloaded; or the stream
 * captures a CUDA graph and the layers have not arrived: wait for them before the capture), the error of a
 * copy that failed. */
GPUSHARE_API int32_t gpushare_model_make_usable(gpushare_model model, uint32_t first, uint32_t end,
                                                gpushare_stream stream);
/* Says that the work of the layers made usable last has been enqueued; the measurement of their execution
 * time ends here. Optional. */
GPUSHARE_API int32_t gpushare_model_mark_end(gpushare_model model, gpushare_stream stream);

/* Blocks until `layer` and all layers before it have arrived. Errors: TIMED_OUT, INVALID_ARGUMENT, the error
 * of a copy that failed. */
GPUSHARE_API int32_t gpushare_model_wait(gpushare_model model, uint32_t layer, uint64_t timeout_ns);

typedef struct gpushare_model_info {
  uint32_t struct_size;
  uint32_t layers;
  uint32_t groups;
  uint32_t layers_arrived;         /* number of first layers that are on the device */
  gpushare_device_address address; /* of the block; layer l lies at address + offset_bytes of l */
  uint64_t bytes;
  uint64_t load_ns; /* device time from the first copy's start until all had arrived; 0 before */
} gpushare_model_info;
#define GPUSHARE_MODEL_INFO_INIT \
  { sizeof(gpushare_model_info), 0, 0, 0, 0, 0, 0 }
/* Does not block. Errors: the error of a copy that failed. */
GPUSHARE_API int32_t gpushare_model_get_info(gpushare_model model, gpushare_model_info* out_info);
/* Describes layer `layer`, with its address on the device. Errors: INVALID_ARGUMENT (no such layer), the
 * error of a copy that failed. */
GPUSHARE_API int32_t gpushare_model_get_layer(gpushare_model model, uint32_t layer,
                                              gpushare_layer_info* out_info);
/* Unloads the model: frees its block in stream order, after copies under way, and gives the handle back.
 * Does not wait for the device. Waits for calls of other threads on this model. Errors: INVALID_ARGUMENT
 * (the model belongs to a switcher), INVALID_STATE (another thread waits for the model, and this is a callback that
 * its copies may wait for: the handle stays good). */
GPUSHARE_API int32_t gpushare_model_release(gpushare_model model);

/* ---- switching ---- */

enum {
  GPUSHARE_RESIDENCY_LRU = 0, /* drops the model first that was used longest ago */
  GPUSHARE_RESIDENCY_WEIGHTED =
      1 /* drops the models of least worth first: request rate times load time, per byte */
};

typedef struct gpushare_switcher_params {
  uint32_t struct_size;
  uint32_t residency; /* GPUSHARE_RESIDENCY_* */
  uint64_t
      keep_bytes; /* upper limit, in bytes, of the model data of all members on the device, the active one
                     included. Inactive members keep theirs within this limit while the device has room; 0 =
                     they keep nothing */
  uint64_t standby_bytes; /* upper limit of the device memory, in addition to keep_bytes, in which members on
                             standby keep their first layers; 0 = none. A member keeps as few layers as the plan
                             predicts to suffice for this: the first output of a switch comes at most 5% of the
                             load time later than with a fully resident member. If all members together need more
                             than standby_bytes, the layers that save most time are chosen. Kept layers are dropped
                             before whole members when room is short. How many layers to keep is computed anew at
                             the end of the first iteration after a switch: for models of hundreds of layers that
                             gpushare_iteration_end takes 2 to 3 ms longer on the host, after the turn has been
                             passed on */
} gpushare_switcher_params;
#define GPUSHARE_SWITCHER_PARAMS_INIT \
  { sizeof(gpushare_switcher_params), 0, UINT64_MAX, 0 }

/* Creates a switcher on the loader's runtime: one active session and any number of members on standby. A
 * member on standby has its weights in host memory, no promise, and no device bytes except within
 * standby_bytes. When a session opened in the runtime would be refused or would have to wait, members
 * give up the bytes that they keep on the device (after a switch under way has finished). The caller owns
 * *out_switcher. */
GPUSHARE_API int32_t gpushare_switcher_create(gpushare_loader loader, const gpushare_switcher_params* params,
                                              gpushare_switcher* out_switcher);
/* Releases the switcher: waiting calls of gpushare_switcher_begin fail with INVALID_STATE, the iteration
 * under way is waited for, and all bytes return. Blocks. Errors: INVALID_STATE (this thread has an iteration
 * of the switcher open). */
GPUSHARE_API int32_t gpushare_switcher_release(gpushare_switcher switcher);

/* Adds a member, on standby. `session` describes the sessions that are opened for it; persistent_bytes and
 * ephemeral_bytes are its needs in addition to the image. `load` may be null; its arrays are copied. Errors:
 * EXCEEDS_CAPACITY (it could not run alone), INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_switcher_add(gpushare_switcher switcher, const gpushare_session_params* session,
                                           gpushare_image image, const gpushare_load_params* load,
                                           uint64_t* out_member);
/* Removes a member: waiting calls of gpushare_switcher_begin for it fail with CANCELLED, and its iteration
 * under way is waited for. Blocks. Errors: NOT_FOUND, INVALID_STATE (this thread has an iteration of the
 * switcher open). */
GPUSHARE_API int32_t gpushare_switcher_remove(gpushare_switcher switcher, uint64_t member);

/* Begins an iteration of `member`, ended by gpushare_iteration_end or _fail. If another member is active,
 * that member stops at the boundary of its iteration under way, its bytes are dropped or kept, and the
 * groups of `member` are enqueued. The iteration then begins at once; gpushare_model_make_usable orders its
 * work behind the layers that the work needs. *out_model belongs to the switcher and is valid until the
 * iteration ends. *out_loaded (may be null) is nonzero when the member's session is new: blocks allocated in
 * earlier iterations are gone. Calls get their turn in the order in which they arrive. Blocks up to
 * timeout_ns. Errors: TIMED_OUT, CANCELLED (removed), NOT_FOUND, DEVICE_OUT_OF_MEMORY (the member does not
 * fit beside other sessions of the runtime even with all other members dropped), DEVICE_LOST, INVALID_STATE
 * (this thread has an iteration of the switcher open), and errors of loading: the member is then on standby,
 * and another call tries again. */
GPUSHARE_API int32_t gpushare_switcher_begin(gpushare_switcher switcher, uint64_t member, uint64_t timeout_ns,
                                             gpushare_iteration* out_iteration, gpushare_model* out_model,
                                             uint32_t* out_loaded);

enum { GPUSHARE_MEMBER_STANDBY = 0, GPUSHARE_MEMBER_KEPT = 1, GPUSHARE_MEMBER_ACTIVE = 2 };
typedef struct gpushare_member_info {
  uint32_t struct_size;
  uint32_t state;         /* GPUSHARE_MEMBER_* */
  uint64_t device_bytes;  /* persistent bytes promised to its session; 0 on standby */
  uint64_t loads;         /* how often its image was sent */
  uint64_t iterations;    /* begun */
  uint64_t drops;         /* how often its bytes were dropped */
  uint64_t standby_bytes; /* bytes of its first layers that stay on the device for its next load */
} gpushare_member_info;
#define GPUSHARE_MEMBER_INFO_INIT \
  { sizeof(gpushare_member_info), 0, 0, 0, 0, 0, 0 }
/* Errors: NOT_FOUND. */
GPUSHARE_API int32_t gpushare_switcher_get_member(gpushare_switcher switcher, uint64_t member,
                                                  gpushare_member_info* out_info);

typedef struct gpushare_switcher_info {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t active; /* member; 0 = none */
  uint64_t members;
  uint64_t kept; /* on the device, not active */
  uint64_t switches;
  uint64_t waiting;       /* calls of gpushare_switcher_begin that wait for their turn */
  uint64_t switch_ns;     /* host time of the last switch, from its turn until its copies were enqueued */
  uint64_t standby_bytes; /* bytes of the first layers of all members, at most
                             gpushare_switcher_params.standby_bytes */
} gpushare_switcher_info;
#define GPUSHARE_SWITCHER_INFO_INIT \
  { sizeof(gpushare_switcher_info), 0, 0, 0, 0, 0, 0, 0, 0 }
/* Errors: INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_switcher_get_info(gpushare_switcher switcher, gpushare_switcher_info* out_info);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_LOADER_H_ */
