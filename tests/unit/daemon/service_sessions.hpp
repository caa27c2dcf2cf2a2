// service_sessions.hpp: sessions, iterations and blocks of runtimes on the daemon's service, for tests that expect them to work.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>

#include "support/bytes.hpp"
#include "support/shared_service.hpp"

namespace gpushare::test {

inline constexpr uint64_t kLong = 60'000'000'000;

inline std::shared_ptr<executor::Session> open_session(executor::Runtime& runtime, const std::string& name,
                                                       uint64_t p, uint64_t e, int32_t priority = 0) {
  return open_session(runtime, need(name, p, e, priority));
}

inline std::shared_ptr<executor::Iteration> begin(executor::Session& session) {
  auto iteration = session.begin(kLong);
  INFO(iteration.status().to_string());
  REQUIRE(iteration.ok());
  return *iteration;
}

inline void* alloc(executor::Session& session, uint64_t bytes) {
  const auto address = session.alloc(memory::Kind::kModel, bytes, 0);
  INFO(address.status().to_string());
  REQUIRE(address.ok());
  return reinterpret_cast<void*>(*address);
}

// An iteration that writes the first values: between iterations a session may be paged out.
inline void fill(executor::Session& session, void* block, uint64_t bytes, int value) {
  const auto iteration = begin(session);
  std::memset(block, value, bytes);
  REQUIRE_OK(iteration->end());
}

}  // namespace gpushare::test
