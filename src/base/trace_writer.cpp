// SPDX-License-Identifier: Apache-2.0
#include "base/trace_writer.hpp"

#include <charconv>
#include <cmath>
#include <utility>

#include "base/utf8.hpp"

namespace gpushare::base {
namespace {

constexpr size_t kFlushBytes = size_t{1} << 16;

}  // namespace

Result<TraceWriter> TraceWriter::open(const std::string& path) {
  FileSink file(path);
  if (file.failed()) return file.close();
  TraceWriter writer(std::move(file));
  writer.put("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
  return writer;
}

TraceWriter::Group TraceWriter::add_group(std::string_view name) {
  const Group group{++groups_};
  metadata("process_name", group.id, 0, name);
  sort_index("process_sort_index", group.id, 0, group.id);
  return group;
}

TraceWriter::Track TraceWriter::add_track(Group group, std::string_view name) {
  const Track track{group.id, ++tracks_};
  metadata("thread_name", group.id, track.id, name);
  sort_index("thread_sort_index", group.id, track.id, track.id);
  return track;
}

void TraceWriter::slice(Track track, std::string_view name, uint64_t start_ns, uint64_t duration_ns,
                        Arguments arguments) {
  begin_event('X', track.group, track.id, name);
  put_microseconds("ts", start_ns);
  put_microseconds("dur", duration_ns);
  put_arguments({arguments.begin(), arguments.size()});
}

void TraceWriter::instant(Track track, std::string_view name, uint64_t time_ns, Arguments arguments) {
  begin_event('i', track.group, track.id, name);
  put(",\"s\":\"t\"");
  put_microseconds("ts", time_ns);
  put_arguments({arguments.begin(), arguments.size()});
}

void TraceWriter::counter(Group group, std::string_view name, uint64_t time_ns, Arguments values) {
  counter(group, name, time_ns, std::span<const TraceArgument>(values.begin(), values.size()));
}

void TraceWriter::counter(Group group, std::string_view name, uint64_t time_ns,
                          std::span<const TraceArgument> values) {
  begin_event('C', group.id, 0, name);
  put_microseconds("ts", time_ns);
  put_arguments(values);
}

Status TraceWriter::close() {
  put("\n]}\n");
  flush();
  return file_.close();
}

void TraceWriter::begin_event(char phase, uint32_t group, uint32_t track, std::string_view name) {
  put(first_ ? "\n{\"ph\":\"" : ",\n{\"ph\":\"");
  first_ = false;
  buffer_.push_back(phase);
  put("\",\"pid\":");
  put_number(group);
  put(",\"tid\":");
  put_number(track);
  put(",\"name\":");
  append_json(buffer_, name);
}

void TraceWriter::metadata(const char* what, uint32_t group, uint32_t track, std::string_view name) {
  begin_event('M', group, track, what);
  const TraceArgument argument("name", name);
  put_arguments({&argument, 1});
}

void TraceWriter::sort_index(const char* what, uint32_t group, uint32_t track, uint32_t index) {
  begin_event('M', group, track, what);
  const TraceArgument argument("sort_index", index);
  put_arguments({&argument, 1});
}

void TraceWriter::put(std::string_view text) {
  buffer_.append(text);
}

void TraceWriter::put_number(uint64_t number) {
  char text[24];
  put({text, static_cast<size_t>(std::to_chars(text, text + sizeof text, number).ptr - text)});
}

// The format counts in microseconds; the fraction keeps the nanoseconds.
void TraceWriter::put_microseconds(const char* key, uint64_t time_ns) {
  put(",\"");
  put(key);
  put("\":");
  put_number(time_ns / 1000);
  const uint64_t rest = time_ns % 1000;
  const char fraction[] = {'.', static_cast<char>('0' + rest / 100), static_cast<char>('0' + rest / 10 % 10),
                           static_cast<char>('0' + rest % 10)};
  put({fraction, sizeof fraction});
}

// Writes the arguments and ends the event.
void TraceWriter::put_arguments(std::span<const TraceArgument> arguments) {
  if (!arguments.empty()) {
    put(",\"args\":{");
    bool first = true;
    for (const TraceArgument& argument : arguments) {
      if (!std::exchange(first, false)) buffer_.push_back(',');
      append_json(buffer_, argument.key);
      buffer_.push_back(':');
      if (const auto* text = std::get_if<std::string_view>(&argument.value)) {
        append_json(buffer_, *text);
      } else if (const auto* number = std::get_if<double>(&argument.value)) {
        put(std::isfinite(*number) ? format("%.17g", *number) : std::string("null"));
      } else if (const auto* integer = std::get_if<int64_t>(&argument.value)) {
        put(std::to_string(*integer));
      } else {
        put_number(std::get<uint64_t>(argument.value));
      }
    }
    buffer_.push_back('}');
  }
  buffer_.push_back('}');
  if (buffer_.size() >= kFlushBytes) flush();
}

void TraceWriter::flush() {
  file_.write(buffer_);
  buffer_.clear();
}

}  // namespace gpushare::base
