// The driver's own limits behind the shim's: which cgroup, which bytes, when they follow and when they go. NVML is the recording
// driver's; the service runs over the cuda backend on the stand-in for the driver.
// SPDX-License-Identifier: Apache-2.0
#include "daemon/kernel_limits.hpp"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

#include "base/units.hpp"
#include "cuda_recorder/recorder.h"
#include "shim/group.hpp"
#include "unit/daemon/lane_jobs.hpp"
#include "unit/daemon/raw_process.hpp"

using namespace gpushare;
using namespace gpushare::test;
using daemon::KernelLimits;

namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr char kOwn[] = "0::/system.slice/daemon.scope/gpushare-exec-7\n";

template <class Function>
Function recorder(const char* name) {
  static void* const library = dlopen(GPUSHARE_RECORDER, RTLD_NOW | RTLD_LOCAL);
  REQUIRE(library != nullptr);
  return reinterpret_cast<Function>(dlsym(library, name));
}
#define GPUSHARE_RECORDER_CALL(name) recorder<decltype(&name)>(#name)

// What NVML has set last.
struct Set {
  std::string cgroup;
  uint64_t soft = 0, hard = 0, calls = 0;
};
Set limits_set() {
  char cgroup[256] = "";
  Set out;
  out.calls = GPUSHARE_RECORDER_CALL(recorder_limits)(cgroup, sizeof cgroup, &out.soft, &out.hard);
  out.cgroup = cgroup;
  return out;
}
bool cleared() {
  const Set now = limits_set();
  return now.soft == 0 && now.hard == UINT64_MAX;
}

// A folder as /proc, in which processes have the cgroups that a test gives them.
struct Processes {
  Processes() {
    REQUIRE(mkdtemp(folder) != nullptr);
    // The devices that NVML knows, by bus.
    setenv("RECORDER_DEVICES", "1", 1);
    GPUSHARE_RECORDER_CALL(recorder_set_limits)(0);
  }
  ~Processes() { std::filesystem::remove_all(folder); }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;
  void add(pid_t process, const std::string& cgroup) const {
    const std::string of = std::string(folder) + "/" + std::to_string(process);
    std::filesystem::create_directories(of);
    std::ofstream(of + "/cgroup") << cgroup;
  }
  KernelLimits::Places places(const std::string& nvml = GPUSHARE_RECORDER) const {
    constexpr uint64_t kHour = 3'600'000'000'000;  // the end is not cut short by a machine that stands still
    return {nvml, folder, "/sys/fs/cgroup", {}, kHour};
  }
  char folder[32] = "/tmp/gpushare-XXXXXX";
};
constexpr uint32_t kDevice = 1 << 8;  // bus 1

}  // namespace

TEST_CASE("the cgroup of a process is the one of version 2") {
  CHECK(daemon::cgroup_in("4:memory:/a\n0::/user.slice/b\n") == "/user.slice/b");
  CHECK(daemon::cgroup_in("0::/only") == "/only");
  CHECK(daemon::cgroup_in("4:memory:/a\n").empty());
  CHECK(daemon::cgroup_in("").empty());
}

TEST_CASE("a group's limit is the driver's too, follows it, and goes with it") {
  const Processes processes;
  processes.add(7, std::string("4:memory:/x\n") + kOwn);
  processes.add(8, kOwn);
  {
    KernelLimits limits(kDevice, processes.places());
    CHECK_FALSE(limits.holds(1));
    limits.set(1, 7, kGiB);
    eventually([&] { return limits.holds(1); });
    Set now = limits_set();
    CHECK(now.cgroup == "/sys/fs/cgroup/system.slice/daemon.scope/gpushare-exec-7");
    CHECK(now.soft == kGiB);
    CHECK(now.hard == kGiB + KernelLimits::kSlackBytes);
    limits.set(1, 7, kGiB);  // nothing new
    limits.set(1, 7, 2 * kGiB);
    eventually([&] { return limits_set().soft == 2 * kGiB; });
    CHECK(limits_set().calls == now.calls + 1);
    eventually([&] { return limits.holds(1); });
    limits.set(2, 8, kGiB);  // a second group in the cgroup, which must not meet the limit of the first
    eventually(cleared);
    eventually([&] { return !limits.holds(1); });
    CHECK_FALSE(limits.holds(2));
    limits.clear(1);
    eventually([&] { return limits.holds(2); });
    CHECK(limits_set().soft == kGiB);
    limits.set(1, 7, kGiB);
    eventually(cleared);
    limits.clear(2);  // and both change their minds before it is carried out, or after
    limits.set(2, 8, kGiB);
    limits.clear(1);
    eventually([&] { return limits.holds(2); });
    limits.set(2, 8, UINT64_MAX);  // no limit any more
    eventually(cleared);
    limits.set(2, 8, kGiB);
    eventually([&] { return limits.holds(2); });
  }
  CHECK(cleared());
}

TEST_CASE("a limit stands where the claim that had the cgroup before is cleared") {
  const Processes processes;
  processes.add(7, kOwn);
  KernelLimits limits(kDevice, processes.places());
  // The older claim has the lesser number, or the greater one: it was refused the cgroup, and asks again.
  for (const auto& [first, second] : {std::pair<uint64_t, uint64_t>{1, 2}, {4, 3}}) {
    limits.set(first, 7, 2 * kGiB);
    eventually([&, claim = first] { return limits.holds(claim); });
    const uint64_t calls = limits_set().calls;
    limits.clear(first);
    limits.set(second, 7, kGiB);
    eventually([&] { return limits_set().calls == calls + 2; });
    CHECK(limits_set().soft == kGiB);
    eventually([&, claim = second] { return limits.holds(claim); });
    limits.clear(second);
    eventually(cleared);
  }
}

TEST_CASE("a daemon clears the limits that a killed one left, but not those of groups that have come back") {
  const Processes processes;
  processes.add(7, kOwn);
  KernelLimits::Places places = processes.places();
  places.record = std::string(processes.folder) + "/limits";
  const std::string record = places.record + ".00000100";
  const auto lines = [&] {
    std::ifstream file(record);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string own = "/system.slice/daemon.scope/gpushare-exec-7\n";
  {
    KernelLimits limits(kDevice, places);
    limits.set(1, 7, kGiB);
    eventually([&] { return limits.holds(1); });
    CHECK(lines() == own);
  }
  CHECK_FALSE(std::filesystem::exists(record));  // it has cleared its limits
  // A daemon that was killed leaves the file as it was.
  std::ofstream(record) << "/left/gpushare-exec-3\n" << own;
  std::filesystem::permissions(record, std::filesystem::perms(0600));
  {
    KernelLimits limits(kDevice, places);
    eventually([&] { return !std::filesystem::exists(record); });
    CHECK(cleared());
    CHECK(limits_set().cgroup == "/sys/fs/cgroup/system.slice/daemon.scope/gpushare-exec-7");
    limits.set(1, 7, kGiB);
    eventually([&] { return limits.holds(1); });
    CHECK(lines() == own);
  }
  // Two groups have come back to the cgroup: the limit that was left is none of theirs.
  processes.add(8, kOwn);
  std::ofstream(record) << own;
  std::filesystem::permissions(record, std::filesystem::perms(0600));
  {
    KernelLimits limits(kDevice, places);
    limits.set(1, 7, kGiB);
    limits.set(2, 8, kGiB);
    eventually([&] { return cleared() && !std::filesystem::exists(record); });
  }
  // The driver refuses. What can be no cgroup is forgotten, what may be one is kept.
  GPUSHARE_RECORDER_CALL(recorder_set_limits)(3);
  std::ofstream(record) << "/" << std::string(300, 'a') << "\n/\n";
  { KernelLimits limits(kDevice, places); }
  CHECK(lines() == "/\n");
  GPUSHARE_RECORDER_CALL(recorder_set_limits)(0);
  std::filesystem::remove(record);
  // What others can have written is not believed.
  std::ofstream(record) << own;
  std::filesystem::permissions(record, std::filesystem::perms(0666));
  const uint64_t calls = limits_set().calls;
  { KernelLimits limits(kDevice, places); }
  CHECK(limits_set().calls == calls);
  CHECK(lines() == own);
}

TEST_CASE(
    "a changed limit holds when the driver has taken it, and goes at the end where it refused the change") {
  const Processes processes;
  processes.add(7, kOwn);
  {
    KernelLimits limits(kDevice, processes.places());
    limits.set(1, 7, 2 * kGiB);
    eventually([&] { return limits.holds(1); });
    GPUSHARE_RECORDER_CALL(recorder_set_limits)(4);
    const uint64_t calls = limits_set().calls;
    limits.set(1, 7, kGiB);
    eventually([&] { return limits_set().calls > calls; });
    CHECK_FALSE(limits.holds(1));  // the driver has twice as much
    GPUSHARE_RECORDER_CALL(recorder_set_limits)(0);
  }
  CHECK(cleared());
}

TEST_CASE("a limit that the driver refused is not cleared, because another's may stand there") {
  const Processes processes;
  processes.add(7, kOwn);
  processes.add(8, "0::/system.slice/daemon.scope/gpushare-exec-8\n");
  KernelLimits limits(kDevice, processes.places());
  const uint64_t before = limits_set().calls;
  GPUSHARE_RECORDER_CALL(recorder_set_limits)(4);
  limits.set(1, 7, kGiB);
  eventually([&] { return limits_set().calls == before + 1; });
  GPUSHARE_RECORDER_CALL(recorder_set_limits)(0);
  limits.clear(1);
  limits.set(2, 8, kGiB);  // comes after the other
  eventually([&] { return limits.holds(2); });
  CHECK(limits_set().calls == before + 2);
}

TEST_CASE("a limit is set on a cgroup that is the group's own, and only where the driver takes it") {
  const Processes processes;
  processes.add(7, "0::/user.slice/user-1000.slice/session-1.scope\n");
  processes.add(8, "0::/kubepods.slice/cri-containerd-" + std::string(64, 'a') + ".scope\n");
  processes.add(9, kOwn);
  KernelLimits limits(kDevice, processes.places());
  const uint64_t before = limits_set().calls;
  limits.set(1, 7, kGiB);
  limits.set(2, 4711, kGiB);  // it has ended
  limits.set(3, 8, kGiB);
  eventually([&] { return limits.holds(3); });
  CHECK(limits_set().calls == before + 1);
  CHECK_FALSE(limits.holds(1));
  CHECK_FALSE(limits.holds(2));
  for (const int refusal : {3, 4}) {  // not supported, no permission
    GPUSHARE_RECORDER_CALL(recorder_set_limits)(refusal);
    const uint64_t calls = limits_set().calls;
    limits.set(4, 9, kGiB);
    eventually([&] { return limits_set().calls > calls; });
    CHECK_FALSE(limits.holds(4));
    limits.clear(4);
  }
  GPUSHARE_RECORDER_CALL(recorder_set_limits)(0);
  KernelLimits without(kDevice, processes.places("/nonexistent/libnvidia-ml.so.1"));
  without.set(1, 9, kGiB);
  KernelLimits elsewhere(2 << 8, processes.places());
  elsewhere.set(1, 9, kGiB);
  CHECK_FALSE(without.holds(1));
  CHECK_FALSE(elsewhere.holds(1));
}

TEST_CASE(
    "the daemon sets the driver's limit of preloaded programs, follows their page, and clears it at the "
    "end") {
  const Processes processes;
  processes.add(getpid(), kOwn);
  client::Descriptor file(memfd_create("page", MFD_CLOEXEC));
  REQUIRE(ftruncate(file.get(), sizeof(shim::GroupPage)) == 0);
  void* memory = mmap(nullptr, sizeof(shim::GroupPage), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  REQUIRE(memory != MAP_FAILED);
  auto* const page = static_cast<shim::GroupPage*>(memory);
  page->magic = shim::kPageMagic;
  page->version = shim::kPageVersion;
  page->limits.device_bytes = 40 * kMiB;
  {
    const Shared shared([&](daemon::ServiceOptions& options) { options.kernel_limits = processes.places(); });
    RawProcess program(shared);
    REQUIRE(program.hello() == GPUSHARE_OK);
    REQUIRE(program.call(arrive(1, 40 * kMiB, 7), file.get()) == GPUSHARE_OK);
    const auto held_by = [&] { return shared.status().sessions.at(0).held_by; };
    eventually([&] { return held_by() == "shim+kernel"; });
    CHECK(limits_set().hard == 40 * kMiB + KernelLimits::kSlackBytes);
    // gpushare exec --change: the programs' page first, then what they ask of the daemon.
    page->limits.device_bytes = 20 * kMiB;
    auto need = client::make_message<client::MessageType::kNeed>(1);
    need.session = 1;
    need.persistent_bytes = 20 * kMiB;
    REQUIRE(program.say(need));
    REQUIRE(client::fields_of<client::Reply>(program.answer()).code == GPUSHARE_OK);
    eventually([&] { return limits_set().soft == 20 * kMiB; });
    eventually([&] { return held_by() == "shim+kernel"; });
    // A session without a page has no such words.
    RawProcess other(shared);
    REQUIRE(other.hello() == GPUSHARE_OK);
    REQUIRE(other.call(arrive(1, kMiB)) == GPUSHARE_OK);
    const auto sessions = shared.status().sessions;
    CHECK(std::count_if(sessions.begin(), sessions.end(),
                        [](const auto& each) { return each.held_by.empty(); }) == 1);
    program.tell(client::MessageType::kLeave, 1);
    eventually(cleared);
  }
  munmap(memory, sizeof(shim::GroupPage));
}
