// model.hpp: an image's layers in a session's memory, arriving or arrived.
//
// Profiling. make_usable says which layers the following work on that stream executes. Marks (timing events) on the
// stream, one behind the wait and one before the next wait, measure that work for the image's profile. mark_end closes
// an execution. The first kProfiledRuns executions are profiled, then one in kProfileEvery.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "executor/gate.hpp"
#include "executor/runtime.hpp"
#include "loader/loader.hpp"
#include "loader/transmission.hpp"

namespace gpushare::loader {

// Threads: all methods from any thread; executions of one model do not overlap, as iterations of its session do
// not. Errors everywhere: INVALID_STATE once it was unloaded or its runtime closed.
class Model {
 public:
  static constexpr uint64_t kProfiledRuns = 8;
  static constexpr uint64_t kProfileEvery = 16;

  Model(std::shared_ptr<Loader> loader, std::shared_ptr<executor::Session> session,
        std::unique_ptr<Transmission> transmission, memory::Address address, bool profile);
  // Unloads.
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Work enqueued on `stream` from now on finds layers [first, end) on the device. No host wait. Errors:
  // INVALID_ARGUMENT (no such layers, a stream of another runtime), INVALID_STATE (the stream captures a graph and the
  // layers have not arrived), what a copy failed with.
  base::Status make_usable(uint32_t first, uint32_t end, const executor::Stream& stream);
  // Says that the work of the layers made usable last has been enqueued, so that the execution ends here.
  base::Status mark_end(const executor::Stream& stream);
  // Blocks until `layer` has arrived. Errors: TIMED_OUT, INVALID_ARGUMENT, what a copy failed with.
  base::Status wait(uint32_t layer, uint64_t timeout_ns);
  base::Result<bool> arrived(uint32_t layer);
  // Device time from the start of the first copy until group `group` was there. NOT_READY before.
  base::Result<uint64_t> arrived_ns(size_t group);

  // This model's layers, lent as a prefix for another transmission of its image. They stay on the device while the loan
  // lives.
  struct Loan {
    executor::GatePass model;
    executor::HeldStream session;
    Prefix prefix;
  };
  // Work enqueued on `copies` from now on finds the layers on the device. The caller records it (Runtime::record_use) before the
  // loan ends. Does not wait. Errors: TIMED_OUT (paged out), the error of a failed copy.
  base::Result<Loan> lend(const device::Stream& copies);

  // Frees the block, unless its session has ended and taken the block along. Does not block, except for other threads'
  // calls on this model. A second call returns OK, too.
  base::Status unload();
  // Before the device goes: waits for the copies.
  void shut();

  memory::Address address(uint32_t layer) const { return address_ + image_->layers()[layer].offset_bytes; }
  const std::shared_ptr<const Image>& image() const { return image_; }
  uint32_t layers() const { return ends_.back(); }  // fewer than the image's if only a prefix was loaded
  const std::vector<uint32_t>& group_ends() const { return ends_; }
  const std::shared_ptr<executor::Session>& session() const { return session_; }

 private:
  // A run of layers between two marks on a stream.
  struct Run {
    device::Event begin, end;
    uint32_t first = 0, last = 0;
    bool closed = false;
  };
  static base::Status gone();
  bool claim();  // the right to take the model apart: true for one caller
  std::unique_ptr<Transmission> take_apart();
  base::Status begin_layers(uint32_t first, uint32_t end, const executor::Stream& stream);
  base::Status end_execution(const executor::Stream& stream);
  base::Status close_run(const device::Stream& stream) GPUSHARE_REQUIRES(mutex_);
  base::Status open_run(uint32_t first, uint32_t end, const device::Stream& stream) GPUSHARE_REQUIRES(mutex_);
  // Calls `keep` if a mark was recorded. On a stream that captures a graph, gives the execution's marks up instead.
  template <class F>
  base::Status marked(base::Status status, F&& keep) GPUSHARE_REQUIRES(mutex_);
  void collect() GPUSHARE_REQUIRES(mutex_);
  void arrived_whole();
  void learn_last() noexcept;

  const std::shared_ptr<Loader> loader_;
  const std::shared_ptr<executor::Session> session_;
  const std::shared_ptr<const Image> image_;
  const memory::Address address_;
  const std::vector<uint32_t> ends_;
  executor::Gate gate_;  // open until it is taken apart: users of transmission_ and of marks
  std::atomic<bool> claimed_{false};
  std::atomic<bool> learned_{false};
  std::unique_ptr<Transmission> transmission_;
  const bool profile_;

  base::Mutex mutex_;
  uint64_t executions_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  const executor::Stream* stream_ GPUSHARE_GUARDED_BY(mutex_) = nullptr;  // of the execution under way
  uint32_t reached_ GPUSHARE_GUARDED_BY(mutex_) = 0;                      // layers made usable by it
  bool marking_ GPUSHARE_GUARDED_BY(mutex_) = false;                      // it is profiled
  std::vector<Run> runs_ GPUSHARE_GUARDED_BY(mutex_);                     // of the execution under way
  std::vector<Run> ended_ GPUSHARE_GUARDED_BY(mutex_);  // of the execution whose times are awaited
  std::vector<Run> spare_ GPUSHARE_GUARDED_BY(mutex_);  // has room for every run that was made
  size_t runs_made_ GPUSHARE_GUARDED_BY(mutex_) = 0;
};

}  // namespace gpushare::loader
