// SPDX-License-Identifier: Apache-2.0
#include "client/status.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

#include "client/channel.hpp"
#include "client/protocol.hpp"

namespace gpushare::client {
namespace {

void put_text(std::string& out, const std::string& value) {
  for (const char each : value) out += static_cast<unsigned char>(each) < 0x20 ? '?' : each;
}
void put_text(std::string& out, double value) {
  out += base::format("%.17g", value);
}
template <class Whole>
void put_text(std::string& out, Whole value) {
  out += std::to_string(value);
}

void put_text(std::string& out, const std::vector<uint64_t>& values) {
  for (size_t i = 0; i < values.size(); ++i) out += (i > 0 ? "," : "") + std::to_string(values[i]);
}

bool take_text(std::string_view text, std::string& out) {
  out = text;
  return true;
}
template <class Number>
bool take_text(std::string_view text, Number& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

bool take_text(std::string_view text, std::vector<uint64_t>& out) {
  out.clear();
  while (!text.empty()) {
    const std::string_view value = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), value.size() + 1));
    if (!take_text(value, out.emplace_back())) return false;
  }
  return true;
}

template <class Line>
void write_line(std::string& out, const char* kind, const Line& line) {
  out += kind;
  Line::for_each_field(line, [&](const char* name, const auto& value) {
    out += std::string("\t") + name + '=';
    put_text(out, value);
  });
  out += '\n';
}

using Fields = std::vector<std::pair<std::string_view, std::string_view>>;

template <class Line>
bool read_line(const Fields& given, Line& line) {
  bool good = true;
  Line::for_each_field(line, [&](const char* name, auto& out) {
    const auto found =
        std::find_if(given.begin(), given.end(), [&](const auto& each) { return each.first == name; });
    good = (found == given.end() || take_text(found->second, out)) && good;
  });
  return good;
}

}  // namespace

std::string encode_status(const ServiceStatus& status) {
  std::string out;
  write_line(out, "daemon", status);
  for (const DeviceStatus& device : status.devices) write_line(out, "device", device);
  for (const ProcessStatus& process : status.processes) write_line(out, "process", process);
  for (const SessionStatus& session : status.sessions) write_line(out, "session", session);
  for (const ImageStatus& image : status.images) write_line(out, "image", image);
  for (const RefusalStatus& refusal : status.refusals) write_line(out, "refusal", refusal);
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
    else if (kind == "refusal")
      good = read_line(given, status.refusals.emplace_back());
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
  GPUSHARE_RETURN_IF_ERROR(send_first_message(connection.get(), bytes_of(request)));
  const base::Deadline deadline = base::Deadline::after(10'000'000'000);
  std::byte buffer[kMaxMessageBytes + 64];
  for (;;) {
    GPUSHARE_RETURN_IF_ERROR(wait_readable(connection.get(), deadline));
    const auto message = receive_message(connection.get(), buffer, out_descriptors);
    if (message.status().code() == GPUSHARE_NOT_READY) continue;
    if (!message.ok()) return message.status();
    GPUSHARE_ASSIGN_OR_RETURN(const MessageType type, check_message(*message, Side::kDaemon));
    if (type == MessageType::kWelcome) {  // the daemon refuses the connection
      const Welcome refused = fields_of<Welcome>(*message);
      if (refused.code != GPUSHARE_OK) return reported(refused.code, text_of(refused.text));
    }
    if (type != MessageType::kReply)
      return {GPUSHARE_MALFORMED_INPUT, "the daemon answers with something else than a Reply"};
    const Reply reply = fields_of<Reply>(*message);
    return reported(reply.code, text_of(reply.text));
  }
}

base::Result<ServiceStatus> query_service(const std::string& socket) {
  std::vector<Descriptor> descriptors;
  GPUSHARE_RETURN_IF_ERROR(ask(socket, make_message<MessageType::kStatusRequest>(1), &descriptors));
  if (descriptors.size() != 1) return base::Status(GPUSHARE_MALFORMED_INPUT, "the daemon sent no status");
  GPUSHARE_ASSIGN_OR_RETURN(const std::string text, read_table_file(descriptors.front().get()));
  return parse_service_status(text);
}

base::Status set_service_capacity(const std::string& socket, const std::string& device, uint64_t bytes) {
  auto request = make_message<MessageType::kSetCapacity>(1);
  if (device.size() >= sizeof(request.device))
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("the device's name has %zu bytes, at most %zu are allowed", device.size(),
                         sizeof(request.device) - 1)};
  request.bytes = bytes;
  put_text(request.device, device);
  return ask(socket, request, nullptr);
}

}  // namespace gpushare::client
