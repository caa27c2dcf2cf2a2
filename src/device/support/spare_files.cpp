// SPDX-License-Identifier: Apache-2.0
#include "device/support/spare_files.hpp"

#include <fcntl.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <exception>
#include <new>
#include <thread>
#include <utility>

#include "base/no_signals.hpp"

namespace gpushare::device {
namespace {

constexpr size_t kMostFiles = 16;  // descriptors are not plentiful

bool is_ours_alone(int file) {
  // The system sends this signal when somebody opens the file while the lease holds. SIGURG is ignored by
  // default.
  if (fcntl(file, F_SETSIG, SIGURG) != 0 || fcntl(file, F_SETLEASE, F_WRLCK) != 0) return false;
  return fcntl(file, F_SETLEASE, F_UNLCK) == 0;
}

}  // namespace

SpareFiles::~SpareFiles() {
  std::thread thread;
  {
    base::MutexLock lock(mutex_);
    stop_ = true;
    thread = std::move(thread_);
  }
  came_.notify_all();
  if (thread.joinable()) thread.join();
}

std::shared_ptr<SharedFile> SpareFiles::take(uint64_t bytes) {
  base::MutexLock lock(mutex_);
  const auto found =
      std::find_if(ready_.begin(), ready_.end(), [&](const auto& file) { return file->bytes() == bytes; });
  if (found == ready_.end()) return nullptr;
  std::shared_ptr<SharedFile> file = std::move(*found);
  ready_.erase(found);
  kept_bytes_ -= bytes;
  return file;
}

void SpareFiles::push(File file) {
  const bool keep = file.keep;
  const uint64_t bytes = file.file->bytes();
  try {
    if (!thread_.joinable() && !stop_) {
      const base::NoSignals no_signals;
      thread_ = std::thread([this] { work(); });
    }
    to_do_.push_back(std::move(file));
  } catch (const std::exception&) {
    // Without a thread, or memory to remember the file, nothing is kept.
    if (keep) kept_bytes_ -= bytes;
    return;
  }
  came_.notify_one();
}

// Down to the limit; the oldest first, as the newest are the likeliest to be asked for again.
void SpareFiles::shrink() {
  while ((kept_bytes_ > limit_bytes_ || ready_.size() >= kMostFiles) && !ready_.empty()) {
    File oldest{std::move(ready_.front()), false};
    ready_.pop_front();
    kept_bytes_ -= oldest.file->bytes();
    push(std::move(oldest));
  }
}

void SpareFiles::give(std::shared_ptr<SharedFile> file) {
  const bool ours = file.use_count() == 1 && is_ours_alone(file->number());
  base::MutexLock lock(mutex_);
  const bool keep = ours && file->bytes() <= limit_bytes_;
  if (keep) {
    kept_bytes_ += file->bytes();
    shrink();
  }
  push({std::move(file), keep});
}

void SpareFiles::limit(uint64_t bytes) {
  base::MutexLock lock(mutex_);
  limit_bytes_ = bytes;
  shrink();
}

void SpareFiles::work() {
  base::MutexLock lock(mutex_);
  for (;;) {
    while (to_do_.empty() && !stop_) came_.wait(mutex_);
    if (stop_) return;
    File next = std::move(to_do_.front());
    to_do_.pop_front();
    const bool keep = next.keep && kept_bytes_ <= limit_bytes_;
    const uint64_t bytes = next.file->bytes();
    lock.unlock();
    if (keep)
      std::memset(next.file->pages(), 0, bytes);
    else
      next.file.reset();
    lock.lock();
    try {
      if (keep) {
        shrink();
        ready_.push_back(std::move(next.file));
        continue;
      }
    } catch (const std::bad_alloc&) {  // no memory to keep it
    }
    if (next.keep) kept_bytes_ -= bytes;
  }
}

}  // namespace gpushare::device
