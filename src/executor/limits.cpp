// limits.cpp: the limits that the environment sets for a runtime on a shared device. The starter of the program
// (a node agent, an operator) sets them; the program's sessions then divide a part of the device instead of the
// whole.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <string>

#include "base/units.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {

base::Result<EnvironmentLimits> EnvironmentLimits::read() {
  EnvironmentLimits limits;
  if (const char* memory = std::getenv("GPUSHARE_MEMORY"); memory != nullptr && *memory != '\0') {
    const auto bytes = base::parse_bytes(memory);
    if (!bytes.ok()) return bytes.status().with_context("GPUSHARE_MEMORY");
    if (*bytes == 0)
      return base::Status(GPUSHARE_INVALID_ARGUMENT, "GPUSHARE_MEMORY is 0: unset it for no limit");
    limits.memory_bytes = *bytes;
  }
  if (const char* weight = std::getenv("GPUSHARE_WEIGHT"); weight != nullptr && *weight != '\0') {
    const auto value = base::parse_double(weight);
    if (!value.ok()) return value.status().with_context("GPUSHARE_WEIGHT");
    if (*value <= 0)
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          std::string("GPUSHARE_WEIGHT is ") + weight + "; it must be above 0");
    limits.weight = *value;
  }
  return limits;
}

uint64_t RuntimeImpl::memory_left(const SessionImpl* but) const {
  if (limits_.memory_bytes == 0) return UINT64_MAX;
  uint64_t given = 0;
  for (const auto& [id, session] : sessions_)
    if (session.get() != but) given += session->effective_quota_bytes();
  return limits_.memory_bytes - std::min(limits_.memory_bytes, given);
}

// A session without a quota gets what the others have left, so that their sum never exceeds the limit.
base::Status RuntimeImpl::limit_memory(SessionOptions& options) const {
  if (limits_.memory_bytes == 0) return {};
  const uint64_t left = memory_left(nullptr);
  const uint64_t wanted = options.persistent_bytes + options.ephemeral_bytes;
  if (options.quota_bytes == 0 && left > 0 && wanted >= options.persistent_bytes && wanted <= left) {
    options.quota_bytes = left;
    return {};
  }
  if (options.quota_bytes > 0 && options.quota_bytes <= left) return {};
  return {GPUSHARE_QUOTA_EXCEEDED,
          "session '" + options.name + "' " +
              (options.quota_bytes > 0
                   ? "asks for a quota of " + base::format_bytes(options.quota_bytes)
                   : "declares persistent_bytes and ephemeral_bytes of " + base::format_bytes(wanted)) +
              "; GPUSHARE_MEMORY allows this runtime " + base::format_bytes(limits_.memory_bytes) +
              ", of which the quotas of other sessions leave " + base::format_bytes(left) +
              ". Give each session a quota_bytes that fits, or raise the limit"};
}

// The runtime's sessions divide the weight of the environment in proportion to their own, so that together they have it and no more.
double RuntimeImpl::limited_weight(double own, double sum) const {
  return limits_.weight > 0 ? limits_.weight * own / sum : own;
}

void RuntimeImpl::divide_weight() {
  if (limits_.weight == 0) return;
  double sum = 0;
  for (const auto& [id, session] : sessions_) sum += session->weight_;
  for (const auto& [id, session] : sessions_)
    authority_->set_weight(id, limited_weight(session->weight_, sum));
}

}  // namespace gpushare::executor
