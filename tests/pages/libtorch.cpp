// The snippet of docs/libtorch.md, with a small network and two batches.
// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <vector>

#include "libtorch_1_includes.inc"

namespace {

torch::nn::Sequential make_network() {
  return torch::nn::Sequential(torch::nn::Linear(8, 4), torch::nn::ReLU(), torch::nn::Linear(4, 2));
}
void train_step(torch::nn::Sequential& network, const at::Tensor& batch) {
  network->zero_grad();
  network->forward(batch).sum().backward();
}

}  // namespace

int main() try {
  const std::vector<at::Tensor> data{at::ones({4, 8}), at::ones({4, 8})};
  torch::nn::Sequential network{nullptr};
#include "libtorch_1.inc"
  const gpushare_session_info info = job.info();
  if (info.iterations_done == 2 && info.ephemeral_bytes == 0 && info.persistent_bytes > 0) return 0;
  std::fprintf(stderr, "the session is not as the page says\n");
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
