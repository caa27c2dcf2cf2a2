// mix_division.hpp: how gpushare divides the devices of a mix among its parts, at the start and again when devices fail
// or come back.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cluster/mix_parts.hpp"

namespace gpushare::cluster {

// The situation in which devices are divided.
struct Moment {
  Knowledge known;
  Course before;              // empty at the start
  std::vector<size_t> parts;  // those that have not ended, in order
  std::vector<size_t> up;     // devices
  // The slices that these parts have by the last division, in order of devices, down ones included. Training jobs also
  // have the whole devices that the trials left. Empty at the start.
  Slices held;
  // When the trials really ended, if they have.
  std::optional<double> trials_ended_s;
  // Parts of which the model says that they have ended, and that have not. No model tells what they gain.
  bool overdue[kMixParts] = {};
  // Parts with work that no device can do that they have and that is up.
  bool waits[kMixParts] = {};
  // Until when a part that waits does other work, if no device fails or comes back.
  double works_until_s[kMixParts] = {};
};

// Whole devices, each part run by its one of `schedulers`. A part's value with n devices is that on the first n that are
// up; the numbers with the greatest sum of values are found exactly, and the parts take so many devices in order. This
// is the best partition where devices are equal and none fails. Empty if there are fewer devices than parts.
std::optional<Slices> divide_whole(const MixParts& parts, const Moment& moment,
                                   const std::string* schedulers);

// Ours, in quarters of devices. For every number of devices that services may have: they are placed there; what their
// placements leave of those devices and all others are quarters for the rest, which are divided exactly. Every division
// is judged by what `moment.known` says of it. With `may_keep`, `moment.held` is taken where none is better.
// `specialists` run the partition below which no part should fall. Empty if no division gives every part something.
std::optional<Slices> divide_shared(const MixParts& parts, const Moment& moment,
                                    const std::string* specialists, bool may_keep);

// A later division that plays nothing. Services keep their devices that are up, or have one. The other parts take the
// rest in turn, whole, each the devices that it has before others. The last parts get nothing where too few are up.
Slices divide_in_turn(const MixParts& parts, const Moment& moment);

// All devices that are up, whole, to the first part that then does more of its work. Empty if there is none.
std::optional<Slices> divide_to_one(const MixParts& parts, const Moment& moment);

// When the trials end whose slices these are, as far as that is known.
double trials_end(const MixParts& parts, const Moment& moment, const Slices& slices);

}  // namespace gpushare::cluster
