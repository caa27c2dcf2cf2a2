// SPDX-License-Identifier: Apache-2.0
#include "loader/loader.hpp"

#include <algorithm>
#include <exception>

#include "base/cancel.hpp"
#include "base/log.hpp"
#include "base/no_memory.hpp"
#include "base/units.hpp"
#include "base/without_throwing.hpp"
#include "loader/model.hpp"
#include "loader/opened_session.hpp"

namespace gpushare::loader {
namespace {

// A callback of the caller's, on a thread of the device: it may neither wait there nor fail the stream.
GroupCallback guarded(GroupCallback call) {
  if (!call) return {};
  return [call = std::move(call)](size_t group, uint32_t first, uint32_t end) GPUSHARE_CATCHES_FORCED_UNWIND {
    const executor::NoWaitScope scope;
    try {
      call(group, first, end);
    } catch (const std::exception& error) {
      base::log(base::kWarning, std::string("a group's callback threw: ") + error.what());
    } catch (const base::ForcedUnwind&) {
      throw;
    } catch (...) {
      base::log(base::kWarning, "a group's callback threw");
    }
  };
}

}  // namespace

Loader::Loader(std::shared_ptr<executor::Runtime> runtime, LoaderOptions options)
    : runtime_(std::move(runtime)),
      options_(std::move(options)),
      pool_(runtime_->device(), options_.chunk_bytes, options_.keep),
      cache_(pool_, options_.limit_bytes, options_.read),
      link_(options_.link.bytes_per_ms > 0 ? options_.link : kAssumedLink),
      link_known_(options_.link.bytes_per_ms > 0),
      link_given_(options_.link.bytes_per_ms > 0),
      device_copies_given_(options_.link.device_bytes_per_ms > 0) {}

base::Result<std::shared_ptr<Loader>> Loader::open(std::shared_ptr<executor::Runtime> runtime,
                                                   LoaderOptions options) {
  if (options.chunk_bytes < (64u << 10) || options.chunk_bytes > (1ull << 30) ||
      (options.chunk_bytes & (options.chunk_bytes - 1)) != 0)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("chunk_bytes is %llu; it must be a power of two from 64 KiB to 1 GiB",
                                     static_cast<unsigned long long>(options.chunk_bytes)));
  GPUSHARE_RETURN_IF_ERROR(check_read_options(options.read));
  // The last pointer may go inside a group's callback, on the thread of the copies: they cannot be waited for there.
  const std::shared_ptr<Loader> loader(new Loader(std::move(runtime), std::move(options)), [](Loader* last) {
    const std::shared_ptr<executor::Runtime> of = last->runtime_;
    std::unique_ptr<Loader> gone(last);
    if (executor::NoWaitScope::active()) of->destroy_later(std::move(gone));
  });
  base::Status attached = loader->runtime_->attach(loader);
  if (!attached.ok()) {
    base::MutexLock lock(loader->mutex_);
    loader->closed_ = true;  // nothing of the device is held
    return attached;
  }
  if (loader->link_known()) loader->tell_link();
  return loader;
}

Loader::~Loader() {
  base::without_throwing([this] { runtime_closing(); });
  detach();
}

Loader::Use::Use(Loader& loader) : loader_(loader) {
  base::MutexLock lock(loader_.mutex_);
  entered_ = !loader_.closed_;
  if (entered_) ++loader_.users_;
}

Loader::Use::~Use() {
  if (!entered_) return;
  base::MutexLock lock(loader_.mutex_);
  if (--loader_.users_ == 0) loader_.unused_.notify_all();
}

base::Status Loader::closed() {
  return {GPUSHARE_INVALID_STATE, "the loader's runtime is closed"};
}

void Loader::runtime_closing() {
  pool_.stop();
  std::vector<std::weak_ptr<Model>> models;
  {
    base::MutexLock lock(mutex_);
    const bool first = !closed_;
    closed_ = true;
    while (users_ > 0) unused_.wait(mutex_);
    if (!first) return;
    models.swap(models_);
  }
  for (const std::weak_ptr<Model>& weak : models)
    if (const auto model = weak.lock()) model->shut();
  {
    base::MutexLock lock(mutex_);  // those that other threads take apart
    while (whole_models_ > 0) unused_.wait(mutex_);
  }
  std::vector<std::unique_ptr<Transmission>> leaving;
  std::shared_ptr<executor::Stream> copies;
  {
    base::MutexLock lock(mutex_);
    leaving.swap(leaving_);
    copies.swap(copies_);
  }
  leaving.clear();  // waits for their copies
  if (copies != nullptr) base::without_throwing([&] { (void)copies->release(); });
  cache_.clear();
  pool_.shut();
}

base::Result<std::shared_ptr<const Image>> Loader::open_image(const std::string& path,
                                                              const ReadOptions& options) {
  const Use use(*this);
  if (!use) return closed();
  sweep();  // models that were unloaded meanwhile give their chunks back
  return cache_.get(path, options);
}

base::Result<std::shared_ptr<const Image>> Loader::create_image(std::string name, std::vector<Layer> layers,
                                                                std::span<const void* const> sources) {
  const Use use(*this);
  if (!use) return closed();
  sweep();
  return cache_.create(std::move(name), std::move(layers), sources);
}

base::Result<std::shared_ptr<executor::Stream>> Loader::copy_stream() {
  {
    base::MutexLock lock(mutex_);
    if (copies_ != nullptr) return copies_;
  }
  GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<executor::Stream> made, runtime_->create_stream(0));
  base::MutexLock lock(mutex_);
  if (copies_ == nullptr) copies_ = std::move(made);
  return copies_;
}

base::Result<std::unique_ptr<Transmission>> Loader::transmit(const Delivery& what) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<executor::Stream> stream, copy_stream());
  std::unique_ptr<Transmission> out;
  base::Status status = enqueue(what, *stream, &out);
  if (status.ok()) return out;
  out.reset();
  replace_if_failed(stream);
  return stream->checked(std::move(status));
}

base::Status Loader::enqueue(const Delivery& what, const executor::Stream& stream,
                             std::unique_ptr<Transmission>* out) {
  GPUSHARE_ASSIGN_OR_RETURN(const executor::HeldStream home, what.session.hold(GPUSHARE_NO_TIMEOUT));
  const base::WorkLock enqueuing(enqueue_mutex_);
  if (!enqueuing) return base::WorkLock::refused();
  GPUSHARE_ASSIGN_OR_RETURN(const executor::HeldStream copies, stream.hold());
  // A program may free any address, also one that it freed before and that the block has now.
  GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<const void> block, runtime_->pin(what.address));
  // The block's bytes were given out in the order of the session's stream, so work already enqueued there may still use them.
  GPUSHARE_ASSIGN_OR_RETURN(device::Event before, runtime_->device().create_event());
  GPUSHARE_RETURN_IF_ERROR(home->record(before));  // refused while the session's stream captures a graph
  GPUSHARE_RETURN_IF_ERROR(copies->wait(before));
  const LoadOptions& options = what.options;
  if (what.layers < what.image->layers().size()) {
    GPUSHARE_ASSIGN_OR_RETURN(
        *out, Transmission::start_prefix(runtime_->device(), *copies, what.image, what.address, what.layers));
  } else {
    const auto loan = options.prefix != nullptr
                          ? options.prefix->lend(*copies)
                          : base::Result<Model::Loan>(base::Status(GPUSHARE_NOT_FOUND, ""));
    std::shared_ptr<const void> source;
    if (loan.ok()) {
      GPUSHARE_ASSIGN_OR_RETURN(source, runtime_->pin(loan->prefix.copy));
    }
    GPUSHARE_ASSIGN_OR_RETURN(
        *out, Transmission::start(runtime_->device(), *copies, what.image, what.address, options.ends,
                                  loan.ok() ? loan->prefix : Prefix{}, guarded(options.on_group)));
    if (loan.ok())
      if (base::Status used = runtime_->record_use(loan->prefix.copy, stream); !used.ok()) {
        out->reset();
        return used;
      }
  }
  (*out)->hold(std::move(before));
  base::Status used = runtime_->record_use(what.address, stream);
  // Without the mark only the hold of the session's stream keeps its memory under the copies: they end before it is let go.
  if (!used.ok()) out->reset();
  return used;
}

void Loader::replace_if_failed(const std::shared_ptr<executor::Stream>& stream) {
  const auto state = [&]() -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const executor::HeldStream held, stream->hold());
    return held->query();
  }();
  if (state.ok() || state.code() == GPUSHARE_NOT_READY) return;
  base::MutexLock lock(mutex_);
  if (copies_ == stream) copies_.reset();
}

base::Status Loader::check(const executor::Session& session, const Image& image) const {
  if (session.runtime() != runtime_.get())
    return {GPUSHARE_INVALID_ARGUMENT,
            "session '" + session.name() + "' is of another runtime than the image"};
  if (!made(image)) return {GPUSHARE_INVALID_ARGUMENT, "image '" + image.name() + "' is of another loader"};
  if (image.layers().empty() || image.bytes() == 0)
    return {GPUSHARE_INVALID_ARGUMENT, "image '" + image.name() + "' has no bytes"};
  return {};
}

base::Result<std::vector<uint32_t>> Loader::plan(const Image& image, const LoadOptions& options) {
  const uint32_t resident = options.prefix == nullptr ? 0 : options.prefix->layers();
  const uint64_t copied_bytes = resident == 0 ? 0 : image.end_of(resident - 1);
  const LinkCosts costs = link();
  std::vector<uint32_t> ends;
  if (options.execution_ms.empty()) {
    GPUSHARE_ASSIGN_OR_RETURN(ends, image.profile().plan(costs, resident, copied_bytes));
  } else {
    GPUSHARE_ASSIGN_OR_RETURN(Grouping plan, plan_groups(layer_costs(image, costs, options.execution_ms),
                                                         costs.grouping(resident, copied_bytes)));
    ends = std::move(plan.ends);
  }
  if (resident > 0) ends.insert(ends.begin(), resident);
  return ends;
}

base::Result<std::shared_ptr<Model>> Loader::load(const std::shared_ptr<executor::Session>& session,
                                                  std::shared_ptr<const Image> image, LoadOptions options) {
  const Use use(*this);
  if (!use) return closed();
  GPUSHARE_RETURN_IF_ERROR(check(*session, *image));
  if (!options.execution_ms.empty() && options.execution_ms.size() != image->layers().size())
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        base::format("%zu execution times for the %zu layers of image '%s'", options.execution_ms.size(),
                     image->layers().size(), image->name().c_str()));
  if (options.prefix != nullptr && options.prefix->image() != image)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        "the prefix is of another image than '" + image->name() + "'");
  sweep();
  if (options.ends.empty()) {
    GPUSHARE_ASSIGN_OR_RETURN(options.ends, plan(*image, options));
  }
  return deliver(session, image, static_cast<uint32_t>(image->layers().size()), options);
}

base::Result<std::shared_ptr<Model>> Loader::deliver(const std::shared_ptr<executor::Session>& session,
                                                     const std::shared_ptr<const Image>& image,
                                                     uint32_t layers, const LoadOptions& options) {
  GPUSHARE_ASSIGN_OR_RETURN(
      const memory::Address address,
      session->alloc(memory::Kind::kModel, image->end_of(layers - 1), kLayerAlignmentBytes));
  base::Result<std::shared_ptr<Model>> model = base::no_memory();
  try {
    model = fill(session, {*session, address, image, layers, options});
  } catch (
      const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the block goes back, as after any failure
  }
  if (!model.ok()) (void)session->free(address);
  return model;
}

base::Result<std::shared_ptr<Model>> Loader::fill(const std::shared_ptr<executor::Session>& session,
                                                  const Delivery& what) {
  auto transmission = transmit(what);
  if (!transmission.ok())
    return transmission.status().with_context(base::format(
        "loading image '%s' into session '%s'", what.image->name().c_str(), session->name().c_str()));
  return adopt(session, what.address, std::move(*transmission), what.options.profile);
}

base::Result<std::shared_ptr<Model>> Loader::load_prefix(const std::shared_ptr<executor::Session>& session,
                                                         std::shared_ptr<const Image> image,
                                                         uint32_t layers) {
  const Use use(*this);
  if (!use) return closed();
  GPUSHARE_RETURN_IF_ERROR(check(*session, *image));
  if (layers == 0 || layers > image->layers().size() || image->end_of(layers - 1) == 0)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("image '%s' has no prefix of %u layers with bytes in it",
                                     image->name().c_str(), layers));
  LoadOptions options;
  options.profile = false;
  options.ends = {layers};
  return deliver(session, image, layers, options);
}

std::shared_ptr<Model> Loader::adopt(const std::shared_ptr<executor::Session>& session,
                                     memory::Address address, std::unique_ptr<Transmission> transmission,
                                     bool profile) {
  {
    base::MutexLock lock(mutex_);
    std::erase_if(models_, [](const auto& weak) { return weak.expired(); });
    // A model frees its block itself, so nothing may fail once there is one.
    models_.reserve(models_.size() + 1);
  }
  auto model =
      std::make_shared<Model>(shared_from_this(), session, std::move(transmission), address, profile);
  base::MutexLock lock(mutex_);
  models_.push_back(model);
  return model;
}

void Loader::model_made() {
  base::MutexLock lock(mutex_);
  const size_t may_leave = leaving_.size() + whole_models_ + 1;
  if (leaving_.capacity() < may_leave) leaving_.reserve(2 * may_leave);
  ++whole_models_;
}

void Loader::model_apart() {
  base::MutexLock lock(mutex_);
  if (--whole_models_ == 0) unused_.notify_all();
}

void Loader::retire(std::unique_ptr<Transmission> transmission) noexcept {
  if (transmission == nullptr) return;
  base::MutexLock lock(mutex_);
  // A transmission may retire while the runtime closes. Only the list grows here, because the caller may be the device's thread.
  leaving_.push_back(std::move(transmission));
}

void Loader::sweep() {
  std::vector<std::unique_ptr<Transmission>> gone;
  const base::QuietQueries quiet;
  base::MutexLock lock(mutex_);
  for (size_t i = 0; i < leaving_.size();) {
    const auto arrived = leaving_[i]->arrived(leaving_[i]->last_layer());
    if (arrived.ok() && !*arrived) {
      ++i;
      continue;
    }
    gone.push_back(std::move(leaving_[i]));
    leaving_.erase(leaving_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  lock.unlock();
}

void Loader::learn(const Transmission& transmission) {
  const auto took = transmission.arrived_ns(transmission.groups() - 1);
  if (!took.ok() || *took == 0) return;
  uint64_t link_ns = *took;
  // The layers copied from device memory were exactly the first group (see plan()).
  if (const uint64_t copied_bytes = transmission.copied_bytes(); copied_bytes > 0) {
    const auto copied = transmission.arrived_ns(0);
    if (!copied.ok() || *copied == 0 || *copied > *took ||
        transmission.image().end_of(transmission.group_ends()[0] - 1) != copied_bytes)
      return;
    link_ns -= *copied;
    base::MutexLock lock(mutex_);
    if (copied_bytes >= kTeachingBytes && !device_copies_given_) {
      const double seen = static_cast<double>(copied_bytes) / static_cast<double>(*copied) * 1e6;
      double& known = link_.device_bytes_per_ms;
      known = known > 0 ? known + Profile::kWeight * (seen - known) : seen;
    }
  }
  const uint64_t bytes = transmission.sent_bytes();
  if (bytes < kTeachingBytes || link_ns == 0) return;
  base::MutexLock lock(mutex_);
  if (link_given_) return;
  const double ms = std::max(static_cast<double>(link_ns) / 1e6 -
                                 link_.call_overhead_ms * static_cast<double>(transmission.copies()),
                             static_cast<double>(link_ns) / 2e6);
  const double seen = static_cast<double>(bytes) / ms;
  link_.bytes_per_ms =
      link_known_ ? link_.bytes_per_ms + Profile::kWeight * (seen - link_.bytes_per_ms) : seen;
  link_known_ = true;
  lock.unlock();
  tell_link();
}

void Loader::tell_link() const {
  runtime_->set_link(1e6 / link().bytes_per_ms);
}

base::Status Loader::calibrate() {
  const Use use(*this);
  if (!use) return closed();
  base::Status status;
  for (const uint64_t bytes : {32ull << 20, 8ull << 20, 1ull << 20}) {
    executor::SessionOptions options;
    options.name = "link calibration";
    options.persistent_bytes = bytes;
    options.ephemeral_bytes = 1;
    options.allow_queueing = options.may_claim = false;
    options.may_page = false;  // its bytes are written outside of iterations
    const auto session = OpenedSession::of(runtime_->open_session(options));
    status = session.status();
    if (!session.ok() &&
        (status.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY || status.code() == GPUSHARE_EXCEEDS_CAPACITY))
      continue;
    GPUSHARE_RETURN_IF_ERROR(status);
    const base::Result<LinkCosts> costs = measure_link(*(*session).get(), bytes);
    GPUSHARE_RETURN_IF_ERROR(costs.status());
    {
      base::MutexLock lock(mutex_);
      link_ = *costs;
      link_known_ = true;
      link_given_ = device_copies_given_ = false;
    }
    tell_link();
    return {};
  }
  return {GPUSHARE_DEVICE_OUT_OF_MEMORY,
          "no room on the device to measure the link; give its costs instead: " + status.message()};
}

base::Result<LinkCosts> Loader::measure_link(executor::Session& session, uint64_t bytes) {
  GPUSHARE_ASSIGN_OR_RETURN(const memory::Address scratch, session.alloc(memory::Kind::kModel, bytes, 0));
  // The session's memory stays until the copies are done, whoever closes the session or its runtime meanwhile.
  GPUSHARE_ASSIGN_OR_RETURN(const executor::HeldStream home, session.hold(GPUSHARE_NO_TIMEOUT));
  GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<const void> block, runtime_->pin(scratch));
  // Pinning costs more than all the copies: a chunk of the images' serves, and serves the next image.
  const struct WithinLimit {
    ~WithinLimit() {
      if (loader.pool_.kept_bytes() > loader.options_.limit_bytes - loader.cache_.bytes())
        loader.pool_.trim();
    }
    Loader& loader;
  } within_limit{*this};
  GPUSHARE_ASSIGN_OR_RETURN(const ChunkPool::Lent chunk, pool_.lend());
  return calibrate_on(runtime_->device(), scratch, bytes, chunk.bytes(), kCalibrationRounds, &*home);
}

LinkCosts Loader::link() const {
  base::MutexLock lock(mutex_);
  return link_;
}

bool Loader::link_known() const {
  base::MutexLock lock(mutex_);
  return link_known_;
}

}  // namespace gpushare::loader
