// forward.hpp: what is believed of jobs beside each other, and a scheduler played forward by that.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "cluster/training/book.hpp"
#include "cluster/training/sharing.hpp"

namespace gpushare::cluster::training {

struct Beside {
  const BookJob* job = nullptr;
  bool opportunistic = false;
};

// How much slower than alone at its first batch size `job` runs beside the others of a device: as measured in that very
// company, else the most demanded resource in proportion to demand, corrected by what was learned of each pair. An
// opportunistic job has what guaranteed ones leave.
double believed_slowdown(const Knowledge& known, const Beside& job, const std::vector<Beside>& others);
// The two halves of it. The key of `companies`; none where nothing measured counts: for a gang, beside nobody, and where
// somebody goes first or gives way.
std::optional<uint64_t> company_among(const Beside& job, const std::vector<Beside>& others);
// What holds where nothing was measured. It stays as it is while the others stay, unless names_both().
double guessed_slowdown(const Knowledge& known, const Beside& job, const std::vector<Beside>& others);
// Whether `job` and one of the others have a configuration, so that what is learned of pairs changes the guess.
bool names_both(const Beside& job, const std::vector<Beside>& others);
// The key of `companies`: `job` among the jobs `here`.
uint64_t company_of(JobId job, const std::vector<JobId>& here);

// Whether a job has waited so long that it comes before all others.
bool starves(const BookJob& job, const std::vector<BookDevice>& devices, double now_s);
// When that is, if the fastest device that has the memory has this speed and the job goes on waiting.
double starves_at(const BookJob& job, double fastest);

// `actions` are what `rule` did first on books in which no job runs. They become actions on `jobs`, some of which run:
// what is placed where it is goes on, what is not placed is paused. Among equal devices, names are changed so that as
// many jobs as possible stay, in the rule's books too.
void settle(const std::vector<BookJob>& jobs, const std::vector<BookDevice>& devices, Book& rule,
            std::vector<Action>& actions);

struct ForwardStart {
  std::vector<BookJob> jobs;
  std::vector<BookDevice> devices;
  double now_s = 0;
  double restart_s = 0;
  std::vector<double> weights;  // of the jobs' completions
};

// The same with no job running.
ForwardStart stopped(const ForwardStart& start);

// The weighted sum of the times until the jobs' completions under `rule`, which has taken over nothing yet, and a
// twentieth of the time for which devices hold jobs. `afresh`:
// the rule places everything anew. kNever if a job is never placed, if a guaranteed job would lose more than it may,
// or as soon as the sum reaches `most`.
double play_forward(Book& rule, const ForwardStart& start, bool afresh, const Knowledge& known, double most);

}  // namespace gpushare::cluster::training
