// Messages and tables of the memory daemon from bytes: what is accepted keeps its promises, and no status is a
// surprise. The first byte says what the rest is taken for.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <span>
#include <string_view>

#include "daemon/protocol.hpp"

namespace {

using namespace gpushare;
using namespace gpushare::daemon;

void require(bool condition) {
  if (!condition) std::abort();
}

void check_refusal(const base::Status& status) {
  require(status.code() == GPUSHARE_MALFORMED_INPUT || status.code() == GPUSHARE_UNSUPPORTED ||
          status.code() == GPUSHARE_INVALID_ARGUMENT);
  require(!status.message().empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::span<const std::byte> message(reinterpret_cast<const std::byte*>(data + 1), size - 1);
  const std::string_view table(reinterpret_cast<const char*>(data + 1), size - 1);
  switch (data[0] % 4) {
    case 0: {
      const auto request = parse_request(message);
      if (!request.ok()) return check_refusal(request.status()), 0;
      require(request->sequence == sequence_of(message));
      if (request->type == MessageType::kAttach) {
        require(!request->name.empty() && request->name.size() < 64);
        require(request->path.size() < 4096 && request->path[0] == '/');
        // Written again it is the same message.
        const AttachRequest again = make_attach(request->sequence, request->name, request->path,
                                                request->execute_ns, request->scratch_bytes);
        require(std::equal(message.begin(), message.end(), std::as_bytes(std::span(&again, 1)).begin()));
      }
      break;
    }
    case 1: {
      const auto reply = parse_reply(message);
      if (!reply.ok()) return check_refusal(reply.status()), 0;
      require(reply->text[sizeof(reply->text) - 1] == 0 && reply->device[sizeof(reply->device) - 1] == 0);
      break;
    }
    case 2: {
      constexpr uint64_t kImageBytes = 1 << 20;
      const auto layers = parse_layers(table, kImageBytes);
      if (!layers.ok()) return check_refusal(layers.status()), 0;
      for (const TableLayer& layer : *layers)
        require(layer.offset_bytes <= kImageBytes && layer.bytes <= kImageBytes - layer.offset_bytes);
      require(encode_layers(*layers) == table);
      break;
    }
    default: {
      const auto status = parse_status(table);
      if (!status.ok()) return check_refusal(status.status()), 0;
      require(encode_status(*status) == table);
      break;
    }
  }
  return 0;
}
