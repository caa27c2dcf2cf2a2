// SPDX-License-Identifier: Apache-2.0
#include "roles.hpp"

#include <poll.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "daemon/service.hpp"
#include "executor/shared_image.hpp"

namespace gpushare::benchmarks {
namespace {

std::shared_ptr<executor::Iteration> begin(executor::Session& session) {
  return take(session.begin(GPUSHARE_NO_TIMEOUT), "begin");
}

void execute(executor::Iteration& iteration, double ms) {
  const auto stream = take(iteration.stream(), "stream");
  auto span = std::chrono::duration<double, std::milli>(ms);
  must(stream->launch_host(
           [](void* data) { std::this_thread::sleep_for(*static_cast<decltype(span)*>(data)); }, &span),
       "launch");
  must(stream->synchronize(), "synchronize");
}

void ready() {
  std::puts("ready");
  std::fflush(stdout);
}

void tell_time() {
  std::printf("%llu\n", static_cast<unsigned long long>(base::host_now_ns()));
  std::fflush(stdout);
}

bool input_came(int timeout_ms = 0) {
  pollfd wait{0, POLLIN, 0};
  return poll(&wait, 1, timeout_ms) != 0;
}

int run_daemon(const char* device, const char* policy, uint64_t capacity_bytes) {
  daemon::ServiceOptions options;
  options.socket = std::getenv("GPUSHARE_SOCKET");
  options.devices = {device};
  options.policy = policy;
  options.capacity_bytes = capacity_bytes;
  options.share_lanes = std::getenv("SHARE_LANES") != nullptr;
  const auto service = take(daemon::Service::start(std::move(options)), "daemon");
  ready();
  while (std::getchar() != EOF) {
  }
  return 0;
}

// Iterations that do nothing: so many, or with 0 until stdin ends.
int run_loop(const char* device, uint64_t iterations) {
  const auto runtime = open_runtime(device);
  const auto session = open_session(*runtime, "loop", kMiB);
  loop(*session, 1);
  ready();
  if (iterations > 0) {
    loop(*session, iterations);
    return 0;
  }
  std::atomic<bool> stop{false};
  std::thread watch([&] {
    while (std::getchar() != EOF) {
    }
    stop.store(true);
  });
  while (!stop.load(std::memory_order_relaxed)) loop(*session, 1);
  watch.join();
  return 0;
}

// Iterations of kStep of device work until stdin ends, then writes their points to the file.
int run_steps(const std::string& file) {
  const auto runtime = open_runtime("shared");
  const auto session = open_session(*runtime, "steps", kMiB);
  loop(*session, 1);
  ready();
  std::vector<Step> steps;
  while (!input_came()) {
    Step step{};
    step.asked = base::host_now_ns();
    const auto iteration = begin(*session);
    step.begun = base::host_now_ns();
    const auto stream = take(iteration->stream(), "stream");
    must(stream->launch_host(
             [](void* data) {
               auto& now = *static_cast<Step*>(data);
               now.start = base::host_now_ns();
               std::this_thread::sleep_for(kStep);
               now.stop = base::host_now_ns();
             },
             &step),
         "launch");
    must(stream->synchronize(), "synchronize");
    step.ended = base::host_now_ns();
    must(iteration->end(), "end");
    steps.push_back(step);
  }
  std::ofstream(file, std::ios::binary)
      .write(reinterpret_cast<const char*>(steps.data()),
             static_cast<std::streamsize>(steps.size() * sizeof(Step)));
  return 0;
}

// Trains until stdin ends, then prints its device time in ns.
int run_share(double weight) {
  const auto runtime = open_runtime("shared");
  const auto session = open_session(*runtime, "share", kMiB, 0, weight);
  loop(*session, 1);
  ready();
  while (!input_came()) {
    const auto iteration = begin(*session);
    execute(*iteration, 1);
    must(iteration->end(), "end");
  }
  std::printf("%llu\n", static_cast<unsigned long long>(session->info().service_ns));
  return 0;
}

// So many sessions, each with a thread that sends requests of `ms` of device work, `apart_ms` apart in the mean (exponential), until stdin
// ends; then prints the sum of the latencies in ns and how many there were.
int run_serve(const char* device, size_t sessions, double ms, double apart_ms, uint64_t seed) {
  const auto runtime = open_runtime(device);
  std::atomic<uint64_t> total_ns{0}, count{0};
  std::vector<std::shared_ptr<executor::Session>> all;
  for (size_t i = 0; i < sessions; ++i) {
    all.push_back(open_session(*runtime, "serve", kMiB));
    loop(*all.back(), 1);
  }
  ready();
  std::vector<std::thread> threads;
  for (size_t i = 0; i < sessions; ++i)
    threads.emplace_back([&, i] {
      std::mt19937_64 random(seed + i);
      std::exponential_distribution<double> apart(1 / apart_ms);
      for (uint64_t at_ns = base::host_now_ns();; ++count) {
        at_ns += static_cast<uint64_t>(apart(random) * 1e6);
        const uint64_t now_ns = base::host_now_ns();
        if (input_came(at_ns > now_ns ? static_cast<int>((at_ns - now_ns) / 1'000'000) : 0)) break;
        const uint64_t begin_ns = base::host_now_ns();
        const auto iteration = begin(*all[i]);
        execute(*iteration, ms);
        must(iteration->end(), "end");
        total_ns += base::host_now_ns() - begin_ns;
      }
    });
  for (std::thread& thread : threads) thread.join();
  std::printf("%llu\n%llu\n", static_cast<unsigned long long>(total_ns),
              static_cast<unsigned long long>(count));
  return 0;
}

// Trains on a state of its own, from and to `file` if it is not "-". Prints when each iteration ended. With the end of
// stdin it checks its state and ends.
int run_train(const char* device, uint64_t bytes, double ms, const std::string& file) {
  const auto runtime = open_runtime(device);
  const auto session = open_session(*runtime, "training", bytes);
  auto* const state = reinterpret_cast<uint64_t*>(
      take(session->alloc(memory::Kind::kModel, bytes, 0), "allocating the state"));
  const uint64_t words = bytes / sizeof(uint64_t);
  uint64_t done = 0;
  for (bool first = true; first || !input_came(); first = false) {
    const auto iteration = begin(*session);
    if (first) {
      std::ifstream saved(file, std::ios::binary);
      if (file == "-" || !saved.read(reinterpret_cast<char*>(state), static_cast<std::streamsize>(bytes)))
        for (uint64_t i = 0; i < words; ++i) state[i] = i;
      done = state[0];
    }
    if (state[0] != done || state[words - 1] != words - 1 + done) give_up("the state is another", {});
    execute(*iteration, ms);
    ++done;
    ++state[0];
    ++state[words - 1];
    must(iteration->end(), "end");
    tell_time();
  }
  const auto iteration = begin(*session);
  for (uint64_t i = 1; i < words - 1; ++i)
    if (state[i] != i) give_up("the state is another", {});
  if (file != "-")
    std::ofstream(file, std::ios::binary)
        .write(reinterpret_cast<const char*>(state), static_cast<std::streamsize>(bytes));
  must(iteration->end(), "end");
  return 0;
}

// For every line of stdin: gets its model to the device, executes it, prints when the answer was there, and leaves the device.
// The model is read from `file` before, as a standby process has it.
int run_infer(const char* device, const std::string& file, double ms) {
  std::vector<char> model(std::filesystem::file_size(file));
  std::ifstream(file, std::ios::binary).read(model.data(), static_cast<std::streamsize>(model.size()));
  const auto runtime = open_runtime(device);
  ready();
  while (std::getchar() != EOF) {
    const auto session = open_session(*runtime, "inference", model.size(), 10);
    const auto block = take(session->alloc(memory::Kind::kModel, model.size(), 0), "allocating the model");
    const auto iteration = begin(*session);
    const auto stream = take(iteration->stream(), "stream");
    must(stream->copy(block, reinterpret_cast<uintptr_t>(model.data()), model.size(),
                      GPUSHARE_COPY_HOST_TO_DEVICE),
         "copying the model");
    execute(*iteration, ms);
    tell_time();
    must(iteration->end(), "end");
    must(session->close(), "close");
  }
  return 0;
}

// Reads an image layer by layer when told to, each layer executing for its part of `ms`; tells when it was done.
int run_read(const std::string& file, double ms) {
  const auto runtime = open_runtime("shared");
  const auto session = open_session(*runtime, "reader", 0, 10);
  executor::SharedImageOptions options;
  options.path = file;
  options.iteration_ns = static_cast<uint64_t>(ms * 1e6);
  const auto image = take(session->open_image(options), "opening the image");
  const auto layers = static_cast<uint32_t>(image->layers().size());
  ready();
  while (std::getchar() != EOF) {
    const auto iteration = begin(*session);
    for (uint32_t i = 0; i < layers; ++i) {
      must(image->wait(i, i + 1, GPUSHARE_NO_TIMEOUT), "waiting for a layer");
      execute(*iteration, ms / layers);
    }
    must(iteration->end(), "end");
    tell_time();
  }
  return 0;
}

}  // namespace

std::shared_ptr<executor::Runtime> open_runtime(const std::string& device) {
  executor::RuntimeOptions options;
  options.device = device;
  return take(executor::Runtime::open(std::move(options)), "opening a runtime");
}

std::shared_ptr<executor::Session> open_session(executor::Runtime& runtime, const char* name, uint64_t p,
                                                int32_t priority, double weight) {
  executor::SessionOptions options;
  options.name = name;
  options.persistent_bytes = p;
  options.ephemeral_bytes = kMiB;
  options.priority = priority;
  options.weight = weight;
  return take(runtime.open_session(options), "opening a session");
}

void loop(executor::Session& session, uint64_t iterations) {
  for (uint64_t i = 0; i < iterations; ++i) must(begin(session)->end(), "end");
}

bool run_role(int argc, char** argv, int* out_code) {
  const std::string role = argc > 1 ? argv[1] : "";
  const auto number = [&](int i) { return std::strtoull(argv[i], nullptr, 10); };
  if (role == "daemon" && argc == 5)
    *out_code = run_daemon(argv[2], argv[3], number(4));
  else if (role == "loop" && argc == 4)
    *out_code = run_loop(argv[2], number(3));
  else if (role == "serve" && argc == 7)
    *out_code = run_serve(argv[2], number(3), std::atof(argv[4]), std::atof(argv[5]), number(6));
  else if (role == "steps" && argc == 3)
    *out_code = run_steps(argv[2]);
  else if (role == "share" && argc == 3)
    *out_code = run_share(std::atof(argv[2]));
  else if (role == "train" && argc == 6)
    *out_code = run_train(argv[2], number(3), std::atof(argv[4]), argv[5]);
  else if (role == "infer" && argc == 5)
    *out_code = run_infer(argv[2], argv[3], std::atof(argv[4]));
  else if (role == "read" && argc == 4)
    *out_code = run_read(argv[2], std::atof(argv[3]));
  else
    return false;
  return true;
}

}  // namespace gpushare::benchmarks
