// Iterations by pull and by push, and tickets.
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "base/no_memory.hpp"
#include "c_api/abi.hpp"
#include "c_api/door.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "c_api/user_function.hpp"
#include "executor/runtime.hpp"
#include "gpushare/bulk.h"
#include "gpushare/gpushare.h"

using namespace gpushare;

namespace {

class SubmittedWork final : public executor::Work {
 public:
  SubmittedWork(gpushare_iteration_fn fn, void* user_data, void (*release)(void*))
      : function_(fn, user_data, release) {}
  base::Status run(const std::shared_ptr<executor::Iteration>& iteration) override {
    return function_.run(iteration, "iteration");
  }
  void own(bool owned) { function_.own(owned); }

 private:
  capi::UserFunction<gpushare_iteration_fn> function_;
};

[[gnu::noinline]] int32_t alloc_by_guard(gpushare_iteration iteration, uint64_t bytes, uint64_t alignment,
                                         gpushare_device_address* out_address) {
  return capi::guard([&]() -> base::Status {
    if (out_address == nullptr) return capi::null_argument("out_address");
    const auto pin = capi::find(iteration);
    if (!pin) return capi::stale(iteration);
    GPUSHARE_ASSIGN_OR_RETURN(*out_address, pin->iteration->alloc(bytes, alignment));
    return {};
  });
}

// All but the first `served` of the blocks.
[[gnu::noinline]] int32_t alloc_rest_by_guard(gpushare_iteration iteration, uint64_t count,
                                              const uint64_t* bytes, uint64_t alignment,
                                              gpushare_device_address* out_addresses, size_t served) {
  return capi::with(iteration, [&](capi::IterationObject& of) -> base::Status {
    if (count == 0) return {};
    if (bytes == nullptr || out_addresses == nullptr)
      return capi::null_argument(bytes == nullptr ? "bytes" : "out_addresses");
    return of.iteration->alloc_many({bytes, count}, alignment, out_addresses, served);
  });
}

}  // namespace

extern "C" {

int32_t gpushare_iteration_begin(gpushare_session session, uint64_t timeout_ns,
                                 gpushare_iteration* out_iteration) {
  return capi::guard<true>([&]() -> base::Status {
    if (out_iteration == nullptr) return capi::null_argument("out_iteration");
    const auto pin = capi::find(session);
    if (!pin) return capi::stale(session);
    GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<executor::Iteration> iteration, pin->begin(timeout_ns));
    // From here on the iteration must not stay open without a handle.
    base::Status status;
    try {
      status = capi::publish_iteration(iteration, out_iteration);
    } catch (const std::bad_alloc&) {
      status = base::no_memory();
    }
    if (!status.ok()) (void)iteration->end();
    return status;
  });
}

int32_t gpushare_iteration_end(gpushare_iteration iteration) {
  return capi::guard([&]() -> base::Status {
    const auto last = capi::table_of<gpushare_iteration>().take(iteration);
    return last ? last->iteration->end() : capi::stale(iteration);
  });
}

int32_t gpushare_iteration_fail(gpushare_iteration iteration, int32_t status, const char* message) {
  return capi::guard([&]() -> base::Status {
    const auto last = capi::table_of<gpushare_iteration>().take(iteration);
    if (!last) return capi::stale(iteration);
    return last->iteration->fail(
        base::Status(status == GPUSHARE_OK ? GPUSHARE_CALLBACK_FAILED : status,
                     message == nullptr ? "the iteration was ended as failed" : message));
  });
}

int32_t gpushare_iteration_alloc(gpushare_iteration iteration, uint64_t bytes, uint64_t alignment_bytes,
                                 gpushare_device_address* out_address) {
  if (capi::alloc_at_door(iteration, bytes, alignment_bytes, out_address)) return GPUSHARE_OK;
  return alloc_by_guard(iteration, bytes, alignment_bytes, out_address);
}

int32_t gpushare_iteration_alloc_many(gpushare_iteration iteration, uint64_t count, const uint64_t* bytes,
                                      uint64_t alignment_bytes, gpushare_device_address* out_addresses) {
  const bool arrays = bytes != nullptr && out_addresses != nullptr;
  const size_t served =
      arrays ? capi::alloc_many_at_door(iteration, bytes, count, alignment_bytes, out_addresses) : 0;
  if (served == count && count > 0) return GPUSHARE_OK;
  return alloc_rest_by_guard(iteration, count, bytes, alignment_bytes, out_addresses, served);
}

int32_t gpushare_iteration_keep(gpushare_iteration iteration, gpushare_device_address address) {
  return capi::with(iteration, [&](capi::IterationObject& of) { return of.iteration->keep(address); });
}

int32_t gpushare_iteration_get_stream(gpushare_iteration iteration, gpushare_stream* out_stream) {
  return capi::guard([&]() -> base::Status {
    if (out_stream == nullptr) return capi::null_argument("out_stream");
    const auto pin = capi::find(iteration);
    if (!pin) return capi::stale(iteration);
    void* handle = pin->stream.load();
    if (handle == nullptr) {
      GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<executor::Stream> stream, pin->iteration->stream());
      gpushare_stream made = nullptr;
      GPUSHARE_RETURN_IF_ERROR(capi::publish(std::move(stream), &made));
      if (pin->stream.compare_exchange_strong(handle, made))
        handle = made;
      else
        capi::table_of<gpushare_stream>().remove(made);  // another thread asked at the same time
    }
    *out_stream = static_cast<gpushare_stream>(handle);
    return {};
  });
}

int32_t gpushare_session_submit(gpushare_session session, gpushare_iteration_fn fn, void* user_data,
                                void (*release)(void*), gpushare_ticket* out_ticket) {
  return capi::guard([&]() -> base::Status {
    if (fn == nullptr) return capi::null_argument("fn");
    const auto pin = capi::find(session);
    if (!pin) return capi::stale(session);
    // Undone unless the call succeeds: of work that was not taken, user_data stays the caller's.
    struct Submission {
      std::unique_ptr<executor::Work> work;
      SubmittedWork& function;
      gpushare_ticket handle = nullptr;
      ~Submission() {
        if (work != nullptr) function.own(false);
        if (handle != nullptr) capi::table_of<gpushare_ticket>().remove(handle);
      }
    };
    auto work = std::make_unique<SubmittedWork>(fn, user_data, release);
    SubmittedWork& function = *work;
    Submission submission{std::move(work), function};
    auto object = std::make_shared<capi::TicketObject>();
    if (out_ticket != nullptr) GPUSHARE_RETURN_IF_ERROR(capi::publish(object, &submission.handle));
    function.own(true);
    GPUSHARE_ASSIGN_OR_RETURN(object->ticket, pin->submit(submission.work));
    if (out_ticket != nullptr) *out_ticket = std::exchange(submission.handle, nullptr);
    return {};
  });
}

int32_t gpushare_ticket_wait(gpushare_ticket ticket, uint64_t timeout_ns) {
  return capi::with_cancellable(ticket, [&](capi::TicketObject& of) { return of.ticket->wait(timeout_ns); });
}

int32_t gpushare_ticket_release(gpushare_ticket ticket) {
  return capi::release(ticket);
}

}  // extern "C"
