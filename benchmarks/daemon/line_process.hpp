// line_process.hpp: what the programs have in common that measure threads of one process beside processes of a daemon
// through the C++ API: each process is the program again, and hears and says lines.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <gpushare/gpushare.hpp>
#include <string>
#include <thread>
#include <vector>

#include "own_process.hpp"

namespace gpushare::benchmarks {

inline std::filesystem::path own_path() {
  return std::filesystem::read_symlink("/proc/self/exe");
}

[[noreturn]] inline void give_up(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", own_path().filename().c_str(), what.c_str());
  std::exit(1);
}

// Waits for the process when it goes.
struct LineProcess : OwnProcess {
  using OwnProcess::OwnProcess;
  ~LineProcess() {
    std::fclose(in);
    std::fclose(out);
    waitpid(pid, nullptr, 0);
  }
  // With its end of line; empty when the process says no more.
  std::string line() {
    char text[128] = "";
    return std::fgets(text, sizeof text, out) == nullptr ? std::string() : text;
  }
  void expect(const char* word) {
    if (line() != std::string(word) + "\n") give_up(std::string("a process did not say ") + word);
  }
  void go() {
    std::fputs("go\n", in);
    std::fflush(in);
  }
};

// ---- in such a process

inline void say(const char* word) {
  std::puts(word);
  std::fflush(stdout);
}

// Waits until the daemon listens, 10 s at most.
inline Runtime open_shared() {
  RuntimeOptions options;
  options.device = "shared";
  for (int tries = 0;; ++tries) {
    try {
      return Runtime::open(options);
    } catch (const Error& error) {
      if (tries == 1000) give_up(error.what());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

// Becomes `gpushare daemon` with these arguments, silently; the tool lies beside this program. Returns if it cannot.
inline void become_daemon(std::vector<std::string> words) {
  const std::string tool = (own_path().parent_path() / "gpushare").string();
  words.insert(words.begin(), {tool, "daemon"});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  if (std::freopen("/dev/null", "w", stdout) != nullptr && std::freopen("/dev/null", "w", stderr) != nullptr)
    execv(tool.c_str(), arguments.data());
}

inline double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(part * static_cast<double>(values.size())))];
}

}  // namespace gpushare::benchmarks
