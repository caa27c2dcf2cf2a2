/* gpushare: continuous batching. Part of the stable C ABI. gpushare.h includes this header, and its contract holds here too.
 *
 * A step queue serves a model that generates its answer piece by piece, such as a language model. Requests join and leave the batch
 * between its iterations. Each iteration of the queue's session is one step: its function processes prompts or parts of them, lets
 * other members generate one token each, and says who is done. Before each step the queue's policy chooses who joins, how much of
 * which prompt is processed, and whose memory is given back.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_STEPS_H_
#define GPUSHARE_STEPS_H_

#include "gpushare/serving.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpushare_step_queue_s* gpushare_step_queue; /* requests served step by step in a session */

typedef struct gpushare_step_queue_params {
  uint32_t struct_size;
  uint32_t max_members; /* of a step, up to 4,096; 0 = 256 */
  const char*
      policy; /* null = "gpushare": as many requests in time as possible; "fifo": in order of arrival */
  uint64_t max_pending;        /* upper limit of requests that wait; 0 = 100,000 */
  uint64_t max_prefill_tokens; /* prompt tokens in a step, of all members; 0 = no limit but the deadlines */
  uint64_t memory_bytes;       /* upper limit of the members' bytes; 0 = none */
  /* The model of time: a step takes step_ns + decode_ns for each member that decodes + prefill_ns for each token of a prompt +
   * read_ns for each token that the decoding members have behind them. 0 = unknown. The queue learns all four while it works. */
  double step_ns, decode_ns, prefill_ns, read_ns;
} gpushare_step_queue_params;
#define GPUSHARE_STEP_QUEUE_PARAMS_INIT \
  { sizeof(gpushare_step_queue_params), 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* A member of a step. A step in which the last of its tokens is processed also generates a token, as does each step in which it
 * decodes. */
typedef struct gpushare_step_member {
  uint64_t id;
  void* user_data;         /* as given to submit */
  uint64_t prefill_tokens; /* to process in this step; 0: the member decodes one token */
  uint64_t before_tokens;  /* that earlier steps have processed since the member joined */
  uint64_t
      total_tokens; /* to process before it decodes: its prompt, and what it had generated when it was returned to the
                              queue */
  uint64_t tokens; /* generated in earlier steps */
} gpushare_step_member;

/* A step as its function sees it. All arrays stay where they are until the device has finished the step: work on the stream may
 * write done, statuses and bytes, which are read then. */
typedef struct gpushare_step {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t count; /* members of this step; 0 where the step only tells who left */
  const gpushare_step_member* members;
  /* Requests that were members and are not any more, cancelled or returned to the queue. Their memory must be free when the
   * function returns; the step's members may use it. A returned one joins again later, with before_tokens 0. */
  uint64_t left_count;
  const gpushare_step_member* left;
  uint64_t expected_ns; /* how long the policy thinks that the step takes */
  uint8_t* done; /* `count` zeros; not 0: the member has generated its last token. Its memory is free then */
  int32_t* statuses; /* `count` zeros, that is OK; how a member failed. Its memory is free then */
  uint64_t*
      bytes; /* `count` times UINT64_MAX; the bytes that the member holds after the step, where they are not as
                           planned: start_bytes and step_bytes for each token */
} gpushare_step;
/* Runs a step by enqueuing its work on the iteration's stream, on the lane's thread in the session's turn, like
 * gpushare_iteration_fn. A status that is not OK, or a C++ exception, fails the members of the step, whose memory is the function's to
 * free; other members, the queue and the session go on. May call gpushare and the queue, except close and drain of the queue, and
 * must not close its session or runtime. */
typedef int32_t (*gpushare_step_fn)(void* user_data, gpushare_iteration iteration, const gpushare_step* step);

/* Creates a queue whose steps run in `session` by `fn`. The caller owns *out_queue and closes it before the session. `release`, if
 * given, is called once with user_data when the queue has been closed; on error it is not called. Starts two threads. Errors:
 * NOT_FOUND (no such policy; the message lists them), INVALID_ARGUMENT (the message names the field). */
GPUSHARE_API int32_t gpushare_step_queue_create(gpushare_session session,
                                                const gpushare_step_queue_params* params, gpushare_step_fn fn,
                                                void* user_data, void (*release)(void* user_data),
                                                gpushare_step_queue* out_queue);
/* Refuses new requests, cancels all others, members included, waits for the running step and for one that tells who left, and
 * gives the queue back. When it returns, every accepted request has been answered and no function of the caller runs any more.
 * Blocks until then; if the session waits for memory, cancel the session first. Errors: INVALID_STATE (called from a function that
 * the queue called, with an iteration open that the steps would wait for, or where calls may not block; nothing changed). */
GPUSHARE_API int32_t gpushare_step_queue_close(gpushare_step_queue queue);
/* Refuses new requests from now on and waits until all accepted ones are answered. Blocks up to timeout_ns. Errors: TIMED_OUT;
 * INVALID_STATE as for close. */
GPUSHARE_API int32_t gpushare_step_queue_drain(gpushare_step_queue queue, uint64_t timeout_ns);

typedef struct gpushare_step_request {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t id;              /* unique among the requests not yet answered */
  uint64_t arrival_ns;      /* gpushare_now_ns; 0 = now, as is a later time */
  uint64_t prompt_tokens;   /* to process before the first token, 1 to 2^32 */
  uint64_t expected_tokens; /* that the request will generate; 0 = unknown */
  uint64_t start_bytes;     /* that a member holds from when it joins */
  uint64_t step_bytes;      /* and more for each token that it generates */
  uint64_t
      first_deadline_ns; /* when the first token is due; UINT64_MAX: never. A request that still waits then is dropped */
  uint64_t
      token_ns; /* token k after the first is due k times this after the first came, >= 1; UINT64_MAX: never */
  double cost;  /* of a token that is late, > 0 */
} gpushare_step_request;
#define GPUSHARE_STEP_REQUEST_INIT \
  { sizeof(gpushare_step_request), 0, 0, 0, 1, 0, 0, 0, UINT64_MAX, UINT64_MAX, 1.0 }

/* News of a request: it has generated `tokens` so far, or it has ended. */
typedef struct gpushare_step_answer {
  uint32_t struct_size;
  int32_t
      status; /* as gpushare_request_outcome.status. DEVICE_OUT_OF_MEMORY: the member grew beyond memory_bytes alone */
  uint64_t id;
  uint64_t tokens;
  uint32_t ended; /* 1: this is the request's last answer */
  uint32_t late;  /* 1: one of its tokens came after it was due */
  uint64_t at_ns;
  uint64_t due_ns; /* of the last token, or of the next one where the request ended without it */
} gpushare_step_answer;
/* Receives the news of a request in order, on a thread of the queue, with no lock held. News that is not taken before the next step
 * is replaced by the newer news, so `tokens` may grow by more than one. It must be quick; it may call the queue, except close and
 * drain. `answer` is valid during the call. */
typedef void (*gpushare_step_answer_fn)(void* user_data, const gpushare_step_answer* answer);

/* Hands a request in. `answer` may be null. user_data must stay valid until the last answer, which comes when the step function
 * uses it no more. Does not wait for the device. Thread-safe. Errors, after which `answer` is not called: QUEUE_FULL
 * (back-pressure), TIMED_OUT (its first deadline has passed), EXCEEDS_CAPACITY (its bytes are above memory_bytes), ALREADY_EXISTS,
 * INVALID_ARGUMENT, INVALID_STATE (the queue drains, or its session has ended), HOST_OUT_OF_MEMORY. */
GPUSHARE_API int32_t gpushare_step_queue_submit(gpushare_step_queue queue,
                                                const gpushare_step_request* request,
                                                gpushare_step_answer_fn answer, void* user_data);
/* Cancels a request: it generates nothing more and is answered CANCELLED, a member after a step has told that it left. Thread-safe.
 * Errors: NOT_FOUND (not held, or cancelled already). */
GPUSHARE_API int32_t gpushare_step_queue_cancel(gpushare_step_queue queue, uint64_t id);
/* Sets the upper limit of the members' bytes from the next step on. Members above the limit are returned to the queue. Does not wait
 * for that: the bytes are free when a later step function, which finds the members in `left`, has returned. So the
 * give_back function of an elastic range lowers the limit, and the step function decommits. Thread-safe. Errors: INVALID_ARGUMENT
 * (above memory_bytes of the params). */
GPUSHARE_API int32_t gpushare_step_queue_set_memory(gpushare_step_queue queue, uint64_t bytes);

typedef struct gpushare_step_queue_info {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t accepted;
  uint64_t refused;
  uint64_t in_time; /* all of its tokens were */
  uint64_t late;
  uint64_t failed;
  uint64_t expired; /* dropped at the deadline of the first token */
  uint64_t cancelled;
  uint64_t pending; /* wait */
  uint64_t members;
  uint64_t held;     /* accepted and not answered */
  uint64_t bytes;    /* of the members */
  uint64_t returned; /* times that a member was returned to the queue */
  uint64_t steps;
  uint64_t tokens;         /* generated */
  uint64_t prefill_tokens; /* processed of prompts */
  uint64_t lost_tokens;    /* processed or generated by members that were returned, to be processed again */
  uint64_t busy_ns;        /* sum of the steps' durations that are known */
  double step_ns, decode_ns, prefill_ns, read_ns; /* the model of time, as learned */
} gpushare_step_queue_info;
#define GPUSHARE_STEP_QUEUE_INFO_INIT \
  { sizeof(gpushare_step_queue_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* Returns statistics since the queue was created. Thread-safe. Does not block. Errors: INVALID_ARGUMENT (bad struct_size). */
GPUSHARE_API int32_t gpushare_step_queue_get_info(gpushare_step_queue queue,
                                                  gpushare_step_queue_info* out_info);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* GPUSHARE_STEPS_H_ */
