// base around forks and at the end of threads; bells and pieces of memory between processes.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "base/bell.hpp"
#include "base/clock.hpp"
#include "base/fork.hpp"
#include "base/log.hpp"
#include "base/no_memory.hpp"
#include "base/pieces.hpp"
#include "base/service_thread.hpp"
#include "base/thread_exit.hpp"
#include "base/thread_local.hpp"
#include "gpushare/gpushare.h"
#include "support/catch.hpp"

namespace {

using namespace gpushare;

std::string g_fork_calls;

base::ForkHook hook_named(const char* name) {
  return {[](void* self) { g_fork_calls += std::string(static_cast<const char*>(self)) + "+"; },
          [](void* self, bool in_child) {
            g_fork_calls += std::string(static_cast<const char*>(self)) + (in_child ? "c" : "-");
          },
          const_cast<char*>(name)};
}

// Forks; the child leaves with the value of `result`.
template <class Result>
int in_child(Result result) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(result());
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

TEST_CASE("fork hooks nest: the last one added is called first before a fork and last after it") {
  static base::ForkHook first = hook_named("a"), second = hook_named("b");
  REQUIRE(base::add_fork_hook(first));
  REQUIRE(base::add_fork_hook(second));
  CHECK(base::fork_depth() == 0);
  for (int times = 0; times < 2; ++times) {  // the order stays
    g_fork_calls.clear();
    const int child = in_child([] { return g_fork_calls == "b+a+acbc" && base::fork_depth() == 1 ? 0 : 1; });
    CHECK(child == 0);
    CHECK(g_fork_calls == "b+a+a-b-");
    CHECK(base::fork_depth() == 0);
  }
  CHECK(in_child([] {  // a child of a child
          const pid_t child = fork();
          if (child == 0) _exit(static_cast<int>(base::fork_depth()));
          int status = 0;
          return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 99;
        }) == 2);
}

TEST_CASE("hooks of a thread run when it exits, the last one first, and may be registered again") {
  static std::string calls;
  static GPUSHARE_THREAD_LOCAL base::ThreadExitHook t_first, t_second;
  calls.clear();
  std::thread([] {
    CHECK(base::at_thread_exit(
        t_first, [](void* self) { calls += static_cast<const char*>(self); }, const_cast<char*>("a")));
    CHECK(base::at_thread_exit(
        t_second,
        [](void* self) {
          calls += static_cast<const char*>(self);
          CHECK(base::at_thread_exit(
              t_second, [](void*) { calls += "again"; }, nullptr));
        },
        const_cast<char*>("b")));
    // Registered once, whatever is asked again.
    CHECK(base::at_thread_exit(
        t_first, [](void*) { calls += "never"; }, nullptr));
    CHECK(calls.empty());
  }).join();
  CHECK(calls == "bagaina");
}

TEST_CASE("the status of a thread is OK at first, the last one set, and each thread's own") {
  static GPUSHARE_THREAD_LOCAL base::ThreadStatus t_status;
  CHECK(t_status.get().ok());
  t_status.set(base::Status(GPUSHARE_NOT_FOUND, "here"));
  CHECK(t_status.get().message() == "here");
  std::thread([] {
    CHECK(t_status.get().ok());
    t_status.set(base::Status(GPUSHARE_IO_ERROR, "there"));
    CHECK(t_status.get().code() == GPUSHARE_IO_ERROR);
  }).join();
  CHECK(t_status.get().message() == "here");
  t_status.set({});
  CHECK(t_status.get().ok());
}

TEST_CASE("the library's threads leave the process's signals to the program's own") {
  sigset_t before, inside, after;
  pthread_sigmask(SIG_BLOCK, nullptr, &before);
  base::ServiceThread thread([&] { pthread_sigmask(SIG_BLOCK, nullptr, &inside); });
  thread.join();
  pthread_sigmask(SIG_BLOCK, nullptr, &after);
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD, SIGALRM, SIGUSR1}) {
    CHECK(sigismember(&inside, signal) == 1);
    CHECK(sigismember(&after, signal) == sigismember(&before, signal));
  }
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGPROF})
    CHECK(sigismember(&inside, signal) == 0);
}

TEST_CASE("a thread waits for the bell until it rings") {
  base::Bell bell;
  CHECK_FALSE(bell.expected());
  std::atomic<bool> news{false};
  bell.expect(true);
  CHECK(bell.expected());
  std::thread ringer([&] {
    news = true;
    bell.ring();
  });
  for (uint32_t seen = bell.look(); !news; seen = bell.look())
    bell.wait(seen, base::Deadline::after(GPUSHARE_NO_TIMEOUT));
  ringer.join();
  CHECK(bell.look() == 1);
  bell.wait(0, base::Deadline::after(GPUSHARE_NO_TIMEOUT));  // it has rung since 0: returns at once
  bell.expect(false);
  CHECK_FALSE(bell.expected());

  // Nobody rings: the thread sleeps until the deadline. A wait may end for no reason, but does not do so all the time.
  const base::Deadline deadline = base::Deadline::after(200'000'000);
  int waits = 0;
  while (!deadline.passed() && ++waits < 100) bell.wait(bell.look(), deadline);
  CHECK(waits < 100);
}

TEST_CASE("a local bell wakes all threads that wait for it") {
  base::LocalBell bell;
  bell.ring();
  bell.wait(0, base::Deadline::after(GPUSHARE_NO_TIMEOUT));  // it has rung since 0: returns at once
  std::atomic<bool> news{false};
  std::atomic<int> looked{0};
  const auto wait = [&] {
    uint32_t seen = bell.look();
    for (++looked; !news; seen = bell.look()) bell.wait(seen, base::Deadline::after(GPUSHARE_NO_TIMEOUT));
  };
  std::thread first(wait), second(wait);
  while (looked < 2) std::this_thread::yield();
  news = true;
  bell.ring();
  first.join();
  second.join();

  const base::Deadline deadline = base::Deadline::after(200'000'000);
  int waits = 0;
  while (!deadline.passed() && ++waits < 100) bell.wait(bell.look(), deadline);
  CHECK(waits < 100);
}

TEST_CASE("pieces follow each other, and own their descriptors") {
  const auto is_open = [](int descriptor) { return fcntl(descriptor, F_GETFD) != -1; };
  const int first = open("/dev/null", O_RDONLY), second = open("/dev/null", O_RDONLY),
            third = open("/dev/null", O_RDONLY);
  base::Pieces::Piece piece{};
  {
    base::Pieces pieces;
    CHECK_FALSE(pieces.get(0, &piece));
    pieces.add(first, 10);
    pieces.add(second, 30);
    pieces.add(third, 5);
    REQUIRE(pieces.get(0, &piece));
    CHECK((piece.descriptor == first && piece.offset_bytes == 0 && piece.bytes == 10));
    REQUIRE(pieces.get(2, &piece));
    CHECK((piece.descriptor == third && piece.offset_bytes == 40 && piece.bytes == 5));
    CHECK_FALSE(pieces.get(3, &piece));
    pieces.cut(41);  // all of them begin below
    CHECK(is_open(third));
    pieces.cut(40);
    CHECK_FALSE(is_open(third));
    CHECK_FALSE(pieces.get(2, &piece));
    CHECK(pieces.get(1, &piece));
    CHECK(is_open(second));
  }
  CHECK_FALSE(is_open(first));
  CHECK_FALSE(is_open(second));
}

TEST_CASE("without a sink, lines go to stderr with their level's name") {
  int ends[2];
  REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
  CHECK(in_child([&] {
          dup2(ends[1], 2);
          base::set_log_sink(nullptr, nullptr, 4);
          base::log(-1, "a");
          for (int32_t level = 0; level < 6; ++level) base::log(level, "b");
          return 0;
        }) == 0);
  close(ends[1]);
  std::string all;
  char part[128];
  for (ssize_t got; (got = read(ends[0], part, sizeof part)) > 0;) all.append(part, static_cast<size_t>(got));
  close(ends[0]);
  CHECK(
      all ==
      "gpushare: error: a\ngpushare: error: b\ngpushare: warning: b\ngpushare: info: b\ngpushare: debug: b\n"
      "gpushare: debug: b\n");
}

TEST_CASE("the status for a process without memory is there before it is needed") {
  base::prepare_no_memory();
  CHECK(base::no_memory().code() == GPUSHARE_HOST_OUT_OF_MEMORY);
  CHECK(base::no_memory().message() == "the process is out of host memory");
}

}  // namespace
