// SPDX-License-Identifier: Apache-2.0
#include "client/protocol.hpp"

#include <algorithm>
#include <cstring>

#include "base/utf8.hpp"

namespace gpushare::client {
namespace {

struct TypeInfo {
  const char* name;
  size_t first_bytes;  // in minor version 0
};

// By type. Sizes of version 1.0 do not change; fields come at the end in later minor versions.
constexpr TypeInfo kTypes[] = {
    {nullptr, 0},
    {"Hello", 16 + 16 + 256 + 64},
    {"Welcome", 16 + 8 + 16 + 256 + 32 + 512},
    {"Reply", 16 + 8 + 512},
    {"Arrive", 16 + 5 * 8 + 8 + 16 + 64},
    {"Need", 16 + 24},
    {"Room", 32},
    {"StatusRequest", 16},
    {"Ready", 32},
    {"NotReady", 32},
    {"Returned", 32},
    {"Wake", 32},
    {"AllowPaging", 32},
    {"Leave", 32},
    {"Unplaced", 32},
    {"PageDone", 32},
    {"PageOutFailed", 32},
    {"RoomUsed", 32},
    {"SetPriority", 32},
    {"SetWeight", 32},
    {"SetRemaining", 32},
    {"Granted", 32},
    {"Wanted", 32},
    {"Admit", 32},
    {"PageOut", 32},
    {"PageIn", 32},
    {"RoomMade", 32},
    {"SetClass", 32},
    {"ImageOpen", 16 + 24 + 4096},
    {"ImageClose", 32},
    {"ImageUnmapped", 32},
    {"ImageOpened", 16 + 24 + 8 + 512},
    {"ImageHere", 32},
    {"ImageGone", 32},
    {"SetCapacity", 16 + 8 + 256},
    {"SetSpare", 32},
    {"SetLink", 32},
    {"RangeHas", 16 + 32},
    {"RangeAsk", 32},
    {"RangeAnswer", 32},
    {"RangeGive", 32},
    {"RangeGiven", 32},
    {"LaneHere", 32},
    {"CountsAs", 32},
    {"Limit", 32},
    {"SetCap", 32},
    {"Context", 32},
    {"PagePart", 32},
    {"RangeAskLower", 32},
    {"TurnBack", 32},
};
constexpr size_t kTypeCount = sizeof(kTypes) / sizeof(kTypes[0]);
static_assert(kTypeCount == static_cast<size_t>(MessageType::kTurnBack) + 1);
static_assert(sizeof(Header) == 16 && sizeof(Hello) >= kTypes[1].first_bytes);
static_assert(sizeof(Welcome) >= kTypes[2].first_bytes && sizeof(Reply) >= kTypes[3].first_bytes);
static_assert(sizeof(Arrive) >= kTypes[4].first_bytes && sizeof(Need) >= kTypes[5].first_bytes);
static_assert(sizeof(SessionMessage) >= kTypes[6].first_bytes);

constexpr int32_t kLastStatus = GPUSHARE_UNKNOWN;

}  // namespace

base::Result<MessageType> check_message(std::span<const std::byte> message) {
  Header header;
  if (message.size() < sizeof(header))
    return base::Status(GPUSHARE_MALFORMED_INPUT,
                        base::format("a message of %zu bytes is shorter than a header", message.size()));
  std::memcpy(&header, message.data(), sizeof(header));
  if (header.mark != kProtocolMark)
    return base::Status(GPUSHARE_MALFORMED_INPUT, "a message does not begin with the protocol's mark");
  if (header.major != kProtocolMajor)
    return base::Status(
        GPUSHARE_UNSUPPORTED,
        base::format("the other side speaks version %u of the protocol, this one %u; install the "
                     "same release on both sides",
                     header.major, kProtocolMajor));
  if (header.type == 0 || header.type >= kTypeCount)
    return base::Status(GPUSHARE_MALFORMED_INPUT, base::format("no message has type %u", header.type));
  if (header.bytes != message.size() || message.size() < kTypes[header.type].first_bytes)
    return base::Status(
        GPUSHARE_MALFORMED_INPUT,
        base::format("a %s has %zu bytes and says %u; at least %zu are needed", kTypes[header.type].name,
                     message.size(), header.bytes, kTypes[header.type].first_bytes));
  return static_cast<MessageType>(header.type);
}

SessionMessage make_session_message(MessageType type, uint64_t session, uint64_t value, uint32_t sequence) {
  auto message = make_message<SessionMessage>(type, sequence);
  message.session = session;
  message.value = value;
  return message;
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

const char* message_name(MessageType type) {
  const auto index = static_cast<size_t>(type);
  return index > 0 && index < kTypeCount ? kTypes[index].name : "message of no type";
}

base::Status reported(int32_t code, std::string text) {
  if (code == GPUSHARE_OK) return {};
  const bool known =
      code > 0 && code <= kLastStatus && std::string_view(base::status_name(code)) != base::status_name(-1);
  if (known) return {code, std::move(text)};
  return {GPUSHARE_UNKNOWN, std::move(text), code};
}

}  // namespace gpushare::client
