// How much host memory there is: of the machine, and of the control groups that the process is in, from files of a folder.
// SPDX-License-Identifier: Apache-2.0
#include "base/host_memory.hpp"

#include <filesystem>
#include <fstream>
#include <string>

#include "support/catch.hpp"
#include "support/model_folder.hpp"

using namespace gpushare;

namespace {

constexpr uint64_t kMiB = 1 << 20;

// The files of /proc and /sys of a machine of 1,000 MiB, 400 MiB of them available.
struct Root {
  Root() {
    write("proc/meminfo", "MemTotal:        1024000 kB\nMemFree:  1 kB\nMemAvailable:     409600 kB\n");
  }
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = std::filesystem::path(root) / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  // A group of the second version: MiB; a negative limit is "max".
  void group(const std::string& path, int64_t limit, uint64_t used, uint64_t cache) const {
    const std::string folder = "sys/fs/cgroup" + path + "/";
    write(folder + "memory.max", limit < 0 ? "max\n" : std::to_string(uint64_t(limit) * kMiB) + "\n");
    write(folder + "memory.current", std::to_string(used * kMiB) + "\n");
    write(folder + "memory.stat",
          "anon 1\nactive_file 5\ninactive_file " + std::to_string(cache * kMiB) + "\nslab 3\n");
  }
  void old_group(const std::string& path, uint64_t limit_bytes, uint64_t used, uint64_t cache) const {
    const std::string folder = "sys/fs/cgroup/memory" + path + "/";
    write(folder + "memory.limit_in_bytes", std::to_string(limit_bytes) + "\n");
    write(folder + "memory.usage_in_bytes", std::to_string(used * kMiB) + "\n");
    write(folder + "memory.stat",
          "inactive_file 7\ntotal_inactive_file " + std::to_string(cache * kMiB) + "\n");
  }
  void check(uint64_t total, uint64_t available) const {
    const base::HostMemory memory = base::host_memory(root.c_str());
    CHECK(memory.total_bytes == total * kMiB);
    CHECK(memory.available_bytes == available * kMiB);
  }
  test::ModelFolder all;
  const std::string root = all.path().string();
};

}  // namespace

TEST_CASE("host memory is the machine's where no control group limits it") {
  Root at;
  at.check(1000, 400);
  at.write("proc/self/cgroup", "0::/\n");
  at.check(1000, 400);
  at.group("/user/app", -1, 300, 0);
  at.write("proc/self/cgroup", "0::/user/app\n");
  at.check(1000, 400);
  at.write("proc/self/cgroup", "no line of that form\n::\n:\n5\n");
  at.check(1000, 400);
  const base::HostMemory none = base::host_memory((at.root + "/nowhere").c_str());
  CHECK(none.total_bytes == UINT64_MAX);
  CHECK(none.available_bytes == UINT64_MAX);
}

TEST_CASE("the tightest control group counts, the process's own or one above it") {
  Root at;
  at.write("proc/self/cgroup", "0::/pod/container/app\n");
  at.group("/pod/container/app", -1, 10, 0);
  at.group("/pod/container", 200, 150, 30);  // 120 MiB cannot be dropped
  at.check(200, 80);
  at.group("/pod", 500, 460, 0);  // larger, and fuller
  at.check(200, 40);
  at.group("/pod", 100, 10, 0);
  at.check(100, 80);
  at.group("/pod/container/app", 50, 50, 60);  // more to drop than it uses: numbers of two moments
  at.check(50, 50);
  at.group("/pod/container", 200, 250, 0);  // above its limit
  at.check(50, 0);
  at.group("/pod/container", 5000, 10, 0);  // above the machine's
  at.check(50, 50);
}

TEST_CASE("a container that sees its control group as the root has that group's limit") {
  Root at;
  at.group("", 300, 100, 0);
  for (const char* path : {"/", "/docker/0123/not/here", "/../../outside"}) {
    at.write("proc/self/cgroup", std::string("0::") + path + "\n");
    at.check(300, 200);
  }
}

TEST_CASE("the first version of control groups, alone and beside the second") {
  Root at;
  constexpr uint64_t kNone = 9223372036854771712u;
  at.write("proc/self/cgroup",
           "12:cpu,cpuacct:/x\n4:blkio,memory:/docker/1\n1:name=systemd:/docker/1\n0::/docker/1\n");
  at.old_group("", kNone, 900, 0);
  at.old_group("/docker/1", 250 * kMiB, 100, 50);
  at.check(250, 200);
  at.old_group("/docker", 150 * kMiB, 120, 0);
  at.check(150, 30);
  at.old_group("/docker", kNone, 120, 0);
  at.old_group("/docker/1", kNone, 100, 50);
  at.check(1000, 400);
  at.write("proc/self/cgroup", "4:memory:/not/here\n");  // the container's own is the root
  at.old_group("", 64 * kMiB, 32, 0);
  at.check(64, 32);
}
