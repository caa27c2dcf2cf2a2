// A plan for devices of any speeds: each trial, the longest first, takes the place where it needs the least area among
// those where it ends within T, or the place where it ends first. A place is a width on certain devices from the time
// on at which they are free, so that slow devices are passed over where waiting for a fast one ends sooner.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cluster/fluid_policies.hpp"
#include "cluster/never.hpp"

namespace gpushare::cluster {
namespace {

constexpr double kTimeSlack = 1e-9;  // of a duration or an area: a smaller difference is rounding

// A device in parts of equal size, each free from a time on.
struct Parts {
  std::vector<double> free_s = {0};  // from now
  double all_s() const { return *std::max_element(free_s.begin(), free_s.end()); }
};

struct Place {
  Width width = 0;
  std::vector<int> devices;
  double start_s = 0;
  double end_s = kNever;
  double area = kNever;
};

// Starts trials at their places, each after those that have the devices before it.
class PlacesPolicy final : public TrialPolicy {
 public:
  PlacesPolicy(std::vector<std::pair<size_t, Place>> places, size_t devices) : queues_(devices) {
    std::stable_sort(places.begin(), places.end(),
                     [](const auto& a, const auto& b) { return a.second.start_s < b.second.start_s; });
    for (auto& [trial, place] : places) {
      for (const int device : place.devices) queues_[size_t(device)].push_back(trial);
      places_.emplace(trial, std::move(place));
    }
  }
  // Trials that run elsewhere, or are to run later, stop.
  void start(TrialRun& run) {
    for (const size_t trial : run.unfinished()) {
      const TrialRun::State& state = run.trials()[trial];
      if (state.width == 0) continue;
      const auto at = places_.find(trial);
      if (at == places_.end()) continue;  // goes on
      if (at->second.start_s <= kTimeSlack && at->second.width == state.width &&
          at->second.devices == state.devices)
        taken(at);
      else
        run.pause(trial);
    }
    fill(run);
  }
  void arrived(TrialRun&, const std::vector<size_t>&) override {}
  void finished(TrialRun& run) override { fill(run); }
  std::unique_ptr<TrialPolicy> clone() const override { return std::make_unique<PlacesPolicy>(*this); }

 private:
  using Places = std::map<size_t, Place>;

  void taken(Places::iterator at) {
    for (const int device : at->second.devices) {
      auto& queue = queues_[size_t(device)];
      queue.erase(std::find(queue.begin(), queue.end(), at->first));
    }
    places_.erase(at);
  }
  void fill(TrialRun& run) {
    for (bool again = true; again;) {
      again = false;
      for (auto at = places_.begin(); at != places_.end();) {
        const auto here = at++;
        const Place& place = here->second;
        const uint64_t memory = run.trials()[here->first].trial.memory_bytes;
        const bool next = std::all_of(place.devices.begin(), place.devices.end(), [&](int device) {
          return queues_[size_t(device)].front() == here->first && run.has(device, place.width, memory);
        });
        if (!next) continue;
        const size_t trial = here->first;
        const Width width = place.width;
        std::vector<int> devices = place.devices;
        taken(here);
        run.place(trial, width, std::move(devices));
        again = true;
      }
    }
  }

  Places places_;
  std::vector<std::deque<size_t>> queues_;  // a device's trials in the order in which they start
};

class Builder {
 public:
  Builder(const TrialRun& run, const std::vector<size_t>& left, bool move) : run_(run) {
    const size_t count = run.devices().size();
    parts_.resize(count);
    for (const size_t trial : left) {
      const TrialRun::State& state = run.trials()[trial];
      if (state.width == 0 || move) {
        todo_.push_back(trial);
        continue;
      }
      // Goes on where it is.
      const double end =
          std::max(0.0, state.stalled_until_s - run.now_s()) + run.remaining(trial) / state.rate;
      for (const int device : state.devices) {
        Parts& parts = parts_[size_t(device)];
        parts.free_s.assign(1, std::max(parts.all_s(), end));
      }
    }
    std::stable_sort(todo_.begin(), todo_.end(), [&](size_t a, size_t b) { return alone(a) > alone(b); });
  }

  std::unique_ptr<PlacesPolicy> build(double T) {
    std::vector<std::pair<size_t, Place>> out;
    for (const size_t trial : todo_) {
      Place place = choose(trial, T);
      if (place.width == 0) continue;
      take(place);
      out.emplace_back(trial, std::move(place));
    }
    return std::make_unique<PlacesPolicy>(std::move(out), parts_.size());
  }

 private:
  double alone(size_t trial) const { return run_.trials()[trial].trial.budget_s * run_.remaining(trial); }

  Place choose(size_t trial, double T) const {
    const TrialRun::State& state = run_.trials()[trial];
    Place best;
    const auto offer = [&](Width width, std::vector<int> devices, double start) {
      double speed = kNever;
      for (const int device : devices) speed = std::min(speed, run_.devices()[size_t(device)].speed);
      const double work = run_.remaining(trial) * duration(state.trial, width);
      const bool stays = state.width == width && start <= kTimeSlack && state.devices == devices;
      const double cost = state.started && !stays ? run_.limits().change_cost_s : 0;
      // Areas of devices of different speeds are compared by the work that fits into them.
      double area = 0;
      for (const int device : devices)
        area += (cost + work / speed) * std::min(1.0, size_of(width)) * run_.devices()[size_t(device)].speed;
      const double end = start + cost + work / speed;
      const bool in_time = end <= T * (1 + kTimeSlack), best_in_time = best.end_s <= T * (1 + kTimeSlack);
      const bool better =
          in_time != best_in_time ? in_time
          : in_time               ? area < best.area * (1 - kTimeSlack) ||
                          (area < best.area * (1 + kTimeSlack) && end < best.end_s * (1 - kTimeSlack))
                    : end < best.end_s * (1 - kTimeSlack);
      if (better) best = {width, std::move(devices), start, end, area};
    };
    if (state.width != 0) {  // where it is, if nobody has taken that
      double start = 0;
      for (const int device : state.devices) {
        const Parts& parts = parts_[size_t(device)];
        const bool same = int(parts.free_s.size()) == (state.width < 0 ? -state.width : 1);
        start = std::max(start,
                         same ? *std::min_element(parts.free_s.begin(), parts.free_s.end()) : parts.all_s());
      }
      if (start <= kTimeSlack) offer(state.width, state.devices, start);
    }
    for (const int device : run_.up()) {
      const auto d = size_t(device);
      const uint64_t memory = run_.devices()[d].memory_bytes;
      if (memory < state.trial.memory_bytes) continue;
      const std::vector<double>& free = parts_[d].free_s;
      offer(1, {device}, parts_[d].all_s());
      for (int p = 2; p <= run_.limits().max_packed; ++p) {
        // Any trials of that size fit together, so that memory need not be counted over time.
        if (state.trial.memory_bytes > memory / uint64_t(p)) break;
        const bool same = int(free.size()) == p;
        offer(-p, {device}, same ? *std::min_element(free.begin(), free.end()) : parts_[d].all_s());
      }
    }
    wide(state.trial, offer);
    return best;
  }

  // The devices at least as fast as each one, the first that are free of them.
  template <class Offer>
  void wide(const Trial& trial, Offer&& offer) const {
    const int most = std::min<int>(run_.limits().max_workers, int(run_.up().size()));
    if (most < 2) return;
    std::vector<std::pair<double, int>> free;
    for (const int device : run_.up())
      if (run_.devices()[size_t(device)].memory_bytes >= trial.memory_bytes)
        free.emplace_back(parts_[size_t(device)].all_s(), device);
    std::sort(free.begin(), free.end());
    std::vector<double> speeds;
    for (const auto& [start, device] : free) speeds.push_back(run_.devices()[size_t(device)].speed);
    std::sort(speeds.begin(), speeds.end());
    speeds.erase(std::unique(speeds.begin(), speeds.end()), speeds.end());
    for (const double least : speeds) {
      std::vector<int> devices;
      for (const auto& [start, device] : free) {
        if (run_.devices()[size_t(device)].speed < least) continue;
        devices.push_back(device);
        if (int(devices.size()) >= 2) offer(int(devices.size()), devices, start);
        if (int(devices.size()) == most) break;
      }
    }
  }

  void take(const Place& place) {
    for (const int device : place.devices) {
      Parts& parts = parts_[size_t(device)];
      if (place.width > 0) {
        parts.free_s.assign(1, place.end_s);
        continue;
      }
      if (int(parts.free_s.size()) != -place.width) parts.free_s.assign(size_t(-place.width), parts.all_s());
      *std::min_element(parts.free_s.begin(), parts.free_s.end()) = place.end_s;
    }
  }

  const TrialRun& run_;
  std::vector<Parts> parts_;
  std::vector<size_t> todo_;
};

}  // namespace

std::unique_ptr<TrialPolicy> make_places(TrialRun& run, double T, bool move) {
  std::unique_ptr<PlacesPolicy> policy = Builder(run, run.unfinished(), move).build(T);
  policy->start(run);
  return policy;
}

}  // namespace gpushare::cluster
