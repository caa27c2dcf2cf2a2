// layers.hpp: layers with forward and backward over the operations of math.hpp. A layer knows where in its
// network's flat parameters its own begin, and between forward and backward where its activations lie.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "math.hpp"

namespace training {

// One pass over a network. `values`, `gradients` and `state` are the network's.
template <class T>
struct Pass {
  Math<T>& math;
  const Scratch& scratch;
  T* values;
  T* gradients;
  T* state;  // running statistics
  int batch;
  bool training;
  T* make(size_t count) const { return static_cast<T*>(scratch(count * sizeof(T))); }
};

// Gives each layer its place; its end is what the network needs.
struct Sizes {
  size_t values = 0;
  size_t state = 0;
};

using Random = std::mt19937_64;

template <class T>
class Layer {
 public:
  virtual ~Layer() = default;
  // First values of its parameters and state, into the network's.
  virtual void initialise(Random& random, double* values, double* state) const = 0;
  virtual const T* forward(const Pass<T>& pass, const T* x) = 0;
  // Adds to the gradients of its parameters; returns the gradient of its input, which may be in `dy`'s memory.
  virtual T* backward(const Pass<T>& pass, T* dy) = 0;
};

template <class T>
using Layers = std::vector<std::unique_ptr<Layer<T>>>;

// y = x w + b for every row; `rows` a sample.
template <class T>
class Linear final : public Layer<T> {
 public:
  Linear(Sizes& sizes, int rows, int in, int out, bool relu);
  void initialise(Random& random, double* values, double* state) const override;
  const T* forward(const Pass<T>& pass, const T* x) override;
  T* backward(const Pass<T>& pass, T* dy) override;

 private:
  const int rows_, in_, out_;
  const bool relu_;
  const size_t at_;  // weights, then bias
  const T* x_ = nullptr;
  const T* y_ = nullptr;
};

template <class T>
class Conv final : public Layer<T> {
 public:
  // shape.batch is ignored.
  Conv(Sizes& sizes, const Convolution& shape);
  void initialise(Random& random, double* values, double* state) const override;
  const T* forward(const Pass<T>& pass, const T* x) override;
  T* backward(const Pass<T>& pass, T* dy) override;

 private:
  Convolution shape_of(const Pass<T>& pass) const;
  const Convolution shape_;
  const size_t at_;
  const T* x_ = nullptr;
};

// Batch normalisation over channels, then max(y, 0) if `relu`.
template <class T>
class BatchNorm final : public Layer<T> {
 public:
  BatchNorm(Sizes& sizes, int channels, int pixels, bool relu);
  void initialise(Random& random, double* values, double* state) const override;
  const T* forward(const Pass<T>& pass, const T* x) override;
  T* backward(const Pass<T>& pass, T* dy) override;

 private:
  const int channels_, pixels_;
  const bool relu_;
  const size_t at_;        // gamma, then beta
  const size_t state_at_;  // running mean, then variance
  const T* x_ = nullptr;
  const T* y_ = nullptr;
  T* mean_ = nullptr;  // then the scale
};

template <class T>
class LayerNorm final : public Layer<T> {
 public:
  LayerNorm(Sizes& sizes, int rows, int columns);
  void initialise(Random& random, double* values, double* state) const override;
  const T* forward(const Pass<T>& pass, const T* x) override;
  T* backward(const Pass<T>& pass, T* dy) override;

 private:
  const int rows_, columns_;
  const size_t at_;  // gamma, then beta
  const T* x_ = nullptr;
  T* mean_ = nullptr;  // then the scale
};

// Self-attention with several heads over `length` tokens of `width`.
template <class T>
class Attention final : public Layer<T> {
 public:
  Attention(Sizes& sizes, int length, int width, int heads);
  void initialise(Random& random, double* values, double* state) const override;
  const T* forward(const Pass<T>& pass, const T* x) override;
  T* backward(const Pass<T>& pass, T* dy) override;

 private:
  const int length_, width_, heads_;
  Linear<T> project_, combine_;  // to queries, keys and values; from the heads
  const T* qkv_ = nullptr;
  T* weights_ = nullptr;  // heads x batch x length x length
};

// x + inner(x), then max(y, 0) if `relu`.
template <class T>
class Residual final : public Layer<T> {
 public:
  Residual(Layers<T> inner, size_t count, bool relu) : inner_(std::move(inner)), count_(count), relu_(relu) {}
  void initialise(Random& random, double* values, double* state) const override;
  const T* forward(const Pass<T>& pass, const T* x) override;
  T* backward(const Pass<T>& pass, T* dy) override;

 private:
  Layers<T> inner_;
  const size_t count_;  // elements a sample
  const bool relu_;
  const T* y_ = nullptr;
};

// Means over `count` of each sample's outer x count x inner.
template <class T>
class MeanPool final : public Layer<T> {
 public:
  MeanPool(int outer, int count, int inner) : outer_(outer), count_(count), inner_(inner) {}
  void initialise(Random&, double*, double*) const override {}
  const T* forward(const Pass<T>& pass, const T* x) override;
  T* backward(const Pass<T>& pass, T* dy) override;

 private:
  const int outer_, count_, inner_;
};

}  // namespace training
