// gpu_suite: measures and writes the result. Exit status: 0 also without a GPU, unless --require-gpu.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <exception>
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
  int repeats = 0;
  app.add_option("--repeats", repeats, "samples of each figure; unset: 21, or 3 with --quick")
      ->check(CLI::Range(1, 1000));
  app.add_option("--json", json, "write the result as JSON to this file");
  app.add_option("--markdown", markdown, "write the result as a Markdown page to this file");
  bool add = false;
  bool page = false;
  bool probe = false;
  std::string checks;
  app.add_flag("--add", add, "keep what the JSON file has of other measurements");
  app.add_option("--checks", checks, "lines of this file end the Markdown page");
  app.add_flag("--page", page, "measure nothing: write the Markdown page from the JSON file");
  app.add_flag("--probe", probe, "measure nothing: say which GPU there is; status 77 if there is none");
  app.add_option("--only", only, "numbers of the measurements to make, 1 to 10")->check(CLI::Range(1, 10));
  uint64_t fill_kib = 0;
  app.add_option("--fill-kib", fill_kib,
                 "size of a fill, one piece of device work; unset: 64 MiB, or 1 MiB with --quick");
  std::string job;
  app.add_option("--as-job", job, "of measurement 4")->group("");
  std::string start;
  app.add_option("--as-start", start, "of measurement 8")->group("");
  CLI11_PARSE(app, argc, argv);
  if (!job.empty()) return run_as_job(job);
  if (!start.empty()) return run_as_start(start);

  Report report;
  report.keep_in(json, markdown, checks);
  if (page) {
    try {
      if (!report.load()) return 0;
      report.save();
      return 0;
    } catch (const std::exception& error) {
      std::cerr << "gpu_suite: " << error.what() << "\n";
      return 1;
    }
  }
  std::unique_ptr<Driver> driver;
  try {
    driver = std::make_unique<Driver>();
  } catch (const std::exception& error) {
    std::cout << "UNAVAILABLE: " << error.what() << "\n";
    return probe ? 77 : require_gpu ? 1 : 0;
  }
  Settings settings;
  if (quick) settings = {3, 1u << 20, 20, 4, 1, 8u << 20, 32, ""};
  if (repeats > 0) settings.repeats = repeats;
  if (fill_kib > 0) settings.fill_bytes = fill_kib << 10;
  char program[4096] = "";
  if (readlink("/proc/self/exe", program, sizeof(program) - 1) > 0) settings.program = program;
  report.device = driver->device_name();
  report.driver = driver->version();
  report.date = today();
  report.label =
      driver->is_standin() ? "stand-in for the driver: the figures say nothing about a GPU" : "GPU";

  using Measure = void (*)(const Driver&, const Settings&, Report&);
  const Measure measures[] = {measure_allocation,  measure_iteration_overhead,
                              measure_switch,      measure_policies,
                              measure_many_models, measure_virtual_memory,
                              measure_partitions,  measure_loading,
                              measure_torch,       measure_exec};
  std::cout << report.header() << std::endl;
  if (probe) return 0;
  const auto wanted = [&](int i) {
    return only.empty() || std::find(only.begin(), only.end(), i) != only.end();
  };
  try {
    if (add) (void)report.load();
    for (int i = 1; i <= 10; ++i)
      if (wanted(i)) report.forget(i);
    report.save();
  } catch (const std::exception& error) {
    std::cerr << "gpu_suite: " << error.what() << "\n";
    return 1;
  }
  int failed = 0;
  for (int i = 1; i <= 10; ++i) {
    if (!wanted(i)) continue;
    const auto begun = std::chrono::steady_clock::now();
    try {
      measures[i - 1](*driver, settings, report);
    } catch (const std::exception& error) {
      std::cerr << "gpu_suite: measurement " << i << " failed: " << error.what() << std::endl;
      ++failed;
      try {
        report.skip(std::to_string(i), "the measurement", std::string("failed: ") + error.what());
      } catch (const std::exception&) {  // what could not be written has been said
      }
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    std::printf("measurement %d took %.1f s\n", i, took.count());
    std::fflush(stdout);
  }
  return failed == 0 ? 0 : 1;
}
