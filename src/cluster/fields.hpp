// cluster: decisions above one device: which job goes to which device and beside whom, how much of it each gets, in
// which configuration. Pure: no thread, no clock, no device; the same inputs give the same answer, bit by bit. May be
// called from sim, c_api/cluster, cli and tests; calls base and sched. Contents:
//   fields, json, plan, kinds     the JSON documents: reading and writing them, the kinds there are, deciding one
//   description, schema           the published JSON Schema, which the readers themselves say
//   model/                        data that several kinds share: devices
//   solve/                        solvers that several systems share
//   services/, and a file or folder for each further kind; one file a system
//
// fields.hpp: an object of a document, read field by field. A field that is missing, out of range, doubled or unknown
// is an error with its path and value. A reader is also the only description of its fields: describe() runs it without a
// document and returns the JSON Schema of what it reads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.hpp"

namespace gpushare::cluster {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

// Most elements of any list of a document.
inline constexpr size_t kMaxElements = 1'000'000;
inline constexpr size_t kMostTextBytes = 256;

// The allowed range of a number. `low` itself is allowed unless `above` is set.
struct Range {
  double low = 0;
  double high = 1e15;
  bool above = false;
};
inline constexpr Range kPositive{0, 1e15, true};
inline constexpr Range kNotNegative{0, 1e15, false};
inline constexpr Range kFraction{0, 1, false};

// Parses a whole text. Errors: MALFORMED_INPUT with line, column and path; a key given twice in one object is one.
base::Result<Json> parse_document(std::string_view text);

class Description;

// One object of a document. The first thing wrong is kept and shared with the objects inside it; from then on reads
// return what is safe and lists are not read further, so a reader checks ok() once, at its end. Use from one thread,
// while the document lives.
class Fields {
 public:
  // The whole document.
  Fields(const Json& document, base::Status* first_error);
  Fields(const Fields&) = delete;
  Fields& operator=(const Fields&) = delete;

  // The JSON Schema of the object that `read` reads. `read` runs once, without a document: every field seems to be there,
  // lists have one element, numbers are the least that is allowed, and nothing is refused. So a reader must reach all
  // its fields when all are there: `if (has(a)) ...` and `if (has(b)) ...`, not `else`.
  static OrderedJson describe(const std::function<void(Fields&)>& read);
  // A sentence for the schema about a field, or about the object itself where `key` is null. Does nothing when reading.
  void about(const char* key, const char* text);

  // Whether the field is there. A field for which a reader asks this first is optional.
  bool has(const char* key);
  // The documents must have exactly one, at most one, at least one of the fields. The reader then asks has() for each.
  void exactly_one(std::initializer_list<const char*> keys);
  void at_most_one(std::initializer_list<const char*> keys);
  void at_least_one(std::initializer_list<const char*> keys);
  // Whether one of the fields is there; then the reader must read all of them.
  bool all_or_none(std::initializer_list<const char*> keys);
  // Refuses the field if it is there. The schema does not have it.
  void never(const char* key, const std::string& reason);
  // Of a pair such as number and number_or the second one is for optional fields. Its fallback is the schema's default, so
  // a fallback that another field decides is written `has(key) ? number(key, range) : other`.
  double number(const char* key, Range range);
  double number_or(const char* key, Range range, double fallback);
  uint64_t whole(const char* key, uint64_t low, uint64_t high);
  uint64_t whole_or(const char* key, uint64_t low, uint64_t high, uint64_t fallback);
  // As whole(); 0 if the field is a list, which the reader then reads.
  uint64_t whole_or_list(const char* key, uint64_t low, uint64_t high);
  bool flag(const char* key);
  bool flag_or(const char* key, bool fallback);
  // A text that is not empty and has at most 256 bytes.
  std::string text(const char* key);
  std::string text_or(const char* key, const char* fallback);
  // The index of the field's word in `words`.
  size_t one_of(const char* key, std::initializer_list<const char*> words);
  size_t one_of_or(const char* key, std::initializer_list<const char*> words, size_t fallback);
  size_t one_of_or(const char* key, const std::vector<const char*>& words, size_t fallback);
  // The names of one list with their indices, to refuse doubled ones.
  using Names = std::unordered_map<std::string, size_t>;
  // The field "name" (or `key`), which no other element of the same list may have.
  std::string name(Names& seen, size_t index, const char* key = "name");
  std::vector<double> numbers(const char* key, size_t low_count, Range range,
                              size_t high_count = kMaxElements);
  // As numbers, with exactly `count` of them, which another field says: the schema does not have it.
  std::vector<double> matrix_row(const char* key, size_t count, Range range);
  // [[x, y], ...] with x ascending strictly.
  std::vector<std::pair<double, double>> points(const char* key, Range x, Range y);
  // {"name": number, ...}, in the order of the names.
  std::vector<std::pair<std::string, double>> named_numbers(const char* key, Range range);
  // The same of whole numbers.
  std::vector<std::pair<std::string, uint64_t>> named_wholes(const char* key, uint64_t low, uint64_t high);

  // Calls f(Fields& element, size_t index) for each object of the list, whose length must be at least `low_count`.
  void each(const char* key, size_t low_count, const std::function<void(Fields& element, size_t index)>& f);
  // Calls f(Fields& object) for the object at `key`.
  void with(const char* key, const std::function<void(Fields& object)>& f);
  // Calls f(Fields& object, const std::string& name) for each object of the object at `key`, in the order of the names.
  void each_named(const char* key, const std::function<void(Fields& object, const std::string& name)>& f);
  // A list of `rows` lists of `columns` numbers each, row by row.
  std::vector<double> matrix(const char* key, size_t rows, size_t columns, Range range);
  // The value as it is; null if it is absent, and when describing.
  const Json* find(const char* key);

  // Refuses the value of `key` (or the object itself, if null) for a reason of the reader's own: "path: value is not
  // allowed; <reason>".
  void refuse(const char* key, const std::string& reason);
  // Refuses a document for a reason that no single value has: "path: <reason>".
  void refuse_all(const std::string& reason);
  // Refuses fields that nothing asked for. each and with call it; the reader of a document calls it for the whole.
  void done();
  bool ok() const { return error_->ok(); }
  // "services[3].configurations[0]"; "" for the document.
  std::string path(const char* key = nullptr) const;

 private:
  static constexpr size_t kNoIndex = std::numeric_limits<size_t>::max();
  Fields(const Fields& parent, const char* key, size_t index, const Json& value);
  Fields(const Json& nothing, base::Status* no_error, Description* description);
  OrderedJson describe_inner(const std::function<void(Fields&)>& read) const;
  size_t count(std::initializer_list<const char*> keys);
  size_t word(const char* key, const char* const* words, size_t count, size_t fallback);
  uint64_t checked_whole(const char* key, const Json& value, uint64_t low, uint64_t high,
                         const std::string& where);
  std::string checked_text(const char* key, const Json& value, const char* fallback);
  bool checked_flag(const char* key, bool fallback);
  const Json* named(const char* key, const char* allowed);
  const Json* array(const char* key, size_t low_count, size_t high_count = kMaxElements);
  void fail(const std::string& where, const Json& value, const std::string& allowed);
  void missing(const char* key, const std::string& allowed);
  double checked(const char* key, const Json& value, Range range, const std::string& where);

  const Json* object_;
  base::Status* error_;
  const Fields* parent_ = nullptr;
  const char* key_ = nullptr;
  size_t index_ = kNoIndex;
  std::vector<const char*> asked_;
  Description* description_ = nullptr;  // set while describing
};

}  // namespace gpushare::cluster
