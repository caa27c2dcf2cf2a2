// SPDX-License-Identifier: Apache-2.0
#include "model_shapes.hpp"

namespace gpushare::gpu_suite {
namespace {

struct Builder {
  std::vector<LayerShape> layers;

  // A convolution without bias over `positions` outputs, and its batch normalisation (scale and shift; the running mean and
  // variance are no parameters and are left out).
  void conv(const std::string& name, uint64_t in, uint64_t out, uint64_t window, uint64_t positions) {
    const uint64_t weights = in * out * window;
    layers.push_back({name + ".conv", weights, weights * positions});
    layers.push_back({name + ".norm", 2 * out, 0});
  }
  void linear(const std::string& name, uint64_t in, uint64_t out, uint64_t positions) {
    layers.push_back({name, in * out + out, in * out * positions});
  }
  void table(const std::string& name, uint64_t weights) { layers.push_back({name, weights, 0}); }
};

// He et al., "Deep Residual Learning for Image Recognition", table 1: 224 x 224 inputs, stages of 3, 8, 36 and 3 bottlenecks.
std::vector<LayerShape> resnet152() {
  Builder net;
  net.conv("stem", 3, 64, 49, 112 * 112);
  uint64_t in = 64;
  const int blocks[] = {3, 8, 36, 3};
  uint64_t side = 56;
  for (int stage = 0; stage < 4; ++stage, side /= 2) {
    const uint64_t width = uint64_t{64} << stage;
    for (int block = 0; block < blocks[stage]; ++block) {
      const std::string name = "stage" + std::to_string(stage + 1) + "." + std::to_string(block);
      // The first block of a later stage halves the picture in its 3 x 3 convolution.
      const uint64_t before = block == 0 && stage > 0 ? 4 * side * side : side * side;
      net.conv(name + ".1", in, width, 1, before);
      net.conv(name + ".2", width, width, 9, side * side);
      net.conv(name + ".3", width, 4 * width, 1, side * side);
      if (block == 0) net.conv(name + ".shortcut", in, 4 * width, 1, side * side);
      in = 4 * width;
    }
  }
  net.linear("fc", 2048, 1000, 1);
  return net.layers;
}

// Szegedy et al., "Rethinking the Inception Architecture for Computer Vision": 299 x 299 inputs, without the auxiliary
// classifier.
std::vector<LayerShape> inception_v3() {
  Builder net;
  net.conv("1a", 3, 32, 9, 149 * 149);
  net.conv("2a", 32, 32, 9, 147 * 147);
  net.conv("2b", 32, 64, 9, 147 * 147);
  net.conv("3b", 64, 80, 1, 73 * 73);
  net.conv("4a", 80, 192, 9, 71 * 71);
  constexpr uint64_t k35 = 35 * 35, k17 = 17 * 17, k8 = 8 * 8;
  uint64_t in = 192;
  for (int i = 0; i < 3; ++i) {
    const std::string name = std::string("5") + "bcd"[i];
    const uint64_t pool = i == 0 ? 32 : 64;
    net.conv(name + ".1x1", in, 64, 1, k35);
    net.conv(name + ".5x5.1", in, 48, 1, k35);
    net.conv(name + ".5x5.2", 48, 64, 25, k35);
    net.conv(name + ".double.1", in, 64, 1, k35);
    net.conv(name + ".double.2", 64, 96, 9, k35);
    net.conv(name + ".double.3", 96, 96, 9, k35);
    net.conv(name + ".pool", in, pool, 1, k35);
    in = 224 + pool;
  }
  net.conv("6a.3x3", in, 384, 9, k17);
  net.conv("6a.double.1", in, 64, 1, k35);
  net.conv("6a.double.2", 64, 96, 9, k35);
  net.conv("6a.double.3", 96, 96, 9, k17);
  const uint64_t narrow[] = {128, 160, 160, 192};
  for (int i = 0; i < 4; ++i) {
    const std::string name = std::string("6") + "bcde"[i];
    const uint64_t width = narrow[i];
    net.conv(name + ".1x1", 768, 192, 1, k17);
    net.conv(name + ".7x7.1", 768, width, 1, k17);
    net.conv(name + ".7x7.2", width, width, 7, k17);
    net.conv(name + ".7x7.3", width, 192, 7, k17);
    net.conv(name + ".double.1", 768, width, 1, k17);
    for (int k = 2; k < 5; ++k) net.conv(name + ".double." + std::to_string(k), width, width, 7, k17);
    net.conv(name + ".double.5", width, 192, 7, k17);
    net.conv(name + ".pool", 768, 192, 1, k17);
  }
  net.conv("7a.3x3.1", 768, 192, 1, k17);
  net.conv("7a.3x3.2", 192, 320, 9, k8);
  net.conv("7a.7x7.1", 768, 192, 1, k17);
  net.conv("7a.7x7.2", 192, 192, 7, k17);
  net.conv("7a.7x7.3", 192, 192, 7, k17);
  net.conv("7a.7x7.4", 192, 192, 9, k8);
  in = 1280;
  for (const char* name : {"7b", "7c"}) {
    const std::string block = name;
    net.conv(block + ".1x1", in, 320, 1, k8);
    net.conv(block + ".3x3.1", in, 384, 1, k8);
    net.conv(block + ".3x3.2a", 384, 384, 3, k8);
    net.conv(block + ".3x3.2b", 384, 384, 3, k8);
    net.conv(block + ".double.1", in, 448, 1, k8);
    net.conv(block + ".double.2", 448, 384, 9, k8);
    net.conv(block + ".double.3a", 384, 384, 3, k8);
    net.conv(block + ".double.3b", 384, 384, 3, k8);
    net.conv(block + ".pool", in, 192, 1, k8);
    in = 2048;
  }
  net.linear("fc", 2048, 1000, 1);
  return net.layers;
}

// Devlin et al., "BERT": 12 layers of width 768, vocabulary of 30,522; sequences of 128. Attention's own products have
// no weights and are a few percent of the work: left out.
std::vector<LayerShape> bert_base() {
  constexpr uint64_t kWidth = 768, kSequence = 128;
  Builder net;
  net.table("embedding.word", 30522 * kWidth);
  net.table("embedding.position", 512 * kWidth);
  net.table("embedding.type", 2 * kWidth);
  net.table("embedding.norm", 2 * kWidth);
  for (int layer = 0; layer < 12; ++layer) {
    const std::string name = "layer" + std::to_string(layer);
    for (const char* part : {".query", ".key", ".value", ".output"})
      net.linear(name + part, kWidth, kWidth, kSequence);
    net.table(name + ".norm1", 2 * kWidth);
    net.linear(name + ".up", kWidth, 4 * kWidth, kSequence);
    net.linear(name + ".down", 4 * kWidth, kWidth, kSequence);
    net.table(name + ".norm2", 2 * kWidth);
  }
  net.linear("pooler", kWidth, kWidth, 1);
  return net.layers;
}

}  // namespace

std::vector<LayerShape> model_shape(const std::string& name) {
  if (name == "resnet152") return resnet152();
  if (name == "inception_v3") return inception_v3();
  if (name == "bert_base") return bert_base();
  return {};
}

uint64_t published_weights(const std::string& name) {
  if (name == "resnet152") return 60'192'808;
  if (name == "inception_v3") return 23'834'568;
  if (name == "bert_base") return 109'482'240;
  return 0;
}

}  // namespace gpushare::gpu_suite
