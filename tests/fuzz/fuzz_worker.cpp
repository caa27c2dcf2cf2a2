// Programs of gpushare_worker_* calls from bytes. The first byte says whom they talk to: a daemon of ours, which must keep its
// promises (one turn at a time, the model's bytes, everything back at the end), or one that lies (hostile_daemon.hpp), which may
// fail every call and must not harm the worker's process.
// SPDX-License-Identifier: Apache-2.0
#include <dirent.h>

#include <array>
#include <utility>

#include "daemon/server.hpp"
#include "daemon/worker.hpp"
#include "fuzz/c_api_input.hpp"
#include "fuzz/hostile_daemon.hpp"
#include "support/model_folder.hpp"

namespace {

using namespace gpushare;
using namespace gpushare::fuzz;

constexpr uint64_t kShortNs = 1'000'000;
constexpr uint64_t kLongNs = 60'000'000'000;

size_t open_descriptors() {
  DIR* const folder = ::opendir("/proc/self/fd");
  size_t count = 0;
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

// Both daemons, for all programs.
struct World {
  World() {
    test::Random random(1);
    models[0] = folder.make("a.safetensors", {70'000, 1'000, 3}, random, &contents[0]);
    models[1] = folder.make("b.safetensors", {100, 200'000}, random, &contents[1]);
    daemon::ServerOptions options;
    options.socket = folder.file("honest");
    options.device = kWorkerDevice;
    options.capacity_bytes = 6 * HostileDaemon::kGranule;  // one of them and scratch memory
    options.standby_bytes = HostileDaemon::kGranule;
    options.images_bytes = 1 << 20;
    options.chunk_bytes = 64 << 10;
    options.link = loader::LinkCosts{0.002, 5e6, 0.002};
    auto started = daemon::Server::start(options);
    require(started.ok(), "a daemon starts");
    server = std::move(*started);
    hostile = new HostileDaemon(folder.file("hostile"));
  }
  test::ModelFolder folder;
  std::array<std::string, 2> models;
  std::array<std::vector<std::string>, 2> contents;
  std::unique_ptr<daemon::Server> server;
  HostileDaemon* hostile;
};

struct Attached {
  gpushare_worker handle = nullptr;
  size_t model = 0;
  bool detached = false;
};

class Program {
 public:
  Program(World& world, Input& input, bool honest) : world_(world), input_(input), honest_(honest) {}
  ~Program() {
    for (const Attached& worker : workers_)
      if (!worker.detached) (void)gpushare_worker_detach(worker.handle);
    if (!honest_) {
      world_.hostile->settle();
      return;
    }
    // The daemon takes everything back as soon as it sees the connections closed.
    for (int look = 0;; ++look) {
      const auto status = daemon::query_status(world_.folder.file("honest"), kLongNs);
      require(status.ok() && look < 60'000, "the daemon serves, and forgets who has left");
      if (status->workers.empty()) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  void step() {
    const uint8_t what = input_.byte() % 8;
    if (what == 0 || workers_.empty()) return require_status(attach());
    const uint8_t which = input_.byte();
    if (which >= 254) return require_status(on_no_worker(what));
    Attached& worker = workers_[which % workers_.size()];
    const int32_t status = call(worker, what);
    require_status(status);
    if (worker.detached)
      require(status == GPUSHARE_INVALID_HANDLE || what == 1, "a detached worker is stale");
  }

 private:
  int32_t attach() {
    if (workers_.size() == (honest_ ? 3 : 1)) return GPUSHARE_OK;
    gpushare_worker_params params = GPUSHARE_WORKER_PARAMS_INIT;
    const uint8_t odd = input_.byte();
    const size_t model = odd % 2;
    const std::string socket = world_.folder.file(honest_ ? "honest" : "hostile");
    const std::string long_name(odd, 'n');
    params.socket = odd == 200 ? nullptr : odd == 201 ? "/nonexistent" : socket.c_str();
    params.name = odd == 202 ? nullptr : odd >= 240 ? long_name.c_str() : "w";
    params.model = odd == 203   ? nullptr
                   : odd == 204 ? "/nonexistent"
                   : odd == 205 ? ""
                                : world_.models[model].c_str();
    if (odd == 206) params.struct_size = input_.byte() % (sizeof(params) + 1);
    params.iteration_ns = input_.size();
    params.scratch_bytes = odd % 3 == 0 ? HostileDaemon::kGranule : odd % 31 == 0 ? input_.size() : 0;
    params.timeout_ns = kLongNs;
    const bool connects = !honest_ && odd < 200;
    if (connects) world_.hostile->expect_connection();
    gpushare_worker worker = nullptr;
    const int32_t status = gpushare_worker_attach(&params, odd == 207 ? nullptr : &worker);
    require((status == GPUSHARE_OK) == (worker != nullptr), "a worker comes of an attach that succeeds");
    if (worker != nullptr) workers_.push_back({worker, model, false});
    if (honest_ && odd < 200 && params.scratch_bytes <= HostileDaemon::kGranule)
      require(status == GPUSHARE_OK, "an honest daemon lets one attach");
    return status;
  }

  int32_t on_no_worker(uint8_t what) {
    gpushare_worker none = reinterpret_cast<gpushare_worker>(static_cast<uintptr_t>(input_.size()));
    for (const Attached& worker : workers_)
      if (worker.handle == none) none = nullptr;
    uint32_t number = 0;
    gpushare_worker_info info = GPUSHARE_WORKER_INFO_INIT;
    gpushare_worker_layer layer = GPUSHARE_WORKER_LAYER_INIT;
    const int32_t status = what == 1   ? gpushare_worker_detach(none)
                           : what == 2 ? gpushare_worker_begin(none, kLongNs)
                           : what == 3 ? gpushare_worker_wait_layers(none, 0, 1, kLongNs)
                           : what == 4 ? gpushare_worker_end(none)
                           : what == 5 ? gpushare_worker_get_wanted(none, &number)
                           : what == 6 ? gpushare_worker_get_info(none, &info)
                                       : gpushare_worker_get_layer(none, 0, &layer);
    require(status == GPUSHARE_INVALID_HANDLE, "what is no worker is told");
    return status;
  }

  int32_t call(Attached& worker, uint8_t what) {
    switch (what) {
      case 1: {
        const bool before = worker.detached;
        const int32_t status = gpushare_worker_detach(worker.handle);
        require((status == GPUSHARE_OK) != before, "one detaches once");
        worker.detached = true;
        return status;
      }
      case 2: {
        const bool held = in_turn(worker);
        bool others = false;
        for (const Attached& other : workers_) others |= &other != &worker && in_turn(other);
        const int32_t status = gpushare_worker_begin(worker.handle, input_.byte() % 2 == 0 ? 0 : kShortNs);
        if (status == GPUSHARE_OK) require(!held && !others, "one turn at a time");
        return status;
      }
      case 3:
        return wait(worker);
      case 4: {
        const bool held = in_turn(worker);
        const int32_t status = gpushare_worker_end(worker.handle);
        require(!in_turn(worker), "a turn that was ended is over");
        if (!worker.detached && !held) require(status == GPUSHARE_INVALID_STATE, "no turn, nothing to end");
        return status;
      }
      case 5: {
        uint32_t wanted = 9;
        const bool null = input_.byte() == 255;
        const int32_t status = gpushare_worker_get_wanted(worker.handle, null ? nullptr : &wanted);
        if (status == GPUSHARE_OK) require(wanted <= 1, "wanted is 0 or 1");
        return status;
      }
      case 6: {
        gpushare_worker_info info = GPUSHARE_WORKER_INFO_INIT;
        if (const uint8_t odd = input_.byte(); odd >= 250) info.struct_size = odd;
        return gpushare_worker_get_info(worker.handle, &info);
      }
      default: {
        gpushare_worker_layer layer = GPUSHARE_WORKER_LAYER_INIT;
        const uint32_t index = input_.byte() % 5;
        const int32_t status = gpushare_worker_get_layer(worker.handle, index, &layer);
        if (status == GPUSHARE_OK && honest_)
          require(layer.bytes == world_.contents[worker.model][index].size(), "a layer has its bytes");
        return status;
      }
    }
  }

  int32_t wait(Attached& worker) {
    const uint32_t first = input_.byte() % 4;
    const uint32_t end = first + input_.byte() % 4;
    const bool held = in_turn(worker);
    // A turn of an honest daemon has its layers soon.
    const uint64_t timeout_ns = honest_ && input_.byte() % 2 == 0 ? kLongNs : 0;
    const int32_t status = gpushare_worker_wait_layers(worker.handle, first, end, timeout_ns);
    if (status != GPUSHARE_OK) return status;
    require(held, "layers are there in a turn alone");
    for (uint32_t i = first; i < end; ++i) {
      gpushare_worker_layer layer = GPUSHARE_WORKER_LAYER_INIT;
      require(gpushare_worker_get_layer(worker.handle, i, &layer) == GPUSHARE_OK,
              "a layer that arrived is one");
      if (layer.bytes == 0) continue;
      const auto* const at = reinterpret_cast<const volatile char*>(static_cast<uintptr_t>(layer.address));
      (void)at[0];  // whoever filled it
      (void)at[layer.bytes - 1];
      if (honest_)
        require(std::memcmp(const_cast<const char*>(at), world_.contents[worker.model][i].data(),
                            layer.bytes) == 0,
                "the model's bytes");
    }
    return status;
  }

  static bool in_turn(const Attached& worker) {
    gpushare_worker_info info = GPUSHARE_WORKER_INFO_INIT;
    return !worker.detached && gpushare_worker_get_info(worker.handle, &info) == GPUSHARE_OK &&
           info.in_turn == 1;
  }

  World& world_;
  Input& input_;
  const bool honest_;
  std::vector<Attached> workers_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static World& world = *new World;
  if (size < 2) return 0;
  const bool honest = data[0] % 2 == 0;
  size_t calls = size;
  if (!honest) {  // the second half is the daemon's
    calls = 1 + (size - 1) / 2;
    world.hostile->play(std::vector<uint8_t>(data + calls, data + size));
  }
  Input input(data + 1, calls - 1);
  {
    Program program(world, input, honest);
    for (int step = 0; !input.empty() && step < 60; ++step) program.step();
  }
  static uint64_t programs = 0;
  if (++programs % 256 == 0) require(open_descriptors() < 100, "descriptors come back");
  return 0;
}
