// SPDX-License-Identifier: Apache-2.0
#include "daemon/model.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"

namespace gpushare::daemon {
namespace {

uint64_t round_up(uint64_t value, uint64_t to) {
  return (value + to - 1) / to * to;
}

void log_failure(const base::Status& status, const std::string& what) {
  if (!status.ok()) base::log(base::kWarning, status.with_context("daemon: " + what).to_string());
}

}  // namespace

const char* state_name(Model::State state) {
  switch (state) {
    case Model::State::kOff:
      return "off";
    case Model::State::kLoading:
      return "loading";
    case Model::State::kResident:
      return "resident";
    case Model::State::kFailed:
      break;
  }
  return "failed";
}

Model::Model(device::Device& device, const device::Stream& stream, std::shared_ptr<const loader::Image> image,
             std::vector<uint32_t> ends, uint64_t id)
    : device_(device),
      stream_(stream),
      image_(std::move(image)),
      ends_(std::move(ends)),
      id_(id),
      region_bytes_(round_up(image_->bytes(), device.info().mapping_granularity_bytes)) {}

Model::~Model() {
  transmission_.reset();  // waits for its copies
  drop();
}

uint32_t Model::arrived() const {
  base::MutexLock lock(progress_->mutex);
  return progress_->arrived;
}

base::Status Model::make_region() {
  GPUSHARE_ASSIGN_OR_RETURN(memory_, device_.phys_create_shared(region_bytes_));
  GPUSHARE_ASSIGN_OR_RETURN(address_, device_.va_reserve(region_bytes_));
  GPUSHARE_RETURN_IF_ERROR(device_.va_map(address_, region_bytes_, memory_, 0));
  mapped_ = true;
  return {};
}

base::Status Model::load(std::function<void()> on_progress) {
  failure_ = {};
  const base::Status made = make_region();
  if (!made.ok()) {
    drop();
    return made.with_context("model " + path());
  }
  auto started = loader::Transmission::start(
      device_, stream_, image_, address_, ends_, /*prefix=*/{},
      [progress = progress_, on_progress = std::move(on_progress)](size_t, uint32_t, uint32_t end) {
        {
          base::MutexLock lock(progress->mutex);
          progress->arrived = end;
          for (const auto& board : progress->boards) board->set_arrived(end);
        }
        on_progress();
      });
  if (!started.ok()) {
    drop();
    return started.status();
  }
  transmission_ = std::move(*started);
  state_ = State::kLoading;
  ++loads_;
  return {};
}

void Model::poll() {
  if (state_ != State::kLoading) return;
  const auto arrived = transmission_->arrived(static_cast<uint32_t>(image_->layers().size()) - 1);
  if (arrived.ok() && !*arrived) return;
  transmission_.reset();
  state_ = arrived.ok() ? State::kResident : State::kFailed;
  if (arrived.ok()) return;
  failure_ = arrived.status().with_context("loading model " + path());
  base::MutexLock lock(progress_->mutex);
  for (const auto& board : progress_->boards) board->fail(failure_);
}

base::Result<Descriptor> Model::share() const {
  GPUSHARE_ASSIGN_OR_RETURN(const int descriptor, device_.phys_export(memory_, GPUSHARE_ACCESS_READ));
  return Descriptor(descriptor);
}

void Model::drop() {
  if (std::exchange(mapped_, false))
    log_failure(device_.va_unmap(address_, region_bytes_), "unmapping the region of " + path());
  if (address_ != 0)
    log_failure(device_.va_free(std::exchange(address_, 0), region_bytes_), "giving back addresses");
  if (memory_ != nullptr)
    log_failure(device_.phys_release(std::exchange(memory_, nullptr)), "releasing the region of " + path());
  state_ = State::kOff;
  base::MutexLock lock(progress_->mutex);
  progress_->arrived = 0;
}

void Model::watch(const std::shared_ptr<Board>& board) {
  base::MutexLock lock(progress_->mutex);
  board->reset(progress_->arrived);
  progress_->boards.push_back(board);
}

void Model::unwatch(const Board* board) {
  base::MutexLock lock(progress_->mutex);
  std::erase_if(progress_->boards, [&](const auto& other) { return other.get() == board; });
}

}  // namespace gpushare::daemon
