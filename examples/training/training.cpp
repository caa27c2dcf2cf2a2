// Trains and serves the three networks as sessions of one process, and compares the losses with a reference in
// double on the host.
//   example_training [--device SPEC] [--math auto|host|cuda] [--policy NAME] [--network NAME]... [--batch N]
//                    [--width N] [--steps N] [--serve N]
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "job.hpp"

namespace {

struct Arguments {
  std::string device = "auto";
  std::string math = "auto";
  std::string policy = "fair";
  std::vector<std::string> networks;
  int batch = 32;
  int width = 1;
  int steps = 30;
  int serve = 4;
};

bool read(int argc, char** argv, Arguments* out) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const char* value = argv[i + 1];
    if (name == "--device") {
      out->device = value;
    } else if (name == "--math") {
      out->math = value;
    } else if (name == "--policy") {
      out->policy = value;
    } else if (name == "--network") {
      out->networks.emplace_back(value);
    } else if (name == "--batch") {
      out->batch = std::atoi(value);
    } else if (name == "--width") {
      out->width = std::atoi(value);
    } else if (name == "--steps") {
      out->steps = std::atoi(value);
    } else if (name == "--serve") {
      out->serve = std::atoi(value);
    } else {
      return false;
    }
  }
  if (out->networks.empty()) out->networks = {"mlp", "resnet", "transformer"};
  return argc % 2 == 1 && out->steps > 1 && out->batch > 1;
}

struct Outcome {
  std::vector<float> losses;
  double accuracy = 0;
  gpushare_session_info info{};
  std::string error;
};

// One job's life, on a thread of its own.
Outcome run(gpushare::Runtime& runtime, const Arguments& arguments, const training::JobOptions& options) {
  Outcome outcome;
  try {
    training::Job job(runtime, options, training::make_math(runtime, arguments.math));
    for (int step = 0; step < arguments.steps; ++step) job.train();
    outcome.losses = job.losses();
    for (int i = 0; i < arguments.serve; ++i)
      outcome.accuracy += job.accuracy(i % options.trainer.batches) / arguments.serve;
    outcome.info = job.session().info();
  } catch (const std::exception& error) {
    outcome.error = error.what();
  }
  return outcome;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!read(argc, argv, &arguments)) {
    std::fprintf(stderr, "usage: see the head of examples/training/training.cpp\n");
    return 2;
  }
  try {
    gpushare::Runtime runtime =
        gpushare::Runtime::open({.device = arguments.device, .policy = arguments.policy});
    std::vector<training::JobOptions> options;
    for (const std::string& network : arguments.networks) {
      training::JobOptions job;
      job.trainer.network = {network, arguments.width};
      job.trainer.batch = arguments.batch;
      job.trainer.kept_losses = arguments.steps;
      job.session.name = network;
      options.push_back(job);
    }
    std::vector<Outcome> outcomes(options.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < options.size(); ++i)
      threads.emplace_back([&, i] { outcomes[i] = run(runtime, arguments, options[i]); });
    for (std::thread& thread : threads) thread.join();

    bool good = true;
    std::printf("%s, %d steps of batch %d, width %d\n", runtime.info().device, arguments.steps,
                arguments.batch, arguments.width);
    for (size_t i = 0; i < options.size(); ++i) {
      const Outcome& outcome = outcomes[i];
      if (!outcome.error.empty()) {
        std::printf("%-12s %s\n", arguments.networks[i].c_str(), outcome.error.c_str());
        good = false;
        continue;
      }
      const double away =
          training::distance(outcome.losses, training::reference_losses(options[i].trainer, arguments.steps));
      const bool close = away <= training::tolerance(arguments.networks[i]);
      const bool falls = outcome.losses.back() < outcome.losses.front();
      good = good && close && falls;
      std::printf(
          "%-12s loss %.4f -> %.4f%s; %.1e of the float64 reference%s; %.0f%% right; P %.2f MiB, E %.2f "
          "MiB\n",
          arguments.networks[i].c_str(), static_cast<double>(outcome.losses.front()),
          static_cast<double>(outcome.losses.back()), falls ? "" : " DOES NOT FALL", away,
          close ? "" : " TOO FAR", 100 * outcome.accuracy,
          static_cast<double>(outcome.info.promised_persistent_bytes) / (1 << 20),
          static_cast<double>(outcome.info.promised_ephemeral_bytes) / (1 << 20));
    }
    return good ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "example_training: %s\n", error.what());
    return 1;
  }
}
