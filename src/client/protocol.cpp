// SPDX-License-Identifier: Apache-2.0
#include "client/protocol.hpp"

#include <algorithm>
#include <cstring>

#include "base/utf8.hpp"

namespace gpushare::client {
namespace {

constexpr int32_t kLastStatus = GPUSHARE_UNKNOWN;

}  // namespace

base::Result<MessageType> check_message(std::span<const std::byte> message, Side from) {
  const auto malformed = [](std::string text) {
    return base::Status(GPUSHARE_MALFORMED_INPUT, std::move(text));
  };
  const auto header = fields_of<Header>(message);
  const MessageKind& kind = kMessages[header.type < kMessageTypes ? header.type : 0];
  switch (fault_of(message.data(), message.size(), from)) {
    case MessageFault::kNone:
      return static_cast<MessageType>(header.type);
    case MessageFault::kShort:
      return malformed(base::format("a message of %zu bytes is shorter than a header", message.size()));
    case MessageFault::kMark:
      return malformed("a message does not begin with the protocol's mark");
    case MessageFault::kVersion:
      return base::Status(
          GPUSHARE_UNSUPPORTED,
          base::format("the other side speaks version %u of the protocol, this one %u; install the "
                       "same release on both sides",
                       header.major, kProtocolMajor));
    case MessageFault::kType:
      return malformed(base::format("no message has type %u", header.type));
    case MessageFault::kSize:
      return malformed(base::format("a %s has %zu bytes and says %u; it must have %u", kind.name,
                                    message.size(), header.bytes, kind.bytes));
    case MessageFault::kSide:
      break;
  }
  return malformed(base::format("a %s comes from the %s alone", kind.name,
                                kind.from == Side::kDaemon ? "daemon" : "process"));
}

void put_text(std::span<char> field, std::string_view text) {
  size_t count = std::min(text.size(), field.size() - 1);
  while (count > 0 && count < text.size() && (static_cast<unsigned char>(text[count]) & 0xc0) == 0x80)
    --count;
  std::memcpy(field.data(), text.data(), count);
  std::memset(field.data() + count, 0, field.size() - count);
}

std::string text_of(std::span<const char> field) {
  return base::to_printable(
      {field.data(), static_cast<size_t>(std::find(field.begin(), field.end(), '\0') - field.begin())});
}

base::Status reported(int32_t code, std::string text) {
  if (code == GPUSHARE_OK) return {};
  const bool known =
      code > 0 && code <= kLastStatus && std::string_view(base::status_name(code)) != base::status_name(-1);
  if (known) return {code, std::move(text)};
  return {GPUSHARE_UNKNOWN, std::move(text), code};
}

}  // namespace gpushare::client
