// Measurements 2, 3, 4, 5 and 7.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <gpushare/gpushare.hpp>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "measures.hpp"

namespace gpushare::gpu_suite {
namespace {

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

CUstream native(const Iteration& iteration) {
  return static_cast<CUstream>(iteration.stream().native());
}

// `pieces` fills of the block on the stream: the device work of one iteration.
void fill(const Driver& driver, CUstream stream, CUdeviceptr block, uint64_t bytes, int pieces) {
  for (int i = 0; i < pieces; ++i)
    must(driver.cuMemsetD8Async(block, static_cast<unsigned char>(i), bytes, stream), "fill");
}

}  // namespace

void measure_iteration_overhead(const Driver& driver, const Settings& settings, Report& report) {
  const std::string group = "2 iteration overhead";
  for (const int pieces : {1, 10, 100}) {
    const uint64_t mib = settings.fill_bytes >> 20;
    const std::string size =
        mib > 0 ? std::to_string(mib) + " MiB" : std::to_string(settings.fill_bytes >> 10) + " KiB";
    const std::string what = std::to_string(pieces) + " fills of " + size;
    const int iterations = std::max(1, settings.iterations / pieces);
    const PlainStream stream(driver);
    const PlainBlock block(driver, settings.fill_bytes);
    const TimingEvent start(driver), end(driver);
    const auto plain = [&](bool events) {
      for (int i = 0; i < iterations; ++i) {
        if (events) start.record(stream.get());
        fill(driver, stream.get(), block.get(), settings.fill_bytes, pieces);
        if (events) end.record(stream.get());
      }
      stream.synchronize();
    };
    Runtime runtime =
        Runtime::open({.device = "cuda:0", .capacity_bytes = (64u << 20) + 4 * settings.fill_bytes});
    Session session = runtime.open_session(
        {.persistent_bytes = 2u << 20, .ephemeral_bytes = settings.fill_bytes, .allow_queueing = false});
    const auto shared = [&] {
      for (int i = 0; i < iterations; ++i) {
        Iteration iteration = session.begin_iteration();
        const Address mine = iteration.alloc_bytes(settings.fill_bytes);
        fill(driver, native(iteration), mine, settings.fill_bytes, pieces);
        iteration.end();
      }
      runtime.synchronize();
    };
    std::vector<double> bare, with_events, with;
    // In turn, so that all see the same clocks and the same neighbours; the first round warms up.
    for (int r = 0; r <= settings.repeats; ++r) {
      const auto add = [&](std::vector<double>& times, const std::function<void()>& run) {
        const auto began = Clock::now();
        run();
        if (r > 0) times.push_back(us_since(began) / iterations);
      };
      add(bare, [&] { plain(false); });
      add(with_events, [&] { plain(true); });
      add(with, shared);
    }
    report.add(group, what, "plain stream", "us/iter", bare);
    // gpushare's iterations have two events each, by which they are measured.
    report.add(group, what, "plain stream with two events", "us/iter", with_events);
    report.add(group, what, "gpushare", "us/iter", with);
  }
  measure_network_overhead(driver, settings, report);
}

void measure_switch(const Driver& driver, const Settings& settings, Report& report) {
  const std::string group = "3 switch between sessions";
  for (const uint32_t depth : {1u, 2u, 4u}) {
    Runtime runtime = Runtime::open({.device = "cuda:0",
                                     .policy = "fair",
                                     .capacity_bytes = (64u << 20) + 4 * settings.fill_bytes,
                                     .max_lanes = 1,
                                     .enqueue_depth = depth});
    std::deque<TimingEvent> events;
    std::vector<double> switches;
    std::vector<double> stays;
    struct Span {
      const TimingEvent* start;
      const TimingEvent* end;
      int session;
    };
    std::vector<Span> spans;
    std::mutex mutex;
    const auto drive = [&](Session& session, int id, int iterations) {
      CUcontext context = nullptr;
      must(driver.cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
      must(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent");
      for (int i = 0; i < iterations; ++i) {
        Iteration iteration = session.begin_iteration();
        const Address block = iteration.alloc_bytes(settings.fill_bytes);
        Span span{};
        {
          const std::lock_guard<std::mutex> lock(mutex);
          span = {&events.emplace_back(driver), &events.emplace_back(driver), id};
        }
        span.start->record(native(iteration));
        fill(driver, native(iteration), block, settings.fill_bytes, 2);
        span.end->record(native(iteration));
        {
          const std::lock_guard<std::mutex> lock(mutex);
          spans.push_back(span);
        }
        iteration.end();
      }
      must(driver.cuCtxPopCurrent(&context), "cuCtxPopCurrent");
      must(driver.cuDevicePrimaryCtxRelease(0), "cuDevicePrimaryCtxRelease");
    };
    const SessionOptions needs{
        .persistent_bytes = 2u << 20, .ephemeral_bytes = settings.fill_bytes, .allow_queueing = false};
    Session first = runtime.open_session(needs);
    Session second = runtime.open_session(needs);
    Worker other([&] { drive(second, 1, settings.iterations); });
    drive(first, 0, settings.iterations);
    other.join();
    runtime.synchronize();
    // In the order of the lane: iterations of a lane are serial, so the order in which they were recorded.
    for (size_t i = 1; i < spans.size(); ++i) {
      const double gap = spans[i].start->microseconds_since(*spans[i - 1].end);
      (spans[i].session == spans[i - 1].session ? stays : switches).push_back(gap);
    }
    const std::string at = ", enqueue depth " + std::to_string(depth);
    report.add(group, "device idle where another session goes on" + at, "gpushare", "us", switches);
    if (!stays.empty()) report.add(group, "device idle where the same goes on" + at, "gpushare", "us", stays);
  }
  measure_network_switch(driver, settings, report);
}

void measure_policies(const Driver& driver, const Settings& settings, Report& report) {
  const std::string group = "4 policies, eight jobs";
  const std::vector<FillJob> jobs = {{60, 1}, {60, 2}, {30, 4}, {30, 8}, {15, 16}, {15, 2}, {8, 24}, {8, 1}};
  const uint64_t bytes = settings.fill_bytes;
  const int repeats = std::max(3, settings.repeats / 5);

  std::vector<double> makespans;
  std::vector<double> completions;
  for (int r = 0; r <= repeats; ++r) {
    std::vector<std::unique_ptr<PlainStream>> streams;
    std::vector<std::unique_ptr<PlainBlock>> blocks;
    std::vector<double> done(jobs.size());
    std::vector<Worker> threads;
    for (size_t j = 0; j < jobs.size(); ++j) {
      streams.push_back(std::make_unique<PlainStream>(driver));
      blocks.push_back(std::make_unique<PlainBlock>(driver, bytes));
    }
    CUcontext context = nullptr;
    must(driver.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
    const auto start = Clock::now();
    for (size_t j = 0; j < jobs.size(); ++j) {
      threads.emplace_back([&, j] {
        CUcontext popped = nullptr;
        must(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent");
        for (int i = 0; i < jobs[j].iterations; ++i)
          fill(driver, streams[j]->get(), blocks[j]->get(), bytes, jobs[j].pieces);
        streams[j]->synchronize();
        done[j] = us_since(start) / 1e3;
        must(driver.cuCtxPopCurrent(&popped), "cuCtxPopCurrent");
      });
    }
    for (Worker& thread : threads) thread.join();
    if (r == 0) continue;
    makespans.push_back(*std::max_element(done.begin(), done.end()));
    completions.push_back(std::accumulate(done.begin(), done.end(), 0.0) / static_cast<double>(done.size()));
  }
  report.add(group, "makespan", "plain, a stream each", "ms", makespans);
  report.add(group, "mean completion", "plain, a stream each", "ms", completions);

  makespans.clear();
  completions.clear();
  for (int r = 0; r <= repeats; ++r) {
    const std::vector<double> done = run_processes(settings.program, jobs, bytes);
    if (r == 0) continue;
    makespans.push_back(*std::max_element(done.begin(), done.end()));
    completions.push_back(std::accumulate(done.begin(), done.end(), 0.0) / static_cast<double>(done.size()));
  }
  report.add(group, "makespan", "time slicing, a process each", "ms", makespans);
  report.add(group, "mean completion", "time slicing, a process each", "ms", completions);

  for (const char* policy : {"fifo", "srtf", "fair", "pack"}) {
    makespans.clear();
    completions.clear();
    for (int r = 0; r <= repeats; ++r) {
      Runtime runtime = Runtime::open(
          {.device = "cuda:0", .policy = policy, .capacity_bytes = (64u << 20) + (jobs.size() + 2) * bytes});
      std::vector<Session> sessions;
      for (const FillJob& job : jobs) {
        sessions.push_back(runtime.open_session({.persistent_bytes = 2u << 20,
                                                 .ephemeral_bytes = bytes,
                                                 .remaining = Nanoseconds(1000 * job.iterations * job.pieces),
                                                 .iterations_total = static_cast<uint64_t>(job.iterations)}));
      }
      std::vector<double> done(jobs.size());
      std::vector<Worker> threads;
      const auto start = Clock::now();
      for (size_t j = 0; j < jobs.size(); ++j) {
        threads.emplace_back([&, j] {
          Ticket last;
          for (int i = 0; i < jobs[j].iterations; ++i) {
            last = sessions[j].run([&, j](Iteration& iteration) {
              const Address block = iteration.alloc_bytes(bytes);
              for (int k = 0; k < jobs[j].pieces; ++k)
                iteration.stream().fill(block, static_cast<uint8_t>(k), bytes);
            });
          }
          last.get();
          sessions[j].close();  // fifo and srtf let the next job in only then
          done[j] = us_since(start) / 1e3;
        });
      }
      for (Worker& thread : threads) thread.join();
      if (r == 0) continue;
      makespans.push_back(*std::max_element(done.begin(), done.end()));
      completions.push_back(std::accumulate(done.begin(), done.end(), 0.0) /
                            static_cast<double>(done.size()));
    }
    report.add(group, "makespan", std::string("gpushare ") + policy, "ms", makespans);
    report.add(group, "mean completion", std::string("gpushare ") + policy, "ms", completions);
  }

  // Three equal jobs in one lane that arrive one after the other and leave in the same order. While two or three of
  // them are there, the one with least service is compared with the fair share since the last arrival or departure.
  std::vector<double> shares;
  for (int r = 0; r < repeats; ++r) {
    Runtime runtime = Runtime::open(
        {.device = "cuda:0", .policy = "fair", .capacity_bytes = (64u << 20) + 5 * bytes, .max_lanes = 1});
    std::vector<Session> sessions(3);
    std::atomic<bool> stop[3] = {false, false, false};
    std::vector<Worker> threads;
    // Also when a session is refused.
    const std::shared_ptr<void> stops(nullptr, [&](void*) { stop[0] = stop[1] = stop[2] = true; });
    const auto arrive = [&](size_t i) {
      sessions[i] = runtime.open_session({.persistent_bytes = 2u << 20, .ephemeral_bytes = bytes});
      threads.emplace_back([&, i] {
        while (!stop[i]) {
          Iteration iteration = sessions[i].begin_iteration();
          iteration.stream().fill(iteration.alloc_bytes(bytes), 1, bytes);
          iteration.end();
        }
      });
    };
    const auto settle = [&](size_t from, size_t to) {
      // The lane's first iteration may take long; the share counts from when all have been served.
      for (int tries = 0; tries < 1000; ++tries) {
        uint64_t least = UINT64_MAX;
        for (size_t i = from; i < to; ++i) least = std::min(least, sessions[i].info().service_ns);
        if (least > 0) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      std::vector<uint64_t> before;
      for (size_t i = from; i < to; ++i) before.push_back(sessions[i].info().service_ns);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      uint64_t least = UINT64_MAX;
      uint64_t sum = 0;
      for (size_t i = from; i < to; ++i) {
        const uint64_t got = sessions[i].info().service_ns - before[i - from];
        least = std::min(least, got);
        sum += got;
      }
      if (sum > 0)
        shares.push_back(static_cast<double>(least) * static_cast<double>(to - from) /
                         static_cast<double>(sum));
    };
    for (size_t i = 0; i < 3; ++i) arrive(i);
    settle(0, 3);
    stop[0] = true;
    settle(1, 3);
    stop[1] = stop[2] = true;
    for (Worker& thread : threads) thread.join();
  }
  report.add(group, "least service over the fair share, three equal jobs", "gpushare fair", "ratio", shares);
}

void measure_many_models(const Driver& driver, const Settings& settings, Report& report) {
  const std::string group = "5 many models";
  constexpr int kModels = 42;
  constexpr uint64_t kModelBytes = 4u << 20;
  const uint64_t bytes = std::min<uint64_t>(settings.fill_bytes, 8u << 20);
  const auto pause = std::chrono::milliseconds(2);
  {
    const PlainStream stream(driver);
    const PlainBlock block(driver, bytes);
    std::vector<double> latencies;
    fill(driver, stream.get(), block.get(), bytes, 4);
    stream.synchronize();
    for (int i = 0; i < settings.iterations; ++i) {
      std::this_thread::sleep_for(pause);
      const auto start = Clock::now();
      fill(driver, stream.get(), block.get(), bytes, 4);
      stream.synchronize();
      latencies.push_back(us_since(start));
    }
    report.add(group, "request of one model, alone on the GPU", "plain stream", "us", latencies);
  }
  Runtime runtime =
      Runtime::open({.device = "cuda:0",
                     .capacity_bytes = kModels * 2 * kModelBytes + 8 * std::max<uint64_t>(bytes, 32u << 20)});
  std::vector<Session> models;
  for (int i = 0; i < kModels; ++i) {
    models.push_back(runtime.open_session({.persistent_bytes = kModelBytes, .ephemeral_bytes = bytes}));
    (void)models.back().alloc_bytes(Kind::model, kModelBytes / 2);
  }
  const auto request = [&](int model) {
    models[static_cast<size_t>(model)]
        .run([&](Iteration& iteration) {
          const Address block = iteration.alloc_bytes(bytes);
          for (int k = 0; k < 4; ++k) iteration.stream().fill(block, 1, bytes);
        })
        .get();
  };
  // A lane's first use pays once for what the model keeps: threads, and on the stand-in the pages of its memory.
  for (int i = 0; i < kModels; ++i) request(i);
  std::vector<double> latencies;
  for (int i = 0; i < settings.iterations; ++i) {
    std::this_thread::sleep_for(pause);
    const auto start = Clock::now();
    request(i * 5 % kModels);
    latencies.push_back(us_since(start));
  }
  report.add(group, "request of one of 42 resident models", "gpushare", "us", latencies);
  measure_network_models(driver, settings, report);
}

}  // namespace gpushare::gpu_suite
