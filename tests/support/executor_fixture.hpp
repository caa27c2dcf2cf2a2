// executor_fixture.hpp: runtimes on host and sim in both layouts, and work from lambdas.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "executor/runtime.hpp"
#include "gpushare/gpushare.h"
#include "support/catch.hpp"
#include "support/sizes.hpp"

namespace gpushare::test {

template <class F>
class LambdaWork final : public executor::Work {
 public:
  explicit LambdaWork(F body) : body_(std::move(body)) {}
  base::Status run(const std::shared_ptr<executor::Iteration>& iteration) override {
    return body_(iteration);
  }

 private:
  F body_;
};

template <class F>
std::unique_ptr<executor::Work> work_of(F body) {
  return std::make_unique<LambdaWork<F>>(std::move(body));
}

struct Setup {
  const char* device;
  memory::Layout layout;
  uint64_t granularity_bytes = 0;  // as memory::DeviceMemoryOptions
};
inline constexpr Setup kSetups[] = {{"host?total_bytes=268435456", memory::Layout::kVirtual},
                                    {"host?total_bytes=268435456", memory::Layout::kContiguous},
                                    {"sim?total_bytes=268435456", memory::Layout::kVirtual},
                                    {"sim?total_bytes=268435456", memory::Layout::kContiguous}};

inline executor::RuntimeOptions options_of(const Setup& setup, const char* policy = "fair") {
  executor::RuntimeOptions options;
  options.device = setup.device;
  options.layout = setup.layout;
  options.granularity_bytes = setup.granularity_bytes;
  auto made = sched::make_policy(policy);
  REQUIRE(made.ok());
  options.policy = std::move(*made);
  return options;
}

inline std::shared_ptr<executor::Runtime> open_runtime(executor::RuntimeOptions options) {
  auto runtime = executor::Runtime::open(std::move(options));
  INFO(runtime.status().to_string());
  REQUIRE(runtime.ok());
  return *runtime;
}

inline executor::SessionOptions need(std::string name, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                                     int32_t priority = 0) {
  executor::SessionOptions options;
  options.name = std::move(name);
  options.persistent_bytes = persistent_bytes;
  options.ephemeral_bytes = ephemeral_bytes;
  options.priority = priority;
  return options;
}

inline std::shared_ptr<executor::Session> open_session(executor::Runtime& runtime,
                                                       const executor::SessionOptions& options) {
  auto session = runtime.open_session(options);
  INFO(session.status().to_string());
  REQUIRE(session.ok());
  return *session;
}

// Device work that takes a known time on sim, and next to none on host.
inline base::Status enqueue(executor::Stream& stream, uint64_t duration_ns) {
  gpushare_backend_work work{};
  work.struct_size = sizeof work;
  work.duration_ns = duration_ns;
  work.demand = 1.0F;
  const base::Status status = stream.work(work);
  if (status.code() != GPUSHARE_UNSUPPORTED) return status;
  return stream.launch_host([](void*) {}, nullptr);
}

}  // namespace gpushare::test
