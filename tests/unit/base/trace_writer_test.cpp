// SPDX-License-Identifier: Apache-2.0
#include "base/trace_writer.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "support/catch.hpp"
#include "support/temporary_file.hpp"

namespace {

using gpushare::base::FileSink;
using gpushare::base::TraceWriter;
using gpushare::test::TemporaryFile;
using nlohmann::json;

json parse(const TemporaryFile& file) {
  return json::parse(file.text());
}

TEST_CASE("trace writer: what goes in comes out as JSON") {
  TemporaryFile file;
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
  const json events = parse(file)["traceEvents"];
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

TEST_CASE("trace writer: the text of a small trace") {
  TemporaryFile file;
  auto writer = TraceWriter::open(file.path());
  REQUIRE(writer.ok());
  const auto first = writer->add_group("g");
  const auto track = writer->add_track(first, "t");
  const auto second = writer->add_group("h");
  writer->slice(track, "s", 1'002, 34'567, {{"a", 1}, {"b", "x"}});
  writer->instant(track, "i", 999);
  writer->counter(second, "c", 0, {{"v", 2u}});
  REQUIRE(writer->close().ok());
  CHECK(file.text() == R"({"displayTimeUnit":"ms","traceEvents":[
{"ph":"M","pid":1,"tid":0,"name":"process_name","args":{"name":"g"}},
{"ph":"M","pid":1,"tid":0,"name":"process_sort_index","args":{"sort_index":1}},
{"ph":"M","pid":1,"tid":1,"name":"thread_name","args":{"name":"t"}},
{"ph":"M","pid":1,"tid":1,"name":"thread_sort_index","args":{"sort_index":1}},
{"ph":"M","pid":2,"tid":0,"name":"process_name","args":{"name":"h"}},
{"ph":"M","pid":2,"tid":0,"name":"process_sort_index","args":{"sort_index":2}},
{"ph":"X","pid":1,"tid":1,"name":"s","ts":1.002,"dur":34.567,"args":{"a":1,"b":"x"}},
{"ph":"i","pid":1,"tid":1,"name":"i","s":"t","ts":0.999},
{"ph":"C","pid":2,"tid":0,"name":"c","ts":0.000,"args":{"v":2}}
]}
)");
}

TEST_CASE("trace writer: the first and the last of each kind of UTF-8 sequence, and those beside them") {
  TemporaryFile file;
  auto writer = TraceWriter::open(file.path());
  REQUIRE(writer.ok());
  const auto track = writer->add_track(writer->add_group("g"), "t");
  const std::string good[] = {" ",
                              "\x7F",
                              "\xC2\x80",
                              "\xDF\xBF",
                              "\xE0\xA0\x80",
                              "\xED\x9F\xBF",
                              "\xEE\x80\x80",
                              "\xEF\xBF\xBF",
                              "\xF0\x90\x80\x80",
                              "\xF4\x8F\xBF\xBF"};
  // Alone or cut off, overlong, a surrogate, above U+10FFFF: each byte is replaced by itself.
  const std::string bad[] = {"\x80",         "\xBF",         "\xC1\xBF",         "\xC2",
                             "\xE1\x80",     "\xE0\x9F\xBF", "\xED\xA0\x80",     "\xF0\x8F\xBF\xBF",
                             "\xF0\x90\x80", "\xF1\x80\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80"};
  for (const std::string& text : good) writer->instant(track, text + "z", 0);
  for (const std::string& text : bad) writer->instant(track, text, 0);
  REQUIRE(writer->close().ok());
  const json events = parse(file)["traceEvents"];
  size_t at = 4;
  for (const std::string& text : good) CHECK(events[at++]["name"] == text + "z");
  for (const std::string& text : bad) {
    std::string replaced;
    for (size_t i = 0; i < text.size(); ++i) replaced += "\xEF\xBF\xBD";
    CHECK(events[at++]["name"] == replaced);
  }
  CHECK(events.size() == at);
}

TEST_CASE("trace writer: an empty trace and a large one are valid") {
  TemporaryFile file;
  {
    auto writer = TraceWriter::open(file.path());
    REQUIRE(writer.ok());
    REQUIRE(writer->close().ok());
  }
  CHECK(parse(file)["traceEvents"].empty());
  auto writer = TraceWriter::open(file.path());
  REQUIRE(writer.ok());
  const auto track = writer->add_track(writer->add_group("g"), "t");
  for (uint64_t i = 0; i < 5000; ++i) writer->slice(track, "s", i * 10, 10);
  REQUIRE(writer->close().ok());
  CHECK(parse(file)["traceEvents"].size() == 5004);
}

TEST_CASE("files take their place whole or not at all") {
  TemporaryFile file;
  const auto content = [&] {
    std::ifstream in(file.path());
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
  };
  const auto beside = [&] {  // files in the folder whose name begins as ours
    size_t count = 0;
    const std::filesystem::path path(file.path());
    for (const auto& entry : std::filesystem::directory_iterator(path.parent_path()))
      count += entry.path().filename().string().starts_with(path.filename().string()) ? 1 : 0;
    return count;
  };
  FileSink first(file.path());
  first.write("first");
  CHECK(content().empty());  // not before close
  REQUIRE(first.close().ok());
  CHECK(content() == "first");
  {
    FileSink abandoned(file.path());
    abandoned.write("half");
  }
  CHECK(content() == "first");
  CHECK(beside() == 1);
  {
    FileSink moved_from(file.path());
    FileSink second(std::move(moved_from));
    second.put('2');
    REQUIRE(second.close().ok());
  }
  CHECK(content() == "2");

  // A symbolic link stays one; what it names is replaced.
  const std::string link = file.path() + ".link";
  REQUIRE(::symlink(file.path().c_str(), link.c_str()) == 0);
  FileSink through(link);
  through.write("through");
  REQUIRE(through.close().ok());
  CHECK(std::filesystem::is_symlink(link));
  CHECK(content() == "through");
  std::remove(link.c_str());
  CHECK(beside() == 1);

  FileSink full("/dev/full");
  full.write("x");
  CHECK(full.close().native_code() == ENOSPC);
  FileSink nowhere("/nonexistent-folder/file");
  CHECK(nowhere.failed());
  nowhere.write("x");
  CHECK(nowhere.close().message().find("/nonexistent-folder/file") != std::string::npos);
}

TEST_CASE("a file that cannot take its place leaves nothing behind") {
  char folder[] = "/tmp/gpushare-XXXXXX";
  REQUIRE(::mkdtemp(folder) != nullptr);
  const auto files = [&] {
    return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
  };
  const std::string path = std::string(folder) + "/file";
  {
    FileSink sink(path);
    REQUIRE_FALSE(sink.failed());
    sink.write("text");
    REQUIRE(std::filesystem::create_directories(path + "/inside"));  // in the way of the rename
    const auto status = sink.close();
    CHECK(status.code() == GPUSHARE_IO_ERROR);
    CHECK((status.native_code() == EISDIR || status.native_code() == ENOTEMPTY));
  }
  CHECK(files() == 1);
  std::filesystem::remove_all(path);

  // A write that fails: the file that was there stays.
  FileSink before(path);
  before.write("before");
  REQUIRE(before.close().ok());
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &limit) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, limit.rlim_max};
  FileSink large(path);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  for (int i = 0; i < 4; ++i) large.write(std::string(8192, 'x'));
  const auto status = large.close();
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
  std::signal(SIGXFSZ, handler);
  CHECK(status.native_code() == EFBIG);
  CHECK(files() == 1);
  std::ifstream in(path);
  std::string text;
  in >> text;
  CHECK(text == "before");
  std::filesystem::remove_all(folder);
}

TEST_CASE("trace writer: without close there is no file") {
  TemporaryFile file;
  std::remove(file.path().c_str());
  {
    auto writer = TraceWriter::open(file.path());
    REQUIRE(writer.ok());
    writer->add_group("g");
  }
  CHECK_FALSE(std::filesystem::exists(file.path()));
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
