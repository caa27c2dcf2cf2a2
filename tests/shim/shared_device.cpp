// The recording driver's shared device (tests/doubles/cuda_recorder/recorder.h): what its clock, its shares and its
// books say is what the tests of the shim rely on. Nothing here depends on how fast the host is.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "shim/table.hpp"
#include "support/catch.hpp"
#include "through_recorder.hpp"

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the kinds of parameters

namespace {

constexpr uint64_t kMillisecond = 1'000'000, kSecond = 1'000'000'000;
constexpr Result kNotReady = 600;
template <class... A>
Result cu(const char* name, A... arguments) {
  return reinterpret_cast<Result (*)(A...)>(dlsym(driver(), name))(arguments...);
}
void* none() {
  return nullptr;
}

// A device, and processes that use it: each test has its own, in children, since a process has one device.
class Device {
 public:
  explicit Device(const char* settings = nullptr) {
    static int number = 0;
    path_ = "/dev/shm/gpushare-test-" + std::to_string(getpid()) + "-" + std::to_string(number++);
    REQUIRE(control<decltype(&recorder_device_create)>("recorder_device_create")(path_.c_str(), settings) ==
            0);
    setenv("RECORDER_DEVICE", path_.c_str(), 1);
  }
  ~Device() {
    for (const pid_t child : children_) {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
    unlink(path_.c_str());
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Runs `body` in a process of its own; its number is the exit code.
  pid_t start(const std::function<int()>& body) {
    const pid_t child = fork();
    if (child == 0) _exit(body());
    children_.push_back(child);
    return child;
  }
  int end(pid_t child) {
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    std::erase(children_, child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  // One process that does `body` and returns 0, or the line that failed.
  int run(const std::function<int()>& body) { return end(start(body)); }
  void stop(pid_t child) {
    kill(child, SIGKILL);
    end(child);
  }

  std::vector<recorder_process> read(recorder_device* out_device = nullptr) {
    recorder_device device;
    std::vector<recorder_process> all(32);
    const int count = control<decltype(&recorder_device_read)>("recorder_device_read")(
        path_.c_str(), out_device != nullptr ? out_device : &device, all.data(), 32);
    REQUIRE(count >= 0);
    all.resize(static_cast<size_t>(count));
    return all;
  }
  // Waits until `count` processes have so many kernels pending that they keep the device busy.
  std::vector<recorder_process> read_when(
      const std::function<bool(const std::vector<recorder_process>&)>& ready) {
    for (;;) {
      std::vector<recorder_process> all = read();
      if (ready(all)) return all;
      usleep(1000);
    }
  }

 private:
  std::string path_;
  std::vector<pid_t> children_;
};

#define CHECK_CHILD(condition) \
  if (!(condition)) return __LINE__ % 250 + 1

void* kernel(const char* name) {
  void* function = nullptr;
  cu("cuModuleGetFunction", &function, none(), name);
  return function;
}
Result launch(void* function, void* stream, unsigned blocks = 1, void** parameters = nullptr) {
  return cu("cuLaunchKernel", function, blocks, 1U, 1U, 1U, 1U, 1U, 0U, stream, parameters, none());
}
void* stream(unsigned flags = 1) {
  void* made = nullptr;
  cu("cuStreamCreate", &made, flags);
  return made;
}
void* event() {
  void* made = nullptr;
  cu("cuEventCreate", &made, 0U);
  return made;
}
float between(void* first, void* second) {
  float milliseconds = -1;
  cu("cuEventSynchronize", second);
  return cu("cuEventElapsedTime", &milliseconds, first, second) == kSuccess ? milliseconds : -1;
}
// Holds a stream until the flag is set, so that what follows is there when the device comes to it.
void hold(void* on, std::atomic<int>* flag) {
  const auto function = +[](void* data) {
    while (static_cast<std::atomic<int>*>(data)->load() == 0) usleep(100);
  };
  cu("cuLaunchHostFunc", on, reinterpret_cast<void*>(function), static_cast<void*>(flag));
}
// A process with work for much longer than any test.
int busy(const char* name) {
  void* const function = kernel(name);
  for (;;) launch(function, nullptr);
}

}  // namespace

TEST_CASE("events carry the device's time: kernels take what they cost") {
  Device device;
  CHECK(device.run([] {
    std::atomic<int> go{0};
    void *s = stream(), *a = event(), *b = event(), *c = event(), *d = event(), *e = event();
    hold(s, &go);
    cu("cuEventRecord", a, s);
    for (int i = 0; i < 50; ++i) launch(kernel("spin_200us"), s);
    cu("cuEventRecord", b, s);
    launch(kernel("spin_10us_per_block"), s, 30);
    cu("cuEventRecord", c, s);
    uint64_t cost = 700'000;
    void* parameters[] = {&cost};
    launch(kernel("spin_arg"), s, 1, parameters);
    cu("cuEventRecord", d, s);
    CHECK_CHILD(cu("cuMemcpyHtoDAsync_v2", uint64_t{1}, none(), uint64_t{25'000'000}, s) == kSuccess);
    cu("cuEventRecord", e, s);
    CHECK_CHILD(cu("cuEventQuery", a) == kNotReady);
    CHECK_CHILD(cu("cuStreamQuery", s) == kNotReady);
    go = 1;
    CHECK_CHILD(between(a, b) == 10.0F);
    CHECK_CHILD(between(b, c) == 0.3F);
    CHECK_CHILD(between(c, d) == 0.7F);
    CHECK_CHILD(between(d, e) == 1.001F);
    CHECK_CHILD(cu("cuStreamQuery", s) == kSuccess);
    return 0;
  }) == 0);
  const auto all = device.read();
  REQUIRE(all.size() == 1);
  CHECK(all[0].alive == 0);
  CHECK(all[0].compute_ns == 11 * kMillisecond);
  CHECK(all[0].copy_ns == kMillisecond + 1000);
  CHECK(all[0].kernels == 52);
}

TEST_CASE("streams run in the driver's order") {
  Device device;
  CHECK(device.run([] {
    std::atomic<int> go{0};
    void *blocking = stream(0), *free = stream(1);
    void *a = event(), *b = event(), *c = event(), *d = event();
    // The legacy default stream waits for streams that block, and those for it; others go on.
    hold(blocking, &go);
    launch(kernel("spin_1ms"), blocking);
    launch(kernel("spin_1ms"), nullptr);
    cu("cuEventRecord", a, none());
    launch(kernel("spin_1ms"), free);
    CHECK_CHILD(cu("cuStreamSynchronize", free) == kSuccess);
    CHECK_CHILD(cu("cuEventQuery", a) == kNotReady);
    // A stream that waits for an event.
    cu("cuStreamWaitEvent", free, a, 0U);
    cu("cuEventRecord", b, free);
    CHECK_CHILD(cu("cuEventQuery", b) == kNotReady);
    // The thread's own default stream blocks; so does the same by its handle.
    launch(kernel("spin_2ms"), reinterpret_cast<void*>(uintptr_t{2}));
    cu("cuEventRecord_ptsz", c, none());
    go = 1;
    CHECK_CHILD(between(a, b) == 0);
    CHECK_CHILD(between(a, c) == 2.0F);
    // Narrow kernels of several streams run beside one another.
    std::atomic<int> start{0};
    void *s[4], *ends[4];
    hold(free, &start);
    cu("cuEventRecord", d, free);
    for (int i = 0; i < 4; ++i) {
      s[i] = stream(1);
      ends[i] = event();
      cu("cuStreamWaitEvent", s[i], d, 0U);
      launch(kernel("spin_1ms_w25"), s[i]);
      cu("cuEventRecord", ends[i], s[i]);
    }
    start = 1;
    for (void* end : ends) CHECK_CHILD(between(d, end) == 1.0F);
    for (void* each : s) CHECK_CHILD(cu("cuStreamDestroy_v2", each) == kSuccess);
    CHECK_CHILD(cu("cuStreamSynchronize", s[0]) == 400);
    // As many streams as one likes, one after the other; threads have their own.
    for (int i = 0; i < 200; ++i) CHECK_CHILD(cu("cuStreamDestroy_v2", stream()) == kSuccess);
    for (int i = 0; i < 100; ++i)
      std::thread([] {
        cu("cuLaunchKernel_ptsz", kernel("spin_1us"), 1U, 1U, 1U, 1U, 1U, 1U, 0U, none(), none(), none());
        cu("cuStreamSynchronize_ptsz", none());
      }).join();
    return 0;
  }) == 0);
}

TEST_CASE("what follows a host function runs after it, whenever somebody looks") {
  Device device;
  CHECK(device.run([] {
    static std::atomic<int> entered{0}, go{0};
    void *first = stream(), *second = stream(), *a = event(), *b = event();
    const auto function = +[](void*) {
      entered = 1;
      while (go == 0) usleep(100);
    };
    cu("cuLaunchHostFunc", first, reinterpret_cast<void*>(function), none());
    cu("cuEventRecord", a, first);
    // From here on nobody looks at the device until the function has returned.
    while (entered == 0) usleep(100);
    usleep(2000);
    cu("cuStreamWaitEvent", second, a, 0U);
    launch(kernel("spin_1ms"), second);
    cu("cuEventRecord", b, second);
    go = 1;
    CHECK_CHILD(between(a, b) == 1.0F);
    return 0;
  }) == 0);
}

TEST_CASE("graphs take what their nodes cost") {
  Device device;
  CHECK(device.run([] {
    void *s = stream(), *other = stream(), *graph = nullptr, *exec = nullptr, *a = event(), *b = event(),
         *joined = event();
    cu("cuStreamBeginCapture_v2", s, 0U);
    launch(kernel("spin_1ms"), s);
    cu("cuEventRecord", joined, s);
    cu("cuStreamWaitEvent", other, joined, 0U);
    launch(kernel("spin_2ms"), other);
    int capturing = 0;
    CHECK_CHILD(cu("cuStreamIsCapturing", other, &capturing) == kSuccess && capturing == 1);
    CHECK_CHILD(cu("cuStreamEndCapture", s, &graph) == kSuccess);
    CHECK_CHILD(cu("cuStreamIsCapturing", other, &capturing) == kSuccess && capturing == 0);
    CHECK_CHILD(cu("cuGraphInstantiateWithFlags", &exec, graph, uint64_t{0}) == kSuccess);
    CHECK_CHILD(cu("cuGraphDestroy", graph) == kSuccess);
    std::atomic<int> go{0};
    hold(s, &go);
    cu("cuEventRecord", a, s);
    for (int i = 0; i < 5; ++i) CHECK_CHILD(cu("cuGraphLaunch", exec, s) == kSuccess);
    cu("cuEventRecord", b, s);
    go = 1;
    CHECK_CHILD(between(a, b) == 15.0F);
    CHECK_CHILD(cu("cuGraphExecDestroy", exec) == kSuccess);
    return 0;
  }) == 0);
}

TEST_CASE("processes with work share the device by time slices") {
  Device device;
  for (const char* name : {"spin_200us", "spin_1ms", "spin_50ms"})
    device.start([name] { return busy(name); });
  const auto loaded = [](const std::vector<recorder_process>& all) {
    if (all.size() < 3) return false;
    for (const recorder_process& one : all)
      if (one.compute_ns < 4 * kMillisecond) return false;
    return true;
  };
  const auto before = device.read_when(loaded);
  const auto after = device.read_when(
      [&](const auto& all) { return all[0].compute_ns > before[0].compute_ns + kSecond / 10; });
  // Whatever the host did: a process whose queue ran dry has lost its slices, so only the total is exact.
  recorder_device totals;
  device.read(&totals);
  uint64_t sum = 0;
  for (const auto& one : device.read(&totals)) sum += one.compute_ns;
  CHECK(sum == totals.busy_ns);
  CHECK(totals.switches > 10);
  CHECK(after[1].compute_ns > before[1].compute_ns);
  CHECK(after[2].compute_ns > before[2].compute_ns);
}

TEST_CASE("two processes with long queues get equal parts, whatever their kernels are") {
  for (const char* settings : {"slice_ns=2000000", "side_by_side=1"}) {
    INFO(settings);
    Device device(settings);
    // Kernels of a second and of ten: the queues outlast the test on the slowest host.
    for (const char* name : {"spin_1000ms", "spin_10000ms"}) device.start([name] { return busy(name); });
    const auto before = device.read_when([](const auto& all) {
      return all.size() == 2 && all[0].compute_ns > 3 * kMillisecond && all[1].compute_ns > 3 * kMillisecond;
    });
    const auto after = device.read_when(
        [&](const auto& all) { return all[0].compute_ns > before[0].compute_ns + kSecond / 20; });
    const auto first = static_cast<double>(after[0].compute_ns - before[0].compute_ns);
    const auto second = static_cast<double>(after[1].compute_ns - before[1].compute_ns);
    CHECK(std::abs(first - second) <= 2.0 * kMillisecond);
  }
}

TEST_CASE("a change from one process to another costs what the settings say") {
  constexpr uint64_t kSwitch = 500'000;
  Device device("slice_ns=1000000,switch_ns=500000");
  for (int i = 0; i < 2; ++i) device.start([] { return busy("spin_1000ms"); });
  recorder_device first{}, last{};
  device.read_when([](const auto& all) {
    return all.size() == 2 && all[0].compute_ns > kMillisecond && all[1].compute_ns > kMillisecond;
  });
  device.read(&first);
  do device.read(&last);
  while (last.switches < first.switches + 20);
  // Both work all the time, so the engine is busy but for the changes; the first and the last may be under way.
  const uint64_t idle_ns = last.now_ns - first.now_ns - (last.busy_ns - first.busy_ns);
  const uint64_t switches = last.switches - first.switches;
  CHECK(idle_ns >= (switches - 1) * kSwitch);
  CHECK(idle_ns <= (switches + 1) * kSwitch);
}

TEST_CASE("memory is of all processes, and free when one is killed") {
  Device device("capacity_bytes=1000000000");
  const pid_t holder = device.start([] {
    uint64_t address = 0;
    CHECK_CHILD(cu("cuMemAlloc_v2", &address, uint64_t{700'000'000}) == kSuccess);
    for (;;) pause();
  });
  device.read_when([](const auto& all) { return all.size() == 1 && all[0].memory_bytes == 700'000'000; });
  const auto look = [] {
    uint64_t address = 0, free = 0, total = 0;
    CHECK_CHILD(cu("cuMemAlloc_v2", &address, uint64_t{400'000'000}) == kOutOfMemory);
    CHECK_CHILD(cu("cuMemGetInfo_v2", &free, &total) == kSuccess);
    CHECK_CHILD(free == 300'000'000 && total == 1'000'000'000);
    CHECK_CHILD(cu("cuMemAlloc_v2", &address, uint64_t{300'000'000}) == kSuccess);
    CHECK_CHILD(cu("cuMemFree_v2", address) == kSuccess);
    return 0;
  };
  CHECK(device.run(look) == 0);
  CHECK(device.run(look) == 0);  // the first one's memory went with it
  device.stop(holder);
  CHECK(device.run([] {
    uint64_t address = 0;
    CHECK_CHILD(cu("cuMemAlloc_v2", &address, uint64_t{1'000'000'000}) == kSuccess);
    return 0;
  }) == 0);
  recorder_device totals;
  device.read(&totals);
  CHECK(totals.used_bytes == 0);
}

TEST_CASE("processes that are killed at any point leave a device that works") {
  Device device;
  for (int round = 0; round < 60; ++round) {
    const pid_t child = device.start([]() -> int {
      void* const function = kernel("spin_5us");
      for (uint64_t address = 0;;) {
        for (int i = 0; i < 10; ++i) launch(function, nullptr);
        cu("cuMemAlloc_v2", &address, uint64_t{1 << 20});
        cu("cuMemFree_v2", address);
      }
    });
    usleep(static_cast<unsigned>(round * 137 % 4000));
    device.stop(child);
  }
  recorder_device totals;
  device.read(&totals);
  CHECK(totals.used_bytes == 0);
  // Its work went too: another gets the device at once.
  CHECK(device.run([] {
    void *a = event(), *b = event();
    std::atomic<int> go{0};
    void* const s = stream();
    hold(s, &go);
    cu("cuEventRecord", a, s);
    launch(kernel("spin_1ms"), s);
    cu("cuEventRecord", b, s);
    go = 1;
    CHECK_CHILD(between(a, b) == 1.0F);
    return 0;
  }) == 0);
}

TEST_CASE("settings that cannot be read are refused") {
  for (const char* settings : {"capacity=1", "slice_ns", "slice_ns=x", "dilation=0"})
    CHECK(control<decltype(&recorder_device_create)>("recorder_device_create")(
              "/dev/shm/gpushare-test-refused", settings) == -1);
  unlink("/dev/shm/gpushare-test-refused");
}
