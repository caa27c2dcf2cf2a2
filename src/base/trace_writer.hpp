// trace_writer.hpp: writes Chrome trace JSON ("Trace Event Format"), which opens in Perfetto and
// chrome://tracing. Events may come in any order of time. One writer for the executor's timeline and the
// simulator's, so that both look alike.
//
//   GPUSHARE_ASSIGN_OR_RETURN(base::TraceWriter writer, base::TraceWriter::open(path));
//   const auto lanes = writer.add_group("lanes");
//   const auto lane0 = writer.add_track(lanes, "lane 0");
//   writer.slice(lane0, "resnet50", start_ns, end_ns - start_ns, {{"iteration", 7}});
//   writer.counter(lanes, "memory", now_ns, {{"persistent_bytes", 1024}, {"ephemeral_bytes", 0}});
//   return writer.close();
//
// Threads: one thread at a time. Names are escaped; bytes that are not UTF-8 become U+FFFD.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "base/file_sink.hpp"
#include "base/status.hpp"

namespace gpushare::base {

// A key with a value, shown with an event. Holds no copies: valid during the call it is passed to.
struct TraceArgument {
  template <class Value>
  TraceArgument(std::string_view argument_key, Value argument_value) : key(argument_key) {
    if constexpr (std::is_floating_point_v<Value>)
      value = static_cast<double>(argument_value);
    else if constexpr (std::is_signed_v<Value>)
      value = static_cast<int64_t>(argument_value);
    else if constexpr (std::is_integral_v<Value>)
      value = static_cast<uint64_t>(argument_value);
    else
      value = std::string_view(argument_value);
  }
  std::string_view key;
  std::variant<uint64_t, int64_t, double, std::string_view> value;
};

class TraceWriter {
 public:
  using Arguments = std::initializer_list<TraceArgument>;
  // A group of tracks with a heading (a "process" in the format); a track in it (a "thread").
  struct Group {
    uint32_t id = 0;
  };
  struct Track {
    uint32_t group = 0;
    uint32_t id = 0;
  };

  // The file takes its place when close() succeeds: whole or not at all. Errors: IO_ERROR with errno.
  static Result<TraceWriter> open(const std::string& path);

  // Groups and tracks are shown in the order added.
  Group add_group(std::string_view name);
  Track add_track(Group group, std::string_view name);

  // An interval. Slices of one track must nest or be disjoint, else viewers drop them.
  void slice(Track track, std::string_view name, uint64_t start_ns, uint64_t duration_ns,
             Arguments arguments = {});
  // A point in time on a track.
  void instant(Track track, std::string_view name, uint64_t time_ns, Arguments arguments = {});
  // The values of a counter track from `time_ns` on; several keys are drawn stacked. At least one key.
  void counter(Group group, std::string_view name, uint64_t time_ns, Arguments values);
  // The same for keys that are known only at run time.
  void counter(Group group, std::string_view name, uint64_t time_ns, std::span<const TraceArgument> values);

  // Finishes the file. Errors: IO_ERROR of the first write that failed. No other call may follow; without this one
  // there is no file.
  Status close();

 private:
  explicit TraceWriter(FileSink file) : file_(std::move(file)) {}
  void begin_event(char phase, uint32_t group, uint32_t track, std::string_view name);
  void metadata(const char* what, uint32_t group, uint32_t track, std::string_view name);
  void sort_index(const char* what, uint32_t group, uint32_t track, uint32_t index);
  void put(std::string_view text);
  void put_number(uint64_t number);
  void put_microseconds(const char* key, uint64_t time_ns);
  void put_arguments(std::span<const TraceArgument> arguments);
  void flush();

  FileSink file_;
  std::string buffer_;
  uint32_t groups_ = 0;
  uint32_t tracks_ = 0;
  bool first_ = true;
};

}  // namespace gpushare::base
