// Histograms of durations.
// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/histogram.hpp"

#include <cstring>
#include <string>
#include <utility>

#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;
using sched::slo::Distribution;
using sched::slo::Histogram;

namespace {

constexpr size_t kBins = 128;  // of the distribution that statistics are read from

base::Status publish(Histogram histogram, gpushare_histogram* out_histogram) {
  return capi::publish(std::make_shared<Histogram>(std::move(histogram)), out_histogram);
}

}  // namespace

extern "C" {

int32_t gpushare_histogram_create(const gpushare_histogram_params* params,
                                  gpushare_histogram* out_histogram) {
  return capi::guard([&]() -> base::Status {
    if (out_histogram == nullptr) return capi::null_argument("out_histogram");
    gpushare_histogram_params read{};
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    if (read.window > (1u << 20))
      return {GPUSHARE_INVALID_ARGUMENT, base::format("window is %llu, allowed are 1 to 2^20, or 0 for 2048",
                                                      static_cast<unsigned long long>(read.window))};
    sched::slo::HistogramOptions options;
    if (read.window != 0) options.window = read.window;
    if (read.drift_samples != 0)
      options.drift_samples = read.drift_samples == UINT32_MAX ? 0 : read.drift_samples;
    return publish(Histogram(options), out_histogram);
  });
}

int32_t gpushare_histogram_release(gpushare_histogram histogram) {
  return capi::release(histogram);
}

int32_t gpushare_histogram_record(gpushare_histogram handle, uint64_t duration_ns) {
  return capi::with(handle, [&](Histogram& histogram) -> base::Status {
    histogram.record(duration_ns);
    return {};
  });
}

int32_t gpushare_histogram_merge(gpushare_histogram handle, gpushare_histogram other) {
  return capi::with(handle, [&](Histogram& histogram) -> base::Status {
    const auto pin = capi::find(other);
    if (!pin) return capi::stale(other);
    histogram.merge(*pin);
    return {};
  });
}

int32_t gpushare_histogram_reset(gpushare_histogram handle) {
  return capi::with(handle, [&](Histogram& histogram) -> base::Status {
    histogram.reset();
    return {};
  });
}

int32_t gpushare_histogram_get_info(gpushare_histogram handle, gpushare_histogram_info* out_info) {
  return capi::with(handle, [&](Histogram& histogram) -> base::Status {
    const Distribution durations = histogram.distribution(kBins);
    gpushare_histogram_info out = GPUSHARE_HISTOGRAM_INFO_INIT;
    out.count = histogram.count();
    out.drifts = histogram.drifts();
    out.mean_ns = durations.mean_ns();
    out.stddev_ns = durations.stddev_ns();
    out.min_ns = durations.min_ns();
    out.max_ns = durations.max_ns();
    return capi::write_struct("out_info", out, out_info);
  });
}

int32_t gpushare_histogram_get_quantile(gpushare_histogram handle, double q, uint32_t k, double* out_ns) {
  return capi::with(handle, [&](Histogram& histogram) -> base::Status {
    if (out_ns == nullptr) return capi::null_argument("out_ns");
    if (!(q >= 0 && q <= 1))
      return {GPUSHARE_INVALID_ARGUMENT, base::format("q is %g, allowed are 0 to 1", q)};
    if (k == 0 || k > 4096)
      return {GPUSHARE_INVALID_ARGUMENT, base::format("k is %u, allowed are 1 to 4096", k)};
    const Distribution one = histogram.distribution(kBins);
    if (one.empty()) return {GPUSHARE_NOT_READY, "the histogram is empty"};
    *out_ns = k == 1 ? one.quantile_ns(q) : sched::slo::maximum(one, one, k - 1, kBins).quantile_ns(q);
    return {};
  });
}

int32_t gpushare_histogram_serialize(gpushare_histogram handle, char* text, uint64_t capacity,
                                     uint64_t* out_size) {
  return capi::with(handle, [&](Histogram& histogram) -> base::Status {
    if (out_size == nullptr) return capi::null_argument("out_size");
    if (text == nullptr && capacity != 0) return capi::null_argument("text");
    const std::string written = histogram.serialize();
    *out_size = written.size() + 1;
    if (text == nullptr || capacity < *out_size)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("capacity is %llu, the text takes %llu", static_cast<unsigned long long>(capacity),
                           static_cast<unsigned long long>(*out_size))};
    std::memcpy(text, written.c_str(), *out_size);
    return {};
  });
}

int32_t gpushare_histogram_parse(const char* text, uint64_t size, gpushare_histogram* out_histogram) {
  return capi::guard([&]() -> base::Status {
    if (text == nullptr) return capi::null_argument("text");
    if (out_histogram == nullptr) return capi::null_argument("out_histogram");
    std::string_view read(text, size);
    while (!read.empty() && read.back() == '\0') read.remove_suffix(1);
    GPUSHARE_ASSIGN_OR_RETURN(Histogram histogram, Histogram::parse(read));
    return publish(std::move(histogram), out_histogram);
  });
}

}  // extern "C"
