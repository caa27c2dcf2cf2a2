// reservation_document.hpp: the texts of reservations: requests and places in, grants and the table's status out.
// Errors: MALFORMED_INPUT with path and value.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "cluster/fields.hpp"
#include "cluster/reservations.hpp"

namespace gpushare::cluster {

// Deadlines in the text count from now_ns.
base::Result<ReservationRequest> read_reservation(std::string_view text, uint64_t now_ns);
base::Result<ReservationTable::Where> read_where(std::string_view text);
base::Result<Amounts> read_amounts(std::string_view text);
// The same of an object that is read already, such as an element of a list. Of the request all but what its reader asks for
// besides: no done().
ReservationRequest read_request(Fields& fields, uint64_t now_ns);
ReservationTable::Where read_place(Fields& fields);
// The schemas of requests and places, as "reservation" and "reservation_place".
OrderedJson describe_reservations();
std::string write_grant(const Grant& grant);
std::string write_status(const ReservationTable& table);

}  // namespace gpushare::cluster
