// c_api_calls.hpp: one random call each on the nouns around sessions: queues, streams, images, the process; and
// runtimes that are used again.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sanitizer/lsan_interface.h>

#include <array>
#include <atomic>
#include <utility>

#include "fuzz/c_api_input.hpp"
#include "gpushare/gate.h"

namespace gpushare::fuzz {

struct Queues {
  std::vector<gpushare_request_queue> queues;
  std::atomic<int> unanswered{0};
};

inline int32_t batch_body(void* user_data, gpushare_iteration iteration, const gpushare_queued_batch* batch) {
  gpushare_device_address address = 0;
  (void)gpushare_iteration_alloc(iteration, 64 * batch->count, 0, &address);
  batch->execution_ns[0] = 1000;
  return user_data != nullptr ? GPUSHARE_DEVICE_OUT_OF_MEMORY : GPUSHARE_OK;
}

inline void answer_body(void* user_data, const gpushare_request_outcome*) {
  --*static_cast<std::atomic<int>*>(user_data);
}

// One call on a request queue. A queue starts threads, so a program gets two.
inline int32_t queue_call(Queues& handles, gpushare_runtime runtime, gpushare_session session, Input& input) {
  const gpushare_request_queue queue = choose(handles.queues, input);
  switch (input.byte() % 8) {
    case 0: {
      if (handles.queues.size() == 2) return GPUSHARE_OK;
      const gpushare_batcher_params params = batcher_params(input);
      gpushare_request_queue created = nullptr;
      const int32_t status = gpushare_request_queue_create(runtime, &params, &created);
      if (status == GPUSHARE_OK) handles.queues.push_back(created);
      return status;
    }
    case 1: {
      gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
      const uint32_t sizes[2] = {input.byte(), input.byte()};
      model.batch_size_count = input.byte() % 3;
      model.batch_sizes = sizes;
      model.c0_ns = input.size() % 1000;
      uint32_t index = 0;
      static int fails = 0;
      return gpushare_request_queue_add_model(queue, session, &model, batch_body,
                                              input.byte() % 4 == 0 ? &fails : nullptr, nullptr, &index);
    }
    case 2:
    case 3: {
      gpushare_request request = GPUSHARE_REQUEST_INIT;
      const gpushare_cost_step step = {input.size(), static_cast<double>(input.byte())};
      request.id = input.byte();
      request.model = input.byte() % 3;
      request.application = input.byte() % 5;
      request.deadline_ns = gpushare_now_ns() + input.size() * 1000;
      request.later_step_count = input.byte() % 2;
      request.later_steps = &step;
      ++handles.unanswered;
      const int32_t status = gpushare_request_queue_submit(queue, &request, answer_body, &handles.unanswered);
      if (status != GPUSHARE_OK) --handles.unanswered;
      return status;
    }
    case 4:
      return gpushare_request_queue_cancel(queue, input.byte());
    case 5:
      if (input.byte() % 3 == 0) {
        const KnownRequest known(input);
        return gpushare_request_queue_observe_request(queue, &known.request, input.size());
      }
      return input.byte() % 2 == 0
                 ? gpushare_request_queue_observe(queue, input.byte() % 3, input.byte() % 5, input.size())
                 : gpushare_request_queue_observe_batch(queue, input.byte() % 3, input.byte(), input.size(),
                                                        input.size());
    case 6: {
      gpushare_request_queue_info info = GPUSHARE_REQUEST_QUEUE_INFO_INIT;
      gpushare_profile profile = GPUSHARE_PROFILE_INIT;
      (void)gpushare_request_queue_get_profile(queue, 0, input.byte() % 5, &profile);
      return gpushare_request_queue_get_info(queue, &info);
    }
    default:  // no close: it would wait for an iteration that this thread has open
      return gpushare_request_queue_drain(queue, 0);
  }
}

struct StepQueues {
  std::vector<gpushare_step_queue> queues;
  std::atomic<int> unanswered{0};
};

inline int32_t step_body(void*, gpushare_iteration iteration, const gpushare_step* step) {
  gpushare_device_address address = 0;
  (void)gpushare_iteration_alloc(iteration, 64 * (1 + step->count), 0, &address);
  int32_t status = GPUSHARE_OK;
  for (uint64_t i = 0; i < step->count; ++i) {
    const gpushare_step_member& each = step->members[i];
    step->done[i] = each.tokens >= each.id % 8;
    if (each.id % 16 == 3) step->statuses[i] = GPUSHARE_MALFORMED_INPUT;
    if (each.id % 16 == 5) step->bytes[i] = each.id * each.tokens;
    if (each.id % 64 == 7) status = GPUSHARE_IO_ERROR;
  }
  return status;
}

inline void step_answer_body(void* user_data, const gpushare_step_answer* answer) {
  if (answer->ended != 0) --*static_cast<std::atomic<int>*>(user_data);
}

// One call on a step queue; a program gets two.
inline int32_t step_queue_call(StepQueues& handles, gpushare_session session, Input& input) {
  const gpushare_step_queue queue = choose(handles.queues, input);
  switch (input.byte() % 7) {
    case 0: {
      if (handles.queues.size() == 2) return GPUSHARE_OK;
      gpushare_step_queue_params params = GPUSHARE_STEP_QUEUE_PARAMS_INIT;
      params.policy = input.byte() % 2 == 0 ? nullptr : "fifo";
      params.max_members = input.byte();
      params.max_pending = input.byte();
      params.max_prefill_tokens = input.byte();
      params.memory_bytes = input.byte() * 16;
      params.prefill_ns = input.byte() * 1000.0 - 1000;
      gpushare_step_queue created = nullptr;
      const int32_t status =
          gpushare_step_queue_create(session, &params, step_body, nullptr, nullptr, &created);
      if (status == GPUSHARE_OK) handles.queues.push_back(created);
      return status;
    }
    case 1:
    case 2: {
      gpushare_step_request request = GPUSHARE_STEP_REQUEST_INIT;
      request.id = input.byte();
      request.prompt_tokens = input.byte();
      request.expected_tokens = input.byte() % 9;
      request.start_bytes = input.byte();
      request.step_bytes = input.byte() % 32;
      if (input.byte() % 2 == 0) request.first_deadline_ns = gpushare_now_ns() + input.size() * 1000;
      if (input.byte() % 2 == 0) request.token_ns = input.size();
      ++handles.unanswered;
      const int32_t status =
          gpushare_step_queue_submit(queue, &request, step_answer_body, &handles.unanswered);
      if (status != GPUSHARE_OK) --handles.unanswered;
      return status;
    }
    case 3:
      return gpushare_step_queue_cancel(queue, input.byte());
    case 4:
      return gpushare_step_queue_set_memory(queue, input.byte() * 16);
    case 5: {
      gpushare_step_queue_info info = GPUSHARE_STEP_QUEUE_INFO_INIT;
      return gpushare_step_queue_get_info(queue, &info);
    }
    default:  // no close: it would wait for an iteration that this thread has open
      return gpushare_step_queue_drain(queue, 0);
  }
}

// Calls that describe the process, or write files, or are refused.
inline int32_t process_call(gpushare_runtime runtime, Input& input) {
  static const char* const kPaths[] = {"/dev/null", "/nonexistent/file", "", nullptr};
  const char* path = kPaths[input.byte() % 4];
  switch (input.byte() % 8) {
    case 0: {
      uint32_t count = 0;
      require(gpushare_device_count(&count) == GPUSHARE_OK && count >= 2, "host and sim are there");
      gpushare_device_info info = GPUSHARE_DEVICE_INFO_INIT;
      return gpushare_device_get_info(input.byte() % 8, &info);
    }
    case 1: {
      const uint32_t index = input.byte() % 8;
      require((gpushare_policy_name(index) != nullptr) == (index < gpushare_policy_count()),
              "policies have names");
      return GPUSHARE_OK;
    }
    case 2: {
      gpushare_backend_ops ops{};
      ops.struct_size = static_cast<uint32_t>(input.size());
      ops.abi_version = static_cast<uint32_t>(input.size());
      ops.name = "fuzz";
      const int32_t status = gpushare_backend_register(input.byte() % 2 == 0 ? &ops : nullptr);
      require(status != GPUSHARE_OK, "a table without functions is refused");
      return status;
    }
    case 3:
      return gpushare_backend_load(path);
    case 4:
      return gpushare_runtime_write_timeline(runtime, path);
    case 5:
      return gpushare_runtime_write_snapshot(runtime, path, input.byte() % 3);
    case 6: {
      char text[256];
      uint64_t size = 0;
      const uint64_t capacity = input.byte() % 2 == 0 ? 0 : sizeof text;
      const int32_t status =
          gpushare_runtime_write_metrics(runtime, capacity == 0 ? nullptr : text, capacity, &size);
      require(status != GPUSHARE_OK || size <= capacity, "the text fits where it was written");
      return status;
    }
    default:
      return gpushare_runtime_write_allocation_log(runtime, path);
  }
}

// Work on a block is waited for, because the block may be freed next and its use is not recorded.
inline int32_t stream_call(gpushare_stream stream, uint64_t address, Input& input) {
  static char host[4096];
  int32_t status = GPUSHARE_OK;
  switch (input.byte() % 6) {
    case 0:
      status = gpushare_stream_fill(stream, address, input.byte(), input.size());
      break;
    case 1:
      status = gpushare_stream_copy(stream, address, reinterpret_cast<uintptr_t>(host), input.byte() * 16u,
                                    GPUSHARE_COPY_HOST_TO_DEVICE);
      break;
    case 2:
      status = gpushare_stream_copy(stream, reinterpret_cast<uintptr_t>(host), address, input.byte() * 16u,
                                    GPUSHARE_COPY_DEVICE_TO_HOST);
      break;
    case 3: {
      gpushare_backend_work work{};
      work.struct_size = sizeof work;
      work.work_class = input.byte() % 3;
      work.duration_ns = input.size() % 1'000'000;
      work.demand = static_cast<float>(input.number());
      return gpushare_stream_work(stream, &work);
    }
    default: {
      void* native = nullptr;
      (void)gpushare_stream_get_native(stream, &native);
      return gpushare_stream_launch_host(
          stream, [](void*) {}, nullptr);
    }
    case 5:
      break;
  }
  const int32_t finished = gpushare_stream_synchronize(stream);
  return status != GPUSHARE_OK ? status : finished;
}

// A gate, and calls on it that do not wait.
inline int32_t gate_call(gpushare_runtime runtime, gpushare_session session, gpushare_stream stream,
                         Input& input) {
  gpushare_gate gate = nullptr;
  const uint32_t* flag = nullptr;
  (void)gpushare_runtime_set_target_slowdown(runtime, input.number());
  (void)gpushare_session_set_target_slowdown(session, input.number());
  const int32_t status = gpushare_gate_open(session, &gate);
  if (status != GPUSHARE_OK) return status;
  require(gpushare_gate_get_flag(gate, &flag) == GPUSHARE_OK && *flag <= 1, "a gate has a flag");
  const uint64_t ns = input.size();
  const int32_t entered = gpushare_gate_enter(gate, input.byte() % 2 == 0 ? stream : nullptr, ns, 0);
  if (input.byte() % 2 == 0) (void)gpushare_gate_done(gate, ns);
  gpushare_gate_info info = GPUSHARE_GATE_INFO_INIT;
  require(gpushare_gate_get_info(gate, &info) == GPUSHARE_OK && info.share >= 0 && info.share <= 1,
          "a gate's share");
  require(gpushare_gate_release(gate) == GPUSHARE_OK, "a gate is released");
  return entered;
}

// One call on an allocator. Blocks that come from it go to `addresses`, whose others it may free as well.
inline int32_t allocator_call(std::vector<gpushare_allocator>& allocators, gpushare_runtime runtime,
                              gpushare_session session, gpushare_stream stream,
                              std::vector<uint64_t>& addresses, gpushare_iteration iteration, bool may_wait,
                              Input& input) {
  const uint64_t address = addresses[input.byte() % addresses.size()];
  const gpushare_allocator allocator = choose(allocators, input);
  void* native = GPUSHARE_NO_NATIVE_STREAM;
  if (const uint8_t which = input.byte() % 4; which == 0)
    (void)gpushare_stream_get_native(stream, &native);
  else if (which == 1)
    native = reinterpret_cast<void*>(static_cast<uintptr_t>(input.byte()));
  const uint64_t pool = input.byte() % 3;
  switch (input.byte() % 20) {
    case 0: {
      if (allocators.size() == 4) return GPUSHARE_OK;
      gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
      params.persistent_kind = input.byte() % 3;
      gpushare_allocator created = nullptr;
      const int32_t status = gpushare_allocator_create(runtime, &params, &created);
      if (status == GPUSHARE_OK) allocators.push_back(created);
      return status;
    }
    case 1:
      return input.byte() % 8 == 0 ? gpushare_allocator_release(allocator) : GPUSHARE_OK;
    case 2:
      return gpushare_allocator_set_default_session(allocator, input.byte() % 2 == 0 ? session : nullptr);
    case 3:
      return gpushare_allocator_adopt_stream(allocator, session, native);
    case 4:
      return gpushare_allocator_forget_stream(allocator, native);
    case 5:
      return gpushare_allocator_bind_thread(allocator, input.byte() % 2 == 0 ? session : nullptr);
    case 6:
      return gpushare_allocator_record_use(allocator, address, native);
    case 7: {
      gpushare_device_address base = 0;
      uint64_t bytes = 0;
      return gpushare_allocator_get_base(allocator, address, &base, &bytes);
    }
    case 8:
      return input.byte() % 2 == 0 ? gpushare_allocator_end_iteration(allocator, iteration)
                                   : gpushare_allocator_keep_blocks(allocator, iteration);
    case 9:
      return input.byte() % 4 == 0 ? gpushare_allocator_close_session(allocator, session) : GPUSHARE_OK;
    case 10: {
      const gpushare_stream_filter_fn odd = [](void*, void* of) {
        return static_cast<int32_t>(reinterpret_cast<uintptr_t>(of) % 2);
      };
      return gpushare_allocator_begin_pool(allocator, 0, pool, input.byte() % 2 == 0 ? odd : nullptr, nullptr,
                                           nullptr);
    }
    case 11:
      return gpushare_allocator_end_pool(allocator, 0, pool);
    case 12:
      return gpushare_allocator_release_pool(allocator, 0, pool);
    case 13: {
      gpushare_allocator_info info = GPUSHARE_ALLOCATOR_INFO_INIT;
      return gpushare_allocator_get_info(allocator, input.byte() % 2 == 0 ? session : nullptr, &info);
    }
    case 14:
      return gpushare_allocator_reset_peaks(allocator, input.byte() % 2 == 0 ? session : nullptr);
    case 15: {
      uint64_t bytes = 0;
      return gpushare_allocator_trim(allocator, &bytes);
    }
    case 16:
      return gpushare_allocator_set_memory_fraction(allocator, input.number());
    case 17:
      return gpushare_allocator_add_observer(
          allocator, [](void*, uint64_t, uint64_t, const char*) {}, nullptr);
    case 18:
      return gpushare_allocator_free(allocator, address, native);
    default: {
      gpushare_device_address made = 0;
      if (may_wait) return GPUSHARE_OK;
      const int32_t status = gpushare_allocator_alloc(
          allocator, input.block_size(), input.byte() % 4 == 0 ? input.size() : 0, native, &made);
      if (status == GPUSHARE_OK) addresses.push_back(made);
      return status;
    }
  }
}

// One call on an elastic range. It may wait for a moment where the session answers at once.
inline int32_t range_call(std::vector<gpushare_range>& ranges, gpushare_session session, bool may_wait,
                          Input& input) {
  const gpushare_range range = choose(ranges, input);
  const uint64_t part = input.byte() % 16 * (uint64_t{2} << 20);
  switch (input.byte() % 5) {
    case 0: {
      if (ranges.size() == 4 || !may_wait) return GPUSHARE_OK;
      static int32_t gives[2] = {0, 1};
      gpushare_range_params params = GPUSHARE_RANGE_PARAMS_INIT;
      params.reserved_bytes = input.byte() % 2 == 0 ? input.size() : uint64_t{64} << 20;
      params.price_ns_per_byte = input.number();
      params.answer_ns = 1000;
      params.user_data = &gives[input.byte() % 2];
      if (input.byte() % 2 == 0)
        params.give_back = [](void* answer, uint64_t bytes, uint64_t) {
          return *static_cast<const int32_t*>(answer) == 0 ? bytes : GPUSHARE_RANGE_NO_ANSWER;
        };
      gpushare_range opened = nullptr;
      const int32_t status = gpushare_range_open(session, &params, &opened);
      if (status == GPUSHARE_OK) ranges.push_back(opened);
      return status;
    }
    case 1:
      return input.byte() % 8 == 0 ? gpushare_range_close(range) : GPUSHARE_OK;
    case 2:
      return gpushare_range_commit(range, part, input.byte() % 8 == 0 ? input.size() : uint64_t{4} << 20,
                                   input.byte() % 8 == 0 ? 1000 : 0);
    case 3:
      return gpushare_range_decommit(range, part, input.byte() % 8 == 0 ? input.size() : uint64_t{4} << 20);
    default: {
      gpushare_range_info info = GPUSHARE_RANGE_INFO_INIT;
      return gpushare_range_get_info(range, &info);
    }
  }
}

// Without a daemon there are no shared images: opening is refused, and so are forged ones.
inline int32_t shared_image_call(gpushare_session session, Input& input) {
  gpushare_shared_image image = reinterpret_cast<gpushare_shared_image>(input.size());
  int32_t status = GPUSHARE_OK;
  switch (input.byte() % 5) {
    case 0: {
      gpushare_shared_image_params params = GPUSHARE_SHARED_IMAGE_PARAMS_INIT;
      params.path = input.byte() % 2 == 0 ? "/dev/null" : nullptr;
      params.iteration_ns = input.size();
      params.timeout_ns = 0;
      status = gpushare_session_open_shared_image(session, &params, &image);
      break;
    }
    case 1:
      status = gpushare_shared_image_release(image);
      break;
    case 2:
      status = gpushare_shared_image_wait(image, input.byte(), input.byte(), 0);
      break;
    case 3: {
      gpushare_shared_image_info info = GPUSHARE_SHARED_IMAGE_INFO_INIT;
      status = gpushare_shared_image_get_info(image, &info);
      break;
    }
    default: {
      gpushare_layer_info info = GPUSHARE_LAYER_INFO_INIT;
      status = gpushare_shared_image_get_layer(image, input.byte(), &info);
    }
  }
  require(status != GPUSHARE_OK, "there are no shared images");
  return status;
}

inline int32_t session_setting(gpushare_session session, Input& input) {
  switch (input.byte() % 4) {
    case 3:
      return gpushare_session_set_quota(session, input.size());
    case 0:
      return gpushare_session_set_priority(session, input.byte() - 128);
    case 1:
      return gpushare_session_set_weight(session, input.number());
    default:
      return gpushare_session_set_remaining(session, input.size());
  }
}

inline int32_t image_call(gpushare_loader loader, gpushare_image image, Input& input) {
  switch (input.byte() % 5) {
    case 0: {
      gpushare_image_info info = GPUSHARE_IMAGE_INFO_INIT;
      gpushare_layer_info layer = GPUSHARE_LAYER_INFO_INIT;
      uint32_t index = 0;
      (void)gpushare_image_find_layer(image, input.byte() % 2 == 0 ? "a" : "z", &index);
      (void)gpushare_image_get_layer(image, input.byte() % 4, &layer);
      return gpushare_image_get_info(image, &info);
    }
    case 1:
      return gpushare_image_report_execution(image, input.byte() % 4, input.byte() % 4, input.size());
    case 2: {
      gpushare_loader_info info = GPUSHARE_LOADER_INFO_INIT;
      gpushare_link_costs link = GPUSHARE_LINK_COSTS_INIT;
      (void)gpushare_loader_get_link(loader, &link);
      return gpushare_loader_get_info(loader, &info);
    }
    case 3:
      return input.byte() % 8 == 0 ? gpushare_loader_calibrate(loader) : GPUSHARE_OK;
    default: {
      gpushare_image_params params = GPUSHARE_IMAGE_PARAMS_INIT;
      params.order_by = input.byte() % 3;
      gpushare_image opened = nullptr;
      const int32_t status =
          gpushare_image_open(loader, input.byte() % 2 == 0 ? "/nonexistent" : nullptr, &params, &opened);
      require(status != GPUSHARE_OK, "there is no such image");
      return status;
    }
  }
}

// Runtimes cost threads: those of one layout and recording are used again, program after program, and every program
// leaves them empty. Now and then all is closed and leaks are looked for; with GPUSHARE_FUZZ_FRESH set, after each
// program, to see whether a finding needs what went before.
class Runtimes {
 public:
  Runtimes() = default;
  Runtimes(const Runtimes&) = delete;
  Runtimes& operator=(const Runtimes&) = delete;
  gpushare_runtime get(uint32_t layout, bool records) {
    gpushare_runtime& runtime = kept_[layout + (records ? 3 : 0)];
    if (runtime != nullptr) return runtime;
    gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
    params.device = "sim";
    params.capacity_bytes = 16 << 20;
    params.layout = layout;
    params.record = records ? GPUSHARE_RECORD_TIMELINE | GPUSHARE_RECORD_ALLOCATIONS : 0;
    require(gpushare_runtime_open(&params, &runtime) == GPUSHARE_OK, "a runtime opens");
    return runtime;
  }
  ~Runtimes() { close(); }
  void program_ended() {
    static const bool fresh = std::getenv("GPUSHARE_FUZZ_FRESH") != nullptr;
    if (!fresh && ++programs_ % 256 != 0) return;
    close();
    require(__lsan_do_recoverable_leak_check() == 0, "nothing leaks");
  }

 private:
  void close() {
    for (gpushare_runtime& runtime : kept_)
      if (runtime != nullptr)
        require(gpushare_runtime_close(std::exchange(runtime, nullptr)) == GPUSHARE_OK, "a runtime closes");
  }

  std::array<gpushare_runtime, 6> kept_{};
  uint64_t programs_ = 0;
};

}  // namespace gpushare::fuzz
