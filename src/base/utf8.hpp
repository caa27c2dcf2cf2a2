// utf8.hpp: text of users in files that must be UTF-8 (timelines, snapshots, reports), and on terminals and in logs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace gpushare::base {

// `text` with U+FFFD in place of each byte that is part of no well-formed sequence (RFC 3629: no overlong forms, no
// surrogates).
std::string to_utf8(std::string_view text);

// `text` for a terminal or a line of a log, whoever it comes from: well-formed UTF-8 in which nothing moves the cursor, sets
// colours or titles, begins a line, hides itself, or changes the direction of what follows. U+FFFD stands in place of control
// characters (C0, DEL and C1, U+009B among them), of characters without a width, and of those that set a direction
// (U+202E and its like).
std::string to_printable(std::string_view text);
// The same for text of several lines: '\n' and '\t' stay.
std::string to_printable_lines(std::string_view text);

// Appends `text` as a string of JSON, made UTF-8 likewise.
void append_json(std::string& out, std::string_view text);

}  // namespace gpushare::base
