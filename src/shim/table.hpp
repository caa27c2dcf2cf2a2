// shim: libraries that are loaded into unmodified programs. libgpushare_preload.so (LD_PRELOAD) and a proxy named
// libcuda.so.1 stand between a program and the CUDA driver: they count the program's memory against a limit and make
// its work wait for its turn. docs/design/shim.md describes the whole; docs/shim.md is for operators.
//
// The folder includes nothing of the project's libraries but the daemon's wire format and leases (src/client/wire.hpp,
// lease.hpp), and is linked into none of them. It runs inside programs with another C++ library, or none, and older C
// libraries: no exceptions, no C++ runtime, one constructor (group.cpp), no symbol newer than GLIBC_2.28, and no driver
// call while a lock of the shim is held.
//
// table.hpp: the entry points of the driver by number, and the driver's functions behind them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "shim/words.hpp"

namespace gpushare::shim {

// Kinds of parameters, as driver_table.inc names them.
using P = void*;
using L = uint64_t;
using I = uint32_t;
using H = uint16_t;
using C = uint8_t;
using F = float;
struct B8 {
  int32_t words[2];
};
struct B64 {
  char bytes[64];
};

using Result = int32_t;  // CUresult
enum : Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kNotFound = 500,
  kNotSupported = 801,
};

enum class Class : uint8_t { pass, count, charge, gate };

// One number for each row of the table, in its order: kEntry_cuMemAlloc_v2.
enum Entry : int32_t {
#define GPUSHARE_ENTRY(cls, name, base, version, parameters, arguments) kEntry_##name,
#define GPUSHARE_NAME(cls, name) kEntry_##name,
#include "shim/driver_table.inc"
#undef GPUSHARE_ENTRY
#undef GPUSHARE_NAME
  kEntries
};

struct EntryInfo {
  const char* name;  // as exported
  const char* base;  // as asked of cuGetProcAddress; null: never asked by version
  int32_t version;   // CUDA version that brought this signature
  Class cls;
};
extern const EntryInfo kEntryInfo[kEntries];
int find_entry(const char* name);  // -1: not a function of the driver

}  // namespace gpushare::shim

// entries.S: what programs call, and the driver's functions, null until first used.
extern "C" {
extern void* const gpushare_shim_entries[gpushare::shim::kEntries];
extern void* gpushare_shim_real[gpushare::shim::kEntries];
}

namespace gpushare::shim {

// driver.cpp: the driver's function of entry `entry`, never null: a driver that lacks it is answered for with kNotFound.
void* resolve(int entry);
bool driver_has(int entry);

inline void* real_function(int entry) {
  void* function = load(gpushare_shim_real[entry]);
  return __builtin_expect(function != nullptr, 1) ? function : resolve(entry);
}
// Calls the driver's own function.
template <class... A>
inline Result real(int entry, A... arguments) {
  return reinterpret_cast<Result (*)(A...)>(real_function(entry))(arguments...);
}

}  // namespace gpushare::shim
