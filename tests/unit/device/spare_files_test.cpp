// Files of shared memory that are kept: only those nobody else has, zeroed, within the limit.
// SPDX-License-Identifier: Apache-2.0
#include "device/support/spare_files.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "support/catch.hpp"

using gpushare::device::SharedFile;
using gpushare::device::SpareFiles;

namespace {

constexpr uint64_t kBytes = 3 << 20;
constexpr uint64_t kMarkerBytes = 4096;

std::shared_ptr<SharedFile> make_file(uint64_t bytes) {
  const auto file = SharedFile::create(bytes);
  REQUIRE(file.ok());
  std::memset((*file)->pages(), 'x', bytes);
  return *file;
}

int open_again(int file, int mode) {
  return open(("/proc/self/fd/" + std::to_string(file)).c_str(), mode | O_CLOEXEC);
}

std::shared_ptr<SharedFile> take_soon(SpareFiles& spare, uint64_t bytes) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (;;) {
    if (auto file = spare.take(bytes); file != nullptr) return file;
    REQUIRE(std::chrono::steady_clock::now() < limit);
    usleep(200);
  }
}

// Returns once every file given before has been dealt with, because one thread handles them in order.
void settle(SpareFiles& spare) {
  spare.give(make_file(kMarkerBytes));
  (void)take_soon(spare, kMarkerBytes);
}

}  // namespace

TEST_CASE("spare files: one that nobody has comes back, zeroed, for its size") {
  SpareFiles spare;
  spare.limit(1 << 30);
  CHECK(spare.take(kBytes) == nullptr);
  for (const bool sealed : {false, true}) {  // sealed against writing, it is still its owner's to write
    auto made = make_file(kBytes);
    if (sealed) REQUIRE(*made->seal(true));
    spare.give(std::move(made));
    settle(spare);
    CHECK(spare.take(kBytes + 4096) == nullptr);
    const auto file = spare.take(kBytes);
    REQUIRE(file != nullptr);
    CHECK(std::string(file->pages(), kBytes) == std::string(kBytes, '\0'));
    CHECK(spare.take(kBytes) == nullptr);
  }
}

TEST_CASE("spare files: one that somebody may still see is not kept") {
  SpareFiles spare;
  spare.limit(1 << 30);
  const auto kept_after = [&](auto&& share) {
    auto file = make_file(kBytes);
    auto unshare = share(file->number());
    spare.give(std::move(file));
    settle(spare);
    const bool kept = spare.take(kBytes) != nullptr;
    unshare();
    return kept;
  };
  CHECK(kept_after([](int) { return [] {}; }));
  for (const int mode : {O_RDONLY, O_RDWR}) {
    CHECK_FALSE(kept_after([&](int file) {
      const int other = open_again(file, mode);
      return [other] { close(other); };
    }));
  }
  CHECK_FALSE(kept_after([](int file) {  // a mapping alone
    const int other = open_again(file, O_RDONLY);
    void* pages = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, other, 0);
    REQUIRE(pages != MAP_FAILED);
    close(other);
    return [pages] { munmap(pages, kBytes); };
  }));
  CHECK_FALSE(kept_after([](int file) {  // a message that nobody has read
    const int other = open_again(file, O_RDONLY);
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    char byte = 0;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &other, sizeof(int));
    REQUIRE(sendmsg(ends[0], &message, 0) == 1);
    close(other);
    return [a = ends[0], b = ends[1]] {
      close(a);
      close(b);
    };
  }));
  const auto used = make_file(kBytes);  // by a copy under way
  spare.give(used);
  settle(spare);
  CHECK(spare.take(kBytes) == nullptr);
  CHECK(kept_after([](int file) {  // one that has gone meanwhile
    close(open_again(file, O_RDONLY));
    return [] {};
  }));
}

TEST_CASE("spare files: no more than the limit, the oldest go first") {
  SpareFiles spare;
  spare.give(make_file(kBytes));  // nothing may be kept
  spare.limit(2 * kBytes + kMarkerBytes);
  settle(spare);
  CHECK(spare.take(kBytes) == nullptr);
  for (int i = 0; i < 4; ++i) {
    spare.give(make_file(kBytes));
    settle(spare);
  }
  auto first = spare.take(kBytes), second = spare.take(kBytes);
  CHECK(first != nullptr);
  CHECK(second != nullptr);
  CHECK(spare.take(kBytes) == nullptr);
  spare.give(std::move(first));
  spare.give(std::move(second));
  settle(spare);
  spare.limit(kBytes);
  (void)take_soon(spare, kBytes);
  CHECK(spare.take(kBytes) == nullptr);
}
