// allocator.hpp: a framework's allocator in C++: RAII over allocator.h. Included by gpushare.hpp, whose rules hold here too.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_ALLOCATOR_HPP_
#define GPUSHARE_ALLOCATOR_HPP_

#include <functional>
#include <memory>
#include <utility>

#include "gpushare/gpushare.hpp"

namespace gpushare {

// The memory of one runtime, as a framework allocates it. `native` is a stream of the device's own API, or no_native_stream.
class Allocator {
 public:
  inline static void* const no_native_stream = GPUSHARE_NO_NATIVE_STREAM;
  struct PoolId {
    uint64_t high = 0;
    uint64_t low = 0;
  };
  struct Base {
    Address address = 0;
    uint64_t bytes = 0;
  };

  Allocator() = default;
  // `kind`: of blocks outside iterations, model or framework.
  explicit Allocator(const Runtime& runtime, Kind kind = Kind::framework) {
    gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
    params.persistent_kind = static_cast<uint32_t>(kind);
    gpushare_allocator out = nullptr;
    check(gpushare_allocator_create(runtime.get(), &params, &out));
    handle_ = Handle(out);
  }
  gpushare_allocator get() const noexcept { return handle_.get(); }

  // Null: none.
  void set_default_session(const Session* session) {
    check(gpushare_allocator_set_default_session(get(), session == nullptr ? nullptr : session->get()));
  }
  void adopt_stream(const Session& session, void* native) {
    check(gpushare_allocator_adopt_stream(get(), session.get(), native));
  }
  void forget_stream(void* native) { check(gpushare_allocator_forget_stream(get(), native)); }
  // Null: the thread is no session's any more.
  void bind_thread(const Session* session) {
    check(gpushare_allocator_bind_thread(get(), session == nullptr ? nullptr : session->get()));
  }

  Address alloc(uint64_t bytes, void* native, uint64_t alignment_bytes = 0) {
    Address out = 0;
    check(gpushare_allocator_alloc(get(), bytes, alignment_bytes, native, &out));
    return out;
  }
  void free(Address block, void* native) { check(gpushare_allocator_free(get(), block, native)); }
  void record_use(Address block, void* native) { check(gpushare_allocator_record_use(get(), block, native)); }
  Base base(Address block) const {
    Base out;
    check(gpushare_allocator_get_base(get(), block, &out.address, &out.bytes));
    return out;
  }

  // Keeps the blocks that are still allocated and ends the iteration. If a block cannot be kept, the iteration stays open.
  void end_iteration(Iteration& iteration) {
    check(gpushare_allocator_end_iteration(get(), iteration.get()));
    const Iteration ended = std::move(iteration);  // its handle is stale
  }
  // The same without the end: for submitted functions, whose iteration ends with them.
  void keep_blocks(const Iteration& iteration) {
    check(gpushare_allocator_keep_blocks(get(), iteration.get()));
  }
  // Closes it with its last block.
  void close_session(Session session) { check(gpushare_allocator_close_session(get(), session.get())); }

  // Allocations for which `filter` is true of their native stream, or, without one, all of this thread.
  void begin_pool(PoolId id, std::function<bool(void*)> filter = nullptr) {
    if (!filter) {
      check(gpushare_allocator_begin_pool(get(), id.high, id.low, nullptr, nullptr, nullptr));
      return;
    }
    auto owned = std::make_unique<std::function<bool(void*)>>(std::move(filter));
    const auto choose = [](void* of, void* native) -> int32_t {
      return (*static_cast<std::function<bool(void*)>*>(of))(native) ? 1 : 0;
    };
    const auto release = [](void* of) {
      const std::unique_ptr<std::function<bool(void*)>> gone(static_cast<std::function<bool(void*)>*>(of));
    };
    check(gpushare_allocator_begin_pool(get(), id.high, id.low, choose, owned.get(), release));
    (void)owned.release();
  }
  void end_pool(PoolId id) { check(gpushare_allocator_end_pool(get(), id.high, id.low)); }
  void release_pool(PoolId id) { check(gpushare_allocator_release_pool(get(), id.high, id.low)); }

  // Null: of the whole runtime.
  gpushare_allocator_info info(const Session* session = nullptr) const {
    gpushare_allocator_info out = GPUSHARE_ALLOCATOR_INFO_INIT;
    check(gpushare_allocator_get_info(get(), session == nullptr ? nullptr : session->get(), &out));
    return out;
  }
  void reset_peaks(const Session* session = nullptr) {
    check(gpushare_allocator_reset_peaks(get(), session == nullptr ? nullptr : session->get()));
  }
  // Returns the bytes that went back to the driver.
  uint64_t trim() {
    uint64_t out = 0;
    check(gpushare_allocator_trim(get(), &out));
    return out;
  }
  void set_memory_fraction(double fraction) {
    check(gpushare_allocator_set_memory_fraction(get(), fraction));
  }
  void add_observer(gpushare_out_of_memory_observer_fn function, void* user_data) {
    check(gpushare_allocator_add_observer(get(), function, user_data));
  }

 private:
  using Handle = detail::Handle<gpushare_allocator, gpushare_allocator_release>;
  Handle handle_;
};

}  // namespace gpushare

#endif  // GPUSHARE_ALLOCATOR_HPP_
