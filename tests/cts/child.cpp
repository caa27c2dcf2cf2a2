// SPDX-License-Identifier: Apache-2.0
#include "child.hpp"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <vector>

#include "cts.hpp"

extern char** environ;

namespace gpushare::cts {
namespace {

constexpr const char* kTaskVariable = "GPUSHARE_CTS_CHILD";
constexpr int kInherited = 199;  // the descriptor's number in the child

// Plain functions and no REQUIRE: the child is no Catch session.
base::Status work(const ChildTask& task) {
  GPUSHARE_ASSIGN_OR_RETURN(const auto device, device::Device::open(device_spec()));
  const uint64_t granule = device->info().mapping_granularity_bytes;
  const bool writes = task.what == "invert";
  GPUSHARE_ASSIGN_OR_RETURN(gpushare_backend_memory * memory,
                            device->phys_import(task.descriptor, task.bytes,
                                                writes ? GPUSHARE_ACCESS_READ_WRITE : GPUSHARE_ACCESS_READ));
  const uint64_t offset = task.what == "read_last_granule" ? task.bytes - granule : 0;
  const uint64_t bytes = task.bytes - offset;
  GPUSHARE_ASSIGN_OR_RETURN(const device::Address address, device->va_reserve(bytes));
  GPUSHARE_RETURN_IF_ERROR(device->va_map(address, bytes, memory, offset));
  {
    GPUSHARE_ASSIGN_OR_RETURN(const device::Stream stream, device->create_stream());
    std::vector<uint8_t> got(bytes);
    GPUSHARE_RETURN_IF_ERROR(
        stream.copy(reinterpret_cast<uint64_t>(got.data()), address, bytes, GPUSHARE_COPY_DEVICE_TO_HOST));
    GPUSHARE_RETURN_IF_ERROR(stream.synchronize());
    const std::vector<uint8_t> wanted = pattern(task.bytes, task.seed);
    if (!std::equal(got.begin(), got.end(), wanted.begin() + static_cast<std::ptrdiff_t>(offset)))
      return {GPUSHARE_INTERNAL, "the child finds other bytes"};
    if (task.what == "read_and_die") raise(SIGKILL);
    if (writes) {
      for (uint8_t& byte : got) byte = static_cast<uint8_t>(~byte);
      GPUSHARE_RETURN_IF_ERROR(
          stream.copy(address, reinterpret_cast<uint64_t>(got.data()), bytes, GPUSHARE_COPY_HOST_TO_DEVICE));
      GPUSHARE_RETURN_IF_ERROR(stream.synchronize());
    }
  }
  GPUSHARE_RETURN_IF_ERROR(device->va_unmap(address, bytes));
  GPUSHARE_RETURN_IF_ERROR(device->va_free(address, bytes));
  GPUSHARE_RETURN_IF_ERROR(device->phys_release(memory));
  return device->close();
}

}  // namespace

int run_child(const ChildTask& task) {
  std::vector<std::string> texts;
  for (char** entry = environ; *entry != nullptr; ++entry) texts.emplace_back(*entry);
  texts.push_back(std::string(kTaskVariable) + "=" + task.what + " " + std::to_string(task.bytes) + " " +
                  std::to_string(task.seed));
  std::vector<char*> environment;
  for (std::string& text : texts) environment.push_back(text.data());
  environment.push_back(nullptr);
  char program[] = "/proc/self/exe";
  char* arguments[] = {program, nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, task.descriptor, kInherited);
  pid_t child = 0;
  const int error = posix_spawn(&child, program, &actions, nullptr, arguments, environment.data());
  posix_spawn_file_actions_destroy(&actions);
  int status = 0;
  if (error != 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

bool is_child(int* out_exit) {
  const char* variable = std::getenv(kTaskVariable);
  if (variable == nullptr) return false;
  ChildTask task{};
  std::istringstream(variable) >> task.what >> task.bytes >> task.seed;
  task.descriptor = kInherited;
  const base::Status status = work(task);
  if (!status.ok()) std::printf("cts: child '%s': %s\n", variable, status.to_string().c_str());
  *out_exit = status.ok() ? 0 : 1;
  return true;
}

}  // namespace gpushare::cts
