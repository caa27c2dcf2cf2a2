// SPDX-License-Identifier: Apache-2.0
#include "daemon/lanes.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "daemon/log_failure.hpp"

namespace gpushare::daemon {

Lanes::~Lanes() {
  for (sched::LaneId lane = 0; lane < lanes_.size(); ++lane) (void)resize(lane, 0, 0);
  stream_ = {};
  if (device_ != nullptr) log_failure(device_->close(), "closing the device");
}

bool Lanes::opening(uint64_t now_ns) {
  if (device_ != nullptr || (opening_ == nullptr && now_ns < open_again_ns_)) return false;
  if (opening_ == nullptr) start_opening(now_ns);
  if (opening_ == nullptr || take_opened(now_ns)) return false;
  if (opening_ == nullptr) return false;  // it could not be opened
  if (now_ns - opening_since_ns_ < kOpenPatienceNs) return true;
  if (!std::exchange(said_late_, true))
    base::log(base::kWarning,
              "daemon: device '" + spec_ +
                  "' has not opened for 5 s, its driver hangs: until it opens, sessions share no "
                  "ephemeral memory there");
  return false;
}

void Lanes::start_opening(uint64_t now_ns) {
  auto started = base::Asked<OpenedDevice>::start("the device's driver",
                                                  [spec = spec_] { return OpenedDevice::open(spec); });
  opening_since_ns_ = now_ns;
  open_again_ns_ = now_ns + kOpenAgainNs;
  said_late_ = false;
  if (started.ok())
    opening_ = *std::move(started);
  else
    log_failure(started.status(), "opening device '" + spec_ + "' for shared lanes");
}

bool Lanes::take_opened(uint64_t now_ns) {
  auto answer = opening_->wait_until({});
  if (!answer) return false;
  opening_.reset();
  if (!answer->ok()) {
    open_again_ns_ = now_ns + kOpenAgainNs;
    log_failure(answer->status(), "opening device '" + spec_ + "' for shared lanes");
    return false;
  }
  device_ = std::move((*answer)->device);
  context_.note((*answer)->context_bytes, now_ns);
  return true;
}

bool Lanes::tick(uint64_t now_ns, uint64_t* next_ns) {
  const bool opened = opening_ != nullptr && take_opened(now_ns);
  if (opening_ != nullptr) *next_ns = std::min(*next_ns, kOpenAgainNs);
  return context_.tick(device_, now_ns, next_ns) || opened;
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
  if (device_ == nullptr) return {GPUSHARE_NOT_READY, "device '" + spec_ + "' is not open"};
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
