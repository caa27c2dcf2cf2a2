// SPDX-License-Identifier: Apache-2.0
#include "executor/shared_image.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {
namespace {

constexpr uint64_t kLookNs = 100'000'000;  // how often a sleeper looks whether the daemon still lives

void log_failure(const base::Status& status, const char* what) {
  if (!status.ok()) base::log(base::kWarning, status.with_context(what).to_string());
}

}  // namespace

base::Result<std::shared_ptr<SharedImage>> SessionImpl::open_image(const SharedImageOptions& options) {
  if (runtime_->images_ == nullptr)
    return base::Status(GPUSHARE_UNSUPPORTED,
                        "images are shared by a daemon: open the runtime on device \"shared\", or load the "
                        "model into the session");
  return SharedImage::open(shared_from_this(), *runtime_, runtime_->images_, options);
}

base::Result<std::shared_ptr<SharedImage>> SharedImage::open(std::shared_ptr<Session> session,
                                                             Runtime& runtime,
                                                             std::shared_ptr<client::Images> images,
                                                             const SharedImageOptions& options) {
  if (NoWaitScope::active())
    return base::Status(GPUSHARE_INVALID_STATE,
                        "an image cannot be opened inside a function that the device waits for");
  auto image = std::make_shared<SharedImage>(std::move(session), std::move(images), runtime.device());
  GPUSHARE_RETURN_IF_ERROR(runtime.attach(image));
  const base::Deadline deadline = base::Deadline::after(options.timeout_ns);
  GPUSHARE_ASSIGN_OR_RETURN(
      image->number_, image->images_->open(image, image->session_->id(), options.path, options.iteration_ns));
  base::MutexLock lock(image->mutex_);
  while (!image->answered_ && image->failure_.ok() && image->device_ != nullptr) {
    if (options.timeout_ns == 0 || deadline.passed())
      return base::Status(GPUSHARE_TIMED_OUT, "the daemon has not read " + options.path + " in time");
    (void)image->changed_.wait(image->mutex_, deadline);
  }
  if (image->device_ == nullptr) return base::Status(GPUSHARE_INVALID_STATE, "the runtime is closed");
  if (!image->failure_.ok()) return image->failure_;
  return image;
}

SharedImage::~SharedImage() {
  close();
  detach();
}

void SharedImage::close() {
  {
    base::MutexLock lock(mutex_);
    free_all();
  }
  images_->close(number_);
}

void SharedImage::runtime_closing() {
  close();
}

void SharedImage::free_all() {
  if (device_ == nullptr) return;
  unmap();
  if (region_ != 0) log_failure(device_->va_free(region_, region_bytes_), "closing a shared image");
  device_ = nullptr;
  changed_.notify_all();
}

base::Status SharedImage::take(const client::ImageOpened& message,
                               std::vector<client::Descriptor> descriptors) {
  GPUSHARE_RETURN_IF_ERROR(client::reported(message.code, client::text_of(message.text)));
  if (descriptors.size() != 2 || message.image_bytes == 0 || message.image_bytes > message.region_bytes)
    return {GPUSHARE_MALFORMED_INPUT, "the daemon's answer about an image contradicts itself"};
  GPUSHARE_ASSIGN_OR_RETURN(board_, client::Board::open(std::move(descriptors[0])));
  GPUSHARE_ASSIGN_OR_RETURN(const std::string table, client::read_table_file(descriptors[1].get()));
  GPUSHARE_ASSIGN_OR_RETURN(layers_, client::parse_layers(table, message.image_bytes));
  if (layers_.empty() || layers_.size() != message.layers)
    return {GPUSHARE_MALFORMED_INPUT, "the daemon's table of layers contradicts its answer"};
  image_bytes_ = message.image_bytes;
  region_bytes_ = message.region_bytes;
  GPUSHARE_ASSIGN_OR_RETURN(region_, device_->va_reserve(region_bytes_));
  return {};
}

void SharedImage::opened(const client::ImageOpened& message, std::vector<client::Descriptor> descriptors) {
  base::MutexLock lock(mutex_);
  if (device_ == nullptr || answered_) return;
  base::Status taken = take(message, std::move(descriptors));
  if (!taken.ok() && failure_.ok()) failure_ = std::move(taken);
  answered_ = true;
  changed_.notify_all();
}

base::Status SharedImage::map(uint64_t first_bytes, std::span<const client::Descriptor> descriptors) {
  if (!answered_ || region_ == 0 || mapped_.load() || first_bytes == 0 || first_bytes > region_bytes_ ||
      descriptors.size() != (first_bytes < region_bytes_ ? 2u : 1u))
    return {GPUSHARE_MALFORMED_INPUT, "the daemon's memory of an image contradicts what it said before"};
  uint64_t offset = 0;
  for (size_t i = 0; i < descriptors.size(); ++i) {
    Part& part = parts_[i];
    part.bytes = i == 0 ? first_bytes : region_bytes_ - offset;
    part.address = region_ + offset;
    GPUSHARE_ASSIGN_OR_RETURN(part.memory,
                              device_->phys_import(descriptors[i].get(), part.bytes, GPUSHARE_ACCESS_READ));
    GPUSHARE_RETURN_IF_ERROR(device_->va_map(part.address, part.bytes, part.memory, 0));
    part.mapped = true;
    offset += part.bytes;
  }
  return {};
}

void SharedImage::unmap() {
  mapped_.store(false, std::memory_order_release);
  for (Part& part : parts_) {
    if (std::exchange(part.mapped, false))
      log_failure(device_->va_unmap(part.address, part.bytes), "unmapping a shared image");
    if (part.memory != nullptr)
      log_failure(device_->phys_release(std::exchange(part.memory, nullptr)), "unmapping a shared image");
  }
}

bool SharedImage::here(uint64_t first_bytes, std::vector<client::Descriptor> descriptors) {
  base::MutexLock lock(mutex_);
  if (device_ == nullptr) return false;
  const base::Status status = map(first_bytes, descriptors);
  if (status.ok()) {
    mapped_.store(true, std::memory_order_release);
  } else {
    unmap();
    if (board_ != nullptr)  // until the daemon sends it for another turn
      board_->fail(status.with_context("mapping a shared image"));
  }
  changed_.notify_all();
  return status.ok();
}

void SharedImage::gone() {
  base::MutexLock lock(mutex_);
  if (device_ != nullptr) unmap();
}

// The mapping stays, so the image stays readable.
void SharedImage::lost(const base::Status& why) {
  base::MutexLock lock(mutex_);
  failure_ = {GPUSHARE_UNAVAILABLE,
              why.message() + "; release the image, and open it anew once a daemon serves there"};
  changed_.notify_all();
}

uint32_t SharedImage::arrived() const {
  if (!mapped_.load(std::memory_order_acquire)) return 0;
  return std::min(board_->arrived(), static_cast<uint32_t>(layers_.size()));
}

base::Status SharedImage::wait(uint32_t first, uint32_t end, uint64_t timeout_ns) const {
  if (first >= end || end > layers_.size())
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("layers [%u, %u) asked; there are [0, %zu)", first, end, layers_.size())};
  if (session_->open_iteration() == 0)
    return {GPUSHARE_INVALID_STATE,
            "session '" + session_->name() +
                "' has no iteration open: its image is there inside iterations alone"};
  if (arrived() >= end) return {};
  if (NoWaitScope::active())
    return {GPUSHARE_INVALID_STATE,
            "a layer cannot be waited for inside a function that the device waits for"};
  const base::Deadline deadline = base::Deadline::after(timeout_ns);
  for (;;) {
    const uint32_t seen = board_->arrived();
    if (arrived() >= end) return {};
    GPUSHARE_RETURN_IF_ERROR(board_->failure());
    base::MutexLock lock(mutex_);
    if (device_ == nullptr) return {GPUSHARE_INVALID_STATE, "the image is closed"};
    GPUSHARE_RETURN_IF_ERROR(failure_);
    if (timeout_ns == 0 || deadline.passed())
      return {GPUSHARE_TIMED_OUT, base::format("layer %u is not on the device yet; %u of %zu are", end - 1,
                                               arrived(), layers_.size())};
    if (!mapped_.load(std::memory_order_acquire)) {
      (void)changed_.wait(mutex_, earlier(base::Deadline::after(kLookNs), deadline));
      continue;
    }
    lock.unlock();
    board_->sleep(seen, std::min(kLookNs, std::max<uint64_t>(timeout_ns, 1)));
  }
}

}  // namespace gpushare::executor
