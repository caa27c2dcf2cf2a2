// gpu_suite: measures and writes the result. Exit status: 0 also without a GPU, unless --require-gpu.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <ctime>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>

#include "measures.hpp"

namespace {

using namespace gpushare::gpu_suite;  // NOLINT(google-build-using-namespace)

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::strftime(text, sizeof(text), "%Y-%m-%d", &parts);
  return text;
}

bool write(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.flush();
  if (!file) std::cerr << "gpu_suite: cannot write " << path << "\n";
  return static_cast<bool>(file);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Measures gpushare on the first GPU, beside what one would use instead"};
  bool require_gpu = false;
  bool quick = false;
  std::string json;
  std::string markdown;
  std::vector<int> only;
  app.add_flag("--require-gpu", require_gpu, "fail when there is no GPU");
  app.add_flag("--quick", quick, "few repeats and little work: to see that it runs, not for figures");
  app.add_option("--json", json, "write the result as JSON to this file");
  app.add_option("--markdown", markdown, "write the result as a Markdown page to this file");
  app.add_option("--only", only, "numbers of the measurements to make, 1 to 8")->check(CLI::Range(1, 8));
  std::string job;
  app.add_option("--as-job", job, "of measurement 4")->group("");
  std::string start;
  app.add_option("--as-start", start, "of measurement 8")->group("");
  CLI11_PARSE(app, argc, argv);
  if (!job.empty()) return run_as_job(job);
  if (!start.empty()) return run_as_start(start);

  Report report;
  std::unique_ptr<Driver> driver;
  try {
    driver = std::make_unique<Driver>();
  } catch (const std::exception& error) {
    std::cout << "UNAVAILABLE: " << error.what() << "\n";
    return require_gpu ? 1 : 0;
  }
  Settings settings;
  if (quick) settings = {3, 1u << 20, 20, 4, 1, 8u << 20, 32, ""};
  char program[4096] = "";
  if (readlink("/proc/self/exe", program, sizeof(program) - 1) > 0) settings.program = program;
  report.device = driver->device_name();
  report.driver = driver->version();
  report.date = today();
  report.label =
      driver->is_standin() ? "stand-in for the driver: the figures say nothing about a GPU" : "GPU";

  using Measure = void (*)(const Driver&, const Settings&, Report&);
  const Measure measures[] = {
      measure_allocation,  measure_iteration_overhead, measure_switch,     measure_policies,
      measure_many_models, measure_virtual_memory,     measure_partitions, measure_loading};
  int failed = 0;
  for (int i = 1; i <= 8; ++i) {
    if (!only.empty() && std::find(only.begin(), only.end(), i) == only.end()) continue;
    try {
      measures[i - 1](*driver, settings, report);
    } catch (const std::exception& error) {
      std::cerr << "gpu_suite: measurement " << i << " failed: " << error.what() << "\n";
      report.skip(std::to_string(i), "the measurement", std::string("failed: ") + error.what());
      ++failed;
    }
  }
  std::cout << report.table();
  bool written = true;
  if (!json.empty()) written = write(json, report.json()) && written;
  if (!markdown.empty()) written = write(markdown, report.markdown()) && written;
  return failed == 0 && written ? 0 : 1;
}
