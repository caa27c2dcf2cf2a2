// trainer.hpp: a network with its data and its memory. It knows of gpushare only the kinds of blocks; job.hpp
// runs it in a session, the GPU suite on a plain stream too, and the reference on the calling thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gpushare/gpushare.hpp>
#include <memory>
#include <string>
#include <vector>

#include "networks.hpp"

namespace training {

struct TrainerOptions {
  NetworkOptions network;
  int batch = 32;
  int batches = 8;  // of training data, used in turn
  double rate = 0.05;
  double momentum = 0.9;
  uint64_t seed = 1;
  int kept_losses = 1024;
};

// A persistent block of the kind.
using Allocate = std::function<void*(gpushare::Kind kind, size_t bytes)>;
// A copy to the device that has been made when it returns, or whose source may go.
using Upload = std::function<void(void* to, const void* from, size_t bytes)>;

// Not thread-safe. Steps are enqueued; what they use must stay until they have run.
template <class T>
class Trainer {
 public:
  // Errors: std::invalid_argument.
  Trainer(const TrainerOptions& options, std::unique_ptr<Math<T>> math);

  const TrainerOptions& options() const { return options_; }
  int classes() const { return network_.classes; }
  // The bytes that prepare() allocates, each block rounded up to 256 bytes. Model: parameters, momentum, running
  // statistics. Framework: gradients, data, losses, the library's workspace.
  size_t persistent_bytes();
  void prepare(const Allocate& allocate, const Upload& upload);

  // Forward, backward and update on the next batch. Its loss is kept at losses()[step % kept_losses].
  void train(const Queue& queue, const Scratch& scratch);
  // Logits (batch x classes) of batch `number` of the data, in scratch memory.
  const T* infer(const Queue& queue, const Scratch& scratch, int number);

  const T* losses() const { return losses_; }
  int steps() const { return steps_; }
  // True labels of batch `number`.
  const int32_t* labels(int number) const;

 private:
  struct Block {
    gpushare::Kind kind;
    size_t bytes;
    const void* first;  // what it holds at the beginning; null: zeros
    void** address;
  };
  std::vector<Block> blocks();

  const TrainerOptions options_;
  const std::unique_ptr<Math<T>> math_;
  Network<T> network_;
  Data data_;
  std::vector<T> first_values_, first_state_, inputs_host_;
  int steps_ = 0;
  // Device memory.
  void* values_ = nullptr;
  void* momentum_ = nullptr;
  void* state_ = nullptr;
  void* gradients_ = nullptr;
  void* inputs_ = nullptr;
  void* labels_ = nullptr;
  T* losses_ = nullptr;
  void* workspace_ = nullptr;
};

// The losses of `steps` training steps in double on the calling thread: the reference.
std::vector<double> reference_losses(const TrainerOptions& options, int steps);

}  // namespace training
