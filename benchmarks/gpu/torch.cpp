// PyTorch's caching allocator in measurement 1, where a Python with PyTorch is at hand.
// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "measures.hpp"

namespace gpushare::gpu_suite {

void measure_torch_allocation(const Settings& settings, const std::vector<uint64_t>& sizes, Report& report) {
  const std::string group = "1 allocation";
  const char* python = std::getenv("GPUSHARE_PYTHON");
  std::string command = python != nullptr && *python != '\0' ? python : "python3";
  // A suite that was moved has the script elsewhere.
  const char* script = std::getenv("GPUSHARE_TORCH_SCRIPT");
  command += std::string(" '") + (script != nullptr && *script != '\0' ? script : GPUSHARE_TORCH_SCRIPT) +
             "' " + std::to_string(settings.repeats);
  for (const uint64_t bytes : sizes) command += " " + std::to_string(bytes);
  std::string text;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe != nullptr) {
    char part[512];
    for (size_t got = 0; (got = fread(part, 1, sizeof(part), pipe)) > 0;) text.append(part, got);
  }
  const int status = pipe != nullptr ? pclose(pipe) : -1;
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    report.skip(group, "PyTorch's caching allocator", text.substr(0, text.find('\n')));
    return;
  }
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    uint64_t bytes = 0;
    std::vector<double> samples;
    if (!(words >> bytes)) continue;
    for (double sample = 0; words >> sample;) samples.push_back(sample);
    report.add(group, "alloc + free, " + size_name(bytes), "PyTorch's cache, from Python", "us", samples);
  }
}

}  // namespace gpushare::gpu_suite
