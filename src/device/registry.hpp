// registry.hpp: the backends of the process. Thread-safe. The built-in ones (host, sim, and cuda where built) register
// themselves on first use, never in a static constructor.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "base/status.hpp"
#include "gpushare/backend.h"

namespace gpushare::device {

// Copies the known prefix of `ops`, fills absent optional groups with UNSUPPORTED answers. Errors: INVALID_ARGUMENT (what is
// missing), ALREADY_EXISTS.
base::Status register_backend(const gpushare_backend_ops* ops);

// dlopens an absolute path and registers its table; the library stays loaded.
base::Status load_backend(const std::string& absolute_path);

// null if there is none of that name. Valid for the life of the process.
const gpushare_backend_ops* find_backend(const std::string& name);

// In order of registration: built-ins first.
std::vector<const gpushare_backend_ops*> backends();

// A device that its backend names, opened by nobody. A backend that cannot be used has one row, which says why.
struct Listed {
  std::string spec;
  base::Status status;
};
// Asks every backend's driver, and blocks as long as that does.
std::vector<Listed> list_devices();

}  // namespace gpushare::device
