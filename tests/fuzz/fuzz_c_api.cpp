// Sequences of C calls from bytes: any order, any handle (live, stale, of another type, random), any size. The library
// must answer every one with a status, keep its invariants, and leave nothing behind.
// SPDX-License-Identifier: Apache-2.0
#include <gpushare/bulk.h>
#include <gpushare/gpushare.h>
#include <algorithm>

#include <map>

#include "fuzz/c_api_calls.hpp"

using namespace gpushare::fuzz;

namespace {

// Would gpushare_session_alloc return, whatever else happens? It waits while its session is queued or paged out, and
// here nobody else would end that wait; a session with an open iteration is on the device and stays there.
bool answers_at_once(gpushare_session session, const std::map<gpushare_session, gpushare_iteration>& open) {
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  if (gpushare_session_get_info(session, &info) != GPUSHARE_OK) return true;
  return info.state == GPUSHARE_SESSION_CANCELLED || info.state == GPUSHARE_SESSION_FAILED ||
         open.count(session) != 0;
}

int32_t iteration_body(void* user_data, gpushare_iteration iteration) {
  gpushare_device_address address = 0;
  (void)gpushare_iteration_alloc(iteration, 4096, 0, &address);
  return user_data != nullptr ? GPUSHARE_CALLBACK_FAILED : GPUSHARE_OK;
}

}  // namespace

// libFuzzer looks for leaks whenever a run frees less than it allocated, and weighs inputs by their features; with
// runtimes that stay and threads that differ from run to run, both take far longer than the program.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  static std::vector<char*> arguments(*argv, *argv + *argc);
  static char no_leaks[] = "-detect_leaks=0", plain[] = "-entropic=0";
  arguments.insert(arguments.begin() + 1, {no_leaks, plain});
  *argc = static_cast<int>(arguments.size());
  arguments.push_back(nullptr);
  *argv = arguments.data();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  gpushare_log_set([](void*, int32_t, const char*) {}, nullptr, GPUSHARE_LOG_ERROR);
  std::vector<gpushare_runtime> runtimes;
  std::vector<gpushare_session> sessions;
  std::vector<gpushare_iteration> iterations;
  std::map<gpushare_session, gpushare_iteration> open;
  const auto ended = [&open](gpushare_iteration iteration) {
    for (auto at = open.begin(); at != open.end(); ++at)
      if (at->second == iteration) {
        open.erase(at);
        return;
      }
  };
  std::vector<gpushare_ticket> tickets;
  std::vector<gpushare_stream> streams;
  std::vector<gpushare_allocator> allocators;
  std::vector<gpushare_range> ranges;
  Queues serving;
  StepQueues stepping;
  std::vector<gpushare_loader> loaders;
  std::vector<gpushare_image> images;
  std::vector<gpushare_model> models;
  std::vector<gpushare_switcher> switchers;
  std::vector<uint64_t> members{0};
  std::vector<uint64_t> addresses{0};
  const char* const policies[] = {"fifo", "srtf", "pack", "fair", "priority", "none", "", nullptr};

  static Runtimes kept;
  const char* policy = policies[input.byte() % 5];
  const uint8_t kind = input.byte();
  const gpushare_runtime main_runtime = kept.get(kind % 3, kind % 16 >= 12);
  require(gpushare_runtime_set_policy(main_runtime, policy, nullptr) == GPUSHARE_OK, "a policy is set");
  runtimes.push_back(main_runtime);

  for (int calls = 0; !input.empty() && calls < 200; ++calls) {
    int32_t status = GPUSHARE_OK;
    switch (input.byte() % 40) {
      case 0: {
        gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
        params.persistent_bytes = input.size();
        params.ephemeral_bytes = input.size();
        params.flags = input.byte() % 9;
        params.priority = input.byte();
        params.weight = input.byte() % 4;
        params.session_class = input.byte() % 3;
        params.plan_iterations = input.byte() % 2;
        params.compute_units = input.byte() % 16 == 0 ? 1 : 0;
        params.quota_bytes = input.byte() % 8 == 0 ? input.size() : 0;
        gpushare_session session = nullptr;
        status = gpushare_session_open(choose(runtimes, input), &params, &session);
        if (status == GPUSHARE_OK) sessions.push_back(session);
        break;
      }
      case 1:
        status = gpushare_session_close(choose(sessions, input));
        break;
      case 2:
        status = gpushare_session_cancel(choose(sessions, input));
        break;
      case 3:
        status = gpushare_session_wait_admitted(choose(sessions, input), 0);
        break;
      case 4:
      case 5: {
        gpushare_device_address address = 0;
        const gpushare_session session = choose(sessions, input);
        if (!answers_at_once(session, open)) break;
        status = gpushare_session_alloc(session, input.byte() % 4, input.block_size(),
                                        1ull << (input.byte() % 24), &address);
        if (status == GPUSHARE_OK) addresses.push_back(address);
        break;
      }
      case 6:
      case 7: {
        gpushare_iteration iteration = nullptr;
        const gpushare_session session = choose(sessions, input);
        status = gpushare_iteration_begin(session, 0, &iteration);
        if (status != GPUSHARE_OK) break;
        iterations.push_back(iteration);
        open[session] = iteration;
        break;
      }
      case 8: {
        const gpushare_iteration iteration = choose(iterations, input);
        status = gpushare_iteration_end(iteration);
        if (status == GPUSHARE_OK) ended(iteration);
        break;
      }
      case 9: {
        const gpushare_iteration iteration = choose(iterations, input);
        status = gpushare_iteration_fail(iteration, input.byte() * 4, "fuzz");
        if (status == GPUSHARE_OK) ended(iteration);
        break;
      }
      case 10:
      case 11: {
        gpushare_device_address address = 0;
        status = gpushare_iteration_alloc(choose(iterations, input), input.block_size(),
                                          input.byte() % 3 * 256, &address);
        if (status == GPUSHARE_OK) addresses.push_back(address);
        break;
      }
      case 12:
        status =
            gpushare_iteration_keep(choose(iterations, input), addresses[input.byte() % addresses.size()]);
        break;
      case 13:
        if (input.byte() % 4 == 0) {
          const uint64_t sizes[3] = {input.block_size(), input.block_size(), input.block_size()};
          gpushare_device_address several[3] = {};
          (void)gpushare_iteration_alloc_many(choose(iterations, input), 3, sizes, 0, several);
          several[input.byte() % 3] = addresses[input.byte() % addresses.size()];
          (void)gpushare_memory_free_many(choose(runtimes, input), 3, several, nullptr);
        }
        status = gpushare_memory_free(choose(runtimes, input), addresses[input.byte() % addresses.size()]);
        break;
      case 14: {
        gpushare_device_address address = 0;
        status = gpushare_memory_alloc(choose(runtimes, input), choose(streams, input), input.byte() % 4,
                                       input.block_size(), 0, &address);
        if (status == GPUSHARE_OK) addresses.push_back(address);
        break;
      }
      case 15: {
        gpushare_stream stream = nullptr;
        status = input.byte() % 2 == 0
                     ? gpushare_stream_create(choose(runtimes, input), input.byte(), &stream)
                     : gpushare_iteration_get_stream(choose(iterations, input), &stream);
        if (status == GPUSHARE_OK) streams.push_back(stream);
        break;
      }
      case 16:
        status = gpushare_stream_release(choose(streams, input));
        break;
      case 17:
        status = gpushare_memory_record_use(
            choose(runtimes, input), addresses[input.byte() % addresses.size()], choose(streams, input));
        break;
      case 18: {
        gpushare_ticket ticket = nullptr;
        int fails = 0;
        status = gpushare_session_submit(choose(sessions, input), iteration_body,
                                         input.byte() % 8 == 0 ? &fails : nullptr, nullptr,
                                         input.byte() % 2 == 0 ? &ticket : nullptr);
        if (status == GPUSHARE_OK && ticket != nullptr) tickets.push_back(ticket);
        break;
      }
      case 19:
        status = input.byte() % 2 == 0 ? gpushare_ticket_wait(choose(tickets, input), 0)
                                       : gpushare_ticket_release(choose(tickets, input));
        break;
      case 20:
        status = gpushare_runtime_set_policy(choose(runtimes, input), policies[input.byte() % 8], nullptr);
        {
          gpushare_interference entry = GPUSHARE_INTERFERENCE_INIT;
          (void)gpushare_runtime_get_interference(choose(runtimes, input), input.byte(), &entry);
        }
        if (status == GPUSHARE_NOT_FOUND) {  // raised again at once: calls that need room would wait for ever
          const gpushare_runtime runtime = choose(runtimes, input);
          status = gpushare_runtime_set_capacity(runtime, input.size());
          if (status == GPUSHARE_OK) status = gpushare_runtime_set_capacity(runtime, 0);
          gpushare_coordination_params coordination = GPUSHARE_COORDINATION_PARAMS_INIT;
          coordination.max_guaranteed = input.byte();
          coordination.max_opportunistic = input.byte();
          coordination.reserved = input.byte() % 8 == 0 ? 1 : 0;
          (void)gpushare_runtime_set_coordination(runtime, &coordination);
          if (gpushare_runtime_set_coordination(runtime, nullptr) == GPUSHARE_UNSUPPORTED) break;
        }
        break;
      case 21:
        status = stream_call(choose(streams, input), addresses[input.byte() % addresses.size()], input);
        break;
      case 22:
        status = session_setting(choose(sessions, input), input);
        break;
      case 23:
      case 24:
      case 25:
        status = queue_call(serving, choose(runtimes, input), choose(sessions, input), input);
        break;
      case 26:
        status = step_queue_call(stepping, choose(sessions, input), input);
        break;
      case 27: {
        gpushare_loader_params params = GPUSHARE_LOADER_PARAMS_INIT;
        gpushare_switcher_params switching = GPUSHARE_SWITCHER_PARAMS_INIT;
        gpushare_loader loader = nullptr;
        gpushare_switcher switcher = nullptr;
        params.chunk_bytes = 65536;
        params.limit_bytes = input.byte() % 2 == 0 ? 1 << 20 : input.size();
        switching.residency = input.byte() % 3;
        switching.keep_bytes = input.byte() % 2 == 0 ? 1 << 20 : input.size();
        switching.standby_bytes = input.byte() % 2 == 0 ? 2048 : input.size();
        status = gpushare_loader_create(choose(runtimes, input), &params, &loader);
        if (status == GPUSHARE_OK) {
          loaders.push_back(loader);
          status = gpushare_switcher_create(loader, &switching, &switcher);
          if (status == GPUSHARE_OK) switchers.push_back(switcher);
        }
        break;
      }
      case 28: {
        static char bytes[3000];
        const gpushare_layer_source layers[3] = {
            {"a", bytes, 1u + input.byte() % 3000u}, {"b", bytes, input.byte()}, {nullptr, bytes, 3000}};
        gpushare_image image = nullptr;
        status = gpushare_image_create(choose(loaders, input), "i", input.byte() % 4, layers, &image);
        if (status == GPUSHARE_OK) images.push_back(image);
        break;
      }
      case 29: {
        gpushare_session_info session = GPUSHARE_SESSION_INFO_INIT;
        const gpushare_session into = choose(sessions, input);
        status = gpushare_session_get_info(into, &session);
        if (status != GPUSHARE_OK || session.state == GPUSHARE_SESSION_QUEUED ||
            session.state == GPUSHARE_SESSION_PAGED_OUT)
          break;  // it would wait
        gpushare_load_params params = GPUSHARE_LOAD_PARAMS_INIT;
        const uint32_t ends[2] = {1u + input.byte() % 3u, input.byte() % 4u};
        params.group_ends = ends;
        params.group_count = input.byte() % 3;
        gpushare_model model = nullptr;
        status = gpushare_session_load(into, choose(images, input), &params, &model);
        if (status == GPUSHARE_OK) models.push_back(model);
        break;
      }
      case 30: {
        gpushare_layer_info layer = GPUSHARE_LAYER_INFO_INIT;
        gpushare_model_info model = GPUSHARE_MODEL_INFO_INIT;
        (void)gpushare_model_get_info(choose(models, input), &model);
        (void)gpushare_model_get_layer(choose(models, input), input.byte() % 4, &layer);
        (void)gpushare_model_make_usable(choose(models, input), input.byte() % 4, input.byte() % 5,
                                         choose(streams, input));
        (void)gpushare_model_mark_end(choose(models, input), choose(streams, input));
        status = gpushare_model_wait(choose(models, input), input.byte() % 4, 0);
        break;
      }
      case 31:
        switch (input.byte() % 6) {
          case 4:
            status =
                gpushare_switcher_remove(choose(switchers, input), members[input.byte() % members.size()]);
            break;
          case 5: {
            gpushare_member_info info = GPUSHARE_MEMBER_INFO_INIT;
            status = gpushare_switcher_get_member(choose(switchers, input),
                                                  members[input.byte() % members.size()], &info);
            break;
          }
          case 0:
            status = gpushare_model_release(choose(models, input));
            break;
          case 1:
            status = gpushare_image_release(choose(images, input));
            break;
          case 2:
            status = gpushare_loader_release(choose(loaders, input));
            break;
          default: {
            gpushare_switcher_info info = GPUSHARE_SWITCHER_INFO_INIT;
            status = gpushare_switcher_get_info(choose(switchers, input), &info);
            break;
          }
        }
        break;
      case 32: {
        gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
        params.persistent_bytes = input.size();
        params.ephemeral_bytes = input.size();
        uint64_t member = 0;
        status =
            gpushare_switcher_add(choose(switchers, input), &params, choose(images, input), nullptr, &member);
        if (status == GPUSHARE_OK) members.push_back(member);
        break;
      }
      case 33: {
        gpushare_iteration iteration = nullptr;
        gpushare_model model = nullptr;
        status = gpushare_switcher_begin(choose(switchers, input), members[input.byte() % members.size()], 0,
                                         &iteration, &model, nullptr);
        if (status == GPUSHARE_OK) {
          if (input.byte() % 2 == 0) models.push_back(model);
          (void)gpushare_model_make_usable(model, 0, 1, choose(streams, input));
          status = input.byte() % 4 == 0
                       ? gpushare_iteration_fail(iteration, GPUSHARE_CALLBACK_FAILED, "fuzz")
                       : gpushare_iteration_end(iteration);
        }
        break;
      }
      case 34:
        status = image_call(choose(loaders, input), choose(images, input), input);
        break;
      case 35:
        status = process_call(choose(runtimes, input), input);
        break;
      case 36: {
        if (input.byte() % 4 != 0) {
          // Whose an allocation is only the library knows: none may wait for admission.
          const bool may_wait = !std::all_of(sessions.begin(), sessions.end(), [&](gpushare_session session) {
            return answers_at_once(session, open);
          });
          const gpushare_iteration iteration = choose(iterations, input);
          status = allocator_call(allocators, choose(runtimes, input), choose(sessions, input),
                                  choose(streams, input), addresses, iteration, may_wait, input);
          if (gpushare_stream stream = nullptr;
              gpushare_iteration_get_stream(iteration, &stream) == GPUSHARE_INVALID_HANDLE)
            ended(iteration);
          break;
        }
        gpushare_block_info block = GPUSHARE_BLOCK_INFO_INIT;
        status = gpushare_memory_get_info(choose(runtimes, input), addresses[input.byte() % addresses.size()],
                                          &block);
        break;
      }
      case 37: {
        static int32_t again[2] = {0, 1};
        status = gpushare_runtime_set_out_of_memory_callback(
            choose(runtimes, input),
            [](void* answer, uint64_t, uint64_t) { return *static_cast<const int32_t*>(answer); },
            &again[input.byte() % 2]);
        break;
      }
      case 38:
        if (input.byte() % 2 == 0) {
          const gpushare_session owner = choose(sessions, input);
          status = range_call(ranges, owner, answers_at_once(owner, open), input);
          break;
        }
        if (input.byte() % 4 == 0) {
          status = gate_call(choose(runtimes, input), choose(sessions, input), choose(streams, input), input);
          break;
        }
        if (input.byte() % 8 == 0) {
          status = shared_image_call(choose(sessions, input), input);
          break;
        }
        status = input.byte() % 2 == 0 ? gpushare_runtime_synchronize(choose(runtimes, input), 0)
                                       : gpushare_runtime_drain(choose(runtimes, input), 0);
        break;
      default: {
        require(gpushare_version() == GPUSHARE_VERSION && gpushare_version_string() != nullptr,
                "the version");
        gpushare_session_info session = GPUSHARE_SESSION_INFO_INIT;
        gpushare_runtime_info runtime = GPUSHARE_RUNTIME_INFO_INIT;
        session.struct_size -= input.byte() % 2 * 8;
        (void)gpushare_session_get_info(choose(sessions, input), &session);
        char wait[64];
        (void)gpushare_session_explain_wait(choose(sessions, input), wait, input.byte() % sizeof wait);
        status = gpushare_runtime_get_info(choose(runtimes, input), &runtime);
        if (status == GPUSHARE_OK)
          require(runtime.promised_bytes <= runtime.capacity_bytes, "safety: promised <= capacity");
        break;
      }
    }
    require_status(status);
  }

  // A batch may wait for its session: iterations, then sessions, then the queues.
  for (gpushare_iteration iteration : iterations) (void)gpushare_iteration_end(iteration);
  for (gpushare_allocator allocator : allocators) (void)gpushare_allocator_release(allocator);
  for (gpushare_switcher switcher : switchers) (void)gpushare_switcher_release(switcher);
  for (gpushare_range range : ranges) (void)gpushare_range_close(range);
  for (gpushare_session session : sessions) (void)gpushare_session_close(session);
  for (gpushare_request_queue queue : serving.queues) (void)gpushare_request_queue_close(queue);
  for (gpushare_step_queue queue : stepping.queues) (void)gpushare_step_queue_close(queue);
  require(serving.unanswered == 0 && stepping.unanswered == 0, "every accepted request was answered");
  for (gpushare_model model : models) (void)gpushare_model_release(model);
  for (gpushare_image image : images) (void)gpushare_image_release(image);
  for (gpushare_loader loader : loaders) (void)gpushare_loader_release(loader);
  for (gpushare_ticket ticket : tickets) (void)gpushare_ticket_release(ticket);
  for (gpushare_stream stream : streams) (void)gpushare_stream_release(stream);
  (void)gpushare_runtime_set_out_of_memory_callback(main_runtime, nullptr, nullptr);
  gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
  require(gpushare_runtime_get_info(main_runtime, &info) == GPUSHARE_OK, "the runtime still answers");
  require(info.promised_bytes == 0 && info.persistent_bytes == 0 && info.ephemeral_bytes == 0,
          "closing every session returns every byte");
  kept.program_ended();
  return 0;
}
