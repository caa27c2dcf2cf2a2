// SPDX-License-Identifier: Apache-2.0
#include "loader/image.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>

#include "base/clock.hpp"
#include "base/host_memory.hpp"
#include "base/no_memory.hpp"
#include "base/no_signals.hpp"
#include "base/round_up.hpp"
#include "base/units.hpp"
#include "loader/checksum.hpp"
#include "loader/file.hpp"
#include "loader/order.hpp"

namespace gpushare::loader {
namespace {

constexpr uint64_t kDirectAlignment = 4096;
// kAuto: with so much of a file in the page cache, reading around it costs more than it saves.
constexpr double kCachedShare = 0.5;
// kAuto, cold: whether reads around the page cache pay depends on the disk and on who else uses it, so the first reads of a
// load go that way, as many through the cache, and the quicker way reads the rest. Loads of fewer reads than kTrialFrom
// would be over before that helps.
constexpr size_t kTrialReads = 8;
constexpr size_t kTrialFrom = 4 * kTrialReads;

using base::round_up;

// One read: file bytes to a place in the image.
struct Read {
  uint32_t file;
  uint64_t file_offset;
  char* host;
  uint64_t bytes;
};

std::vector<Read> plan_reads(const Image& image, std::span<const Tensor> tensors, uint64_t read_bytes) {
  // Neighbours in the file and in memory are one run, whatever tensors they belong to.
  std::vector<Read> runs;
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (const Image::Piece& piece : image.pieces(image.begin_of(i), tensors[i].bytes())) {
      const uint64_t at = tensors[i].file_begin + (piece.offset_bytes - image.begin_of(i));
      if (!runs.empty()) {
        Read& last = runs.back();
        if (last.file == tensors[i].file && last.file_offset + last.bytes == at &&
            last.host + last.bytes == piece.host) {
          last.bytes += piece.bytes;
          continue;
        }
      }
      runs.push_back({tensors[i].file, at, piece.host, piece.bytes});
    }
  }
  // Runs are cut where blocks of the file begin, so that only their ends are parts of blocks.
  std::vector<Read> reads;
  for (const Read& run : runs) {
    for (uint64_t done = 0; done < run.bytes;) {
      const uint64_t at = run.file_offset + done;
      uint64_t bytes = std::min(read_bytes, run.bytes - done);
      if (const uint64_t end = (at + bytes) / kDirectAlignment * kDirectAlignment;
          bytes < run.bytes - done && end > at)
        bytes = end - at;
      reads.push_back({run.file, at, run.host + done, bytes});
      done += bytes;
    }
  }
  return reads;
}

// Memory for direct reads of whole blocks of which only a part is wanted. Its pages stay from read to read.
class Bounce {
 public:
  // Throws std::bad_alloc.
  char* at_least(uint64_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      bytes_ = 0;
      memory_.reset(static_cast<char*>(std::aligned_alloc(kDirectAlignment, bytes)));
      if (memory_ == nullptr) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  uint64_t bytes_ = 0;
};

// Reads the whole blocks around `read` into the bounce buffer and copies the wanted part out.
base::Status read_around(const File& direct, const File& buffered, const Read& read, Bounce& bounce) {
  if (read.bytes == 0) return {};
  const uint64_t begin = read.file_offset / kDirectAlignment * kDirectAlignment;
  const uint64_t end = round_up(read.file_offset + read.bytes, kDirectAlignment);
  // The last block of a file is usually partial: that one is read through the page cache.
  if (end > direct.size()) return buffered.read_at(read.file_offset, read.host, read.bytes);
  char* const blocks = bounce.at_least(end - begin);
  GPUSHARE_RETURN_IF_ERROR(direct.read_at(begin, blocks, end - begin));
  std::memcpy(read.host, blocks + (read.file_offset - begin), read.bytes);
  return {};
}

// Direct reads need aligned offsets, sizes and buffers. Where the bytes lie in memory as they lie in the file, whole blocks go
// straight to their place, and only the two ends take the way through the bounce buffer.
base::Status read_direct(const File& direct, const File& buffered, const Read& read, Bounce& bounce) {
  const uint64_t first = round_up(read.file_offset, kDirectAlignment);
  const uint64_t last = (read.file_offset + read.bytes) / kDirectAlignment * kDirectAlignment;
  if (first >= last || (reinterpret_cast<uintptr_t>(read.host) - read.file_offset) % kDirectAlignment != 0)
    return read_around(direct, buffered, read, bounce);
  const auto part = [&](uint64_t begin, uint64_t end) {
    return Read{read.file, begin, read.host + (begin - read.file_offset), end - begin};
  };
  GPUSHARE_RETURN_IF_ERROR(read_around(direct, buffered, part(read.file_offset, first), bounce));
  GPUSHARE_RETURN_IF_ERROR(direct.read_at(first, part(first, last).host, last - first));
  return read_around(direct, buffered, part(last, read.file_offset + read.bytes), bounce);
}

class Mapping {
 public:
  Mapping(const File& file) : bytes_(file.size()) {
    if (bytes_ > 0) data_ = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file.descriptor(), 0);
    if (data_ != MAP_FAILED && bytes_ > 0) madvise(data_, bytes_, MADV_SEQUENTIAL);
  }
  Mapping(Mapping&& other) noexcept : data_(std::exchange(other.data_, MAP_FAILED)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() {
    if (data_ != MAP_FAILED) munmap(data_, bytes_);
  }
  const char* data() const { return data_ == MAP_FAILED ? nullptr : static_cast<const char*>(data_); }

 private:
  void* data_ = MAP_FAILED;
  size_t bytes_;
};

// Puts the tensors into the order asked for. Errors: INVALID_ARGUMENT naming a tensor that is missing,
// unknown, or there twice.
base::Status reorder(const std::vector<std::string>& order, const std::string& path,
                     std::vector<Tensor>* tensors) {
  std::unordered_map<std::string, size_t> place;
  for (size_t i = 0; i < order.size(); ++i)
    if (!place.emplace(order[i], i).second)
      return {GPUSHARE_INVALID_ARGUMENT, "the order names tensor '" + order[i] + "' twice"};
  std::vector<Tensor> sorted(order.size());
  for (Tensor& tensor : *tensors) {
    const auto found = place.find(tensor.name);
    if (found == place.end())
      return {GPUSHARE_INVALID_ARGUMENT, "the order does not name tensor '" + tensor.name + "' of " + path};
    sorted[found->second] = std::move(tensor);
  }
  if (tensors->size() != order.size())
    for (size_t i = 0; i < order.size(); ++i)
      if (sorted[i].name.empty())
        return {GPUSHARE_INVALID_ARGUMENT, path + " has no tensor '" + order[i] + "'"};
  *tensors = std::move(sorted);
  return {};
}

void sort_by_names(std::vector<Tensor>* tensors) {
  std::vector<std::string_view> names;
  for (const Tensor& tensor : *tensors) names.push_back(tensor.name);
  std::vector<Tensor> sorted;
  sorted.reserve(names.size());
  for (const size_t i : order_by_name(names)) sorted.push_back((*tensors)[i]);
  *tensors = std::move(sorted);
}

// Which of two ways reads faster, by the median time a byte of the first reads of each.
class Trial {
 public:
  bool direct(size_t index) const {
    return index < kTrialReads ||
           (index >= 2 * kTrialReads && !buffered_wins_.load(std::memory_order_relaxed));
  }
  void took(size_t index, uint64_t bytes, uint64_t ns) {
    if (index >= 2 * kTrialReads || bytes == 0) return;
    base::MutexLock lock(mutex_);
    const bool buffered = index >= kTrialReads;
    ns_a_byte_[buffered][counts_[buffered]++] = static_cast<double>(ns) / static_cast<double>(bytes);
    if (counts_[0] + counts_[1] < 2 * kTrialReads) return;
    for (auto& times : ns_a_byte_) std::sort(times.begin(), times.end());
    buffered_wins_ = ns_a_byte_[1][kTrialReads / 2] < ns_a_byte_[0][kTrialReads / 2];
  }

 private:
  base::Mutex mutex_;
  std::array<std::array<double, kTrialReads>, 2> ns_a_byte_ GPUSHARE_GUARDED_BY(mutex_){};
  std::array<size_t, 2> counts_ GPUSHARE_GUARDED_BY(mutex_){};
  std::atomic<bool> buffered_wins_{false};
};

// All reads of a model, spread over reads_in_flight threads; the first error stops the others.
class Reader {
 public:
  Reader(const ChunkPool& pool, const ReadOptions& options, std::vector<Read> reads,
         std::span<const Source> sources)
      : pool_(pool), options_(options), reads_(std::move(reads)), sources_(sources) {}

  base::Status open(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
      GPUSHARE_ASSIGN_OR_RETURN(File file, File::open(path));
      if (options_.path == ReadOptions::Path::kMapped) {
        mappings_.emplace_back(file);
        if (file.size() > 0 && mappings_.back().data() == nullptr)
          return {GPUSHARE_IO_ERROR, "cannot map " + path + ": " + std::strerror(errno), errno};
      }
      bool direct = options_.path == ReadOptions::Path::kDirect;
      if (options_.path == ReadOptions::Path::kAuto) direct = file.cached_share() < kCachedShare;
      if (direct) {
        base::Result<File> opened = File::open(path, File::Mode::kDirect);
        if (opened.ok())
          direct_.emplace(files_.size(), std::move(*opened));
        else if (opened.status().code() != GPUSHARE_UNSUPPORTED)
          return opened.status();
      }
      files_.push_back(std::move(file));
    }
    if (options_.path == ReadOptions::Path::kAuto && direct_.size() == files_.size() &&
        reads_.size() >= kTrialFrom)
      trial_.emplace();
    return {};
  }

  base::Status run() {
    std::vector<std::thread> helpers;
    const size_t threads = std::min<size_t>(options_.reads_in_flight, std::max<size_t>(1, reads_.size()));
    helpers.reserve(threads);
    try {
      const base::NoSignals no_signals;
      for (size_t i = 1; i < threads; ++i) helpers.emplace_back([this] { work(); });
    } catch (const std::exception&) {
      // Fewer threads read as well, only slower.
    }
    work();
    for (std::thread& helper : helpers) helper.join();
    {
      base::MutexLock lock(mutex_);
      if (!error_.ok()) return error_;
    }
    // Since before their headers were read: what those say of a file that was replaced is wrong of the new one.
    GPUSHARE_RETURN_IF_ERROR(check_unchanged(sources_));
    if (options_.drop_page_cache)
      for (const File& file : files_) posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED);
    return {};
  }

 private:
  void work() {
    Bounce bounce;
    for (;;) {
      const size_t index = next_.fetch_add(1, std::memory_order_relaxed);
      if (index >= reads_.size()) return;
      base::Status status;
      try {
        status =
            pool_.stopped()
                ? base::Status(GPUSHARE_INVALID_STATE,
                               "the runtime closed while " + files_[reads_[index].file].path() + " was read")
                : timed(index, bounce);
      } catch (const std::bad_alloc&) {
        status = base::no_memory();
      }
      if (status.ok()) continue;
      next_.store(reads_.size(), std::memory_order_relaxed);
      base::MutexLock lock(mutex_);
      if (error_.ok()) error_ = status;
      return;
    }
  }
  base::Status timed(size_t index, Bounce& bounce) {
    if (!trial_) return one(reads_[index], true, bounce);
    const uint64_t begin_ns = base::host_now_ns();
    base::Status status = one(reads_[index], trial_->direct(index), bounce);
    trial_->took(index, reads_[index].bytes, base::host_now_ns() - begin_ns);
    return status;
  }
  base::Status one(const Read& read, bool may_be_direct, Bounce& bounce) {
    const File& file = files_[read.file];
    if (const auto direct = direct_.find(read.file); may_be_direct && direct != direct_.end())
      return read_direct(direct->second, file, read, bounce);
    if (options_.path == ReadOptions::Path::kMapped) {
      std::memcpy(read.host, mappings_[read.file].data() + read.file_offset, read.bytes);
      return {};
    }
    return file.read_at(read.file_offset, read.host, read.bytes);
  }

  const ChunkPool& pool_;
  const ReadOptions& options_;
  const std::vector<Read> reads_;
  const std::span<const Source> sources_;
  std::vector<File> files_;
  std::unordered_map<size_t, File> direct_;  // by index, those that are read so
  std::optional<Trial> trial_;
  std::vector<Mapping> mappings_;
  std::atomic<size_t> next_{0};
  base::Mutex mutex_;
  base::Status error_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace

base::Status check_read_options(const ReadOptions& options) {
  if (options.reads_in_flight < 1 || options.reads_in_flight > 64)
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("reads_in_flight is %u, allowed are 1 to 64", options.reads_in_flight)};
  if (options.read_bytes < 4096 || options.read_bytes > (1ull << 30))
    return {GPUSHARE_INVALID_ARGUMENT, base::format("read_bytes is %llu, allowed are 4096 to 2^30",
                                                    static_cast<unsigned long long>(options.read_bytes))};
  return {};
}

namespace {

// While chunks are kept, the pool looks so often whether the system's memory is short.
constexpr uint64_t kLookNs = 500'000'000;
constexpr uint64_t kLeastWaitNs = 1'000'000;

}  // namespace

double system_memory_available() {
  const base::HostMemory host = base::host_memory();
  if (host.total_bytes == UINT64_MAX || host.total_bytes == 0 || host.available_bytes == UINT64_MAX) return 1;
  return static_cast<double>(host.available_bytes) / static_cast<double>(host.total_bytes);
}

ChunkPool::~ChunkPool() {
  shut();
}

base::Result<char*> ChunkPool::take() {
  if (stopped()) return base::Status(GPUSHARE_INVALID_STATE, "the loader's runtime is closing");
  {
    base::MutexLock lock(mutex_);
    if (!kept_.empty()) {
      char* chunk = kept_.back().chunk;
      kept_.pop_back();
      return chunk;
    }
  }
  GPUSHARE_ASSIGN_OR_RETURN(void* made, device_.host_alloc(chunk_bytes_));
  char* const chunk = static_cast<char*>(made);
  base::MutexLock lock(mutex_);
  try {
    if (kept_.capacity() <= all_.size()) kept_.reserve(2 * all_.size() + 1);  // giving back must not fail
    all_.push_back(chunk);
  } catch (const std::bad_alloc&) {
    (void)device_.host_free(chunk);
    throw;
  }
  return chunk;
}

void ChunkPool::give(char* chunk) {
  base::MutexLock lock(mutex_);
  if (shut_) return;
  kept_.push_back({chunk, base::host_now_ns()});
  if (!thread_started_ && !end_thread_) {
    try {
      thread_ = base::ServiceThread([this] { run(); });
      thread_started_ = true;
    } catch (const std::exception&) {
      // No thread now: the next chunk that is given back tries again, and trim() and shut() need none.
    }
  }
  if (thread_waits_ || kept_.size() > keep_.bytes / chunk_bytes_) changed_.notify_one();
}

uint64_t ChunkPool::kept_bytes() const {
  base::MutexLock lock(mutex_);
  return kept_.size() * chunk_bytes_;
}

std::vector<char*> ChunkPool::take_oldest(size_t count) {
  std::vector<char*> out;
  out.reserve(count);
  for (size_t i = 0; i < count; ++i) out.push_back(kept_[i].chunk);
  kept_.erase(kept_.begin(), kept_.begin() + static_cast<ptrdiff_t>(count));
  std::sort(out.begin(), out.end());
  std::erase_if(all_, [&](char* chunk) { return std::binary_search(out.begin(), out.end(), chunk); });
  return out;
}

std::vector<char*> ChunkPool::take_due(bool memory_is_short, uint64_t now_ns) {
  if (memory_is_short) return take_oldest(kept_.size());
  const size_t most = static_cast<size_t>(keep_.bytes / chunk_bytes_);
  size_t due = kept_.size() > most ? kept_.size() - most : 0;
  while (due < kept_.size() && now_ns - kept_[due].since_ns >= keep_.ns) ++due;
  return take_oldest(due);
}

void ChunkPool::trim() {
  std::vector<char*> chunks;
  {
    base::MutexLock lock(mutex_);
    chunks = take_oldest(kept_.size());
  }
  for (char* chunk : chunks) (void)device_.host_free(chunk);
}

void ChunkPool::run() {
  prctl(PR_SET_NAME, "gpushare-chunks", 0, 0, 0);
  base::MutexLock lock(mutex_);
  while (!end_thread_) {
    if (kept_.empty()) {
      thread_waits_ = true;
      changed_.wait(mutex_);
      thread_waits_ = false;
      continue;
    }
    lock.unlock();
    const double share = keep_.available_share();
    lock.lock();
    std::vector<char*> due;
    try {
      due = take_due(share < kShortShare, base::host_now_ns());
    } catch (const std::bad_alloc&) {
      // Without memory nothing is freed now; the thread looks again soon.
    }
    if (!due.empty()) {
      lock.unlock();
      for (char* chunk : due) (void)device_.host_free(chunk);
      lock.lock();
      continue;
    }
    if (end_thread_ || kept_.empty()) continue;
    const uint64_t age_ns = base::host_now_ns() - kept_.front().since_ns;
    const uint64_t wait_ns = std::clamp(keep_.ns > age_ns ? keep_.ns - age_ns : 0, kLeastWaitNs, kLookNs);
    (void)changed_.wait_until(mutex_, std::chrono::steady_clock::now() + std::chrono::nanoseconds(wait_ns));
  }
}

void ChunkPool::end_thread() {
  base::ServiceThread thread;
  {
    base::MutexLock lock(mutex_);
    end_thread_ = true;
    changed_.notify_all();
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

void ChunkPool::shut() {
  end_thread();
  std::vector<char*> chunks;
  {
    base::MutexLock lock(mutex_);
    shut_ = true;
    kept_.clear();
    chunks.swap(all_);
  }
  for (char* chunk : chunks) (void)device_.host_free(chunk);
}

namespace {

std::vector<uint64_t> sizes_of(std::span<const Layer> layers) {
  std::vector<uint64_t> out;
  for (const Layer& layer : layers) out.push_back(layer.bytes);
  return out;
}

}  // namespace

Image::Image(ChunkPool& pool, std::string name, std::vector<Layer> layers, std::vector<Source> sources)
    : pool_(pool),
      name_(std::move(name)),
      layers_(std::move(layers)),
      sources_(std::move(sources)),
      profile_(sizes_of(layers_)) {}

base::Result<std::shared_ptr<Image>> Image::create(ChunkPool& pool, std::string name,
                                                   std::vector<Layer> layers, std::vector<Source> sources,
                                                   uint64_t lead_bytes) {
  std::shared_ptr<Image> image(new Image(pool, std::move(name), std::move(layers), std::move(sources)));
  for (Layer& layer : image->layers_) {
    layer.offset_bytes = round_up(image->bytes_, kLayerAlignmentBytes);
    if (layer.bytes > (1ull << 50) || layer.offset_bytes > (1ull << 50))
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          "image '" + image->name_ + "': larger than 1 PiB at layer '" + layer.name + "'");
    image->bytes_ = layer.offset_bytes + layer.bytes;
  }
  if (round_up(image->bytes_ + lead_bytes, pool.chunk_bytes()) == round_up(image->bytes_, pool.chunk_bytes()))
    image->lead_bytes_ = lead_bytes;
  // Whoever takes a chunk has a place for it, so that none is lost.
  image->chunks_.reserve(static_cast<size_t>((image->bytes_ + pool.chunk_bytes() - 1) / pool.chunk_bytes()));
  for (uint64_t have = 0; have < image->bytes_; have += pool.chunk_bytes()) {
    base::Result<char*> chunk = pool.take();
    if (!chunk.ok())
      return chunk.status().with_context("image '" + image->name_ + "' of " +
                                         base::format_bytes(image->bytes_));
    image->chunks_.push_back(*chunk);
  }
  // A copy of several layers takes the bytes between them along, and a chunk may have those of an earlier image there.
  for (size_t i = 1; i < image->layers_.size(); ++i) {
    const uint64_t end = image->end_of(i - 1);
    for (const Piece& gap : image->pieces(end, image->begin_of(i) - end)) std::memset(gap.host, 0, gap.bytes);
  }
  return image;
}

Image::~Image() {
  for (char* chunk : chunks_) pool_.give(chunk);
}

std::vector<Image::Piece> Image::pieces(uint64_t offset_bytes, uint64_t bytes) const {
  std::vector<Piece> out;
  while (bytes > 0) {
    const uint64_t at = lead_bytes_ + offset_bytes;
    const uint64_t within = at % pool_.chunk_bytes();
    const uint64_t step = std::min(bytes, pool_.chunk_bytes() - within);
    out.push_back({chunks_[at / pool_.chunk_bytes()] + within, offset_bytes, step});
    offset_bytes += step;
    bytes -= step;
  }
  return out;
}

namespace {

base::Status verify(const Image& image, const Checksums& checksums, const ReadOptions& options) {
  std::atomic<size_t> next{0};
  base::Mutex mutex;
  base::Status error;
  const auto check = [&] {
    for (size_t i = next++; i < image.layers().size(); i = next++) {
      const Layer& layer = image.layers()[i];
      uint32_t sum = 0;
      for (const Image::Piece& piece : image.pieces(layer.offset_bytes, layer.bytes))
        sum = crc32c(sum, piece.host, piece.bytes);
      const auto listed = checksums.find(layer.name);
      if (listed != checksums.end() && listed->second == sum) continue;
      base::MutexLock lock(mutex);
      error = {GPUSHARE_MALFORMED_INPUT,
               listed == checksums.end()
                   ? base::format("%s: tensor '%s' is not listed in %s", image.name().c_str(),
                                  layer.name.c_str(), options.checksums.c_str())
                   : base::format("%s: tensor '%s' has checksum %08x, %s lists %08x: the file is damaged, or "
                                  "the list is of another",
                                  image.name().c_str(), layer.name.c_str(), sum, options.checksums.c_str(),
                                  listed->second)};
      next = image.layers().size();
    }
  };
  const auto work = [&] {
    try {
      check();
    } catch (const std::bad_alloc&) {
      base::MutexLock lock(mutex);
      error = base::no_memory();
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(options.reads_in_flight);
  try {
    for (uint32_t i = 1; i < options.reads_in_flight; ++i) helpers.emplace_back(work);
  } catch (const std::exception&) {
    // Fewer threads verify as well, only slower.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  return error;
}

}  // namespace

base::Result<std::shared_ptr<const Image>> load_image(ChunkPool& pool, const std::string& path,
                                                      const ReadOptions& options) {
  GPUSHARE_RETURN_IF_ERROR(check_read_options(options));
  GPUSHARE_ASSIGN_OR_RETURN(ModelFiles model, read_model(path));
  if (!options.order.empty())
    GPUSHARE_RETURN_IF_ERROR(reorder(options.order, path, &model.tensors));
  else if (options.sort == ReadOptions::Sort::kNames)
    sort_by_names(&model.tensors);
  std::vector<Layer> layers;
  for (const Tensor& tensor : model.tensors) layers.push_back({tensor.name, 0, tensor.bytes()});
  const uint64_t lead_bytes = model.tensors.empty() ? 0 : model.tensors.front().file_begin % kDirectAlignment;
  GPUSHARE_ASSIGN_OR_RETURN(
      std::shared_ptr<Image> image,
      Image::create(pool, path, std::move(layers), std::move(model.sources), lead_bytes));
  Reader reader(pool, options, plan_reads(*image, model.tensors, options.read_bytes), image->sources());
  GPUSHARE_RETURN_IF_ERROR(reader.open(model.paths));
  GPUSHARE_RETURN_IF_ERROR(reader.run());
  if (!options.checksums.empty()) {
    GPUSHARE_ASSIGN_OR_RETURN(const Checksums checksums, read_checksums(options.checksums));
    GPUSHARE_RETURN_IF_ERROR(verify(*image, checksums, options));
  }
  return std::shared_ptr<const Image>(std::move(image));
}

}  // namespace gpushare::loader
