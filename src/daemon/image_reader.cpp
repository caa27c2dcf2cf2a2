// SPDX-License-Identifier: Apache-2.0
#include "daemon/image_reader.hpp"

#include <chrono>
#include <new>
#include <thread>

#include "base/no_memory.hpp"

namespace gpushare::daemon {

ImageReader::ImageReader(loader::ImageCache& cache, std::function<void()> on_done)
    : cache_(cache), on_done_(std::move(on_done)), thread_([this] { work(); }) {}

ImageReader::~ImageReader() {
  {
    base::MutexLock lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ImageReader::read(uint64_t worker, std::string path) {
  {
    base::MutexLock lock(mutex_);
    waiting_.emplace_back(worker, std::move(path));
  }
  changed_.notify_all();
}

std::vector<ImageReader::Done> ImageReader::take() {
  base::MutexLock lock(mutex_);
  return std::exchange(done_, {});
}

void ImageReader::work() {
  base::MutexLock lock(mutex_);
  for (;;) {
    while (waiting_.empty() && !stop_) changed_.wait(mutex_);
    if (stop_) return;
    const auto [worker, path] = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    base::Result<std::shared_ptr<const loader::Image>> image = base::Status();
    try {
      image = cache_.get(path);
    } catch (const std::bad_alloc&) {
      image = base::no_memory();
    }
    lock.lock();
    for (size_t before = done_.size(); done_.size() == before && !stop_;) {
      try {
        done_.emplace_back();
      } catch (const std::bad_alloc&) {  // the worker waits for its answer, and so does this
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        lock.lock();
        before = done_.size();
      }
    }
    if (stop_) return;
    done_.back() = {worker, std::move(image)};
    lock.unlock();
    on_done_();
    lock.lock();
  }
}

}  // namespace gpushare::daemon
