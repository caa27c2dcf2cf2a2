// Messages, tables and the status of the daemon from bytes: what is accepted keeps its promises, and no status is a
// surprise. The first byte says what the rest is taken for.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <span>
#include <string_view>

#include "client/images.hpp"
#include "client/protocol.hpp"
#include "client/status.hpp"

namespace {

using namespace gpushare;
using namespace gpushare::client;

void require(bool condition) {
  if (!condition) std::abort();
}

void check_refusal(const base::Status& status) {
  require(status.code() == GPUSHARE_MALFORMED_INPUT || status.code() == GPUSHARE_UNSUPPORTED);
  require(!status.message().empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::span<const std::byte> message(reinterpret_cast<const std::byte*>(data + 1), size - 1);
  const std::string_view table(reinterpret_cast<const char*>(data + 1), size - 1);
  switch (data[0] % 3) {
    case 0: {
      const Side from = (data[0] & 0x80) != 0 ? Side::kDaemon : Side::kProcess;
      const auto type = check_message(message, from);
      if (!type.ok()) return check_refusal(type.status()), 0;
      const MessageKind& kind = kMessages[static_cast<size_t>(*type)];
      require(kind.bytes == message.size() && kind.from == from);
      require(text_of(fields_of<ImageOpen>(message).path).size() <= sizeof(ImageOpen::path));
      break;
    }
    case 1: {
      constexpr uint64_t kImageBytes = 1 << 20;
      const auto layers = parse_layers(table, kImageBytes);
      if (!layers.ok()) return check_refusal(layers.status()), 0;
      for (const TableLayer& layer : *layers)
        require(layer.offset_bytes <= kImageBytes && layer.bytes <= kImageBytes - layer.offset_bytes);
      require(encode_layers(*layers) == table);
      break;
    }
    default: {
      const auto status = parse_service_status(table);
      if (!status.ok()) return check_refusal(status.status()), 0;
      require(parse_service_status(encode_status(*status)).ok());
      break;
    }
  }
  return 0;
}
