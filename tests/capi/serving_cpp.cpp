// serving.hpp: the request queue, histograms and score queues in C++.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdio>
#include <gpushare/gpushare.hpp>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

constexpr uint64_t kHourNs = 3'600'000'000'000;

gpushare_request request(uint64_t id, uint64_t slack_ns = kHourNs) {
  gpushare_request out = GPUSHARE_REQUEST_INIT;
  out.id = id;
  out.deadline_ns = gpushare::now_ns() + slack_ns;
  return out;
}

void queue() {
  gpushare::RuntimeOptions options;
  options.device = "host";
  options.capacity_bytes = 16 << 20;
  gpushare::Runtime runtime = gpushare::Runtime::open(options);
  gpushare::Session session = runtime.open_session({});
  std::atomic<int> batches{0}, answers{0};
  {
    gpushare::RequestQueue queue(runtime);
    const uint32_t model =
        queue.add_model(session,
                        [&](gpushare::Iteration& iteration, const gpushare_queued_batch& batch) {
                          ++batches;
                          iteration.alloc<float>(1024);
                          for (uint64_t i = 0; i < batch.count; ++i)
                            if (batch.ids[i] == 7) throw std::runtime_error("seven");
                        },
                        0, 1.0, {1});
    queue.observe(model, 0, 1000);
    for (uint64_t id = 0; id < 20; ++id)
      CHECK(queue.submit(request(id), [&](const gpushare_request_outcome& outcome) {
        if (outcome.status == (outcome.id == 7 ? GPUSHARE_CALLBACK_FAILED : GPUSHARE_OK)) ++answers;
      }));
    std::future<gpushare_request_outcome> last = queue.submit(request(20));
    CHECK(last.get().status == GPUSHARE_OK);
    try {
      (void)queue.submit(request(21, 0));
      CHECK(false);
    } catch (const gpushare::Error& error) {
      CHECK(error.status() == GPUSHARE_TIMED_OUT);
    }
    CHECK(!queue.cancel(99));
    CHECK(queue.drain());
    CHECK(answers == 20);
    CHECK(batches == 21);
    CHECK(queue.info().failed == 1);
    // How many of the batches' times are remembered depends on the machine: a change of all times forgets those before it.
    const uint64_t known = queue.profile(model, 0).samples;
    CHECK(known >= 1);
    queue.observe(model, 0, 1000);
    CHECK(queue.profile(model, 0).samples == known + 1);
    queue.close();
  }
  session.close();
  try {
    gpushare::RequestQueue none(runtime, "nope");
    CHECK(false);
  } catch (const gpushare::Error& error) {
    CHECK(error.status() == GPUSHARE_NOT_FOUND);
  }
}

void steps() {
  gpushare::RuntimeOptions options;
  options.device = "host";
  options.capacity_bytes = 16 << 20;
  gpushare::Runtime runtime = gpushare::Runtime::open(options);
  gpushare::Session session = runtime.open_session({});
  std::atomic<int> answers{0}, failed{0};
  std::atomic<uint64_t> tokens{0};
  const auto held = std::make_shared<int>();
  gpushare::StepQueue queue(session, [held](gpushare::Iteration&, const gpushare::StepQueue::Step& step) {
    for (uint64_t i = 0; i < step.count; ++i) {
      if (step.members[i].id == 9) throw std::runtime_error("no");
      step.done[i] = step.members[i].tokens == 2;
    }
  });
  gpushare_step_request one = GPUSHARE_STEP_REQUEST_INIT;
  const auto answer = [&](const gpushare::StepQueue::Answer& news) {
    if (news.ended == 0) return;
    try {
      queue.close();  // refused here, and the queue stays open
      CHECK(false);
    } catch (const gpushare::Error& error) {
      CHECK(error.status() == GPUSHARE_INVALID_STATE);
    }
    ++answers;
    tokens += news.tokens;
    failed += news.status == GPUSHARE_CALLBACK_FAILED ? 1 : 0;
  };
  one.id = 9;
  CHECK(queue.submit(one, answer));
  while (queue.info().failed == 0) std::this_thread::yield();
  for (one.id = 1; one.id <= 8; ++one.id) CHECK(queue.submit(one, answer));
  CHECK(!queue.cancel(99));
  queue.set_memory(1);
  one.id = 10;
  one.first_deadline_ns = 1;
  CHECK(!queue.submit(one, answer));
  CHECK(queue.drain());
  CHECK(answers == 9 && tokens == 24 && failed == 1);
  CHECK(queue.info().in_time == 8);
  CHECK(held.use_count() == 2);
  queue.close();
  CHECK(held.use_count() == 1);
}

void scores() {
  gpushare::Histogram durations;
  for (uint64_t i = 0; i < 100; ++i) durations.record(1'000'000 + i * 10'000);
  const gpushare::Histogram copy = gpushare::Histogram::parse(durations.serialize());
  CHECK(copy.info().count == 100);
  CHECK(copy.quantile_ns(0.5, 8) > copy.quantile_ns(0.5));
  gpushare::ScoreQueue queue;
  gpushare_score_class of = GPUSHARE_SCORE_CLASS_INIT;
  of.histogram = copy.get();
  of.k = 4;
  of.c0_ns = 5e6;
  const uint32_t index = queue.add_class(of);
  CHECK(!queue.best(0));
  const uint32_t entry = queue.insert(index, 50'000'000, 1);
  queue.insert(index, 60'000'000, 2);
  queue.insert(index, 70'000'000, 3);
  CHECK(queue.best(0)->id == 1);
  queue.erase(entry);
  queue.set_class(index, of);
  CHECK((queue.pop(0, 8) == std::vector<uint64_t>{2, 3}));
  CHECK(queue.size() == 0);
}

}  // namespace

int main() {
  queue();
  steps();
  scores();
  return failures == 0 ? 0 : 1;
}
