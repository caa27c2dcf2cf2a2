// first_fault.hpp: keeps the first of the faults that threads find, for the test that checks it at its end.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>
#include <string>

namespace gpushare::test {

// For any thread.
class FirstFault {
 public:
  void add(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (first_.empty()) first_ = what;
  }
  std::string first() const {  // empty: there was none
    const std::lock_guard lock(mutex_);
    return first_;
  }

 private:
  mutable std::mutex mutex_;
  std::string first_;
};

}  // namespace gpushare::test
