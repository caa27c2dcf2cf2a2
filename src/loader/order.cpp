// SPDX-License-Identifier: Apache-2.0
#include "loader/order.hpp"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <tuple>

namespace gpushare::loader {
namespace {

bool has(std::string_view part, std::initializer_list<std::string_view> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](std::string_view word) { return part.find(word) != std::string_view::npos; });
}

bool is(std::string_view part, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), part) != words.end();
}

bool starts(std::string_view part, std::initializer_list<std::string_view> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](std::string_view word) { return part.substr(0, word.size()) == word; });
}

// A part without the number at its end, that number (0: none), and whether it is used early or late among its
// siblings.
struct Part {
  int place = 0;  // -2 to 2
  std::string_view stem;
  uint64_t number = 0;
};

constexpr size_t kMaxDigits = 18;  // more are no number of a block

Part read_part(std::string_view part) {
  Part out;
  size_t digits = 0;
  while (digits < part.size() && digits < kMaxDigits && part[part.size() - 1 - digits] >= '0' &&
         part[part.size() - 1 - digits] <= '9')
    ++digits;
  out.stem = part.substr(0, part.size() - digits);
  for (const char digit : part.substr(part.size() - digits))
    out.number = out.number * 10 + static_cast<uint64_t>(digit - '0');
  if (starts(part,
             {"lm_head", "head", "classifier", "score", "logits", "pooler", "output", "ln_f", "final"}) ||
      is(part, {"norm", "fc", "cls", "qa_outputs"}))
    out.place = 2;
  else if (is(part, {"decoder"}))
    out.place = 1;
  else if (has(part, {"embed", "stem"}) ||
           starts(part, {"wte", "wpe", "patch", "input", "cls_token", "pos_", "shared"}) ||
           is(part, {"conv1"}))
    out.place = -2;
  else if (is(part, {"bn1"}) || has(part, {"attn", "attention"}))
    out.place = -1;
  return out;
}

std::vector<Part> read_name(std::string_view name) {
  std::vector<Part> out;
  for (;;) {
    const size_t end = name.find_first_of("./");
    out.push_back(read_part(name.substr(0, end)));
    if (end == std::string_view::npos) return out;
    name.remove_prefix(end + 1);
  }
}

// Below 0: `a` comes first. 0: the names do not tell.
int compare(const std::vector<Part>& a, const std::vector<Part>& b) {
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const auto left = std::tie(a[i].place, a[i].stem, a[i].number);
    const auto right = std::tie(b[i].place, b[i].stem, b[i].number);
    if (left != right) return left < right ? -1 : 1;
  }
  return a.size() == b.size() ? 0 : a.size() < b.size() ? -1 : 1;
}

}  // namespace

std::vector<size_t> order_by_name(std::span<const std::string_view> names) {
  std::vector<std::vector<Part>> parts;
  parts.reserve(names.size());
  for (const std::string_view name : names) parts.push_back(read_name(name));
  std::vector<size_t> order(names.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return compare(parts[a], parts[b]) < 0; });
  return order;
}

}  // namespace gpushare::loader
