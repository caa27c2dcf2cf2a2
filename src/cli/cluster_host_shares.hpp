// cluster_host_shares.hpp: jobs of a document of kind shares that really run: a session each on one runtime of the device
// `host`, whose weights are the units that a policy gives them, set anew in each round.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "cluster/shares/rounds.hpp"

namespace gpushare::cli {

// All jobs run from here until the object is destroyed, each in a thread of its own. A job with a deadline gets requests
// at random times (Poisson), `load` a second; a request that is late before it begins is dropped. Its performance is the part of
// the requests ended in a round that were answered in time. The others run iterations one after the other, and their
// performance is iterations a second. Work is arithmetic on the iteration's memory, whose length was measured alone on a core.
//
// Units are weights: what a job leaves, the others take. `go_on` is asked some times a second; false ends the round with
// CANCELLED. Errors: INVALID_ARGUMENT (more than 1024 jobs, more than 10,000 requests a second), INTERNAL (a job whose
// memory another job wrote), and those of the runtime.
base::Result<std::unique_ptr<cluster::shares::RealJobs>> make_host_shares(
    const cluster::shares::RoundsProblem& problem, std::function<bool()> go_on);

}  // namespace gpushare::cli
