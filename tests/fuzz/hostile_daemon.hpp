// hostile_daemon.hpp: a daemon that answers a worker's requests as a script of bytes says: rightly, with damaged messages, with
// descriptors missing, exchanged or of another kind, with boards that lie, or by hanging up.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.hpp"
#include "daemon/board.hpp"
#include "daemon/channel.hpp"
#include "daemon/protocol.hpp"
#include "device/device.hpp"
#include "fuzz/c_api_input.hpp"

namespace gpushare::fuzz {

inline constexpr const char* kWorkerDevice = "host?total_bytes=67108864&granularity=65536";

class HostileDaemon {
 public:
  static constexpr uint64_t kGranule = 64 << 10;
  static constexpr uint64_t kRegionBytes = 3 * kGranule;

  explicit HostileDaemon(const std::string& path) : device_(*device::Device::open(kWorkerDevice)) {
    listener_ = *daemon::Listener::open(path);
    whole_ = memory(kRegionBytes);
    prefix_ = memory(kGranule);
    rest_ = memory(kRegionBytes - kGranule);
    scratch_ = memory(kGranule);
    thread_ = std::thread([this] { serve(); });
  }
  // It lives as long as the process: the thread is never joined.
  ~HostileDaemon() = delete;

  // What the next connections are answered with.
  void play(std::vector<uint8_t> script) {
    base::MutexLock lock(mutex_);
    script_ = std::move(script);
    at_ = 0;
  }
  // One more connects.
  void expect_connection() {
    base::MutexLock lock(mutex_);
    ++connections_;
  }
  // Until all of them have been served to their end.
  void settle() {
    base::MutexLock lock(mutex_);
    while (served_ < connections_) changed_.wait(mutex_);
  }

 private:
  gpushare_backend_memory* memory(uint64_t bytes) { return *device_->phys_create_shared(bytes); }
  daemon::Descriptor share(gpushare_backend_memory* of, uint32_t access = GPUSHARE_ACCESS_READ) {
    return daemon::Descriptor(*device_->phys_export(of, access));
  }
  uint8_t byte() {
    base::MutexLock lock(mutex_);
    return at_ < script_.size() ? script_[at_++] : 0;
  }

  void serve() {
    for (;;) {
      (void)daemon::wait_readable(listener_.get(), base::Deadline::after(UINT64_MAX));
      daemon::Peer peer;
      base::Result<daemon::Descriptor> socket = daemon::accept_peer(listener_.get(), &peer);
      if (!socket.ok()) continue;
      while (answer(socket->get())) {
      }
      *socket = daemon::Descriptor();
      board_.reset();
      base::MutexLock lock(mutex_);
      ++served_;
      changed_.notify_all();
    }
  }

  // False: the connection is over.
  bool answer(int socket) {
    std::array<std::byte, daemon::kMaxRequestBytes + 1> buffer;
    (void)daemon::wait_readable(socket, base::Deadline::after(UINT64_MAX));
    const auto message = daemon::receive_message(socket, buffer);
    if (message.status().code() == GPUSHARE_NOT_READY) return true;
    if (!message.ok()) return false;
    const auto request = daemon::parse_request(*message);
    require(request.ok(), "a worker's requests are of the protocol");
    const uint8_t action = byte();
    if (action >= 128) {
      if (action % 8 == 0) return false;
      misanswer(socket, *request, action);
    }
    std::vector<daemon::Descriptor> descriptors;
    const daemon::Reply reply = good(*request, descriptors, false);
    send(socket, reply, descriptors);
    if (board_ != nullptr) lie(byte());
    return true;
  }

  daemon::Reply good(const daemon::Request& request, std::vector<daemon::Descriptor>& descriptors,
                     bool bad_table) {
    daemon::Reply reply = daemon::make_reply(request.sequence, {});
    reply.image_bytes = kRegionBytes - 1000;
    reply.region_bytes = kRegionBytes;
    reply.layers = 3;
    reply.worker = 7;
    std::strncpy(reply.device, kWorkerDevice, sizeof(reply.device) - 1);
    if (request.type == daemon::MessageType::kAttach) {
      scratch_wanted_ = request.scratch_bytes > 0;
      board_ = *daemon::Board::create();
      const std::vector<daemon::TableLayer> layers = {
          {"a", 0, kGranule}, {"b", kGranule, 10}, {"c", 2 * kGranule, kGranule - 1000}};
      std::string table = daemon::encode_layers(layers);
      if (bad_table)
        for (int i = byte() % 8; i >= 0; --i) table[byte() % table.size()] = static_cast<char>(byte());
      descriptors.emplace_back(::dup(board_->file()));
      descriptors.push_back(*daemon::make_table_file(table));
    } else if (request.type == daemon::MessageType::kBegin) {
      if (byte() % 2 == 0) {
        descriptors.push_back(share(whole_));
      } else {
        reply.prefix_bytes = kGranule;
        descriptors.push_back(share(prefix_));
        descriptors.push_back(share(rest_));
      }
      if (scratch_wanted_) descriptors.push_back(share(scratch_, GPUSHARE_ACCESS_READ_WRITE));
      reply.arrived = byte() % 4;
    }
    if (scratch_wanted_) reply.scratch_bytes = kGranule;
    reply.descriptors = static_cast<uint32_t>(descriptors.size());
    return reply;
  }

  void misanswer(int socket, const daemon::Request& request, uint8_t action) {
    std::vector<daemon::Descriptor> descriptors;
    daemon::Reply reply = good(request, descriptors, action % 8 == 7);
    switch (action % 8) {
      case 1:  // damaged anywhere
      case 2:
        for (int i = byte() % 8; i >= 0; --i) {
          const size_t where = (static_cast<size_t>(byte()) << 8 | byte()) % sizeof(reply);
          reinterpret_cast<unsigned char*>(&reply)[where] = byte();
        }
        if (reply.code == GPUSHARE_INTERNAL) reply.code = GPUSHARE_UNKNOWN;  // no bug of the library's
        break;
      case 3: {  // numbers that contradict each other
        uint64_t* const numbers[] = {&reply.image_bytes, &reply.region_bytes, &reply.prefix_bytes,
                                     &reply.scratch_bytes};
        *numbers[byte() % 4] = static_cast<uint64_t>(byte()) << (byte() % 64);
        reply.layers = byte() % 5;
        break;
      }
      case 4:
        if (!descriptors.empty() && byte() % 2 == 0) {
          descriptors.pop_back();
          if (byte() % 2 == 0) --reply.descriptors;
        } else {
          std::reverse(descriptors.begin(), descriptors.end());
        }
        break;
      case 5:
        if (!descriptors.empty()) descriptors[byte() % descriptors.size()] = odd_descriptor();
        break;
      case 6: {
        const uint8_t code = byte();
        reply = daemon::make_reply(request.sequence, {GPUSHARE_IO_ERROR, std::string(byte(), 'x')});
        reply.code = code < 128 ? code * 8 : -code;  // of the protocol, or of none
        descriptors.clear();
        break;
      }
      default:
        break;  // a damaged table
    }
    send(socket, reply, descriptors);
  }

  daemon::Descriptor odd_descriptor() {
    switch (byte() % 5) {
      case 0:
        return daemon::Descriptor(::open("/dev/null", O_RDWR | O_CLOEXEC));
      case 1:
        return daemon::Descriptor(::open("/", O_RDONLY | O_CLOEXEC));
      case 2: {  // not sealed, and of any size
        daemon::Descriptor file(memfd_create("odd", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        require(::ftruncate(file.get(), static_cast<off_t>(byte()) << (byte() % 24)) == 0, "a memory file");
        return file;
      }
      case 3:
        return share(scratch_, GPUSHARE_ACCESS_READ_WRITE);
      default:
        return *daemon::make_table_file(std::string(byte(), 'x'));
    }
  }

  void lie(uint8_t what) {
    if (what % 4 == 0) board_->set_arrived(3);
    if (what % 4 == 1) board_->set_arrived(what);
    if (what % 16 == 2) board_->fail({static_cast<int8_t>(what), std::string(600, 'y')});
    board_->set_wanted(what % 2 == 0);
  }

  static void send(int socket, const daemon::Reply& reply,
                   const std::vector<daemon::Descriptor>& descriptors) {
    std::vector<int> numbers;
    for (const daemon::Descriptor& descriptor : descriptors) numbers.push_back(descriptor.get());
    (void)daemon::send_message(socket, daemon::bytes_of(reply), numbers);
  }

  const std::unique_ptr<device::Device> device_;
  daemon::Listener listener_;
  gpushare_backend_memory* whole_;
  gpushare_backend_memory* prefix_;
  gpushare_backend_memory* rest_;
  gpushare_backend_memory* scratch_;
  bool scratch_wanted_ = false;
  std::shared_ptr<daemon::Board> board_;  // of the connection
  std::thread thread_;
  base::Mutex mutex_;
  base::ConditionVariable changed_;
  std::vector<uint8_t> script_ GPUSHARE_GUARDED_BY(mutex_);
  size_t at_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t connections_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t served_ GPUSHARE_GUARDED_BY(mutex_) = 0;
};

}  // namespace gpushare::fuzz
