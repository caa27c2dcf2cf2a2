// SPDX-License-Identifier: Apache-2.0
#include "daemon/protocol.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace gpushare::daemon {
namespace {

constexpr uint32_t kTableMagic = 0x47505354;
// No valid table exceeds these limits. They bound the memory that a broken table can ask for.
constexpr uint64_t kMaxEntries = 1'000'000;

base::Status malformed(const std::string& what) {
  return {GPUSHARE_MALFORMED_INPUT, what};
}

template <class T>
T message_of(MessageType type, uint32_t sequence) {
  static_assert(std::is_trivially_copyable_v<T> && std::has_unique_object_representations_v<T>);
  T message;
  message.header.type = static_cast<uint16_t>(type);
  message.header.bytes = sizeof(T);
  message.header.sequence = sequence;
  return message;
}

template <size_t N>
void put_text(char (&out)[N], const std::string& text) {
  const size_t length = std::min(text.size(), N - 1);
  std::memcpy(out, text.data(), length);
  std::memset(out + length, 0, N - length);
}

// The text of a fixed field. Errors: MALFORMED_INPUT without an end, or with something behind it.
template <size_t N>
base::Result<std::string> take_text(const char (&field)[N], const char* what) {
  const char* end = static_cast<const char*>(std::memchr(field, 0, N));
  if (end == nullptr) return malformed(base::format("the %s has no end within %zu bytes", what, N));
  if (std::any_of(end, field + N, [](char c) { return c != 0; }))
    return malformed(base::format("there are bytes behind the end of the %s", what));
  return std::string(field, end);
}

base::Result<Header> take_header(std::span<const std::byte> message) {
  Header header;
  if (message.size() < sizeof(header))
    return malformed(
        base::format("a message of %zu bytes; a header has %zu", message.size(), sizeof(header)));
  std::memcpy(&header, message.data(), sizeof(header));
  if (header.magic != kMagic)
    return malformed(base::format("a message starts with 0x%08x, not with gpushare's mark", header.magic));
  if (header.version != kProtocolVersion) {
    return base::Status(
        GPUSHARE_UNSUPPORTED,
        base::format("the message is of protocol version %u, this side speaks %u; use the same "
                     "gpushare for daemon and workers",
                     header.version, kProtocolVersion));
  }
  if (header.bytes != message.size())
    return malformed(
        base::format("a message of %zu bytes says that it has %u", message.size(), header.bytes));
  return header;
}

template <class T>
base::Result<T> take_message(std::span<const std::byte> message, const char* what) {
  if (message.size() != sizeof(T))
    return malformed(base::format("%s of %zu bytes; it has %zu", what, message.size(), sizeof(T)));
  T out;
  std::memcpy(&out, message.data(), sizeof(T));
  return out;
}

class Writer {
 public:
  template <class T>
  void number(T value) {
    static_assert(std::is_integral_v<T>);
    out_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  void text(const std::string& value) {
    number(static_cast<uint32_t>(value.size()));
    out_ += value;
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads past the end give zeros and are remembered.
class Reader {
 public:
  explicit Reader(std::string_view in) : in_(in) {}
  template <class T>
  T number() {
    static_assert(std::is_integral_v<T>);
    T value{};
    if (in_.size() < sizeof(T)) {
      good_ = false;
      in_ = {};
      return value;
    }
    std::memcpy(&value, in_.data(), sizeof(T));
    in_.remove_prefix(sizeof(T));
    return value;
  }
  std::string text() {
    const auto length = number<uint32_t>();
    if (length > in_.size()) {
      good_ = false;
      in_ = {};
      return {};
    }
    std::string out(in_.substr(0, length));
    in_.remove_prefix(length);
    return out;
  }
  bool good() const { return good_; }
  bool at_end() const { return good_ && in_.empty(); }

 private:
  std::string_view in_;
  bool good_ = true;
};

}  // namespace

uint32_t sequence_of(std::span<const std::byte> message) {
  Header header;
  if (message.size() < sizeof(header)) return 0;
  std::memcpy(&header, message.data(), sizeof(header));
  return header.sequence;
}

base::Result<Request> parse_request(std::span<const std::byte> message) {
  GPUSHARE_ASSIGN_OR_RETURN(const Header header, take_header(message));
  Request request;
  request.sequence = header.sequence;
  request.type = static_cast<MessageType>(header.type);
  switch (request.type) {
    case MessageType::kAttach: {
      GPUSHARE_ASSIGN_OR_RETURN(const AttachRequest attach,
                                take_message<AttachRequest>(message, "an attach request"));
      request.execute_ns = attach.execute_ns;
      request.scratch_bytes = attach.scratch_bytes;
      GPUSHARE_ASSIGN_OR_RETURN(request.name, take_text(attach.name, "worker's name"));
      GPUSHARE_ASSIGN_OR_RETURN(request.path, take_text(attach.path, "model's path"));
      const bool printable = std::all_of(request.name.begin(), request.name.end(), [](char c) {
        return static_cast<unsigned char>(c) >= 0x20 && c != 0x7f;
      });
      if (request.name.empty() || !printable)
        return base::Status(
            GPUSHARE_INVALID_ARGUMENT,
            "the worker's name is empty or has control characters; give 1 to 63 bytes of text");
      if (request.path.empty() || request.path.front() != '/')
        return base::Status(GPUSHARE_INVALID_ARGUMENT, "the model's path '" + request.path +
                                                           "' is not absolute: the daemon has another "
                                                           "current directory");
      return request;
    }
    case MessageType::kBegin: {
      GPUSHARE_ASSIGN_OR_RETURN(const BeginRequest begin,
                                take_message<BeginRequest>(message, "a begin request"));
      request.timeout_ns = begin.timeout_ns;
      return request;
    }
    case MessageType::kEnd: {
      GPUSHARE_ASSIGN_OR_RETURN(const EndRequest end, take_message<EndRequest>(message, "an end request"));
      request.iteration_ns = end.iteration_ns;
      return request;
    }
    case MessageType::kStatus:
      GPUSHARE_RETURN_IF_ERROR(take_message<StatusRequest>(message, "a status request").status());
      return request;
    case MessageType::kReply:
      break;
  }
  return malformed(base::format("there is no request of type %u", header.type));
}

base::Result<Reply> parse_reply(std::span<const std::byte> message) {
  GPUSHARE_ASSIGN_OR_RETURN(const Header header, take_header(message));
  if (static_cast<MessageType>(header.type) != MessageType::kReply)
    return malformed(base::format("a message of type %u where a reply was due", header.type));
  GPUSHARE_ASSIGN_OR_RETURN(const Reply reply, take_message<Reply>(message, "a reply"));
  GPUSHARE_RETURN_IF_ERROR(take_text(reply.device, "device").status());
  GPUSHARE_RETURN_IF_ERROR(take_text(reply.text, "text").status());
  return reply;
}

base::Status reported(int32_t code, std::string text) {
  if (code == GPUSHARE_OK || std::string_view(base::status_name(code)) != base::status_name(-1))
    return {code, std::move(text)};
  return {GPUSHARE_UNKNOWN, base::format("the daemon reports status %d: ", code) + text, code};
}

AttachRequest make_attach(uint32_t sequence, const std::string& name, const std::string& path,
                          uint64_t execute_ns, uint64_t scratch_bytes) {
  AttachRequest message = message_of<AttachRequest>(MessageType::kAttach, sequence);
  message.execute_ns = execute_ns;
  message.scratch_bytes = scratch_bytes;
  put_text(message.name, name);
  put_text(message.path, path);
  return message;
}

BeginRequest make_begin(uint32_t sequence, uint64_t timeout_ns) {
  BeginRequest message = message_of<BeginRequest>(MessageType::kBegin, sequence);
  message.timeout_ns = timeout_ns;
  return message;
}

EndRequest make_end(uint32_t sequence, uint64_t iteration_ns) {
  EndRequest message = message_of<EndRequest>(MessageType::kEnd, sequence);
  message.iteration_ns = iteration_ns;
  return message;
}

StatusRequest make_status(uint32_t sequence) {
  return message_of<StatusRequest>(MessageType::kStatus, sequence);
}

Reply make_reply(uint32_t sequence, const base::Status& status) {
  Reply message = message_of<Reply>(MessageType::kReply, sequence);
  message.code = status.code();
  put_text(message.text, status.message());
  return message;
}

std::string encode_layers(std::span<const TableLayer> layers) {
  Writer out;
  out.number(kTableMagic);
  out.number(static_cast<uint64_t>(layers.size()));
  for (const TableLayer& layer : layers) {
    out.number(layer.offset_bytes);
    out.number(layer.bytes);
    out.text(layer.name);
  }
  return out.take();
}

base::Result<std::vector<TableLayer>> parse_layers(std::string_view table, uint64_t image_bytes) {
  Reader in(table);
  if (in.number<uint32_t>() != kTableMagic) return malformed("the layer table does not start with its mark");
  const auto count = in.number<uint64_t>();
  if (count > kMaxEntries) return malformed("the layer table says that it has too many layers");
  std::vector<TableLayer> layers;
  for (uint64_t i = 0; i < count && in.good(); ++i) {
    TableLayer layer;
    layer.offset_bytes = in.number<uint64_t>();
    layer.bytes = in.number<uint64_t>();
    layer.name = in.text();
    if (layer.offset_bytes > image_bytes || layer.bytes > image_bytes - layer.offset_bytes)
      return malformed(
          base::format("layer %llu of the table lies outside the image", static_cast<unsigned long long>(i)));
    layers.push_back(std::move(layer));
  }
  if (!in.at_end()) return malformed("the layer table is cut or has bytes behind its end");
  return layers;
}

std::string encode_status(const DaemonStatus& status) {
  Writer out;
  out.number(kTableMagic);
  out.text(status.device);
  out.number(status.pid);
  for (const uint64_t value :
       {status.uptime_ns, status.capacity_bytes, status.resident_bytes, status.standby_bytes,
        status.device_free_bytes, status.device_total_bytes, status.images_bytes, status.images_limit_bytes,
        status.turns, status.loads, status.drops, status.reclaimed, status.cut_off, status.refused})
    out.number(value);
  out.number(static_cast<uint64_t>(status.workers.size()));
  for (const WorkerStatus& worker : status.workers) {
    out.number(worker.worker);
    out.number(worker.pid);
    out.text(worker.name);
    out.text(worker.state);
    out.text(worker.model);
    out.number(worker.turns);
    out.number(worker.turn_ns);
    out.number(worker.scratch_bytes);
    out.number(worker.iteration_ns);
  }
  out.number(static_cast<uint64_t>(status.models.size()));
  for (const ModelStatus& model : status.models) {
    out.text(model.path);
    out.text(model.state);
    out.number(model.bytes);
    out.number(model.layers);
    out.number(model.arrived);
    out.number(model.workers);
    out.number(model.loads);
  }
  return out.take();
}

base::Result<DaemonStatus> parse_status(std::string_view table) {
  Reader in(table);
  if (in.number<uint32_t>() != kTableMagic) return malformed("the status table does not start with its mark");
  DaemonStatus status;
  status.device = in.text();
  status.pid = in.number<int64_t>();
  for (uint64_t* value : {&status.uptime_ns, &status.capacity_bytes, &status.resident_bytes,
                          &status.standby_bytes, &status.device_free_bytes, &status.device_total_bytes,
                          &status.images_bytes, &status.images_limit_bytes, &status.turns, &status.loads,
                          &status.drops, &status.reclaimed, &status.cut_off, &status.refused})
    *value = in.number<uint64_t>();
  const auto workers = in.number<uint64_t>();
  for (uint64_t i = 0; i < std::min(workers, kMaxEntries) && in.good(); ++i) {
    WorkerStatus worker;
    worker.worker = in.number<uint64_t>();
    worker.pid = in.number<int64_t>();
    worker.name = in.text();
    worker.state = in.text();
    worker.model = in.text();
    worker.turns = in.number<uint64_t>();
    worker.turn_ns = in.number<uint64_t>();
    worker.scratch_bytes = in.number<uint64_t>();
    worker.iteration_ns = in.number<uint64_t>();
    status.workers.push_back(std::move(worker));
  }
  const auto models = in.number<uint64_t>();
  for (uint64_t i = 0; i < std::min(models, kMaxEntries) && in.good(); ++i) {
    ModelStatus model;
    model.path = in.text();
    model.state = in.text();
    model.bytes = in.number<uint64_t>();
    model.layers = in.number<uint32_t>();
    model.arrived = in.number<uint32_t>();
    model.workers = in.number<uint64_t>();
    model.loads = in.number<uint64_t>();
    status.models.push_back(std::move(model));
  }
  if (!in.at_end()) return malformed("the status table is cut or has bytes behind its end");
  return status;
}

}  // namespace gpushare::daemon
