// Jobs of measurement 4 as processes of their own, for what the driver's time slicing makes of them, and models of
// measurement 8 that start from nothing.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

#include "measures.hpp"

extern char** environ;

namespace gpushare::gpu_suite {
namespace {

// One such process. Killed if it is left running.
class Process {
 public:
  Process(const std::string& program, std::string flag, const std::string& job) {
    int in[2] = {-1, -1};
    int out[2] = {-1, -1};
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    char* arguments[] = {const_cast<char*>(program.c_str()), flag.data(), const_cast<char*>(job.c_str()),
                         nullptr};
    const int error = posix_spawn(&id_, program.c_str(), &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    to_ = in[1];
    from_ = out[0];
    if (error != 0) {
      id_ = 0;
      throw std::runtime_error("cannot start " + program + ": " + std::strerror(error));
    }
  }
  ~Process() {
    close(to_);
    close(from_);
    if (id_ == 0) return;
    kill(id_, SIGKILL);
    waitpid(id_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // The next byte that it says.
  void expect(char wanted) const {
    char said = 0;
    if (read(from_, &said, 1) != 1 || said != wanted) throw std::runtime_error("a job's process failed");
  }
  // Until it has ended, which on the stand-in tells that it left nothing behind.
  void wait() {
    int status = 0;
    if (waitpid(std::exchange(id_, 0), &status, 0) < 0 || status != 0)
      throw std::runtime_error("a process ended with status " + std::to_string(status));
  }
  void go() const {
    if (write(to_, "g", 1) != 1) throw std::runtime_error("a job's process is gone");
  }

 private:
  pid_t id_ = 0;
  int to_ = -1;
  int from_ = -1;
};

}  // namespace

std::vector<double> run_processes(const std::string& program, const std::vector<FillJob>& jobs,
                                  uint64_t bytes) {
  std::vector<std::unique_ptr<Process>> processes;
  for (const FillJob& job : jobs)
    processes.push_back(std::make_unique<Process>(
        program, "--as-job",
        std::to_string(job.iterations) + " " + std::to_string(job.pieces) + " " + std::to_string(bytes)));
  for (const auto& process : processes) process->expect('r');
  std::vector<double> done(jobs.size());
  std::vector<std::string> wrong(jobs.size());
  std::vector<std::thread> threads;
  const auto start = std::chrono::steady_clock::now();
  for (const auto& process : processes) process->go();
  for (size_t i = 0; i < jobs.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        processes[i]->expect('d');
      } catch (const std::exception& error) {
        wrong[i] = error.what();
      }
      done[i] = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& what : wrong)
    if (!what.empty()) throw std::runtime_error(what);
  return done;
}

double run_from_nothing(const std::string& program, const std::string& model) {
  const auto start = std::chrono::steady_clock::now();
  Process process(program, "--as-start", model);
  process.expect('d');
  const double ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  process.wait();
  return ms;
}

int run_as_job(const std::string& text) {
  FillJob job{};
  unsigned long long bytes = 0;
  if (std::sscanf(text.c_str(), "%d %d %llu", &job.iterations, &job.pieces, &bytes) != 3) return 2;
  try {
    const Driver driver;
    const PlainStream stream(driver);
    const PlainBlock block(driver, bytes);
    must(driver.cuMemsetD8Async(block.get(), 0, bytes, stream.get()), "fill");
    stream.synchronize();
    char go = 0;
    if (write(1, "r", 1) != 1 || read(0, &go, 1) != 1) return 1;
    for (int i = 0; i < job.iterations * job.pieces; ++i)
      must(driver.cuMemsetD8Async(block.get(), static_cast<unsigned char>(i), bytes, stream.get()), "fill");
    stream.synchronize();
    if (write(1, "d", 1) != 1) return 1;
    // Until the parent has read the others' times and closes its end, so that leaving disturbs none of them.
    (void)!read(0, &go, 1);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_suite --as-job: %s\n", error.what());
    return 1;
  }
}

}  // namespace gpushare::gpu_suite
