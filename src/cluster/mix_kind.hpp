// mix_kind.hpp: the kind "mix" of cluster documents: services, retraining, trials and training jobs together on the
// same devices.
//
// A document has an object of each part's own fields (at least one part). Schedulers:
//   static         numbers of whole devices for the parts, which take them in order; each part is run by the specialist
//                  published for it. A part's value with n devices is what it reaches afterwards on the first n, so in
//                  run static is an oracle. The best numbers by these values are taken. Where devices are equal and
//                  none fails, no partition into whole devices is better
//   gpushare       parts get quarters of devices, training jobs whole ones. The rest of the services' devices goes to
//                  the other parts. When the trials have ended, their devices go to the training jobs. Decided at the
//                  start, from the document, and again whenever devices fail or come back; while a part waits, also
//                  when another part ends
//   gpushare-whole in whole devices, without handing over, and divided once: shows where the gain comes from
// The sum of the logarithms of the parts' figures weighs one part's gain against another's. The figures are services'
// goodput, retraining accuracy, trials' 1 / makespan, training's 1 / mean completion.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cluster/kinds.hpp"

namespace gpushare::cluster {

// `training`: the kind of the training jobs, whose figures come from who plays them; the same at every call.
const Kind& mix_kind(const Kind& training);

}  // namespace gpushare::cluster
