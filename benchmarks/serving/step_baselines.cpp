// SPDX-License-Identifier: Apache-2.0
#include "step_baselines.hpp"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

namespace gpushare::experiments {
namespace {

using sched::slo::kNever;
using sched::slo::RequestId;
using sched::slo::StepBatcher;
using sched::slo::StepOptions;

double until(uint64_t now_ns, uint64_t at_ns) {
  if (at_ns == kNever) return INFINITY;
  return at_ns > now_ns ? static_cast<double>(at_ns - now_ns) : 0;
}

// The base of all baselines: members in order of arrival, and decoding that returns the last arrival for want of memory.
class Baseline : public StepBatcher {
 protected:
  using StepBatcher::StepBatcher;
  // The time of a step in which so many members decode, each with the mean context.
  double all_ns(double decoding) const {
    double read = 0;
    for (const Held* each : members())
      read += static_cast<double>(each->total() + each->tokens - each->generated);
    return time().ns(
        {decoding, 0, members().empty() ? 0 : read / static_cast<double>(members().size()) * decoding});
  }
  std::vector<Held*> by_age() const {
    std::vector<Held*> out = members();
    std::sort(out.begin(), out.end(), [](const Held* a, const Held* b) {
      return std::pair(a->request.arrival_ns, a->request.id) <
             std::pair(b->request.arrival_ns, b->request.id);
    });
    return out;
  }
  bool decode_or_return(Held& of) {
    if (of.place != Place::kMember) return false;
    while (!decode(of)) {
      Held* last = victim();
      if (last == nullptr || last == &of) return false;
      give_back(*last);
    }
    return true;
  }
  void decode_members() {
    for (Held* each : by_age())
      if (each->decodes()) decode_or_return(*each);
  }
};

// Orca (OSDI '22): requests join in order of arrival, and a request joins only when memory for its longest possible sequence is
// free. Here the reservation is for as many tokens as it really generates where that is told, else for kReserved.
class Orca final : public Baseline {
 public:
  explicit Orca(const StepOptions& options) : Baseline("orca", options) {}

 private:
  static constexpr uint64_t kReserved = 2048;
  void choose(uint64_t) override {
    uint64_t reserved = 0;
    const auto most = [](const Held& of) {
      const uint64_t tokens = of.request.expected_tokens != 0 ? of.request.expected_tokens : kReserved;
      return of.request.start_bytes + std::max(tokens, of.tokens) * of.request.step_bytes;
    };
    for (Held* each : by_age()) {
      if (each->decodes())
        decode_or_return(*each);
      else
        prefill(*each, UINT64_MAX);
    }
    for (const Held* each : members()) reserved += most(*each);
    while (!by_arrival().empty()) {
      Held& first = held(by_arrival().begin()->second);
      reserved += most(first);
      if ((reserved > limit() && !members().empty()) || !join(first) || !prefill(first, UINT64_MAX)) return;
    }
  }
};

// vLLM (SOSP '23): waiting prompts first, in steps of their own, up to max_num_batched_tokens; else everybody decodes. 1% of the
// memory is kept free when a request joins.
class Vllm final : public Baseline {
 public:
  explicit Vllm(const StepOptions& options) : Baseline("vllm", options) {}

 private:
  static constexpr uint64_t kTokens = 8192;
  void choose(uint64_t) override {
    uint64_t tokens = 0;
    for (Held* each : by_age())
      if (!each->decodes() && prefill(*each, UINT64_MAX)) tokens += each->total();
    while (!by_arrival().empty()) {
      Held& first = held(by_arrival().begin()->second);
      const uint64_t more = first.request.prompt_tokens + first.tokens;
      if (tokens != 0 && tokens + more > kTokens) break;
      if (first.join_bytes() + limit() / 100 > room() && !members().empty()) break;
      if (!join(first) || !prefill(first, UINT64_MAX)) break;
      tokens += more;
    }
    if (tokens == 0) decode_members();
  }
};

// Sarathi-Serve (OSDI '24): everybody decodes in every step, and prompts fill it in chunks up to a budget of tokens that was fixed
// beforehand so that such a step lasts no longer than a token may: here it is derived from the cost model and the tightest
// token time, which gives it the best budget for each SLO.
class Sarathi final : public Baseline {
 public:
  explicit Sarathi(const StepOptions& options) : Baseline("sarathi", options) {}

 private:
  void choose(uint64_t) override {
    decode_members();
    double token_ns = INFINITY;
    for (const Held* each : members())
      token_ns = std::min(token_ns, static_cast<double>(each->request.token_ns));
    for (const Key& key : by_arrival()) {
      token_ns = std::min(token_ns, static_cast<double>(held(key.second).request.token_ns));
      break;
    }
    if (std::isfinite(token_ns))
      budget_ = std::max(64.0, (token_ns / time().margin() - all_ns(static_cast<double>(decoding()))) /
                                   std::max(time().prefill_ns(), 1.0));
    const auto left = [this] {
      const double used = static_cast<double>(prefilling());
      return used >= budget_ ? uint64_t{0} : static_cast<uint64_t>(budget_ - used);
    };
    for (Held* each : by_age())
      if (!each->decodes() && left() > 0) prefill(*each, left());
    while (!by_arrival().empty() && left() > 0) {
      Held& first = held(by_arrival().begin()->second);
      if (first.join_bytes() + limit() / 100 > room() && !members().empty()) return;
      if (!join(first) || !prefill(first, left())) return;
    }
  }
  double budget_ = 512;
};

// SLOs-Serve (arXiv 2504.08784), without speculation, one replica: when requests come, a dynamic program over the waiting ones in
// order of their first deadlines chooses how many to accept, so that the prompts' tokens fit into what is left of the token
// budget beside the decoding of all accepted; who is accepted keeps its promise. Others are best effort and get what remains.
// A step lasts as long as the tightest token time allows and its tokens go to decoding, then to accepted prompts by deadline.
class SlosServe final : public Baseline {
 public:
  explicit SlosServe(const StepOptions& options) : Baseline("slos-serve", options) {}

 private:
  static constexpr size_t kMost = 64;  // new requests that a plan looks at

  // Prompt tokens that can be processed in `ns` while `decoding` members get a token in each token time.
  double budget(double ns, double decoding, double token_ns) const {
    const double step = all_ns(decoding);
    if (!(time().prefill_ns() > 0)) return 1e15;
    return std::max(0.0, ns * (1 - step / token_ns) / time().prefill_ns());
  }

  void plan(uint64_t now_ns) {
    std::vector<Held*> fresh;
    double decoding_now = 0, bytes = 0, token_ns = INFINITY;
    std::vector<std::pair<double, double>> promised;  // until, tokens
    for (const DeadlineKey& key : by_deadline()) {
      Held& of = held(std::get<2>(key));
      if (accepted_.contains(std::get<2>(key)))
        promised.push_back({until(now_ns, std::get<0>(key)), static_cast<double>(of.request.prompt_tokens)});
      else if (!declined_.contains(std::get<2>(key)) && fresh.size() < kMost)
        fresh.push_back(&of);
    }
    if (fresh.empty()) return;
    for (Held* each : members()) {
      token_ns = std::min(token_ns, static_cast<double>(each->request.token_ns));
      bytes += static_cast<double>(each->bytes) +
               std::max(mean_tokens() / 2, 1.0) * static_cast<double>(each->request.step_bytes);
      decoding_now += 1;
      if (!each->decodes() && accepted_.contains(each->request.id))
        promised.push_back(
            {until(now_ns, each->due_ns()), static_cast<double>(each->total() - each->processed)});
    }
    for (const Held* each : fresh) token_ns = std::min(token_ns, static_cast<double>(each->request.token_ns));
    std::sort(promised.begin(), promised.end());
    // best[n]: most prompt tokens left over after n accepted of those looked at so far; the promised ones are always in.
    std::vector<double> best{0}, memory{bytes};
    std::vector<std::vector<bool>> took;
    size_t next = 0;
    double before = 0;
    for (Held* each : fresh) {
      const double due = until(now_ns, each->request.first_deadline_ns);
      double owed = 0;
      for (; next < promised.size() && promised[next].first <= due; ++next) owed += promised[next].second;
      std::vector<double> now(best.size() + 1, -1), now_memory(best.size() + 1, INFINITY);
      std::vector<bool> in(best.size() + 1, false);
      const double own = static_cast<double>(each->request.prompt_tokens);
      const double own_bytes = static_cast<double>(each->request.start_bytes) +
                               mean_tokens() * static_cast<double>(each->request.step_bytes);
      for (size_t n = 0; n < now.size(); ++n) {
        const auto after = [&](size_t of) {
          return best[of] +
                 budget(due - before, decoding_now + static_cast<double>(of + promised.size()), token_ns) -
                 owed;
        };
        if (n < best.size() && best[n] >= 0) {
          now[n] = std::max(0.0, after(n));
          now_memory[n] = memory[n];
        }
        if (n > 0 && best[n - 1] >= 0) {
          const double with = after(n - 1) - own, with_bytes = memory[n - 1] + own_bytes;
          const double step_ns = all_ns(decoding_now + static_cast<double>(promised.size() + n));
          if (with >= 0 && with > now[n] && with_bytes <= static_cast<double>(limit()) &&
              step_ns <= token_ns) {
            now[n] = with;
            now_memory[n] = with_bytes;
            in[n] = true;
          }
        }
      }
      best = std::move(now);
      memory = std::move(now_memory);
      took.push_back(std::move(in));
      before = due;
    }
    size_t n = 0;
    for (size_t i = 0; i < best.size(); ++i)
      if (best[i] >= 0) n = i;
    for (size_t i = fresh.size(); i-- > 0;) {
      const bool in = n < took[i].size() && took[i][n];
      (in ? accepted_ : declined_).insert(fresh[i]->request.id);
      n -= in ? 1 : 0;
    }
  }

  void choose(uint64_t now_ns) override {
    plan(now_ns);
    std::vector<Held*> order = by_age();
    std::stable_partition(order.begin(), order.end(),
                          [this](const Held* of) { return accepted_.contains(of->request.id); });
    double until_ns = INFINITY;
    for (Held* each : order)
      if (each->decodes() && accepted_.contains(each->request.id) && decode_or_return(*each))
        until_ns = std::min(until_ns, static_cast<double>(each->request.token_ns));
    const auto fits = [&] { return planned_ns() + time().decode_ns() <= until_ns / time().margin(); };
    for (Held* each : order)
      if (each->place == Place::kMember && each->decodes() && !each->chosen && fits()) decode(*each);
    const auto left = [&] {
      if (!std::isfinite(until_ns)) return prefilling() == 0 ? uint64_t{4096} : uint64_t{0};
      return static_cast<uint64_t>(
          std::max(0.0, (until_ns / time().margin() - planned_ns()) / std::max(time().prefill_ns(), 1.0)));
    };
    for (const bool promised : {true, false}) {
      for (Held* each : order)
        if (each->place == Place::kMember && !each->decodes() &&
            accepted_.contains(each->request.id) == promised && left() > 0)
          prefill(*each, left());
      std::vector<RequestId> waiting;
      for (const DeadlineKey& key : by_deadline())
        if (accepted_.contains(std::get<2>(key)) == promised && waiting.size() < kMost)
          waiting.push_back(std::get<2>(key));
      for (const RequestId id : waiting) {
        if (left() == 0) break;
        if (!promised && held(id).join_bytes() + limit() / 10 > room()) continue;
        if (join(held(id))) prefill(held(id), left());
      }
    }
  }
  Held* victim() override {
    Held* one = nullptr;
    for (Held* each : members())
      if (!each->chosen &&
          (one == nullptr || std::pair(!accepted_.contains(each->request.id), each->request.arrival_ns) >
                                 std::pair(!accepted_.contains(one->request.id), one->request.arrival_ns)))
        one = each;
    return one;
  }
  std::unordered_set<RequestId> accepted_, declined_;
};

// JITServe (NSDI '26, arXiv 2504.20068): a request's priority is its goodput by the time that it still needs, computed with an upper
// bound of its length; the requests of the highest priority that can be in time form the batch, prompts of like length together;
// each gets just the bandwidth that it needs. A member keeps its place for a frame of steps, then one of higher priority may
// displace it.
class JitServe final : public Baseline {
 public:
  explicit JitServe(const StepOptions& options) : Baseline("jitserve", options) {}

 private:
  static constexpr uint64_t kFrame = 50;  // steps

  double needs_ns(const Held& of) const {
    const double bound =
        of.request.expected_tokens != 0 ? static_cast<double>(of.request.expected_tokens) : 2 * mean_tokens();
    const double tokens = std::max(bound - static_cast<double>(of.tokens), 1.0);
    const double prompt = static_cast<double>(
        of.place == Place::kMember ? of.total() - of.processed : of.request.prompt_tokens + of.tokens);
    return time().prefill_ns() * prompt + tokens * time().ns({1, 0, static_cast<double>(of.context())});
  }
  double priority(const Held& of, uint64_t now_ns) const {
    if (of.late) return 0;
    if (!of.decodes() &&
        time().prefill_ns() * static_cast<double>(of.request.prompt_tokens) > until(now_ns, of.due_ns()))
      return 0;
    return of.request.cost / std::max(needs_ns(of), 1.0);
  }

  void choose(uint64_t now_ns) override {
    std::vector<Held*> order = members();
    const auto higher = [&](const Held* a, const Held* b) {
      return std::pair(-priority(*a, now_ns), a->request.id) <
             std::pair(-priority(*b, now_ns), b->request.id);
    };
    std::sort(order.begin(), order.end(), higher);
    double until_ns = INFINITY, token_ns = INFINITY;
    for (Held* each : order)
      if (each->decodes() && decode_or_return(*each) && !each->late) {
        const double left = until(now_ns, each->due_ns());
        if (left > planned_ns()) until_ns = std::min(until_ns, left);
        token_ns = std::min(token_ns, static_cast<double>(each->request.token_ns));
      }
    until_ns = std::min(until_ns, std::isfinite(token_ns) ? token_ns : 0.25e9);
    const auto left = [&] {
      return static_cast<uint64_t>(
          std::max(0.0, (until_ns / time().margin() - planned_ns()) / std::max(time().prefill_ns(), 1.0)));
    };
    for (Held* each : order)
      if (each->place == Place::kMember && !each->decodes() && left() > 0) prefill(*each, left());
    std::vector<Held*> waiting;
    for (const DeadlineKey& key : by_deadline()) {
      waiting.push_back(&held(std::get<2>(key)));
      if (waiting.size() >= 512) break;
    }
    std::sort(waiting.begin(), waiting.end(), higher);
    if (++steps_ % kFrame == 0 && !waiting.empty()) {
      Held* last = victim();
      if (last != nullptr && !last->decodes() &&
          priority(*last, now_ns) < 0.5 * priority(*waiting.front(), now_ns))
        give_back(*last);
    }
    for (Held* each : waiting) {
      if (left() == 0) break;
      if (priority(*each, now_ns) == 0 && !members().empty()) break;
      if (each->join_bytes() + limit() / 50 > room() && !members().empty()) continue;
      if (std::isfinite(token_ns) && all_ns(static_cast<double>(members().size() + 1)) > token_ns) break;
      if (join(*each)) prefill(*each, std::max<uint64_t>(left(), 1));
    }
  }
  uint64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<StepBatcher> step_policy(std::string_view name, const StepOptions& options) {
  if (name == "orca") return std::make_unique<Orca>(options);
  if (name == "vllm") return std::make_unique<Vllm>(options);
  if (name == "sarathi") return std::make_unique<Sarathi>(options);
  if (name == "slos-serve") return std::make_unique<SlosServe>(options);
  if (name == "jitserve") return std::make_unique<JitServe>(options);
  auto made = sched::slo::make_step_batcher(name, options);
  return made.ok() ? std::move(made.value()) : nullptr;
}

}  // namespace gpushare::experiments
