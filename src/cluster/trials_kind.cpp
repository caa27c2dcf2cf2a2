// The kind "trials": groups of tuning trials. Reads the document, asks fluid.hpp, writes the result.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <random>

#include "base/saturate.hpp"
#include "cluster/fluid.hpp"
#include "cluster/fluid_scheduler.hpp"
#include "cluster/json.hpp"
#include "cluster/kinds.hpp"

namespace gpushare::cluster {
namespace {

Trial read_trial(Fields& fields, Fields::Names& seen, size_t index) {
  Trial trial;
  trial.name = fields.name(seen, index);
  fields.about("budget_s", "On one device of speed 1.");
  fields.about("alpha",
               "On 1/p of a device the trial takes budget_s x alpha^(p-1); without alpha, p x budget_s.");
  fields.about("beta", "On w devices the trial takes budget_s / w x beta^(w-1).");
  trial.budget_s = fields.number("budget_s", kPositive);
  if (fields.has("alpha")) trial.alpha = fields.number("alpha", {1, 1000, false});
  trial.beta = fields.number_or("beta", {1, 1000, false}, 1);
  trial.memory_bytes = fields.whole_or("memory_bytes", 0, uint64_t{1} << 50, 0);
  return trial;
}

// The work of a trial that really runs.
struct TrialWork {
  double iteration_ms = 10;
  double demand = 1;
};

TrialWork read_work(Fields& fields) {
  TrialWork work;
  fields.about("work", "For run on host devices: what budget_s consists of there.");
  if (!fields.has("work")) return work;
  fields.with("work", [&](Fields& inner) {
    inner.about("iteration_ms", "The time of an iteration on one device of speed 1.");
    inner.about("demand",
                "The part of an iteration for which it keeps the device busy; then it waits on the host.");
    work.iteration_ms = inner.number_or("iteration_ms", {0, 1e6, true}, work.iteration_ms);
    work.demand = inner.number_or("demand", {0, 1, true}, work.demand);
  });
  return work;
}

class TrialsProblem final : public Problem {
 public:
  TrialsProblem(Fields& document, const std::vector<Device>& devices) : real_devices_(devices) {
    for (const Device& device : devices) {
      devices_.push_back({device.speed, device.memory_bytes});
      ids_.push_back(device.id);
    }
    document.about("run", "For run.");
    document.about("max_packed", "Most trials on one device.");
    document.about("max_workers", "Most devices for one trial.");
    document.about("change_cost_s", "Lost whenever the devices of a started trial change.");
    if (document.has("run"))
      document.with("run", [&](Fields& inner) {
        inner.about("noise", "The relative standard deviation of what a trial really takes from its budget.");
        noise_ = inner.number_or("noise", {0, 10, false}, 0);
      });
    limits_.max_packed = int(document.whole("max_packed", 1, 64));
    limits_.max_workers = int(document.whole("max_workers", 1, 4096));
    limits_.change_cost_s = document.number_or("change_cost_s", kNotNegative, 0);
    Fields::Names seen;  // of all groups: the result names trials
    document.each("groups", 1, [&](Fields& fields, size_t) {
      TrialGroup group;
      group.arrival_s = fields.number("arrival_s", kNotNegative);
      fields.each("trials", 0, [&](Fields& inner, size_t index) {
        group.trials.push_back(read_trial(inner, seen, index));
        works_.push_back(read_work(inner));
      });
      groups_.push_back(std::move(group));
    });
  }

  base::Status solve(std::string_view choice, OrderedJson& result) override {
    write(plan_trials(devices_, limits_, groups_, scheduler_of(choice)), result);
    return {};
  }

  base::Status play(std::string_view choice, const PlayOptions& options, OrderedJson& result,
                    std::vector<PlaySpan>* spans) override {
    if (options.real_trials) return play_real(scheduler_of(choice), options, result, spans);
    const double noise = options.noise.value_or(noise_);
    std::mt19937_64 random(options.seed);
    std::normal_distribution<double> normal(0, 1);
    std::vector<double> scales;
    std::vector<TrialGroup> truth = groups_;
    std::vector<const std::string*> names;
    for (TrialGroup& group : truth)
      for (Trial& trial : group.trials) {
        scales.push_back(std::max(0.1, 1 + noise * normal(random)));
        trial.budget_s *= scales.back();
        names.push_back(&trial.name);
      }
    std::vector<TrialSpan> held;
    TrialResult played = play_trials(devices_, limits_, groups_, scheduler_of(choice), scales,
                                     spans == nullptr ? nullptr : &held, device_changes(real_devices_));
    played.bound_s = trials_bound(devices_, limits_, truth);
    write(played, result);
    if (spans == nullptr) return {};
    for (const TrialSpan& span : held)
      spans->push_back({"device " + ids_[size_t(span.device)],
                        span.width > 0 ? *names[span.trial]
                                       : base::format("%s (1/%d)", names[span.trial]->c_str(), -span.width),
                        span.begin_s, span.end_s});
    return {};
  }

 private:
  // The trials as jobs, in the order of their arrival, run by the caller.
  base::Status play_real(TrialScheduler rule, const PlayOptions& options, OrderedJson& result,
                         std::vector<PlaySpan>* spans) const {
    struct Entry {
      double arrival_s;
      const Trial* trial;
      size_t row;  // in document order
    };
    std::vector<Entry> entries;
    for (const TrialGroup& group : groups_)
      for (const Trial& trial : group.trials) entries.push_back({group.arrival_s, &trial, entries.size()});
    std::stable_sort(entries.begin(), entries.end(),
                     [](const Entry& a, const Entry& b) { return a.arrival_s < b.arrival_s; });
    std::vector<Trial> trials;
    std::vector<JobInfo> jobs;
    for (const Entry& entry : entries) {
      const TrialWork& work = works_[entry.row];
      JobInfo job;
      job.name = entry.trial->name;
      job.arrival_s = entry.arrival_s;
      job.work_s = entry.trial->budget_s;
      job.memory_bytes = entry.trial->memory_bytes;
      job.iterations = base::to_uint64(std::max(1.0, std::round(job.work_s * 1e3 / work.iteration_ms)));
      job.demands = {work.demand};
      job.divides = true;
      jobs.push_back(std::move(job));
      trials.push_back(*entry.trial);
    }
    FluidScheduler scheduler(rule, limits_, std::move(trials));
    GPUSHARE_ASSIGN_OR_RETURN(const RealRun run, options.real_trials(jobs, real_devices_, scheduler));
    TrialResult played;
    played.trials.resize(entries.size());
    for (size_t i = 0; i < entries.size(); ++i) {
      TrialResult::Row& row = played.trials[entries[i].row];
      row.width = scheduler.first_widths()[i];
      row.rejected = scheduler.rejected(JobId(i));
      row.stranded = run.end_s[i] < 0 && !row.rejected;
      if (run.end_s[i] >= 0)
        played.makespan_s = std::max(played.makespan_s, run.end_s[i] - jobs[0].arrival_s);
    }
    played.utilization = run.utilization;
    write(played, result);
    result.erase("bound_s");  // what trials really take is known to nobody
    result["changes"] = run.pauses;
    if (spans != nullptr) spans->insert(spans->end(), run.spans.begin(), run.spans.end());
    return {};
  }

  static TrialScheduler scheduler_of(std::string_view choice) {
    return choice == "fifo"            ? TrialScheduler::kFifo
           : choice == "static-fluid"  ? TrialScheduler::kStaticFluid
           : choice == "dynamic-fluid" ? TrialScheduler::kDynamicFluid
                                       : TrialScheduler::kGpushare;
  }

  void write(const TrialResult& plan, OrderedJson& result) const {
    OrderedJson::object_t shares;  // appended to, not searched: names are told apart already
    OrderedJson rejected = OrderedJson::array(), not_completed = OrderedJson::array();
    size_t row = 0;
    for (const TrialGroup& group : groups_) {
      for (const Trial& trial : group.trials) {
        const TrialResult::Row& got = plan.trials[row++];
        if (got.rejected) {
          rejected.push_back(object(
              {{"trial", trial.name}, {"reason", "memory_bytes is beyond the memory of every device"}}));
        } else {
          shares.OrderedJson::object_t::Container::emplace_back(trial.name, size_of(got.width));
        }
        if (got.stranded)
          not_completed.push_back(
              object({{"trial", trial.name}, {"reason", "no device with its memory is up any more"}}));
      }
    }
    result["makespan_s"] = plan.makespan_s;
    result["bound_s"] = plan.bound_s;
    result["shares"] = std::move(shares);
    result["utilization"] = plan.utilization;
    if (!rejected.empty()) result["rejected"] = std::move(rejected);
    if (!not_completed.empty()) result["not_completed"] = std::move(not_completed);
  }

  const std::vector<Device> real_devices_;
  std::vector<TrialWork> works_;  // of the groups' trials, in document order
  std::vector<std::string> ids_;
  double noise_ = 0;
  std::vector<TrialDevice> devices_;
  TrialLimits limits_;
  std::vector<TrialGroup> groups_;
};

}  // namespace

const Kind& trials_kind() {
  static const Kind kind = {
      "trials",
      "scheduler",
      {"fifo", "static-fluid", "dynamic-fluid", "gpushare"},
      {"gpushare"},
      {"fifo", "static-fluid", "dynamic-fluid", "gpushare"},
      {"gpushare"},
      true,
      [](Fields& document, const std::vector<Device>& devices) -> std::unique_ptr<Problem> {
        return std::make_unique<TrialsProblem>(document, devices);
      },
      true};
  return kind;
}

}  // namespace gpushare::cluster
