// The server of figures: what its readers get, who is dropped, and whose file at its path it replaces.
// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics_server.hpp"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/model_folder.hpp"
#include "support/status_checks.hpp"

using namespace gpushare;
using client::Descriptor;
using daemon::MetricsServer;

namespace {

const std::string kFigures = "# figures\nbytes 7\n";

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  return address;
}
Descriptor connected(const std::string& path) {
  Descriptor to(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = address_of(path);
  REQUIRE(connect(to.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  return to;
}
void say(const Descriptor& to, const std::string& text) {
  REQUIRE(send(to.get(), text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size()));
}
// All that comes until the server closes the connection.
std::string rest_of(const Descriptor& from) {
  std::string all;
  char buffer[4096];
  for (ssize_t got = 0; (got = recv(from.get(), buffer, sizeof buffer, 0)) > 0;)
    all.append(buffer, static_cast<size_t>(got));
  return all;
}
std::string answer(const std::string& path, const std::string& request) {
  const Descriptor reader = connected(path);
  say(reader, request);
  return rest_of(reader);
}
std::string reply(const std::string& status, const std::string& body) {
  return "HTTP/1.1 " + status +
         "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: " +
         std::to_string(body.size()) + "\r\nConnection: close\r\n\r\n" + body;
}
base::Result<std::unique_ptr<MetricsServer>> started(const std::string& path) {
  return MetricsServer::start(path, [] { return base::Result<std::string>(kFigures); });
}

}  // namespace

TEST_CASE("a reader gets the figures whole, however it asks for them, and others get what is wrong") {
  const test::ModelFolder folder;
  const std::string path = folder.file("figures.sock");
  {
    const auto server = started(path);
    REQUIRE_OK(server.status());
    CHECK((*server)->address() == path);
    const std::string ok = reply("200 OK", kFigures);
    CHECK(answer(path, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") == ok);
    CHECK(answer(path, "GET /metrics?name=x HTTP/1.1\r\n\r\n") == ok);
    const Descriptor slow = connected(path);
    say(slow, "GET /metr");
    CHECK(answer(path, "POST /metrics HTTP/1.1\r\n\r\n") ==
          reply("405 Method Not Allowed", "only GET is answered\n"));
    say(slow, "ics HTTP/1.1\r\n\r\n");
    CHECK(rest_of(slow) == ok);
    CHECK(answer(path, "GET / HTTP/1.1\r\n\r\n") == reply("404 Not Found", "the figures are at /metrics\n"));
    CHECK(answer(path, std::string(8193, 'x')) ==
          reply("431 Request Header Fields Too Large", "the request is too long\n"));
  }
  CHECK(access(path.c_str(), F_OK) != 0);
  const auto failing = MetricsServer::start(
      path, [] { return base::Result<std::string>(base::Status(GPUSHARE_UNAVAILABLE, "no figures yet")); });
  REQUIRE_OK(failing.status());
  CHECK(answer(path, "GET /metrics HTTP/1.1\r\n\r\n") ==
        reply("503 Service Unavailable", "no figures yet\n"));
}

TEST_CASE("connections that say nothing make room for readers, the oldest first") {
  const test::ModelFolder folder;
  const std::string path = folder.file("figures.sock");
  const auto server = started(path);
  REQUIRE_OK(server.status());
  std::vector<Descriptor> silent;
  for (int i = 0; i < 16; ++i) silent.push_back(connected(path));
  CHECK(answer(path, "GET /metrics HTTP/1.1\r\n\r\n") == reply("200 OK", kFigures));
  CHECK(rest_of(silent.front()).empty());
  say(silent.back(), "GET /metrics HTTP/1.1\r\n\r\n");
  CHECK(rest_of(silent.back()) == reply("200 OK", kFigures));
}

TEST_CASE("the socket of a server that is gone is replaced; another server's and any other file stay") {
  const test::ModelFolder folder;
  const std::string path = folder.file("figures.sock");
  {
    const Descriptor gone(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_un address = address_of(path);
    REQUIRE(bind(gone.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  }
  REQUIRE(access(path.c_str(), F_OK) == 0);
  const auto server = started(path);
  REQUIRE_OK(server.status());
  CHECK(started(path).status().code() == GPUSHARE_ALREADY_EXISTS);
  CHECK(answer(path, "GET /metrics HTTP/1.1\r\n\r\n") == reply("200 OK", kFigures));

  const std::string text = folder.write("text", "somebody's");
  CHECK(started(text).status().code() == GPUSHARE_ALREADY_EXISTS);
  std::ifstream file(text);
  std::string left;
  std::getline(file, left);
  CHECK(left == "somebody's");
}

TEST_CASE("an address names an IP and a port, or a path") {
  for (const char* wrong :
       {"", "9477", "localhost:9477", "127.0.0.1:", "127.0.0.1:65536", "[::1:9477", "[x]:1"})
    CHECK(started(wrong).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(started("/" + std::string(107, 'x')).status().code() == GPUSHARE_INVALID_ARGUMENT);
  const auto server = started("127.0.0.1:0");
  REQUIRE_OK(server.status());
  CHECK((*server)->address().starts_with("127.0.0.1:"));
  CHECK((*server)->address() != "127.0.0.1:0");
}
