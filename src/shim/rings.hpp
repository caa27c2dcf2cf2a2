// rings.hpp: the work that the device has of this process. While others want the device there is an event behind each
// piece, and one before it where its stream was idle. The events tell how much is in flight, when the device has
// drained, and how long it worked. The time of a signature's last pieces is the estimate for its next.
//
// While nobody else wants the device, only a part of the pieces has events: one before and one behind. Such a piece
// stands for the work that its stream got since the stream's last one.
//
// Threads: any. One thread looks at events at a time; nobody waits for it but forget_ring().
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "shim/gate.hpp"
#include "shim/work.hpp"

namespace gpushare::shim {

// A piece of work that was given to the device.
struct Piece {
  void* begin;  // events; made when first needed
  void* end;
  uint64_t stream;
  uint32_t signature;
  uint32_t state;
  uint32_t
      has_begin;  // an event stands before it too: the stream had nothing in flight, or the piece is sparse
  uint32_t sparse;
  uint64_t estimate_ns;
};
struct Ring;

// The ring of a context; null: there are more contexts than rings.
Ring* ring_of(uint64_t context, int seat);
// A place for the work; null: there is no room in the quantum or in flight now. `sparse`: nobody else wants the device.
Piece* reserve(const Work& work, Ring* ring, bool sparse, uint64_t* out_number);
// While nobody else wants the device: whether the work needs events. If not, it is added to what its stream's next piece
// stands for.
bool needs_events(const Work& work, int seat);
// Who else wants the device in this turn.
enum class Others : uint32_t {
  none,      // nobody, or nobody for as long as the turn lasts
  may_come,  // they find what is in flight before them
  wait,      // for the end of the turn
};
// Sets how much of the process's work may be in flight in this turn. The session's thread calls it.
void bound_flight(int seat, Others others, bool is_opportunistic);
// Call before the driver gets the work. False: the work goes without events, which is noted.
bool begin(Piece& piece, Ring& ring, const Work& work, uint64_t number);
// Call after the driver has answered.
void end(Piece& piece, int seat, const Work& work, Result result);
// A context is about to go: destroys its events, and does not wait for its work.
void forget_ring(uint64_t context);
// From now on a child of fork finds no rings.
void wipe_rings_on_fork();

}  // namespace gpushare::shim
