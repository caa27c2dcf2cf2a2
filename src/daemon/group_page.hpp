// group_page.hpp: the page on which the preloaded programs of a group count their memory (shim/group.hpp), as the daemon sees it.
//
// The programs check their memory against the limit on the page, without asking anybody. So the daemon can give a part
// of the group's memory to sessions of programs that use gpushare: it lowers that limit and raises it again. It reads
// and writes the file and does not map it, because a process that makes the file shorter must not end the daemon. The
// limits of a page are per device, and each daemon's device looks at its own.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "client/channel.hpp"
#include "daemon/user_limits.hpp"
#include "sched/types.hpp"

namespace gpushare::daemon {

class GroupPage {
 public:
  // Null: the file is no page of this version, lies where reading may block (network and user file systems), or has no
  // place for the device of that PCI address (as a number, shim/group.hpp). An address of 0: the first device of the
  // page. The programs are `user`'s. `patience` limits the CPU time of held_bytes() for that user, and must outlive the
  // page.
  static std::unique_ptr<GroupPage> open(client::Descriptor file, uint32_t pci_address, uid_t user,
                                         Patience& patience);

  // The bytes of the device that the programs may have, and the bytes lent to other sessions of the group; both 0 when
  // the file cannot be read.
  struct Limit {
    uint64_t bytes = 0;
    uint64_t lent_bytes = 0;
  };
  Limit limit() const;
  // The class that all programs of the group take. Empty: `gpushare exec --change` has set none, and each has its own.
  std::optional<sched::SessionClass> cls() const;
  // Lends `bytes` of the limit, and leaves the rest to the programs. False, with nothing changed: there is no limit,
  // the programs hold more than the rest, or the file is gone.
  bool set_lent(uint64_t bytes);
  // The bytes that living programs of the group hold on the device. When the user's patience is over, the sum also has
  // the bytes of ended programs whose slots were not emptied.
  uint64_t held_bytes() const { return held().device_bytes; }
  // The same, with bytes on the host: spilled blocks, and pinned memory including those blocks.
  struct Held {
    uint64_t device_bytes = 0, spilled_bytes = 0, pinned_bytes = 0;
  };
  Held held() const;

 private:
  GroupPage(client::Descriptor file, int place, uid_t user, Patience& patience)
      : file_(std::move(file)), place_(place), user_(user), patience_(patience) {}
  bool is_alive(uint32_t slot) const;
  bool write_lent(uint64_t bytes);

  client::Descriptor file_;
  int place_;  // of the device on the page
  const uid_t user_;
  Patience& patience_;
};

}  // namespace gpushare::daemon
