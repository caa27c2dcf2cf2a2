// A policy of your own: lottery scheduling, each session's tickets being its priority. The same table exists in C:
// gpushare_policy_ops.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <gpushare/gpushare.hpp>
#include <memory>
#include <random>
#include <vector>

namespace gs = gpushare;

namespace {

class Lottery final : public gs::Policy {
 public:
  uint32_t pick(uint32_t /*lane*/, const gpushare_candidate* candidates, uint32_t count,
                uint64_t /*now_ns*/) override {
    int64_t tickets = 0;
    for (uint32_t i = 0; i < count; ++i) tickets += candidates[i].priority;
    if (tickets <= 0) return 0;
    auto winner = std::uniform_int_distribution<int64_t>(0, tickets - 1)(random_);
    for (uint32_t i = 0; i < count; ++i) {
      winner -= candidates[i].priority;
      if (winner < 0) return i;
    }
    return idle;
  }
  uint32_t max_lanes() const override { return 1; }

 private:
  std::mt19937 random_{7};
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
