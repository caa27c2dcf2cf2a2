// The networks against numerical gradients, the training against its float64 reference, and the jobs as sessions:
// no GPU needed.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <thread>

#include "host_math.hpp"
#include "job.hpp"
#include "support/catch.hpp"

using namespace training;  // NOLINT(google-build-using-namespace)

namespace {

const std::vector<std::string> kNetworks = {"mlp", "resnet", "transformer"};

// A network in double with memory of its own, for derivatives.
struct Probe {
  int batch = 3;
  Network<double> network;
  Data data;
  HostMath<double> math;
  ImmediateQueue queue;
  std::vector<double> values, state, gradients;
  std::vector<std::unique_ptr<char[]>> blocks;
  Scratch scratch = [this](size_t bytes) {
    blocks.push_back(std::make_unique<char[]>(bytes));
    return static_cast<void*>(blocks.back().get());
  };

  explicit Probe(const std::string& name)
      : network(make_network<double>({name, 1})), data(make_data({name, 1}, batch, 5)) {
    network.initialise(11, &values, &state);
    gradients.assign(values.size(), 0);
    math.use(queue);
  }
  double loss(bool backward) {
    std::vector<double> spare = state;  // each call sees the same running statistics
    const Pass<double> pass{math, scratch, values.data(), gradients.data(), spare.data(), batch, true};
    const double* logits = network.forward(pass, data.inputs.data());
    double result = 0;
    double* dlogits = pass.make(static_cast<size_t>(batch * network.classes));
    math.cross_entropy(logits, data.labels.data(), &result, dlogits, batch, network.classes);
    if (backward) network.backward(pass, dlogits);
    blocks.clear();
    return result;
  }
};

gpushare::Runtime open_host(const std::string& policy = "fair") {
  return gpushare::Runtime::open({.device = "host", .policy = policy, .capacity_bytes = 256u << 20});
}

}  // namespace

TEST_CASE("gradients are those of the loss, by central differences", "[training]") {
  for (const std::string& name : kNetworks) {
    INFO(name);
    Probe probe(name);
    (void)probe.loss(true);
    const std::vector<double> gradients = probe.gradients;
    double most = 0;
    for (const double gradient : gradients) most = std::max(most, std::abs(gradient));
    REQUIRE(most > 1e-3);
    // A spread of places over all layers. A step may cross the bend of a ReLU: such a place disagrees with itself
    // at half the step and says nothing.
    const size_t stride = std::max<size_t>(1, gradients.size() / 150);
    int compared = 0, skipped = 0;
    for (size_t i = 0; i < gradients.size(); i += stride) {
      const double at = probe.values[i];
      const auto slope = [&](double step) {
        probe.values[i] = at + step;
        const double above = probe.loss(false);
        probe.values[i] = at - step;
        const double below = probe.loss(false);
        probe.values[i] = at;
        return (above - below) / (2 * step);
      };
      const double wide = slope(1e-5);
      const double narrow = slope(5e-6);
      if (std::abs(wide - narrow) > 1e-6 * most + 1e-4 * std::abs(narrow)) {
        ++skipped;
        continue;
      }
      INFO("parameter " << i << " of " << gradients.size());
      CHECK(std::abs(narrow - gradients[i]) <= 1e-6 * most + 1e-4 * std::abs(narrow));
      ++compared;
    }
    CHECK(compared > 100);
    CHECK(skipped < compared / 5);
  }
}

TEST_CASE("the loss of the reference falls for every network and batch size", "[training]") {
  for (const std::string& name : kNetworks) {
    for (const int batch : {4, 16}) {
      TrainerOptions options;
      options.network = {name, 1};
      options.batch = batch;
      options.batches = 4;
      const std::vector<double> losses = reference_losses(options, 40);
      INFO(name << " batch " << batch << ": " << losses.front() << " to " << losses.back());
      double first = 0, last = 0;
      for (size_t i = 0; i < 4; ++i) {
        first += losses[i];
        last += losses[losses.size() - 1 - i];
      }
      CHECK(last < 0.7 * first);
    }
  }
}

TEST_CASE("three networks as sessions of one process follow the reference", "[training]") {
  constexpr int kSteps = 40;
  gpushare::Runtime runtime = open_host();
  std::vector<std::thread> threads;
  std::vector<std::string> wrong(kNetworks.size());
  for (size_t i = 0; i < kNetworks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        JobOptions options;
        options.trainer.network = {kNetworks[i], 1};
        options.trainer.batch = 8;
        options.session.name = kNetworks[i];
        Job job(runtime, options, make_math(runtime, "auto"));
        for (int step = 0; step < kSteps; ++step) job.train();
        const double away = distance(job.losses(), reference_losses(options.trainer, kSteps));
        if (!(away <= tolerance(kNetworks[i]))) wrong[i] = "away " + std::to_string(away);
        if (job.accuracy(0) < 0.3) wrong[i] += " learned nothing";
        const gpushare_session_info info = job.session().info();
        // Nothing ephemeral is left between iterations, and the measured need is that of one iteration.
        if (info.ephemeral_bytes != 0 || info.promised_ephemeral_bytes == 0) wrong[i] += " ephemeral bytes";
        job.session().close();
      } catch (const std::exception& error) {
        wrong[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < wrong.size(); ++i) {
    INFO(kNetworks[i]);
    CHECK(wrong[i] == "");
  }
  CHECK(runtime.info().persistent_bytes == 0);
}

TEST_CASE("memory comes by kind: parameters, what is kept, and what one iteration uses", "[training]") {
  gpushare::Runtime runtime = open_host();
  Trainer<float> trainer({}, std::make_unique<HostMath<float>>());
  gpushare::Session session = runtime.open_session(
      {.persistent_bytes = trainer.persistent_bytes() + (1 << 20), .ephemeral_bytes = 4u << 20});
  uint64_t bytes[3] = {};
  gpushare::Iteration iteration = session.begin_iteration();
  const auto count = [&](gpushare::Address block) {
    const gpushare_block_info info = runtime.block_info(block);
    bytes[info.kind] += info.bytes;
    return gpushare::detail::pointer<void>(block);
  };
  trainer.prepare([&](gpushare::Kind kind, size_t size) { return count(session.alloc_bytes(kind, size)); },
                  [&](void* to, const void* from, size_t size) {
                    iteration.stream().copy_to_device(reinterpret_cast<uintptr_t>(to), from, size);
                    iteration.stream().synchronize();
                  });
  const StreamQueue queue(iteration.stream());
  trainer.train(queue, [&](size_t size) { return count(iteration.alloc_bytes(size)); });
  iteration.end();
  const uint64_t values = make_network<float>({}).sizes.values * sizeof(float);
  CHECK(bytes[GPUSHARE_KIND_MODEL] == 2 * values);
  CHECK(bytes[GPUSHARE_KIND_FRAMEWORK] > values);
  CHECK(bytes[GPUSHARE_KIND_EPHEMERAL] > 32 * 64 * sizeof(float));
  runtime.synchronize();
}

TEST_CASE("a job that fails harms no other, and bad options are told", "[training]") {
  gpushare::Runtime runtime = open_host();
  JobOptions options;
  options.trainer.network.name = "no such network";
  CHECK_THROWS_AS(Job(runtime, options, make_math(runtime, "host")), std::invalid_argument);
  options.trainer.network.name = "mlp";
  options.trainer.batch = 0;
  CHECK_THROWS_AS(Job(runtime, options, make_math(runtime, "host")), std::invalid_argument);
  CHECK_THROWS_AS(make_math(runtime, "cuda"), std::runtime_error);
  CHECK_THROWS_AS(make_math(runtime, "abacus"), std::runtime_error);

  options.trainer.batch = 8;
  Job good(runtime, options, make_math(runtime, "host"));
  Job ended(runtime, options, make_math(runtime, "host"));
  ended.train();
  ended.session().cancel();
  CHECK_THROWS_AS(ended.train(), gpushare::Error);
  good.train();
  CHECK(good.losses().size() == 1);
}
