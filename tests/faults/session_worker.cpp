// A process with one session on a shared device, for shared_processes.cpp:
//   session_worker NAME POLICY_WEIGHT PRIORITY P_MIB E_MIB WORK_US ITERATIONS [MODEL CHECKSUM]
// trains: each iteration checks its persistent bytes, writes them and its scratch memory, computes for WORK_US, and
// finds the scratch as it was. Prints "ready" once it is admitted, then its iterations and device time at the end.
// ITERATIONS 0: until it is killed, or gets a line on stdin. With MODEL it opens that image and compares its checksum
// in each iteration. Exit 1 with the reason when anything goes wrong.
// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "executor/runtime.hpp"
#include "executor/shared_image.hpp"
#include "support/bytes.hpp"
#include "support/model_folder.hpp"

using namespace gpushare;

namespace {

int fail(const char* what, const base::Status& status) {
  std::fprintf(stderr, "session_worker: %s: %s\n", what, status.to_string().c_str());
  return 1;
}

// The bytes of the device, which the host cannot touch.
base::Result<std::string> bytes_at(executor::Stream& stream, memory::Address address, uint64_t bytes) {
  std::string found(bytes, '\0');
  GPUSHARE_RETURN_IF_ERROR(
      stream.copy(reinterpret_cast<uintptr_t>(found.data()), address, bytes, GPUSHARE_COPY_DEVICE_TO_HOST));
  GPUSHARE_RETURN_IF_ERROR(stream.synchronize());
  return found;
}

base::Status check_all(executor::Stream& stream, memory::Address address, uint64_t bytes, int value,
                       const char* otherwise) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::string found, bytes_at(stream, address, bytes));
  if (test::all_are(found.data(), bytes, value)) return {};
  return {GPUSHARE_INTERNAL, otherwise};
}

bool told_to_stop() {
  pollfd wait{0, POLLIN, 0};
  return poll(&wait, 1, 0) > 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8 && argc != 10) return 2;
  executor::RuntimeOptions options;
  options.device = "shared";
  auto runtime = executor::Runtime::open(std::move(options));
  if (!runtime.ok()) return fail("open", runtime.status());
  executor::SessionOptions wanted;
  wanted.name = argv[1];
  wanted.weight = std::atof(argv[2]);
  wanted.priority = std::atoi(argv[3]);
  wanted.persistent_bytes = std::strtoull(argv[4], nullptr, 10) << 20;
  wanted.ephemeral_bytes = std::strtoull(argv[5], nullptr, 10) << 20;
  const auto work = std::chrono::microseconds(std::atoi(argv[6]));
  const uint64_t iterations = std::strtoull(argv[7], nullptr, 10);
  // A child that keeps every descriptor open until stdin closes.
  if (wanted.name == "forks" && fork() == 0) {
    pollfd wait{0, POLLIN, 0};
    (void)poll(&wait, 1, -1);
    _exit(0);
  }
  auto session = (*runtime)->open_session(wanted);
  if (!session.ok()) return fail("open_session", session.status());
  const auto block = (*session)->alloc(memory::Kind::kModel, wanted.persistent_bytes, 0);
  if (!block.ok()) return fail("alloc", block.status());
  std::shared_ptr<executor::SharedImage> image;
  if (argc == 10) {
    executor::SharedImageOptions open;
    open.path = argv[8];
    auto opened = (*session)->open_image(open);
    if (!opened.ok()) return fail("open_image", opened.status());
    image = *opened;
  }
  std::puts("ready");
  std::fflush(stdout);
  uint64_t done = 0;
  for (; iterations > 0 ? done < iterations : !told_to_stop();) {
    auto iteration = (*session)->begin(GPUSHARE_NO_TIMEOUT);
    if (iteration.status().code() == GPUSHARE_UNAVAILABLE) {  // the daemon is being replaced
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      continue;
    }
    if (!iteration.ok()) return fail("begin", iteration.status());
    const auto before = static_cast<uint8_t>(done % 251), after = static_cast<uint8_t>((done + 1) % 251);
    auto stream = (*iteration)->stream();
    if (!stream.ok()) return fail("stream", stream.status());
    const auto fill = [&](memory::Address address, uint8_t value, uint64_t bytes) {
      return (*stream)->fill(address, value, bytes);
    };
    // The first values are written here and not after alloc(): between iterations the session may be paged out.
    if (done == 0)
      if (const auto filled = fill(*block, before, wanted.persistent_bytes); !filled.ok())
        return fail("fill", filled);
    if (const auto same = check_all(**stream, *block, wanted.persistent_bytes, before,
                                    "the session's persistent bytes are others");
        !same.ok())
      return fail("state", same);
    if (const auto filled = fill(*block, after, wanted.persistent_bytes); !filled.ok())
      return fail("fill", filled);
    if (image != nullptr) {
      uint64_t sum = test::checksum(nullptr, 0);
      for (uint32_t i = 0; i < image->layers().size(); ++i) {
        const client::TableLayer& layer = image->layers()[i];
        if (const base::Status there = image->wait(i, i + 1, GPUSHARE_NO_TIMEOUT); !there.ok())
          return fail("wait", there);
        const auto bytes = bytes_at(**stream, image->address() + layer.offset_bytes, layer.bytes);
        if (!bytes.ok()) return fail("copy", bytes.status());
        sum = test::checksum(bytes->data(), layer.bytes, sum);
      }
      if (sum != std::strtoull(argv[9], nullptr, 10))
        return fail("image", {GPUSHARE_INTERNAL, "the image's bytes are others"});
    }
    memory::Address scratch = 0;
    if (wanted.ephemeral_bytes > 0) {
      const auto allocated = (*iteration)->alloc(wanted.ephemeral_bytes, 0);
      if (!allocated.ok()) return fail("scratch", allocated.status());
      scratch = *allocated;
      if (const auto filled = fill(scratch, after, wanted.ephemeral_bytes); !filled.ok())
        return fail("fill", filled);
    }
    // On the stream, so that it is device time.
    auto spin = work;
    const base::Status launched = (*stream)->launch_host(
        [](void* data) {
          const auto until =
              std::chrono::steady_clock::now() + *static_cast<std::chrono::microseconds*>(data);
          while (std::chrono::steady_clock::now() < until) {
          }
        },
        &spin);
    if (!launched.ok()) return fail("launch", launched);
    if (const base::Status passed = (*stream)->synchronize(); !passed.ok())
      return fail("synchronize", passed);
    // In a shared lane others write it, in their turns.
    if (wanted.ephemeral_bytes > 0)
      if (const auto same = check_all(**stream, scratch, wanted.ephemeral_bytes, after,
                                      "somebody else wrote it in this session's turn");
          !same.ok())
        return fail("scratch", same);
    if (const base::Status ended = (*iteration)->end(); !ended.ok()) return fail("end", ended);
    ++done;
  }
  const auto info = (*session)->info();
  std::printf("%llu %llu\n", static_cast<unsigned long long>(info.iterations_done),
              static_cast<unsigned long long>(info.service_ns));
  if (const base::Status closed = (*session)->close(); !closed.ok()) return fail("close", closed);
  return 0;
}
