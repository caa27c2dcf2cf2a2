// session.hpp: this process as a session of `gpushare daemon` for each device: memory promised to it, turns given to it.
//
// A process joins for a device when it is about to make or retain a context there, a child of fork at its first work.
// It declares the group's limit as memory that it keeps. Without a limit it tells what it holds, a few times a second.
// Without a daemon, or where that does not serve the device, it works alone there, and does not look again.
//
// A thread of the shim's own for each device talks with the daemon. It holds no lock while it calls the driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gpushare::shim {

// Joins unless that is done. Blocks while the daemon has no memory for the process. True: it is a session there, or
// works alone. False: the daemon or the settings refuse it, which is said in the log; the process must get no context
// on the device.
bool join_daemon(int seat);
// For a program that uses gpushare itself and opens a shared device: its own sessions are held by the daemon, so this
// library neither counts nor holds back what the process does. False: the process is a session of this library's, or
// holds memory, already. A child of fork is held again.
bool stand_aside();
// Phase resting: asks for a turn. Any thread.
void ask_for_turn(int seat);

}  // namespace gpushare::shim
