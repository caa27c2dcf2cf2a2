// image_reader.hpp: reads images from disk on a thread of its own, so that the server keeps turning turns.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "loader/image.hpp"

namespace gpushare::daemon {

class ImageReader {
 public:
  struct Done {
    uint64_t worker = 0;
    std::string path;
    base::Result<std::shared_ptr<const loader::Image>> image = base::Status();
  };
  // `on_done` is called from the thread whenever take() has something.
  ImageReader(loader::ImageCache& cache, std::function<void()> on_done);
  ~ImageReader();  // finishes the read it is at, forgets the rest

  void read(uint64_t worker, std::string path);
  std::list<Done> take();

 private:
  void work();

  loader::ImageCache& cache_;
  const std::function<void()> on_done_;
  base::Mutex mutex_;
  base::ConditionVariable changed_;
  std::list<Done> waiting_ GPUSHARE_GUARDED_BY(mutex_);
  std::list<Done> done_ GPUSHARE_GUARDED_BY(mutex_);
  bool stop_ GPUSHARE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace gpushare::daemon
