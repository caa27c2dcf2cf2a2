// A worker process of a memory daemon: its model's layers come onto the device while the first ones already execute,
// and it hands the turn on whenever another worker wants it. Run two of them beside a daemon:
//   gpushare model-daemon --socket models.sock --device host --capacity 512MiB &
//   example_worker models.sock a.safetensors & example_worker models.sock b.safetensors
// examples/run_worker does just that.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <exception>
#include <gpushare/gpushare.hpp>

namespace gs = gpushare;

// Stands in for executing a layer: reads all of its weights.
static unsigned execute(const gpushare_worker_layer& layer) {
  const auto* weights =
      reinterpret_cast<const unsigned char*>(layer.address);  // the host device's memory is ours to read
  unsigned sum = 0;
  for (uint64_t i = 0; i < layer.bytes; ++i) sum += weights[i];
  return sum;
}

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: example_worker SOCKET MODEL.safetensors\n");
    return 2;
  }
  try {
    gs::Worker worker = gs::Worker::attach({.socket = argv[1], .name = argv[2], .model = argv[2]});
    const uint32_t layers = worker.info().layers;
    unsigned first_sum = 0;
    int iterations = 0;
    for (int turns = 0; turns < 3; ++turns) {
      gs::Worker::Turn turn = worker.begin();  // waits for this worker's turn
      do {
        unsigned sum = 0;
        for (uint32_t i = 0; i < layers; ++i) {
          turn.wait_layers(i, i + 1);  // a look at shared memory once it is there
          sum += execute(worker.layer(i));
        }
        if (iterations++ == 0) first_sum = sum;
        if (sum != first_sum) throw std::runtime_error("the model has changed");
      } while (!turn.wanted() && iterations % 10 != 0);
      turn.end();
    }
    std::printf("%s: %u layers, %d iterations in 3 turns, sum %u\n", argv[2], layers, iterations, first_sum);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "example_worker: %s\n", error.what());
    return 1;
  }
  return 0;
}
