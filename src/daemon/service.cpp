// Connections, processes and their messages.
// SPDX-License-Identifier: Apache-2.0
#include "daemon/service.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/no_signals.hpp"
#include "base/units.hpp"

namespace gpushare::daemon {

using client::Descriptor;
using client::MessageType;

namespace {

constexpr uint64_t kWakeId = 0, kListenerId = 1;  // of epoll; processes have 2 * id, their pidfds one more
constexpr uint64_t kHelloNs = 1'000'000'000;      // a connection that has said nothing by then is closed
constexpr size_t kMessagesAtOnce = 64;            // of one process, before others are heard

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

// A descriptor of the process at the other end. Older kernels lack the option that cannot miss: there the process is found
// by its number, as it was when it connected.
Descriptor process_of(int socket, pid_t pid) {
  int number = -1;
  socklen_t bytes = sizeof(number);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &number, &bytes) == 0) return Descriptor(number);
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

constexpr uint64_t kHeldLookNs = 5'000'000, kLateLookNs = 1'000'000'000;  // a device that opens calls nobody

base::Status watch(int epoll, int descriptor, uint64_t id) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = id;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event) == 0) return {};
  return {GPUSHARE_IO_ERROR, std::string("epoll_ctl: ") + std::strerror(errno), errno};
}

// As CUDA and NVML write it.
std::string pci_text(uint32_t address) {
  return base::format("%04x:%02x:%02x.%x", address >> 16, address >> 8 & 0xff, address >> 3 & 0x1f,
                      address & 7);
}

}  // namespace

bool send_to(const Process& process, std::span<const std::byte> message, std::span<const int> descriptors) {
  if (!process.socket) return true;
  const base::Status sent = client::send_message(process.socket.get(), message, descriptors);
  return sent.ok() || sent.code() == GPUSHARE_UNAVAILABLE;  // the end of the process is noticed elsewhere
}

base::Result<std::unique_ptr<Service>> Service::start(ServiceOptions options) {
  std::unique_ptr<Service> service(new Service(std::move(options)));
  GPUSHARE_RETURN_IF_ERROR(service->open());
  return service;
}

base::Status Service::open() {
  started_ns_ = base::host_now_ns();
  if (options_.devices.empty()) return {GPUSHARE_INVALID_ARGUMENT, "no device is named"};
  if (options_.lease_ns == 0) return {GPUSHARE_INVALID_ARGUMENT, "the lease is 0; give a time above 0"};
  if (options_.max_lanes == 0) return {GPUSHARE_INVALID_ARGUMENT, "max_lanes is 0; allowed is 1 and more"};
  if (options_.share_lanes && options_.max_lanes > 1)
    return {
        GPUSHARE_INVALID_ARGUMENT,
        "lanes are shared where one session at a time has the device: leave max_lanes 1, or share_lanes off"};
  GPUSHARE_ASSIGN_OR_RETURN(listener_,
                            client::Listener::open(options_.socket, options_.all_users ? 0666 : 0600));
  GPUSHARE_RETURN_IF_ERROR(open_devices());
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  if (!wake_ || !epoll_) return {GPUSHARE_IO_ERROR, std::string("epoll: ") + std::strerror(errno), errno};
  GPUSHARE_RETURN_IF_ERROR(watch(epoll_.get(), wake_.get(), kWakeId));
  GPUSHARE_RETURN_IF_ERROR(watch(epoll_.get(), listener_.get(), kListenerId));
  if (options_.on_hang) GPUSHARE_RETURN_IF_ERROR(watch_.start(options_.step_patience_ns, options_.on_hang));
  try {
    const base::NoSignals no_signals;
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    return {GPUSHARE_HOST_OUT_OF_MEMORY, std::string("cannot start the daemon's thread: ") + error.what()};
  }
  return {};
}

Service::~Service() {
  stop_.store(true);
  if (wake_) wake();
  if (thread_.joinable()) thread_.join();
  watch_.begin_last();
  devices_.clear();  // their threads may still call wake()
  watch_.end();
}

void Service::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

// epoll_wait() itself counts in milliseconds, and turns are that short.
void Service::sleep(uint64_t next_tick_ns) const {
  const uint64_t now_ns = base::host_now_ns();
  if (next_tick_ns <= now_ns || next_tick_ns == UINT64_MAX) return;
  const uint64_t wait_ns = next_tick_ns - now_ns;
  const timespec time{static_cast<time_t>(wait_ns / 1'000'000'000),
                      static_cast<long>(wait_ns % 1'000'000'000)};
  pollfd any{epoll_.get(), POLLIN, 0};
  (void)ppoll(&any, 1, &time, nullptr);
}

void Service::handle_event(uint64_t id) {
  watch_.at_none();
  if (id == kListenerId) return accept_processes();
  if (id == kWakeId) {
    uint64_t drained = 0;
    [[maybe_unused]] const ssize_t got = read(wake_.get(), &drained, sizeof(drained));
    return;
  }
  const auto found = processes_.find(id / 2);
  if (found == processes_.end() || found->second->dead) return;
  if (found->second->device != nullptr) watch_.at(found->second->device->name());
  if (id % 2 != 0)
    died(*found->second);
  else
    receive(*found->second);
}

uint64_t Service::tick(uint64_t now_ns) {
  uint64_t in_ns = log_limit_.tick(now_ns);
  watch_.at_none();
  if (take_late()) in_ns = std::min(in_ns, kLateLookNs);
  if (handle_held(now_ns)) in_ns = std::min(in_ns, kHeldLookNs);
  for (const auto& device : devices_) {
    watch_.at(device->name());
    in_ns = std::min(in_ns, device->tick(now_ns));
  }
  watch_.at_none();
  for (const auto& [id, process] : processes_) {
    if (process->welcome || process->dead) continue;
    if (now_ns > process->connected_ns + kHelloNs)
      disconnect(*process, {});
    else
      in_ns = std::min(in_ns, kHelloNs);
  }
  return in_ns == UINT64_MAX ? UINT64_MAX : now_ns + in_ns;
}

void Service::pump() {
  for (const auto& device : devices_) {
    watch_.at(device->name());
    device->pump();
  }
}

void Service::serve() {
  std::array<epoll_event, 64> events{};
  uint64_t next_tick_ns = 0;
  while (!stop_.load()) {
    sleep(next_tick_ns);
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                 next_tick_ns == UINT64_MAX ? -1 : 0);
    if (count < 0 && errno != EINTR) {
      base::log(base::kError, std::string("daemon: epoll_wait: ") + std::strerror(errno));
      return;
    }
    watch_.begin();
    try {
      for (int i = 0; i < count; ++i) handle_event(events[static_cast<size_t>(i)].data.u64);
      pump();
      const uint64_t now_ns = base::host_now_ns();
      if (now_ns >= next_tick_ns || count != 0) next_tick_ns = tick(now_ns);
      watch_.at_none();
      sweep();
      if (options_.on_fault)
        for (const auto& device : devices_)
          if (const std::string wrong = device->check(); !wrong.empty()) options_.on_fault(wrong);
    } catch (const std::bad_alloc&) {
      try {
        base::log(base::kError, "daemon: out of host memory; the request at hand is lost");
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): not even the line
      }
    }
    watch_.end();
  }
}

std::vector<Process*> Service::connections_of(uid_t user, bool welcome) const {
  std::vector<Process*> out;
  for (const auto& [id, process] : processes_)
    if (process->peer.uid == user && process->welcome == welcome && !process->dead)
      out.push_back(process.get());
  return out;
}

base::Status Service::has_place(uid_t user) const {
  const size_t count = connections_of(user, true).size();
  // A preloaded process connects once for each device.
  if (count < options_.max_processes_per_user * devices_.size()) return {};
  return {GPUSHARE_QUEUE_FULL,
          base::format("user %u has %zu processes connected, as many as allowed", user, count)};
}

// Connections that have not said Hello have as many places of their own, and the oldest gives its place to a new one.
// So they cannot keep others out. The Hello of the oldest may have come meanwhile.
void Service::make_place(uid_t user) {
  const std::vector<Process*> silent = connections_of(user, false);  // the oldest first
  const size_t most = options_.max_processes_per_user * devices_.size();
  for (size_t i = 0; i + most <= silent.size(); ++i) {
    receive(*silent[i]);
    if (!silent[i]->welcome) disconnect(*silent[i], {});
  }
}

size_t Service::sessions_of(uid_t user) const {
  size_t count = 0;
  for (const auto& [id, process] : processes_)
    if (process->peer.uid == user) count += process->sessions.size();
  return count;
}

void Service::accept_processes() {
  for (;;) {
    client::Peer peer;
    base::Result<Descriptor> socket = client::accept_peer(listener_.get(), &peer);
    if (!socket.ok()) {
      if (socket.status().code() == GPUSHARE_NOT_READY) return;
      // Out of descriptors: those that wait stay in the backlog until some are free.
      base::log(base::kWarning, "daemon: " + socket.status().to_string());
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return;
    }
    base::Status refused;
    if (!options_.all_users && peer.uid != geteuid() && peer.uid != 0)
      refused = {GPUSHARE_UNAVAILABLE,
                 base::format("this daemon serves user %u alone; you are user %u", geteuid(), peer.uid)};
    else
      refused = has_place(peer.uid);
    if (refused.ok()) make_place(peer.uid);
    auto process = std::make_unique<Process>();
    process->id = next_id_++;
    process->peer = peer;
    process->socket = std::move(*socket);
    process->connected_ns = base::host_now_ns();
    process->pidfd = process_of(process->socket.get(), peer.pid);
    if (refused.ok() && !process->pidfd)
      refused = {GPUSHARE_IO_ERROR, std::string("cannot watch your process: ") + std::strerror(errno), errno};
    if (refused.ok()) refused = watch(epoll_.get(), process->socket.get(), 2 * process->id);
    if (refused.ok()) refused = watch(epoll_.get(), process->pidfd.get(), 2 * process->id + 1);
    if (!refused.ok()) {
      count_refusal(refusals_, refused);
      auto welcome = client::make_message<MessageType::kWelcome>();
      welcome.code = refused.code();
      client::put_text(welcome.text, refused.message());
      (void)send_to(*process, client::bytes_of(welcome));
      continue;
    }
    processes_.emplace(process->id, std::move(process));
  }
}

void Service::receive(Process& process) {
  std::array<std::byte, client::kMaxMessageBytes + 64> buffer;
  for (size_t i = 0; i < kMessagesAtOnce && !process.dead && process.socket && !process.held; ++i) {
    std::vector<client::Descriptor> descriptors;
    const auto message = client::receive_message(process.socket.get(), buffer, &descriptors);
    if (message.status().code() == GPUSHARE_NOT_READY) return;
    if (!message.ok()) {
      disconnect(process, {});
      return;
    }
    const base::Status handled = handle(process, *message, std::move(descriptors));
    if (!handled.ok()) {
      auto reply = client::make_message<MessageType::kReply>();
      reply.code = handled.code();
      client::put_text(reply.text, handled.message());
      (void)send_to(process, client::bytes_of(reply));
      disconnect(process, handled.message());
      return;
    }
  }
}

void count_refusal(Refusals& refusals, const base::Status& status) {
  if (!status.ok()) ++refusals[base::status_name(status.code())];
}

void Request::answer(const base::Status& status, uint32_t value, const std::string& told,
                     std::span<const int> files) const {
  count_refusal(refusals, status);
  if (sequence == 0) return;
  auto reply = client::make_message<MessageType::kReply>(sequence);
  reply.code = status.code();
  reply.value = value;
  client::put_text(reply.text, status.ok() ? told : status.message());
  if (!send_to(process, client::bytes_of(reply), files)) client::shut(process.socket);
}

base::Status Service::handle(Process& process, std::span<const std::byte> message,
                             std::vector<client::Descriptor> descriptors) {
  GPUSHARE_ASSIGN_OR_RETURN(const MessageType type, client::check_message(message, client::Side::kProcess));
  const Request request{process, client::fields_of<client::Header>(message).sequence, descriptors, refusals_};
  const bool first =
      type == MessageType::kHello || type == MessageType::kStatusRequest || type == MessageType::kSetCapacity;
  if (!first && !process.welcome) return {GPUSHARE_MALFORMED_INPUT, "the first message is no Hello"};
  switch (type) {
#define GPUSHARE_CASE_EVENT(name, fields, handler)
#define GPUSHARE_CASE_ANSWER(name, fields, handler)
#define GPUSHARE_CASE_NEWS(name, fields, handler)
#define GPUSHARE_CASE_CALL(name, fields, handler) \
  case MessageType::k##name:                      \
    return on_##handler(request, client::fields_of<client::fields>(message));
#define GPUSHARE_CASE(name, fields, kind, handler) GPUSHARE_CASE_##kind(name, fields, handler)
    GPUSHARE_MESSAGES(GPUSHARE_CASE)
#undef GPUSHARE_CASE
#undef GPUSHARE_CASE_CALL
#undef GPUSHARE_CASE_ANSWER
#undef GPUSHARE_CASE_NEWS
#undef GPUSHARE_CASE_EVENT
    default:
      break;
  }
  // Every message about a session begins alike.
  const auto found = process.sessions.find(client::fields_of<client::SessionMessage>(message).session);
  if (found == process.sessions.end())
    request.answer({GPUSHARE_NOT_FOUND, "no such session"});
  else
    process.device->handle(*found->second, type, message, request);
  return {};
}

base::Status Service::on_context(const Request& request, const client::SessionMessage& message) {
  const base::Status counted =
      request.process.device->set_context(request.process, message.value, request.sequence != 0);
  if (counted.ok()) forget_closed(request.process);
  request.answer(counted);
  return {};
}

base::Status Service::on_arrive(const Request& request, const client::Arrive& message) {
  if (request.process.device->arrives_later(message, base::host_now_ns()))
    hold(request, message);
  else
    arrive(request, message);
  return {};
}

void Service::arrive(const Request& request, const client::Arrive& message) {
  Process& process = request.process;
  if (sessions_of(process.peer.uid) >= options_.max_sessions_per_user) {
    request.answer({GPUSHARE_QUEUE_FULL, base::format("user %u has %u sessions, as many as allowed",
                                                      process.peer.uid, options_.max_sessions_per_user)});
    return;
  }
  std::unique_ptr<GroupPage> page;
  if (!request.descriptors.empty())
    page = GroupPage::open(std::move(request.descriptors.front()), process.pci_address, process.peer.uid,
                           patience_);
  uint32_t slot = 0;
  const base::Status arrived = process.device->arrive(process, message, std::move(page), &slot);
  request.answer(arrived, slot);
}

// Nothing of a process that is not read may wake the service, not even that its socket has closed.
void Service::hold(const Request& request, const client::Arrive& message) {
  request.process.held.emplace(Process::Held{message, std::move(request.descriptors)});
  (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, request.process.socket.get(), nullptr);
}

bool Service::handle_held(uint64_t now_ns) {
  bool waits = false;
  for (const auto& [id, process] : processes_) {
    if (!process->held || process->dead) continue;
    watch_.at(process->device->name());
    if (process->device->arrives_later(process->held->message, now_ns)) {
      waits = true;
      continue;
    }
    Process::Held held = *std::exchange(process->held, std::nullopt);
    if (const base::Status watched = watch(epoll_.get(), process->socket.get(), 2 * id); !watched.ok()) {
      disconnect(*process, watched.message());
      continue;
    }
    arrive({*process, held.message.header.sequence, held.descriptors, refusals_}, held.message);
    process->device->pump();
  }
  return waits;
}

base::Status Service::on_image_close(const Request& request, const client::SessionMessage& message) {
  request.process.device->images().close(request.process, message.value);
  return {};
}

base::Status Service::on_image_unmapped(const Request& request, const client::SessionMessage& message) {
  request.process.device->images().unmapped(request.process, message.value);
  return {};
}

base::Status Service::on_hello(const Request& request, const client::Hello& message) {
  if (request.process.welcome) return {GPUSHARE_MALFORMED_INPUT, "a second Hello"};
  const base::Status welcomed = welcome(request.process, message);
  if (welcomed.ok()) return {};
  count_refusal(refusals_, welcomed);
  auto refusal = client::make_message<MessageType::kWelcome>();
  refusal.code = welcomed.code();
  client::put_text(refusal.text, welcomed.message());
  (void)send_to(request.process, client::bytes_of(refusal));
  return welcomed;
}

// The same runtime under a new connection declares everything anew.
void Service::meet_again(Process& process, SharedDevice& device, uint64_t instance) {
  for (const auto& [id, other] : processes_) {
    if (other.get() == &process || other->socket || other->dead || other->peer.pid != process.peer.pid ||
        (other->instance != instance && !is_closed(*other, device)))
      continue;
    if (other->device == &device)
      (void)device.set_context(process, std::max(device.context_bytes(process), device.context_bytes(*other)),
                               false);
    died(*other);
  }
  watch_.at(device.name());
}

base::Status Service::welcome(Process& process, const client::Hello& message) {
  GPUSHARE_ASSIGN_OR_RETURN(SharedDevice* const device, find_device(message));
  watch_.at(device->name());
  meet_again(process, *device, message.instance);
  GPUSHARE_RETURN_IF_ERROR(has_place(process.peer.uid));
  process.passes_turns = (message.flags & client::kPassesTurns) != 0;
  GPUSHARE_ASSIGN_OR_RETURN(process.leases, device->leases_for(process.peer.uid, process.passes_turns));
  process.device = device;
  process.instance = message.instance;
  process.program = client::text_of(message.program);
  process.pci_address = static_cast<uint32_t>(message.pci_address);
  process.welcome = true;
  auto welcome = client::make_message<MessageType::kWelcome>();
  welcome.capacity_bytes = device->capacity_bytes();
  welcome.slots = process.leases->page->slots();
  client::put_text(welcome.device, device->name());
  client::put_text(welcome.policy, device->policy_name());
  const int file = process.leases->page->file();
  if (!send_to(process, client::bytes_of(welcome), std::span<const int>(&file, 1)))
    return {GPUSHARE_QUEUE_FULL, "the process does not read"};
  return {};
}

bool Service::is_closed(const Process& process, SharedDevice& device) {
  return !process.socket && !process.dead && process.device == &device && process.sessions.empty() &&
         !device.images().in_use(process);
}

void Service::forget_closed(const Process& process) {
  for (const auto& [id, other] : processes_)
    if (other->peer.pid == process.peer.pid && is_closed(*other, *process.device)) died(*other);
}

base::Result<SharedDevice*> Service::find_device(const client::Hello& message) const {
  const std::string wanted = client::text_of(message.device);
  const auto pci = static_cast<uint32_t>(message.pci_address);
  // A device that has not opened may have the address.
  const bool by_address =
      wanted.empty() && pci != 0 &&
      (!late_.empty() || std::any_of(devices_.begin(), devices_.end(),
                                     [](const auto& each) { return each->pci_address() != 0; }));
  // Without a name: the operator's first device, open or not, because a process that comes back has its memory there.
  const bool first = wanted.empty() && !by_address;
  std::string names;
  if (const std::string why = late(first ? named_.front() : wanted); !why.empty())
    return base::Status(GPUSHARE_UNAVAILABLE, why);
  for (const auto& each : devices_) {
    const bool meant = first        ? each.get() == first_device_
                       : by_address ? each->pci_address() == pci
                                    : each->name() == wanted;
    if (meant) return each.get();
    names += (names.empty() ? "" : ", ") + each->name();
    if (by_address) names += " at " + pci_text(each->pci_address());
  }
  if (by_address && !late_.empty())
    return base::Status(GPUSHARE_UNAVAILABLE,
                        "no device at " + pci_text(pci) + " is open; " + late(late_.front().spec));
  return base::Status(GPUSHARE_NOT_FOUND, "this daemon has no device " +
                                              (by_address ? "at " + pci_text(pci) : "'" + wanted + "'") +
                                              "; it has: " + names);
}

client::ServiceStatus Service::status(uid_t user) const {
  client::ServiceStatus out;
  out.pid = static_cast<uint64_t>(getpid());
  out.uptime_ns = base::host_now_ns() - started_ns_;
  out.lost_processes = lost_processes_;
  const bool all = user == 0 || user == geteuid();
  for (const auto& device : devices_) out.devices.push_back(device->status());
  for (const auto& [id, process] : processes_) {
    if (!process->welcome || (!all && process->peer.uid != user)) continue;
    client::ProcessStatus line;
    line.pid = static_cast<uint64_t>(process->peer.pid);
    line.uid = process->peer.uid;
    line.program = process->program;
    line.device = process->device->name();
    line.state = process->socket ? "connected" : "owing";
    line.sessions = process->sessions.size();
    line.context_bytes = process->device->context_bytes(*process);
    out.processes.push_back(std::move(line));
    for (const auto& [number, session] : process->sessions)
      out.sessions.push_back(process->device->status_of(*session));
  }
  // Images are read by the service's own user, and their status shows what is on its disk.
  if (!all) return out;
  for (const auto& device : devices_)
    for (client::ImageStatus& image : device->images().status()) out.images.push_back(std::move(image));
  for (const auto& [cause, count] : refusals_) out.refusals.push_back({cause, count});
  return out;
}

base::Status Service::set_capacity(const Process& process, const client::SetCapacity& message) {
  if (process.peer.uid != geteuid() && process.peer.uid != 0)
    return {GPUSHARE_UNAVAILABLE, "only the daemon's operator, its own user or root, sets the capacity"};
  const std::string name = client::text_of(message.device);
  if (const std::string why = late(name.empty() ? named_.front() : name); !why.empty())
    return {GPUSHARE_UNAVAILABLE, why};
  for (const auto& device : devices_)
    if (name.empty() ? device.get() == first_device_ : device->name() == name) {
      watch_.at(device->name());
      return device->set_capacity(message.bytes);
    }
  return {GPUSHARE_NOT_FOUND, "this daemon has no device '" + name + "'"};
}

// The devices are pumped first, so the caller finds the new capacity on the page when the answer comes.
base::Status Service::on_set_capacity(const Request& request, const client::SetCapacity& message) {
  const base::Status set = set_capacity(request.process, message);
  pump();
  request.answer(set);
  return {};
}

// The answer tells what all messages before it have led to.
base::Status Service::on_status_request(const Request& request, const client::StatusRequest&) {
  pump();
  const auto file = client::make_table_file(client::encode_status(status(request.process.peer.uid)));
  const int number = file.ok() ? file->get() : -1;
  request.answer(file.status(), 0, {}, std::span<const int>(&number, file.ok() ? 1 : 0));
  return {};
}

void Service::disconnect(Process& process, const std::string& why) {
  if (!process.socket) return;
  if (!why.empty())
    log_limit_.warn(process.peer.uid,
                    base::format("daemon: process %d is disconnected: %s", process.peer.pid, why.c_str()),
                    base::host_now_ns());
  process.socket = Descriptor();
  process.held.reset();
  std::vector<RemoteSession*> sessions;
  for (const auto& [number, session] : process.sessions) sessions.push_back(session);
  for (RemoteSession* session : sessions) process.device->disconnected(*session);
  if (process.device != nullptr && process.device->images().in_use(process))
    process.device->disconnected(process);
  else if (sessions.empty() && (process.device == nullptr || process.device->context_bytes(process) == 0))
    process.dead = true;
}

void Service::died(Process& process) {
  process.dead = true;
  if (process.device != nullptr) watch_.at(process.device->name());
  if (!process.sessions.empty()) ++lost_processes_;
  while (!process.sessions.empty()) process.device->remove(*process.sessions.begin()->second);
  if (process.device != nullptr) process.device->died(process);
  process.socket = Descriptor();
}

void Service::sweep() {
  std::erase_if(processes_, [](const auto& entry) { return entry.second->dead; });
}

}  // namespace gpushare::daemon
