// lane_jobs.hpp: a daemon that shares lanes, and runtimes of this process that stand for processes. On the host device, or over
// the cuda backend on the stand-in for its driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "support/bytes.hpp"
#include "support/shared_service.hpp"
#ifdef GPUSHARE_CUDA_STANDIN
#include "unit/device/cuda/standin_support.hpp"
#endif

namespace gpushare::test {

inline constexpr uint64_t kLong = 60'000'000'000;
#ifdef GPUSHARE_CUDA_STANDIN
inline constexpr char kBackend[] = "cuda";
inline constexpr char kDeviceOptions[] = "?driver=" GPUSHARE_CUDA_STANDIN "&total_bytes=268435456";
inline constexpr char kWholeDevice[] =
    "cuda?driver=" GPUSHARE_CUDA_STANDIN;  // 1 GiB, of all processes together
#else
inline constexpr char kBackend[] = "host";
inline constexpr char kDeviceOptions[] = "?total_bytes=268435456&granularity=65536";
inline constexpr char kWholeDevice[] =
    "host?total_bytes=1073741824&granularity=65536";  // 1 GiB for each process
#endif

// Capacity 64 MiB: pieces of 2 MiB, which is also what P and E are rounded up to.
struct Shared : SharedService {
  explicit Shared(const std::function<void(daemon::ServiceOptions&)>& change = {})
      : SharedService([&](daemon::ServiceOptions& service_options) {
          service_options.devices = {std::string(kBackend) + kDeviceOptions};
          service_options.share_lanes = true;
          if (change) change(service_options);
        }) {}
#ifdef GPUSHARE_CUDA_STANDIN
  ~Shared() {  // jobs are closed
    service.reset();
    standin_test::check_clean();
  }
#endif
  uint64_t promised() const {
    return status().devices[0].promised_bytes;
  }
};

// A runtime of its own, as a process has, with one session.
struct Job {
  Job(const std::string& name, uint64_t p, uint64_t e, int32_t priority = 0)
      : runtime(SharedService::open()),
        session(open_session(*runtime, need(name, p, e, priority))),
        ephemeral_bytes(e) {}
  ~Job() {
    (void)session->close();
    session.reset();
    (void)runtime->close();
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  // One iteration that takes all of E, fills so much of it, and finds that as it was. For any thread.
  base::Status run(uint8_t value, uint64_t bytes = 2 * kMiB) {
    GPUSHARE_ASSIGN_OR_RETURN(const auto iteration, session->begin(kLong));
    GPUSHARE_ASSIGN_OR_RETURN(const auto stream, iteration->stream());
    GPUSHARE_ASSIGN_OR_RETURN(const memory::Address scratch, iteration->alloc(ephemeral_bytes, 0));
    GPUSHARE_RETURN_IF_ERROR(stream->fill(scratch, value, bytes));
    const base::Status same = is_all(*stream, scratch, bytes, value);
    GPUSHARE_RETURN_IF_ERROR(iteration->end());
    return same;
  }
  static base::Status is_all(executor::Stream& stream, memory::Address address, uint64_t bytes,
                             uint8_t value) {
    std::string found(bytes, '\0');
    GPUSHARE_RETURN_IF_ERROR(
        stream.copy(reinterpret_cast<uintptr_t>(found.data()), address, bytes, GPUSHARE_COPY_DEVICE_TO_HOST));
    GPUSHARE_RETURN_IF_ERROR(stream.synchronize());
    if (all_are(found.data(), bytes, value)) return {};
    return {GPUSHARE_INTERNAL, "somebody else wrote memory of this session"};
  }
  std::shared_ptr<executor::Iteration> begin() const {
    auto iteration = session->begin(kLong);
    INFO(iteration.status().to_string());
    REQUIRE(iteration.ok());
    return *iteration;
  }
  std::shared_ptr<executor::Runtime> runtime;
  std::shared_ptr<executor::Session> session;
  const uint64_t ephemeral_bytes;
};

}  // namespace gpushare::test
