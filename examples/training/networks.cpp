// SPDX-License-Identifier: Apache-2.0
#include "networks.hpp"

#include <stdexcept>

namespace training {
namespace {

constexpr int kClasses = 10;
constexpr int kFeatures = 32;             // of a sample of the MLP
constexpr int kImage = 16, kColours = 3;  // of the ResNet
constexpr int kTokens = 16,
              kTokenInputs = 16;  // of the transformer; the first input marks the token that counts

template <class T>
void add_conv(Network<T>& network, Layers<T>& to, int in, int out, int size, int stride, bool relu) {
  const Convolution shape{1, in, out, size, 3, stride, 1};
  to.push_back(std::make_unique<Conv<T>>(network.sizes, shape));
  to.push_back(std::make_unique<BatchNorm<T>>(network.sizes, out, shape.out_size() * shape.out_size(), relu));
}

template <class T>
void add_block(Network<T>& network, int channels, int size) {
  Layers<T> inner;
  add_conv(network, inner, channels, channels, size, 1, true);
  add_conv(network, inner, channels, channels, size, 1, false);
  network.layers.push_back(
      std::make_unique<Residual<T>>(std::move(inner), static_cast<size_t>(channels) * size * size, true));
}

template <class T, class... Arguments>
void add_linear(Network<T>& network, Arguments... arguments) {
  network.layers.push_back(std::make_unique<Linear<T>>(network.sizes, arguments...));
}

template <class T>
void build_mlp(Network<T>& network, int width) {
  const int hidden = 64 * width;
  network.inputs = kFeatures;
  add_linear(network, 1, kFeatures, hidden, true);
  add_linear(network, 1, hidden, hidden, true);
  add_linear(network, 1, hidden, kClasses, false);
}

template <class T>
void build_resnet(Network<T>& network, int width) {
  const int channels = 8 * width;
  network.inputs = kColours * kImage * kImage;
  add_conv(network, network.layers, kColours, channels, kImage, 1, true);
  add_block(network, channels, kImage);
  add_conv(network, network.layers, channels, 2 * channels, kImage, 2, true);
  add_block(network, 2 * channels, kImage / 2);
  network.layers.push_back(std::make_unique<MeanPool<T>>(2 * channels, kImage * kImage / 4, 1));
  add_linear(network, 1, 2 * channels, kClasses, false);
}

template <class T>
void build_transformer(Network<T>& network, int width) {
  const int model = 32 * width;
  const size_t sample = static_cast<size_t>(kTokens) * model;
  network.inputs = kTokens * kTokenInputs;
  add_linear(network, kTokens, kTokenInputs, model, false);
  Layers<T> attend;
  attend.push_back(std::make_unique<LayerNorm<T>>(network.sizes, kTokens, model));
  attend.push_back(std::make_unique<Attention<T>>(network.sizes, kTokens, model, 2 * width));
  network.layers.push_back(std::make_unique<Residual<T>>(std::move(attend), sample, false));
  Layers<T> feed;
  feed.push_back(std::make_unique<LayerNorm<T>>(network.sizes, kTokens, model));
  feed.push_back(std::make_unique<Linear<T>>(network.sizes, kTokens, model, 4 * model, true));
  feed.push_back(std::make_unique<Linear<T>>(network.sizes, kTokens, 4 * model, model, false));
  network.layers.push_back(std::make_unique<Residual<T>>(std::move(feed), sample, false));
  network.layers.push_back(std::make_unique<LayerNorm<T>>(network.sizes, kTokens, model));
  network.layers.push_back(std::make_unique<MeanPool<T>>(1, kTokens, model));
  add_linear(network, 1, model, kClasses, false);
}

}  // namespace

template <class T>
void Network<T>::initialise(uint64_t seed, std::vector<double>* values, std::vector<double>* state) const {
  Random random(seed);
  values->assign(sizes.values, 0);
  state->assign(sizes.state, 0);
  for (const auto& layer : layers) layer->initialise(random, values->data(), state->data());
}

template <class T>
const T* Network<T>::forward(const Pass<T>& pass, const T* x) const {
  for (const auto& layer : layers) x = layer->forward(pass, x);
  return x;
}

template <class T>
void Network<T>::backward(const Pass<T>& pass, T* dlogits) const {
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer)
    dlogits = (*layer)->backward(pass, dlogits);
}

template <class T>
Network<T> make_network(const NetworkOptions& options) {
  if (options.width < 1) throw std::invalid_argument("a network's width is at least 1");
  Network<T> network;
  network.classes = kClasses;
  if (options.name == "mlp") {
    build_mlp(network, options.width);
  } else if (options.name == "resnet") {
    build_resnet(network, options.width);
  } else if (options.name == "transformer") {
    build_transformer(network, options.width);
  } else {
    throw std::invalid_argument("no network '" + options.name + "': mlp, resnet or transformer");
  }
  return network;
}

Data make_data(const NetworkOptions& options, int samples, uint64_t seed) {
  const int inputs = make_network<float>(options).inputs;
  const bool marked = options.name == "transformer";
  const int pattern = marked ? kTokenInputs - 1 : inputs;
  // The patterns are the same for every seed: what was learned on one set holds for another.
  Random fixed(7);
  Random random(seed);
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> any_class(0, kClasses - 1);
  std::vector<double> patterns(static_cast<size_t>(kClasses) * pattern);
  for (double& value : patterns) value = normal(fixed);
  const auto add_pattern = [&](std::vector<double>& to, int label) {
    for (int i = 0; i < pattern; ++i)
      to.push_back(patterns[static_cast<size_t>(label) * pattern + i] + 0.5 * normal(random));
  };
  Data data;
  for (int s = 0; s < samples; ++s) {
    const int label = any_class(random);
    data.labels.push_back(label);
    if (!marked) {
      add_pattern(data.inputs, label);
      continue;
    }
    const int place = static_cast<int>(random() % kTokens);
    for (int t = 0; t < kTokens; ++t) {
      data.inputs.push_back(t == place ? 4 : 0);
      add_pattern(data.inputs, t == place ? label : any_class(random));
    }
  }
  return data;
}

template struct Network<float>;
template struct Network<double>;
template Network<float> make_network(const NetworkOptions& options);
template Network<double> make_network(const NetworkOptions& options);

}  // namespace training
