// SPDX-License-Identifier: Apache-2.0
#include "daemon/group_page.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <ctime>

#include "base/clock.hpp"
#include "base/saturate.hpp"
#include "shim/group.hpp"

namespace gpushare::daemon {
namespace {

constexpr long kXfsMagic = 0x58465342;

bool never_blocks(int file) {
  struct statfs system {};
  if (fstatfs(file, &system) != 0) return false;
  const auto type = static_cast<long>(system.f_type);
  return type == TMPFS_MAGIC || type == EXT4_SUPER_MAGIC || type == kXfsMagic || type == BTRFS_SUPER_MAGIC;
}

template <class T>
bool read_at(int file, size_t offset, T* out) {
  return pread(file, out, sizeof(T), static_cast<off_t>(offset)) == static_cast<ssize_t>(sizeof(T));
}

size_t lent_at(int place) {
  return offsetof(shim::GroupPage, lent_bytes) + static_cast<size_t>(place) * sizeof(uint64_t);
}

uint64_t cpu_ns() {
  timespec time{};
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

}  // namespace

// A process holds the lock of its slot for as long as it lives. The kernel walks all locks of the file to answer, and the
// programs can make any number of them.
bool GroupPage::is_alive(uint32_t slot) const {
  const uint64_t now_ns = base::host_now_ns();
  if (!patience_.may(user_, now_ns)) return true;
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(slot);
  lock.l_len = 1;
  const uint64_t before_ns = cpu_ns();
  const bool alive = fcntl(file_.get(), F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
  patience_.spent(user_, cpu_ns() - before_ns, now_ns);
  return alive;
}

std::unique_ptr<GroupPage> GroupPage::open(client::Descriptor file, uint32_t pci_address, uid_t user,
                                           Patience& patience) {
  struct stat about {};
  uint32_t mark[2] = {};  // magic, version
  if (fstat(file.get(), &about) != 0 || !S_ISREG(about.st_mode) || !never_blocks(file.get()) ||
      about.st_size != static_cast<off_t>(sizeof(shim::GroupPage)) || !read_at(file.get(), 0, &mark) ||
      mark[0] != shim::kPageMagic || mark[1] != shim::kPageVersion)
    return nullptr;
  uint64_t devices[shim::kDevices] = {};
  if (!read_at(file.get(), offsetof(shim::GroupPage, devices), &devices)) return nullptr;
  const auto* const found =
      pci_address == 0 ? std::begin(devices)
                       : std::find(std::begin(devices), std::end(devices), shim::device_word(pci_address));
  if (found == std::end(devices)) return nullptr;
  return std::unique_ptr<GroupPage>(
      new GroupPage(std::move(file), static_cast<int>(found - devices), user, patience));
}

GroupPage::Limit GroupPage::limit() const {
  struct Words {  // read at once, because each lender's are read after each event
    shim::Limits limits;
    uint64_t lent_bytes[shim::kDevices];
  } words;
  static_assert(offsetof(Words, lent_bytes) ==
                offsetof(shim::GroupPage, lent_bytes) - offsetof(shim::GroupPage, limits));
  if (!read_at(file_.get(), offsetof(shim::GroupPage, limits), &words)) return {};
  const uint64_t all = words.limits.device_bytes;
  Limit limit;
  limit.lent_bytes = words.lent_bytes[place_];
  limit.bytes = all == shim::kNoLimit ? all : all - std::min(all, limit.lent_bytes);
  return limit;
}

std::optional<sched::SessionClass> GroupPage::cls() const {
  constexpr size_t at = offsetof(shim::GroupPage, share);
  uint32_t said = 0, cls = 0;  // in this order: it is said last
  if (!read_at(file_.get(), at + offsetof(shim::Share, said), &said) || (said & shim::Share::kClass) == 0 ||
      !read_at(file_.get(), at + offsetof(shim::Share, cls), &cls) ||
      cls > static_cast<uint32_t>(sched::SessionClass::kOpportunistic))
    return std::nullopt;
  return static_cast<sched::SessionClass>(cls);
}

bool GroupPage::write_lent(uint64_t bytes) {
  return pwrite(file_.get(), &bytes, sizeof bytes, static_cast<off_t>(lent_at(place_))) ==
         static_cast<ssize_t>(sizeof bytes);
}

bool GroupPage::set_lent(uint64_t bytes) {
  const Limit before = limit();
  if (before.bytes == shim::kNoLimit || (before.bytes == 0 && before.lent_bytes == 0)) return false;
  if (!write_lent(bytes)) return false;
  // Programs that charged against the limit of before have done so by now, or look at the new one: shim::add().
  if (bytes <= before.lent_bytes || held_bytes() <= limit().bytes) return true;
  write_lent(before.lent_bytes);
  return false;
}

GroupPage::Held GroupPage::held() const {
  uint32_t used = 0;
  if (!read_at(file_.get(), offsetof(shim::GroupPage, slots_used), &used)) return {UINT64_MAX, 0, 0};
  Held held;
  for (uint32_t i = 0; i < std::min<uint32_t>(used, shim::kSlots); ++i) {
    shim::Slot slot;
    if (!read_at(file_.get(), offsetof(shim::GroupPage, slots) + i * sizeof slot, &slot))
      return {UINT64_MAX, 0, 0};
    const uint64_t bytes = base::add_saturated(slot.counted[place_], slot.overhead[place_]);
    if (slot.identity == 0 || (bytes == 0 && slot.pinned == 0) || !is_alive(i)) continue;
    held.device_bytes = base::add_saturated(held.device_bytes, bytes);
    held.spilled_bytes = base::add_saturated(held.spilled_bytes, slot.spilled[place_]);
    held.pinned_bytes = base::add_saturated(held.pinned_bytes, slot.pinned);
  }
  return held;
}

}  // namespace gpushare::daemon
