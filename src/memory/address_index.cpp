// SPDX-License-Identifier: Apache-2.0
#include "memory/address_index.hpp"

#include <new>

namespace gpushare::memory {
namespace {
constexpr unsigned kGranuleShift = 21;
}

AddressIndex::~AddressIndex() {
  for (auto& child : root_.entries)
    if (void* node = child.load(std::memory_order_relaxed)) destroy(static_cast<Node*>(node), 1);
}

void AddressIndex::destroy(Node* node, unsigned level) {
  if (level + 1 < kLevels)
    for (auto& child : node->entries)
      if (void* next = child.load(std::memory_order_relaxed)) destroy(static_cast<Node*>(next), level + 1);
  delete node;
}

std::atomic<void*>* AddressIndex::entry(uint64_t granule, bool make) {
  Node* node = &root_;
  for (unsigned level = 0;; ++level) {
    auto& slot = node->entries[(granule >> ((kLevels - 1 - level) * kLevelBits)) & (kFanout - 1)];
    if (level + 1 == kLevels) return &slot;
    auto* next = static_cast<Node*>(slot.load(std::memory_order_acquire));
    if (next == nullptr) {
      if (!make || (next = new (std::nothrow) Node) == nullptr) return nullptr;
      slot.store(next, std::memory_order_release);
    }
    node = next;
  }
}

BlockOwner* AddressIndex::find(device::Address address) const {
  const uint64_t granule = address >> kGranuleShift;
  const Node* node = &root_;
  void* next = nullptr;
  for (unsigned level = 0; level < kLevels; ++level) {
    next = node->entries[(granule >> ((kLevels - 1 - level) * kLevelBits)) & (kFanout - 1)].load(
        std::memory_order_acquire);
    if (next == nullptr) return nullptr;
    node = static_cast<const Node*>(next);
  }
  return static_cast<BlockOwner*>(next);
}

base::Status AddressIndex::set(device::Address address, uint64_t bytes, BlockOwner* owner) {
  const uint64_t first = address >> kGranuleShift;
  const uint64_t end = first + (bytes >> kGranuleShift);
  base::MutexLock lock(mutex_);
  for (uint64_t granule = first; granule < end; ++granule) {
    auto* slot = entry(granule, true);
    base::Status status;
    if (slot == nullptr)
      status = {GPUSHARE_HOST_OUT_OF_MEMORY, "no host memory for the address index"};
    else if (slot->load(std::memory_order_relaxed) != nullptr)
      status = {GPUSHARE_ALREADY_EXISTS,
                base::format("device address %#llx has an owner already",
                             static_cast<unsigned long long>(granule) << kGranuleShift)};
    if (!status.ok()) {
      while (granule > first) entry(--granule, false)->store(nullptr, std::memory_order_release);
      return status;
    }
    slot->store(owner, std::memory_order_release);
  }
  return {};
}

base::Status AddressIndex::prepare(device::Address address, uint64_t bytes) {
  const uint64_t first = address >> kGranuleShift;
  base::MutexLock lock(mutex_);
  for (uint64_t granule = first; granule < first + (bytes >> kGranuleShift); ++granule)
    if (entry(granule, true) == nullptr)
      return {GPUSHARE_HOST_OUT_OF_MEMORY, "no host memory for the address index"};
  return {};
}

void AddressIndex::clear(device::Address address, uint64_t bytes) {
  const uint64_t first = address >> kGranuleShift;
  base::MutexLock lock(mutex_);
  for (uint64_t granule = first; granule < first + (bytes >> kGranuleShift); ++granule)
    if (auto* slot = entry(granule, false)) slot->store(nullptr, std::memory_order_release);
}

}  // namespace gpushare::memory
