// SPDX-License-Identifier: Apache-2.0
#include "cluster/reservation_document.hpp"

#include "cluster/fields.hpp"
#include "cluster/json.hpp"

namespace gpushare::cluster {
namespace {

Amounts read_needs(Fields& fields) {
  Amounts needs;
  fields.about("needs", "How much of each resource the part takes on one node.");
  for (const auto& [name, amount] : fields.named_numbers("needs", kPositive)) needs[name] = amount;
  return needs;
}

std::vector<Part> read_parts(Fields& fields) {
  std::vector<Part> parts;
  fields.each("parts", 1, [&](Fields& inner, size_t) {
    Part part;
    part.needs = read_needs(inner);
    inner.about("count", "So many of these parts.");
    inner.about("apart", "Each part on a node of its own.");
    inner.about("node", "On that node.");
    part.count = int(inner.whole_or("count", 1, 4096, 1));
    part.apart = inner.flag_or("apart", false);
    part.node = inner.text_or("node", "");
    parts.push_back(std::move(part));
  });
  return parts;
}

uint64_t in_ns(double ms) {
  return static_cast<uint64_t>(ms * 1e6);
}

template <class Read>
auto read_text(std::string_view text, Read&& read) -> base::Result<decltype(read(std::declval<Fields&>()))> {
  GPUSHARE_ASSIGN_OR_RETURN(const Json document, parse_document(text));
  base::Status error;
  Fields fields(document, &error);
  auto out = read(fields);
  fields.done();
  GPUSHARE_RETURN_IF_ERROR(error);
  return out;
}

}  // namespace

ReservationRequest read_request(Fields& fields, uint64_t now_ns) {
  constexpr Range kMilliseconds{0, 1e9, false};
  ReservationRequest request;
  fields.about(nullptr,
               "A request for resources: all parts of one alternative, the first that fits, or nothing.");
  fields.about("deadline_ms", "The request waits so long at most.");
  fields.about("lease_ms", "The grant ends after so long.");
  request.owner = fields.text("owner");
  fields.exactly_one({"parts", "alternatives"});
  if (fields.has("alternatives"))
    fields.each("alternatives", 1,
                [&](Fields& inner, size_t) { request.alternatives.push_back(read_parts(inner)); });
  if (fields.has("parts")) request.alternatives.push_back(read_parts(fields));
  if (fields.has("deadline_ms"))
    request.deadline_ns = now_ns + in_ns(fields.number("deadline_ms", kMilliseconds));
  if (fields.has("lease_ms")) request.lease_ns = in_ns(fields.number("lease_ms", kMilliseconds));
  return request;
}

ReservationTable::Where read_place(Fields& fields) {
  ReservationTable::Where where;
  fields.about(nullptr, "Where a resource is set: on a node, or on count nodes that have one of the needs.");
  fields.exactly_one({"node", "any_of"});
  if (fields.has("node")) where.node = fields.text("node");
  if (fields.has("any_of"))
    fields.each("any_of", 1, [&](Fields& inner, size_t) { where.any_of.push_back(read_needs(inner)); });
  fields.about("count", "Nodes, with any_of.");
  where.count = int(fields.whole_or("count", 1, 1'000'000, 1));
  if (where.count > 1 && !where.node.empty())
    fields.refuse("count", "the node is one; give any_of for several");
  return where;
}

OrderedJson describe_reservations() {
  return object({{"reservation", Fields::describe([](Fields& fields) { read_request(fields, 0); })},
                 {"reservation_place", Fields::describe([](Fields& fields) { read_place(fields); })}});
}

base::Result<ReservationRequest> read_reservation(std::string_view text, uint64_t now_ns) {
  return read_text(text, [&](Fields& fields) { return read_request(fields, now_ns); });
}

base::Result<ReservationTable::Where> read_where(std::string_view text) {
  return read_text(text, read_place);
}

base::Result<Amounts> read_amounts(std::string_view text) {
  GPUSHARE_ASSIGN_OR_RETURN(const Json document, parse_document(text));
  base::Status error;
  const Json wrapped = {{"resources", document}};
  Fields fields(wrapped, &error);
  Amounts amounts;
  for (const auto& [name, amount] : fields.named_numbers("resources", kNotNegative)) amounts[name] = amount;
  GPUSHARE_RETURN_IF_ERROR(error);
  return amounts;
}

std::string write_grant(const Grant& grant) {
  return object({{"alternative", grant.alternative}, {"nodes", grant.nodes}})
      .dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

std::string write_status(const ReservationTable& table) {
  OrderedJson resources = OrderedJson::array();
  for (const ReservationTable::Level& level : table.levels())
    resources.push_back(object(
        {{"node", level.node}, {"name", level.name}, {"capacity", level.capacity}, {"used", level.used}}));
  return object({{"waiting", table.waiting()}, {"resources", std::move(resources)}})
      .dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace gpushare::cluster
