/* gpushare: loading models and switching between them. Part of the stable C ABI; included by gpushare.h, whose
 * contract holds here too.
 *
 *   plan      which consecutive layers are sent, and executed, as one group
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

/* What the link to the device costs. */
typedef struct gpushare_link_costs {
  uint32_t struct_size;
  uint32_t known; /* 0: assumed, nothing was given or measured yet. Ignored where costs are given */
  uint64_t bytes_per_s;
  uint64_t call_overhead_ns;  /* of one copy, whatever its size */
  uint64_t group_overhead_ns; /* of making a stream wait for a group and launching on it */
  uint64_t
      device_bytes_per_s; /* of copies within the device, such as of first layers on standby; 0: not known, learned
                                  from the first of them */
} gpushare_link_costs;
#define GPUSHARE_LINK_COSTS_INIT \
  { sizeof(gpushare_link_costs), 0, 0, 0, 0, 0 }

typedef struct gpushare_plan_params {
  uint32_t struct_size;
  uint32_t resident_layers; /* the first so many are on the device already */
  uint64_t link_busy_ns;    /* the link is free from then on */
  uint64_t lane_busy_ns;    /* the lane is free from then on */
  uint64_t group_cap_bytes; /* most bytes of a group; a larger layer is a group alone. 0 = none */
} gpushare_plan_params;
#define GPUSHARE_PLAN_PARAMS_INIT \
  { sizeof(gpushare_plan_params), 0, 0, 0, 0 }

/* The plan: which consecutive layers are sent, and executed, as one group so that the last one is done
 * earliest. Exact, O(layers * groups). `execute_ns` (null: each layer executes as long as its bytes take) and
 * `layer_bytes` have `layers` elements; out_ends has room for as many and gets the exclusive end of each group.
 * Errors: INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_plan_solve(const gpushare_plan_params* params, const gpushare_link_costs* link,
                                         uint32_t layers, const uint64_t* layer_bytes,
                                         const uint64_t* execute_ns, uint32_t* out_ends, uint32_t* out_groups,
                                         uint64_t* out_makespan_ns);

enum {
  GPUSHARE_READ_AUTO =
      0, /* buffered where the page cache has the file, else as its first reads are quicker */
  GPUSHARE_READ_BUFFERED = 1, /* plain reads */
  GPUSHARE_READ_DIRECT = 2,   /* past the page cache; buffered where the file system refuses */
  GPUSHARE_READ_MAPPED = 3    /* fast when cached; a file truncated meanwhile ends the process (SIGBUS) */
};

typedef struct gpushare_loader_params {
  uint32_t struct_size;
  uint32_t reads_in_flight; /* 1 to 64; 0 = 4 */
  uint64_t limit_bytes;     /* of host memory for images; 0 = no limit */
  uint64_t chunk_bytes;     /* images are laid over pinned chunks of this size, a power of two; 0 = 16 MiB */
  uint64_t read_bytes;      /* of each read, 4 KiB to 1 GiB; 0 = 8 MiB */
  uint32_t read_path;       /* GPUSHARE_READ_* */
  uint32_t drop_page_cache; /* nonzero: tell the system that a file's pages are not needed again */
  const gpushare_link_costs*
      link; /* given costs are kept; null: assumed at first, corrected by transmissions */
} gpushare_loader_params;
#define GPUSHARE_LOADER_PARAMS_INIT \
  { sizeof(gpushare_loader_params), 0, 0, 0, 0, 0, 0, 0 }

/* A loader for `runtime`: a cache of images with a byte limit, least recently used first out, and a stream for
 * copies. The caller owns *out_loader and releases it; images, models and switchers made with it keep what they
 * need of it. Errors: INVALID_ARGUMENT, INVALID_STATE (the runtime is closed). */
GPUSHARE_API int32_t gpushare_loader_create(gpushare_runtime runtime, const gpushare_loader_params* params,
                                            gpushare_loader* out_loader);
/* Gives the loader back. Its cache goes with what was made of it. Does not block; but whoever gives back the last of it all
 * waits for copies under way, unless inside a function that the device waits for: then they are waited for elsewhere. */
GPUSHARE_API int32_t gpushare_loader_release(gpushare_loader loader);

/* Measures the link with some copies in a session of its own of at most 32 MiB. Blocks, tens of milliseconds on
 * a fast link. Errors: DEVICE_OUT_OF_MEMORY (no room; give the costs instead), DEVICE_LOST. */
GPUSHARE_API int32_t gpushare_loader_calibrate(gpushare_loader loader);

typedef struct gpushare_loader_info {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t limit_bytes;
  uint64_t images_bytes; /* host memory of images, of whole chunks */
  uint64_t images;
  uint64_t hits; /* images opened that were there */
  uint64_t misses;
} gpushare_loader_info;
#define GPUSHARE_LOADER_INFO_INIT \
  { sizeof(gpushare_loader_info), 0, 0, 0, 0, 0, 0 }
/* What the cache holds, and how often it had what was opened. Errors: INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_loader_get_info(gpushare_loader loader, gpushare_loader_info* out_info);
/* The link's costs as known now: given, calibrated, or assumed and corrected. Errors: INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_loader_get_link(gpushare_loader loader, gpushare_link_costs* out_link);

/* In which order the layers of a file are taken to execute. Names: numbers in them count as numbers, embeddings and
 * other inputs come first, heads and other outputs last; writers of files sort by type and name, so bytes seldom lie
 * as they are used. A rule of thumb: a wrong guess costs time and nothing else. */
enum { GPUSHARE_ORDER_BY_BYTES = 0, GPUSHARE_ORDER_BY_NAMES = 1 };

typedef struct gpushare_image_params {
  uint32_t struct_size;
  uint32_t order_count;     /* names in `order`; 0 = as order_by says */
  const char* const* order; /* names of all tensors in execution order */
  const char* checksums;    /* path of a file with lines "CRC32C-in-hex name", verified; null = none */
  uint32_t order_by;        /* GPUSHARE_ORDER_BY_*, for an order_count of 0 */
  uint32_t reserved;
} gpushare_image_params;
#define GPUSHARE_IMAGE_PARAMS_INIT \
  { sizeof(gpushare_image_params), 0, 0, 0, GPUSHARE_ORDER_BY_BYTES, 0 }

/* Reads a model, a .safetensors file or an index of shards (*.safetensors.index.json), or finds it in the cache
 * (a file that changed is read anew). `params` may be null. The caller owns *out_image. Blocks on the disk.
 * Errors: IO_ERROR (native code is errno; also a file replaced while it was read), MALFORMED_INPUT (what is
 * wrong, by name; a checksum that differs), HOST_OUT_OF_MEMORY (limit_bytes; the message has the numbers),
 * INVALID_ARGUMENT (an order that does not fit the file, no regular file), INVALID_STATE (the runtime is closed). */
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
  uint64_t bytes;        /* what a session needs for it on the device */
  uint64_t held_bytes;   /* of host memory */
  uint64_t observations; /* measured execution times that its plans rest on */
  uint64_t replans;      /* times they led to another plan */
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
  const char* name; /* valid while the image or the model that was asked is */
  uint64_t bytes;
  uint64_t offset_bytes;           /* in the image */
  gpushare_device_address address; /* on the device; 0 when an image was asked */
  uint64_t execution_ns;           /* estimate; 0 when nothing was measured */
  uint32_t group;                  /* that brings it; 0 when an image was asked */
  uint32_t arrived;                /* 1: it is on the device */
} gpushare_layer_info;
#define GPUSHARE_LAYER_INFO_INIT \
  { sizeof(gpushare_layer_info), 0, 0, 0, 0, 0, 0, 0, 0 }
/* Layer `layer` of the image, counted from 0 in execution order. Errors: INVALID_ARGUMENT (no such layer). */
GPUSHARE_API int32_t gpushare_image_get_layer(gpushare_image image, uint32_t layer,
                                              gpushare_layer_info* out_info);

/* Called when the last byte of a group, layers [first, end), has arrived, in order, on a thread of the device.
 * Be quick; calls that would block return INVALID_STATE. */
typedef void (*gpushare_group_fn)(void* user_data, uint32_t group, uint32_t first, uint32_t end);

typedef struct gpushare_load_params {
  uint32_t struct_size;
  uint32_t group_count;       /* a grouping of yours, with `group_ends`; 0 = planned */
  const uint32_t* group_ends; /* exclusive ends, ascending, the last one being the number of layers */
  const uint64_t*
      execute_ns; /* of each layer, for the plan; null: as measured so far, else as long as its bytes take */
  gpushare_group_fn on_group; /* may be null */
  void* on_group_user_data;   /* valid until the last group has arrived */
  uint32_t no_profile;        /* nonzero: gpushare_model_make_usable does not measure execution times */
  uint32_t reserved;
} gpushare_load_params;
#define GPUSHARE_LOAD_PARAMS_INIT \
  { sizeof(gpushare_load_params), 0, 0, 0, 0, 0, 0, 0 }

/* Allocates a block of kind MODEL in `session` and enqueues the image's copies to it, group by group, on the
 * loader's stream. Returns at once on a RESIDENT session; otherwise waits until it is. `params` may be null. The
 * caller owns *out_model. Errors: as gpushare_session_alloc; INVALID_ARGUMENT (a session of another runtime, a
 * grouping that is none). */
GPUSHARE_API int32_t gpushare_session_load(gpushare_session session, gpushare_image image,
                                           const gpushare_load_params* params, gpushare_model* out_model);

/* Makes layers [first, end) usable on `stream`: work enqueued there from now on finds them on the device. One
 * event at most; no host wait. Ask in execution order; the time on the stream from one call to the next is taken
 * as the execution of its layers. Errors: INVALID_ARGUMENT (no such layers, a stream of another runtime),
 * INVALID_STATE (unloaded; the stream captures a CUDA graph and the layers have not arrived: wait for them before the
 * capture), what a copy has failed with. */
GPUSHARE_API int32_t gpushare_model_make_usable(gpushare_model model, uint32_t first, uint32_t end,
                                                gpushare_stream stream);
/* The work of the layers made usable last has been enqueued: what is measured ends here. Optional. */
GPUSHARE_API int32_t gpushare_model_mark_end(gpushare_model model, gpushare_stream stream);

/* Blocks until `layer` has arrived; all of them with the last one. Errors: TIMED_OUT, INVALID_ARGUMENT, what a
 * copy failed with. */
GPUSHARE_API int32_t gpushare_model_wait(gpushare_model model, uint32_t layer, uint64_t timeout_ns);

typedef struct gpushare_model_info {
  uint32_t struct_size;
  uint32_t layers;
  uint32_t groups;
  uint32_t layers_arrived;         /* the first so many are on the device */
  gpushare_device_address address; /* of the block; layer l lies at address + offset_bytes of l */
  uint64_t bytes;
  uint64_t load_ns; /* device time from the first copy's start until all had arrived; 0 before */
} gpushare_model_info;
#define GPUSHARE_MODEL_INFO_INIT \
  { sizeof(gpushare_model_info), 0, 0, 0, 0, 0, 0 }
/* Does not block. Errors: what a copy failed with. */
GPUSHARE_API int32_t gpushare_model_get_info(gpushare_model model, gpushare_model_info* out_info);
/* Layer `layer` with its address on the device. Errors: INVALID_ARGUMENT (no such layer), what a copy failed with. */
GPUSHARE_API int32_t gpushare_model_get_layer(gpushare_model model, uint32_t layer,
                                              gpushare_layer_info* out_info);
/* Unloads: the block is freed (after copies under way, in stream order) and the handle given back. Does not
 * wait for the device, but for other threads' calls on this model. INVALID_ARGUMENT for a switcher's model. */
GPUSHARE_API int32_t gpushare_model_release(gpushare_model model);

/* ---- switching ---- */

enum {
  GPUSHARE_RESIDENCY_LRU = 0, /* of the models on the device, the one used longest ago goes first */
  GPUSHARE_RESIDENCY_WEIGHTED =
      1 /* the ones least worth: request rate times load time, against their bytes */
};

typedef struct gpushare_switcher_params {
  uint32_t struct_size;
  uint32_t residency; /* GPUSHARE_RESIDENCY_* */
  uint64_t
      keep_bytes; /* members not active keep their bytes up to so many, the active one's included, while the
                          device has room; 0 = none is kept */
  uint64_t
      standby_bytes; /* of the device, beside those: members on standby keep their first layers there, as few
                             as let the first output come within 5% of the load time of a member that is there
                             already (the plan predicts it). If that is more than standby_bytes together, those
                             that save most. Dropped before whole members when room is short. How many is worked
                             out anew at the end of the first iteration after a switch: gpushare_iteration_end
                             then takes 2 to 3 ms longer on the host for models of hundreds of layers, when the
                             turn has been given on. 0 = none */
} gpushare_switcher_params;
#define GPUSHARE_SWITCHER_PARAMS_INIT \
  { sizeof(gpushare_switcher_params), 0, UINT64_MAX, 0 }

/* One active session and any number on standby on the loader's runtime. On standby a member has its weights in
 * host memory, no promise, and no device bytes but what standby_bytes allows. Sessions opened in the runtime take what
 * is kept so when they would be refused or wait otherwise (and wait for a switch under way). The caller owns *out_switcher. */
GPUSHARE_API int32_t gpushare_switcher_create(gpushare_loader loader, const gpushare_switcher_params* params,
                                              gpushare_switcher* out_switcher);
/* Begins that wait fail with INVALID_STATE, the iteration under way is waited for, all bytes return. Blocks.
 * Errors: INVALID_STATE (this thread has an iteration of the switcher open). */
GPUSHARE_API int32_t gpushare_switcher_release(gpushare_switcher switcher);

/* Adds a member, on standby. `session` describes its sessions; its persistent_bytes and ephemeral_bytes are
 * needs beside the image. `load` may be null; its arrays are copied. Errors: EXCEEDS_CAPACITY (it could not run alone),
 * INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_switcher_add(gpushare_switcher switcher, const gpushare_session_params* session,
                                           gpushare_image image, const gpushare_load_params* load,
                                           uint64_t* out_member);
/* Begins that wait for the member fail with CANCELLED; its iteration under way is waited for. Blocks. Errors:
 * NOT_FOUND, INVALID_STATE (this thread has an iteration of the switcher open). */
GPUSHARE_API int32_t gpushare_switcher_remove(gpushare_switcher switcher, uint64_t member);

/* Begins an iteration of `member`, ended by gpushare_iteration_end or _fail. If another member is active, it
 * stops at the boundary of its iteration under way, its bytes are dropped or kept, and the groups of this one
 * are enqueued; the iteration begins at once, and gpushare_model_make_usable orders it behind the layers it
 * needs. *out_model belongs to the switcher and is valid until the iteration ends. *out_loaded (may be null) is
 * nonzero when the member's session is new: blocks allocated in earlier iterations are gone. Begins get their
 * turn in the order they come. Blocks up to timeout_ns. Errors: TIMED_OUT, CANCELLED (removed), NOT_FOUND,
 * DEVICE_OUT_OF_MEMORY (it does not fit beside other sessions of the runtime, all other members dropped),
 * DEVICE_LOST, INVALID_STATE (this thread has an iteration of the switcher open), and what its loading fails
 * with: the member is on standby then, and another begin tries again. */
GPUSHARE_API int32_t gpushare_switcher_begin(gpushare_switcher switcher, uint64_t member, uint64_t timeout_ns,
                                             gpushare_iteration* out_iteration, gpushare_model* out_model,
                                             uint32_t* out_loaded);

enum { GPUSHARE_MEMBER_STANDBY = 0, GPUSHARE_MEMBER_KEPT = 1, GPUSHARE_MEMBER_ACTIVE = 2 };
typedef struct gpushare_member_info {
  uint32_t struct_size;
  uint32_t state;         /* GPUSHARE_MEMBER_* */
  uint64_t device_bytes;  /* persistent bytes promised to its session; 0 on standby */
  uint64_t loads;         /* times its image was sent */
  uint64_t iterations;    /* begun */
  uint64_t drops;         /* times its bytes were dropped */
  uint64_t standby_bytes; /* of its first layers, on the device for its next load */
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
  uint64_t waiting;       /* begins that wait for their turn */
  uint64_t switch_ns;     /* host time of the last switch, from its turn until its copies were enqueued */
  uint64_t standby_bytes; /* of all members' first layers, at most what the switcher was given */
} gpushare_switcher_info;
#define GPUSHARE_SWITCHER_INFO_INIT \
  { sizeof(gpushare_switcher_info), 0, 0, 0, 0, 0, 0, 0, 0 }
/* Errors: INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_switcher_get_info(gpushare_switcher switcher, gpushare_switcher_info* out_info);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_LOADER_H_ */
