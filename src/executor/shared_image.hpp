// shared_image.hpp: an image of the daemon, mapped for reading beside a session of a shared runtime. The daemon sends its memory
// before it grants the session a turn, and takes it back only outside of turns; addresses stay the same. Waiting for a
// layer is a look at a page that the daemon shares, at worst a sleep on it.
//
// Threads: any. Messages come on the thread that listens to the daemon.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.hpp"
#include "client/board.hpp"
#include "client/images.hpp"
#include "executor/runtime.hpp"

namespace gpushare::executor {

class SharedImage final : public Dependent, public client::ImageUser {
 public:
  // Session::open_image().
  static base::Result<std::shared_ptr<SharedImage>> open(std::shared_ptr<Session> session, Runtime& runtime,
                                                         std::shared_ptr<client::Images> images,
                                                         const SharedImageOptions& options);
  SharedImage(std::shared_ptr<Session> session, std::shared_ptr<client::Images> images,
              device::Device& device)
      : session_(std::move(session)), images_(std::move(images)), device_(&device) {}
  ~SharedImage() override;

  // Blocks until layers [first, end) are on the device, inside an iteration of the session. Errors: TIMED_OUT, INVALID_STATE
  // (no iteration is open; closed), INVALID_ARGUMENT, UNAVAILABLE, those of the load.
  base::Status wait(uint32_t first, uint32_t end, uint64_t timeout_ns) const;
  // Unmaps it. Work that uses it must have finished.
  void close();

  std::span<const client::TableLayer> layers() const { return layers_; }
  device::Address address() const { return region_; }
  uint64_t bytes() const { return image_bytes_; }
  uint32_t arrived() const;  // layers that are there, 0 while it is not mapped

  void opened(const client::ImageOpened& message, std::vector<client::Descriptor> descriptors) override;
  bool here(uint64_t first_bytes, std::vector<client::Descriptor> descriptors) override;
  void gone() override;
  void lost(const base::Status& why) override;
  void runtime_closing() override;

 private:
  struct Part {
    gpushare_backend_memory* memory = nullptr;
    device::Address address = 0;
    uint64_t bytes = 0;
    bool mapped = false;
  };
  base::Status take(const client::ImageOpened& message, std::vector<client::Descriptor> descriptors)
      GPUSHARE_REQUIRES(mutex_);
  base::Status map(uint64_t first_bytes, std::span<const client::Descriptor> descriptors)
      GPUSHARE_REQUIRES(mutex_);
  void unmap() GPUSHARE_REQUIRES(mutex_);
  void free_all() GPUSHARE_REQUIRES(mutex_);

  const std::shared_ptr<Session> session_;
  const std::shared_ptr<client::Images> images_;
  uint64_t number_ = 0;
  // Set once by opened(), before the object is handed out.
  std::shared_ptr<client::Board> board_;
  std::vector<client::TableLayer> layers_;
  uint64_t image_bytes_ = 0, region_bytes_ = 0;
  device::Address region_ = 0;

  mutable base::Mutex mutex_;
  mutable base::ConditionVariable changed_;
  device::Device* device_ GPUSHARE_GUARDED_BY(mutex_);  // null once closed
  bool answered_ GPUSHARE_GUARDED_BY(mutex_) = false;
  base::Status failure_ GPUSHARE_GUARDED_BY(mutex_);
  Part parts_[2] GPUSHARE_GUARDED_BY(mutex_);
  std::atomic<bool> mapped_{false};
};

}  // namespace gpushare::executor
