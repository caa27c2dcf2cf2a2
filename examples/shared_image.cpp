// A process that shares a device with others: the daemon brings its model's layers to the device while the first ones
// already execute, and keeps one copy for all processes. Run two of them beside a daemon:
//   gpushare daemon --socket shared.sock --device host --capacity 14MiB &
//   export GPUSHARE_SOCKET=shared.sock
//   example_shared_image a.safetensors & example_shared_image b.safetensors
// examples/run_shared_image does just that.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <exception>
#include <gpushare/gpushare.hpp>

namespace gs = gpushare;

// Stands in for executing a layer: reads all of its weights.
static unsigned execute(const gpushare_layer_info& layer) {
  const auto* weights =
      reinterpret_cast<const unsigned char*>(layer.address);  // the host device's memory is ours to read
  unsigned sum = 0;
  for (uint64_t i = 0; i < layer.bytes; ++i) sum += weights[i];
  return sum;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: example_shared_image MODEL.safetensors\n");
    return 2;
  }
  try {
    gs::Runtime runtime = gs::Runtime::open({.device = "shared"});
    gs::Session session = runtime.open_session({.name = argv[1], .ephemeral_bytes = 1 << 16});
    const gs::SharedImage image = gs::SharedImage::open(session.get(), {.path = argv[1]});
    const uint32_t layers = image.info().layers;
    unsigned first_sum = 0;
    for (int step = 0; step < 30; ++step) {
      gs::Iteration iteration = session.begin_iteration();  // waits for this session's turn
      unsigned sum = 0;
      for (uint32_t i = 0; i < layers; ++i) {
        image.wait(i, i + 1);  // a look at shared memory once it is there
        sum += execute(image.layer(i));
      }
      iteration.end();
      if (step == 0) first_sum = sum;
      if (sum != first_sum) throw std::runtime_error("the model has changed");
    }
    std::printf("%s: %u layers, 30 iterations, sum %u\n", argv[1], layers, first_sum);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "example_shared_image: %s\n", error.what());
    return 1;
  }
  return 0;
}
