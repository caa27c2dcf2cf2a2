// toy_framework: how a framework replaces its allocator and its stream dispatcher. The framework below has tensors and
// one operation; the three places where gpushare comes in are marked. docs/embed.md explains them.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "gpushare/gpushare.hpp"

namespace toy {

// 1. The allocator. Inside an iteration memory is ephemeral, outside it is the session's. gpushare finds the owner of a
//   free by address.
struct Device {
  gpushare::Runtime runtime = gpushare::Runtime::open({});  // the first GPU, else the host
};
struct Context {  // what the framework calls a context, a stream, a session of its own
  Device& device;
  gpushare::Session session;
  gpushare::Iteration iteration{};
  gpushare::Address alloc(uint64_t bytes) {
    return iteration ? iteration.alloc_bytes(bytes) : session.alloc_bytes(gpushare::Kind::model, bytes);
  }
};

struct Tensor {
  Context& context;
  size_t count;
  gpushare::Address address;
  Tensor(Context& of, size_t elements)
      : context(of), count(elements), address(of.alloc(elements * sizeof(float))) {}
  ~Tensor() {
    context.device.runtime.free(address);
  }  // in stream order: work enqueued before may still use it
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  float* data() const { return reinterpret_cast<float*>(address); }  // host device: an address is a pointer
};

// 2. The dispatcher. Work goes to the lane's stream, never to a stream of the framework's own. On a GPU: cuLaunchKernel
//   on native().
void add(Context& context, const Tensor& a, float b, const Tensor& out) {
  context.iteration.stream().launch_host([from = a.data(), b, to = out.data(), count = a.count] {
    for (size_t i = 0; i < count; ++i) to[i] = from[i] + b;
  });
}

// 3. The iteration marks, around what the framework calls a step.
void step(Context& context, const Tensor& weights) {
  context.iteration = context.session.begin_iteration();  // waits for this session's turn
  {
    const Tensor activation(context, weights.count);  // ephemeral
    add(context, weights, 1.0F, activation);
    add(context, activation, -0.5F, weights);
  }
  context.iteration.end();  // the next session's step may be enqueued at once
}

}  // namespace toy

int main() try {
  toy::Device device;
  std::vector<std::thread> jobs;
  for (const char* name : {"a", "b"})
    jobs.emplace_back([&device, name] {
      gpushare::SessionOptions options;
      options.name = name;
      options.persistent_bytes = options.ephemeral_bytes = 1 << 20;
      toy::Context context{device, device.runtime.open_session(options)};
      {
        const toy::Tensor weights(context, 1000);
        for (size_t i = 0; i < weights.count; ++i) weights.data()[i] = 0;
        for (int i = 0; i < 100; ++i) toy::step(context, weights);
        device.runtime.synchronize();
        std::printf("%s: 100 steps of +0.5 make %g\n", name, static_cast<double>(weights.data()[999]));
      }
    });
  for (std::thread& job : jobs) job.join();
  return 0;
} catch (const gpushare::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
