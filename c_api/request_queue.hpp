// request_queue.hpp: the object behind a gpushare_request_queue; for request_queue.cpp and metrics.cpp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/mutex.hpp"
#include "executor/runtime.hpp"
#include "executor/serving/request_server.hpp"

namespace gpushare::capi {

// Where the daemon's readers see the counts of a queue: at the session of its first model.
class ShownAt {
 public:
  void begin(std::shared_ptr<executor::Session> session) {
    base::MutexLock lock(mutex_);
    if (session_ == nullptr) session_ = std::move(session);
  }
  void show(const executor::RequestServerStats& stats) {
    if (const std::shared_ptr<executor::Session> session = this->session())
      session->note_requests(stats.counts());
  }

 private:
  std::shared_ptr<executor::Session> session() {
    base::MutexLock lock(mutex_);
    return session_;
  }
  base::Mutex mutex_;
  std::shared_ptr<executor::Session> session_ GPUSHARE_GUARDED_BY(mutex_);
};

struct RequestQueueObject {
  static uint64_t next_number() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }
  const uint64_t number = next_number();  // of the process's queues, from 1
  std::shared_ptr<executor::Runtime> runtime;
  const std::shared_ptr<ShownAt> shown = std::make_shared<ShownAt>();
  std::unique_ptr<executor::RequestServer> server;
};

}  // namespace gpushare::capi
