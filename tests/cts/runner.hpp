// runner.hpp: between cts.cpp and main.cpp only.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "cts.hpp"

namespace gpushare::cts {

// Set in the processes that run an excused test to see it fail.
inline constexpr const char* kNoExcuses = "GPUSHARE_CTS_NO_EXCUSES";

const std::vector<std::string>& test_names();
bool matches(const Excuse& excuse, const std::string& name);
// The backend's list, and a planted entry if there is one.
std::vector<Excuse> unsupported();

}  // namespace gpushare::cts
