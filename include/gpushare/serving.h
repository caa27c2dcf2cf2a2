/* gpushare: serving requests with deadlines. Part of the stable C ABI. gpushare.h includes this header, and
 * its contract holds here too.
 *
 *   request queue   in front of a runtime: requests go in from any thread, batches run as iterations of your
 *                   sessions, every request is answered once
 *   batcher         the decisions alone, for programs with threads of their own
 *   histogram       measured execution times
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

/* Requests with deadlines go in, batches come out. A batcher only decides: it has no thread and reads no
 * clock. The caller runs the batches and reports what happened. Times are nanoseconds on a clock of the
 * caller's choice, the same for all calls. Threads: the caller must serialise calls on one batcher. Nothing
 * here blocks. Every request that gpushare_batcher_arrive accepted is answered once: in a batch, or by
 * gpushare_batcher_take_drops. */
typedef struct gpushare_batcher_params {
  uint32_t struct_size;
  uint32_t reserved;
  const char*
      policy; /* null = "gpushare"; or a baseline: fifo, edf, maxdelay, greedy, clipper, clipper-mean, clipper-aimd,
               * nexus, nexus-earliest, nexus-cycle, clockwork, clockwork-single, orloj, orloj-own */
  uint64_t max_pending;  /* upper limit of requests held; 0 = 100,000 */
  uint64_t max_defer_ns; /* gpushare: how long a batch that is not full may wait for further requests; 0 =
                            not at all */
  /* Zero in any field from here on means its default, which stands at the end of its comment.
   * docs/design/slo.md explains the policy gpushare, benchmarks/results/serving-decisions.md the others; the
   * sensitivities are in benchmarks/results/serving.md. */
  uint64_t window;    /* how many durations of an application are remembered, up to 2^20; 2,048 */
  uint32_t bins;      /* bins of the distributions that decisions use, up to 4,096; 32 */
  uint32_t flags;     /* GPUSHARE_BATCHER_* */
  double opportunity; /* gpushare: price of device time as a share of the recent goodput per busy time; 1 */
  double feasible_quantile;     /* gpushare: quantile of a batch's duration that must fit into each member's
                                   slack; 0.7 */
  double delay_rate_per_ms;     /* orloj: b; 1e-4 */
  double estimate_quantile;     /* orloj: quantile in EstimateBatchLatency; the mean */
  uint64_t max_delay_ns;        /* maxdelay; 10 ms */
  uint64_t clockwork_window_ns; /* clockwork: how late an action may start, and how far ahead it is sent; 10
                                   ms */
  uint64_t clockwork_slack_ns;  /* clockwork: taken off each deadline; 5 ms */
  uint64_t nexus_overhead_ns;   /* nexus: taken off each deadline; 0 */
} gpushare_batcher_params;
#define GPUSHARE_BATCHER_PARAMS_INIT \
  { sizeof(gpushare_batcher_params), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
enum {
  GPUSHARE_BATCHER_EARLIEST_FIRST = 1 << 0, /* orloj: batch sizes in order of the earliest deadline (as in
                                               the paper's text), not descending */
  GPUSHARE_BATCHER_MORE_THAN_SIZE = 1 << 1  /* orloj: a batch of n needs more than n waiting requests (as in
                                               the printed algorithm) */
};
/* Errors: NOT_FOUND (no such policy; the message lists them), INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_batcher_create(const gpushare_batcher_params* params,
                                             gpushare_batcher* out_batcher);
GPUSHARE_API int32_t gpushare_batcher_release(gpushare_batcher batcher);

/* A model's batch time: a batch of k requests takes c0 + c1 k l, where l is the time that the longest of
 * them takes alone. gpushare_batcher_observe_batch refines c0 and c1. */
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

/* A further cost, for missing the deadline by more than after_ns. */
typedef struct gpushare_cost_step {
  uint64_t after_ns;
  double cost; /* > 0 */
} gpushare_cost_step;

typedef struct gpushare_request {
  uint32_t struct_size;
  uint32_t model;
  uint64_t id;          /* unique among the requests held */
  uint32_t application; /* requests of one application share a distribution of execution times; any number */
  uint32_t feature_count; /* up to 8; the same for all requests of an application that have any */
  uint64_t arrival_ns;
  uint64_t deadline_ns;                  /* UINT64_MAX: none */
  double cost;                           /* cost of missing the deadline, > 0 */
  const gpushare_cost_step* later_steps; /* usually none; read during the call only */
  uint64_t later_step_count;             /* up to 64 */
  /* Finite numbers, known at the request's arrival, that its execution time depends on (tokens of the prompt, steps,
   * pixels), always in the same order. A line through them, learned from what finishes, predicts the time; requests of an
   * application whose predictions are alike share a distribution of execution times. Read during the call only. */
  const double* features;
} gpushare_request;
#define GPUSHARE_REQUEST_INIT \
  { sizeof(gpushare_request), 0, 0, 0, 0, 0, 0, 1.0, 0, 0, 0 }
/* Hands a request in. Errors, after which the request is not held: QUEUE_FULL (back-pressure), TIMED_OUT (it
 * cannot finish in time; the message has the numbers), ALREADY_EXISTS (a request with this id is held),
 * INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_batcher_arrive(gpushare_batcher batcher, const gpushare_request* request,
                                             uint64_t now_ns);
/* Says that the caller no longer wants the request; a drop follows. Errors: NOT_FOUND (not held, or in a
 * batch already). */
GPUSHARE_API int32_t gpushare_batcher_cancel(gpushare_batcher batcher, uint64_t id, uint64_t now_ns);

typedef struct gpushare_batch {
  uint32_t struct_size;
  uint32_t model;
  uint64_t id;
  uint64_t count;
  uint64_t expected_ns;     /* how long the policy thinks it takes */
  uint64_t not_before_ns;   /* do not start the batch earlier; 0 = at once */
  uint64_t latest_start_ns; /* after this time do not start the batch but call gpushare_batcher_rejected;
                               UINT64_MAX = no limit */
  uint64_t wake_ns;         /* with NOT_READY: the time to ask again if nothing happens before; UINT64_MAX =
                               never */
} gpushare_batch;
#define GPUSHARE_BATCH_INIT \
  { sizeof(gpushare_batch), 0, 0, 0, 0, 0, 0, 0 }
/* Chooses the batch to run next. in_flight is the number of batches handed out that are neither finished nor
 * rejected; most policies hand out a batch only at 0. The ids are written to out_ids, which has room for
 * `capacity` ids, at least the largest batch size of any model. Errors: NOT_READY (nothing to run now;
 * out_batch->wake_ns is set), INVALID_ARGUMENT (capacity; nothing changed). */
GPUSHARE_API int32_t gpushare_batcher_next(gpushare_batcher batcher, uint64_t now_ns, uint32_t in_flight,
                                           gpushare_batch* out_batch, uint64_t* out_ids, uint64_t capacity);
/* These three report that a batch began, that it ended after device_ns of device time, and that it was not
 * started. Unknown ids are ignored. A device_ns of 0 is an unknown time, from which nothing is learned. */
GPUSHARE_API int32_t gpushare_batcher_started(gpushare_batcher batcher, uint64_t batch_id, uint64_t now_ns);
GPUSHARE_API int32_t gpushare_batcher_finished(gpushare_batcher batcher, uint64_t batch_id,
                                               uint64_t device_ns, uint64_t now_ns);
/* Reports that a batch ended, with the times of its members. execution_ns[i] is the time that member i, in the order of
 * out_ids, took or would take alone; where it is 0, or beyond `count`, the time is unknown and is inferred from
 * device_ns. This call replaces gpushare_batcher_finished, gpushare_batcher_observe and
 * gpushare_batcher_observe_batch for the batch, and only this call learns from the members' features. Unknown ids are
 * ignored. With a device_ns of 0 nothing is learned. Errors: INVALID_ARGUMENT (count above 4,096). */
GPUSHARE_API int32_t gpushare_batcher_finished_run(gpushare_batcher batcher, uint64_t batch_id,
                                                   const uint64_t* execution_ns, uint64_t count,
                                                   uint64_t device_ns, uint64_t now_ns);
GPUSHARE_API int32_t gpushare_batcher_rejected(gpushare_batcher batcher, uint64_t batch_id, uint64_t now_ns);
/* Reports the time that a request of this application took, or would take, alone. Decisions rest on these
 * times. */
GPUSHARE_API int32_t gpushare_batcher_observe(gpushare_batcher batcher, uint32_t model, uint32_t application,
                                              uint64_t execution_ns);
/* The same for a request with features. Only the request's model, application and features are read. Errors:
 * INVALID_ARGUMENT (no such model; the features, see gpushare_request). */
GPUSHARE_API int32_t gpushare_batcher_observe_request(gpushare_batcher batcher,
                                                      const gpushare_request* request, uint64_t execution_ns);
/* Reports the time of a batch of k requests, the longest of which takes longest_ns alone. */
GPUSHARE_API int32_t gpushare_batcher_observe_batch(gpushare_batcher batcher, uint32_t model, uint32_t k,
                                                    uint64_t longest_ns, uint64_t device_ns);
/* Reports the time of a batch of `count` members. applications[i] is the application of member i, and
 * execution_ns[i] the time that this member took, or would take, alone. Where execution_ns[i] is 0, or
 * execution_ns is null, the time is unknown and is inferred from the batch's duration. This call replaces
 * gpushare_batcher_observe and gpushare_batcher_observe_batch for the batch. Errors: INVALID_ARGUMENT (count
 * 0 or above 4,096, no such model). With a device_ns of 0 nothing is learned. */
GPUSHARE_API int32_t gpushare_batcher_observe_run(gpushare_batcher batcher, uint32_t model,
                                                  const uint32_t* applications, const uint64_t* execution_ns,
                                                  uint64_t count, uint64_t device_ns);

/* A batcher's knowledge about an application of a model. */
typedef struct gpushare_profile {
  uint32_t struct_size;
  uint32_t reserved;
  double c0_ns; /* a batch of k takes c0 + c1 k l, l being the time that its longest request takes alone */
  double c1;
  /* Durations in the window; where times are inferred, requests of the batches that they are estimated from.
   * If there are none, the fields below are zero. */
  uint64_t samples;
  uint64_t drifts; /* how often a shift of the distribution was detected and older durations were forgotten */
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
/* Moves up to `capacity` drops to out_drops, oldest first; the others stay. Call it after every other call. */
GPUSHARE_API int32_t gpushare_batcher_take_drops(gpushare_batcher batcher, gpushare_drop* out_drops,
                                                 uint64_t capacity, uint64_t* out_count);
/* Requests held, not yet in a batch. */
GPUSHARE_API int32_t gpushare_batcher_get_pending(gpushare_batcher batcher, uint64_t* out_pending);

/* ---- the request queue ---- */

/* Creates a queue for requests with deadlines in front of a runtime. A batcher decides on a thread of the
 * queue. A batch runs as an iteration of the session that its model was registered with, so it takes turns
 * with other jobs and allocates like every iteration. The times of batches are measured and feed the
 * decisions: a queue that was told nothing learns execution times and batch times while it works. Every
 * request that gpushare_request_queue_submit accepted is answered exactly once. Times are host time,
 * gpushare_now_ns. `params` gives the policy and its settings. Errors: NOT_FOUND (no such policy),
 * INVALID_ARGUMENT. */
GPUSHARE_API int32_t gpushare_request_queue_create(gpushare_runtime runtime,
                                                   const gpushare_batcher_params* params,
                                                   gpushare_request_queue* out_queue);

/* Refuses new requests, answers waiting requests with CANCELLED, waits for the running batch, and gives the
 * queue back. When it returns, every accepted request has been answered and no function of the caller runs
 * any more. Close the queue before the sessions of its models. Blocks until the running batch has finished;
 * if the session of that batch waits for memory, cancel the session first. Errors: INVALID_STATE (called
 * from a function that the queue called, or where calls may not block, such as host and progress functions;
 * nothing changed). */
GPUSHARE_API int32_t gpushare_request_queue_close(gpushare_request_queue queue);

/* Refuses new requests from now on and waits until all accepted ones are answered. Blocks up to timeout_ns.
 * Errors: TIMED_OUT; INVALID_STATE (called from a function that the queue called, or where calls may not
 * block and not all are answered; nothing changed). */
GPUSHARE_API int32_t gpushare_request_queue_drain(gpushare_request_queue queue, uint64_t timeout_ns);

/* Returns the clock of deadlines: the monotonic time of this machine in nanoseconds. */
GPUSHARE_API uint64_t gpushare_now_ns(void);

/* A batch as its function sees it. It is valid during the call. */
typedef struct gpushare_queued_batch {
  uint32_t struct_size;
  uint32_t model;
  uint64_t count;
  const uint64_t* ids;    /* of the requests */
  void* const* user_data; /* of the requests, as given to submit */
  uint64_t expected_ns;   /* how long the policy thinks it takes */
  uint64_t* execution_ns; /* `count` zeros. Where the function knows it, it writes the time that each request
                             took, or would take, alone; the others are inferred from the duration of the
                             batch. */
  int32_t*
      statuses; /* `count` zeros, that is OK. The function writes how each request ended, where one fails and
                             others do not; the status is that of the request's outcome. */
} gpushare_queued_batch;
/* Runs a batch by enqueuing its work on the iteration's stream. It is called on the lane's thread in the
 * session's turn, like gpushare_iteration_fn. The batch ends when the device has finished the enqueued work.
 * A status that is not OK, or a C++ exception, counts as there and fails the requests of the batch; the
 * session goes on. The function may call gpushare and the queue, except close and drain of the queue, and
 * must not close its session or runtime. */
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
  /* OK: its batch ran, in time or late. TIMED_OUT: it was dropped because it could not be served in time.
   * CANCELLED: it was cancelled. Any other status says why it or its batch failed: the status that the function
   * returned, or wrote for it, CALLBACK_FAILED, DEVICE_LOST, INVALID_STATE (the session was closed), ... */
  int32_t status;
  uint64_t id;
  uint32_t drop;        /* GPUSHARE_DROP_*; GPUSHARE_DROP_NONE if it was in a batch */
  uint32_t batch_count; /* requests in its batch; 0 if dropped */
  uint64_t finished_ns; /* the request was in time if this is not above deadline_ns */
  uint64_t deadline_ns;
} gpushare_request_outcome;
/* Receives the outcome of a request, on a thread of the queue, with no lock held. It must be quick, because
 * the queue decides nothing meanwhile. It may call the queue, except close and drain. `outcome` is valid
 * during the call. */
typedef void (*gpushare_answer_fn)(void* user_data, const gpushare_request_outcome* outcome);

/* Hands a request in. The caller chooses its id, unique among the requests not yet answered. Its application
 * may be any number. arrival_ns 0 means now. `answer` may be null; the statistics count the request in any
 * case. Does not wait for the device. Errors, after which `answer` is not called: QUEUE_FULL (back-pressure:
 * max_pending requests wait, or answers are not taken fast enough), TIMED_OUT (it cannot finish in time; the
 * message has the numbers), ALREADY_EXISTS, INVALID_ARGUMENT, INVALID_STATE (the queue drains; or the
 * session of its model has ended), HOST_OUT_OF_MEMORY. When the host has no memory for a decision the queue
 * gives up: requests that are not running are answered with HOST_OUT_OF_MEMORY, and so is every later
 * submit. Close the queue then and create another. */
GPUSHARE_API int32_t gpushare_request_queue_submit(gpushare_request_queue queue,
                                                   const gpushare_request* request, gpushare_answer_fn answer,
                                                   void* user_data);

/* Cancels a request: if it still waits, it will not run and is answered CANCELLED. Errors: NOT_FOUND (not held, or in a batch
 * already). */
GPUSHARE_API int32_t gpushare_request_queue_cancel(gpushare_request_queue queue, uint64_t id);

/* These tell the queue times that are known beforehand, like gpushare_batcher_observe and
 * gpushare_batcher_observe_batch. Errors of the first: INVALID_ARGUMENT (no such model). */
GPUSHARE_API int32_t gpushare_request_queue_observe(gpushare_request_queue queue, uint32_t model,
                                                    uint32_t application, uint64_t execution_ns);
/* As gpushare_batcher_observe_request. */
GPUSHARE_API int32_t gpushare_request_queue_observe_request(gpushare_request_queue queue,
                                                            const gpushare_request* request,
                                                            uint64_t execution_ns);
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
  uint64_t most_held; /* most requests ever held at once; never above twice max_pending + 4,096 */
  uint64_t batches;
  uint64_t batched_requests;
  uint64_t busy_ns; /* sum of the batches' durations */
  uint64_t decisions;
  uint64_t decision_ns; /* host time spent in them */
  /* Signal for autoscaling: the share of the last decided requests (about 1,024) that were expected to miss
   * their deadline when they were decided. A request that was refused (queue full or hopeless) or dropped
   * counts as 1. A request in a batch counts by its chance to miss, or, under policies that know no chances,
   * as 1 if it did miss. */
  double predicted_miss_rate;
  /* Signal for autoscaling, under policy gpushare: the worth of a second of device time in the cost of
   * requests (in requests, where all cost 1). The policy asks a batch to win this much for its time. 0 under
   * other policies. */
  double price_per_s;
} gpushare_request_queue_info;
#define GPUSHARE_REQUEST_QUEUE_INFO_INIT \
  { sizeof(gpushare_request_queue_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* Returns statistics since the queue was created. */
GPUSHARE_API int32_t gpushare_request_queue_get_info(gpushare_request_queue queue,
                                                     gpushare_request_queue_info* out_info);

/* ---- histograms ---- */

/* A histogram holds the last `window` durations in logarithmic buckets (within 1.6%). It detects a shift of
 * the distribution by a Kolmogorov-Smirnov test of the newest drift_samples against the others, and then
 * forgets the older durations. Threads: the caller must serialise calls on one histogram. Nothing blocks. */
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
/* O(1). Durations above 2^40 ns count as 2^40 ns. */
GPUSHARE_API int32_t gpushare_histogram_record(gpushare_histogram histogram, uint64_t duration_ns);
/* Appends the durations of `other`, in their order. */
GPUSHARE_API int32_t gpushare_histogram_merge(gpushare_histogram histogram, gpushare_histogram other);
GPUSHARE_API int32_t gpushare_histogram_reset(gpushare_histogram histogram);

typedef struct gpushare_histogram_info {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t count;
  uint64_t drifts;
  double mean_ns; /* zero when the histogram is empty, as are the fields below */
  double stddev_ns;
  double min_ns;
  double max_ns;
} gpushare_histogram_info;
#define GPUSHARE_HISTOGRAM_INFO_INIT \
  { sizeof(gpushare_histogram_info), 0, 0, 0, 0, 0, 0, 0 }
/* Errors: INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_histogram_get_info(gpushare_histogram histogram,
                                                 gpushare_histogram_info* out_info);
/* Returns the q-quantile of the longest of k independent durations (k = 1: of a single duration). Errors:
 * INVALID_ARGUMENT (q not in 0 to 1, k 0 or above 4,096), NOT_READY (empty). */
GPUSHARE_API int32_t gpushare_histogram_get_quantile(gpushare_histogram histogram, double q, uint32_t k,
                                                     double* out_ns);
/* Writes a NUL-terminated text for gpushare_histogram_parse. out_size receives the size of the text,
 * including the NUL. Call it with capacity 0 and a null text first to learn the size. Errors:
 * INVALID_ARGUMENT (`capacity` is too small; out_size is set in this case too). */
GPUSHARE_API int32_t gpushare_histogram_serialize(gpushare_histogram histogram, char* text, uint64_t capacity,
                                                  uint64_t* out_size);
/* Creates a histogram, with the window of the text. Errors: MALFORMED_INPUT (the message names the wrong
 * word). */
GPUSHARE_API int32_t gpushare_histogram_parse(const char* text, uint64_t size,
                                              gpushare_histogram* out_histogram);

/* ---- the score queue ---- */

/* A score queue holds requests by deadline and finds the one with the greatest score at a given time. The
 * score (Orloj, eq 4.2) is the expected worth of starting a request now rather than later, computed from the
 * distribution of its batch's duration. Threads: the caller must serialise calls on one queue. Nothing
 * blocks. Times are nanoseconds on a clock of the caller's choice, the same for all calls. */
GPUSHARE_API int32_t gpushare_score_queue_create(gpushare_score_queue* out_queue);
GPUSHARE_API int32_t gpushare_score_queue_release(gpushare_score_queue queue);

/* A class of requests with one score curve: an application, in batches of one size. */
typedef struct gpushare_score_class {
  uint32_t struct_size;
  uint32_t k;                   /* batch size; 0 = 1 */
  gpushare_histogram histogram; /* of the times that requests take alone; read during the call only */
  uint32_t bins;                /* 0 = 32 */
  uint32_t step_count;
  double c0_ns;                    /* batch duration c0 + c1 k l, l the longest of k; */
  double c1;                       /* 0 = 1 */
  double delay_rate_per_ms;        /* b; 0 = 1e-4 */
  const gpushare_cost_step* steps; /* the cost function; none = 1 at the deadline */
} gpushare_score_class;
#define GPUSHARE_SCORE_CLASS_INIT \
  { sizeof(gpushare_score_class), 0, 0, 0, 0, 0, 0, 0, 0 }
/* Classes are numbered from 0. Errors: INVALID_ARGUMENT (the message names the number; an empty histogram). */
GPUSHARE_API int32_t gpushare_score_queue_add_class(gpushare_score_queue queue,
                                                    const gpushare_score_class* score_class,
                                                    uint32_t* out_class);
/* Gives a class another curve, for example after its histogram has changed. Errors: as add_class. */
GPUSHARE_API int32_t gpushare_score_queue_set_class(gpushare_score_queue queue, uint32_t index,
                                                    const gpushare_score_class* score_class);
/* Inserts a request. out_entry identifies it for erase until it is erased or popped. Errors:
 * INVALID_ARGUMENT (no such class). */
GPUSHARE_API int32_t gpushare_score_queue_insert(gpushare_score_queue queue, uint32_t index,
                                                 uint64_t deadline_ns, uint64_t id, uint32_t* out_entry);
/* Errors: NOT_FOUND. */
GPUSHARE_API int32_t gpushare_score_queue_erase(gpushare_score_queue queue, uint32_t entry);
/* Returns the request with the greatest score at now_ns. out_score may be null. Errors: NOT_READY (empty). */
GPUSHARE_API int32_t gpushare_score_queue_best(gpushare_score_queue queue, uint64_t now_ns, uint64_t* out_id,
                                               double* out_score);
/* Removes the `count` requests with the greatest scores and returns their ids, best first. out_ids has room
 * for `count` ids. */
GPUSHARE_API int32_t gpushare_score_queue_pop(gpushare_score_queue queue, uint64_t now_ns, uint64_t count,
                                              uint64_t* out_ids, uint64_t* out_count);
GPUSHARE_API int32_t gpushare_score_queue_get_size(gpushare_score_queue queue, uint64_t* out_size);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_SERVING_H_ */
