// lanes.hpp: the memory of one device's lanes that processes share. It is made here in pieces of one size, sent to each
// process whose session is in the lane, and given back when no session needs it. The scheduler decides how much a lane
// has (sched::SchedulerOptions::shared_lanes); the sender of the descriptors decides which processes may map it.
//
// The service's thread calls everything. The device is opened for the first session, on a thread of its own, because a
// driver may hang there.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/patient.hpp"
#include "base/status.hpp"
#include "client/channel.hpp"
#include "daemon/own_context.hpp"
#include "device/device.hpp"
#include "sched/types.hpp"

namespace gpushare::daemon {

class Lanes {
 public:
  // `piece_bytes`: a multiple of what the device maps, of 2 MiB at least.
  Lanes(std::string device, uint64_t piece_bytes) : spec_(std::move(device)), piece_bytes_(piece_bytes) {}
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  uint64_t piece_bytes() const { return piece_bytes_; }
  uint64_t context_bytes() const { return context_.bytes(); }  // of this process, since the first piece
  // As OwnContext::tick; it also takes a device that has opened late.
  bool tick(uint64_t now_ns, uint64_t* next_ns);
  // Opens the device if it is not open, and does not wait for it. True: it may be open soon, so a session that is to have
  // memory of a lane should arrive later. That is so for kOpenPatienceNs at most. Such a session is then better off
  // without a lane, until is_open().
  bool opening(uint64_t now_ns);
  bool is_open() const { return device_ != nullptr; }
  // Gives the lane of `user` `bytes`, a multiple of piece_bytes(), once the device is open. No process may still map the pieces that go. On
  // failure the lane has the pieces that could be made. Errors: NOT_READY (the device is not open); the device's.
  base::Status resize(sched::LaneId lane, uint64_t bytes, uint64_t user);
  uint64_t bytes(sched::LaneId lane) const { return pieces(lane) * piece_bytes_; }
  // The descriptor of the lane's piece, valid as long as the lane has the piece.
  int descriptor(sched::LaneId lane, size_t piece) const { return lanes_[lane][piece].descriptor.get(); }

 private:
  struct Piece {
    gpushare_backend_memory* memory = nullptr;
    client::Descriptor descriptor;
  };
  size_t pieces(sched::LaneId lane) const { return lane < lanes_.size() ? lanes_[lane].size() : 0; }
  base::Status make(uint64_t user, Piece* out_piece);
  // A driver need not clear memory that this process gave back and has again.
  base::Status clear(gpushare_backend_memory* memory);

  void start_opening(uint64_t now_ns);
  bool take_opened(uint64_t now_ns);  // true if the device is open now

  // A process takes a daemon that does not answer for 10 s for gone.
  static constexpr uint64_t kOpenPatienceNs = 5'000'000'000;
  static constexpr uint64_t kOpenAgainNs = 1'000'000'000;  // after it could not be opened

  const std::string spec_;
  const uint64_t piece_bytes_;
  std::shared_ptr<device::Device> device_;  // a question about its context that hangs has it too
  std::unique_ptr<base::Asked<OpenedDevice>>
      opening_;  // null: it is open, or was not asked for, or could not be opened
  uint64_t opening_since_ns_ = 0;
  bool said_late_ = false;
  uint64_t open_again_ns_ = 0;
  OwnContext context_;
  device::Stream stream_;
  std::vector<std::vector<Piece>> lanes_;
  uint64_t only_user_ = 0;  // the only user that has had memory here; 0: none yet
  bool several_users_ = false;
};

}  // namespace gpushare::daemon
