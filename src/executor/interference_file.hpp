// interference_file.hpp: the table of measured interference, in a file. Other folders do not include it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/status.hpp"
#include "sched/measured_interference.hpp"

namespace gpushare::executor {

// Both block on the disk. A file that does not exist yet is an empty table. Errors: IO_ERROR, MALFORMED_INPUT (file,
// line, field, what is allowed).
base::Status read_interference(const std::string& path, sched::MeasuredInterference& into);
// The file is replaced whole or not at all. Errors: IO_ERROR.
base::Status write_interference(const std::string& path, const std::string& text);
// Seconds since 1970: the time now, from which the table counts the age of its entries.
uint64_t unix_seconds();

}  // namespace gpushare::executor
