// SPDX-License-Identifier: Apache-2.0
#include "cluster/fields.hpp"

#include <algorithm>
#include <boost/unordered/unordered_flat_set.hpp>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "cluster/description.hpp"
#include "cluster/json.hpp"

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

std::string joined(const char* const* words, size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += (i == 0 ? "" : ", ") + std::string(words[i]);
  return out;
}

// "a, b and c"
std::string listed(std::initializer_list<const char*> keys) {
  std::string out;
  for (const auto* key = keys.begin(); key != keys.end(); ++key)
    out += (key == keys.begin() ? "" : key + 1 == keys.end() ? " and " : ", ") + std::string(*key);
  return out;
}

// What is read in place of a number that is not there.
double safe(Range range) {
  return range.above ? std::min(range.high, range.low + 1) : range.low;
}

std::string list_text(size_t low_count, size_t high_count) {
  return low_count == high_count ? base::format("give a list of %zu", low_count)
                                 : base::format("give a list of %zu to %zu", low_count, high_count);
}

std::string text_text() {
  return base::format("give a text of 1 to %zu bytes", kMostTextBytes);
}

OrderedJson words_schema(const char* const* words, size_t count) {
  OrderedJson out = OrderedJson::object();
  if (count == 1) {
    out["const"] = words[0];
  } else {
    out["enum"] = OrderedJson::array();
    for (size_t i = 0; i < count; ++i) out["enum"].push_back(words[i]);
  }
  return out;
}

// Describing, there is a document of which nothing is read, and nothing in it is wrong.
const Json& no_document() {
  static const Json none = Json::object();
  return none;
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

Fields::Fields(const Json& nothing, base::Status* no_error, Description* description)
    : object_(&nothing), error_(no_error), description_(description) {}

OrderedJson Fields::describe(const std::function<void(Fields&)>& read) {
  base::Status none;
  Description description;
  Fields fields(no_document(), &none, &description);
  read(fields);
  return description.schema();
}

OrderedJson Fields::describe_inner(const std::function<void(Fields&)>& read) const {
  Description description;
  Fields fields(no_document(), error_, &description);
  read(fields);
  return description.schema();
}

void Fields::about(const char* key, const char* text) {
  if (description_ != nullptr) description_->about(key, text);
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
  if (!ok() || description_ != nullptr) return;
  *error_ =
      base::Status(GPUSHARE_MALFORMED_INPUT, where + ": " + shown(value) + " is not allowed; " + allowed);
}

void Fields::missing(const char* key, const std::string& allowed) {
  if (!ok() || description_ != nullptr) return;
  *error_ = base::Status(GPUSHARE_MALFORMED_INPUT, path(key) + ": the field is missing; " + allowed);
}

void Fields::refuse(const char* key, const std::string& reason) {
  const Json* value = key == nullptr ? object_ : find(key);
  fail(path(key), value == nullptr ? Json() : *value, reason);
}

void Fields::refuse_all(const std::string& reason) {
  if (!ok() || description_ != nullptr) return;
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
  if (description_ != nullptr) {
    description_->may_lack(key);
    return true;
  }
  return find(key) != nullptr;
}

size_t Fields::count(std::initializer_list<const char*> keys) {
  size_t there = 0;
  for (const char* key : keys) there += find(key) != nullptr ? 1 : 0;
  return there;
}

void Fields::exactly_one(std::initializer_list<const char*> keys) {
  if (description_ != nullptr) return description_->choice(keys, 1, 1);
  if (count(keys) != 1) refuse_all("give one of " + listed(keys));
}

void Fields::at_most_one(std::initializer_list<const char*> keys) {
  if (description_ != nullptr) return description_->choice(keys, 0, 1);
  if (count(keys) > 1) refuse_all("give one of " + listed(keys) + " at most");
}

void Fields::at_least_one(std::initializer_list<const char*> keys) {
  if (description_ != nullptr) return description_->choice(keys, 1, keys.size());
  if (count(keys) == 0) refuse_all("give at least one of " + listed(keys));
}

bool Fields::all_or_none(std::initializer_list<const char*> keys) {
  if (description_ != nullptr) {
    description_->together(keys);
    return true;
  }
  return count(keys) > 0;
}

void Fields::never(const char* key, const std::string& reason) {
  if (description_ != nullptr || find(key) == nullptr || !ok()) return;
  *error_ = base::Status(GPUSHARE_MALFORMED_INPUT, path(key) + ": " + reason);
}

double Fields::checked(const char* key, const Json& value, Range range, const std::string& where) {
  if (within(range, value)) return value.get<double>();
  fail(where.empty() ? path(key) : where, value, allowed_text(range, &value));
  return safe(range);
}

double Fields::number(const char* key, Range range) {
  if (description_ != nullptr) description_->field(key, number_schema(range));
  const Json* value = find(key);
  if (value != nullptr) return checked(key, *value, range, "");
  missing(key, allowed_text(range, nullptr));
  return safe(range);
}

double Fields::number_or(const char* key, Range range, double fallback) {
  if (description_ != nullptr)
    description_->field_or(key, number_schema(range), fallback, within(range, fallback));
  const Json* value = find(key);
  return value == nullptr ? fallback : checked(key, *value, range, "");
}

uint64_t Fields::checked_whole(const char* key, const Json& value, uint64_t low, uint64_t high,
                               const std::string& where) {
  uint64_t number = low;
  bool whole = false;
  if (value.is_number_unsigned()) {
    number = value.get<uint64_t>();
    whole = true;
  } else if (value.is_number_float()) {  // 1e9
    const auto real = value.get<double>();
    whole = real >= 0 && real <= 9e15 && std::floor(real) == real;
    if (whole) number = static_cast<uint64_t>(real);
  }
  if (whole && number >= low && number <= high) return number;
  fail(where.empty() ? path(key) : where, value, whole_text(low, high));
  return low;
}

uint64_t Fields::whole(const char* key, uint64_t low, uint64_t high) {
  if (description_ != nullptr) description_->field(key, whole_schema(low, high));
  const Json* value = find(key);
  if (value != nullptr) return checked_whole(key, *value, low, high, "");
  missing(key, whole_text(low, high));
  return low;
}

uint64_t Fields::whole_or(const char* key, uint64_t low, uint64_t high, uint64_t fallback) {
  if (description_ != nullptr)
    description_->field_or(key, whole_schema(low, high), fallback, low <= fallback && fallback <= high);
  const Json* value = find(key);
  return value == nullptr ? fallback : checked_whole(key, *value, low, high, "");
}

uint64_t Fields::whole_or_list(const char* key, uint64_t low, uint64_t high) {
  const Json* value = find(key);
  if (value != nullptr && value->is_array()) return 0;
  const uint64_t number = whole(key, low, high);
  return description_ == nullptr ? number : 0;
}

bool Fields::flag(const char* key) {
  if (description_ != nullptr) description_->field(key, object({{"type", "boolean"}}));
  if (find(key) == nullptr) missing(key, "give true or false");
  return checked_flag(key, false);
}

bool Fields::flag_or(const char* key, bool fallback) {
  if (description_ != nullptr) description_->field_or(key, object({{"type", "boolean"}}), fallback, true);
  return checked_flag(key, fallback);
}

bool Fields::checked_flag(const char* key, bool fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  fail(path(key), *value, "give true or false");
  return fallback;
}

std::string Fields::text(const char* key) {
  if (description_ != nullptr) description_->field(key, text_schema());
  const Json* value = find(key);
  if (value == nullptr) missing(key, text_text());
  return value == nullptr ? "" : checked_text(key, *value, "");
}

std::string Fields::text_or(const char* key, const char* fallback) {
  if (description_ != nullptr) description_->field_or(key, text_schema(), fallback, *fallback != '\0');
  const Json* value = find(key);
  return value == nullptr ? fallback : checked_text(key, *value, fallback);
}

std::string Fields::checked_text(const char* key, const Json& value, const char* fallback) {
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    if (!text.empty() && text.size() <= kMostTextBytes) return text;
  }
  fail(path(key), value, text_text());
  return fallback;
}

size_t Fields::one_of(const char* key, std::initializer_list<const char*> words) {
  if (description_ != nullptr) description_->field(key, words_schema(words.begin(), words.size()));
  if (find(key) == nullptr) missing(key, "there are " + joined(words.begin(), words.size()));
  return word(key, words.begin(), words.size(), 0);
}

size_t Fields::one_of_or(const char* key, std::initializer_list<const char*> words, size_t fallback) {
  if (description_ != nullptr)
    description_->field_or(key, words_schema(words.begin(), words.size()), words.begin()[fallback], true);
  return word(key, words.begin(), words.size(), fallback);
}

size_t Fields::one_of_or(const char* key, const std::vector<const char*>& words, size_t fallback) {
  if (description_ != nullptr)
    description_->field_or(key, words_schema(words.data(), words.size()), words[fallback], true);
  return word(key, words.data(), words.size(), fallback);
}

size_t Fields::word(const char* key, const char* const* words, size_t count, size_t fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (value->is_string()) {
    const auto* at = std::find(words, words + count, value->get_ref<const std::string&>());
    if (at != words + count) return static_cast<size_t>(at - words);
  }
  fail(path(key), *value, "there are " + joined(words, count));
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

const Json* Fields::array(const char* key, size_t low_count, size_t high_count) {
  const Json* value = find(key);
  if (value == nullptr) {
    missing(key, list_text(low_count, high_count));
    return nullptr;
  }
  if (value->is_array() && value->size() >= low_count && value->size() <= high_count) return value;
  fail(path(key), *value, list_text(low_count, high_count));
  return nullptr;
}

void Fields::each(const char* key, size_t low_count, const std::function<void(Fields&, size_t)>& f) {
  if (description_ != nullptr)
    description_->field(key, list_schema(describe_inner([&](Fields& element) { f(element, 0); }), low_count));
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
  if (description_ != nullptr) description_->field(key, describe_inner(f));
  const Json* value = find(key);
  if (value == nullptr) return missing(key, "give an object");
  Fields object(*this, key, kNoIndex, *value);
  if (!ok()) return;
  f(object);
  object.done();
}

void Fields::each_named(const char* key, const std::function<void(Fields&, const std::string&)>& f) {
  if (description_ != nullptr)
    description_->field(key, names_schema(describe_inner([&](Fields& inner) { f(inner, "name"); })));
  const Json* value = find(key);
  if (value == nullptr) return missing(key, "give an object of objects");
  if (!value->is_object()) return fail(path(key), *value, "give an object of objects");
  Fields all(*this, key, kNoIndex, *value);
  for (auto at = value->begin(); at != value->end() && ok(); ++at) {
    Fields inner(all, at.key().c_str(), kNoIndex, at.value());
    if (!ok()) return;
    f(inner, at.key());
    inner.done();
  }
}

std::vector<double> Fields::numbers(const char* key, size_t low_count, Range range, size_t high_count) {
  std::vector<double> out;
  if (description_ != nullptr) {
    description_->field(key, list_schema(number_schema(range), low_count, high_count));
    out.resize(std::max<size_t>(low_count, 1), safe(range));
  }
  const Json* list = array(key, low_count, high_count);
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
  if (description_ != nullptr) description_->field(key, list_schema(number_schema(range), 1));
  std::vector<double> out;
  const Json* list = array(key, count, count);
  for (size_t i = 0; list != nullptr && i < count && ok(); ++i)
    out.push_back(checked(key, (*list)[i], range, path(key) + base::format("[%zu]", i)));
  out.resize(count, safe(range));
  return out;
}

std::vector<double> Fields::matrix(const char* key, size_t rows, size_t columns, Range range) {
  if (description_ != nullptr) description_->field(key, list_schema(list_schema(number_schema(range), 1), 1));
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
  out.resize(rows * columns, safe(range));
  return out;
}

std::vector<std::pair<double, double>> Fields::points(const char* key, Range x, Range y) {
  std::vector<std::pair<double, double>> out;
  if (description_ != nullptr) {
    OrderedJson point = list_schema(OrderedJson(false), 2, 2);
    point["prefixItems"] = OrderedJson::array();
    point["prefixItems"].push_back(number_schema(x));
    point["prefixItems"].push_back(number_schema(y));
    description_->field(key, list_schema(std::move(point), 1));
  }
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

const Json* Fields::named(const char* key, const char* allowed) {
  const Json* value = find(key);
  if (value == nullptr) {
    missing(key, allowed);
    return nullptr;
  }
  if (value->is_object()) return value;
  fail(path(key), *value, allowed);
  return nullptr;
}

std::vector<std::pair<std::string, double>> Fields::named_numbers(const char* key, Range range) {
  if (description_ != nullptr) description_->field(key, names_schema(number_schema(range)));
  std::vector<std::pair<std::string, double>> out;
  const Json* value = named(key, "give an object of numbers");
  if (value == nullptr) return out;
  for (auto at = value->begin(); at != value->end() && ok(); ++at)
    out.emplace_back(at.key(), checked(key, at.value(), range, path(key) + "." + at.key()));
  return out;
}

std::vector<std::pair<std::string, uint64_t>> Fields::named_wholes(const char* key, uint64_t low,
                                                                   uint64_t high) {
  if (description_ != nullptr) description_->field(key, names_schema(whole_schema(low, high)));
  std::vector<std::pair<std::string, uint64_t>> out;
  const Json* value = named(key, "give an object of whole numbers");
  if (value == nullptr) return out;
  for (auto at = value->begin(); at != value->end() && ok(); ++at)
    out.emplace_back(at.key(), checked_whole(key, at.value(), low, high, path(key) + "." + at.key()));
  return out;
}

void Fields::done() {
  if (!ok() || description_ != nullptr) return;
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
