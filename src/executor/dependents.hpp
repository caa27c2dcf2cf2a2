// dependents.hpp: objects built on a runtime (loaders, servers, images), which are told when the runtime closes. Other
// folders do not include it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "base/mutex.hpp"
#include "executor/runtime.hpp"

namespace gpushare::executor {

// Threads: any. Its lock is a leaf: dependents are called without it.
class Dependents {
 public:
  // Keeps `runtime` until the dependent's destructor has ended. INVALID_STATE once they were told that the runtime closes.
  base::Status attach(std::weak_ptr<Dependent> dependent, std::shared_ptr<void> runtime);
  // Tells the dependents that the runtime closes, the last first, and waits for dependents that other threads are destroying.
  void close();
  // Takes `dependent`, to be destroyed by destroy_let_go() on another thread. False once the runtime is closed: the
  // dependent holds nothing of the device any more, and the caller destroys it.
  bool let_go(std::unique_ptr<Dependent>& dependent) noexcept;
  bool any_let_go() const;
  void destroy_let_go() noexcept;
  void closed();  // nobody is left to destroy what is let go later

 private:
  struct Attached {
    std::weak_ptr<Dependent> dependent;
    std::weak_ptr<void> life;  // ends with the dependent's destructor, which takes a while
  };
  mutable base::Mutex mutex_;
  base::ConditionVariable changed_;  // one was destroyed or let go
  std::vector<Attached> attached_ GPUSHARE_GUARDED_BY(mutex_);
  std::unique_ptr<Dependent> let_go_ GPUSHARE_GUARDED_BY(mutex_);  // a list
  bool told_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool closed_ GPUSHARE_GUARDED_BY(mutex_) = false;
};

}  // namespace gpushare::executor
