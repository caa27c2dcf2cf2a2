// SPDX-License-Identifier: Apache-2.0
#include "memory/trace_io.hpp"

#include "base/flat_hash.hpp"

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

namespace gpushare::memory {
namespace {

constexpr uint64_t kMaxSizeBytes = uint64_t{1} << 50;
constexpr uint64_t kMaxTotalBytes = uint64_t{1} << 62;
constexpr uint64_t kMaxTime = uint64_t{1} << 62;
constexpr size_t kMaxOps = size_t{1} << 25;
constexpr size_t kMaxFileBytes = size_t{1} << 30;
constexpr size_t kMaxSnapshotValues = 30'000'000;  // some 2 GB as a tree

// Shortened and printable, for messages.
std::string quoted(std::string_view text) {
  std::string out = "'";
  for (char c : text.substr(0, 40)) out += c >= ' ' && c <= '~' ? c : '?';
  out += text.size() > 40 ? "...'" : "'";
  return out;
}

base::Status malformed(const std::string& name, size_t line, const std::string& what) {
  return {GPUSHARE_MALFORMED_INPUT, name + ":" + std::to_string(line) + ": " + what};
}

base::Status bad_field(const std::string& name, size_t line, std::string_view field, std::string_view value,
                       const char* allowed) {
  return malformed(name, line,
                   "field '" + std::string(field) + "' is " + quoted(value) + "; allowed: " + allowed);
}

bool parse_number(std::string_view text, int base, uint64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out, base);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

// Decimal, or hexadecimal after 0x; C libraries write a null pointer as (nil).
bool parse_pointer(std::string_view text, uint64_t* out) {
  *out = 0;
  if (text == "(nil)") return true;
  if (text.substr(0, 2) == "0x" || text.substr(0, 2) == "0X") return parse_number(text.substr(2), 16, out);
  return parse_number(text, 10, out);
}

// Lines of a text one by one, without their end (\n or \r\n). Blank lines at the end do not count.
class Lines {
 public:
  explicit Lines(std::string_view text) : text_(text) {
    ended_ = text_.ends_with('\n');
    while (!text_.empty() && (text_.back() == '\n' || text_.back() == '\r')) text_.remove_suffix(1);
  }
  bool next(std::string_view* line) {
    if (done_ || text_.empty()) return false;
    const size_t end = text_.find('\n');
    *line = text_.substr(0, end);
    if (end == std::string_view::npos) {
      done_ = true;
    } else {
      text_.remove_prefix(end + 1);
    }
    if (!line->empty() && line->back() == '\r') line->remove_suffix(1);
    ++number_;
    return true;
  }
  size_t number() const { return number_; }      // of the line last returned, from 1
  bool cut() const { return done_ && !ended_; }  // that line is the last and does not end: it may be cut off

 private:
  std::string_view text_;
  size_t number_ = 0;
  bool done_ = false, ended_ = false;
};

constexpr size_t kMaxFields = 16;
using Fields = std::array<std::string_view, kMaxFields>;

// The number of fields, or kMaxFields + 1 if there are more than fit.
size_t split(std::string_view line, Fields* fields) {
  size_t count = 0;
  for (;;) {
    if (count == kMaxFields) return kMaxFields + 1;
    const size_t end = line.find(',');
    (*fields)[count++] = line.substr(0, end);
    if (end == std::string_view::npos) return count;
    line.remove_prefix(end + 1);
  }
}

std::string_view first_line(std::string_view text) {
  std::string_view line;
  return Lines(text).next(&line) ? line : std::string_view();
}

constexpr std::string_view kRmmHeader = "Thread,Time,Action,Pointer,Size,Stream";
constexpr std::string_view kOldRmmHeader = "Event Type,Device ID,Address,Stream,Size (bytes)";  // and more

// The live blocks by address, kept up to date line by line.
class LiveBlocks {
 public:
  explicit LiveBlocks(LoadedTrace* loaded) : loaded_(loaded) {}
  uint64_t live_bytes() const { return builder_.live_bytes(); }

  void allocate(uint64_t address, uint64_t size) {
    const auto [entry, inserted] = live_.try_emplace(address, 0);
    if (!inserted) {  // its free has happened, but is written later
      builder_.free(entry->second);
      ++owed_[address];
      ++loaded_->early_frees;
    }
    entry->second = builder_.allocate(size);
  }
  void free(uint64_t address) {
    const auto owed = owed_.find(address);
    if (owed != owed_.end() && owed->second > 0) {
      --owed->second;
      return;
    }
    const auto entry = live_.find(address);
    if (entry == live_.end()) {
      ++loaded_->skipped_frees;
      return;
    }
    builder_.free(entry->second);
    live_.erase(entry);
  }
  // The size of the live block; 0 if there is none, or if a free is owed.
  uint64_t size_of(uint64_t address) {
    const auto owed = owed_.find(address);
    const auto entry = live_.find(address);
    return entry == live_.end() || (owed != owed_.end() && owed->second > 0)
               ? 0
               : builder_.size_bytes(entry->second);
  }
  Trace take() { return builder_.take(); }

 private:
  LoadedTrace* loaded_;
  TraceBuilder builder_;
  base::FlatHashMap<uint64_t, uint32_t> live_;
  base::FlatHashMap<uint64_t, uint32_t>
      owed_;  // frees that are still to be written of blocks that have ended
};
constexpr const char* kSizeAllowed = "a whole number of bytes from 1 to 2^50";
constexpr const char* kTimeAllowed = "a whole number from 0 to 2^62";

}  // namespace

base::Result<std::vector<Buffer>> parse_lifetimes(std::string_view text, const std::string& name) {
  Lines lines(text);
  std::string_view line;
  Fields fields;
  if (!lines.next(&line)) return malformed(name, 1, "empty; expected the header id,lower,upper,size");
  const size_t columns = split(line, &fields);
  constexpr std::array<std::string_view, 4> kNames = {"id", "lower", "upper", "size"};
  std::array<size_t, 4> column = {kMaxFields, kMaxFields, kMaxFields, kMaxFields};
  if (columns <= kMaxFields) {
    for (size_t k = 0; k < columns; ++k) {
      size_t which = 0;
      while (which < kNames.size() && kNames[which] != fields[k]) ++which;
      if (which == kNames.size() || column[which] != kMaxFields)
        return bad_field(name, 1, "header", fields[k], "id, lower, upper, size, each once");
      column[which] = k;
    }
  }
  if (columns != kNames.size())
    return malformed(name, 1, "header is " + quoted(line) + "; allowed: id,lower,upper,size in any order");

  std::vector<Buffer> buffers;
  base::FlatHashSet<std::string_view> ids;
  uint64_t total = 0;
  while (lines.next(&line)) {
    const size_t found = split(line, &fields);
    if (found != columns)
      return malformed(name, lines.number(),
                       "has " + (found > kMaxFields ? "too many" : std::to_string(found)) +
                           " fields; allowed: 4, as the header");
    const std::string_view id = fields[column[0]];
    if (id.empty() || id.size() > 256)
      return bad_field(name, lines.number(), "id", id, "1 to 256 characters");
    if (!ids.insert(id).second) return bad_field(name, lines.number(), "id", id, "an id not used before");
    Buffer buffer{};
    if (!parse_number(fields[column[1]], 10, &buffer.lower) || buffer.lower > kMaxTime)
      return bad_field(name, lines.number(), "lower", fields[column[1]], kTimeAllowed);
    if (!parse_number(fields[column[2]], 10, &buffer.upper) || buffer.upper > kMaxTime)
      return bad_field(name, lines.number(), "upper", fields[column[2]], kTimeAllowed);
    if (buffer.upper <= buffer.lower)
      return bad_field(name, lines.number(), "upper", fields[column[2]], "a time above lower");
    if (!parse_number(fields[column[3]], 10, &buffer.size_bytes) || buffer.size_bytes == 0 ||
        buffer.size_bytes > kMaxSizeBytes)
      return bad_field(name, lines.number(), "size", fields[column[3]], kSizeAllowed);
    total += buffer.size_bytes;
    if (total > kMaxTotalBytes)
      return malformed(name, lines.number(), "sizes add up to more than 2^62 bytes");
    if (buffers.size() == kMaxOps / 2)
      return malformed(name, lines.number(), "more than 2^24 buffers, the most allowed");
    buffers.push_back(buffer);
  }
  return buffers;
}

base::Result<LoadedTrace> parse_lifetimes_csv(std::string_view text, const std::string& name) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::vector<Buffer> buffers, parse_lifetimes(text, name));
  LoadedTrace loaded;
  loaded.format = TraceFormat::kLifetimes;
  loaded.trace = trace_of(buffers);
  return loaded;
}

namespace {

struct RmmLine {
  enum class Action { kAllocate, kFree, kNothing } action = Action::kNothing;
  uint64_t pointer = 0, size = 0;
  bool sized = true;  // the line says the size of what is freed
};

base::Status read_rmm(const Fields& fields, const std::string& name, size_t number, RmmLine* out) {
  uint64_t stream = 0;
  const std::string_view action = fields[2];
  if (action != "allocate" && action != "free" && action != "allocate failure")
    return bad_field(name, number, "Action", action, "allocate, free, allocate failure");
  if (!parse_pointer(fields[3], &out->pointer))
    return bad_field(name, number, "Pointer", fields[3], "an address, decimal or hexadecimal after 0x");
  if (!parse_number(fields[4], 10, &out->size) || out->size > kMaxSizeBytes)
    return bad_field(name, number, "Size", fields[4], "a whole number of bytes from 0 to 2^50");
  if (!parse_pointer(fields[5], &stream))
    return bad_field(name, number, "Stream", fields[5], "a stream handle, decimal or hexadecimal after 0x");
  if (action == "allocate failure" || out->size == 0) return {};  // took no memory
  out->action = action == "free" ? RmmLine::Action::kFree : RmmLine::Action::kAllocate;
  return {};
}

base::Status read_old_rmm(const Fields& fields, const std::string& name, size_t number, RmmLine* out) {
  if (fields[0] != "Alloc" && fields[0] != "Free")
    return bad_field(name, number, "Event Type", fields[0], "Alloc, Free");
  if (!parse_pointer(fields[2], &out->pointer))
    return bad_field(name, number, "Address", fields[2], "an address, decimal or hexadecimal after 0x");
  if (!parse_number(fields[4], 10, &out->size) || out->size > kMaxSizeBytes)
    return bad_field(name, number, "Size (bytes)", fields[4], "a whole number of bytes from 0 to 2^50");
  if (out->pointer == 0) return {};
  out->sized = false;
  if (fields[0] == "Free")
    out->action = RmmLine::Action::kFree;
  else if (out->size > 0)
    out->action = RmmLine::Action::kAllocate;
  return {};
}

}  // namespace

base::Result<LoadedTrace> parse_rmm_csv(std::string_view text, const std::string& name) {
  Lines lines(text);
  std::string_view header, line;
  const bool any = lines.next(&header), old = any && header.starts_with(kOldRmmHeader);
  if (!any || (!old && header != kRmmHeader))
    return malformed(name, 1, "header is " + quoted(header) + "; allowed: " + std::string(kRmmHeader));
  LoadedTrace loaded;
  loaded.format = TraceFormat::kRmm;
  LiveBlocks blocks(&loaded);
  Fields fields;
  const size_t columns = split(header, &fields);
  std::optional<std::string> device;
  size_t ops = 0;
  while (lines.next(&line)) {
    const size_t number = lines.number();
    if (line == header) continue;  // a log that was appended to
    const size_t found = split(line, &fields);
    if (found < columns && lines.cut()) {
      loaded.cut = true;
      break;
    }
    if (found != columns)
      return malformed(name, number,
                       "has " + (found > kMaxFields ? "too many" : std::to_string(found)) +
                           " fields; allowed: " + std::to_string(columns) + ", " + std::string(header));
    RmmLine read;
    GPUSHARE_RETURN_IF_ERROR(old ? read_old_rmm(fields, name, number, &read)
                                 : read_rmm(fields, name, number, &read));
    if (old) {
      if (!device) device = std::string(fields[1]);
      if (*device != fields[1])
        return bad_field(name, number, "Device ID", fields[1],
                         "one device, as in the lines before: split the log");
    }
    if (read.action == RmmLine::Action::kNothing) continue;
    if (++ops > kMaxOps) return malformed(name, number, "more than 2^25 operations, the most allowed");
    if (read.action == RmmLine::Action::kAllocate) {
      if (blocks.live_bytes() + read.size > kMaxTotalBytes)
        return malformed(name, number, "more than 2^62 bytes live at once");
      blocks.allocate(read.pointer, read.size);
      continue;
    }
    const uint64_t size = blocks.size_of(read.pointer);
    if (read.sized && size != 0 && size != read.size)
      return bad_field(name, number, "Size", fields[4], "the size the block was allocated with");
    blocks.free(read.pointer);
  }
  loaded.trace = blocks.take();
  return loaded;
}

namespace {

using Json = nlohmann::json;

// Where in a snapshot a message points: "file: device_traces[0][17]".
std::string at(const std::string& name, size_t device, size_t entry) {
  return name + ": device_traces[" + std::to_string(device) + "][" + std::to_string(entry) + "]";
}

base::Status bad_member(const std::string& where, const char* key, const char* allowed) {
  return {GPUSHARE_MALFORMED_INPUT, where + ": field '" + key + "' is missing or wrong; allowed: " + allowed};
}

std::optional<uint64_t> number_of(const Json& entry, const char* key) {
  const auto found = entry.find(key);
  if (found == entry.end() || !found->is_number_integer()) return std::nullopt;
  if (!found->is_number_unsigned() && found->get<int64_t>() < 0) return std::nullopt;
  return found->get<uint64_t>();
}

base::Status add_device_trace(const Json& events, size_t device, const std::string& name,
                              LoadedTrace* loaded) {
  // A block is back when its free has completed. Recordings without that event (other writers, older PyTorch)
  // mean the request.
  bool completes = false;
  for (const Json& event : events) {
    if (!event.is_object()) continue;
    const auto action = event.find("action");
    completes = completes || (action != event.end() && *action == "free_completed");
  }
  LiveBlocks blocks(loaded);
  for (size_t k = 0; k < events.size(); ++k) {
    const Json& event = events[k];
    const std::string where = at(name, device, k);
    if (!event.is_object()) return {GPUSHARE_MALFORMED_INPUT, where + ": is not an object"};
    const auto action = event.find("action");
    if (action == event.end() || !action->is_string()) return bad_member(where, "action", "a string");
    const std::string& verb = action->get_ref<const std::string&>();
    const bool is_alloc = verb == "alloc";
    if (!is_alloc && verb != (completes ? "free_completed" : "free_requested"))
      continue;  // segments, oom, snapshots
    const std::optional<uint64_t> address = number_of(event, "addr");
    if (!address) return bad_member(where, "addr", "an address, a whole number from 0");
    if (!is_alloc) {
      blocks.free(*address);
      continue;
    }
    const std::optional<uint64_t> size = number_of(event, "size");
    if (!size || *size > kMaxSizeBytes)
      return bad_member(where, "size", "a whole number of bytes from 0 to 2^50");
    if (*size == 0) continue;
    if (blocks.live_bytes() + *size > kMaxTotalBytes)
      return {GPUSHARE_MALFORMED_INPUT, where + ": more than 2^62 bytes live at once"};
    blocks.allocate(*address, *size);
  }
  loaded->trace = blocks.take();
  return {};
}

}  // namespace

namespace {

base::Result<Json> read_snapshot(std::string_view text, const std::string& name) {
  Json root;
  size_t values = 0;
  struct TooMany {};
  const Json::parser_callback_t count = [&](int, Json::parse_event_t event, Json&) {
    if (event != Json::parse_event_t::array_end && event != Json::parse_event_t::object_end &&
        ++values > kMaxSnapshotValues)
      throw TooMany();
    return true;
  };
  try {
    root = Json::parse(text.begin(), text.end(), count);
  } catch (const TooMany&) {
    return base::Status(GPUSHARE_MALFORMED_INPUT,
                        name + ": holds more than 30 million values, the most allowed");
  } catch (const Json::exception& error) {
    return base::Status(GPUSHARE_MALFORMED_INPUT, name + ": not JSON: " + error.what());
  }
  if (!root.is_object() || !root.contains("device_traces") || !root["device_traces"].is_array())
    return base::Status(
        GPUSHARE_MALFORMED_INPUT,
        name +
            ": field 'device_traces' is missing; allowed: a PyTorch memory snapshot, an object with "
            "a list of events for each device under 'device_traces'");
  const Json& traces = root["device_traces"];
  for (size_t k = 0; k < traces.size(); ++k) {
    if (!traces[k].is_array())
      return base::Status(GPUSHARE_MALFORMED_INPUT,
                          name + ": device_traces[" + std::to_string(k) + "] is not a list");
    if (traces[k].size() > kMaxOps)
      return base::Status(GPUSHARE_MALFORMED_INPUT,
                          name + ": device_traces[" + std::to_string(k) + "] holds more than 2^25 events");
  }
  return root;
}

}  // namespace

base::Result<std::vector<LoadedTrace>> parse_snapshot_devices(std::string_view text,
                                                              const std::string& name) {
  GPUSHARE_ASSIGN_OR_RETURN(const Json root, read_snapshot(text, name));
  const Json& traces = root["device_traces"];
  std::vector<LoadedTrace> all;
  for (size_t k = 0; k < traces.size(); ++k) {
    if (traces[k].empty()) continue;
    LoadedTrace loaded;
    loaded.format = TraceFormat::kSnapshot;
    loaded.device = static_cast<int>(k);
    GPUSHARE_RETURN_IF_ERROR(add_device_trace(traces[k], k, name, &loaded));
    all.push_back(std::move(loaded));
  }
  if (all.empty())
    return base::Status(GPUSHARE_MALFORMED_INPUT, name + ": holds no events; record with history enabled");
  return all;
}

base::Result<LoadedTrace> parse_snapshot_json(std::string_view text, const std::string& name, int device) {
  GPUSHARE_ASSIGN_OR_RETURN(std::vector<LoadedTrace> all, parse_snapshot_devices(text, name));
  if (device < 0 && all.size() > 1)
    return base::Status(GPUSHARE_MALFORMED_INPUT, name + ": holds traces of devices " +
                                                      std::to_string(all[0].device) + " and " +
                                                      std::to_string(all[1].device) + "; choose one device");
  for (LoadedTrace& loaded : all)
    if (device < 0 || loaded.device == device) return std::move(loaded);
  return base::Status(GPUSHARE_MALFORMED_INPUT,
                      name + ": holds no trace of device " + std::to_string(device));
}

base::Result<LoadedTrace> parse_trace(std::string_view text, const std::string& name, int device) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);  // a byte order mark
  const size_t start = text.find_first_not_of(" \t\r\n");
  if (start == std::string_view::npos) return malformed(name, 1, "is empty");
  if (text[start] == '{') return parse_snapshot_json(text, name, device);
  if (text[0] == '\x80')
    return base::Status(
        GPUSHARE_UNSUPPORTED,
        name + ": is a Python pickle, which `gpushare replay` reads; here the snapshot must be JSON");
  const std::string_view header = first_line(text);
  if (header == kRmmHeader || header.starts_with(kOldRmmHeader)) return parse_rmm_csv(text, name);
  if (header.starts_with("(dp") || header.starts_with("}q"))
    return base::Status(
        GPUSHARE_UNSUPPORTED,
        name +
            ": is a Python pickle of protocol 0 or 1; write it again with protocol 4: python3 -c "
            "\"import pickle,sys; pickle.dump(pickle.load(open(sys.argv[1],'rb')), "
            "open(sys.argv[2],'wb'), 4)\" IN OUT");
  if (header.find("lower") != std::string_view::npos) return parse_lifetimes_csv(text, name);
  return malformed(name, 1,
                   "first line is " + quoted(header) + "; allowed: id,lower,upper,size or " +
                       std::string(kRmmHeader) + " or a PyTorch memory snapshot in JSON");
}

base::Result<LoadedTrace> read_trace(const std::string& path, int device) {
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (file == nullptr) {
    const int error = errno;
    return base::Status(error == ENOENT ? GPUSHARE_NOT_FOUND : GPUSHARE_IO_ERROR,
                        "cannot open " + path + ": " + std::strerror(error), error);
  }
  std::string text;
  std::array<char, 1 << 16> buffer{};
  for (size_t got = 0; (got = std::fread(buffer.data(), 1, buffer.size(), file.get())) != 0;) {
    text.append(buffer.data(), got);
    if (text.size() > kMaxFileBytes)
      return base::Status(GPUSHARE_MALFORMED_INPUT, path + ": is larger than 1 GiB, the most allowed");
  }
  if (std::ferror(file.get()) != 0) {
    const int error = errno;
    return base::Status(GPUSHARE_IO_ERROR, "cannot read " + path + ": " + std::strerror(error), error);
  }
  return parse_trace(text, path, device);
}

}  // namespace gpushare::memory
