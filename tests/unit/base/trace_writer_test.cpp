// SPDX-License-Identifier: Apache-2.0
#include "base/trace_writer.hpp"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "support/catch.hpp"

namespace {

using gpushare::base::TraceWriter;
using nlohmann::json;

// A file of the test's own, removed at the end.
class ScratchFile {
 public:
  ScratchFile() {
    char name[] = "/tmp/gpushare_trace_XXXXXX";
    const int file = mkstemp(name);
    REQUIRE(file >= 0);
    close(file);
    path_ = name;
  }
  ~ScratchFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }
  json parse() const {
    std::ifstream in(path_);
    std::stringstream text;
    text << in.rdbuf();
    return json::parse(text.str());
  }

 private:
  std::string path_;
};

TEST_CASE("trace writer: what goes in comes out as JSON") {
  ScratchFile file;
  {
    auto writer = TraceWriter::open(file.path());
    REQUIRE(writer.ok());
    const auto group = writer->add_group("lanes");
    const auto track = writer->add_track(group, "lane 0");
    writer->slice(track, "it \"quoted\" \\ \n\x01 \xC3\xA9 \xFF \xED\xA0\x80", 1'234'567, 5'001,
                  {{"n", 7}, {"negative", -3}, {"share", 0.25}, {"why", "text"}, {"bad", std::nan("")}});
    writer->instant(track, "admitted", 18'446'744'073'709'551'615ull);
    writer->counter(group, "memory", 10, {{"a_bytes", uint64_t{1} << 40}, {"b_bytes", 0u}});
    REQUIRE(writer->close().ok());
  }
  const json events = file.parse()["traceEvents"];
  REQUIRE(events.size() == 7);
  CHECK(events[0]["name"] == "process_name");
  CHECK(events[0]["args"]["name"] == "lanes");
  CHECK(events[2]["args"]["name"] == "lane 0");
  const json& slice = events[4];
  CHECK(slice["ph"] == "X");
  CHECK(slice["ts"].get<double>() == Approx(1234.567));
  CHECK(slice["dur"].get<double>() == Approx(5.001));
  CHECK(slice["name"] ==
        "it \"quoted\" \\ \n\x01 \xC3\xA9 \xEF\xBF\xBD \xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
  CHECK(slice["args"]["n"] == 7);
  CHECK(slice["args"]["negative"] == -3);
  CHECK(slice["args"]["share"] == 0.25);
  CHECK(slice["args"]["why"] == "text");
  CHECK(slice["args"]["bad"].is_null());
  CHECK(slice["pid"] == events[2]["pid"]);
  CHECK(slice["tid"] == events[2]["tid"]);
  CHECK(events[5]["ph"] == "i");
  CHECK(events[6]["args"]["a_bytes"] == uint64_t{1} << 40);
}

TEST_CASE("trace writer: an empty trace and a large one are valid") {
  ScratchFile file;
  {
    auto writer = TraceWriter::open(file.path());
    REQUIRE(writer.ok());
  }  // the destructor closes
  CHECK(file.parse()["traceEvents"].empty());
  auto writer = TraceWriter::open(file.path());
  REQUIRE(writer.ok());
  const auto track = writer->add_track(writer->add_group("g"), "t");
  for (uint64_t i = 0; i < 5000; ++i) writer->slice(track, "s", i * 10, 10);
  REQUIRE(writer->close().ok());
  CHECK(file.parse()["traceEvents"].size() == 5004);
}

TEST_CASE("trace writer: failures are reported") {
  const auto missing = TraceWriter::open("/nonexistent-folder/trace.json");
  REQUIRE_FALSE(missing.ok());
  CHECK(missing.status().code() == GPUSHARE_IO_ERROR);
  CHECK(missing.status().message().find("/nonexistent-folder/trace.json") != std::string::npos);
  auto full = TraceWriter::open("/dev/full");
  REQUIRE(full.ok());
  const auto track = full->add_track(full->add_group("g"), "t");
  for (uint64_t i = 0; i < 5000; ++i) full->slice(track, "s", i, 1);
  const auto status = full->close();
  CHECK(status.code() == GPUSHARE_IO_ERROR);
  CHECK(status.native_code() == ENOSPC);
}

}  // namespace
