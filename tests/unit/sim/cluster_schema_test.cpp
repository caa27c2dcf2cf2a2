// The published schema and the readers say the same of every field. The schema is made by the readers; this test reads it as a
// stranger would, by a validator of its own, and holds every example document, and thousands of changed ones, against both.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>

#include "cluster/json.hpp"
#include "cluster/plan.hpp"
#include "sim/cluster_training.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using cluster::Json;
using cluster::Kind;

namespace {

// The words of JSON Schema that the schema uses; any other fails the test.
bool valid(const Json& schema, const Json& value);

size_t count_valid(const Json& schemas, const Json& value) {
  size_t count = 0;
  for (const Json& schema : schemas) count += valid(schema, value) ? 1 : 0;
  return count;
}

bool is_whole(const Json& value) {
  if (!value.is_number()) return false;
  const auto number = value.get<double>();
  return number == std::floor(number);
}

bool has_type(const std::string& type, const Json& value) {
  if (type == "object") return value.is_object();
  if (type == "array") return value.is_array();
  if (type == "string") return value.is_string();
  if (type == "boolean") return value.is_boolean();
  if (type == "number") return value.is_number();
  REQUIRE(type == "integer");
  return is_whole(value);
}

bool has_all(const Json& keys, const Json& value) {
  for (const Json& key : keys)
    if (!value.contains(key.get<std::string>())) return false;
  return true;
}

bool valid_object(const std::string& word, const Json& rule, const Json& schema, const Json& value) {
  if (word == "required") return !value.is_object() || has_all(rule, value);
  if (word == "dependentRequired") {
    for (const auto& [key, others] : rule.items())
      if (value.contains(key) && !has_all(others, value)) return false;
    return true;
  }
  if (word == "properties") {
    for (const auto& [key, inner] : rule.items())
      if (value.contains(key) && !valid(inner, value.at(key))) return false;
    return true;
  }
  for (const auto& [key, inner] : value.items()) {  // additionalProperties
    if (schema.contains("properties") && schema.at("properties").contains(key)) continue;
    if (!valid(rule, inner)) return false;
  }
  return true;
}

bool valid_array(const std::string& word, const Json& rule, const Json& schema, const Json& value) {
  if (word == "minItems") return value.size() >= rule.get<size_t>();
  if (word == "maxItems") return value.size() <= rule.get<size_t>();
  const size_t first = schema.contains("prefixItems") ? schema.at("prefixItems").size() : 0;
  for (size_t i = 0; i < value.size(); ++i) {
    if (word == "prefixItems" ? i < first && !valid(rule[i], value[i]) : i >= first && !valid(rule, value[i]))
      return false;
  }
  return true;
}

bool valid(const Json& schema, const Json& value) {
  if (schema.is_boolean()) return schema.get<bool>();
  for (const auto& [word, rule] : schema.items()) {
    bool good = true;
    if (word == "type") {
      good = has_type(rule.get<std::string>(), value);
    } else if (word == "const") {
      good = value == rule;
    } else if (word == "enum") {
      good = std::find(rule.begin(), rule.end(), value) != rule.end();
    } else if (word == "minimum") {
      good = !value.is_number() || value.get<double>() >= rule.get<double>();
    } else if (word == "exclusiveMinimum") {
      good = !value.is_number() || value.get<double>() > rule.get<double>();
    } else if (word == "maximum") {
      good = !value.is_number() || value.get<double>() <= rule.get<double>();
    } else if (word == "minLength") {
      good = !value.is_string() || value.get_ref<const std::string&>().size() >= rule.get<size_t>();
    } else if (word == "maxLength") {
      good = !value.is_string() || value.get_ref<const std::string&>().size() <= rule.get<size_t>();
    } else if (word == "oneOf") {
      good = count_valid(rule, value) == 1;
    } else if (word == "anyOf") {
      good = count_valid(rule, value) > 0;
    } else if (word == "allOf") {
      good = count_valid(rule, value) == rule.size();
    } else if (word == "not") {
      good = !valid(rule, value);
    } else if (word == "required" || word == "properties" || word == "additionalProperties" ||
               word == "dependentRequired") {
      good = !value.is_object() || valid_object(word, rule, schema, value);
    } else if (word == "items" || word == "prefixItems" || word == "minItems" || word == "maxItems") {
      good = !value.is_array() || valid_array(word, rule, schema, value);
    } else {
      INFO(word);
      REQUIRE((word == "description" || word == "default"));
    }
    if (!good) return false;
  }
  return true;
}

std::string refused(const Kind& kind, const Json& document) {
  base::Status error;
  cluster::Fields fields(document, &error);
  const std::vector<cluster::Device> devices = cluster::read_frame(fields, kind);
  if (error.ok()) kind.read(fields, devices);
  fields.done();
  return error.ok() ? "" : error.message();
}

Json example(const Kind& kind) {
  std::ifstream in(std::string(GPUSHARE_EXAMPLES "/cluster/") + kind.name + ".json");
  std::stringstream text;
  text << in.rdbuf();
  return Json::parse(text.str());
}

// Whether the reader's reason is one that a schema can express. Others concern several fields: names that are there twice,
// points that do not ascend, sizes of a matrix.
bool is_of_one_field(const std::string& message) {
  if (message.find("give 2 lists of") != std::string::npos || message.find("lists of") != std::string::npos)
    return false;
  for (const char* said :
       {"the field is missing; give", "the field is missing; there", "; give a number",
        "; give a whole number", "; give a text", "; give an object", "; give a list of 1 to",
        "; give a list of 0 to", "; give a list of 2 to", "; give a list of 5", "no such field",
        "; there are ", ": give one of", ": give at least one", "; give true or false"})
    if (message.find(said) != std::string::npos) return true;
  return false;
}

// Calls f for each place in a document, the first two elements of a list alone.
template <class F>
void each_place(const Json::json_pointer& at, const Json& value, F&& f) {
  if (value.is_object())
    for (const auto& [key, inner] : value.items()) {
      f(at / key);
      each_place(at / key, inner, f);
    }
  if (value.is_array())
    for (size_t i = 0; i < std::min<size_t>(2, value.size()); ++i) {
      f(at / i);
      each_place(at / i, value[i], f);
    }
}

}  // namespace

TEST_CASE("the schema and the readers take and refuse the same documents", "[cluster]") {
  const Json schema = Json::parse(cluster::schema(sim::all_cluster_kinds()));
  const Json values =
      Json::parse(R"([-1, 0, 1, 0.5, 7, 3e9, 1e300, "", "word", true, null, [], {}, [[1, 2]], ["a"]])");
  size_t tried = 0, taken = 0;
  for (const Kind* kind : sim::all_cluster_kinds()) {
    INFO(kind->name);
    const Json& own = schema.at("$defs").at(kind->name);
    const Json document = example(*kind);
    CHECK(refused(*kind, document).empty());
    CHECK(valid(own, document));
    const auto check = [&](const Json& changed, const std::string& what) {
      INFO(what);
      const std::string message = refused(*kind, changed);
      INFO(message);
      ++tried;
      taken += message.empty() ? 1 : 0;
      if (valid(own, changed) ? !is_of_one_field(message) : !message.empty()) return;
      CHECK(message.empty() == valid(own, changed));
    };
    // Tables of measurements are hundreds of numbers of one field: the first are enough.
    each_place(Json::json_pointer(), document, [&](const Json::json_pointer& at) {
      for (const Json& value : values) {
        Json changed = document;
        changed[at] = value;
        check(changed, at.to_string() + " is " + value.dump());
      }
      if (document.at(at.parent_pointer()).is_object()) {
        Json changed = document;
        changed.at(at.parent_pointer()).erase(at.back());
        check(changed, at.to_string() + " is not there");
      }
      if (document.at(at).is_object()) {
        Json changed = document;
        changed[at]["no such field"] = 1;
        check(changed, at.to_string() + " has one more");
      }
    });
  }
  CHECK(tried > 1000);
  CHECK(taken > 100);
}

TEST_CASE("what the schema says of a field that a document lacks is what the readers take", "[cluster]") {
  const Json schema = Json::parse(cluster::schema(sim::all_cluster_kinds()));
  size_t given = 0;
  for (const Kind* kind : sim::all_cluster_kinds()) {
    const Json document = example(*kind);
    const std::function<void(const Json&, const Json::json_pointer&)> walk =
        [&](const Json& own, const Json::json_pointer& at) {
          const Json& value = document.at(at);
          if (own.contains("items") && value.is_array() && !value.empty()) walk(own.at("items"), at / 0);
          if (!own.contains("properties") || !value.is_object()) return;
          for (const auto& [key, field] : own.at("properties").items()) {
            if (value.contains(key)) {
              walk(field, at / key);
            } else if (field.contains("default")) {
              Json changed = document;
              changed[at][key] = field.at("default");
              INFO(kind->name << " " << (at / key).to_string());
              CHECK(refused(*kind, changed).empty());
              ++given;
            }
          }
        };
    walk(schema.at("$defs").at(kind->name), Json::json_pointer());
  }
  CHECK(given > 10);
}
