// Calls every entry point of the driver directly and through the shim, by each way in, and compares what arrives and
// what returns. Run with the shim preloaded and GPUSHARE_CUDA_DRIVER naming the recording driver; in builds with
// sanitizers the entries are the only way in.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "through_shim.hpp"

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the kinds of parameters

namespace {

// One value for each place: pointers to zeroed memory of the test, numbers that differ.
alignas(64) char g_scratch[16][4096];
void fill(P& value, int place) {
  value = g_scratch[place];
}
void fill(B8& value, int place) {
  value = {{place + 70, place + 80}};
}
void fill(B64& value, int place) {
  std::memset(&value, place + 1, sizeof value);
}
template <class T>
void fill(T& value, int place) {
  value = static_cast<T>(place + 1);
}

// Calls `function` with the values; the places of a row's parameters count from 0.
template <class... A>
Result call(void* function, Result (*)(A...)) {
  std::memset(g_scratch, 0, sizeof g_scratch);
  int place = 0;
  std::tuple<A...> values;
  std::apply([&place](A&... value) { (fill(value, place++), ...); }, values);
  return std::apply(reinterpret_cast<Result (*)(A...)>(function), values);
}

struct Row {
  const char* name;
  const char* base;
  int version;
  Class cls;
  Result (*call)(void* function);
};
#define GPUSHARE_ENTRY(cls, name, base, version, parameters, arguments) \
  Result call_##name(void* function) {                                  \
    return call(function, static_cast<Result(*) parameters>(nullptr));  \
  }
#define GPUSHARE_NAME(cls, name)
#include "shim/driver_table.inc"
#undef GPUSHARE_ENTRY
const Row kRows[] = {
#define GPUSHARE_ENTRY(cls, name, base, version, parameters, arguments) \
  {#name, #base, version, Class::cls, call_##name},
#include "shim/driver_table.inc"
#undef GPUSHARE_ENTRY
#undef GPUSHARE_NAME
};
constexpr int kCount = sizeof kRows / sizeof *kRows;

// The same call of both functions. Returns what differs; empty if nothing does.
std::string compare(int row, void* direct, void* through, int result) {
  static const auto arm = control<decltype(&recorder_arm)>("recorder_arm");
  static const auto last = control<decltype(&recorder_last)>("recorder_last");
  arm(row, result);
  const Result first = kRows[row].call(direct);
  const recorder_call expected = *last();
  arm(row, result);
  const Result second = kRows[row].call(through);
  const recorder_call seen = *last();
  arm(-1, 0);
  if (first != second)
    return std::string(kRows[row].name) + ": answers " + std::to_string(second) + ", not " +
           std::to_string(first);
  if (seen.entry != expected.entry) return std::string(kRows[row].name) + ": did not arrive";
  if (std::memcmp(&seen, &expected, sizeof seen) != 0)
    return std::string(kRows[row].name) + ": other arguments";
  return {};
}

}  // namespace

TEST_CASE("every entry point takes the same arguments to the driver and brings the same answer back") {
  REQUIRE(driver() != nullptr);
  void* const proxy = dlopen(GPUSHARE_PROXY, RTLD_NOW | RTLD_LOCAL);
  REQUIRE(proxy != nullptr);
  const auto function_of = control<decltype(&recorder_function)>("recorder_function");
  int hooked = 0;
  for (int row = 0; row < kCount; ++row) {
    void* const direct = function_of(row);
    void* const by_handle = entry(kRows[row].name);
    std::vector<void*> ways = {by_handle};
    REQUIRE(by_handle != nullptr);
    INFO(kRows[row].name);
    if (kRows[row].cls != Class::pass) ++hooked;
    void* const by_proxy = dlsym(proxy, kRows[row].name);
    REQUIRE(by_proxy != nullptr);
    ways.push_back(by_proxy);
    // A call that the shim must see never gets the driver's own function. A call that it passes on does.
    CHECK((by_handle != direct) == (kRows[row].cls != Class::pass));
    CHECK(by_proxy != direct);
    if (kRows[row].cls != Class::pass) {
      CHECK(dlsym(RTLD_DEFAULT, kRows[row].name) == by_handle);
      CHECK(dlvsym(RTLD_DEFAULT, kRows[row].name, "any") == by_handle);
    }
    for (const int result : {0, 719})
      for (void* through : ways) CHECK(compare(row, direct, through, result).empty());
  }
  CHECK(hooked > 190);
}

TEST_CASE("nothing that gets memory or gives the device work passes uncounted or ungated") {
  const auto begins = [](const char* name, std::initializer_list<const char*> with) {
    for (const char* each : with)
      if (std::strncmp(name, each, std::strlen(each)) == 0) return true;
    return false;
  };
  int gated = 0, charged = 0;
  for (const auto& row : kRows) {
    INFO(row.name);
    // Host functions take no time of the device.
    if (begins(row.name, {"cuLaunch", "cuMemcpy", "cuMemsetD", "cuMemPrefetch", "cuMemDiscard",
                          "cuGraphLaunch", "cuGraphUpload"}) &&
        !begins(row.name, {"cuLaunchHostFunc"})) {
      ++gated;
      CHECK(row.cls == Class::gate);
    }
    if (begins(row.name,
               {"cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister", "cuMemCreate", "cuMemImport",
                "cuMemPoolImportPointer", "cuArrayCreate", "cuArray3DCreate", "cuMipmappedArrayCreate",
                "cuIpcOpenMemHandle", "cuImportExternalMemory", "cuGraphInstantiate", "cuModuleLoad",
                "cuLibraryLoad", "cuCtxCreate", "cuDevicePrimaryCtxRetain", "cuGreenCtxCreate"})) {
      ++charged;
      CHECK((row.cls == Class::charge || row.cls == Class::count));
    }
  }
  CHECK(gated > 120);
  CHECK(charged > 35);
}

TEST_CASE(
    "cuGetProcAddress answers with the shim's function of exactly the version and stream variant that was "
    "asked for") {
  using V2 = Result (*)(const char*, void**, int, uint64_t, int*);
  using V1 = Result (*)(const char*, void**, int, uint64_t);
  const auto function_of = control<decltype(&recorder_function)>("recorder_function");
  const auto bare_find = reinterpret_cast<V2>(function_of(find_entry("cuGetProcAddress_v2")));
  const auto v2 = reinterpret_cast<V2>(entry("cuGetProcAddress_v2"));
  const auto v1 = reinterpret_cast<V1>(entry("cuGetProcAddress"));
  for (int row = 0; row < kCount; ++row)
    for (const int version : {kRows[row].version, 13050})
      for (const uint64_t flags : {uint64_t{0}, uint64_t{1}, uint64_t{2}}) {
        void* bare = nullptr;
        void* seen = nullptr;
        void* seen_v1 = nullptr;
        int status = -1, bare_status = -1;
        INFO(kRows[row].base << " " << version << " " << flags);
        CHECK(bare_find(kRows[row].base, &bare, version, flags, &bare_status) ==
              v2(kRows[row].base, &seen, version, flags, &status));
        CHECK(status == bare_status);
        v1(kRows[row].base, &seen_v1, version, flags);
        CHECK(seen == seen_v1);
        if (bare == nullptr) continue;
        int found = 0;
        while (function_of(found) != bare) ++found;
        CHECK(seen == (kRows[found].cls == Class::pass ? bare : entry(kRows[found].name)));
      }
  void* none = nullptr;
  CHECK(v2("cuNoSuchFunction", &none, 13050, 0, nullptr) == kNotFound);
  CHECK(none == nullptr);
}

// RECORDER_VERSION=14000: whoever asks for that version gets one of which the table knows nothing.
TEST_CASE("a version that the table does not know is never answered with the hook of an older one") {
  using V2 = Result (*)(const char*, void**, int, uint64_t, int*);
  const auto function_of = control<decltype(&recorder_function)>("recorder_function");
  const auto bare_find = reinterpret_cast<V2>(function_of(find_entry("cuGetProcAddress_v2")));
  const auto find = reinterpret_cast<V2>(entry("cuGetProcAddress_v2"));
  int newer = 0, hooked = 0;
  for (const auto& row : kRows)
    for (int version = 2000; version <= 15000; version += version < 13900 ? 1000 : 50)
      for (const uint64_t flags : {uint64_t{0}, uint64_t{1}, uint64_t{2}}) {
        void *bare = nullptr, *seen = nullptr;
        int status = -1, bare_status = -1;
        INFO(row.base << " " << version << " " << flags);
        CHECK(bare_find(row.base, &bare, version, flags, &bare_status) ==
              find(row.base, &seen, version, flags, &status));
        CHECK(status == bare_status);
        if (bare == nullptr) continue;
        if (version >= 14000) {
          CHECK(seen == bare);
          ++newer;
        } else if (seen != bare) {
          ++hooked;
        }
      }
  CHECK(newer > 10'000);
  CHECK(hooked > 2'000);
}

TEST_CASE("functions that the proxy lacks are the driver's") {
  void* const proxy = dlopen(GPUSHARE_PROXY, RTLD_NOW | RTLD_LOCAL);
  REQUIRE(proxy != nullptr);
  dlerror();
  for (const char* name : {"cuOfTomorrow", "cuMemAlloc_v9"}) {
    INFO(name);
    void* const found = dlsym(proxy, name);
    CHECK(found != nullptr);
    CHECK(dlerror() == nullptr);
    CHECK(found == dlsym(driver(), name));
  }
  void* asked = nullptr;
  const auto find =
      reinterpret_cast<Result (*)(const char*, void**, int, uint64_t, int*)>(entry("cuGetProcAddress_v2"));
  CHECK(find("cuOfTomorrow", &asked, 13050, 0, nullptr) == kSuccess);
  CHECK(asked == dlsym(driver(), "cuOfTomorrow"));
  CHECK(dlsym(proxy, "cuOfTheDayAfter") == nullptr);
  CHECK(dlerror() != nullptr);
}

TEST_CASE("programs that find the C library's functions by hand get the shim's") {
  void* const libc = dlopen("libc.so.6", RTLD_LAZY);
  REQUIRE(libc != nullptr);
  using Find = void* (*)(void*, const char*);
  const auto found = reinterpret_cast<Find>(dlsym(libc, "dlsym"));
  REQUIRE(found != nullptr);
  CHECK(found(driver(), "cuMemAlloc_v2") == dlsym(driver(), "cuMemAlloc_v2"));
  CHECK(found(driver(), "cuMemAlloc_v2") !=
        control<decltype(&recorder_function)>("recorder_function")(find_entry("cuMemAlloc_v2")));
  // RTLD_NEXT of names that are not the driver's depends on who asks.
  CHECK(dlsym(RTLD_NEXT, "malloc") != nullptr);
  CHECK(dlsym(RTLD_NEXT, "no_such_function") == nullptr);
  CHECK(dlerror() != nullptr);
}
