// daemon_fixture.hpp: a daemon in this process, on a small host device, with models of known bytes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/server.hpp"
#include "daemon/worker.hpp"
#include "support/catch.hpp"
#include "support/model_folder.hpp"
#include "support/status_checks.hpp"

namespace gpushare::test {

inline constexpr uint64_t kGranule = 64 << 10;

struct Daemon {
  explicit Daemon(uint64_t capacity_bytes = 16 * kGranule,
                  const std::function<void(daemon::ServerOptions&)>& change = {}) {
    options.socket = folder.file("socket");
    options.device = "host?total_bytes=67108864&granularity=65536";
    options.capacity_bytes = capacity_bytes;
    options.images_bytes = 64 << 20;
    options.chunk_bytes = 256 << 10;
    options.link = loader::LinkCosts{0.002, 5e6, 0.002};
    if (change) change(options);
    start();
  }
  void start() {
    auto started = daemon::Server::start(options);
    INFO(started.status().to_string());
    REQUIRE(started.ok());
    server = std::move(*started);
  }
  std::string model(const std::string& name, const std::vector<size_t>& sizes,
                    std::vector<std::string>* out_contents = nullptr) {
    return folder.make(name, sizes, random, out_contents);
  }
  daemon::WorkerOptions worker_options(const std::string& name, const std::string& path) const {
    daemon::WorkerOptions worker;
    worker.socket = options.socket;
    worker.name = name;
    worker.path = path;
    worker.timeout_ns = 30'000'000'000;
    return worker;
  }
  std::unique_ptr<daemon::Worker> attach(const std::string& name, const std::string& path,
                                         uint64_t scratch_bytes = 0) {
    daemon::WorkerOptions worker = worker_options(name, path);
    worker.scratch_bytes = scratch_bytes;
    auto attached = daemon::Worker::attach(worker);
    INFO(attached.status().to_string());
    REQUIRE(attached.ok());
    return std::move(*attached);
  }
  daemon::DaemonStatus status() const {
    auto now = daemon::query_status(options.socket);
    INFO(now.status().to_string());
    REQUIRE(now.ok());
    return *now;
  }
  // Until `condition` holds; fails after a long time (a hang must not hang the suite).
  void wait_for(const std::function<bool(const daemon::DaemonStatus&)>& condition) const {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition(status())) {
      REQUIRE(std::chrono::steady_clock::now() < limit);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  ModelFolder folder;
  Random random{seed()};
  daemon::ServerOptions options;
  std::unique_ptr<daemon::Server> server;
};

// Every layer's bytes as this worker sees them; waits for each.
inline std::vector<std::string> contents_of(daemon::Worker& worker) {
  std::vector<std::string> out;
  for (uint32_t i = 0; i < worker.layers().size(); ++i) {
    REQUIRE_OK(worker.wait_layers(i, i + 1, 30'000'000'000));
    out.emplace_back(reinterpret_cast<const char*>(worker.address(i)), worker.layers()[i].bytes);
  }
  return out;
}

}  // namespace gpushare::test
