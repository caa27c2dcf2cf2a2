// SPDX-License-Identifier: Apache-2.0
#include "client/channel.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace gpushare::client {
namespace {

constexpr int kTableSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
constexpr int kPageSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

base::Result<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("socket path '%s' has %zu bytes; the system allows 1 to %zu",
                                     path.c_str(), path.size(), sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

bool would_block(int error) {
  return error == EAGAIN || error == EWOULDBLOCK;
}

}  // namespace

base::Status system_error(int32_t code, const std::string& what) {
  const int error = errno;
  return {code, what + ": " + std::strerror(error), error};
}

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

base::Result<Listener> Listener::open(const std::string& path, unsigned mode) {
  GPUSHARE_ASSIGN_OR_RETURN(const sockaddr_un address, address_of(path));
  Listener listener;
  const std::string lock_path = path + ".lock";
  listener.lock_ = Descriptor(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!listener.lock_) return system_error(GPUSHARE_IO_ERROR, "cannot open the lock file " + lock_path);
  struct stat owner {};
  if (fstat(listener.lock_.get(), &owner) != 0)
    return system_error(GPUSHARE_IO_ERROR, "cannot examine the lock file " + lock_path);
  if (owner.st_uid != geteuid())
    return base::Status(
        GPUSHARE_IO_ERROR,
        base::format("the lock file %s belongs to user %u, who could hold it for ever; choose a "
                     "socket in a folder that only you can write",
                     lock_path.c_str(), owner.st_uid));
  if (flock(listener.lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (!would_block(errno)) return system_error(GPUSHARE_IO_ERROR, "cannot lock " + lock_path);
    return base::Status(GPUSHARE_ALREADY_EXISTS,
                        "a daemon serves " + path + " already; stop it (SIGTERM), or choose another socket");
  }
  // The lock is ours, so a socket here is what a dead daemon left.
  struct stat there {};
  if (lstat(path.c_str(), &there) == 0) {
    if (!S_ISSOCK(there.st_mode))
      return base::Status(GPUSHARE_ALREADY_EXISTS, path + " is there and is no socket; choose another path");
    if (unlink(path.c_str()) != 0)
      return system_error(GPUSHARE_IO_ERROR, "cannot remove the stale socket " + path);
  }
  listener.socket_ = Descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.socket_) return system_error(GPUSHARE_IO_ERROR, "cannot make a socket");
  // The mode of the unbound socket becomes the file's: nobody else can connect at any moment, whatever the umask.
  // A wider mode is set once the socket is complete.
  if (fchmod(listener.socket_.get(), 0600) != 0 ||
      bind(listener.socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    return system_error(GPUSHARE_IO_ERROR, "cannot bind " + path);
  if (lstat(path.c_str(), &there) != 0) return system_error(GPUSHARE_IO_ERROR, "cannot examine " + path);
  listener.device_ = there.st_dev;
  listener.inode_ = there.st_ino;
  listener.path_ = path;  // from here on it is ours to remove
  if (listen(listener.socket_.get(), 64) != 0)
    return system_error(GPUSHARE_IO_ERROR, "cannot listen at " + path);
  if (mode != 0600 && chmod(path.c_str(), mode) != 0)
    return system_error(GPUSHARE_IO_ERROR, "cannot open " + path + " for other users");
  return listener;
}

Listener::~Listener() {
  // The lock file stays: removing it would let two daemons hold "the" lock.
  struct stat there {};
  if (!path_.empty() && lstat(path_.c_str(), &there) == 0 && there.st_dev == device_ &&
      there.st_ino == inode_)
    unlink(path_.c_str());
  // Unlocked before it is closed: a child that another thread has forked holds the same lock until it executes its program.
  if (lock_) flock(lock_.get(), LOCK_UN);
}

base::Result<Descriptor> accept_peer(int listener, Peer* out_peer) {
  Descriptor socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    if (would_block(errno) || errno == ECONNABORTED || errno == EINTR)
      return base::Status(GPUSHARE_NOT_READY, "nobody connects");
    return system_error(GPUSHARE_IO_ERROR, "cannot accept a client");
  }
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0)
    return system_error(GPUSHARE_IO_ERROR, "cannot tell who connects");
  *out_peer = {credentials.pid, credentials.uid};
  return socket;
}

base::Result<Descriptor> connect_to(const std::string& path, const char* start_with) {
  GPUSHARE_ASSIGN_OR_RETURN(const sockaddr_un address, address_of(path));
  Descriptor descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!descriptor) return system_error(GPUSHARE_IO_ERROR, "cannot make a socket");
  if (connect(descriptor.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    const int error = errno;
    const std::string advice = error == EAGAIN ? "it has too many callers at once; try again"
                               : error == EACCES || error == EPERM
                                   ? "it serves its own user alone"
                                   : std::string("start one with: ") + start_with + " --socket PATH";
    return base::Status(
        GPUSHARE_UNAVAILABLE,
        base::format("no daemon answers at %s (%s); %s", path.c_str(), std::strerror(error), advice.c_str()),
        error);
  }
  ucred server{};
  socklen_t bytes = sizeof(server);
  if (getsockopt(descriptor.get(), SOL_SOCKET, SO_PEERCRED, &server, &bytes) != 0)
    return system_error(GPUSHARE_IO_ERROR, "cannot tell who serves " + path);
  if (server.uid != geteuid() && server.uid != 0)
    return base::Status(
        GPUSHARE_UNAVAILABLE,
        base::format("%s is served by user %u, who is neither you nor root; choose another socket",
                     path.c_str(), server.uid));
  return descriptor;
}

base::Status send_message(int socket, std::span<const std::byte> message, std::span<const int> descriptors) {
  iovec part{const_cast<std::byte*>(message.data()), message.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)] = {};
  if (!descriptors.empty()) {
    if (descriptors.size() > kMaxDescriptors) return {GPUSHARE_INTERNAL, "too many descriptors in a message"};
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) return {};
  if (would_block(errno) || errno == ENOBUFS)
    return {GPUSHARE_QUEUE_FULL, "the other side does not read its messages", errno};
  if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN)
    return {GPUSHARE_UNAVAILABLE, "the other side has gone", errno};
  return system_error(GPUSHARE_IO_ERROR, "cannot send a message");
}

base::Status send_first_message(int socket, std::span<const std::byte> message) {
  const base::Status sent = send_message(socket, message);
  return sent.code() == GPUSHARE_UNAVAILABLE ? base::Status() : sent;
}

base::Result<std::span<const std::byte>> receive_message(int socket, std::span<std::byte> buffer,
                                                         std::vector<Descriptor>* out_descriptors) {
  iovec part{buffer.data(), buffer.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)] = {};
  if (out_descriptors != nullptr) {  // without room for them the system closes them
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }
  ssize_t got = 0;
  // The peer may have closed with messages of ours unread. The kernel reports that once; the peer's earlier messages
  // are still readable.
  bool reset = false;
  do {
    got = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && (errno == EINTR || (errno == ECONNRESET && !std::exchange(reset, true))));
  if (got < 0) {
    if (would_block(errno)) return base::Status(GPUSHARE_NOT_READY, "no message yet");
    if (errno == ECONNRESET || errno == ENOTCONN)
      return base::Status(GPUSHARE_UNAVAILABLE, "the other side has gone", errno);
    return system_error(GPUSHARE_IO_ERROR, "cannot receive a message");
  }
  if (out_descriptors != nullptr) {
    for (cmsghdr* item = CMSG_FIRSTHDR(&header); item != nullptr; item = CMSG_NXTHDR(&header, item)) {
      if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int number = -1;
        std::memcpy(&number, CMSG_DATA(item) + i * sizeof(int), sizeof(int));
        out_descriptors->emplace_back(number);
      }
    }
  }
  // A message of no bytes and the end look the same; we send none of the former.
  if (got == 0) return base::Status(GPUSHARE_UNAVAILABLE, "the other side has gone");
  return std::span<const std::byte>(buffer.data(), static_cast<size_t>(got));
}

base::Status wait_readable(int socket, const base::Deadline& deadline) {
  for (;;) {
    int timeout_ms = -1;
    if (!deadline.never()) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(deadline.at() - std::chrono::steady_clock::now());
      timeout_ms = static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30));
    }
    pollfd item{socket, POLLIN, 0};
    const int ready = poll(&item, 1, timeout_ms);
    if (ready > 0) return {};  // a hang-up too: receiving tells
    if (ready < 0 && errno != EINTR) return system_error(GPUSHARE_IO_ERROR, "cannot wait for a message");
    if (deadline.passed()) return {GPUSHARE_TIMED_OUT, "no message in time"};
  }
}

void shut(const Descriptor& socket) {
  (void)shutdown(socket.get(), SHUT_RDWR);
}

base::Result<Descriptor> make_page_file(const char* name, const char* what, uint64_t bytes) {
  Descriptor file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) return system_error(GPUSHARE_IO_ERROR, std::string("memfd_create for ") + what);
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(file.get(), F_ADD_SEALS, kPageSeals) != 0)
    return system_error(GPUSHARE_IO_ERROR, std::string("sizing ") + what);
  return file;
}

uint64_t page_file_bytes(int file) {
  struct stat info {};
  const int seals = fcntl(file, F_GET_SEALS);
  const bool sealed = seals >= 0 && (seals & kPageSeals) == kPageSeals;
  return sealed && fstat(file, &info) == 0 ? static_cast<uint64_t>(info.st_size) : 0;
}

base::Result<Descriptor> make_table_file(std::string_view content) {
  Descriptor file(memfd_create("gpushare-table", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) return system_error(GPUSHARE_IO_ERROR, "memfd_create for a table");
  while (!content.empty()) {
    const ssize_t written = write(file.get(), content.data(), content.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return system_error(GPUSHARE_HOST_OUT_OF_MEMORY, "writing a table");
    content.remove_prefix(static_cast<size_t>(written));
  }
  if (fcntl(file.get(), F_ADD_SEALS, kTableSeals | F_SEAL_SEAL) != 0)
    return system_error(GPUSHARE_IO_ERROR, "sealing a table");
  return file;
}

base::Result<std::string> read_table_file(int file, uint64_t limit) {
  const int seals = fcntl(file, F_GET_SEALS);
  struct stat info {};
  if (seals < 0 || (seals & kTableSeals) != kTableSeals || fstat(file, &info) != 0 ||
      static_cast<uint64_t>(info.st_size) > limit)
    return base::Status(GPUSHARE_MALFORMED_INPUT, "what came is no table of a daemon");
  std::string out(static_cast<size_t>(info.st_size), '\0');
  for (size_t done = 0; done < out.size();) {
    const ssize_t got = pread(file, out.data() + done, out.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return system_error(GPUSHARE_IO_ERROR, "reading a table");
    done += static_cast<size_t>(got);
  }
  return out;
}

}  // namespace gpushare::client
