// no_destroy.hpp: a static object that is never destroyed, for objects that threads and other statics' destructors may
// still use while the process exits. Its own destructor is trivial, so nothing is registered to run at exit.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <new>
#include <utility>

namespace gpushare::base {

// Use it as a function-local static: `static const NoDestroy<T> value(arguments...);`.
template <class T>
class NoDestroy {
 public:
  template <class... Arguments>
  explicit NoDestroy(Arguments&&... arguments) {
    new (static_cast<void*>(storage_)) T(std::forward<Arguments>(arguments)...);
  }
  NoDestroy(const NoDestroy&) = delete;
  NoDestroy& operator=(const NoDestroy&) = delete;
  const T& operator*() const { return *std::launder(reinterpret_cast<const T*>(storage_)); }
  T& operator*() { return *std::launder(reinterpret_cast<T*>(storage_)); }
  const T* operator->() const { return &**this; }
  T* operator->() { return &**this; }

 private:
  alignas(T) std::byte storage_[sizeof(T)];
};

}  // namespace gpushare::base
