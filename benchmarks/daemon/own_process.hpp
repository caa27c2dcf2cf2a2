// own_process.hpp: a benchmark that starts itself again in other roles.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <spawn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

extern char** environ;

namespace gpushare::benchmarks {

// This program with other arguments, its stdin and stdout as pipes. Ends this process, with the reason on stderr, if it cannot be
// started. A derived class closes the pipes and waits for the process.
struct OwnProcess {
  explicit OwnProcess(std::vector<std::string> words) {
    int to[2], from[2];
    if (pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0) not_started("pipe");
    words.insert(words.begin(), "/proc/self/exe");
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to[0], 0);
    posix_spawn_file_actions_adddup2(&actions, from[1], 1);
    if (posix_spawn(&pid, arguments[0], &actions, nullptr, arguments.data(), environ) != 0)
      not_started("spawn");
    posix_spawn_file_actions_destroy(&actions);
    close(to[0]);
    close(from[1]);
    in = fdopen(to[1], "w");
    out = fdopen(from[0], "r");
  }
  OwnProcess(const OwnProcess&) = delete;
  OwnProcess& operator=(const OwnProcess&) = delete;

  pid_t pid = 0;
  FILE* in = nullptr;
  FILE* out = nullptr;

 private:
  [[noreturn]] static void not_started(const char* what) {
    std::perror(what);
    std::exit(1);
  }
};

}  // namespace gpushare::benchmarks
