// shared_service.hpp: the daemon's service in this process, and runtimes that reach it through the environment.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "client/status.hpp"
#include "daemon/service.hpp"
#include "support/executor_fixture.hpp"
#include "support/first_fault.hpp"
#include "support/status_checks.hpp"

namespace gpushare::test {

// No wait ends by time. A test that hangs says where, every half minute.
template <class Condition>
void eventually(Condition&& condition, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  auto say_at = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (std::chrono::steady_clock::now() < say_at) continue;
    std::fprintf(stderr, "%s:%d: the condition is not true yet\n", file, line);
    say_at += std::chrono::seconds(30);
  }
}

struct SharedService {
  explicit SharedService(const std::function<void(daemon::ServiceOptions&)>& change = {}) {
    char name[] = "/tmp/gpushare-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    folder = name;
    options.socket = folder + "/socket";
    options.devices = {"host?total_bytes=268435456&granularity=65536"};
    options.capacity_bytes = 64 << 20;
    options.on_fault = [faults = faults](const std::string& wrong) { faults->add(wrong); };
    if (change) change(options);
    setenv("GPUSHARE_SOCKET", options.socket.c_str(), 1);
    setenv("GPUSHARE_DAEMON_WAIT", "0", 1);  // else a test that ends the daemon waits for another one
    start();
  }
  ~SharedService() {
    service.reset();
    std::filesystem::remove_all(folder);
    CHECK(faults->first() == "");
  }
  SharedService(const SharedService&) = delete;
  SharedService& operator=(const SharedService&) = delete;
  void start() {
    auto started = daemon::Service::start(options);
    INFO(started.status().to_string());
    REQUIRE(started.ok());
    service = std::move(*started);
  }
  // For any thread: open() asserts, which Catch2 allows on the main thread alone.
  static base::Result<std::shared_ptr<executor::Runtime>> try_open() {
    executor::RuntimeOptions runtime;
    runtime.device = "shared";
    return executor::Runtime::open(std::move(runtime));
  }
  static std::shared_ptr<executor::Runtime> open() {
    auto opened = try_open();
    INFO(opened.status().to_string());
    REQUIRE(opened.ok());
    return *opened;
  }
  client::ServiceStatus status() const {
    auto now = client::query_service(options.socket);
    INFO(now.status().to_string());
    REQUIRE(now.ok());
    return *now;
  }
  std::string folder;
  // What was found wrong with the books of the daemon's devices. The daemon's thread adds.
  const std::shared_ptr<FirstFault> faults = std::make_shared<FirstFault>();
  daemon::ServiceOptions options;
  std::unique_ptr<daemon::Service> service;
};

}  // namespace gpushare::test
