// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics_server.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/clock.hpp"
#include "base/units.hpp"
#include "base/without_throwing.hpp"

namespace gpushare::daemon {
namespace {

using client::Descriptor;

constexpr size_t kMostConnections = 16, kMostRequestBytes = 8192;
// A reader that has neither asked nor read for so long is dropped.
constexpr uint64_t kReaderPatienceNs = 10'000'000'000;

union Address {
  sockaddr any;
  sockaddr_in v4;
  sockaddr_in6 v6;
  sockaddr_un path;
};

base::Status cannot(const std::string& what, const std::string& address) {
  const int error = errno;
  return {error == EADDRINUSE ? GPUSHARE_ALREADY_EXISTS : GPUSHARE_IO_ERROR,
          "cannot " + what + " " + address + ": " + std::strerror(error), error};
}

base::Status wrong_address(const std::string& address) {
  return {GPUSHARE_INVALID_ARGUMENT, "the address '" + address +
                                         "' is neither IP:PORT, as 127.0.0.1:9477 or [::1]:9477, nor the "
                                         "path of a Unix socket of at most 107 bytes with a '/'"};
}

base::Result<socklen_t> parse_address(const std::string& text, Address* out) {
  std::memset(out, 0, sizeof *out);
  if (text.find('/') != std::string::npos) {
    if (text.size() >= sizeof out->path.sun_path) return wrong_address(text);
    out->path.sun_family = AF_UNIX;
    std::memcpy(out->path.sun_path, text.data(), text.size());
    return static_cast<socklen_t>(sizeof out->path);
  }
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return wrong_address(text);
  const auto port = base::parse_uint64(text.substr(colon + 1));
  if (!port.ok() || *port > UINT16_MAX) return wrong_address(text);
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    out->v6.sin6_family = AF_INET6;
    out->v6.sin6_port = htons(static_cast<uint16_t>(*port));
    if (inet_pton(AF_INET6, host.c_str(), &out->v6.sin6_addr) != 1) return wrong_address(text);
    return static_cast<socklen_t>(sizeof out->v6);
  }
  out->v4.sin_family = AF_INET;
  out->v4.sin_port = htons(static_cast<uint16_t>(*port));
  if (inet_pton(AF_INET, host.c_str(), &out->v4.sin_addr) != 1) return wrong_address(text);
  return static_cast<socklen_t>(sizeof out->v4);
}

// Removes the socket of a server that is gone. A file of another kind stays, and binding fails.
void remove_stale(const Address& address, socklen_t length) {
  struct stat about {};
  if (lstat(address.path.sun_path, &about) != 0 || !S_ISSOCK(about.st_mode)) return;
  const Descriptor probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (probe && connect(probe.get(), &address.any, length) != 0 && errno == ECONNREFUSED)
    (void)unlink(address.path.sun_path);
}

std::string response(const char* status, const std::string& body) {
  return base::format(
             "HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
             "Content-Length: %zu\r\nConnection: close\r\n\r\n",
             status, body.size()) +
         body;
}

std::string answer_to(std::string_view request, const MetricsServer::Text& text) {
  const std::string_view line = request.substr(0, request.find_first_of("\r\n"));
  const size_t blank = line.find(' ');
  const std::string_view method = line.substr(0, blank);
  std::string_view target = blank == std::string_view::npos ? std::string_view() : line.substr(blank + 1);
  target = target.substr(0, target.find_first_of(" ?"));
  if (method != "GET") return response("405 Method Not Allowed", "only GET is answered\n");
  if (target != "/metrics") return response("404 Not Found", "the figures are at /metrics\n");
  const auto figures = text();
  return figures.ok() ? response("200 OK", *figures)
                      : response("503 Service Unavailable", figures.status().message() + "\n");
}

}  // namespace

struct MetricsServer::Connection {
  Descriptor socket;
  uint64_t moved_ns = 0;  // when something was read or written last
  std::string request, reply;
  size_t sent = 0;
};

// False: the connection is over.
bool MetricsServer::advance(Connection& connection, uint64_t now_ns) {
  char buffer[4096];
  while (connection.reply.empty()) {
    const ssize_t got = recv(connection.socket.get(), buffer, sizeof buffer, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 && errno == EAGAIN;
    connection.moved_ns = now_ns;
    connection.request.append(buffer, static_cast<size_t>(got));
    if (connection.request.find("\r\n\r\n") != std::string::npos)
      connection.reply = answer_to(connection.request, text_);
    else if (connection.request.size() > kMostRequestBytes)
      connection.reply = response("431 Request Header Fields Too Large", "the request is too long\n");
  }
  while (connection.sent < connection.reply.size()) {
    const ssize_t put = send(connection.socket.get(), connection.reply.data() + connection.sent,
                             connection.reply.size() - connection.sent, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno == EAGAIN;
    connection.moved_ns = now_ns;
    connection.sent += static_cast<size_t>(put);
  }
  return false;
}

base::Result<std::unique_ptr<MetricsServer>> MetricsServer::start(const std::string& address, Text text) {
  Address where;
  GPUSHARE_ASSIGN_OR_RETURN(const socklen_t length, parse_address(address, &where));
  std::unique_ptr<MetricsServer> server(new MetricsServer);
  server->text_ = std::move(text);
  server->address_ = address;
  server->wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  server->listener_ = Descriptor(socket(where.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!server->wake_ || !server->listener_) return cannot("open a socket for", address);
  const int yes = 1;
  if (where.any.sa_family == AF_UNIX)
    remove_stale(where, length);
  else
    (void)setsockopt(server->listener_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  // The permissions of a Unix socket's file are those of the socket when it is bound.
  if (where.any.sa_family == AF_UNIX) (void)fchmod(server->listener_.get(), 0600);
  if (bind(server->listener_.get(), &where.any, length) != 0) return cannot("bind", address);
  if (where.any.sa_family == AF_UNIX) server->path_ = address;
  if (listen(server->listener_.get(), 16) != 0) return cannot("listen at", address);
  socklen_t size = sizeof where;
  if (server->path_.empty() && getsockname(server->listener_.get(), &where.any, &size) == 0)
    server->address_ =
        address.substr(0, address.rfind(':') + 1) +
        std::to_string(ntohs(where.any.sa_family == AF_INET6 ? where.v6.sin6_port : where.v4.sin_port));
  try {
    server->thread_ = base::ServiceThread([it = server.get()] { it->serve(); });
  } catch (const std::system_error& error) {
    return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY,
                        std::string("cannot start the thread for metrics: ") + error.what());
  }
  return server;
}

MetricsServer::~MetricsServer() {
  stop_ = true;
  const uint64_t one = 1;
  if (wake_) (void)!write(wake_.get(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
  if (!path_.empty()) (void)unlink(path_.c_str());
}

void MetricsServer::serve() {
  std::vector<Connection> connections;
  // Without host memory no reader is answered until there is some again.
  while (!stop_)
    if (!base::without_throwing([&] { serve_once(connections); })) connections.clear();
}

void MetricsServer::serve_once(std::vector<Connection>& connections) {
  std::vector<pollfd> waits{{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
  for (const Connection& connection : connections)
    waits.push_back(
        {connection.socket.get(), static_cast<short>(connection.reply.empty() ? POLLIN : POLLOUT), 0});
  (void)poll(waits.data(), waits.size(), connections.empty() ? -1 : 1000);
  const uint64_t now_ns = base::host_now_ns();
  for (size_t i = connections.size(); i-- > 0;) {
    const bool over = waits[i + 2].revents != 0 ? !advance(connections[i], now_ns)
                                                : now_ns - connections[i].moved_ns > kReaderPatienceNs;
    if (over) connections.erase(connections.begin() + static_cast<ptrdiff_t>(i));
  }
  while (!stop_) {
    Descriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      // Without a descriptor to give, the listener stays readable: others end meanwhile.
      if (errno == EMFILE || errno == ENFILE) (void)poll(waits.data(), 1, 100);
      break;
    }
    // The oldest connection makes room, so that silent connections cannot keep readers out.
    if (connections.size() == kMostConnections) connections.erase(connections.begin());
    connections.push_back({std::move(socket), now_ns, {}, {}, 0});
  }
}

}  // namespace gpushare::daemon
