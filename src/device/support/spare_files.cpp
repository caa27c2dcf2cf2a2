// SPDX-License-Identifier: Apache-2.0
#include "device/support/spare_files.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <exception>
#include <new>

namespace gpushare::device {
namespace {

constexpr size_t kMostFiles = 16;  // descriptors are not plentiful

bool is_ours_alone(int file) {
  // Whoever opens the file while the lease holds makes the system send this signal; SIGURG is ignored by default.
  if (fcntl(file, F_SETSIG, SIGURG) != 0 || fcntl(file, F_SETLEASE, F_WRLCK) != 0) return false;
  return fcntl(file, F_SETLEASE, F_UNLCK) == 0;
}

bool write_zeros(int file, uint64_t bytes) {
  static constexpr std::array<char, 1 << 16> kZeros{};
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t wrote = pwrite(file, kZeros.data(), std::min<uint64_t>(kZeros.size(), bytes - done),
                                 static_cast<off_t>(done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    done += static_cast<uint64_t>(wrote);
  }
  return true;
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
  base::MutexLock lock(mutex_);
  for (const auto* files : {&to_do_, &ready_})
    for (const File& file : *files) close(file.number);
}

int SpareFiles::take(uint64_t bytes) {
  base::MutexLock lock(mutex_);
  const auto found =
      std::find_if(ready_.begin(), ready_.end(), [&](const File& file) { return file.bytes == bytes; });
  if (found == ready_.end()) return -1;
  const int number = found->number;
  ready_.erase(found);
  kept_bytes_ -= bytes;
  return number;
}

void SpareFiles::push(const File& file) {
  try {
    if (!thread_.joinable() && !stop_) thread_ = std::thread([this] { work(); });
    to_do_.push_back(file);
  } catch (const std::exception&) {
    // Without a thread, or memory to remember the file, nothing is kept.
    if (file.keep) kept_bytes_ -= file.bytes;
    close(file.number);
    return;
  }
  came_.notify_one();
}

// Down to the limit; the oldest first, as the newest are the likeliest to be asked for again.
void SpareFiles::shrink() {
  while ((kept_bytes_ > limit_bytes_ || ready_.size() >= kMostFiles) && !ready_.empty()) {
    const File oldest = ready_.front();
    ready_.pop_front();
    kept_bytes_ -= oldest.bytes;
    push({oldest.number, oldest.bytes, false});
  }
}

void SpareFiles::give(int number, uint64_t bytes) {
  const bool ours = is_ours_alone(number);
  base::MutexLock lock(mutex_);
  const bool keep = ours && bytes <= limit_bytes_;
  if (keep) {
    kept_bytes_ += bytes;
    shrink();
  }
  push({number, bytes, keep});
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
    File file = to_do_.front();
    to_do_.pop_front();
    const bool keep = file.keep && kept_bytes_ <= limit_bytes_;
    lock.unlock();
    const bool zeroed = keep && write_zeros(file.number, file.bytes);
    if (!zeroed) close(file.number);
    lock.lock();
    try {
      if (zeroed) {
        shrink();
        ready_.push_back(file);
        continue;
      }
    } catch (const std::bad_alloc&) {
      close(file.number);  // no memory to keep it
    }
    if (file.keep) kept_bytes_ -= file.bytes;
  }
}

}  // namespace gpushare::device
