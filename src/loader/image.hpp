// image.hpp: a model's layers in host memory, ready for transmission, and the cache that keeps them.
//
// An image is one address space of layers, each at a 256-byte boundary in execution order, laid over chunks
// of pinned host memory. A device block with the same layout can take any run of layers in one copy a chunk.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "device/device.hpp"
#include "loader/safetensors.hpp"

namespace gpushare::loader {

inline constexpr uint64_t kLayerAlignmentBytes = 256;

struct Layer {
  std::string name;
  uint64_t offset_bytes = 0;  // in the image
  uint64_t bytes = 0;
};

// Pinned host chunks of one size, recycled. Thread-safe. Must outlive its images; the device must outlive it.
class ChunkPool {
 public:
  ChunkPool(device::Device& device, uint64_t chunk_bytes) : device_(device), chunk_bytes_(chunk_bytes) {}
  ~ChunkPool();
  ChunkPool(const ChunkPool&) = delete;
  ChunkPool& operator=(const ChunkPool&) = delete;
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  // Errors: HOST_OUT_OF_MEMORY.
  base::Result<char*> take();
  void give(char* chunk);
  // Returns unused chunks to the system.
  void trim();

 private:
  device::Device& device_;
  const uint64_t chunk_bytes_;
  base::Mutex mutex_;
  std::vector<char*> free_ GPUSHARE_GUARDED_BY(mutex_);
};

// Immutable once loaded; shared by reference. Gives its chunks back when the last reference goes.
class Image {
 public:
  // Lays `layers` out (offsets are set here) over fresh chunks; the bytes are for the caller to fill through
  // pieces().
  static base::Result<std::shared_ptr<Image>> create(ChunkPool& pool, std::string name,
                                                     std::vector<Layer> layers);
  ~Image();
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  const std::string& name() const { return name_; }
  std::span<const Layer> layers() const { return layers_; }
  uint64_t bytes() const { return bytes_; }  // layout's end, padding included
  // What a device block needs for layers [first, end): from the first one's offset to the last one's end.
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
  Image(ChunkPool& pool, std::string name, std::vector<Layer> layers)
      : pool_(pool), name_(std::move(name)), layers_(std::move(layers)) {}
  ChunkPool& pool_;
  std::string name_;
  std::vector<Layer> layers_;
  std::vector<char*> chunks_;
  uint64_t bytes_ = 0;
};

// How file bytes are read into an image.
struct ReadOptions {
  uint32_t reads_in_flight = 4;      // 1 to 64
  uint64_t read_bytes = 8ull << 20;  // of each, 4 KiB to 1 GiB
  enum class Path : uint8_t { kBuffered, kDirect, kMapped } path = Path::kBuffered;
  bool drop_page_cache = false;  // tell the system that the file's pages are not needed again
  std::vector<std::string>
      order;  // tensor names in execution order; empty = order in the files. Must name every tensor.
};

// Reads a whole model (safetensors file or index). kDirect falls back to buffered reads where the file system
// refuses. Blocks on the disk. Errors: read_model's; IO_ERROR also when a file changed while it was read
// (nothing of it is kept).
base::Result<std::shared_ptr<const Image>> load_image(ChunkPool& pool, const std::string& path,
                                                      const ReadOptions& options);

// Images by path, least recently used first out, never above limit_bytes; images in use are not evicted. A
// file that changed since (size, time of modification, inode) is loaded anew. Thread-safe; two callers of one
// path share one read.
class ImageCache {
 public:
  ImageCache(ChunkPool& pool, uint64_t limit_bytes, ReadOptions options)
      : pool_(pool), limit_bytes_(limit_bytes), options_(std::move(options)) {}
  // Errors: load_image's; HOST_OUT_OF_MEMORY when the image does not fit beside those in use (message has the
  // numbers).
  base::Result<std::shared_ptr<const Image>> get(const std::string& path);
  uint64_t bytes() const;
  uint64_t hits() const;
  uint64_t misses() const;

 private:
  struct Entry {
    std::string path;
    std::string version;
    std::shared_ptr<const Image> image;  // null while it is being read
  };
  void evict_for(uint64_t bytes) GPUSHARE_REQUIRES(mutex_);

  ChunkPool& pool_;
  const uint64_t limit_bytes_;
  const ReadOptions options_;
  mutable base::Mutex mutex_;
  base::ConditionVariable loaded_;
  std::list<Entry> entries_ GPUSHARE_GUARDED_BY(mutex_);  // most recently used first
  uint64_t bytes_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t hits_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t misses_ GPUSHARE_GUARDED_BY(mutex_) = 0;
};

}  // namespace gpushare::loader
