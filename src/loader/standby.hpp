// standby.hpp: the first layers of a switcher's members on standby, on the device within a budget, so that a switch
// does not begin with waiting for them. They are separate copies, sent from the image, and no iteration sees them. So
// whatever an iteration does to its weights, the next load gets the image's bytes. A load copies them into the member's
// block, on the device, in place of sending them.
//
// Each prefix has a session with the executor, of its member's class, which is spare (executor::Session::set_spare):
// its bytes are admitted and counted like all others, and the scheduler drops it where room is needed and others are
// worth more. sched::give_up decides which members ask for a prefix within the budget, from what the prefix saves
// (prefix.hpp) and how often its member is wanted.
//
// Threads: calls that change something are for one thread at a time (the switcher's switching_); add and the rest are for
// any.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/role.hpp"
#include "loader/loader.hpp"
#include "loader/model.hpp"
#include "loader/prefix.hpp"

namespace gpushare::loader {

inline constexpr base::Role
    has_entries;  // the role of the holder of a Standby's mutex, which guards what is known of each member

class Standby {
 public:
  // A member as update() sees it.
  struct Use {
    uint64_t member = 0;
    double requests = 0;  // the rate of requests, in any unit that is the same for all
    bool away = false;    // no other bytes of the member are on the device
    bool active = false;
  };

  Standby(Loader& loader, uint64_t budget_bytes) : loader_(loader), budget_bytes_(budget_bytes) {}

  // `execution_ms`: of each layer, or empty: as the image's profile says.
  void add(uint64_t member, std::shared_ptr<const Image> image, std::vector<double> execution_ms,
           sched::SessionClass cls);
  void remove(uint64_t member);
  // The prefix from which a load of `member` may take its first layers; null: there is none.
  std::shared_ptr<Model> prefix(uint64_t member) const;
  // The member's execution times may have changed since its wish was worked out. The wish stays until refresh().
  void learned(uint64_t member);
  // Computes the wishes that are out of date; update() uses them. Takes milliseconds for a model of hundreds of layers,
  // so call it when no thread waits for a switch. For any thread. Does not throw.
  void refresh() noexcept;

  // Brings the device in line with the members' present wishes: drops prefixes that lost against others, and sends
  // granted prefixes that are missing, behind the copies enqueued so far. Prefixes are for members that are away; the
  // active member keeps its own if they leave room for it, which saves sending it again. While sessions queue for room
  // no member gets a new prefix. Prefixes that do not fit are left out.
  void update(std::span<const Use> uses);
  // With `held` the member's prefix makes no room for others; without it, it does again. False: there is no prefix.
  bool hold(uint64_t member, bool held);
  // Drops all prefixes. Needs no memory and does not throw.
  void clear() noexcept;

  uint64_t bytes() const;
  uint64_t bytes(uint64_t member) const;

 private:
  struct Entry {
    Entry(std::shared_ptr<const Image> of, std::vector<double> times_ms, sched::SessionClass its_class)
        : image(std::move(of)), execution_ms(std::move(times_ms)), cls(its_class) {}
    const std::shared_ptr<const Image> image;
    const std::vector<double> execution_ms;
    const sched::SessionClass cls;
    std::optional<PrefixChoice> wish GPUSHARE_GUARDED_BY(has_entries);  // none: not worked out yet
    bool out_of_date GPUSHARE_GUARDED_BY(has_entries) = false;  // and no thread is computing the next one
    std::optional<PrefixChoice> fresh GPUSHARE_GUARDED_BY(has_entries);  // the next wish
    double worth_ns GPUSHARE_GUARDED_BY(has_entries) = 0;                // at the last update()
    uint64_t bytes GPUSHARE_GUARDED_BY(has_entries) = 0;
    std::shared_ptr<executor::Session> session GPUSHARE_GUARDED_BY(has_entries);
    std::shared_ptr<Model> model GPUSHARE_GUARDED_BY(has_entries);
  };
  PrefixChoice work_out(const Image& image, const std::vector<double>& execution_ms) const;
  static bool suits(const Entry& entry) GPUSHARE_REQUIRES(has_entries);
  static bool there(const Entry& entry) GPUSHARE_REQUIRES(has_entries) {
    return entry.session != nullptr && !entry.session->dropped();
  }
  bool has_prefix(const Entry& entry) const;
  void drop_useless(Entry& entry);
  bool send(uint64_t member, Entry& entry);
  void drop(Entry& entry) noexcept;
  // Entries stay where they are; only the thread that changes entries removes them.
  std::vector<std::pair<uint64_t, Entry*>> entries();

  Loader& loader_;
  const uint64_t budget_bytes_;
  mutable base::Mutex mutex_;
  std::map<uint64_t, Entry> entries_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::loader
