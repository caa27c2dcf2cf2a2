// failing_new.hpp: an operator new that fails on demand, on every thread but those of the test. For programs of their
// own: include it in one source file.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace gpushare::test {

inline std::atomic<int64_t> allocations_left{INT64_MAX};  // until one fails
inline std::atomic<bool> keeps_failing{false};            // and every one after it
inline std::atomic<uint64_t> failures{0};
inline thread_local bool spared = false;  // allocations of this thread neither count nor fail

// While one lives, the allocation after `succeed` others fails; `for_ever`: so does every later one.
class FailingNew {
 public:
  FailingNew(uint64_t succeed, bool for_ever) {
    failures = 0;
    keeps_failing = for_ever;
    allocations_left = static_cast<int64_t>(succeed);
  }
  ~FailingNew() { allocations_left = INT64_MAX; }
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;
};

// This thread's allocations never fail meanwhile, or (spare = false) may.
class Spared {
 public:
  explicit Spared(bool spare = true) : before_(spared) { spared = spare; }
  ~Spared() { spared = before_; }
  Spared(const Spared&) = delete;
  Spared& operator=(const Spared&) = delete;

 private:
  const bool before_;
};

inline bool refuses() {
  if (spared || allocations_left.load(std::memory_order_relaxed) == INT64_MAX) return false;
  const int64_t left = allocations_left.fetch_sub(1, std::memory_order_relaxed);
  if (left > 0 || (left < 0 && !keeps_failing)) return false;
  ++failures;
  return true;
}

}  // namespace gpushare::test

// Arrays come here too, by the default operators; except under sanitizers, which bring their own, in pairs.
void* operator new(size_t bytes) {
  if (!gpushare::test::refuses())
    if (void* block = std::malloc(bytes != 0 ? bytes : 1)) return block;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  const size_t unit = static_cast<size_t>(alignment);
  if (!gpushare::test::refuses())
    if (void* block = std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit)) return block;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return gpushare::test::refuses() ? nullptr : std::malloc(bytes != 0 ? bytes : 1);
}
void operator delete(void* block) noexcept {
  std::free(block);
}
void operator delete(void* block, const std::nothrow_t&) noexcept {
  std::free(block);
}
void operator delete(void* block, size_t) noexcept {
  std::free(block);
}
void operator delete(void* block, std::align_val_t) noexcept {
  std::free(block);
}
void operator delete(void* block, size_t, std::align_val_t) noexcept {
  std::free(block);
}
