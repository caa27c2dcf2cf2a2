// The policies of the step batcher.
//
// gpushare. A step may last until the first token of a decoding member is due. What this leaves beside the decoding itself goes to
// prompts, whole or in chunks. Which prompts: Moore and Hodgson's rule. In the order of their first deadlines, each adds its
// prefill time to the sum; where a prompt would be late, the one with the most work per cost so far is put off. This is the
// most that can be in time on one machine when all are there. A prompt that was put off runs when nothing else wants the
// device, so that a wrong model of time is found out. A request joins only if all members' tokens stay in time once it decodes,
// and if the memory that the members are expected to hold fits at each later moment, as they end one after the other.
//
// fifo. Requests join in the order of their arrival while there is room, with their whole prompts; every member decodes in each
// step. Members are returned only for want of memory, the last arrival first (Orca's order, vLLM's memory).
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <queue>

#include "gpushare/status.h"
#include "sched/slo/step_batcher.hpp"

namespace gpushare::sched::slo {
namespace {

class FifoSteps final : public StepBatcher {
 public:
  explicit FifoSteps(const StepOptions& options) : StepBatcher("fifo", options) {}

 private:
  void choose(uint64_t /*now_ns*/) override {
    std::vector<Held*> in_order = members();
    std::sort(in_order.begin(), in_order.end(), [](const Held* a, const Held* b) {
      return std::pair(a->request.arrival_ns, a->request.id) <
             std::pair(b->request.arrival_ns, b->request.id);
    });
    for (Held* each : in_order) {
      while (each->place == Place::kMember && each->decodes() && !decode(*each)) {
        Held* last = victim();
        if (last == nullptr || last == each) break;
        give_back(*last);
      }
      if (each->place == Place::kMember && !each->decodes()) prefill(*each, UINT64_MAX);
    }
    while (!by_arrival().empty()) {
      Held& first = held(by_arrival().begin()->second);
      if (!join(first)) return;
      if (!prefill(first, UINT64_MAX)) return;
    }
  }
};

class GpushareSteps final : public StepBatcher {
 public:
  explicit GpushareSteps(const StepOptions& options) : StepBatcher("gpushare", options) {}

 private:
  static constexpr size_t kLookedAt = 512;  // waiting requests of the earliest deadlines
  static constexpr double kFull = 0.95;     // of a token's time that decoding members may need
  static constexpr double kLongest =
      0.25;  // of the time until a first token is due: the longest step beside it
  static constexpr double kShortestNs = 1e6;  // no first token is reason for steps below this
  struct Prompt {
    Held* of;
    double work_ns;
    bool put_off = false;
  };

  static bool sooner(const Held* a, const Held* b) {
    return std::tuple(a->late, a->due_ns(), a->request.arrival_ns, a->request.id) <
           std::tuple(b->late, b->due_ns(), b->request.arrival_ns, b->request.id);
  }

  // Late members first, then the last arrival.
  Held* victim() override {
    Held* one = nullptr;
    for (Held* each : members())
      if (!each->chosen &&
          (one == nullptr || std::tuple(each->late, each->request.arrival_ns, each->request.id) >
                                 std::tuple(one->late, one->request.arrival_ns, one->request.id)))
        one = each;
    return one;
  }

  void choose(uint64_t now_ns) override {
    decode_all(now_ns);
    gather(now_ns);
    put_off(now_ns);
    // Nothing else wants the device: prompts that seem hopeless are worked on all the same.
    if (!fill(false)) fill(true);
  }

  // Every member decodes, the late ones only where that keeps nobody from being in time. Sets until_ns_.
  void decode_all(uint64_t now_ns) {
    std::vector<Held*> in_order;
    for (Held* each : members())
      if (each->decodes()) in_order.push_back(each);
    std::sort(in_order.begin(), in_order.end(), sooner);
    until_ns_ = INFINITY;
    shortest_ns_ = INFINITY;
    StepWork all;
    for (const Held* each : in_order) all.read += static_cast<double>(each->context());
    all.decoding = static_cast<double>(in_order.size());
    const double alone_ns = time().ns(all);
    for (Held* each : in_order) {
      if (each->place != Place::kMember) continue;
      const double left_ns = from(now_ns, each->due_ns());
      if (!each->late) shortest_ns_ = std::min(shortest_ns_, static_cast<double>(each->request.token_ns));
      if (each->late && planned_ns() + own_ns(*each) > until_ns_) continue;
      while (!decode(*each)) {
        Held* last = victim();
        if (last == nullptr || last == each) break;
        give_back(*last);
      }
      if (!each->late && left_ns >= alone_ns) until_ns_ = std::min(until_ns_, left_ns);
    }
  }

  // The prompts to be processed, of members and of waiting requests, in the order of their deadlines.
  void gather(uint64_t now_ns) {
    prompts_.clear();
    for (Held* each : members())
      if (!each->decodes()) prompts_.push_back({each, 0});
    for (const DeadlineKey& key : by_deadline()) {
      if (prompts_.size() >= kLookedAt + options().max_members) break;
      prompts_.push_back({&held(std::get<2>(key)), 0});
    }
    std::sort(prompts_.begin(), prompts_.end(),
              [](const Prompt& a, const Prompt& b) { return sooner(a.of, b.of); });
    // Beside decoding members a step of shortest_ns_ has this share for prompts.
    const double decoding_ns = planned_ns();
    const double share = std::isfinite(shortest_ns_) ? std::max(0.05, 1 - decoding_ns / shortest_ns_) : 1;
    for (Prompt& each : prompts_) {
      const uint64_t tokens = each.of->place == Place::kMember
                                  ? each.of->total() - each.of->processed
                                  : each.of->request.prompt_tokens + each.of->tokens;
      each.work_ns = time().prefill_ns() * static_cast<double>(tokens) / share +
                     (std::isfinite(shortest_ns_) ? 0 : time().step_ns());
      if (each.of->place != Place::kWaiting || each.of->tokens != 0) continue;
      const double whole_ns = from(each.of->request.arrival_ns, each.of->request.first_deadline_ns);
      // One that would be late on an idle device shortens nobody's steps.
      if (whole_ns > time().step_ns() + time().prefill_ns() * static_cast<double>(tokens))
        longest_ns_ = std::min(longest_ns_, std::max(kLongest * whole_ns, kShortestNs));
    }
    if (!prompts_.empty()) until_ns_ = std::min(until_ns_, std::max(longest_ns_, 4 * decoding_ns));
    longest_ns_ *= 1.001;  // forgets tight deadlines that come no more
    (void)now_ns;
  }

  // Moore and Hodgson's rule.
  void put_off(uint64_t now_ns) {
    const auto more = [](const Prompt* a, const Prompt* b) {
      return a->work_ns / a->of->request.cost < b->work_ns / b->of->request.cost;
    };
    std::priority_queue<Prompt*, std::vector<Prompt*>, decltype(more)> kept(more);
    double sum_ns = planned_ns();
    for (Prompt& each : prompts_) {
      if (each.of->late) {
        each.put_off = true;
        continue;
      }
      sum_ns += each.work_ns;
      kept.push(&each);
      if (sum_ns <= from(now_ns, each.of->due_ns())) continue;
      sum_ns -= kept.top()->work_ns;
      kept.top()->put_off = true;
      kept.pop();
    }
    now_ns_ = now_ns;
  }

  // Gives the step's time to prompts; true if one got some.
  bool fill(bool hopeless) {
    bool any = false;
    for (const Prompt& each : prompts_) {
      if (each.put_off != hopeless || each.of->chosen || each.of->place == Place::kLeaving) continue;
      const uint64_t tokens = tokens_left();
      if (tokens == 0) break;
      if (hopeless && each.of->place == Place::kWaiting && !members().empty()) continue;
      if (each.of->place == Place::kWaiting &&
          !(may_decode(*each.of) && will_fit(*each.of) && join(*each.of)))
        continue;
      if (!prefill(*each.of, tokens)) continue;
      any = true;
      // The step ends with its first token.
      if (!hopeless && each.of->decodes_after(tokens))
        until_ns_ = std::min(until_ns_, std::max(from(now_ns_, each.of->due_ns()), planned_ns()));
      if (hopeless) break;
    }
    return any;
  }

  uint64_t tokens_left() const {
    if (!std::isfinite(until_ns_) || !(time().prefill_ns() > 0)) return UINT64_MAX;
    // Half of the time that members are ahead is kept for steps that last longer than expected.
    const double most_ns =
        std::min(until_ns_ / time().margin(), std::max(shortest_ns_ / time().margin(), until_ns_ / 2));
    const double left_ns = most_ns - planned_ns();
    // Without decoding members a step may as well be short: at least a little goes on.
    const double least = decoding() == 0 && prefilling() == 0 ? 16 : 0;
    return static_cast<uint64_t>(std::clamp(left_ns / time().prefill_ns(), least, 1e15));
  }

  // What a step takes longer when this one decodes in it.
  double own_ns(const Held& one) const {
    const uint64_t reads =
        one.decodes() && one.place == Place::kMember ? one.context() : one.request.prompt_tokens + one.tokens;
    return time().decode_ns() + time().read_ns() * static_cast<double>(reads);
  }

  // Whether all tokens stay in time when this one decodes with the others.
  bool may_decode(const Held& one) const {
    double all_ns = time().step_ns() + own_ns(one);
    double least_ns = shortest_ns_;
    const double token_ns = static_cast<double>(one.request.token_ns);
    if (all_ns <= kFull * token_ns) least_ns = std::min(least_ns, token_ns);  // else nothing helps
    for (const Held* each : members()) all_ns += own_ns(*each);
    return members().empty() || all_ns <= kFull * least_ns;
  }

  // Whether the memory of the members and this one is enough at each moment when one of them ends.
  bool will_fit(const Held& one) {
    if (options().memory_bytes == 0) return true;
    ends_.clear();
    const auto add = [this](const Held& of, double bytes) {
      const double expected =
          of.request.expected_tokens != 0 ? static_cast<double>(of.request.expected_tokens) : mean_tokens();
      const double tokens = static_cast<double>(of.tokens);
      const double left = std::max(expected > tokens ? expected - tokens : expected / 2, 1.0);
      ends_.push_back({left, bytes, static_cast<double>(of.request.step_bytes)});
    };
    for (const Held* each : members()) add(*each, static_cast<double>(each->bytes));
    add(one, static_cast<double>(one.join_bytes()));
    std::sort(ends_.begin(), ends_.end(), [](const End& a, const End& b) { return a.left > b.left; });
    double bytes = 0, growth = 0;
    for (const End& each : ends_) {  // when `each` ends, those before are still there
      bytes += each.bytes;
      growth += each.growth;
      if (bytes + growth * each.left > static_cast<double>(limit()) && ends_.size() > 1) return false;
    }
    return true;
  }

  static double from(uint64_t now_ns, uint64_t to_ns) {
    if (to_ns == kNever) return INFINITY;
    return to_ns > now_ns ? static_cast<double>(to_ns - now_ns) : 0;
  }

  struct End {
    double left, bytes, growth;
  };
  std::vector<Prompt> prompts_;
  std::vector<End> ends_;
  uint64_t now_ns_ = 0;
  double until_ns_ = 0;     // the step should not last longer
  double shortest_ns_ = 0;  // time of a token of the decoding members in time
  double longest_ns_ =
      INFINITY;  // a step should not be longer, so that requests that arrive meanwhile can be in time
};

base::Status check(const StepOptions& options) {
  const auto wrong = [](const char* name, double value, const char* allowed) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("%s is %g, allowed are %s", name, value, allowed));
  };
  if (options.max_members == 0 || options.max_members > 4096)
    return wrong("max_members", options.max_members, "1 to 4096");
  if (options.max_pending == 0) return wrong("max_pending", 0, "1 and more");
  for (const auto& [name, value] :
       {std::pair("step_ns", options.step_ns), std::pair("decode_ns", options.decode_ns),
        std::pair("prefill_ns", options.prefill_ns), std::pair("read_ns", options.read_ns)})
    if (!(value >= 0) || value > 1e15) return wrong(name, value, "0 (unknown) to 1e15");
  return {};
}

}  // namespace

base::Result<std::unique_ptr<StepBatcher>> make_step_batcher(std::string_view policy,
                                                             const StepOptions& options) {
  GPUSHARE_RETURN_IF_ERROR(check(options));
  if (policy == "gpushare") return std::unique_ptr<StepBatcher>(std::make_unique<GpushareSteps>(options));
  if (policy == "fifo") return std::unique_ptr<StepBatcher>(std::make_unique<FifoSteps>(options));
  return base::Status(GPUSHARE_NOT_FOUND,
                      base::format("no policy of steps is named '%.*s'; there are gpushare, fifo",
                                   static_cast<int>(policy.size()), policy.data()));
}

}  // namespace gpushare::sched::slo
