// Random C calls, legal and illegal, from 3 to 6 threads on the same handles, over host and sim in both layouts: every call returns,
// none says INTERNAL, and when all is closed the runtime has no bytes and closes. A watchdog names the call that does not return.
//
// GPUSHARE_TEST_CALLS=n makes n calls (scripts/soak calls: ten million); GPUSHARE_TEST_SEED=n repeats a run's decisions. The order in which
// threads meet is not repeated. GPUSHARE_TEST_RUNTIME=n lives the life of the run's n-th runtime (from 0) over and over.
// SPDX-License-Identifier: Apache-2.0
#include <gpushare/allocator.h>
#include <gpushare/bulk.h>
#include <gpushare/gpushare.h>
#include <gpushare/loader.h>
#include <gpushare/range.h>
#include <gpushare/serving.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sizes.hpp"

using gpushare::test::kMiB;

namespace {

using Clock = std::chrono::steady_clock;
// A call that lasts so long may wait for memory, which other threads that wait as well do not give: sessions without memory are
// cancelled, later all.
constexpr std::chrono::milliseconds kRelief{30}, kGreatRelief{1000};
constexpr auto kStuck = std::chrono::seconds(240);  // a call that lasts as long will not return

// Handles of one type that threads share, stale ones included.
template <class T>
class Pool {
 public:
  void add(T handle) {
    const std::lock_guard lock(mutex_);
    if (handles_.size() < 64)
      handles_.push_back(handle);
    else
      handles_[next_++ % 64] = handle;
    all_.push_back(handle);
  }
  T pick(std::mt19937_64& random) {
    const uint64_t which = random() % 64;
    if (which == 0) return nullptr;
    if (which == 1) return reinterpret_cast<T>(static_cast<uintptr_t>(random()));
    const std::lock_guard lock(mutex_);
    return handles_.empty() ? nullptr : handles_[random() % handles_.size()];
  }
  std::vector<T> all() {
    const std::lock_guard lock(mutex_);
    return all_;
  }

 private:
  std::mutex mutex_;
  std::vector<T> handles_, all_;
  size_t next_ = 0;
};

class Addresses {
 public:
  void add(uint64_t address) {
    const std::lock_guard lock(mutex_);
    if (addresses_.size() < 256)
      addresses_.push_back(address);
    else
      addresses_[next_++ % 256] = address;
  }
  uint64_t pick(std::mt19937_64& random) {
    const std::lock_guard lock(mutex_);
    return addresses_.empty() || random() % 32 == 0 ? random() : addresses_[random() % addresses_.size()];
  }

 private:
  std::mutex mutex_;
  std::vector<uint64_t> addresses_;
  size_t next_ = 0;
};

// What a thread is doing, for the watchdog.
struct Doing {
  std::atomic<const char*> name{nullptr};
  std::atomic<int64_t> since_ns{0};
};

struct World {
  gpushare_runtime runtime = nullptr;
  Pool<gpushare_session> sessions;
  Pool<gpushare_iteration> iterations;
  Pool<gpushare_stream> streams;
  Pool<gpushare_ticket> tickets;
  Pool<gpushare_range> ranges;
  Pool<gpushare_allocator> allocators;
  Pool<gpushare_request_queue> queues;
  Pool<gpushare_step_queue> step_queues;
  Pool<gpushare_loader> loaders;
  Pool<gpushare_image> images;
  Pool<gpushare_model> models;
  Pool<gpushare_switcher> switchers;
  Addresses addresses;
  std::atomic<int64_t> unanswered{0}, unreleased{0};
  std::atomic<uint32_t> queues_made{0}, step_queues_made{0}, ranges_made{0}, loaders_made{0};
};

class Caller {
 public:
  Caller(World& world, uint64_t seed, Doing& doing) : world_(world), random_(seed), doing_(doing) {}

  void call() {
    const Action& action = kActions[random_() % kActions.size()];
    if (action.waits) end_iterations();  // or threads would wait for each other
    doing_.since_ns = Clock::now().time_since_epoch().count();
    doing_.name = action.name;
    const int32_t status = (this->*action.run)();
    doing_.name = nullptr;
    if (status == GPUSHARE_INTERNAL || std::strcmp(gpushare_status_name(status), "UNRECOGNIZED") == 0) {
      std::fprintf(stderr, "%s: %s: %s\n", action.name, gpushare_status_name(status),
                   gpushare_last_error_message());
      failed = true;
    }
  }
  void end_iterations() {
    for (gpushare_iteration iteration : mine_) {
      doing_.since_ns = Clock::now().time_since_epoch().count();
      doing_.name = "gpushare_iteration_end";
      (void)gpushare_iteration_end(iteration);
      doing_.name = nullptr;
    }
    mine_.clear();
  }
  static std::atomic<bool> failed;

 private:
  struct Action {
    const char* name;
    int32_t (Caller::*run)();
    bool waits;  // for iterations of other threads
  };
  static const std::vector<Action> kActions;

  uint64_t below(uint64_t n) { return random_() % n; }
  uint64_t bytes() {
    if (below(64) == 0) return below(2) == 0 ? UINT64_MAX - below(9) : below(1ull << 50);
    return below(8) == 0 ? below(8 * kMiB) : below(1u << 18);
  }
  template <class T>
  uint32_t size_of_struct() {
    return below(32) == 0 ? static_cast<uint32_t>(below(5000)) : static_cast<uint32_t>(sizeof(T));
  }

  int32_t session_open() {
    gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
    params.persistent_bytes = below(4) == 0 ? bytes() : below(4 * kMiB);
    params.ephemeral_bytes = below(4) == 0 ? 0 : below(4 * kMiB);
    params.flags = static_cast<uint32_t>(below(below(16) == 0 ? 64 : 8));
    params.priority = static_cast<int32_t>(below(9)) - 4;
    params.weight = below(16) == 0 ? -1.0 : static_cast<double>(below(4));
    params.session_class = static_cast<uint32_t>(below(32) == 0 ? 7 : below(4) == 0);
    params.quota_bytes = below(8) == 0 ? bytes() : 0;
    params.struct_size = size_of_struct<gpushare_session_params>();
    if (params.struct_size > sizeof params) params.struct_size = sizeof params;
    gpushare_session session = nullptr;
    const int32_t status = gpushare_session_open(below(64) == 0 ? nullptr : world_.runtime, &params,
                                                 below(64) == 0 ? nullptr : &session);
    if (status == GPUSHARE_OK) world_.sessions.add(session);
    return status;
  }
  int32_t session_close() { return gpushare_session_close(world_.sessions.pick(random_)); }
  int32_t session_cancel() { return gpushare_session_cancel(world_.sessions.pick(random_)); }
  int32_t session_wait() {
    return gpushare_session_wait_admitted(world_.sessions.pick(random_), below(100'000));
  }
  int32_t session_alloc() {
    gpushare_device_address address = 0;
    const int32_t status =
        gpushare_session_alloc(world_.sessions.pick(random_), static_cast<uint32_t>(below(4)), bytes(),
                               below(4) == 0 ? 1ull << below(24) : 0, &address);
    if (status == GPUSHARE_OK) world_.addresses.add(address);
    return status;
  }
  int32_t session_set() {
    const gpushare_session session = world_.sessions.pick(random_);
    switch (below(4)) {
      case 0:
        return gpushare_session_set_priority(session, static_cast<int32_t>(below(9)) - 4);
      case 1:
        return gpushare_session_set_weight(session, static_cast<double>(below(5)));
      case 2:
        return gpushare_session_set_remaining(session, below(1'000'000));
      default:
        return gpushare_session_set_quota(session, below(3) == 0 ? bytes() : 0);
    }
  }
  int32_t session_info() {
    gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
    info.struct_size = size_of_struct<gpushare_session_info>();
    if (info.struct_size > sizeof info) info.struct_size = sizeof info;
    char text[100];
    (void)gpushare_session_explain_wait(world_.sessions.pick(random_), text, below(sizeof text));
    return gpushare_session_get_info(world_.sessions.pick(random_), &info);
  }

  int32_t iteration_begin() {
    gpushare_iteration iteration = nullptr;
    const int32_t status =
        gpushare_iteration_begin(world_.sessions.pick(random_), below(200'000), &iteration);
    if (status != GPUSHARE_OK) return status;
    mine_.push_back(iteration);
    if (below(4) == 0) world_.iterations.add(iteration);  // others use it, and end it
    return status;
  }
  gpushare_iteration iteration() {
    return mine_.empty() || below(8) == 0 ? world_.iterations.pick(random_) : mine_[below(mine_.size())];
  }
  int32_t iteration_end() {
    return below(8) == 0
               ? gpushare_iteration_fail(iteration(), static_cast<int32_t>(below(500)), "by the test")
               : gpushare_iteration_end(iteration());
  }
  int32_t iteration_alloc() {
    gpushare_device_address address = 0;
    const int32_t status = gpushare_iteration_alloc(iteration(), bytes(), below(3) * 256, &address);
    if (status == GPUSHARE_OK) world_.addresses.add(address);
    if (status == GPUSHARE_OK && below(8) == 0) (void)gpushare_iteration_keep(iteration(), address);
    return status;
  }
  int32_t iteration_alloc_many() {
    const uint64_t sizes[4] = {bytes(), bytes(), bytes(), bytes()};
    gpushare_device_address several[4] = {};
    const int32_t status = gpushare_iteration_alloc_many(iteration(), below(5), sizes, 0, several);
    if (status == GPUSHARE_OK)
      for (const uint64_t address : several) world_.addresses.add(address);
    return status;
  }
  int32_t submit() {
    gpushare_ticket ticket = nullptr;
    ++world_.unreleased;
    const int32_t status = gpushare_session_submit(
        world_.sessions.pick(random_),
        [](void*, gpushare_iteration of) -> int32_t {
          gpushare_device_address address = 0;
          return gpushare_iteration_alloc(of, 1 << 16, 0, &address) == GPUSHARE_OK ? GPUSHARE_OK
                                                                                   : GPUSHARE_CALLBACK_FAILED;
        },
        &world_.unreleased, [](void* count) { --*static_cast<std::atomic<int64_t>*>(count); },
        below(2) == 0 ? &ticket : nullptr);
    if (status != GPUSHARE_OK) --world_.unreleased;
    if (ticket != nullptr) world_.tickets.add(ticket);
    return status;
  }
  int32_t ticket() {
    return below(2) == 0 ? gpushare_ticket_wait(world_.tickets.pick(random_), below(100'000))
                         : gpushare_ticket_release(world_.tickets.pick(random_));
  }

  int32_t memory() {
    const uint64_t address = world_.addresses.pick(random_);
    switch (below(4)) {
      case 0: {
        gpushare_block_info info = GPUSHARE_BLOCK_INFO_INIT;
        return gpushare_memory_get_info(world_.runtime, address, &info);
      }
      case 1:
        return gpushare_memory_record_use(world_.runtime, address, world_.streams.pick(random_));
      default:
        return gpushare_memory_free(world_.runtime, address);
    }
  }
  int32_t stream() {
    gpushare_stream stream = nullptr;
    switch (below(6)) {
      case 0: {
        const int32_t status =
            below(2) == 0 ? gpushare_stream_create(world_.runtime, static_cast<int32_t>(below(3)), &stream)
                          : gpushare_iteration_get_stream(iteration(), &stream);
        if (status == GPUSHARE_OK) world_.streams.add(stream);
        return status;
      }
      case 1:
        return gpushare_stream_synchronize(world_.streams.pick(random_));
      default:
        return gpushare_stream_launch_host(
            world_.streams.pick(random_), [](void*) {}, nullptr);
    }
  }
  int32_t stream_release() { return gpushare_stream_release(world_.streams.pick(random_)); }

  int32_t range() {
    const gpushare_range range = world_.ranges.pick(random_);
    const uint64_t part = below(8) * kMiB;
    switch (below(5)) {
      case 0: {
        if (world_.ranges_made >= 16) return GPUSHARE_OK;
        gpushare_range_params params = GPUSHARE_RANGE_PARAMS_INIT;
        params.reserved_bytes = below(8) == 0 ? bytes() : 16 * kMiB;
        params.answer_ns = 1000;
        if (below(2) == 0) params.give_back = [](void*, uint64_t, uint64_t) -> uint64_t { return 0; };
        gpushare_range opened = nullptr;
        const int32_t status = gpushare_range_open(world_.sessions.pick(random_), &params, &opened);
        if (status == GPUSHARE_OK) world_.ranges.add(opened), ++world_.ranges_made;
        return status;
      }
      case 1:
        return gpushare_range_decommit(range, part, 2 * kMiB);
      case 2: {
        gpushare_range_info info = GPUSHARE_RANGE_INFO_INIT;
        return gpushare_range_get_info(range, &info);
      }
      default:
        return gpushare_range_commit(range, part, 2 * kMiB, below(100'000));
    }
  }
  int32_t range_close() {
    return below(4) == 0 ? gpushare_range_close(world_.ranges.pick(random_)) : GPUSHARE_OK;
  }

  int32_t allocator() {
    const gpushare_allocator allocator = world_.allocators.pick(random_);
    gpushare_device_address address = 0;
    switch (below(6)) {
      case 0: {
        gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
        gpushare_allocator made = nullptr;
        if (below(8) != 0) return GPUSHARE_OK;
        const int32_t status = gpushare_allocator_create(world_.runtime, &params, &made);
        if (status == GPUSHARE_OK) world_.allocators.add(made);
        return status;
      }
      case 1:
        return gpushare_allocator_set_default_session(allocator, world_.sessions.pick(random_));
      case 2:
        return gpushare_allocator_free(allocator, world_.addresses.pick(random_), nullptr);
      case 3: {
        uint64_t trimmed = 0;
        return gpushare_allocator_trim(allocator, &trimmed);
      }
      default: {
        const int32_t status = gpushare_allocator_alloc(allocator, bytes(), 0, nullptr, &address);
        if (status == GPUSHARE_OK) world_.addresses.add(address);
        return status;
      }
    }
  }
  int32_t allocator_release() {
    return below(8) == 0 ? gpushare_allocator_release(world_.allocators.pick(random_)) : GPUSHARE_OK;
  }

  int32_t queue() {
    const gpushare_request_queue queue = world_.queues.pick(random_);
    switch (below(8)) {
      case 0: {
        if (world_.queues_made++ >= 4) return GPUSHARE_OK;
        gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
        gpushare_request_queue made = nullptr;
        const int32_t status = gpushare_request_queue_create(world_.runtime, &params, &made);
        if (status == GPUSHARE_OK) world_.queues.add(made);
        return status;
      }
      case 1: {
        gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
        uint32_t index = 0;
        return gpushare_request_queue_add_model(
            queue, world_.sessions.pick(random_), &model,
            [](void*, gpushare_iteration, const gpushare_queued_batch*) { return 0; }, nullptr, nullptr,
            &index);
      }
      case 2:
        return gpushare_request_queue_cancel(queue, below(1000));
      case 3: {
        gpushare_request_queue_info info = GPUSHARE_REQUEST_QUEUE_INFO_INIT;
        return gpushare_request_queue_get_info(queue, &info);
      }
      default: {
        gpushare_request request = GPUSHARE_REQUEST_INIT;
        request.id = below(1000);
        request.model = static_cast<uint32_t>(below(3));
        request.deadline_ns = gpushare_now_ns() + below(20'000'000);
        ++world_.unanswered;
        const int32_t status = gpushare_request_queue_submit(
            queue, &request,
            [](void* count, const gpushare_request_outcome*) {
              --*static_cast<std::atomic<int64_t>*>(count);
            },
            &world_.unanswered);
        if (status != GPUSHARE_OK) --world_.unanswered;
        return status;
      }
    }
  }
  int32_t steps() {
    const gpushare_step_queue queue = world_.step_queues.pick(random_);
    switch (below(8)) {
      case 0: {
        if (world_.step_queues_made++ >= 4) return GPUSHARE_OK;
        gpushare_step_queue_params params = GPUSHARE_STEP_QUEUE_PARAMS_INIT;
        params.policy = below(2) == 0 ? "fifo" : nullptr;
        params.memory_bytes = 1000;
        gpushare_step_queue made = nullptr;
        ++world_.unreleased;
        const int32_t status = gpushare_step_queue_create(
            world_.sessions.pick(random_), &params, step, &world_.unreleased,
            [](void* count) { --*static_cast<std::atomic<int64_t>*>(count); }, &made);
        if (status == GPUSHARE_OK)
          world_.step_queues.add(made);
        else
          --world_.unreleased;
        return status;
      }
      case 1:
        return gpushare_step_queue_cancel(queue, below(1000));
      case 2:
        return gpushare_step_queue_set_memory(queue, below(1000));
      case 3: {
        gpushare_step_queue_info info = GPUSHARE_STEP_QUEUE_INFO_INIT;
        return gpushare_step_queue_get_info(queue, &info);
      }
      default: {
        gpushare_step_request request = GPUSHARE_STEP_REQUEST_INIT;
        request.id = below(1000);
        request.prompt_tokens = 1 + below(100);
        request.start_bytes = below(300);
        request.step_bytes = below(30);
        if (below(2) == 0) request.first_deadline_ns = gpushare_now_ns() + below(20'000'000);
        ++world_.unanswered;
        const int32_t status = gpushare_step_queue_submit(
            queue, &request,
            [](void* count, const gpushare_step_answer* news) {
              if (news->ended != 0) --*static_cast<std::atomic<int64_t>*>(count);
            },
            &world_.unanswered);
        if (status != GPUSHARE_OK) --world_.unanswered;
        return status;
      }
    }
  }
  // Some members grow, fail or end; some steps fail.
  static int32_t step(void*, gpushare_iteration, const gpushare_step* step) {
    for (uint64_t i = 0; i < step->count; ++i) {
      const gpushare_step_member& of = step->members[i];
      step->done[i] = of.tokens >= of.id % 7;
      if (of.id % 50 == 1) step->bytes[i] = 400;
      if (of.id % 50 == 2) step->statuses[i] = GPUSHARE_IO_ERROR;
    }
    return step->count > 0 && step->members[0].id % 50 == 3 ? GPUSHARE_MALFORMED_INPUT : GPUSHARE_OK;
  }
  int32_t load() {
    switch (below(6)) {
      case 0: {
        if (world_.loaders_made++ >= 4) return GPUSHARE_OK;
        gpushare_loader_params params = GPUSHARE_LOADER_PARAMS_INIT;
        params.chunk_bytes = 1 << 16;
        params.limit_bytes = 4 * kMiB;
        gpushare_loader loader = nullptr;
        const int32_t status = gpushare_loader_create(world_.runtime, &params, &loader);
        if (status == GPUSHARE_OK) world_.loaders.add(loader);
        return status;
      }
      case 1: {
        static const std::array<char, 1 << 16> data{};
        const gpushare_layer_source layers[2] = {{"a", data.data(), 1 + below(1 << 16)},
                                                 {nullptr, data.data(), 4096}};
        gpushare_image image = nullptr;
        const int32_t status = gpushare_image_create(world_.loaders.pick(random_), "i", 2, layers, &image);
        if (status == GPUSHARE_OK) world_.images.add(image);
        return status;
      }
      case 2: {
        gpushare_model model = nullptr;
        const int32_t status = gpushare_session_load(world_.sessions.pick(random_),
                                                     world_.images.pick(random_), nullptr, &model);
        if (status == GPUSHARE_OK) world_.models.add(model);
        return status;
      }
      case 3:
        return gpushare_model_wait(world_.models.pick(random_), 1, below(100'000));
      case 4:
        return gpushare_model_make_usable(world_.models.pick(random_), 0, 1, world_.streams.pick(random_));
      default:
        return below(2) == 0 ? gpushare_model_release(world_.models.pick(random_))
                             : gpushare_image_release(world_.images.pick(random_));
    }
  }
  int32_t runtime() {
    gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
    switch (below(6)) {
      case 0:
        return gpushare_runtime_set_policy(world_.runtime, kPolicies[below(6)], nullptr);
      case 1:
        return gpushare_runtime_synchronize(world_.runtime, below(50'000));
      case 2: {
        const int32_t status = gpushare_runtime_set_capacity(world_.runtime, 12 * kMiB + below(12 * kMiB));
        (void)gpushare_runtime_set_capacity(world_.runtime, 0);
        return status;
      }
      default:
        return gpushare_runtime_get_info(world_.runtime, &info);
    }
  }

  static constexpr const char* kPolicies[] = {"fifo", "srtf", "pack", "fair", "priority", "none"};
  World& world_;
  std::mt19937_64 random_;
  Doing& doing_;
  std::vector<gpushare_iteration> mine_;
};

std::atomic<bool> Caller::failed{false};
const std::vector<Caller::Action> Caller::kActions = {
    {"gpushare_session_open", &Caller::session_open, false},
    {"gpushare_session_close", &Caller::session_close, true},
    {"gpushare_session_cancel", &Caller::session_cancel, false},
    {"gpushare_session_wait_admitted", &Caller::session_wait, false},
    {"gpushare_session_alloc", &Caller::session_alloc, true},
    {"gpushare_session_alloc", &Caller::session_alloc, true},
    {"gpushare_session_set_...", &Caller::session_set, false},
    {"gpushare_session_get_info", &Caller::session_info, false},
    {"gpushare_iteration_begin", &Caller::iteration_begin, false},
    {"gpushare_iteration_begin", &Caller::iteration_begin, false},
    {"gpushare_iteration_begin", &Caller::iteration_begin, false},
    {"gpushare_iteration_end", &Caller::iteration_end, false},
    {"gpushare_iteration_end", &Caller::iteration_end, false},
    {"gpushare_iteration_alloc", &Caller::iteration_alloc, false},
    {"gpushare_iteration_alloc", &Caller::iteration_alloc, false},
    {"gpushare_iteration_alloc_many", &Caller::iteration_alloc_many, false},
    {"gpushare_session_submit", &Caller::submit, false},
    {"gpushare_ticket_...", &Caller::ticket, false},
    {"gpushare_memory_...", &Caller::memory, false},
    {"gpushare_memory_...", &Caller::memory, false},
    {"gpushare_stream_...", &Caller::stream, false},
    {"gpushare_stream_release", &Caller::stream_release, true},
    {"gpushare_range_...", &Caller::range, true},
    {"gpushare_range_close", &Caller::range_close, true},
    {"gpushare_allocator_...", &Caller::allocator, true},
    {"gpushare_allocator_release", &Caller::allocator_release, true},
    {"gpushare_request_queue_...", &Caller::queue, false},
    {"gpushare_request_queue_...", &Caller::queue, false},
    {"gpushare_step_queue_...", &Caller::steps, false},
    {"gpushare_step_queue_...", &Caller::steps, false},
    {"gpushare_loader_...", &Caller::load, true},
    {"gpushare_runtime_...", &Caller::runtime, false},
};

// Cancels sessions that calls wait for, and ends the program when a call is stuck, with the call's name.
class Watchdog {
 public:
  Watchdog(World& world, std::vector<Doing>& doings, uint64_t seed)
      : world_(world), doings_(doings), seed_(seed), thread_([this] { watch(); }) {}
  ~Watchdog() {
    stop_ = true;
    thread_.join();
  }

 private:
  void watch() {
    while (!stop_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      bool relief = false, great = false;
      for (const Doing& doing : doings_) {
        const char* const name = doing.name;
        const auto lasts = Clock::now() - Clock::time_point(Clock::duration(doing.since_ns.load()));
        if (name == nullptr || lasts < kRelief) continue;
        relief = true;
        great = great || lasts > kGreatRelief;
        if (lasts < kStuck) continue;
        std::fprintf(stderr, "stuck for %lld s: %s, seed %llu\n",
                     static_cast<long long>(std::chrono::duration_cast<std::chrono::seconds>(lasts).count()),
                     name, static_cast<unsigned long long>(seed_));
        std::abort();
      }
      if (!relief) continue;
      for (gpushare_session session : world_.sessions.all()) {
        gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
        const bool waits =
            gpushare_session_get_info(session, &info) == GPUSHARE_OK &&
            (info.state == GPUSHARE_SESSION_QUEUED || info.state == GPUSHARE_SESSION_PAGED_OUT);
        if (waits || great) (void)gpushare_session_cancel(session);
      }
    }
  }

  World& world_;
  std::vector<Doing>& doings_;
  const uint64_t seed_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

template <class T, class F>
void close_all(Pool<T>& pool, Doing& doing, const char* name, F close) {
  for (T handle : pool.all()) {
    doing.since_ns = Clock::now().time_since_epoch().count();
    doing.name = name;
    (void)close(handle);
    doing.name = nullptr;
  }
}

// A runtime's life: so many calls by several threads, then all is closed.
void live(const char* device, uint32_t layout, uint64_t calls, uint64_t seed) {
  std::mt19937_64 random(seed);
  World world;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  params.device = device;
  params.layout = layout;
  params.capacity_bytes = 24 * kMiB;
  params.max_lanes = static_cast<uint32_t>(random() % 4);
  REQUIRE(gpushare_runtime_open(&params, &world.runtime) == GPUSHARE_OK);
  const size_t count = 3 + random() % 4;
  std::vector<Doing> doings(count + 1);
  {
    const Watchdog watchdog(world, doings, seed);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < count; ++i)
      threads.emplace_back([&, i, of = random()] {
        Caller caller(world, of, doings[i]);
        for (uint64_t call = 0; call < calls / count; ++call) caller.call();
        caller.end_iterations();
      });
    for (std::thread& thread : threads) thread.join();
    Doing& doing = doings.back();
    close_all(world.iterations, doing, "gpushare_iteration_end", gpushare_iteration_end);
    close_all(world.allocators, doing, "gpushare_allocator_release", gpushare_allocator_release);
    close_all(world.ranges, doing, "gpushare_range_close", gpushare_range_close);
    close_all(world.sessions, doing, "gpushare_session_close", gpushare_session_close);
    close_all(world.queues, doing, "gpushare_request_queue_close", gpushare_request_queue_close);
    close_all(world.step_queues, doing, "gpushare_step_queue_close", gpushare_step_queue_close);
    close_all(world.models, doing, "gpushare_model_release", gpushare_model_release);
    close_all(world.images, doing, "gpushare_image_release", gpushare_image_release);
    close_all(world.loaders, doing, "gpushare_loader_release", gpushare_loader_release);
    close_all(world.tickets, doing, "gpushare_ticket_release", gpushare_ticket_release);
    close_all(world.streams, doing, "gpushare_stream_release", gpushare_stream_release);
  }
  CHECK(world.unanswered == 0);
  CHECK(world.unreleased == 0);
  gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
  REQUIRE(gpushare_runtime_get_info(world.runtime, &info) == GPUSHARE_OK);
  CHECK(info.promised_bytes == 0);
  CHECK(info.persistent_bytes == 0);
  CHECK(info.ephemeral_bytes == 0);
  CHECK(info.sessions_resident + info.sessions_queued + info.sessions_paged_out == 0);
  const int32_t closed = gpushare_runtime_close(world.runtime);
  INFO(gpushare_last_error_message());
  CHECK(closed == GPUSHARE_OK);
}

}  // namespace

TEST_CASE("random calls by several threads: all return, and the books are right at the end") {
  const char* const asked = std::getenv("GPUSHARE_TEST_CALLS");
  const uint64_t calls = asked != nullptr ? std::strtoull(asked, nullptr, 10) : 10'000;
  const uint64_t seed = gpushare::test::seed();
  gpushare_log_set([](void*, int32_t, const char*) {}, nullptr, GPUSHARE_LOG_ERROR);
  const struct {
    const char* device;
    uint32_t layout;
  } setups[] = {{"host?total_bytes=67108864", GPUSHARE_LAYOUT_VIRTUAL},
                {"sim?total_bytes=67108864", GPUSHARE_LAYOUT_VIRTUAL},
                {"host?total_bytes=67108864", GPUSHARE_LAYOUT_CONTIGUOUS},
                {"sim?total_bytes=67108864", GPUSHARE_LAYOUT_CONTIGUOUS}};
  constexpr uint64_t kCallsOfRuntime = 2500;
  const char* const only = std::getenv("GPUSHARE_TEST_RUNTIME");
  uint64_t runtimes = 0;
  for (uint64_t made = 0; made < calls; made += kCallsOfRuntime, ++runtimes) {
    const uint64_t runtime = only != nullptr ? std::strtoull(only, nullptr, 10) : runtimes;
    INFO("seed " << seed << ", runtime " << runtime);
    const auto& setup = setups[runtime % std::size(setups)];
    live(setup.device, setup.layout, kCallsOfRuntime, seed * 1'000'003 + runtime);
    REQUIRE_FALSE(Caller::failed);
    if (runtimes % 400 == 399)
      std::fprintf(stderr, "%llu calls\n", static_cast<unsigned long long>(made + kCallsOfRuntime));
  }
}
