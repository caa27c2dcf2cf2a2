// model_shapes.hpp: the layers of published networks, by arithmetic from their architectures: how many weights each has
// and how many multiply-adds an input costs. No weights are needed to measure loading. The totals equal the parameter
// counts that are published with the networks; measure_loading refuses to run where they do not.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gpushare::gpu_suite {

struct LayerShape {
  std::string name;
  uint64_t weights = 0;  // float32 each
  uint64_t multiply_adds =
      0;  // of one input; 0 for look-ups and normalisation, which cost next to nothing beside the rest
};

// "resnet152", "inception_v3" or "bert_base"; empty for any other name.
std::vector<LayerShape> model_shape(const std::string& name);
// As published: torchvision's resnet152 and inception_v3 without the auxiliary classifier, bert-base-uncased with its pooler.
uint64_t published_weights(const std::string& name);

}  // namespace gpushare::gpu_suite
