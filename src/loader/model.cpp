// SPDX-License-Identifier: Apache-2.0
#include "loader/model.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/clock.hpp"
#include "base/no_memory.hpp"
#include "base/without_throwing.hpp"

namespace gpushare::loader {

using executor::GatePass;

Model::Model(std::shared_ptr<Loader> loader, std::shared_ptr<executor::Session> session,
             std::unique_ptr<Transmission> transmission, memory::Address address, bool profile)
    : loader_(std::move(loader)),
      session_(std::move(session)),
      image_(transmission->shared_image()),
      address_(address),
      ends_(transmission->group_ends().begin(), transmission->group_ends().end()),
      transmission_(std::move(transmission)),
      profile_(profile) {
  gate_.open();
  loader_->model_made();
}

Model::~Model() {
  (void)unload();
}

base::Status Model::gone() {
  return {GPUSHARE_INVALID_STATE, "the model was unloaded, or its runtime closed"};
}

bool Model::claim() {
  return !claimed_.exchange(true);
}

std::unique_ptr<Transmission> Model::take_apart() {
  gate_.close();
  std::vector<Run> runs, ended, spare;  // their events go without the lock
  base::MutexLock lock(mutex_);
  runs.swap(runs_);
  ended.swap(ended_);
  spare.swap(spare_);
  return std::move(transmission_);
}

// The last chance to learn from the transmission. Without memory nothing is learned.
void Model::learn_last() noexcept {
  try {
    (void)arrived(layers() - 1);
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): see above
  }
}

base::Status Model::unload() {
  learn_last();
  // A thread that waits for a layer stays inside until the copies have come, and these may be behind this very function.
  if (executor::NoWaitScope::active() && !claimed_.load() && !gate_.try_close())
    return base::WorkLock::refused();
  if (!claim()) return {};
  {
    const struct Apart {
      ~Apart() { loader.model_apart(); }
      Loader& loader;
    } apart{*loader_};
    loader_->retire(take_apart());
  }
  // The host memory of an image that nobody else holds goes now, unless its copies are still on their way.
  if (!executor::NoWaitScope::active()) base::without_throwing([this] { loader_->sweep(); });
  base::Status freed;
  try {
    freed = session_->free(address_);
  } catch (const std::bad_alloc&) {  // the session gives the block back when it ends
    freed = base::no_memory();
  }
  // The block went with its session, which is what was wanted.
  if (freed.code() == GPUSHARE_INVALID_STATE || freed.code() == GPUSHARE_NOT_FOUND) return {};
  return freed;
}

void Model::shut() {
  if (!claim()) return;
  take_apart().reset();
  loader_->model_apart();
}

// Learns about the link from the transmission, once all of it has arrived.
void Model::arrived_whole() {
  if (!learned_.exchange(true)) loader_->learn(*transmission_);
}

base::Status Model::make_usable(uint32_t first, uint32_t end, const executor::Stream& stream) {
  if (stream.runtime() != &loader_->runtime())
    return {GPUSHARE_INVALID_ARGUMENT, "the stream is of another runtime than the model"};
  const GatePass pass(gate_);
  if (!pass) return gone();
  if (first >= end || end > image_->layers().size())
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("layers [%u, %u) are none of the %zu of image '%s'", first, end,
                         image_->layers().size(), image_->name().c_str())};
  // A copy that has failed already is told here; one that fails later, by wait and arrived.
  GPUSHARE_ASSIGN_OR_RETURN(const bool there, transmission_->arrived(end - 1));
  if (there && end == image_->layers().size()) arrived_whole();
  return stream.checked(begin_layers(first, end, stream));
}

base::Status Model::begin_layers(uint32_t first, uint32_t end, const executor::Stream& stream) {
  GPUSHARE_ASSIGN_OR_RETURN(const executor::HeldStream lane, stream.hold());
  base::MutexLock lock(mutex_);
  if (stream_ == &stream && first >= reached_) {
    GPUSHARE_RETURN_IF_ERROR(close_run(*lane));
  } else {
    collect();
    for (Run& run : runs_) spare_.push_back(std::move(run));  // an execution without an end
    runs_.clear();
    ++executions_;
    stream_ = &stream;
    marking_ =
        profile_ && ended_.empty() && (executions_ <= kProfiledRuns || executions_ % kProfileEvery == 0);
  }
  reached_ = end;
  GPUSHARE_RETURN_IF_ERROR(transmission_->make_usable(first, end, *lane));
  return marking_ ? open_run(first, end, *lane) : base::Status();
}

// Marks cannot be set between a graph's nodes, so nothing is learned from an execution that is captured.
template <class F>
base::Status Model::marked(base::Status status, F&& keep) {
  if (status.code() == GPUSHARE_INVALID_STATE) {
    marking_ = false;
    for (Run& run : runs_) spare_.push_back(std::move(run));
    runs_.clear();
    return {};
  }
  if (status.ok()) keep();
  return status;
}

base::Status Model::open_run(uint32_t first, uint32_t end, const device::Stream& stream) {
  runs_.reserve(runs_.size() + 1);
  Run run;
  if (!spare_.empty()) {
    run = std::move(spare_.back());
    spare_.pop_back();
  } else {
    spare_.reserve(++runs_made_);
    GPUSHARE_ASSIGN_OR_RETURN(run.begin, loader_->runtime().device().create_event(GPUSHARE_EVENT_TIMING));
    GPUSHARE_ASSIGN_OR_RETURN(run.end, loader_->runtime().device().create_event(GPUSHARE_EVENT_TIMING));
  }
  run.first = first;
  run.last = end;
  run.closed = false;
  return marked(stream.record(run.begin),
                [&]() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { runs_.push_back(std::move(run)); });
}

base::Status Model::close_run(const device::Stream& stream) {
  if (runs_.empty() || runs_.back().closed) return {};
  return marked(stream.record(runs_.back().end),
                [&]() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { runs_.back().closed = true; });
}

base::Status Model::mark_end(const executor::Stream& stream) {
  if (stream.runtime() != &loader_->runtime())
    return {GPUSHARE_INVALID_ARGUMENT, "the stream is of another runtime than the model"};
  const GatePass pass(gate_);
  if (!pass) return gone();
  return stream.checked(end_execution(stream));
}

base::Status Model::end_execution(const executor::Stream& stream) {
  GPUSHARE_ASSIGN_OR_RETURN(const executor::HeldStream lane, stream.hold());
  base::MutexLock lock(mutex_);
  if (stream_ != &stream) return {};
  GPUSHARE_RETURN_IF_ERROR(close_run(*lane));
  collect();
  if (ended_.empty()) {
    ended_.swap(runs_);
  } else {
    for (Run& run : runs_) spare_.push_back(std::move(run));
    runs_.clear();
  }
  stream_ = nullptr;
  return {};
}

void Model::collect() {
  const base::QuietQueries quiet;
  if (ended_.empty() || ended_.back().end.query().code() == GPUSHARE_NOT_READY) return;
  for (const Run& run : ended_) {
    const auto took = run.end.elapsed_since(run.begin);
    if (took.ok()) image_->profile().observe(run.first, run.last, static_cast<double>(*took) / 1e6);
  }
  for (Run& run : ended_) spare_.push_back(std::move(run));
  ended_.clear();
}

base::Status Model::wait(uint32_t layer, uint64_t timeout_ns) {
  const base::Deadline deadline = base::Deadline::after(timeout_ns);
  if (timeout_ns > 0 && executor::NoWaitScope::active())
    return {GPUSHARE_INVALID_STATE,
            "a model cannot be waited for inside a function that the device or the runtime waits for"};
  const GatePass pass(gate_);
  if (!pass) return gone();
  // A device with virtual time moves only while somebody waits for it.
  const bool whole = deadline.never() ||
                     (timeout_ns > 0 && loader_->runtime().device().can(GPUSHARE_DEVICE_CAP_VIRTUAL_TIME));
  if (whole) {
    GPUSHARE_RETURN_IF_ERROR(transmission_->wait(layer));
  } else {
    for (std::chrono::microseconds pause{20};; pause = std::min(2 * pause, std::chrono::microseconds(500))) {
      GPUSHARE_ASSIGN_OR_RETURN(const bool there, transmission_->arrived(layer));
      if (there) break;
      if (timeout_ns == 0 || deadline.passed())
        return {GPUSHARE_TIMED_OUT, "layer '" + image_->layers()[layer].name + "' of image '" +
                                        image_->name() + "' has not arrived yet"};
      std::this_thread::sleep_for(pause);
    }
  }
  if (layer + 1 == image_->layers().size()) arrived_whole();
  return {};
}

base::Result<Model::Loan> Model::lend(const device::Stream& copies) {
  GatePass pass(gate_);
  if (!pass) return gone();
  GPUSHARE_RETURN_IF_ERROR(transmission_->arrived(layers() - 1).status());
  GPUSHARE_ASSIGN_OR_RETURN(executor::HeldStream home, session_->hold(0));
  GPUSHARE_RETURN_IF_ERROR(transmission_->make_usable(0, layers(), copies));
  return Loan{std::move(pass), std::move(home), {layers(), address_}};
}

base::Result<bool> Model::arrived(uint32_t layer) {
  const GatePass pass(gate_);
  if (!pass) return gone();
  auto there = transmission_->arrived(layer);
  if (there.ok() && *there && layer + 1 == image_->layers().size()) arrived_whole();
  return there;
}

base::Result<uint64_t> Model::arrived_ns(size_t group) {
  const GatePass pass(gate_);
  if (!pass) return gone();
  return transmission_->arrived_ns(group);
}

}  // namespace gpushare::loader
