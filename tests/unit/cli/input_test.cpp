// Options and pickles.
// SPDX-License-Identifier: Apache-2.0
#include "cli/options.hpp"
#include "cli/pickle.hpp"
#include "support/catch.hpp"

#include <nlohmann/json.hpp>

using namespace gpushare;
using namespace gpushare::cli;

namespace {

std::string bytes(std::initializer_list<int> values) {
  std::string out;
  for (const int value : values) out += static_cast<char>(value);
  return out;
}

// pickle.dumps([{"segments": [1], "device_traces": [[{"action": "alloc", "addr": 140000000000000, "size":
// 512, "x": -2.5}]], "t": (1, 2), "n": None, "b": True}], protocol=4), written out.
std::string sample() {
  std::string out = bytes({0x80, 4, ']', 0x94, '}', 0x94, '('});
  const auto text = [&](const std::string& s) {
    out += bytes({0x8c, static_cast<int>(s.size())}) + s + bytes({0x94});
  };
  text("segments");
  out += bytes({']', 0x94, 'K', 1, 'a'});
  text("device_traces");
  out += bytes({']', 0x94, ']', 0x94, '}', 0x94, '('});
  text("action");
  text("alloc");
  text("addr");
  out += bytes({0x8a, 6, 0x00, 0x40, 0x6f, 0xd4, 0x54, 0x7f});
  text("size");
  out += bytes({'M', 0, 2});
  text("x");
  out += bytes({'G', 0xc0, 0x04, 0, 0, 0, 0, 0, 0});
  out += bytes({'u', 'a', 'a'});
  text("t");
  out += bytes({'K', 1, 'K', 2, 0x86, 0x94});
  text("n");
  out += bytes({'N'});
  text("b");
  out += bytes({0x88, 'u', 'a', '.'});
  return out;
}

}  // namespace

TEST_CASE("numbers of options", "[cli]") {
  CHECK(*parse_count("--n", "64", 64) == 64);
  for (const char* bad : {"65", "-1", "1.5", "", "x", "1 ", "99999999999999999999"}) {
    CAPTURE(bad);
    const auto result = parse_count("--n", bad, 64);
    CHECK(result.status().code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(result.status().message().find("--n: '") == 0);
  }
  CHECK(*parse_number("--x", "0.5", 0, false, 1) == 0.5);
  CHECK_FALSE(parse_number("--x", "0", 0, false, 1).ok());
  CHECK(parse_number("--x", "0", 0, true, 1).ok());
  for (const char* bad : {"1.01", "nan", "inf", "-inf", "1e999", "half"})
    CHECK_FALSE(parse_number("--x", bad, 0, true, 1).ok());
  CHECK(*parse_size("--c", "1KiB") == 1024);
  for (const char* bad : {"0", "-1", "", "1 parsec", "1e30"}) CHECK_FALSE(parse_size("--c", bad).ok());
  CHECK(split_list("a,,b") == std::vector<std::string>{"a", "", "b"});
  CHECK(split_list("").size() == 1);
}

TEST_CASE("pickle: what Python writes", "[cli]") {
  const std::string text = sample();
  REQUIRE(is_pickle(text));
  const auto read = pickle_as_json(text, "f", {"segments"});
  REQUIRE(read.ok());
  const nlohmann::json top = nlohmann::json::parse(*read)[0];
  CHECK(top["segments"].is_null());
  CHECK(top["device_traces"][0][0]["action"] == "alloc");
  CHECK(top["device_traces"][0][0]["addr"] == 0x7f54d46f4000);
  CHECK(top["device_traces"][0][0]["size"] == 512);
  CHECK(top["device_traces"][0][0]["x"] == -2.5);
  CHECK(top["t"] == nlohmann::json::array({1, 2}));
  CHECK(top["n"].is_null());
  CHECK(top["b"] == true);
  CHECK(*pickle_as_json(bytes({0x80, 2, 0x8a, 9, 255, 255, 255, 255, 255, 255, 255, 255, 0, '.'}), "f") ==
        "18446744073709551615");
  CHECK_FALSE(pickle_as_json(bytes({0x80, 2, 0x8a, 9, 0, 0, 0, 0, 0, 0, 0, 0, 1, '.'}), "f").ok());
}

TEST_CASE("pickle: refuses what could do harm", "[cli]") {
  const auto refused = [](const std::string& text, const char* why) {
    const auto read = pickle_as_json(text, "f", {}, 100'000);
    INFO((read.ok() ? *read : std::string(read.status().message())));
    CHECK(read.status().code() == GPUSHARE_MALFORMED_INPUT);
    CHECK(read.status().message().find("f: ") == 0);
    CHECK(read.status().message().find(why) != std::string::npos);
  };
  // GLOBAL and REDUCE, INST, and the name on the stack: "call os.system". Nothing is imported.
  refused(bytes({0x80, 2}) + "cos\nsystem\n(U\x02idtR.", "it names os.system");
  refused(bytes({0x80, 2}) + "(ios\nsystem\n.", "it names os.system");
  refused(bytes({0x80, 4, 0x8c, 2}) + "os" + bytes({0x8c, 6}) + "system" + bytes({0x93, '.'}),
          "it names os.system");
  // An object of somebody else's store, and an extension by its number.
  refused(bytes({0x80, 2}) + "Pkey\n.", "");
  refused(bytes({0x80, 2, 0x82, 1, '.'}), "");
  // A list that contains itself.
  refused(bytes({0x80, 2, ']', 'q', 0, 'h', 0, 'a', '.'}), "recursion");
  // Lists of two of the last, forty deep: 2^40 values.
  std::string laughs = bytes({0x80, 2, ']', 'q', 0, '0'});
  for (int i = 0; i < 40; ++i) laughs += bytes({']', 'q', i + 1, '(', 'h', i, 'h', i, 'e', '0'});
  laughs += bytes({'h', 40, '.'});
  refused(laughs, "too many values");
  // Lengths and places of the memo that no file has.
  refused(bytes({0x80, 2, 'N', 'r', 255, 255, 255, 255, '.'}), "");
  refused(bytes({0x80, 2, 0x8d, 255, 255, 255, 255, 255, 255, 255, 255, '.'}), "");
  refused(sample().substr(0, 60), "");
}
