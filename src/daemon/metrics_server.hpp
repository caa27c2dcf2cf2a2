// metrics_server.hpp: answers GET /metrics over HTTP, on a TCP address or a Unix socket, from a thread of its own. The
// rest of the daemon never waits for a reader, because the thread asks for the text as any other program would.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/service_thread.hpp"
#include "client/channel.hpp"

namespace gpushare::daemon {

class MetricsServer {
 public:
  using Text = std::function<base::Result<std::string>()>;
  // `address`: "127.0.0.1:9477", "[::1]:9477", or the path of a Unix socket, which has a '/' and is the user's alone. `text` is called on the
  // server's thread. Errors: INVALID_ARGUMENT (address), ALREADY_EXISTS (somebody listens there), IO_ERROR.
  static base::Result<std::unique_ptr<MetricsServer>> start(const std::string& address, Text text);
  // Closes all connections.
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;
  // The address on which it listens, with the port that the system chose for port 0.
  const std::string& address() const { return address_; }

 private:
  struct Connection;
  MetricsServer() = default;
  void serve();
  void serve_once(std::vector<Connection>& connections);
  // Reads and writes as much as it can without blocking.
  bool advance(Connection& connection, uint64_t now_ns);

  std::string address_, path_;  // path_: of the Unix socket; empty on TCP
  Text text_;
  client::Descriptor listener_, wake_;
  std::atomic<bool> stop_{false};
  base::ServiceThread thread_;
};

}  // namespace gpushare::daemon
