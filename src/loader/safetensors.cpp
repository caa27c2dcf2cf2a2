// SPDX-License-Identifier: Apache-2.0
#include "loader/safetensors.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "loader/file.hpp"

namespace gpushare::loader {
namespace {

using Json = nlohmann::json;

base::Status malformed(const std::string& what) {
  return {GPUSHARE_MALFORMED_INPUT, what};
}

// A name from a file, short enough and plain enough for a message.
std::string shown(std::string_view name) {
  std::string out = "'";
  for (const char c : name.substr(0, 80))
    out += (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) ? '?' : c;
  return out + (name.size() > 80 ? "...'" : "'");
}

// Streams the JSON into tensors, so that the header never becomes a tree and a duplicate key is seen. Depth 1
// holds names, depth 2 a tensor's fields or the metadata, depth 3 the numbers of an array.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  base::Status error;
  std::vector<Tensor> tensors;
  std::vector<std::pair<std::string, std::string>> metadata;

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { return unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return unexpected("a number that is not whole and below 2^64");
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }
  bool number_unsigned(number_unsigned_t value) override {
    if (!in_array_) return unexpected("a number");
    if (field_ == Field::kOffsets && offsets_.size() == 2)
      return fail("data_offsets has more than two numbers");
    if (field_ == Field::kShape && tensors.back().shape.size() == 64)
      return fail("shape has more than 64 dimensions");
    (field_ == Field::kOffsets ? offsets_ : tensors.back().shape).push_back(value);
    return true;
  }
  bool string(string_t& value) override {
    if (depth_ == 2 && in_metadata_) {
      metadata.emplace_back(key_, value);
      return true;
    }
    if (depth_ != 2 || field_ != Field::kDtype || in_array_) return unexpected("a string");
    tensors.back().dtype = value;
    return true;
  }
  bool start_object(std::size_t) override {
    if (in_array_ || depth_ == 2 || (depth_ == 1 && key_.empty())) return unexpected("an object");
    ++depth_;
    if (depth_ == 2) {
      in_metadata_ = key_ == "__metadata__";
      if (!in_metadata_) {
        tensors.emplace_back();
        tensors.back().name = key_;
        offsets_.clear();
        seen_ = 0;
      }
      field_ = Field::kNone;
      keys_.clear();
    }
    return true;
  }
  bool key(string_t& value) override {
    key_ = value;
    if (depth_ == 1) {
      if (value.empty()) return fail("a tensor without a name");
      return names_.insert(value).second || fail("tensor " + shown(value) + " is there twice");
    }
    if (in_metadata_)
      return keys_.insert(value).second || fail("__metadata__ has the key " + shown(value) + " twice");
    field_ = value == "dtype"          ? Field::kDtype
             : value == "shape"        ? Field::kShape
             : value == "data_offsets" ? Field::kOffsets
                                       : Field::kNone;
    if (field_ == Field::kNone) return fail("has the unknown field " + shown(value));
    const unsigned bit = 1u << static_cast<unsigned>(field_);
    if ((seen_ & bit) != 0) return fail("has " + value + " twice");
    seen_ |= bit;
    return true;
  }
  bool end_object() override {
    --depth_;
    if (depth_ == 1 && !in_metadata_) {
      if (seen_ != 0b1110) return fail("lacks one of dtype, shape, data_offsets");
      if (offsets_.size() != 2) return fail("data_offsets must be two numbers");
      tensors.back().file_begin = offsets_[0];
      tensors.back().file_end = offsets_[1];
    }
    if (depth_ == 1) in_metadata_ = false;
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_array_ || in_metadata_ || (field_ != Field::kShape && field_ != Field::kOffsets))
      return unexpected("an array");
    in_array_ = true;
    return true;
  }
  bool end_array() override {
    in_array_ = false;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const Json::exception& why) override {
    if (error.ok())
      error = malformed(base::format("header: not JSON at byte %zu: ", position) +
                        std::string(why.what()).substr(0, 160));
    return false;
  }

 private:
  enum class Field : unsigned { kNone = 0, kDtype = 1, kShape = 2, kOffsets = 3 };

  bool fail(const std::string& what) {
    const bool inside = depth_ == 2 && !in_metadata_ && !tensors.empty();
    error = malformed("header: " + (inside ? "tensor " + shown(tensors.back().name) + ": " : std::string()) +
                      what);
    return false;
  }
  bool unexpected(const char* what) {
    return fail(std::string(what) + " where none is allowed" +
                (key_.empty() ? "" : " (at key " + shown(key_) + ")"));
  }

  int depth_ = 0;
  bool in_array_ = false;
  bool in_metadata_ = false;
  Field field_ = Field::kNone;
  unsigned seen_ = 0;
  std::string key_;
  std::vector<uint64_t> offsets_;
  std::unordered_set<std::string> names_;
  std::unordered_set<std::string> keys_;
};

// Bits of an element, for the types that are known.
uint64_t dtype_bits(std::string_view dtype) {
  static constexpr std::pair<std::string_view, uint32_t> kBits[] = {
      {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"BOOL", 8},        {"U8", 8},      {"I8", 8},
      {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F8_E8M0", 8}, {"U16", 16},
      {"I16", 16},    {"F16", 16},    {"BF16", 16},       {"U32", 32},        {"I32", 32},    {"F32", 32},
      {"U64", 64},    {"I64", 64},    {"F64", 64},        {"C64", 64},        {"C128", 128}};
  for (const auto& [name, bits] : kBits)
    if (name == dtype) return bits;
  return 0;
}

// A type that this reader does not know has a name like the others, because writers invent new types: the bytes of the
// tensor are then taken as they are.
bool is_dtype_name(std::string_view dtype) {
  return !dtype.empty() && dtype.size() <= 32 && dtype.front() >= 'A' && dtype.front() <= 'Z' &&
         std::all_of(dtype.begin(), dtype.end(),
                     [](char c) { return (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; });
}

base::Status check_size(const Tensor& tensor) {
  if (!is_dtype_name(tensor.dtype))
    return malformed("header: tensor " + shown(tensor.name) + ": dtype " + shown(tensor.dtype) +
                     " is no name of a type such as F32, BF16 or F8_E4M3");
  uint64_t elements = 1;
  for (const uint64_t dimension : tensor.shape)
    if (__builtin_mul_overflow(elements, dimension, &elements))
      return malformed("header: tensor " + shown(tensor.name) + ": its shape overflows 64 bits");
  const uint64_t known = dtype_bits(tensor.dtype);
  uint64_t bits = 0;
  uint64_t span = 0;  // of the data, in bits
  const bool fits = tensor.file_begin <= tensor.file_end &&
                    !__builtin_mul_overflow(tensor.bytes(), 8, &span) &&
                    !__builtin_mul_overflow(elements, known, &bits);
  // Elements of an unknown type take the same whole number of bits each.
  if (fits && (known != 0      ? span == bits
               : elements == 0 ? span == 0
                               : span >= elements && span % elements == 0))
    return {};
  return malformed(base::format(
      "header: tensor %s: data_offsets [%llu, %llu) do not span the %llu elements of its shape, each %s",
      shown(tensor.name).c_str(), static_cast<unsigned long long>(tensor.file_begin),
      static_cast<unsigned long long>(tensor.file_end), static_cast<unsigned long long>(elements),
      known == 0 ? "a whole number of bits"
                 : base::format("%llu bits", static_cast<unsigned long long>(known)).c_str()));
}

// What a file is that people take for a .safetensors file, by its first bytes; null: none of these. A header of 128 bytes
// begins as some pickles do.
const char* other_format(std::string_view begin) {
  static constexpr std::pair<std::string_view, const char*> kOthers[] = {
      {"version https://git-lfs", "a Git LFS pointer and not the file itself: fetch it with `git lfs pull`"},
      {"PK\x03\x04",
       "a PyTorch checkpoint (.bin, .pt) and not a .safetensors file: convert it with "
       "safetensors.torch.save_file"},
      {"\x80",
       "a pickle (.bin, .pt) and not a .safetensors file: convert it with safetensors.torch.save_file"},
      {"GGUF", "a GGUF file and not a .safetensors file"}};
  for (const auto& [magic, what] : kOthers)
    if (begin.substr(0, magic.size()) == magic && !(begin.size() > 8 && begin[8] == '{')) return what;
  return nullptr;
}

base::Status check_format(const File& file, const std::string& path) {
  char begin[32];
  const size_t bytes = static_cast<size_t>(std::min<uint64_t>(file.size(), sizeof begin));
  GPUSHARE_RETURN_IF_ERROR(file.read_at(0, begin, bytes));
  const char* const other = other_format({begin, bytes});
  return other == nullptr ? base::Status() : malformed(path + " is " + other);
}

bool ends_with(std::string_view text, std::string_view tail) {
  return text.size() >= tail.size() && text.substr(text.size() - tail.size()) == tail;
}

// weight_map of an index: tensor -> shard, duplicates refused.
base::Result<std::unordered_map<std::string, std::string>> parse_index(const std::string& json) {
  const char* wrong = nullptr;
  std::vector<std::unordered_set<std::string>> keys;
  const Json index = Json::parse(
      json,
      [&](int, Json::parse_event_t event, Json& parsed) {
        if (event == Json::parse_event_t::object_start) keys.emplace_back();
        if (event == Json::parse_event_t::object_end) keys.pop_back();
        if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
          wrong = "has a key twice";
        return true;
      },
      /*allow_exceptions=*/false);
  if (wrong != nullptr) return malformed(wrong);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object() || map->empty())
    return malformed("is not a JSON object with a weight_map of tensor names to shard files");
  std::unordered_map<std::string, std::string> out;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string())
      return malformed("weight_map: " + shown(tensor) + " is not mapped to a file name");
    const auto& name = shard.get_ref<const std::string&>();
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos)
      return malformed("weight_map: " + shown(tensor) + ": shard " + shown(name) +
                       " must be a plain file name beside the index");
    if (ends_with(name, ".bin"))
      return malformed("is an index of PyTorch checkpoints, such as " + shown(name) +
                       ", and not of .safetensors files: convert them with safetensors.torch.save_file");
    out.emplace(tensor, name);
  }
  return out;
}

}  // namespace

base::Result<ModelFiles> parse_safetensors_header(std::string_view json, uint64_t file_bytes) {
  const uint64_t data_begin = 8 + static_cast<uint64_t>(json.size());
  if (json.empty() || json.front() != '{') return malformed("header: does not begin with '{'");
  if (data_begin > file_bytes) return malformed("header: longer than the file");
  HeaderReader reader;
  const bool parsed = Json::sax_parse(json.begin(), json.end(), &reader);
  if (!reader.error.ok()) return reader.error;
  if (!parsed) return malformed("header: not JSON");

  ModelFiles out;
  out.metadata = std::move(reader.metadata);
  out.tensors = std::move(reader.tensors);
  // Empty tensors first among equals, so that they do not look like overlaps.
  std::stable_sort(out.tensors.begin(), out.tensors.end(), [](const Tensor& a, const Tensor& b) {
    return std::pair(a.file_begin, a.file_end) < std::pair(b.file_begin, b.file_end);
  });
  uint64_t covered = 0;
  for (Tensor& tensor : out.tensors) {
    GPUSHARE_RETURN_IF_ERROR(check_size(tensor));
    if (tensor.file_begin != covered)
      return malformed(
          base::format("header: tensor %s begins at byte %llu of the data, %s byte %llu",
                       shown(tensor.name).c_str(), static_cast<unsigned long long>(tensor.file_begin),
                       tensor.file_begin < covered ? "overlapping what ends at" : "leaving a hole after",
                       static_cast<unsigned long long>(covered)));
    covered = tensor.file_end;
    if (covered > file_bytes - data_begin)
      return malformed(
          base::format("header: tensor %s ends at byte %llu of the data, the file has %llu: truncated?",
                       shown(tensor.name).c_str(), static_cast<unsigned long long>(covered),
                       static_cast<unsigned long long>(file_bytes - data_begin)));
    tensor.file_begin += data_begin;
    tensor.file_end += data_begin;
  }
  if (covered != file_bytes - data_begin)
    return malformed(base::format("the tensors cover %llu bytes of data, the file has %llu",
                                  static_cast<unsigned long long>(covered),
                                  static_cast<unsigned long long>(file_bytes - data_begin)));
  out.bytes = covered;
  return out;
}

base::Result<ModelFiles> read_safetensors(const std::string& path) {
  GPUSHARE_ASSIGN_OR_RETURN(const File file, File::open(path));
  GPUSHARE_RETURN_IF_ERROR(check_format(file, path));
  if (file.size() < 8)
    return malformed(base::format("%s: has %llu bytes, a safetensors file has at least 8", path.c_str(),
                                  static_cast<unsigned long long>(file.size())));
  unsigned char length[8];
  GPUSHARE_RETURN_IF_ERROR(file.read_at(0, reinterpret_cast<char*>(length), sizeof length));
  uint64_t bytes = 0;
  for (int i = 7; i >= 0; --i) bytes = bytes << 8 | length[i];
  if (bytes > kMaxSafetensorsHeaderBytes || bytes > file.size() - 8)
    return malformed(base::format("%s: header size is %llu, allowed are up to %llu and the file's %llu bytes",
                                  path.c_str(), static_cast<unsigned long long>(bytes),
                                  static_cast<unsigned long long>(kMaxSafetensorsHeaderBytes),
                                  static_cast<unsigned long long>(file.size() - 8)));
  std::string json(static_cast<size_t>(bytes), '\0');
  GPUSHARE_RETURN_IF_ERROR(file.read_at(8, json.data(), json.size()));
  base::Result<ModelFiles> model = parse_safetensors_header(json, file.size());
  if (!model.ok()) return model.status().with_context(path);
  model->paths.push_back(path);
  model->sources.push_back({path, file.version()});
  return model;
}

base::Status check_unchanged(std::span<const Source> sources) {
  for (const Source& source : sources) {
    GPUSHARE_ASSIGN_OR_RETURN(const std::string now, File::version_at(source.path));
    if (now != source.version)
      return {GPUSHARE_IO_ERROR, source.path + " was changed or replaced since it was opened; load it again"};
  }
  return {};
}

base::Result<ModelFiles> read_model(const std::string& path) {
  if (!ends_with(path, ".json"))
    return read_safetensors(path);  // x.safetensors.index.json, x.safetensors.index.fp16.json
  GPUSHARE_ASSIGN_OR_RETURN(const File file, File::open(path));
  if (file.size() > kMaxSafetensorsHeaderBytes)
    return malformed(base::format("%s: has %llu bytes; an index has at most %llu", path.c_str(),
                                  static_cast<unsigned long long>(file.size()),
                                  static_cast<unsigned long long>(kMaxSafetensorsHeaderBytes)));
  GPUSHARE_RETURN_IF_ERROR(check_format(file, path));
  std::string json(static_cast<size_t>(file.size()), '\0');
  GPUSHARE_RETURN_IF_ERROR(file.read_at(0, json.data(), json.size()));
  const auto index = parse_index(json);
  if (!index.ok()) return index.status().with_context(path);

  const size_t slash = path.find_last_of('/');
  const std::string folder = slash == std::string::npos ? std::string() : path.substr(0, slash + 1);
  std::vector<std::string> shards;
  for (const auto& [tensor, shard] : *index) shards.push_back(shard);
  std::sort(shards.begin(), shards.end());
  shards.erase(std::unique(shards.begin(), shards.end()), shards.end());
  ModelFiles out;
  out.sources.push_back({path, file.version()});
  for (const std::string& shard : shards) {
    GPUSHARE_ASSIGN_OR_RETURN(ModelFiles part, read_safetensors(folder + shard));
    for (Tensor& tensor : part.tensors) {
      const auto entry = index->find(tensor.name);
      if (entry == index->end() || entry->second != shard)
        return malformed(base::format("%s%s: has tensor %s, which %s does not place there", folder.c_str(),
                                      shard.c_str(), shown(tensor.name).c_str(), path.c_str()));
      tensor.file = static_cast<uint32_t>(out.paths.size());
      out.tensors.push_back(std::move(tensor));
    }
    out.paths.push_back(folder + shard);
    out.sources.push_back(std::move(part.sources.front()));
    out.bytes += part.bytes;
  }
  if (out.tensors.size() != index->size())
    return malformed(base::format("%s: places %zu tensors, its shards hold %zu of them", path.c_str(),
                                  index->size(), out.tensors.size()));
  return out;
}

}  // namespace gpushare::loader
