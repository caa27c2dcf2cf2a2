/* gpushare: serving requests with deadlines. Part of the stable C ABI; included by gpushare.h, whose contract
 * holds here too.
 *
 *   request queue   in front of a runtime: requests go in from any thread, batches run as iterations of your
 *                   sessions, every request is answered once
 *   batcher         the decisions alone, for programs with threads of their own
 *   histogram       what is known of execution times
 *   score queue     pending requests by Orloj's score
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_SERVING_H_
#define GPUSHARE_SERVING_H_

#include "gpushare/gpushare.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpushare_request_queue_s* gpushare_request_queue; /* requests served by a runtime */
typedef struct gpushare_batcher_s* gpushare_batcher;             /* deadline-aware batching, decisions only */
typedef struct gpushare_histogram_s* gpushare_histogram;         /* the last durations of something */
typedef struct gpushare_score_queue_s* gpushare_score_queue;     /* deadlines by score */

/* ---- deadline-aware batching ---- */

/* Requests with deadlines go in, batches come out. A batcher decides and does nothing else: it has no thread
 * and reads no clock, the caller runs the batches and tells what happened. Times are nanoseconds on any one
 * clock. Threads: the caller orders calls on one batcher. Nothing here blocks. Every request that
 * gpushare_batcher_arrive accepted is answered once: in a batch, or by gpushare_batcher_take_drops. */
typedef struct gpushare_batcher_params {
  uint32_t struct_size;
  uint32_t reserved;
  const char*
      policy; /* null = "gpushare"; or a baseline: fifo, edf, maxdelay, greedy, clipper, clipper-mean, clipper-aimd,
               * nexus, nexus-cycle, clockwork, clockwork-single, orloj, orloj-own */
  uint64_t max_pending;  /* requests held at most; 0 = 100,000 */
  uint64_t max_defer_ns; /* gpushare: how long an unfilled batch may wait for company; 0 = not at all */
  /* Zero in any field from here on: the default. docs/design/slo.md says what each does; the sensitivities are
   * in docs/experiments/serving.md. */
  uint64_t window; /* durations of an application that are remembered, up to 2^20; 2,048 */
  uint32_t bins;   /* of the distributions that decisions use, up to 4,096; 32 */
  uint32_t flags;  /* GPUSHARE_BATCHER_* */
  double
      opportunity; /* gpushare: price of device time, as a share of the recent goodput per busy time; 0.7 */
  double hold;     /* gpushare: see docs/design/slo.md; 0.4, negative = none */
  double feasible_quantile;     /* gpushare: of a batch's duration, that a member's slack covers; 0.7 */
  double delay_rate_per_ms;     /* orloj: b; 1e-4 */
  double estimate_quantile;     /* orloj: of EstimateBatchLatency; default the mean */
  uint64_t max_delay_ns;        /* maxdelay; 10 ms */
  uint64_t clockwork_window_ns; /* clockwork: how late an action may start, how far ahead it is sent; 10 ms */
  uint64_t clockwork_slack_ns;  /* clockwork: taken off each deadline; 5 ms */
  uint64_t nexus_overhead_ns;   /* nexus: taken off each deadline; 0 */
} gpushare_batcher_params;
#define GPUSHARE_BATCHER_PARAMS_INIT \
  { sizeof(gpushare_batcher_params), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
enum {
  GPUSHARE_BATCHER_EARLIEST_FIRST = 1 << 0, /* orloj: sizes by earliest deadline (the text), not descending */
  GPUSHARE_BATCHER_MORE_THAN_SIZE = 1 << 1  /* orloj: a batch of n wants more than n waiting (as printed) */
};
/* Errors: NOT_FOUND (no such policy; the message lists them), INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_batcher_create(const gpushare_batcher_params* params,
                                             gpushare_batcher* out_batcher);
GPUSHARE_API int32_t gpushare_batcher_release(gpushare_batcher batcher);

/* A model: a batch of k whose longest request takes l alone takes c0 + c1 k l; both are refined from
 * gpushare_batcher_observe_batch. */
typedef struct gpushare_batcher_model {
  uint32_t struct_size;
  uint32_t batch_size_count;   /* 0: sizes 1, 2, 4, 8, 16 */
  const uint32_t* batch_sizes; /* prepared sizes, ascending from 1 to 4096; read during the call only */
  uint64_t c0_ns;
  double c1; /* > 0 */
} gpushare_batcher_model;
#define GPUSHARE_BATCHER_MODEL_INIT \
  { sizeof(gpushare_batcher_model), 0, 0, 0, 1.0 }
/* Models are numbered from 0. Errors: INVALID_ARGUMENT (the message names the number). */
GPUSHARE_API int32_t gpushare_batcher_add_model(gpushare_batcher batcher, const gpushare_batcher_model* model,
                                                uint32_t* out_model);

/* A further cost, of missing the deadline by more than after_ns. */
typedef struct gpushare_cost_step {
  uint64_t after_ns;
  double cost; /* > 0 */
} gpushare_cost_step;

typedef struct gpushare_request {
  uint32_t struct_size;
  uint32_t model;
  uint64_t id;          /* unique among the requests held */
  uint32_t application; /* requests of one application share a distribution of execution times; any number */
  uint32_t reserved;
  uint64_t arrival_ns;
  uint64_t deadline_ns;
  double cost;                           /* of missing the deadline, > 0 */
  const gpushare_cost_step* later_steps; /* usually none; read during the call only */
  uint64_t later_step_count;             /* up to 64 */
} gpushare_request;
#define GPUSHARE_REQUEST_INIT \
  { sizeof(gpushare_request), 0, 0, 0, 0, 0, 0, 1.0, 0, 0 }
/* Errors, nothing being held then: QUEUE_FULL (back-pressure), TIMED_OUT (it cannot finish in time; the
 * message has the numbers), ALREADY_EXISTS (the id is held), INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_batcher_arrive(gpushare_batcher batcher, const gpushare_request* request,
                                             uint64_t now_ns);
/* The caller gave up; a drop follows. Errors: NOT_FOUND (not held, or in a batch already). */
GPUSHARE_API int32_t gpushare_batcher_cancel(gpushare_batcher batcher, uint64_t id, uint64_t now_ns);

typedef struct gpushare_batch {
  uint32_t struct_size;
  uint32_t model;
  uint64_t id;
  uint64_t count;
  uint64_t expected_ns;     /* how long the policy thinks it takes */
  uint64_t not_before_ns;   /* start no earlier; 0 = at once */
  uint64_t latest_start_ns; /* past it do not start, call gpushare_batcher_rejected; UINT64_MAX = any time */
  uint64_t wake_ns;         /* with NOT_READY: ask again then if nothing happens before; UINT64_MAX = never */
} gpushare_batch;
#define GPUSHARE_BATCH_INIT \
  { sizeof(gpushare_batch), 0, 0, 0, 0, 0, 0, 0 }
/* What to run next; in_flight is the number of batches handed out and neither finished nor rejected (most
 * policies answer at 0 only). The ids go to out_ids, which has room for `capacity`, at least the largest
 * batch size of any model. Errors: NOT_READY (nothing to run now; out_batch->wake_ns is set),
 * INVALID_ARGUMENT (capacity; nothing changed). */
GPUSHARE_API int32_t gpushare_batcher_next(gpushare_batcher batcher, uint64_t now_ns, uint32_t in_flight,
                                           gpushare_batch* out_batch, uint64_t* out_ids, uint64_t capacity);
/* A batch began; it ended after device_ns; it was not started. Unknown ids are ignored. */
GPUSHARE_API int32_t gpushare_batcher_started(gpushare_batcher batcher, uint64_t batch_id, uint64_t now_ns);
GPUSHARE_API int32_t gpushare_batcher_finished(gpushare_batcher batcher, uint64_t batch_id,
                                               uint64_t device_ns, uint64_t now_ns);
GPUSHARE_API int32_t gpushare_batcher_rejected(gpushare_batcher batcher, uint64_t batch_id, uint64_t now_ns);
/* What a request of this application took, or would take, alone: the profile that decisions rest on. */
GPUSHARE_API int32_t gpushare_batcher_observe(gpushare_batcher batcher, uint32_t model, uint32_t application,
                                              uint64_t execution_ns);
/* What a batch of k took whose longest takes longest_ns alone. */
GPUSHARE_API int32_t gpushare_batcher_observe_batch(gpushare_batcher batcher, uint32_t model, uint32_t k,
                                                    uint64_t longest_ns, uint64_t device_ns);
/* What a batch of `count` members took; application[i] is its i-th member's, and execution_ns[i], where known,
 * what that took or would take alone (0, or a null execution_ns: not known; what the members took is then
 * inferred from the batch's duration). Tells what gpushare_batcher_observe and _observe_batch would, at once.
 * Errors: INVALID_ARGUMENT (count 0 or above 4,096, no such model). */
GPUSHARE_API int32_t gpushare_batcher_observe_run(gpushare_batcher batcher, uint32_t model,
                                                  const uint32_t* applications, const uint64_t* execution_ns,
                                                  uint64_t count, uint64_t device_ns);

/* What has been learned of an application of a model. */
typedef struct gpushare_profile {
  uint32_t struct_size;
  uint32_t reserved;
  double c0_ns; /* a batch of k whose longest takes l alone takes c0 + c1 k l */
  double c1;
  uint64_t samples; /* durations in the window; without any the rest is zero */
  uint64_t drifts;  /* times that the distribution was seen to shift and the past was forgotten */
  double mean_ns;
  double p50_ns;
  double p99_ns;
} gpushare_profile;
#define GPUSHARE_PROFILE_INIT \
  { sizeof(gpushare_profile), 0, 0, 0, 0, 0, 0, 0, 0 }
/* Errors: NOT_FOUND (no such model, an application never seen). */
GPUSHARE_API int32_t gpushare_batcher_get_profile(gpushare_batcher batcher, uint32_t model,
                                                  uint32_t application, gpushare_profile* out_profile);

enum {
  GPUSHARE_DROP_EXPIRED = 0,  /* its deadline passed while it waited */
  GPUSHARE_DROP_HOPELESS = 1, /* it could not have finished in time any more */
  GPUSHARE_DROP_REJECTED = 2, /* its batch was rejected */
  GPUSHARE_DROP_CANCELLED = 4,
  GPUSHARE_DROP_NONE = 0xffff /* not dropped */
};
typedef struct gpushare_drop {
  uint64_t id;
  uint32_t reason; /* GPUSHARE_DROP_* */
  uint32_t reserved;
} gpushare_drop;
/* Moves up to `capacity` drops to out_drops, oldest first; the rest stays. Call it after every other call. */
GPUSHARE_API int32_t gpushare_batcher_take_drops(gpushare_batcher batcher, gpushare_drop* out_drops,
                                                 uint64_t capacity, uint64_t* out_count);
/* Requests held, not yet in a batch. */
GPUSHARE_API int32_t gpushare_batcher_get_pending(gpushare_batcher batcher, uint64_t* out_pending);

/* ---- the request queue ---- */

/* Puts requests with deadlines in front of a runtime. A batcher decides on a thread of the queue's; a batch
 * runs as an iteration of the session its model was registered with, so that it takes turns with other jobs
 * and allocates as any iteration does. What batches take is measured and feeds the decisions: a queue that
 * was told nothing learns the execution times and the batch time as it goes. Every request that
 * gpushare_request_queue_submit accepted is answered exactly once. Times are host time, gpushare_now_ns.
 * `params`: the policy and its settings. Errors: NOT_FOUND (no such policy), INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_request_queue_create(gpushare_runtime runtime,
                                                   const gpushare_batcher_params* params,
                                                   gpushare_request_queue* out_queue);

/* Refuses new requests, cancels those that wait (they are answered CANCELLED), waits for the batch that runs,
 * and gives the queue back; then every accepted request has been answered and no function of yours runs any
 * more. Close it before the sessions of its models. Blocks as long as that batch takes its turn: if its session
 * waits for memory, cancel the session first. Errors: INVALID_STATE from a function that the queue called, and
 * where calls may not block: host and progress functions (nothing changed). */
GPUSHARE_API int32_t gpushare_request_queue_close(gpushare_request_queue queue);

/* Refuses new requests from now on and waits until all accepted ones are answered. Blocks up to timeout_ns.
 * Errors: TIMED_OUT; INVALID_STATE from a function that the queue called, and where calls may not block unless all
 * are answered (nothing changed). */
GPUSHARE_API int32_t gpushare_request_queue_drain(gpushare_request_queue queue, uint64_t timeout_ns);

/* The clock of deadlines: nanoseconds, monotonic, of this machine. */
GPUSHARE_API uint64_t gpushare_now_ns(void);

/* A batch, as its function sees it. Valid during the call. */
typedef struct gpushare_queued_batch {
  uint32_t struct_size;
  uint32_t model;
  uint64_t count;
  const uint64_t* ids;    /* of the requests */
  void* const* user_data; /* of the requests, as given to submit */
  uint64_t expected_ns;   /* how long the policy thinks it takes */
  uint64_t* execution_ns; /* `count` zeros. Where you know it, write what each request took or would take
                             * alone; the rest is inferred from the duration of the batch. */
} gpushare_queued_batch;
/* Runs a batch: enqueue its work on the iteration's stream. On the lane's thread, in the session's turn, as
 * gpushare_iteration_fn. The batch ends when the device has finished what was enqueued. A status that is not
 * OK, or a C++ exception (CALLBACK_FAILED), fails the batch's requests; the session goes on. May call
 * gpushare, also the queue (not its close or drain), but must not close its session or runtime. */
typedef int32_t (*gpushare_batch_fn)(void* user_data, gpushare_iteration iteration,
                                     const gpushare_queued_batch* batch);

/* Registers a model: batches of its requests run in `session`, by `fn`. Several models may share a session.
 * Models are numbered from 0. `release`, if given, is called once with user_data when the queue has been
 * closed. Errors: INVALID_ARGUMENT (the message names the number; the session is of another runtime),
 * INVALID_STATE (draining). On error `release` is not called. */
GPUSHARE_API int32_t gpushare_request_queue_add_model(gpushare_request_queue queue, gpushare_session session,
                                                      const gpushare_batcher_model* model,
                                                      gpushare_batch_fn fn, void* user_data,
                                                      void (*release)(void* user_data), uint32_t* out_model);

/* How a request ended. */
typedef struct gpushare_request_outcome {
  uint32_t struct_size;
  /* OK: its batch ran, in time or late. TIMED_OUT: dropped, it could not be served in time. CANCELLED. Else why
   * its batch failed: what the function returned, CALLBACK_FAILED, DEVICE_LOST, INVALID_STATE (the session was
   * closed), ... */
  int32_t status;
  uint64_t id;
  uint32_t drop;        /* GPUSHARE_DROP_*; GPUSHARE_DROP_NONE if it was in a batch */
  uint32_t batch_count; /* requests in its batch; 0 if dropped */
  uint64_t finished_ns; /* in time if not above deadline_ns */
  uint64_t deadline_ns;
} gpushare_request_outcome;
/* Takes the outcome of a request; on a thread of the queue's, with no lock held. Be quick: the queue decides
 * nothing meanwhile. May call the queue, except its close and drain. `outcome` is valid during the call. */
typedef void (*gpushare_answer_fn)(void* user_data, const gpushare_request_outcome* outcome);

/* Hands a request in. Its id is chosen by you, unique among those not yet answered; its application may be any
 * number; arrival_ns 0 means now. `answer` may be null: the statistics count it all the same. Does not wait for
 * the device. Errors, `answer` is then not called: QUEUE_FULL (back-pressure: max_pending wait, or answers are
 * not taken fast enough), TIMED_OUT (it cannot finish in time; the message has the numbers), ALREADY_EXISTS,
 * INVALID_ARGUMENT, INVALID_STATE (draining; its model's session has ended), HOST_OUT_OF_MEMORY. When the host has
 * no memory for a decision the queue gives up: what is not running is answered with HOST_OUT_OF_MEMORY, and so is
 * every later submit; close it and create another. */
GPUSHARE_API int32_t gpushare_request_queue_submit(gpushare_request_queue queue,
                                                   const gpushare_request* request, gpushare_answer_fn answer,
                                                   void* user_data);

/* The caller gave up: the request is answered CANCELLED if it still waits. Errors: NOT_FOUND (not held, or in a
 * batch already). */
GPUSHARE_API int32_t gpushare_request_queue_cancel(gpushare_request_queue queue, uint64_t id);

/* What is known beforehand; as gpushare_batcher_observe and gpushare_batcher_observe_batch. */
GPUSHARE_API int32_t gpushare_request_queue_observe(gpushare_request_queue queue, uint32_t model,
                                                    uint32_t application, uint64_t execution_ns);
GPUSHARE_API int32_t gpushare_request_queue_observe_batch(gpushare_request_queue queue, uint32_t model,
                                                          uint32_t k, uint64_t longest_ns,
                                                          uint64_t device_ns);
/* As gpushare_batcher_get_profile. */
GPUSHARE_API int32_t gpushare_request_queue_get_profile(gpushare_request_queue queue, uint32_t model,
                                                        uint32_t application, gpushare_profile* out_profile);

typedef struct gpushare_request_queue_info {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t accepted;
  uint64_t refused_full;     /* QUEUE_FULL */
  uint64_t refused_hopeless; /* TIMED_OUT at submit */
  uint64_t in_time;
  uint64_t late;
  uint64_t failed;  /* with their batch */
  uint64_t expired; /* dropped: GPUSHARE_DROP_EXPIRED, and so on */
  uint64_t hopeless;
  uint64_t rejected;
  uint64_t cancelled;
  uint64_t pending;   /* not yet in a batch */
  uint64_t held;      /* accepted and not answered */
  uint64_t most_held; /* ever; never above twice max_pending + 4,096 */
  uint64_t batches;
  uint64_t batched_requests;
  uint64_t busy_ns; /* sum of what batches took */
  uint64_t decisions;
  uint64_t decision_ns; /* host time spent in them */
  /* Signals for whoever decides how many devices there should be. The share of the last requests decided (about 1,024)
   * that were expected to miss their deadline when they were decided: 1 for one that was refused for a full queue or as
   * hopeless, or dropped; for one in a batch its chance, or, under policies that know no chances, what became of it. */
  double predicted_miss_rate;
  /* gpushare: what a second of the device is worth in the cost of requests (their number, where all cost 1): what the
   * policy asks a batch to win for its time. 0 under other policies. */
  double price_per_s;
} gpushare_request_queue_info;
#define GPUSHARE_REQUEST_QUEUE_INFO_INIT \
  { sizeof(gpushare_request_queue_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* Statistics since it was created. */
GPUSHARE_API int32_t gpushare_request_queue_get_info(gpushare_request_queue queue,
                                                     gpushare_request_queue_info* out_info);

/* ---- histograms ---- */

/* The last `window` durations of something, in logarithmic buckets (within 1.6%). A shift of the distribution
 * is noticed (the newest drift_samples against the rest, Kolmogorov-Smirnov) and the past forgotten. Threads:
 * the caller orders calls on one histogram. Nothing blocks. */
typedef struct gpushare_histogram_params {
  uint32_t struct_size;
  uint32_t drift_samples; /* 0 = 64; UINT32_MAX = never reset */
  uint64_t window;        /* up to 2^20; 0 = 2,048 */
} gpushare_histogram_params;
#define GPUSHARE_HISTOGRAM_PARAMS_INIT \
  { sizeof(gpushare_histogram_params), 0, 0 }
/* The caller owns *out_histogram and releases it. Errors: INVALID_ARGUMENT (the window). */
GPUSHARE_API int32_t gpushare_histogram_create(const gpushare_histogram_params* params,
                                               gpushare_histogram* out_histogram);
GPUSHARE_API int32_t gpushare_histogram_release(gpushare_histogram histogram);
/* O(1). Durations above 2^40 ns count as that. */
GPUSHARE_API int32_t gpushare_histogram_record(gpushare_histogram histogram, uint64_t duration_ns);
/* Adds the other's durations, in its order, after these. */
GPUSHARE_API int32_t gpushare_histogram_merge(gpushare_histogram histogram, gpushare_histogram other);
GPUSHARE_API int32_t gpushare_histogram_reset(gpushare_histogram histogram);

typedef struct gpushare_histogram_info {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t count;
  uint64_t drifts;
  double mean_ns; /* this and the rest: zero when empty */
  double stddev_ns;
  double min_ns;
  double max_ns;
} gpushare_histogram_info;
#define GPUSHARE_HISTOGRAM_INFO_INIT \
  { sizeof(gpushare_histogram_info), 0, 0, 0, 0, 0, 0, 0 }
/* Errors: INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_histogram_get_info(gpushare_histogram histogram,
                                                 gpushare_histogram_info* out_info);
/* The q-quantile of the longest of k independent durations (k = 1: of one). Errors: INVALID_ARGUMENT (q not in
 * 0 to 1, k 0 or above 4,096), NOT_READY (empty). */
GPUSHARE_API int32_t gpushare_histogram_get_quantile(gpushare_histogram histogram, double q, uint32_t k,
                                                     double* out_ns);
/* Writes a text form, NUL-terminated, for gpushare_histogram_parse. out_size is what it needs, the NUL included.
 * Errors: INVALID_ARGUMENT when `capacity` is less (call with 0 and null first); out_size is set all the same. */
GPUSHARE_API int32_t gpushare_histogram_serialize(gpushare_histogram histogram, char* text, uint64_t capacity,
                                                  uint64_t* out_size);
/* Errors: MALFORMED_INPUT naming the word that is wrong. The window is the text's. */
GPUSHARE_API int32_t gpushare_histogram_parse(const char* text, uint64_t size,
                                              gpushare_histogram* out_histogram);

/* ---- the score queue ---- */

/* Deadlines, asked for the one with the greatest score now. The score (Orloj, eq 4.2) is the expected worth of
 * starting a request now rather than later, from the distribution of its batch's duration. Threads: the caller
 * orders calls on one queue. Nothing blocks. Times are nanoseconds on any one clock. */
enum {
  GPUSHARE_SCORE_QUEUE_AUTOMATIC = 0, /* what measures best for its size */
  GPUSHARE_SCORE_QUEUE_SLACK = 1,     /* by deadline, in each class */
  GPUSHARE_SCORE_QUEUE_SCAN = 2,      /* this and the next: points (alpha, beta); one delay rate for all */
  GPUSHARE_SCORE_QUEUE_KINETIC = 3,
  GPUSHARE_SCORE_QUEUE_HULL = 4
};
/* Errors: INVALID_ARGUMENT (no such back end). */
GPUSHARE_API int32_t gpushare_score_queue_create(uint32_t backend, gpushare_score_queue* out_queue);
GPUSHARE_API int32_t gpushare_score_queue_release(gpushare_score_queue queue);

/* Requests with one score curve: an application, in batches of one size. */
typedef struct gpushare_score_class {
  uint32_t struct_size;
  uint32_t k;                   /* batch size; 0 = 1 */
  gpushare_histogram histogram; /* of execution times alone; read during the call only */
  uint32_t bins;                /* 0 = 32 */
  uint32_t step_count;
  double c0_ns;                    /* batch duration c0 + c1 k l, l the longest of k; */
  double c1;                       /* 0 = 1 */
  double delay_rate_per_ms;        /* b; 0 = 1e-4 */
  const gpushare_cost_step* steps; /* the cost function; none = 1 at the deadline */
} gpushare_score_class;
#define GPUSHARE_SCORE_CLASS_INIT \
  { sizeof(gpushare_score_class), 0, 0, 0, 0, 0, 0, 0, 0 }
/* Classes are numbered from 0. Errors: INVALID_ARGUMENT (the message names the number; an empty histogram),
 * UNSUPPORTED (scan, kinetic and hull: another delay rate than the first class's). */
GPUSHARE_API int32_t gpushare_score_queue_add_class(gpushare_score_queue queue,
                                                    const gpushare_score_class* score_class,
                                                    uint32_t* out_class);
/* Gives a class another curve, e.g. of a histogram that moved. Errors: as add_class. */
GPUSHARE_API int32_t gpushare_score_queue_set_class(gpushare_score_queue queue, uint32_t index,
                                                    const gpushare_score_class* score_class);
/* out_entry names it for erase, until it is erased or popped. Errors: INVALID_ARGUMENT (no such class). */
GPUSHARE_API int32_t gpushare_score_queue_insert(gpushare_score_queue queue, uint32_t index,
                                                 uint64_t deadline_ns, uint64_t id, uint32_t* out_entry);
/* Errors: NOT_FOUND. */
GPUSHARE_API int32_t gpushare_score_queue_erase(gpushare_score_queue queue, uint32_t entry);
/* The best at now_ns; out_score may be null. Errors: NOT_READY (empty). */
GPUSHARE_API int32_t gpushare_score_queue_best(gpushare_score_queue queue, uint64_t now_ns, uint64_t* out_id,
                                               double* out_score);
/* Takes the best `count` out, best first; out_ids has room for that many. */
GPUSHARE_API int32_t gpushare_score_queue_pop(gpushare_score_queue queue, uint64_t now_ns, uint64_t count,
                                              uint64_t* out_ids, uint64_t* out_count);
GPUSHARE_API int32_t gpushare_score_queue_get_size(gpushare_score_queue queue, uint64_t* out_size);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_SERVING_H_ */
