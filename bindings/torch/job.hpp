// bindings/torch: what a tensor framework needs between its allocator and gpushare: whose memory a request is (Job),
// and libtorch's CPU allocator on top of it (cpu_allocator.hpp). Uses the public C++ API alone; nothing in src/ knows
// of it. job.hpp needs no libtorch and serves any framework that allocates tensor by tensor.
//
// job.hpp: a session as a framework's allocator sees it. A framework asks for bytes and gives them back when a tensor
// dies, without saying which tensors live for one iteration only. A Job decides that and keeps a promise: nothing that
// the framework still holds ever vanishes.
//
// Inside an iteration a block is ephemeral at first. A block that is alive at the end of its iteration is promoted,
// which costs one call and no copy. From the third iteration on the Job predicts: an allocation at the same place of
// the sequence, with the same size, as one that outlived the iteration before is persistent from the start. A wrong
// prediction costs memory until the tensor dies, never a tensor. Outside iterations blocks are persistent (parameters,
// optimizer state made by the first step are found as above).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "gpushare/gpushare.hpp"

namespace gpushare::torch {

// One session of `runtime`. While a thread is bound to a Job (Scope, or an open iteration), allocate() on that thread
// takes memory of it.
//
// Ownership: blocks keep the Job's session and its runtime open. A Job that is destroyed while blocks live closes its
// session when the last of them is freed. Threads: allocate() and release() may be called from any thread; begin() and
// end() from the thread that is to run the iteration. Errors: all methods throw gpushare::Error.
//
// Limit: a policy that pages sessions out (srtf, priority) moves the persistent blocks of a session that is not in an
// iteration, so tensors of a Job may then be read inside its iterations only. fifo, pack and fair never page.
class Job {
 public:
  // Opens the session; it waits for admission when its first iteration begins, or its first block is allocated.
  Job(std::shared_ptr<Runtime> runtime, const SessionOptions& options);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Blocks until it is the session's turn, then binds this thread until end().
  void begin();
  // Promotes the blocks of this iteration that are still alive, and ends it; also after an exception, whose tensors
  // somebody may look at. DEVICE_OUT_OF_MEMORY if a promotion is not safe: the iteration is open as before, and the
  // message says what is free. INVALID_STATE if none is open.
  void end();

  gpushare_session_info info() const;
  void set_weight(double weight);
  void set_priority(int32_t priority);
  // Blocks handed out and not freed, and how many of the iteration's allocations were predicted to outlive it, for
  // tests and reports.
  uint64_t live_blocks() const;
  uint64_t predicted_blocks() const;

  // Binds the calling thread to `job` without an iteration: what is allocated meanwhile is persistent. Nests.
  class Scope {
   public:
    explicit Scope(Job& job);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    void* before_;
  };

 private:
  struct State;
  friend void* allocate(size_t bytes);
  friend bool release(void* block);
  std::shared_ptr<State> state_;
};

// Memory of the Job that the calling thread is bound to, aligned to 256 bytes; null if it is bound to none, or bytes is
// 0. Blocks as gpushare_session_alloc. Throws gpushare::Error (DEVICE_OUT_OF_MEMORY, QUOTA_EXCEEDED, ...).
void* allocate(size_t bytes);

// Gives a block back, from any thread, also after its Job was destroyed. False if allocate() did not hand it out:
// nothing happens then.
bool release(void* block);

}  // namespace gpushare::torch
