// Three jobs sharing one device under each built-in policy: a short one, a long one, and one that fails half-way without harming
// the others. Each job is a plain loop in a thread of its own, as a framework's training loop would be.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <gpushare/gpushare.hpp>
#include <stdexcept>
#include <thread>
#include <vector>

namespace gs = gpushare;

namespace {

// Stands for a training step: real arithmetic on the iteration's memory.
void train_step(float* scratch, size_t count) {
  for (size_t i = 0; i < count; ++i) scratch[i] = static_cast<float>(i) * 0.5F + 1.0F;
}

void job(gs::Session& session, int iterations, int fail_at) {
  try {
    session.alloc_model<float>(1 << 16);
    for (int step = 0; step < iterations; ++step) {
      gs::Iteration iteration = session.begin_iteration();
      auto* scratch = iteration.alloc<float>(1 << 16);
      iteration.stream().launch_host([scratch] { train_step(scratch, 1 << 16); });
      if (step == fail_at) throw std::runtime_error("planned failure");
    }
  } catch (const std::exception& error) {
    std::printf("    a job ended: %s\n", error.what());
  }
}

}  // namespace

int main() {
  for (uint32_t i = 0; gpushare_policy_name(i) != nullptr; ++i) {
    const char* policy = gpushare_policy_name(i);
    gs::RuntimeOptions options;
    options.device = "host";
    options.policy = policy;
    options.capacity_bytes = 64 << 20;
    gs::Runtime runtime = gs::Runtime::open(options);
    std::printf("%s\n", policy);

    struct Plan {
      const char* name;
      int iterations;
      int fail_at;
    };
    const std::vector<Plan> plans{{"short", 20, -1}, {"long", 60, -1}, {"failing", 40, 10}};
    std::vector<gs::Session> sessions;
    for (const Plan& plan : plans) {
      gs::SessionOptions session;
      session.name = plan.name;
      session.persistent_bytes = 1 << 20;
      session.ephemeral_bytes = 1 << 20;
      session.remaining = std::chrono::microseconds(50 * plan.iterations);
      sessions.push_back(runtime.open_session(session));
    }
    std::vector<std::thread> threads;
    for (size_t k = 0; k < plans.size(); ++k) {
      threads.emplace_back([&, k] {
        job(sessions[k], plans[k].iterations, plans[k].fail_at);
        runtime.synchronize();  // what was enqueued has run: the figures are whole
        // A finished job gives its place to those that wait; one left open would block a head-of-line policy.
        const gpushare_session_info info = sessions[k].info();
        std::printf("  %-8s %3llu iterations, %.2f ms device time\n", plans[k].name,
                    static_cast<unsigned long long>(info.iterations_done),
                    static_cast<double>(info.service_ns) / 1e6);
        sessions[k].close();
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (runtime.info().persistent_bytes != 0) return 1;
  }
  return 0;
}
