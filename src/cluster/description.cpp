// SPDX-License-Identifier: Apache-2.0
#include "cluster/description.hpp"

#include <algorithm>
#include <utility>

#include "cluster/json.hpp"

namespace gpushare::cluster {
namespace {

OrderedJson required(std::initializer_list<const char*> keys) {
  OrderedJson names = OrderedJson::array();
  for (const char* key : keys) names.push_back(key);
  return object({{"required", std::move(names)}});
}

// None, or one, of the fields.
OrderedJson one_of_each(std::initializer_list<const char*> keys) {
  OrderedJson out = OrderedJson::array();
  for (const char* key : keys) out.push_back(required({key}));
  return out;
}

}  // namespace

OrderedJson& Description::property(const char* key) {
  if (!properties_.contains(key)) properties_[key] = OrderedJson::object();
  return properties_[key];
}

void Description::may_lack(const char* key) {
  property(key);
  optional_.insert(key);
}

void Description::field(const char* key, OrderedJson schema) {
  OrderedJson& known = property(key);
  if (known.empty() || known == schema) {
    known = std::move(schema);
  } else if (known.contains("oneOf")) {
    known["oneOf"].push_back(std::move(schema));
  } else {
    OrderedJson both = OrderedJson::array();
    both.push_back(std::move(known));
    both.push_back(std::move(schema));
    known = object({{"oneOf", std::move(both)}});
  }
}

void Description::field_or(const char* key, OrderedJson schema, const OrderedJson& fallback, bool is_value) {
  may_lack(key);
  if (is_value) schema["default"] = fallback;
  field(key, std::move(schema));
}

void Description::about(const char* key, const char* text) {
  if (key == nullptr)
    about_ = text;
  else
    texts_[key] = text;
}

void Description::choice(std::initializer_list<const char*> keys, size_t low, size_t high) {
  for (const char* key : keys) may_lack(key);
  if (low == 1 && high == 1) {
    rules_.push_back(object({{"oneOf", one_of_each(keys)}}));
  } else if (low == 1) {
    rules_.push_back(object({{"anyOf", one_of_each(keys)}}));
  } else {
    for (const auto* a = keys.begin(); a != keys.end(); ++a)
      for (const auto* b = a + 1; b != keys.end(); ++b)
        rules_.push_back(object({{"not", required({*a, *b})}}));
  }
}

void Description::together(std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    may_lack(key);
    OrderedJson others = OrderedJson::array();
    for (const char* other : keys)
      if (std::string_view(other) != key) others.push_back(other);
    dependent_[key] = std::move(others);
  }
}

OrderedJson Description::schema() const {
  OrderedJson out = OrderedJson::object();
  if (!about_.empty()) out["description"] = about_;
  out["type"] = "object";
  OrderedJson properties = OrderedJson::object(), needed = OrderedJson::array();
  for (const auto& [key, schema] : properties_.items()) {
    OrderedJson property = OrderedJson::object();
    if (texts_.contains(key)) property["description"] = texts_[key];
    property.update(schema);
    properties[key] = std::move(property);
    if (optional_.count(key) == 0) needed.push_back(key);
  }
  out["properties"] = std::move(properties);
  if (!needed.empty()) out["required"] = std::move(needed);
  if (!rules_.empty()) out["allOf"] = rules_;
  if (!dependent_.empty()) out["dependentRequired"] = dependent_;
  out["additionalProperties"] = false;
  return out;
}

OrderedJson number_schema(Range range) {
  return object({{"type", "number"},
                 {range.above ? "exclusiveMinimum" : "minimum", range.low},
                 {"maximum", range.high}});
}

OrderedJson whole_schema(uint64_t low, uint64_t high) {
  if (low == high) return object({{"const", low}});
  return object({{"type", "integer"}, {"minimum", low}, {"maximum", high}});
}

OrderedJson text_schema() {
  return object({{"type", "string"}, {"minLength", 1}, {"maxLength", kMostTextBytes}});
}

OrderedJson list_schema(OrderedJson items, size_t low_count, size_t high_count) {
  return object(
      {{"type", "array"}, {"minItems", low_count}, {"maxItems", high_count}, {"items", std::move(items)}});
}

OrderedJson names_schema(OrderedJson values) {
  return object({{"type", "object"}, {"additionalProperties", std::move(values)}});
}

}  // namespace gpushare::cluster
