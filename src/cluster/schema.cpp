// The published JSON Schema: what the readers of the documents say that they read.
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "cluster/json.hpp"
#include "cluster/plan.hpp"
#include "cluster/reservation_document.hpp"

namespace gpushare::cluster {
namespace {

OrderedJson texts(std::initializer_list<const char*> list) {
  OrderedJson out = OrderedJson::array();
  for (const char* text : list) out.push_back(text);
  return out;
}

OrderedJson describe(const Kind& kind) {
  return Fields::describe([&](Fields& document) {
    const std::vector<Device> devices = read_frame(document, kind);
    kind.read(document, devices);
  });
}

}  // namespace

std::string schema(const std::vector<const Kind*>& known) {
  OrderedJson documents = OrderedJson::array();
  OrderedJson names = OrderedJson::array();
  OrderedJson definitions = OrderedJson::object();
  for (const Kind* kind : known) {
    definitions[kind->name] = describe(*kind);
    documents.push_back(object({{"$ref", std::string("#/$defs/") + kind->name}}));
    names.push_back(kind->name);
  }
  definitions.update(describe_reservations());
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
