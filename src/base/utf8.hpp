// utf8.hpp: text of users in files that must be UTF-8: timelines, snapshots and reports.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace gpushare::base {

// `text` with U+FFFD in place of each byte that is part of no well-formed sequence (RFC 3629: no overlong forms, no
// surrogates).
std::string to_utf8(std::string_view text);

// Appends `text` as a string of JSON, made UTF-8 likewise.
void append_json(std::string& out, std::string_view text);

}  // namespace gpushare::base
