// unsupported.hpp: between registry.cpp and device.cpp only.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gpushare::device {

// Whether the calling thread's last UNSUPPORTED came from an op that the registry filled in, which has no
// details to ask the backend for. Resets it.
bool take_unsupported();

}  // namespace gpushare::device
