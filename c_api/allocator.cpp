// The allocator of a framework.
// SPDX-License-Identifier: Apache-2.0
#include "framework/allocator.hpp"

#include "c_api/abi.hpp"
#include "c_api/door.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;

namespace {

// `body` with the session behind the handle; null stands for none.
template <class Body>
int32_t with_session(gpushare_allocator allocator, gpushare_session session, Body&& body) {
  return capi::with(allocator, [&](framework::Allocator& of) -> base::Status {
    if (session == nullptr) return body(of, std::shared_ptr<executor::Session>());
    const auto pin = capi::find(session);
    return pin ? body(of, pin.shared()) : capi::stale(session);
  });
}

// A filter of the caller's, and what tells him that it is not called any more.
struct Filter {
  Filter(gpushare_stream_filter_fn the_function, void* the_user_data, void (*the_release)(void*))
      : function(the_function), user_data(the_user_data), release(the_release) {}
  Filter(const Filter&) = delete;
  Filter& operator=(const Filter&) = delete;
  gpushare_stream_filter_fn function;
  void* user_data;
  void (*release)(void*);
  ~Filter() {
    if (release == nullptr) return;
    const base::CallbackCalls may_call;
    release(user_data);
  }
};

[[gnu::noinline]] int32_t alloc_by_guard(gpushare_allocator allocator, uint64_t bytes, uint64_t alignment,
                                         void* native_stream, gpushare_device_address* out_address) {
  return capi::guard([&]() -> base::Status {
    if (out_address == nullptr) return capi::null_argument("out_address");
    const auto pin = capi::find(allocator);
    if (!pin) return capi::stale(allocator);
    GPUSHARE_ASSIGN_OR_RETURN(*out_address, pin->alloc(bytes, alignment, native_stream));
    return {};
  });
}

[[gnu::noinline]] int32_t free_by_guard(gpushare_allocator allocator, gpushare_device_address address,
                                        void* native_stream) {
  return capi::with(allocator, [&](framework::Allocator& of) { return of.free(address, native_stream); });
}

}  // namespace

extern "C" {

int32_t gpushare_allocator_create(gpushare_runtime runtime, const gpushare_allocator_params* params,
                                  gpushare_allocator* out_allocator) {
  return capi::guard([&]() -> base::Status {
    gpushare_allocator_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    if (out_allocator == nullptr) return capi::null_argument("out_allocator");
    if (read.persistent_kind > GPUSHARE_KIND_FRAMEWORK)
      return {
          GPUSHARE_INVALID_ARGUMENT,
          base::format("persistent_kind is %u, allowed are 0 (model), 1 (framework)", read.persistent_kind)};
    const auto pin = capi::find(runtime);
    if (!pin) return capi::stale(runtime);
    const auto allocator =
        std::make_shared<framework::Allocator>(pin.shared(), static_cast<memory::Kind>(read.persistent_kind));
    GPUSHARE_RETURN_IF_ERROR(capi::publish(allocator, out_allocator));
    allocator->set_name(*out_allocator);
    return {};
  });
}

int32_t gpushare_allocator_release(gpushare_allocator allocator) {
  return capi::guard([&]() -> base::Status {
    const auto last = capi::table_of<gpushare_allocator>().take(allocator);
    if (!last) return capi::stale(allocator);
    last->close_doors();
    return {};
  });
}

int32_t gpushare_allocator_set_default_session(gpushare_allocator allocator, gpushare_session session) {
  return with_session(allocator, session,
                      [](framework::Allocator& of, const std::shared_ptr<executor::Session>& by_default) {
                        return of.set_default_session(by_default);
                      });
}

int32_t gpushare_allocator_adopt_stream(gpushare_allocator allocator, gpushare_session session,
                                        void* native_stream) {
  return with_session(
      allocator, session,
      [&](framework::Allocator& of, const std::shared_ptr<executor::Session>& owner) -> base::Status {
        if (owner == nullptr) return capi::stale(session);
        return of.adopt_stream(owner, native_stream);
      });
}

int32_t gpushare_allocator_forget_stream(gpushare_allocator allocator, void* native_stream) {
  return capi::with(allocator, [&](framework::Allocator& of) { return of.forget_stream(native_stream); });
}

int32_t gpushare_allocator_bind_thread(gpushare_allocator allocator, gpushare_session session) {
  return with_session(allocator, session,
                      [](framework::Allocator& of, const std::shared_ptr<executor::Session>& owner) {
                        return of.bind_thread(owner);
                      });
}

int32_t gpushare_allocator_alloc(gpushare_allocator allocator, uint64_t bytes, uint64_t alignment_bytes,
                                 void* native_stream, gpushare_device_address* out_address) {
  if (capi::alloc_at_door(allocator, bytes, alignment_bytes, native_stream, out_address)) return GPUSHARE_OK;
  return alloc_by_guard(allocator, bytes, alignment_bytes, native_stream, out_address);
}

int32_t gpushare_allocator_free(gpushare_allocator allocator, gpushare_device_address address,
                                void* native_stream) {
  if (capi::free_at_door(allocator, address, native_stream)) return GPUSHARE_OK;
  return free_by_guard(allocator, address, native_stream);
}

int32_t gpushare_allocator_record_use(gpushare_allocator allocator, gpushare_device_address address,
                                      void* native_stream) {
  return capi::with(allocator,
                    [&](framework::Allocator& of) { return of.record_use(address, native_stream); });
}

int32_t gpushare_allocator_get_base(gpushare_allocator allocator, gpushare_device_address address,
                                    gpushare_device_address* out_base, uint64_t* out_bytes) {
  return capi::with(allocator, [&](framework::Allocator& of) -> base::Status {
    if (out_base == nullptr) return capi::null_argument("out_base");
    if (out_bytes == nullptr) return capi::null_argument("out_bytes");
    const auto base = of.base(address);
    if (!base.ok()) return base.status();
    *out_base = base->first;
    *out_bytes = base->second;
    return {};
  });
}

int32_t gpushare_allocator_end_iteration(gpushare_allocator allocator, gpushare_iteration iteration) {
  return capi::with(allocator, [&](framework::Allocator& of) -> base::Status {
    {
      const auto pin = capi::find(iteration);
      if (!pin) return capi::stale(iteration);
      GPUSHARE_RETURN_IF_ERROR(of.keep_all(*pin->iteration));
    }
    const auto last = capi::table_of<gpushare_iteration>().take(iteration);
    return last ? last->iteration->end() : capi::stale(iteration);
  });
}

int32_t gpushare_allocator_keep_blocks(gpushare_allocator allocator, gpushare_iteration iteration) {
  return capi::with(allocator, [&](framework::Allocator& of) -> base::Status {
    const auto pin = capi::find(iteration);
    if (!pin) return capi::stale(iteration);
    return of.keep_all(*pin->iteration);
  });
}

int32_t gpushare_allocator_close_session(gpushare_allocator allocator, gpushare_session session) {
  return with_session(
      allocator, session,
      [&](framework::Allocator& of, const std::shared_ptr<executor::Session>& closing) -> base::Status {
        if (closing == nullptr) return capi::stale(session);
        GPUSHARE_RETURN_IF_ERROR(of.close_session(closing));
        return capi::table_of<gpushare_session>().remove(session) ? base::Status() : capi::stale(session);
      });
}

int32_t gpushare_allocator_begin_pool(gpushare_allocator allocator, uint64_t id_high, uint64_t id_low,
                                      gpushare_stream_filter_fn filter, void* user_data,
                                      void (*release)(void*)) {
  return capi::with(allocator, [&](framework::Allocator& of) -> base::Status {
    framework::PoolFilter chooses;
    const auto owned = std::make_shared<Filter>(filter, user_data, release);
    if (filter != nullptr)
      chooses = [owned](void* native) {
        const base::CallbackCalls may_call;
        return owned->function(owned->user_data, native) != 0;
      };
    return of.begin_pool({id_high, id_low}, std::move(chooses));
  });
}

int32_t gpushare_allocator_end_pool(gpushare_allocator allocator, uint64_t id_high, uint64_t id_low) {
  return capi::with(allocator, [&](framework::Allocator& of) { return of.end_pool({id_high, id_low}); });
}

int32_t gpushare_allocator_release_pool(gpushare_allocator allocator, uint64_t id_high, uint64_t id_low) {
  return capi::with(allocator, [&](framework::Allocator& of) { return of.release_pool({id_high, id_low}); });
}

int32_t gpushare_allocator_get_info(gpushare_allocator allocator, gpushare_session session,
                                    gpushare_allocator_info* out_info) {
  return with_session(
      allocator, session,
      [&](framework::Allocator& of, const std::shared_ptr<executor::Session>& one) -> base::Status {
        GPUSHARE_ASSIGN_OR_RETURN(const framework::AllocatorInfo info, of.info(one.get()));
        gpushare_allocator_info out = GPUSHARE_ALLOCATOR_INFO_INIT;
        out.current_bytes = info.current_bytes;
        out.peak_bytes = info.peak_bytes;
        out.reserved_bytes = info.reserved_bytes;
        out.limit_bytes = info.limit_bytes;
        out.allocations = info.allocations;
        out.failures = info.failures;
        out.predicted = info.predicted;
        return capi::write_struct("out_info", out, out_info);
      });
}

int32_t gpushare_allocator_reset_peaks(gpushare_allocator allocator, gpushare_session session) {
  return with_session(allocator, session,
                      [](framework::Allocator& of, const std::shared_ptr<executor::Session>& one) {
                        return of.reset_peaks(one.get());
                      });
}

int32_t gpushare_allocator_trim(gpushare_allocator allocator, uint64_t* out_bytes) {
  return capi::with(allocator, [&](framework::Allocator& of) -> base::Status {
    if (out_bytes == nullptr) return capi::null_argument("out_bytes");
    GPUSHARE_ASSIGN_OR_RETURN(*out_bytes, of.trim());
    return {};
  });
}

int32_t gpushare_allocator_set_memory_fraction(gpushare_allocator allocator, double fraction) {
  return capi::with(allocator, [&](framework::Allocator& of) { return of.set_fraction(fraction); });
}

int32_t gpushare_allocator_add_observer(gpushare_allocator allocator, gpushare_out_of_memory_observer_fn fn,
                                        void* user_data) {
  return capi::with(allocator, [&](framework::Allocator& of) -> base::Status {
    if (fn == nullptr) return capi::null_argument("fn");
    of.add_observer([fn, user_data](uint64_t session_id, uint64_t bytes, const base::Status& why) {
      const base::CallbackCalls may_call;
      fn(user_data, session_id, bytes, why.message().c_str());
    });
    return {};
  });
}

}  // extern "C"
