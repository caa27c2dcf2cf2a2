// The switcher: who is active, what is dropped and kept, bytes that are right after every switch, and everything
// that can go wrong in the middle of one.
// SPDX-License-Identifier: Apache-2.0
#include "loader/switcher.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "unit/loader/loading.hpp"

using namespace gpushare;
using loader::MemberState;
using test::kMiB;
using test::Loading;

namespace {

constexpr uint32_t kLayers = 6;

struct Switching : Loading {
  explicit Switching(const test::Setup& setup, uint64_t capacity_bytes = 24 * kMiB,
                     loader::SwitcherOptions options = {}, uint32_t max_lanes = 0)
      : Loading(setup, capacity_bytes, {}, max_lanes) {
    switcher = *loader::Switcher::open(loader, options);
    standby_bytes = options.standby_bytes;
  }
  // A member of about 6 MiB whose bytes are told by `seed`, with 1 MiB ephemeral.
  loader::MemberId add(int seed, uint64_t ephemeral_bytes = kMiB) {
    loader::MemberOptions member;
    member.session = test::need("m" + std::to_string(seed), 0, ephemeral_bytes);
    member.image = image("m" + std::to_string(seed), kLayers, kMiB, seed);
    const auto id = switcher->add(std::move(member));
    INFO(id.status().to_string());
    REQUIRE(id.ok());
    members.push_back(*id);
    return *id;
  }
  // One iteration that looks at every byte of every layer; what is wrong.
  std::string run(loader::MemberId member, int seed, bool* loaded = nullptr) {
    auto turn = switcher->begin(member, GPUSHARE_NO_TIMEOUT);
    if (!turn.ok()) return turn.status().to_string();
    if (loaded != nullptr) *loaded = turn->loaded;
    const auto stream = turn->iteration->stream();
    if (!stream.ok()) return stream.status().to_string();
    std::string out;
    for (uint32_t layer = 0; layer < kLayers && out.empty(); ++layer) {
      const base::Status usable = turn->model->make_usable(layer, layer + 1, **stream);
      if (!usable.ok())
        out = usable.to_string();
      else if (runtime->device().can(GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE))
        out = wrong(*turn->model, layer, seed, **stream);
    }
    if (!turn->iteration->alloc(1000, 0).ok()) out += " no ephemeral block";
    const base::Status ended = turn->iteration->end();
    return ended.ok() ? out : ended.to_string();
  }
  MemberState state(loader::MemberId member) const { return switcher->info(member)->state; }
  // The safety invariant holds and nobody on standby counts.
  void check() { check_but(0); }
  // With so many sessions of others.
  void check_but(uint64_t others) {
    CHECK(runtime->check() == "");
    const auto info = *runtime->info();
    CHECK(info.promised_bytes <= info.capacity_bytes);
    const loader::SwitcherInfo now = switcher->info();
    uint64_t standby = 0, prefixes = 0;
    for (const loader::MemberId id : members) {
      const auto member = switcher->info(id);
      if (!member.ok()) continue;
      standby += member->standby_bytes;
      prefixes += member->standby_bytes > 0 ? 1 : 0;
    }
    CHECK(info.sessions_resident == now.kept + (now.active != 0 ? 1 : 0) + prefixes + others);
    CHECK(now.standby_bytes == standby);
    CHECK(now.standby_bytes <= standby_bytes);
  }

  std::shared_ptr<loader::Switcher> switcher;
  std::vector<loader::MemberId> members;  // of add()
  uint64_t standby_bytes = 0;
};

}  // namespace

TEST_CASE("a switch stops the one, drops or keeps it by room, and brings the other") {
  for (const test::Setup& setup : test::kSetups) {
    INFO(setup.device);
    // Room for two of three.
    Switching on(setup, 18 * kMiB);
    const loader::MemberId a = on.add(1), b = on.add(2), c = on.add(3);
    on.check();
    CHECK(on.runtime->info()->promised_bytes == 0);
    CHECK(on.state(a) == MemberState::kStandby);
    bool loaded = false;
    CHECK(on.run(a, 1, &loaded) == "");
    CHECK(loaded);
    CHECK(on.state(a) == MemberState::kActive);
    CHECK(on.run(a, 1, &loaded) == "");
    CHECK_FALSE(loaded);
    CHECK(on.run(b, 2, &loaded) == "");
    CHECK(loaded);
    CHECK(on.state(a) == MemberState::kKept);
    CHECK(on.state(b) == MemberState::kActive);
    CHECK(on.run(a, 1, &loaded) == "");  // it was kept: nothing is sent
    CHECK_FALSE(loaded);
    on.check();
    CHECK(on.run(c, 3) == "");  // b was used longest ago
    CHECK(on.state(b) == MemberState::kStandby);
    CHECK(on.state(a) == MemberState::kKept);
    CHECK(on.switcher->info(b)->device_bytes == 0);
    CHECK(on.switcher->info(c)->device_bytes >= 6 * kMiB);
    CHECK(on.switcher->info().switches == 4);
    on.check();
    CHECK(on.run(b, 2, &loaded) == "");
    CHECK(loaded);
    CHECK(on.switcher->info(b)->loads == 2);
    CHECK(on.switcher->info(b)->drops == 1);
    REQUIRE(on.switcher->close().ok());
    CHECK(on.runtime->info()->promised_bytes == 0);
    CHECK(on.switcher->close().code() == GPUSHARE_INVALID_STATE);
    CHECK(on.switcher->begin(a, 0).status().code() == GPUSHARE_INVALID_STATE);
    CHECK(on.runtime->close().ok());
  }
}

TEST_CASE("keep_bytes bounds what stays; 0 keeps none but the active one") {
  for (const uint64_t keep : {uint64_t{0}, 13 * kMiB}) {
    loader::SwitcherOptions options;
    options.keep_bytes = keep;
    Switching on(test::kSetups[0], 64 * kMiB, options);
    const loader::MemberId a = on.add(1), b = on.add(2), c = on.add(3);
    for (int round = 0; round < 2; ++round) {
      CHECK(on.run(a, 1) == "");
      CHECK(on.run(b, 2) == "");
      CHECK(on.state(a) == (keep == 0 ? MemberState::kStandby : MemberState::kKept));
      CHECK(on.run(c, 3) == "");
      CHECK(on.state(a) == MemberState::kStandby);
      CHECK(on.switcher->info().kept == (keep == 0 ? 0u : 1u));
      on.check();
    }
  }
}

TEST_CASE("members share the device with sessions that are not the switcher's") {
  Switching on(test::kSetups[0], 16 * kMiB);
  const loader::MemberId a = on.add(1), b = on.add(2);
  CHECK(on.run(a, 1) == "");
  // 6 MiB less: the two no longer fit together, and one that needs more than is left does not fit at all.
  const auto other = test::open_session(*on.runtime, test::need("other", 6 * kMiB, kMiB));
  CHECK(on.run(b, 2) == "");
  CHECK(on.state(a) == MemberState::kStandby);
  auto more = on.runtime->open_session(test::need("more", 3 * kMiB, kMiB));
  CHECK_FALSE((more.ok() && more.value()->wait_admitted(0).ok()));
  if (more.ok()) CHECK((*more)->close().ok());
  REQUIRE(on.switcher->remove(b).ok());
  const auto greedy = test::open_session(*on.runtime, test::need("greedy", 6 * kMiB, kMiB));
  REQUIRE(greedy->wait_admitted(0).ok());
  const auto refused = on.switcher->begin(a, GPUSHARE_NO_TIMEOUT);
  CHECK(refused.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(on.state(a) == MemberState::kStandby);
  CHECK(on.switcher->info().active == 0);
  REQUIRE(greedy->close().ok());
  CHECK(on.run(a, 1) == "");
  CHECK(on.runtime->check() == "");
}

TEST_CASE("what a member cannot be, and who cannot wait") {
  Switching on(test::kSetups[0], 16 * kMiB);
  CHECK(on.switcher->add({}).status().code() == GPUSHARE_INVALID_ARGUMENT);
  // An image lives in its loader's memory: no other may send it.
  const auto second = *loader::Loader::open(on.runtime, {});
  loader::MemberOptions foreign;
  foreign.image = *second->create_image("foreign", {{"only", 0, 4}}, std::vector<const void*>{"abc"});
  CHECK(on.switcher->add(foreign).status().code() == GPUSHARE_INVALID_ARGUMENT);
  const auto session = test::open_session(*on.runtime, test::need("s", kMiB, 256));
  CHECK(on.loader->load(session, foreign.image, {}).status().code() == GPUSHARE_INVALID_ARGUMENT);
  REQUIRE(session->close().ok());
  loader::MemberOptions large;
  large.image = on.image("large", 4, 2 * kMiB, 9);
  large.session = test::need("large", 9 * kMiB, 0);
  CHECK(on.switcher->add(large).status().code() == GPUSHARE_EXCEEDS_CAPACITY);
  large.session = test::need("large", 0, UINT64_MAX);
  CHECK(on.switcher->add(large).status().code() == GPUSHARE_EXCEEDS_CAPACITY);
  const loader::MemberId a = on.add(1), b = on.add(2);
  CHECK(on.switcher->begin(77, 0).status().code() == GPUSHARE_NOT_FOUND);
  CHECK(on.switcher->remove(77).code() == GPUSHARE_NOT_FOUND);
  CHECK(on.switcher->info(77).status().code() == GPUSHARE_NOT_FOUND);
  const auto turn = on.switcher->begin(a, 0);
  REQUIRE(turn.ok());
  // The same thread would wait for itself, whichever member it asks for.
  CHECK(on.switcher->begin(b, GPUSHARE_NO_TIMEOUT).status().code() == GPUSHARE_INVALID_STATE);
  CHECK(on.switcher->begin(a, 0).status().code() == GPUSHARE_INVALID_STATE);
  CHECK(on.switcher->remove(b).code() == GPUSHARE_INVALID_STATE);
  CHECK(on.switcher->close().code() == GPUSHARE_INVALID_STATE);
  std::thread([&] {
    CHECK(on.switcher->begin(b, 0).status().code() == GPUSHARE_TIMED_OUT);
    CHECK(on.switcher->begin(b, 1'000'000).status().code() == GPUSHARE_TIMED_OUT);
  }).join();
  REQUIRE(turn->iteration->end().ok());
  CHECK(turn->iteration->end().code() == GPUSHARE_INVALID_STATE);
  CHECK(turn->iteration->fail({GPUSHARE_UNKNOWN, "late"}).code() == GPUSHARE_INVALID_STATE);
  CHECK(on.run(b, 2) == "");
}

TEST_CASE("an iteration that fails puts its member on standby; it comes back with fresh bytes") {
  Switching on(test::kSetups[0], 24 * kMiB);
  const loader::MemberId a = on.add(1), b = on.add(2);
  CHECK(on.run(b, 2) == "");
  {
    const auto turn = on.switcher->begin(a, GPUSHARE_NO_TIMEOUT);
    REQUIRE(turn.ok());
    const auto stream = *turn->iteration->stream();
    REQUIRE(turn->model->make_usable(0, kLayers, *stream).ok());
    REQUIRE(stream->fill(turn->model->address(0), 0, turn->model->image()->bytes()).ok());
    (void)turn->iteration->fail({GPUSHARE_CALLBACK_FAILED, "the model's own fault"});
  }
  CHECK(on.run(b, 2) == "");
  bool loaded = false;
  CHECK(on.run(a, 1, &loaded) == "");
  CHECK(loaded);
  on.check();
}

TEST_CASE("a need that was not declared is learned once, and kept over drops") {
  loader::SwitcherOptions options;
  options.keep_bytes = 0;
  Switching on(test::kSetups[0], 32 * kMiB, options);
  const loader::MemberId a = on.add(1, 0), b = on.add(2, 0);
  for (int i = 0; i < 4; ++i) CHECK(on.run(a, 1) == "");
  CHECK(on.run(b, 2) == "");
  CHECK(on.run(a, 1) == "");
  CHECK(on.run(b, 2) == "");
  on.check();
}

TEST_CASE("loading that fails leaves the member on standby and the switcher whole") {
  for (const uint32_t kind :
       {uint32_t{GPUSHARE_FAULT_LAUNCH_FAILS}, uint32_t{GPUSHARE_FAULT_STREAM_CREATE_FAILS},
        uint32_t{GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY}, uint32_t{GPUSHARE_FAULT_MAP_FAILS}}) {
    for (uint64_t call = 1; call <= 4; call += test::kFaultStep) {
      INFO("fault " << kind << " at " << call);
      Switching on(test::kSetups[0], 16 * kMiB);
      const loader::MemberId a = on.add(1), b = on.add(2), c = on.add(3);
      REQUIRE(on.run(a, 1) == "");
      REQUIRE(on.run(c, 3) == "");
      REQUIRE(test::inject(on.runtime->device(), kind, call).ok());
      const std::string failed = on.run(b, 2);  // fails, or gets by with what is kept dropped
      REQUIRE(test::inject(on.runtime->device(), GPUSHARE_FAULT_NONE, 1).ok());
      INFO(failed);
      // A lane's failing stream is the device's end for a runtime; everything else is not.
      const auto probe = on.runtime->open_session(test::need("probe", 0, 256));
      if (probe.status().code() == GPUSHARE_DEVICE_LOST) {
        CHECK(kind == GPUSHARE_FAULT_LAUNCH_FAILS);
        continue;
      }
      if (probe.ok()) REQUIRE((*probe)->close().ok());
      CHECK(on.run(b, 2) == "");
      CHECK(on.run(a, 1) == "");
      CHECK(on.run(c, 3) == "");
      on.check();
    }
  }
}

TEST_CASE("a lost device is told to everybody, and everything closes") {
  for (uint64_t call = 1; call <= 40; call += 9) {
    Switching on(test::kSetups[0], 16 * kMiB);
    const loader::MemberId a = on.add(1), b = on.add(2), c = on.add(3);
    REQUIRE(on.run(a, 1) == "");
    REQUIRE(test::inject(on.runtime->device(), GPUSHARE_FAULT_DEVICE_LOST, call).ok());
    std::atomic<int> told{0};
    std::vector<std::thread> threads;
    for (const loader::MemberId member : {a, b, c})
      threads.emplace_back([&, member] {
        for (int i = 0; i < 1'000'000; ++i) {
          const auto turn = on.switcher->begin(member, GPUSHARE_NO_TIMEOUT);
          if (!turn.ok()) {
            if (turn.status().code() == GPUSHARE_DEVICE_LOST) {
              ++told;
              return;
            }
            continue;
          }
          (void)turn->iteration->end();
        }
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(told == 3);
    CHECK(on.switcher->close().ok());
  }
}

TEST_CASE("removing a member cancels who waits for it; closing a runtime ends all waits") {
  Switching on(test::kSetups[0], 24 * kMiB);
  const loader::MemberId a = on.add(1), b = on.add(2), c = on.add(3);
  auto turn = on.switcher->begin(a, GPUSHARE_NO_TIMEOUT);
  REQUIRE(turn.ok());
  std::atomic<int32_t> waited{-1}, removed{-1};
  std::thread waiter([&] { waited = on.switcher->begin(b, GPUSHARE_NO_TIMEOUT).status().code(); });
  while (on.switcher->info().waiting == 0) std::this_thread::yield();
  std::thread remover([&] { removed = on.switcher->remove(b).code(); });
  waiter.join();
  CHECK(waited == GPUSHARE_CANCELLED);
  CHECK(removed == -1);  // waits for the iteration under way
  REQUIRE(turn->iteration->end().ok());
  remover.join();
  CHECK(removed == GPUSHARE_OK);
  CHECK(on.switcher->begin(b, 0).status().code() == GPUSHARE_NOT_FOUND);
  CHECK(on.switcher->info().members == 2);

  // A runtime that closes waits for the iteration under way; who waits for a turn is told.
  std::atomic<bool> open{false};
  std::atomic<int32_t> last{GPUSHARE_OK}, closed{-1};
  std::thread user([&] {
    const auto mine = on.switcher->begin(a, GPUSHARE_NO_TIMEOUT);
    open = true;
    if (!mine.ok()) return;
    while (on.switcher->info().waiting == 0) std::this_thread::yield();
    while (on.runtime->open_session(test::need("late", 0, 256)).ok()) std::this_thread::yield();  // it closes
    (void)mine->iteration->end();
  });
  while (!open) std::this_thread::yield();
  std::thread stuck([&] { last = on.switcher->begin(c, GPUSHARE_NO_TIMEOUT).status().code(); });
  while (on.switcher->info().waiting == 0) std::this_thread::yield();
  closed = on.runtime->close().code();
  user.join();
  stuck.join();
  CHECK(closed == GPUSHARE_OK);
  CHECK(last == GPUSHARE_INVALID_STATE);
  CHECK(on.switcher->begin(a, 0).status().code() == GPUSHARE_INVALID_STATE);
  CHECK(on.switcher->closed());
}

namespace {

// Does something when it is copied first: a switch copies it when it has opened the member's session, and then loads.
struct WhenCopied {
  explicit WhenCopied(std::function<void()> function)
      : does(std::make_shared<std::function<void()>>(std::move(function))) {}
  WhenCopied(const WhenCopied& other) : does(other.does) {
    if (const auto once = std::exchange(*does, nullptr)) once();
  }
  WhenCopied(WhenCopied&&) = default;
  ~WhenCopied() = default;
  WhenCopied& operator=(const WhenCopied&) = delete;
  WhenCopied& operator=(WhenCopied&&) = delete;
  void operator()(size_t, uint32_t, uint32_t) const {}

  std::shared_ptr<std::function<void()>> does;
};

}  // namespace

TEST_CASE(
    "a session that outranks a member between its opening and its load waits for the load, not the load for "
    "it") {
  for (const test::Setup& setup : {test::kSetups[0], test::kSetups[2]}) {
    INFO(setup.device);
    Switching on(setup, 16 * kMiB);
    REQUIRE(on.runtime->set_policy(std::move(*sched::make_policy("priority"))).ok());
    executor::SessionOptions high = test::need("high", 10 * kMiB, kMiB);
    high.priority = 1;
    std::shared_ptr<executor::Session> guest;
    loader::MemberOptions member;
    member.session = test::need("m1", 0, kMiB);
    member.image = on.image("m1", kLayers, kMiB, 1);
    member.load.on_group = WhenCopied([&] {
      guest = test::open_session(*on.runtime, high);
      CHECK(on.runtime->check() == "");  // what was decided is done
      CHECK(guest->info().state == executor::SessionState::kQueued);
    });
    const loader::MemberId a = *on.switcher->add(std::move(member));
    // Its load goes out; then the guest has the room.
    CHECK(on.switcher->begin(a, 0).status().code() == GPUSHARE_TIMED_OUT);
    REQUIRE(guest != nullptr);
    CHECK(guest->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
    CHECK(on.runtime->info()->sessions_paged_out == 1);
    REQUIRE(guest->close().ok());
    bool loaded = true;
    CHECK(on.run(a, 1, &loaded) == "");
    CHECK_FALSE(loaded);
    REQUIRE(on.switcher->close().ok());
    CHECK(on.runtime->check() == "");
    CHECK(on.runtime->info()->promised_bytes == 0);
  }
}

TEST_CASE(
    "a begin that waits for a member that was paged out ends when the member is removed, or the switcher "
    "closed") {
  for (const bool remove : {true, false}) {
    Switching on(test::kSetups[0], 16 * kMiB);
    REQUIRE(on.runtime->set_policy(std::move(*sched::make_policy("priority"))).ok());
    const loader::MemberId a = on.add(1);
    CHECK(on.run(a, 1) == "");
    executor::SessionOptions high = test::need("high", 10 * kMiB, kMiB);
    high.priority = 1;
    const auto guest = test::open_session(*on.runtime, high);
    REQUIRE(guest->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
    std::atomic<int32_t> waited{-1};
    std::thread waiter([&] { waited = on.switcher->begin(a, GPUSHARE_NO_TIMEOUT).status().code(); });
    while (on.switcher->begin(a, 0).status().message().find("switcher's turn") == std::string::npos)
      std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // from its turn to the wait for its session
    CHECK((remove ? on.switcher->remove(a) : on.switcher->close()).ok());
    waiter.join();
    CHECK(waited == (remove ? GPUSHARE_CANCELLED : GPUSHARE_INVALID_STATE));
    CHECK(on.runtime->info()->sessions_paged_out == 0);
    REQUIRE(guest->close().ok());
    CHECK(on.runtime->info()->promised_bytes == 0);
  }
}

TEST_CASE("a member whose iteration failed is on standby at once, and its next turn loads it again") {
  for (const test::Setup& setup : test::kSetups) {
    INFO(setup.device);
    Switching on(setup, 18 * kMiB);
    const loader::MemberId a = on.add(1), b = on.add(2);
    CHECK(on.run(b, 2) == "");
    const auto turn = on.switcher->begin(a, GPUSHARE_NO_TIMEOUT);
    REQUIRE(turn.ok());
    CHECK(turn->iteration->fail({GPUSHARE_CALLBACK_FAILED, "planned"}).ok());
    CHECK(on.state(a) == MemberState::kStandby);
    CHECK(on.switcher->info(a)->device_bytes == 0);
    CHECK(on.switcher->info(a)->drops == 1);
    CHECK(on.switcher->info().active == 0);
    CHECK(on.switcher->info().kept == 1);
    on.check();
    bool loaded = false;
    CHECK(on.run(a, 1, &loaded) == "");
    CHECK(loaded);
    CHECK(on.switcher->info(a)->drops == 1);
    on.check();
    CHECK(on.switcher->close().ok());
    CHECK(on.runtime->close().ok());
  }
}

TEST_CASE("threads ask for members at random while others are removed and added") {
  for (const test::Setup& setup : {test::kSetups[0], test::kSetups[1]}) {
    INFO(setup.device);
    Switching on(setup, 18 * kMiB);
    constexpr int kMembers = 4;
    loader::MemberId members[kMembers];
    for (int i = 0; i < kMembers; ++i) members[i] = on.add(i + 1);
    std::atomic<int> wrong{0}, ran{0};
    std::atomic<bool> stop{false};
    std::mutex what_mutex;
    std::string what;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        test::Random random(test::seed() + static_cast<uint64_t>(t));
        for (int round = 0; round < 12; ++round) {
          const auto pick = static_cast<int>(test::uniform(random, 0, kMembers - 1));
          if (test::uniform(random, 0, 5) == 0) {
            const auto turn = on.switcher->begin(members[pick], 100'000);
            if (turn.ok()) {
              if (test::uniform(random, 0, 1) == 0)
                (void)turn->iteration->end();
              else
                (void)turn->iteration->fail({GPUSHARE_CALLBACK_FAILED, "planned"});
            }
            continue;
          }
          const std::string said = on.run(members[pick], pick + 1);
          ++ran;
          if (said.empty()) continue;
          ++wrong;
          const std::lock_guard<std::mutex> lock(what_mutex);
          what = said;
        }
      });
    }
    std::thread churn([&] {
      while (!stop) {
        loader::MemberOptions member;
        member.session = test::need("guest", 0, kMiB);
        member.image =
            on.loader->create_image("guest", {{"only", 0, 4}}, std::vector<const void*>{"abc"}).value();
        const auto id = on.switcher->add(std::move(member));
        if (!id.ok()) {
          ++wrong;
          return;
        }
        const auto turn = on.switcher->begin(*id, GPUSHARE_NO_TIMEOUT);
        if (turn.ok()) (void)turn->iteration->end();
        if (!on.switcher->remove(*id).ok()) ++wrong;
      }
    });
    for (std::thread& thread : threads) thread.join();
    stop = true;
    churn.join();
    INFO(what);
    CHECK(wrong == 0);
    CHECK(ran > 0);
    on.check();
    CHECK(on.switcher->close().ok());
    CHECK(on.runtime->info()->promised_bytes == 0);
    CHECK(on.runtime->close().ok());
  }
}

TEST_CASE(
    "what is kept for speed alone makes way for a session that would be refused or wait, the active one does "
    "not") {
  for (const test::Setup& setup : test::kSetups) {
    INFO(setup.device);
    // Three of 8 MiB, with the granule's rest, and one lane of 2: lanes that give way would make room as well.
    Switching on(setup, 26 * kMiB, {}, 1);
    const loader::MemberId a = on.add(1), b = on.add(2), c = on.add(3);
    for (const loader::MemberId id : {a, b, c, c}) CHECK(on.run(id, static_cast<int>(id)) == "");
    REQUIRE(on.switcher->info().kept == 2);
    // All that is kept would not do: nothing of it goes.
    executor::SessionOptions guest = test::need("guest", 20 * kMiB, kMiB);
    guest.allow_queueing = false;
    CHECK(on.runtime->open_session(guest).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    CHECK(on.switcher->info().kept == 2);
    // One has to go, then the other; a session that may wait need not.
    guest.persistent_bytes = 5 * kMiB;
    const auto first = on.runtime->open_session(guest);
    INFO(first.status().to_string());
    REQUIRE(first.ok());
    CHECK(on.switcher->info().kept == 1);
    guest.allow_queueing = true;
    const auto second = on.runtime->open_session(guest);
    REQUIRE(second.ok());
    CHECK((*second)->wait_admitted(0).ok());
    CHECK(on.switcher->info().kept == 0);
    CHECK(on.state(c) == MemberState::kActive);
    on.check_but(2);
    // Nothing is left to give up: the third waits, or is refused.
    const auto third = on.runtime->open_session(guest);
    REQUIRE(third.ok());
    CHECK((*third)->wait_admitted(0).code() == GPUSHARE_TIMED_OUT);
    REQUIRE((*third)->close().ok());
    guest.allow_queueing = false;
    guest.persistent_bytes = 7 * kMiB;
    CHECK_FALSE(on.runtime->open_session(guest).ok());
    REQUIRE((*first)->close().ok());
    REQUIRE((*second)->close().ok());
    for (const loader::MemberId id : {a, b, c}) CHECK(on.run(id, static_cast<int>(id)) == "");
    CHECK(on.switcher->info().kept == 2);
    on.check();
  }
}

TEST_CASE(
    "a session opened inside an iteration, or that says that it takes nothing, leaves the active one be") {
  Switching on(test::kSetups[0], 18 * kMiB);
  const loader::MemberId a = on.add(1), b = on.add(2);
  CHECK(on.run(a, 1) == "");
  const auto turn = on.switcher->begin(b, GPUSHARE_NO_TIMEOUT);
  REQUIRE(turn.ok());
  executor::SessionOptions guest = test::need("guest", 4 * kMiB, kMiB);
  guest.allow_queueing = guest.may_claim = false;
  CHECK_FALSE(on.runtime->open_session(guest).ok());
  CHECK(on.state(a) == MemberState::kKept);
  guest.may_claim = true;
  const auto opened = on.runtime->open_session(guest);
  REQUIRE(opened.ok());
  CHECK(on.state(a) == MemberState::kStandby);
  guest.persistent_bytes = 8 * kMiB;
  CHECK_FALSE(on.runtime->open_session(guest).ok());
  CHECK(on.state(b) == MemberState::kActive);
  REQUIRE(turn->iteration->end().ok());
  REQUIRE((*opened)->close().ok());
  CHECK(on.run(b, 2) == "");
  // Once the switcher is closed there is nobody to ask.
  REQUIRE(on.switcher->close().ok());
  CHECK(on.runtime->open_session(guest).ok());
}

TEST_CASE(
    "an open session that grows beyond its promise takes what is kept, the worth of the kept decides which") {
  for (const test::Setup& setup : test::kSetups) {
    INFO(setup.device);
    // Three of 8 MiB and the guest's 2, one lane of 2: 4 are free.
    Switching on(setup, 32 * kMiB, {}, 1);
    const loader::MemberId a = on.add(1), b = on.add(2), c = on.add(3);
    auto guest = on.runtime->open_session(test::need("guest", 2 * kMiB, kMiB));
    REQUIRE(guest.ok());
    for (const loader::MemberId id : {a, b, c}) CHECK(on.run(id, static_cast<int>(id)) == "");
    REQUIRE(on.switcher->info().kept == 2);
    const auto block = (*guest)->alloc(memory::Kind::kModel, 8 * kMiB, 0);
    INFO(block.status().to_string());
    CHECK(block.ok());
    CHECK(on.state(a) == MemberState::kStandby);  // asked for longest ago
    CHECK(on.state(b) == MemberState::kKept);
    CHECK(on.state(c) == MemberState::kActive);
    CHECK(on.switcher->info(a)->drops == 1);
    REQUIRE((*guest)->close().ok());
    CHECK(on.run(a, 1) == "");
    CHECK(on.switcher->info(a)->drops == 1);
    CHECK(on.switcher->info(a)->loads == 2);
    REQUIRE(on.switcher->close().ok());
    CHECK(on.runtime->info()->promised_bytes == 0);
  }
}

TEST_CASE("the scheduler is told what the link takes, given or learned") {
  loader::LoaderOptions options;
  options.link = {0.001, 1e6, 0.001};
  test::Loading given(test::kSetups[0], 64 * kMiB, options);
  CHECK(given.runtime->info()->link_bytes_per_s == 1'000'000'000);
  test::Loading learned(test::kSetups[2]);
  CHECK(learned.runtime->info()->link_bytes_per_s == 0);
  REQUIRE(learned.loader->calibrate().ok());
  const double rate = learned.loader->link().bytes_per_ms * 1e3;
  CHECK(static_cast<double>(learned.runtime->info()->link_bytes_per_s) == Approx(rate));
}

TEST_CASE("members switch while others come and go and take what is kept, and every byte is right") {
  for (const test::Setup& setup : {test::kSetups[0], test::kSetups[3]}) {
    INFO(setup.device);
    loader::SwitcherOptions options;
    options.standby_bytes = 4 * kMiB;
    Switching on(setup, 26 * kMiB, options);
    const loader::MemberId members[] = {on.add(1), on.add(2), on.add(3)};
    std::atomic<bool> stop{false};
    std::atomic<int> wrong{0}, opened{0};
    std::thread guests([&] {
      test::Random random(test::seed());
      while (!stop) {
        executor::SessionOptions guest = test::need("guest", test::uniform(random, 1, 12) * kMiB, kMiB);
        guest.allow_queueing = test::uniform(random, 0, 1) == 0;
        const auto session = on.runtime->open_session(guest);
        if (session.ok()) ++opened;
        if (session.ok() && !(*session)->close().ok()) ++wrong;
        if (!session.ok() && session.status().code() != GPUSHARE_DEVICE_OUT_OF_MEMORY) ++wrong;
      }
    });
    for (int round = 0; round < 60; ++round) {
      const auto pick = static_cast<size_t>(round * 7 % 3);
      const std::string said = on.run(members[pick], static_cast<int>(pick) + 1);
      // A guest may have all the room for the moment.
      CHECK((said.empty() || said.find("DEVICE_OUT_OF_MEMORY") != std::string::npos));
    }
    stop = true;
    guests.join();
    CHECK(wrong == 0);
    for (const loader::MemberId id : members) CHECK(on.run(id, static_cast<int>(id)) == "");
    on.check();
    REQUIRE(on.switcher->close().ok());
    CHECK(on.runtime->info()->promised_bytes == 0);
  }
}
