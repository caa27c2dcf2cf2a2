// SPDX-License-Identifier: Apache-2.0
#include "client/status.hpp"

#include <charconv>
#include <cstdlib>
#include <utility>

#include "client/channel.hpp"
#include "client/protocol.hpp"

namespace gpushare::client {
namespace {

// The fields of each line, in one place for both directions: visit(name, member).
template <class Visit>
void fields(Visit& visit, ServiceStatus& status) {
  visit("pid", status.pid);
  visit("uptime_ns", status.uptime_ns);
}
template <class Visit>
void fields(Visit& visit, DeviceStatus& device) {
  visit("device", device.device);
  visit("policy", device.policy);
  visit("capacity_bytes", device.capacity_bytes);
  visit("effective_capacity_bytes", device.effective_capacity_bytes);
  visit("promised_bytes", device.promised_bytes);
  visit("images_bytes", device.images_bytes);
  visit("lanes", device.lanes);
  visit("resident", device.resident);
  visit("waiting", device.waiting);
  visit("turns", device.turns);
  visit("cut_off", device.cut_off);
  visit("max_guaranteed", device.max_guaranteed);
  visit("max_opportunistic", device.max_opportunistic);
}
template <class Visit>
void fields(Visit& visit, ProcessStatus& process) {
  visit("pid", process.pid);
  visit("uid", process.uid);
  visit("program", process.program);
  visit("device", process.device);
  visit("state", process.state);
  visit("sessions", process.sessions);
}
template <class Visit>
void fields(Visit& visit, SessionStatus& session) {
  visit("pid", session.pid);
  visit("session", session.session);
  visit("name", session.name);
  visit("device", session.device);
  visit("state", session.state);
  visit("waits_for", session.waits_for);
  visit("lane", session.lane);
  visit("persistent_bytes", session.persistent_bytes);
  visit("ephemeral_bytes", session.ephemeral_bytes);
  visit("service_ns", session.service_ns);
  visit("iterations", session.iterations);
  visit("weight", session.weight);
  visit("cap", session.cap);
  visit("priority", session.priority);
  visit("class", session.cls);
  visit("limit_bytes", session.limit_bytes);
  visit("share", session.share);
  visit("group", session.group);
}

template <class Visit>
void fields(Visit& visit, ImageStatus& image) {
  visit("path", image.path);
  visit("device", image.device);
  visit("state", image.state);
  visit("bytes", image.bytes);
  visit("kept_bytes", image.kept_bytes);
  visit("layers", image.layers);
  visit("arrived", image.arrived);
  visit("loads", image.loads);
  visit("sessions", image.sessions);
}

struct Writer {
  std::string out;
  void field(const char* name, const std::string& value) {
    out += '\t';
    out += name;
    out += '=';
    for (const char c : value) out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  }
  void operator()(const char* name, const std::string& value) { field(name, value); }
  void operator()(const char* name, uint64_t value) { field(name, std::to_string(value)); }
  void operator()(const char* name, int64_t value) { field(name, std::to_string(value)); }
  void operator()(const char* name, double value) { field(name, base::format("%.17g", value)); }
};

using Fields = std::vector<std::pair<std::string_view, std::string_view>>;

struct Reader {
  const Fields& given;
  bool wrong = false;
  const std::string_view* find(const char* name) const {
    for (const auto& [key, value] : given)
      if (key == name) return &value;
    return nullptr;
  }
  void operator()(const char* name, std::string& out) {
    if (const auto* value = find(name)) out = std::string(*value);
  }
  template <class Number>
  void number(const char* name, Number& out) {
    const auto* value = find(name);
    if (value == nullptr) return;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), out);
    wrong = wrong || error != std::errc() || end != value->data() + value->size();
  }
  void operator()(const char* name, uint64_t& out) { number(name, out); }
  void operator()(const char* name, int64_t& out) { number(name, out); }
  void operator()(const char* name, double& out) { number(name, out); }
};

template <class Line>
void write_line(std::string& out, const char* kind, const Line& line) {
  Writer writer;
  fields(writer, const_cast<Line&>(line));
  out += kind + writer.out + '\n';
}

template <class Line>
bool read_line(const Fields& given, Line& line) {
  Reader reader{given};
  fields(reader, line);
  return !reader.wrong;
}

}  // namespace

std::string encode_status(const ServiceStatus& status) {
  std::string out;
  write_line(out, "daemon", status);
  for (const DeviceStatus& device : status.devices) write_line(out, "device", device);
  for (const ProcessStatus& process : status.processes) write_line(out, "process", process);
  for (const SessionStatus& session : status.sessions) write_line(out, "session", session);
  for (const ImageStatus& image : status.images) write_line(out, "image", image);
  return out;
}

base::Result<ServiceStatus> parse_service_status(std::string_view text) {
  ServiceStatus status;
  bool said = false;
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos)
      return base::Status(GPUSHARE_MALFORMED_INPUT, base::format("status line %zu has no end", number));
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    const std::string_view kind = line.substr(0, line.find('\t'));
    line.remove_prefix(kind.size());
    Fields given;
    while (!line.empty()) {
      line.remove_prefix(1);
      const std::string_view item = line.substr(0, line.find('\t'));
      line.remove_prefix(item.size());
      const size_t equals = item.find('=');
      if (equals == std::string_view::npos)
        return base::Status(GPUSHARE_MALFORMED_INPUT,
                            base::format("status line %zu has a field without '='", number));
      given.emplace_back(item.substr(0, equals), item.substr(equals + 1));
    }
    bool good = true;
    if (kind == "daemon")
      good = said = read_line(given, status);
    else if (kind == "device")
      good = read_line(given, status.devices.emplace_back());
    else if (kind == "process")
      good = read_line(given, status.processes.emplace_back());
    else if (kind == "session")
      good = read_line(given, status.sessions.emplace_back());
    else if (kind == "image")
      good = read_line(given, status.images.emplace_back());
    if (!good)
      return base::Status(GPUSHARE_MALFORMED_INPUT,
                          base::format("status line %zu has a number that is none", number));
  }
  if (!said)
    return base::Status(GPUSHARE_MALFORMED_INPUT, "the status does not begin with a line about the daemon");
  return status;
}

// Sends one request over a connection of its own and waits for the reply.
template <class Request>
base::Status ask(const std::string& socket, const Request& request,
                 std::vector<Descriptor>* out_descriptors) {
  GPUSHARE_ASSIGN_OR_RETURN(const Descriptor connection, connect_to(socket));
  GPUSHARE_RETURN_IF_ERROR(send_message(connection.get(), bytes_of(request)));
  const base::Deadline deadline = base::Deadline::after(10'000'000'000);
  std::byte buffer[kMaxMessageBytes + 64];
  for (;;) {
    GPUSHARE_RETURN_IF_ERROR(wait_readable(connection.get(), deadline));
    const auto message = receive_message(connection.get(), buffer, out_descriptors);
    if (message.status().code() == GPUSHARE_NOT_READY) continue;
    if (!message.ok()) return message.status();
    GPUSHARE_ASSIGN_OR_RETURN(const MessageType type, check_message(*message));
    if (type != MessageType::kReply)
      return {GPUSHARE_MALFORMED_INPUT, "the daemon answers with something else than a Reply"};
    const Reply reply = fields_of<Reply>(*message);
    return reported(reply.code, text_of(reply.text));
  }
}

base::Result<ServiceStatus> query_service(const std::string& socket) {
  std::vector<Descriptor> descriptors;
  GPUSHARE_RETURN_IF_ERROR(
      ask(socket, make_message<StatusRequest>(MessageType::kStatusRequest, 1), &descriptors));
  if (descriptors.size() != 1) return base::Status(GPUSHARE_MALFORMED_INPUT, "the daemon sent no status");
  GPUSHARE_ASSIGN_OR_RETURN(const std::string text, read_table_file(descriptors.front().get()));
  return parse_service_status(text);
}

base::Status set_service_capacity(const std::string& socket, const std::string& device, uint64_t bytes) {
  auto request = make_message<SetCapacity>(MessageType::kSetCapacity, 1);
  if (device.size() >= sizeof(request.device))
    return {GPUSHARE_INVALID_ARGUMENT, "the name of the device is too long"};
  request.bytes = bytes;
  put_text(request.device, device);
  return ask(socket, request, nullptr);
}

}  // namespace gpushare::client
