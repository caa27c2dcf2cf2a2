// session.hpp: this process as a session of `gpushare daemon`: memory promised to it, turns given to it.
//
// A process joins when it is about to make or retain a context, a child of fork at its first work for the device. It declares the group's limit
// as memory that it keeps. Without a limit it tells what it holds, a few times a second. Without a daemon it works alone, and does not look again.
//
// One thread of the shim's own talks with the daemon. It holds no lock while it calls the driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gpushare::shim {

// Joins unless that is done. Blocks while the daemon has no memory for the process. True: it is a session, or works alone. False: the
// daemon or the settings refuse it, which is said in the log; the process must get no context.
bool join_daemon();
// Phase resting: asks for a turn. Any thread.
void ask_for_turn();

}  // namespace gpushare::shim
