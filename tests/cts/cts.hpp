// The conformance suite: what backend.h promises, as tests that every backend must pass. The suites are
// compiled once; a backend joins with one file in backends/, from which CMake makes the program and ctest
// entry cts_<file name>.
//
// Rules for suites: device memory is read and written by copies only, never through a pointer. While a Gate
// is closed, only queries are made (a device may run host functions on the thread that waits). Test names are
// unique, start with the suite's name and a colon, and hold no comma, bracket or quote.
//
// Environment: GPUSHARE_CTS_REQUIRE="host,sim" names backends for which UNAVAILABLE is a failure and not a
// skip; GPUSHARE_CTS_VERIFY=1 runs the unsupported tests too, each in a process of its own, and fails if one
// passes (xfail tests are always run so); GPUSHARE_CTS_SPEC opens another device specification.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "support/catch.hpp"
#include "support/gate.hpp"
#include "support/status_checks.hpp"

namespace gpushare::cts {

// A test that a backend is excused from. `test` is a test's name, or the start of several followed by '*'.
struct Excuse {
  std::string test;
  std::string reason;
};

struct Backend {
  std::string name;
  std::string spec;                 // what Device::open takes
  std::vector<std::string> tags;    // what suites ask has_tag() for, see below
  std::vector<Excuse> unsupported;  // never meant to pass
  std::vector<Excuse> xfail;        // should pass and does not yet: always run, and must fail
};

// Tag: nobody else uses the device's memory, so that free_bytes adds up.
inline constexpr const char* kExactMemory = "exact_memory";
// Tag: what opening a device begins takes far longer than a test, and goes on while any is open. One is kept open
// beside the tests.
inline constexpr const char* kSlowToOpen = "slow_to_open";

// Defined by the one file of the backend.
const Backend& backend();
bool has_tag(const std::string& tag);
// backend().spec, or GPUSHARE_CTS_SPEC.
std::string device_spec();

// One test's device. Closed, and checked for leaks, when the test has ended.
struct Context {
  std::unique_ptr<device::Device> device;

  device::Stream stream(int32_t priority = 0);
  device::Event event(uint32_t flags = GPUSHARE_EVENT_DEFAULT);
  // Blocking copies; `stream` is synchronized.
  void upload(const device::Stream& stream, device::Address to, const std::vector<uint8_t>& bytes);
  std::vector<uint8_t> download(const device::Stream& stream, device::Address from, uint64_t bytes);
};

using TestFunction = void (*)(Context&);
// Registers a name, for checking the excuses.
struct Registration {
  explicit Registration(const char* name);
};
void run(const char* name, TestFunction function);

using test::Gate;

// Host functions. The user data are an int.
inline void count_up(void* counter) {
  ++*static_cast<int*>(counter);
}

// Bytes that tell where they are from.
std::vector<uint8_t> pattern(uint64_t bytes, uint64_t seed);
inline uint64_t address_of(const void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}

// 3xx: "fix the call". Which of them a backend can tell differs with its driver.
inline bool is_call_error(int32_t code) {
  return code >= 300 && code < 400;
}
inline bool is_call_error(const base::Status& status) {
  return is_call_error(status.code());
}

gpushare_backend_fault fault(uint32_t kind, uint64_t at_call, double factor = 0);
gpushare_backend_work work(uint64_t duration_ns, float demand = 1);

}  // namespace gpushare::cts

#define GPUSHARE_CTS_CONCAT2(a, b) a##b
#define GPUSHARE_CTS_CONCAT(a, b) GPUSHARE_CTS_CONCAT2(a, b)
#define GPUSHARE_CTS_TEST(function, registration, name)          \
  static void function(::gpushare::cts::Context& cts);           \
  static const ::gpushare::cts::Registration registration(name); \
  TEST_CASE(name) {                                              \
    ::gpushare::cts::run(name, function);                        \
  }                                                              \
  static void function(::gpushare::cts::Context& cts)
// CTS_TEST("streams: a new stream is idle") { ... cts.device->... }
#define CTS_TEST(name)                                           \
  GPUSHARE_CTS_TEST(GPUSHARE_CTS_CONCAT(cts_test_, __COUNTER__), \
                    GPUSHARE_CTS_CONCAT(cts_registration_, __COUNTER__), name)
