// SPDX-License-Identifier: Apache-2.0
#include "daemon/shared_image.hpp"

#include <algorithm>
#include <utility>

#include "base/round_up.hpp"
#include "daemon/log_failure.hpp"

namespace gpushare::daemon {
namespace {

using base::round_up;

}  // namespace

const char* state_name(SharedImage::State state) {
  switch (state) {
    case SharedImage::State::kOff:
      return "off";
    case SharedImage::State::kLoading:
      return "loading";
    case SharedImage::State::kResident:
      return "resident";
    case SharedImage::State::kFailed:
      break;
  }
  return "failed";
}

SharedImage::SharedImage(device::Device& device, const device::Stream& stream,
                         std::shared_ptr<const loader::Image> image, uint64_t id)
    : device_(device),
      stream_(stream),
      source_(std::move(image)),
      id_(id),
      region_bytes_(round_up(source_->bytes(), device.info().mapping_granularity_bytes)) {}

SharedImage::~SharedImage() {
  transmission_.reset();  // waits for its copies
  drop();
}

uint32_t SharedImage::arrived() const {
  base::MutexLock lock(progress_->mutex);
  return progress_->arrived;
}

void SharedImage::set_prefix(loader::PrefixChoice prefix) {
  // A prefix of all layers would be an image that stays: residency decides on those.
  if (prefix.bytes >= region_bytes_) prefix = {};
  if (prefix.layers != prefix_.layers) forget_prefix();
  prefix_ = prefix;
}

void SharedImage::forget_prefix() {
  if (kept_bytes() > 0) drop();
}

base::Status SharedImage::make(Part& part) {
  if (part.bytes == 0 || part.mapped) return {};
  GPUSHARE_ASSIGN_OR_RETURN(part.memory, device_.phys_create_shared(part.bytes));
  GPUSHARE_RETURN_IF_ERROR(device_.va_map(address_ + part.offset, part.bytes, part.memory, 0));
  part.mapped = true;
  return {};
}

void SharedImage::give_back(Part& part) {
  if (std::exchange(part.mapped, false))
    log_failure(device_.va_unmap(address_ + part.offset, part.bytes), "unmapping the region of " + path());
  if (part.memory != nullptr)
    log_failure(device_.phys_release(std::exchange(part.memory, nullptr)),
                "releasing the region of " + path());
  part = {};
}

base::Status SharedImage::make_region() {
  if (address_ == 0) {
    GPUSHARE_ASSIGN_OR_RETURN(address_, device_.va_reserve(region_bytes_));
  }
  if (parts_[0].memory == nullptr) parts_[0].bytes = prefix_.bytes > 0 ? prefix_.bytes : region_bytes_;
  parts_[1].offset = parts_[0].bytes;
  parts_[1].bytes = region_bytes_ - parts_[0].bytes;
  GPUSHARE_RETURN_IF_ERROR(make(parts_[0]));
  return make(parts_[1]);
}

base::Status SharedImage::load(std::vector<uint32_t> ends, std::function<void()> on_progress) {
  failure_ = {};
  const uint32_t kept = kept_layers();
  const base::Status made = make_region();
  if (!made.ok()) {
    drop(kept > 0);
    return made.with_context("image " + path());
  }
  {
    base::MutexLock lock(progress_->mutex);
    progress_->arrived = kept;
  }
  auto started = loader::Transmission::start(
      device_, stream_, source_, address_, std::move(ends), {kept, 0},
      [progress = progress_, on_progress = std::move(on_progress)](size_t, uint32_t, uint32_t end) {
        {
          base::MutexLock lock(progress->mutex);
          progress->arrived = end;
          for (const auto& board : progress->boards) board->set_arrived(end);
        }
        on_progress();
      });
  if (!started.ok()) {
    drop(kept > 0);
    return started.status();
  }
  transmission_ = std::move(*started);
  state_ = State::kLoading;
  ++loads_;
  return {};
}

void SharedImage::poll() {
  if (state_ != State::kLoading) return;
  const auto arrived = transmission_->arrived(static_cast<uint32_t>(source_->layers().size()) - 1);
  if (arrived.ok() && !*arrived) return;
  if (arrived.ok() && transmission_->groups() > 0) {
    if (const auto took = transmission_->arrived_ns(transmission_->groups() - 1); took.ok()) {
      load_ns_ = *took;
      sent_bytes_ = transmission_->sent_bytes();
    }
  }
  transmission_.reset();
  state_ = arrived.ok() ? State::kResident : State::kFailed;
  if (arrived.ok()) return;
  failure_ = arrived.status().with_context("loading image " + path());
  base::MutexLock lock(progress_->mutex);
  for (const auto& board : progress_->boards) board->fail(failure_);
}

base::Result<std::vector<client::Descriptor>> SharedImage::share() const {
  std::vector<client::Descriptor> out;
  for (const Part& part : parts_) {
    if (part.memory == nullptr) continue;
    GPUSHARE_ASSIGN_OR_RETURN(const int descriptor, device_.phys_export(part.memory, GPUSHARE_ACCESS_READ));
    out.emplace_back(descriptor);
  }
  return out;
}

void SharedImage::drop(bool keep_prefix) {
  // Only what has arrived is worth keeping; what was kept has.
  const bool whole = state_ == State::kResident;
  keep_prefix = keep_prefix && prefix_.bytes > 0 && parts_[0].bytes == prefix_.bytes &&
                (whole || parts_[0].kept_bytes > 0);
  give_back(parts_[1]);
  if (keep_prefix) {
    parts_[0].kept_bytes = parts_[0].bytes;
  } else {
    give_back(parts_[0]);
    if (address_ != 0)
      log_failure(device_.va_free(std::exchange(address_, 0), region_bytes_), "giving back addresses");
  }
  state_ = State::kOff;
  base::MutexLock lock(progress_->mutex);
  progress_->arrived = 0;
}

void SharedImage::watch(const std::shared_ptr<client::Board>& board) {
  base::MutexLock lock(progress_->mutex);
  board->reset(progress_->arrived);
  progress_->boards.push_back(board);
}

void SharedImage::unwatch(const client::Board* board) {
  base::MutexLock lock(progress_->mutex);
  std::erase_if(progress_->boards, [&](const auto& other) { return other.get() == board; });
}

}  // namespace gpushare::daemon
