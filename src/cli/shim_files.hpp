// shim_files.hpp: where `gpushare exec` finds the preload library and the proxy of libcuda, and the paths by which the loader reads them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/status.hpp"

namespace gpushare::cli {

// Paths for LD_PRELOAD and LD_LIBRARY_PATH.
struct ShimFiles {
  std::string library;
  std::string proxy_folder;
};

// The files beside the tool as built or as installed. Errors: UNAVAILABLE, with the file that is missing and the command that
// builds it.
base::Result<ShimFiles> find_shim_files();

// `folder` itself, or a link to it in /tmp/gpushare-UID: spaces and colons separate the paths of LD_PRELOAD, colons and
// semicolons those of LD_LIBRARY_PATH, there is no way to quote them, and the loader replaces what begins with '$'. The link
// stays, for programs that begin after this process has ended. Errors: IO_ERROR.
base::Result<std::string> readable_by_loader(const std::string& folder);

}  // namespace gpushare::cli
