// protocol.hpp: the messages on the daemon's socket (wire.hpp), checked here. Each packet is one message of a
// known type. Each side treats messages of the other as possibly broken. Nothing here touches a socket.
//
//   process                                    daemon
//   Hello                          ->
//                                  <-          Welcome + the page of leases (lease_page.hpp)
//   Context                        ->
//                                  <-          Reply, if it was a question
//   Arrive, Need, Room             ->
//                                  <-          Reply, with the request's sequence
//   Ready, NotReady, Returned, ... ->          (no reply)
//                                  <-          Granted, Wanted, Admit, PageOut, PageIn, RoomMade
//                                  <-          LaneHere + memory to map, before an Admit, a PageIn or a Reply to a Need
//   ImageOpen                      ->
//                                  <-          ImageOpened + board (board.hpp), table of layers
//                                  <-          ImageHere + memory to read, before a turn of the image's session is granted
//                                  <-          ImageGone: unmap it
//   ImageUnmapped, ImageClose      ->          (no reply)
//   RangeHas, RangeAnswer          ->          (no reply)
//   Room, of ranges                ->
//                                  <-          Reply, RangeGive to owners of other ranges, RangeGiven
//                                  <-          CountsAs, Limit, where the daemon has a coordinator
//   GateOpen, WorkBegan, WorkEnded ->          (no reply)
//   StatusRequest, SetCapacity     ->          (instead of Hello)
//                                  <-          Reply [+ a sealed file with the status (status.hpp)]
//
// wire.hpp has the one table of messages and the rule for versions. A message that is not in the table, has another size than the
// table says or comes from the wrong side is refused by fault_of(), and ends its connection.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/status.hpp"
#include "client/wire.hpp"

namespace gpushare::client {

// The type of a message that came `from` that side. Errors: MALFORMED_INPUT (mark, type, size, side), UNSUPPORTED (major version;
// names both).
base::Result<MessageType> check_message(std::span<const std::byte> message, Side from);
// The fields of a checked message.
template <class T>
T fields_of(std::span<const std::byte> message) {
  return fields_of<T>(message.data(), message.size());
}
// Copies text into a field of fixed size. Text that does not fit is cut between two characters.
void put_text(std::span<char> field, std::string_view text);
// The text of a field, up to its end or its first zero, as base::to_printable makes it: the other side may have written anything.
std::string text_of(std::span<const char> field);
// Turns the error that the other side reports into a status. A code that this version does not know becomes
// UNKNOWN, with the code kept as the native one.
base::Status reported(int32_t code, std::string text);

}  // namespace gpushare::client
