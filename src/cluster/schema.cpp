// The published JSON Schema: a frame here, the fields of each kind in its own file.
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "cluster/json.hpp"
#include "cluster/plan.hpp"

namespace gpushare::cluster {
namespace {

OrderedJson texts(std::initializer_list<const char*> list) {
  OrderedJson out = OrderedJson::array();
  for (const char* text : list) out.push_back(text);
  return out;
}

}  // namespace

std::string schema(const std::vector<const Kind*>& known) {
  OrderedJson documents = OrderedJson::array();
  OrderedJson names = OrderedJson::array();
  OrderedJson definitions = OrderedJson::parse(R"({
    "positive": {"type": "number", "exclusiveMinimum": 0},
    "not_negative": {"type": "number", "minimum": 0},
    "fraction": {"type": "number", "minimum": 0, "maximum": 1},
    "name": {"type": "string", "minLength": 1, "maxLength": 256},
    "devices": {
      "description": "A number of equal devices of 16 GiB, or a list of them. speed is relative to the device that the profiles are of. Without it a device with compute_units has their number over that of a device of speed 1: as the first device says that has both, or else the device with the most. Gangs of training jobs are placed on as few nodes as possible.",
      "oneOf": [
        {"type": "integer", "minimum": 1, "maximum": 1000000},
        {"type": "array", "minItems": 1, "maxItems": 1000000, "items": {
          "type": "object",
          "properties": {
            "id": {"$ref": "#/$defs/name"},
            "memory_bytes": {"type": "integer", "minimum": 1},
            "compute_units": {"$ref": "#/$defs/positive"},
            "node": {"$ref": "#/$defs/name"},
            "speed": {"$ref": "#/$defs/positive"},
            "down": {"description": "For run, of services and training jobs: when the device has failed. Without until_s it does not come back.", "type": "array", "minItems": 1, "items": {
              "type": "object", "properties": {"from_s": {"$ref": "#/$defs/not_negative"}, "until_s": {"$ref": "#/$defs/positive"}},
              "required": ["from_s"], "additionalProperties": false}}
          },
          "required": ["id", "memory_bytes"],
          "additionalProperties": false}}
      ]
    }
  })");
  for (const Kind* kind : known) {
    const OrderedJson own = OrderedJson::parse(kind->schema);
    OrderedJson properties = object({{"version", object({{"const", kDocumentVersion}})},
                                     {"kind", object({{"const", kind->name}})},
                                     {"devices", object({{"$ref", "#/$defs/devices"}})}});
    OrderedJson required = texts({"version", "kind"});
    if (kind->needs_devices) required.push_back("devices");
    properties.update(own.at("properties"));
    for (const auto& field : own.at("required")) required.push_back(field);
    if (own.contains("$defs")) definitions.update(own.at("$defs"));
    definitions[kind->name] = object({{"type", "object"},
                                      {"properties", std::move(properties)},
                                      {"required", std::move(required)},
                                      {"additionalProperties", false}});
    documents.push_back(object({{"$ref", std::string("#/$defs/") + kind->name}}));
    names.push_back(kind->name);
  }
  const OrderedJson entry = object({{"type", "object"}, {"required", texts({"solve_ms"})}});
  definitions["result"] =
      object({{"description", "What comes back: one entry of results a scheduler or objective."},
              {"type", "object"},
              {"properties", object({{"version", object({{"const", kDocumentVersion}})},
                                     {"kind", object({{"enum", std::move(names)}})},
                                     {"results", object({{"type", "array"}, {"items", entry}})}})},
              {"required", texts({"version", "kind", "results"})}});
  const OrderedJson whole = object({{"$schema", "https://json-schema.org/draft/2020-12/schema"},
                                    {"title", "gpushare cluster document, version 1"},
                                    {"oneOf", std::move(documents)},
                                    {"$defs", std::move(definitions)}});
  return whole.dump(2) + "\n";
}

}  // namespace gpushare::cluster
