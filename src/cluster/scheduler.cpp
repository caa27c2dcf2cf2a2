// SPDX-License-Identifier: Apache-2.0
#include "cluster/scheduler.hpp"

#include <algorithm>
#include <cmath>

namespace gpushare::cluster {
namespace {

constexpr double kFixedPart = 0.2;  // of an iteration's time, whatever its batch size
constexpr const char* kBatchLabel = "batch size ";

double first_batch(const JobInfo& info) {
  return info.batch_sizes.empty() ? 0 : info.batch_sizes.front();
}

}  // namespace

double iterations_factor(const JobInfo& info) {
  const double first = first_batch(info);
  if (first <= 0 || info.batch <= 0) return 1;
  return first / info.batch * (info.noise_scale + info.batch) / (info.noise_scale + first);
}

double assumed_iteration_factor(const JobInfo& info) {
  const double first = first_batch(info);
  return first <= 0 || info.batch <= 0 ? 1 : kFixedPart + (1 - kFixedPart) * info.batch / first;
}

JobInfo with_batch(JobInfo info, double batch) {
  if (info.batch <= 0 || batch <= 0 || batch == info.batch) return info;
  const auto ephemeral =
      static_cast<uint64_t>(std::llround(static_cast<double>(info.ephemeral_bytes) * batch / info.batch));
  info.memory_bytes = info.memory_bytes - info.ephemeral_bytes + ephemeral;
  info.ephemeral_bytes = ephemeral;
  info.batch = batch;
  if (const size_t label = info.config.find(kBatchLabel); label != std::string::npos) {
    const size_t begin = label + std::string_view(kBatchLabel).size();
    size_t end = begin;
    while (end < info.config.size() && (std::isdigit(static_cast<unsigned char>(info.config[end])) != 0))
      ++end;
    info.config.replace(begin, end - begin, base::format("%.15g", batch));
  } else if (!info.config.empty()) {
    info.config += base::format(" (%s%.15g)", kBatchLabel, batch);
  }
  return info;
}

void Scheduler::known_pair(const JobInfo&, const JobInfo&, double) {}

}  // namespace gpushare::cluster
