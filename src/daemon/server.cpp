// The server's thread: connections, messages, clock. Its decisions about turns and memory are in turns.cpp.
// SPDX-License-Identifier: Apache-2.0
#include "daemon/server.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/saturate.hpp"
#include "base/units.hpp"

namespace gpushare::daemon {
namespace {

constexpr uint64_t kWakeId = 0;
constexpr uint64_t kListenerId = UINT64_MAX;
constexpr uint64_t kIdleNs =
    200'000'000;                // a connection that has not attached by then may be dropped for another
constexpr int kLoadTickMs = 5;  // a load that fails calls nobody back

base::Status system_error(const char* what) {
  const int error = errno;
  return {GPUSHARE_IO_ERROR, std::string(what) + ": " + std::strerror(error), error};
}

base::Status watch_descriptor(int epoll, int descriptor, uint64_t id) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = id;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event) != 0) return system_error("epoll_ctl");
  return {};
}

}  // namespace

base::Result<std::unique_ptr<Server>> Server::start(ServerOptions options) {
  std::unique_ptr<Server> server(new Server(std::move(options)));
  GPUSHARE_RETURN_IF_ERROR(server->open());
  try {
    server->reader_ = std::make_unique<ImageReader>(*server->cache_, [raw = server.get()] { raw->wake(); });
    server->thread_ = std::thread([raw = server.get()] { raw->serve(); });
  } catch (const std::system_error& error) {
    return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY, std::string("cannot start a thread: ") + error.what());
  }
  return server;
}

base::Status Server::open() {
  started_ns_ = base::host_now_ns();
  if (options_.max_workers == 0)
    return {GPUSHARE_INVALID_ARGUMENT, "max_workers is 0; allowed is 1 and more"};
  if (options_.capacity_bytes != 0 && options_.standby_bytes > options_.capacity_bytes)
    return {GPUSHARE_INVALID_ARGUMENT,
            "the budget for first layers is " + base::format_bytes(options_.standby_bytes) +
                ", a part of the capacity, which is " + base::format_bytes(options_.capacity_bytes)};
  if (options_.lease_ns == 0) return {GPUSHARE_INVALID_ARGUMENT, "the lease is 0; give a time above 0"};
  // First, so that a second daemon takes no device memory.
  GPUSHARE_ASSIGN_OR_RETURN(listener_, Listener::open(options_.socket));
  GPUSHARE_ASSIGN_OR_RETURN(device_, device::Device::open(options_.device));
  if (!device_->can(GPUSHARE_DEVICE_CAP_IPC)) {
    return {GPUSHARE_UNSUPPORTED, "device '" + options_.device +
                                      "' cannot share memory between processes (capability ipc); use a "
                                      "device that 'gpushare devices' lists with ipc, such as host"};
  }
  worker_device_ = options_.device == "auto" ? device_->spec() : options_.device;
  if (worker_device_.size() >= sizeof(Reply::device))
    return {GPUSHARE_INVALID_ARGUMENT, base::format("the device has %zu characters; allowed are %zu",
                                                    worker_device_.size(), sizeof(Reply::device) - 1)};
  const uint64_t free_bytes = device_->info().free_bytes;
  capacity_bytes_ = options_.capacity_bytes == 0 ? free_bytes : options_.capacity_bytes;
  if (capacity_bytes_ > free_bytes) {
    return {GPUSHARE_EXCEEDS_CAPACITY, "a capacity of " + base::format_bytes(capacity_bytes_) +
                                           " asked; device '" + options_.device + "' has " +
                                           base::format_bytes(free_bytes) + " free"};
  }
  if (options_.standby_bytes > capacity_bytes_) {
    return {GPUSHARE_EXCEEDS_CAPACITY, "the budget for first layers is " +
                                           base::format_bytes(options_.standby_bytes) +
                                           ", a part of the capacity: all that is free on device '" +
                                           options_.device + "', " + base::format_bytes(capacity_bytes_)};
  }
  if (options_.link) {
    link_ = *options_.link;
  } else {
    const auto measured = loader::calibrate(*device_);
    // Any plan is correct: a guess only costs time. Small devices have no room for the measurement.
    link_ = measured.ok() ? *measured : loader::LinkCosts{0.01, 10e6, 0.02};
    if (!measured.ok())
      base::log(base::kWarning, "daemon: plans assume 10 GB/s: " + measured.status().to_string());
  }
  pool_ = std::make_unique<loader::ChunkPool>(*device_, options_.chunk_bytes);
  cache_ = std::make_unique<loader::ImageCache>(*pool_, options_.images_bytes, options_.read);
  residency_ = std::make_unique<sched::Residency>(capacity_bytes_, options_.residency);
  GPUSHARE_ASSIGN_OR_RETURN(link_stream_, device_->create_stream());
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  if (!wake_ || !epoll_) return system_error("cannot make an event loop");
  GPUSHARE_RETURN_IF_ERROR(watch_descriptor(epoll_.get(), wake_.get(), kWakeId));
  return watch_descriptor(epoll_.get(), listener_.get(), kListenerId);
}

Server::~Server() {
  stop_.store(true);
  if (wake_) wake();
  if (thread_.joinable()) thread_.join();
  reader_.reset();
  for (auto& [id, connection] : connections_) remove(*connection, {});
  connections_.clear();
  // Models wait for their copies; the device's threads may still call wake().
  models_.clear();
  cache_.reset();
  pool_.reset();
  link_stream_ = {};
  if (device_ == nullptr) return;
  const base::Status closed = device_->close();
  if (!closed.ok()) base::log(base::kWarning, closed.with_context("daemon: closing the device").to_string());
}

void Server::wake() {
  const uint64_t one = 1;
  // Full means that the thread has been told already.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

void Server::serve() {
  std::array<epoll_event, 64> events{};
  while (!stop_.load()) {
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms());
    if (count < 0 && errno != EINTR) {
      base::log(base::kError, "daemon: " + system_error("epoll_wait").to_string());
      return;
    }
    try {
      for (int i = 0; i < count; ++i) {
        const uint64_t id = events[static_cast<size_t>(i)].data.u64;
        if (id == kWakeId) {
          uint64_t drained = 0;
          [[maybe_unused]] const ssize_t got = read(wake_.get(), &drained, sizeof(drained));
        } else if (id == kListenerId) {
          accept_workers();
        } else if (const auto found = connections_.find(id); found != connections_.end()) {
          receive(*found->second);
        }
      }
      for (ImageReader::Done& done : reader_->take()) image_is_read(std::move(done));
      look_at_loads();
      give_turns();
      look_at_clock();
      sweep();
    } catch (const std::bad_alloc&) {
      try {
        base::log(base::kError, "daemon: out of host memory; the request at hand is lost");
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): not even the line
      }
    }
  }
}

bool Server::any_loading() const {
  return std::any_of(models_.begin(), models_.end(),
                     [](const auto& entry) { return entry.second->state() == Model::State::kLoading; });
}

int Server::timeout_ms() const {
  uint64_t next_ns = UINT64_MAX;
  for (const Connection* c : waiting_) next_ns = std::min(next_ns, c->deadline_ns);
  if (wanted_since_ns_ != 0 && options_.lease_ns != kNoTimeout)
    next_ns = std::min(next_ns, base::add_saturated(wanted_since_ns_, options_.lease_ns));
  int timeout = any_loading() ? kLoadTickMs : -1;
  if (next_ns != UINT64_MAX) {
    const uint64_t now = base::host_now_ns();
    const uint64_t left_ms = next_ns <= now ? 0 : (next_ns - now) / 1'000'000 + 1;
    const int left = static_cast<int>(std::min<uint64_t>(left_ms, 1 << 30));
    timeout = timeout < 0 ? left : std::min(timeout, left);
  }
  return timeout;
}

void Server::accept_workers() {
  for (;;) {
    Peer peer;
    base::Result<Descriptor> socket = accept_peer(listener_.get(), &peer);
    if (!socket.ok()) {
      if (socket.status().code() == GPUSHARE_NOT_READY) return;
      // Out of descriptors: those that wait stay in the backlog until some are free. The pause keeps this from
      // turning into a loop at full speed.
      base::log(base::kWarning, "daemon: " + socket.status().to_string());
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return;
    }
    base::Status refused;
    // Connections that have not attached for a while make room: they could keep everybody else out otherwise.
    const uint64_t now_ns = base::host_now_ns();
    if (connections_.size() >= options_.max_workers) {
      const auto idle = std::find_if(connections_.begin(), connections_.end(), [now_ns](const auto& entry) {
        return entry.second->state == State::kConnected && now_ns > entry.second->connected_ns + kIdleNs;
      });
      if (idle != connections_.end()) connections_.erase(idle);
    }
    if (peer.uid != geteuid()) {
      refused = {GPUSHARE_UNAVAILABLE,
                 base::format("this daemon serves user %u alone; you are user %u", geteuid(), peer.uid)};
    } else if (connections_.size() >= options_.max_workers) {
      refused = {GPUSHARE_QUEUE_FULL,
                 base::format("%u workers are connected, as many as allowed; wait for one to leave, or start "
                              "the daemon with a higher limit",
                              options_.max_workers)};
    }
    auto connection = std::make_unique<Connection>();
    connection->id = next_id_++;
    connection->peer = peer;
    connection->connected_ns = now_ns;
    connection->socket = std::move(*socket);
    if (refused.ok()) refused = watch_descriptor(epoll_.get(), connection->socket.get(), connection->id);
    if (!refused.ok()) {
      ++counts_.refused;
      (void)send_message(connection->socket.get(), bytes_of(make_reply(0, refused)));
      continue;
    }
    connections_.emplace(connection->id, std::move(connection));
  }
}

void Server::receive(Connection& c) {
  if (c.state == State::kGone) return;
  std::array<std::byte, kMaxRequestBytes + 1> buffer;
  const auto message = receive_message(c.socket.get(), buffer);
  if (!message.ok()) {
    if (message.status().code() != GPUSHARE_NOT_READY) remove(c, {});
    return;
  }
  const auto request = parse_request(*message);
  const bool out_of_turn = c.state == State::kReading || c.state == State::kWaiting;
  if (request.ok() && !out_of_turn) {
    handle(c, *request);
    return;
  }
  ++counts_.refused;
  c.sequence = sequence_of(*message);
  if (request.ok()) {
    reply(c,
          {GPUSHARE_INVALID_STATE, "a request before the reply to the last one; the connection is closed"});
    remove(c, "it sends requests out of turn");
    return;
  }
  reply(c, request.status());
  // A message of another protocol ends the connection: there is no way to continue.
  if (request.status().code() != GPUSHARE_INVALID_ARGUMENT) remove(c, request.status().message());
}

void Server::handle(Connection& c, const Request& request) {
  c.sequence = request.sequence;
  switch (request.type) {
    case MessageType::kAttach: {
      const base::Status started = attach(c, request);
      if (!started.ok()) reply(c, started);
      return;
    }
    case MessageType::kBegin:
      if (c.state != State::kAttached) {
        reply(c,
              {GPUSHARE_INVALID_STATE,
               c.state == State::kTurn ? "this worker has the turn already; end it first" : "attach first"});
        return;
      }
      c.state = State::kWaiting;
      c.deadline_ns = UINT64_MAX;
      if (const uint64_t now = base::host_now_ns(); request.timeout_ns < UINT64_MAX - now)
        c.deadline_ns = now + request.timeout_ns;
      waiting_.push_back(&c);
      return;
    case MessageType::kEnd:
      if (c.state != State::kTurn) {
        reply(c, {GPUSHARE_INVALID_STATE, "this worker does not have the turn"});
        return;
      }
      learn_iteration(c, request.iteration_ns);
      end_turn(c);
      give_turns();  // the next one first: it has waited longer
      reply(c, {});
      return;
    case MessageType::kStatus:
      send_status(c);
      return;
    case MessageType::kReply:
      break;
  }
}

void Server::look_at_clock() {
  const uint64_t now = base::host_now_ns();
  for (size_t i = 0; i < waiting_.size();) {
    Connection& c = *waiting_[i];
    if (c.deadline_ns > now) {
      ++i;
      continue;
    }
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    c.state = State::kAttached;
    reply(c, {GPUSHARE_TIMED_OUT, holder_ == nullptr ? std::string("the turn was not given in time")
                                                     : "worker '" + holder_->name + "' still has the turn"});
  }
  if (wanted_since_ns_ == 0 || options_.lease_ns == kNoTimeout || now - wanted_since_ns_ < options_.lease_ns)
    return;
  ++counts_.cut_off;
  holder_->board->fail(
      {GPUSHARE_TIMED_OUT, "the daemon cut this worker off: it held the turn for more than " +
                               base::format_duration_ns(options_.lease_ns) +
                               " while another waited; end turns when they are wanted, or raise the lease"});
  remove(*holder_, "it held the turn longer than the lease");
  give_turns();
}

void Server::reply(Connection& c, const base::Status& status) {
  send(c, make_reply(c.sequence, status), {});
}

void Server::send(Connection& c, const Reply& message, std::span<const int> descriptors) {
  if (c.state == State::kGone) return;
  const base::Status sent = send_message(c.socket.get(), bytes_of(message), descriptors);
  if (!sent.ok()) remove(c, sent.message());
}

void Server::remove(Connection& c, const std::string& why) {
  if (c.state == State::kGone) return;
  if (!why.empty())
    base::log(base::kInfo, base::format("daemon: worker '%s' (pid %d) is disconnected: %s", c.name.c_str(),
                                        c.peer.pid, why.c_str()));
  if (c.state == State::kTurn || c.state == State::kWaiting || c.state == State::kReading)
    ++counts_.reclaimed;
  std::erase(waiting_, &c);
  if (holder_ == &c) end_turn(c);
  c.state = State::kGone;
  c.socket = {};
  if (const std::shared_ptr<Model> model = std::exchange(c.model, nullptr); model && workers_of(*model) == 0)
    retire(model);
}

void Server::sweep() {
  std::erase_if(connections_, [](const auto& entry) { return entry.second->state == State::kGone; });
}

void Server::send_status(Connection& c) {
  base::Result<Descriptor> file = make_table_file(encode_status(status()));
  if (!file.ok()) {
    reply(c, file.status());
    return;
  }
  Reply message = make_reply(c.sequence, {});
  message.descriptors = 1;
  const int descriptors[] = {file->get()};
  send(c, message, descriptors);
}

DaemonStatus Server::status() const {
  DaemonStatus out = counts_;
  out.device = worker_device_;
  out.pid = getpid();
  out.uptime_ns = base::host_now_ns() - started_ns_;
  out.capacity_bytes = capacity_bytes_;
  out.resident_bytes = residency_->resident_bytes();
  out.standby_bytes = standby_bytes();
  if (const auto info = device_->refresh_info(); info.ok()) {
    out.device_free_bytes = info->free_bytes;
    out.device_total_bytes = info->total_bytes;
  }
  out.images_bytes = cache_->bytes();
  out.images_limit_bytes = options_.images_bytes;
  for (const auto& [id, c] : connections_) {
    if (c->state == State::kConnected || c->state == State::kGone) continue;
    const char* state = c->state == State::kReading   ? "reading"
                        : c->state == State::kWaiting ? "waiting"
                        : c->state == State::kTurn    ? "turn"
                                                      : "attached";
    const uint64_t turn_ns =
        c->turn_ns + (c->state == State::kTurn ? base::host_now_ns() - c->turn_began_ns : 0);
    out.workers.push_back({c->id, c->peer.pid, c->name, state, c->model ? c->model->path() : "", c->turns,
                           turn_ns, c->scratch_bytes, c->execute_ns});
  }
  for (const auto& [id, model] : models_) {
    out.models.push_back({model->path(), state_name(model->state()), model->region_bytes(),
                          static_cast<uint32_t>(model->image()->layers().size()), model->arrived(),
                          workers_of(*model), model->loads()});
  }
  return out;
}

}  // namespace gpushare::daemon
