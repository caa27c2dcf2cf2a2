// A program that a test starts: it tells the test something in lines on its stdout, and ends when it may, is told to or
// is killed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "support/catch.hpp"

namespace gpushare::test {

class ChildProcess {
 public:
  ChildProcess(const char* program, std::vector<std::string> arguments) {
    int out[2], in[2];
    REQUIRE(pipe2(out, O_CLOEXEC) == 0);
    REQUIRE(pipe2(in, O_CLOEXEC) == 0);
    arguments.insert(arguments.begin(), program);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      dup2(out[1], 1);
      dup2(in[0], 0);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(out[1]);
    close(in[0]);
    out_ = fdopen(out[0], "r");
    in_ = in[1];
  }
  // Kills it where nobody has waited for its end.
  ~ChildProcess() {
    if (pid_ > 0) kill();
    if (out_ != nullptr) std::fclose(out_);
    close(in_);
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  // The next line with its end; waits for it. Empty once the program has closed its stdout.
  std::string line() {
    char text[256] = {};
    if (std::fgets(text, sizeof(text), out_) == nullptr) return {};
    return text;
  }
  // Writes to its stdin.
  void tell(const std::string& text) {
    REQUIRE(write(in_, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  }
  void tell_to_stop() { tell("x"); }
  void kill() {
    ::kill(pid_, SIGKILL);
    (void)wait();
  }
  // Waits for its end: its exit status, or the signal that ended it as a negative number.
  int wait() {
    int status = 0;
    REQUIRE(waitpid(pid_, &status, 0) == pid_);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  FILE* out_ = nullptr;
  int in_ = -1;
};

}  // namespace gpushare::test
