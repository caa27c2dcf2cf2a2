// The cache of images: which images stay within the limit, and which threads wait for another's read.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <new>

#include "base/round_up.hpp"
#include "base/units.hpp"
#include "loader/file.hpp"
#include "loader/image.hpp"

namespace gpushare::loader {
namespace {

using base::round_up;

}  // namespace

uint64_t ImageCache::chunked(uint64_t bytes) const {
  return round_up(bytes, pool_.chunk_bytes());
}

ImageCache::Entries::iterator ImageCache::erase(Entries::iterator entry) {
  bytes_ -= entry->bytes;
  return entries_.erase(entry);
}

base::Status ImageCache::reserve(Entries::iterator entry, const std::string& name, uint64_t bytes) {
  // One reference is the cache's own: nobody can gain another without this lock.
  const auto unused = [](const Entry& of) { return of.image != nullptr && of.image.use_count() == 1; };
  for (auto other = entries_.begin(); other != entries_.end();)
    other = other->key.empty() && unused(*other) ? erase(other) : std::next(other);
  for (auto other = entries_.end(); bytes_ + bytes > limit_bytes_ && other != entries_.begin();) {
    --other;
    if (unused(*other)) other = erase(other);
  }
  if (bytes > limit_bytes_ || bytes_ > limit_bytes_ - bytes)
    return {GPUSHARE_HOST_OUT_OF_MEMORY, name + " needs " + base::format_bytes(bytes) +
                                             " of the image cache, which has " + base::format_bytes(bytes_) +
                                             " in use of " + base::format_bytes(limit_bytes_) +
                                             ". Release images, or raise the limit"};
  bytes_ += bytes;
  entry->bytes = bytes;
  return {};
}

base::Result<std::shared_ptr<const Image>> ImageCache::read(Entries::iterator entry, const std::string& path,
                                                            const ReadOptions& options) {
  try {
    GPUSHARE_ASSIGN_OR_RETURN(const ModelFiles model, read_model(path));
    {
      // Room before the read, so that the limit holds at every moment.
      base::MutexLock lock(mutex_);
      GPUSHARE_RETURN_IF_ERROR(
          reserve(entry, path, chunked(model.bytes + model.tensors.size() * kLayerAlignmentBytes)));
    }
    return load_image(pool_, path, options);
  } catch (const std::bad_alloc&) {
    return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY, base::format("no host memory to read %s", path.c_str()));
  }
}

std::shared_ptr<const Image> ImageCache::lend(std::shared_ptr<const Image> image) {
  const Image* const raw = image.get();
  return {raw, [this, image = std::move(image)](const Image*) mutable { forget_unused(std::move(image)); }};
}

void ImageCache::forget_unused(std::shared_ptr<const Image> image) {
  Entries gone;  // after the lock: an image gives its chunks back
  base::MutexLock lock(mutex_);
  const auto entry =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& each) { return each.image == image; });
  image.reset();
  if (entry == entries_.end() || !entry->once || entry->image.use_count() > 1) return;
  bytes_ -= entry->bytes;
  gone.splice(gone.begin(), entries_, entry);
  lock.unlock();
}

base::Result<std::shared_ptr<const Image>> ImageCache::get(const std::string& path,
                                                           const ReadOptions& options) {
  GPUSHARE_RETURN_IF_ERROR(File::open(path).status());  // the cache does not serve what one may not read
  std::string key = path + '\0' + options.checksums + '\0' +
                    (options.order.empty() && options.sort == ReadOptions::Sort::kNames ? 'n' : 'b');
  for (const std::string& name : options.order) key.append(1, '\0').append(name);
  base::MutexLock lock(mutex_);
  for (;;) {
    const auto found =
        std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.key == key; });
    if (found == entries_.end()) break;
    if (found->image == nullptr) {
      loaded_.wait(mutex_);
      continue;
    }
    const std::shared_ptr<const Image> image = found->image;
    lock.unlock();
    const bool same = check_unchanged(image->sources()).ok();
    lock.lock();
    const auto still = std::find_if(entries_.begin(), entries_.end(),
                                    [&](const Entry& entry) { return entry.image == image; });
    if (same) {
      ++hits_;
      const bool once = options.once && still != entries_.end() && still->once;
      if (still != entries_.end()) {
        still->once = once;  // a user who does not open it once wants it kept
        entries_.splice(entries_.begin(), entries_, still);
      }
      lock.unlock();
      return once ? lend(image) : image;
    }
    // The file was replaced. Users of the old image keep it, and the old image still counts in the limit.
    if (still != entries_.end()) still->key.clear();
  }
  ++misses_;
  entries_.push_front({key, nullptr, 0, options.once});
  const auto entry = entries_.begin();
  lock.unlock();
  base::Result<std::shared_ptr<const Image>> image = read(entry, path, options);
  lock.lock();
  if (image.ok()) {
    entry->image = *image;
    bytes_ -= entry->bytes;
    entry->bytes = (*image)->held_bytes();
    bytes_ += entry->bytes;
  } else {
    erase(entry);
  }
  loaded_.notify_all();
  lock.unlock();
  if (image.ok() && options.once) return lend(std::move(*image));
  return image;
}

base::Result<std::shared_ptr<const Image>> ImageCache::create(std::string name, std::vector<Layer> layers,
                                                              std::span<const void* const> sources) {
  if (layers.size() != sources.size())
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("%zu layers and %zu sources", layers.size(), sources.size()));
  uint64_t bytes = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].bytes > (1ull << 50))
      return base::Status(GPUSHARE_INVALID_ARGUMENT, "layer '" + layers[i].name + "' is larger than 1 PiB");
    if (sources[i] == nullptr && layers[i].bytes > 0)
      return base::Status(GPUSHARE_INVALID_ARGUMENT, "layer '" + layers[i].name + "' has no bytes: null");
    bytes = round_up(bytes, kLayerAlignmentBytes) + layers[i].bytes;
    if (bytes > (1ull << 50))
      return base::Status(GPUSHARE_INVALID_ARGUMENT, "image '" + name + "' is larger than 1 PiB");
  }
  Entries::iterator entry;
  {
    base::MutexLock lock(mutex_);
    entries_.push_front({});
    entry = entries_.begin();
  }
  base::Result<std::shared_ptr<const Image>> image =
      fill(entry, std::move(name), bytes, std::move(layers), sources);
  base::MutexLock lock(mutex_);
  if (image.ok())
    entry->image = *image;
  else
    erase(entry);
  return image;
}

base::Result<std::shared_ptr<const Image>> ImageCache::fill(Entries::iterator entry, std::string name,
                                                            uint64_t bytes, std::vector<Layer> layers,
                                                            std::span<const void* const> sources) {
  try {
    {
      base::MutexLock lock(mutex_);
      GPUSHARE_RETURN_IF_ERROR(reserve(entry, "image '" + name + "'", chunked(bytes)));
    }
    GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<Image> image,
                              Image::create(pool_, std::move(name), std::move(layers)));
    for (size_t i = 0; i < sources.size(); ++i) {
      const auto* from = static_cast<const char*>(sources[i]);
      for (const Image::Piece& piece : image->pieces(image->begin_of(i), image->layers()[i].bytes)) {
        std::memcpy(piece.host, from, piece.bytes);
        from += piece.bytes;
      }
    }
    return std::shared_ptr<const Image>(image);
  } catch (const std::bad_alloc&) {
    return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY, "no host memory for an image");
  }
}

uint64_t ImageCache::bytes() const {
  base::MutexLock lock(mutex_);
  return bytes_;
}

uint64_t ImageCache::images() const {
  base::MutexLock lock(mutex_);
  return entries_.size();
}

uint64_t ImageCache::hits() const {
  base::MutexLock lock(mutex_);
  return hits_;
}

uint64_t ImageCache::misses() const {
  base::MutexLock lock(mutex_);
  return misses_;
}

void ImageCache::clear() {
  Entries gone;
  base::MutexLock lock(mutex_);
  gone.swap(entries_);
  bytes_ = 0;
}

}  // namespace gpushare::loader
