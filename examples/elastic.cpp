// A model server and a training share a device without a fixed split. The server's KV cache and the training's
// activation buffers are elastic ranges: when requests pile up, the cache grows in memory that the training gives back
// at the end of its step; when they are done, the training takes it again and computes larger batches. Host device.
//
//   example_elastic [FILE]   FILE: bytes over time as CSV, for elastic_picture.py
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <gpushare/gpushare.hpp>
#include <mutex>
#include <thread>
#include <vector>

namespace gs = gpushare;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kCapacity = 128 * kMiB, kPart = 4 * kMiB;

unsigned char* bytes_at(gs::Address address) {
  return reinterpret_cast<unsigned char*>(address);
}

// Opportunistic: steps with as many buffers as there are. Bytes change hands between steps.
class Training {
 public:
  explicit Training(gs::Runtime& runtime) : session_(runtime.open_session(options())) {
    gs::Range::Params params;
    params.name = "activations";
    params.reserved_bytes = kCapacity;
    params.give_back = [this](uint64_t bytes, gs::Nanoseconds within) { return give_back(bytes, within); };
    params.answer = 500ms;
    range_ = gs::Range(session_, std::move(params));
    base_ = range_.info().address;
  }
  void run(const std::atomic<bool>& stop) {
    while (!stop) {
      {
        gs::Iteration step = session_.begin_iteration();
        for (uint64_t i = 0; i < parts_; ++i)
          std::memset(bytes_at(base_ + i * kPart), static_cast<int>(steps), kPart);
        std::this_thread::sleep_for(2ms);
      }
      ++steps;
      samples += 1 + parts_;
      const std::lock_guard lock(mutex_);
      if (asked_parts_ > 0) {
        const uint64_t gives = asked_parts_ < parts_ ? asked_parts_ : parts_.load();
        parts_ -= gives;
        range_.decommit(parts_ * kPart, gives * kPart);
        given_ = gives * kPart;
        asked_parts_ = 0;
        gave_.notify_all();
      } else if (parts_ < kCapacity / kPart &&
                 gpushare_range_commit(range_.get(), parts_ * kPart, kPart, 0) == GPUSHARE_OK) {
        ++parts_;  // there was room, and nobody waits for it
      }
    }
  }
  uint64_t committed() const { return parts_ * kPart; }
  std::atomic<uint64_t> steps{0}, samples{0};

 private:
  static gs::SessionOptions options() {
    gs::SessionOptions out;
    out.name = "training";
    out.cls = gs::opportunistic;
    out.ephemeral_bytes = kPart;
    return out;
  }
  uint64_t give_back(uint64_t bytes, gs::Nanoseconds within) {
    std::unique_lock lock(mutex_);
    asked_parts_ = (bytes + kPart - 1) / kPart;
    given_ = 0;
    gave_.wait_for(lock, within, [this] { return asked_parts_ == 0; });
    return given_;
  }

  gs::Session session_;
  std::mutex mutex_;
  std::condition_variable gave_;
  std::atomic<uint64_t> parts_{0};
  uint64_t asked_parts_ = 0, given_ = 0;
  gs::Range range_;  // last: its function uses what is above
  gs::Address base_ = 0;
};

// Guaranteed: each request holds a part of the cache while it is decoded, and checks that it keeps its content.
class Server {
 public:
  explicit Server(gs::Runtime& runtime) : session_(runtime.open_session(options())) {
    gs::Range::Params params;
    params.name = "kv cache";
    params.reserved_bytes = kCapacity;
    range_ = gs::Range(session_, std::move(params));
    base_ = range_.info().address;
    held_.assign(kCapacity / kPart, false);
  }
  void request(Clock::duration lasts) {
    uint64_t part = 0;
    {
      const std::lock_guard lock(mutex_);
      while (part < held_.size() && held_[part]) ++part;
      if (part == held_.size()) {
        ++refused;
        return;
      }
      held_[part] = true;
    }
    range_.commit(part * kPart, kPart, 5s);
    committed += kPart;
    const auto value = static_cast<unsigned char>(17 + part);
    std::memset(bytes_at(base_ + part * kPart), value, kPart);
    std::this_thread::sleep_for(lasts);
    for (uint64_t at = 0; at < kPart; at += 4096)
      if (bytes_at(base_ + part * kPart)[at] != value) ++wrong;
    committed -= kPart;
    range_.decommit(part * kPart, kPart);
    ++served;
    const std::lock_guard lock(mutex_);
    held_[part] = false;
  }
  gpushare_range_info info() const { return range_.info(); }
  std::atomic<uint64_t> committed{0}, served{0}, refused{0}, wrong{0};

 private:
  static gs::SessionOptions options() {
    gs::SessionOptions out;
    out.name = "server";
    out.ephemeral_bytes = kPart;
    return out;
  }
  gs::Session session_;
  std::mutex mutex_;
  std::vector<bool> held_;
  gs::Range range_;
  gs::Address base_ = 0;
};

}  // namespace

int main(int argc, char** argv) try {
  gs::RuntimeOptions options;
  options.device = "host";
  options.capacity_bytes = kCapacity;
  gs::Runtime runtime = gs::Runtime::open(options);
  Training training(runtime);
  Server server(runtime);
  std::atomic<bool> stop{false};
  std::thread trains([&] { training.run(stop); });
  std::FILE* const file = argc > 1 ? std::fopen(argv[1], "w") : nullptr;
  if (file != nullptr) std::fputs("ms,training_bytes,kv_bytes,capacity_bytes\n", file);
  const auto start = Clock::now();
  std::vector<std::thread> requests;
  // Two waves of requests: arrivals every 12 ms, each decoded for 150 ms.
  for (int tick = 0; tick < 300; ++tick) {
    std::this_thread::sleep_until(start + tick * 4ms);
    const bool wave = (tick >= 60 && tick < 120) || (tick >= 180 && tick < 260);
    if (wave && tick % 3 == 0) requests.emplace_back([&server] { server.request(150ms); });
    if (file != nullptr)
      std::fprintf(file, "%.1f,%llu,%llu,%llu\n",
                   std::chrono::duration<double, std::milli>(Clock::now() - start).count(),
                   static_cast<unsigned long long>(training.committed()),
                   static_cast<unsigned long long>(server.committed),
                   static_cast<unsigned long long>(kCapacity));
  }
  for (std::thread& request : requests) request.join();
  stop = true;
  trains.join();
  if (file != nullptr) std::fclose(file);
  const gpushare_range_info info = server.info();
  std::printf(
      "%llu requests served, %llu refused; the cache peaked at %llu MiB; it waited %llu times, at most %.1f "
      "ms\n",
      static_cast<unsigned long long>(server.served), static_cast<unsigned long long>(server.refused),
      static_cast<unsigned long long>(info.peak_bytes / kMiB), static_cast<unsigned long long>(info.waits),
      static_cast<double>(info.longest_wait_ns) / 1e6);
  std::printf("%llu training steps, %llu samples\n", static_cast<unsigned long long>(training.steps),
              static_cast<unsigned long long>(training.samples));
  return server.wrong == 0 ? 0 : 1;
} catch (const gs::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
