// A process with one session on a shared device that does what it is told in lines on its stdin, and answers each with one line:
//   open NAME CLASS P_MIB E_MIB LEAST_MIB FLAGS   a session; CLASS g or o, FLAGS s (may spill), u (may be upgraded) or -
//   admitted MS               waits so long until it is let in
//   alloc MIB VALUE           a persistent block full of that value
//   quota MIB                 0: none
//   iterate N                 iterations; each checks all blocks
//   run, halt                 begins and ends iterations on a thread of its own, which go on until halt
//   cycle MIB                 from now on a thread lowers the quota to that and raises it, with iterations between, until the process is killed
//   info                      CLASS STATE LIMIT_MIB SPILLED_MIB PROMISED_MIB
//   close
// The answer is "ok", or what went wrong. Ends with its stdin.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "executor/runtime.hpp"
#include "support/bytes.hpp"

using namespace gpushare;

namespace {

constexpr uint64_t kToldMiB = uint64_t{1} << 20, kSoonNs = 60'000'000'000;

struct Block {
  memory::Address address;
  uint64_t bytes;
  int value;
};

struct Told {
  std::shared_ptr<executor::Runtime> runtime;
  std::shared_ptr<executor::Session> session;
  std::vector<Block> blocks;
  std::atomic<bool> halt{false};
  std::thread runs;
  base::Status ran;  // read after the thread's end

  base::Status iterate(uint64_t times) {
    for (uint64_t i = 0; i < times; ++i) {
      GPUSHARE_ASSIGN_OR_RETURN(const auto iteration, session->begin(kSoonNs));
      for (const Block& block : blocks)
        if (!test::all_are(reinterpret_cast<const void*>(block.address), block.bytes, block.value))
          return {GPUSHARE_INTERNAL, "a block's bytes are others"};
      GPUSHARE_RETURN_IF_ERROR(iteration->end());
    }
    return {};
  }
  base::Status open(std::istream& words) {
    executor::SessionOptions options;
    std::string name, cls, flags;
    uint64_t persistent = 0, ephemeral = 0, least = 0;
    words >> name >> cls >> persistent >> ephemeral >> least >> flags;
    options.name = name;
    options.cls = cls == "o" ? sched::SessionClass::kOpportunistic : sched::SessionClass::kGuaranteed;
    options.persistent_bytes = persistent * kToldMiB;
    options.ephemeral_bytes = ephemeral * kToldMiB;
    options.least_bytes = least * kToldMiB;
    options.allow_spill = flags.find('s') != std::string::npos;
    options.may_upgrade = flags.find('u') != std::string::npos;
    GPUSHARE_ASSIGN_OR_RETURN(session, runtime->open_session(options));
    return {};
  }
  base::Status alloc(uint64_t mib, int value) {
    GPUSHARE_ASSIGN_OR_RETURN(const memory::Address address,
                              session->alloc(memory::Kind::kModel, mib * kToldMiB, 0));
    std::memset(reinterpret_cast<void*>(address), value, mib * kToldMiB);
    blocks.push_back({address, mib * kToldMiB, value});
    return {};
  }
  void start(uint64_t cycle_mib) {
    halt = false;
    runs = std::thread([this, cycle_mib] {
      while (!halt && ran.ok()) {
        if (cycle_mib > 0) ran = session->set_quota(cycle_mib * kToldMiB);
        for (int i = 0; i < 12 && ran.ok(); ++i) ran = iterate(1);
        if (cycle_mib > 0 && ran.ok()) ran = session->set_quota(0);
        for (int i = 0; i < 12 && ran.ok(); ++i) ran = iterate(1);
      }
      if (!ran.ok()) std::fprintf(stderr, "told_worker: %s\n", ran.to_string().c_str());
    });
  }
  base::Status stop() {
    halt = true;
    if (runs.joinable()) runs.join();
    return ran;
  }
  std::string info() const {
    static constexpr const char* kStates[] = {"queued", "resident", "paged_out", "cancelled", "failed"};
    const executor::SessionInfo info = session->info();
    std::ostringstream out;
    out << (info.cls == sched::SessionClass::kGuaranteed ? "g" : "o") << ' '
        << kStates[static_cast<size_t>(info.state)] << ' ' << info.limit_bytes / kToldMiB << ' '
        << info.spilled_bytes / kToldMiB << ' '
        << (info.promised_persistent_bytes + info.promised_ephemeral_bytes) / kToldMiB;
    return out.str();
  }
};

}  // namespace

int main() {
  Told told;
  executor::RuntimeOptions options;
  options.device = "shared";
  options.spill_move_loss = 1e9;  // rests would last longer than a test
  auto runtime = executor::Runtime::open(std::move(options));
  if (!runtime.ok()) {
    std::fprintf(stderr, "told_worker: %s\n", runtime.status().to_string().c_str());
    return 1;
  }
  told.runtime = *runtime;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    uint64_t number = 0;
    int value = 0;
    base::Status status;
    std::string answer = "ok";
    if (what == "open") {
      status = told.open(words);
    } else if (what == "admitted") {
      words >> number;
      status = told.session->wait_admitted(number * 1'000'000);
    } else if (what == "alloc") {
      words >> number >> value;
      status = told.alloc(number, value);
    } else if (what == "quota") {
      words >> number;
      status = told.session->set_quota(number * kToldMiB);
    } else if (what == "iterate") {
      words >> number;
      status = told.iterate(number);
    } else if (what == "run") {
      told.start(0);
    } else if (what == "cycle") {
      words >> number;
      told.start(number);
    } else if (what == "halt") {
      status = told.stop();
    } else if (what == "info") {
      answer = told.info();
    } else if (what == "close") {
      (void)told.stop();
      status = told.session->close();
    } else {
      answer = "unknown";
    }
    std::printf("%s\n", status.ok() ? answer.c_str() : status.to_string().c_str());
    std::fflush(stdout);
  }
  return told.stop().ok() ? 0 : 1;
}
