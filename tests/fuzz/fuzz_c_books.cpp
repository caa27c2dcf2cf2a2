// Sequences of the C calls that start no thread and touch no device: heaps, placements, plans, histograms, score
// queues, batchers. Every call is answered with a status, and the books stay right.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <string>

#include "fuzz/c_api_input.hpp"

using namespace gpushare::fuzz;

namespace {

struct Books {
  std::vector<gpushare_heap> heaps;
  std::vector<gpushare_histogram> histograms;
  std::vector<gpushare_score_queue> scores;
  std::vector<gpushare_batcher> batchers;
  std::vector<uint64_t> offsets{0};
  std::vector<uint64_t> batches{0};
  std::map<gpushare_batcher, uint64_t> held;  // accepted and not answered
  uint64_t now_ns = 0;
};

int32_t heap_call(Books& books, Input& input) {
  switch (input.byte() % 4) {
    case 0: {
      gpushare_heap_params params = GPUSHARE_HEAP_PARAMS_INIT;
      params.capacity_bytes = input.size();
      params.alignment_bytes = input.byte();
      gpushare_heap heap = nullptr;
      const int32_t status = gpushare_heap_create(&params, &heap);
      if (status == GPUSHARE_OK) books.heaps.push_back(heap);
      return status;
    }
    case 1: {
      uint64_t offset = 0;
      const int32_t status = gpushare_heap_alloc(choose(books.heaps, input), input.size(), &offset);
      if (status == GPUSHARE_OK) books.offsets.push_back(offset);
      return status;
    }
    case 2:
      return gpushare_heap_free(choose(books.heaps, input),
                                books.offsets[input.byte() % books.offsets.size()]);
    default: {
      gpushare_heap_info info = GPUSHARE_HEAP_INFO_INIT;
      const int32_t status = gpushare_heap_get_info(choose(books.heaps, input), &info);
      if (status == GPUSHARE_OK) require(info.live_bytes <= info.capacity_bytes, "live <= capacity");
      return status;
    }
  }
}

int32_t placement_call(Input& input) {
  constexpr size_t kMost = 12;
  uint64_t lower[kMost], upper[kMost], bytes[kMost], offsets[kMost] = {}, arena = 0;
  const uint64_t count = input.byte() % (kMost + 1);
  for (uint64_t i = 0; i < count; ++i) {
    lower[i] = input.byte();
    upper[i] = lower[i] + input.byte() % 16;
    bytes[i] = input.size();
  }
  const int32_t status = gpushare_placement_solve(count, lower, upper, bytes, input.byte() % 3 * 128,
                                                  input.byte() % 4 * 1000, offsets, &arena);
  if (status != GPUSHARE_OK) return status;
  for (uint64_t i = 0; i < count; ++i) {
    require(offsets[i] + bytes[i] <= arena, "a buffer lies inside the arena");
    for (uint64_t j = 0; j < i; ++j)
      require(upper[i] <= lower[j] || upper[j] <= lower[i] || offsets[i] + bytes[i] <= offsets[j] ||
                  offsets[j] + bytes[j] <= offsets[i],
              "buffers alive together do not overlap");
  }
  return status;
}

int32_t plan_call(Input& input) {
  constexpr uint32_t kMost = 16;
  gpushare_plan_params params = GPUSHARE_PLAN_PARAMS_INIT;
  gpushare_link_costs link = GPUSHARE_LINK_COSTS_INIT;
  uint64_t bytes[kMost], execute[kMost], makespan = 0;
  uint32_t ends[kMost] = {}, groups = 0;
  const uint32_t layers = input.byte() % (kMost + 1);
  params.resident_layers = input.byte() % 4;
  params.link_busy_ns = input.size();
  params.lane_busy_ns = input.size();
  params.group_cap_bytes = input.size();
  link.bytes_per_s = input.size();
  link.call_overhead_ns = input.size();
  link.group_overhead_ns = input.size();
  for (uint32_t i = 0; i < layers; ++i) {
    bytes[i] = input.size();
    execute[i] = input.size();
  }
  const int32_t status = gpushare_plan_solve(
      &params, &link, layers, bytes, input.byte() % 2 == 0 ? nullptr : execute, ends, &groups, &makespan);
  if (status != GPUSHARE_OK) return status;
  if (params.resident_layers == layers)
    require(groups == 0, "nothing is sent");
  else
    require(groups > 0 && groups <= layers && ends[groups - 1] == layers, "the groups are all the layers");
  require(std::is_sorted(ends, ends + groups), "in order");
  return status;
}

int32_t histogram_call(Books& books, Input& input) {
  switch (input.byte() % 7) {
    case 0: {
      gpushare_histogram_params params = GPUSHARE_HISTOGRAM_PARAMS_INIT;
      params.window = input.byte();
      params.drift_samples = input.byte();
      gpushare_histogram histogram = nullptr;
      const int32_t status = gpushare_histogram_create(&params, &histogram);
      if (status == GPUSHARE_OK) books.histograms.push_back(histogram);
      return status;
    }
    case 1:
      return gpushare_histogram_merge(choose(books.histograms, input), choose(books.histograms, input));
    case 2:
      return gpushare_histogram_reset(choose(books.histograms, input));
    case 3: {
      double value = 0;
      return gpushare_histogram_get_quantile(choose(books.histograms, input), input.number(), input.byte(),
                                             &value);
    }
    case 4: {
      const gpushare_histogram histogram = choose(books.histograms, input);
      gpushare_histogram_info info = GPUSHARE_HISTOGRAM_INFO_INIT;
      int32_t status = gpushare_histogram_get_info(histogram, &info);
      if (status != GPUSHARE_OK) return status;
      require(info.min_ns <= info.max_ns, "the least is not above the greatest");
      // A histogram that was written can be read, and is the same.
      uint64_t size = 0;
      (void)gpushare_histogram_serialize(histogram, nullptr, 0, &size);
      std::string text(size, ' ');
      status = gpushare_histogram_serialize(histogram, text.data(), size, &size);
      gpushare_histogram copy = nullptr;
      require(status == GPUSHARE_OK &&
                  gpushare_histogram_parse(text.data(), text.size() - 1, &copy) == GPUSHARE_OK,
              "a histogram's text can be read back");
      gpushare_histogram_info again = GPUSHARE_HISTOGRAM_INFO_INIT;
      require(gpushare_histogram_get_info(copy, &again) == GPUSHARE_OK && again.count == info.count,
              "with as many durations");
      return gpushare_histogram_release(copy);
    }
    case 5: {
      char text[64];
      const size_t length = std::strlen(input.text(text, sizeof text));
      gpushare_histogram histogram = nullptr;
      const int32_t status = gpushare_histogram_parse(text, length, &histogram);
      if (status == GPUSHARE_OK) books.histograms.push_back(histogram);
      return status;
    }
    default:
      return gpushare_histogram_record(choose(books.histograms, input), input.size());
  }
}

int32_t score_call(Books& books, Input& input) {
  const gpushare_score_queue queue = choose(books.scores, input);
  switch (input.byte() % 6) {
    case 0: {
      gpushare_score_queue created = nullptr;
      const int32_t status = gpushare_score_queue_create(&created);
      if (status == GPUSHARE_OK) books.scores.push_back(created);
      return status;
    }
    case 1: {
      gpushare_score_class of = GPUSHARE_SCORE_CLASS_INIT;
      const gpushare_cost_step steps[2] = {{input.size(), input.number()}, {input.size(), input.number()}};
      of.histogram = choose(books.histograms, input);
      of.k = input.byte();
      of.bins = input.byte();
      of.step_count = input.byte() % 3;
      of.steps = steps;
      of.delay_rate_per_ms = input.byte() % 3 * 1e-3;
      uint32_t index = 0;
      return input.byte() % 2 == 0 ? gpushare_score_queue_add_class(queue, &of, &index)
                                   : gpushare_score_queue_set_class(queue, input.byte() % 3, &of);
    }
    case 2: {
      uint32_t entry = 0;
      return gpushare_score_queue_insert(queue, input.byte() % 3, input.size(), input.byte(), &entry);
    }
    case 3:
      return gpushare_score_queue_erase(queue, input.byte());
    case 4: {
      uint64_t id = 0, size = 0;
      double score = 0;
      const int32_t status = gpushare_score_queue_best(queue, input.size(), &id, &score);
      if (gpushare_score_queue_get_size(queue, &size) == GPUSHARE_OK)
        require((status == GPUSHARE_NOT_READY) == (size == 0), "there is a best unless it is empty");
      return status;
    }
    default: {
      uint64_t ids[4], count = 0;
      return gpushare_score_queue_pop(queue, input.size(), input.byte() % 5, ids, &count);
    }
  }
}

// Drops answer requests; those of a rejected batch are pending no more.
void take_drops(Books& books, gpushare_batcher batcher) {
  gpushare_drop drops[4];
  uint64_t count = 0;
  while (gpushare_batcher_take_drops(batcher, drops, 4, &count) == GPUSHARE_OK && count > 0)
    for (uint64_t i = 0; i < count; ++i)
      books.held[batcher] -= drops[i].reason == GPUSHARE_DROP_REJECTED ? 0 : 1;
}

int32_t batcher_call(Books& books, Input& input) {
  const gpushare_batcher batcher = choose(books.batchers, input);
  books.now_ns += input.byte() * 10'000ull;
  const uint64_t batch = books.batches[input.byte() % books.batches.size()];
  int32_t status = GPUSHARE_OK;
  switch (input.byte() % 12) {
    case 0: {
      const gpushare_batcher_params params = batcher_params(input);
      gpushare_batcher created = nullptr;
      status = gpushare_batcher_create(&params, &created);
      if (status == GPUSHARE_OK) books.batchers.push_back(created);
      break;
    }
    case 1: {
      gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
      const uint32_t sizes[3] = {input.byte() % 8u, input.byte() % 16u, input.byte()};
      model.batch_size_count = input.byte() % 4;
      model.batch_sizes = sizes;
      model.c0_ns = input.size();
      model.c1 = input.number();
      uint32_t index = 0;
      status = gpushare_batcher_add_model(batcher, &model, &index);
      break;
    }
    case 2:
    case 3:
    case 4: {
      gpushare_request request = GPUSHARE_REQUEST_INIT;
      const gpushare_cost_step steps[2] = {{input.size(), input.number()}, {input.size(), input.number()}};
      request.id = input.byte();
      request.model = input.byte() % 3;
      request.application = input.byte() % 5;
      request.arrival_ns = books.now_ns;
      request.deadline_ns = books.now_ns + input.size() * 1000;
      if (input.byte() % 4 == 0) request.cost = input.number();
      request.later_step_count = input.byte() % 3;
      request.later_steps = steps;
      status = gpushare_batcher_arrive(batcher, &request, books.now_ns);
      if (status == GPUSHARE_OK) ++books.held[batcher];
      break;
    }
    case 5:
      status = gpushare_batcher_cancel(batcher, input.byte(), books.now_ns);
      break;
    case 6: {
      gpushare_batch out = GPUSHARE_BATCH_INIT;
      uint64_t ids[256];
      status = gpushare_batcher_next(batcher, books.now_ns, input.byte() % 2, &out, ids, 256);
      if (status != GPUSHARE_OK) break;
      require(out.count > 0 && out.count <= 256, "a batch has members");
      books.held[batcher] -= out.count;
      books.batches.push_back(out.id);
      break;
    }
    case 7: {
      const uint64_t execution[3] = {input.size(), input.size(), 0};
      const uint8_t what = input.byte() % 4;
      status = what == 0   ? gpushare_batcher_started(batcher, batch, books.now_ns)
               : what == 1 ? gpushare_batcher_rejected(batcher, batch, books.now_ns)
               : what == 2 ? gpushare_batcher_finished(batcher, batch, input.size(), books.now_ns)
                           : gpushare_batcher_finished_run(batcher, batch, execution, input.byte() % 4,
                                                           input.size(), books.now_ns);
      break;
    }
    case 8: {
      const KnownRequest known(input);
      const gpushare_request& request = known.request;
      status = request.feature_count == 0
                   ? gpushare_batcher_observe(batcher, request.model, request.application, input.size())
                   : gpushare_batcher_observe_request(batcher, &request, input.size());
      break;
    }
    case 9:
      status =
          gpushare_batcher_observe_batch(batcher, input.byte() % 3, input.byte(), input.size(), input.size());
      break;
    case 10: {
      const uint32_t applications[3] = {input.byte() % 5u, input.byte() % 5u, input.byte() % 5u};
      const uint64_t execution[3] = {input.size(), input.size(), input.size()};
      status = gpushare_batcher_observe_run(batcher, input.byte() % 3, applications,
                                            input.byte() % 2 == 0 ? nullptr : execution, input.byte() % 4,
                                            input.size());
      break;
    }
    default: {
      gpushare_profile profile = GPUSHARE_PROFILE_INIT;
      status = gpushare_batcher_get_profile(batcher, input.byte() % 3, input.byte() % 5, &profile);
      break;
    }
  }
  for (const gpushare_batcher one : books.batchers) {
    take_drops(books, one);
    uint64_t pending = 0;
    require(gpushare_batcher_get_pending(one, &pending) == GPUSHARE_OK && pending == books.held[one],
            "what was accepted and not answered is pending");
  }
  return status;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  Books books;
  for (int calls = 0; !input.empty() && calls < 200; ++calls) {
    int32_t status = GPUSHARE_OK;
    switch (input.byte() % 7) {
      case 6: {  // stale from then on
        const uint8_t what = input.byte() % 3;
        status = what == 0   ? gpushare_heap_release(choose(books.heaps, input))
                 : what == 1 ? gpushare_histogram_release(choose(books.histograms, input))
                             : gpushare_score_queue_release(choose(books.scores, input));
        break;
      }
      case 0:
        status = heap_call(books, input);
        break;
      case 1:
        status = input.byte() % 2 == 0 ? placement_call(input) : plan_call(input);
        break;
      case 2:
        status = histogram_call(books, input);
        break;
      case 3:
        status = score_call(books, input);
        break;
      default:
        status = batcher_call(books, input);
        break;
    }
    require_status(status);
  }
  for (gpushare_heap heap : books.heaps) (void)gpushare_heap_release(heap);
  for (gpushare_histogram histogram : books.histograms) (void)gpushare_histogram_release(histogram);
  for (gpushare_score_queue queue : books.scores) (void)gpushare_score_queue_release(queue);
  for (gpushare_batcher batcher : books.batchers) (void)gpushare_batcher_release(batcher);
  return 0;
}
