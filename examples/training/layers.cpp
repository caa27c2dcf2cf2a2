// SPDX-License-Identifier: Apache-2.0
#include "layers.hpp"

#include <algorithm>
#include <cmath>

namespace training {
namespace {

size_t take(size_t& end, size_t count) {
  const size_t at = end;
  end += count;
  return at;
}

size_t product(int a, int b, int c = 1, int d = 1) {
  return static_cast<size_t>(a) * static_cast<size_t>(b) * static_cast<size_t>(c) * static_cast<size_t>(d);
}

void fill_normal(Random& random, double* values, size_t count, double deviation) {
  std::normal_distribution<double> normal(0, deviation);
  for (size_t i = 0; i < count; ++i) values[i] = normal(random);
}

}  // namespace

template <class T>
Linear<T>::Linear(Sizes& sizes, int rows, int in, int out, bool relu)
    : rows_(rows), in_(in), out_(out), relu_(relu), at_(take(sizes.values, product(in + 1, out))) {}

template <class T>
void Linear<T>::initialise(Random& random, double* values, double*) const {
  fill_normal(random, values + at_, product(in_, out_), std::sqrt((relu_ ? 2.0 : 1.0) / in_));
  std::fill_n(values + at_ + product(in_, out_), out_, 0.0);
}

template <class T>
const T* Linear<T>::forward(const Pass<T>& pass, const T* x) {
  const int rows = pass.batch * rows_;
  T* y = pass.make(product(rows, out_));
  const T* w = pass.values + at_;
  pass.math.linear(x, w, w + product(in_, out_), y, rows, in_, out_, relu_);
  x_ = x;
  y_ = y;
  return y;
}

template <class T>
T* Linear<T>::backward(const Pass<T>& pass, T* dy) {
  const int rows = pass.batch * rows_;
  if (relu_) pass.math.relu_backward(y_, dy, dy, product(rows, out_));
  T* dw = pass.gradients + at_;
  pass.math.gemm(
      {.transpose_a = true, .m = in_, .n = out_, .k = rows, .ld_a = in_, .ld_b = out_, .ld_c = out_}, 1, x_,
      dy, 1, dw);
  pass.math.add_column_sums(dy, dw + product(in_, out_), rows, out_);
  T* dx = pass.make(product(rows, in_));
  pass.math.gemm(
      {.transpose_b = true, .m = rows, .n = in_, .k = out_, .ld_a = out_, .ld_b = out_, .ld_c = in_}, 1, dy,
      pass.values + at_, 0, dx);
  return dx;
}

template <class T>
Conv<T>::Conv(Sizes& sizes, const Convolution& shape)
    : shape_(shape),
      at_(take(sizes.values, product(shape.out_channels, shape.in_channels, shape.kernel, shape.kernel))) {}

template <class T>
void Conv<T>::initialise(Random& random, double* values, double*) const {
  const size_t fan_in = product(shape_.in_channels, shape_.kernel, shape_.kernel);
  fill_normal(random, values + at_, fan_in * static_cast<size_t>(shape_.out_channels),
              std::sqrt(2.0 / static_cast<double>(fan_in)));
}

template <class T>
Convolution Conv<T>::shape_of(const Pass<T>& pass) const {
  Convolution shape = shape_;
  shape.batch = pass.batch;
  return shape;
}

template <class T>
const T* Conv<T>::forward(const Pass<T>& pass, const T* x) {
  const int out = shape_.out_size();
  T* y = pass.make(product(pass.batch, shape_.out_channels, out, out));
  pass.math.convolution(shape_of(pass), x, pass.values + at_, y, pass.scratch);
  x_ = x;
  return y;
}

template <class T>
T* Conv<T>::backward(const Pass<T>& pass, T* dy) {
  const Convolution shape = shape_of(pass);
  pass.math.convolution_backward_filter(shape, x_, dy, pass.gradients + at_, pass.scratch);
  T* dx = pass.make(product(pass.batch, shape.in_channels, shape.size, shape.size));
  pass.math.convolution_backward_data(shape, pass.values + at_, dy, dx, pass.scratch);
  return dx;
}

template <class T>
BatchNorm<T>::BatchNorm(Sizes& sizes, int channels, int pixels, bool relu)
    : channels_(channels),
      pixels_(pixels),
      relu_(relu),
      at_(take(sizes.values, product(2, channels))),
      state_at_(take(sizes.state, product(2, channels))) {}

template <class T>
void BatchNorm<T>::initialise(Random&, double* values, double* state) const {
  std::fill_n(values + at_, channels_, 1.0);
  std::fill_n(values + at_ + channels_, channels_, 0.0);
  std::fill_n(state + state_at_, channels_, 0.0);
  std::fill_n(state + state_at_ + channels_, channels_, 1.0);
}

template <class T>
const T* BatchNorm<T>::forward(const Pass<T>& pass, const T* x) {
  const size_t count = product(pass.batch, channels_, pixels_);
  T* y = pass.make(count);
  mean_ = pass.make(product(2, channels_));
  const T* gamma = pass.values + at_;
  T* running = pass.state + state_at_;
  pass.math.batch_norm(x, gamma, gamma + channels_, y, running, running + channels_, mean_, mean_ + channels_,
                       pass.batch, channels_, pixels_, pass.training);
  if (relu_) pass.math.relu(y, y, count);
  x_ = x;
  y_ = y;
  return y;
}

template <class T>
T* BatchNorm<T>::backward(const Pass<T>& pass, T* dy) {
  const size_t count = product(pass.batch, channels_, pixels_);
  if (relu_) pass.math.relu_backward(y_, dy, dy, count);
  T* dx = pass.make(count);
  T* dgamma = pass.gradients + at_;
  pass.math.batch_norm_backward(x_, pass.values + at_, mean_, mean_ + channels_, dy, dx, dgamma,
                                dgamma + channels_, pass.batch, channels_, pixels_);
  return dx;
}

template <class T>
LayerNorm<T>::LayerNorm(Sizes& sizes, int rows, int columns)
    : rows_(rows), columns_(columns), at_(take(sizes.values, product(2, columns))) {}

template <class T>
void LayerNorm<T>::initialise(Random&, double* values, double*) const {
  std::fill_n(values + at_, columns_, 1.0);
  std::fill_n(values + at_ + columns_, columns_, 0.0);
}

template <class T>
const T* LayerNorm<T>::forward(const Pass<T>& pass, const T* x) {
  const int rows = pass.batch * rows_;
  T* y = pass.make(product(rows, columns_));
  mean_ = pass.make(product(2, rows));
  const T* gamma = pass.values + at_;
  pass.math.layer_norm(x, gamma, gamma + columns_, y, mean_, mean_ + rows, rows, columns_);
  x_ = x;
  return y;
}

template <class T>
T* LayerNorm<T>::backward(const Pass<T>& pass, T* dy) {
  const int rows = pass.batch * rows_;
  T* dx = pass.make(product(rows, columns_));
  T* dgamma = pass.gradients + at_;
  pass.math.layer_norm_backward(x_, pass.values + at_, mean_, mean_ + rows, dy, dx, dgamma, dgamma + columns_,
                                rows, columns_);
  return dx;
}

template <class T>
Attention<T>::Attention(Sizes& sizes, int length, int width, int heads)
    : length_(length),
      width_(width),
      heads_(heads),
      project_(sizes, length, width, 3 * width, false),
      combine_(sizes, length, width, width, false) {}

template <class T>
void Attention<T>::initialise(Random& random, double* values, double* state) const {
  project_.initialise(random, values, state);
  combine_.initialise(random, values, state);
}

template <class T>
const T* Attention<T>::forward(const Pass<T>& pass, const T* x) {
  const int head = width_ / heads_;
  const int64_t row = 3 * width_;
  qkv_ = project_.forward(pass, x);
  weights_ = pass.make(product(heads_ * pass.batch, length_, length_));
  T* mixed = pass.make(product(pass.batch * length_, width_));
  const int64_t square = static_cast<int64_t>(length_) * length_;
  for (int h = 0; h < heads_; ++h) {
    const T* q = qkv_ + h * head;
    pass.math.gemm({.transpose_b = true,
                    .m = length_,
                    .n = length_,
                    .k = head,
                    .ld_a = 3 * width_,
                    .ld_b = 3 * width_,
                    .ld_c = length_,
                    .stride_a = length_ * row,
                    .stride_b = length_ * row,
                    .stride_c = square,
                    .count = pass.batch},
                   static_cast<T>(1 / std::sqrt(head)), q, q + width_, 0, weights_ + h * pass.batch * square);
  }
  pass.math.softmax(weights_, heads_ * pass.batch * length_, length_);
  for (int h = 0; h < heads_; ++h) {
    pass.math.gemm({.m = length_,
                    .n = head,
                    .k = length_,
                    .ld_a = length_,
                    .ld_b = 3 * width_,
                    .ld_c = width_,
                    .stride_a = square,
                    .stride_b = length_ * row,
                    .stride_c = static_cast<int64_t>(length_) * width_,
                    .count = pass.batch},
                   1, weights_ + h * pass.batch * square, qkv_ + 2 * width_ + h * head, 0, mixed + h * head);
  }
  return combine_.forward(pass, mixed);
}

template <class T>
T* Attention<T>::backward(const Pass<T>& pass, T* dy) {
  const int head = width_ / heads_;
  const int64_t row = 3 * width_;
  const int64_t square = static_cast<int64_t>(length_) * length_;
  const int64_t sample = static_cast<int64_t>(length_) * width_;
  const T* dmixed = combine_.backward(pass, dy);
  T* dqkv = pass.make(product(pass.batch * length_, 3, width_));
  T* dweights = pass.make(product(heads_ * pass.batch, length_, length_));
  for (int h = 0; h < heads_; ++h) {
    const int64_t at = h * pass.batch * square;
    // dweights = dmixed values^T; dvalues = weights^T dmixed.
    pass.math.gemm({.transpose_b = true,
                    .m = length_,
                    .n = length_,
                    .k = head,
                    .ld_a = width_,
                    .ld_b = 3 * width_,
                    .ld_c = length_,
                    .stride_a = sample,
                    .stride_b = length_ * row,
                    .stride_c = square,
                    .count = pass.batch},
                   1, dmixed + h * head, qkv_ + 2 * width_ + h * head, 0, dweights + at);
    pass.math.gemm({.transpose_a = true,
                    .m = length_,
                    .n = head,
                    .k = length_,
                    .ld_a = length_,
                    .ld_b = width_,
                    .ld_c = 3 * width_,
                    .stride_a = square,
                    .stride_b = sample,
                    .stride_c = length_ * row,
                    .count = pass.batch},
                   1, weights_ + at, dmixed + h * head, 0, dqkv + 2 * width_ + h * head);
  }
  pass.math.softmax_backward(weights_, dweights, dweights, heads_ * pass.batch * length_, length_);
  for (int h = 0; h < heads_; ++h) {
    for (const bool keys : {false, true}) {
      // dqueries = dscores keys; dkeys = dscores^T queries.
      pass.math.gemm({.transpose_a = keys,
                      .m = length_,
                      .n = head,
                      .k = length_,
                      .ld_a = length_,
                      .ld_b = 3 * width_,
                      .ld_c = 3 * width_,
                      .stride_a = square,
                      .stride_b = length_ * row,
                      .stride_c = length_ * row,
                      .count = pass.batch},
                     static_cast<T>(1 / std::sqrt(head)), dweights + h * pass.batch * square,
                     qkv_ + (keys ? 0 : width_) + h * head, 0, dqkv + (keys ? width_ : 0) + h * head);
    }
  }
  return project_.backward(pass, dqkv);
}

template <class T>
void Residual<T>::initialise(Random& random, double* values, double* state) const {
  for (const auto& layer : inner_) layer->initialise(random, values, state);
}

template <class T>
const T* Residual<T>::forward(const Pass<T>& pass, const T* x) {
  const size_t count = count_ * static_cast<size_t>(pass.batch);
  const T* inner = x;
  for (const auto& layer : inner_) inner = layer->forward(pass, inner);
  T* y = pass.make(count);
  pass.math.add(x, inner, y, count);
  if (relu_) pass.math.relu(y, y, count);
  y_ = y;
  return y;
}

template <class T>
T* Residual<T>::backward(const Pass<T>& pass, T* dy) {
  const size_t count = count_ * static_cast<size_t>(pass.batch);
  if (relu_) pass.math.relu_backward(y_, dy, dy, count);
  // The inner layers may write into what they are given.
  T* inner = pass.make(count);
  pass.math.copy(dy, inner, count);
  for (auto layer = inner_.rbegin(); layer != inner_.rend(); ++layer) inner = (*layer)->backward(pass, inner);
  pass.math.add(dy, inner, dy, count);
  return dy;
}

template <class T>
const T* MeanPool<T>::forward(const Pass<T>& pass, const T* x) {
  T* y = pass.make(product(pass.batch, outer_, inner_));
  pass.math.mean_pool(x, y, pass.batch * outer_, count_, inner_);
  return y;
}

template <class T>
T* MeanPool<T>::backward(const Pass<T>& pass, T* dy) {
  T* dx = pass.make(product(pass.batch, outer_, count_, inner_));
  pass.math.mean_pool_backward(dy, dx, pass.batch * outer_, count_, inner_);
  return dx;
}

#define TRAINING_LAYERS(T)     \
  template class Linear<T>;    \
  template class Conv<T>;      \
  template class BatchNorm<T>; \
  template class LayerNorm<T>; \
  template class Attention<T>; \
  template class Residual<T>;  \
  template class MeanPool<T>;
TRAINING_LAYERS(float)
TRAINING_LAYERS(double)

}  // namespace training
