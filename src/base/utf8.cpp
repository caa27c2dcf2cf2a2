// SPDX-License-Identifier: Apache-2.0
#include "base/utf8.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "base/status.hpp"

namespace gpushare::base {
namespace {

// Length of the well-formed UTF-8 sequence that starts at text[at] (RFC 3629: no overlong forms, no
// surrogates), 0 if there is none.
size_t utf8_sequence(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(at);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                        : (lead & 0xF0) == 0xE0        ? 3
                        : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                       : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
  const unsigned char second = byte(at + 1);
  if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) || (lead == 0xF0 && second < 0x90) ||
      (lead == 0xF4 && second > 0x8F))
    return 0;
  return length;
}

// The code point of a well-formed sequence.
uint32_t code_point(std::string_view sequence) {
  static constexpr unsigned char kLeadBits[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
  uint32_t point = static_cast<unsigned char>(sequence[0]) & kLeadBits[sequence.size()];
  for (size_t i = 1; i < sequence.size(); ++i)
    point = point << 6 | (static_cast<unsigned char>(sequence[i]) & 0x3f);
  return point;
}

struct Points {
  uint32_t first, last;
};
// Control characters, and format characters that cannot be seen (Unicode's categories Cc, Cf, Zl and Zp), in order.
constexpr Points kUnseen[] = {{0x00, 0x1f},       {0x7f, 0x9f},       {0xad, 0xad},       {0x061c, 0x061c},
                              {0x115f, 0x1160},   {0x180b, 0x180f},   {0x200b, 0x200f},   {0x2028, 0x202e},
                              {0x2060, 0x206f},   {0x3164, 0x3164},   {0xfe00, 0xfe0f},   {0xfeff, 0xfeff},
                              {0xffa0, 0xffa0},   {0xfff0, 0xfffb},   {0xfffe, 0xffff},   {0x110bd, 0x110bd},
                              {0x13430, 0x1343f}, {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0000, 0xe0fff}};

bool is_unseen(uint32_t point) {
  const auto* const found =
      std::lower_bound(std::begin(kUnseen), std::end(kUnseen), point,
                       [](const Points& of, uint32_t value) { return of.last < value; });
  return found != std::end(kUnseen) && point >= found->first;
}

std::string printable(std::string_view text, bool lines) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_sequence(text, at);
    const std::string_view sequence = text.substr(at, length);
    const bool kept =
        length > 0 && (!is_unseen(code_point(sequence)) || (lines && (text[at] == '\n' || text[at] == '\t')));
    out += kept ? sequence : "\xEF\xBF\xBD";
    at += length == 0 ? 1 : length;
  }
  return out;
}

}  // namespace

std::string to_printable(std::string_view text) {
  return printable(text, false);
}

std::string to_printable_lines(std::string_view text) {
  return printable(text, true);
}

std::string to_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_sequence(text, at);
    out += length == 0 ? "\xEF\xBF\xBD" : text.substr(at, length);
    at += length == 0 ? 1 : length;
  }
  return out;
}

void append_json(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : to_utf8(text)) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20)
      out += format("\\u%04x", static_cast<unsigned>(c));
    else
      out += c;
  }
  out += '"';
}

}  // namespace gpushare::base
