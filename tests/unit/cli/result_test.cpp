// Series, results, tables, exit codes.
// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cli/report.hpp"
#include "cli/run_options.hpp"
#include "cli/run_result.hpp"
#include "cli/series.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::cli;

namespace {

double integral_s(const Series& series, double covered_s) {
  double out = 0;
  const double width = static_cast<double>(series.bucket_ns()) * 1e-9;
  const auto buckets = series.buckets();
  for (size_t i = 0; i < buckets.size(); ++i)
    out += buckets[i].mean * std::min(width, covered_s - width * static_cast<double>(i));
  return out;
}

JobOutcome job(const char* name, double arrival, double start, double end) {
  JobOutcome out;
  out.name = name;
  out.arrival_s = arrival;
  out.start_s = start;
  out.end_s = end;
  return out;
}

RunResult two_policies() {
  RunResult result;
  result.device = result.label = "sim";
  result.jobs_file = "jobs.csv";
  result.capacity_bytes = uint64_t{16} << 30;
  for (const char* policy : {"fifo", "srtf"}) {
    PolicyRun run;
    run.policy = policy;
    run.jobs = {job("a", 0, 0, 10), job("b", 1, 2, 3)};
    run.makespan_s = 10;
    run.utilization = 0.5;
    run.lanes_open.set(0, 1);
    run.lanes_busy.add(0, 5'000'000'000);
    run.lanes_open.finish(10'000'000'000);
    summarize(run);
    result.policies.push_back(run);
  }
  return result;
}

}  // namespace

TEST_CASE("series: integrals survive any number of folds", "[cli]") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  Series set;
  Series add;
  double set_integral = 0;
  double add_integral = 0;
  uint64_t now = 0;
  double value = 0;
  for (int i = 0; i < 20000; ++i) {
    const uint64_t step = test::uniform(random, 0, 49'999'999);
    set_integral += value * static_cast<double>(step) * 1e-9;
    now += step;
    value = static_cast<double>(test::uniform(random, 0, 99));
    set.set(now, value);
    const uint64_t start = test::uniform(random, 0, now);
    const uint64_t length = test::uniform(random, 0, 2'999'999'999);
    add.add(start, start + length);
    add_integral += static_cast<double>(length) * 1e-9;
  }
  set.finish(now);
  CHECK(set.buckets().size() <= Series::kBuckets);
  CHECK(set.buckets().size() > Series::kBuckets / 4);
  CHECK(integral_s(set, static_cast<double>(now) * 1e-9) == Approx(set_integral).epsilon(1e-9));
  double added = 0;
  for (const Series::Bucket& bucket : add.buckets())
    added += bucket.mean * static_cast<double>(add.bucket_ns()) * 1e-9;
  CHECK(added == Approx(add_integral).epsilon(1e-9));
  CHECK(set.max() == 99);
}

TEST_CASE("series: a value that lasts no time shows in the maximum only", "[cli]") {
  Series series;
  series.set(0, 1);
  series.set(500'000, 7);
  series.set(500'000, 1);
  series.finish(1'000'000);
  REQUIRE_FALSE(series.buckets().empty());
  CHECK(series.buckets()[0].max == 7);
  CHECK(series.buckets()[0].mean == Approx(1));
}

TEST_CASE("percentiles by nearest rank", "[cli]") {
  CHECK(percentile({}, 0.5) == 0);
  const std::vector<double> ten{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  CHECK(percentile(ten, 0.5) == 5);
  CHECK(percentile(ten, 0.95) == 10);
  CHECK(percentile(ten, 0.9) == 9);
  CHECK(percentile(ten, 1.0) == 10);
  CHECK(percentile(ten, 0.001) == 1);
}

TEST_CASE("a summary counts completed jobs only", "[cli]") {
  PolicyRun run;
  run.jobs = {job("a", 1, 2, 5), job("b", 0, 3, 10)};
  run.jobs.push_back(job("too large", 0, 0, 0));
  run.jobs.back().state = JobOutcome::State::kRefused;
  summarize(run);
  CHECK(run.completed == 2);
  CHECK(run.refused == 1);
  CHECK(run.jct_mean_s == Approx(7));
  CHECK(run.queue_mean_s == Approx(2));
  CHECK(run.jct_p50_s == Approx(4));
  CHECK(run.jct_p95_s == Approx(10));
}

TEST_CASE("durations of a table share a unit", "[cli]") {
  CHECK(std::string(time_unit(12).name) == "s");
  CHECK(time_unit(12).number(1.5) == "1.50");
  CHECK(std::string(time_unit(567 * 60).name) == "min");
  CHECK(time_unit(567 * 60).number(279.84 * 60) == "279.8");
  CHECK(std::string(time_unit(1e6).name) == "h");
  CHECK(std::string(time_unit(1e8).name) == "days");
}

TEST_CASE("the table shows what there is to show", "[cli]") {
  RunResult result = two_policies();
  CHECK(render_table(result).find("refused") == std::string::npos);
  result.policies[0].jobs[0].state = JobOutcome::State::kRefused;
  summarize(result.policies[0]);
  CHECK(render_table(result).find("refused") != std::string::npos);
  result.notes = {"a note"};
  CHECK(render_table(result).find("- a note\n") != std::string::npos);
}

TEST_CASE("JSON and CSV of a result", "[cli]") {
  RunResult result = two_policies();
  result.policies[1].jobs[1].state = JobOutcome::State::kRefused;
  result.policies[1].jobs[1].name = "quoted \"b\", twice";
  result.policies[1].jobs[1].reason = "too large";
  summarize(result.policies[1]);
  const nlohmann::ordered_json json = to_json(result);
  CHECK(json["device"] == "sim");
  CHECK(json["policies"][0]["policy"] == "fifo");
  CHECK(json["policies"][0]["jobs"] == 2);
  CHECK(json["policies"][0]["jct_mean_s"] == Approx(6));
  CHECK(json["policies"][1]["not_completed"][0]["reason"] == "too large");
  const std::string csv = per_job_csv(result);
  CHECK(csv.find("fifo,a,completed,0,0,10,10,0,0,0,\n") != std::string::npos);
  CHECK(csv.find("srtf,\"quoted \"\"b\"\", twice\",refused,1,,,,,0,0,too large\n") != std::string::npos);
}

TEST_CASE("a report escapes what comes from files, and stands alone", "[cli]") {
  RunResult result = two_policies();
  result.jobs_file = "<script>alert(1)</script>.csv";
  result.policies[0].jobs[0].name = "<b>job</b>";
  result.policies[0].jobs[0].state = JobOutcome::State::kFailed;
  result.policies[0].jobs[0].reason = "a & b";
  summarize(result.policies[0]);
  result.notes = {"5 < 6"};
  const std::string page = render_report(result);
  CHECK(page.find("<script") == std::string::npos);
  CHECK(page.find("<b>job") == std::string::npos);
  CHECK(page.find("a &amp; b") != std::string::npos);
  CHECK(page.find("5 &lt; 6") != std::string::npos);
  CHECK(page.find("http") == std::string::npos);
  CHECK(page.find("nan") == std::string::npos);
}

TEST_CASE("a policy that completed fewer jobs is not reported as the quickest", "[cli]") {
  RunResult result = two_policies();
  const auto names_srtf = [&] {
    return render_report(result).find("<b>srtf</b> has the shortest mean") != std::string::npos;
  };
  result.policies[0].jobs[0].end_s += 10;  // fifo is slower
  summarize(result.policies[0]);
  CHECK(names_srtf());
  CHECK(render_report(result).find("class=\"best\"") != std::string::npos);
  result.policies[1].jobs[0].state = JobOutcome::State::kFailed;
  summarize(result.policies[1]);
  CHECK_FALSE(names_srtf());
  CHECK(render_report(result).find("class=\"best\"") == std::string::npos);
}

TEST_CASE("a report of nothing", "[cli]") {
  RunResult result;
  CHECK(render_report(result).find("</html>") != std::string::npos);
  result.policies.emplace_back();
  result.policies[0].policy = "fifo";
  result.policies[0].jobs.push_back(job("a", 0, 0, 0));
  result.policies[0].jobs[0].state = JobOutcome::State::kRefused;
  summarize(result.policies[0]);
  const std::string page = render_report(result);
  CHECK(page.find("No job completed") != std::string::npos);
  CHECK(page.find("nan") == std::string::npos);
}

TEST_CASE("text tables", "[cli]") {
  Table table;
  table.add_column("name", Table::Align::kLeft);
  table.add_column("long\ntitle", Table::Align::kRight);
  table.add_row({"\xC3\xA9t\xC3\xA9", "1"});  // three characters, five bytes
  table.add_row({"plain"});
  CHECK(table.to_string() ==
        "        long\n"
        "name   title\n"
        "-----  -----\n"
        "\xC3\xA9t\xC3\xA9        1\n"
        "plain\n");
}

TEST_CASE("wrapping keeps words whole", "[cli]") {
  CHECK(wrap("aa bb cc", 5, 2) == "aa bb\n  cc");
  CHECK(wrap("wordlongerthanwidth x", 5, 0) == "wordlongerthanwidth\nx");
  CHECK(wrap("", 5, 0).empty());
}

TEST_CASE("files of several policies", "[cli]") {
  CHECK(policy_path("out.json", "srtf", 0) == "out.json");
  CHECK(policy_path("out.json", "srtf", 1) == "out.srtf.json");
  CHECK(policy_path("dir.d/out", "srtf", 1) == "dir.d/out.srtf");
  CHECK(policy_path("dir/.hidden", "srtf", 2) == "dir/.hidden.srtf");
}

TEST_CASE("exit codes say who has to mend it", "[cli]") {
  CHECK(exit_code({}) == kExitOk);
  CHECK(exit_code({GPUSHARE_INVALID_ARGUMENT, "x"}) == kExitUsage);
  CHECK(exit_code({GPUSHARE_MALFORMED_INPUT, "x"}) == kExitUsage);
  CHECK(exit_code({GPUSHARE_NOT_FOUND, "x"}) == kExitUsage);
  CHECK(exit_code({GPUSHARE_UNAVAILABLE, "x"}) == kExitUnavailable);
  CHECK(exit_code({GPUSHARE_IO_ERROR, "x"}) == kExitFailed);
  CHECK(exit_code({GPUSHARE_DEVICE_OUT_OF_MEMORY, "x"}) == kExitFailed);
}
