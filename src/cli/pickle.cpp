// SPDX-License-Identifier: Apache-2.0
#include "cli/pickle.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <utility>

namespace gpushare::cli {
namespace {

struct Value;
using Ref = Value*;  // owned by the parser: pickles may hold cycles

// Pickles share values; so do we, until the tree is built.
struct Value {
  enum class Kind { kScalar, kList, kDict } kind = Kind::kScalar;
  nlohmann::json scalar;
  std::vector<Ref> items;                          // of a list
  std::vector<std::pair<std::string, Ref>> pairs;  // of a dict; keys as text
};

constexpr size_t kMostDepth = 200;

class Parser {
 public:
  Parser(std::string_view text, const std::string& name, const std::vector<std::string>& skipped,
         size_t most_values)
      : text_(text), name_(name), skipped_(skipped), most_values_(most_values) {}

  base::Result<nlohmann::json> parse() {
    while (!done_) GPUSHARE_RETURN_IF_ERROR(step());
    if (stack_.size() != 1 || !marks_.empty()) return error("ends with more than one value");
    nlohmann::json out;
    GPUSHARE_RETURN_IF_ERROR(unfold(*stack_.back(), out, 0));
    return out;
  }

 private:
  base::Status error(const std::string& what) const {
    return {GPUSHARE_MALFORMED_INPUT,
            base::format(
                "'%s': byte %zu: %s; a pickle of plain dicts, lists, tuples, strings and numbers is allowed",
                name_.c_str(), at_, what.c_str())};
  }

  base::Result<std::string_view> take(uint64_t count) {
    if (count > text_.size() - at_) return error("the file ends in the middle of a value");
    const std::string_view out = text_.substr(at_, count);
    at_ += count;
    return out;
  }
  // A little-endian number.
  base::Result<uint64_t> number(size_t bytes) {
    GPUSHARE_ASSIGN_OR_RETURN(const std::string_view raw, take(bytes));
    uint64_t out = 0;
    for (size_t i = 0; i < bytes; ++i) out |= uint64_t{static_cast<unsigned char>(raw[i])} << (8 * i);
    return out;
  }

  Ref scalar(nlohmann::json value) {
    Ref out = container(Value::Kind::kScalar);
    out->scalar = std::move(value);
    return out;
  }
  Ref container(Value::Kind kind) {
    values_.emplace_back();
    values_.back().kind = kind;
    return &values_.back();
  }
  void push(Ref value) { stack_.push_back(value); }

  base::Status push_text(const base::Result<uint64_t>& length) {
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t bytes, length);
    GPUSHARE_ASSIGN_OR_RETURN(const std::string_view text, take(bytes));
    push(scalar(std::string(text)));
    return {};
  }

  // The values above the last mark, taken off the stack.
  base::Result<std::vector<Ref>> since_mark() {
    if (marks_.empty() || marks_.back() > stack_.size()) return error("a mark is missing");
    std::vector<Ref> out(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return out;
  }
  base::Result<std::vector<Ref>> top(size_t count) {
    if (stack_.size() < count + (marks_.empty() ? 0 : marks_.back())) return error("values are missing");
    std::vector<Ref> out(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return out;
  }

  base::Status push_list(base::Result<std::vector<Ref>> items) {
    if (!items.ok()) return items.status();
    Ref list = container(Value::Kind::kList);
    list->items = std::move(*items);
    push(list);
    return {};
  }
  base::Status append(base::Result<std::vector<Ref>> items) {
    if (!items.ok()) return items.status();
    if (stack_.empty() || stack_.back()->kind != Value::Kind::kList) return error("items without a list");
    stack_.back()->items.insert(stack_.back()->items.end(), items->begin(), items->end());
    return {};
  }
  base::Status set(base::Result<std::vector<Ref>> items) {
    if (!items.ok()) return items.status();
    if (stack_.empty() || stack_.back()->kind != Value::Kind::kDict || items->size() % 2 != 0)
      return error("pairs without a dict");
    for (size_t i = 0; i < items->size(); i += 2) {
      const Value& key = *(*items)[i];
      if (key.kind != Value::Kind::kScalar) return error("a key that is neither text nor number");
      std::string name = key.scalar.is_string() ? key.scalar.get<std::string>() : key.scalar.dump();
      const bool skip = std::find(skipped_.begin(), skipped_.end(), name) != skipped_.end();
      stack_.back()->pairs.emplace_back(std::move(name), skip ? scalar(nullptr) : (*items)[i + 1]);
    }
    return {};
  }

  base::Status memoize(uint64_t index) {
    if (stack_.empty()) return error("nothing to remember");
    // Indices are handed out one by one; a far larger one would be a request for memory, not data.
    if (index > memo_.size() + 1'000'000) return error("a memo index out of all proportion");
    if (memo_.size() <= index) memo_.resize(index + 1);
    memo_[index] = stack_.back();
    return {};
  }
  base::Status remember(const base::Result<uint64_t>& index) {
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t at, index);
    return memoize(at);
  }
  base::Status recall(const base::Result<uint64_t>& index) {
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t at, index);
    if (at >= memo_.size() || memo_[at] == nullptr) return error("a value that was never remembered");
    push(memo_[at]);
    return {};
  }

  base::Status integer(const base::Result<uint64_t>& length) {
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t bytes, length);
    if (bytes > 9) return error("a whole number of more than 64 bits");
    GPUSHARE_ASSIGN_OR_RETURN(const std::string_view raw, take(bytes));
    uint64_t value = 0;
    for (size_t i = 0; i < std::min<size_t>(8, bytes); ++i)
      value |= uint64_t{static_cast<unsigned char>(raw[i])} << (8 * i);
    const bool negative = bytes > 0 && (static_cast<unsigned char>(raw[bytes - 1]) & 0x80) != 0;
    // A ninth byte only holds the sign of what fills eight.
    if (bytes == 9 && raw[8] != 0) return error("a whole number of more than 64 bits");
    if (negative) {
      if (bytes < 8) value |= ~uint64_t{0} << (8 * bytes);
      push(scalar(static_cast<int64_t>(value)));
    } else {
      push(scalar(value));
    }
    return {};
  }

  base::Status step() {
    GPUSHARE_ASSIGN_OR_RETURN(const std::string_view op, take(1));
    switch (static_cast<unsigned char>(op[0])) {
      case 0x80: {  // PROTO
        GPUSHARE_ASSIGN_OR_RETURN(const uint64_t protocol, number(1));
        return protocol <= 5 ? base::Status() : error("a protocol above 5");
      }
      case 0x95:  // FRAME
        return number(8).status();
      case '.':
        done_ = true;
        return {};
      case '(':
        marks_.push_back(stack_.size());
        return {};
      case '0':  // POP
        return top(1).status();
      case '1':  // POP_MARK
        return since_mark().status();
      case 'N':
        push(scalar(nullptr));
        return {};
      case 0x88:
      case 0x89:
        push(scalar(static_cast<unsigned char>(op[0]) == 0x88));
        return {};
      case 'J': {  // BININT: signed
        GPUSHARE_ASSIGN_OR_RETURN(const uint64_t value, number(4));
        push(scalar(static_cast<int64_t>(static_cast<int32_t>(static_cast<uint32_t>(value)))));
        return {};
      }
      case 'K':
      case 'M': {
        GPUSHARE_ASSIGN_OR_RETURN(const uint64_t value, number(op[0] == 'K' ? 1 : 2));
        push(scalar(value));
        return {};
      }
      case 0x8a:  // LONG1
        return integer(number(1));
      case 0x8b:  // LONG4
        return integer(number(4));
      case 'G': {  // BINFLOAT: big-endian
        GPUSHARE_ASSIGN_OR_RETURN(const std::string_view raw, take(8));
        uint64_t bits = 0;
        for (const char c : raw) bits = bits << 8 | static_cast<unsigned char>(c);
        push(scalar(std::bit_cast<double>(bits)));
        return {};
      }
      case 'X':  // BINUNICODE
      case 'T':  // BINSTRING
      case 'B':  // BINBYTES
        return push_text(number(4));
      case 0x8c:  // SHORT_BINUNICODE
      case 'U':   // SHORT_BINSTRING
      case 'C':   // SHORT_BINBYTES
        return push_text(number(1));
      case 0x8d:  // BINUNICODE8
      case 0x8e:  // BINBYTES8
        return push_text(number(8));
      case ']':
      case ')':
      case 0x8f:  // EMPTY_SET
        push(container(Value::Kind::kList));
        return {};
      case '}':
        push(container(Value::Kind::kDict));
        return {};
      case 'l':
      case 't':
      case 0x91:  // FROZENSET
        return push_list(since_mark());
      case 0x85:
      case 0x86:
      case 0x87:  // TUPLE1 to TUPLE3
        return push_list(top(static_cast<size_t>(static_cast<unsigned char>(op[0]) - 0x84)));
      case 'd': {
        base::Result<std::vector<Ref>> items = since_mark();
        push(container(Value::Kind::kDict));
        return set(std::move(items));
      }
      case 'a':
        return append(top(1));
      case 'e':   // APPENDS
      case 0x90:  // ADDITEMS
        return append(since_mark());
      case 's':
        return set(top(2));
      case 'u':
        return set(since_mark());
      case 'q':  // BINPUT
        return remember(number(1));
      case 'r':  // LONG_BINPUT
        return remember(number(4));
      case 0x94:  // MEMOIZE
        return memoize(memo_.size());
      case 'h':  // BINGET
        return recall(number(1));
      case 'j':  // LONG_BINGET
        return recall(number(4));
      default:
        return error(
            base::format("operation 0x%02x", static_cast<unsigned>(static_cast<unsigned char>(op[0]))));
    }
  }

  base::Status unfold(const Value& value, nlohmann::json& out, size_t depth) {
    if (depth > kMostDepth) return error("values nested too deep");
    unfolded_ += 1 + (value.scalar.is_string() ? value.scalar.get_ref<const std::string&>().size() / 32 : 0);
    if (unfolded_ > most_values_) return error("too many values");
    switch (value.kind) {
      case Value::Kind::kScalar:
        out = value.scalar;
        return {};
      case Value::Kind::kList:
        out = nlohmann::json::array();
        for (const Ref& item : value.items) {
          out.emplace_back();
          GPUSHARE_RETURN_IF_ERROR(unfold(*item, out.back(), depth + 1));
        }
        return {};
      case Value::Kind::kDict:
        out = nlohmann::json::object();
        for (const auto& [key, item] : value.pairs)
          GPUSHARE_RETURN_IF_ERROR(unfold(*item, out[key], depth + 1));
        return {};
    }
    return {};
  }

  std::string_view text_;
  const std::string& name_;
  const std::vector<std::string>& skipped_;
  const size_t most_values_;
  size_t at_ = 0;
  bool done_ = false;
  std::vector<Ref> stack_;
  std::vector<size_t> marks_;
  std::vector<Ref> memo_;
  std::deque<Value> values_;
  size_t unfolded_ = 0;
};

}  // namespace

bool is_pickle(std::string_view text) {
  return text.size() >= 2 && static_cast<unsigned char>(text[0]) == 0x80 && text[1] >= 2 && text[1] <= 5;
}

base::Result<nlohmann::json> parse_pickle(std::string_view text, const std::string& name,
                                          const std::vector<std::string>& skipped, size_t most_values) {
  return Parser(text, name, skipped, most_values).parse();
}

}  // namespace gpushare::cli
