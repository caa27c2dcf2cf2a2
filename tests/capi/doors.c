/* The quick ways to blocks that a thread remembers: of a session's heap, of a framework's allocator, of a heap without a device.
 * Each test first makes the calls that open the way, then changes what a call must answer.
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "gpushare/bulk.h"

static gpushare_session_info info_of(gpushare_session session) {
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  CHECK_STATUS(gpushare_session_get_info(session, &info), GPUSHARE_OK);
  return info;
}

static gpushare_runtime_info runtime_info(gpushare_runtime runtime) {
  gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
  CHECK_STATUS(gpushare_runtime_get_info(runtime, &info), GPUSHARE_OK);
  return info;
}

static int32_t model(gpushare_session session, uint64_t bytes, gpushare_device_address* out) {
  return gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, bytes, 0, out);
}

/* Blocks of a session, each other one freed again. */
enum { kSome = 40 };
static void some_models(gpushare_runtime runtime, gpushare_session session, gpushare_device_address* blocks) {
  for (int i = 0; i < kSome; ++i) CHECK_STATUS(model(session, 1000, &blocks[i]), GPUSHARE_OK);
  for (int i = 1; i < kSome; i += 2) {
    CHECK(blocks[i] % 256 == 0 && blocks[i] != blocks[i - 1]);
    CHECK_STATUS(gpushare_memory_free(runtime, blocks[i]), GPUSHARE_OK);
    CHECK_STATUS(gpushare_memory_free(runtime, blocks[i]), GPUSHARE_NOT_FOUND);
  }
}

static void models(const char* device) {
  gpushare_runtime runtime = open_runtime(device, "fair", 128 * MIB);
  gpushare_runtime other = open_runtime(device, "fair", 32 * MIB);
  gpushare_session session = open_session(runtime, "one", 16 * MIB, 4 * MIB);
  gpushare_device_address blocks[kSome] = {0}, block = 0;

  /* counted exactly, whatever the heap has not told yet */
  some_models(runtime, session, blocks);
  CHECK(info_of(session).persistent_bytes == kSome / 2 * 1024);
  CHECK(info_of(session).peak_bytes == kSome * 1024);
  CHECK(runtime_info(runtime).persistent_bytes == kSome / 2 * 1024);
  CHECK(runtime_info(runtime).peak_bytes == kSome * 1024);
  CHECK_STATUS(model(session, 8 * MIB, &block), GPUSHARE_OK);
  CHECK_STATUS(gpushare_memory_free(runtime, block), GPUSHARE_OK);
  CHECK(runtime_info(runtime).persistent_bytes == kSome / 2 * 1024);
  CHECK(runtime_info(runtime).peak_bytes >= 8 * MIB);

  /* what is wrong is told as ever */
  CHECK_STATUS(gpushare_memory_free(other, blocks[0]), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_memory_free(NULL, blocks[0]), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_memory_free(runtime, blocks[0] + 256), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_memory_free(runtime, blocks[0] + 1), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(model(session, 0, &block), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(model(session, UINT64_MAX, &block), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(model(session, 1000, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_alloc(session, GPUSHARE_KIND_MODEL, 1, 3, &block), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_alloc(session, GPUSHARE_KIND_EPHEMERAL, 1, 0, &block),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_alloc(session, GPUSHARE_KIND_FRAMEWORK, 1, 65536, &block), GPUSHARE_OK);
  CHECK(block % 65536 == 0);
  CHECK_STATUS(gpushare_memory_free(runtime, block), GPUSHARE_OK);

  /* a quota counts from now on, and no longer once it is lifted */
  CHECK_STATUS(model(session, 1000, &block), GPUSHARE_OK);
  CHECK_STATUS(gpushare_memory_free(runtime, block), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_set_quota(session, 64 * 1024), GPUSHARE_OK);
  CHECK_STATUS(model(session, 60 * 1024, &block), GPUSHARE_QUOTA_EXCEEDED);
  CHECK_STATUS(gpushare_session_set_quota(session, 0), GPUSHARE_OK);
  CHECK_STATUS(model(session, 60 * 1024, &block), GPUSHARE_OK);

  /* a session that closes takes its blocks along */
  CHECK_STATUS(model(session, 1000, &block), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_memory_free(runtime, block), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(model(session, 1000, &block), GPUSHARE_INVALID_HANDLE);
  CHECK(runtime_info(runtime).persistent_bytes == 0);
  CHECK_STATUS(gpushare_runtime_close(other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_memory_free(runtime, block), GPUSHARE_INVALID_HANDLE);
}

/* A thread that has blocks of more sessions than it remembers, by turns. */
static void several(const char* device) {
  enum { kSessions = 12, kRounds = 5 };
  gpushare_runtime runtime = open_runtime(device, "fair", 512 * MIB);
  gpushare_session sessions[kSessions], another = NULL;
  gpushare_device_address blocks[kSessions * kRounds];
  for (int i = 0; i < kSessions; ++i) sessions[i] = open_session(runtime, "one", 16 * MIB, 4 * MIB);
  for (int used = 1; used <= kSessions; used += used < 3 ? 1 : 3) {
    const int count = used * kRounds;
    for (int i = 0; i < count; ++i) CHECK_STATUS(model(sessions[i % used], 1000, &blocks[i]), GPUSHARE_OK);
    for (int i = 0; i < used; ++i) CHECK(info_of(sessions[i]).persistent_bytes == kRounds * 1024);
    for (int i = 0; i < count; ++i) {
      const int at = i * 7 % count;
      CHECK_STATUS(gpushare_memory_free(runtime, blocks[at] + 256), GPUSHARE_NOT_FOUND);
      CHECK_STATUS(gpushare_memory_free(runtime, blocks[at]), GPUSHARE_OK);
      CHECK_STATUS(gpushare_memory_free(runtime, blocks[at]), GPUSHARE_NOT_FOUND);
    }
    CHECK(runtime_info(runtime).persistent_bytes == 0);
  }
  /* one goes, and its place and its door are another's: neither the handle nor the block is mistaken for that one's */
  for (int i = 0; i < 3; ++i) CHECK_STATUS(model(sessions[i], 1000, &blocks[i]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(sessions[1]), GPUSHARE_OK);
  another = open_session(runtime, "another", 16 * MIB, 4 * MIB);
  CHECK_STATUS(model(sessions[1], 1000, &blocks[3]), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_memory_free(runtime, blocks[1]), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(model(another, 1000, &blocks[4]), GPUSHARE_OK);
  CHECK_STATUS(model(sessions[1], 1000, &blocks[3]), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_memory_free(runtime, blocks[0]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_memory_free(runtime, blocks[2]), GPUSHARE_OK);
  CHECK(runtime_info(runtime).persistent_bytes == 1024);
  for (int i = 0; i < kSessions; ++i)
    if (i != 1) CHECK_STATUS(gpushare_session_close(sessions[i]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(another), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

/* The handle goes at once and the session with its last block. */
static void handle_before_session(const char* device) {
  gpushare_runtime runtime = open_runtime(device, "fair", 128 * MIB);
  gpushare_session session = open_session(runtime, "one", 16 * MIB, 4 * MIB);
  gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
  gpushare_allocator allocator = NULL;
  gpushare_device_address blocks[kSome] = {0}, block = 0;
  CHECK_STATUS(gpushare_allocator_create(runtime, &params, &allocator), GPUSHARE_OK);
  some_models(runtime, session, blocks);
  CHECK_STATUS(gpushare_allocator_close_session(allocator, session), GPUSHARE_OK);
  CHECK_STATUS(model(session, 1000, &block), GPUSHARE_INVALID_HANDLE);
  for (int i = 0; i < kSome; i += 2)
    CHECK_STATUS(gpushare_allocator_free(allocator, blocks[i], GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_release(allocator), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

typedef struct step {
  gpushare_runtime runtime;
  gpushare_session session;
  gpushare_allocator allocator;
  gpushare_iteration iteration;
  void* native;
} step;

static void begin(step* s) {
  gpushare_stream stream = NULL;
  CHECK_STATUS(gpushare_iteration_begin(s->session, GPUSHARE_NO_TIMEOUT, &s->iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_get_stream(s->iteration, &stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_stream_get_native(stream, &s->native), GPUSHARE_OK);
}
static step open_step(const char* device) {
  step s = {0};
  gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
  params.persistent_kind = GPUSHARE_KIND_FRAMEWORK;
  s.runtime = open_runtime(device, "fair", 128 * MIB);
  s.session = open_session(s.runtime, "one", 16 * MIB, 16 * MIB);
  CHECK_STATUS(gpushare_allocator_create(s.runtime, &params, &s.allocator), GPUSHARE_OK);
  begin(&s);
  return s;
}
static gpushare_device_address alloc(const step* s, uint64_t bytes) {
  gpushare_device_address block = 0;
  CHECK_STATUS(gpushare_allocator_alloc(s->allocator, bytes, 0, s->native, &block), GPUSHARE_OK);
  return block;
}
static void give(const step* s, gpushare_device_address block) {
  CHECK_STATUS(gpushare_allocator_free(s->allocator, block, s->native), GPUSHARE_OK);
}
/* Pairs, of which all but the first take the quick way. */
static void some_pairs(const step* s) {
  for (int i = 0; i < kSome; ++i) give(s, alloc(s, 1000));
}
static void close_step(step* s) {
  CHECK_STATUS(gpushare_session_close(s->session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_release(s->allocator), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(s->runtime), GPUSHARE_OK);
}
static gpushare_allocator_info allocator_info(const step* s) {
  gpushare_allocator_info info = GPUSHARE_ALLOCATOR_INFO_INIT;
  CHECK_STATUS(gpushare_allocator_get_info(s->allocator, s->session, &info), GPUSHARE_OK);
  return info;
}
static gpushare_block_info block_info(const step* s, gpushare_device_address block) {
  gpushare_block_info info = GPUSHARE_BLOCK_INFO_INIT;
  CHECK_STATUS(gpushare_memory_get_info(s->runtime, block, &info), GPUSHARE_OK);
  return info;
}

static void framework(const char* device) {
  step s = open_step(device);
  gpushare_device_address block = 0, kept = 0, base = 0;
  uint64_t bytes = 0;
  some_pairs(&s);
  CHECK(allocator_info(&s).allocations == kSome && allocator_info(&s).current_bytes == 0);

  /* what is wrong is told as ever */
  block = alloc(&s, 1000);
  CHECK(block_info(&s, block).kind == GPUSHARE_KIND_EPHEMERAL);
  give(&s, block);
  CHECK_STATUS(gpushare_allocator_free(s.allocator, block, s.native), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_allocator_free(s.allocator, block + 1, s.native), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_allocator_free(s.allocator, 0, s.native), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(s.allocator, 0, 0, s.native, &block), GPUSHARE_OK);
  CHECK(block == 0);
  CHECK_STATUS(gpushare_allocator_alloc(s.allocator, 1, 3, s.native, &block), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_alloc(s.allocator, 1, 0, s.native, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_alloc(s.allocator, 1, 0, &s, &block), GPUSHARE_UNSUPPORTED);
  some_pairs(&s);
  bytes = 1000;
  CHECK_STATUS(gpushare_iteration_alloc(NULL, bytes, 0, &block), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_iteration_alloc_many(NULL, 1, &bytes, 0, &block), GPUSHARE_INVALID_HANDLE);

  /* a pool takes the thread's allocations while it is begun; its blocks are freed as ever */
  some_pairs(&s);
  CHECK_STATUS(gpushare_allocator_begin_pool(s.allocator, 1, 2, NULL, NULL, NULL), GPUSHARE_OK);
  block = alloc(&s, 1000);
  CHECK_STATUS(gpushare_allocator_get_base(s.allocator, block, &base, &bytes), GPUSHARE_OK);
  CHECK(bytes >= MIB && base < block);
  CHECK_STATUS(gpushare_allocator_end_pool(s.allocator, 1, 2), GPUSHARE_OK);
  some_pairs(&s);
  give(&s, block);
  CHECK_STATUS(gpushare_allocator_release_pool(s.allocator, 1, 2), GPUSHARE_OK);

  /* a limit counts from now on */
  some_pairs(&s);
  CHECK_STATUS(gpushare_allocator_set_memory_fraction(s.allocator, 0.01), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(s.allocator, 8 * MIB, 0, s.native, &block), GPUSHARE_QUOTA_EXCEEDED);
  CHECK_STATUS(gpushare_allocator_set_memory_fraction(s.allocator, 1.0), GPUSHARE_OK);
  some_pairs(&s);
  block = alloc(&s, 8 * MIB);
  give(&s, block);
  CHECK_STATUS(gpushare_session_set_quota(s.session, 2 * MIB), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(s.allocator, 8 * MIB, 0, s.native, &block), GPUSHARE_QUOTA_EXCEEDED);
  CHECK_STATUS(gpushare_session_set_quota(s.session, 0), GPUSHARE_OK);

  /* the iteration's end keeps what lives, and the next iteration has its own blocks */
  some_pairs(&s);
  kept = alloc(&s, 3000);
  some_pairs(&s);
  CHECK_STATUS(gpushare_allocator_end_iteration(s.allocator, s.iteration), GPUSHARE_OK);
  CHECK(block_info(&s, kept).promoted == 1);
  block = alloc(&s, 1000); /* between iterations */
  CHECK(block_info(&s, block).kind == GPUSHARE_KIND_FRAMEWORK);
  give(&s, block);
  begin(&s);
  some_pairs(&s);
  CHECK(block_info(&s, kept).promoted == 1);
  give(&s, kept);
  CHECK_STATUS(gpushare_allocator_free(s.allocator, kept, s.native), GPUSHARE_NOT_FOUND);

  /* an allocator that was given back serves nobody, whatever a thread remembers */
  some_pairs(&s);
  block = alloc(&s, 1000);
  CHECK_STATUS(gpushare_allocator_release(s.allocator), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_free(s.allocator, block, s.native), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_allocator_alloc(s.allocator, 1, 0, s.native, &block), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_iteration_end(s.iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(s.session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(s.runtime), GPUSHARE_OK);
}

/* The block that outlives each iteration is expected from the fourth iteration on, whichever way the others took. */
static void learning(const char* device) {
  step s = open_step(device);
  gpushare_device_address before = 0;
  for (int i = 0; i < 6; ++i) {
    if (i > 0) begin(&s);
    some_pairs(&s);
    const gpushare_device_address kept = alloc(&s, 5000);
    some_pairs(&s);
    CHECK(block_info(&s, kept).kind == (uint32_t)(i < 2 ? GPUSHARE_KIND_EPHEMERAL : GPUSHARE_KIND_FRAMEWORK));
    if (before != 0) give(&s, before);
    before = kept;
    CHECK_STATUS(gpushare_allocator_end_iteration(s.allocator, s.iteration), GPUSHARE_OK);
  }
  CHECK(allocator_info(&s).predicted == 4);
  CHECK(allocator_info(&s).allocations == 6 * (2 * kSome + 1));
  close_step(&s);
}

/* Two allocators in one iteration: each lists its own blocks. */
static void two_allocators(const char* device) {
  step one = open_step(device), two = one;
  gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
  gpushare_device_address first = 0, second = 0;
  CHECK_STATUS(gpushare_allocator_create(one.runtime, &params, &two.allocator), GPUSHARE_OK);
  some_pairs(&one);
  some_pairs(&two);
  first = alloc(&one, 1000);
  second = alloc(&two, 2000);
  some_pairs(&one);
  CHECK(allocator_info(&one).allocations == 2 * kSome + 1);
  CHECK(allocator_info(&two).allocations == kSome + 1);
  CHECK_STATUS(gpushare_allocator_keep_blocks(one.allocator, one.iteration), GPUSHARE_OK);
  CHECK(block_info(&one, first).promoted == 1 && block_info(&two, second).promoted == 0);
  CHECK_STATUS(gpushare_allocator_release(two.allocator), GPUSHARE_OK);
  some_pairs(&one);
  CHECK_STATUS(gpushare_allocator_end_iteration(one.allocator, one.iteration), GPUSHARE_OK);
  close_step(&one);
}

/* The last block of a session that is to close closes the session, though the thread knows a quicker way. */
static void last_block(const char* device) {
  step s = open_step(device);
  gpushare_device_address block = 0;
  some_pairs(&s);
  block = alloc(&s, 1000);
  CHECK_STATUS(gpushare_allocator_end_iteration(s.allocator, s.iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_close_session(s.allocator, s.session), GPUSHARE_OK);
  CHECK(runtime_info(s.runtime).sessions_resident == 1);
  give(&s, block);
  CHECK(runtime_info(s.runtime).sessions_resident == 0);
  CHECK_STATUS(gpushare_allocator_release(s.allocator), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(s.runtime), GPUSHARE_OK);
}

typedef struct worker {
  const step* of;
  atomic_int* ready;
  atomic_bool* stop;
  uint64_t pairs;
  gpushare_device_address held[40]; /* of burst_until() */
} worker;
static void* pair_until(void* of) {
  worker* w = of;
  for (atomic_fetch_add(w->ready, 1); !atomic_load(w->stop) || w->pairs < 1000; ++w->pairs) {
    gpushare_device_address block = 0, weight = 0;
    CHECK_STATUS(gpushare_allocator_alloc(w->of->allocator, 256 + w->pairs % 4096, 0, w->of->native, &block),
                 GPUSHARE_OK);
    CHECK_STATUS(gpushare_allocator_free(w->of->allocator, block, w->of->native), GPUSHARE_OK);
    CHECK_STATUS(model(w->of->session, 512, &weight), GPUSHARE_OK);
    CHECK_STATUS(gpushare_memory_free(w->of->runtime, weight), GPUSHARE_OK);
  }
  return NULL;
}

/* Threads on the quick ways while others change what they must answer. */
static void threads(const char* device) {
  step s = open_step(device);
  atomic_int ready = 0;
  atomic_bool stop = false;
  worker workers[3];
  pthread_t started[3];
  gpushare_device_address held[64];
  for (int i = 0; i < 3; ++i) {
    workers[i] = (worker){.of = &s, .ready = &ready, .stop = &stop};
    CHECK(pthread_create(&started[i], NULL, pair_until, &workers[i]) == 0);
  }
  while (atomic_load(&ready) < 3) sched_yield();
  for (int i = 0; i < 200; ++i) {
    CHECK_STATUS(gpushare_allocator_begin_pool(s.allocator, 7, 7, NULL, NULL, NULL), GPUSHARE_OK);
    CHECK_STATUS(gpushare_allocator_end_pool(s.allocator, 7, 7), GPUSHARE_OK);
    CHECK_STATUS(gpushare_allocator_release_pool(s.allocator, 7, 7), GPUSHARE_OK);
    CHECK_STATUS(gpushare_session_set_quota(s.session, 24 * MIB), GPUSHARE_OK);
    CHECK_STATUS(gpushare_session_set_quota(s.session, 0), GPUSHARE_OK);
    (void)runtime_info(s.runtime);
    CHECK(allocator_info(&s).failures == 0);
    held[i % 64] = alloc(&s, 256);
    CHECK_STATUS(gpushare_allocator_keep_blocks(s.allocator, s.iteration), GPUSHARE_OK);
    give(&s, held[i % 64]);
  }
  atomic_store(&stop, true);
  uint64_t pairs = 200;
  for (int i = 0; i < 3; ++i) {
    CHECK(pthread_join(started[i], NULL) == 0);
    pairs += workers[i].pairs;
  }
  CHECK(allocator_info(&s).allocations == pairs);
  CHECK_STATUS(gpushare_allocator_end_iteration(s.allocator, s.iteration), GPUSHARE_OK);
  CHECK(info_of(s.session).persistent_bytes == 0 && info_of(s.session).ephemeral_bytes == 0);
  CHECK(runtime_info(s.runtime).persistent_bytes == 0);
  close_step(&s);
}

enum { kBurst = 400 };
static void* burst_until(void* of) {
  worker* w = of;
  gpushare_device_address blocks[kBurst];
  atomic_fetch_add(w->ready, 1);
  for (uint64_t round = 0; !atomic_load(w->stop) || round < 10; ++round) {
    const int count = (int)(round * 37 % kBurst);
    if (round < 40) w->held[round] = alloc(w->of, 512);
    for (int i = 0; i < count; ++i)
      CHECK_STATUS(gpushare_allocator_alloc(w->of->allocator, 256, 0, w->of->native, &blocks[i]),
                   GPUSHARE_OK);
    for (int i = 0; i < count; ++i)
      CHECK_STATUS(gpushare_allocator_free(w->of->allocator, blocks[i], w->of->native), GPUSHARE_OK);
  }
  return NULL;
}

/* While an iteration's blocks are kept, other threads of it allocate more than the journal had room for. The end keeps what they
 * still have. */
static void bursts(const char* device) {
  step s = open_step(device);
  for (int iteration = 0; iteration < 6; ++iteration) {
    atomic_int ready = 0;
    atomic_bool stop = false;
    worker workers[3];
    pthread_t started[3];
    if (iteration > 0) begin(&s);
    for (int i = 0; i < 3; ++i) {
      workers[i] = (worker){.of = &s, .ready = &ready, .stop = &stop};
      CHECK(pthread_create(&started[i], NULL, burst_until, &workers[i]) == 0);
    }
    while (atomic_load(&ready) < 3) sched_yield();
    for (int i = 0; i < 30; ++i)
      CHECK_STATUS(gpushare_allocator_keep_blocks(s.allocator, s.iteration), GPUSHARE_OK);
    atomic_store(&stop, true);
    for (int i = 0; i < 3; ++i) CHECK(pthread_join(started[i], NULL) == 0);
    CHECK_STATUS(gpushare_allocator_end_iteration(s.allocator, s.iteration), GPUSHARE_OK);
    for (int i = 0; i < 3; ++i)
      for (int k = 0; k < 40 && workers[i].held[k] != 0; ++k) {
        const gpushare_block_info info = block_info(&s, workers[i].held[k]);
        CHECK(info.bytes == 512 && (info.promoted == 1 || info.kind == GPUSHARE_KIND_FRAMEWORK));
        give(&s, workers[i].held[k]);
      }
    CHECK(info_of(s.session).persistent_bytes == 0);
  }
  close_step(&s);
}

typedef struct listener {
  gpushare_runtime runtime;
  atomic_bool* stop;
} listener;
static void* listen_until(void* of) {
  const listener* l = of;
  while (!atomic_load(l->stop)) (void)runtime_info(l->runtime);
  return NULL;
}

/* What a thread has allocated counts for it at once, whoever asks beside it. */
static void listeners(const char* device) {
  gpushare_runtime runtime = open_runtime(device, "fair", 128 * MIB);
  gpushare_session session = open_session(runtime, "one", 16 * MIB, 4 * MIB);
  atomic_bool stop = false;
  listener of = {runtime, &stop};
  pthread_t started[2];
  uint64_t wrong = 0;
  for (int i = 0; i < 2; ++i) CHECK(pthread_create(&started[i], NULL, listen_until, &of) == 0);
  for (int i = 0; i < 50000; ++i) {
    gpushare_device_address block = 0;
    CHECK_STATUS(model(session, 1000, &block), GPUSHARE_OK);
    wrong += runtime_info(runtime).persistent_bytes != 1024;
    CHECK_STATUS(gpushare_memory_free(runtime, block), GPUSHARE_OK);
    wrong += runtime_info(runtime).persistent_bytes != 0;
  }
  atomic_store(&stop, true);
  for (int i = 0; i < 2; ++i) CHECK(pthread_join(started[i], NULL) == 0);
  CHECK(wrong == 0);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

static void without_device(void) {
  gpushare_heap_params params = GPUSHARE_HEAP_PARAMS_INIT;
  gpushare_heap heap = NULL;
  uint64_t a = 0, b = 0;
  params.capacity_bytes = 1 * MIB;
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_alloc(heap, 1000, &a), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_alloc(heap, 1, &b), GPUSHARE_OK);
  CHECK(a == 0 && b == 1024);
  CHECK_STATUS(gpushare_heap_alloc(heap, 0, &b), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_heap_alloc(heap, 1 * MIB, &b), GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_STATUS(gpushare_heap_alloc(heap, UINT64_MAX, &b), GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_STATUS(gpushare_heap_alloc(heap, 1000, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_heap_alloc(NULL, 1000, &b), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_heap_free(heap, 256), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_heap_free(heap, 1), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_heap_free(heap, UINT64_MAX / 256 * 256), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_heap_free(heap, 0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_free(heap, 0), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_heap_release(heap), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_alloc(heap, 1000, &b), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_heap_free(heap, 1024), GPUSHARE_INVALID_HANDLE);
}

/* More blocks than a heap keeps records of: the message says how many it holds. */
static void too_many(void) {
  gpushare_heap_params params = GPUSHARE_HEAP_PARAMS_INIT;
  gpushare_heap heap = NULL;
  uint64_t offset = 0, live = 0;
  char number[32];
  int32_t status = GPUSHARE_OK;
  params.capacity_bytes = 1ull << 40;
  CHECK_STATUS(gpushare_heap_create(&params, &heap), GPUSHARE_OK);
  while ((status = gpushare_heap_alloc(heap, 256, &offset)) == GPUSHARE_OK && live < 1u << 22) ++live;
  CHECK(status == GPUSHARE_QUOTA_EXCEEDED);
  snprintf(number, sizeof number, "%llu blocks", (unsigned long long)live);
  CHECK(strstr(gpushare_last_error_message(), number) != NULL);
  CHECK(strstr(gpushare_last_error_message(), "the most") != NULL);
  CHECK_STATUS(gpushare_heap_free(heap, offset), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_alloc(heap, 256, &offset), GPUSHARE_OK);
  CHECK_STATUS(gpushare_heap_release(heap), GPUSHARE_OK);
}

/* Events of blocks are recorded whatever way the blocks have come. */
static void recorded(const char* device) {
  enum { kBlocks = 20 };
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_runtime runtime = NULL;
  gpushare_session session = NULL;
  gpushare_iteration iteration = NULL;
  gpushare_device_address blocks[kBlocks];
  uint64_t sizes[kBlocks];
  char path[] = "/tmp/gpushare-doors-XXXXXX", line[256];
  const int file = mkstemp(path);
  FILE* log = NULL; /* the file is replaced when it is written */
  int allocated = 0, freed = 0;
  CHECK(file >= 0 && close(file) == 0);
  params.device = device;
  params.record = GPUSHARE_RECORD_ALLOCATIONS;
  CHECK_STATUS(gpushare_runtime_open(&params, &runtime), GPUSHARE_OK);
  need.persistent_bytes = need.ephemeral_bytes = 4 * MIB;
  CHECK_STATUS(gpushare_session_open(runtime, &need, &session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  for (int i = 0; i < kBlocks; ++i) {
    sizes[i] = 1000;
    CHECK_STATUS(gpushare_iteration_alloc(iteration, sizes[i], 0, &blocks[i]), GPUSHARE_OK);
  }
  for (int i = 0; i < kBlocks; ++i) CHECK_STATUS(gpushare_memory_free(runtime, blocks[i]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_alloc_many(iteration, kBlocks, sizes, 0, blocks), GPUSHARE_OK);
  CHECK_STATUS(gpushare_memory_free_many(runtime, kBlocks, blocks, NULL), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
  for (int i = 0; i < kBlocks; ++i) CHECK_STATUS(model(session, sizes[i], &blocks[i]), GPUSHARE_OK);
  for (int i = 0; i < kBlocks; ++i) CHECK_STATUS(gpushare_memory_free(runtime, blocks[i]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_write_allocation_log(runtime, path), GPUSHARE_OK);
  log = fopen(path, "r");
  while (log != NULL && fgets(line, sizeof line, log) != NULL) {
    allocated += strstr(line, ",allocate,") != NULL;
    freed += strstr(line, ",free,") != NULL;
  }
  CHECK(allocated == 3 * kBlocks);
  CHECK(freed == 3 * kBlocks);
  if (log != NULL) fclose(log);
  (void)remove(path);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

int main(void) {
  static const char* const devices[] = {"host", "sim"};
  for (int i = 0; i < 2; ++i) {
    models(devices[i]);
    several(devices[i]);
    handle_before_session(devices[i]);
    recorded(devices[i]);
  }
  framework("host");
  learning("host");
  two_allocators("host");
  last_block("host");
  threads("host");
  bursts("host");
  listeners("host");
  without_device();
  too_many();
  return capi_result();
}
