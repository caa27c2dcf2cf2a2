// Objects built on a runtime. They are told when the runtime closes, and destroyed on a thread that may wait.
// SPDX-License-Identifier: Apache-2.0
#include "executor/dependents.hpp"

#include <utility>

#include "executor/internal.hpp"

namespace gpushare::executor {

base::Status Dependents::attach(std::weak_ptr<Dependent> dependent, std::shared_ptr<void> runtime) {
  const std::shared_ptr<Dependent> alive = dependent.lock();
  if (alive == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "the dependent is gone"};
  const std::shared_ptr<void> life(alive.get(), [this, runtime = std::move(runtime)](void*) {
    base::MutexLock lock(mutex_);
    changed_.notify_all();
  });
  base::MutexLock lock(mutex_);
  if (told_) return {GPUSHARE_INVALID_STATE, "the runtime is closed"};
  std::erase_if(attached_, [](const Attached& attached) { return attached.life.expired(); });
  attached_.push_back({std::move(dependent), life});
  alive->life_ = life;
  return {};
}

void Dependents::close() {
  std::vector<Attached> attached;
  {
    base::MutexLock lock(mutex_);
    told_ = true;
    attached.swap(attached_);
  }
  for (auto last = attached.rbegin(); last != attached.rend(); ++last) {
    if (const auto alive = last->dependent.lock()) {
      alive->runtime_closing();
      continue;
    }
    for (;;) {  // another thread is destroying it, or leaves that to this one
      destroy_let_go();
      base::MutexLock lock(mutex_);
      if (last->life.expired()) break;
      if (let_go_ == nullptr) changed_.wait(mutex_);
    }
  }
}

bool Dependents::let_go(std::unique_ptr<Dependent>& dependent) noexcept {
  base::MutexLock lock(mutex_);
  if (closed_) return false;
  dependent->next_ = std::move(let_go_);
  let_go_ = std::move(dependent);
  changed_.notify_all();
  return true;
}

bool Dependents::any_let_go() const {
  base::MutexLock lock(mutex_);
  return let_go_ != nullptr;
}

void Dependents::destroy_let_go() noexcept {
  std::unique_ptr<Dependent> list;
  {
    base::MutexLock lock(mutex_);
    list = std::move(let_go_);
  }
  const CallbackScope scope;  // objects that go with them may not close the runtime whose thread this is
  while (list != nullptr) list = std::move(list->next_);
}

void Dependents::closed() {
  {
    base::MutexLock lock(mutex_);
    closed_ = true;
  }
  destroy_let_go();
}

}  // namespace gpushare::executor
