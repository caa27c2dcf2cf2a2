// loader.hpp: brings models from files into sessions: images in host memory, and the link over which they are sent. An
// image loaded into a session is a Model (model.hpp). A Switcher (switcher.hpp) decides which session is active.
//
// The loader's own stream carries all copies, in the order of the loads: all copies share one link, and the
// first model's layers should not wait for the second's. The costs of the link are calibrated on demand, given,
// or assumed at first; every transmission above a minimum size corrects assumed costs. The scheduler is told of each new
// figure, because paging has its price by it.
//
// Threads: all methods from any thread. A loader keeps its runtime; when the runtime closes, models and images
// that are left answer INVALID_STATE.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "base/work_mutex.hpp"
#include "executor/runtime.hpp"
#include "loader/image.hpp"
#include "loader/transmission.hpp"

namespace gpushare::loader {

struct LoaderOptions {
  uint64_t limit_bytes = UINT64_MAX;  // of host memory for images
  uint64_t chunk_bytes = 16ull << 20;
  KeepOptions keep;  // chunks of released images; together with the images never more than limit_bytes
  ReadOptions read;
  LinkCosts link;  // bytes_per_ms of 0: not known
};

class Model;

struct LoadOptions {
  std::vector<uint32_t> ends;        // the caller's grouping; empty: it is planned
  std::vector<double> execution_ms;  // the time of each layer, for the plan; empty: as in the image's profile
  GroupCallback on_group;            // may throw; must not wait for the runtime
  bool profile = true;               // learn execution times from make_usable (model.hpp)
  // Result of an earlier load_prefix() of the same image. Its layers are copied from device memory instead of
  // the host; the transmission plan accounts for that. If the prefix is not on the device any more, or its
  // copies failed, all layers come from the image.
  std::shared_ptr<Model> prefix;
};

class Loader final : public executor::Dependent, public std::enable_shared_from_this<Loader> {
 public:
  // 12 GB/s, 10 us a call, 20 us a group: PCIe 3, before anything is measured.
  static constexpr LinkCosts kAssumedLink{0.010, 12e6, 0.020};
  // Nothing about bandwidth is learned from a transmission of fewer bytes.
  static constexpr uint64_t kTeachingBytes = 4ull << 20;

  // Errors: INVALID_ARGUMENT (chunk_bytes not a power of two from 64 KiB to 1 GiB), INVALID_STATE (the runtime is
  // closed), the device's.
  static base::Result<std::shared_ptr<Loader>> open(std::shared_ptr<executor::Runtime> runtime,
                                                    LoaderOptions options);
  Loader(std::shared_ptr<executor::Runtime> runtime, LoaderOptions options);
  ~Loader() override;

  // As ImageCache::get and create. Blocks on the disk.
  base::Result<std::shared_ptr<const Image>> open_image(const std::string& path, const ReadOptions& options);
  base::Result<std::shared_ptr<const Image>> create_image(std::string name, std::vector<Layer> layers,
                                                          std::span<const void* const> sources);
  const ReadOptions& read_options() const { return options_.read; }
  const ImageCache& images() const { return cache_; }
  const ChunkPool& chunks() const { return pool_; }

  // Allocates a block of kind model in `session` and enqueues the image's copies there. Returns at once if the
  // session is resident; waits for admission or page-in otherwise. Errors: Session::alloc's;
  // INVALID_ARGUMENT (a session of another runtime, an image of another loader, ends that are no grouping); the
  // device's.
  base::Result<std::shared_ptr<Model>> load(const std::shared_ptr<executor::Session>& session,
                                            std::shared_ptr<const Image> image, LoadOptions options);

  // Loads only the first `layers`, to a block of kind model with room for just these. The returned model has no other
  // layers. Errors: as load.
  base::Result<std::shared_ptr<Model>> load_prefix(const std::shared_ptr<executor::Session>& session,
                                                   std::shared_ptr<const Image> image, uint32_t layers);

  // Measures the link in a session of its own, of 1 to 32 MiB. Blocks. Errors: DEVICE_OUT_OF_MEMORY (no room
  // for it: give the costs instead), the device's.
  base::Status calibrate();
  LinkCosts link() const;
  bool link_known() const;

  executor::Runtime& runtime() const { return *runtime_; }
  // True if this loader made the image. An image can be loaded only by the loader that made it.
  bool made(const Image& image) const { return image.is_of(pool_); }
  void runtime_closing() override;

 private:
  friend class Model;
  // Counts a call; fails when the runtime closes. The runtime waits for the counted calls.
  class Use {
   public:
    explicit Use(Loader& loader);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    explicit operator bool() const { return entered_; }

   private:
    Loader& loader_;
    bool entered_;
  };
  static base::Status closed();
  base::Result<LinkCosts> measure_link(executor::Session& session, uint64_t bytes);
  base::Result<std::shared_ptr<executor::Stream>> copy_stream();
  // The first `layers` of an image on their way to the block at `address` of `session`.
  struct Delivery {
    executor::Session& session;
    memory::Address address;
    const std::shared_ptr<const Image>& image;
    uint32_t layers;
    const LoadOptions& options;
  };
  // Allocates a block for the first `layers` and enqueues their copies.
  base::Result<std::shared_ptr<Model>> deliver(const std::shared_ptr<executor::Session>& session,
                                               const std::shared_ptr<const Image>& image, uint32_t layers,
                                               const LoadOptions& options);
  base::Result<std::shared_ptr<Model>> fill(const std::shared_ptr<executor::Session>& session,
                                            const Delivery& what);
  base::Result<std::unique_ptr<Transmission>> transmit(const Delivery& what);
  // Enqueues the copies on `stream`, in an order that is right for the block. `*out` may be set although it fails.
  base::Status enqueue(const Delivery& what, const executor::Stream& stream,
                       std::unique_ptr<Transmission>* out);
  // Replaces a stream that has failed, because it stays failed.
  void replace_if_failed(const std::shared_ptr<executor::Stream>& stream);
  base::Status check(const executor::Session& session, const Image& image) const;
  base::Result<std::vector<uint32_t>> plan(const Image& image, const LoadOptions& options);
  std::shared_ptr<Model> adopt(const std::shared_ptr<executor::Session>& session, memory::Address address,
                               std::unique_ptr<Transmission> transmission, bool profile);
  // These count models, so that runtime_closing() can wait for those that other threads are destroying.
  void model_made();  // also makes room for its transmission in leaving_, so that retire() needs no memory
  void model_apart();
  // Takes the transmission of a model that was unloaded, and keeps it until its copies have finished.
  void retire(std::unique_ptr<Transmission> transmission) noexcept;
  void sweep();
  void learn(const Transmission& transmission);
  void tell_link() const;

  const std::shared_ptr<executor::Runtime> runtime_;
  const LoaderOptions options_;
  ChunkPool pool_;
  ImageCache cache_;
  mutable base::Mutex mutex_;
  base::ConditionVariable unused_;
  bool closed_ GPUSHARE_GUARDED_BY(mutex_) = false;
  uint32_t users_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t whole_models_ GPUSHARE_GUARDED_BY(mutex_) = 0;  // models that hold events of the device
  LinkCosts link_ GPUSHARE_GUARDED_BY(mutex_);
  bool link_known_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool link_given_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool device_copies_given_ GPUSHARE_GUARDED_BY(mutex_) = false;
  std::shared_ptr<executor::Stream> copies_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Transmission>> leaving_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<Model>> models_ GPUSHARE_GUARDED_BY(mutex_);
  base::WorkMutex enqueue_mutex_;  // the copies of one load together
};

}  // namespace gpushare::loader
