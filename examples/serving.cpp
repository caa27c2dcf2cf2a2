// Requests with deadlines in front of a runtime: two applications share a model, four times as much is asked
// as can be served, some callers give up. Batches run as iterations of the model's session, so a training job
// on the same device would take its turns between them. Every request is answered once.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <gpushare/gpushare.hpp>
#include <thread>

namespace gs = gpushare;

namespace {

constexpr uint64_t kMs = 1'000'000;

// The time that a network's kernels take stands for the network.
void run_model(const gs::Stream& stream, uint64_t count, bool is_long) {
  const auto span = std::chrono::microseconds((is_long ? 400 : 100) * count + 500);
  stream.launch_host([span] { std::this_thread::sleep_for(span); });
}

}  // namespace

int main() {
  gs::Runtime runtime = gs::Runtime::open({"host"});
  gs::Session session = runtime.open_session({"model"});
  float* weights = session.alloc_model<float>(1 << 16);
  std::atomic<int> in_time{0}, late{0}, dropped{0}, cancelled{0};
  int refused = 0;
  {
    gs::RequestQueue queue(runtime);  // policy "gpushare"
    const uint32_t model =
        queue.add_model(session, [weights](gs::Iteration& iteration, const gs::RequestQueue::Batch& batch) {
          float* activations = iteration.alloc<float>(1 << 14);  // gone with the batch
          (void)weights;
          (void)activations;
          bool is_long = false;
          for (uint64_t i = 0; i < batch.count; ++i) is_long = is_long || batch.ids[i] % 2 == 1;
          run_model(iteration.stream(), batch.count, is_long);
        });

    // Nothing was said of how long anything takes: the queue measures what runs.
    for (uint64_t id = 0; id < 400; ++id) {
      gpushare_request request = GPUSHARE_REQUEST_INIT;
      request.model = model;
      request.id = id;
      request.application = id % 2;  // 1: the long ones
      request.deadline_ns = gs::now_ns() + 30 * kMs;
      const bool accepted = queue.submit(request, [&](const gs::RequestQueue::Outcome& outcome) {
        if (outcome.status == GPUSHARE_OK)
          ++(outcome.finished_ns <= outcome.deadline_ns ? in_time : late);
        else
          ++(outcome.status == GPUSHARE_CANCELLED ? cancelled : dropped);
      });
      if (!accepted) ++refused;  // at the door: QUEUE_FULL, or hopeless
      if (id % 50 == 49) queue.cancel(id);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    queue.drain();
    const gpushare_request_queue_info info = queue.info();
    std::printf("%llu batches of %.1f requests, %.1f us a decision\n",
                static_cast<unsigned long long>(info.batches),
                static_cast<double>(info.batched_requests) / static_cast<double>(info.batches),
                static_cast<double>(info.decision_ns) / 1e3 / static_cast<double>(info.decisions));
  }
  std::printf("in time %d, late %d, dropped %d, cancelled %d, refused %d\n", in_time.load(), late.load(),
              dropped.load(), cancelled.load(), refused);
  return in_time + late + dropped + cancelled + refused == 400 ? 0 : 1;
}
