// description.hpp: what a reader says of one object while it describes the fields that it reads: the JSON Schema of that object.
// Fields::describe lets a reader run once without a document; its Fields writes down here each field that the reader asks for.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>

#include "cluster/fields.hpp"

namespace gpushare::cluster {

class Description {
 public:
  // The document may lack the field. A later field() says what it is.
  void may_lack(const char* key);
  // The reader reads the field as `schema` says. It is required unless may_lack() came before. A field that is read in
  // two ways, such as a number or a list, is one of both.
  void field(const char* key, OrderedJson schema);
  // As field(), for one that is replaced by `fallback` if the document lacks it. A fallback that the document itself
  // could not give stands for "not there" and is not written.
  void field_or(const char* key, OrderedJson schema, const OrderedJson& fallback, bool is_value);
  // A sentence about the field, or about the object where `key` is null.
  void about(const char* key, const char* text);
  // From `low` to `high` of the fields are there.
  void choice(std::initializer_list<const char*> keys, size_t low, size_t high);
  // Where one of the fields is there, all are.
  void together(std::initializer_list<const char*> keys);

  OrderedJson schema() const;

 private:
  OrderedJson& property(const char* key);

  OrderedJson properties_ = OrderedJson::object();
  OrderedJson texts_ = OrderedJson::object();
  std::string about_;
  std::unordered_set<std::string> optional_;
  OrderedJson rules_ = OrderedJson::array();
  OrderedJson dependent_ = OrderedJson::object();
};

// The schemas of single values.
OrderedJson number_schema(Range range);
OrderedJson whole_schema(uint64_t low, uint64_t high);
OrderedJson text_schema();
OrderedJson list_schema(OrderedJson items, size_t low_count, size_t high_count = kMaxElements);
OrderedJson names_schema(OrderedJson values);  // {"name": value, ...}

}  // namespace gpushare::cluster
