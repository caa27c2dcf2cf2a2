// known_models.hpp: published facts about the models that the public traces name, for what those traces leave
// out.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace gpushare::sim {

// A model of Salus's table A.1. Only parameters persist there: TensorFlow's plain SGD keeps no second copy,
// and gradients live inside the iteration.
struct SalusModel {
  std::string_view name;  // "vgg16"
  double parameters_millions;
};
const SalusModel* find_salus_model(std::string_view name);  // null if unknown

// Salus measured 110.9 MB (googlenet_25) as its least persistent memory, 822.2 MB as its most:
// framework-internal memory sets a floor below which a small model's parameters do not matter.
inline constexpr double kSalusLeastPersistentMb = 110.9;
inline constexpr double kSalusMostPersistentMb = 822.2;

// A configuration of Gavel's traces.
struct GavelConfig {
  std::string_view name;  // "ResNet-18 (batch size 32)"
  double steps_per_s;     // alone on a P100
  double parameters_millions;
  double ephemeral_mb;  // estimate: see known_models.cpp
};
const GavelConfig* find_gavel_config(std::string_view name);  // null if unknown

// PyTorch keeps weights, gradients and two moments of Adam, fp32 each.
inline constexpr double kGavelBytesPerParameter = 16;

}  // namespace gpushare::sim
