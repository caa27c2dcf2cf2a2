// loading.hpp: runtimes with a loader, and images whose bytes tell which layer they are of.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "loader/loader.hpp"
#include "loader/model.hpp"
#include "support/executor_fixture.hpp"

namespace gpushare::test {

struct Loading {
  explicit Loading(const Setup& setup, uint64_t capacity_bytes = 64 * kMiB,
                   loader::LoaderOptions options = {}) {
    executor::RuntimeOptions open = options_of(setup);
    open.capacity_bytes = capacity_bytes;
    runtime = open_runtime(std::move(open));
    options.chunk_bytes = 64 << 10;
    auto made = loader::Loader::open(runtime, options);
    INFO(made.status().to_string());
    REQUIRE(made.ok());
    loader = *made;
  }

  // `count` layers of `bytes` each (a few more with the layer's number); byte b of layer l is value(seed, l, b).
  std::shared_ptr<const loader::Image> image(const std::string& name, uint32_t count, uint64_t bytes,
                                             int seed) {
    std::vector<loader::Layer> layers;
    std::vector<std::vector<char>> data;
    std::vector<const void*> sources;
    for (uint32_t l = 0; l < count; ++l) {
      data.emplace_back(bytes + l * 3);
      for (size_t b = 0; b < data.back().size(); ++b) data.back()[b] = value(seed, l, b);
      layers.push_back({name + "." + std::to_string(l), 0, data.back().size()});
    }
    for (const auto& layer : data) sources.push_back(layer.data());
    auto made = loader->create_image(name, std::move(layers), sources);
    INFO(made.status().to_string());
    REQUIRE(made.ok());
    return *made;
  }
  static char value(int seed, uint32_t layer, size_t byte) {
    return static_cast<char>(seed * 31 + static_cast<int>(layer) * 7 + static_cast<int>(byte % 251));
  }

  // What work on `stream` finds of a layer; empty if it is as it should be. Waits.
  static std::string wrong(loader::Model& model, uint32_t layer, int seed, executor::Stream& stream) {
    std::vector<char> back(model.image()->layers()[layer].bytes);
    const base::Status copied = stream.copy(reinterpret_cast<uintptr_t>(back.data()), model.address(layer),
                                            back.size(), GPUSHARE_COPY_DEVICE_TO_HOST);
    if (!copied.ok()) return copied.to_string();
    const base::Status done = stream.synchronize();
    if (!done.ok()) return done.to_string();
    for (size_t b = 0; b < back.size(); ++b)
      if (back[b] != value(seed, layer, b)) return base::format("layer %u differs at byte %zu", layer, b);
    return {};
  }

  std::shared_ptr<executor::Runtime> runtime;
  std::shared_ptr<loader::Loader> loader;
};

inline base::Status inject(device::Device& device, uint32_t kind, uint64_t at_call) {
  return device.set_fault({sizeof(gpushare_backend_fault), kind, at_call, 1.0});
}

}  // namespace gpushare::test
