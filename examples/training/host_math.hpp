// host_math.hpp: the operations in plain C++, one host function of the queue each. Double is the reference that
// the others are compared with.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "math.hpp"

namespace training {

template <class T>
class HostMath final : public Math<T> {
 public:
  void use(const Queue& queue) override { queue_ = &queue; }
  void gemm(const Gemm& shape, T alpha, const T* a, const T* b, T beta, T* c) override;
  void linear(const T* x, const T* w, const T* bias, T* y, int rows, int in, int out, bool relu) override;
  void add_column_sums(const T* x, T* sums, int rows, int columns) override;
  void relu(const T* x, T* y, size_t count) override;
  void relu_backward(const T* y, const T* dy, T* dx, size_t count) override;
  void add(const T* a, const T* b, T* y, size_t count) override;
  void copy(const T* x, T* y, size_t count) override;
  void softmax(T* x, int rows, int columns) override;
  void softmax_backward(const T* y, const T* dy, T* dx, int rows, int columns) override;
  void layer_norm(const T* x, const T* gamma, const T* beta, T* y, T* mean, T* scale, int rows,
                  int columns) override;
  void layer_norm_backward(const T* x, const T* gamma, const T* mean, const T* scale, const T* dy, T* dx,
                           T* dgamma, T* dbeta, int rows, int columns) override;
  void convolution(const Convolution& shape, const T* x, const T* w, T* y, const Scratch& scratch) override;
  void convolution_backward_data(const Convolution& shape, const T* w, const T* dy, T* dx,
                                 const Scratch& scratch) override;
  void convolution_backward_filter(const Convolution& shape, const T* x, const T* dy, T* dw,
                                   const Scratch& scratch) override;
  void batch_norm(const T* x, const T* gamma, const T* beta, T* y, T* running_mean, T* running_variance,
                  T* mean, T* scale, int batch, int channels, int pixels, bool training) override;
  void batch_norm_backward(const T* x, const T* gamma, const T* mean, const T* scale, const T* dy, T* dx,
                           T* dgamma, T* dbeta, int batch, int channels, int pixels) override;
  void mean_pool(const T* x, T* y, int outer, int count, int inner) override;
  void mean_pool_backward(const T* dy, T* dx, int outer, int count, int inner) override;
  void cross_entropy(const T* logits, const int32_t* labels, T* loss, T* dlogits, int rows,
                     int classes) override;
  void descend(T* values, T* momentum, T* gradients, size_t count, T rate, T mu) override;

 private:
  const Queue* queue_ = nullptr;
};

}  // namespace training
