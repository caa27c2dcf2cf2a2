// SPDX-License-Identifier: Apache-2.0
#include "cluster/reservation_document.hpp"

#include "cluster/fields.hpp"
#include "cluster/json.hpp"

namespace gpushare::cluster {
namespace {

Amounts read_needs(Fields& fields) {
  Amounts needs;
  for (const auto& [name, amount] : fields.named_numbers("needs", kPositive)) needs[name] = amount;
  return needs;
}

std::vector<Part> read_parts(Fields& fields) {
  std::vector<Part> parts;
  fields.each("parts", 1, [&](Fields& inner, size_t) {
    Part part;
    part.needs = read_needs(inner);
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

}  // namespace

base::Result<ReservationRequest> read_reservation(std::string_view text, uint64_t now_ns) {
  GPUSHARE_ASSIGN_OR_RETURN(const Json document, parse_document(text));
  base::Status error;
  Fields fields(document, &error);
  ReservationRequest request;
  request.owner = fields.text("owner");
  const bool list = fields.has("alternatives");
  if (list == fields.has("parts")) fields.refuse_all("give one of parts and alternatives");
  if (list) {
    fields.each("alternatives", 1,
                [&](Fields& inner, size_t) { request.alternatives.push_back(read_parts(inner)); });
  } else {
    request.alternatives.push_back(read_parts(fields));
  }
  constexpr Range kMilliseconds{0, 1e9, false};
  if (fields.has("deadline_ms"))
    request.deadline_ns = now_ns + in_ns(fields.number("deadline_ms", kMilliseconds));
  if (fields.has("lease_ms")) request.lease_ns = in_ns(fields.number("lease_ms", kMilliseconds));
  fields.done();
  GPUSHARE_RETURN_IF_ERROR(error);
  return request;
}

base::Result<ReservationTable::Where> read_where(std::string_view text) {
  GPUSHARE_ASSIGN_OR_RETURN(const Json document, parse_document(text));
  base::Status error;
  Fields fields(document, &error);
  ReservationTable::Where where;
  const bool node = fields.has("node");
  if (node == fields.has("any_of")) fields.refuse_all("give one of node and any_of");
  if (node) where.node = fields.text("node");
  if (!node)
    fields.each("any_of", 1, [&](Fields& inner, size_t) { where.any_of.push_back(read_needs(inner)); });
  if (!node) where.count = int(fields.whole_or("count", 1, 1'000'000, 1));
  fields.done();
  GPUSHARE_RETURN_IF_ERROR(error);
  return where;
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
