// log_failure.hpp: logs the failure of a step of cleaning up, which no caller gets as a status.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/log.hpp"
#include "base/status.hpp"

namespace gpushare::daemon {

inline void log_failure(const base::Status& status, const std::string& what) {
  if (!status.ok()) base::log(base::kWarning, status.with_context("daemon: " + what).to_string());
}

}  // namespace gpushare::daemon
