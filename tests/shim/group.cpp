// A group whose page has no place left: a process gets no memory under a limit, with whatever setting. The page is full of
// this process, which lives.
// SPDX-License-Identifier: Apache-2.0
#include "shim/group.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "support/catch.hpp"

namespace {

using gpushare::shim::GroupPage;

uint64_t own_identity() {
  std::ifstream in("/proc/self/stat");
  std::string word;
  std::getline(in, word, ')');
  for (int i = 0; i < 20; ++i) in >> word;
  return static_cast<uint64_t>(getpid()) << 40 | (std::stoull(word) & ((uint64_t{1} << 40) - 1));
}
uint64_t own_space() {
  char text[64] = {};
  REQUIRE(readlink("/proc/self/ns/pid", text, sizeof text - 1) > 0);
  return std::strtoull(std::strchr(text, '[') + 1, nullptr, 10);
}

std::string said_by(const std::string& command) {
  FILE* out = popen(command.c_str(), "r");
  REQUIRE(out != nullptr);
  std::string said;
  std::array<char, 512> text{};
  while (std::fgets(text.data(), text.size(), out) != nullptr) said += text.data();
  pclose(out);
  return said;
}
// What a program says that asks for 10 MiB on that page, in a line each: the driver's answer, and what the shim has to say.
std::string ask(const std::string& page, const std::string& more) {
  return said_by("LD_PRELOAD=" GPUSHARE_PRELOAD " GPUSHARE_SHIM_GROUP=" + page + ' ' + more +
                 " " GPUSHARE_PROBE " path 10 2>&1");
}

// The page of a group that may have 64 MiB, in a file that no program inherits.
struct Page {
  Page() {
    REQUIRE(ftruncate(file, sizeof(GroupPage)) == 0);
    void* memory = mmap(nullptr, sizeof(GroupPage), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    REQUIRE(memory != MAP_FAILED);
    at = static_cast<GroupPage*>(memory);
    at->limits = {uint64_t{64} << 20, 0, gpushare::shim::kNoLimit};
    at->version = gpushare::shim::kPageVersion;
    at->magic = gpushare::shim::kPageMagic;
  }
  ~Page() {
    munmap(at, sizeof(GroupPage));
    close(file);
  }
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;
  const int file = memfd_create("gpushare-group", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  GroupPage* at = nullptr;
};

}  // namespace

TEST_CASE("a process for which the group's page has no place gets no memory") {
  const Page of_group;
  GroupPage* const page = of_group.at;
  const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(of_group.file);
  CHECK(ask(path, "") == "0\n");
  CHECK(page->reports != 0);
  for (auto& slot : page->slots) {
    slot.space = own_space();
    slot.identity = own_identity();
  }
  page->slots_used = gpushare::shim::kSlots;
  for (const char* fail : {"", "GPUSHARE_SHIM_FAIL=closed"}) {
    const std::string said = ask(path, fail);
    CHECK(said.find("gpushare: the group has 1024 processes") == 0);
    CHECK(said.find("\n2\n") != std::string::npos);
  }
  // What a process that has ended holds is free before anybody is refused.
  const pid_t ended = fork();
  if (ended == 0) _exit(0);
  REQUIRE(waitpid(ended, nullptr, 0) == ended);
  for (auto& slot : page->slots) slot.identity = 0;
  page->slots[3].identity = static_cast<uint64_t>(ended) << 40 | 1;
  page->slots[3].counted[0] = uint64_t{60} << 20;
  page->slots_used = 4;
  CHECK(ask(path, "") == "0\n");
  CHECK(page->slots[3].identity == 0);
  for (auto& slot : page->slots) slot.identity = own_identity();
  page->slots_used = gpushare::shim::kSlots;
  // A place that comes free is taken.
  page->slots[700].identity = 0;
  CHECK(ask(path, "") == "0\n");
  // Without a limit there is nothing to hold.
  page->slots[700].identity = own_identity();
  page->limits.device_bytes = gpushare::shim::kNoLimit;
  CHECK(ask(path, "").find("\n0\n") != std::string::npos);
}

TEST_CASE("a program that was not told of its group's page finds it with one of its 63 next ancestors") {
  const Page page;
  REQUIRE(fcntl(page.file, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  // The answer for 100 MiB: that many generations below this process, each of which waits for the next.
  const auto asked = [](int generations) {
    std::string command = "LD_PRELOAD=" GPUSHARE_PRELOAD " " GPUSHARE_PROBE " path 100 2>&1; :";
    for (int i = 2; i < generations; ++i) command = "( " + command + " ); :";
    return said_by(command);
  };
  CHECK(asked(2) == "2\n");
  CHECK(asked(63) == "2\n");
  CHECK(asked(64) == "0\n");
}

TEST_CASE("limits that cannot be read are none, and nothing is given where the process must not go without") {
  for (const char* setting : {"GPUSHARE_SOFT=1G", "GPUSHARE_MEMORY=8", "GPUSHARE_MEMORY=much"}) {
    INFO(setting);
    const auto asked = [setting](const char* fail) {
      return said_by(std::string("LD_PRELOAD=" GPUSHARE_PRELOAD " ") + setting + fail +
                     " " GPUSHARE_PROBE " path 10 2>&1");
    };
    CHECK(asked("").find("this process has no such limit\n0\n") != std::string::npos);
    CHECK(asked(" GPUSHARE_SHIM_FAIL=closed").find("GPUSHARE_SHIM_FAIL=closed)\n2\n") != std::string::npos);
  }
}
