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

// What a program says that asks for 10 MiB on that page, in a line each: the driver's answer, and what the shim has to say.
std::string ask(const std::string& page, const std::string& more) {
  const std::string command = "LD_PRELOAD=" GPUSHARE_PRELOAD " GPUSHARE_SHIM_GROUP=" + page + ' ' + more +
                              ' ' + GPUSHARE_PROBE " path 10 2>&1";
  FILE* out = popen(command.c_str(), "r");
  REQUIRE(out != nullptr);
  std::string said;
  std::array<char, 512> text{};
  while (std::fgets(text.data(), text.size(), out) != nullptr) said += text.data();
  pclose(out);
  return said;
}

}  // namespace

TEST_CASE("a process for which the group's page has no place gets no memory") {
  const int file = memfd_create("gpushare-group", 0);
  REQUIRE(ftruncate(file, sizeof(GroupPage)) == 0);
  void* memory = mmap(nullptr, sizeof(GroupPage), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  REQUIRE(memory != MAP_FAILED);
  auto* const page = static_cast<GroupPage*>(memory);
  page->limits = {uint64_t{64} << 20, 0, gpushare::shim::kNoLimit};
  page->version = gpushare::shim::kPageVersion;
  page->magic = gpushare::shim::kPageMagic;
  const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
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
  munmap(memory, sizeof(GroupPage));
  close(file);
}
