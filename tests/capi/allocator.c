/* A framework's allocator: owners by native stream and by thread, what outlives an iteration, pools, limits,
 * statistics. On host and sim, and, given the path of the stand-in for the CUDA driver, on that with streams and graph
 * captures of others.
 * SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <pthread.h>

#include "check.h"

typedef struct fixture {
  gpushare_runtime runtime;
  gpushare_session session, other;
  gpushare_allocator allocator;
} fixture;

static fixture open_all(const char* device) {
  fixture f;
  gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
  f.runtime = open_runtime(device, "fair", 128 * MIB);
  f.session = open_session(f.runtime, "one", 8 * MIB, 16 * MIB);
  f.other = open_session(f.runtime, "two", 8 * MIB, 16 * MIB);
  f.allocator = NULL;
  params.persistent_kind = GPUSHARE_KIND_FRAMEWORK;
  CHECK_STATUS(gpushare_allocator_create(f.runtime, &params, &f.allocator), GPUSHARE_OK);
  return f;
}

static void close_all(fixture* f) {
  CHECK_STATUS(gpushare_session_close(f->session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(f->other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_release(f->allocator), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_release(f->allocator), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_runtime_close(f->runtime), GPUSHARE_OK);
}

static uint64_t id_of(gpushare_session session) {
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  CHECK_STATUS(gpushare_session_get_info(session, &info), GPUSHARE_OK);
  return info.session_id;
}

static gpushare_block_info block_at(gpushare_runtime runtime, gpushare_device_address address) {
  gpushare_block_info info = GPUSHARE_BLOCK_INFO_INIT;
  CHECK_STATUS(gpushare_memory_get_info(runtime, address, &info), GPUSHARE_OK);
  return info;
}

static void* lane_stream(gpushare_iteration iteration) {
  gpushare_stream stream = NULL;
  void* native = NULL;
  CHECK_STATUS(gpushare_iteration_get_stream(iteration, &stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_stream_get_native(stream, &native), GPUSHARE_OK);
  return native;
}

/* An allocation on a thread that has never called the library, as autograd makes them. */
typedef struct helper {
  gpushare_allocator allocator;
  void* native;
  int32_t status;
  gpushare_device_address address;
} helper;
static void* allocate_on_helper(void* of) {
  helper* h = of;
  h->status = gpushare_allocator_alloc(h->allocator, 1000, 0, h->native, &h->address);
  return NULL;
}
static helper on_helper(gpushare_allocator allocator, void* native) {
  helper h = {allocator, native, 0, 0};
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, allocate_on_helper, &h) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  return h;
}

static void owners(const char* device) {
  fixture f = open_all(device);
  gpushare_device_address a = 1, b = 0, c = 0;
  gpushare_iteration iteration = NULL;
  gpushare_stream side = NULL;
  void *lane = NULL, *native = NULL;
  helper h;
  /* Zero bytes, and nobody to own more. */
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 0, 0, GPUSHARE_NO_NATIVE_STREAM, &a), GPUSHARE_OK);
  CHECK(a == 0);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, 0, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1, 0, GPUSHARE_NO_NATIVE_STREAM, &a),
               GPUSHARE_NOT_FOUND);
  CHECK(strstr(gpushare_last_error_message(), "default session") != NULL);
  /* The default session, outside of iterations and from a helper thread. */
  CHECK_STATUS(gpushare_allocator_set_default_session(f.allocator, f.other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, GPUSHARE_NO_NATIVE_STREAM, &a), GPUSHARE_OK);
  CHECK(block_at(f.runtime, a).session_id == id_of(f.other) &&
        block_at(f.runtime, a).kind == GPUSHARE_KIND_FRAMEWORK);
  h = on_helper(f.allocator, GPUSHARE_NO_NATIVE_STREAM);
  CHECK_STATUS(h.status, GPUSHARE_OK);
  CHECK(block_at(f.runtime, h.address).session_id == id_of(f.other));
  CHECK_STATUS(gpushare_allocator_free(f.allocator, h.address, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, h.address, GPUSHARE_NO_NATIVE_STREAM),
               GPUSHARE_NOT_FOUND);
  /* The thread's session goes before it. */
  CHECK_STATUS(gpushare_allocator_bind_thread(f.allocator, f.session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 4096, GPUSHARE_NO_NATIVE_STREAM, &b), GPUSHARE_OK);
  CHECK(b % 4096 == 0 && block_at(f.runtime, b).session_id == id_of(f.session));
  CHECK_STATUS(gpushare_allocator_bind_thread(f.allocator, f.other), GPUSHARE_OK);
  /* The thread's iteration goes before that. */
  CHECK_STATUS(gpushare_iteration_begin(f.session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, GPUSHARE_NO_NATIVE_STREAM, &c), GPUSHARE_OK);
  CHECK(block_at(f.runtime, c).session_id == id_of(f.session) &&
        block_at(f.runtime, c).kind == GPUSHARE_KIND_EPHEMERAL);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, c, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_bind_thread(f.allocator, NULL), GPUSHARE_OK);
  /* The lane's native stream goes before all, on any thread. */
  lane = lane_stream(iteration);
  h = on_helper(f.allocator, lane);
  CHECK_STATUS(h.status, GPUSHARE_OK);
  CHECK(block_at(f.runtime, h.address).session_id == id_of(f.session));
  CHECK(block_at(f.runtime, h.address).kind == GPUSHARE_KIND_EPHEMERAL);
  CHECK_STATUS(gpushare_allocator_adopt_stream(f.allocator, f.session, lane), GPUSHARE_INVALID_ARGUMENT);
  /* A stream that a session has adopted, while the other one's iteration is open on this thread. */
  CHECK_STATUS(gpushare_stream_create(f.runtime, 0, &side), GPUSHARE_OK);
  CHECK_STATUS(gpushare_stream_get_native(side, &native), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_adopt_stream(f.allocator, f.other, native), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, native, &c), GPUSHARE_OK);
  CHECK(block_at(f.runtime, c).session_id == id_of(f.other));
  CHECK_STATUS(gpushare_stream_fill(side, c, 7, 1000), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_record_use(f.allocator, c, lane), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_record_use(f.allocator, c + 1, lane), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_allocator_record_use(f.allocator, c, GPUSHARE_NO_NATIVE_STREAM),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, c, native), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_forget_stream(f.allocator, native), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_forget_stream(f.allocator, native), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, native, &c), GPUSHARE_OK); /* by thread again */
  CHECK(block_at(f.runtime, c).session_id == id_of(f.session));
  CHECK_STATUS(gpushare_stream_fill(side, c, 7, 1000), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, c, native), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_end_iteration(f.allocator, iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_end_iteration(f.allocator, iteration), GPUSHARE_INVALID_HANDLE);
  CHECK(block_at(f.runtime, h.address).promoted == 1); /* the helper's block was never freed */
  CHECK_STATUS(gpushare_stream_release(side), GPUSHARE_OK);
  close_all(&f);
}

/* A submitted function: its iteration ends when it returns, and what it leaves allocated is to stay. */
typedef struct submitted {
  fixture* of;
  gpushare_device_address kept, gone;
} submitted;

static int32_t keeps_a_block(void* user_data, gpushare_iteration iteration) {
  submitted* const work = user_data;
  const gpushare_allocator allocator = work->of->allocator;
  gpushare_stream stream = NULL;
  CHECK_STATUS(gpushare_iteration_get_stream(iteration, &stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(allocator, 3000, 0, GPUSHARE_NO_NATIVE_STREAM, &work->kept),
               GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_keep_blocks(allocator, iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_keep_blocks(allocator, iteration), GPUSHARE_OK);
  CHECK(block_at(work->of->runtime, work->kept).promoted == 1);
  CHECK_STATUS(gpushare_allocator_alloc(allocator, 5000, 0, GPUSHARE_NO_NATIVE_STREAM, &work->gone),
               GPUSHARE_OK);
  return GPUSHARE_OK;
}

static void keeping(const char* device) {
  fixture f = open_all(device);
  submitted work = {&f, 0, 0};
  gpushare_ticket ticket = NULL;
  CHECK_STATUS(gpushare_session_submit(f.session, keeps_a_block, &work, NULL, &ticket), GPUSHARE_OK);
  CHECK_STATUS(gpushare_ticket_wait(ticket, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_ticket_release(ticket), GPUSHARE_OK);
  CHECK(block_at(f.runtime, work.kept).promoted == 1);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, work.gone, GPUSHARE_NO_NATIVE_STREAM),
               GPUSHARE_NOT_FOUND); /* allocated after the call */
  CHECK_STATUS(gpushare_allocator_free(f.allocator, work.kept, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_keep_blocks(f.allocator, NULL), GPUSHARE_INVALID_HANDLE);
  close_all(&f);
}

static void learning(const char* device) {
  fixture f = open_all(device);
  gpushare_allocator_info info = GPUSHARE_ALLOCATOR_INFO_INIT, whole = GPUSHARE_ALLOCATOR_INFO_INIT;
  gpushare_device_address kept = 0;
  CHECK_STATUS(gpushare_allocator_set_default_session(f.allocator, f.session), GPUSHARE_OK);
  for (int step = 0; step < 5; ++step) {
    gpushare_iteration iteration = NULL;
    gpushare_device_address state = 0, scratch = 0, again = 0;
    CHECK_STATUS(gpushare_iteration_begin(f.session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
    /* `state` lives until the next step, as gradients do. `scratch` does not, and `again` takes its place. */
    CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 3000, 0, GPUSHARE_NO_NATIVE_STREAM, &state),
                 GPUSHARE_OK);
    CHECK(block_at(f.runtime, state).kind == (step >= 2 ? GPUSHARE_KIND_FRAMEWORK : GPUSHARE_KIND_EPHEMERAL));
    CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 5000, 0, GPUSHARE_NO_NATIVE_STREAM, &scratch),
                 GPUSHARE_OK);
    CHECK_STATUS(gpushare_allocator_free(f.allocator, scratch, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
    CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 5000, 0, GPUSHARE_NO_NATIVE_STREAM, &again),
                 GPUSHARE_OK);
    CHECK(block_at(f.runtime, again).kind == GPUSHARE_KIND_EPHEMERAL);
    CHECK_STATUS(gpushare_allocator_get_info(f.allocator, f.session, &info), GPUSHARE_OK);
    CHECK_STATUS(gpushare_allocator_get_info(f.allocator, NULL, &whole), GPUSHARE_OK);
    CHECK(info.current_bytes >= 8000 && whole.current_bytes == info.current_bytes);
    CHECK_STATUS(gpushare_allocator_free(f.allocator, again, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
    if (kept != 0)
      CHECK_STATUS(gpushare_allocator_free(f.allocator, kept, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
    kept = state;
    CHECK_STATUS(gpushare_allocator_end_iteration(f.allocator, iteration), GPUSHARE_OK);
    CHECK_STATUS(gpushare_allocator_get_info(f.allocator, f.session, &info), GPUSHARE_OK);
    CHECK(info.current_bytes >= 3000 && info.current_bytes <= 4096); /* nothing vanished, nothing is left */
  }
  CHECK(info.predicted == 3 && info.allocations == 15 && info.failures == 0 &&
        info.limit_bytes == UINT64_MAX);
  CHECK(info.peak_bytes >= 8000 && info.reserved_bytes >= info.current_bytes);
  /* Peaks begin anew. */
  CHECK_STATUS(gpushare_runtime_synchronize(f.runtime, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_reset_peaks(f.allocator, f.session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_reset_peaks(f.allocator, NULL), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_get_info(f.allocator, f.session, &info), GPUSHARE_OK);
  CHECK(info.peak_bytes == info.current_bytes);
  CHECK_STATUS(gpushare_allocator_get_info(f.allocator, NULL, &info), GPUSHARE_OK);
  CHECK(info.peak_bytes == info.current_bytes && info.allocations == 15);
  info.struct_size = 4;
  CHECK_STATUS(gpushare_allocator_get_info(f.allocator, NULL, &info), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, kept, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  close_all(&f);
}

/* An iteration that allocates without end keeps what lives, and the list of its allocations stays short. */
static void endless(const char* device) {
  fixture f = open_all(device);
  gpushare_iteration iteration = NULL;
  gpushare_device_address kept = 0, a = 0;
  gpushare_allocator_info info = GPUSHARE_ALLOCATOR_INFO_INIT;
  CHECK_STATUS(gpushare_allocator_set_default_session(f.allocator, f.session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_begin(f.session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 3000, 0, GPUSHARE_NO_NATIVE_STREAM, &kept), GPUSHARE_OK);
  for (int i = 0; i < 200000; ++i) {
    if (gpushare_allocator_alloc(f.allocator, 500, 0, GPUSHARE_NO_NATIVE_STREAM, &a) != GPUSHARE_OK) break;
    if (gpushare_allocator_free(f.allocator, a, GPUSHARE_NO_NATIVE_STREAM) != GPUSHARE_OK) break;
  }
  CHECK_STATUS(gpushare_allocator_end_iteration(f.allocator, iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_get_info(f.allocator, f.session, &info), GPUSHARE_OK);
  CHECK(info.allocations == 200001 && info.current_bytes >= 3000 && info.current_bytes < 4096);
  CHECK(block_at(f.runtime, kept).promoted == 1);
  /* Which blocks outlive their iterations is learned anew, from the two that come next. */
  for (int step = 0; step < 3; ++step) {
    CHECK_STATUS(gpushare_allocator_free(f.allocator, kept, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
    CHECK_STATUS(gpushare_iteration_begin(f.session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
    CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 3000, 0, GPUSHARE_NO_NATIVE_STREAM, &kept),
                 GPUSHARE_OK);
    CHECK(block_at(f.runtime, kept).kind == (step == 2 ? GPUSHARE_KIND_FRAMEWORK : GPUSHARE_KIND_EPHEMERAL));
    CHECK_STATUS(gpushare_allocator_end_iteration(f.allocator, iteration), GPUSHARE_OK);
  }
  close_all(&f);
}

static int observed;
static void observe(void* user_data, uint64_t session_id, uint64_t bytes, const char* message) {
  CHECK(*(uint64_t*)user_data == session_id && bytes >= 64 * MIB && message[0] != 0);
  ++observed;
}

static void limits(const char* device) {
  fixture f = open_all(device);
  gpushare_device_address a = 0;
  gpushare_allocator_info info = GPUSHARE_ALLOCATOR_INFO_INIT;
  uint64_t session = id_of(f.session), bytes = 1;
  CHECK_STATUS(gpushare_allocator_set_default_session(f.allocator, f.session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_add_observer(f.allocator, NULL, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_add_observer(f.allocator, observe, &session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_set_memory_fraction(f.allocator, 0.0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_set_memory_fraction(f.allocator, 1.5), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_set_memory_fraction(f.allocator, 0.25), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 64 * MIB, 0, GPUSHARE_NO_NATIVE_STREAM, &a),
               GPUSHARE_QUOTA_EXCEEDED);
  CHECK(observed == 1 && strstr(gpushare_last_error_message(), "memory fraction") != NULL);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1 * MIB, 0, GPUSHARE_NO_NATIVE_STREAM, &a), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, a, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  /* The limit to the byte. */
  CHECK_STATUS(gpushare_allocator_set_memory_fraction(f.allocator, 0.03125), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_get_info(f.allocator, NULL, &info), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, info.limit_bytes, 0, GPUSHARE_NO_NATIVE_STREAM, &a),
               GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_set_memory_fraction(f.allocator, 1.0), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 4096 * MIB, 0, GPUSHARE_NO_NATIVE_STREAM, &a),
               GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(observed == 2);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 3, GPUSHARE_NO_NATIVE_STREAM, &a),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK(observed == 2); /* told of memory that is missing, of nothing else */
  CHECK_STATUS(gpushare_allocator_get_info(f.allocator, NULL, &info), GPUSHARE_OK);
  CHECK(info.failures == 3 && info.allocations == 2);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, a, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_trim(f.allocator, &bytes), GPUSHARE_OK);
  observed = 0;
  close_all(&f);
}

static void* filtered;
static int32_t is_filtered(void* user_data, void* native) {
  CHECK(user_data == &filtered);
  return native == filtered;
}
static int pools_released;
static void pool_released(void* user_data) {
  CHECK(user_data == &filtered);
  ++pools_released;
}

static void pools(const char* device) {
  fixture f = open_all(device);
  gpushare_device_address a = 0, b = 0, c = 0, base = 0;
  gpushare_allocator_info info = GPUSHARE_ALLOCATOR_INFO_INIT;
  gpushare_stream side = NULL;
  uint64_t bytes = 0;
  CHECK_STATUS(gpushare_allocator_set_default_session(f.allocator, f.session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_stream_create(f.runtime, 0, &side), GPUSHARE_OK);
  CHECK_STATUS(gpushare_stream_get_native(side, &filtered), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_end_pool(f.allocator, 0, 1), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_allocator_release_pool(f.allocator, 0, 1), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_allocator_begin_pool(f.allocator, 0, 1, is_filtered, &filtered, pool_released),
               GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, filtered, &a), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, GPUSHARE_NO_NATIVE_STREAM, &b), GPUSHARE_OK);
  CHECK(block_at(f.runtime, b).bytes == 1000); /* an ordinary block */
  CHECK_STATUS(gpushare_allocator_get_base(f.allocator, b, &base, &bytes), GPUSHARE_OK);
  CHECK(base == b && bytes == 1000);
  CHECK_STATUS(gpushare_allocator_get_base(f.allocator, a, &base, &bytes), GPUSHARE_OK);
  CHECK(base < a && bytes == 2 * MIB);
  CHECK_STATUS(gpushare_stream_fill(side, a, 1, 1000), GPUSHARE_OK);
  /* Freed bytes are the pool's alone, and those that another stream has used are nobody's. */
  CHECK_STATUS(gpushare_allocator_free(f.allocator, a, filtered), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, a, filtered), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 512, filtered, &c), GPUSHARE_OK);
  CHECK(c % 512 == 0 && c - base < 4096);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, c, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, c, filtered), GPUSHARE_NOT_FOUND);
  a = c;
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 512, filtered, &c), GPUSHARE_OK);
  CHECK(c != a);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 5 * MIB, 0, filtered, &a),
               GPUSHARE_OK); /* a chunk of its own */
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 4096 * MIB, 0, filtered, &base),
               GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_STATUS(gpushare_allocator_end_pool(f.allocator, 0, 1), GPUSHARE_OK);
  CHECK(pools_released == 1);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, b, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, filtered, &b), GPUSHARE_OK);
  CHECK(block_at(f.runtime, b).bytes == 1000);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, b, filtered), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_get_info(f.allocator, f.session, &info), GPUSHARE_OK);
  CHECK(info.current_bytes == 8 * MIB);
  /* Released: what holds no live block returns, the rest with its last. */
  CHECK_STATUS(gpushare_allocator_free(f.allocator, a, filtered), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_release_pool(f.allocator, 0, 1), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_get_info(f.allocator, f.session, &info), GPUSHARE_OK);
  CHECK(info.current_bytes == 2 * MIB);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, c, filtered), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_get_info(f.allocator, f.session, &info), GPUSHARE_OK);
  CHECK(info.current_bytes == 0);
  /* A pool of the thread's. */
  CHECK_STATUS(gpushare_allocator_begin_pool(f.allocator, 7, 7, NULL, NULL, NULL), GPUSHARE_OK);
  CHECK(block_at(f.runtime, on_helper(f.allocator, GPUSHARE_NO_NATIVE_STREAM).address).bytes == 1000);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, GPUSHARE_NO_NATIVE_STREAM, &a), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_get_base(f.allocator, a, &base, &bytes), GPUSHARE_OK);
  CHECK(bytes == 2 * MIB);
  CHECK_STATUS(gpushare_allocator_end_pool(f.allocator, 7, 7), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, a, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_release_pool(f.allocator, 7, 7), GPUSHARE_OK);
  CHECK_STATUS(gpushare_stream_release(side), GPUSHARE_OK);
  pools_released = 0;
  close_all(&f);
}

static void closing(const char* device) {
  fixture f = open_all(device);
  gpushare_device_address a = 0, b = 0;
  gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
  gpushare_iteration iteration = NULL;
  void* lane = NULL;
  CHECK_STATUS(gpushare_allocator_set_default_session(f.allocator, f.session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_begin(f.session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  lane = lane_stream(iteration);
  CHECK_STATUS(gpushare_allocator_end_iteration(f.allocator, iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, GPUSHARE_NO_NATIVE_STREAM, &a), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, GPUSHARE_NO_NATIVE_STREAM, &b), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_close_session(f.allocator, f.session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_close_session(f.allocator, f.session), GPUSHARE_INVALID_HANDLE);
  CHECK(block_at(f.runtime, a).bytes == 1000); /* what the framework holds does not vanish */
  CHECK_STATUS(gpushare_allocator_free(f.allocator, a, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_get_info(f.runtime, &info), GPUSHARE_OK);
  CHECK(info.sessions_resident == 2);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, b, lane), GPUSHARE_OK); /* the stream of its session */
  CHECK_STATUS(gpushare_runtime_get_info(f.runtime, &info), GPUSHARE_OK);
  CHECK(info.sessions_resident == 1);
  f.session = open_session(f.runtime, "three", 1 * MIB, 0);
  CHECK_STATUS(gpushare_allocator_close_session(f.allocator, f.session),
               GPUSHARE_OK); /* has no block: at once */
  CHECK_STATUS(gpushare_runtime_get_info(f.runtime, &info), GPUSHARE_OK);
  CHECK(info.sessions_resident == 1);
  f.session = open_session(f.runtime, "four", 1 * MIB, 0);
  /* Frees that come after all was closed are answered. */
  CHECK_STATUS(gpushare_allocator_bind_thread(f.allocator, f.session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, GPUSHARE_NO_NATIVE_STREAM, &a), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(f.session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, a, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, GPUSHARE_NO_NATIVE_STREAM, &a),
               GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_session_close(f.other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(f.runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, a, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_allocator_release(f.allocator), GPUSHARE_OK);
}

/* A session that closes with its last block, as many bytes of which lie on the host as on the device. */
static void closing_spilled(void) {
  fixture f = open_all("host");
  gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  gpushare_device_address here = 0, away = 0;
  gpushare_session spills = NULL;
  need.flags = GPUSHARE_SESSION_ALLOW_QUEUEING | GPUSHARE_SESSION_ALLOW_SPILL;
  need.persistent_bytes = need.quota_bytes = 4 * MIB;
  CHECK_STATUS(gpushare_session_open(f.runtime, &need, &spills), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_set_default_session(f.allocator, spills), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 4 * MIB, 0, GPUSHARE_NO_NATIVE_STREAM, &here),
               GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 4 * MIB, 0, GPUSHARE_NO_NATIVE_STREAM, &away),
               GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_get_info(spills, &info), GPUSHARE_OK);
  CHECK(info.persistent_bytes == 4 * MIB && info.spilled_bytes == 4 * MIB);
  CHECK_STATUS(gpushare_allocator_close_session(f.allocator, spills), GPUSHARE_OK);
  CHECK(block_at(f.runtime, here).bytes == 4 * MIB && block_at(f.runtime, away).spilled == 1);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, here, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  CHECK(block_at(f.runtime, away).bytes == 4 * MIB);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, away, GPUSHARE_NO_NATIVE_STREAM), GPUSHARE_OK);
  close_all(&f);
}

/* Streams and captures that the framework makes by itself, with the driver's calls. */
typedef struct cuda {
  int (*stream_create)(void** stream, unsigned flags);
  int (*stream_destroy)(void* stream);
  int (*begin_capture)(void* stream, int mode);
  int (*end_capture)(void* stream, void** graph);
  int (*graph_destroy)(void* graph);
  int (*memset_async)(unsigned long long address, unsigned char value, size_t bytes, void* stream);
  int (*stream_synchronize)(void* stream);
  int (*retain)(void** context, int device);
  int (*release)(int device);
  int (*set_current)(void* context);
} cuda;

static void* symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  CHECK(found != NULL);
  return found;
}

static void native_streams(const char* device, const char* path) {
  fixture f = open_all(device);
  void* library = dlopen(path, RTLD_NOW);
  cuda api;
  void *stream = NULL, *graph = NULL, *context = NULL;
  gpushare_device_address a = 0, b = 0, c = 0, d = 0;
  CHECK(library != NULL);
  if (library == NULL) return;
  *(void**)&api.stream_create = symbol(library, "cuStreamCreate");
  *(void**)&api.stream_destroy = symbol(library, "cuStreamDestroy_v2");
  *(void**)&api.begin_capture = symbol(library, "cuStreamBeginCapture_v2");
  *(void**)&api.end_capture = symbol(library, "cuStreamEndCapture");
  *(void**)&api.graph_destroy = symbol(library, "cuGraphDestroy");
  *(void**)&api.memset_async = symbol(library, "cuMemsetD8Async");
  *(void**)&api.stream_synchronize = symbol(library, "cuStreamSynchronize");
  *(void**)&api.retain = symbol(library, "cuDevicePrimaryCtxRetain");
  *(void**)&api.release = symbol(library, "cuDevicePrimaryCtxRelease_v2");
  *(void**)&api.set_current = symbol(library, "cuCtxSetCurrent");
  CHECK(api.retain(&context, 0) == 0 && api.set_current(context) == 0);
  CHECK(api.stream_create(&stream, 1) == 0);
  CHECK_STATUS(gpushare_allocator_set_default_session(f.allocator, f.other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_adopt_stream(f.allocator, f.session, stream), GPUSHARE_OK);
  /* The stand-in tells any use of the same bytes by two streams that is not ordered: reuse goes back and forth. */
  for (int round = 0; round < 20; ++round) {
    gpushare_iteration iteration = NULL;
    void* lane = NULL;
    CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 3 * MIB, 0, stream, &a), GPUSHARE_OK);
    CHECK(block_at(f.runtime, a).session_id == id_of(f.session));
    CHECK(api.memset_async(a, 1, 3 * MIB, stream) == 0);
    CHECK_STATUS(gpushare_allocator_free(f.allocator, a, stream), GPUSHARE_OK);
    CHECK_STATUS(gpushare_iteration_begin(f.session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
    lane = lane_stream(iteration);
    CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 3 * MIB, 0, lane, &b), GPUSHARE_OK);
    CHECK(api.memset_async(b, 2, 3 * MIB, lane) == 0);
    CHECK_STATUS(gpushare_allocator_free(f.allocator, b, lane), GPUSHARE_OK);
    CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 3 * MIB, 0, stream, &b),
                 GPUSHARE_OK); /* of the iteration, on the other stream */
    CHECK(api.memset_async(b, 3, 3 * MIB, stream) == 0);
    CHECK_STATUS(gpushare_allocator_free(f.allocator, b, stream), GPUSHARE_OK);
    CHECK_STATUS(gpushare_allocator_end_iteration(f.allocator, iteration), GPUSHARE_OK);
    /* The legacy default stream is nobody's: the default session's. */
    CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, NULL, &c), GPUSHARE_OK);
    CHECK(block_at(f.runtime, c).session_id == id_of(f.other));
    CHECK(api.memset_async(c, 4, 1000, NULL) == 0);
    CHECK_STATUS(gpushare_allocator_free(f.allocator, c, NULL), GPUSHARE_OK);
  }
  /* A capture: what it allocates comes from its pool; what it frees and was there before is freed afterwards. */
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, stream, &a), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1000, 0, stream, &d), GPUSHARE_OK);
  filtered = stream;
  CHECK_STATUS(gpushare_allocator_begin_pool(f.allocator, 0, 9, is_filtered, &filtered, NULL), GPUSHARE_OK);
  CHECK(api.begin_capture(stream, 0) == 0);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1 * MIB, 0, stream, &b), GPUSHARE_OK);
  CHECK(api.memset_async(b, 5, 1 * MIB, stream) == 0);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, b, stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1 * MIB, 0, stream, &c), GPUSHARE_OK);
  CHECK(c == b);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, a, stream), GPUSHARE_OK);
  CHECK(block_at(f.runtime, a).bytes == 1000); /* not yet */
  CHECK_STATUS(gpushare_allocator_free(f.allocator, d, stream), GPUSHARE_OK);
  CHECK(block_at(f.runtime, a).bytes == 1000); /* tried again, and still not */
  CHECK(api.end_capture(stream, &graph) == 0 && graph != NULL);
  CHECK_STATUS(gpushare_allocator_end_pool(f.allocator, 0, 9), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, a, stream), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, d, stream), GPUSHARE_NOT_FOUND);
  CHECK(api.graph_destroy(graph) == 0);
  CHECK_STATUS(gpushare_allocator_free(f.allocator, c, stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_release_pool(f.allocator, 0, 9), GPUSHARE_OK);
  CHECK(api.stream_synchronize(stream) == 0);
  CHECK_STATUS(gpushare_allocator_forget_stream(f.allocator, stream), GPUSHARE_OK);
  CHECK(api.stream_destroy(stream) == 0);
  close_all(&f);
  CHECK(api.set_current(NULL) == 0 && api.release(0) == 0);
}

/* A thread that outlives many allocators can be bound again and again. */
static void many_bindings(void) {
  for (int i = 0; i < 40; ++i) {
    fixture f = open_all("sim");
    CHECK_STATUS(gpushare_allocator_bind_thread(f.allocator, f.session), GPUSHARE_OK);
    close_all(&f);
  }
}

static void bad_input(void) {
  fixture f = open_all("host");
  fixture foreign = open_all("sim");
  gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
  gpushare_allocator made = NULL;
  gpushare_device_address a = 0;
  uint64_t bytes = 0;
  int unknown = 0;
  params.persistent_kind = GPUSHARE_KIND_EPHEMERAL;
  CHECK_STATUS(gpushare_allocator_create(f.runtime, &params, &made), GPUSHARE_INVALID_ARGUMENT);
  params.persistent_kind = 0;
  CHECK_STATUS(gpushare_allocator_create(f.runtime, &params, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_create(NULL, &params, &made), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_allocator_set_default_session(f.allocator, foreign.session),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_bind_thread(f.allocator, foreign.session), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_bind_thread(f.allocator, NULL), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_adopt_stream(f.allocator, foreign.session, NULL),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_adopt_stream(f.allocator, f.session, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_adopt_stream(f.allocator, NULL, NULL), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_allocator_adopt_stream(f.allocator, f.session, &unknown), GPUSHARE_UNSUPPORTED);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1, 0, &unknown, &a), GPUSHARE_UNSUPPORTED);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1, 0, NULL, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_close_session(f.allocator, foreign.session), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_close_session(f.allocator, NULL), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_allocator_get_base(f.allocator, 4096, &a, &bytes), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_allocator_trim(f.allocator, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_set_default_session(f.allocator, f.session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1, 3, NULL, &a),
               GPUSHARE_INVALID_ARGUMENT); /* alignment */
  CHECK_STATUS(gpushare_allocator_begin_pool(f.allocator, 1, 1, NULL, NULL, NULL), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_alloc(f.allocator, 1, 3, NULL, &a), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_allocator_end_pool(f.allocator, 1, 1), GPUSHARE_OK);
  CHECK_STATUS(gpushare_allocator_release_pool(f.allocator, 1, 1), GPUSHARE_OK);
  close_all(&f);
  close_all(&foreign);
}

int main(int argc, char** argv) {
  static const char* const devices[] = {"host", "sim"};
  char cuda_device[1024];
  for (int i = 0; i < 2; ++i) {
    owners(devices[i]);
    keeping(devices[i]);
    learning(devices[i]);
    limits(devices[i]);
    pools(devices[i]);
    closing(devices[i]);
  }
  bad_input();
  many_bindings();
  endless("host");
  closing_spilled();
  if (argc > 1) {
    snprintf(cuda_device, sizeof cuda_device, "cuda?driver=%s", argv[1]);
    owners(cuda_device);
    keeping(cuda_device);
    learning(cuda_device);
    pools(cuda_device);
    closing(cuda_device);
    native_streams(cuda_device, argv[1]);
  }
  return capi_result();
}
