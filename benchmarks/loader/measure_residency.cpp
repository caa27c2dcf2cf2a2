// measure_residency: requests on a trace to more models than the device holds, by policy of residency: how
// many loads and how much load time. Arrival times are those of the Azure LLM 2023 conversation trace, where
// the shared data folder is there, else one every 180 ms; which model a request is for is drawn (the trace
// names none): Zipf with the given exponent, and popularity moves on by a quarter of the models every quarter
// of the trace. Everything here is computed; nothing is timed.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/units.hpp"
#include "model_sizes.hpp"
#include "sched/residency.hpp"

namespace {

using namespace gpushare;
using sched::ModelId;
using sched::Residency;
using sched::ResidencyPolicy;

constexpr size_t kModels = 32;

struct Model {
  uint64_t bytes;
  uint64_t load_ns;
};

struct Request {
  uint64_t time_ns;
  ModelId model;
};

// Four real models and scaled ones of them, loaded at 12 GB/s; every second one pays 40 ms more for being
// made ready (Python objects, handles), so that time is not in proportion to size.
std::vector<Model> make_models() {
  const char* names[] = {"resnet50", "resnet101", "bert_base", "gpt2"};
  const uint64_t made[] = {102'000'000, 178'000'000, 438'000'000, 498'000'000};
  std::vector<Model> out;
  for (size_t i = 0; i < kModels; ++i) {
    uint64_t bytes = 0;
    for (const uint64_t layer : bench::model_layer_bytes(names[i % 4])) bytes += layer;
    if (bytes == 0) bytes = made[i % 4];
    bytes = bytes * (2 + i / 4 % 4) / 2;
    out.push_back({bytes, static_cast<uint64_t>(static_cast<double>(bytes) / 12.0) +
                              (i / 4 % 2 == 0 ? 5'000'000u : 45'000'000u)});
  }
  return out;
}

// Times of day of the trace's first column, "2023-11-16 18:15:46.6805900", from its first row.
std::vector<uint64_t> arrivals(bool* from_trace) {
  std::vector<uint64_t> out;
  const std::string path = std::string(GPUSHARE_SHARED_DATA) + "/requests/azure_llm_2023_conv.csv";
  const auto text = sim::read_text(path);
  if (text.ok()) {
    const auto rows = sim::parse_csv(*text, path);
    for (size_t i = 1; rows.ok() && i < rows->size(); ++i) {
      int hours = 0, minutes = 0;
      double seconds = 0;
      if (std::sscanf((*rows)[i].fields[0].c_str(), "%*d-%*d-%*d %d:%d:%lf", &hours, &minutes, &seconds) != 3)
        continue;
      out.push_back(static_cast<uint64_t>(((hours * 60 + minutes) * 60 + seconds) * 1e9));
    }
  }
  *from_trace = !out.empty();
  if (out.empty())
    for (uint64_t i = 0; i < 19'366; ++i) out.push_back(i * 180'000'000);
  std::sort(out.begin(), out.end());
  return out;
}

std::vector<Request> make_requests(const std::vector<uint64_t>& times, double exponent) {
  std::mt19937_64 random(20261121);
  std::vector<double> weights;
  for (size_t rank = 1; rank <= kModels; ++rank)
    weights.push_back(1.0 / std::pow(static_cast<double>(rank), exponent));
  std::discrete_distribution<size_t> rank(weights.begin(), weights.end());
  std::vector<ModelId> order(kModels);
  for (size_t i = 0; i < kModels; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  std::vector<Request> out;
  for (size_t i = 0; i < times.size(); ++i) {
    if (i > 0 && i % (times.size() / 4) == 0)
      std::rotate(order.begin(), order.begin() + kModels / 4, order.end());
    out.push_back({times[i], order[rank(random)]});
  }
  return out;
}

struct Outcome {
  uint64_t loads = 0;
  double load_s = 0;
};

Outcome replay(const std::vector<Model>& models, const std::vector<Request>& requests, uint64_t capacity,
               ResidencyPolicy policy, uint64_t half_life_ns) {
  Residency residency(policy, half_life_ns);
  Outcome out;
  for (ModelId id = 0; id < models.size(); ++id) residency.add(id, models[id].bytes, models[id].load_ns);
  for (const Request& request : requests) {
    const bool had = residency.resident(request.model);
    residency.request(request.model, request.time_ns);
    if (had) continue;
    if (const uint64_t bytes = residency.resident_bytes(); bytes > capacity)
      (void)residency.shed(bytes - capacity, request.model, request.time_ns);
    ++out.loads;
    out.load_s += static_cast<double>(models[request.model].load_ns) / 1e9;
  }
  return out;
}

// Knows the future: drops the model whose next request is farthest (Belady), whatever it costs. Not a bound
// for models of different sizes and costs, but what recency tries to guess.
Outcome farthest(const std::vector<Model>& models, const std::vector<Request>& requests, uint64_t capacity) {
  std::vector<size_t> next(requests.size(), requests.size());
  std::map<ModelId, size_t> seen;
  for (size_t i = requests.size(); i-- > 0;) {
    const auto entry = seen.find(requests[i].model);
    if (entry != seen.end()) next[i] = entry->second;
    seen[requests[i].model] = i;
  }
  Outcome out;
  std::map<ModelId, size_t> there;  // model to its next request
  uint64_t used = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const ModelId model = requests[i].model;
    if (there.count(model) == 0) {
      while (used + models[model].bytes > capacity) {
        const auto last = std::max_element(there.begin(), there.end(),
                                           [](const auto& a, const auto& b) { return a.second < b.second; });
        used -= models[last->first].bytes;
        there.erase(last);
      }
      used += models[model].bytes;
      ++out.loads;
      out.load_s += static_cast<double>(models[model].load_ns) / 1e9;
    }
    there[model] = next[i];
  }
  return out;
}

}  // namespace

int main() {
  const std::vector<Model> models = make_models();
  uint64_t total = 0;
  for (const Model& model : models) total += model.bytes;
  bool from_trace = false;
  const std::vector<uint64_t> times = arrivals(&from_trace);
  std::printf("%zu requests (%s), %zu models of %s together; computed\n", times.size(),
              from_trace ? "times of the Azure LLM 2023 conversation trace" : "made: one every 180 ms",
              models.size(), base::format_bytes(total).c_str());
  std::printf("%-5s %-9s %-28s %8s %10s %8s\n", "zipf", "capacity", "policy", "loads", "load s", "/lru");
  for (const double exponent : {0.6, 1.0, 1.4}) {
    const std::vector<Request> requests = make_requests(times, exponent);
    for (const uint64_t percent : {20u, 40u, 60u}) {
      const uint64_t capacity = total * percent / 100;
      const Outcome lru =
          replay(models, requests, capacity, ResidencyPolicy::kLeastRecentlyUsed, 60'000'000'000);
      const auto print = [&](const char* policy, const Outcome& outcome) {
        std::printf("%-5.1f %6llu%%   %-28s %8llu %10.1f %8.3f\n", exponent,
                    static_cast<unsigned long long>(percent), policy,
                    static_cast<unsigned long long>(outcome.loads), outcome.load_s,
                    outcome.load_s / lru.load_s);
      };
      print("least recently used", lru);
      for (const uint64_t seconds : {10u, 60u, 300u})
        print(base::format("weighted, half-life %llu s", static_cast<unsigned long long>(seconds)).c_str(),
              replay(models, requests, capacity, ResidencyPolicy::kWeighted, seconds * 1'000'000'000ull));
      print("farthest next use (offline)", farthest(models, requests, capacity));
    }
  }
  return 0;
}
