// The scheduler "gpushare" of training jobs: a portfolio of rules. At every event each rule is played forward over the
// jobs that are there, once from the state as it is and once placing all of them anew (so that jobs move to devices
// that have become free, and short ones come before long ones), with the cost of restarts. The best is followed.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "cluster/portfolio.hpp"
#include "cluster/training/forward.hpp"
#include "cluster/training/schedulers.hpp"

namespace gpushare::cluster {
namespace training {
namespace {

using Shared = std::shared_ptr<Knowledge>;

struct Rule {
  std::unique_ptr<Book> (*make)(const Shared&);
  bool knows_priorities = false;
  bool keeps_promises = true;  // by itself: it places no guaranteed job where it would lose more than it may
};
const Rule kRules[] = {
    {[](const Shared& known) { return make_best(known); }, true},
    {[](const Shared& known) { return make_greedy(known, false); }, true},
    {[](const Shared& known) { return make_greedy(known, true); }, false},
    {[](const Shared& known) { return make_anew(known); }, true},
    {[](const Shared&) { return make_fifo(); }, false},
    {[](const Shared&) { return make_srtf(); }, false},
    {[](const Shared&) { return make_tiresias(); }, false},
    {[](const Shared& known) { return make_pack(known); }, false, false},
    {[](const Shared& known) { return make_antman(known); }, false},
    {[](const Shared& known) { return make_iadeep(known); }, false, false},
};
constexpr size_t kReserving = 1;  // the one that reserves devices for gangs, shortest first
constexpr size_t kRuleCount = sizeof(kRules) / sizeof(kRules[0]);

constexpr double kSwitchMargin = 1e-4;  // part of the sum of completions that another rule must gain
constexpr double kPerPriority = 1000;   // how much a job of the next greater priority weighs more
constexpr int kMostPriorities = 4;      // above the least; beyond, they count as equal
constexpr double kSurprise =
    0.02;  // difference of measured and believed slowdowns from which on all is decided anew
constexpr double kLookS = 5;  // after which a company that nobody has measured is looked at
constexpr size_t kMostCompanies = 100'000;
// Work of deciding, in rules x events x (jobs + devices). Each event earns some; a decision that would take more than
// what is saved is not made, and the rule that is followed goes on. So 10,000 jobs on 1,000 devices cost what one rule
// costs.
constexpr double kEarned = 8'000, kMostSaved = 60'000;

class Ours final : public Book {
 public:
  Ours() : known_(std::make_shared<Knowledge>()), rule_(kRules[0].make(known_)) {}

  void restart_cost(double seconds) override { known_->restart_s = seconds; }
  void device_changed(DeviceIndex device, const DeviceInfo& info, bool up, double now_s) override {
    Book::device_changed(device, info, up, now_s);
    rule_->device_changed(device, info, up, now_s);
    fastest_ = 0;
    for (const BookDevice& one : devices_)
      if (one.up) fastest_ = std::max(fastest_, one.info.speed);
    bool changed = false;
    for (const JobId job : unfinished_) {
      const bool gone = !possible(jobs_[job].info);
      changed = changed || gone != jobs_[job].gone;
      jobs_[job].gone = gone;
    }
    if (changed) change_rule({current_, false});
    gangs_.clear();
    for (const JobId other : unfinished_) gang_waits(other);
    news_ = true;
  }
  void arrived(JobId job, const JobInfo& info, double now_s) override {
    Book::arrived(job, info, now_s);
    rule_->arrived(job, info, now_s);
    if (progress_.size() <= job) progress_.resize(job + size_t{1});
    if (jobs_[job].gone) return;
    unfinished_.insert(job);
    if (!possible(info)) {
      jobs_[job].gone = true;
      change_rule({current_, false});
    }
    gang_waits(job);
    news_ = true;
  }
  void known_pair(const JobInfo& job, const JobInfo& other, double slowdown) override {
    known_->slowdowns.know(job, other, slowdown);
  }
  PredictionReport predictions() const override { return known_->slowdowns.predictions(); }

  void observed(JobId job, double attained_s, double remaining_s, double slowdown, double now_s) override {
    if (jobs_[job].running && slowdown > 0) {
      look_at_company(job);
      measure_pace(job, attained_s, remaining_s, slowdown);
      measure_company(job, slowdown);
    }
    Book::observed(job, attained_s, remaining_s, slowdown, now_s);
    rule_->observed(job, attained_s, remaining_s, slowdown, now_s);
  }
  void finished(JobId job, double now_s) override {
    Book::finished(job, now_s);
    rule_->finished(job, now_s);
    unfinished_.erase(job);
    news_ = true;
  }

  double tick(double now_s, std::vector<Action>& actions) override {
    take_rejected(actions);
    saved_ = std::min(kMostSaved, saved_ + kEarned);
    const bool news = std::exchange(news_, false);
    const bool afresh = news && choose(now_s);
    std::vector<Action> told;
    // A rule is asked when it would be asked in play_forward(): a look at what was measured is no event. `anew` would
    // move jobs again at each look, which no comparison has counted.
    if (news || now_s >= asked_again_s_) asked_again_s_ = rule_->tick(now_s, told);
    if (afresh) settle(jobs_, devices_, *rule_, told);
    for (const Action& action : told)  // what is repeated after it, or has other iterations, is no progress
      if (action.kind == Action::Kind::kPlace || action.kind == Action::Kind::kReconfigure)
        progress_[action.job] = {};
    follow(told, now_s, actions);
    for (const Action& action : told)
      if (action.kind == Action::Kind::kPause) gang_waits(action.job);
    return unmeasured() ? std::min(asked_again_s_, now_s + kLookS) : asked_again_s_;
  }

 private:
  void waiting_again(JobId, double) override {}

  struct Progress {
    double expected_s = 0, made_s = 0;
    bool fresh = true;      // it has just been placed: what it repeats is no progress
    double speed = 0;       // of each of its devices; 0: they differ
    bool compared = false;  // it is beside equals, on one device
    uint64_t beside = 0;    // its company there
    // The last measurement: among whom, the slowdown, and how often companies had been cleared then.
    uint64_t company = 0;
    double slowdown = 0;
    uint32_t cleared = 0;
  };
  struct Choice {
    size_t rule = 0;
    bool afresh = false;
  };

  // Notes what the job's devices and the jobs there say, if they are others than they were.
  void look_at_company(JobId job) {
    BookJob& entry = jobs_[job];
    if (std::exchange(entry.same_company, true)) return;
    Progress& progress = progress_[job];
    const BookDevice& first = devices_[entry.devices[0]];
    // A gang has one slowdown, that of its most crowded device, which need not be the one that it waits for.
    const bool alike = std::all_of(entry.devices.begin(), entry.devices.end(),
                                   [&](DeviceIndex d) { return devices_[d].info.speed == first.info.speed; });
    progress.speed = alike ? first.info.speed : 0;
    progress.compared =
        !entry.opportunistic && entry.info.gang == 1 && first.jobs.size() > 1 && of_equals(first.jobs, job);
    if (progress.compared) progress.beside = company_of(job, first.jobs);
  }

  // Progress over what the measured slowdown and the devices' speed say: the job's own pace.
  void measure_pace(JobId job, double attained_s, double remaining_s, double slowdown) {
    BookJob& entry = jobs_[job];
    Progress& progress = progress_[job];
    const double passed = attained_s - entry.attained_s;
    if (std::exchange(progress.fresh, false) || passed <= 0 || progress.speed == 0) return;
    progress.expected_s += passed * progress.speed / slowdown;
    progress.made_s += entry.remaining_s - remaining_s;
    if (progress.expected_s > 0) entry.pace = std::clamp(progress.made_s / progress.expected_s, 0.2, 5.0);
  }

  // Measures what the job's present company costs it.
  void measure_company(JobId job, double slowdown) {
    // Most often it is what was measured at the last event.
    Progress& progress = progress_[job];
    if (!progress.compared) return;
    const uint64_t company = progress.beside;
    const bool full = known_->companies.size() >= kMostCompanies;
    if (!full && progress.company == company && progress.slowdown == slowdown &&
        progress.cleared == known_->cleared)
      return;
    const BookJob& entry = jobs_[job];
    std::vector<Beside> beside;
    for (const JobId other : devices_[entry.devices[0]].jobs)
      if (other != job) beside.push_back({&jobs_[other], false});
    const double believed = believed_slowdown(*known_, {&entry, false}, beside);
    if (std::abs(slowdown - believed) > kSurprise * believed) news_ = true;
    if (full) {
      known_->companies.clear();
      ++known_->cleared;
    }
    known_->companies[company] = slowdown;
    progress.company = company;
    progress.slowdown = slowdown;
    progress.cleared = known_->cleared;
  }
  // Whether nobody beside `job` has only what the others leave.
  bool of_equals(const std::vector<JobId>& here, JobId job) const {
    return std::none_of(here.begin(), here.end(),
                        [&](JobId other) { return other != job && jobs_[other].opportunistic; });
  }

  // Whether a guaranteed job runs in a company that nobody has measured. A company once found measured is so until
  // the device changes or companies are cleared.
  bool unmeasured() {
    measured_.resize(devices_.size());
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      const BookDevice& device = devices_[d];
      const std::pair now(device.changes, known_->cleared);
      if (device.jobs.size() < 2 || measured_[d] == now) continue;
      const bool missing = std::any_of(device.jobs.begin(), device.jobs.end(), [&](JobId job) {
        return jobs_[job].info.guaranteed && of_equals(device.jobs, job) &&
               !known_->companies.contains(company_of(job, device.jobs));
      });
      if (missing) return true;
      measured_[d] = now;
    }
    return false;
  }

  // Whether enough devices that could hold the job are up. While they are not, the job counts as gone, so that no rule
  // makes the others wait for it beside idle devices.
  bool possible(const JobInfo& info) const {
    uint32_t fitting = 0;
    for (const BookDevice& device : devices_)
      if (device.up && device.info.memory_bytes >= info.memory_bytes && ++fitting == info.gang) return true;
    return false;
  }

  // The jobs that are there, numbered anew.
  ForwardStart start(double now_s) const {
    ForwardStart out;
    out.devices = devices_;
    out.now_s = now_s;
    out.restart_s = known_->restart_s;
    for (BookDevice& device : out.devices) device.jobs.clear();
    std::set<int32_t> priorities;
    for (const JobId job : unfinished_) priorities.insert(jobs_[job].info.priority);
    for (const JobId job : unfinished_) {
      if (jobs_[job].gone) continue;
      const auto number = static_cast<JobId>(out.jobs.size());
      out.jobs.push_back(jobs_[job]);
      for (const DeviceIndex d : jobs_[job].devices) out.devices[d].jobs.push_back(number);
      const auto below = std::distance(priorities.begin(), priorities.find(jobs_[job].info.priority));
      const int above = static_cast<int>(below) + (starves(jobs_[job], devices_, now_s) ? 1 : 0);
      out.weights.push_back(jobs_[job].info.weight *
                            std::pow(kPerPriority, std::min(kMostPriorities, above)));
    }
    return out;
  }

  // Takes the best rule; true if it is to place everything anew.
  bool choose(double now_s) {
    const auto jobs = static_cast<double>(unfinished_.size());
    const double work = 2 * double(kRuleCount) * 2 * jobs * (jobs + static_cast<double>(devices_.size()));
    if (unfinished_.empty()) return false;
    if (work > kMostSaved) go_on_alone(now_s);
    if (work > saved_) {  // a rule that is not compared must keep the promises by itself
      if (!kRules[current_].keeps_promises) change_rule({0, false});
      return false;
    }
    saved_ -= work;
    const ForwardStart from = start(now_s);
    if (from.jobs.empty()) return false;
    bool running = false, priorities = false;
    for (const BookJob& job : from.jobs) {
      running = running || job.running;
      priorities = priorities || job.info.priority != from.jobs[0].info.priority;
    }
    Portfolio<Choice> portfolio(kSwitchMargin);
    const auto offer = [&](size_t rule, bool afresh) {
      if (priorities && !kRules[rule].knows_priorities) return;
      const std::unique_ptr<Book> thought = kRules[rule].make(known_);
      portfolio.offer(play_forward(*thought, from, afresh, *known_, portfolio.cost()), {rule, afresh});
    };
    offer(current_, false);
    for (size_t rule = 0; rule < kRuleCount; ++rule) {
      if (rule != current_) offer(rule, false);
      if (running) offer(rule, true);
    }
    if (portfolio.empty()) return false;
    const Choice chosen = portfolio.best();
    if (chosen.rule == current_ && !chosen.afresh) return false;
    change_rule(chosen);
    return chosen.afresh;
  }

  void change_rule(const Choice& chosen) {
    current_ = chosen.rule;
    const std::unique_ptr<Book> replaced = std::exchange(rule_, kRules[current_].make(known_));
    if (!chosen.afresh) {
      rule_->take_over(*replaced, jobs_, devices_, unfinished_);
    } else {
      const ForwardStart none = stopped({jobs_, devices_, 0, 0, {}});
      rule_->take_over(none.jobs, none.devices);
    }
  }

  // Where there is too much to compare rules: the first one, or, if a gang starves, the one that reserves devices.
  void go_on_alone(double now_s) {
    bool starving = false;
    for (auto at = gangs_.begin(); at != gangs_.end() && at->first <= now_s && !starving;) {
      const BookJob& job = jobs_[at->second];
      starving = !job.gone && !job.running && starves(job, devices_, now_s);
      at = job.gone || job.running ? gangs_.erase(at) : std::next(at);
    }
    const size_t wanted = starving ? kReserving : 0;
    if (wanted != current_) change_rule({wanted, false});
  }

  // Notes when a waiting gang starves at the earliest: were the fastest device of all one for it.
  void gang_waits(JobId job) {
    const BookJob& entry = jobs_[job];
    if (entry.info.gang < 2 || entry.running || entry.gone) return;
    constexpr double kEarlier = 1 - 1e-9;  // for rounding
    gangs_.emplace(starves_at(entry, fastest_) * kEarlier, job);
  }

  const Shared known_;
  size_t current_ = 0;
  std::unique_ptr<Book> rule_;
  std::set<JobId> unfinished_;  // also those that are gone until a device comes back
  std::vector<Progress> progress_;
  std::vector<std::pair<uint32_t, uint32_t>> measured_;  // by device, see unmeasured()
  double saved_ = kMostSaved;
  bool news_ = false;
  double asked_again_s_ = kNever;             // when the rule wants to be asked without news
  double fastest_ = 0;                        // speed of any device that is up
  std::set<std::pair<double, JobId>> gangs_;  // that wait, by the time before which they do not starve
};

}  // namespace

std::unique_ptr<Scheduler> make_portfolio() {
  return std::make_unique<Ours>();
}

}  // namespace training

std::unique_ptr<Scheduler> make_training_scheduler(std::string_view name) {
  using namespace training;
  const auto known = std::make_shared<Knowledge>();
  if (name == "fifo") return make_fifo();
  if (name == "srtf") return make_srtf();
  if (name == "tiresias") return make_tiresias();
  if (name == "pack") return make_pack(known);
  if (name == "antman") return make_antman(known);
  if (name == "iadeep") return make_iadeep(known);
  if (name == "gpushare") return make_portfolio();
  return nullptr;
}

}  // namespace gpushare::cluster
