// SPDX-License-Identifier: Apache-2.0
#include "reference/serving_steps.hpp"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <random>

#include "base/flat_hash.hpp"
#include "base/saturate.hpp"
#include "gpushare/status.h"
#include "sim/csv.hpp"

namespace gpushare::sim {
namespace {

using sched::slo::Step;
using sched::slo::StepBatcher;
using sched::slo::StepEvent;
using sched::slo::StepMember;
using sched::slo::StepRequest;

class StepRun {
 public:
  StepRun(const std::vector<TimedGeneration>& requests, StepBatcher& batcher,
          const StepServingOptions& options)
      : requests_(requests),
        batcher_(batcher),
        options_(options),
        random_(options.seed),
        first_ns_(requests.size(), 0) {}

  StepServingResult run() {
    while (arrived_ < requests_.size() || batcher_.stats().pending + batcher_.stats().members > 0) {
      arrive();
      const Step& step = batcher_.begin_step(now_ns_);
      take_events();
      if (step.empty()) {
        const uint64_t next =
            arrived_ < requests_.size() ? requests_[arrived_].arrival_ns : sched::slo::kNever;
        const uint64_t wake = std::min(next, base::add_saturated(step.wake_ns, 1));
        if (wake == sched::slo::kNever) break;
        now_ns_ = std::max(now_ns_, wake);
        continue;
      }
      const uint64_t took_ns = duration(step);
      busy_ns_ += took_ns;
      now_ns_ += took_ns;
      end(step, took_ns);
      take_events();
    }
    return result();
  }

 private:
  uint64_t due(const TimedGeneration& request) const {
    return request.arrival_ns + options_.first_ns +
           base::to_uint64(options_.first_ns_per_token * static_cast<double>(request.prompt_tokens));
  }

  void arrive() {
    for (; arrived_ < requests_.size() && requests_[arrived_].arrival_ns <= now_ns_; ++arrived_) {
      const TimedGeneration& from = requests_[arrived_];
      StepRequest request;
      request.id = arrived_;
      request.arrival_ns = from.arrival_ns;
      request.prompt_tokens = from.prompt_tokens;
      request.expected_tokens = options_.tell_tokens ? from.tokens : 0;
      request.start_bytes = from.prompt_tokens * options_.bytes_per_token;
      request.step_bytes = options_.bytes_per_token;
      request.first_deadline_ns = due(from);
      request.token_ns = options_.token_ns;
      (void)batcher_.arrive(request, now_ns_);
    }
  }

  uint64_t duration(const Step& step) {
    double decoding = 0, prefill = 0, read = 0;
    for (const StepMember& each : step.members) {
      prefill += static_cast<double>(each.prefill);
      if (each.prefill != 0) continue;
      ++decoding;
      read += static_cast<double>(requests_[each.id].prompt_tokens + each.tokens);
    }
    const StepCost& cost = options_.cost;
    const double factor = std::max(0.2, 1 + cost.noise * normal_(random_));
    return base::to_uint64(factor * (cost.step_ns + cost.decode_ns * decoding + cost.prefill_ns * prefill +
                                     cost.read_ns * read));
  }

  void end(const Step& step, uint64_t took_ns) {
    done_.clear();
    for (const StepMember& each : step.members) {
      const bool token = each.prefill == 0 || each.before + each.prefill == each.total;
      done_.push_back(token && each.tokens + 1 >= requests_[each.id].tokens ? 1 : 0);
    }
    sched::slo::StepResult result;
    result.done = done_;
    batcher_.end_step(result, took_ns, now_ns_);
  }

  void take_events() {
    events_.clear();
    batcher_.take_events(events_);
    for (const StepEvent& event : events_) {
      if (event.tokens == 1 && first_ns_[event.id] == 0) {
        first_ns_[event.id] = event.at_ns;
        first_in_time_ += event.at_ns <= due(requests_[event.id]) ? 1 : 0;
      }
      if (!event.ended || event.status != GPUSHARE_OK) continue;
      in_time_ += event.late ? 0 : 1;
      const uint64_t tokens_ns = (requests_[event.id].tokens - 1) * options_.token_ns;
      if (first_ns_[event.id] <= due(requests_[event.id]) && event.at_ns - first_ns_[event.id] <= tokens_ns)
        in_time_mean_ += 1;
    }
  }

  StepServingResult result() const {
    StepServingResult out;
    out.requests = requests_.size();
    const double all = static_cast<double>(std::max<size_t>(requests_.size(), 1));
    out.in_time = in_time_ / all;
    out.in_time_mean = in_time_mean_ / all;
    out.first_in_time = first_in_time_ / all;
    out.stats = batcher_.stats();
    out.returned = out.stats.returned;
    out.lost_work = static_cast<double>(out.stats.lost_tokens) /
                    static_cast<double>(std::max<uint64_t>(out.stats.tokens + out.stats.prefilled_tokens, 1));
    out.busy = static_cast<double>(busy_ns_) / static_cast<double>(std::max<uint64_t>(now_ns_, 1));
    return out;
  }

  const std::vector<TimedGeneration>& requests_;
  StepBatcher& batcher_;
  const StepServingOptions& options_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_{0, 1};
  uint64_t now_ns_ = 0, busy_ns_ = 0;
  size_t arrived_ = 0;
  std::vector<uint8_t> done_;
  std::vector<StepEvent> events_;
  std::vector<uint64_t> first_ns_;
  double in_time_ = 0, in_time_mean_ = 0, first_in_time_ = 0;
};

bool read_line(const std::string& line, TimedGeneration* out) {
  std::tm date{};
  double seconds = 0;
  unsigned long long prompt = 0, tokens = 0, at_ms = 0;
  if (std::sscanf(line.c_str(), "%d-%d-%d %d:%d:%lf,%llu,%llu", &date.tm_year, &date.tm_mon, &date.tm_mday,
                  &date.tm_hour, &date.tm_min, &seconds, &prompt, &tokens) == 8) {
    date.tm_year -= 1900;
    date.tm_mon -= 1;
    out->arrival_ns = static_cast<uint64_t>(timegm(&date)) * 1'000'000'000 + base::to_uint64(seconds * 1e9);
  } else if (std::sscanf(line.c_str(),
                         "{\"timestamp\": %llu, \"input_length\": %llu, \"output_length\": %llu", &at_ms,
                         &prompt, &tokens) == 3) {
    out->arrival_ns = at_ms * 1'000'000;
  } else {
    return false;
  }
  out->prompt_tokens = std::max<uint64_t>(prompt, 1);
  out->tokens = std::max<uint64_t>(tokens, 1);
  return true;
}

}  // namespace

StepServingResult serve_steps(const std::vector<TimedGeneration>& requests, StepBatcher& batcher,
                              const StepServingOptions& options) {
  return StepRun(requests, batcher, options).run();
}

base::Result<std::vector<TimedGeneration>> read_generations(const std::string& path) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::string text, read_text(path));
  std::vector<TimedGeneration> out;
  size_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    ++number;
    if (line.empty() || line == "\r" || (number == 1 && line.rfind("TIMESTAMP", 0) == 0)) continue;
    TimedGeneration request;
    if (!read_line(line, &request))
      return base::Status(
          GPUSHARE_MALFORMED_INPUT,
          base::format("%s, line %zu: neither 'YYYY-MM-DD HH:MM:SS.s,prompt,generated' nor a JSON object of "
                       "timestamp, input_length, output_length",
                       path.c_str(), number));
    out.push_back(request);
  }
  std::stable_sort(out.begin(), out.end(), [](const TimedGeneration& a, const TimedGeneration& b) {
    return a.arrival_ns < b.arrival_ns;
  });
  const uint64_t first_ns = out.empty() ? 0 : out.front().arrival_ns;
  for (TimedGeneration& each : out) each.arrival_ns -= first_ns;
  return out;
}

}  // namespace gpushare::sim
