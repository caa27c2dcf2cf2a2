// reservation_document.hpp: the texts of reservations: requests and places in, grants and the table's status out.
// Errors: MALFORMED_INPUT with path and value.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "cluster/reservations.hpp"

namespace gpushare::cluster {

// Deadlines in the text count from now_ns.
base::Result<ReservationRequest> read_reservation(std::string_view text, uint64_t now_ns);
base::Result<ReservationTable::Where> read_where(std::string_view text);
base::Result<Amounts> read_amounts(std::string_view text);
std::string write_grant(const Grant& grant);
std::string write_status(const ReservationTable& table);

}  // namespace gpushare::cluster
