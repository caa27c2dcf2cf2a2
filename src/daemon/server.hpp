// server.hpp: the model daemon: which workers are attached, whose turn it is, which models are on the device.
// One thread turns messages into decisions. Images are read on another thread, and layers arrive on the
// device's thread.
//
// A turn ends when its worker ends it, dies, or holds it longer than the lease while another waits. In the last
// two cases the connection is closed, which gives back the turn and every byte held for the worker. Turns are
// given in the order of the requests. When a turn is given, sched::Residency decides which models stay on the
// device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/status.hpp"
#include "daemon/board.hpp"
#include "daemon/channel.hpp"
#include "daemon/image_reader.hpp"
#include "daemon/model.hpp"
#include "daemon/protocol.hpp"
#include "device/device.hpp"
#include "loader/grouping.hpp"
#include "loader/image.hpp"
#include "loader/transmission.hpp"
#include "sched/residency.hpp"

namespace gpushare::daemon {

struct ServerOptions {
  std::string socket;
  std::string device = "auto";  // must have GPUSHARE_DEVICE_CAP_IPC
  uint64_t capacity_bytes = 0;  // of models and scratch memory together; 0 = what is free at start
  // Part of capacity_bytes that is reserved for the first layers of models that are otherwise off the device.
  // Without these layers a turn would begin with waiting. Models that nobody uses leave this part free; the
  // model in use takes it if it must.
  uint64_t standby_bytes = 0;
  uint64_t images_bytes = 4ull << 30;  // host cache of images
  uint64_t chunk_bytes = 16ull << 20;  // of pinned host memory
  uint64_t lease_ns = 10'000'000'000;  // of a turn while another worker waits; kNoTimeout = for ever
  uint32_t max_workers = 256;          // connections at once
  sched::ResidencyPolicy residency = sched::ResidencyPolicy::kWeighted;
  loader::ReadOptions read;
  std::optional<loader::LinkCosts> link;  // measured at start if absent (64 MiB of device and host memory)
};

class Server {
 public:
  // Opens the device, binds the socket and starts serving. Errors: UNSUPPORTED (device without ipc),
  // ALREADY_EXISTS (another daemon there), EXCEEDS_CAPACITY (of what is free on the device), INVALID_ARGUMENT,
  // the device's.
  static base::Result<std::unique_ptr<Server>> start(ServerOptions options);
  // Stops serving: workers find the connection closed. Gives everything back.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  const std::string& device() const { return device_->spec(); }
  uint64_t capacity_bytes() const { return capacity_bytes_; }

 private:
  enum class State : uint8_t { kConnected, kReading, kAttached, kWaiting, kTurn, kGone };
  struct Connection {
    uint64_t id = 0;
    Descriptor socket;
    Peer peer;
    uint64_t connected_ns = 0;
    State state = State::kConnected;
    std::string name;
    std::shared_ptr<Model> model;
    std::shared_ptr<Board> board;
    uint32_t sequence = 0;     // of the request that waits for its reply
    uint64_t deadline_ns = 0;  // of a wait for the turn
    uint64_t execute_ns = 0;   // of an iteration: as it said, then as its turns show; 0 = as long as the load
    uint64_t scratch_bytes = 0;
    uint64_t scratch_id = 0;  // in residency_, while it has the turn
    gpushare_backend_memory* scratch = nullptr;
    uint64_t turn_began_ns = 0;
    uint64_t turns = 0;
    uint64_t turn_ns = 0;
  };

  explicit Server(ServerOptions options) : options_(std::move(options)) {}
  base::Status open();
  void serve();
  void wake();
  int timeout_ms() const;  // until look_at_clock or look_at_loads has something to do
  bool any_loading() const;
  bool other_loading(const Model& model) const;
  uint64_t load_ns(const Model& model) const;
  void accept_workers();
  void receive(Connection& c);
  void handle(Connection& c, const Request& request);
  base::Status attach(Connection& c, const Request& request);
  void image_is_read(ImageReader::Done done);
  base::Status finish_attach(Connection& c, const std::shared_ptr<const loader::Image>& image);
  size_t workers_of(const Model& model) const;
  std::vector<loader::LayerCost> layer_costs(const loader::Image& image, uint64_t execute_ns) const;
  base::Result<std::vector<uint32_t>> plan(const loader::Image& image, uint64_t execute_ns,
                                           uint32_t resident_layers) const;
  base::Status load(Connection& c, Model& model);
  void learn_iteration(Connection& c, uint64_t iteration_ns);
  void drop(const std::vector<sched::ModelId>& models);
  // Kept first layers: within the budget and what `next` and the others leave. And all of them, for room.
  void trim_standby(const Model* next);
  bool forget_standby();
  uint64_t standby_bytes() const;
  void give_turns();
  base::Status give_turn(Connection& c);
  base::Status make_scratch(Connection& c, Descriptor* out_shared);
  void end_turn(Connection& c);
  // Takes everything back and closes the connection; `why` is logged unless it is empty.
  void remove(Connection& c, const std::string& why);
  void sweep();
  void look_at_loads();
  void look_at_clock();
  void retire(const std::shared_ptr<Model>& model);
  void forget(Model& model);
  void reply(Connection& c, const base::Status& status);
  void send(Connection& c, const Reply& message, std::span<const int> descriptors);
  void send_status(Connection& c);
  DaemonStatus status() const;

  const ServerOptions options_;
  uint64_t started_ns_ = 0;
  uint64_t capacity_bytes_ = 0;
  std::string worker_device_;  // what workers open
  std::unique_ptr<device::Device> device_;
  device::Stream link_stream_;
  loader::LinkCosts link_;
  std::unique_ptr<loader::ChunkPool> pool_;
  std::unique_ptr<loader::ImageCache> cache_;
  std::unique_ptr<sched::Residency> residency_;
  std::map<uint64_t, std::shared_ptr<Model>> models_;  // by id
  Listener listener_;
  Descriptor wake_;
  Descriptor epoll_;
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::deque<Connection*> waiting_;  // for the turn
  Connection* holder_ = nullptr;
  uint64_t wanted_since_ns_ = 0;  // somebody waits while holder_ has the turn
  uint64_t next_id_ = 1;
  DaemonStatus counts_;
  std::atomic<bool> stop_{false};
  std::unique_ptr<ImageReader> reader_;
  std::thread thread_;
};

}  // namespace gpushare::daemon
