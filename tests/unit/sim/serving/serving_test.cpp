// Request lists and the serving simulator: parsers, hand-computed runs, and what must hold of every policy.
// SPDX-License-Identifier: Apache-2.0
#include "sim/serving/serving.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <map>
#include <string>

#include "reference/serving_bound.hpp"
#include "sim/serving/requests.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::sim;
using gpushare::test::Random;
using gpushare::test::seed;
using gpushare::test::uniform;
using sched::slo::DropReason;

namespace {

constexpr uint64_t kMs = 1'000'000;

TimedRequest at(uint64_t arrival_ms, uint64_t exec_ms, uint64_t slo_ms, uint32_t application = 0) {
  return {arrival_ms * kMs, application, exec_ms * kMs, slo_ms * kMs};
}

std::vector<TimedRequest> synthetic(const char* spec_text, double load, double burst = 0, size_t n = 1500,
                                    uint64_t seed = 1) {
  const SyntheticSpec spec = *parse_synthetic(spec_text);
  return draw(spec, {.requests = n,
                     .rate_per_s = load / (mean_execution_ns(spec) / 1e9),
                     .burstiness = burst,
                     .seed = seed});
}

uint64_t dropped(const ServingResult& result, DropReason reason) {
  return result.dropped[static_cast<size_t>(reason)];
}

}  // namespace

TEST_CASE("synthetic specifications") {
  CHECK(parse_synthetic("modes:8")->modes.size() == 8);
  CHECK(parse_synthetic("bimodal:2/0.5")->modes[1].sd_units == 0.5);
  CHECK(parse_synthetic("bimodal:2")->modes[1].sd_units == 2);
  CHECK(mean_execution_ns(*parse_synthetic("static:12.5")) == Approx(12.5e6));
  for (const char* bad : {"", "modes", "modes:", "modes:0", "modes:9", "modes:x", "bimodal:", "bimodal:0",
                          "bimodal:1/2/3", "bimodal:6", "static:0", "static:-1", "static:nan", "uniform:3"}) {
    INFO(bad);
    CHECK(parse_synthetic(bad).status().code() == GPUSHARE_INVALID_ARGUMENT);
  }
  // Same work at another load, other work with another seed.
  const auto slow = synthetic("modes:3", 0.5), fast = synthetic("modes:3", 2),
             other = synthetic("modes:3", 2, 0, 1500, 2);
  CHECK(slow[700].execution_ns == fast[700].execution_ns);
  CHECK(slow[700].arrival_ns > fast[700].arrival_ns);
  CHECK(other[700].execution_ns != fast[700].execution_ns);
  CHECK(std::is_sorted(fast.begin(), fast.end(),
                       [](const auto& a, const auto& b) { return a.arrival_ns < b.arrival_ns; }));
}

TEST_CASE("request files") {
  const auto own = parse_requests(
      "arrival_s,application,exec_ms,slo_ms\n0.5,chat,20,100\n0.25,vision,5,50\r\n\n", "r.csv");
  REQUIRE(own.ok());
  REQUIRE(own->size() == 2);
  CHECK((*own)[0].arrival_ns == 250 * kMs);
  CHECK((*own)[0].application == 1);
  CHECK((*own)[0].slo_ns == 50 * kMs);
  CHECK((*own)[1].execution_ns == 20 * kMs);
  CHECK(parse_requests("arrival_s,application,exec_ms\n", "r.csv")->empty());

  const auto tokens = parse_requests(
      "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,1000,10\n2023-11-17 "
      "00:00:00.2500000,40,0\n",
      "r.csv", {.prefill_ms_per_token = 1, .decode_ms_per_token = 5});
  REQUIRE(tokens.ok());
  CHECK((*tokens)[0].arrival_ns == 0);
  CHECK((*tokens)[1].arrival_ns == 750 * kMs);
  CHECK((*tokens)[0].execution_ns == Approx(1050.0 * kMs));
  CHECK((*tokens)[0].application == 9);
  CHECK((*tokens)[1].application == 5);

  const std::string own_header = "arrival_s,application,exec_ms,slo_ms\n",
                    token_header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  for (const std::string& bad :
       {std::string(), std::string("a,b\n"), own_header + "1,a,2", own_header + "x,a,2,3",
        own_header + "-1,a,2,3", own_header + "1,,2,3", own_header + "1,a,0,3", own_header + "1,a,2,nan",
        own_header + "1,a,2,3,4", token_header + "2023-11-16,1,1", token_header + "2023-13-16 00:00:00.0,1,1",
        token_header + "2023-02-29 00:00:00.0,1,1", token_header + "2023-11-16 00:00:00.0,-1,1",
        token_header + "2023-11-16 00:00:00.0,1",
        token_header + "2023-11-16 00:00:01.0,1,1\n2023-11-16 00:00:00.0,1,1"}) {
    INFO(bad);
    CHECK(parse_requests(bad, "r.csv").status().code() == GPUSHARE_MALFORMED_INPUT);
  }
  const std::string where = parse_requests(own_header + "1,a,2,3\n1,a,none,4", "r.csv").status().message();
  CHECK(where == "r.csv:3: exec_ms: 'none' must be a number above 0 and at most 1e+09");
  CHECK(read_requests("/nonexistent/requests.csv").status().code() == GPUSHARE_NOT_FOUND);
  CHECK(read_requests("/").status().code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("public traces of language models: Azure, BurstGPT, Mooncake, with failures and cut lines") {
  const TokenRule rule{.prefill_ms_per_token = 1, .decode_ms_per_token = 5};
  const char* const files[] = {
      // 2024: a zone, some times without a fraction. 2025: images, too.
      "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,1000,10\n2024-05-10 "
      "00:00:02+00:00,40,3\n2024-05-",
      "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 01:00:00.5,2,1000,10\n2024-10-15 "
      "01:00:02,0,40,3\n2024-10-15 01",
      "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log "
      "Type\n5,ChatGPT,1000,10,1010,Conversation "
      "log\n6,GPT-4,9,0,9,API log\n6.5,GPT-4,40,3,43,API log\n7,GPT",
      "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log "
      "Type\n5,a,1,ChatGPT,1000,10,1010,Conversation log\n6,,0,GPT-4,9,0,9,API log\n6.5,,1,GPT-4,40,3,43,API "
      "log\n7,,",
      "{\"timestamp\": 27482, \"input_length\": 1000, \"output_length\": 10, \"hash_ids\": [46, "
      "47]}\n{\"timestamp\": 28982, \"input_length\": 40, \"output_length\": 3, \"hash_ids\": []}\n{\"times",
  };
  for (const char* text : files) {
    INFO(text);
    std::vector<std::string> notes;
    const auto read = parse_requests(text, "r", rule, &notes);
    INFO(read.status().message());
    REQUIRE(read.ok());
    REQUIRE(read->size() == 2);
    CHECK((*read)[0].arrival_ns == 0);
    CHECK((*read)[1].arrival_ns == 1500 * kMs);
    CHECK((*read)[0].execution_ns == Approx(1050.0 * kMs));
    CHECK((*read)[1].application == 5);
    CHECK(notes.size() == (std::string(text).find("Model") == std::string::npos ? 1 : 2));
    CHECK(notes.back() == "the last line is cut off and left out");
  }
  CHECK(parse_requests("{\"timestamp\": 1, \"input_length\": -4}\n", "r.jsonl")
            .status()
            .message()
            .find("r.jsonl:1: expected an object with timestamp") == 0);
}

TEST_CASE("the parser survives random edits of a good file") {
  test::Random random(test::seed());
  const std::string good =
      "arrival_s,application,exec_ms,slo_ms\n0.5,chat,20,100\n1.25,vision,5,50\n2,chat,7.5,80\n";
  for (int round = 0; round < 20'000; ++round) {
    std::string text = good;
    for (uint64_t edits = test::uniform(random, 1, 6); edits > 0; --edits) {
      const size_t place = test::uniform(random, 0, text.size() - 1);
      switch (test::uniform(random, 0, 2)) {
        case 0:
          text[place] = static_cast<char>(test::uniform(random, 0, 255));
          break;
        case 1:
          text.erase(place, 1);
          break;
        default:
          text.insert(text.begin() + static_cast<ptrdiff_t>(place), ",.\n-e9"[test::uniform(random, 0, 5)]);
      }
      if (text.empty()) text.push_back('x');
    }
    const auto parsed = parse_requests(text, "r.csv");
    if (parsed.ok()) {
      for (const TimedRequest& request : *parsed) REQUIRE(request.execution_ns > 0);
    } else {
      REQUIRE(parsed.status().code() == GPUSHARE_MALFORMED_INPUT);
    }
  }
}

TEST_CASE("fifo by hand: batches of what waits, padded to the longest") {
  // c0 = 10 ms, c1 = 0.5. At 0: one of 20 -> 20 ms. At 20: two wait, longest 40: 10 + 0.5 * 2 * 40 = 50 ->
  // ends at 70.
  const std::vector<TimedRequest> requests{at(0, 20, 100), at(5, 40, 64), at(6, 10, 65), at(300, 20, 5)};
  ServingOptions options;
  options.c0_ns = 10.0 * kMs;
  options.c1 = 0.5;
  const auto result = serve(requests, "fifo", options);
  REQUIRE(result.ok());
  CHECK(result->batches == 3);
  CHECK(result->batch_sizes[2] == 1);
  // The first ends at 20 in time; the others at 70, after 69 and before 71; the last would end at 320 and has
  // until 305.
  CHECK(result->finished_in_time == 2);
  CHECK(result->finished_late == 2);
}

TEST_CASE("clockwork by hand: a batch that overruns its prediction costs the next") {
  // Two applications' worth of times that a single number cannot predict: 20 ms nearly always, one of 200.
  std::vector<TimedRequest> requests;
  for (uint64_t i = 0; i < 12; ++i) requests.push_back(at(i, 20, 2000));
  requests[3].execution_ns = 200 * kMs;
  ServingOptions options;
  options.c1 = 1;
  options.batch_sizes = {1};
  options.warm_samples = 3;
  const auto result = serve(requests, "clockwork", options);
  REQUIRE(result.ok());
  CHECK(dropped(*result, DropReason::kRejected) >= 1);
  CHECK(result->finished_in_time + dropped(*result, DropReason::kRejected) == 12);
}

TEST_CASE("every request is answered once by every policy, at every load, deterministically") {
  for (const char* policy : sched::slo::batcher_names())
    for (const char* spec : {"modes:3", "static:20", "bimodal:2/0.5"})
      for (double load : {0.3, 2.0, 10.0}) {
        INFO(policy << " " << spec << " load " << load);
        const auto requests = synthetic(spec, load, 1.0, 1000);
        ServingOptions options;
        options.c0_ns = 0.7 * mean_execution_ns(*parse_synthetic(spec));
        options.c1 = 0.3;
        options.warm_samples = load > 1 ? 64 : 0;
        const auto result = serve(requests, policy, options);
        INFO(result.status().to_string());
        REQUIRE(result.ok());
        CHECK(result->finished_in_time + result->finished_late + result->drops() == requests.size());
        CHECK(result->busy_share <= 1.0 + 1e-9);
        const auto again = serve(requests, policy, options);
        CHECK(again->finished_in_time == result->finished_in_time);
        CHECK(again->batches == result->batches);
        if (load < 1 && std::string(policy) != "maxdelay") CHECK(result->finish_rate > 0.2);
      }
}

TEST_CASE("a bounded batcher stays bounded under five times the load and says why it refuses") {
  const auto requests = synthetic("modes:2", 20, 0, 4000);
  ServingOptions options;
  options.slo_x_p99 = 200;
  options.batcher.max_pending = 100;
  for (const char* policy : sched::slo::batcher_names()) {
    INFO(policy);
    const auto result = serve(requests, policy, options);
    REQUIRE(result.ok());
    CHECK(result->most_pending <= 100);
    CHECK(dropped(*result, DropReason::kQueueFull) > 1000);
  }
}

TEST_CASE("static models: gpushare does no worse than clockwork") {
  for (double load : {0.6, 1.0, 2.0, 4.0})
    for (double slo : {1.5, 2.0, 3.0, 5.0}) {
      const auto requests = synthetic("static:50", load, 0.5, 3000);
      ServingOptions options;
      options.c0_ns = 35e6;
      options.c1 = 0.3;
      options.slo_x_p99 = slo;
      const double ours = serve(requests, "gpushare", options)->finish_rate,
                   theirs = serve(requests, "clockwork", options)->finish_rate;
      INFO("load " << load << " slo " << slo << ": " << ours << " and " << theirs);
      CHECK(ours >= theirs - 0.005);
    }
}

TEST_CASE("gpushare beats the four baselines on a bimodal load that none of them was made for") {
  const auto requests = synthetic("bimodal:1", 4, 0, 4000);
  ServingOptions options;
  options.c0_ns = 0.9 * mean_execution_ns(*parse_synthetic("bimodal:1"));
  options.c1 = 0.1;
  for (double slo : {1.5, 2.0, 3.0}) {
    options.slo_x_p99 = slo;
    const double ours = serve(requests, "gpushare", options)->finish_rate;
    for (const char* policy : {"clipper", "nexus", "clockwork", "orloj"}) {
      INFO(policy << " at " << slo);
      CHECK(ours > serve(requests, policy, options)->finish_rate);
    }
  }
}

TEST_CASE("options out of range are refused") {
  const auto requests = synthetic("modes:1", 1, 0, 10);
  ServingOptions options;
  CHECK(serve(requests, "nope", options).status().code() == GPUSHARE_NOT_FOUND);
  CHECK(serve(requests, "nope", options).status().message().find("clockwork") != std::string::npos);
  const auto code = [&](auto change) {
    ServingOptions changed;
    change(changed);
    return serve(requests, "gpushare", changed).status().code();
  };
  CHECK(code([](ServingOptions& o) { o.batcher.bins = 0; }) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(code([](ServingOptions& o) { o.batcher.max_pending = 0; }) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(code([](ServingOptions& o) { o.batcher.delay_rate_per_ms = 0; }) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(code([](ServingOptions& o) { o.batcher.estimate_quantile = 1; }) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(code([](ServingOptions& o) { o.batcher.feasible_quantile = 0; }) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(code([](ServingOptions& o) { o.batcher.max_delay_ms = -1; }) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(code([](ServingOptions& o) { o.batch_sizes = {2, 1}; }) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(code([](ServingOptions& o) { o.c1 = 0; }) == GPUSHARE_INVALID_ARGUMENT);
  CHECK(code([](ServingOptions& o) { o.c0_ns = NAN; }) == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("times beyond 64 bits are refused or are no deadline at all") {
  ServingOptions options;
  const auto late = synthetic("modes:1", 1e-300, 0, 10);
  CHECK(late.back().arrival_ns == UINT64_MAX);
  CHECK(serve(late, "edf", options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  const std::vector<TimedRequest> requests = {at(0, 1'000'000'000, 0)};  // 11 days
  options.slo_x_p99 = 1e6;
  const auto served = serve(requests, "edf", options);
  REQUIRE(served.ok());
  CHECK(served->finished_in_time == 1);
  options.c1 = 1e6;
  CHECK(serve(requests, "edf", options).status().code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("the public request trace, or a small one like it") {
  std::vector<TimedRequest> requests;
  auto read = read_requests(std::string(GPUSHARE_SHARED_DATA) + "/requests/azure_llm_2023_conv.csv");
  if (read.ok()) {
    CHECK(read->size() == 19366);
    requests.assign(read->begin(), read->begin() + 2000);
  } else {
    WARN("no shared data: a made trace of 2000 requests instead");
    test::Random random(test::seed());
    uint64_t now = 0;
    for (int i = 0; i < 2000; ++i) {
      now += test::uniform(random, 0, 400) * kMs;
      requests.push_back({now, static_cast<uint32_t>(test::uniform(random, 5, 11)),
                          test::uniform(random, 100, 20'000) * kMs, 0});
    }
  }
  ServingOptions options;
  options.c0_ns = 2e9;
  options.c1 = 0.05;
  const auto ours = serve(requests, "gpushare", options);
  REQUIRE(ours.ok());
  CHECK(ours->finish_rate > serve(requests, "edf", options)->finish_rate);
}

TEST_CASE("told nothing, a batcher learns what requests take from the durations of batches") {
  for (const char* name : {"modes:1", "modes:3", "modes:8"}) {
    const SyntheticSpec spec = *parse_synthetic(name);
    const double mean = mean_execution_ns(spec);
    for (const double load : {0.5, 2.0, 4.0}) {
      double told = 0, learned = 0;
      for (uint64_t seed = 1; seed <= 3; ++seed) {
        const auto requests = draw(spec, {.requests = 5000, .rate_per_s = load / (mean / 1e9), .seed = seed});
        ServingOptions options;
        options.c0_ns = 0.9 * mean;
        options.c1 = 0.1;
        told += serve(requests, "gpushare", options)->finish_rate / 3;
        options.warm_samples = 0;
        options.infer = true;
        options.told_batch_time = false;
        learned += serve(requests, "gpushare", options)->finish_rate / 3;
      }
      INFO(name << " at load " << load << ": told " << told << ", learned " << learned);
      CHECK(learned > told - 0.02);
    }
  }
}

TEST_CASE("told nothing, a batcher follows a distribution that shifts") {
  const SyntheticSpec spec = *parse_synthetic("modes:3");
  const double mean = mean_execution_ns(spec);
  double told = 0, learned = 0;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    auto requests = draw(spec, {.requests = 6000, .rate_per_s = 3 / (mean / 1e9), .seed = seed});
    for (size_t i = requests.size() / 2; i < requests.size(); ++i)
      requests[i].execution_ns = requests[i].execution_ns * 3 / 10;
    ServingOptions options;
    options.c0_ns = 0.9 * mean;
    options.c1 = 0.1;
    options.warm_from = requests.size() / 2;
    told += serve(requests, "gpushare", options)->finish_rate / 3;
    options.warm_samples = 0;
    options.infer = true;
    options.told_batch_time = false;
    learned += serve(requests, "gpushare", options)->finish_rate / 3;
  }
  INFO("told " << told << ", learned " << learned);
  CHECK(learned > told - 0.02);
}

namespace {

// The most requests in time over all orders of all batches, by trying them.
size_t best_schedule(const std::vector<TimedRequest>& requests, const ServingOptions& options, double now_ns,
                     uint32_t left) {
  size_t best = 0;
  for (uint32_t batch = left; batch != 0; batch = (batch - 1) & left) {
    if (static_cast<uint32_t>(std::popcount(batch)) > options.batch_sizes.back()) continue;
    double start = now_ns, longest = 0;
    for (size_t i = 0; i < requests.size(); ++i)
      if ((batch >> i & 1) != 0) {
        start = std::max(start, static_cast<double>(requests[i].arrival_ns));
        longest = std::max(longest, static_cast<double>(requests[i].execution_ns));
      }
    const double end = start + options.c0_ns + options.c1 * std::popcount(batch) * longest;
    size_t in_time = 0;
    for (size_t i = 0; i < requests.size(); ++i)
      if ((batch >> i & 1) != 0 && end <= static_cast<double>(requests[i].arrival_ns + requests[i].slo_ns))
        ++in_time;
    if (in_time > 0) best = std::max(best, in_time + best_schedule(requests, options, end, left & ~batch));
  }
  return best;
}

}  // namespace

TEST_CASE("no schedule finishes more in time than the bound") {
  Random random(seed());
  size_t tight = 0;
  for (int round = 0; round < 200; ++round) {
    ServingOptions options;
    options.c0_ns = static_cast<double>(uniform(random, 0, 50));
    options.c1 = static_cast<double>(uniform(random, 1, 10)) / 10;
    options.batch_sizes = {1, 2, 3};
    std::vector<TimedRequest> requests(uniform(random, 1, 6));
    uint64_t now = 0;
    for (TimedRequest& request : requests) {
      request.arrival_ns = now += uniform(random, 0, 100);
      request.execution_ns = uniform(random, 1, 100);
      request.slo_ns = uniform(random, 20, 300);
    }
    const size_t best = best_schedule(requests, options, 0, (1u << requests.size()) - 1);
    const uint64_t bound = most_in_time(requests, options);
    INFO("round " << round << " seed " << seed());
    REQUIRE(best <= bound);
    REQUIRE(bound <= requests.size());
    tight += best == bound ? 1 : 0;
  }
  CHECK(tight > 60);
}

TEST_CASE("the bound is exact where it is plain") {
  ServingOptions options;
  options.c0_ns = 0;
  options.c1 = 1;
  options.batch_sizes = {1};
  // Ten of 10 ns each at once, and 35 ns for them.
  std::vector<TimedRequest> requests(10,
                                     {.arrival_ns = 5, .application = 0, .execution_ns = 10, .slo_ns = 35});
  CHECK(most_in_time(requests, options) == 3);
  options.batch_sizes = {1, 2};
  CHECK(most_in_time(requests, options) == 3);  // l = c1 k max l: a batch saves nothing without c0
  options.c0_ns = 15;
  options.c1 = 0.5;
  CHECK(most_in_time(requests, options) == 2);  // 12.5 a member of a batch of two
  requests.assign(3, {.arrival_ns = 0, .application = 0, .execution_ns = 100, .slo_ns = 50});
  CHECK(most_in_time(requests, options) == 0);
  CHECK(most_in_time({}, options) == 0);
}

TEST_CASE("under overload goodput does not fall with the number of requests that may wait") {
  const SyntheticSpec spec = *parse_synthetic("modes:3");
  for (const bool labels : {true, false}) {
    double least_wait = 0;
    for (const size_t max_pending : {500u, 100'000u}) {
      ServingOptions options;
      const double mean = mean_execution_ns(spec);
      options.c0_ns = 0.9 * mean;
      options.c1 = 0.1;
      options.slo_x_p99 = 20;
      options.labels = labels;
      options.batcher.max_pending = max_pending;
      const auto requests =
          draw(spec, {.requests = 40'000, .rate_per_s = 50 / (mean / 1e9), .burstiness = 0, .seed = 5});
      const auto result = serve(requests, "gpushare", options);
      REQUIRE(result.ok());
      INFO("labels " << labels << ", max_pending " << max_pending);
      if (max_pending == 500)
        least_wait = result->goodput_per_s;
      else
        CHECK(result->goodput_per_s > 0.99 * least_wait);
    }
  }
}

TEST_CASE("told no labels, in bursts and under overload, gpushare is not below orloj") {
  for (const char* source : {"modes:4", "modes:8"})
    for (const auto& [load, burst] : {std::pair{0.5, 4.0}, {1.5, 2.0}, {6.0, 0.0}}) {
      ServingOptions options;
      const SyntheticSpec spec = *parse_synthetic(source);
      const double mean = mean_execution_ns(spec);
      options.c0_ns = 0.9 * mean;
      options.c1 = 0.1;
      options.slo_x_p99 = 3;
      options.labels = false;
      double ours = 0, orloj = 0;
      for (const uint64_t seed : {21, 22, 23}) {
        const auto requests = draw(
            spec, {.requests = 2000, .rate_per_s = load / (mean / 1e9), .burstiness = burst, .seed = seed});
        ours += serve(requests, "gpushare", options)->finish_rate / 3;
        orloj += serve(requests, "orloj", options)->finish_rate / 3;
      }
      INFO(source << ", load " << load << ", burst " << burst << ": " << ours << " against " << orloj);
      CHECK(ours > orloj - 0.01);
    }
}

namespace {

// An application of a random list: its share, mean execution time and lognormal deviation.
struct Kind {
  double share, mean_ms, deviation;
};
// 2,000 requests with one SLO, at so many a second.
std::vector<TimedRequest> random_list(std::initializer_list<Kind> kinds, double rate_per_s, double slo_ms,
                                      uint64_t seed) {
  Random random(seed);
  std::uniform_real_distribution<double> unit(0, 1);
  std::normal_distribution<double> normal(0, 1);
  double now_ms = 0;
  std::vector<TimedRequest> out;
  for (int i = 0; i < 2000; ++i) {
    now_ms += -std::log(1 - unit(random)) / rate_per_s * 1e3;
    double pick = unit(random);
    const Kind* kind = kinds.begin();
    while (kind + 1 < kinds.end() && pick >= kind->share) pick -= (kind++)->share;
    const double scale = std::sqrt(std::log(1 + kind->deviation * kind->deviation));
    const double ms = kind->mean_ms * std::exp(scale * normal(random) - scale * scale / 2);
    out.push_back({static_cast<uint64_t>(now_ms * 1e6), static_cast<uint32_t>(kind - kinds.begin()),
                   static_cast<uint64_t>(std::max(1.0, ms * 1e6)), static_cast<uint64_t>(slo_ms * 1e6)});
  }
  return out;
}

double mean_rate(std::initializer_list<Kind> kinds, double rate_per_s, double slo_ms, const char* policy,
                 const ServingOptions& options) {
  constexpr int kSeeds = 3;
  double sum = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed)
    sum += serve(random_list(kinds, rate_per_s, slo_ms, seed), policy, options)->finish_rate / kSeeds;
  return sum;
}

}  // namespace

// Nobody can bear a batch of a worthwhile size with a good chance: those with the most slack are still the most likely.
// Without labels the requests that have little time looked as if they took as long as the others.
TEST_CASE("told no labels but deadlines that differ as times do, gpushare is not below mean latencies") {
  struct Kind {
    double share, mean_ms;
    uint64_t slo_ms;
  };
  const Kind kinds[] = {{0.08, 16.8, 46}, {0.43, 11.3, 52}, {0.49, 136.8, 460}};
  for (const uint64_t drawn : {1u, 2u}) {
    INFO("seed " << drawn);
    Random random(drawn);
    const auto part = [&] { return static_cast<double>(uniform(random, 0, 999'999)) / 1e6; };
    std::vector<TimedRequest> requests;
    double now_ms = 0;
    for (size_t i = 0; i < 2000; ++i) {
      now_ms += -std::log(1 - part()) * 32;
      double pick = part();
      const Kind* kind = kinds;
      while (kind != &kinds[2] && pick >= kind->share) pick -= kind++->share;
      const double takes_ms = kind->mean_ms * (0.95 + part() / 10);
      requests.push_back({static_cast<uint64_t>(now_ms * 1e6), 0, static_cast<uint64_t>(takes_ms * 1e6),
                          kind->slo_ms * kMs});
    }
    ServingOptions options;
    options.c0_ns = 6e6;
    options.c1 = 0.37;
    options.labels = false;
    const auto ours = serve(requests, "gpushare", options), mean = serve(requests, "clipper-mean", options);
    REQUIRE(ours.ok());
    REQUIRE(mean.ok());
    CHECK(ours->finish_rate >= mean->finish_rate - 0.005);
  }
}

TEST_CASE("of tight and scattered requests under overload the latest are served, as orloj does") {
  ServingOptions options;
  options.c0_ns = 17.6e6;
  options.c1 = 0.07;
  const auto kinds = {Kind{1, 68, 0.97}};
  const double ours = mean_rate(kinds, 200, 45, "gpushare", options);
  const double orloj = mean_rate(kinds, 200, 45, "orloj", options);
  INFO(ours << " against " << orloj);
  CHECK(ours > orloj - 0.005);
}

TEST_CASE("told nothing, a rare long application does not make all requests look long") {
  ServingOptions options;
  options.c0_ns = 8e6;
  options.c1 = 0.3;
  options.infer = true;
  options.told_batch_time = false;
  options.warm_samples = 0;
  const auto kinds = {Kind{0.49, 7.8, 0.05}, Kind{0.49, 10.4, 0.05}, Kind{0.02, 143.7, 0.05}};
  const double ours = mean_rate(kinds, 410, 190, "gpushare", options);
  const double clockwork = mean_rate(kinds, 410, 190, "clockwork", options);
  INFO(ours << " against " << clockwork);
  CHECK(ours > clockwork - 0.005);
}

TEST_CASE("told nothing, no labels either, scattered requests are not served in batches that end late") {
  ServingOptions options;
  options.c0_ns = 4.1e6;
  options.c1 = 0.13;
  options.infer = true;
  options.labels = false;
  options.told_batch_time = false;
  options.warm_samples = 0;
  const auto kinds = {Kind{0.86, 4.3, 0.49}, Kind{0.14, 126.5, 0.49}};
  const double ours = mean_rate(kinds, 310, 249, "gpushare", options);
  const double clockwork = mean_rate(kinds, 310, 249, "clockwork", options);
  INFO(ours << " against " << clockwork);
  CHECK(ours > clockwork + 0.1);
}

TEST_CASE("how much batches deviate from their model is part of the chance to be in time") {
  ServingOptions options;
  options.c0_ns = 13.7e6;
  options.c1 = 0.46;
  options.noise = 0.3;
  const auto kinds = {Kind{0.7, 58, 0.05}, Kind{0.3, 12.3, 0.05}};
  const double ours = mean_rate(kinds, 52, 140, "gpushare", options);
  const double greedy = mean_rate(kinds, 52, 140, "greedy", options);
  INFO(ours << " against " << greedy);
  CHECK(ours > greedy + 0.02);
}

// With a cost in the square of the number of applications this took hours.
TEST_CASE("ten thousand applications are served") {
  std::vector<TimedRequest> requests;
  Random random(seed());
  for (size_t i = 0; i < 20'000; ++i)
    requests.push_back({.arrival_ns = i * 1'000'000,
                        .application = static_cast<uint32_t>(uniform(random, 0, 9'999)),
                        .execution_ns = uniform(random, 1'000'000, 20'000'000),
                        .slo_ns = 100'000'000});
  for (TimedRequest& request : requests)
    request.execution_ns = 1'000'000 + request.application * 2'000 + request.execution_ns / 20;
  ServingOptions options;
  options.c0_ns = 5e6;
  options.c1 = 0.1;
  const auto labelled = serve(requests, "gpushare", options);
  REQUIRE(labelled.ok());
  options.labels = false;
  const auto unlabelled = serve(requests, "gpushare", options);
  REQUIRE(unlabelled.ok());
  CHECK(labelled->finish_rate > unlabelled->finish_rate);
  CHECK(labelled->finished_in_time <= most_in_time(requests, options));
}

TEST_CASE("the signals: misses expected, and what device time is worth") {
  const SyntheticSpec spec = *parse_synthetic("modes:3");
  const double mean = mean_execution_ns(spec);
  ServingOptions options;
  options.c0_ns = 0.9 * mean;
  options.c1 = 0.1;
  options.slo_x_p99 = 3;
  sched::slo::Signals calm, busy;
  for (const double load : {0.3, 8.0}) {
    const auto requests =
        draw(spec, {.requests = 3000, .rate_per_s = load / (mean / 1e9), .burstiness = 0, .seed = 9});
    const auto result = serve(requests, "gpushare", options);
    REQUIRE(result.ok());
    INFO("load " << load << ": " << result->signals.predicted_miss_rate << ", finished "
                 << result->finish_rate);
    CHECK(std::abs(result->signals.predicted_miss_rate - (1 - result->finish_rate)) < 0.1);
    (load < 1 ? calm : busy) = result->signals;
    const auto fifo = serve(requests, "fifo", options);
    CHECK(fifo->signals.price_per_s == 0);
    CHECK(std::abs(fifo->signals.predicted_miss_rate - (1 - fifo->finish_rate)) < 0.1);
  }
  CHECK(calm.predicted_miss_rate < busy.predicted_miss_rate);
  CHECK(calm.price_per_s > 0);
  CHECK(busy.price_per_s > calm.price_per_s);
}

TEST_CASE("one application a model, as clockwork has it") {
  const SyntheticSpec spec = *parse_synthetic("modes:4");
  const double mean = mean_execution_ns(spec);
  ServingOptions options;
  options.c0_ns = 0.9 * mean;
  options.c1 = 0.1;
  options.model_per_application = true;
  const auto requests =
      draw(spec, {.requests = 1000, .rate_per_s = 2 / (mean / 1e9), .burstiness = 0, .seed = 3});
  for (const char* policy : {"clockwork", "gpushare", "orloj-own"})
    CHECK(serve(requests, policy, options).ok());
}

TEST_CASE("requests bring features: drawn, from our columns, from tokens") {
  const auto spec = parse_synthetic("numeric:0.1");
  REQUIRE(spec.ok());
  CHECK(parse_synthetic("numeric:-1").status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(parse_synthetic("numeric:2").status().code() == GPUSHARE_INVALID_ARGUMENT);
  const std::vector<TimedRequest> drawn = draw(*spec, {.requests = 2000, .rate_per_s = 10});
  for (const TimedRequest& request : drawn) {
    REQUIRE(request.features.size() == 1);
    const double units = static_cast<double>(request.execution_ns) / (spec->unit_ms * 1e6);
    REQUIRE(units / request.features[0] > 0.4);
    REQUIRE(units / request.features[0] < 1.6);
  }
  const auto read =
      parse_requests("arrival_s,application,exec_ms,slo_ms,feature,feature_steps\n0,a,10,50,3,20\n", "f");
  REQUIRE(read.ok());
  CHECK(read->front().features == std::vector<double>{3, 20});
  const auto bad = parse_requests("arrival_s,application,exec_ms,feature\n0,a,10,x\n", "f");
  CHECK(bad.status().message().find("f:2: feature: 'x'") != std::string::npos);
  CHECK(parse_requests("arrival_s,application,exec_ms,steps\n0,a,10,1\n", "f").status().code() ==
        GPUSHARE_MALFORMED_INPUT);
  const auto tokens =
      parse_requests("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,374,44\n", "f");
  REQUIRE(tokens.ok());
  CHECK(tokens->front().features == std::vector<double>{374});
}

TEST_CASE("features let more requests finish in time than an application alone") {
  const auto spec = parse_synthetic("numeric:0.1");
  ServingOptions options;
  options.c0_ns = 0.9 * mean_execution_ns(*spec);
  options.c1 = 0.1;
  const std::vector<TimedRequest> requests =
      draw(*spec,
           {.requests = 1500, .rate_per_s = 4e9 / mean_execution_ns(*spec), .seed = gpushare::test::seed()});
  INFO("seed " << gpushare::test::seed());
  double rate[2];
  for (const bool told : {false, true}) {
    options.features = told;
    const auto served = serve(requests, "gpushare", options);
    REQUIRE(served.ok());
    rate[told] = served->finish_rate;
  }
  CHECK(rate[1] > rate[0]);
}
