// Measurement 8: sending models to the device.
//
// The models have the layers of published networks (model_shapes.hpp) and no weights worth naming: their bytes are what
// is sent. A layer executes as fills that take its share of the model's execution by its multiply-adds; how long the
// whole takes is set against what its transmission takes on this machine's link, so that the figures mean the same on
// any GPU.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <gpushare/gpushare.hpp>
#include <gpushare/loader.hpp>
#include <stdexcept>
#include <vector>

#include "measures.hpp"
#include "model_shapes.hpp"

namespace gpushare::gpu_suite {
namespace {

using Clock = std::chrono::steady_clock;
constexpr const char* kGroup = "8 loading";
constexpr uint64_t kMiB = 1u << 20;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

class PinnedBlock {
 public:
  PinnedBlock(const Driver& driver, uint64_t bytes) : driver_(driver) {
    must(driver.cuMemHostAlloc(&pointer_, bytes, 3), "cuMemHostAlloc");  // portable, mapped: as the library's
  }
  ~PinnedBlock() { (void)driver_.cuMemFreeHost(pointer_); }
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;
  void* get() const { return pointer_; }

 private:
  const Driver& driver_;
  void* pointer_ = nullptr;
};

// A model to be sent, and how its layers execute.
struct Workload {
  std::string name;
  std::vector<uint64_t> bytes;       // of each layer
  std::vector<uint64_t> fill_bytes;  // that stand for its execution
  std::vector<uint64_t> execution_ns;
  uint64_t total_bytes = 0;

  // `execution_ms` of the whole, shared out by multiply-adds; fills run at `fill_bytes_per_ms`. `divisor` makes the
  // model smaller.
  Workload(const std::string& model, uint64_t divisor, double execution_ms, double fill_bytes_per_ms)
      : name(model) {
    const std::vector<LayerShape> layers = model_shape(model);
    uint64_t weights = 0, multiply_adds = 0;
    for (const LayerShape& layer : layers) {
      weights += layer.weights;
      multiply_adds += layer.multiply_adds;
    }
    if (weights != published_weights(model) || weights == 0)
      throw std::runtime_error("the shape of " + model + " has " + std::to_string(weights) + " weights");
    for (const LayerShape& layer : layers) {
      const double ms =
          execution_ms * static_cast<double>(layer.multiply_adds) / static_cast<double>(multiply_adds);
      bytes.push_back(std::max<uint64_t>(layer.weights * 4 / divisor, 16));
      fill_bytes.push_back(std::max<uint64_t>(static_cast<uint64_t>(ms * fill_bytes_per_ms), 256));
      execution_ns.push_back(static_cast<uint64_t>(ms * 1e6));
      total_bytes += (bytes.back() + 255) / 256 * 256;
    }
  }

  // Enqueues the execution of layers [first, end).
  void execute(const Driver& driver, CUstream stream, CUdeviceptr block, uint64_t block_bytes, size_t first,
               size_t end) const {
    for (size_t layer = first; layer < end; ++layer) {
      for (uint64_t left = fill_bytes[layer]; left > 0;) {
        const uint64_t piece = std::min(left, block_bytes);
        must(driver.cuMemsetD8Async(block, 1, piece, stream), "fill");
        left -= piece;
      }
    }
  }
};

Image make_image(Loader& loader, const Workload& work) {
  const std::vector<char> any(*std::max_element(work.bytes.begin(), work.bytes.end()), 1);
  std::vector<std::string> names;
  for (size_t i = 0; i < work.bytes.size(); ++i) names.push_back(std::to_string(i));
  std::vector<gpushare_layer_source> layers;
  for (size_t i = 0; i < work.bytes.size(); ++i)
    layers.push_back({names[i].c_str(), any.data(), work.bytes[i]});
  return loader.create_image(work.name, layers);
}

// One inference of the active model; returns when its output would be there.
void infer(const Driver& driver, const Workload& work, Switcher::Turn& turn,
           const std::vector<uint32_t>& ends, uint64_t block_bytes) {
  const Stream stream = turn.iteration.stream();
  const Address block = turn.iteration.alloc_bytes(block_bytes);
  uint32_t first = 0;
  for (const uint32_t end : ends) {
    turn.model.make_usable(first, end, stream);
    work.execute(driver, static_cast<CUstream>(stream.native()), block, block_bytes, first, end);
    first = end;
  }
  stream.synchronize();
  turn.iteration.end();
}

// Two members of one image, of which one is on the device at a time.
struct Switching {
  Switching(const Driver& on, const Workload& of, uint64_t block) : driver(on), work(of), block_bytes(block) {
    runtime =
        Runtime::open({.device = "cuda:0", .capacity_bytes = 2 * work.total_bytes + block_bytes + 64 * kMiB});
    loader = Loader(runtime);
    loader.calibrate();
    image = make_image(loader, work);
  }
  // Empty `grouping`: the loader's plan, which is read off the first load and kept. With `standby_bytes` members on
  // standby keep their first layers on the device and every load is planned.
  void start(std::vector<uint32_t> grouping, uint64_t standby_bytes = 0) {
    ends = std::move(grouping);
    gpushare_switcher_params alone = GPUSHARE_SWITCHER_PARAMS_INIT;
    alone.keep_bytes = 0;  // also where both would fit
    alone.standby_bytes = standby_bytes;
    switcher = Switcher(loader, alone);
    gpushare_load_params load = GPUSHARE_LOAD_PARAMS_INIT;
    load.group_ends = ends.data();
    load.group_count = static_cast<uint32_t>(ends.size());
    load.execution_ns = ends.empty() ? work.execution_ns.data() : nullptr;
    load.no_profile = 1;
    SessionOptions options;
    options.ephemeral_bytes = block_bytes;
    for (int i = 0; i < 2; ++i) members[i] = switcher.add(image, options, load);
    if (!ends.empty()) return;
    for (int i = 0; i < 4 && standby_bytes > 0; ++i) switcher.begin(members[i & 1]).iteration.end();
    Switcher::Turn turn = switcher.begin(members[0]);
    const uint32_t groups = turn.model.info().groups;
    for (uint32_t layer = 1; layer < work.bytes.size(); ++layer)
      if (turn.model.layer(layer).group != turn.model.layer(layer - 1).group) ends.push_back(layer);
    ends.push_back(static_cast<uint32_t>(work.bytes.size()));
    turn.iteration.end();
    if (ends.size() != groups) throw std::runtime_error("the plan's groups do not add up");
    if (standby_bytes > 0) return;
    switcher.close();
    start(std::vector<uint32_t>(ends));
  }
  // Milliseconds from asking for member `which` until its output.
  double first_output(int which, bool loads) {
    const auto start = Clock::now();
    Switcher::Turn turn = switcher.begin(members[which]);
    if (turn.loaded != loads) throw std::runtime_error("a switch did not do what it is measured for");
    infer(driver, work, turn, ends, block_bytes);
    return ms_since(start);
  }

  const Driver& driver;
  const Workload& work;
  const uint64_t block_bytes;
  std::vector<uint32_t> ends;
  Runtime runtime;
  Loader loader;
  Image image;
  Switcher switcher;
  uint64_t members[2] = {0, 0};
};

// Bytes a millisecond of fills, and of copies from pinned memory in one call: what the device can do.
double fill_rate(const Driver& driver, uint64_t bytes) {
  const PlainStream stream(driver);
  const PlainBlock block(driver, bytes);
  const TimingEvent begin(driver), end(driver);
  std::vector<double> rates;
  for (int i = 0; i < 6; ++i) {
    begin.record(stream.get());
    for (int k = 0; k < 8; ++k) must(driver.cuMemsetD8Async(block.get(), 1, bytes, stream.get()), "fill");
    end.record(stream.get());
    stream.synchronize();
    rates.push_back(8e3 * static_cast<double>(bytes) / std::max(end.microseconds_since(begin), 1e-3));
  }
  return summarise({rates.begin() + 1, rates.end()}).median;
}

// The link: the driver's own copy of pinned memory beside the loader's transmission of as many bytes, in turn. Returns
// bytes a ms.
double measure_link(const Driver& driver, const Settings& settings, Report& report) {
  const uint64_t bytes = settings.load_bytes;
  const PinnedBlock host(driver, bytes);
  const PlainBlock block(driver, bytes);
  const PlainStream stream(driver);
  const TimingEvent begin(driver), end(driver);
  Runtime runtime = Runtime::open({.device = "cuda:0", .capacity_bytes = 2 * bytes + 64 * kMiB});
  Loader loader(runtime);
  loader.calibrate();
  constexpr uint32_t kLayers = 64;
  Workload even("resnet152", 1, 1, 1);
  even.bytes.assign(kLayers, bytes / kLayers);
  const Image image = make_image(loader, even);
  Session session = runtime.open_session({.name = "link",
                                          .persistent_bytes = bytes + 2 * kMiB,
                                          .ephemeral_bytes = kMiB,
                                          .allow_queueing = false});
  const uint32_t one_group[] = {kLayers};
  std::vector<double> plain, whole, planned, share;
  for (int i = 0; i <= settings.repeats; ++i) {
    begin.record(stream.get());
    must(driver.cuMemcpyHtoDAsync(block.get(), host.get(), bytes, stream.get()), "cuMemcpyHtoDAsync");
    end.record(stream.get());
    stream.synchronize();
    const double limit = static_cast<double>(bytes) / std::max(end.microseconds_since(begin), 1e-3) / 1e3;
    double rates[2] = {0, 0};
    for (const bool plan : {false, true}) {
      gpushare_load_params load = GPUSHARE_LOAD_PARAMS_INIT;
      load.no_profile = 1;
      if (!plan) {
        load.group_count = 1;
        load.group_ends = one_group;
      }
      Model model = loader.load(session, image, load);
      (void)model.wait(kLayers - 1);
      rates[plan ? 1 : 0] =
          static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(model.info().load_ns, 1));
      model.unload();
    }
    if (i == 0) continue;
    plain.push_back(limit);
    whole.push_back(rates[0]);
    planned.push_back(rates[1]);
    share.push_back(100 * rates[1] / limit);
  }
  const std::string what = "host to device, " + size_name(bytes) + " of pinned memory";
  report.add(kGroup, what, "driver, one copy", "GB/s", plain);
  report.add(kGroup, what, "gpushare, one group", "GB/s", whole);
  report.add(kGroup, what, "gpushare, planned groups", "GB/s", planned);
  report.add(kGroup, what + ": planned groups of the driver's", "gpushare", "%", share);
  return summarise(plain).median * 1e6;
}

// The rate at which `execution_ms` of this model's layers really take that long: short fills are bound by launching, or
// fit a cache.
double settle_rate(const Driver& driver, const Settings& settings, const std::string& model,
                   double execution_ms, double rate) {
  const PlainStream stream(driver);
  const PlainBlock block(driver, settings.fill_bytes);
  for (int round = 0; round < 4; ++round) {
    const Workload work(model, settings.load_divisor, execution_ms, rate);
    std::vector<double> took;
    for (int i = 0; i < 4; ++i) {
      const auto start = Clock::now();
      work.execute(driver, stream.get(), block.get(), settings.fill_bytes, 0, work.bytes.size());
      stream.synchronize();
      if (i > 0) took.push_back(ms_since(start));
    }
    rate *= std::clamp(execution_ms / summarise(std::move(took)).median, 0.2, 5.0);
  }
  return rate;
}

void measure_model(const Driver& driver, const Settings& settings, Report& report, const std::string& model,
                   double ratio, double link_rate, double rate_of_fills) {
  const Workload sized(model, settings.load_divisor, 1, rate_of_fills);
  const double load_ms = static_cast<double>(sized.total_bytes) / link_rate;
  const double execution_ms = ratio * load_ms;
  const double rate = settle_rate(driver, settings, model, execution_ms, rate_of_fills);
  const Workload work(model, settings.load_divisor, execution_ms, rate);
  char what[160];
  std::snprintf(what, sizeof(what), "first output, %s (%llu MB), execution %.1f x transmission",
                model.c_str(), static_cast<unsigned long long>(work.total_bytes / 1000000), ratio);
  std::vector<double> ready, planned, over, one_shot, kept;
  {
    Switching switching(driver, work, settings.fill_bytes);
    for (const bool plan : {true, false}) {
      switching.start(plan ? std::vector<uint32_t>{}
                           : std::vector<uint32_t>{static_cast<uint32_t>(work.bytes.size())});
      for (int i = -2; i < settings.repeats; ++i) {
        const double switched = switching.first_output(i & 1, true);
        const double again = switching.first_output(i & 1, false);
        if (i < 0) continue;
        (plan ? planned : one_shot).push_back(switched);
        if (!plan) continue;
        ready.push_back(again);
        over.push_back(switched - again);
      }
      switching.switcher.close();
    }
    switching.start({}, work.total_bytes / 3);
    for (int i = -2; i < settings.repeats; ++i) {
      const double switched = switching.first_output((i + 1) & 1, true);  // the first member is active
      if (i >= 0) kept.push_back(switched);
    }
    switching.switcher.close();
  }
  std::vector<double> plain;
  {
    // Without gpushare: all of it in one copy, then the same execution, on memory that is there from the start.
    const PinnedBlock host(driver, work.total_bytes);
    const PlainBlock weights(driver, work.total_bytes), block(driver, settings.fill_bytes);
    const PlainStream stream(driver);
    for (int i = 0; i <= settings.repeats; ++i) {
      const auto start = Clock::now();
      must(driver.cuMemcpyHtoDAsync(weights.get(), host.get(), work.total_bytes, stream.get()), "copy");
      work.execute(driver, stream.get(), block.get(), settings.fill_bytes, 0, work.bytes.size());
      stream.synchronize();
      if (i > 0) plain.push_back(ms_since(start));
    }
  }
  report.add(kGroup, what, "gpushare, there already", "ms", ready);
  report.add(kGroup, what, "gpushare, switched to", "ms", planned);
  report.add(kGroup, what, "gpushare, over ready", "ms", over);
  report.add(kGroup, what, "gpushare, first layers kept", "ms", kept);
  report.add(kGroup, what, "gpushare, one shot", "ms", one_shot);
  report.add(kGroup, what, "driver, one copy", "ms", plain);
  std::vector<double> restarted;
  char job[160];
  std::snprintf(job, sizeof(job), "%s %llu %.9g %.9g %llu", model.c_str(),
                static_cast<unsigned long long>(settings.load_divisor), execution_ms, rate,
                static_cast<unsigned long long>(settings.fill_bytes));
  for (int i = 0; i < std::clamp(settings.repeats / 4, 2, 5); ++i)
    restarted.push_back(run_from_nothing(settings.program, job));
  report.add(kGroup, what, "stop and start (a process)", "ms", restarted);
}

}  // namespace

void measure_loading(const Driver& driver, const Settings& settings, Report& report) {
  const double link_rate = measure_link(driver, settings, report);
  const double rate = fill_rate(driver, settings.fill_bytes);
  for (const char* model : {"resnet152", "inception_v3", "bert_base"})
    for (const double ratio : {0.5, 1.0})
      measure_model(driver, settings, report, model, ratio, link_rate, rate);
}

int run_as_start(const std::string& text) {
  char model[64] = "";
  unsigned long long divisor = 0, block_bytes = 0;
  double execution_ms = 0, rate = 0;
  if (std::sscanf(text.c_str(), "%63s %llu %lf %lf %llu", model, &divisor, &execution_ms, &rate,
                  &block_bytes) != 5 ||
      divisor == 0 || block_bytes == 0)
    return 2;
  try {
    const Driver driver;
    const Workload work(model, divisor, execution_ms, rate);
    Runtime runtime =
        Runtime::open({.device = "cuda:0", .capacity_bytes = 2 * work.total_bytes + block_bytes + 64 * kMiB});
    Loader loader(runtime);
    const Image image = make_image(loader, work);
    Session session = runtime.open_session({.name = "started",
                                            .persistent_bytes = work.total_bytes + 2 * kMiB,
                                            .ephemeral_bytes = block_bytes,
                                            .allow_queueing = false});
    const auto layers = static_cast<uint32_t>(work.bytes.size());
    gpushare_load_params load = GPUSHARE_LOAD_PARAMS_INIT;
    load.group_count = 1;
    load.group_ends = &layers;
    Model loaded = loader.load(session, image, load);
    Iteration iteration = session.begin_iteration();
    const Stream stream = iteration.stream();
    const Address block = iteration.alloc_bytes(block_bytes);
    loaded.make_usable(0, layers, stream);
    work.execute(driver, static_cast<CUstream>(stream.native()), block, block_bytes, 0, layers);
    stream.synchronize();
    if (write(1, "d", 1) != 1) return 1;
    iteration.end();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_suite --as-start: %s\n", error.what());
    return 1;
  }
}

}  // namespace gpushare::gpu_suite
