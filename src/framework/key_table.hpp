// key_table.hpp: from a number (a session's id, a native stream) to a shared object, read on every allocation by
// threads of different sessions that must not share a lock. Readers walk a bucket's list without one and lock the node
// they find, which belongs to one session. Nodes are never freed before the table: a node whose key is erased serves
// the next key of its bucket.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.hpp"

namespace gpushare::framework {

template <class T>
class KeyTable {
 public:
  static constexpr uint64_t kNoKey = UINT64_MAX;  // not a key

  KeyTable() = default;
  KeyTable(const KeyTable&) = delete;
  KeyTable& operator=(const KeyTable&) = delete;
  ~KeyTable() {
    for (auto& bucket : buckets_)
      for (Node* node = bucket.load(); node != nullptr;) {
        const std::unique_ptr<Node> owned(node);
        node = node->next;
      }
  }

  // Null if the key is not there.
  std::shared_ptr<T> find(uint64_t key) const {
    for (Node* node = bucket_of(key).load(std::memory_order_acquire); node != nullptr; node = node->next) {
      if (node->key.load(std::memory_order_acquire) != key) continue;
      base::MutexLock lock(node->mutex);
      if (node->key.load(std::memory_order_relaxed) == key) return node->value;
    }
    return nullptr;
  }

  // Replaces the value of the key, and returns the earlier one.
  std::shared_ptr<T> assign(uint64_t key, std::shared_ptr<T> value) {
    base::MutexLock writing(writers_);
    Node* unused = nullptr;
    std::atomic<Node*>& bucket = bucket_of(key);
    for (Node* node = bucket.load(std::memory_order_relaxed); node != nullptr; node = node->next) {
      const uint64_t found = node->key.load(std::memory_order_relaxed);
      if (found == kNoKey) unused = node;
      if (found != key) continue;
      base::MutexLock lock(node->mutex);
      node->value.swap(value);
      return value;
    }
    if (unused == nullptr) {
      unused = new Node;
      unused->next = bucket.load(std::memory_order_relaxed);
      bucket.store(unused, std::memory_order_release);
    }
    base::MutexLock lock(unused->mutex);
    unused->value = std::move(value);
    unused->key.store(key, std::memory_order_release);
    return nullptr;
  }

  // Returns the value; null if the key was not there.
  std::shared_ptr<T> erase(uint64_t key) {
    base::MutexLock writing(writers_);
    for (Node* node = bucket_of(key).load(std::memory_order_relaxed); node != nullptr; node = node->next) {
      if (node->key.load(std::memory_order_relaxed) != key) continue;
      base::MutexLock lock(node->mutex);
      node->key.store(kNoKey, std::memory_order_release);
      return std::exchange(node->value, nullptr);
    }
    return nullptr;
  }

  // Removes some value and returns it; null if there is none. Allocates nothing.
  std::shared_ptr<T> take_any() {
    base::MutexLock writing(writers_);
    for (const auto& bucket : buckets_)
      for (Node* node = bucket.load(std::memory_order_relaxed); node != nullptr; node = node->next) {
        base::MutexLock lock(node->mutex);
        if (node->value == nullptr) continue;
        node->key.store(kNoKey, std::memory_order_release);
        return std::exchange(node->value, nullptr);
      }
    return nullptr;
  }

  // All values as they are now.
  std::vector<std::shared_ptr<T>> values() const {
    std::vector<std::shared_ptr<T>> all;
    base::MutexLock writing(writers_);
    for (const auto& bucket : buckets_)
      for (Node* node = bucket.load(std::memory_order_relaxed); node != nullptr; node = node->next) {
        base::MutexLock lock(node->mutex);
        if (node->value != nullptr) all.push_back(node->value);
      }
    return all;
  }

 private:
  struct Node {
    std::atomic<uint64_t> key{kNoKey};
    base::Mutex mutex;
    std::shared_ptr<T> value GPUSHARE_GUARDED_BY(mutex);
    Node* next = nullptr;  // set before the node is seen
  };
  static constexpr unsigned kBits = 8;
  std::atomic<Node*>& bucket_of(uint64_t key) const {
    return buckets_[(key * 0x9e3779b97f4a7c15u) >> (64 - kBits)];
  }

  mutable base::Mutex writers_;
  mutable std::array<std::atomic<Node*>, 1u << kBits> buckets_{};
};

}  // namespace gpushare::framework
