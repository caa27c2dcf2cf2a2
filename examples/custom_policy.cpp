// A policy of your own: lottery scheduling, each session's tickets being its priority. The same table exists in C:
// gpushare_policy_ops.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <gpushare/gpushare.hpp>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace gs = gpushare;

namespace {

// Each session runs towards its next win at random, twice the tickets twice as fast, and who is there first goes before
// the others. Who wins next is then as likely as its tickets say, whoever won before.
class Lottery final : public gs::Policy {
 public:
  bool before(const gpushare_candidate& a, const gpushare_candidate& b) override {
    return next_win(a) < next_win(b);
  }
  double share(const gpushare_candidate& /*session*/) override {
    return GPUSHARE_SHARE_WHOLE;
  }  // one at a time

 private:
  struct Runner {
    uint64_t wins = 0;
    double next = 0;
  };
  double next_win(const gpushare_candidate& session) {
    std::exponential_distribution<double> step(session.priority > 0 ? session.priority : 1);
    const auto [it, is_new] = runners_.try_emplace(session.session_id);
    Runner& runner = it->second;
    if (is_new) runner = {session.iterations_done, now_ + step(random_)};
    for (; runner.wins < session.iterations_done; ++runner.wins) {
      now_ = std::max(now_, runner.next);
      runner.next = now_ + step(random_);
    }
    return runner.next;
  }

  std::mt19937 random_{7};
  std::map<uint64_t, Runner> runners_;
  double now_ = 0;  // of the last win
};

}  // namespace

int main() {
  gs::RuntimeOptions options;
  options.device = "host";
  options.capacity_bytes = 64 << 20;
  options.custom_policy = std::make_shared<Lottery>();
  options.custom_policy_name = "lottery";
  gs::Runtime runtime = gs::Runtime::open(options);

  constexpr int kTickets[] = {9, 1};
  std::vector<gs::Session> sessions;
  for (const int priority : kTickets) {
    gs::SessionOptions session;
    session.priority = priority;
    session.persistent_bytes = 1 << 20;
    session.ephemeral_bytes = 1 << 20;
    sessions.push_back(runtime.open_session(session));
  }

  constexpr int kTurns = 200;
  std::atomic<int> turns{0}, wins[2]{};
  std::vector<gs::Ticket> tickets;
  {
    // The lottery begins when this turn ends: both sessions have work then, and have it for 200 turns.
    gs::Session opening = runtime.open_session({"opening"});
    const gs::Iteration turn = opening.begin_iteration();
    for (int i = 0; i < kTurns; ++i)
      for (size_t who = 0; who < sessions.size(); ++who)
        tickets.push_back(sessions[who].run([&turns, &won = wins[who]](gs::Iteration& iteration) {
          volatile float* scratch = iteration.alloc<float>(1024);
          for (int k = 0; k < 1024; ++k) scratch[k] = 1.0F;
          if (turns++ < kTurns) ++won;
        }));
  }
  for (gs::Ticket& ticket : tickets) ticket.get();
  for (size_t who = 0; who < sessions.size(); ++who)
    std::printf("%d of 10 tickets won %d of %d turns\n", kTickets[who], wins[who].load(), kTurns);
  return wins[0] >= 160 && wins[0] < kTurns ? 0
                                            : 1;  // 180 on average, and seldom more than 10 away from that
}
