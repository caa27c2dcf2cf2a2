// group_page.hpp: the page on which the preloaded programs of a group count their memory (shim/group.hpp), as the daemon sees it.
//
// The programs check their memory against the limit on the page, without asking anybody. So the daemon can give a part
// of the group's memory to sessions of programs that use gpushare: it lowers that limit and raises it again. It reads
// and writes the file and does not map it, because a process that makes the file shorter must not end the daemon.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "client/channel.hpp"

namespace gpushare::daemon {

class GroupPage {
 public:
  // Null: the file is no page of this version, or lies where reading may block (network and user file systems).
  static std::unique_ptr<GroupPage> open(client::Descriptor file);

  // The bytes that the programs may have, and the bytes lent to other sessions of the group; both 0 when the file cannot be read.
  struct Limit {
    uint64_t bytes = 0;
    uint64_t lent_bytes = 0;
  };
  Limit limit() const;
  // Writes limit and loan. False, and nothing changed: there is no limit, the programs hold more, or the file is gone.
  bool set_limit(Limit limit);
  // The bytes that living programs of the group hold on the device where they hold most.
  uint64_t held_bytes() const;

 private:
  explicit GroupPage(client::Descriptor file) : file_(std::move(file)) {}
  bool write(Limit limit);

  client::Descriptor file_;
};

}  // namespace gpushare::daemon
