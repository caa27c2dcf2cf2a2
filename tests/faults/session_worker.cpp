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
#include <cstring>
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
  auto* const weights = reinterpret_cast<unsigned char*>(*block);
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
    const int before = static_cast<int>(done % 251), after = static_cast<int>((done + 1) % 251);
    // The first values are written here and not after alloc(): between iterations the session may be paged out.
    if (done == 0) std::memset(weights, before, wanted.persistent_bytes);
    if (!test::all_are(weights, wanted.persistent_bytes, before))
      return fail("state", {GPUSHARE_INTERNAL, "the session's persistent bytes are others"});
    std::memset(weights, after, wanted.persistent_bytes);
    if (image != nullptr) {
      uint64_t sum = test::checksum(nullptr, 0);
      for (uint32_t i = 0; i < image->layers().size(); ++i) {
        const client::TableLayer& layer = image->layers()[i];
        if (const base::Status there = image->wait(i, i + 1, GPUSHARE_NO_TIMEOUT); !there.ok())
          return fail("wait", there);
        sum = test::checksum(reinterpret_cast<const void*>(image->address() + layer.offset_bytes),
                             layer.bytes, sum);
      }
      if (sum != std::strtoull(argv[9], nullptr, 10))
        return fail("image", {GPUSHARE_INTERNAL, "the image's bytes are others"});
    }
    void* scratch = nullptr;
    if (wanted.ephemeral_bytes > 0) {
      const auto allocated = (*iteration)->alloc(wanted.ephemeral_bytes, 0);
      if (!allocated.ok()) return fail("scratch", allocated.status());
      scratch = reinterpret_cast<void*>(*allocated);
      std::memset(scratch, after, wanted.ephemeral_bytes);
    }
    auto stream = (*iteration)->stream();
    if (!stream.ok()) return fail("stream", stream.status());
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
    if (!test::all_are(scratch, wanted.ephemeral_bytes, after))
      return fail("scratch", {GPUSHARE_INTERNAL, "somebody else wrote it in this session's turn"});
    if (const base::Status ended = (*iteration)->end(); !ended.ok()) return fail("end", ended);
    ++done;
  }
  const auto info = (*session)->info();
  std::printf("%llu %llu\n", static_cast<unsigned long long>(info.iterations_done),
              static_cast<unsigned long long>(info.service_ns));
  if (const base::Status closed = (*session)->close(); !closed.ok()) return fail("close", closed);
  return 0;
}
