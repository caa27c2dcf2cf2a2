// daemon: models shared by processes. A server (`gpushare model-daemon`) owns the device buffer and the images; worker
// processes attach, take turns, and find a model's layers in memory that the server filled. Calls base,
// device, sched (residency) and loader; may be called from c_api and cli.
//
// protocol.hpp: what goes over the socket: one message of a fixed size a type, each with its version. The
// server treats every message as hostile, the worker every reply as possibly broken; nothing here touches a
// socket.
//
//   worker                          server
//   AttachRequest   ->
//                   <-   Reply (device, sizes) + board, layer table
//   BeginRequest    ->                           (waits for its turn)
//                   <-   Reply (sizes) + region, in one part or two [+ scratch]
//   EndRequest      ->
//                   <-   Reply
// StatusRequest may be sent by anybody, attached or not; its reply carries the status table. A reply has the
// request's sequence. One request at a time: the next one only after the reply.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"

namespace gpushare::daemon {

inline constexpr uint32_t kMagic = 0x47505344;  // "GPSD"
inline constexpr uint16_t kProtocolVersion = 1;
inline constexpr uint64_t kNoTimeout = UINT64_MAX;

enum class MessageType : uint16_t { kAttach = 1, kBegin = 2, kEnd = 3, kStatus = 4, kReply = 5 };

struct Header {
  uint32_t magic = kMagic;
  uint16_t version = kProtocolVersion;
  uint16_t type = 0;
  uint32_t bytes = 0;  // of the whole message
  uint32_t sequence = 0;
};

struct AttachRequest {
  Header header;
  uint64_t execute_ns = 0;     // of one iteration, for the plan; 0 = as long as the transmission
  uint64_t scratch_bytes = 0;  // of the worker's own memory while it has the turn
  char name[64] = {};
  char path[4096] = {};  // of the model, absolute
};

struct BeginRequest {
  Header header;
  uint64_t timeout_ns = kNoTimeout;
};

struct EndRequest {
  Header header;
  uint64_t iteration_ns = 0;  // the shortest iteration of the turn with all layers there; 0 = none was seen
};

struct StatusRequest {
  Header header;
};

struct Reply {
  Header header;
  int32_t code = 0;          // of status.h; unless it is OK, nothing but text counts
  uint32_t descriptors = 0;  // that come with it
  uint64_t image_bytes = 0;
  uint64_t region_bytes = 0;
  uint64_t prefix_bytes =
      0;  // of the region, in the first descriptor; the rest is in a second. 0: all in one
  uint64_t scratch_bytes = 0;  // rounded up to granules
  uint64_t worker = 0;         // the server's number of it
  uint32_t layers = 0;
  uint32_t arrived = 0;   // layers that were on the device when the turn was given
  char device[256] = {};  // what the worker opens
  char text[512] = {};    // why not
};

// A checked request. Fields that its type lacks are zero.
struct Request {
  MessageType type = MessageType::kStatus;
  uint32_t sequence = 0;
  uint64_t execute_ns = 0;
  uint64_t scratch_bytes = 0;
  uint64_t timeout_ns = 0;
  uint64_t iteration_ns = 0;
  std::string name;
  std::string path;
};

// The largest request.
inline constexpr size_t kMaxRequestBytes = sizeof(AttachRequest);

// Errors: MALFORMED_INPUT (size, magic, type, text without an end), UNSUPPORTED (version; names both),
// INVALID_ARGUMENT (empty or unprintable name, path that is not absolute).
base::Result<Request> parse_request(std::span<const std::byte> message);
// The sequence of a message that may be broken, for the answer; 0 if it is too short for one.
uint32_t sequence_of(std::span<const std::byte> message);
// Errors: MALFORMED_INPUT, UNSUPPORTED. A reply with a code that is not OK is no error of parsing.
base::Result<Reply> parse_reply(std::span<const std::byte> message);

// Turns the error that the other side reports into a status. A code that this version does not know (from a
// newer daemon, or invalid) becomes UNKNOWN, with the code kept as the native one.
base::Status reported(int32_t code, std::string text);

AttachRequest make_attach(uint32_t sequence, const std::string& name, const std::string& path,
                          uint64_t execute_ns, uint64_t scratch_bytes);
BeginRequest make_begin(uint32_t sequence, uint64_t timeout_ns);
EndRequest make_end(uint32_t sequence, uint64_t iteration_ns = 0);
StatusRequest make_status(uint32_t sequence);
Reply make_reply(uint32_t sequence, const base::Status& status);

// ---- tables, sent as sealed files: of any length ---------------------------------------------------------

struct TableLayer {
  std::string name;
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
};
std::string encode_layers(std::span<const TableLayer> layers);
// Errors: MALFORMED_INPUT, also for a layer outside `image_bytes`.
base::Result<std::vector<TableLayer>> parse_layers(std::string_view table, uint64_t image_bytes);

struct WorkerStatus {
  uint64_t worker = 0;
  int64_t pid = 0;
  std::string name;
  std::string state;  // "reading", "attached", "waiting", "turn"
  std::string model;
  uint64_t turns = 0;
  uint64_t turn_ns = 0;  // in all
  uint64_t scratch_bytes = 0;
  uint64_t iteration_ns =
      0;  // what its loads are planned for: as it said, then as seen; 0 = as long as the load
};
struct ModelStatus {
  std::string path;
  std::string state;  // "off", "loading", "resident", "failed"
  uint64_t bytes = 0;
  uint32_t layers = 0;
  uint32_t arrived = 0;
  uint64_t workers = 0;
  uint64_t loads = 0;
};
struct DaemonStatus {
  std::string device;
  int64_t pid = 0;
  uint64_t uptime_ns = 0;
  uint64_t capacity_bytes = 0;
  uint64_t resident_bytes = 0;     // of models and scratch memory
  uint64_t standby_bytes = 0;      // of first layers of models that are off the device otherwise
  uint64_t device_free_bytes = 0;  // as the device says
  uint64_t device_total_bytes = 0;
  uint64_t images_bytes = 0;
  uint64_t images_limit_bytes = 0;
  uint64_t turns = 0;
  uint64_t loads = 0;
  uint64_t drops = 0;
  uint64_t reclaimed = 0;  // workers that left with the turn, waiting for it, or while their image was read
  uint64_t cut_off = 0;    // for a turn longer than the lease
  uint64_t refused = 0;    // connections and messages
  std::vector<WorkerStatus> workers;
  std::vector<ModelStatus> models;
};
std::string encode_status(const DaemonStatus& status);
base::Result<DaemonStatus> parse_status(std::string_view table);

}  // namespace gpushare::daemon
