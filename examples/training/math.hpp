// examples/training: three small networks trained and served through gpushare, as sessions of one process.
//   math.hpp       the operations that the networks are made of, and the queue that they go to
//   host_math.*    them in plain C++, float and double: the oracle, and what runs where there is no GPU
//   cuda_math.cpp, kernels.cu   them on cuBLAS, cuBLASLt and cuDNN, in a library that is opened at run time
//   layers.*       layers with forward and backward;  networks.*  the networks and their data
//   trainer.*      a network with its memory: one training step, one batch of inference
//   job.*          a trainer as a gpushare session;  training.cpp  the program
//
// Every operation is enqueued and returns at once (on the immediate queue it has run). Tensors are dense, rows
// outermost, images channels first. Sizes are counts of elements.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace training {

// Where the work of a step goes, in order.
class Queue {
 public:
  virtual ~Queue() = default;
  // The CUstream; null where there is none.
  virtual void* native() const = 0;
  virtual void run(std::function<void()> function) const = 0;
};

// Runs everything at once, on the calling thread.
class ImmediateQueue final : public Queue {
 public:
  void* native() const override { return nullptr; }
  void run(std::function<void()> function) const override { function(); }
};

// Memory that is needed until the step has ended: gpushare's ephemeral blocks.
using Scratch = std::function<void*(size_t bytes)>;

// A square convolution without bias.
struct Convolution {
  int batch, in_channels, out_channels, size, kernel, stride, padding;
  int out_size() const { return (size + 2 * padding - kernel) / stride + 1; }
  auto operator<=>(const Convolution&) const = default;
};

// c = alpha op(a) op(b) + beta c, `count` times, each a `stride_*` further; op(a) is m x k, op(b) k x n. ld_* is
// the distance of two rows as they are stored.
struct Gemm {
  bool transpose_a = false, transpose_b = false;
  int m = 0, n = 0, k = 0;
  int ld_a = 0, ld_b = 0, ld_c = 0;
  int64_t stride_a = 0, stride_b = 0, stride_c = 0;
  int count = 1;
};

template <class T>
class Math {
 public:
  virtual ~Math() = default;
  // Memory that the library behind it wants to keep, given once by set_workspace.
  virtual size_t workspace_bytes() const { return 0; }
  virtual void set_workspace(void*) {}
  // Work enqueued from now on goes to `queue`.
  virtual void use(const Queue& queue) = 0;

  virtual void gemm(const Gemm& shape, T alpha, const T* a, const T* b, T beta, T* c) = 0;
  // y = x w + bias, then max(y, 0) if `relu`. x: rows x in, w: in x out.
  virtual void linear(const T* x, const T* w, const T* bias, T* y, int rows, int in, int out, bool relu) = 0;
  // sums[j] += sum over rows of x[i, j].
  virtual void add_column_sums(const T* x, T* sums, int rows, int columns) = 0;
  virtual void relu(const T* x, T* y, size_t count) = 0;
  // dx = dy where y > 0. dx may be dy.
  virtual void relu_backward(const T* y, const T* dy, T* dx, size_t count) = 0;
  virtual void add(const T* a, const T* b, T* y, size_t count) = 0;
  virtual void copy(const T* x, T* y, size_t count) = 0;

  // Over each row, in place; dx may be dy.
  virtual void softmax(T* x, int rows, int columns) = 0;
  virtual void softmax_backward(const T* y, const T* dy, T* dx, int rows, int columns) = 0;

  // Each row to mean 0 and variance 1, then scaled and shifted. `mean` and `scale` (1 / deviation) are of rows.
  virtual void layer_norm(const T* x, const T* gamma, const T* beta, T* y, T* mean, T* scale, int rows,
                          int columns) = 0;
  // dgamma and dbeta are added to.
  virtual void layer_norm_backward(const T* x, const T* gamma, const T* mean, const T* scale, const T* dy,
                                   T* dx, T* dgamma, T* dbeta, int rows, int columns) = 0;

  virtual void convolution(const Convolution& shape, const T* x, const T* w, T* y,
                           const Scratch& scratch) = 0;
  virtual void convolution_backward_data(const Convolution& shape, const T* w, const T* dy, T* dx,
                                         const Scratch& scratch) = 0;
  // dw is added to.
  virtual void convolution_backward_filter(const Convolution& shape, const T* x, const T* dy, T* dw,
                                           const Scratch& scratch) = 0;

  // Per channel over batch and pixels. Training updates the running mean and (unbiased) variance by a tenth and
  // keeps mean and 1 / deviation of the batch; inference uses the running ones.
  virtual void batch_norm(const T* x, const T* gamma, const T* beta, T* y, T* running_mean,
                          T* running_variance, T* mean, T* scale, int batch, int channels, int pixels,
                          bool training) = 0;
  virtual void batch_norm_backward(const T* x, const T* gamma, const T* mean, const T* scale, const T* dy,
                                   T* dx, T* dgamma, T* dbeta, int batch, int channels, int pixels) = 0;

  // y[o, i] = mean over p of x[o, p, i].
  virtual void mean_pool(const T* x, T* y, int outer, int count, int inner) = 0;
  virtual void mean_pool_backward(const T* dy, T* dx, int outer, int count, int inner) = 0;

  // *loss = mean over rows of -log softmax(logits)[label]; dlogits is its gradient.
  virtual void cross_entropy(const T* logits, const int32_t* labels, T* loss, T* dlogits, int rows,
                             int classes) = 0;
  // momentum = mu momentum + gradient; value -= rate momentum; gradient = 0.
  virtual void descend(T* values, T* momentum, T* gradients, size_t count, T rate, T mu) = 0;
};

inline constexpr double kNormEpsilon = 1e-5;
inline constexpr double kRunningShare = 0.1;

}  // namespace training
