// move.hpp: plain memory in virtual memory, whose bytes change places between the device and the host under the same address.
//
// Such a block is mapped at every moment, to physical memory of the device or of the host, which the device reaches
// too, only slower. To move it, its bytes are copied to new physical memory, which then takes the old one's place
// behind the address. Nothing may use the block meanwhile: the caller has closed the gate (gate.hpp), and the device
// has finished what the process gave it. Only drivers from 12.2 on have physical memory of the host.
//
// Threads: allocating and freeing from any. Moving from one at a time: the session's thread, or where there is no
// daemon the thread that frees.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/move_budget.hpp"
#include "shim/books.hpp"
#include "shim/device.hpp"
#include "shim/ranges.hpp"
#include "shim/settings.hpp"
#include "shim/table.hpp"

namespace gpushare::shim {

// Blocks from here on. Smaller ones would waste memory, which is mapped in steps of 2 MiB on today's devices.
inline constexpr uint64_t kMovableBytes = 2 << 20;

// Whether a block of so many bytes is to be movable.
inline bool may_move(uint64_t bytes) {
  return bytes >= kMovableBytes && (may_spill() || load_settings().pageable);
}
// Whether the driver supports movable blocks on the device.
bool can_move(int place);
// The device at `from` may use such blocks of `place` from now on, both present and later ones.
void reach(int place, int from);
uint64_t reached_by(int place);  // the places of those devices as bits
// Gets a movable block, on the device or else on the host. False: no such block can be had, and nothing was done.
bool allocate_movable(const Current& at, uint64_t bytes, void* out_address, Result* out_result);
// Frees a range that was taken out of the table. After an error it is in the table again.
Result free_movable(const Range& range);
// The block is gone from the driver, even if the device may still use it.
Result unmap_movable(const Range& range);

// Moves spilled blocks to the device, as far as it has room, within the budget. `wants_home`: some would fit.
bool wants_home(int place);
void bring_home(int place, const base::MoveBudget& budget = {});
// Without a daemon this moves them at once, after memory of the device was freed: nobody else waits, so only bytes are bounded.
void bring_home_alone(int place);

// Told of each part of a page-out: the bytes that have gone. The first call, perhaps of 0 bytes, also says that new blocks
// of the process lie on the host from now on.
using TellPart = void (*)(void* who, uint64_t bytes);
enum class Went : uint8_t { nothing, in_part, all };
// The process gives the device to others: all its movable blocks go to the host, and their room on the device stays
// counted. They go in parts, and `tell_part` is told of each. `in_part`: the rest cannot follow, and the blocks that went
// stay there until page_in().
Went page_out(int place, TellPart tell_part, void* who);
// The process has the device again. Blocks for which the device has no room stay on the host, where they are slower. So do
// the blocks that are left when `stops`, which may be null, answers true.
void page_in(int place, bool (*stops)(void* who), void* who);
bool is_out(int place);

}  // namespace gpushare::shim
