// SPDX-License-Identifier: Apache-2.0
#include "daemon/lanes.hpp"

#include <utility>

#include "base/clock.hpp"
#include "daemon/log_failure.hpp"

namespace gpushare::daemon {

Lanes::~Lanes() {
  for (sched::LaneId lane = 0; lane < lanes_.size(); ++lane) (void)resize(lane, 0, 0);
}

base::Status Lanes::resize(sched::LaneId lane, uint64_t bytes, uint64_t user) {
  if (lanes_.size() <= lane) lanes_.resize(lane + 1);
  std::vector<Piece>& pieces = lanes_[lane];
  while (pieces.size() * piece_bytes_ > bytes) {
    log_failure(device_->phys_release(pieces.back().memory), "giving back memory of a lane");
    pieces.pop_back();
  }
  while (pieces.size() * piece_bytes_ < bytes) {
    Piece piece;
    if (auto made = make(user, &piece); !made.ok()) {
      if (piece.memory != nullptr)
        log_failure(device_->phys_release(piece.memory), "giving back memory of a lane");
      return made.with_context("making memory of a shared lane");
    }
    pieces.push_back(std::move(piece));
  }
  return {};
}

base::Status Lanes::make(uint64_t user, Piece* out_piece) {
  if (device_ == nullptr) {
    GPUSHARE_ASSIGN_OR_RETURN(device_, device::Device::open(spec_));
    context_.measure(*device_, base::host_now_ns());
  }
  GPUSHARE_ASSIGN_OR_RETURN(out_piece->memory, device_->phys_create_shared(piece_bytes_));
  several_users_ = several_users_ || (only_user_ != 0 && only_user_ != user);
  only_user_ = user;
  if (several_users_) GPUSHARE_RETURN_IF_ERROR(clear(out_piece->memory));
  GPUSHARE_ASSIGN_OR_RETURN(const int descriptor,
                            device_->phys_export(out_piece->memory, GPUSHARE_ACCESS_READ_WRITE));
  out_piece->descriptor = client::Descriptor(descriptor);
  return {};
}

base::Status Lanes::clear(gpushare_backend_memory* memory) {
  if (!stream_) {
    GPUSHARE_ASSIGN_OR_RETURN(stream_, device_->create_stream());
  }
  GPUSHARE_ASSIGN_OR_RETURN(const device::Address address, device_->va_reserve(piece_bytes_));
  base::Status status = device_->va_map(address, piece_bytes_, memory, 0);
  if (status.ok()) {
    status = stream_.fill(address, 0, piece_bytes_);
    if (status.ok()) status = stream_.synchronize();
    log_failure(device_->va_unmap(address, piece_bytes_), "clearing memory of a lane");
  }
  log_failure(device_->va_free(address, piece_bytes_), "clearing memory of a lane");
  return status;
}

}  // namespace gpushare::daemon
