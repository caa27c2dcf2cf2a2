// scheduler_adapter.hpp: a scheduler of the caller's own, a table of C functions, behind the interface of
// src/cluster/scheduler.hpp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "base/status.hpp"
#include "cluster/scheduler.hpp"
#include "gpushare/cluster.h"

namespace gpushare::capi_cluster {

// Errors: INVALID_ARGUMENT naming what is wrong with the table.
base::Status check_scheduler(const gpushare_cluster_scheduler_ops* ops);
// A fresh one over a checked table, which must outlive it.
std::unique_ptr<cluster::Scheduler> adapt_scheduler(const gpushare_cluster_scheduler_ops* ops);

}  // namespace gpushare::capi_cluster
