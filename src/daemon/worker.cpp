// SPDX-License-Identifier: Apache-2.0
#include "daemon/worker.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "base/clock.hpp"
#include "base/log.hpp"

namespace gpushare::daemon {
namespace {

// How long the daemon may be late with an answer that it promised in time.
constexpr uint64_t kGraceNs = 2'000'000'000;
// How often a sleeper looks whether the daemon still lives.
constexpr uint64_t kLookNs = 100'000'000;

uint64_t add(uint64_t timeout_ns, uint64_t more_ns) {
  return timeout_ns > UINT64_MAX - more_ns ? UINT64_MAX : timeout_ns + more_ns;
}

void log_failure(const base::Status& status, const char* what) {
  if (!status.ok()) base::log(base::kWarning, status.with_context(what).to_string());
}

// One reply with this sequence, or one about the connection as a whole (sequence 0). UNAVAILABLE: the daemon is gone.
base::Result<Reply> receive_reply(int socket, uint32_t sequence, const base::Deadline& deadline,
                                  std::vector<Descriptor>* out_descriptors) {
  for (;;) {
    std::array<std::byte, sizeof(Reply) + 1> buffer;
    std::vector<Descriptor> descriptors;
    const auto message = receive_message(socket, buffer, &descriptors);
    if (message.status().code() == GPUSHARE_NOT_READY) {
      GPUSHARE_RETURN_IF_ERROR(wait_readable(socket, deadline));
      continue;
    }
    if (!message.ok()) return message.status();
    GPUSHARE_ASSIGN_OR_RETURN(const Reply reply, parse_reply(*message));
    if (reply.header.sequence != sequence && reply.header.sequence != 0) continue;
    if (reply.code != GPUSHARE_OK) return reported(reply.code, reply.text);
    if (reply.descriptors != descriptors.size())
      return base::Status(
          GPUSHARE_IO_ERROR,
          base::format("the daemon sent %u descriptors, %zu came: this process has no room for "
                       "more open files",
                       reply.descriptors, descriptors.size()));
    if (out_descriptors != nullptr) *out_descriptors = std::move(descriptors);
    return reply;
  }
}

}  // namespace

base::Result<std::unique_ptr<Worker>> Worker::attach(const WorkerOptions& options) {
  std::unique_ptr<Worker> worker(new Worker);
  GPUSHARE_RETURN_IF_ERROR(worker->connect(options));
  return worker;
}

base::Status Worker::connect(const WorkerOptions& options) {
  if (options.name.empty() || options.name.size() >= sizeof(AttachRequest::name))
    return {GPUSHARE_INVALID_ARGUMENT, base::format("the worker's name has %zu bytes; allowed are 1 to %zu",
                                                    options.name.size(), sizeof(AttachRequest::name) - 1)};
  std::error_code error;
  const std::string path = std::filesystem::absolute(options.path, error).string();
  if (options.path.empty() || error || path.size() >= sizeof(AttachRequest::path))
    return {GPUSHARE_INVALID_ARGUMENT, base::format("the model's path has %zu bytes; allowed are 1 to %zu",
                                                    path.size(), sizeof(AttachRequest::path) - 1)};
  socket_path_ = options.socket;
  GPUSHARE_ASSIGN_OR_RETURN(socket_, connect_to(options.socket, "gpushare model-daemon"));
  base::MutexLock lock(mutex_);
  std::vector<Descriptor> descriptors;
  GPUSHARE_ASSIGN_OR_RETURN(const Reply reply, ask(make_attach(next_sequence(), options.name, path,
                                                               options.execute_ns, options.scratch_bytes),
                                                   options.timeout_ns, &descriptors));
  if (descriptors.size() != 2) return {GPUSHARE_MALFORMED_INPUT, "the daemon's answer lacks its descriptors"};
  GPUSHARE_ASSIGN_OR_RETURN(board_, Board::open(std::move(descriptors[0])));
  GPUSHARE_ASSIGN_OR_RETURN(const std::string table, read_table_file(descriptors[1].get()));
  GPUSHARE_ASSIGN_OR_RETURN(layers_, parse_layers(table, reply.image_bytes));
  if (layers_.empty() || layers_.size() != reply.layers || reply.image_bytes > reply.region_bytes)
    return {GPUSHARE_MALFORMED_INPUT, "the daemon's answer contradicts itself"};
  id_ = reply.worker;
  image_bytes_ = reply.image_bytes;
  region_bytes_ = reply.region_bytes;
  scratch_bytes_ = reply.scratch_bytes;
  device_spec_ = reply.device;
  GPUSHARE_ASSIGN_OR_RETURN(device_, device::Device::open(device_spec_));
  GPUSHARE_ASSIGN_OR_RETURN(region_, device_->va_reserve(region_bytes_));
  if (scratch_bytes_ > 0) {
    GPUSHARE_ASSIGN_OR_RETURN(scratch_, device_->va_reserve(scratch_bytes_));
  }
  return {};
}

Worker::~Worker() {
  if (device_ == nullptr) return;
  if (in_turn()) log_failure(end(), "detaching a worker");
  if (region_ != 0) log_failure(device_->va_free(region_, region_bytes_), "detaching a worker");
  if (scratch_ != 0) log_failure(device_->va_free(scratch_, scratch_bytes_), "detaching a worker");
}

void Worker::detach() {
  detached_.store(true);
  // Properly if it can be done at once; the daemon takes back what a closed connection leaves, too.
  if (in_turn()) (void)end();
  broken_.store(true);
  shutdown(socket_.get(), SHUT_RDWR);
}

base::Status Worker::gone() const {
  if (detached_.load()) return {GPUSHARE_CANCELLED, "the worker was detached"};
  if (board_ != nullptr) GPUSHARE_RETURN_IF_ERROR(board_->failure());
  return {GPUSHARE_UNAVAILABLE, "the daemon at " + socket_path_ +
                                    " has gone; start it again, detach this worker and attach a new one"};
}

template <class T>
base::Result<Reply> Worker::ask(const T& request, uint64_t timeout_ns,
                                std::vector<Descriptor>* out_descriptors) {
  if (broken_.load()) return gone();
  const base::Status sent = send_message(socket_.get(), bytes_of(request));
  base::Result<Reply> reply = sent;
  // A daemon that refuses the connection says why before it closes: its word is there even if sending failed.
  if (sent.ok() || sent.code() == GPUSHARE_UNAVAILABLE)
    reply = receive_reply(socket_.get(), request.header.sequence,
                          base::Deadline::after(sent.ok() ? timeout_ns : 0), out_descriptors);
  if (reply.ok()) return reply;
  const bool cut = hung_up(socket_.get());
  if (reply.status().code() == GPUSHARE_TIMED_OUT && !cut &&
      reply.status().message() == "no message in time") {
    // An answer may still come; there is no telling what the daemon has done by then.
    broken_.store(true);
    shutdown(socket_.get(), SHUT_RDWR);
    return base::Status(GPUSHARE_UNAVAILABLE, "the daemon at " + socket_path_ +
                                                  " does not answer; see whether it is stopped, detach this "
                                                  "worker and attach a new one");
  }
  if (cut && reply.status().message() == "the other side has gone") {
    broken_.store(true);
    return gone();
  }
  return reply;
}

base::Status Worker::map(int descriptor, uint64_t bytes, device::Address address, uint32_t access,
                         Mapping* out) {
  GPUSHARE_ASSIGN_OR_RETURN(out->memory, device_->phys_import(descriptor, bytes, access));
  GPUSHARE_RETURN_IF_ERROR(device_->va_map(address, bytes, out->memory, 0));
  out->address = address;
  out->bytes = bytes;
  out->mapped = true;
  return {};
}

void Worker::unmap(Mapping* mapping) {
  if (std::exchange(mapping->mapped, false))
    log_failure(device_->va_unmap(mapping->address, mapping->bytes), "ending a turn");
  if (mapping->memory != nullptr)
    log_failure(device_->phys_release(std::exchange(mapping->memory, nullptr)), "ending a turn");
}

base::Status Worker::map_turn(const Reply& reply, std::span<const Descriptor> descriptors) {
  const size_t parts = reply.prefix_bytes > 0 ? 2 : 1;
  if (descriptors.size() != parts + (scratch_bytes_ > 0 ? 1 : 0) || reply.region_bytes != region_bytes_ ||
      reply.prefix_bytes >= region_bytes_)
    return {GPUSHARE_MALFORMED_INPUT, "the daemon's answer contradicts its last one"};
  uint64_t offset = 0;
  for (size_t i = 0; i < parts; ++i) {
    const uint64_t bytes = i + 1 < parts ? reply.prefix_bytes : region_bytes_ - offset;
    GPUSHARE_RETURN_IF_ERROR(
        map(descriptors[i].get(), bytes, region_ + offset, GPUSHARE_ACCESS_READ, &region_mappings_[i]));
    offset += bytes;
  }
  if (scratch_bytes_ == 0) return {};
  return map(descriptors[parts].get(), scratch_bytes_, scratch_, GPUSHARE_ACCESS_READ_WRITE,
             &scratch_mapping_);
}

void Worker::unmap_turn() {
  for (Mapping& mapping : region_mappings_) unmap(&mapping);
  unmap(&scratch_mapping_);
}

base::Status Worker::begin(uint64_t timeout_ns) {
  base::MutexLock lock(mutex_);
  if (in_turn()) return {GPUSHARE_INVALID_STATE, "this worker has the turn already; end it first"};
  std::vector<Descriptor> descriptors;
  GPUSHARE_ASSIGN_OR_RETURN(const Reply reply, ask(make_begin(next_sequence(), timeout_ns),
                                                   add(timeout_ns, kGraceNs), &descriptors));
  const base::Status status = map_turn(reply, descriptors);
  if (!status.ok()) {
    unmap_turn();
    descriptors.clear();
    log_failure(ask(make_end(next_sequence()), kGraceNs, nullptr).status(), "giving a turn back");
    return status;
  }
  arrived_at_begin_.store(reply.arrived, std::memory_order_relaxed);
  iteration_began_ns_.store(0, std::memory_order_relaxed);
  shortest_iteration_ns_.store(0, std::memory_order_relaxed);
  in_turn_.store(true, std::memory_order_release);
  return {};
}

// Called when an iteration that finds all layers begins, or when the turn ends: the iteration before took until
// now. Idle time of the worker between iterations is included, so the shortest time is the one to report.
void Worker::saw_iteration(uint64_t began_ns) const {
  const uint64_t before_ns = iteration_began_ns_.exchange(began_ns, std::memory_order_relaxed);
  if (before_ns == 0) return;
  const uint64_t took_ns = std::max<uint64_t>(1, base::host_now_ns() - before_ns);
  const uint64_t shortest_ns = shortest_iteration_ns_.load(std::memory_order_relaxed);
  if (shortest_ns == 0 || took_ns < shortest_ns)
    shortest_iteration_ns_.store(took_ns, std::memory_order_relaxed);
}

base::Status Worker::wait_layers(uint32_t first, uint32_t end, uint64_t timeout_ns) const {
  if (first >= end || end > layers_.size())
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("layers [%u, %u) asked; there are [0, %zu)", first, end, layers_.size())};
  if (first == 0 && in_turn()) {
    const bool whole = board_->arrived() >= layers_.size();
    if (whole) saw_iteration(base::host_now_ns());
  }
  base::Deadline deadline;
  bool timed = false;
  for (;;) {
    if (!in_turn()) return {GPUSHARE_INVALID_STATE, "this worker does not have the turn; begin one"};
    const uint32_t arrived = board_->arrived();
    if (arrived >= end) return {};
    GPUSHARE_RETURN_IF_ERROR(board_->failure());
    if (!timed) {  // the clock is read only by those who wait
      deadline = base::Deadline::after(timeout_ns);
      timed = true;
    }
    if (broken_.load() || hung_up(socket_.get())) return gone();
    if (deadline.passed())
      return {GPUSHARE_TIMED_OUT, base::format("layer %u is not on the device yet; %u of %zu are", end - 1,
                                               arrived, layers_.size())};
    board_->sleep(arrived, std::min(kLookNs, std::max<uint64_t>(timeout_ns, 1)));
  }
}

base::Status Worker::end() {
  base::MutexLock lock(mutex_);
  if (!in_turn()) return {GPUSHARE_INVALID_STATE, "this worker does not have the turn; begin one"};
  saw_iteration(0);
  in_turn_.store(false, std::memory_order_release);
  unmap_turn();
  return ask(make_end(next_sequence(), shortest_iteration_ns_.load(std::memory_order_relaxed)), kGraceNs,
             nullptr)
      .status();
}

base::Result<DaemonStatus> query_status(const std::string& socket, uint64_t timeout_ns) {
  GPUSHARE_ASSIGN_OR_RETURN(const Descriptor descriptor, connect_to(socket, "gpushare model-daemon"));
  const StatusRequest request = make_status(1);
  (void)send_message(descriptor.get(), bytes_of(request));  // the answer tells
  std::vector<Descriptor> tables;
  GPUSHARE_RETURN_IF_ERROR(receive_reply(descriptor.get(), 1, base::Deadline::after(timeout_ns), &tables)
                               .status()
                               .with_context("daemon at " + socket));
  if (tables.size() != 1)
    return base::Status(GPUSHARE_MALFORMED_INPUT, "the daemon's answer lacks its table");
  GPUSHARE_ASSIGN_OR_RETURN(const std::string table, read_table_file(tables[0].get()));
  return parse_status(table);
}

}  // namespace gpushare::daemon
