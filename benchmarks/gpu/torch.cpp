// The parts of the suite that need a Python with PyTorch: its caching allocator in measurement 1, and measurements 9 and 10.
// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <utility>

#include "measures.hpp"

namespace gpushare::gpu_suite {
namespace {

// Runs a script of this folder with GPUSHARE_PYTHON and hands on each line as it comes. Returns false with the last
// line if it fails.
bool run_script(const std::string& script, const std::string& arguments,
                const std::function<void(const std::string&)>& on_line, std::string* out_last) {
  const char* python = std::getenv("GPUSHARE_PYTHON");
  const char* folder = std::getenv("GPUSHARE_TORCH_SCRIPTS");  // of a suite that was moved
  std::string command = python != nullptr && *python != '\0' ? python : "python3";
  if (folder == nullptr || *folder == '\0') folder = GPUSHARE_TORCH_SCRIPTS;
  command += std::string(" '") + folder + "/" + script + "' " + arguments + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) {
    *out_last = "no process could be started";
    return false;
  }
  std::string line;
  for (int c = 0; (c = fgetc(pipe)) != EOF;) {
    if (c != '\n') {
      line.push_back(static_cast<char>(c));
      continue;
    }
    on_line(line);
    *out_last = std::exchange(line, {});
  }
  const int status = pclose(pipe);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::vector<double> numbers(std::istream& words) {
  std::vector<double> found;
  for (double number = 0; words >> number;) found.push_back(number);
  return found;
}

// Adds the rows that a script of measurement 9 or 10 says.
void add_rows_of(const std::string& script, const std::string& group, const Driver& driver,
                 const Settings& settings, Report& report) {
  if (driver.is_standin()) {
    report.skip(group, "PyTorch",
                "the stand-in for the driver computes nothing; scripts/test-pytorch tries this on the CPU");
    return;
  }
  std::string last;
  const auto on_line = [&](const std::string& line) {
    std::vector<std::string> fields;
    std::istringstream text(line);
    for (std::string field; std::getline(text, field, '\t');) fields.push_back(field);
    if (fields.size() == 3 && fields[0] == "skip") report.skip(group, fields[1], fields[2]);
    if (fields.size() != 5 || fields[0] != "row") return;
    std::istringstream words(fields[4]);
    if (const std::vector<double> samples = numbers(words); !samples.empty())
      report.add(group, fields[1], fields[2], fields[3], samples);
  };
  if (!run_script(script, settings.load_divisor > 1 ? "--quick" : "", on_line, &last))
    report.skip(group, "PyTorch", last);
}

}  // namespace

void measure_torch_allocation(const Settings& settings, const std::vector<uint64_t>& sizes, Report& report) {
  const std::string group = "1 allocation";
  std::string arguments = std::to_string(settings.repeats), last;
  for (const uint64_t bytes : sizes) arguments += " " + std::to_string(bytes);
  const auto on_line = [&](const std::string& line) {
    std::istringstream words(line);
    uint64_t bytes = 0;
    if (!(words >> bytes)) return;
    const std::vector<double> samples = numbers(words);
    if (!samples.empty())
      report.add(group, "alloc + free, " + size_name(bytes), "PyTorch's cache, from Python", "us", samples);
  };
  if (!run_script("torch_allocator.py", arguments, on_line, &last))
    report.skip(group, "PyTorch's caching allocator", last);
}

void measure_torch(const Driver& driver, const Settings& settings, Report& report) {
  add_rows_of("torch_suite.py", "9 PyTorch", driver, settings, report);
}

void measure_exec(const Driver& driver, const Settings& settings, Report& report) {
  add_rows_of("torch_exec.py", "10 PyTorch under gpushare exec", driver, settings, report);
}

}  // namespace gpushare::gpu_suite
