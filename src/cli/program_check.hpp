// program_check.hpp: whether a program can be held by a library that is preloaded into it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/status.hpp"

namespace gpushare::cli {

// The file that `name` means to a shell: with a slash itself, else the first in PATH that may be executed. Errors: NOT_FOUND.
base::Result<std::string> find_program(const std::string& name);

// OK if the loader will preload a library into the program. Errors: UNSUPPORTED, with the reason: setuid or setgid,
// file capabilities, linked statically or to musl, of another processor, a script whose interpreter is one of these.
base::Status check_preloadable(const std::string& path);

}  // namespace gpushare::cli
