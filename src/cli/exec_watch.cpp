// SPDX-License-Identifier: Apache-2.0
#include "cli/exec_watch.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <sstream>

#include "base/clock.hpp"
#include "base/status.hpp"
#include "shim/process.hpp"

namespace gpushare::cli {
namespace {

// Only a program that its loader has neither finished nor given up needs so long, as on a file system that hangs.
constexpr int kDeadlineMs = 10'000;
int deadline_ms() {
  const char* const set = std::getenv("GPUSHARE_SHIM_DEADLINE_MS");
  const int value = set != nullptr ? std::atoi(set) : 0;
  return value > 0 ? value : kDeadlineMs;
}
constexpr int kFirstPauseMs = 5, kLongestPauseMs = 2000;

// By hand: a stream throws where a process ends while its file is read.
std::string text_of(pid_t process, const char* name) {
  const std::string path = "/proc/" + std::to_string(process) + '/' + name;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  std::string text;
  char part[16384];
  for (ssize_t got = 0; (got = ::read(file, part, sizeof part)) > 0;)
    text.append(part, static_cast<size_t>(got));
  ::close(file);
  return text;
}

// Tells the programs apart that a process runs one after another: the vector has random addresses. 0: it cannot be read.
uint64_t image_of(pid_t process) {
  const std::string vector = text_of(process, "auxv");
  return vector.empty() ? 0 : std::hash<std::string>{}(vector) | 1;
}

// What the loader has mapped into a process.
struct Mapped {
  bool library = false;    // the preload library
  bool c_library = false;  // which the loader maps after the libraries that are preloaded
  bool driver = false;
};
Mapped mapped(pid_t process, const std::string& driver) {
  Mapped out;
  std::istringstream lines(text_of(process, "maps"));
  for (std::string line; std::getline(lines, line);) {
    const size_t path = line.find('/'), slash = line.rfind('/');
    if (path == std::string::npos) continue;
    const auto is = [&](const char* with) { return line.compare(slash + 1, std::strlen(with), with) == 0; };
    out.library |= is(shim::kLibrary);
    out.c_library |= is("libc.so.6") || is("libc-2.") || is("ld-musl") || is("libc.musl");
    out.driver |= is("libcuda.so") || (!driver.empty() && line.compare(path, std::string::npos, driver) == 0);
  }
  return out;
}

// Every process with its parent.
std::vector<std::pair<pid_t, pid_t>> parents() {
  std::vector<std::pair<pid_t, pid_t>> out;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    pid_t process = 0, parent = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), process).ec != std::errc{}) continue;
    const std::string stat = text_of(process, "stat");
    // The program's name is in parentheses and may hold any character; state and parent follow.
    const size_t behind = stat.rfind(')');
    if (behind != std::string::npos && std::sscanf(stat.c_str() + behind + 1, " %*c %d", &parent) == 1)
      out.emplace_back(process, parent);
  }
  return out;
}

std::vector<pid_t> descendants() {
  const auto all = parents();
  std::vector<pid_t> found{::getpid()};
  for (size_t i = 0; i < found.size(); ++i)
    for (const auto& [process, parent] : all)
      if (parent == found[i]) found.push_back(process);
  found.erase(found.begin());
  return found;
}

std::string name_of(pid_t process) {
  std::string name = text_of(process, "comm");
  while (!name.empty() && name.back() == '\n') name.pop_back();
  for (char& each : name)
    if (static_cast<unsigned char>(each) < ' ' || static_cast<unsigned char>(each) > '~') each = '?';
  return name;
}

}  // namespace

ExecWatch::ExecWatch(const shim::GroupPage& page, std::string driver, pid_t program, std::string name,
                     bool fail_closed)
    : page_(page),
      driver_(std::move(driver)),
      program_(program),
      name_(std::move(name)),
      fail_closed_(fail_closed),
      began_ns_(base::host_now_ns()) {}

int ExecWatch::look() {
  if (!decided_) return look_at_program();
  look_at_descendants();
  const int pause = pause_ms_;
  pause_ms_ = std::min(2 * pause_ms_, kLongestPauseMs);
  return pause;
}

int ExecWatch::look_at_program() {
  const auto passed_over = [this] {
    const Mapped has = mapped(program_, driver_);
    return has.c_library && !has.library && !has_reported();
  };
  if (has_reported()) {
    decided_ = held_ = true;
  } else if (passed_over() && passed_over()) {
    not_held(program_, name_, std::string("its loader has not loaded ") + shim::kLibrary + ".so");
    decided_ = true;
  } else if (base::host_now_ns() - began_ns_ > static_cast<uint64_t>(deadline_ms()) * 1'000'000) {
    not_held(program_, name_,
             base::format("%s.so in it has not reported within %g s", shim::kLibrary, deadline_ms() / 1e3));
    decided_ = true;
  }
  return kFirstPauseMs;
}

bool ExecWatch::end() {
  if (!decided_ && !has_reported())
    std::fprintf(stderr, "gpushare exec: '%s' has ended, and no %s.so in it has reported: it was not held\n",
                 name_.c_str(), shim::kLibrary);
  held_ = held_ || has_reported();
  return !held_ && fail_closed_;
}

void ExecWatch::look_at_descendants() {
  const std::vector<pid_t> processes = descendants();
  for (auto it = done_.begin(); it != done_.end();)
    it = std::find(processes.begin(), processes.end(), it->first) == processes.end() ? done_.erase(it)
                                                                                     : std::next(it);
  for (const pid_t process : processes) look_at(process);
}

void ExecWatch::look_at(pid_t process) {
  const uint64_t image = image_of(process);
  if (const auto it = done_.find(process); image == 0 || (it != done_.end() && it->second == image)) return;
  const Mapped has = mapped(process, driver_);
  if (!has.library && !has.driver) return;
  if (image_of(process) != image) return;  // another program by now
  done_[process] = image;
  if (!has.library && (process != program_ || held_))
    not_held(process, name_of(process),
             std::string("it has the CUDA driver and not ") + shim::kLibrary + ".so");
}

void ExecWatch::not_held(pid_t process, const std::string& name, const std::string& why) {
  if (fail_closed_) ::kill(process, SIGKILL);
  std::fprintf(stderr, "gpushare exec: '%s' (process %d) %s: %s\n", name.c_str(), static_cast<int>(process),
               fail_closed_ ? "was ended, because nothing holds it to its limits (--fail-closed)"
                            : "is not held, it runs without limits and without turns",
               why.c_str());
}

}  // namespace gpushare::cli
