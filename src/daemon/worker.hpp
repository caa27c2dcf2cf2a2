// worker.hpp: the worker's side: attaches to a daemon, takes turns, and finds its model's layers in memory that
// the daemon filled.
//
// The model is read-only: workers of one model share one copy, and a copy may be dropped between turns. A
// worker writes to its scratch memory, which belongs to it alone and lasts for one turn. Both are mapped from
// begin to end of a turn, at addresses that stay the same; outside, touching them is a fault.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "daemon/board.hpp"
#include "daemon/channel.hpp"
#include "daemon/protocol.hpp"
#include "device/device.hpp"

namespace gpushare::daemon {

struct WorkerOptions {
  std::string socket;
  std::string name;
  std::string path;         // of the model; relative to this process
  uint64_t execute_ns = 0;  // of an iteration, for the plan; 0 = as long as the load
  uint64_t scratch_bytes = 0;
  uint64_t timeout_ns = kNoTimeout;  // of attaching, which includes reading the model
};

// begin and end are for one thread at a time (others wait); everything else may be called from any.
class Worker {
 public:
  // Errors: UNAVAILABLE (no daemon), TIMED_OUT, what reading the model gives, EXCEEDS_CAPACITY, the device's.
  static base::Result<std::unique_ptr<Worker>> attach(const WorkerOptions& options);
  // Ends the turn and detaches. Work of the device that uses the memory must have finished.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Calls that wait return CANCELLED, and so do all later ones but end(); the rest is for the destructor.
  void detach();

  // Waits for the turn. Errors: TIMED_OUT; INVALID_STATE (has it already); UNAVAILABLE (the daemon is gone: attach
  // anew); DEVICE_OUT_OF_MEMORY, and what a load can fail with.
  base::Status begin(uint64_t timeout_ns = kNoTimeout);
  // Blocks until layers [first, end) are on the device. A look at shared memory if they are. Errors: TIMED_OUT,
  // INVALID_STATE (not in a turn), INVALID_ARGUMENT, UNAVAILABLE; TIMED_OUT also once the lease has been taken.
  base::Status wait_layers(uint32_t first, uint32_t end, uint64_t timeout_ns = kNoTimeout) const;
  // Gives the turn back. Device work of the turn must have finished. The turn is over whatever it returns.
  base::Status end();
  // True while another worker waits for the turn: a good moment to end it. One load of shared memory.
  bool turn_wanted() const { return in_turn_.load(std::memory_order_acquire) && board_->wanted(); }
  bool in_turn() const { return in_turn_.load(std::memory_order_acquire); }

  device::Device& device() { return *device_; }
  const std::string& device_spec() const { return device_spec_; }
  std::span<const TableLayer> layers() const { return layers_; }
  device::Address address(uint32_t layer) const { return region_ + layers_[layer].offset_bytes; }
  device::Address region() const { return region_; }
  uint64_t image_bytes() const { return image_bytes_; }
  device::Address scratch() const { return scratch_; }  // 0 without
  uint64_t scratch_bytes() const { return scratch_bytes_; }
  uint64_t id() const { return id_; }
  // Layers that were on the device when the turn began.
  uint32_t arrived_at_begin() const { return arrived_at_begin_.load(std::memory_order_relaxed); }

 private:
  struct Mapping {
    gpushare_backend_memory* memory = nullptr;
    device::Address address = 0;
    uint64_t bytes = 0;
    bool mapped = false;
  };
  Worker() = default;
  template <class T>
  base::Result<Reply> ask(const T& request, uint64_t timeout_ns, std::vector<Descriptor>* out_descriptors)
      GPUSHARE_REQUIRES(mutex_);
  base::Status connect(const WorkerOptions& options);
  base::Status map_turn(const Reply& reply, std::span<const Descriptor> descriptors)
      GPUSHARE_REQUIRES(mutex_);
  void unmap_turn() GPUSHARE_REQUIRES(mutex_);
  void saw_iteration(uint64_t began_ns) const;
  base::Status map(int descriptor, uint64_t bytes, device::Address address, uint32_t access, Mapping* out);
  void unmap(Mapping* mapping);
  base::Status gone() const;
  uint32_t next_sequence() GPUSHARE_REQUIRES(mutex_) { return ++sequence_; }

  std::string socket_path_;
  std::string device_spec_;
  std::unique_ptr<device::Device> device_;
  std::vector<TableLayer> layers_;
  std::shared_ptr<Board> board_;
  uint64_t id_ = 0;
  uint64_t image_bytes_ = 0;
  uint64_t region_bytes_ = 0;
  uint64_t scratch_bytes_ = 0;
  device::Address region_ = 0;
  device::Address scratch_ = 0;
  std::atomic<bool> in_turn_{false};
  std::atomic<uint32_t> arrived_at_begin_{0};
  // An iteration begins when the worker waits for layer 0. For iterations that find all layers on the device:
  // the begin of the last one, and the shortest duration in this turn.
  mutable std::atomic<uint64_t> iteration_began_ns_{0};
  mutable std::atomic<uint64_t> shortest_iteration_ns_{0};
  // Closed only by the destructor, so that waits may look at it without the lock.
  Descriptor socket_;
  std::atomic<bool> broken_{false};
  std::atomic<bool> detached_{false};
  base::Mutex mutex_;  // one request at a time
  uint32_t sequence_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  Mapping region_mappings_[2] GPUSHARE_GUARDED_BY(mutex_);  // its prefix and the rest, or one of all
  Mapping scratch_mapping_ GPUSHARE_GUARDED_BY(mutex_);
};

// Asks the daemon at `socket` for its status. Errors: UNAVAILABLE, TIMED_OUT.
base::Result<DaemonStatus> query_status(const std::string& socket, uint64_t timeout_ns = 5'000'000'000);

}  // namespace gpushare::daemon
