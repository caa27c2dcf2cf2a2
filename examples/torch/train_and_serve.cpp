// train_and_serve: two networks are trained and a third one serves, in one process, as sessions that share the host
// device. libtorch's CPU tensors lie in the sessions' memory, an iteration is one training step or one batch of
// requests. For every policy the program holds the losses against a run without gpushare, bit by bit, and the memory
// against what the networks need.
//
//   example_torch [steps]      prints a line a job and policy; returns 1 if anything differs
// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu_allocator.hpp"
#include "gpushare/gpushare.hpp"
#include "job.hpp"

namespace gs = gpushare;

namespace {

// Runs a step, in a turn of its session or bare.
using Turn = std::function<void(const std::function<void()>&)>;

torch::nn::Sequential perceptron() {
  return torch::nn::Sequential(torch::nn::Linear(64, 256), torch::nn::ReLU(), torch::nn::Linear(256, 10));
}

torch::nn::Sequential convolutions() {
  return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3).padding(1)),
                               torch::nn::ReLU(), torch::nn::MaxPool2d(2), torch::nn::Flatten(),
                               torch::nn::Linear(8 * 8 * 8, 10));
}

// A job's result: its losses, or the sums of its answers; and the bytes of the tensors that it keeps.
struct Outcome {
  std::vector<float> values;
  int64_t kept_bytes = 0;
};

// Random numbers come from a generator of the job's own, so that jobs side by side see the same data as one after the other.
at::Tensor data(at::Generator& generator, at::IntArrayRef shape) {
  return torch::randn(shape, generator);
}

void fill(torch::nn::Sequential& network, at::Generator& generator) {
  const torch::NoGradGuard guard;
  for (at::Tensor& parameter : network->parameters())
    parameter.copy_(0.1 * data(generator, parameter.sizes()));
}

Outcome train(const Turn& build, const Turn& turn, int steps, bool image) {
  at::Generator generator = at::detail::createCPUGenerator(image ? 2 : 1);
  torch::nn::Sequential network{nullptr};
  std::unique_ptr<torch::optim::SGD> optimizer;
  build([&] {
    network = image ? convolutions() : perceptron();
    fill(network, generator);
    optimizer = std::make_unique<torch::optim::SGD>(network->parameters(),
                                                    torch::optim::SGDOptions(0.05).momentum(0.9));
  });
  Outcome outcome;
  for (int step = 0; step < steps; ++step) {
    turn([&] {
      const at::Tensor input = image ? data(generator, {32, 1, 16, 16}) : data(generator, {32, 64});
      const at::Tensor target = input.flatten(1).slice(1, 0, 10).argmax(1);
      optimizer->zero_grad();
      const at::Tensor loss = torch::nn::functional::cross_entropy(network->forward(input), target);
      loss.backward();
      optimizer->step();
      outcome.values.push_back(loss.item<float>());
    });
  }
  for (const at::Tensor& parameter : network->parameters())
    outcome.kept_bytes += 3 * static_cast<int64_t>(parameter.nbytes());
  return outcome;  // parameter, gradient, momentum: three tensors each
}

Outcome serve(const Turn& build, const Turn& turn, int steps) {
  at::Generator generator = at::detail::createCPUGenerator(3);
  torch::nn::Sequential network{nullptr};
  build([&] {
    network = perceptron();
    fill(network, generator);
  });
  Outcome outcome;
  const torch::NoGradGuard guard;
  for (int step = 0; step < steps; ++step)
    turn([&] { outcome.values.push_back(network->forward(data(generator, {16, 64})).sum().item<float>()); });
  for (const at::Tensor& parameter : network->parameters())
    outcome.kept_bytes += static_cast<int64_t>(parameter.nbytes());
  return outcome;
}

Outcome run(int job, const Turn& build, const Turn& turn, int steps) {
  return job == 2 ? serve(build, turn, steps) : train(build, turn, steps, /*image=*/job == 1);
}

const char* const kNames[] = {"perceptron", "convolutions", "serving"};

// One job as a session of `runtime`. Returns what is wrong with it, or "".
std::string share(const std::shared_ptr<gs::Runtime>& runtime, int number, int steps, const Outcome& alone) {
  gs::SessionOptions options;
  options.name = kNames[number];
  options.persistent_bytes = 16 << 20;
  options.ephemeral_bytes = 32 << 20;
  gs::torch::Job job(runtime, options);
  std::string wrong;
  const Turn build = [&](const std::function<void()>& body) {
    const gs::torch::Job::Scope scope(job);
    body();
  };
  uint64_t persistent = 0;
  const Turn turn = [&](const std::function<void()>& body) {
    job.begin();
    body();
    job.end();
    const gpushare_session_info info = job.info();
    if (info.ephemeral_bytes != 0) wrong = "ephemeral bytes are left between iterations";
    persistent = info.persistent_bytes;
  };
  const Outcome shared = run(number, build, turn, steps);
  if (shared.values != alone.values) wrong = "the results differ from those without gpushare";
  // Each tensor is rounded up to the heap's granule.
  const auto expected = static_cast<uint64_t>(shared.kept_bytes);
  if (persistent < expected || persistent > expected + 64 * 256)
    wrong = "persistent bytes are not those of the network's tensors";
  std::printf("  %-13s %4d iterations   last value %12.6f   persistent %7.1f KiB (tensors %7.1f)   %s\n",
              kNames[number], steps, static_cast<double>(shared.values.back()),
              static_cast<double>(persistent) / 1024, static_cast<double>(expected) / 1024,
              wrong.empty() ? "as without gpushare" : wrong.c_str());
  return wrong;
}

}  // namespace

int main(int argc, char** argv) try {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 20;
  if (steps < 1) {
    std::fprintf(stderr, "usage: %s [steps], a number from 1; given: %s\n", argv[0], argv[1]);
    return 2;
  }
  at::set_num_threads(1);  // the order of additions must not depend on the machine's load
  const Turn bare = [](const std::function<void()>& body) { body(); };
  std::vector<Outcome> alone;
  for (int job = 0; job < 3; ++job) alone.push_back(run(job, bare, bare, steps));

  gs::torch::install_cpu_allocator();
  bool right = true;
  for (const char* policy : {"fifo", "srtf", "pack", "fair", "priority"}) {
    std::printf("%s\n", policy);
    gs::RuntimeOptions options;
    options.device = "host";
    options.policy = policy;
    options.capacity_bytes = 256 << 20;
    const auto runtime = std::make_shared<gs::Runtime>(gs::Runtime::open(options));
    std::vector<std::thread> threads;
    std::vector<std::string> wrong(3);
    for (int job = 0; job < 3; ++job)
      threads.emplace_back([&, job] {
        try {
          wrong[static_cast<size_t>(job)] = share(runtime, job, steps, alone[static_cast<size_t>(job)]);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "%s: %s\n", kNames[job], error.what());
          wrong[static_cast<size_t>(job)] = "it failed";
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::string& what : wrong) right = right && what.empty();
  }
  return right ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
