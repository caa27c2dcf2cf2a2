// SPDX-License-Identifier: Apache-2.0
#include "daemon/images.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/no_memory.hpp"
#include "base/no_signals.hpp"
#include "base/saturate.hpp"
#include "base/units.hpp"
#include "daemon/log_failure.hpp"
#include "daemon/service.hpp"
#include "loader/grouping.hpp"
#include "loader/prefix.hpp"

namespace gpushare::daemon {

using client::Descriptor;
using client::MessageType;

namespace {

constexpr uint64_t kChunkBytes = 16ull << 20;  // of pinned host memory

constexpr std::chrono::milliseconds kStopLook{50}, kOpenPatience{30'000};

uint64_t now_ns() {
  return base::host_now_ns();
}

}  // namespace

Images::Images(std::string device, uint64_t limit_bytes, sched::Scheduler& scheduler, uint64_t& next_id,
               std::function<void()> wake)
    : spec_(std::move(device)),
      limit_bytes_(limit_bytes),
      scheduler_(scheduler),
      next_id_(next_id),
      wake_(std::move(wake)) {}

Images::~Images() {
  {
    base::MutexLock lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (reader_.joinable()) reader_.join();
  uses_.clear();
  entries_.clear();  // they wait for their copies; the device's threads may still call wake_
  to_read_.clear();
  read_.clear();
  cache_.reset();
  pool_.reset();
  link_stream_ = {};
  if (device_ != nullptr) log_failure(device_->close(), "closing the device");
}

// ---- reading --------------------------------------------------------------------------------------------------

// A driver that hangs does not hold up the end of the service, and the reader for kOpenPatience an image.
base::Result<OpenedDevice> Images::wait_for_device() {
  using Clock = std::chrono::steady_clock;
  if (opening_ == nullptr) {
    GPUSHARE_ASSIGN_OR_RETURN(
        opening_, base::Asked<OpenedDevice>::start("the device's driver",
                                                   [spec = spec_] { return OpenedDevice::open(spec); }));
  }
  const auto until = Clock::now() + kOpenPatience;
  for (;;) {
    if (auto opened = opening_->wait_until(Clock::now() + kStopLook)) {
      opening_.reset();
      return *std::move(opened);
    }
    base::MutexLock lock(mutex_);
    if (stop_ || Clock::now() >= until)
      return base::Status(GPUSHARE_UNAVAILABLE, "device '" + spec_ + "' has not opened, its driver hangs");
  }
}

base::Status Images::open_device() {
  GPUSHARE_ASSIGN_OR_RETURN(OpenedDevice opened, wait_for_device());
  std::unique_ptr<device::Device>& device = opened.device;
  if (!device->can(GPUSHARE_DEVICE_CAP_IPC)) {
    log_failure(device->close(), "closing the device");
    return {GPUSHARE_UNSUPPORTED,
            "device '" + spec_ + "' cannot share memory between processes (capability ipc)"};
  }
  GPUSHARE_ASSIGN_OR_RETURN(link_stream_, device->create_stream());
  pool_ = std::make_unique<loader::ChunkPool>(*device, kChunkBytes);
  cache_ = std::make_unique<loader::ImageCache>(*pool_, limit_bytes_, loader::ReadOptions{});
  device_ = std::move(device);
  context_.note(opened.context_bytes, now_ns());
  return {};
}

void Images::read_images() {
  base::MutexLock lock(mutex_);
  for (;;) {
    while (to_read_.empty() && !stop_) changed_.wait(mutex_);
    if (stop_) return;
    std::list<Read> now;  // moved from list to list: without host memory the process is still answered
    now.splice(now.end(), to_read_, to_read_.begin());
    lock.unlock();
    Read& read = now.front();
    try {
      const base::Status opened = device_ == nullptr ? open_device() : base::Status();
      if (opened.ok())
        read.image = cache_->get(read.path);
      else
        read.image = opened;
    } catch (const std::bad_alloc&) {
      read.image = base::no_memory();
    }
    lock.lock();
    read_.splice(read_.end(), now);
    lock.unlock();
    wake_();
    lock.lock();
  }
}

void Images::open(Process& process, RemoteSession& session, const client::ImageOpen& message) {
  auto use = std::make_unique<ImageUse>();
  use->number = message.image;
  use->process = &process;
  use->session = &session;
  use->iteration_ns = message.iteration_ns;
  const std::string path(message.path, strnlen(message.path, sizeof(message.path)));
  base::Status refused;
  const auto same = std::find_if(uses_.begin(), uses_.end(), [&](const auto& other) {
    return other->process == &process && other->number == use->number;
  });
  if (use->number == 0 || same != uses_.end())
    refused = {GPUSHARE_INVALID_ARGUMENT, "the image's number is 0 or in use"};
  else if (process.peer.uid != geteuid() && process.peer.uid != 0)
    refused = {
        GPUSHARE_UNSUPPORTED,
        base::format("this daemon reads files as user %u, and shares images with that user alone; you are "
                     "user %u: start a daemon of your own, or load the image into the session",
                     geteuid(), process.peer.uid)};
  else if (session.claim->group != 0)
    refused = {GPUSHARE_UNSUPPORTED, "sessions of a group open no images"};
  else if (path.empty() || path.front() != '/')
    refused = {GPUSHARE_INVALID_ARGUMENT, "the image's path is not absolute"};
  if (!refused.ok()) {
    answer(*use, refused);
    return;
  }
  if (!reader_.joinable()) {
    try {
      const base::NoSignals no_signals;
      reader_ = std::thread([this] { read_images(); });
    } catch (const std::system_error& error) {
      answer(*use, {GPUSHARE_HOST_OUT_OF_MEMORY,
                    std::string("the daemon cannot start a thread to read the image: ") + error.what()});
      return;
    }
  }
  {
    base::MutexLock lock(mutex_);
    to_read_.push_back({process.id, use->number, path});
  }
  changed_.notify_all();
  session.images.push_back(use.get());
  uses_.push_back(std::move(use));
}

void Images::answer(const ImageUse& use, const base::Status& status, std::span<const int> descriptors) {
  auto message = client::make_message<MessageType::kImageOpened>();
  message.image = use.number;
  message.code = status.code();
  client::put_text(message.text, status.message());
  if (status.ok()) {
    message.image_bytes = use.image->source()->bytes();
    message.region_bytes = use.image->region_bytes();
    message.layers = static_cast<uint32_t>(use.image->source()->layers().size());
  }
  if (!send_to(*use.process, client::bytes_of(message), descriptors)) client::shut(use.process->socket);
}

// ---- loaded images ---------------------------------------------------------------------------------------------------

Images::Entry* Images::entry_of(uint64_t cache) {
  for (Entry& entry : entries_)
    if (entry.rest == cache || (entry.first == cache && cache != 0)) return &entry;
  return nullptr;
}

Images::Entry* Images::entry_of(const SharedImage& image) {
  return entry_of(image.id());
}

std::vector<loader::LayerCost> Images::layer_costs(const loader::Image& image, uint64_t execution_ns) const {
  std::vector<loader::LayerCost> layers = loader::layer_costs(image, link_, {});
  // Only the length of a whole iteration is known: layers are assumed to execute in proportion to their bytes.
  double transmit_ms = 0;
  for (const loader::LayerCost& layer : layers) transmit_ms += layer.transmit_ms;
  const double ratio =
      execution_ns == 0 || transmit_ms <= 0 ? 1.0 : static_cast<double>(execution_ns) / 1e6 / transmit_ms;
  for (loader::LayerCost& layer : layers) layer.execution_ms = layer.transmit_ms * ratio;
  return layers;
}

// Sessions of one user share an image's memory.
base::Result<Images::Entry*> Images::entry_for(const std::shared_ptr<const loader::Image>& image,
                                               uint64_t user, uint64_t iteration_ns) {
  for (Entry& entry : entries_)
    if (entry.image->source() == image && entry.user == user) return &entry;
  Entry entry;
  entry.rest = next_id_++;
  entry.user = user;
  entry.image = std::make_shared<SharedImage>(*device_, link_stream_, image, entry.rest);
  loader::PrefixLimits limits;
  limits.granule_bytes = device_->info().mapping_granularity_bytes;
  const auto prefix = loader::choose_prefix(layer_costs(*image, iteration_ns), link_.grouping(), limits);
  if (prefix.ok()) entry.image->set_prefix(*prefix);
  const uint64_t first_bytes = entry.image->prefix().bytes;
  if (first_bytes > 0) {
    entry.first = next_id_++;
    GPUSHARE_RETURN_IF_ERROR(scheduler_.add_cache(
        entry.first, first_bytes, static_cast<double>(link_.send_ns(first_bytes)) + prefix->saves_ms * 1e6));
  }
  const uint64_t rest_bytes = entry.image->region_bytes() - first_bytes;
  const base::Status added = scheduler_.add_cache(
      entry.rest, rest_bytes, static_cast<double>(link_.send_ns(rest_bytes)), entry.first);
  if (!added.ok()) {
    if (entry.first != 0) scheduler_.remove_cache(entry.first, now_ns());
    return added.with_context("image " + image->name());
  }
  entries_.push_back(std::move(entry));
  return &entries_.back();
}

base::Status Images::finish(ImageUse& use, const std::shared_ptr<const loader::Image>& image) {
  if (image->bytes() == 0)
    return {GPUSHARE_INVALID_ARGUMENT, "image " + image->name() + " has no bytes to load"};
  std::vector<client::TableLayer> table;
  for (const loader::Layer& layer : image->layers())
    table.push_back({layer.name, layer.offset_bytes, layer.bytes});
  GPUSHARE_ASSIGN_OR_RETURN(const Descriptor layers, client::make_table_file(client::encode_layers(table)));
  GPUSHARE_ASSIGN_OR_RETURN(use.board, client::Board::create());
  GPUSHARE_ASSIGN_OR_RETURN(Entry * entry, entry_for(image, use.process->peer.uid, use.iteration_ns));
  // The session must be able to run with the image's bytes beside its own.
  uint64_t bytes = entry->image->region_bytes();
  for (const ImageUse* other : use.session->images)
    if (other->image != nullptr && other->image != entry->image) bytes += other->image->region_bytes();
  const uint64_t own = use.session->claim->persistent_bytes + use.session->claim->ephemeral_bytes;
  const uint64_t capacity = scheduler_.capacity().target_bytes;
  if (bytes > capacity - std::min(capacity, own)) {
    return {GPUSHARE_EXCEEDS_CAPACITY,
            base::format("session '%s' with %s of its own and images of %s does not fit into the device's %s",
                         use.session->name.c_str(), base::format_bytes(own).c_str(),
                         base::format_bytes(bytes).c_str(), base::format_bytes(capacity).c_str())};
  }
  use.image = entry->image;
  const int descriptors[] = {use.board->file(), layers.get()};
  answer(use, {}, descriptors);
  if (use.session->image_state != RemoteSession::ImageState::kWaits)
    use.session->image_state = RemoteSession::ImageState::kNone;
  if (use.session->leased())
    ask(*use.session);  // it may wait for the image in this turn, and would not ask for another
  return {};
}

base::Status Images::load(Entry& entry, uint64_t execution_ns) {
  const loader::Image& image = *entry.image->source();
  GPUSHARE_ASSIGN_OR_RETURN(
      const loader::Grouping grouping,
      loader::plan_groups(layer_costs(image, execution_ns), link_.grouping(entry.image->kept_layers())));
  return entry.image->load(grouping.ends, wake_);
}

void Images::fill(uint64_t cache) {
  Entry* entry = entry_of(cache);
  if (entry == nullptr) return;
  const bool whole =
      scheduler_.cache_held(entry->rest) && (entry->first == 0 || scheduler_.cache_held(entry->first));
  if (!whole || entry->image->state() != SharedImage::State::kOff) return;
  uint64_t execution_ns = 0;
  for (const auto& use : uses_) {
    if (use->image != entry->image || use->session == nullptr) continue;
    const uint64_t measured_ns = scheduler_.view(use->session->claim->id).iteration_ns;
    execution_ns = std::max(execution_ns, measured_ns != 0 ? measured_ns : use->iteration_ns);
  }
  if (const base::Status loading = load(*entry, execution_ns); !loading.ok()) fail(*entry, loading);
}

// A load failed. The sessions that want the image still get their turns, and their waits return the failure.
void Images::fail(Entry& entry, const base::Status& why) {
  base::log(base::kWarning, why.with_context("daemon").to_string());
  entry.failure = why;
  for (const auto& use : uses_)
    if (use->image == entry.image) {
      use->board->fail(why);
      if (use->session != nullptr) retry(*use->session);
    }
}

void Images::drop(uint64_t cache) {
  if (Entry* entry = entry_of(cache)) give_back(*entry);
}

bool Images::mapped(const SharedImage& image) const {
  return std::any_of(uses_.begin(), uses_.end(),
                     [&](const auto& use) { return use->image.get() == &image && use->mapped; });
}

bool Images::ask_to_unmap(ImageUse& use) {
  use.going = true;
  use.overdue = false;
  use.going_since_ns = now_ns();
  return send_to(*use.process,
                 client::bytes_of(client::make_session_message(MessageType::kImageGone, 0, use.number)));
}

std::vector<const Process*> Images::overdue(uint64_t now, uint64_t lease_ns, uint64_t* next_ns) {
  std::vector<const Process*> out;
  for (const auto& use : uses_) {
    if (!use->mapped || !use->going || use->overdue) continue;
    const uint64_t ends_ns = base::add_saturated(use->going_since_ns, lease_ns);
    if (now < ends_ns) {
      *next_ns = std::min(*next_ns, ends_ns - now);
      continue;
    }
    use->overdue = true;
    base::log(
        base::kWarning,
        base::format("daemon: process %d was asked %s ago to let go of image %s, and has not: the image's "
                     "bytes stay promised",
                     use->process->peer.pid, base::format_duration_ns(now - use->going_since_ns).c_str(),
                     use->image->path().c_str()));
    out.push_back(use->process);
  }
  return out;
}

void Images::give_back(Entry& entry) {
  SharedImage& image = *entry.image;
  const bool unheld = !scheduler_.cache_held(entry.rest);
  const bool failed = !entry.failure.ok() && entry.users == 0;
  if ((!unheld && !failed) || image.state() == SharedImage::State::kLoading) return;
  for (const auto& use : uses_) {
    if (use->image != entry.image || !use->mapped || use->going) continue;
    if (!ask_to_unmap(*use)) client::shut(use->process->socket);
  }
  if (mapped(image)) return;
  const bool first_stays = !failed && entry.first != 0 && scheduler_.cache_held(entry.first);
  if (image.state() != SharedImage::State::kOff)
    image.drop(first_stays);
  else if (!first_stays)
    image.forget_prefix();
  if (failed) entry.failure = {};
  scheduler_.cache_dropped(entry.rest, now_ns());
  if (!first_stays && entry.first != 0) scheduler_.cache_dropped(entry.first, now_ns());
}

// ---- sessions -------------------------------------------------------------------------------------------------

bool Images::lacks(const RemoteSession& session) {
  return !session.images.empty() && session.image_state < RemoteSession::ImageState::kHas;
}

// An image could not be had for the turn.
void Images::retry(RemoteSession& session) {
  if (session.image_state == RemoteSession::ImageState::kHas)
    session.image_state = RemoteSession::ImageState::kRetry;
}

void Images::ask(RemoteSession& session) {
  if (session.image_state == RemoteSession::ImageState::kWaits) return;
  session.image_state = RemoteSession::ImageState::kWaits;
  line_.push_back(&session);
}

void Images::let_go(RemoteSession& session) {
  if (std::exchange(session.image_state, RemoteSession::ImageState::kNone) ==
      RemoteSession::ImageState::kWaits)
    std::erase(line_, &session);
  unwant(session);
}

bool Images::want(RemoteSession& session) {
  bool any = false;
  for (const ImageUse* use : session.images) {
    if (use->image == nullptr) continue;
    Entry& entry = *entry_of(*use->image);
    if (std::find(session.wanted_images.begin(), session.wanted_images.end(), entry.rest) !=
        session.wanted_images.end())
      continue;
    any = true;
    ++entry.users;
    session.wanted_images.push_back(entry.rest);
    scheduler_.want_cache(entry.rest, session.claim->id, now_ns());
  }
  return any;
}

void Images::unwant(RemoteSession& session) {
  for (const uint64_t rest : std::exchange(session.wanted_images, {})) {
    Entry* entry = entry_of(rest);
    if (entry == nullptr) continue;
    --entry->users;
    scheduler_.unwant_cache(entry->rest, now_ns());
    give_back(*entry);
  }
}

// All its images are on the device or on their way; a failed one counts.
bool Images::there(const RemoteSession& session) {
  return std::all_of(session.images.begin(), session.images.end(), [&](const ImageUse* use) {
    if (use->image == nullptr)
      return true;  // the file is being read: a wait in the session's turn includes that
    Entry& entry = *entry_of(*use->image);
    if (!entry.failure.ok()) return true;
    const bool held =
        scheduler_.cache_held(entry.rest) && (entry.first == 0 || scheduler_.cache_held(entry.first));
    return held && (entry.image->state() == SharedImage::State::kLoading ||
                    entry.image->state() == SharedImage::State::kResident);
  });
}

bool Images::share(ImageUse& use) {
  if (use.image == nullptr || use.mapped) return true;
  if (const base::Status& failure = entry_of(*use.image)->failure; !failure.ok()) {
    use.board->fail(failure);
    retry(*use.session);
    return true;
  }
  base::Result<std::vector<Descriptor>> parts = use.image->share();
  if (!parts.ok()) {
    use.board->fail(parts.status().with_context("sharing image " + use.image->path()));
    retry(*use.session);
    return true;
  }
  use.image->unwatch(use.board.get());
  use.image->watch(use.board);
  std::vector<int> descriptors;
  for (const Descriptor& part : *parts) descriptors.push_back(part.get());
  const uint64_t first_bytes = parts->size() > 1 ? use.image->prefix_bytes() : use.image->region_bytes();
  use.mapped = true;
  use.going = false;
  if (send_to(
          *use.process,
          client::bytes_of(client::make_session_message(MessageType::kImageHere, first_bytes, use.number)),
          descriptors))
    return true;
  client::shut(use.process->socket);
  return false;
}

void Images::take_read() {
  std::list<Read> read;
  {
    base::MutexLock lock(mutex_);
    read.splice(read.end(), read_);
  }
  for (Read& done : read) {
    const auto found = std::find_if(uses_.begin(), uses_.end(), [&](const auto& use) {
      return use->process->id == done.process && use->number == done.number && use->image == nullptr;
    });
    if (found == uses_.end()) continue;
    ImageUse& use = **found;
    base::Status status = done.image.status();
    if (status.ok()) status = finish(use, *done.image);
    if (status.ok()) continue;
    answer(use, status);
    std::erase(use.session->images, &use);
    uses_.erase(found);
    forget_unused();
  }
}

bool Images::take_loaded() {
  bool any = false;
  for (Entry& entry : entries_) {
    if (entry.image->state() != SharedImage::State::kLoading) continue;
    entry.image->poll();
    if (entry.image->state() == SharedImage::State::kLoading) continue;
    if (entry.image->state() == SharedImage::State::kFailed) {
      fail(entry, entry.image->failure());
    } else if (entry.image->load_ns() > 0) {  // what the link really does
      const double measured =
          static_cast<double>(entry.image->sent_bytes()) * 1e6 / static_cast<double>(entry.image->load_ns());
      link_.bytes_per_ms += (link_measured_ ? 0.25 : 1.0) * (measured - link_.bytes_per_ms);
      link_measured_ = true;
      scheduler_.set_link(1e6 / link_.bytes_per_ms);
    }
    give_back(entry);
    any = true;
  }
  return any;
}

bool Images::step(std::vector<RemoteSession*>* out_ready) {
  if (!reader_.joinable()) return false;  // nobody has asked for an image yet
  take_read();
  bool moved = take_loaded();
  forget_unused();
  // One session after the other; a session behind the first gets its images only if they are there anyway.
  bool first = true;
  for (size_t i = 0; i < line_.size();) {
    RemoteSession& session = *line_[i];
    if ((first || there(session)) && want(session)) moved = true;
    first = false;
    if (!there(session)) {
      ++i;
      continue;
    }
    bool sent = true;
    session.image_state = RemoteSession::ImageState::kHas;
    for (ImageUse* use : session.images) sent = share(*use) && sent;
    line_.erase(line_.begin() + static_cast<std::ptrdiff_t>(i));
    if (sent && !session.leased()) out_ready->push_back(&session);
    first = i == 0;
  }
  return moved;
}

bool Images::loading() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return entry.image->state() == SharedImage::State::kLoading; });
}

// ---- ends -----------------------------------------------------------------------------------------------------

void Images::unmapped(Process& process, uint64_t number) {
  for (auto use = uses_.begin(); use != uses_.end(); ++use) {
    if ((*use)->process != &process || (*use)->number != number || !(*use)->mapped) continue;
    if (!(*use)->going && (*use)->session != nullptr) retry(*(*use)->session);
    (*use)->mapped = (*use)->going = false;
    const std::shared_ptr<SharedImage> image = (*use)->image;
    if ((*use)->session == nullptr) {
      image->unwatch((*use)->board.get());
      uses_.erase(use);
    }
    give_back(*entry_of(*image));
    break;
  }
  forget_unused();
}

void Images::close(Process& process, uint64_t number) {
  const auto found = std::find_if(uses_.begin(), uses_.end(), [&](const auto& use) {
    return use->process == &process && use->number == number;
  });
  if (found == uses_.end()) return;
  ImageUse& use = **found;
  if (use.session != nullptr) std::erase(use.session->images, &use);
  Entry* entry = use.image == nullptr ? nullptr : entry_of(*use.image);
  if (use.image != nullptr) use.image->unwatch(use.board.get());
  uses_.erase(found);
  if (entry != nullptr) give_back(*entry);
  forget_unused();
}

void Images::left(RemoteSession& session) {
  let_go(session);
  for (ImageUse* use : std::exchange(session.images, {})) {
    use->session = nullptr;
    if (use->mapped && !use->going) (void)ask_to_unmap(*use);
  }
  std::erase_if(uses_, [](const auto& use) {
    const bool over = use->session == nullptr && !use->mapped;
    if (over && use->image != nullptr) use->image->unwatch(use->board.get());
    return over;
  });
  forget_unused();
}

void Images::died(Process& process) {
  std::erase_if(uses_, [&](const auto& use) {
    if (use->process != &process) return false;
    if (use->image == nullptr) return true;
    use->image->unwatch(use->board.get());
    if (use->stuck) {
      Entry& entry = *entry_of(*use->image);
      --entry.users;
      scheduler_.unwant_cache(entry.rest, now_ns());
    }
    return true;
  });
  for (Entry& entry : entries_) give_back(entry);
  forget_unused();
}

void Images::disconnected(Process& process) {
  for (const auto& use : uses_) {
    if (use->process != &process || !use->mapped) continue;
    Entry& entry = *entry_of(*use->image);
    if (!scheduler_.cache_held(entry.rest)) continue;
    use->stuck = true;
    ++entry.users;
    scheduler_.want_cache(entry.rest, sched::kNoSession, now_ns());
  }
}

bool Images::in_use(const Process& process) const {
  return std::any_of(uses_.begin(), uses_.end(),
                     [&](const auto& use) { return use->process == &process && use->mapped; });
}

// Nobody has it open any more, and its memory is not on loan.
void Images::forget_unused() {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const bool used =
        std::any_of(uses_.begin(), uses_.end(), [&](const auto& use) { return use->image == entry->image; });
    if (used || entry->image->state() == SharedImage::State::kLoading) {
      ++entry;
      continue;
    }
    const uint64_t rest = entry->rest, first_part = entry->first;
    entry = entries_.erase(entry);  // gives its memory back
    scheduler_.remove_cache(rest, now_ns());
    if (first_part != 0) scheduler_.remove_cache(first_part, now_ns());
  }
}

std::vector<client::ImageStatus> Images::status() const {
  std::vector<client::ImageStatus> out;
  for (const Entry& entry : entries_) {
    client::ImageStatus line;
    line.path = entry.image->path();
    line.device = spec_;
    line.state = !entry.failure.ok() ? "failed" : state_name(entry.image->state());
    line.bytes = entry.image->region_bytes();
    line.kept_bytes = entry.image->kept_bytes();
    line.layers = entry.image->source()->layers().size();
    line.arrived = entry.image->arrived();
    line.loads = entry.image->loads();
    line.sessions = static_cast<uint64_t>(std::count_if(
        uses_.begin(), uses_.end(), [&](const auto& use) { return use->image == entry.image; }));
    out.push_back(std::move(line));
  }
  return out;
}

}  // namespace gpushare::daemon
