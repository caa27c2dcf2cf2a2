// A policy of your own: lottery scheduling, each session's tickets being its priority. The same table exists in C:
// gpushare_policy_ops.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
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

  std::vector<gs::Session> sessions;
  std::vector<gs::Ticket> tickets;
  for (const int priority : {1, 9}) {
    gs::SessionOptions session;
    session.name = priority == 1 ? "one ticket" : "nine tickets";
    session.priority = priority;
    session.persistent_bytes = 1 << 20;
    session.ephemeral_bytes = 1 << 20;
    sessions.push_back(runtime.open_session(session));
  }
  for (int i = 0; i < 200; ++i)
    for (gs::Session& session : sessions)
      tickets.push_back(session.run([](gs::Iteration& iteration) {
        volatile float* scratch = iteration.alloc<float>(1024);
        for (int k = 0; k < 1024; ++k) scratch[k] = 1.0F;
      }));
  for (gs::Ticket& ticket : tickets) ticket.get();
  for (gs::Session& session : sessions)
    std::printf("%llu iterations done\n", static_cast<unsigned long long>(session.info().iterations_done));
  std::printf("policy %s, %llu switches\n", runtime.info().policy,
              static_cast<unsigned long long>(runtime.info().switches));
  return 0;
}
