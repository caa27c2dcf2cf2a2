// Sequences of C calls from bytes: any order, any handle (live, stale, of another type, random), any size. The library must answer
// every one with a status, keep its invariants, and leave nothing behind.
// SPDX-License-Identifier: Apache-2.0
#include <gpushare/gpushare.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

// Takes bytes off the front; zeros when there are none left.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return size_ == 0; }
  uint8_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  uint64_t size() {
    // Mostly sensible sizes, sometimes absurd ones.
    const uint8_t kind = byte();
    if (kind < 200) return static_cast<uint64_t>(byte()) << (kind % 18);
    if (kind < 220) return 0;
    if (kind < 240) return UINT64_MAX - byte();
    return static_cast<uint64_t>(byte()) << 40;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

// Handles seen so far, stale ones included.
template <class T>
T choose(const std::vector<T>& handles, Input& input) {
  const uint8_t which = input.byte();
  if (which == 255 || handles.empty()) return nullptr;
  if (which == 254) return reinterpret_cast<T>(static_cast<uintptr_t>(input.size()));
  return handles[which % handles.size()];
}

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s; last error: %s\n", what, gpushare_last_error_message());
  std::abort();
}

int32_t iteration_body(void* user_data, gpushare_iteration iteration) {
  gpushare_device_address address = 0;
  (void)gpushare_iteration_alloc(iteration, 4096, 0, &address);
  return user_data != nullptr ? GPUSHARE_CALLBACK_FAILED : GPUSHARE_OK;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  gpushare_log_set([](void*, int32_t, const char*) {}, nullptr, GPUSHARE_LOG_ERROR);
  std::vector<gpushare_runtime> runtimes;
  std::vector<gpushare_session> sessions;
  std::vector<gpushare_iteration> iterations;
  std::vector<gpushare_ticket> tickets;
  std::vector<gpushare_stream> streams;
  std::vector<gpushare_heap> heaps;
  std::vector<uint64_t> addresses{0};
  const char* const policies[] = {"fifo", "srtf", "pack", "fair", "priority", "none", "", nullptr};

  gpushare_runtime_params first = GPUSHARE_RUNTIME_PARAMS_INIT;
  first.device = "sim";
  first.capacity_bytes = 16 << 20;
  first.policy = policies[input.byte() % 5];
  first.layout = input.byte() % 3;
  gpushare_runtime main_runtime = nullptr;
  require(gpushare_runtime_open(&first, &main_runtime) == GPUSHARE_OK, "the first runtime opens");
  runtimes.push_back(main_runtime);

  for (int calls = 0; !input.empty() && calls < 200; ++calls) {
    int32_t status = GPUSHARE_OK;
    switch (input.byte() % 24) {
      case 0: {
        gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
        params.persistent_bytes = input.size();
        params.ephemeral_bytes = input.size();
        params.flags = input.byte() % 5;
        params.priority = input.byte();
        params.weight = input.byte() % 4;
        params.session_class = input.byte() % 3;
        params.plan_iterations = input.byte() % 2;
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
        status = gpushare_session_alloc(choose(sessions, input), input.byte() % 4, input.size(),
                                        1ull << (input.byte() % 24), &address);
        if (status == GPUSHARE_OK) addresses.push_back(address);
        break;
      }
      case 6:
      case 7: {
        gpushare_iteration iteration = nullptr;
        status = gpushare_iteration_begin(choose(sessions, input), 0, &iteration);
        if (status == GPUSHARE_OK) iterations.push_back(iteration);
        break;
      }
      case 8:
        status = gpushare_iteration_end(choose(iterations, input));
        break;
      case 9:
        status = gpushare_iteration_fail(choose(iterations, input), input.byte() * 4, "fuzz");
        break;
      case 10:
      case 11: {
        gpushare_device_address address = 0;
        status = gpushare_iteration_alloc(choose(iterations, input), input.size(), input.byte() % 3 * 256,
                                          &address);
        if (status == GPUSHARE_OK) addresses.push_back(address);
        break;
      }
      case 12:
        status =
            gpushare_iteration_keep(choose(iterations, input), addresses[input.byte() % addresses.size()]);
        break;
      case 13:
        status = gpushare_memory_free(choose(runtimes, input), addresses[input.byte() % addresses.size()]);
        break;
      case 14: {
        gpushare_device_address address = 0;
        status = gpushare_memory_alloc(choose(runtimes, input), choose(streams, input), input.byte() % 4,
                                       input.size(), 0, &address);
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
        break;
      case 21: {
        gpushare_heap_params params = GPUSHARE_HEAP_PARAMS_INIT;
        params.capacity_bytes = input.size();
        params.alignment_bytes = input.byte();
        gpushare_heap heap = nullptr;
        status = gpushare_heap_create(&params, &heap);
        if (status == GPUSHARE_OK) heaps.push_back(heap);
        break;
      }
      case 22: {
        uint64_t offset = 0;
        const gpushare_heap heap = choose(heaps, input);
        status = gpushare_heap_alloc(heap, input.size(), &offset);
        if (status == GPUSHARE_OK && input.byte() % 2 == 0) status = gpushare_heap_free(heap, offset);
        break;
      }
      default: {
        gpushare_session_info session = GPUSHARE_SESSION_INFO_INIT;
        gpushare_runtime_info runtime = GPUSHARE_RUNTIME_INFO_INIT;
        session.struct_size -= input.byte() % 2 * 8;
        (void)gpushare_session_get_info(choose(sessions, input), &session);
        status = gpushare_runtime_get_info(choose(runtimes, input), &runtime);
        if (status == GPUSHARE_OK)
          require(runtime.promised_bytes <= runtime.capacity_bytes, "safety: promised <= capacity");
        break;
      }
    }
    if (status != GPUSHARE_OK)
      require(std::strcmp(gpushare_status_name(status), "UNRECOGNIZED") != 0 && status != GPUSHARE_INTERNAL,
              "a known status, not INTERNAL");
  }

  for (gpushare_iteration iteration : iterations) (void)gpushare_iteration_end(iteration);
  for (gpushare_session session : sessions) (void)gpushare_session_close(session);
  for (gpushare_ticket ticket : tickets) (void)gpushare_ticket_release(ticket);
  for (gpushare_stream stream : streams) (void)gpushare_stream_release(stream);
  for (gpushare_heap heap : heaps) (void)gpushare_heap_release(heap);
  gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
  require(gpushare_runtime_get_info(main_runtime, &info) == GPUSHARE_OK, "the runtime still answers");
  require(info.promised_bytes == 0 && info.persistent_bytes == 0 && info.ephemeral_bytes == 0,
          "closing every session returns every byte");
  require(gpushare_runtime_close(main_runtime) == GPUSHARE_OK, "the runtime closes");
  return 0;
}
