// measure_room [rounds, 15] [MiB held, 192]: how long an allocation of a guaranteed session waits for bytes that an idle
// opportunistic session holds, through the C ABI on the host device. Prints the table of docs/design/memory.md.
//
// The holder has filled all bytes but what both sessions need to run. The allocation misses a part of them, or all, which
// are copied to host memory. Then it ends, and the holder comes back before the next one. The holder is a session of the
// same process, or of another process of a daemon. A round measures each way and each size once, in turns, beside a
// plain copy of as many bytes to new pages. The processes are this program again, see main().
// SPDX-License-Identifier: Apache-2.0
#include <signal.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <gpushare/gpushare.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "line_process.hpp"

namespace gs = gpushare;
namespace {

using namespace gs::benchmarks;  // NOLINT
constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kSmall = 2 * kMiB;  // E of both sessions, P of the guaranteed one
constexpr const char* kDevice = "host?total_bytes=1073741824";

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

gs::Session open_session(gs::Runtime& runtime, const char* name, gs::Class cls, uint64_t bytes) {
  gs::SessionOptions options;
  options.name = name;
  options.cls = cls;
  options.persistent_bytes = bytes;
  options.ephemeral_bytes = kSmall;
  return runtime.open_session(options);
}

// It has its bytes: an iteration needs all of them.
void be_in(gs::Session& session) {
  auto iteration = session.begin_iteration(std::chrono::seconds(60));
  if (!iteration) give_up("a session waits for a minute");
  iteration->end();
}

class Holder {
 public:
  Holder(gs::Runtime& runtime, uint64_t bytes)
      : bytes_(bytes), session_(open_session(runtime, "holds", gs::Class::opportunistic, bytes)) {
    be_in(session_);
    block_ = session_.alloc_model<unsigned char>(bytes);
    std::memset(block_, 7, bytes);
  }
  void come_back() {
    be_in(session_);
    if (block_[0] != 7 || block_[bytes_ - 1] != 7) give_up("a byte was lost");
  }

 private:
  uint64_t bytes_;
  gs::Session session_;
  unsigned char* block_ = nullptr;
};

// The wait of an allocation of `bytes`, in ms.
double wait_for(gs::Runtime& runtime, uint64_t bytes) {
  gs::Session session = open_session(runtime, "wants", gs::Class::guaranteed, kSmall);
  be_in(session);
  const double start = now_ms();
  (void)session.alloc_bytes(gs::Kind::model, bytes);
  return now_ms() - start;
}

uint64_t capacity_for(uint64_t held) {
  return held + 3 * kSmall;
}

// holder BYTES
int holder_process(char** argv) {
  gs::Runtime runtime = open_shared();
  Holder holder(runtime, std::strtoull(argv[2], nullptr, 10));
  say("ready");
  char line[16];
  while (std::fgets(line, sizeof line, stdin) != nullptr) {
    holder.come_back();
    say("in");
  }
  return 0;
}

// daemon BYTES
int daemon_process(char** argv) {
  const std::string capacity = std::to_string(capacity_for(std::strtoull(argv[2], nullptr, 10)));
  become_daemon({"--device", kDevice, "--capacity", capacity});
  return 1;
}

// A plain copy to pages that the process does not have yet, as the host memory of a page-out is.
double copy_ms(const std::vector<unsigned char>& from, uint64_t bytes) {
  const std::unique_ptr<unsigned char, decltype(&std::free)> to(
      static_cast<unsigned char*>(std::aligned_alloc(kSmall, bytes)), std::free);
  const double start = now_ms();
  std::memcpy(to.get(), from.data(), bytes);
  return now_ms() - start;
}

std::string cell(const std::vector<double>& of_rounds) {
  char text[96];
  std::snprintf(text, sizeof text, "%.3g (%.3g to %.3g)", quantile(of_rounds, 0.5), quantile(of_rounds, 0),
                quantile(of_rounds, 1));
  return text;
}

void measure(int rounds, uint64_t held) {
  const uint64_t sizes[] = {held / 32, held / 8, held / 2, held};
  struct Size {
    std::vector<double> alone, shared, copy;
  } times[std::size(sizes)];
  LineProcess daemon({"daemon", std::to_string(held)});
  {
    LineProcess there({"holder", std::to_string(held)});
    there.expect("ready");
    gs::Runtime shared = open_shared();
    gs::RuntimeOptions options;
    options.device = kDevice;
    options.capacity_bytes = capacity_for(held);
    gs::Runtime alone = gs::Runtime::open(options);
    Holder here(alone, held);
    const std::vector<unsigned char> from(held, 1);
    for (int round = 0; round < rounds; ++round)
      for (size_t i = 0; i < std::size(sizes); ++i) {
        times[i].alone.push_back(wait_for(alone, sizes[i]));
        here.come_back();
        times[i].shared.push_back(wait_for(shared, sizes[i]));
        there.go();
        there.expect("in");
        times[i].copy.push_back(copy_ms(from, sizes[i]));
      }
  }
  kill(daemon.pid, SIGTERM);
  std::printf("an opportunistic session holds %llu MiB; %d rounds: ms, median (least to most)\n",
              static_cast<unsigned long long>(held / kMiB), rounds);
  std::printf("| missing, MiB | one process | two processes of a daemon | plain copy |\n|---|---|---|---|\n");
  for (size_t i = 0; i < std::size(sizes); ++i)
    std::printf("| %llu | %s | %s | %s |\n", static_cast<unsigned long long>(sizes[i] / kMiB),
                cell(times[i].alone).c_str(), cell(times[i].shared).c_str(), cell(times[i].copy).c_str());
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string first = argc > 1 ? argv[1] : "15";
  if (first == "holder" && argc == 3) return holder_process(argv);
  if (first == "daemon" && argc == 3) return daemon_process(argv);
  const int rounds = std::atoi(first.c_str());
  const uint64_t mib = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 192;
  if (rounds < 1 || mib < 64 || mib > 800 || mib % 64 != 0)
    give_up("usage: measure_room [rounds] [MiB held]");
  char folder[] = "/tmp/gpushare-room-XXXXXX";
  if (mkdtemp(folder) == nullptr) give_up("mkdtemp");
  setenv("GPUSHARE_SOCKET", (std::string(folder) + "/socket").c_str(), 1);
  measure(rounds, mib * kMiB);
  std::filesystem::remove_all(folder);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "measure_room: %s\n", error.what());
  return 1;
}
