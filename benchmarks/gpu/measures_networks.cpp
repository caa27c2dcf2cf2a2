// The networks of examples/training in measurements 2, 3, 5, and measurement 7.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "job.hpp"
#include "measures.hpp"

namespace gpushare::gpu_suite {
namespace {

using Clock = std::chrono::steady_clock;
constexpr const char* kNetworks[] = {"mlp", "resnet", "transformer"};

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

std::unique_ptr<training::Math<float>> math_for(const Driver& driver) {
  return training::make_math("cuda:0", driver.is_standin() ? "host" : "cuda");
}

// False, with the reason in the report, where the operations were not built (no nvcc, cuBLAS or cuDNN).
bool have_networks(const Driver& driver, Report& report, const std::string& group) {
  try {
    (void)math_for(driver);
    return true;
  } catch (const std::exception& error) {
    report.skip(group, "the networks", error.what());
    return false;
  }
}

training::TrainerOptions trainer_options(const Settings& settings, const char* network) {
  training::TrainerOptions options;
  options.network = {network, settings.width};
  options.batch = settings.batch;
  options.batches = 4;
  return options;
}

training::JobOptions job_options(const Settings& settings, const char* network,
                                 uint64_t ephemeral_bytes = 0) {
  training::JobOptions options;
  options.trainer = trainer_options(settings, network);
  options.session.name = network;
  options.session.ephemeral_bytes = ephemeral_bytes;
  return options;
}

CUstream native(const Iteration& iteration) {
  return static_cast<CUstream>(iteration.stream().native());
}

// A stream of the driver's own as a queue.
class DriverQueue final : public training::Queue {
 public:
  explicit DriverQueue(const Driver& driver) : driver_(driver), stream_(driver) {}
  void* native() const override { return stream_.get(); }
  void run(std::function<void()> function) const override {
    auto owned = std::make_unique<std::function<void()>>(std::move(function));
    must(driver_.cuLaunchHostFunc(
             stream_.get(),
             [](void* data) {
               const std::unique_ptr<std::function<void()>> body(static_cast<std::function<void()>*>(data));
               (*body)();
             },
             owned.get()),
         "cuLaunchHostFunc");
    (void)owned.release();
  }
  void synchronize() const { stream_.synchronize(); }

 private:
  const Driver& driver_;
  const PlainStream stream_;
};

// A trainer without gpushare, at its best: its memory is there from the start, taking a piece is an addition.
class PlainTrainer {
 public:
  PlainTrainer(const Driver& driver, const training::TrainerOptions& options, uint64_t ephemeral_bytes)
      : driver_(driver),
        trainer_(options, math_for(driver)),
        queue_(driver),
        persistent_(driver, trainer_.persistent_bytes() + 4096),
        ephemeral_(driver, ephemeral_bytes),
        room_(ephemeral_bytes) {
    uint64_t used = 0;
    trainer_.prepare(
        [&](Kind, size_t bytes) {
          const CUdeviceptr at = persistent_.get() + used;
          used += (bytes + 255) / 256 * 256;
          return reinterpret_cast<void*>(at);
        },
        [&](void* to, const void* from, size_t bytes) {
          must(driver.cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from, bytes,
                                        static_cast<CUstream>(queue_.native())),
               "cuMemcpyHtoDAsync");
          queue_.synchronize();
        });
  }
  void train() {
    used_ = 0;
    trainer_.train(queue_, scratch_);
  }
  void serve(int number) {
    used_ = 0;
    (void)trainer_.infer(queue_, scratch_, number);
    queue_.synchronize();
  }
  void synchronize() const { queue_.synchronize(); }

 private:
  const Driver& driver_;
  training::Trainer<float> trainer_;
  const DriverQueue queue_;
  const PlainBlock persistent_, ephemeral_;
  const uint64_t room_;
  uint64_t used_ = 0;
  const training::Scratch scratch_ = [this](size_t bytes) {
    const uint64_t at = used_;
    used_ += (bytes + 255) / 256 * 256;
    if (used_ > room_) throw std::runtime_error("the plain trainer's scratch memory is used up");
    return reinterpret_cast<void*>(ephemeral_.get() + at);
  };
};

uint64_t measured_need(training::Job& job) {
  job.train();
  job.train();
  job.train();
  return job.session().info().promised_ephemeral_bytes;
}

// Takes half of the GPU: the other half is for the plain side, and for cuBLAS and cuDNN themselves. On a large GPU it
// takes less, because a session's first iterations run on most of the free memory, which takes a driver call or two for
// each 2 MiB.
Runtime open(const Driver& driver, uint32_t max_lanes = 0, uint32_t depth = 0) {
  size_t free = 0, total = 0;
  must(driver.cuMemGetInfo(&free, &total), "cuMemGetInfo");
  const uint64_t bytes = std::min<uint64_t>(total / 2, uint64_t{16} << 30);
  return Runtime::open({.device = "cuda:0?total_bytes=" + std::to_string(bytes),
                        .policy = "fair",
                        .max_lanes = max_lanes,
                        .enqueue_depth = depth});
}

}  // namespace

void measure_network_overhead(const Driver& driver, const Settings& settings, Report& report) {
  const std::string group = "2 iteration overhead";
  if (!have_networks(driver, report, group)) return;
  const int iterations = std::max(2, settings.iterations / 4);
  for (const char* network : kNetworks) {
    Runtime runtime = open(driver);
    training::Job job(runtime, job_options(settings, network), math_for(driver));
    PlainTrainer plain(driver, trainer_options(settings, network), 2 * measured_need(job) + (1u << 20));
    const auto run = [&](const std::function<void()>& step, const std::function<void()>& wait) {
      const auto start = Clock::now();
      for (int i = 0; i < iterations; ++i) step();
      wait();
      return us_since(start) / iterations;
    };
    std::vector<double> without, with, overhead;
    // In turn, so that both see the same clocks and the same neighbours; the first pair warms up.
    for (int r = 0; r <= settings.repeats; ++r) {
      const double bare = run([&] { plain.train(); }, [&] { plain.synchronize(); });
      const double shared = run([&] { job.train(); }, [&] { runtime.synchronize(); });
      if (r == 0) continue;
      without.push_back(bare);
      with.push_back(shared);
      overhead.push_back(100 * (shared / bare - 1));
    }
    const std::string what =
        std::string("training step, ") + network + ", batch " + std::to_string(settings.batch);
    report.add(group, what, "plain stream", "us/iter", without);
    report.add(group, what, "gpushare", "us/iter", with);
    report.add(group, what, "gpushare over plain", "%", overhead);
  }
}

void measure_network_switch(const Driver& driver, const Settings& settings, Report& report) {
  const std::string group = "3 switch between sessions";
  if (!have_networks(driver, report, group)) return;
  for (const uint32_t depth : {1u, 2u, 4u}) {
    Runtime runtime = open(driver, 1, depth);
    struct Span {
      TimingEvent start, end;
      int session;
      Span(const Driver& d, int id) : start(d), end(d), session(id) {}
    };
    std::deque<Span> spans;  // in the order of the lane
    std::mutex mutex;
    const auto drive = [&](training::Job& job, int id, int iterations) {
      CUcontext context = nullptr;
      must(driver.cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
      must(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent");
      for (int i = 0; i < iterations; ++i) {
        Iteration iteration = job.session().begin_iteration();
        Span* span = nullptr;
        {
          const std::lock_guard<std::mutex> lock(mutex);
          span = &spans.emplace_back(driver, id);
        }
        span->start.record(native(iteration));
        const training::StreamQueue queue(iteration.stream());
        job.trainer().train(queue, training::scratch_of(iteration));
        span->end.record(native(iteration));
        iteration.end();
      }
      must(driver.cuCtxPopCurrent(&context), "cuCtxPopCurrent");
      must(driver.cuDevicePrimaryCtxRelease(0), "cuDevicePrimaryCtxRelease");
    };
    training::Job first(runtime, job_options(settings, "mlp"), math_for(driver));
    training::Job second(runtime, job_options(settings, "transformer"), math_for(driver));
    (void)measured_need(first);
    (void)measured_need(second);
    const int iterations = std::max(4, settings.iterations / 4);
    Worker other([&] { drive(second, 1, iterations); });
    drive(first, 0, iterations);
    other.join();
    runtime.synchronize();
    std::vector<double> switches, stays;
    for (size_t i = 1; i < spans.size(); ++i) {
      const double gap = spans[i].start.microseconds_since(spans[i - 1].end);
      (spans[i].session == spans[i - 1].session ? stays : switches).push_back(gap);
    }
    const std::string at = ", networks, enqueue depth " + std::to_string(depth);
    report.add(group, "device idle where another session goes on" + at, "gpushare", "us", switches);
    if (!stays.empty()) report.add(group, "device idle where the same goes on" + at, "gpushare", "us", stays);
  }
}

void measure_network_models(const Driver& driver, const Settings& settings, Report& report) {
  const std::string group = "5 many models";
  if (!have_networks(driver, report, group)) return;
  constexpr int kModels = 42;
  const auto pause = std::chrono::milliseconds(2);
  Settings small = settings;
  small.batch = std::min(settings.batch, 8);
  Runtime runtime = open(driver);
  uint64_t needs[3] = {};
  std::vector<std::vector<double>> alone(3);
  for (size_t n = 0; n < 3; ++n) {
    {
      training::Job probe(runtime, job_options(small, kNetworks[n]), math_for(driver));
      needs[n] = measured_need(probe);
    }
    PlainTrainer plain(driver, trainer_options(small, kNetworks[n]), 2 * needs[n] + (1u << 20));
    plain.serve(0);
    for (int i = 0; i < std::max(5, settings.iterations / 4); ++i) {
      std::this_thread::sleep_for(pause);
      const auto start = Clock::now();
      plain.serve(i % 4);
      alone[n].push_back(us_since(start));
    }
  }
  std::vector<std::unique_ptr<training::Job>> models;
  for (int i = 0; i < kModels; ++i) {
    const auto n = static_cast<size_t>(i % 3);
    models.push_back(std::make_unique<training::Job>(runtime, job_options(small, kNetworks[n], needs[n]),
                                                     math_for(driver)));
    models.back()->serve(0);
  }
  std::vector<std::vector<double>> resident(3);
  for (int i = 0; i < std::max(kModels, settings.iterations); ++i) {
    std::this_thread::sleep_for(pause);
    const int model = i * 5 % kModels;
    const auto start = Clock::now();
    models[static_cast<size_t>(model)]->serve(i % 4);
    resident[static_cast<size_t>(model % 3)].push_back(us_since(start));
  }
  for (size_t n = 0; n < 3; ++n) {
    const std::string what =
        std::string("request, ") + kNetworks[n] + ", batch " + std::to_string(small.batch);
    report.add(group, what + ", alone on the GPU", "plain stream", "us", alone[n]);
    report.add(group, what + ", one of 42 resident", "gpushare", "us", resident[n]);
  }
}

void measure_partitions(const Driver& driver, const Settings& settings, Report& report) {
  const std::string group = "7 SM partitions";
  if (!have_networks(driver, report, group)) return;
  const gpushare_runtime_info facts = open(driver).info();
  if (facts.partitionable_compute_units == 0) {
    report.skip(group, "requests beside a training", "the device has no partitions");
    return;
  }
  const uint32_t granule = facts.granularity_compute_units;
  const uint32_t share = std::max(granule, facts.partitionable_compute_units / 4 / granule * granule);
  struct Case {
    const char* by;
    bool heavy;
    uint32_t units, heavy_units;
  };
  const std::string own = "own share, " + std::to_string(share) + " SMs";
  const Case cases[] = {{"alone, all SMs", false, 0, 0},
                        {"alone, own share", false, share, 0},
                        {"both on all SMs", true, 0, 0},
                        {own.c_str(), true, share, facts.partitionable_compute_units - share}};
  Settings large = settings;
  large.batch = settings.batch * 4;
  for (const Case& c : cases) {
    Runtime runtime = open(driver);
    Settings small = settings;
    small.batch = std::min(settings.batch, 8);
    training::JobOptions options = job_options(small, "mlp");
    options.session.compute_units = c.units;
    training::Job critical(runtime, options, math_for(driver));
    (void)measured_need(critical);
    std::atomic<bool> stop{false}, gone{false};
    std::atomic<int> trained{0};
    Worker background = !c.heavy ? Worker() : Worker([&] {
      const std::shared_ptr<void> goes(nullptr, [&](void*) { gone = true; });
      training::JobOptions heavy = job_options(large, "resnet");
      heavy.session.compute_units = c.heavy_units;
      training::Job job(runtime, heavy, math_for(driver));
      for (; !stop; ++trained) job.train();
    });
    // Also when a request fails.
    const std::shared_ptr<void> stops(nullptr, [&](void*) { stop = true; });
    // Its first iterations are profiled, alone on the device, and libraries load their kernels in them.
    while (c.heavy && trained < 10 && !gone) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::vector<double> latencies;
    for (int i = 0; i < std::max(10, settings.iterations); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const auto start = Clock::now();
      critical.serve(i % 4);
      latencies.push_back(us_since(start));
    }
    stop = true;
    background.join();
    std::vector<double> sorted = latencies;
    std::sort(sorted.begin(), sorted.end());
    report.add(group, std::string("request, mlp, batch 8") + (c.heavy ? ", beside training" : ""), c.by, "us",
               latencies);
    report.add(group, std::string("its 99th percentile") + (c.heavy ? ", beside training" : ""), c.by, "us",
               {sorted[sorted.size() * 99 / 100]});
  }
}

}  // namespace gpushare::gpu_suite
