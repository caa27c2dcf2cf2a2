// SPDX-License-Identifier: Apache-2.0
#include <fstream>
#include <string>
#include <vector>

#include "sim/interference.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace gpushare::sim;

namespace {

const char* const kTable = R"json({"p100": {
  "('A (batch size 1)', 1)": {"null": 10.0, "('A (batch size 1)', 1)": [5.0, 5.0], "('B', 1)": [8.0, 2.0]},
  "('B', 1)": {"null": 4.0, "('A (batch size 1)', 1)": [2.0, 8.0]},
  "('C', 1)": {"null": 2.0, "('A (batch size 1)', 1)": [0.0, 0.0]},
  "('D', 1)": {"null": 0.0},
  "('A (batch size 1)', 8)": {"null": 70.0, "('B', 8)": [1, 1]}}})json";

Job of(const char* config, double demand = 0) {
  Job job;
  job.config = config;
  job.demand = demand;
  return job;
}

}  // namespace

TEST_CASE("a table of measured pairs is read for one device and one GPU") {
  const auto table = InterferenceTable::parse(kTable, "t.json");
  REQUIRE(table.ok());
  CHECK(table->size() == 3);  // D ran at 0, and 8 GPUs are not one
  const size_t a = table->find("A (batch size 1)"), b = table->find("B"), c = table->find("C");
  CHECK(table->find("E") == InterferenceTable::kNone);
  CHECK(table->alone_steps_per_s(a) == 10);
  CHECK(table->pair_rate(a, b) == Approx(0.8));
  CHECK(table->pair_rate(b, a) == Approx(0.5));
  CHECK(table->pair_rate(a, a) == Approx(0.5));
  CHECK(table->pair_rate(c, a) == 0);  // could not run together: unmeasured
}

TEST_CASE("what is wrong with a table is said with its place") {
  const auto message = [](const char* text, int32_t code = GPUSHARE_MALFORMED_INPUT) {
    const auto table = InterferenceTable::parse(text, "t.json");
    CHECK(table.status().code() == code);
    return table.status().message();
  };
  CHECK(message("{").find("t.json") != std::string::npos);
  CHECK(message("[]").find("object of devices") != std::string::npos);
  CHECK(message("{\"k80\": {}}", GPUSHARE_NOT_FOUND).find("k80") != std::string::npos);
  CHECK(message("{\"p100\": 3}").find("configurations") != std::string::npos);
  CHECK(message("{\"p100\": {\"A\": {\"null\": 1}}}").find("'NAME'") != std::string::npos);
  CHECK(message("{\"p100\": {\"('A', 1)\": 1}}").find("must be an object") != std::string::npos);
  CHECK(message("{\"p100\": {\"('A', 1)\": {}}}").find("null") != std::string::npos);
  CHECK(message("{\"p100\": {\"('A', 1)\": {\"null\": -1}}}").find(">= 0") != std::string::npos);
  CHECK(message("{\"p100\": {\"('A', 1)\": {\"null\": \"x\"}}}").find("number") != std::string::npos);
  CHECK(message("{\"p100\": {\"('A', 1)\": {\"null\": 1, \"B\": [1, 1]}}}").find("'NAME'") !=
        std::string::npos);
  CHECK(message("{\"p100\": {\"('A', 1)\": {\"null\": 1, \"('A', 1)\": [1]}}}").find("[steps/s, steps/s]") !=
        std::string::npos);
  CHECK(message("{\"p100\": {\"('A', 1)\": {\"null\": 1, \"('A', x)\": [1, 1]}}}").find("'NAME'") !=
        std::string::npos);
  CHECK(InterferenceTable::read("/nowhere/t.json").status().code() == GPUSHARE_NOT_FOUND);
  CHECK(InterferenceTable::read("/").status().code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("measured slowdowns add up, unmeasured jobs share compute by demand") {
  const auto table = InterferenceTable::parse(kTable, "t.json");
  REQUIRE(table.ok());
  const std::vector<Job> jobs = {of("A (batch size 1)"),
                                 of("A (batch size 1)"),
                                 of("A (batch size 1)"),
                                 of("B"),
                                 of("", 0.4),
                                 of("", 0.4),
                                 of("", 0.4)};
  const InterferenceModel model(jobs, &*table);
  CHECK(model.jobs_in_table() == 4);
  const auto rate = [&](sched::SessionId id, std::vector<sched::SessionId> beside) {
    return model.rate(id, beside);
  };
  CHECK(rate(1, {}) == 1);
  CHECK(rate(1, {2}) == Approx(1 / 2.0));
  CHECK(rate(1, {2, 3}) == Approx(1 / 3.0));
  CHECK(rate(1, {4}) == Approx(0.8));
  CHECK(rate(4, {1}) == Approx(0.5));
  CHECK(rate(5, {6}) == 1);  // 0.8 of the device
  CHECK(rate(5, {6, 7}) == Approx(1 / 1.2));
  CHECK(rate(1, {5}) == Approx(1 / (InterferenceModel::kDefaultDemand + 0.4)));
  CHECK(rate(1, {99}) == 1);
  CHECK(rate(99, {1}) == 1);
}

TEST_CASE("the published pair table is read whole") {
  const std::string path = std::string(GPUSHARE_SHARED_DATA) + "/interference/gavel_pairs_k80_p100.json";
  if (!std::ifstream(path)) {
    WARN("no shared data at " << path << ": only the table made by this program was read");
    return;
  }
  for (const char* device : {"p100", "k80"}) {
    const auto table = InterferenceTable::read(path, device);
    REQUIRE(table.ok());
    CHECK(table->size() == 26);
    size_t pairs = 0;
    for (size_t i = 0; i < table->size(); ++i)
      for (size_t j = 0; j < table->size(); ++j) pairs += table->pair_rate(i, j) > 0;
    CHECK(pairs > 500);
  }
  CHECK(InterferenceTable::read(path, "v100").status().code() == GPUSHARE_NOT_FOUND);
}
