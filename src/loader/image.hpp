// image.hpp: a model's layers in host memory, ready for transmission, and the cache that keeps them.
//
// An image is one address space of layers, each at a 256-byte boundary in execution order, laid over chunks
// of pinned host memory. A device block with the same layout can take any run of layers in one copy a chunk.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "base/service_thread.hpp"
#include "base/status.hpp"
#include "device/device.hpp"
#include "loader/profile.hpp"
#include "loader/safetensors.hpp"

namespace gpushare::loader {

inline constexpr uint64_t kLayerAlignmentBytes = 256;

struct Layer {
  std::string name;
  uint64_t offset_bytes = 0;  // in the image
  uint64_t bytes = 0;
};

// The available part of the host memory that this process may use: that of the machine or of the container
// (base/host_memory.hpp). 1 where the system does not tell.
double system_memory_available();

// How many chunks of released images a pool keeps for the next image, and for how long. Fresh memory costs a page fault for
// every page, and a call of the driver where it is pinned; a kept chunk costs neither.
struct KeepOptions {
  uint64_t bytes = UINT64_MAX;   // upper limit of what is kept
  uint64_t ns = 10'000'000'000;  // a chunk that was unused for this time goes back; UINT64_MAX: never
  double (*available_share)() = &system_memory_available;  // tests give another function
};

// Pinned host chunks of one size, recycled. Thread-safe. Must outlive its images; the device must outlive it,
// or shut() must be called before the device goes.
//
// A thread, started when the first chunk is kept, gives chunks back: chunks that were unused for KeepOptions::ns, and all
// chunks while the system has less than kShortShare of its memory available.
class ChunkPool {
 public:
  static constexpr double kShortShare = 1.0 / 16;

  ChunkPool(device::Device& device, uint64_t chunk_bytes, KeepOptions keep = {})
      : device_(device), chunk_bytes_(chunk_bytes), keep_(keep) {}
  ~ChunkPool();
  ChunkPool(const ChunkPool&) = delete;
  ChunkPool& operator=(const ChunkPool&) = delete;
  device::Device& device() const { return device_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  const KeepOptions& keep() const { return keep_; }
  // Bytes of the chunks that no image has.
  uint64_t kept_bytes() const;
  // The chunk's bytes are undefined: zeroes, or those of an earlier image. Errors: HOST_OUT_OF_MEMORY.
  base::Result<char*> take();
  // Does not call the device, so an image may be released on a thread of the device.
  void give(char* chunk);
  // A chunk until the end of a scope.
  class Lent {
   public:
    Lent(ChunkPool& pool, char* chunk) : pool_(&pool), chunk_(chunk) {}
    Lent(Lent&& from) noexcept : pool_(from.pool_), chunk_(std::exchange(from.chunk_, nullptr)) {}
    Lent& operator=(Lent&&) = delete;
    ~Lent() {
      if (chunk_ != nullptr) pool_->give(chunk_);
    }
    std::span<char> bytes() const { return {chunk_, pool_->chunk_bytes()}; }

   private:
    ChunkPool* pool_;
    char* chunk_;
  };
  base::Result<Lent> lend() {
    GPUSHARE_ASSIGN_OR_RETURN(char* const chunk, take());
    return Lent(*this, chunk);
  }
  // Returns unused chunks to the system.
  void trim();
  // From now on take() fails with INVALID_STATE and reading into chunks stops at the next read.
  void stop() { stopped_.store(true); }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }
  // Returns all chunks to the system, also those of images, which keep their layout but no bytes. Call stop() first, and
  // wait for threads that read or fill images.
  void shut();

 private:
  struct Kept {
    char* chunk;
    uint64_t since_ns;  // base::host_now_ns()
  };
  void run();
  void end_thread();
  // Chunks that have to go now, the oldest first. They do not belong to the pool any more.
  std::vector<char*> take_due(bool memory_is_short, uint64_t now_ns) GPUSHARE_REQUIRES(mutex_);
  std::vector<char*> take_oldest(size_t count) GPUSHARE_REQUIRES(mutex_);

  device::Device& device_;
  const uint64_t chunk_bytes_;
  const KeepOptions keep_;
  std::atomic<bool> stopped_{false};
  mutable base::Mutex mutex_;
  base::ConditionVariable changed_;
  std::vector<Kept> kept_
      GPUSHARE_GUARDED_BY(mutex_);  // the longest unused first; the last one is taken first
  std::vector<char*> all_ GPUSHARE_GUARDED_BY(mutex_);
  bool shut_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool thread_started_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool thread_waits_ GPUSHARE_GUARDED_BY(mutex_) = false;  // for a first chunk to be kept
  bool end_thread_ GPUSHARE_GUARDED_BY(mutex_) = false;
  base::ServiceThread thread_ GPUSHARE_GUARDED_BY(mutex_);
};

// Immutable once loaded; shared by reference. Gives its chunks back when the last reference goes.
class Image {
 public:
  // Lays `layers` out (offsets are set here) over fresh chunks; the bytes are for the caller to fill through
  // pieces(). `lead_bytes` below 4 KiB: where in the first chunk the layout should begin. Direct reads need a file's bytes
  // at a place in memory of the same alignment as in the file. It is 0 if a further chunk would be needed for it.
  static base::Result<std::shared_ptr<Image>> create(ChunkPool& pool, std::string name,
                                                     std::vector<Layer> layers,
                                                     std::vector<Source> sources = {},
                                                     uint64_t lead_bytes = 0);
  ~Image();
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  const std::string& name() const { return name_; }
  std::span<const Layer> layers() const { return layers_; }
  // The files from which it was read; none if it was made from memory.
  std::span<const Source> sources() const { return sources_; }
  uint64_t bytes() const { return bytes_; }  // layout's end, padding included
  // The host memory that it takes, in whole chunks.
  uint64_t held_bytes() const { return chunks_.size() * pool_.chunk_bytes(); }
  bool is_of(const ChunkPool& pool) const { return &pool_ == &pool; }
  // Measured execution times of the image's layers, for planning its transmission.
  Profile& profile() const { return profile_; }
  // Bytes that a device block needs for layers [first, end): from the offset of the first layer to the end of
  // the last.
  uint64_t begin_of(size_t first) const { return layers_[first].offset_bytes; }
  uint64_t end_of(size_t last) const { return layers_[last].offset_bytes + layers_[last].bytes; }

  struct Piece {
    char* host;
    uint64_t offset_bytes;  // in the image
    uint64_t bytes;
  };
  // The contiguous host pieces of [offset, offset + bytes).
  std::vector<Piece> pieces(uint64_t offset_bytes, uint64_t bytes) const;

 private:
  Image(ChunkPool& pool, std::string name, std::vector<Layer> layers, std::vector<Source> sources);
  ChunkPool& pool_;
  std::string name_;
  std::vector<Layer> layers_;
  const std::vector<Source> sources_;
  mutable Profile profile_;
  std::vector<char*> chunks_;
  uint64_t lead_bytes_ = 0;  // the layout's start in the first chunk
  uint64_t bytes_ = 0;
};

// How file bytes are read into an image.
struct ReadOptions {
  uint32_t reads_in_flight = 4;      // 1 to 64
  uint64_t read_bytes = 8ull << 20;  // of each, 4 KiB to 1 GiB
  // kAuto: kBuffered where the page cache has the file, else kDirect or kBuffered, whichever is quicker in the first
  // reads. kMapped: a file that is truncated during the load ends the process (SIGBUS), so kAuto never chooses it.
  enum class Path : uint8_t { kBuffered, kDirect, kMapped, kAuto } path = Path::kBuffered;
  bool drop_page_cache = false;  // tell the system that the file's pages are not needed again
  std::vector<std::string>
      order;  // tensor names in execution order; empty = as `sort` says. Must name every tensor.
  // The order if `order` is empty: that of the bytes in the files, or the one that the names suggest (order.hpp).
  enum class Sort : uint8_t { kBytes, kNames } sort = Sort::kBytes;
  bool once = false;      // the cache forgets the image with its last user
  std::string checksums;  // path of a file with a CRC-32C a tensor (checksum.hpp), verified; empty = none
};

// INVALID_ARGUMENT naming what is out of range.
base::Status check_read_options(const ReadOptions& options);

// Reads a whole model (safetensors file or index). kDirect falls back to buffered reads where the file system
// refuses. Blocks on the disk. Errors: read_model's; IO_ERROR also when a file changed while it was read
// (nothing of it is kept); MALFORMED_INPUT for a tensor whose checksum differs or is not listed.
base::Result<std::shared_ptr<const Image>> load_image(ChunkPool& pool, const std::string& path,
                                                      const ReadOptions& options);

// Images by path and order, least recently used first out, never above limit_bytes (of whole chunks); images in
// use are not evicted. A model of which a file, index or shard, changed since (inode, time of modification, size) is loaded
// anew.
// Thread-safe; two callers of one path share one read.
class ImageCache {
 public:
  ImageCache(ChunkPool& pool, uint64_t limit_bytes, ReadOptions options)
      : pool_(pool), limit_bytes_(limit_bytes), options_(std::move(options)) {}
  // Errors: load_image's; HOST_OUT_OF_MEMORY when the image does not fit beside those in use (message has the
  // numbers).
  base::Result<std::shared_ptr<const Image>> get(const std::string& path) { return get(path, options_); }
  // As get() above, but a missing image is read with `options`. An image that all its users opened `once` leaves the
  // cache with the last of them, and its chunks go to the pool.
  base::Result<std::shared_ptr<const Image>> get(const std::string& path, const ReadOptions& options);
  // An image copied from the caller's memory, `sources[i]` being the bytes of layer i. The image counts against the
  // limit while it is held; get() does not find it. Errors: HOST_OUT_OF_MEMORY, INVALID_ARGUMENT.
  base::Result<std::shared_ptr<const Image>> create(std::string name, std::vector<Layer> layers,
                                                    std::span<const void* const> sources);
  uint64_t bytes() const;
  uint64_t limit_bytes() const { return limit_bytes_; }
  uint64_t images() const;
  uint64_t hits() const;
  uint64_t misses() const;
  // Forgets every image; images in use stay with their holders. No thread may be in get() or create().
  void clear();

 private:
  struct Entry {
    std::string key;                     // empty: made from memory, or the file on the disk has changed
    std::shared_ptr<const Image> image;  // null while it is being read
    uint64_t bytes = 0;                  // of the limit
    bool once = false;                   // goes with its last user
  };
  using Entries = std::list<Entry>;
  // Takes `bytes` the bytes of the limit that it takes for `entry`, evicting others.
  base::Status reserve(Entries::iterator entry, const std::string& name, uint64_t bytes)
      GPUSHARE_REQUIRES(mutex_);
  Entries::iterator erase(Entries::iterator entry) GPUSHARE_REQUIRES(mutex_);
  // The image for a user who opened it once. The cache outlives the user, who holds the loader.
  std::shared_ptr<const Image> lend(std::shared_ptr<const Image> image);
  void forget_unused(std::shared_ptr<const Image> image);
  base::Result<std::shared_ptr<const Image>> read(Entries::iterator entry, const std::string& path,
                                                  const ReadOptions& options);
  base::Result<std::shared_ptr<const Image>> fill(Entries::iterator entry, std::string name, uint64_t bytes,
                                                  std::vector<Layer> layers,
                                                  std::span<const void* const> sources);
  uint64_t chunked(uint64_t bytes) const;

  ChunkPool& pool_;
  const uint64_t limit_bytes_;
  const ReadOptions options_;
  mutable base::Mutex mutex_;
  base::ConditionVariable loaded_;
  Entries entries_ GPUSHARE_GUARDED_BY(mutex_);  // most recently used first
  uint64_t bytes_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t hits_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t misses_ GPUSHARE_GUARDED_BY(mutex_) = 0;
};

}  // namespace gpushare::loader
