// words.hpp: words that several threads or processes read and write. What was written before a store() is seen after the load() that reads it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gpushare::shim {

template <class T>
T load(const T& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

template <class T>
struct Same {
  using Type = T;
};
// The value takes the word's type: store(word, 1).
template <class T>
void store(T& word, typename Same<T>::Type to) {
  __atomic_store_n(&word, to, __ATOMIC_RELEASE);
}

}  // namespace gpushare::shim
