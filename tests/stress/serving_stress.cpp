// Requests with deadlines on real threads in front of a runtime on the host device: four producers, cancels,
// failing batches, five times more than can be served. Run it under ThreadSanitizer. The test asserts that each
// accepted request is answered exactly once, each refusal says why, the number of held requests stays bounded, and the
// device gets everything back. GPUSHARE_SERVING_REQUESTS sets how many requests (20,000; 100,000 in the measured runs of
// benchmarks/results/serving-host.md).
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "executor/serving/iteration_batch.hpp"
#include "support/executor_fixture.hpp"
#include "support/random.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT
using executor::RequestOutcome;
using executor::RequestServer;
using executor::RequestServerOptions;
using executor::RequestServerStats;
using sched::slo::Batch;
using sched::slo::DropReason;

constexpr size_t kProducers = 4;
constexpr uint64_t kUs = 1000;

size_t requests_to_send() {
  return number_from("GPUSHARE_SERVING_REQUESTS", 20'000);
}

// Real work: sums over the batch's own memory.
struct Work {
  float* data = nullptr;
  size_t rounds = 0;
  std::atomic<float> sum{0};
  static void run(void* user_data) {
    auto* work = static_cast<Work*>(user_data);
    float sum = 0;
    for (size_t round = 0; round < work->rounds; ++round)
      for (size_t i = 0; i < 1024; ++i) {
        work->data[i] = work->data[i] * 0.5F + static_cast<float>(i);
        sum += work->data[i];
      }
    work->sum = sum;
  }
};

// One request in this many has a deadline so far away that no load of the machine can make it miss.
constexpr uint64_t kPatient = 61;
constexpr size_t kAfter = 1000;  // requests at most, one by one, after the storm
constexpr uint64_t kFarNs = 3'600'000'000'000;

struct Sent {
  std::vector<std::atomic<uint8_t>> answers;
  std::atomic<uint64_t> accepted{0}, full{0}, hopeless{0}, wordless{0}, other{0}, wrong{0};
  uint64_t refused_after = 0;  // once the producers have ended
  std::atomic<uint64_t> ran{0}, failed{0}, cancelled{0}, timed_out{0}, patient_late{0};
  explicit Sent(size_t n) : answers(n) {}

  void answer(const RequestOutcome& outcome) {
    ++answers[outcome.id];
    if (outcome.status == GPUSHARE_OK)
      ++ran;
    else if (outcome.status == GPUSHARE_CALLBACK_FAILED)
      ++failed;
    else if (outcome.status == GPUSHARE_CANCELLED && outcome.dropped == DropReason::kCancelled)
      ++cancelled;
    else if (outcome.status == GPUSHARE_TIMED_OUT && outcome.dropped && outcome.batch_size == 0)
      ++timed_out;
    else
      ++wrong;
    // Only an action that came after its latest start (clockwork) costs a patient request its place.
    if (outcome.id % kPatient == 0 && outcome.status == GPUSHARE_TIMED_OUT &&
        outcome.dropped != DropReason::kRejected)
      ++patient_late;
  }
};

struct Load {
  const char* policy;
  uint64_t gap_ns;  // between the requests of a producer; 0 = none: far more than can be served
  uint64_t slack_ns;
  size_t max_pending;
  size_t rounds;  // of work for each request in a batch
};

void serve(const Load& load, size_t n) {
  INFO(load.policy << ", gap " << load.gap_ns << " ns, " << n << " requests");
  auto runtime = open_runtime(options_of(kSetups[0]));
  executor::SessionOptions session_options;
  session_options.persistent_bytes = session_options.ephemeral_bytes = kMiB;
  auto session = runtime->open_session(session_options);
  REQUIRE(session.ok());
  RequestServerOptions options;
  options.policy = load.policy;
  options.batcher.max_pending = load.max_pending;
  options.batcher.clockwork_slack_ms = 0.1;
  options.batcher.max_delay_ms = 0.1;
  auto server = RequestServer::start(options);
  REQUIRE(server.ok());
  Sent sent(n + kAfter);
  Work work;
  std::atomic<uint64_t> batches{0};
  sched::slo::ModelSpec model;
  model.c0_ns = 20.0 * kUs;
  model.c1 = 0.2;
  REQUIRE((*server)
              ->add_model(model,
                          executor::run_as_iterations(
                              *session,
                              [&](const Batch& batch, const std::shared_ptr<executor::Iteration>& iteration,
                                  executor::BatchReport&) -> base::Status {
                                const uint64_t serial = ++batches;
                                if (serial % 101 == 0) throw std::runtime_error("planned");
                                GPUSHARE_ASSIGN_OR_RETURN(const memory::Address block,
                                                          iteration->alloc(4096, 0));
                                GPUSHARE_ASSIGN_OR_RETURN(const auto stream, iteration->stream());
                                work.data = reinterpret_cast<float*>(block);  // NOLINT
                                work.rounds = load.rounds * batch.requests.size();
                                return stream->launch_host(&Work::run, &work);
                              }))
              .ok());
  std::vector<std::thread> producers;
  for (size_t p = 0; p < kProducers; ++p)
    producers.emplace_back([&, p] {
      Random random(seed() + p);
      uint64_t next_ns = base::host_now_ns();
      for (size_t id = p; id < n; id += kProducers) {
        if (load.gap_ns != 0) {
          next_ns += load.gap_ns;
          const uint64_t now = base::host_now_ns();
          if (next_ns > now) std::this_thread::sleep_for(std::chrono::nanoseconds(next_ns - now));
        }
        sched::slo::Request request;
        request.id = id;
        request.application = static_cast<uint32_t>(uniform(random, 0, 2));
        request.deadline_ns =
            base::host_now_ns() +
            (id % kPatient == 0 ? kFarNs : uniform(random, load.slack_ns / 2, load.slack_ns));
        const base::Status status =
            (*server)->submit(request, [&](const RequestOutcome& outcome) { sent.answer(outcome); });
        if (status.ok()) {
          ++sent.accepted;
          if (uniform(random, 0, 31) == 0) (*server)->cancel(id);
          continue;
        }
        ++sent.answers[id];
        if (status.message().find(std::to_string(id)) == std::string::npos) ++sent.wordless;
        ++(status.code() == GPUSHARE_QUEUE_FULL  ? sent.full
           : status.code() == GPUSHARE_TIMED_OUT ? sent.hopeless
                                                 : sent.other);
        if (id % 64 == p) (void)(*server)->stats();
      }
    });
  for (std::thread& producer : producers) producer.join();
  // After the storm the server serves: patient requests one after the other until one has run. (A batch may be one
  // of those that fail, its action may be rejected, and the queue may be full for a while.)
  size_t last = n;
  for (const uint64_t ran_before = sent.ran; sent.ran == ran_before && last < sent.answers.size();) {
    sched::slo::Request request;
    request.id = last;
    request.deadline_ns = base::host_now_ns() + kFarNs;
    const base::Status status =
        (*server)->submit(request, [&](const RequestOutcome& outcome) { sent.answer(outcome); });
    if (status.code() == GPUSHARE_QUEUE_FULL) {
      ++sent.refused_after;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    REQUIRE(status.ok());
    ++sent.accepted;
    while (sent.answers[last] == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    ++last;
  }
  REQUIRE((*server)->drain().ok());
  const RequestServerStats stats = (*server)->stats();
  REQUIRE((*server)->stop().ok());
  size_t not_once = 0;
  for (size_t id = 0; id < last; ++id) not_once += sent.answers[id] != 1 ? 1 : 0;
  CHECK(not_once == 0);
  CHECK(sent.wrong == 0);
  CHECK(sent.other == 0);
  CHECK(sent.wordless == 0);
  CHECK(sent.patient_late == 0);
  CHECK(sent.accepted + sent.full + sent.hopeless == last);
  CHECK(sent.ran + sent.failed + sent.cancelled + sent.timed_out == sent.accepted);
  CHECK(sent.ran > 0);
  CHECK(stats.accepted == sent.accepted);
  CHECK(stats.refused_full == sent.full + sent.refused_after);
  CHECK(stats.refused_hopeless == sent.hopeless);
  CHECK(stats.in_time + stats.late == sent.ran);
  CHECK(stats.failed == sent.failed);
  CHECK(stats.held == 0);
  CHECK(stats.pending == 0);
  CHECK(stats.batches == batches);
  CHECK(stats.batched_requests == sent.ran + sent.failed);
  CHECK(stats.most_held <= 2 * load.max_pending + 4096);
  const std::string broken = runtime->check();
  INFO(broken);
  CHECK(broken.empty());
  WARN(load.policy << " x " << n << ": ran " << sent.ran << " (in time " << stats.in_time << "), failed "
                   << sent.failed << ", dropped " << sent.timed_out << ", cancelled " << sent.cancelled
                   << ", refused full " << sent.full << ", hopeless " << sent.hopeless << "; most held "
                   << stats.most_held << ", " << stats.batches << " batches");
  CHECK((*session)->close().ok());
  CHECK(runtime->close().ok());
}

}  // namespace

TEST_CASE("four producers, about what can be served") {
  serve({"gpushare", 200 * kUs, 50'000 * kUs, 100'000, 4}, requests_to_send());
}

TEST_CASE("far more than can be served: bounded, every refusal with its reason") {
  serve({"gpushare", 0, 20'000 * kUs, 500, 4}, requests_to_send());
}

TEST_CASE("the same under the policies that plan ahead or shed by themselves") {
  for (const char* policy : {"clockwork", "orloj", "nexus", "edf"})
    serve({policy, 0, 20'000 * kUs, 500, 4}, requests_to_send() / 10);
}
