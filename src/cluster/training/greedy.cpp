// A rule of our own: each job in turn is placed where it costs least by what is believed, its own time and what it
// takes of others' together, or waits for devices where that ends sooner. Where it waits it has them reserved: jobs
// behind it run there only if they end before, so that a gang is not passed for ever (backfill).
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "cluster/training/forward.hpp"
#include "cluster/training/schedulers.hpp"

namespace gpushare::cluster::training {
namespace {

constexpr size_t kMostBeside = 16;  // jobs on a device
constexpr size_t kMostReserved =
    64;  // jobs that wait for devices, after which the rest waits for the next event
constexpr double kGreedyGangExponent = 0.8;
constexpr double kLeastLeft = 1e-3;  // of its speed that a job has, whoever goes first

class Greedy final : public Lending {
 public:
  // `fill`: what waits runs on idle devices until then.
  Greedy(std::shared_ptr<Knowledge> known, bool by_arrival, bool fill)
      : Lending(std::move(known)), by_arrival_(by_arrival), fill_(fill) {}

  void device_changed(DeviceIndex device, const DeviceInfo& info, bool up, double now_s) override {
    Lending::device_changed(device, info, up, now_s);
    speeds_known_ = false;
  }
  double tick(double now_s, std::vector<Action>& actions) override {
    take_rejected(actions);
    give_back(actions);
    if (!speeds_known_) learn_speeds();
    order(now_s);
    if (!order_.empty()) place_waiting(now_s, actions);
    drop_void_resizes(actions);
    return tune(now_s, actions);
  }

 private:
  void took_over() override {
    Lending::took_over();
    speeds_known_ = false;
  }

  void place_waiting(double now_s, std::vector<Action>& actions) {
    prepare(now_s);
    std::vector<JobId> wait;
    for (auto at = order_.begin(); at != order_.end() && wait.size() < kMostReserved;) {
      const JobId job = std::get<JobId>(*at);
      std::vector<DeviceIndex> devices = decide(job, now_s);
      if (devices.empty()) {
        wait.push_back(job);
        ++at;
        continue;
      }
      at = order_.erase(at);
      patience_.erase({waiting_[job].starves_s, job});
      enter_classes(job, std::move(devices), actions);
      for (const DeviceIndex d : jobs_[job].devices) {
        refresh(d);
        free_until(d, std::max(free_s_[d], now_s + time_of(d)));
      }
    }
    if (fill_)
      for (const JobId job : wait) fill(job, actions);
  }

  // On the fastest idle devices.
  void fill(JobId job, std::vector<Action>& actions) {
    std::vector<DeviceIndex> devices = cheapest(jobs_[job].info, [&](DeviceIndex d) {
      return devices_[d].jobs.empty() ? -devices_[d].info.speed : kNever;
    });
    if (devices.empty()) return;
    order_.erase(waiting_[job].key);
    patience_.erase({waiting_[job].starves_s, job});
    enter_classes(job, std::move(devices), actions);
  }

  // What placing a job on a device, now, is believed to take.
  struct Cost {
    double own_s = kNever;   // until it ends
    double harm_s = kNever;  // weighted, of the others
  };

  void prepare(double now_s) {
    free_s_.assign(devices_.size(), now_s);
    held_s_.assign(devices_.size(), kNever);
    facts_.resize(devices_.size());
    members_.resize(devices_.size());
    free_bytes_.resize(devices_.size());
    if (std::exchange(cleared_, known_->cleared) != known_->cleared)
      for (std::vector<Member>& here : members_)
        for (Member& member : here) member.measured = nullptr;
    for (Group& group : groups_) group.free.clear();
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      refresh(d);
      if (!devices_[d].jobs.empty()) free_s_[d] = now_s + time_of(d);
      if (devices_[d].up) groups_[group_of_[d]].free.emplace_back(free_s_[d], d);
    }
    for (Group& group : groups_) std::make_heap(group.free.begin(), group.free.end(), std::greater<>());
  }

  // What depends on the devices alone. All keys do.
  void learn_speeds() {
    speeds_known_ = true;
    speeds_.clear();
    fastest_.clear();
    std::vector<std::pair<uint64_t, double>> all;
    for (const BookDevice& device : devices_) {
      if (!device.up) continue;
      speeds_.push_back(device.info.speed);
      all.emplace_back(device.info.memory_bytes, device.info.speed);
    }
    learn_groups();
    std::sort(speeds_.begin(), speeds_.end(), std::greater<>());
    std::sort(all.begin(), all.end(), std::greater<>());
    for (const auto& [bytes, speed] : all)
      if (fastest_.empty() || speed > fastest_.back().second) fastest_.emplace_back(bytes, speed);
    for (const Key& one : order_) fresh_.push_back(std::get<JobId>(one));
    order_.clear();
    patience_.clear();
  }

  void learn_groups() {
    groups_.clear();
    group_of_.assign(devices_.size(), 0);
    std::map<std::pair<double, uint64_t>, size_t> known;
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      const DeviceInfo& info = devices_[d].info;
      if (!devices_[d].up) continue;
      const auto [at, added] = known.emplace(std::pair(info.speed, info.memory_bytes), groups_.size());
      if (added) groups_.push_back({info.speed, info.memory_bytes, {}});
      group_of_[d] = at->second;
    }
  }

  // A device's jobs, and those that have it reserved, end later than was known.
  void free_until(DeviceIndex d, double free_s) {
    if (std::exchange(free_s_[d], free_s) == free_s || !devices_[d].up) return;
    std::vector<std::pair<double, DeviceIndex>>& heap = groups_[group_of_[d]].free;
    heap.emplace_back(free_s, d);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  }

  // The pace of a gang on the fastest devices: that of the slowest of these.
  double pace_of(uint32_t gang) const { return gang <= speeds_.size() ? speeds_[gang - 1] : 1; }

  void waiting_again(JobId job, double) override { fresh_.push_back(job); }

  // Brings order_ up to date: a waiting job's key changes only when it begins to starve.
  void order(double now_s) {
    if (waiting_.size() < jobs_.size()) waiting_.resize(jobs_.size());
    for (const JobId job : fresh_) {
      if (jobs_[job].gone || jobs_[job].running) continue;
      constexpr double kEarlier = 1 - 1e-9;  // for rounding
      const double starves_s = starves_at(jobs_[job], fastest_for(jobs_[job].info.memory_bytes)) * kEarlier;
      waiting_[job] = {key(job, false), starves_s};
      order_.insert(waiting_[job].key);
      patience_.emplace(starves_s, job);
    }
    fresh_.clear();
    for (auto at = patience_.begin(); at != patience_.end() && at->first <= now_s;) {
      const JobId job = at->second;
      if (!starves(jobs_[job], devices_, now_s)) {
        ++at;
        continue;
      }
      order_.erase(waiting_[job].key);
      waiting_[job].key = key(job, true);
      order_.insert(waiting_[job].key);
      at = patience_.erase(at);
    }
  }

  // Least first: of greater priority, then who starves, then by arrival or the shortest.
  using Key = std::tuple<int32_t, bool, double, JobId>;
  Key key(JobId job, bool starving) const {
    const BookJob& entry = jobs_[job];
    if (by_arrival_ || starving) return {-entry.info.priority, !starving, static_cast<double>(job), job};
    // A gang holds all its devices at the pace of the slowest.
    const double length = entry.remaining_s / pace_of(entry.info.gang) *
                          std::pow(entry.info.gang, kGreedyGangExponent) / entry.info.weight;
    return {-entry.info.priority, true, length, job};
  }

  // The speed of the fastest device with that much memory; 0: there is none.
  double fastest_for(uint64_t memory_bytes) const {
    double speed = 0;
    for (const auto& [bytes, fastest] : fastest_)
      if (bytes >= memory_bytes) speed = fastest;
    return speed;
  }

  // Who is beside `job` among `here` and `newcomer`: others_.
  void gather(JobId job, const std::vector<JobId>& here, JobId newcomer, bool guaranteed_there) {
    others_.clear();
    for (const JobId other : here)
      if (other != job) others_.push_back({&jobs_[other], guaranteed_there && !jobs_[other].info.guaranteed});
    if (newcomer != job && newcomer != kNobody)
      others_.push_back({&jobs_[newcomer], guaranteed_there && !jobs_[newcomer].info.guaranteed});
  }
  double slowdown(JobId job, bool opportunistic, const std::vector<JobId>& here, JobId newcomer,
                  bool guaranteed_there) {
    gather(job, here, newcomer, guaranteed_there);
    return believed_slowdown(*known_, {&jobs_[job], opportunistic}, others_);
  }

  // A job of a device, and what is known of it until the device changes.
  struct Member {
    JobId job = 0;
    bool opportunistic = false;
    double held = 1;                   // see held_back()
    double there = 1;                  // its progress a second, but for its slowdown
    double least = 1;                  // of its slowdown
    std::optional<uint64_t> company;   // see company_among()
    const double* measured = nullptr;  // its slowdown in that company, until companies are cleared
    std::optional<double> guessed;     // where that does not change
  };

  // What believed_slowdown() says of it.
  double slowdown_of(Member& member, DeviceIndex d) {
    if (member.company && member.measured == nullptr)
      if (const auto at = known_->companies.find(*member.company); at != known_->companies.end())
        member.measured = &at->second;
    if (member.measured != nullptr) return *member.measured;
    if (member.guessed) return *member.guessed;
    gather(member.job, devices_[d].jobs, kNobody, facts_[d].guaranteed);
    const Beside self{&jobs_[member.job], member.opportunistic};
    const double guessed = guessed_slowdown(*known_, self, others_);
    if (!names_both(self, others_)) member.guessed = guessed;
    return guessed;
  }

  // Until the last of a device's jobs ends, at their present speeds.
  double time_of(DeviceIndex d) {
    double last = 0;
    for (Member& member : members_[d])
      last = std::max(last, jobs_[member.job].remaining_s * slowdown_of(member, d) / member.there);
    return last;
  }

  bool has_guaranteed(const std::vector<JobId>& here) const {
    return std::any_of(here.begin(), here.end(), [&](JobId job) { return jobs_[job].info.guaranteed; });
  }

  // How much slower than a device of that speed the slowest of a running job's devices is.
  double held_back(const BookJob& job, double speed) const {
    double slowest = speed;
    for (const DeviceIndex d : job.devices) slowest = std::min(slowest, devices_[d].info.speed);
    return speed / slowest;
  }

  Cost cost_on(JobId newcomer, DeviceIndex d) {
    const BookJob& own = jobs_[newcomer];
    const std::vector<JobId>& here = devices_[d].jobs;
    const double speed = devices_[d].info.speed * own.pace, alone = alone_slowdown(own);
    if (here.empty()) return {own.remaining_s * alone / speed, 0};
    if (here.size() >= kMostBeside) return {};
    const bool before = has_guaranteed(here), after = before || own.info.guaranteed;
    const double slow = slowdown(newcomer, after && !own.info.guaranteed, here, kNobody, after);
    beside_.clear();
    double last_s = 0;
    for (Member& member : members_[d]) {
      const JobId job = member.job;
      const BookJob& other = jobs_[job];
      const bool way_after = after && !other.info.guaranteed;
      const double was = slowdown_of(member, d);
      const double then = slowdown(job, way_after, here, newcomer, after);
      // A gang waits for its slowest device: company on a faster one may cost it nothing.
      const double held = member.held, there = member.there;
      beside_.push_back(
          {other.remaining_s, std::max(was, held) / there, std::max(then, held) / there, other.info.weight});
      last_s = std::max(last_s, other.remaining_s * std::max(then, held) / there);
    }
    Cost cost{own.remaining_s * slow / speed, 0};
    if (cost.own_s > last_s)  // alone in the end
      cost.own_s = last_s + std::max(0.0, own.remaining_s - last_s * speed / slow) * alone / speed;
    if (own.info.guaranteed &&
        std::min(own.remaining_s, last_s * speed / slow) * (slow / alone - 1) > may_lose(own) * (1 + 1e-9))
      return {};
    for (size_t i = 0; i < here.size(); ++i) {
      const auto& [remaining, was, then, weight] = beside_[i];
      const double harm_s = std::max(0.0, std::min(remaining * (then - was), cost.own_s * (1 - was / then)));
      const BookJob& other = jobs_[here[i]];
      if (other.info.guaranteed && harm_s > may_lose(other) * was * (1 + 1e-9)) return {};
      cost.harm_s += weight * harm_s;
    }
    return cost;
  }

  // What a bound of cost_on() needs of a device; demands are of the first resource.
  struct Facts {
    bool up = false, guaranteed = false;  // some of its jobs
    bool one = false;                     // it has one job, without a choice of batch sizes
    uint32_t changes = UINT32_MAX;        // of the device, when it was looked at
    size_t jobs = 0;
    double speed = 1;
    double guaranteed_demand = 0, other_demand = 0;
    double last_s = 0;  // until its last job ends, at the least
    // Of the one job.
    bool one_resource = false;
    double remaining_s = 0, weight = 0, may_lose_s = 0, held = 0, there = 0;
  };
  // Brings facts_ and members_ of a device up to date.
  void refresh(DeviceIndex d) {
    Facts& facts = facts_[d];
    if (facts.changes != devices_[d].changes) look_at(d);
    facts.last_s = 0;
    for (const Member& member : members_[d]) {
      const BookJob& entry = jobs_[member.job];
      facts.last_s = std::max(facts.last_s, entry.remaining_s * member.least / member.there);
      if (!facts.one) continue;
      facts.remaining_s = entry.remaining_s;
      facts.may_lose_s = may_lose(entry);
    }
  }
  // All of them that stays until the device changes.
  void look_at(DeviceIndex d) {
    const BookDevice& device = devices_[d];
    Facts out;
    out.changes = device.changes;
    out.up = device.up && device.used_bytes <= device.info.memory_bytes;
    free_bytes_[d] = out.up ? device.info.memory_bytes - device.used_bytes : 0;
    out.jobs = device.jobs.size();
    out.speed = device.info.speed;
    out.guaranteed = has_guaranteed(device.jobs);
    members_[d].clear();
    for (const JobId job : device.jobs) {
      const BookJob& entry = jobs_[job];
      const double demand = entry.info.demands.empty() ? 0 : entry.info.demands[0];
      (entry.info.guaranteed ? out.guaranteed_demand : out.other_demand) += demand;
      Member member;
      member.job = job;
      member.opportunistic = out.guaranteed && !entry.info.guaranteed;
      out.held = member.held = held_back(entry, out.speed);
      out.there = member.there = out.speed * entry.pace;
      member.least = std::max(alone_slowdown(entry), member.held);
      gather(job, device.jobs, kNobody, out.guaranteed);
      member.company = company_among({&entry, member.opportunistic}, others_);
      members_[d].push_back(member);
      out.one = out.jobs == 1 && entry.info.batch_sizes.size() < 2;
      out.one_resource = entry.info.demands.size() == 1;
      out.weight = entry.info.weight;
    }
    facts_[d] = out;
  }

  // Whether bounds hold for the job: nothing was ever measured beside it, and only its demands say what it suffers.
  static bool plain(const BookJob& job) {
    return job.attained_s == 0 && job.pauses == 0 && job.info.config.empty() &&
           job.info.batch_sizes.size() < 2;
  }

  // No more than what cost_on() says of a plain job, from demands alone; no cost only where that has none. It spares the
  // thousands of pairs that come to nothing.
  Cost least_cost(const BookJob& own, const Facts& there) const {
    constexpr double kLess = 1 - 1e-9;  // for rounding
    const double speed = there.speed * own.pace, alone_s = own.remaining_s / speed;
    if (there.jobs == 0 || own.info.demands.empty()) return {alone_s * kLess, 0};
    const double demand = own.info.demands[0];
    const bool mine = own.info.guaranteed;
    double slow = std::max(1.0, demand + (mine ? there.guaranteed_demand : there.other_demand));
    if (!mine && there.guaranteed && own.info.demands.size() == 1)
      slow /= left_of(there.guaranteed_demand, demand);
    Cost least{std::min(alone_s * slow, there.last_s * (1 - 1 / slow) + alone_s) * kLess, 0};
    if (mine && std::min(own.remaining_s, there.last_s * speed / slow) * (slow - 1) * kLess >
                    may_lose(own) * (1 + 1e-9))
      return {};
    if (!there.one || (there.guaranteed && !mine)) return least;
    double then = 1;
    if (mine == there.guaranteed)
      then = std::max(1.0, demand + there.guaranteed_demand + there.other_demand);
    else if (there.one_resource)
      then = 1 / left_of(demand, there.other_demand);
    const double was = std::max(1.0, there.held) / there.there;
    then = std::max(then, there.held) / there.there;
    const double harm_s =
        std::max(0.0, std::min(there.remaining_s * (then - was), least.own_s * (1 - was / then))) * kLess;
    if (there.guaranteed && harm_s * kLess > there.may_lose_s * was * (1 + 1e-9)) return {};
    least.harm_s = there.weight * harm_s;
    return least;
  }
  // The part of its speed that a job has beside those that go first.
  static double left_of(double above, double demand) {
    return above > 0 ? std::clamp((1 - above) / std::max(demand, 1e-6), kLeastLeft, 1.0) : 1.0;
  }

  // The devices to place the job on now; none: it waits, with devices reserved where it will be.
  std::vector<DeviceIndex> decide(JobId job, double now_s) {
    const BookJob& entry = jobs_[job];
    const JobInfo& info = entry.info;
    const Later later = find_later(job);
    if (later.devices.empty()) return {};
    // What costs more than to wait is not looked at: no device costs more than all that are chosen.
    const double most = info.weight * (later.end_s - now_s) * (1 + 1e-9);
    const bool bounded = plain(entry);
    const auto too_dear = [&](const Cost& cost, DeviceIndex d) {
      return !(cost.own_s < kNever) || info.weight * cost.own_s + cost.harm_s > most ||
             (held_s_[d] < kNever && now_s + cost.own_s > held_s_[d]);
    };
    // No device ends the job sooner than this.
    const double soonest_s = bounded ? now_s + entry.remaining_s / (speeds_[0] * entry.pace) * (1 - 1e-8) : 0;
    std::vector<std::tuple<double, DeviceIndex, Cost>>& now = now_;
    now.clear();
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      if (free_bytes_[d] < info.memory_bytes || soonest_s > held_s_[d]) continue;
      const Facts& there = facts_[d];
      if (!there.up) continue;
      if (bounded && too_dear(least_cost(entry, there), d)) continue;
      const Cost cost = cost_on(job, d);
      if (too_dear(cost, d) || (held_s_[d] < kNever && cost.harm_s > 1e-9)) continue;
      now.emplace_back(info.weight * cost.own_s + cost.harm_s, d, cost);
    }
    double cost_now = kNever;
    std::vector<DeviceIndex> devices;
    if (now.size() >= info.gang) {
      // Where it costs as little beside others, an idle device is left to who needs one.
      std::sort(now.begin(), now.end(), [&](const auto& a, const auto& b) {
        const auto key = [&](const auto& one) {
          return std::tuple(std::get<0>(one), devices_[std::get<1>(one)].jobs.empty(), std::get<1>(one));
        };
        return key(a) < key(b);
      });
      double own_s = 0, harm_s = 0;
      for (uint32_t i = 0; i < info.gang; ++i) {
        const auto& [value, d, cost] = now[i];
        own_s = std::max(own_s, cost.own_s);
        harm_s += cost.harm_s;
        devices.push_back(d);
      }
      if (info.gang > 1 && nodes_ > 1) devices = near(info.gang, now);
      cost_now = info.weight * own_s + harm_s;
    }
    if (cost_now <= most) return devices;
    for (const DeviceIndex d : later.devices) {
      held_s_[d] = std::min(held_s_[d], later.start_s);
      free_until(d, later.end_s);
    }
    return {};
  }

  // Of those that cost no more than the dearest that is needed, devices of few nodes.
  std::vector<DeviceIndex> near(uint32_t gang,
                                const std::vector<std::tuple<double, DeviceIndex, Cost>>& sorted) const {
    std::vector<std::pair<double, DeviceIndex>> same;
    for (const auto& [value, d, cost] : sorted)
      if (value <= std::get<0>(sorted[gang - 1])) same.emplace_back(value, d);
    return of_few_nodes(gang, std::move(same));
  }

  // Whole devices that end the job soonest; none if there are too few.
  struct Later {
    std::vector<DeviceIndex> devices;
    double start_s = 0, end_s = 0;
  };
  Later find_later(JobId job) {
    const BookJob& entry = jobs_[job];
    const double alone = entry.remaining_s * alone_slowdown(entry) / entry.pace;
    const size_t gang = entry.info.gang;
    // Of devices that are alike, those that are free first end it first: the groups' first ones are compared.
    const auto later = std::greater<>();
    soonest_.clear();
    popped_.clear();
    const auto offer_next = [&](size_t number) {
      std::vector<std::pair<double, DeviceIndex>>& heap = groups_[number].free;
      while (!heap.empty()) {
        const auto [free_s, d] = heap.front();
        std::pop_heap(heap.begin(), heap.end(), later);
        heap.pop_back();
        if (free_s != free_s_[d]) continue;  // it has become later
        popped_.emplace_back(free_s, d);
        soonest_.emplace_back(free_s + alone / groups_[number].speed, free_s, d);
        std::push_heap(soonest_.begin(), soonest_.end(), later);
        return;
      }
    };
    for (size_t number = 0; number < groups_.size(); ++number)
      if (groups_[number].memory_bytes >= entry.info.memory_bytes) offer_next(number);
    Later out;
    double speed = kNever;
    while (out.devices.size() < gang && !soonest_.empty()) {
      const auto [end_s, free_s, d] = soonest_.front();
      std::pop_heap(soonest_.begin(), soonest_.end(), later);
      soonest_.pop_back();
      out.start_s = std::max(out.start_s, free_s);
      speed = std::min(speed, devices_[d].info.speed);
      out.devices.push_back(d);
      if (out.devices.size() < gang) offer_next(group_of_[d]);
    }
    for (const auto& [free_s, d] : popped_) {
      std::vector<std::pair<double, DeviceIndex>>& heap = groups_[group_of_[d]].free;
      heap.emplace_back(free_s, d);
      std::push_heap(heap.begin(), heap.end(), later);
    }
    if (out.devices.size() < gang) return {};
    out.end_s = out.start_s + alone / speed;
    return out;
  }

  static constexpr JobId kNobody = UINT32_MAX;
  const bool by_arrival_, fill_;
  std::vector<double> free_s_;  // a device: when its jobs, and those that have it reserved, have ended
  std::vector<double> speeds_;  // of the devices that are up, the fastest first
  std::vector<double> held_s_;  // when the first of those that have it reserved begins
  std::vector<Beside> others_;
  std::vector<std::array<double, 4>> beside_;  // remaining, time a second before and after, weight
  // By device.
  std::vector<Facts> facts_;
  std::vector<std::vector<Member>> members_;
  std::vector<uint64_t> free_bytes_;
  std::vector<size_t> group_of_;
  // Devices that are up and alike, by when they are free, as a heap. What is not the device's free_s_ any longer counts
  // for nothing.
  struct Group {
    double speed = 1;
    uint64_t memory_bytes = 0;
    std::vector<std::pair<double, DeviceIndex>> free;
  };
  std::vector<Group> groups_;
  uint32_t cleared_ = 0;  // what known_ said when members_ were brought up to date
  // Of find_later() and decide().
  std::vector<std::tuple<double, double, DeviceIndex>> soonest_;
  std::vector<std::pair<double, DeviceIndex>> popped_;
  std::vector<std::tuple<double, DeviceIndex, Cost>> now_;
  struct Waiting {
    Key key;
    double starves_s = 0;  // the job does not starve before
  };
  std::vector<Waiting> waiting_;                      // by job; of those in order_
  std::set<Key> order_;                               // jobs that wait
  std::set<std::pair<double, JobId>> patience_;       // those of order_ that do not starve, by starves_s
  std::vector<JobId> fresh_;                          // that wait, and are not in order_ yet
  bool speeds_known_ = false;                         // and so fastest_ and the keys
  std::vector<std::pair<uint64_t, double>> fastest_;  // of devices with at least that memory; memory descends
};

class Anew final : public Sharing {
 public:
  using Sharing::Sharing;
  double tick(double now_s, std::vector<Action>& actions) override {
    take_rejected(actions);
    Greedy greedy(known_, false, true);
    greedy.think();
    const ForwardStart none = stopped({jobs_, devices_, now_s, 0, {}});
    greedy.take_over(none.jobs, none.devices);
    std::vector<Action> told;
    greedy.tick(now_s, told);
    settle(jobs_, devices_, greedy, told);
    follow(told, now_s, actions);
    return tune(now_s, actions);
  }
};

}  // namespace

std::unique_ptr<Book> make_greedy(std::shared_ptr<Knowledge> known, bool by_arrival) {
  return std::make_unique<Greedy>(std::move(known), by_arrival, false);
}
std::unique_ptr<Book> make_anew(std::shared_ptr<Knowledge> known) {
  return std::make_unique<Anew>(std::move(known));
}

}  // namespace gpushare::cluster::training
