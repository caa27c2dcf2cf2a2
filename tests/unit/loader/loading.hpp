// loading.hpp: runtimes with a loader, and images whose bytes tell which layer they are of.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
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
                   loader::LoaderOptions options = {}, uint32_t max_lanes = 0) {
    executor::RuntimeOptions open = options_of(setup);
    open.max_lanes = max_lanes;
    open.capacity_bytes = capacity_bytes;
    runtime = open_runtime(std::move(open));
    options.chunk_bytes = 64 << 10;
    auto made = loader::Loader::open(runtime, options);
    INFO(made.status().to_string());
    REQUIRE(made.ok());
    loader = *made;
  }

  // `count` layers of `bytes` each (a few more with the layer's number), of content(seed, layer, ...).
  std::shared_ptr<const loader::Image> image(const std::string& name, uint32_t count, uint64_t bytes,
                                             int seed) {
    std::vector<uint64_t> sizes;
    for (uint32_t l = 0; l < count; ++l) sizes.push_back(bytes + l * 3);
    return image(name, sizes, seed);
  }
  std::shared_ptr<const loader::Image> image(const std::string& name, const std::vector<uint64_t>& sizes,
                                             int seed) {
    std::vector<loader::Layer> layers;
    std::vector<std::vector<char>> data;
    std::vector<const void*> sources;
    for (uint32_t l = 0; l < sizes.size(); ++l) {
      data.push_back(content(seed, l, sizes[l]));
      layers.push_back({name + "." + std::to_string(l), 0, sizes[l]});
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
  // A layer's bytes, value(seed, layer, b). By copies: a loop over bytes is most of a test's time under ThreadSanitizer.
  static std::vector<char> content(int seed, uint32_t layer, size_t bytes) {
    constexpr size_t kPeriod = 251;
    std::vector<char> out(bytes);
    size_t done = std::min(bytes, kPeriod);
    for (size_t b = 0; b < done; ++b) out[b] = value(seed, layer, b);
    for (size_t more; done < bytes; done += more) {
      more = std::min(done, bytes - done);
      std::memcpy(out.data() + done, out.data(), more);
    }
    return out;
  }

  // The first difference between `found` and the layer's content; empty if there is none.
  static std::string difference(const std::vector<char>& found, int seed, uint32_t layer) {
    const std::vector<char> expected = content(seed, layer, found.size());
    if (found == expected) return {};
    const auto at = std::mismatch(found.begin(), found.end(), expected.begin()).first - found.begin();
    return base::format("layer %u differs at byte %td", layer, at);
  }

  // The difference that work on `stream` finds in a layer; empty if the layer is right. Waits.
  static std::string wrong(loader::Model& model, uint32_t layer, int seed, executor::Stream& stream) {
    std::vector<char> back(model.image()->layers()[layer].bytes);
    const base::Status copied = stream.copy(reinterpret_cast<uintptr_t>(back.data()), model.address(layer),
                                            back.size(), GPUSHARE_COPY_DEVICE_TO_HOST);
    if (!copied.ok()) return copied.to_string();
    const base::Status done = stream.synchronize();
    return done.ok() ? difference(back, seed, layer) : done.to_string();
  }

  std::shared_ptr<executor::Runtime> runtime;
  std::shared_ptr<loader::Loader> loader;
};

inline base::Status inject(device::Device& device, uint32_t kind, uint64_t at_call) {
  return device.set_fault({sizeof(gpushare_backend_fault), kind, at_call, 1.0});
}

}  // namespace gpushare::test
