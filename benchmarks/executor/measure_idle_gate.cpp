// This program measures what gates cost opportunistic work while no guaranteed session has work: the bar is 98% of the work that the
// same session does without gates.
//
//   measure_idle_gate DEVICE [pairs, 15] [0 to 4: one guaranteed session, all]   DEVICE: host, cuda:0 (a stand-in by GPUSHARE_CUDA_DRIVER), or shared (under a daemon,
//       GPUSHARE_SOCKET: each session in a runtime of its own, as in two processes)
//
// Blocks of iterations with the gate and without follow each other, the order changes from pair to pair, and the ratio is of the
// two blocks of a pair. A kernel is a host function that ends one kernel's time after it was launched, or after the kernel before it:
// so it needs no core, and is late only where the launch was late. On a busy machine both programs need real-time priority (chrt -f 1),
// because a thread that wakes late launches late. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <gpushare/gate.hpp>
#include <gpushare/gpushare.hpp>
#include <string>
#include <thread>
#include <vector>

namespace gs = gpushare;
namespace {

using Clock = std::chrono::steady_clock;
using Ns = std::chrono::nanoseconds;

struct Kernels {
  Ns length{0};
  Clock::time_point end;  // of the last; of the device's thread
  void launch(const gs::Stream& stream) {
    stream.launch_host([this, launched = Clock::now()] {
      end = std::max(end, launched) + length;
      std::this_thread::sleep_until(end);
    });
  }
};

// Guaranteed sessions, as far as they are known: there is none; one is open that never ran; one has run and rests; one has run and left.
// rests: after iterations of 1 ms. rests_long: of 16 ms.
enum class Other { none, open, rests, rests_long, left };
const char* name_of(Other other) {
  return other == Other::none         ? "none"
         : other == Other::open       ? "open, never ran"
         : other == Other::rests      ? "has run 1 ms at a time, rests"
         : other == Other::rests_long ? "has run 16 ms at a time, rests"
                                      : "has run and left";
}

gs::Runtime open_runtime(const std::string& device) {
  gs::RuntimeOptions options;
  options.device = device;
  if (device == "shared") return gs::Runtime::open(options);
  options.policy = "pack";
  options.capacity_bytes = 64 << 20;
  return gs::Runtime::open(options);
}

gs::Session open_session(gs::Runtime& runtime, const char* name, gs::Class cls) {
  gs::SessionOptions need;
  need.name = name;
  need.cls = cls;
  need.persistent_bytes = need.ephemeral_bytes = 1 << 20;
  return runtime.open_session(need);
}

constexpr int kKernels = 16;  // of an iteration

// Seconds for the iterations, with their work.
double block(gs::Session& session, const gs::Gate* gate, Kernels& kernels, int iterations, bool waits) {
  const auto start = Clock::now();
  for (int i = 0; i < iterations; ++i) {
    gs::Iteration iteration = session.begin_iteration();
    const gs::Stream stream = iteration.stream();
    for (int k = 0; k < kKernels; ++k) {
      if (gate != nullptr) gate->enter(stream, kernels.length);
      kernels.launch(stream);
    }
    if (waits || i + 1 == iterations) stream.synchronize();
    iteration.end();
  }
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(part * static_cast<double>(values.size())))];
}

void measure(const std::string& device, Other other, Ns length, bool waits, int pairs) {
  gs::Runtime runtime = open_runtime(device);
  gs::Runtime beside = device == "shared" ? open_runtime(device) : gs::Runtime();
  gs::Session session = open_session(runtime, "opportunistic", gs::opportunistic);
  const gs::Gate gate(session);
  gs::Session guaranteed;
  if (other != Other::none)
    guaranteed = open_session(device == "shared" ? beside : runtime, "guaranteed", gs::guaranteed);
  if (other > Other::open) {
    Kernels of_guaranteed{std::chrono::microseconds(other == Other::rests_long ? 1000 : 1000 / kKernels), {}};
    for (int i = 0; i < 100; ++i) (void)block(guaranteed, nullptr, of_guaranteed, 1, true);
    if (other == Other::left) guaranteed.close();
  }
  Kernels kernels{length, {}};
  const int iterations =
      std::max<int>(2, static_cast<int>(Ns(std::chrono::milliseconds(300)) / (kKernels * length)));
  (void)block(session, &gate, kernels, iterations, waits);
  std::vector<double> ratios;
  for (int pair = 0; pair < pairs; ++pair) {
    double with = 0, without = 0;
    for (const bool gated : {pair % 2 == 0, pair % 2 != 0})
      (gated ? with : without) = block(session, gated ? &gate : nullptr, kernels, iterations, waits);
    ratios.push_back(100 * without / with);
  }
  const gpushare_gate_info info = gate.info();
  std::printf("| %s | %.2f ms | %s | %.1f%% (%.1f to %.1f) | %llu of %llu |\n", name_of(other),
              static_cast<double>(length.count()) * 1e-6, waits ? "waits" : "runs ahead",
              quantile(ratios, 0.5), quantile(ratios, 0.25), quantile(ratios, 0.75),
              static_cast<unsigned long long>(info.waits), static_cast<unsigned long long>(info.entries));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string device = argc > 1 ? argv[1] : "host";
  const int pairs = argc > 2 ? std::max(1, std::atoi(argv[2])) : 15;
  std::printf(
      "| guaranteed session | kernels | its loop | work, of that without gates (quartiles) | launches that "
      "waited |\n"
      "|---|---|---|---|---|\n");
  const int only = argc > 3 ? std::atoi(argv[3]) : -1;
  for (const Other other : {Other::none, Other::open, Other::rests, Other::rests_long, Other::left}) {
    if (only >= 0 && other != static_cast<Other>(only)) continue;
    for (const int us : {200, 2000, 20'000})
      for (const bool waits : {false, true})
        measure(device, other, std::chrono::microseconds(us), waits, pairs);
  }
  return 0;
}
