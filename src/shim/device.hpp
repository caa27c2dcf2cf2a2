// device.hpp: which device and context the calling thread uses, as the books know them.
// Threads: any. Calls the driver; no lock is held.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "shim/table.hpp"

namespace gpushare::shim {

struct Current {
  uint64_t context = 0;
  int place =
      -1;  // of its device on the group's page; -1: unknown, not counted; kUncounted: refused under a limit
};
// The device of the calling thread's context; place -1 without a context.
Current current();
// The place of a context's device; `is_current`: it is the calling thread's.
int place_of_context(uint64_t context, bool is_current);
// The place of the only device of a machine; -1: there are several, or none.
int only_place();
// The place of the driver's device `ordinal`.
int place_of(int ordinal);
// The driver's ordinal of the device at a place; -1: nobody has asked for that device yet.
int ordinal_of(int place);
// The context is gone: its blocks are discharged, and the driver may use its number again.
void forget_context(uint64_t context);
// Measures what the process has of the device beyond its blocks (contexts, modules) and notes it. False: more than the
// limit leaves; `out_bytes` (may be null) has it.
// `kept`: what pools are known to keep, which is not to count here.
bool measure_overhead(int ordinal, uint64_t* out_bytes = nullptr, uint64_t kept = 0);

// The calling thread has the context for so long; 0: the one that it has.
class InContext {
 public:
  explicit InContext(uint64_t context) {
    if (context == 0) return;
    void* now = nullptr;
    is_ = real(kEntry_cuCtxGetCurrent, &now) == kSuccess && now == reinterpret_cast<P>(context);
    if (!is_) is_ = pushed_ = real(kEntry_cuCtxPushCurrent_v2, reinterpret_cast<P>(context)) == kSuccess;
  }
  ~InContext() {
    void* popped = nullptr;
    if (pushed_) real(kEntry_cuCtxPopCurrent_v2, &popped);
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
  bool is() const { return is_; }

 private:
  bool is_ = false, pushed_ = false;
};

// A child of fork has no primary context yet.
void forget_primaries_in_child();

}  // namespace gpushare::shim
