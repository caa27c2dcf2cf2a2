// A rule of our own: each job in turn is placed where it costs least by what is believed, its own time and what it
// takes of others' together, or waits for devices where that ends sooner. Where it waits it has them reserved: jobs
// behind it run there only if they end before, so that a gang is not passed for ever (backfill).
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <set>
#include <tuple>

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
  void take_over(const std::vector<BookJob>& jobs, const std::vector<BookDevice>& devices) override {
    Lending::take_over(jobs, devices);
    speeds_known_ = false;
  }
  double tick(double now_s, std::vector<Action>& actions) override {
    take_rejected(actions);
    give_back(actions);
    prepare(now_s);
    order(now_s);
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
        free_s_[d] = std::max(free_s_[d], now_s + time_of(d));
        facts_[d] = facts_of(d);
      }
    }
    if (fill_)
      for (const JobId job : wait) fill(job, actions);
    drop_void_resizes(actions);
    return tune(now_s, actions);
  }

 private:
  // On the fastest idle devices.
  void fill(JobId job, std::vector<Action>& actions) {
    std::vector<DeviceIndex> devices = cheapest(jobs_[job].info, [&](DeviceIndex d) {
      return devices_[d].jobs.empty() ? -devices_[d].info.speed : kNever;
    });
    if (devices.empty()) return;
    order_.erase(waiting_[job].key);
    patience_.erase({waiting_[job].starves_s, job});
    enter(job, std::move(devices), false, actions);
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
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      facts_[d] = facts_of(d);
      if (!devices_[d].jobs.empty()) free_s_[d] = now_s + time_of(d);
    }
    if (!speeds_known_) learn_speeds();
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
    std::sort(speeds_.begin(), speeds_.end(), std::greater<>());
    std::sort(all.begin(), all.end(), std::greater<>());
    for (const auto& [bytes, speed] : all)
      if (fastest_.empty() || speed > fastest_.back().second) fastest_.emplace_back(bytes, speed);
    for (const Key& one : order_) fresh_.push_back(std::get<JobId>(one));
    order_.clear();
    patience_.clear();
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

  double slowdown(JobId job, bool opportunistic, const std::vector<JobId>& here, JobId newcomer,
                  bool guaranteed_there) {
    others_.clear();
    for (const JobId other : here)
      if (other != job) others_.push_back({&jobs_[other], guaranteed_there && !jobs_[other].info.guaranteed});
    if (newcomer != job && newcomer != kNobody)
      others_.push_back({&jobs_[newcomer], guaranteed_there && !jobs_[newcomer].info.guaranteed});
    return believed_slowdown(*known_, {&jobs_[job], opportunistic}, others_);
  }

  // Until the last of a device's jobs ends, at their present speeds.
  double time_of(DeviceIndex d) {
    const std::vector<JobId>& here = devices_[d].jobs;
    const bool guaranteed = has_guaranteed(here);
    double last = 0;
    for (const JobId job : here) {
      const double slow = slowdown(job, guaranteed && !jobs_[job].info.guaranteed, here, kNobody, guaranteed);
      last = std::max(last, jobs_[job].remaining_s * slow / (devices_[d].info.speed * jobs_[job].pace));
    }
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
    const double speed = devices_[d].info.speed * own.pace, alone = alone_slowdown(own.info);
    if (here.empty()) return {own.remaining_s * alone / speed, 0};
    if (here.size() >= kMostBeside) return {};
    const bool before = has_guaranteed(here), after = before || own.info.guaranteed;
    const double slow = slowdown(newcomer, after && !own.info.guaranteed, here, kNobody, after);
    beside_.clear();
    double last_s = 0;
    for (const JobId job : here) {
      const BookJob& other = jobs_[job];
      const bool way_before = before && !other.info.guaranteed, way_after = after && !other.info.guaranteed;
      const double was = slowdown(job, way_before, here, kNobody, before);
      const double then = slowdown(job, way_after, here, newcomer, after);
      // A gang waits for its slowest device: company on a faster one may cost it nothing.
      const double held = held_back(other, devices_[d].info.speed);
      const double there = devices_[d].info.speed * other.pace;
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
    uint64_t free_bytes = 0;
    size_t jobs = 0;
    double speed = 1;
    double guaranteed_demand = 0, other_demand = 0;
    double last_s = 0;  // until its last job ends, at the least
    // Of the one job.
    bool one_resource = false;
    double remaining_s = 0, weight = 0, may_lose_s = 0, held = 0, there = 0;
  };
  Facts facts_of(DeviceIndex d) const {
    const BookDevice& device = devices_[d];
    Facts out;
    out.up = device.up && device.used_bytes <= device.info.memory_bytes;
    out.free_bytes = out.up ? device.info.memory_bytes - device.used_bytes : 0;
    out.jobs = device.jobs.size();
    out.speed = device.info.speed;
    for (const JobId job : device.jobs) {
      const BookJob& entry = jobs_[job];
      const double demand = entry.info.demands.empty() ? 0 : entry.info.demands[0];
      (entry.info.guaranteed ? out.guaranteed_demand : out.other_demand) += demand;
      out.guaranteed = out.guaranteed || entry.info.guaranteed;
      const double alone = alone_slowdown(entry.info);
      out.held = held_back(entry, out.speed);
      out.there = out.speed * entry.pace;
      out.last_s = std::max(out.last_s, entry.remaining_s * std::max(alone, out.held) / out.there);
      out.one = out.jobs == 1 && entry.info.batch_sizes.size() < 2;
      out.one_resource = entry.info.demands.size() == 1;
      out.remaining_s = entry.remaining_s;
      out.weight = entry.info.weight;
      out.may_lose_s = may_lose(entry);
    }
    return out;
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
    std::vector<std::tuple<double, DeviceIndex, Cost>> now;
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      const Facts& there = facts_[d];
      if (!there.up || there.free_bytes < info.memory_bytes) continue;
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
      free_s_[d] = later.end_s;
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
    const double alone = entry.remaining_s * alone_slowdown(entry.info) / entry.pace;
    const size_t gang = entry.info.gang;
    // The soonest of the devices seen so far, as a heap with the latest on top.
    std::vector<std::tuple<double, double, DeviceIndex>>& soonest = soonest_;
    soonest.clear();
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      if (!devices_[d].up || devices_[d].info.memory_bytes < entry.info.memory_bytes) continue;
      const std::tuple one(free_s_[d] + alone / devices_[d].info.speed, free_s_[d], d);
      if (soonest.size() == gang) {
        if (!(one < soonest.front())) continue;
        std::pop_heap(soonest.begin(), soonest.end());
        soonest.pop_back();
      }
      soonest.push_back(one);
      std::push_heap(soonest.begin(), soonest.end());
    }
    Later out;
    if (soonest.size() < gang) return out;
    std::sort_heap(soonest.begin(), soonest.end());
    double speed = kNever;
    for (const auto& [end_s, free_s, d] : soonest) {
      out.start_s = std::max(out.start_s, free_s);
      speed = std::min(speed, devices_[d].info.speed);
      out.devices.push_back(d);
    }
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
  std::vector<Facts> facts_;                   // by device
  std::vector<std::tuple<double, double, DeviceIndex>> soonest_;  // see find_later()
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
