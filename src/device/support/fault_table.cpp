// SPDX-License-Identifier: Apache-2.0
#include "device/support/fault_table.hpp"

namespace gpushare::device {

base::Status FaultTable::set(const gpushare_backend_fault* fault) {
  if (fault == nullptr || fault->struct_size < sizeof(gpushare_backend_fault)) {
    return {GPUSHARE_INVALID_ARGUMENT, "the fault is null or its struct_size is too small"};
  }
  if (fault->kind >= kKinds) {
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("fault kind %u is unknown; the last one is %u", fault->kind, kKinds - 1)};
  }
  base::MutexLock lock(mutex_);
  if (fault->kind == GPUSHARE_FAULT_NONE) {
    armed_.fill(Armed{});
    armed_count_.store(0, std::memory_order_relaxed);
    return {};
  }
  if (fault->at_call == 0) return {GPUSHARE_INVALID_ARGUMENT, "a fault's at_call is 0; 1 is the next call"};
  const bool slow = fault->kind == GPUSHARE_FAULT_SLOW_STREAM;
  if (slow && !(fault->factor >= 1 && fault->factor <= 1000)) {
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("a slow stream's factor is %g; allowed is 1 to 1000", fault->factor)};
  }
  Armed& armed = armed_[fault->kind];
  if (armed.calls_left == 0) armed_count_.fetch_add(1, std::memory_order_relaxed);
  armed = {fault->at_call, slow ? fault->factor : 0};
  return {};
}

bool FaultTable::count_down(uint32_t kind) {
  Armed& armed = armed_[kind];
  if (armed.calls_left == 0 || --armed.calls_left > 0) return false;
  armed_count_.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

bool FaultTable::fires(uint32_t kind) {
  if (armed_count_.load(std::memory_order_relaxed) == 0) return false;
  base::MutexLock lock(mutex_);
  return count_down(kind);
}

FaultTable::Verdict FaultTable::on_enqueue() {
  Verdict verdict;
  if (armed_count_.load(std::memory_order_relaxed) == 0) return verdict;
  base::MutexLock lock(mutex_);
  // Every armed kind counts this call, also when another one fires.
  verdict.device_lost = count_down(GPUSHARE_FAULT_DEVICE_LOST);
  verdict.launch_fails = count_down(GPUSHARE_FAULT_LAUNCH_FAILS);
  const double factor = armed_[GPUSHARE_FAULT_SLOW_STREAM].factor;
  if (count_down(GPUSHARE_FAULT_SLOW_STREAM)) verdict.slow_factor = factor;
  return verdict;
}

}  // namespace gpushare::device
