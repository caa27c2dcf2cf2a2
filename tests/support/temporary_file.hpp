// temporary_file.hpp: an empty file of the test's own, removed at its end.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "support/catch.hpp"

namespace gpushare::test {

class TemporaryFile {
 public:
  TemporaryFile() {
    char name[] = "/tmp/gpushare-XXXXXX";  // the X are mkstemp's to fill in
    const int file = ::mkstemp(name);
    REQUIRE(file >= 0);
    ::close(file);
    path_ = name;
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  const std::string& path() const { return path_; }
  std::string text() const {
    std::ifstream in(path_, std::ios::binary);
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
  }

 private:
  std::string path_;
};

}  // namespace gpushare::test
