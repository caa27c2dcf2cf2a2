// trace_merge.hpp: the timelines of several runs as one file.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "base/status.hpp"

namespace gpushare::cli {

// Removes the files when it goes out of scope. `paths` may grow until then.
class RemoveFiles {
 public:
  explicit RemoveFiles(const std::vector<std::string>& paths) : paths_(paths) {}
  ~RemoveFiles();
  RemoveFiles(const RemoveFiles&) = delete;
  RemoveFiles& operator=(const RemoveFiles&) = delete;

 private:
  const std::vector<std::string>& paths_;
};

// Reads Chrome traces and writes one to `path` in which the groups (processes) of trace i are called
// "<names[i]>: ...". Errors: IO_ERROR, MALFORMED_INPUT.
base::Status merge_traces(const std::vector<std::string>& traces, const std::vector<std::string>& names,
                          const std::string& path);

}  // namespace gpushare::cli
