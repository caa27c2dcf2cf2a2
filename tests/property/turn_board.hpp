// turn_board.hpp: what the processes of processes_property.cpp write about their iterations, in memory that the test
// and all of them have mapped.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gpushare::test {

inline constexpr size_t kTurnWorkers = 8;

struct TurnBoard {
  struct Worker {
    std::atomic<uint64_t> weight, begun, out_of_order, overwritten;
    std::atomic<uint64_t> service_ns;  // as its runtime has measured it, and told the daemon
    std::atomic<uint64_t> backlogged;  // it has iterations that have not begun
  };
  std::atomic<int32_t> holder;       // the process whose iteration is on the device; 0: none
  std::atomic<uint64_t> overlaps;    // iterations that began while another was there
  std::atomic<uint64_t> longest_ns;  // iteration, in service_ns
  // The iterations in the order in which they began on the device: who, and what all had been served before.
  struct Begun {
    std::atomic<uint64_t> worker, service_ns[kTurnWorkers], backlogged[kTurnWorkers];
  };
  static constexpr size_t kMostBegun = 1024;
  std::atomic<uint64_t> count;
  Begun order[kMostBegun];
  Worker worker[kTurnWorkers];

  // Null: it cannot be had. It is unmapped when the process ends.
  static TurnBoard* map(const char* path) {
    const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(TurnBoard)) != 0) return nullptr;
    void* const at = mmap(nullptr, sizeof(TurnBoard), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return at == MAP_FAILED ? nullptr : static_cast<TurnBoard*>(at);
  }
};

inline void raise_to(std::atomic<uint64_t>& most, uint64_t value) {
  uint64_t now = most.load();
  while (now < value && !most.compare_exchange_weak(now, value)) {
  }
}

}  // namespace gpushare::test
