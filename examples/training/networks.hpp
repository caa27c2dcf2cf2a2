// networks.hpp: the three networks and data that they can learn.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "layers.hpp"

namespace training {

struct NetworkOptions {
  std::string name = "mlp";  // or "resnet", "transformer"
  int width = 1;             // multiplies the hidden sizes; 1 is for tests
};

template <class T>
struct Network {
  Layers<T> layers;
  Sizes sizes;
  int inputs = 0;  // a sample
  int classes = 0;

  void initialise(uint64_t seed, std::vector<double>* values, std::vector<double>* state) const;
  // Logits, batch x classes.
  const T* forward(const Pass<T>& pass, const T* x) const;
  void backward(const Pass<T>& pass, T* dlogits) const;
};

// Throws std::invalid_argument for an unknown name or a width below 1.
template <class T>
Network<T> make_network(const NetworkOptions& options);

// Noise around one pattern a class; for the transformer the pattern is one marked token among others. `inputs`
// has samples x network.inputs values.
struct Data {
  std::vector<double> inputs;
  std::vector<int32_t> labels;
};
Data make_data(const NetworkOptions& options, int samples, uint64_t seed);

}  // namespace training
