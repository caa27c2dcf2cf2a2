// A runtime's measurements of sessions beside each other, and the file for them; lane finders by name.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "support/executor_fixture.hpp"
#include "support/temporary_file.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

// Iterations that each keep their lane for a while. No assertion, so that several threads may.
base::Status run_iterations(executor::Session& session, int count) {
  for (int i = 0; i < count; ++i) {
    GPUSHARE_ASSIGN_OR_RETURN(const auto iteration, session.begin(GPUSHARE_NO_TIMEOUT));
    GPUSHARE_ASSIGN_OR_RETURN(const auto stream, iteration->stream());
    GPUSHARE_RETURN_IF_ERROR(enqueue(*stream, 1'000'000));
    GPUSHARE_RETURN_IF_ERROR(iteration->end());
  }
  return {};
}

size_t entries_alone(executor::Runtime& runtime, const std::string& name) {
  const auto entries = runtime.interference();
  REQUIRE(entries.ok());
  return static_cast<size_t>(std::count_if(entries->begin(), entries->end(), [&](const auto& entry) {
    return entry.name == name && entry.beside.empty() && entry.value > 0;
  }));
}

executor::RuntimeOptions packed(const Setup& setup, std::string file) {
  auto options = options_of(setup, "pack");
  options.interference_file = std::move(file);
  return options;
}

}  // namespace

TEST_CASE("pack measures sessions on a device, and the next runtime reads what was measured from the file") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device, static_cast<int>(setup.layout));
  const TemporaryFile file;
  std::filesystem::remove(file.path());  // there is none yet
  {
    auto runtime = open_runtime(packed(setup, file.path()));
    auto a = open_session(*runtime, need("a", kMiB, kMiB)), b = open_session(*runtime, need("b", kMiB, kMiB));
    auto unnamed = open_session(*runtime, need("", kMiB, kMiB));
    base::Status of_b;
    // Each alone first: on a busy machine nothing says that they are, once both run.
    REQUIRE(run_iterations(*a, 4).ok());
    REQUIRE(run_iterations(*b, 4).ok());
    std::thread other([&] { of_b = run_iterations(*b, 30); });
    const base::Status of_a = run_iterations(*a, 30);
    const base::Status of_unnamed = run_iterations(*unnamed, 5);
    other.join();
    REQUIRE(of_a.ok());
    REQUIRE(of_b.ok());
    REQUIRE(of_unnamed.ok());
    REQUIRE(runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
    CHECK(runtime->check() == "");
    CHECK(entries_alone(*runtime, "a") == 1);
    CHECK(entries_alone(*runtime, "b") == 1);
    CHECK(entries_alone(*runtime, "session-3") == 0);
    REQUIRE(runtime->close().ok());
    CHECK(runtime->interference().status().code() == GPUSHARE_INVALID_STATE);
  }
  CHECK(file.text().find("gpushare interference 1\nalone\ta\t") == 0);
  auto runtime = open_runtime(packed(setup, file.path()));
  CHECK(entries_alone(*runtime, "a") == 1);
  CHECK(entries_alone(*runtime, "b") == 1);
}

TEST_CASE("another policy measures only with a file, and files that cannot be used are named") {
  {
    auto runtime = open_runtime(options_of(kSetups[2], "fair"));
    auto a = open_session(*runtime, need("a", kMiB, kMiB));
    REQUIRE(run_iterations(*a, 5).ok());
    CHECK(runtime->interference()->empty());
    // From now on it is measured.
    REQUIRE(runtime->set_policy(std::move(*sched::make_policy("pack"))).ok());
    REQUIRE(run_iterations(*a, 5).ok());
    REQUIRE(runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
    CHECK(entries_alone(*runtime, "a") == 1);
  }
  const TemporaryFile file;
  std::ofstream(file.path()) << "something else\n";
  auto options = options_of(kSetups[2], "fair");
  options.interference_file = file.path();
  const base::Status malformed = executor::Runtime::open(std::move(options)).status();
  CHECK(malformed.code() == GPUSHARE_MALFORMED_INPUT);
  CHECK(malformed.message().find(file.path() + ":1: the first line is 'something else'") !=
        std::string::npos);
  options = options_of(kSetups[2], "fair");
  options.interference_file = "/nonexistent/folder/table";
  auto runtime = open_runtime(std::move(options));
  const base::Status closed = runtime->close();
  CHECK(closed.code() == GPUSHARE_IO_ERROR);
  CHECK(closed.message().find("/nonexistent/folder/table") != std::string::npos);
}

TEST_CASE("the lane finder of the runtime's options decides which lane a session joins") {
  const auto lanes = [](std::optional<sched::LaneFinderKind> finder) {
    auto options = options_of(kSetups[2], "fair");
    options.lane_finder = finder;
    auto runtime = open_runtime(std::move(options));
    const auto a = open_session(*runtime, need("a", kMiB, 8 * kMiB)),
               b = open_session(*runtime, need("b", kMiB, 8 * kMiB));
    CHECK(runtime->check() == "");
    return runtime->info()->lanes;
  };
  CHECK(lanes(std::nullopt) == 2);
  CHECK(lanes(sched::LaneFinderKind::kSalus) == 2);
  CHECK(lanes(sched::LaneFinderKind::kBalanced) == 2);
  CHECK(lanes(sched::LaneFinderKind::kCompact) == 1);
}
