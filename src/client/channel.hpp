// client: what a process needs to reach the daemon: the wire format, the socket, the page with the leases of turns, and
// sched::Authority as seen from another process. Calls base and sched; may be called from executor, daemon and shim.
//
// channel.hpp: descriptors, the Unix socket (SOCK_SEQPACKET, so that messages keep their bounds) and sealed
// memory files. System calls and nothing else.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/status.hpp"

namespace gpushare::client {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();
  int get() const { return number_; }
  int release() { return std::exchange(number_, -1); }  // the caller owns it from now on
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

// A message with at most this many descriptors.
inline constexpr size_t kMaxDescriptors = 4;

// The listening socket at a path. Only its owner can use it (mode 0600) unless `mode` says otherwise. A lock file
// beside it (PATH.lock) shows whether an existing socket is that of a running daemon (ALREADY_EXISTS) or of a dead one
// (replaced). A lock file that belongs to another user is refused: that user could hold the lock for ever. A file at
// the path that is not a socket is left alone. The destructor removes the socket if the path still names this one.
class Listener {
 public:
  static base::Result<Listener> open(const std::string& path, unsigned mode = 0600);
  Listener() = default;
  Listener(Listener&& other) noexcept { *this = std::move(other); }
  Listener& operator=(Listener&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(lock_, other.lock_);
    std::swap(socket_, other.socket_);
    std::swap(device_, other.device_);
    std::swap(inode_, other.inode_);
    return *this;
  }
  ~Listener();
  int get() const { return socket_.get(); }

 private:
  std::string path_;
  Descriptor lock_;
  Descriptor socket_;
  uint64_t device_ = 0, inode_ = 0;  // of the socket file
};

struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
};

// Does not block. NOT_READY when no peer is waiting.
base::Result<Descriptor> accept_peer(int listener, Peer* out_peer);
// Errors: UNAVAILABLE (no server listens there, and the message says how to start one; or the server belongs to another
// user who is not root, and could read what is sent), INVALID_ARGUMENT (path too long). `start_with`: the command that
// starts such a server, for the message.
base::Result<Descriptor> connect_to(const std::string& path, const char* start_with = "gpushare daemon");

// Sends without blocking. Errors: UNAVAILABLE (the peer is gone), QUEUE_FULL (it does not read).
base::Status send_message(int socket, std::span<const std::byte> message,
                          std::span<const int> descriptors = {});
template <class T>
std::span<const std::byte> bytes_of(const T& message) {
  return std::as_bytes(std::span<const T, 1>(&message, 1));
}

// For the first message on a connection. A peer that refuses the connection may say why and close before the message is
// sent. So a peer that is gone is no error here; receive_message() tells.
base::Status send_first_message(int socket, std::span<const std::byte> message);

// Receives one message into `buffer` and returns the part that it fills. The kernel truncates longer messages, so give a
// buffer that is one byte larger than the longest valid message: a full buffer means that the message was too long.
// Without `out_descriptors` the descriptors that come with it are closed. Does not block. Errors: NOT_READY,
// UNAVAILABLE (the peer is gone).
base::Result<std::span<const std::byte>> receive_message(int socket, std::span<std::byte> buffer,
                                                         std::vector<Descriptor>* out_descriptors = nullptr);
// Blocks until there is something to receive or the peer is gone. TIMED_OUT.
base::Status wait_readable(int socket, const base::Deadline& deadline);
// Ends the connection in both directions; threads that wait on the socket wake.
void shut(const Descriptor& socket);

// `code` with what the system says of errno.
base::Status system_error(int32_t code, const std::string& what);

// A memory file of zeros whose size cannot change: no look at a mapping of it is a bus error. `what` names it in errors.
base::Result<Descriptor> make_page_file(const char* name, const char* what, uint64_t bytes);
// The size of such a file; 0 for any other.
uint64_t page_file_bytes(int file);

// A memory file that holds `content` and can no longer change.
base::Result<Descriptor> make_table_file(std::string_view content);
// The content of such a file, at most `limit` bytes. Errors: MALFORMED_INPUT (not sealed, larger), IO_ERROR.
base::Result<std::string> read_table_file(int file, uint64_t limit = 256ull << 20);

}  // namespace gpushare::client
