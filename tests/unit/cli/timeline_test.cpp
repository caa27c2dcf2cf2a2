// The bounded timeline, and merging traces.
// SPDX-License-Identifier: Apache-2.0
#include "cli/timeline.hpp"

#include <unistd.h>

#include <map>
#include <nlohmann/json.hpp>

#include "cli/output.hpp"
#include "cli/trace_merge.hpp"
#include "sim/csv.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::cli;

namespace {

class TemporaryFile {
 public:
  explicit TemporaryFile(const char* suffix) : path_("unit_cli." + std::to_string(::getpid()) + suffix) {}
  ~TemporaryFile() { (void)::unlink(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

nlohmann::json written(Timeline& timeline, const std::string& path) {
  auto writer = base::TraceWriter::open(path);
  REQUIRE(writer.ok());
  timeline.write(*writer, "fifo");
  REQUIRE(writer->close().ok());
  auto text = gpushare::sim::read_text(path);
  REQUIRE(text.ok());
  nlohmann::json trace = nlohmann::json::parse(*text);
  return trace.is_array() ? trace : trace["traceEvents"];
}

}  // namespace

TEST_CASE("timeline: slices stay within the limit and keep every lane's time", "[cli]") {
  constexpr size_t kLimit = 1000;
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  Timeline timeline(kLimit);
  std::map<uint32_t, uint64_t> busy;
  std::map<uint32_t, uint64_t> at;
  uint64_t iterations = 0;
  for (sched::SessionId id = 1; id <= 5; ++id) {
    const std::string name = "job" + std::to_string(id);
    timeline.session({0, id, sim::SessionStep::kArrived, sched::kNoLane, 0, name});
  }
  for (int i = 0; i < 50'000; ++i) {
    const auto lane = static_cast<uint32_t>(test::uniform(random, 0, 2));
    const uint64_t length = 1'000 + test::uniform(random, 0, 4'999'999);
    timeline.iterations(lane, 1 + test::uniform(random, 0, 4), at[lane], at[lane] + length, 2);
    iterations += 2;
    busy[lane] += length;
    at[lane] += length;
    timeline.memory(at[lane] / 3, test::uniform(random, 0, 999), test::uniform(random, 0, 999),
                    test::uniform(random, 0, 999));
  }
  CHECK(timeline.resolution_ns() > 0);

  const TemporaryFile file(".trace.json");
  const nlohmann::json events = written(timeline, file.path());
  std::map<std::string, std::string> track_names;
  std::map<std::string, double> by_track;
  size_t slices = 0;
  size_t counters = 0;
  uint64_t counted = 0;
  const auto key = [](const nlohmann::json& e) { return e["pid"].dump() + "/" + e["tid"].dump(); };
  for (const auto& e : events)
    if (e["ph"] == "M" && e["name"] == "thread_name") track_names[key(e)] = e["args"]["name"];
  for (const auto& e : events) {
    if (e["ph"] == "C") {
      ++counters;
      CHECK((e["name"] == "promised bytes" || e["name"] == "ephemeral bytes in use"));  // as on a device
    }
    if (e["ph"] != "X" || !e.contains("args") || !e["args"].contains("iterations")) continue;
    ++slices;
    counted += e["args"]["iterations"].get<uint64_t>();
    by_track[track_names[key(e)]] += e["dur"].get<double>();
  }
  CHECK(slices <= kLimit);
  CHECK(slices > kLimit / 8);
  CHECK(counters <= kLimit);
  CHECK(counted == iterations);
  for (const auto& [lane, ns] : busy)
    CHECK(by_track["lane " + std::to_string(lane)] == Approx(static_cast<double>(ns) / 1e3).epsilon(1e-6));
}

TEST_CASE("timeline: a session's life", "[cli]") {
  Timeline timeline;
  using sim::SessionStep;
  timeline.session({0, 1, SessionStep::kArrived, sched::kNoLane, 0, "a"});
  timeline.session({10'000, 1, SessionStep::kAdmitted, 0});
  timeline.session({20'000, 1, SessionStep::kPagingOut, 0, 5});
  timeline.session({30'000, 1, SessionStep::kPagedOut});
  timeline.session({40'000, 1, SessionStep::kPagingIn, 0, 5});
  timeline.session({50'000, 1, SessionStep::kPagedIn, 0});
  timeline.session({60'000, 1, SessionStep::kLeft});
  timeline.session({0, 2, SessionStep::kArrived, sched::kNoLane, 0, "b"});
  timeline.session({0, 2, SessionStep::kRefused, sched::kNoLane, 0, "too large"});
  timeline.iterations(0, 1, 10'000, 20'000, 1);
  timeline.iterations(0, 1, 20'000, 25'000, 1);
  CHECK(timeline.resolution_ns() == 0);
  const TemporaryFile file(".trace.json");
  std::vector<std::string> names;
  size_t slices = 0;
  for (const auto& e : written(timeline, file.path())) {
    if (e["ph"] == "X" && e["args"].contains("bytes")) names.push_back(e["name"]);
    if (e["ph"] == "X" && e["args"].contains("iterations")) {
      ++slices;
      CHECK(e["args"]["iterations"] == 2);
    }
    if (e["ph"] == "i") CHECK(e["args"]["reason"] == "too large");
  }
  CHECK(names ==
        std::vector<std::string>{"queued", "resident", "paging out", "paged out", "paging in", "resident"});
  CHECK(slices == 1);
}

TEST_CASE("traces of several runs become one", "[cli]") {
  const TemporaryFile one(".1.json");
  const TemporaryFile two(".2.json");
  const TemporaryFile out(".out.json");
  for (const TemporaryFile* file : {&one, &two}) {
    auto writer = base::TraceWriter::open(file->path());
    REQUIRE(writer.ok());
    const auto group = writer->add_group("lanes");
    writer->slice(writer->add_track(group, "lane 0"), "job", 0, 10);
    REQUIRE(writer->close().ok());
  }
  REQUIRE(merge_traces({one.path(), two.path()}, {"fifo", "srtf"}, out.path()).ok());
  const nlohmann::json merged = nlohmann::json::parse(*gpushare::sim::read_text(out.path()));
  std::map<std::string, int64_t> groups;
  std::map<int64_t, int> slices;
  for (const auto& e : merged["traceEvents"]) {
    if (e["name"] == "process_name") groups[e["args"]["name"]] = e["pid"];
    if (e["ph"] == "X") ++slices[e["pid"]];
  }
  REQUIRE(groups.size() == 2);
  CHECK(groups["fifo: lanes"] != groups["srtf: lanes"]);
  CHECK(slices[groups["fifo: lanes"]] == 1);
  CHECK(slices[groups["srtf: lanes"]] == 1);

  REQUIRE(write_file(two.path(), "no json").ok());
  CHECK(merge_traces({one.path(), two.path()}, {"a", "b"}, out.path()).code() == GPUSHARE_MALFORMED_INPUT);
  CHECK(merge_traces({"does/not/exist"}, {"a"}, out.path()).code() == GPUSHARE_NOT_FOUND);
}

TEST_CASE("files are replaced whole or not at all", "[cli]") {
  const TemporaryFile file(".txt");
  REQUIRE(write_file(file.path(), "one").ok());
  REQUIRE(write_file(file.path(), "two").ok());
  CHECK(*gpushare::sim::read_text(file.path()) == "two");
  CHECK(write_file("no/such/folder/file", "x").code() == GPUSHARE_IO_ERROR);
  CHECK(write_file("/dev/full", "x").code() == GPUSHARE_IO_ERROR);
  CHECK(gpushare::sim::read_text("no/such/file").status().code() == GPUSHARE_NOT_FOUND);
  CHECK(gpushare::sim::read_text("/").status().code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("outputs are checked before the work", "[cli]") {
  const TemporaryFile file(".out");
  CHECK(check_files({}, {{"--x", ""}, {"--y", "/dev/null"}, {"--z", "/dev/null"}, {"--json", "-"}}).ok());
  CHECK(check_files({}, {{"--x", "/"}}).code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(check_files({}, {{"--x", "-"}}).code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(check_files({}, {{"--x", "no/such/folder/file"}}).message().find("--x") == 0);
  CHECK(check_files({{"--in", file.path()}}, {{"--x", "./" + file.path()}}).message().find("--in") !=
        std::string::npos);
  CHECK(check_files({}, {{"--x", file.path()}, {"--y", file.path()}}).code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(check_files({{"--in", "other"}}, {{"--x", file.path()}}).ok());
}
