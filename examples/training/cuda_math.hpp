// cuda_math.hpp: what libtraining_cuda.so exports. It links cuBLAS, cuDNN and the CUDA runtime, so that nothing
// else has to.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "math.hpp"

namespace training {

// The operations on the primary context of CUDA device `device`. Throws std::runtime_error.
using MakeCudaMath = Math<float>* (*)(int device, bool allow_tf32);
inline constexpr const char* kMakeCudaMathName = "training_make_cuda_math";

}  // namespace training
