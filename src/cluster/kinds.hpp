// kinds.hpp: the kinds of documents, and how one joins: a file that defines its `<name>_kind()`, which is declared and listed here, an
// example under examples/cluster, and its files in CMakeLists.txt. Nothing else knows the kinds.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cluster/fields.hpp"
#include "cluster/model/device.hpp"

namespace gpushare::cluster {

// A document that was read, to be decided by any of its kind's schedulers.
class Problem {
 public:
  virtual ~Problem() = default;
  // Adds the fields of the kind to `result`. `choice` is one of the kind's. What cannot be served or run is said in the result, not an
  // error. Errors: what the scheduler needs and the document lacks, with its path (INVALID_ARGUMENT).
  virtual base::Status solve(std::string_view choice, OrderedJson& result) = 0;
};

struct Kind {
  const char* name;
  const char*
      chooses;  // "scheduler" or "objective": what `choices` are, and the field of a result that names one
  std::vector<const char*> choices;
  std::vector<const char*> defaults;  // taken when nothing is said
  bool needs_devices;                 // else the document may leave them out
  // Reads the kind's own fields. Errors go to `document`; what comes back is then not used.
  std::unique_ptr<Problem> (*read)(Fields& document, const std::vector<Device>& devices);
  // JSON Schema of the kind's own fields: {"properties": {...}, "required": [...], "$defs": {...}}.
  const char* schema;
};

const Kind& services_kind();
const Kind& trials_kind();
const Kind& retraining_kind();
const Kind& shares_kind();

// All of them, in the order in which help lists them.
const std::vector<const Kind*>& kinds();

}  // namespace gpushare::cluster
