// schedulers.hpp: the schedulers of training jobs, which are also the rules of the portfolio.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "cluster/training/book.hpp"

namespace gpushare::cluster::training {

struct Knowledge;

std::unique_ptr<Book> make_fifo();
std::unique_ptr<Book> make_srtf();
// `limits`: device seconds after which a job falls to the next queue, ascending.
std::unique_ptr<Book> make_tiresias(std::vector<double> limits = {3200});
std::unique_ptr<Book> make_pack(std::shared_ptr<Knowledge> known);
std::unique_ptr<Book> make_antman(std::shared_ptr<Knowledge> known);
std::unique_ptr<Book> make_iadeep(std::shared_ptr<Knowledge> known);

// Rules of our own.
// Shortest first, with pairs that are worth it: sharing.cpp.
std::unique_ptr<Book> make_best(std::shared_ptr<Knowledge> known);
// Each job where it costs all least, by what is believed, or later: greedy.cpp. `by_arrival`: in that order, else the
// shortest first.
std::unique_ptr<Book> make_greedy(std::shared_ptr<Knowledge> known, bool by_arrival);
// The same with all jobs placed anew at every event, and those that wait on what is idle until then.
std::unique_ptr<Book> make_anew(std::shared_ptr<Knowledge> known);

// The scheduler "gpushare": at every event the best of all these by what is believed: portfolio.cpp.
std::unique_ptr<Scheduler> make_portfolio();

}  // namespace gpushare::cluster::training
