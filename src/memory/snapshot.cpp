// SPDX-License-Identifier: Apache-2.0
#include "memory/snapshot.hpp"

#include <algorithm>

#include "base/file_sink.hpp"
#include "base/flat_hash.hpp"
#include "base/utf8.hpp"

namespace gpushare::memory {
namespace {

// The same calls make either format: values, lists and dicts whose entries are key() followed by a value.
class PickleEmitter {
 public:
  explicit PickleEmitter(base::FileSink& sink) : sink_(sink) { sink_.write(std::string_view("\x80\x02", 2)); }
  void finish() { sink_.put('.'); }

  void begin_dict() { sink_.write("}("); }
  void end_dict() { sink_.put('u'); }
  void begin_list() { sink_.write("]("); }
  void end_list() { sink_.put('e'); }
  // Keys recur: written once, then fetched from the memo.
  void key(std::string_view name) {
    const auto [entry, is_new] = memo_.try_emplace(std::string(name), static_cast<uint8_t>(memo_.size()));
    if (is_new) {
      string(name);
      sink_.put('q');
    } else {
      sink_.put('h');
    }
    sink_.put(static_cast<char>(entry->second));
  }
  void string(std::string_view text) {
    sink_.put('X');
    little_endian(text.size(), 4);
    sink_.write(text);
  }
  void integer(uint64_t value) {
    if (value < 0x80000000u) {
      sink_.put('J');
      little_endian(value, 4);
    } else {
      // As few bytes as hold it with the sign bit clear, as Python writes it: older viewers take at most eight.
      int bytes = 5;
      while (bytes < 9 && value >> (8 * bytes - 1) != 0) ++bytes;
      sink_.put('\x8a');
      sink_.put(static_cast<char>(bytes));
      little_endian(value, std::min(bytes, 8));
      if (bytes == 9) sink_.put('\0');
    }
  }
  void boolean(bool value) { sink_.put(value ? '\x88' : '\x89'); }
  void pair(uint64_t first, uint64_t second) {
    integer(first);
    integer(second);
    sink_.put('\x86');
  }

 private:
  void little_endian(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) sink_.put(static_cast<char>(value >> (8 * i)));
  }
  base::FileSink& sink_;
  base::FlatHashMap<std::string, uint8_t> memo_;  // some thirty keys
};

class JsonEmitter {
 public:
  explicit JsonEmitter(base::FileSink& sink) : sink_(sink) {}
  void finish() { sink_.put('\n'); }

  void begin_dict() { open('{'); }
  void end_dict() { close('}'); }
  void begin_list() { open('['); }
  void end_list() { close(']'); }
  void key(std::string_view name) {
    string(name);
    sink_.put(':');
    first_ = true;  // no comma before the value
  }
  void string(std::string_view text) {
    separate();
    std::string out;
    base::append_json(out, text);
    sink_.write(out);
  }
  void integer(uint64_t value) {
    separate();
    sink_.write(std::to_string(value));
  }
  void boolean(bool value) {
    separate();
    sink_.write(value ? "true" : "false");
  }
  void pair(uint64_t first, uint64_t second) {
    begin_list();
    integer(first);
    integer(second);
    end_list();
  }

 private:
  void separate() {
    if (!first_) sink_.put(',');
    first_ = false;
  }
  void open(char bracket) {
    separate();
    sink_.put(bracket);
    first_ = true;
  }
  void close(char bracket) {
    sink_.put(bracket);
    first_ = false;
  }
  base::FileSink& sink_;
  bool first_ = true;
};

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kModel:
      return "model";
    case Kind::kFramework:
      return "framework";
    case Kind::kEphemeral:
      return "ephemeral";
  }
  return "unknown";
}

std::string block_label(Kind kind, SessionId session, bool promoted, bool spilled) {
  return base::format("session %llu, %s%s%s", static_cast<unsigned long long>(session), kind_name(kind),
                      promoted ? ", promoted" : "", spilled ? ", in host memory" : "");
}

template <class Emitter, class Value>
void field(Emitter& out, std::string_view key, const Value& value) {
  out.key(key);
  if constexpr (std::is_same_v<Value, bool>)
    out.boolean(value);
  else if constexpr (std::is_integral_v<Value>)
    out.integer(static_cast<uint64_t>(value));
  else
    out.string(value);
}

// Where the viewer shows the stack of an allocation.
template <class Emitter>
void frames(Emitter& out, std::string_view label) {
  out.key("frames");
  out.begin_list();
  out.begin_dict();
  field(out, "name", label);
  field(out, "filename", "gpushare");
  field(out, "line", 0);
  out.end_dict();
  out.end_list();
}

template <class Emitter>
void block(Emitter& out, Address address, uint64_t size, uint64_t requested, const char* state,
           std::string_view label) {
  out.begin_dict();
  field(out, "address", address);
  field(out, "size", size);
  field(out, "requested_size", requested);
  field(out, "state", state);
  if (label.empty()) {
    out.key("frames");
    out.begin_list();
    out.end_list();
  } else {
    frames(out, label);
  }
  out.end_dict();
}

uint64_t size_of(const BlockInfo& info) {
  return (info.bytes + 255) / 256 * 256;
}

template <class Emitter>
void segment(Emitter& out, const MemorySnapshot& snapshot, const SegmentSnapshot& segment) {
  std::vector<BlockInfo> blocks = segment.blocks;
  std::sort(blocks.begin(), blocks.end(),
            [](const BlockInfo& a, const BlockInfo& b) { return a.address < b.address; });
  uint64_t active = 0, requested = 0;
  for (const BlockInfo& info : blocks) {
    active += size_of(info);
    requested += info.bytes;
  }
  out.begin_dict();
  field(out, "device", 0);
  field(out, "address", segment.address);
  field(out, "total_size", segment.bytes);
  field(out, "allocated_size", active);
  field(out, "active_size", active);
  field(out, "requested_size", requested);
  field(out, "stream", segment.stream);
  field(out, "segment_type", "large");
  out.key("segment_pool_id");
  out.pair(segment.session, 0);
  field(out, "is_expandable", snapshot.layout == Layout::kVirtual);
  frames(out, base::to_utf8(segment.name));
  out.key("blocks");
  out.begin_list();
  Address at = segment.address;
  for (const BlockInfo& info : blocks) {
    if (info.address > at) block(out, at, info.address - at, 0, "inactive", {});
    block(out, info.address, size_of(info), info.bytes, "active_allocated",
          block_label(info.kind, info.session, info.promoted, info.spilled));
    at = info.address + size_of(info);
  }
  if (at < segment.address + segment.bytes)
    block(out, at, segment.address + segment.bytes - at, 0, "inactive", {});
  out.end_list();
  out.end_dict();
}

template <class Emitter>
void trace_entry(Emitter& out, const char* action, const char* address_key, const AllocationEvent& event) {
  out.begin_dict();
  field(out, "action", action);
  field(out, address_key, event.address);
  field(out, "size", event.bytes);
  field(out, "stream", event.stream);
  field(out, "time_us", event.time_ns / 1000);
  frames(out, block_label(event.kind, event.session, false, false));
  out.end_dict();
}

template <class Emitter>
void emit(Emitter out, const MemorySnapshot& snapshot) {
  out.begin_dict();
  out.key("segments");
  out.begin_list();
  for (const SegmentSnapshot& s : snapshot.segments) segment(out, snapshot, s);
  out.end_list();
  out.key("device_traces");
  out.begin_list();
  out.begin_list();  // of the one device
  for (const AllocationEvent& event : snapshot.events) {
    switch (event.action) {
      case AllocationEvent::Action::kAlloc:
        trace_entry(out, "alloc", "addr", event);
        break;
      case AllocationEvent::Action::kFree:
        // A free takes effect at once in its stream's order.
        trace_entry(out, "free_requested", "addr", event);
        trace_entry(out, "free_completed", "addr", event);
        break;
      case AllocationEvent::Action::kOutOfMemory:
        trace_entry(out, "oom", "device_free", event);
        break;
    }
  }
  out.end_list();
  out.end_list();
  out.key("allocator_settings");
  out.begin_dict();
  field(out, "allocator", "gpushare");
  field(out, "layout", snapshot.layout == Layout::kVirtual ? "virtual" : "contiguous");
  field(out, "capacity_bytes", snapshot.capacity_bytes);
  field(out, "expandable_segments", snapshot.layout == Layout::kVirtual);
  out.end_dict();
  out.end_dict();
  out.finish();
}

}  // namespace

base::Status write_snapshot(const MemorySnapshot& snapshot, SnapshotFormat format, const std::string& path) {
  base::FileSink sink(path);
  if (!sink.failed()) {
    if (format == SnapshotFormat::kPickle)
      emit(PickleEmitter(sink), snapshot);
    else
      emit(JsonEmitter(sink), snapshot);
  }
  return sink.close();
}

}  // namespace gpushare::memory
