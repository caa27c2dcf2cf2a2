// SPDX-License-Identifier: Apache-2.0
#include "cluster/ekya.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "cluster/learn/profiler_error.hpp"
#include "cluster/never.hpp"
#include "cluster/portfolio.hpp"
#include "cluster/solve/shares.hpp"

namespace gpushare::cluster {
namespace {

constexpr double kPerPointBelowFloor = 1e6;  // of accuracy: keeping the floor comes before any gain
constexpr double kTolerance = 1e-9;
// Where the next window is not known, divisions are tried in which a stream's accuracy at a window's end counts as so many windows at it.
constexpr double kEndWeights[] = {0.1, 0.2, 0.4, 0.7, 1.0};
constexpr double kLeastAccuracy = 1e-3;  // points, that an accuracy of 0 counts as in logarithms

// The state of a stream from now until the end of the window.
struct StreamState {
  double accuracy = 0;
  bool done = false;     // retrained in this window: not again
  int running = -1;      // configuration that has been started
  double remaining = 0;  // GPU-seconds of it
};

struct Option {  // one way to use a stream's quanta
  int64_t inference = 0;
  int64_t retraining = 0;
  int configuration = -1;
};

// The part of a window that has passed before anything may be retrained.
struct Begun {
  double seconds = 0;
  std::vector<Option> options;      // shares meanwhile
  std::vector<double> integral;     // of accuracy, by stream
  std::vector<double> below_floor;  // by stream
};

struct Outcome {
  double integral = 0;     // of accuracy over the time asked
  double below_floor = 0;  // greatest distance below what the floor asks
  double end_accuracy = 0;
  bool feasible = true;  // the retraining ends in time
  int completed = -1;    // the configuration whose retraining ended
};

// A rule of a window. kFixed: the best fixed shares, divided once. kDivided: the same at each completion, with what a
// stream's accuracy at the window's end counts in the divisions.
struct WindowRule {
  enum class Kind { kFixed, kDivided, kStolen, kEqual, kEqualRetrained };
  Kind kind = Kind::kDivided;
  double end_weight = 0;
};

class Planner {
 public:
  explicit Planner(const RetrainingProblem& problem)
      : problem_(problem), quanta_(problem.quanta()), up_(quanta_), devices_up_(problem.devices) {
    factors_.resize(problem.streams.size());
    for (size_t v = 0; v < problem.streams.size(); ++v) {
      for (int64_t q = 0; q <= quanta_; ++q)
        factors_[v].push_back(inference_factor(problem.streams[v], double(q) * problem.quantum));
    }
  }

  const std::vector<RetrainingConfiguration>& configurations(size_t stream, size_t window) const {
    static const std::vector<RetrainingConfiguration> kNone;
    const auto& windows = problem_.streams[stream].windows;
    return window < windows.size() ? windows[window] : kNone;
  }

  // So many devices are up: what is decided from now on is for these.
  void set_up(double devices) {
    devices_up_ = devices;
    up_ = problem_.quanta_in(devices);
  }
  int64_t quanta_up() const { return up_; }

  double asked(size_t stream, double accuracy) const {
    return std::min(problem_.accuracy_floor, accuracy * factors_[stream][size_t(up_)]);
  }

  // One stream from now on with fixed shares given as factors and devices, over `left` seconds.
  Outcome outcome(size_t stream, size_t window, const StreamState& state, double factor, double factor_after,
                  double retraining_devices, int configuration, double left) const {
    Outcome result;
    // Without a retraining its share is with inference from the start.
    const double during = state.accuracy * (configuration < 0 ? factor_after : factor);
    result.below_floor = std::max(0.0, asked(stream, state.accuracy) - during);
    result.end_accuracy = state.accuracy;
    if (configuration < 0) {
      result.integral = during * left;
      return result;
    }
    const auto& chosen = configurations(stream, window)[size_t(configuration)];
    const double work = state.running == configuration ? state.remaining : chosen.gpu_seconds;
    const double seconds = retraining_devices > 0 ? work / retraining_devices : kNever;
    if (seconds > left * (1 + kTolerance)) {
      result.feasible = false;
      result.integral = during * left;
      return result;
    }
    const double after = chosen.accuracy * factor_after;
    result.integral = during * seconds + after * std::max(0.0, left - seconds);
    result.end_accuracy = chosen.accuracy;
    result.completed = configuration;
    if (left - seconds > left * kTolerance)
      result.below_floor = std::max(result.below_floor, asked(stream, chosen.accuracy) - after);
    return result;
  }

  Outcome outcome(size_t stream, size_t window, const StreamState& state, const Option& option,
                  double left) const {
    const auto& factors = factors_[stream];
    return outcome(stream, window, state, factors[size_t(option.inference)],
                   factors[size_t(option.inference + option.retraining)],
                   double(option.retraining) * problem_.quantum, option.configuration, left);
  }

  double worth(const Outcome& outcome, double end_weight) const {
    return outcome.integral / problem_.window_s - kPerPointBelowFloor * outcome.below_floor +
           end_weight * outcome.end_accuracy;
  }

  // The best fixed shares for the rest of the window: the best option of each stream at every number of quanta, then a dynamic
  // programme over streams. Exact.
  std::vector<Option> best_fixed(size_t window, const std::vector<StreamState>& states, double left,
                                 double end_weight) {
    std::vector<ValueTable> tables(states.size());
    std::vector<std::vector<Option>> options(states.size());
    for (size_t v = 0; v < states.size(); ++v) {
      const StreamState& state = states[v];
      auto& value = tables[v].value;
      value.assign(size_t(up_) + 1, -kNever);
      options[v].resize(size_t(up_) + 1);
      const auto offer = [&](const Option& option) {
        const Outcome got = outcome(v, window, state, option, left);
        if (!got.feasible) return;
        const double worth_of_it = worth(got, end_weight);
        const auto total = size_t(option.inference + option.retraining);
        if (worth_of_it <= value[total]) return;
        value[total] = worth_of_it;
        options[v][total] = option;
      };
      for (int64_t q = 0; q <= up_; ++q) offer({q, 0, -1});
      if (!state.done) {
        const auto& list = configurations(v, window);
        for (int c = 0; c < int(list.size()); ++c) {
          if (state.running >= 0 ? state.running != c : !list[size_t(c)].offered) continue;
          const double work = state.running == c ? state.remaining : list[size_t(c)].gpu_seconds;
          const auto least = int64_t(std::ceil(work / left / problem_.quantum * (1 - kTolerance)));
          for (int64_t r = std::max<int64_t>(1, least); r <= up_; ++r) {
            for (int64_t i = 0; i + r <= up_; ++i) {
              offer({i, r, c});
              // More than inference and a faster retraining can use changes nothing.
              if (factors_[v][size_t(i)] >= factors_[v][size_t(up_)]) break;
            }
          }
        }
      }
      spent_ += double(up_) * double(up_) * 0.5 * double(1 + configurations(v, window).size());
      // More quanta are never worth less: keep the option with fewer.
      for (size_t q = 1; q < value.size(); ++q) {
        if (value[q] > value[q - 1]) continue;
        value[q] = value[q - 1];
        options[v][q] = options[v][q - 1];
      }
    }
    spent_ += double(states.size()) * double(up_) * double(up_);
    const auto units = maximise_sum(tables, up_);
    std::vector<Option> chosen;
    for (size_t v = 0; v < states.size(); ++v) chosen.push_back(options[v][size_t((*units)[v])]);
    return chosen;
  }

  RetrainingPhase phase_of(const std::vector<Option>& options, double start_s) const {
    RetrainingPhase phase{start_s, {}};
    for (const Option& option : options) {
      phase.shares.push_back({double(option.inference) * problem_.quantum,
                              double(option.retraining) * problem_.quantum, option.configuration});
    }
    return phase;
  }

  // The start of a window: for `seconds`, `quanta` of the devices are taken and inference has the rest by the best fixed shares.
  Begun begin(const std::vector<StreamState>& states, double seconds, int64_t taken) const {
    Begun begun{seconds, std::vector<Option>(states.size()), std::vector<double>(states.size(), 0.0),
                std::vector<double>(states.size(), 0.0)};
    if (seconds <= 0) return begun;
    std::vector<ValueTable> tables(states.size());
    const auto inference = [&](size_t v, int64_t q) {
      const double accuracy = states[v].accuracy * factors_[v][size_t(q)];
      return Outcome{accuracy * seconds, std::max(0.0, asked(v, states[v].accuracy) - accuracy), 0, true, -1};
    };
    for (size_t v = 0; v < states.size(); ++v)
      for (int64_t q = 0; q <= up_ - taken; ++q) tables[v].value.push_back(worth(inference(v, q), 0));
    const auto units = maximise_sum(tables, up_ - taken);
    for (size_t v = 0; v < states.size(); ++v) {
      const Outcome got = inference(v, (*units)[v]);
      begun.options[v] = {(*units)[v], 0, -1};
      begun.integral[v] = got.integral;
      begun.below_floor[v] = got.below_floor;
    }
    return begun;
  }

  // The mean accuracy of a window from these states in which inference has all devices.
  double without_retraining(const std::vector<StreamState>& states) const {
    double sum = 0;
    for (const double value : begin(states, problem_.window_s, 0).integral) sum += value;
    return sum / problem_.window_s / double(states.size());
  }

  // A window with shares that stay from `begun` until its end but for the handover at each completion.
  RetrainingWindow play_fixed(size_t window, std::vector<StreamState>& states,
                              const std::vector<Option>& options, const Begun& begun) const {
    RetrainingWindow result;
    result.profiling_s = begun.seconds;
    if (begun.seconds > 0) result.phases.push_back(phase_of(begun.options, 0));
    if (begun.seconds < problem_.window_s) result.phases.push_back(phase_of(options, begun.seconds));
    for (size_t v = 0; v < states.size(); ++v) {
      Outcome got = outcome(v, window, states[v], options[v], problem_.window_s - begun.seconds);
      got.integral += begun.integral[v];
      got.below_floor = std::max(got.below_floor, begun.below_floor[v]);
      add(result, states[v], got);
    }
    finish(result);
    return result;
  }

  // How a window's shares are divided whenever a retraining ends.
  struct Division {
    bool stolen = false;    // by steal(), else the best fixed shares for the rest of the window
    double end_weight = 0;  // of the best fixed shares
  };
  std::vector<Option> divide(const Division& by, size_t window, const std::vector<StreamState>& states,
                             double left) {
    if (!by.stolen) return best_fixed(window, states, left, by.end_weight);
    std::vector<Option> options = steal(window, states, left);
    for (Option& option : options)  // without a retraining its share is with inference
      if (option.configuration < 0) option.inference += std::exchange(option.retraining, 0);
    return options;
  }

  // A window whose shares are divided anew whenever a retraining ends, by `decides`: this planner, or one that was told
  // other accuracies.
  // `first` replaces the first division if it is given.
  RetrainingWindow play_divided_anew(size_t window, std::vector<StreamState>& states, const Division& by,
                                     const std::vector<Option>* first, Planner& decides, const Begun& begun) {
    RetrainingWindow result;
    result.profiling_s = begun.seconds;
    std::vector<double> integral = begun.integral;
    std::vector<double> below = begun.below_floor;
    std::vector<int> completed(states.size(), -1);
    double now = begun.seconds;
    if (now > 0) result.phases.push_back(phase_of(begun.options, 0));
    while (now < problem_.window_s * (1 - kTolerance)) {
      const double left = problem_.window_s - now;
      const std::vector<Option> options =
          now == 0 && first != nullptr ? *first : decides.divide(by, window, states, left);
      result.phases.push_back(phase_of(options, now));
      double step = left;  // until the first retraining ends
      for (size_t v = 0; v < states.size(); ++v) {
        if (options[v].configuration < 0 || options[v].retraining == 0) continue;
        const double work = work_of(v, window, states[v], options[v].configuration);
        step = std::min(step, work / (double(options[v].retraining) * problem_.quantum));
      }
      for (size_t v = 0; v < states.size(); ++v) {
        StreamState& state = states[v];
        const double accuracy = state.accuracy * factors_[v][size_t(options[v].inference)];
        integral[v] += accuracy * step;
        below[v] = std::max(below[v], asked(v, state.accuracy) - accuracy);
        const int c = options[v].configuration;
        if (c < 0 || options[v].retraining == 0) continue;
        const double work =
            work_of(v, window, state, c) - step * double(options[v].retraining) * problem_.quantum;
        state.running = c;
        state.remaining = work;
        if (work > kTolerance * configurations(v, window)[size_t(c)].gpu_seconds) continue;
        state = {configurations(v, window)[size_t(c)].accuracy, true, -1, 0};
        completed[v] = c;
      }
      now += step;
    }
    for (size_t v = 0; v < states.size(); ++v)
      add(result, states[v], {integral[v], below[v], states[v].accuracy, true, completed[v]});
    finish(result);
    return result;
  }

  // The shares by a rule from now on, for the devices that are up.
  std::vector<StreamShare> shares_by(const WindowRule& rule, size_t window,
                                     const std::vector<StreamState>& states, double left) {
    const bool retrain = rule.kind == WindowRule::Kind::kEqualRetrained;
    if (retrain || rule.kind == WindowRule::Kind::kEqual) {
      std::vector<StreamShare> shares;
      for (size_t v = 0; v < states.size(); ++v) shares.push_back(fair_share(window, v, states[v], retrain));
      return shares;
    }
    if (up_ == 0) return std::vector<StreamShare>(states.size());
    const Division by{rule.kind == WindowRule::Kind::kStolen, rule.end_weight};
    return phase_of(divide(by, window, states, left), 0).shares;
  }

  // A window, or its rest, in which devices fail or come back: `up` has what is up at its start and from each change
  // on, in seconds of the window. `decides` divides at its start, after profiling and at each change, and, if that is
  // the rule, at each completion. `profiling` is in seconds on a device, with so many quanta at most. At each change
  // `choose`, unless empty, is asked for the rule of the rest, or after profiling if the change comes before its end;
  // `reached` is the streams' accuracy so far, as part of the window's.
  using ChooseRule =
      std::function<WindowRule(const std::vector<StreamState>& states, const DevicesUp& up, double reached)>;
  RetrainingWindow play_changing(WindowRule rule, size_t window, std::vector<StreamState>& states,
                                 Planner& decides, double profiling, int64_t profilers,
                                 const std::vector<DevicesUp>& up, const ChooseRule& choose = {}) const {
    const double end = problem_.window_s;
    RetrainingWindow result;
    std::vector<double> integral(states.size(), 0.0), below(states.size(), 0.0);
    std::vector<int> completed(states.size(), -1);
    std::vector<StreamShare> shares;
    size_t next = 0;
    bool divide = true, changed = false;  // since the rule was chosen
    const auto choose_rule = [&](double now) {
      if (!choose || !changed || profiling > 0 || decides.quanta_up() == 0) return;
      double reached = 0;
      for (const double one : integral) reached += one / (end * double(states.size()));
      rule = choose(states, {now, up[next - 1].devices}, reached);
      changed = false;
    };
    for (double now = up.front().from_s; now < end * (1 - kTolerance);) {
      for (; next < up.size() && up[next].from_s <= now + end * kTolerance; ++next, divide = true) {
        decides.set_up(up[next].devices);
        changed = changed || next > 0;
      }
      choose_rule(now);
      const double until = next < up.size() ? std::min(up[next].from_s, end) : end;
      double step = until - now;
      const bool profiles = profiling > 0;
      const int64_t taken = profiles ? std::min(profilers, decides.quanta_up()) : 0;
      if (profiles) {
        shares = decides.phase_of(decides.begin(states, step, taken).options, 0).shares;
        if (taken > 0) step = std::min(step, profiling / (double(taken) * problem_.quantum));
      } else if (divide) {
        shares = decides.shares_by(rule, window, states, end - now);
        divide = false;
      }
      result.phases.push_back({now, shares});
      for (size_t v = 0; v < states.size(); ++v)
        if (shares[v].configuration >= 0 && shares[v].retraining > 0)
          step =
              std::min(step, work_of(v, window, states[v], shares[v].configuration) / shares[v].retraining);
      for (size_t v = 0; v < states.size(); ++v) {
        StreamState& state = states[v];
        StreamShare& share = shares[v];
        const double accuracy = state.accuracy * inference_factor(problem_.streams[v], share.inference);
        integral[v] += accuracy * step;
        below[v] = std::max(below[v], asked(v, state.accuracy) - accuracy);
        const int c = share.configuration;
        if (c < 0 || share.retraining <= 0) continue;
        const RetrainingConfiguration& chosen = configurations(v, window)[size_t(c)];
        state.remaining = work_of(v, window, state, c) - step * share.retraining;
        state.running = c;
        if (state.remaining > kTolerance * chosen.gpu_seconds) continue;
        state = {chosen.accuracy, true, -1, 0};
        completed[v] = c;
        share = {share.inference + share.retraining, 0, -1};
        divide = divide || rule.kind == WindowRule::Kind::kDivided || rule.kind == WindowRule::Kind::kStolen;
      }
      now += step;
      if (!profiles) continue;
      profiling -= step * double(taken) * problem_.quantum;
      result.profiling_s = now;
      if (profiling > kTolerance * step) continue;
      profiling = 0;
      divide = true;
    }
    for (size_t v = 0; v < states.size(); ++v)
      add(result, states[v], {integral[v], below[v], states[v].accuracy, true, completed[v]});
    finish(result);
    return result;
  }

  double work_of(size_t stream, size_t window, const StreamState& state, int configuration) const {
    return state.running == configuration ? state.remaining
                                          : configurations(stream, window)[size_t(configuration)].gpu_seconds;
  }

  void add(RetrainingWindow& window, StreamState& state, const Outcome& outcome) const {
    window.stream_accuracy.push_back(outcome.integral / problem_.window_s);
    window.end_accuracy.push_back(outcome.end_accuracy);
    window.completed.push_back(outcome.completed);
    window.below_floor += outcome.below_floor;
    state = {outcome.end_accuracy, false, -1, 0};
  }

  static void finish(RetrainingWindow& window) {
    double sum = 0;
    for (double accuracy : window.stream_accuracy) sum += accuracy;
    window.accuracy = sum / double(window.stream_accuracy.size());
  }

  // The quanta in equal parts to the jobs: a stream's inference, and its retraining unless that has ended.
  std::vector<int64_t> fair_start(const std::vector<StreamState>& states) const {
    std::vector<size_t> jobs;
    for (size_t v = 0; v < states.size(); ++v) {
      jobs.push_back(2 * v);
      if (!states[v].done) jobs.push_back(2 * v + 1);
    }
    std::vector<int64_t> shares(2 * states.size(), 0);
    for (size_t i = 0; i < jobs.size(); ++i)
      shares[jobs[i]] = up_ / int64_t(jobs.size()) + (i < size_t(up_ % int64_t(jobs.size())) ? 1 : 0);
    return shares;
  }

  // Algorithm 1 as printed: from a fair start every job in turn steals quanta from every other while the estimate
  // rises, and stops at the first quantum that does not raise it. Without a retraining configuration that fits, a
  // stream's retraining share is idle. A division that keeps some stream below the floor has no estimate (that stream's
  // list of configurations is empty), so that a start below the floor from which no single quantum leads out stays:
  // then nothing is retrained. Asked again within a window, streams that were retrained in it have no retraining job, and
  // what is being retrained goes on with its configuration.
  std::vector<Option> steal(size_t window, const std::vector<StreamState>& states, double left) const {
    const size_t jobs = 2 * states.size();
    const auto is_job = [&](size_t job) { return job % 2 == 0 || !states[job / 2].done; };
    std::vector<int64_t> shares = fair_start(states);
    const auto estimate_of = [&](size_t v, const std::vector<int64_t>& at, Option& best) {
      best = {at[2 * v], 0, -1};
      const Outcome none = outcome(v, window, states[v], best, left);
      best.retraining = at[2 * v + 1];
      double greatest = none.below_floor > kTolerance ? -kNever : none.integral;
      for (int c = 0; c < int(configurations(v, window).size()); ++c) {
        const bool allowed =
            states[v].running >= 0 ? states[v].running == c : configurations(v, window)[size_t(c)].offered;
        if (!allowed || states[v].done) continue;
        const Option option{at[2 * v], at[2 * v + 1], c};
        const Outcome got = outcome(v, window, states[v], option, left);
        if (!got.feasible || got.below_floor > kTolerance || got.integral <= greatest) continue;
        greatest = got.integral;
        best = option;
      }
      return greatest;
    };
    std::vector<Option> options(states.size());
    std::vector<double> estimates(states.size());
    for (size_t v = 0; v < states.size(); ++v) estimates[v] = estimate_of(v, shares, options[v]);
    const auto sum = [](const std::vector<double>& values) {
      double all = 0;
      for (double value : values) all += value;
      return all;
    };
    double best = sum(estimates);
    for (size_t thief = 0; thief < jobs; ++thief) {
      for (size_t victim = 0; victim < jobs; ++victim) {
        while (thief != victim && is_job(thief) && shares[victim] > 0) {
          --shares[victim];
          ++shares[thief];
          auto moved = estimates;
          Option of_thief;
          Option of_victim;
          moved[thief / 2] = estimate_of(thief / 2, shares, of_thief);
          moved[victim / 2] = estimate_of(victim / 2, shares, of_victim);
          const double estimate = sum(moved);
          if (!(estimate > best + kTolerance)) {
            ++shares[victim];
            --shares[thief];
            break;
          }
          best = estimate;
          estimates = std::move(moved);
          options[thief / 2] = of_thief;
          options[victim / 2] = of_victim;
        }
      }
    }
    if (best > -kNever) return options;
    for (Option& option : options) option.configuration = -1;
    return options;
  }

  StreamShare fair_share(size_t window, size_t stream, const StreamState& state, bool retrain) const {
    const double fair = devices_up_ / double(problem_.streams.size());
    const auto& list = configurations(stream, window);
    int best = state.running;
    for (int c = 0; retrain && !state.done && state.running < 0 && c < int(list.size()); ++c) {
      const auto& candidate = list[size_t(c)];
      if (!candidate.offered) continue;
      if (best < 0 || candidate.accuracy > list[size_t(best)].accuracy ||
          (candidate.accuracy == list[size_t(best)].accuracy &&
           candidate.gpu_seconds < list[size_t(best)].gpu_seconds))
        best = c;
    }
    const double retraining = best < 0 ? 0 : fair / 2;
    return {fair - retraining, retraining, best};
  }

  // None and uniform: fair shares, not rounded; uniform gives half of each to the most accurate configuration.
  RetrainingWindow play_fair(size_t window, std::vector<StreamState>& states, bool retrain,
                             const Planner& decides) const {
    RetrainingWindow result;
    result.phases.push_back({0, {}});
    for (size_t v = 0; v < states.size(); ++v) {
      const StreamShare share = decides.fair_share(window, v, states[v], retrain);
      const Stream& stream = problem_.streams[v];
      result.phases[0].shares.push_back(share);
      Outcome got = outcome(v, window, states[v], inference_factor(stream, share.inference),
                            inference_factor(stream, share.inference + share.retraining), share.retraining,
                            share.configuration, problem_.window_s);
      add(result, states[v], got);
    }
    finish(result);
    return result;
  }

  std::vector<StreamState> start() const {
    std::vector<StreamState> states;
    for (const Stream& stream : problem_.streams) states.push_back({stream.accuracy, false, -1, 0});
    return states;
  }

  double score(const RetrainingPlan& plan) const {
    double score = plan.mean_accuracy;
    for (const RetrainingWindow& window : plan.windows) score -= kPerPointBelowFloor * window.below_floor;
    return score;
  }

  RetrainingPlan fixed_plan() {
    RetrainingPlan plan;
    auto states = start();
    for (size_t w = 0; w < problem_.windows(); ++w)
      plan.windows.push_back(
          play_fixed(w, states, best_fixed(w, states, problem_.window_s, 0), begin(states, 0, 0)));
    return with_mean(std::move(plan));
  }

  RetrainingPlan divided_plan(double end_weight, const std::vector<std::vector<Option>>& first) {
    RetrainingPlan plan;
    auto states = start();
    const size_t windows = problem_.windows();
    for (size_t w = 0; w < windows; ++w) {
      const double weight = w + 1 < windows ? end_weight : 0;
      plan.windows.push_back(play_divided_anew(w, states, {false, weight},
                                               w < first.size() && !first[w].empty() ? &first[w] : nullptr,
                                               *this, begin(states, 0, 0)));
    }
    return with_mean(std::move(plan));
  }

  // All windows at once. Candidates: fixed shares; shares divided anew at each completion with the accuracy at a
  // window's end weighted in several ways; and, while the budget of work lasts, changes of one quantum or configuration
  // to the first division of a window. The best by what it yields over all windows.
  RetrainingPlan best_plan() {
    constexpr double kBudget = 2e8;
    RetrainingPlan best = fixed_plan();
    double best_weight = 0;
    for (double weight : {0.0, 0.1, 0.3, 1.0}) {
      if (weight > 0 && problem_.windows() == 1) break;
      RetrainingPlan plan = divided_plan(weight, {});
      if (score(plan) <= score(best) + kTolerance) continue;
      best = std::move(plan);
      best_weight = weight;
    }
    std::vector<std::vector<Option>> first(problem_.windows());
    for (size_t w = 0; w < problem_.windows(); ++w) {
      bool better = true;
      while (better && spent_ < kBudget) {
        better = false;
        std::vector<Option> from;
        for (const StreamShare& share : best.windows[w].phases[0].shares) {
          from.push_back({std::llround(share.inference / problem_.quantum),
                          std::llround(share.retraining / problem_.quantum), share.configuration});
        }
        for (const auto& changed : neighbours(w, from)) {
          if (spent_ >= kBudget) break;
          auto candidate = first;
          candidate[w] = changed;
          RetrainingPlan plan = divided_plan(best_weight, candidate);
          if (score(plan) <= score(best) + 1e-7) continue;
          best = std::move(plan);
          first = std::move(candidate);
          better = true;
          break;
        }
      }
    }
    return best;
  }

  // Divisions that differ by one quantum moved, or by one stream's configuration.
  std::vector<std::vector<Option>> neighbours(size_t window, const std::vector<Option>& from) const {
    std::vector<std::vector<Option>> result;
    const size_t jobs = 2 * from.size();
    const auto share = [](std::vector<Option>& options, size_t job) -> int64_t& {
      return job % 2 == 0 ? options[job / 2].inference : options[job / 2].retraining;
    };
    int64_t used = 0;
    for (const Option& option : from) used += option.inference + option.retraining;
    for (size_t to = 0; to < jobs; ++to) {
      const size_t stream = to / 2;
      std::vector<int> choices{from[stream].configuration};
      if (to % 2 == 1) {
        if (from[stream].configuration < 0) choices.clear();
        for (int c = 0; c < int(configurations(stream, window).size()); ++c)
          if (c != from[stream].configuration) choices.push_back(c);
      }
      for (int configuration : choices) {
        for (size_t victim = 0; victim <= jobs; ++victim) {  // jobs: from what is unused
          for (int64_t size : {int64_t(1), int64_t(quanta_ / 8), int64_t(quanta_ / 3)}) {
            if (victim == to || size == 0) continue;
            auto options = from;
            if (victim == jobs ? used + size > quanta_ : share(options, victim) < size) continue;
            if (victim < jobs) {
              share(options, victim) -= size;
              if (victim % 2 == 1 && share(options, victim) == 0) options[victim / 2].configuration = -1;
            }
            share(options, to) += size;
            options[stream].configuration = configuration;
            result.push_back(std::move(options));
          }
        }
      }
    }
    return result;
  }

  static RetrainingPlan with_mean(RetrainingPlan plan) {
    for (const RetrainingWindow& window : plan.windows) plan.mean_accuracy += window.accuracy;
    plan.mean_accuracy /= double(std::max<size_t>(1, plan.windows.size()));
    return plan;
  }

 private:
  const RetrainingProblem& problem_;
  int64_t quanta_;
  int64_t up_;  // of the quanta, in the devices that are up
  double devices_up_;
  std::vector<std::vector<double>> factors_;  // [stream][quanta of inference]
  double spent_ =
      0;  // options looked at: bounds the search by work, so that its result does not depend on the machine
};

}  // namespace

double RetrainingConfiguration::profiling_gpu_seconds() const {
  double last = 0;
  for (const auto& [epoch, reached] : profile.observed) last = std::max(last, epoch);
  return profile.observed.empty() ? 0
                                  : gpu_seconds * profile.data_share * std::min(1.0, last / profile.epochs);
}

size_t RetrainingProblem::windows() const {
  size_t windows = 0;
  for (const Stream& stream : streams) windows = std::max(windows, stream.windows.size());
  return windows;
}

int64_t RetrainingProblem::quanta() const {
  return quanta_in(devices);
}

int64_t RetrainingProblem::quanta_in(double of_devices) const {
  return int64_t(std::floor(of_devices / quantum * (1 + kTolerance)));
}

double inference_factor(const Stream& stream, double share) {
  double factor = 0;
  for (const InferenceConfiguration& configuration : stream.inference)
    factor = std::max(
        factor, configuration.accuracy_factor * std::min(1.0, share / configuration.gpus * (1 + 1e-12)));
  return factor;
}

namespace {

base::Status check(const RetrainingProblem& problem, RetrainingScheduler scheduler) {
  const int64_t quanta = problem.quanta();
  if (quanta > kMaxQuanta) {
    return base::Status(
        GPUSHARE_EXCEEDS_CAPACITY,
        base::format(
            "quantum: %g of a device divides %g devices into %lld quanta, at most %lld are searched; "
            "choose a larger quantum",
            problem.quantum, problem.devices, static_cast<long long>(quanta),
            static_cast<long long>(kMaxQuanta)));
  }
  if (quanta < int64_t(problem.streams.size()) && scheduler != RetrainingScheduler::kNone &&
      scheduler != RetrainingScheduler::kUniform) {
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        base::format(
            "quantum: %g devices are %lld quanta for %zu streams, each needs one; choose a smaller quantum",
            problem.devices, static_cast<long long>(quanta), problem.streams.size()));
  }
  return {};
}

}  // namespace

base::Result<RetrainingPlan> plan_retraining(const RetrainingProblem& problem,
                                             RetrainingScheduler scheduler) {
  GPUSHARE_RETURN_IF_ERROR(check(problem, scheduler));
  if (problem.streams.empty()) return RetrainingPlan{};
  Planner planner(problem);
  if (scheduler == RetrainingScheduler::kGpushare) return planner.best_plan();
  if (scheduler == RetrainingScheduler::kFixed) return planner.fixed_plan();
  RetrainingPlan plan;
  auto states = planner.start();
  for (size_t w = 0; w < problem.windows(); ++w) {
    if (scheduler == RetrainingScheduler::kThief || scheduler == RetrainingScheduler::kEkya)
      plan.windows.push_back(planner.play_divided_anew(w, states,
                                                       {scheduler == RetrainingScheduler::kThief, 0}, nullptr,
                                                       planner, planner.begin(states, 0, 0)));
    else
      plan.windows.push_back(
          planner.play_fair(w, states, scheduler == RetrainingScheduler::kUniform, planner));
  }
  return Planner::with_mean(std::move(plan));
}

namespace {

RetrainingWindow play_rule(const WindowRule& rule, const Planner& truth, Planner& decides, size_t window,
                           std::vector<StreamState>& states, const Begun& begun) {
  switch (rule.kind) {
    case WindowRule::Kind::kEqual:  // the equal shares are not bound to quanta
    case WindowRule::Kind::kEqualRetrained:
      return truth.play_fair(window, states, rule.kind == WindowRule::Kind::kEqualRetrained, decides);
    case WindowRule::Kind::kFixed:
    case WindowRule::Kind::kStolen:
    case WindowRule::Kind::kDivided:
      break;
  }
  return Planner(truth).play_divided_anew(
      window, states, {rule.kind == WindowRule::Kind::kStolen, rule.end_weight}, nullptr, decides, begun);
}

// The portfolio of a window: each rule is played by what is believed. The next window is not known, and it is assumed
// that nothing is retrained in it: a stream's accuracy is worth what the devices can serve of it. The product of the two
// windows' accuracies is compared and not their sum, so that no rule gives much of this window for what may not come.
//
// `play` plays the window, or what is left of it, by a rule, and sets the states at its end. `reached` is the accuracy
// of what has passed, as part of the window's.
using PlayByRule = std::function<RetrainingWindow(const WindowRule& rule, std::vector<StreamState>& states)>;
WindowRule best_rule(const Planner& decides, const std::vector<StreamState>& states, bool last, bool equal,
                     double reached, const PlayByRule& play) {
  std::vector<WindowRule> rules = {{WindowRule::Kind::kDivided, 0}, {WindowRule::Kind::kStolen, 0}};
  if (!last)
    for (const double weight : kEndWeights) rules.push_back({WindowRule::Kind::kDivided, weight});
  if (equal) {
    rules.push_back({WindowRule::Kind::kEqual, 0});
    rules.push_back({WindowRule::Kind::kEqualRetrained, 0});
  }
  const auto logarithm = [](double accuracy) { return std::log(kLeastAccuracy + accuracy); };
  Portfolio<WindowRule> portfolio;
  for (const WindowRule& rule : rules) {
    auto end = states;
    const RetrainingWindow played = play(rule, end);
    const double later = last ? 0 : logarithm(decides.without_retraining(end));
    portfolio.offer(played.below_floor * kPerPointBelowFloor - logarithm(reached + played.accuracy) - later,
                    rule);
  }
  return portfolio.best();
}

// The rule of a whole window. While something is profiled, shares are not equal.
WindowRule best_rule_of_window(Planner& decides, size_t window, const std::vector<StreamState>& states,
                               bool last, const Begun& begun) {
  return best_rule(decides, states, last, begun.seconds <= 0, 0,
                   [&](const WindowRule& rule, std::vector<StreamState>& end) {
                     return play_rule(rule, decides, decides, window, end, begun);
                   });
}

// The rule from a change of devices on: nobody knows of another one.
WindowRule best_rule_of_rest(const Planner& decides, size_t window, const std::vector<StreamState>& states,
                             bool last, const DevicesUp& up, double reached) {
  return best_rule(decides, states, last, true, reached,
                   [&](const WindowRule& rule, std::vector<StreamState>& end) {
                     Planner believed(decides);
                     return Planner(decides).play_changing(rule, window, end, believed, 0, 1, {up});
                   });
}

}  // namespace

namespace {

// The devices that are up at a window's start, and from each change in it on, in seconds of the window. Empty: all devices, all
// the time.
std::vector<DevicesUp> up_in_window(const std::vector<DevicesUp>& up, const RetrainingProblem& problem,
                                    double begin_s) {
  std::vector<DevicesUp> own = {{0, problem.devices}};
  for (const DevicesUp& change : up) {
    if (change.from_s >= begin_s + problem.window_s * (1 - kTolerance)) break;
    if (change.from_s <= begin_s)
      own.front().devices = change.devices;
    else
      own.push_back({change.from_s - begin_s, change.devices});
  }
  if (own.size() == 1 && own.front().devices == problem.devices) own.clear();
  return own;
}

// Tells what has been learned of the profiler's error after a window.
void learn_from_window(const Planner& decides, const RetrainingProblem& truth, const RetrainingProblem& told,
                       size_t window, const std::vector<int>& completed, ProfilerError& error) {
  for (size_t v = 0; v < truth.streams.size(); ++v) {
    const auto& list = decides.configurations(v, window);
    for (size_t c = 0; c < list.size(); ++c) {
      if (!list[c].offered) continue;
      const double said = told.streams[v].windows[window][c].accuracy;
      if (completed[v] == int(c))
        error.reached(v, list[c].name, said, truth.streams[v].windows[window][c].accuracy);
      else
        error.told(v, list[c].name, said);
    }
  }
}

WindowRule rule_of(RetrainingScheduler scheduler) {
  switch (scheduler) {
    case RetrainingScheduler::kNone:
      return {WindowRule::Kind::kEqual, 0};
    case RetrainingScheduler::kUniform:
      return {WindowRule::Kind::kEqualRetrained, 0};
    case RetrainingScheduler::kFixed:
      return {WindowRule::Kind::kFixed, 0};
    case RetrainingScheduler::kThief:
      return {WindowRule::Kind::kStolen, 0};
    case RetrainingScheduler::kEkya:
    case RetrainingScheduler::kGpushare:
      break;
  }
  return {WindowRule::Kind::kDivided, 0};
}

}  // namespace

base::Result<RetrainingPlan> run_retraining(const RetrainingProblem& truth, const RetrainingProblem& told,
                                            RetrainingScheduler scheduler, const Profiling& profiling,
                                            const std::vector<DevicesUp>& up) {
  GPUSHARE_RETURN_IF_ERROR(check(truth, scheduler));
  if (truth.streams.empty()) return RetrainingPlan{};
  // kGpushare does not take the accuracies that it is told as they are: it corrects them by the error that it has seen.
  RetrainingProblem believed = told;
  ProfilerError error;
  Planner planner(truth), decides(scheduler == RetrainingScheduler::kGpushare ? believed : told);
  const bool profiles = scheduler != RetrainingScheduler::kNone && scheduler != RetrainingScheduler::kUniform;
  const int64_t profilers = std::clamp<int64_t>(std::llround(profiling.devices / truth.quantum), 1,
                                                std::max<int64_t>(1, truth.quanta()));
  RetrainingPlan plan;
  auto states = planner.start();
  const size_t windows = truth.windows();
  const auto believe = [&](size_t w) {
    for (size_t v = 0; v < believed.streams.size(); ++v) {
      auto& list = believed.streams[v].windows;
      if (w >= list.size()) continue;
      for (RetrainingConfiguration& own : list[w]) own.accuracy = error.believed(v, own.name, own.accuracy);
    }
  };
  for (size_t w = 0; w < windows; ++w) {
    const double work = profiles && w < profiling.gpu_seconds.size() ? profiling.gpu_seconds[w] : 0;
    const std::vector<DevicesUp> changes = up_in_window(up, truth, double(w) * truth.window_s);
    decides.set_up(changes.empty() ? truth.devices : changes.front().devices);
    if (!changes.empty()) {
      WindowRule rule = rule_of(scheduler);
      if (scheduler == RetrainingScheduler::kGpushare) {
        believe(w);
        const int64_t taken = std::min(profilers, decides.quanta_up());
        const double seconds =
            work > 0 && taken > 0 ? work / (double(taken) * truth.quantum) : 0;  // by what is up now
        if (decides.quanta_up() > 0 && seconds < truth.window_s * (1 - kTolerance))
          rule = best_rule_of_window(decides, w, states, w + 1 == windows,
                                     decides.begin(states, seconds, taken));
      }
      Planner::ChooseRule choose;
      if (scheduler == RetrainingScheduler::kGpushare)
        choose = [&, w](const std::vector<StreamState>& now, const DevicesUp& devices, double reached) {
          return best_rule_of_rest(decides, w, now, w + 1 == windows, devices, reached);
        };
      plan.windows.push_back(
          planner.play_changing(rule, w, states, decides, work, profilers, changes, choose));
      if (scheduler == RetrainingScheduler::kGpushare)
        learn_from_window(decides, truth, told, w, plan.windows.back().completed, error);
      continue;
    }
    double seconds = work / (double(profilers) * truth.quantum);
    if (seconds > truth.window_s * (1 - kTolerance)) seconds = truth.window_s;
    const Begun begun = planner.begin(states, seconds, profilers);
    const double left = truth.window_s - seconds;
    if (left <= 0) {  // nothing is retrained
      plan.windows.push_back(planner.play_fixed(w, states, begun.options, begun));
      continue;
    }
    switch (scheduler) {
      case RetrainingScheduler::kNone:
      case RetrainingScheduler::kUniform:
        plan.windows.push_back(
            planner.play_fair(w, states, scheduler == RetrainingScheduler::kUniform, decides));
        break;
      case RetrainingScheduler::kThief:
      case RetrainingScheduler::kEkya:
        plan.windows.push_back(planner.play_divided_anew(
            w, states, {scheduler == RetrainingScheduler::kThief, 0}, nullptr, decides, begun));
        break;
      case RetrainingScheduler::kFixed:
        plan.windows.push_back(planner.play_fixed(w, states, decides.best_fixed(w, states, left, 0), begun));
        break;
      case RetrainingScheduler::kGpushare: {
        believe(w);
        const WindowRule rule = best_rule_of_window(decides, w, states, w + 1 == windows, begun);
        plan.windows.push_back(play_rule(rule, planner, decides, w, states, begun));
        learn_from_window(decides, truth, told, w, plan.windows.back().completed, error);
        break;
      }
    }
  }
  return Planner::with_mean(std::move(plan));
}

}  // namespace gpushare::cluster
