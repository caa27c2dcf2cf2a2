// c_api: the extern "C" bodies of gpushare.h, one file a noun, each a thin step from handles and structs to
// the C++ core. Calls everything below it; called by nobody but users. guard.hpp turns exceptions and Status
// into codes and the thread's last error, abi.hpp reads and writes the sized structs, handles.hpp tells live
// handles from stale ones.
//
// handles.hpp: handles are not pointers. A handle is (type, generation, slot) packed into a pointer-sized
// value; looking it up compares the generation, so a stale, foreign or random handle is refused and never
// followed.
//
// A lookup pins the object: a release that happens meanwhile invalidates the handle at once, and the object
// goes when its last pin goes. Lookup is wait-free (one fetch_add); slots live in chunks that are never
// freed, so a stale handle always has a slot to be compared with.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include "base/fork.hpp"
#include "base/mutex.hpp"
#include "base/status.hpp"

namespace gpushare::capi {

// A child of a fork has its parent's tables, but the objects are of no use there: their threads and their device are the
// parent's. The child leaves them alone for good, refuses their handles, and makes its own from other slots.
// T: the object. Tag: 1 to 255, one per handle type.
template <class T, unsigned Tag>
class HandleTable {
  static_assert(Tag >= 1 && Tag <= 255, "a handle has 8 bits for its type");

 private:
  struct Slot {
    // generation (32 bits) | retired (1) | pins (31). Even generations are free, odd ones live.
    std::atomic<uint64_t> word{0};
    std::atomic<const void*> live{nullptr};  // the handle; while none is live, dead(index)
    uint32_t index = 0;
    bool kept = false;                 // for one owner's use again and again
    std::atomic<bool> parked{false};   // kept, and no handle of it is live or pinned
    std::atomic<T*> address{nullptr};  // the object's, for peek()
    std::array<std::atomic<uint64_t>, 2>
        note{};  // while the slot is free, the first is the next free one, plus 1
    std::shared_ptr<T> object;
  };
  static constexpr uint64_t kRetired = 1ull << 31;
  static constexpr uint64_t kPins = kRetired - 1;
  static constexpr uint32_t kChunkBits = 12;
  static constexpr uint32_t kMaxChunks = 1u << 12;  // 16.7 million live handles of a type
  static constexpr uint32_t kInChunk = (1u << kChunkBits) - 1;
  static constexpr uint64_t kIndexBits = 24, kIndexMask = (1ull << kIndexBits) - 1;
  static_assert(kChunkBits + 12 == kIndexBits);
  using Chunk = std::array<Slot, kInChunk + 1>;
  static_assert(sizeof(void*) == 8, "a handle packs 8 + 32 + 24 bits");

 public:
  // Keeps the object alive; empty if the handle was not live.
  class Pin {
   public:
    Pin() = default;
    Pin(HandleTable* table, Slot* slot) : table_(table), slot_(slot) {}
    Pin(Pin&& other) noexcept : table_(other.table_), slot_(std::exchange(other.slot_, nullptr)) {}
    Pin& operator=(Pin&& other) noexcept {
      std::swap(table_, other.table_);
      std::swap(slot_, other.slot_);
      return *this;
    }
    ~Pin() {
      if (slot_ != nullptr) table_->unpin(*slot_);
    }
    explicit operator bool() const { return slot_ != nullptr; }
    T* operator->() const { return slot_->object.get(); }
    T& operator*() const { return *slot_->object; }
    const std::shared_ptr<T>& shared() const { return slot_->object; }
    // read_note() tells it for as long as the handle is live. Several threads may leave the same note.
    void leave_note(uint64_t first) const { slot_->note[0].store(first, std::memory_order_release); }

   private:
    HandleTable* table_ = nullptr;
    Slot* slot_ = nullptr;
  };

  // A slot that is used for one object again and again, without the table's lock: see keep().
  class Kept {
   public:
    Kept(HandleTable* table, Slot* slot) : table_(table), slot_(slot) {}
    ~Kept() { table_->give_up(*slot_); }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;
    // Between handles: the last one has been removed and nobody has it pinned.
    bool parked() const { return slot_->parked.load(std::memory_order_acquire); }
    // For the owner, while parked.
    T& object() const { return *slot_->object; }
    // A new handle, with a note that read_note() tells for as long as the handle is live.
    void* reopen(uint64_t first, uint64_t second) {
      slot_->parked.store(false, std::memory_order_relaxed);
      return open(*slot_, first, second);
    }

   private:
    HandleTable* const table_;
    Slot* const slot_;
  };

  // One table a type in the process. Never destroyed: handles may be used while static destructors run. There from the
  // beginning: no look-up asks whether the table has been made.
  static HandleTable& instance() {
    static_assert(std::is_trivially_destructible_v<HandleTable>, "no destructor may run at exit");
    static constinit HandleTable table;
    return table;
  }
  constexpr HandleTable() = default;
  HandleTable(const HandleTable&) = delete;
  HandleTable& operator=(const HandleTable&) = delete;

  // null when every slot is taken.
  void* add(std::shared_ptr<T> object) {
    Slot* slot = take_slot(std::move(object));
    return slot == nullptr ? nullptr : open(*slot, 0, 0);
  }

  // For T with `std::shared_ptr<void> park()`, which lets go of the resources that the object has only while a handle
  // of it is live; called when the last pin goes. Null when every slot is taken.
  std::shared_ptr<Kept> keep(std::shared_ptr<T> object) {
    Slot* slot = take_slot(std::move(object));
    if (slot == nullptr) return nullptr;
    slot->kept = true;
    slot->parked.store(true, std::memory_order_relaxed);
    return std::make_shared<Kept>(this, slot);
  }

 private:
  // Tells the table when the process forks. Without memory for the hook, a child must not use its parent's handles.
  [[gnu::noinline]] bool add_hook() {
    hook_.before = [](void* self)
                       GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { static_cast<HandleTable*>(self)->mutex_.lock(); };
    hook_.after = [](void* self, bool in_child) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
      auto* table = static_cast<HandleTable*>(self);
      if (in_child) table->disown();
      table->mutex_.unlock();
    };
    hook_.self = this;
    return base::add_fork_hook(hook_);
  }
  // Null when every slot is taken. Throws bad_alloc.
  Slot* free_slot() {
    base::MutexLock lock(mutex_);
    if (free_ != 0) {
      Slot& slot = slot_at(free_ - 1);
      free_ = static_cast<uint32_t>(slot.note[0].load(std::memory_order_relaxed));
      return &slot;
    }
    if ((next_ & kInChunk) == 0) {
      if ((next_ >> kChunkBits) >= kMaxChunks) return nullptr;
      auto* const chunk = new Chunk;
      for (uint32_t i = 0; i <= kInChunk; ++i) {
        (*chunk)[i].index = next_ + i;
        (*chunk)[i].live.store(dead(next_ + i), std::memory_order_relaxed);
      }
      chunks_[next_ >> kChunkBits].store(chunk, std::memory_order_release);
    }
    return &slot_at(next_++);
  }
  Slot* take_slot(std::shared_ptr<T> object) {
    [[maybe_unused]] static const bool hooked =
        instance().add_hook();  // before the first handle, and without mutex_
    Slot* const taken = free_slot();
    if (taken == nullptr) return nullptr;
    Slot& slot = *taken;
    slot.address.store(object.get(), std::memory_order_relaxed);
    slot.object = std::move(object);
    return &slot;
  }
  static void* open(Slot& slot, uint64_t first, uint64_t second) {
    // Release: who reads one of these finds the handle before it retired.
    slot.note[0].store(first, std::memory_order_release);
    slot.note[1].store(second, std::memory_order_release);
    // An addition, not a store: a stale lookup may hold a short-lived pin.
    const uint64_t word = slot.word.fetch_add(1ull << 32, std::memory_order_release);
    void* const handle = pack(slot.index, ((word >> 32) + 1) & 0xffffffffull);
    slot.live.store(handle, std::memory_order_release);
    return handle;
  }

 public:
  // The address of the object behind the handle, without keeping it alive: for comparison, and for objects whose calls the
  // caller serialises. null if the handle is not live.
  T* peek(const void* handle) const {
    const Slot* const slot = slot_of_live(handle);
    return slot != nullptr ? slot->address.load(std::memory_order_relaxed) : nullptr;
  }
  bool is_live(const void* handle) const { return slot_of_live(handle) != nullptr; }
  // False if the handle is not live.
  bool read_note(const void* handle, uint64_t* first, uint64_t* second) const {
    const Slot* const slot = slot_of_live(handle);
    if (slot == nullptr) return false;
    *first = slot->note[0].load(std::memory_order_acquire);
    *second = slot->note[1].load(std::memory_order_acquire);
    return slot->live.load(std::memory_order_acquire) == handle;  // the two are of this handle if it still is
  }

  Pin find(const void* handle) {
    uint32_t index = 0;
    uint64_t generation = 0;
    Slot* slot = nullptr;
    if (!unpack(handle, &index, &generation) || index < inherited_ || (slot = find_slot(index)) == nullptr)
      return {};
    const uint64_t word = slot->word.fetch_add(1, std::memory_order_acquire);
    Pin pin(this, slot);
    if ((word >> 32) != generation || (word & kRetired) != 0) return {};
    return pin;
  }

  // `visit` for each object that has a live handle, pinned meanwhile. Handles that come or go during the call may be missed.
  template <class Visit>
  void each(Visit&& visit) {
    if (chunks_[0].load(std::memory_order_acquire) == nullptr)
      return;  // nothing yet, and no hook to let the lock go in a child
    uint32_t end = 0;
    {
      base::MutexLock lock(mutex_);
      end = next_;
    }
    for (uint32_t index = inherited_; index < end; ++index) {
      Slot& slot = slot_at(index);
      const uint64_t word = slot.word.fetch_add(1, std::memory_order_acquire);
      const Pin pin(this, &slot);
      if (((word >> 32) & 1) != 0 && (word & kRetired) == 0) visit(*pin);
    }
  }

  // The handle is of an object of the process that forked this one.
  bool inherited(const void* handle) const {
    uint32_t index = 0;
    uint64_t generation = 0;
    return unpack(handle, &index, &generation) && index < inherited_;
  }

  // Invalidates the handle; true for exactly one caller. The object goes with its last pin, or with
  // *out_object.
  bool remove(const void* handle, std::shared_ptr<T>* out_object = nullptr) {
    const Pin pin = take(handle);
    if (!pin) return false;
    if (out_object != nullptr) *out_object = pin.shared();
    return true;
  }
  // The same, with a pin of the object for the one caller.
  Pin take(const void* handle) {
    Pin pin = find(handle);
    if (!pin) return {};
    uint32_t index = 0;
    uint64_t generation = 0;
    (void)unpack(handle, &index, &generation);
    Slot& slot = slot_at(index);
    uint64_t word = slot.word.load(std::memory_order_acquire);
    do {
      if ((word >> 32) != generation || (word & kRetired) != 0) return {};
    } while (!slot.word.compare_exchange_weak(word, word | kRetired, std::memory_order_acq_rel));
    slot.live.store(dead(index), std::memory_order_release);  // the pin keeps the slot from its next handle
    return pin;
  }

 private:
  // In the child of a fork: all slots so far are the parent's.
  void disown() GPUSHARE_REQUIRES(mutex_) {
    for (uint32_t index = inherited_; index < next_; ++index)
      slot_at(index).live.store(dead(index), std::memory_order_relaxed);
    free_ = 0;
    inherited_ = next_ = (next_ + kInChunk) & ~kInChunk;
  }

  void unpin(Slot& slot) {
    uint64_t word = slot.word.fetch_sub(1, std::memory_order_acq_rel) - 1;
    if ((word & kRetired) == 0 || (word & kPins) != 0) return;
    // The last pin of a retired slot frees it. A stale lookup may pin meanwhile: then this fails, and its
    // unpin comes here.
    const uint64_t freed = ((word >> 32) + 1) << 32;
    if (!slot.word.compare_exchange_strong(word, freed, std::memory_order_acq_rel)) return;
    if constexpr (requires(T & object) { object.park(); }) {
      if (slot.kept) {
        const std::shared_ptr<void> rest =
            slot.object->park();  // may be the last pointer to the slot's owner
        slot.parked.store(true, std::memory_order_release);
        return;
      }
    }
    vacate(slot);
  }
  void vacate(Slot& slot) {
    const std::shared_ptr<T> object = std::move(slot.object);
    slot.object.reset();
    slot.address.store(nullptr, std::memory_order_relaxed);
    base::MutexLock lock(mutex_);
    slot.note[0].store(free_, std::memory_order_relaxed);
    free_ = slot.index + 1;
  }
  // A kept slot that is not parked is lost: its owner keeps it from that.
  void give_up(Slot& slot) {
    if (slot.index < inherited_ || !slot.parked.exchange(false)) return;
    slot.kept = false;
    vacate(slot);
  }
  // Null if the handle is not live. One comparison looks at type, generation and slot together.
  [[gnu::always_inline]] const Slot* slot_of_live(const void* handle) const {
    const Slot* const slot =
        find_slot(static_cast<uint32_t>(reinterpret_cast<uint64_t>(handle) & kIndexMask));
    return slot != nullptr && slot->live.load(std::memory_order_acquire) == handle ? slot : nullptr;
  }
  // No handle that leads to the slot is equal to it.
  static const void* dead(uint32_t index) {
    return reinterpret_cast<const void*>(
        ~uint64_t{index});  // NOLINT(performance-no-int-to-ptr): never followed
  }

  // For an index below next_.
  Slot& slot_at(uint32_t index) const {
    return (*chunks_[index >> kChunkBits].load(std::memory_order_acquire))[index & kInChunk];
  }
  Slot* find_slot(uint32_t index) const {
    auto* slots = chunks_[index >> kChunkBits].load(std::memory_order_acquire);
    return slots == nullptr ? nullptr : &(*slots)[index & kInChunk];
  }
  static void* pack(uint32_t index, uint64_t generation) {
    const uint64_t value =
        (static_cast<uint64_t>(Tag) << 56) | ((generation & 0xffffffffull) << kIndexBits) | index;
    return reinterpret_cast<void*>(value);  // NOLINT(performance-no-int-to-ptr): never followed
  }
  static bool unpack(const void* handle, uint32_t* index, uint64_t* generation) {
    const auto value = reinterpret_cast<uint64_t>(handle);
    if ((value >> 56) != Tag) return false;
    *index = static_cast<uint32_t>(value & kIndexMask);
    *generation = (value >> kIndexBits) & 0xffffffffull;
    return (*generation & 1) == 1;
  }

  uint32_t inherited_ = 0;  // slots below are the parent's; changes only while the process has one thread
  base::ForkHook hook_;
  base::Mutex mutex_;
  uint32_t free_ GPUSHARE_GUARDED_BY(mutex_) = 0;  // the slot that was freed last, plus 1; 0: none
  uint32_t next_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  std::array<std::atomic<Chunk*>, kMaxChunks> chunks_{};
};

}  // namespace gpushare::capi
