// SPDX-License-Identifier: Apache-2.0
#include "cluster/fields.hpp"

#include <algorithm>
#include <boost/unordered/unordered_flat_set.hpp>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

namespace gpushare::cluster {
namespace {

// Builds no path until one is needed: a document may have a million elements.
struct Level {
  bool array = false;
  size_t index = 0;
  std::string key;
  boost::unordered_flat_set<std::string> keys;
};

std::string path_of(const std::vector<Level>& levels, size_t depth) {
  std::string out;
  for (size_t i = 0; i < depth; ++i) {
    if (levels[i].array)
      out += base::format("[%zu]", levels[i].index);
    else if (!levels[i].key.empty())
      out += (out.empty() ? "" : ".") + levels[i].key;
  }
  return out.empty() ? "the document" : out;
}

std::string number_text(double value) {
  return base::format("%.15g", value);
}

bool within(Range range, const Json& value) {
  if (!value.is_number()) return false;
  const auto number = value.get<double>();
  return std::isfinite(number) && number <= range.high &&
         (range.above ? number > range.low : number >= range.low);
}

// `value` is what was given, null if nothing was. The most that any number may be is said only to who gave more.
std::string allowed_text(Range range, const Json* value) {
  const bool beyond = value != nullptr && value->is_number() && value->get<double>() > range.high;
  if (range.high >= 1e15 && !beyond)
    return base::format("give a number %s %s", range.above ? "above" : "of at least",
                        number_text(range.low).c_str());
  return base::format("give a number %s %s %s %s", range.above ? "above" : "from",
                      number_text(range.low).c_str(), range.above ? "and at most" : "to",
                      number_text(range.high).c_str());
}

std::string whole_text(uint64_t low, uint64_t high) {
  return base::format("give a whole number from %llu to %llu", static_cast<unsigned long long>(low),
                      static_cast<unsigned long long>(high));
}

// Short enough for a message, whatever was given.
std::string shown(const Json& value) {
  if (value.is_array()) return base::format("a list of %zu", value.size());
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 56) + "...\"";
  return text;
}

std::string joined(std::initializer_list<const char*> words) {
  std::string out;
  for (const char* word : words) out += (out.empty() ? "" : ", ") + std::string(word);
  return out;
}

// Reads a document without building it, for the path of what is wrong and for fields given twice. The parser's callback
// would do in one pass, but it looks through a list again at the end of each of its objects: quadratic for a million
// jobs.
class DocumentReader final : public nlohmann::json_sax<Json> {
 public:
  std::string doubled;  // path of the first field that is there twice; "" if there is none
  std::string what;     // what the parser says is wrong
  std::string path() const { return path_of(levels_, depth_); }

  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool string(string_t&) override { return value(); }
  bool binary(binary_t&) override { return value(); }
  bool start_object(size_t) override { return open(false); }
  bool start_array(size_t) override { return open(true); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    Level& level = levels_[depth_ - 1];
    level.key = name;
    if (!level.keys.insert(level.key).second && doubled.empty()) doubled = path();
    return true;
  }
  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 12: syntax error ..."
    what = error.what();
    if (const size_t end = what.find("] "); end != std::string::npos) what = what.substr(end + 2);
    return false;
  }

 private:
  bool open(bool array) {
    if (levels_.size() <= depth_) levels_.emplace_back();
    Level& level = levels_[depth_++];
    level.array = array;
    level.index = 0;
    level.key.clear();
    level.keys.clear();
    return true;
  }
  bool close() {
    --depth_;
    return value();
  }
  bool value() {
    if (depth_ > 0 && levels_[depth_ - 1].array) ++levels_[depth_ - 1].index;
    return true;
  }
  std::vector<Level> levels_;
  size_t depth_ = 0;
};

}  // namespace

base::Result<Json> parse_document(std::string_view text) {
  DocumentReader reader;
  const bool good = Json::sax_parse(text, &reader);
  if (!good)
    return base::Status(GPUSHARE_MALFORMED_INPUT, reader.path() + ": not JSON: " + reader.what +
                                                      " (numbers are finite; NaN and Infinity are none)");
  if (!reader.doubled.empty())
    return base::Status(GPUSHARE_MALFORMED_INPUT,
                        reader.doubled + ": the field is there twice; a field is given once");
  return Json::parse(text);
}

Fields::Fields(const Json& document, base::Status* first_error) : object_(&document), error_(first_error) {
  if (ok() && !document.is_object()) fail("the document", document, "give an object");
}

Fields::Fields(const Fields& parent, const char* key, size_t index, const Json& value)
    : object_(&value), error_(parent.error_), parent_(&parent), key_(key), index_(index) {
  if (ok() && !value.is_object()) fail(path(), value, "give an object");
}

std::string Fields::path(const char* key) const {
  std::string out;
  if (parent_ != nullptr) {
    out = parent_->path(key_);
    if (index_ != kNoIndex) out += base::format("[%zu]", index_);
  }
  if (key != nullptr) out += (out.empty() ? "" : ".") + std::string(key);
  return out;
}

void Fields::fail(const std::string& where, const Json& value, const std::string& allowed) {
  if (!ok()) return;
  *error_ =
      base::Status(GPUSHARE_MALFORMED_INPUT, where + ": " + shown(value) + " is not allowed; " + allowed);
}

void Fields::missing(const char* key, const std::string& allowed) {
  if (!ok()) return;
  *error_ = base::Status(GPUSHARE_MALFORMED_INPUT, path(key) + ": the field is missing; " + allowed);
}

void Fields::refuse(const char* key, const std::string& reason) {
  const Json* value = key == nullptr ? object_ : find(key);
  fail(path(key), value == nullptr ? Json() : *value, reason);
}

void Fields::refuse_all(const std::string& reason) {
  if (!ok()) return;
  const std::string where = path();
  *error_ = base::Status(GPUSHARE_MALFORMED_INPUT, (where.empty() ? "the document" : where) + ": " + reason);
}

const Json* Fields::find(const char* key) {
  if (!ok()) return nullptr;
  if (std::none_of(asked_.begin(), asked_.end(),
                   [&](const char* asked) { return std::strcmp(asked, key) == 0; }))
    asked_.push_back(key);
  const auto at = object_->find(key);
  return at == object_->end() ? nullptr : &*at;
}

bool Fields::has(const char* key) {
  return find(key) != nullptr;
}

bool Fields::is_list(const char* key) {
  const Json* value = find(key);
  return value != nullptr && value->is_array();
}

double Fields::checked(const char* key, const Json& value, Range range, const std::string& where) {
  if (within(range, value)) return value.get<double>();
  fail(where.empty() ? path(key) : where, value, allowed_text(range, &value));
  return range.above ? std::min(range.high, range.low + 1) : range.low;
}

double Fields::number(const char* key, Range range) {
  const Json* value = find(key);
  if (value != nullptr) return checked(key, *value, range, "");
  missing(key, allowed_text(range, nullptr));
  return range.above ? std::min(range.high, range.low + 1) : range.low;
}

double Fields::number_or(const char* key, Range range, double fallback) {
  const Json* value = find(key);
  return value == nullptr ? fallback : checked(key, *value, range, "");
}

uint64_t Fields::whole(const char* key, uint64_t low, uint64_t high) {
  if (!has(key)) missing(key, whole_text(low, high));
  return whole_or(key, low, high, low);
}

uint64_t Fields::whole_or(const char* key, uint64_t low, uint64_t high, uint64_t fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  uint64_t number = low;
  bool whole = false;
  if (value->is_number_unsigned()) {
    number = value->get<uint64_t>();
    whole = true;
  } else if (value->is_number_float()) {  // 1e9
    const auto real = value->get<double>();
    whole = real >= 0 && real <= 9e15 && std::floor(real) == real;
    if (whole) number = static_cast<uint64_t>(real);
  }
  if (whole && number >= low && number <= high) return number;
  fail(path(key), *value, whole_text(low, high));
  return low;
}

bool Fields::flag_or(const char* key, bool fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  fail(path(key), *value, "give true or false");
  return fallback;
}

std::string Fields::text(const char* key) {
  if (!has(key)) missing(key, "give a text of 1 to 256 bytes");
  return text_or(key, "");
}

std::string Fields::text_or(const char* key, const char* fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (value->is_string()) {
    const auto& text = value->get_ref<const std::string&>();
    if (!text.empty() && text.size() <= 256) return text;
  }
  fail(path(key), *value, "give a text of 1 to 256 bytes");
  return fallback;
}

size_t Fields::one_of(const char* key, std::initializer_list<const char*> words) {
  if (!has(key)) missing(key, "there are " + joined(words));
  return one_of_or(key, words, 0);
}

size_t Fields::one_of_or(const char* key, std::initializer_list<const char*> words, size_t fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (value->is_string()) {
    const auto* at = std::find(words.begin(), words.end(), value->get_ref<const std::string&>());
    if (at != words.end()) return static_cast<size_t>(at - words.begin());
  }
  fail(path(key), *value, "there are " + joined(words));
  return fallback;
}

std::string Fields::name(Names& seen, size_t index, const char* key) {
  std::string name = text(key);
  if (!ok()) return name;
  const auto [at, added] = seen.emplace(name, index);
  if (!added)
    refuse(key, base::format("element %zu has that %s already; each needs its own", at->second, key));
  return name;
}

const Json* Fields::array(const char* key, size_t low_count) {
  const std::string allowed = base::format("give a list of %zu to %zu", low_count, kMaxElements);
  const Json* value = find(key);
  if (value == nullptr) {
    missing(key, allowed);
    return nullptr;
  }
  if (value->is_array() && value->size() >= low_count && value->size() <= kMaxElements) return value;
  fail(path(key), *value, allowed);
  return nullptr;
}

void Fields::each(const char* key, size_t low_count, const std::function<void(Fields&, size_t)>& f) {
  const Json* list = array(key, low_count);
  if (list == nullptr) return;
  for (size_t i = 0; i < list->size() && ok(); ++i) {
    Fields element(*this, key, i, (*list)[i]);
    if (!ok()) return;
    f(element, i);
    element.done();
  }
}

void Fields::with(const char* key, const std::function<void(Fields&)>& f) {
  const Json* value = find(key);
  if (value == nullptr) return missing(key, "an object");
  Fields object(*this, key, kNoIndex, *value);
  if (!ok()) return;
  f(object);
  object.done();
}

void Fields::each_named(const char* key, const std::function<void(Fields&, const std::string&)>& f) {
  const Json* value = find(key);
  if (value == nullptr) return missing(key, "an object of objects");
  if (!value->is_object()) return fail(path(key), *value, "give an object of objects");
  Fields all(*this, key, kNoIndex, *value);
  for (auto at = value->begin(); at != value->end() && ok(); ++at) {
    Fields inner(all, at.key().c_str(), kNoIndex, at.value());
    if (!ok()) return;
    f(inner, at.key());
    inner.done();
  }
}

std::vector<double> Fields::numbers(const char* key, size_t low_count, Range range) {
  std::vector<double> out;
  const Json* list = array(key, low_count);
  if (list == nullptr) return out;
  out.reserve(list->size());
  for (size_t i = 0; i < list->size() && ok(); ++i) {
    const Json& value = (*list)[i];  // the path is made only for what is wrong
    out.push_back(
        checked(key, value, range, within(range, value) ? "" : path(key) + base::format("[%zu]", i)));
  }
  return out;
}

std::vector<double> Fields::matrix_row(const char* key, size_t count, Range range) {
  std::vector<double> out = numbers(key, count, range);
  if (ok() && out.size() != count) fail(path(key), *find(key), base::format("give a list of %zu", count));
  out.resize(count, range.low + 1);
  return out;
}

std::vector<double> Fields::matrix(const char* key, size_t rows, size_t columns, Range range) {
  std::vector<double> out;
  const std::string allowed = base::format("give %zu lists of %zu numbers", rows, columns);
  const Json* list = find(key);
  if (list == nullptr) {
    missing(key, allowed);
  } else if (!list->is_array() || list->size() != rows) {
    fail(path(key), *list, allowed);
  } else {
    for (size_t i = 0; i < rows && ok(); ++i) {
      const std::string where = path(key) + base::format("[%zu]", i);
      const Json& row = (*list)[i];
      if (!row.is_array() || row.size() != columns) {
        fail(where, row, allowed);
        break;
      }
      for (size_t j = 0; j < columns && ok(); ++j)
        out.push_back(checked(key, row[j], range, where + base::format("[%zu]", j)));
    }
  }
  out.resize(rows * columns, range.low + 1);
  return out;
}

std::vector<std::pair<double, double>> Fields::points(const char* key, Range x, Range y) {
  std::vector<std::pair<double, double>> out;
  const Json* list = array(key, 1);
  if (list == nullptr) return out;
  for (size_t i = 0; i < list->size() && ok(); ++i) {
    const std::string where = path(key) + base::format("[%zu]", i);
    const Json& point = (*list)[i];
    if (!point.is_array() || point.size() != 2) {
      fail(where, point, "give a pair [x, y]");
      break;
    }
    out.emplace_back(checked(key, point[0], x, where + "[0]"), checked(key, point[1], y, where + "[1]"));
    if (ok() && i > 0 && out[i].first <= out[i - 1].first)
      fail(where + "[0]", point[0], "the points ascend: give more than " + number_text(out[i - 1].first));
  }
  return out;
}

std::vector<std::pair<std::string, double>> Fields::named_numbers(const char* key, Range range) {
  std::vector<std::pair<std::string, double>> out;
  const Json* value = find(key);
  if (value == nullptr) {
    missing(key, "give an object of numbers");
    return out;
  }
  if (!value->is_object()) {
    fail(path(key), *value, "give an object of numbers");
    return out;
  }
  for (auto at = value->begin(); at != value->end() && ok(); ++at)
    out.emplace_back(at.key(), checked(key, at.value(), range, path(key) + "." + at.key()));
  return out;
}

void Fields::done() {
  if (!ok()) return;
  for (auto at = object_->begin(); at != object_->end(); ++at) {
    if (std::any_of(asked_.begin(), asked_.end(), [&](const char* asked) { return at.key() == asked; }))
      continue;
    std::string known;
    for (const char* asked : asked_) known += (known.empty() ? "" : ", ") + std::string(asked);
    std::string key = at.key().substr(0, 60);
    *error_ =
        base::Status(GPUSHARE_MALFORMED_INPUT, path(key.c_str()) + ": no such field; there are " + known);
    return;
  }
}

}  // namespace gpushare::cluster
