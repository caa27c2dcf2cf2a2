// words.hpp: words that several threads or processes read and write. Writes before a store() are visible after the
// load() that reads it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sched.h>
#include <unistd.h>

#include <cstdint>

namespace gpushare::shim {

// Always in place, so that files that are compiled without a sanitizer's checks do not get others' copies with them.
template <class T>
__attribute__((always_inline)) inline T load(const T& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

template <class T>
struct Same {
  using Type = T;
};
// The value takes the word's type: store(word, 1).
template <class T>
__attribute__((always_inline)) inline void store(T& word, typename Same<T>::Type to) {
  __atomic_store_n(&word, to, __ATOMIC_RELEASE);
}

// Holds a lock of one word, which is held for a few instructions at a time.
class Locked {
 public:
  explicit Locked(uint32_t& word) : word_(word) {
    for (int spins = 0; __atomic_exchange_n(&word_, 1U, __ATOMIC_ACQUIRE) != 0; ++spins)
      if (spins % 64 == 63) sched_yield();
  }
  ~Locked() { store(word_, 0); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  uint32_t& word_;
};

// A lock whose word is the number of the process that holds it, so that a child of fork does not wait for a thread that
// it has not got. It is given back by store(word, 0).
inline bool try_lock_by_process(uint32_t& word) {
  const auto own = static_cast<uint32_t>(getpid());
  uint32_t holder = load(word);
  return holder != own &&
         __atomic_compare_exchange_n(&word, &holder, own, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}
class LockedByProcess {
 public:
  explicit LockedByProcess(uint32_t& word) : word_(word) {
    while (!try_lock_by_process(word_)) sched_yield();
  }
  ~LockedByProcess() { store(word_, 0); }
  LockedByProcess(const LockedByProcess&) = delete;
  LockedByProcess& operator=(const LockedByProcess&) = delete;

 private:
  uint32_t& word_;
};

}  // namespace gpushare::shim
