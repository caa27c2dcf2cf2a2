// SPDX-License-Identifier: Apache-2.0
#include "daemon/kernel_limits.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "base/dynamic_library.hpp"
#include "base/log.hpp"
#include "base/mutex.hpp"
#include "base/no_signals.hpp"
#include "base/saturate.hpp"
#include "daemon/metrics.hpp"

namespace gpushare::daemon {
namespace {

// As nvml.h declares them.
struct SetMemoryLimits {
  const char* cgroup;
  unsigned long long soft_bytes;
  unsigned long long hard_bytes;
};
struct Memory {
  unsigned long long total, free, used;
};
constexpr unsigned long long kNoLimit = ~0ull;
constexpr int kNotSupported = 3, kNoPermission = 4, kFunctionNotFound = 13;

struct Nvml {
  int (*init)() = nullptr;
  int (*find_device)(const char* address, void** out_device) = nullptr;
  int (*memory)(void* device, Memory* out_memory) = nullptr;
  int (*set_limits)(void* device, SetMemoryLimits* limits) = nullptr;
  void* device = nullptr;
  std::string missing;  // why there are no limits; empty: there are
};

template <class Function>
void find(const base::DynamicLibrary& library, const char* name, Function* out_function) {
  *out_function = reinterpret_cast<Function>(library.find(name));
}

Nvml load(const std::string& path, uint32_t pci_address) {
  Nvml nvml;
  base::Result<base::DynamicLibrary> library = base::DynamicLibrary::open(path);
  if (!library.ok()) {
    nvml.missing = library.status().message();
    return nvml;
  }
  find(*library, "nvmlInit_v2", &nvml.init);
  find(*library, "nvmlDeviceGetHandleByPciBusId_v2", &nvml.find_device);
  find(*library, "nvmlDeviceGetMemoryInfo", &nvml.memory);
  find(*library, "nvmlDeviceSetMemoryLimits_v1", &nvml.set_limits);
  const std::string address = base::format("%04x:%02x:%02x.%x", pci_address >> 16, pci_address >> 8 & 0xff,
                                           pci_address >> 3 & 0x1f, pci_address & 7);
  if (nvml.init == nullptr || nvml.find_device == nullptr || nvml.memory == nullptr ||
      nvml.set_limits == nullptr)
    nvml.missing = "NVML has no such function: drivers from r615 on have it";
  else if (const int failed = nvml.init(); failed != 0)
    nvml.missing = base::format("nvmlInit failed (%d)", failed);
  else if (const int unknown = nvml.find_device(address.c_str(), &nvml.device); unknown != 0)
    nvml.missing = base::format("NVML knows no device at %s (%d)", address.c_str(), unknown);
  library->release();
  return nvml;
}

std::string why(int result) {
  switch (result) {
    case kNotSupported:
    case kFunctionNotFound:
      return "this driver or device does not support them";
    case kNoPermission:
      return "only a daemon of root may set them";
    default:
      return base::format("NVML error %d", result);
  }
}

std::string read_all(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The lines of a file that this user alone can have written; none if there is no such file.
std::set<std::string> own_lines(const std::string& path) {
  constexpr size_t kMostBytes = 1 << 20;
  std::set<std::string> lines;
  const int file = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return lines;
  struct stat info {};
  std::string text;
  if (fstat(file, &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == geteuid() &&
      (info.st_mode & 022) == 0) {
    text.resize(std::min<size_t>(static_cast<size_t>(info.st_size), kMostBytes));
    text.resize(static_cast<size_t>(std::max<ssize_t>(0, pread(file, text.data(), text.size(), 0))));
  }
  close(file);
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);)
    if (!line.empty() && line.front() == '/') lines.insert(line);
  return lines;
}

// False if that cannot be told. The path came from a file, so it may be no path of a cgroup.
bool is_gone(const std::string& path) {
  std::error_code error;
  return !std::filesystem::exists(path, error) && error != std::errc::permission_denied;
}

// Replaces the file, by a rename: a daemon that is killed meanwhile leaves one of the two.
void write_lines(const std::string& path, const std::set<std::string>& lines) {
  if (lines.empty()) {
    (void)unlink(path.c_str());
    return;
  }
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  const std::string made = path + ".new";
  (void)unlink(made.c_str());
  const int file = open(made.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (file < 0) return;
  const bool whole = write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(file);
  if (!whole || rename(made.c_str(), path.c_str()) != 0) (void)unlink(made.c_str());
}

}  // namespace

std::string cgroup_in(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    if (text.compare(at, 3, "0::") == 0) return text.substr(at + 3, end - at - 3);
    at = end + 1;
  }
  return {};
}

struct KernelLimits::State {
  struct Limit {
    std::string cgroup;
    uint64_t wanted_bytes = 0;
    uint64_t asked_bytes =
        UINT64_MAX;  // what NVML was asked to set; 0: no limit; UINT64_MAX: not asked yet, or not since the group came back
    uint64_t set_bytes = 0;  // the limit that NVML has said is set; 0: none
    bool gone = false;       // to be cleared
  };

  State(uint32_t address, Places where) : pci_address(address), places(std::move(where)) {
    if (places.record.empty()) return;
    places.record += base::format(".%08x", address);
    recorded = own_lines(places.record);
  }
  void run();
  // Clears limits that an earlier daemon left on cgroups in which this daemon has no group.
  void clear_left();
  void load_once() {
    if (!std::exchange(loaded, true)) nvml = load(places.nvml, pci_address);
  }
  // For the thread: notes in the file that `cgroup` may have a limit of the driver's, or has none. True if that is new.
  bool record(const std::string& cgroup, bool may_have) {
    if (!(may_have ? recorded.insert(cgroup).second : recorded.erase(cgroup) > 0)) return false;
    if (!places.record.empty()) write_lines(places.record, recorded);
    return true;
  }
  // Starts the thread unless it runs; false: it cannot be had.
  static bool start(const std::shared_ptr<State>& state) GPUSHARE_REQUIRES(state->mutex);
  // The limit that NVML is to set for the claim; 0: none, because another group is in the cgroup, too, and would be
  // limited.
  uint64_t due_bytes(uint64_t claim, const Limit& limit) const GPUSHARE_REQUIRES(mutex) {
    return any_in(limit.cgroup, claim) ? 0 : limit.wanted_bytes;
  }
  bool any_in(const std::string& cgroup, uint64_t but) const GPUSHARE_REQUIRES(mutex) {
    return std::any_of(limits.begin(), limits.end(), [&](const auto& entry) {
      return entry.first != but && !entry.second.gone && entry.second.cgroup == cgroup;
    });
  }
  // For the thread: true if no claim explains the driver's limit on the cgroup, so that an earlier daemon must have
  // left it.
  bool has_left(const std::string& cgroup) const GPUSHARE_REQUIRES(mutex) {
    return recorded.count(cgroup) > 0 && std::none_of(limits.begin(), limits.end(), [&](const auto& entry) {
             return entry.second.cgroup == cgroup && entry.second.set_bytes != 0;
           });
  }
  // The next limit that is not as it should be; null: all are.
  std::map<uint64_t, Limit>::iterator next() GPUSHARE_REQUIRES(mutex);
  int apply(const std::string& cgroup, uint64_t limit_bytes);
  void say(const std::string& reason) GPUSHARE_REQUIRES(mutex) {
    if (!std::exchange(said, true))
      base::log(base::kInfo, "daemon: the kernel does not limit the memory of groups as well: " + reason);
  }

  const uint32_t pci_address;
  Places places;
  Nvml nvml;  // the thread's; so the next two
  bool loaded = false;
  std::set<std::string> recorded;  // cgroups that may have a limit
  base::Mutex mutex;
  base::ConditionVariable changed;
  std::map<uint64_t, Limit> limits GPUSHARE_GUARDED_BY(mutex);
  bool started GPUSHARE_GUARDED_BY(mutex) = false;
  bool stop GPUSHARE_GUARDED_BY(mutex) = false;
  bool ended GPUSHARE_GUARDED_BY(mutex) = false;
  bool said GPUSHARE_GUARDED_BY(mutex) = false;
};

std::map<uint64_t, KernelLimits::State::Limit>::iterator KernelLimits::State::next() {
  // Limits of ended claims go first: a later claim may be in the same cgroup already, and its limit must stay.
  const auto gone =
      std::find_if(limits.begin(), limits.end(), [](const auto& entry) { return entry.second.gone; });
  if (gone != limits.end()) return gone;
  for (auto each = limits.begin(); each != limits.end(); ++each)
    if (each->second.asked_bytes != due_bytes(each->first, each->second)) return each;
  return limits.end();
}

// limit_bytes of 0: none.
int KernelLimits::State::apply(const std::string& cgroup, uint64_t limit_bytes) {
  const std::string path = places.cgroups + cgroup;
  SetMemoryLimits asked{path.c_str(), 0, kNoLimit};
  Memory memory{};
  if (limit_bytes > 0 && nvml.memory(nvml.device, &memory) == 0) {
    asked.hard_bytes = std::min<uint64_t>(base::add_saturated(limit_bytes, kSlackBytes), memory.total);
    asked.soft_bytes = std::min<uint64_t>(limit_bytes, asked.hard_bytes);
  } else if (limit_bytes > 0) {
    asked.hard_bytes = base::add_saturated(limit_bytes, kSlackBytes);
  }
  return nvml.set_limits(nvml.device, &asked);
}

void KernelLimits::State::clear_left() {
  if (recorded.empty()) return;
  load_once();
  if (!nvml.missing.empty()) return;
  for (const std::string& cgroup : std::set<std::string>(recorded)) {
    {
      base::MutexLock lock(mutex);
      if (any_in(cgroup, UINT64_MAX)) continue;  // its group has come back, and gets its limit anew
    }
    if (apply(cgroup, 0) == 0 || is_gone(places.cgroups + cgroup)) record(cgroup, false);
  }
}

void KernelLimits::State::run() {
  clear_left();
  base::MutexLock lock(mutex);
  for (;;) {
    const auto found = next();
    if (found == limits.end()) {
      if (stop) break;
      changed.wait(mutex);
      continue;
    }
    const uint64_t claim = found->first;
    const uint64_t wanted = found->second.gone ? 0 : due_bytes(claim, found->second);
    const std::string cgroup = found->second.cgroup;
    const bool was_set = found->second.set_bytes != 0;
    found->second.asked_bytes = wanted;
    if (found->second.gone) limits.erase(found);
    if (wanted == 0 && !was_set && !has_left(cgroup)) continue;
    lock.unlock();
    load_once();
    const bool added = wanted != 0 && nvml.missing.empty() && record(cgroup, true);
    const int result = nvml.missing.empty() ? apply(cgroup, wanted) : kNotSupported;
    if (wanted == 0 ? result == 0 : result != 0 && added) record(cgroup, false);
    lock.lock();
    if (wanted != 0 && result != 0) say(nvml.missing.empty() ? why(result) : nvml.missing);
    if (const auto still = limits.find(claim); still != limits.end() && result == 0)
      still->second.set_bytes = wanted;
  }
  ended = true;
  changed.notify_all();
}

bool KernelLimits::State::start(const std::shared_ptr<State>& state) {
  if (std::exchange(state->started, true)) return true;
  try {
    const base::NoSignals no_signals;
    std::thread([state] { state->run(); }).detach();
    return true;
  } catch (const std::system_error& error) {
    state->started = false;
    state->say(std::string("no thread can be started: ") + error.what());
    return false;
  }
}

KernelLimits::KernelLimits(uint32_t pci_address, Places places)
    : state_(std::make_shared<State>(pci_address, std::move(places))) {
  base::MutexLock lock(state_->mutex);
  if (!state_->recorded.empty()) (void)State::start(state_);
}

KernelLimits::~KernelLimits() {
  base::MutexLock lock(state_->mutex);
  if (!state_->started) return;
  for (auto& [claim, limit] : state_->limits) limit.gone = true;
  state_->stop = true;
  state_->changed.notify_all();
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(state_->places.end_ns);
  // If NVML hangs, the thread is left to itself; it holds the state.
  while (!state_->ended && state_->changed.wait_until(state_->mutex, until)) {
  }
}

void KernelLimits::set(uint64_t claim, pid_t process, uint64_t limit_bytes) {
  if (limit_bytes == 0 || limit_bytes == UINT64_MAX) return clear(claim);
  base::MutexLock lock(state_->mutex);
  const auto known = state_->limits.find(claim);
  if (known != state_->limits.end()) {
    known->second.wanted_bytes = limit_bytes;
    if (std::exchange(known->second.gone, false)) known->second.asked_bytes = UINT64_MAX;  // asked anew
  } else {
    const std::string text = read_all(state_->places.processes + "/" + std::to_string(process) + "/cgroup");
    const std::string cgroup = cgroup_in(text);
    const bool own = cgroup.compare(cgroup.rfind('/') + 1, sizeof kCgroupName - 1, kCgroupName) == 0;
    if (cgroup.empty() || (!own && container_in(cgroup).empty()))
      return state_->say("the cgroup '" + cgroup + "' of process " + std::to_string(process) +
                         " is not its group's own");
    if (state_->any_in(cgroup, claim)) state_->say("the cgroup '" + cgroup + "' has two groups");
    state_->limits[claim] = {cgroup, limit_bytes, UINT64_MAX, 0, false};
  }
  if (!State::start(state_)) {
    state_->limits.erase(claim);
    return;
  }
  state_->changed.notify_all();
}

void KernelLimits::clear(uint64_t claim) {
  base::MutexLock lock(state_->mutex);
  const auto known = state_->limits.find(claim);
  if (known == state_->limits.end()) return;
  known->second.gone = true;
  state_->changed.notify_all();
}

bool KernelLimits::holds(uint64_t claim) const {
  base::MutexLock lock(state_->mutex);
  const auto known = state_->limits.find(claim);
  return known != state_->limits.end() && !known->second.gone &&
         known->second.asked_bytes == known->second.wanted_bytes &&
         known->second.set_bytes == known->second.wanted_bytes;
}

}  // namespace gpushare::daemon
