// stream.hpp: streams as they are handed out: safe to use late, and host functions that cannot poison a lane.
// Other folders do not include it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "base/mutex.hpp"
#include "executor/gate.hpp"
#include "executor/runtime.hpp"

namespace gpushare::executor {

class RuntimeImpl;
class SessionImpl;
struct LaneSlot;

class StreamImpl final : public Stream {
 public:
  // `lane`: null for a side stream. Open from the start.
  StreamImpl(std::shared_ptr<RuntimeImpl> runtime, device::Stream stream, LaneSlot* lane);
  ~StreamImpl() override;

  bool is_lane() const override { return lane_ != nullptr; }
  base::Result<std::shared_ptr<Session>> owner() const override;
  base::Result<void*> native() const override;
  base::Status synchronize() override;
  base::Status launch_host(gpushare_host_function function, void* user_data) override;
  base::Status copy(uint64_t destination, uint64_t source, uint64_t bytes, uint32_t kind) override;
  base::Status fill(memory::Address address, uint8_t value, uint64_t bytes) override;
  base::Status work(const gpushare_backend_work& work) override;
  base::Status release() override;
  base::Result<HeldStream> hold() const override;
  base::Status checked(base::Status status) const override;
  const Runtime* runtime() const override;

  // For the runtime, which knows that it is open.
  const device::Stream& device_stream() const { return stream_; }
  Gate& gate() const { return gate_; }
  // Ends all use, waits for the work and destroys the device's stream. Idempotent; not from two threads at
  // once.
  void shut();
  // The right to call shut(): true for one caller.
  bool claim_shut() { return !released_.exchange(true); }

 private:
  // A host function on its way through the stream. Pooled: in steady state nothing is allocated.
  struct HostCall {
    StreamImpl* stream = nullptr;
    gpushare_host_function function = nullptr;
    void* user_data = nullptr;
    std::shared_ptr<SessionImpl> session;  // whose iteration launched it; null on side streams
    uint64_t serial = 0;                   // of that iteration
  };
  static void run_host_call(void* user_data);
  HostCall* take_call();
  void give_call(HostCall* call);
  static base::Status released();
  template <class F>
  base::Status use(F&& body) const;

  std::shared_ptr<RuntimeImpl> runtime_;
  device::Stream stream_;
  LaneSlot* const lane_;
  mutable Gate gate_;
  std::atomic<bool> released_{false};  // the right to shut it is taken
  base::Mutex mutex_;
  std::deque<HostCall> calls_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<HostCall*> spare_calls_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::executor
