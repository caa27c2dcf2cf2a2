// A run as pictures: a timeline for Perfetto, a memory snapshot for PyTorch's memory_viz, an allocation log.
//   trace_export [folder]     writes timeline.json, snapshot.pickle, snapshot.json and allocations.csv there
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <gpushare/gpushare.hpp>
#include <string>
#include <vector>

namespace gs = gpushare;

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".";
  gs::RuntimeOptions options;
  options.device = "host";
  options.capacity_bytes = 256 << 20;
  options.record_timeline = true;
  options.record_allocations = true;
  gs::Runtime runtime = gs::Runtime::open(options);

  std::vector<gs::Session> sessions;
  for (const char* name : {"bert", "resnet50", "vgg16"}) {
    gs::SessionOptions session;
    session.name = name;
    session.persistent_bytes = 8 << 20;
    session.ephemeral_bytes = 32 << 20;
    sessions.push_back(runtime.open_session(session));
    sessions.back().alloc_model<float>(1 << 20);
  }
  std::vector<gs::Ticket> tickets;
  for (int i = 0; i < 20; ++i)
    for (gs::Session& session : sessions)
      tickets.push_back(session.run([i](gs::Iteration& iteration) {
        auto* activations = iteration.alloc<float>(size_t{1} << (14 + i % 5));
        iteration.alloc<float>(1 << 12);
        iteration.stream().fill(reinterpret_cast<uintptr_t>(activations), 1, 1 << 16);
      }));
  for (gs::Ticket& ticket : tickets) ticket.get();

  runtime.write_timeline(folder + "/timeline.json");
  runtime.write_snapshot(folder + "/snapshot.pickle");
  runtime.write_snapshot(folder + "/snapshot.json", GPUSHARE_SNAPSHOT_JSON);
  runtime.write_allocation_log(folder + "/allocations.csv");
  std::printf(
      "open timeline.json at https://ui.perfetto.dev and snapshot.pickle at "
      "https://pytorch.org/memory_viz\n");
  return 0;
}
