// channel.hpp: the sockets and descriptors of client/channel.hpp under the names that this folder uses.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "client/channel.hpp"

namespace gpushare::daemon {
using namespace client;  // NOLINT(google-build-using-namespace)
}  // namespace gpushare::daemon
