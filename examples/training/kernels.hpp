// kernels.hpp: the operations that neither cuBLAS nor cuDNN has, as kernels of our own. Each enqueues one kernel.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace training::kernels {

using Stream = CUstream_st*;

void add_column_sums(Stream stream, const float* x, float* sums, int rows, int columns);
void relu(Stream stream, const float* x, float* y, size_t count);
void relu_backward(Stream stream, const float* y, const float* dy, float* dx, size_t count);
void add(Stream stream, const float* a, const float* b, float* y, size_t count);
void layer_norm(Stream stream, const float* x, const float* gamma, const float* beta, float* y, float* mean,
                float* scale, int rows, int columns, float epsilon);
void layer_norm_backward_data(Stream stream, const float* x, const float* gamma, const float* mean,
                              const float* scale, const float* dy, float* dx, int rows, int columns);
void layer_norm_backward_parameters(Stream stream, const float* x, const float* mean, const float* scale,
                                    const float* dy, float* dgamma, float* dbeta, int rows, int columns);
void mean_pool(Stream stream, const float* x, float* y, int outer, int count, int inner);
void mean_pool_backward(Stream stream, const float* dy, float* dx, int outer, int count, int inner);
// One block adds the losses of all rows in a fixed order, so that runs agree.
void cross_entropy(Stream stream, const float* logits, const int32_t* labels, float* loss, float* dlogits,
                   int rows, int classes);
void descend(Stream stream, float* values, float* momentum, float* gradients, size_t count, float rate,
             float mu);

// The name of the first error since the last call; null when all went well.
const char* last_error();

}  // namespace training::kernels
