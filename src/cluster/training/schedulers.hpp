// schedulers.hpp: the schedulers of training jobs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cluster/training/book.hpp"

namespace gpushare::cluster::training {

std::unique_ptr<Scheduler> make_fifo();
std::unique_ptr<Scheduler> make_srtf();
// `limits`: device seconds after which a job falls to the next queue, ascending.
std::unique_ptr<Scheduler> make_tiresias(std::vector<double> limits = {3200});
std::unique_ptr<Scheduler> make_pack();
std::unique_ptr<Scheduler> make_antman();
std::unique_ptr<Scheduler> make_iadeep();
std::unique_ptr<Scheduler> make_best();

}  // namespace gpushare::cluster::training
