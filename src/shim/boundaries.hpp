// boundaries.hpp: where the iterations of a program probably end. A turn that is half over ends there, if the next
// iteration would not fit into it; else it would end amid that iteration. A guess has no other effect: the program keeps
// what it holds.
//
// A guess is made where the program has waited for its work with success (cuStreamSynchronize, cuEventSynchronize,
// cuCtxSynchronize; a loop over cuEventQuery or cuStreamQuery), and at the launch with which a sequence of launches
// begins anew (pattern.hpp). A turn without others that wait has no end.
//
// Threads: any. Nobody waits here: when several launches come at once, some are not looked at.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::shim {

// A launch of a quantum, before it is given to the device.
void note_launch(int seat, uint64_t signature);
// The turn at the device ends here if it should.
void note_boundary(int seat);

}  // namespace gpushare::shim
