// measures.hpp: the measurements of the suite. Each adds rows to the report and throws on failure.
//
// Device work without kernels of our own is fills: they exist in every driver, run at the memory's speed and can be made as
// long as wanted. Measurements that need real kernels use the networks of examples/training: cuBLAS and cuDNN on a GPU,
// and on the stand-in the host's operations, which say nothing but that it all runs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver.hpp"
#include "report.hpp"

namespace gpushare::gpu_suite {

struct Settings {
  int repeats = 21;
  uint64_t fill_bytes = 64u << 20;  // one piece of device work
  int iterations = 200;             // of a run that is timed as a whole
  int batch = 64;                   // of the networks
  int width = 4;
  uint64_t load_bytes = 256u << 20;  // of one transmission
  uint64_t load_divisor = 1;         // of the models of measurement 8
  std::string program;               // this one, to be started again
};

// 1: lane alloc and free, beside cuMemAlloc and the stream-ordered allocator with a warmed pool.
void measure_allocation(const Driver& driver, const Settings& settings, Report& report);
// 2: iterations of one session alone, beside the same work on a plain stream.
void measure_iteration_overhead(const Driver& driver, const Settings& settings, Report& report);
// 3: the device's idle gap where a lane goes on with another session, by enqueue depth.
void measure_switch(const Driver& driver, const Settings& settings, Report& report);
// 4: eight jobs under each policy, beside a plain stream each and a process each; fairness of three equal jobs that come and go.
void measure_policies(const Driver& driver, const Settings& settings, Report& report);
// 5: 42 inference models resident at once: the latency that they add at a low rate.
void measure_many_models(const Driver& driver, const Settings& settings, Report& report);
// 6: what a granule costs to create, map and unmap, by its size; a session's growth above its promise.
void measure_virtual_memory(const Driver& driver, const Settings& settings, Report& report);
// 7: requests of a small network beside the training of a large one, on a share of the SMs of its own and without.
void measure_partitions(const Driver& driver, const Settings& settings, Report& report);

// 8: bandwidth of the loader's transmission beside the driver's own; time to first output of a model that is there, is
// switched to, is sent whole first, and is started from nothing.
void measure_loading(const Driver& driver, const Settings& settings, Report& report);

// 9: PyTorch with gpushare.torch beside PyTorch alone: trainings and an inference, loading, switching (torch_suite.py).
void measure_torch(const Driver& driver, const Settings& settings, Report& report);
// 10: an unmodified PyTorch training under `gpushare exec`, alone, side by side and oversubscribed (torch_exec.py).
void measure_exec(const Driver& driver, const Settings& settings, Report& report);

// The parts of 2, 3 and 5 that train and serve the networks of examples/training (measures_networks.cpp).
void measure_network_overhead(const Driver& driver, const Settings& settings, Report& report);
void measure_network_switch(const Driver& driver, const Settings& settings, Report& report);
void measure_network_models(const Driver& driver, const Settings& settings, Report& report);

// The part of 1 that needs a Python with PyTorch (torch.cpp).
void measure_torch_allocation(const Settings& settings, const std::vector<uint64_t>& sizes, Report& report);
// "64 KiB".
inline std::string size_name(uint64_t bytes) {
  return bytes >= (1u << 20) ? std::to_string(bytes >> 20) + " MiB" : std::to_string(bytes >> 10) + " KiB";
}

// A thread whose exception join() throws; joined at the latest when it dies.
class Worker {
 public:
  Worker() = default;
  explicit Worker(std::function<void()> body)
      : error_(std::make_unique<std::exception_ptr>()),
        thread_([body = std::move(body), error = error_.get()] {
          try {
            body();
          } catch (...) {
            *error = std::current_exception();
          }
        }) {}
  Worker(Worker&&) = default;
  Worker& operator=(Worker&&) = delete;
  ~Worker() {
    if (thread_.joinable()) thread_.join();
  }
  void join() {
    if (thread_.joinable()) thread_.join();
    if (error_ != nullptr && *error_ != nullptr) std::rethrow_exception(*error_);
  }

 private:
  std::unique_ptr<std::exception_ptr> error_;
  std::thread thread_;
};

// A job of measurement 4.
struct FillJob {
  int iterations;
  int pieces;
};
// Each job in a process of its own: when each was done, in ms from the common start. Throws.
std::vector<double> run_processes(const std::string& program, const std::vector<FillJob>& jobs,
                                  uint64_t bytes);
// The body of such a process, started with --as-job: it says on stdout when it is ready and when it is done, and starts
// when a line comes.
int run_as_job(const std::string& job);
// Milliseconds from the start of a process that loads and runs a model of measurement 8 until its output. Throws.
double run_from_nothing(const std::string& program, const std::string& model);
// The body of such a process, started with --as-start.
int run_as_start(const std::string& model);

}  // namespace gpushare::gpu_suite
