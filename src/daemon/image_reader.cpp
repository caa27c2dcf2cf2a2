// SPDX-License-Identifier: Apache-2.0
#include "daemon/image_reader.hpp"

#include <new>

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
    waiting_.push_back({worker, std::move(path)});
  }
  changed_.notify_all();
}

std::list<ImageReader::Done> ImageReader::take() {
  base::MutexLock lock(mutex_);
  return std::exchange(done_, {});
}

void ImageReader::work() {
  base::MutexLock lock(mutex_);
  for (;;) {
    while (waiting_.empty() && !stop_) changed_.wait(mutex_);
    if (stop_) return;
    std::list<Done> read;  // moved from list to list: without host memory the worker is still answered
    read.splice(read.end(), waiting_, waiting_.begin());
    lock.unlock();
    Done& done = read.front();
    try {
      done.image = cache_.get(done.path);
    } catch (const std::bad_alloc&) {
      done.image = base::no_memory();
    }
    lock.lock();
    if (stop_) return;
    done_.splice(done_.end(), read);
    lock.unlock();
    on_done_();
    lock.lock();
  }
}

}  // namespace gpushare::daemon
