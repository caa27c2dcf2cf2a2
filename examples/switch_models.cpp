// Two models take turns on a device that has room for one. Both wait in host memory; whoever is asked for next
// is sent group by group, and its first layers compute while later ones are on their way. The link is capped, so
// that transmission takes time on the host device as it would on a bus.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <gpushare/gpushare.hpp>
#include <string>
#include <vector>

namespace gs = gpushare;

namespace {

constexpr uint32_t kLayers = 8;
constexpr size_t kLayerFloats = 1 << 18;  // 1 MiB a layer

gs::Image make_image(gs::Loader& loader, const std::string& name, float value) {
  const std::vector<float> weights(kLayerFloats, value);
  const std::vector<gpushare_layer_source> layers(
      kLayers, gpushare_layer_source{nullptr, weights.data(), weights.size() * sizeof(float)});
  return loader.create_image(name, layers);
}

// One inference: a sum over all weights, layer by layer, each as soon as it is there.
float infer(gs::Switcher& switcher, uint64_t member) {
  float sum = 0;
  gs::Switcher::Turn turn = switcher.begin(member);
  const gs::Stream stream = turn.iteration.stream();
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    turn.model.make_usable(layer, layer + 1, stream);
    const auto* weights = turn.model.data<float>(layer);
    stream.launch_host([weights, &sum] {
      for (size_t i = 0; i < kLayerFloats; i += 4096) sum += weights[i];
    });
  }
  turn.model.mark_end(stream);  // the plan learns how long the layers execute
  stream.synchronize();
  return sum;
}

}  // namespace

int main() {
  gs::RuntimeOptions options;
  options.device = "host?copy_gbps=2";
  options.capacity_bytes = 14 << 20;
  gs::Runtime runtime = gs::Runtime::open(options);
  gs::Loader loader(runtime);
  loader.calibrate();
  gs::Switcher switcher(loader);
  gs::SessionOptions need;  // beside the image
  need.ephemeral_bytes = 1 << 20;
  const uint64_t members[2] = {switcher.add(make_image(loader, "one", 1.0F), need),
                               switcher.add(make_image(loader, "two", 2.0F), need)};
  bool right = true;
  for (int turn = 0; turn < 8; ++turn) {
    const auto start = std::chrono::steady_clock::now();
    const int which = turn / 2 % 2;  // each twice in a row: the second time it is there already
    const float sum = infer(switcher, members[which]);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    std::printf("model %d: %.0f after %.2f ms\n", which + 1, sum, took.count());
    right = right && sum == static_cast<float>(kLayers * kLayerFloats / 4096) * static_cast<float>(which + 1);
  }
  std::printf("%llu switches, %llu bytes of images in host memory\n",
              static_cast<unsigned long long>(switcher.info().switches),
              static_cast<unsigned long long>(loader.info().images_bytes));
  return right ? 0 : 1;
}
