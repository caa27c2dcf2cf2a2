// A worker process for daemon_crash.cpp, which kills it:
//   daemon_worker SOCKET MODEL CHECKSUM SCRATCH_BYTES TURNS
// takes TURNS turns and compares its model's checksum in each. Exit 1 with the reason when anything goes wrong.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "daemon/worker.hpp"
#include "support/model_folder.hpp"

int main(int argc, char** argv) {
  using namespace gpushare;
  if (argc != 6) return 2;
  daemon::WorkerOptions options;
  options.socket = argv[1];
  options.name = "victim";
  options.path = argv[2];
  options.scratch_bytes = std::strtoull(argv[4], nullptr, 10);
  const uint64_t wanted = std::strtoull(argv[3], nullptr, 10);
  const auto fail = [](const char* what, const base::Status& status) {
    std::fprintf(stderr, "daemon_worker: %s: %s\n", what, status.to_string().c_str());
    return 1;
  };
  const auto worker = daemon::Worker::attach(options);
  if (!worker.ok()) return fail("attach", worker.status());
  for (int turn = 0; turn < std::atoi(argv[5]); ++turn) {
    if (const base::Status begun = (*worker)->begin(); !begun.ok()) return fail("begin", begun);
    if ((*worker)->scratch() != 0)
      std::memset(reinterpret_cast<void*>((*worker)->scratch()), turn, (*worker)->scratch_bytes());
    uint64_t sum = test::checksum(nullptr, 0);
    for (uint32_t i = 0; i < (*worker)->layers().size(); ++i) {
      const base::Status there = (*worker)->wait_layers(i, i + 1);
      if (!there.ok()) return fail("wait_layers", there);
      sum = test::checksum(reinterpret_cast<const void*>((*worker)->address(i)), (*worker)->layers()[i].bytes,
                           sum);
    }
    if (sum != wanted) return fail("checksum", {GPUSHARE_INTERNAL, "the model's bytes are others"});
    if (const base::Status ended = (*worker)->end(); !ended.ok()) return fail("end", ended);
  }
  return 0;
}
