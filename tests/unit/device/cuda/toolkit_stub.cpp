// A copy of the behaviour of the CUDA toolkit's lib64/stubs/libcuda.so: every function returns CUDA_ERROR_STUB_LIBRARY.
// SPDX-License-Identifier: Apache-2.0
constexpr int kStubLibrary = 34;

extern "C" {
__attribute__((visibility("default"))) int cuInit(unsigned) {
  return kStubLibrary;
}
__attribute__((visibility("default"))) int cuGetProcAddress_v2(const char*, void**, int, unsigned long long,
                                                               int*) {
  return kStubLibrary;
}
}
