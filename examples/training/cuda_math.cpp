// The operations on a GPU: matrix products by cuBLAS, with bias and ReLU by cuBLASLt, convolutions, batch
// normalisation and softmax by cuDNN, the rest by kernels.cu. All device memory is given from outside, the
// libraries' workspaces too; all work goes to the queue's stream.
// SPDX-License-Identifier: Apache-2.0
#include "cuda_math.hpp"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>

#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include "kernels.hpp"

namespace training {
namespace {

void must(bool good, const char* what, const std::string& why) {
  if (!good) throw std::runtime_error(std::string(what) + ": " + why);
}
void must(cublasStatus_t status, const char* what) {
  must(status == CUBLAS_STATUS_SUCCESS, what, cublasGetStatusString(status));
}
void must(cudnnStatus_t status, const char* what) {
  must(status == CUDNN_STATUS_SUCCESS, what, cudnnGetErrorString(status));
}
void must(cudaError_t error, const char* what) {
  must(error == cudaSuccess, what, cudaGetErrorName(error));
}

// A tensor of floats, channels first.
class Tensor {
 public:
  Tensor(int n, int c, int h, int w) {
    must(cudnnCreateTensorDescriptor(&handle_), "cudnnCreateTensorDescriptor");
    must(cudnnSetTensor4dDescriptor(handle_, CUDNN_TENSOR_NCHW, CUDNN_DATA_FLOAT, n, c, h, w),
         "cudnnSetTensor4dDescriptor");
  }
  ~Tensor() { (void)cudnnDestroyTensorDescriptor(handle_); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  cudnnTensorDescriptor_t get() const { return handle_; }

 private:
  cudnnTensorDescriptor_t handle_ = nullptr;
};

// cuDNN's first algorithm that it says can do it.
template <class Performance>
Performance first_good(const Performance* found, int count, const char* call) {
  for (int i = 0; i < count; ++i)
    if (found[i].status == CUDNN_STATUS_SUCCESS) return found[i];
  must(false, call, "no algorithm for this shape");
  return {};
}

// The algorithms and descriptors of a convolution shape, found once.
class Plan {
 public:
  Plan(cudnnHandle_t cudnn, const Convolution& s, bool allow_tf32)
      : x_(s.batch, s.in_channels, s.size, s.size), y_(s.batch, s.out_channels, s.out_size(), s.out_size()) {
    must(cudnnCreateFilterDescriptor(&w_), "cudnnCreateFilterDescriptor");
    must(cudnnSetFilter4dDescriptor(w_, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW, s.out_channels, s.in_channels,
                                    s.kernel, s.kernel),
         "cudnnSetFilter4dDescriptor");
    must(cudnnCreateConvolutionDescriptor(&shape_), "cudnnCreateConvolutionDescriptor");
    must(cudnnSetConvolution2dDescriptor(shape_, s.padding, s.padding, s.stride, s.stride, 1, 1,
                                         CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT),
         "cudnnSetConvolution2dDescriptor");
    must(cudnnSetConvolutionMathType(shape_, allow_tf32 ? CUDNN_DEFAULT_MATH : CUDNN_FMA_MATH),
         "cudnnSetConvolutionMathType");
    int count = 0;
    cudnnConvolutionFwdAlgoPerf_t forward[CUDNN_CONVOLUTION_FWD_ALGO_COUNT];
    must(cudnnGetConvolutionForwardAlgorithm_v7(cudnn, x_.get(), w_, shape_, y_.get(),
                                                CUDNN_CONVOLUTION_FWD_ALGO_COUNT, &count, forward),
         "cudnnGetConvolutionForwardAlgorithm_v7");
    forward_ = first_good(forward, count, "cudnnGetConvolutionForwardAlgorithm_v7");
    cudnnConvolutionBwdDataAlgoPerf_t data[CUDNN_CONVOLUTION_BWD_DATA_ALGO_COUNT];
    must(cudnnGetConvolutionBackwardDataAlgorithm_v7(cudnn, w_, y_.get(), shape_, x_.get(),
                                                     CUDNN_CONVOLUTION_BWD_DATA_ALGO_COUNT, &count, data),
         "cudnnGetConvolutionBackwardDataAlgorithm_v7");
    data_ = first_good(data, count, "cudnnGetConvolutionBackwardDataAlgorithm_v7");
    cudnnConvolutionBwdFilterAlgoPerf_t filter[CUDNN_CONVOLUTION_BWD_FILTER_ALGO_COUNT];
    must(cudnnGetConvolutionBackwardFilterAlgorithm_v7(
             cudnn, x_.get(), y_.get(), shape_, w_, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_COUNT, &count, filter),
         "cudnnGetConvolutionBackwardFilterAlgorithm_v7");
    filter_ = first_good(filter, count, "cudnnGetConvolutionBackwardFilterAlgorithm_v7");
  }
  ~Plan() {
    (void)cudnnDestroyConvolutionDescriptor(shape_);
    (void)cudnnDestroyFilterDescriptor(w_);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  void run(cudnnHandle_t cudnn, const float* x, const float* w, float* y, const Scratch& scratch) const {
    must(cudnnConvolutionForward(cudnn, &kOne, x_.get(), x, w_, w, shape_, forward_.algo,
                                 workspace(scratch, forward_.memory), forward_.memory, &kZero, y_.get(), y),
         "cudnnConvolutionForward");
  }
  void run_data(cudnnHandle_t cudnn, const float* w, const float* dy, float* dx,
                const Scratch& scratch) const {
    must(cudnnConvolutionBackwardData(cudnn, &kOne, w_, w, y_.get(), dy, shape_, data_.algo,
                                      workspace(scratch, data_.memory), data_.memory, &kZero, x_.get(), dx),
         "cudnnConvolutionBackwardData");
  }
  void run_filter(cudnnHandle_t cudnn, const float* x, const float* dy, float* dw,
                  const Scratch& scratch) const {
    must(cudnnConvolutionBackwardFilter(cudnn, &kOne, x_.get(), x, y_.get(), dy, shape_, filter_.algo,
                                        workspace(scratch, filter_.memory), filter_.memory, &kOne, w_, dw),
         "cudnnConvolutionBackwardFilter");
  }

  static constexpr float kOne = 1;
  static constexpr float kZero = 0;

 private:
  static void* workspace(const Scratch& scratch, size_t bytes) {
    return bytes == 0 ? nullptr : scratch(bytes);
  }

  const Tensor x_, y_;
  cudnnFilterDescriptor_t w_ = nullptr;
  cudnnConvolutionDescriptor_t shape_ = nullptr;
  cudnnConvolutionFwdAlgoPerf_t forward_{};
  cudnnConvolutionBwdDataAlgoPerf_t data_{};
  cudnnConvolutionBwdFilterAlgoPerf_t filter_{};
};

// y = relu(x w + bias) of one shape by cuBLASLt. Its matrices are column-first, so that it computes the transposed:
// y' (out x rows) = w' x'.
class LinearPlan {
 public:
  static constexpr uint32_t kParameterAlignment = 16;
  LinearPlan(cublasLtHandle_t lt, int rows, int in, int out, bool relu, size_t workspace_bytes,
             bool allow_tf32) {
    const cublasComputeType_t type = allow_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    must(cublasLtMatmulDescCreate(&product_, type, CUDA_R_32F), "cublasLtMatmulDescCreate");
    const cublasLtEpilogue_t epilogue = relu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS;
    must(cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)),
         "cublasLtMatmulDescSetAttribute");
    must(cublasLtMatrixLayoutCreate(&w_, CUDA_R_32F, static_cast<uint64_t>(out), static_cast<uint64_t>(in),
                                    out),
         "cublasLtMatrixLayoutCreate");
    must(cublasLtMatrixLayoutCreate(&x_, CUDA_R_32F, static_cast<uint64_t>(in), static_cast<uint64_t>(rows),
                                    in),
         "cublasLtMatrixLayoutCreate");
    must(cublasLtMatrixLayoutCreate(&y_, CUDA_R_32F, static_cast<uint64_t>(out), static_cast<uint64_t>(rows),
                                    out),
         "cublasLtMatrixLayoutCreate");
    cublasLtMatmulPreference_t preference = nullptr;
    must(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    (void)cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &workspace_bytes, sizeof(workspace_bytes));
    // Parameters lie side by side in one block; without this, algorithms for blocks aligned to 256 bytes are proposed too.
    const uint32_t alignment = kParameterAlignment;
    for (const cublasLtMatmulPreferenceAttributes_t matrix :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      (void)cublasLtMatmulPreferenceSetAttribute(preference, matrix, &alignment, sizeof(alignment));
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(lt, product_, w_, x_, y_, y_, preference, 1, &result, &found);
    (void)cublasLtMatmulPreferenceDestroy(preference);
    must(status, "cublasLtMatmulAlgoGetHeuristic");
    must(found > 0, "cublasLtMatmulAlgoGetHeuristic", "no algorithm for this shape");
    algorithm_ = result.algo;
  }
  ~LinearPlan() {
    (void)cublasLtMatrixLayoutDestroy(y_);
    (void)cublasLtMatrixLayoutDestroy(x_);
    (void)cublasLtMatrixLayoutDestroy(w_);
    (void)cublasLtMatmulDescDestroy(product_);
  }
  LinearPlan(const LinearPlan&) = delete;
  LinearPlan& operator=(const LinearPlan&) = delete;

  void run(cublasLtHandle_t lt, const float* x, const float* w, const float* bias, float* y, void* workspace,
           size_t workspace_bytes, cudaStream_t stream) const {
    must(cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias)),
         "cublasLtMatmulDescSetAttribute");
    must(cublasLtMatmul(lt, product_, &Plan::kOne, w, w_, x, x_, &Plan::kZero, y, y_, y, y_, &algorithm_,
                        workspace, workspace_bytes, stream),
         "cublasLtMatmul");
  }

 private:
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr, x_ = nullptr, y_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
};

class CudaMath final : public Math<float> {
 public:
  // Delegates, so that the destructor runs when one of the handles cannot be made.
  CudaMath(int device, bool allow_tf32) : CudaMath(device, allow_tf32, nullptr) {
    must(cudaSetDevice(device), "cudaSetDevice");
    must(cublasCreate(&cublas_), "cublasCreate");
    must(cublasSetMathMode(cublas_, allow_tf32 ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH),
         "cublasSetMathMode");
    must(cublasLtCreate(&lt_), "cublasLtCreate");
    must(cudnnCreate(&cudnn_), "cudnnCreate");
  }
  ~CudaMath() override {
    plans_.clear();
    linear_plans_.clear();
    if (cudnn_ != nullptr) (void)cudnnDestroy(cudnn_);
    if (lt_ != nullptr) (void)cublasLtDestroy(lt_);
    if (cublas_ != nullptr) (void)cublasDestroy(cublas_);
  }

  // cuBLAS takes the first half, cuBLASLt the second.
  size_t workspace_bytes() const override { return 2 * kWorkspaceBytes; }
  void set_workspace(void* memory) override { workspace_ = static_cast<char*>(memory); }

  void use(const Queue& queue) override {
    must(cudaSetDevice(device_), "cudaSetDevice");  // of the calling thread, and each step may have another
    auto* stream = static_cast<cudaStream_t>(queue.native());
    if (stream == stream_ && stream != nullptr) return;
    stream_ = stream;
    must(cublasSetStream(cublas_, stream), "cublasSetStream");
    // After the stream: setting that brings cuBLAS's own workspace back.
    must(cublasSetWorkspace(cublas_, workspace_, kWorkspaceBytes), "cublasSetWorkspace");
    must(cudnnSetStream(cudnn_, stream), "cudnnSetStream");
  }

  void gemm(const Gemm& s, float alpha, const float* a, const float* b, float beta, float* c) override {
    // Row-first c = a b is column-first c' = b' a'.
    must(
        cublasSgemmStridedBatched(cublas_, s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                                  s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, s.n, s.m, s.k, &alpha, b, s.ld_b,
                                  s.stride_b, a, s.ld_a, s.stride_a, &beta, c, s.ld_c, s.stride_c, s.count),
        "cublasSgemmStridedBatched");
  }

  void linear(const float* x, const float* w, const float* bias, float* y, int rows, int in, int out,
              bool relu) override {
    auto& plan = linear_plans_[{rows, in, out, relu}];
    if (plan == nullptr)
      plan = std::make_unique<LinearPlan>(lt_, rows, in, out, relu, kWorkspaceBytes, allow_tf32_);
    plan->run(lt_, x, w, bias, y, workspace_ + kWorkspaceBytes, kWorkspaceBytes, stream_);
  }

  void add_column_sums(const float* x, float* sums, int rows, int columns) override {
    kernels::add_column_sums(stream_, x, sums, rows, columns);
    check("add_column_sums");
  }
  void relu(const float* x, float* y, size_t count) override {
    kernels::relu(stream_, x, y, count);
    check("relu");
  }
  void relu_backward(const float* y, const float* dy, float* dx, size_t count) override {
    kernels::relu_backward(stream_, y, dy, dx, count);
    check("relu_backward");
  }
  void add(const float* a, const float* b, float* y, size_t count) override {
    kernels::add(stream_, a, b, y, count);
    check("add");
  }
  void copy(const float* x, float* y, size_t count) override {
    must(cudaMemcpyAsync(y, x, count * sizeof(float), cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
  }

  void softmax(float* x, int rows, int columns) override {
    const Tensor shape(rows, columns, 1, 1);
    must(cudnnSoftmaxForward(cudnn_, CUDNN_SOFTMAX_ACCURATE, CUDNN_SOFTMAX_MODE_CHANNEL, &Plan::kOne,
                             shape.get(), x, &Plan::kZero, shape.get(), x),
         "cudnnSoftmaxForward");
  }
  void softmax_backward(const float* y, const float* dy, float* dx, int rows, int columns) override {
    const Tensor shape(rows, columns, 1, 1);
    must(cudnnSoftmaxBackward(cudnn_, CUDNN_SOFTMAX_ACCURATE, CUDNN_SOFTMAX_MODE_CHANNEL, &Plan::kOne,
                              shape.get(), y, shape.get(), dy, &Plan::kZero, shape.get(), dx),
         "cudnnSoftmaxBackward");
  }

  void layer_norm(const float* x, const float* gamma, const float* beta, float* y, float* mean, float* scale,
                  int rows, int columns) override {
    kernels::layer_norm(stream_, x, gamma, beta, y, mean, scale, rows, columns,
                        static_cast<float>(kNormEpsilon));
    check("layer_norm");
  }
  void layer_norm_backward(const float* x, const float* gamma, const float* mean, const float* scale,
                           const float* dy, float* dx, float* dgamma, float* dbeta, int rows,
                           int columns) override {
    kernels::layer_norm_backward_parameters(stream_, x, mean, scale, dy, dgamma, dbeta, rows, columns);
    kernels::layer_norm_backward_data(stream_, x, gamma, mean, scale, dy, dx, rows, columns);
    check("layer_norm_backward");
  }

  void convolution(const Convolution& shape, const float* x, const float* w, float* y,
                   const Scratch& scratch) override {
    plan(shape).run(cudnn_, x, w, y, scratch);
  }
  void convolution_backward_data(const Convolution& shape, const float* w, const float* dy, float* dx,
                                 const Scratch& scratch) override {
    plan(shape).run_data(cudnn_, w, dy, dx, scratch);
  }
  void convolution_backward_filter(const Convolution& shape, const float* x, const float* dy, float* dw,
                                   const Scratch& scratch) override {
    plan(shape).run_filter(cudnn_, x, dy, dw, scratch);
  }

  void batch_norm(const float* x, const float* gamma, const float* beta, float* y, float* running_mean,
                  float* running_variance, float* mean, float* scale, int batch, int channels, int pixels,
                  bool training) override {
    const Tensor shape(batch, channels, pixels, 1);
    const Tensor parameters(1, channels, 1, 1);
    if (training) {
      must(cudnnBatchNormalizationForwardTraining(cudnn_, CUDNN_BATCHNORM_SPATIAL, &Plan::kOne, &Plan::kZero,
                                                  shape.get(), x, shape.get(), y, parameters.get(), gamma,
                                                  beta, kRunningShare, running_mean, running_variance,
                                                  kNormEpsilon, mean, scale),
           "cudnnBatchNormalizationForwardTraining");
    } else {
      must(cudnnBatchNormalizationForwardInference(cudnn_, CUDNN_BATCHNORM_SPATIAL, &Plan::kOne, &Plan::kZero,
                                                   shape.get(), x, shape.get(), y, parameters.get(), gamma,
                                                   beta, running_mean, running_variance, kNormEpsilon),
           "cudnnBatchNormalizationForwardInference");
    }
  }
  void batch_norm_backward(const float* x, const float* gamma, const float* mean, const float* scale,
                           const float* dy, float* dx, float* dgamma, float* dbeta, int batch, int channels,
                           int pixels) override {
    const Tensor shape(batch, channels, pixels, 1);
    const Tensor parameters(1, channels, 1, 1);
    must(cudnnBatchNormalizationBackward(cudnn_, CUDNN_BATCHNORM_SPATIAL, &Plan::kOne, &Plan::kZero,
                                         &Plan::kOne, &Plan::kOne, shape.get(), x, shape.get(), dy,
                                         shape.get(), dx, parameters.get(), gamma, dgamma, dbeta,
                                         kNormEpsilon, mean, scale),
         "cudnnBatchNormalizationBackward");
  }

  void mean_pool(const float* x, float* y, int outer, int count, int inner) override {
    kernels::mean_pool(stream_, x, y, outer, count, inner);
    check("mean_pool");
  }
  void mean_pool_backward(const float* dy, float* dx, int outer, int count, int inner) override {
    kernels::mean_pool_backward(stream_, dy, dx, outer, count, inner);
    check("mean_pool_backward");
  }
  void cross_entropy(const float* logits, const int32_t* labels, float* loss, float* dlogits, int rows,
                     int classes) override {
    kernels::cross_entropy(stream_, logits, labels, loss, dlogits, rows, classes);
    check("cross_entropy");
  }
  void descend(float* values, float* momentum, float* gradients, size_t count, float rate,
               float mu) override {
    kernels::descend(stream_, values, momentum, gradients, count, rate, mu);
    check("descend");
  }

 private:
  CudaMath(int device, bool allow_tf32, std::nullptr_t) : device_(device), allow_tf32_(allow_tf32) {}
  static constexpr size_t kWorkspaceBytes = 8u << 20;

  static void check(const char* kernel) {
    if (const char* error = kernels::last_error(); error != nullptr)
      throw std::runtime_error(std::string("kernel ") + kernel + ": " + error);
  }
  const Plan& plan(const Convolution& shape) {
    auto& found = plans_[shape];
    if (found == nullptr) found = std::make_unique<Plan>(cudnn_, shape, allow_tf32_);
    return *found;
  }

  const int device_;
  const bool allow_tf32_;
  cublasHandle_t cublas_ = nullptr;
  cublasLtHandle_t lt_ = nullptr;
  cudnnHandle_t cudnn_ = nullptr;
  cudaStream_t stream_ = nullptr;
  char* workspace_ = nullptr;
  std::map<Convolution, std::unique_ptr<Plan>> plans_;
  std::map<std::tuple<int, int, int, bool>, std::unique_ptr<LinearPlan>> linear_plans_;
};

}  // namespace
}  // namespace training

extern "C" __attribute__((visibility("default"))) training::Math<float>* training_make_cuda_math(
    int device, bool allow_tf32) {
  return new training::CudaMath(device, allow_tf32);
}
