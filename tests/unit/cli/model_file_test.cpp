// Files that `gpushare plan` reads, and files that it refuses by file, line and field.
// SPDX-License-Identifier: Apache-2.0
#include "cli/model_file.hpp"

#include "support/catch.hpp"

using namespace gpushare;
using namespace gpushare::cli;

namespace {

void check_refused(const base::Status& status, std::initializer_list<const char*> words) {
  CHECK(status.code() == GPUSHARE_MALFORMED_INPUT);
  for (const char* word : words) {
    CAPTURE(status.message(), word);
    CHECK(status.message().find(word) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("layers of a CSV", "[cli]") {
  const auto layers =
      parse_layer_csv("layer,type,megabytes\n0,Conv2d,0.5\n\n1, ReLU ,0.000\r\nhead,Linear,2\n", "m.csv");
  REQUIRE(layers.ok());
  REQUIRE(layers->size() == 3);
  CHECK((*layers)[0].bytes == 524288);
  CHECK((*layers)[1].bytes == 0);
  CHECK((*layers)[2].name == "head");
  CHECK((*layers)[2].bytes == 2097152);
}

TEST_CASE("bad layer files are refused by file, line and field", "[cli]") {
  const std::string header = "layer,type,megabytes\n";
  check_refused(parse_layer_csv("", "m.csv").status(), {"m.csv:1", "layer,type,megabytes"});
  check_refused(parse_layer_csv("layer,megabytes\n0,1\n", "m.csv").status(), {"m.csv:1", "header"});
  check_refused(parse_layer_csv(header, "m.csv").status(), {"m.csv", "no layers"});
  check_refused(parse_layer_csv(header + "0,Conv2d\n", "m.csv").status(), {"m.csv:2", "2 fields"});
  check_refused(parse_layer_csv(header + ",Conv2d,1\n", "m.csv").status(), {"m.csv:2", "layer"});
  for (const char* value : {"", "-1", "x", "nan", "inf", "1e8", "1 2"})
    check_refused(parse_layer_csv(header + "0,Conv2d,1\n1,Conv2d," + value + "\n", "m.csv").status(),
                  {"m.csv:3", "megabytes", "from 0 to"});
  check_refused(parse_layer_csv(header + "0,a,1\n0,b,1\n", "m.csv").status(), {"m.csv:3", "layer", "line 2"});
  CHECK(read_model_layers("model.bin").status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK_FALSE(read_model_layers("/nowhere/model.csv").ok());
  CHECK_FALSE(read_model_layers("/nowhere/model.safetensors").ok());
}

TEST_CASE("execution times cover the model's layers once each", "[cli]") {
  const std::vector<ModelLayer> layers{{"a", 1}, {"b", 2}};
  const auto times = parse_execution_times("layer,exec_ms\nb,2.5\na,0\n", "e.csv", layers);
  REQUIRE(times.ok());
  CHECK(*times == std::vector<double>{0, 2.5});
  const auto refuse = [&](const std::string& rows, std::initializer_list<const char*> words) {
    check_refused(parse_execution_times("layer,exec_ms\n" + rows, "e.csv", layers).status(), words);
  };
  refuse("a,1\n", {"e.csv", "'b'", "2 layers"});
  refuse("a,1\nc,1\n", {"e.csv:3", "layer", "'c'"});
  refuse("a,1\na,1\n", {"e.csv:3", "layer", "once"});
  refuse("a,-1\nb,1\n", {"e.csv:2", "exec_ms", "from 0 to"});
  refuse("a,1,2\nb,1\n", {"e.csv:2", "3 fields"});
  check_refused(parse_execution_times("layer,ms\na,1\n", "e.csv", layers).status(),
                {"e.csv:1", "layer,exec_ms"});
}
