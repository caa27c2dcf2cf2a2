// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/dynamic_library.hpp"
#include "base/figures_text.hpp"
#include "base/log.hpp"
#include "base/move_budget.hpp"
#include "base/status.hpp"
#include "base/units.hpp"
#include "base/utf8.hpp"
#include "gpushare/gpushare.h"
#include "support/catch.hpp"

using namespace gpushare;

TEST_CASE("a status keeps code, message, native code and backend") {
  const base::Status ok;
  CHECK(ok.ok());
  CHECK(ok.message().empty());
  const base::Status bad(GPUSHARE_IO_ERROR, "cannot read x", 5, "host");
  CHECK_FALSE(bad.ok());
  CHECK(bad.code() == GPUSHARE_IO_ERROR);
  CHECK(bad.native_code() == 5);
  CHECK(bad.with_context("job 3").message() == "job 3: cannot read x");
  CHECK(bad.with_context("job 3").backend() == "host");
  CHECK(bad.to_string() == "IO_ERROR: cannot read x");
}

TEST_CASE("every status code has a name and no other number does") {
  int named = 0;
  for (int32_t code = 0; code < 1000; ++code)
    if (std::string(base::status_name(code)) != "UNRECOGNIZED") ++named;
  CHECK(named == 22);
  CHECK(std::string(base::status_name(-1)) == "UNRECOGNIZED");
}

TEST_CASE("sizes parse as people write them") {
  CHECK(*base::parse_bytes("4096") == 4096);
  CHECK(*base::parse_bytes("64KiB") == 65536);
  CHECK(*base::parse_bytes("1.5 GiB") == 1610612736);
  CHECK(*base::parse_bytes("16G") == 17179869184ull);
  CHECK(*base::parse_bytes("16GB") == 16000000000ull);
  CHECK(*base::parse_bytes("8EiB") == 1ull << 63);
  CHECK(*base::parse_bytes("9223372036854775808") == 1ull << 63);
  CHECK_FALSE(base::parse_bytes("9223372036854777856").ok());
  uint64_t binary = 1, decimal = 1;
  for (const char* prefix : {"K", "M", "G", "T", "P", "E"}) {
    const std::string letter = prefix;
    INFO(letter);
    binary *= 1024;
    decimal *= 1000;
    CHECK(*base::parse_bytes("2" + letter) == 2 * binary);
    CHECK(*base::parse_bytes("2 " + letter + "iB") == 2 * binary);
    CHECK(*base::parse_bytes("2  " + letter + "B") == 2 * decimal);
  }
  CHECK(*base::parse_bytes("3kB") == 3000);
  CHECK(*base::parse_bytes("3B") == 3);
  CHECK(*base::parse_bytes("0.5B") == 1);  // rounded
  CHECK(*base::parse_bytes("1.5E") == 3ull << 59);
  CHECK(*base::parse_size("8GiB") == uint64_t{8} << 30);
  CHECK(*base::parse_size("8B") == 8);
  CHECK(*base::parse_size("0") == 0);
  for (const char* text : {"8", "8.5", "8.", "17179869184"}) {
    const base::Status refused = base::parse_size(text).status();
    CHECK(refused.code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(refused.message() == "'" + std::string(text) + "' has no unit: " + text + "GiB or " + text + "B?");
  }
  CHECK(base::parse_bytes("9EiB").status().message().find("up to 8 EiB") != std::string::npos);
  for (const char* text : {"", "-1", "GiB", "1e3", "12XB", "1.2.3", "nan", "99999999TiB", " 4"}) {
    INFO(text);
    CHECK(base::parse_bytes(text).status().code() == GPUSHARE_INVALID_ARGUMENT);
  }
}

TEST_CASE("numbers parse whole or not at all") {
  CHECK(*base::parse_double("2.5e3") == 2500.0);
  CHECK(*base::parse_percent("100%") == 1.0);
  CHECK(*base::parse_percent("12.5%") == 0.125);
  for (const char* text : {"", "%", "30", "0%", "-1%", "100.1%", "nan%", "30%%", " 30%"})
    CHECK_FALSE(base::parse_percent(text).ok());
  CHECK(*base::parse_uint64("18446744073709551615") == UINT64_MAX);
  for (const char* text : {"", "1x", "inf", "nan", "0x10", "+1", "1e400"}) {
    INFO(text);
    CHECK_FALSE(base::parse_double(text).ok());
  }
  CHECK_FALSE(base::parse_uint64("-1").ok());
  CHECK_FALSE(base::parse_uint64("18446744073709551616").ok());
}

TEST_CASE("sizes and times print short") {
  CHECK(base::format_bytes(0) == "0 B");
  CHECK(base::format_bytes(1536) == "1.50 KiB");
  CHECK(base::format_bytes(1023) == "1023 B");
  CHECK(base::format_bytes(1024) == "1.00 KiB");
  CHECK(base::format_bytes(1 << 20) == "1.00 MiB");
  CHECK(base::format_bytes(3ull << 40) == "3.00 TiB");
  CHECK(base::format_bytes(UINT64_MAX) == "16.00 EiB");
  const std::pair<uint64_t, const char*> durations[] = {{0, "0 ns"},
                                                        {999, "999 ns"},
                                                        {1'000, "1.00 us"},
                                                        {1'000'000, "1.00 ms"},
                                                        {1'500'000, "1.50 ms"},
                                                        {1'000'000'000, "1.00 s"},
                                                        {90'000'000'000, "90.00 s"},
                                                        {120'000'000'000, "2.0 min"},
                                                        {7'200'000'000'000, "2.0 h"},
                                                        {9'000'000'000'000, "2.5 h"}};
  for (const auto& [ns, text] : durations) CHECK(base::format_duration_ns(ns) == text);
}

TEST_CASE("a deadline too far away never passes and does not overflow") {
  CHECK(base::Deadline::after(GPUSHARE_NO_TIMEOUT).never());
  CHECK(base::Deadline::after(0).passed());
  CHECK_FALSE(base::Deadline::after(3'600'000'000'000).passed());
}

TEST_CASE("the log sink gets lines of its level and more severe ones only") {
  std::vector<std::string> lines;
  base::set_log_sink(
      [](void* user, int32_t, const char* text) {
        static_cast<std::vector<std::string>*>(user)->emplace_back(text);
      },
      &lines, base::kWarning);
  base::log(base::kError, "a");
  base::log(base::kInfo, "b");
  base::set_log_sink(nullptr, nullptr, base::kWarning);
  CHECK(lines == std::vector<std::string>{"a"});
}

TEST_CASE("a library that is not there is UNAVAILABLE with the loader's reason") {
  const auto library = base::DynamicLibrary::open("libgpushare-no-such-thing.so");
  CHECK(library.status().code() == GPUSHARE_UNAVAILABLE);
  CHECK(library.status().message().find("libgpushare-no-such-thing.so") != std::string::npos);
}

TEST_CASE("a library that is there gives its symbols, and moves") {
  auto library = base::DynamicLibrary::open("libc.so.6");
  REQUIRE(library.ok());
  base::DynamicLibrary moved(std::move(*library));
  CHECK(moved.find("getpid") != nullptr);
  CHECK(moved.find("gpushare_no_such_symbol") == nullptr);
}

TEST_CASE("text of others is printable: well-formed, without control characters and directions") {
  CHECK(base::to_printable("plain, \u00fcml\u00e4ut, \u6f22\u5b57, \U0001F600") ==
        "plain, \u00fcml\u00e4ut, \u6f22\u5b57, \U0001F600");
  CHECK(base::to_printable(std::string_view("a\0b\x1b[31m\x7f\n\t", 11)) ==
        "a\ufffd"
        "b\ufffd[31m\ufffd\ufffd\ufffd");
  CHECK(base::to_printable_lines("a\n\tb\r\x1b") == "a\n\tb\ufffd\ufffd");
  const std::vector<std::string> unseen = {"\xc2\x80",        "\xc2\x9b",     "\xc2\x9f",     "\xc2\xad",
                                           "\xd8\x9c",        "\xe2\x80\x8b", "\xe2\x80\x8f", "\xe2\x80\xa8",
                                           "\xe2\x80\xae",    "\xe2\x81\xa6", "\xe2\x81\xa9", "\xef\xbb\xbf",
                                           "\xf3\xa0\x81\x81"};
  for (const std::string& character : unseen) CHECK(base::to_printable(character) == "\ufffd");
  for (const char* broken : {"\xff", "\xc3", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80"}) {
    const std::string text = base::to_printable(std::string("<") + broken + ">");
    CHECK(text == base::to_utf8(text));
    CHECK(text.front() == '<');
    CHECK(text.back() == '>');
  }
}

TEST_CASE("a status without memory keeps its code") {
  // Making one does not throw, which destructors rely on; faults_calls tries it.
  static_assert(noexcept(base::Status(GPUSHARE_INTERNAL, "why")));
  static_assert(noexcept(base::Status().with_context("where")));
  for (int32_t code = -1; code < 500; ++code)
    if (code != GPUSHARE_OK) CHECK(base::Status(code, "why").code() == code);
}

TEST_CASE("figures for Prometheus are escaped, and whole numbers are written whole") {
  gpushare::base::MetricsText text;
  text.gauge("gpushare_some_bytes", "Some bytes.");
  text.sample({{"name", "a\\b\"c\nd\xff"}, {"empty", ""}}, 9007199254740992.0);
  text.sample({}, 0.5);
  CHECK(text.text() ==
        "# HELP gpushare_some_bytes Some bytes.\n# TYPE gpushare_some_bytes gauge\n"
        "gpushare_some_bytes{name=\"a\\\\b\\\"c\\nd\xEF\xBF\xBD\",empty=\"\"} 9007199254740992\n"
        "gpushare_some_bytes 0.5\n");
}

TEST_CASE("a histogram's buckets are cumulative, and its count is the last of them") {
  gpushare::base::MetricsText text;
  text.histogram("gpushare_some_seconds", "Some time.");
  const double bounds[] = {0.0001, 2.5};
  const uint64_t counts[] = {3, 0, 1};
  text.buckets({{"name", "a"}}, bounds, counts, 7.25);
  CHECK(text.text() ==
        "# HELP gpushare_some_seconds Some time.\n# TYPE gpushare_some_seconds histogram\n"
        "gpushare_some_seconds_bucket{name=\"a\",le=\"0.0001\"} 3\n"
        "gpushare_some_seconds_bucket{name=\"a\",le=\"2.5\"} 3\n"
        "gpushare_some_seconds_bucket{name=\"a\",le=\"+Inf\"} 4\n"
        "gpushare_some_seconds_sum{name=\"a\"} 7.25\n"
        "gpushare_some_seconds_count{name=\"a\"} 4\n");
}

TEST_CASE("iterations are counted by device time and by slowdown, a bound in its own bucket") {
  gpushare::base::IterationHistogram histogram;
  histogram.add(100'000, 0);         // the first bound
  histogram.add(100'001, 100'001);   // twice its time
  histogram.add(60'000'000'000, 1);  // longer than every bound
  histogram.add(500'000, 200'000'000'000);
  histogram.add(0, 5'000);  // without device work nothing is known of its slowdown
  histogram.add(1'000'000, 0, 3);
  const auto counts = histogram.read();
  CHECK(counts.times[0] == 2);
  CHECK(counts.times[1] == 2);
  CHECK(counts.times[2] == 3);
  CHECK(counts.times[gpushare::base::kIterationBuckets - 1] == 1);
  CHECK(counts.time_ns == 100'000 + 100'001 + 60'000'000'000 + 500'000 + 3'000'000);
  CHECK(counts.slowdowns[0] == 6);
  CHECK(counts.slowdowns[3] == 1);
  CHECK(counts.slowdowns[gpushare::base::kSlowdownBuckets - 1] == 1);
  CHECK(counts.slowdown_milli == 6000 + 2000 + 400'001'000);
  histogram.reset();
  CHECK(histogram.read().slowdown_milli == 0);
  CHECK(gpushare::base::IterationHistogram::slowdown_of(1, UINT64_MAX) ==
        1'000'000'000);  // what is added stays sound
}

TEST_CASE("bytes move within a budget of bytes and of time, judged by those that have moved") {
  constexpr uint64_t kStep = 100;
  base::MovePart part({1000, 50}, 7);
  CHECK(part.next(7, kStep) == kStep);     // nobody knows yet how long it takes
  CHECK(part.next(9999, kStep) == kStep);  // and something always moves
  part.moved(kStep);
  CHECK(part.next(7 + 10, kStep) == 400);  // 10 ns a step, 40 are left
  CHECK(part.next(7 + 1, kStep) == 900);
  CHECK(part.next(7, kStep) == 900);
  CHECK(part.next(7 + 30, kStep) == 0);  // another one would take 30
  CHECK(part.next(7 + 51, kStep) == 0);
  part.moved(850);
  CHECK(part.next(7 + 1, kStep) == 0);  // less than a step is left
  CHECK(part.next(7 + 1, 1) == 50);
  base::MovePart patient({1000, base::MoveBudget::kUnlimited}, 0);
  CHECK(patient.next(0, 300) == 900);
  patient.moved(900);
  CHECK(patient.next(UINT64_MAX, 300) == 0);
  CHECK(base::MovePart({10, base::MoveBudget::kUnlimited}, 0).next(0, 300) == 300);
  CHECK(base::MovePart({UINT64_MAX, base::MoveBudget::kUnlimited}, 0).next(0, 1) == UINT64_MAX);
}
