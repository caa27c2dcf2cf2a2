// Runs the suites over one backend: is it there, do its excuses name tests, do the tests pass, do the excused
// ones fail.
// SPDX-License-Identifier: Apache-2.0
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "child.hpp"
#include "runner.hpp"
#include "support/run_tests.hpp"

extern char** environ;

namespace gpushare::cts {
namespace {

constexpr int kSkipped = 77;  // SKIP_RETURN_CODE in CMakeLists.txt

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, "0") != 0 && *value != '\0';
}

bool is_required(const std::string& name) {
  const char* list = std::getenv("GPUSHARE_CTS_REQUIRE");
  std::stringstream names(list != nullptr ? list : "");
  for (std::string item; std::getline(names, item, ',');) {
    if (item == name) return true;
  }
  return false;
}

// The exit status of this program running `test` alone and without excuses; negative if it could not be run.
int run_alone(const std::string& test) {
  const std::string variable = std::string(kNoExcuses) + "=1";
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  environment.push_back(const_cast<char*>(variable.c_str()));
  environment.push_back(nullptr);
  char program[] = "/proc/self/exe";
  char* arguments[] = {program, const_cast<char*>(test.c_str()), nullptr};
  posix_spawn_file_actions_t quiet;
  posix_spawn_file_actions_init(&quiet);
  posix_spawn_file_actions_addopen(&quiet, 1, "/dev/null", 1, 0);
  posix_spawn_file_actions_addopen(&quiet, 2, "/dev/null", 1, 0);
  pid_t child = 0;
  const int error = posix_spawn(&child, program, &quiet, nullptr, arguments, environment.data());
  posix_spawn_file_actions_destroy(&quiet);
  int status = 0;
  if (error != 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

// How many excused tests pass although they should not.
int verify(const std::vector<Excuse>& excuses, const char* kind) {
  int wrong = 0;
  for (const Excuse& excuse : excuses) {
    for (const std::string& test : test_names()) {
      if (!matches(excuse, test)) continue;
      const int status = run_alone(test);
      if (status > 0) continue;
      std::printf("cts: '%s' is listed as %s (%s), and %s\n", test.c_str(), kind, excuse.reason.c_str(),
                  status == 0 ? "passes: take it off the list" : "could not be run");
      ++wrong;
    }
  }
  return wrong;
}

int check_excuses(const std::vector<Excuse>& excuses) {
  int wrong = 0;
  for (const Excuse& excuse : excuses) {
    const auto& names = test_names();
    if (std::any_of(names.begin(), names.end(),
                    [&](const std::string& name) { return matches(excuse, name); })) {
      if (!excuse.reason.empty()) continue;
    }
    std::printf("cts: the excuse '%s' names no test or gives no reason\n", excuse.test.c_str());
    ++wrong;
  }
  return wrong;
}

int main_of(int argc, char** argv) {
  const std::string& name = backend().name;
  auto first = device::Device::open(device_spec());
  if (!first.ok()) {
    const bool absent = first.status().code() == GPUSHARE_UNAVAILABLE;
    std::printf("cts: %s: %s\n", name.c_str(), first.status().to_string().c_str());
    if (absent && !is_required(name)) return kSkipped;
    std::printf("cts: %s\n",
                absent ? "the backend is required (GPUSHARE_CTS_REQUIRE)" : "only UNAVAILABLE may skip");
    return 1;
  }
  if (!has_tag(kSlowToOpen)) first->reset();
  if (check_excuses(unsupported()) + check_excuses(backend().xfail) > 0) return 1;
  const int failed = test::run_tests(argc, argv);
  if (failed != 0 || std::getenv(kNoExcuses) != nullptr) return failed;
  int wrong = verify(backend().xfail, "xfail");
  if (is_set("GPUSHARE_CTS_VERIFY")) wrong += verify(unsupported(), "unsupported");
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace gpushare::cts

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what a test said is there, should the process be killed
  int exit_status = 0;
  if (gpushare::cts::is_child(&exit_status)) return exit_status;
  return gpushare::cts::main_of(argc, argv);
}
