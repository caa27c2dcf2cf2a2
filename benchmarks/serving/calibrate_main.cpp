// Writes the calibration of every printed case: serving_calibrate OUT.csv [points].
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "calibrate.hpp"
#include "printed.hpp"

int main(int argc, char** argv) {
  using namespace gpushare::experiments;
  if (argc < 2) {
    std::fprintf(stderr, "usage: serving_calibrate OUT.csv [points]\n");
    return 2;
  }
  const size_t points = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 240;
  std::vector<std::string> names;
  for (const PrintedCell& cell : kPrinted)
    if (names.empty() || names.back() != cell.name) names.push_back(cell.name);
  std::vector<Calibration> all(2 * names.size());
  std::atomic<size_t> next{0};
  std::vector<std::thread> workers;
  for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t)
    workers.emplace_back([&] {
      for (size_t i = next++; i < all.size(); i = next++) {
        all[i] = calibrate(names[i / 2], i % 2 == 0 ? Target::kAchievable : Target::kColumns, points);
        std::fprintf(stderr, "%s", to_csv({all[i]}).c_str() + to_csv({}).size());
      }
    });
  for (std::thread& worker : workers) worker.join();
  std::ofstream file(argv[1]);
  file << to_csv(all);
  return file ? 0 : 1;
}
