// Every entry point of class gate waits while the gate is closed, and reaches the driver when the turn comes. The
// shim's objects are part of the test, which closes and opens the gate in place of the session's thread. The driver is
// the recording one.
// SPDX-License-Identifier: Apache-2.0
#include "shim/gate.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "shim/books.hpp"
#include "shim/boundaries.hpp"
#include "shim/connection.hpp"
#include "shim/ranges.hpp"
#include "shim/table.hpp"
#include "shim/words.hpp"
#include "support/catch.hpp"
#include "through_recorder.hpp"

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the kinds of parameters

namespace {

// An empty file, which becomes the page of this process's group.
struct PageFile {
  PageFile() {
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    setenv("GPUSHARE_SHIM_GROUP", path.c_str(), 1);
  }
  ~PageFile() { close(file); }
  const int file = memfd_create("gpushare-group", MFD_CLOEXEC);
} g_page_of_group;

alignas(64) char g_zeros[16][4096];

template <class T>
void fill(T& value, int place) {
  if constexpr (std::is_same_v<T, P>)
    value = g_zeros[place];
  else
    std::memset(static_cast<void*>(&value), 0, sizeof value);
}
// Calls the entry with pointers to zeros, and zeros.
template <class... A>
Result call(void* function, Result (*)(A...)) {
  int place = 0;
  std::tuple<A...> values;
  std::apply([&place](A&... value) { (fill(value, place++), ...); }, values);
  return std::apply(reinterpret_cast<Result (*)(A...)>(function), values);
}

struct Row {
  const char* name;
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
#undef GPUSHARE_NAME
const Row kRows[] = {
#define GPUSHARE_ENTRY(cls, name, base, version, parameters, arguments) {#name, Class::cls, call_##name},
#define GPUSHARE_NAME(cls, name) {#name, Class::cls, nullptr},
#include "shim/driver_table.inc"
#undef GPUSHARE_ENTRY
#undef GPUSHARE_NAME
};

constexpr int kSeat = 0;

// A process that is a session on one device.
void be_a_session() {
  store(gate().seats, 1);
  store(gate().sessions, 1);
  store(gate().first, kSeat + 1);
  store(turn(kSeat).budget_ns, UINT64_MAX);
  store(turn(kSeat).most_ns, UINT64_MAX);
}
void hold(Phase phase) {
  change_phase(kSeat, phase);
  close_gate();
}

}  // namespace

TEST_CASE(
    "every entry of class gate waits while the gate is closed, and goes to the driver when the turn comes") {
  REQUIRE(driver() != nullptr);
  be_a_session();
  const auto arm = control<decltype(&recorder_arm)>("recorder_arm");
  const auto last = control<decltype(&recorder_last)>("recorder_last");
  constexpr int kNoEntry = -2, kAnswer = 719;
  int gated = 0;
  for (const Phase closed : {Phase::asked, Phase::draining}) {
    for (int row = 0; row < kEntries; ++row) {
      if (kRows[row].cls != Class::gate || kRows[row].call == nullptr) continue;
      INFO(kRows[row].name);
      ++gated;
      hold(closed);
      arm(row, kAnswer);
      std::atomic<int> answer{kNoEntry};
      std::thread program([&, row] { answer = kRows[row].call(gpushare_shim_entries[row]); });
      // It waits at the gate, or has come past it.
      while (load(turn(kSeat).waiting) == 0 && answer.load() == kNoEntry) sched_yield();
      CHECK(answer.load() == kNoEntry);
      CHECK(last()->entry != row);
      change_phase(kSeat, Phase::open);
      program.join();
      CHECK(answer.load() == kAnswer);
      CHECK(last()->entry == row);
      arm(-1, 0);
    }
  }
  CHECK(gated == 2 * 136);
}

TEST_CASE("an entry of class gate that finds the gate open does not wait") {
  be_a_session();
  const auto arm = control<decltype(&recorder_arm)>("recorder_arm");
  change_phase(kSeat, Phase::open);
  open_gate();
  for (int row = 0; row < kEntries; ++row) {
    if (kRows[row].cls != Class::gate || kRows[row].call == nullptr) continue;
    INFO(kRows[row].name);
    arm(row, 719);
    CHECK(kRows[row].call(gpushare_shim_entries[row]) == 719);
  }
  arm(-1, 0);
}

TEST_CASE("the gate opens for a process on one device, or without a session, whose blocks stay") {
  const auto opens = [](uint32_t seats, uint32_t sessions) {
    close_gate();
    store(gate().seats, seats);
    store(gate().sessions, sessions);
    open_gate();
    return load(gate().open) == 1;
  };
  CHECK(opens(1, 1));
  CHECK(opens(1, 0));
  CHECK(opens(2, 0));
  CHECK_FALSE(opens(2, 1));
  store(g_moves, 1U);
  CHECK_FALSE(opens(1, 0));
  store(g_moves, 0U);
}

namespace {

constexpr uint64_t kBudgetNs = 5'000'000;

// A quantum of which so much is used.
void begin_quantum(uint64_t used_ns) {
  Turn& now = turn(kSeat);
  now = {};
  now.budget_ns = kBudgetNs;
  now.used_ns = used_ns;
  hold(Phase::quantum);
}
Result call_entry(const char* name, int result) {
  const int row = find_entry(name);
  control<decltype(&recorder_arm)>("recorder_arm")(row, result);
  const Result answer = kRows[row].call(gpushare_shim_entries[row]);
  control<decltype(&recorder_arm)>("recorder_arm")(-1, 0);
  return answer;
}

}  // namespace

TEST_CASE(
    "a quantum that is half over ends where the program has waited for its work, if the next iteration would "
    "not fit") {
  be_a_session();
  constexpr int kNotReady = 600;
  for (const char* name :
       {"cuCtxSynchronize", "cuCtxSynchronize_v2", "cuStreamSynchronize", "cuStreamSynchronize_ptsz",
        "cuEventSynchronize", "cuEventQuery", "cuStreamQuery", "cuStreamQuery_ptsz"}) {
    INFO(name);
    const bool asks = std::string(name).find("Query") != std::string::npos;
    const auto wait = [&] {
      if (asks) CHECK(call_entry(name, kNotReady) == kNotReady);
      CHECK(call_entry(name, 0) == 0);
    };
    // One iteration of 4 ms; another would end after the quantum.
    begin_quantum(4'000'000);
    CHECK(call_entry(name, 719) == 719);
    CHECK(turn(kSeat).over == 0);
    wait();
    CHECK(turn(kSeat).over == 1);
    // Less than half.
    begin_quantum(2'000'000);
    wait();
    CHECK(turn(kSeat).over == 0);
    // A second one of 0.6 ms: a third would fit. Then one of 2.1 ms: another would not.
    turn(kSeat).used_ns = 2'600'000;
    wait();
    CHECK(turn(kSeat).over == 0);
    turn(kSeat).used_ns = 4'700'000;
    wait();
    CHECK(turn(kSeat).over == 1);
    // Nobody waits for this turn, or it is none.
    begin_quantum(4'000'000);
    turn(kSeat).budget_ns = UINT64_MAX;
    wait();
    CHECK(turn(kSeat).over == 0);
    begin_quantum(4'000'000);
    hold(Phase::draining);
    wait();
    CHECK(turn(kSeat).over == 0);
    // Work that had ended before it was asked for.
    begin_quantum(4'000'000);
    if (asks) {
      CHECK(call_entry(name, 0) == 0);
      CHECK(turn(kSeat).over == 0);
    }
  }
}

TEST_CASE("a quantum that is half over ends where a sequence of launches begins anew") {
  be_a_session();
  begin_quantum(0);
  int ended_at = 0;
  for (int launch = 0; launch < 60; ++launch) {
    begin_quantum(launch < 40 ? 0 : 4'000'000);
    note_launch(kSeat, 100 + static_cast<uint64_t>(launch) % 6);
    if (launch < 40) CHECK(turn(kSeat).over == 0);
    if (turn(kSeat).over != 0) ended_at = ended_at == 0 || (launch - ended_at) % 6 == 0 ? launch : -1;
  }
  CHECK(ended_at >= 40);
}

TEST_CASE("the smallest range is one of the device's, and lies where it is looked for") {
  REQUIRE(add_range({0x10000, 10, 30, 1, 0, 0, Lies::spilled, false}));
  REQUIRE(add_range({0x20000, 10, 10, 1, 0, 1, Lies::spilled, false}));
  REQUIRE(add_range({0x30000, 10, 20, 1, 0, 0, Lies::away, false}));
  REQUIRE(add_range({0x40000, 10, 40, 1, 0, 0, Lies::spilled, false}));
  CHECK(least_range(0, Lies::spilled) == 30);
  CHECK(least_range(1, Lies::spilled) == 10);
  CHECK(least_range(0, Lies::away) == 20);
  CHECK(least_range(1, Lies::away) == UINT64_MAX);
  forget_ranges_in_child();
}

TEST_CASE("a child of fork has no ranges, and nobody holds any of them") {
  Range range;
  REQUIRE(add_range({0x10000, 10, 30, 1, 0, 0, Lies::spilled, false}));
  const uint64_t before = ended_holds();
  REQUIRE(hold_range(0, 0, Lies::spilled, &range));
  CHECK(ended_holds() == kHeld);
  release_range(range);
  CHECK(ended_holds() == before + 1);
  REQUIRE(hold_range(0, 0, Lies::spilled, &range));
  forget_ranges_in_child();
  CHECK(ended_holds() == 0);
  CHECK_FALSE(has_ranges());
  CHECK(range_bytes(0, Lies::spilled) == 0);
  CHECK_FALSE(hold_range(0, 0, Lies::spilled, &range));
}

TEST_CASE("a message to a daemon that has gone is not sent") {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  Session session{};
  session.socket = ends[0];
  CHECK(tell(session, gpushare::client::MessageType::kReturned, 1));
  close(ends[1]);
  CHECK_FALSE(tell(session, gpushare::client::MessageType::kReturned, 1));
  close(ends[0]);
}

TEST_CASE("a process that leaves its group holds nothing, has no limit, and leaves its place to another") {
  GroupPage& page = group();
  REQUIRE(page_file() >= 0);
  page.limits = {uint64_t{64} << 20, uint64_t{64} << 20, uint64_t{64} << 20};
  Slot& slot = *g_slot;
  REQUIRE(slot.identity != 0);
  for (const bool on_host : {false, true}) {
    REQUIRE((on_host ? charge_host(-1, 4096) : charge(0, 4096)));
    CHECK_FALSE(leave_group());
    CHECK(&group() == &page);
    on_host ? discharge_host(-1, 4096) : discharge(0, 4096);
  }
  REQUIRE(leave_group());
  CHECK(slot.identity == 0);
  CHECK(page_file() == -1);
  CHECK_FALSE(limited());
  CHECK_FALSE(may_spill());
  CHECK(group().limits.pinned_bytes == kNoLimit);
  CHECK(charge(0, uint64_t{1} << 40));
  discharge(0, uint64_t{1} << 40);
}
