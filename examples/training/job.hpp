// job.hpp: a trainer as a gpushare session. Its parameters are model blocks, what the training keeps besides
// them framework blocks, activations and workspaces ephemeral blocks of the iteration.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gpushare/gpushare.hpp>
#include <memory>
#include <string>
#include <vector>

#include "trainer.hpp"

namespace training {

// The lane's stream as a queue.
class StreamQueue final : public Queue {
 public:
  explicit StreamQueue(gpushare::Stream stream) : stream_(stream) {}
  void* native() const override { return stream_.native(); }
  void run(std::function<void()> function) const override { stream_.launch_host(std::move(function)); }

 private:
  gpushare::Stream stream_;
};

// The iteration's ephemeral blocks.
Scratch scratch_of(gpushare::Iteration& iteration);

struct JobOptions {
  TrainerOptions trainer;
  gpushare::SessionOptions session;  // persistent_bytes is filled in; ephemeral_bytes 0: gpushare measures it
};

// One job. Each method by one thread at a time.
class Job {
 public:
  // Opens the session and allocates; waits for admission. Throws gpushare::Error, std::invalid_argument.
  Job(gpushare::Runtime& runtime, JobOptions options, std::unique_ptr<Math<float>> math);

  // One training step as one iteration: waits for its turn, enqueues, ends.
  void train();
  // Share of batch `number` that is classified rightly; waits for the result.
  double accuracy(int number);
  // Inference whose result stays on the device; waits for it.
  void serve(int number);

  // The losses of the steps so far (the last kept_losses); waits for them.
  std::vector<float> losses();
  gpushare::Session& session() { return session_; }
  Trainer<float>& trainer() { return trainer_; }

 private:
  gpushare::Session session_;
  Trainer<float> trainer_;
};

// How far a training in float may be from the reference after some tens of steps: rounding grows with each step,
// fastest through batch normalisation.
double tolerance(const std::string& network);
// Largest relative distance of two series of losses.
double distance(const std::vector<float>& losses, const std::vector<double>& reference);

// The operations for a device: on a GPU those of cuBLAS and cuDNN, from the library beside this program
// (libtraining_cuda.so, or the path in GPUSHARE_TRAINING_CUDA); elsewhere the host's. `kind`: "auto", "host" or
// "cuda". Throws std::runtime_error with the reason when it cannot be had.
std::unique_ptr<Math<float>> make_math(const std::string& device, const std::string& kind,
                                       bool allow_tf32 = false);
inline std::unique_ptr<Math<float>> make_math(const gpushare::Runtime& runtime, const std::string& kind) {
  return make_math(runtime.info().device, kind);
}

}  // namespace training
