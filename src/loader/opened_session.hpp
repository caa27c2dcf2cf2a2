// opened_session.hpp: a session that was opened for a purpose, and is closed again unless the purpose is reached.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "base/without_throwing.hpp"
#include "executor/runtime.hpp"

namespace gpushare::loader {

class OpenedSession {
 public:
  explicit OpenedSession(std::shared_ptr<executor::Session> session) : session_(std::move(session)) {}
  OpenedSession(OpenedSession&& other) noexcept : session_(std::move(other.session_)) {}
  OpenedSession& operator=(OpenedSession&&) = delete;
  ~OpenedSession() {
    if (session_ != nullptr) base::without_throwing([this] { (void)session_->close(); });
  }
  static base::Result<OpenedSession> of(base::Result<std::shared_ptr<executor::Session>> opened) {
    if (!opened.ok()) return opened.status();
    return OpenedSession(std::move(*opened));
  }
  executor::Session* operator->() const { return session_.get(); }
  const std::shared_ptr<executor::Session>& get() const { return session_; }
  // Stays open from here on.
  std::shared_ptr<executor::Session> take() { return std::move(session_); }

 private:
  std::shared_ptr<executor::Session> session_;
};

}  // namespace gpushare::loader
