// service_thread.hpp: a thread that the library starts. It is never cancelled, and takes none of the process's signals.
// If a callback ends it (pthread_exit), another thread goes on in its place: the body is called again, from its start.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

namespace gpushare::base {

class ServiceThread {
 public:
  ServiceThread() = default;
  // The body returns to end the thread. Where it calls the caller's functions it must be ready to be unwound, and to be
  // called again on another thread. Throws std::system_error, std::bad_alloc.
  explicit ServiceThread(std::function<void()> body);
  bool joinable() const { return state_ != nullptr; }
  // Waits until the body has returned.
  void join();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace gpushare::base
