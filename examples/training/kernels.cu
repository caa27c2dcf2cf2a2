// SPDX-License-Identifier: Apache-2.0
#include "kernels.hpp"

namespace training::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

int blocks_of(size_t count) {
  const size_t blocks = (count + kThreads - 1) / kThreads;
  return static_cast<int>(blocks < 65535 ? blocks : 65535);
}

// for (i in my share of count)
#define TRAINING_EACH(i, count)                                                            \
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < (count); \
       i += static_cast<size_t>(gridDim.x) * blockDim.x)

__device__ float warp_sum(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}
__device__ float warp_max(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

// A block has 32 columns and 8 rows of threads; each column's partial sums meet in shared memory.
constexpr int kColumnRows = 8;
template <class Term>
__device__ void add_by_column(float* sums, int rows, int columns, Term term) {
  __shared__ float parts[kColumnRows][kWarp];
  const int column = blockIdx.x * kWarp + threadIdx.x;
  float sum = 0;
  if (column < columns)
    for (int row = threadIdx.y; row < rows; row += kColumnRows) sum += term(row, column);
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < columns) {
    for (int part = 1; part < kColumnRows; ++part) sum += parts[part][threadIdx.x];
    sums[column] += sum;
  }
  __syncthreads();
}

__global__ void add_column_sums_kernel(const float* x, float* sums, int rows, int columns) {
  add_by_column(sums, rows, columns,
                [=](int row, int column) { return x[static_cast<size_t>(row) * columns + column]; });
}

__global__ void relu_kernel(const float* x, float* y, size_t count) {
  TRAINING_EACH(i, count) y[i] = fmaxf(x[i], 0.0f);
}

__global__ void relu_backward_kernel(const float* y, const float* dy, float* dx, size_t count) {
  TRAINING_EACH(i, count) dx[i] = y[i] > 0.0f ? dy[i] : 0.0f;
}

__global__ void add_kernel(const float* a, const float* b, float* y, size_t count) {
  TRAINING_EACH(i, count) y[i] = a[i] + b[i];
}

// A warp a row.
__global__ void layer_norm_kernel(const float* x, const float* gamma, const float* beta, float* y,
                                  float* mean, float* scale, int rows, int columns, float epsilon) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const float* in = x + static_cast<size_t>(row) * columns;
  float* out = y + static_cast<size_t>(row) * columns;
  float sum = 0;
  for (int j = threadIdx.x; j < columns; j += kWarp) sum += in[j];
  const float middle = warp_sum(sum) / columns;
  float squares = 0;
  for (int j = threadIdx.x; j < columns; j += kWarp) squares += (in[j] - middle) * (in[j] - middle);
  const float factor = rsqrtf(warp_sum(squares) / columns + epsilon);
  for (int j = threadIdx.x; j < columns; j += kWarp) out[j] = (in[j] - middle) * factor * gamma[j] + beta[j];
  if (threadIdx.x == 0) {
    mean[row] = middle;
    scale[row] = factor;
  }
}

__global__ void layer_norm_backward_kernel(const float* x, const float* gamma, const float* mean,
                                           const float* scale, const float* dy, float* dx, int rows,
                                           int columns) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const size_t at = static_cast<size_t>(row) * columns;
  const float middle = mean[row];
  const float factor = scale[row];
  float sum = 0, dot = 0;
  for (int j = threadIdx.x; j < columns; j += kWarp) {
    const float slope = dy[at + j] * gamma[j];
    sum += slope;
    dot += slope * (x[at + j] - middle) * factor;
  }
  sum = warp_sum(sum);
  dot = warp_sum(dot);
  for (int j = threadIdx.x; j < columns; j += kWarp) {
    const float normal = (x[at + j] - middle) * factor;
    dx[at + j] = factor * (dy[at + j] * gamma[j] - (sum + normal * dot) / columns);
  }
}

__global__ void layer_norm_parameters_kernel(const float* x, const float* mean, const float* scale,
                                             const float* dy, float* dgamma, float* dbeta, int rows,
                                             int columns) {
  add_by_column(dgamma, rows, columns, [=](int row, int column) {
    const size_t at = static_cast<size_t>(row) * columns + column;
    return dy[at] * (x[at] - mean[row]) * scale[row];
  });
  add_by_column(dbeta, rows, columns,
                [=](int row, int column) { return dy[static_cast<size_t>(row) * columns + column]; });
}

__global__ void mean_pool_kernel(const float* x, float* y, int count, int inner, size_t outputs) {
  TRAINING_EACH(i, outputs) {
    const size_t outer = i / inner;
    float sum = 0;
    for (int p = 0; p < count; ++p) sum += x[(outer * count + p) * inner + i % inner];
    y[i] = sum / count;
  }
}

__global__ void mean_pool_backward_kernel(const float* dy, float* dx, int count, int inner, size_t inputs) {
  TRAINING_EACH(i, inputs) {
    const size_t outer = i / (static_cast<size_t>(count) * inner);
    dx[i] = dy[outer * inner + i % inner] / count;
  }
}

__global__ void cross_entropy_kernel(const float* logits, const int32_t* labels, float* loss, float* dlogits,
                                     int rows, int classes) {
  __shared__ float losses[kThreads / kWarp];
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  float mine = 0;
  for (int row = warp; row < rows; row += kThreads / kWarp) {
    const float* in = logits + static_cast<size_t>(row) * classes;
    float* out = dlogits + static_cast<size_t>(row) * classes;
    float most = -INFINITY;
    for (int j = lane; j < classes; j += kWarp) most = fmaxf(most, in[j]);
    most = warp_max(most);
    float sum = 0;
    for (int j = lane; j < classes; j += kWarp) sum += expf(in[j] - most);
    sum = warp_sum(sum);
    for (int j = lane; j < classes; j += kWarp)
      out[j] = (expf(in[j] - most) / sum - (j == labels[row] ? 1.0f : 0.0f)) / rows;
    mine += logf(sum) - (in[labels[row]] - most);
  }
  if (lane == 0) losses[warp] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0;
    for (float part : losses) total += part;
    *loss = total / rows;
  }
}

__global__ void descend_kernel(float* values, float* momentum, float* gradients, size_t count, float rate,
                               float mu) {
  TRAINING_EACH(i, count) {
    const float speed = mu * momentum[i] + gradients[i];
    momentum[i] = speed;
    values[i] -= rate * speed;
    gradients[i] = 0;
  }
}

const dim3 kColumnThreads(kWarp, kColumnRows);
const dim3 kRowThreads(kWarp, kThreads / kWarp);
int column_blocks(int columns) {
  return (columns + kWarp - 1) / kWarp;
}
int row_blocks(int rows) {
  return (rows + kThreads / kWarp - 1) / (kThreads / kWarp);
}

}  // namespace

void add_column_sums(Stream stream, const float* x, float* sums, int rows, int columns) {
  add_column_sums_kernel<<<column_blocks(columns), kColumnThreads, 0, stream>>>(x, sums, rows, columns);
}
void relu(Stream stream, const float* x, float* y, size_t count) {
  relu_kernel<<<blocks_of(count), kThreads, 0, stream>>>(x, y, count);
}
void relu_backward(Stream stream, const float* y, const float* dy, float* dx, size_t count) {
  relu_backward_kernel<<<blocks_of(count), kThreads, 0, stream>>>(y, dy, dx, count);
}
void add(Stream stream, const float* a, const float* b, float* y, size_t count) {
  add_kernel<<<blocks_of(count), kThreads, 0, stream>>>(a, b, y, count);
}
void layer_norm(Stream stream, const float* x, const float* gamma, const float* beta, float* y, float* mean,
                float* scale, int rows, int columns, float epsilon) {
  layer_norm_kernel<<<row_blocks(rows), kRowThreads, 0, stream>>>(x, gamma, beta, y, mean, scale, rows,
                                                                  columns, epsilon);
}
void layer_norm_backward_data(Stream stream, const float* x, const float* gamma, const float* mean,
                              const float* scale, const float* dy, float* dx, int rows, int columns) {
  layer_norm_backward_kernel<<<row_blocks(rows), kRowThreads, 0, stream>>>(x, gamma, mean, scale, dy, dx,
                                                                           rows, columns);
}
void layer_norm_backward_parameters(Stream stream, const float* x, const float* mean, const float* scale,
                                    const float* dy, float* dgamma, float* dbeta, int rows, int columns) {
  layer_norm_parameters_kernel<<<column_blocks(columns), kColumnThreads, 0, stream>>>(
      x, mean, scale, dy, dgamma, dbeta, rows, columns);
}
void mean_pool(Stream stream, const float* x, float* y, int outer, int count, int inner) {
  const size_t outputs = static_cast<size_t>(outer) * inner;
  mean_pool_kernel<<<blocks_of(outputs), kThreads, 0, stream>>>(x, y, count, inner, outputs);
}
void mean_pool_backward(Stream stream, const float* dy, float* dx, int outer, int count, int inner) {
  const size_t inputs = static_cast<size_t>(outer) * count * inner;
  mean_pool_backward_kernel<<<blocks_of(inputs), kThreads, 0, stream>>>(dy, dx, count, inner, inputs);
}
void cross_entropy(Stream stream, const float* logits, const int32_t* labels, float* loss, float* dlogits,
                   int rows, int classes) {
  cross_entropy_kernel<<<1, kThreads, 0, stream>>>(logits, labels, loss, dlogits, rows, classes);
}
void descend(Stream stream, float* values, float* momentum, float* gradients, size_t count, float rate,
             float mu) {
  descend_kernel<<<blocks_of(count), kThreads, 0, stream>>>(values, momentum, gradients, count, rate, mu);
}

const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorName(error);
}

}  // namespace training::kernels
