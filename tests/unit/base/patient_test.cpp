// Questions to a library that hangs.
// SPDX-License-Identifier: Apache-2.0
#include "base/patient.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <new>
#include <thread>

#include "support/catch.hpp"

using namespace gpushare;

namespace {

constexpr std::chrono::seconds kNone{0}, kLong{3600};

}  // namespace

TEST_CASE("a library that hangs is given up, not asked meanwhile, and asked again when it has come back") {
  static base::Hangs hangs;
  static std::atomic<bool> hanging{true};
  static std::atomic<int> asked{0};
  const auto ask = [](std::chrono::seconds patience) {
    return base::ask_patiently<int>(hangs, "the library", patience, []() -> base::Result<int> {
      ++asked;
      hanging.wait(true);
      return 7;
    });
  };
  CHECK(ask(kNone).status().code() == GPUSHARE_NOT_READY);
  CHECK(hangs.any());
  for (int i = 0; i < 3; ++i) CHECK(ask(kLong).status().code() == GPUSHARE_NOT_READY);
  CHECK(asked <= 1);
  const pid_t child = fork();
  if (child == 0) _exit(hangs.any() ? 1 : 0);  // it has no thread but this one
  REQUIRE(child > 0);
  int ended = 0;
  REQUIRE(waitpid(child, &ended, 0) == child);
  CHECK(ended == 0);
  hanging = false;
  hanging.notify_all();
  while (hangs.any()) std::this_thread::yield();
  const base::Result<int> answer = ask(kLong);
  REQUIRE(answer.ok());
  CHECK(*answer == 7);
  CHECK_FALSE(hangs.any());
}

TEST_CASE("what a question ends with is its answer") {
  static base::Hangs hangs;
  const auto refused = base::ask_patiently<int>(hangs, "the library", kLong, []() -> base::Result<int> {
    return base::Status(GPUSHARE_UNSUPPORTED, "no");
  });
  CHECK(refused.status().code() == GPUSHARE_UNSUPPORTED);
  const auto no_memory = base::ask_patiently<int>(hangs, "the library", kLong,
                                                  []() -> base::Result<int> { throw std::bad_alloc(); });
  CHECK(no_memory.status().code() == GPUSHARE_NOT_READY);
  CHECK_FALSE(hangs.any());
}

TEST_CASE("threads of several askers that hang are counted, in a child of fork anew") {
  base::Hangs hangs;
  hangs.add();
  hangs.add();
  const pid_t child = fork();
  if (child == 0) {
    const bool none = !hangs.any();
    hangs.add();
    const bool one = hangs.any();
    hangs.drop();
    _exit(none && one && !hangs.any() ? 0 : 1);
  }
  REQUIRE(child > 0);
  int ended = 0;
  REQUIRE(waitpid(child, &ended, 0) == child);
  CHECK(ended == 0);
  hangs.drop();
  CHECK(hangs.any());
  hangs.drop();
  CHECK_FALSE(hangs.any());
}

TEST_CASE("an answer that comes late is given once, and destroyed if nobody takes it") {
  static std::atomic<bool> hanging{true};
  struct Counts {
    explicit Counts(std::atomic<int>& alive) : alive_(&alive) { ++*alive_; }
    ~Counts() { --*alive_; }
    Counts(const Counts&) = delete;
    Counts& operator=(const Counts&) = delete;
    std::atomic<int>* const alive_;
  };
  using Answer = std::unique_ptr<Counts>;
  static std::atomic<int> alive{0}, answered{0};
  const auto start = [] {
    auto started = base::Asked<Answer>::start("the library", []() -> base::Result<Answer> {
      hanging.wait(true);
      auto answer = std::make_unique<Counts>(alive);
      ++answered;
      return answer;
    });
    REQUIRE(started.ok());
    return *std::move(started);
  };
  const auto taken = start(), left = start();
  {
    const auto given_up = start();
    CHECK_FALSE(given_up->wait_until({}));
  }
  CHECK_FALSE(taken->wait_until({}));
  hanging = false;
  hanging.notify_all();
  {
    const auto answer = taken->wait_until(std::chrono::steady_clock::time_point::max());
    REQUIRE(answer);
    CHECK(answer->ok());
    CHECK_FALSE(taken->wait_until({}));
  }
  while (answered != 3 || alive != 1) std::this_thread::yield();  // that of `left`
}
