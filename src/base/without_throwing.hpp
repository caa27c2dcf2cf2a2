// without_throwing.hpp: steps of a destructor that may lack host memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <utility>

#include "base/cancel.hpp"

namespace gpushare::base {

// Runs one step of a destructor. A step that fails for want of memory is left out, and the next one follows: whatever it
// could not give back, its owner gives back when the owner ends. The thread's own end (pthread_exit, pthread_cancel) goes on.
template <class F>
GPUSHARE_CATCHES_FORCED_UNWIND bool without_throwing(F&& step) {
  try {
    std::forward<F>(step)();
    return true;
  } catch (const ForcedUnwind&) {
    throw;
  } catch (...) {
    return false;
  }
}

}  // namespace gpushare::base
