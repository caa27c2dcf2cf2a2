// Every way a safetensors file can lie.
// SPDX-License-Identifier: Apache-2.0
#include "loader/safetensors.hpp"

#include <filesystem>
#include <fstream>
#include <string>

#include <unistd.h>

#include "support/catch.hpp"
#include "support/model_folder.hpp"
#include "support/random.hpp"

using namespace gpushare;

namespace {

std::string file_of(const std::string& json, size_t data_bytes) {
  std::string out(8, '\0');
  for (int i = 0; i < 8; ++i) out[static_cast<size_t>(i)] = static_cast<char>(json.size() >> (8 * i));
  return out + json + std::string(data_bytes, 'x');
}

const std::string kGood =
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[4,28]},"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"z":{"dtype":"I8","shape":[0,7],"data_offsets":[28,28]}} )";

}  // namespace

TEST_CASE("a good file gives its tensors in the order of their bytes") {
  const test::ModelFolder folder;
  const auto model = loader::read_model(folder.write("good.safetensors", file_of(kGood, 28)));
  REQUIRE(model.ok());
  REQUIRE(model->tensors.size() == 3);
  CHECK(model->tensors[0].name == "a");
  CHECK(model->tensors[1].shape == std::vector<uint64_t>{2, 3});
  CHECK(model->tensors[1].file_begin == 8 + kGood.size() + 4);
  CHECK(model->bytes == 28);
  CHECK(model->metadata.front().second == "pt");
}

TEST_CASE("a header that lies is refused by name") {
  struct Case {
    const char* json;
    const char* says;
  };
  const Case cases[] = {
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
       "overlapping"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
       "hole"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "span"},
      {R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})", "truncated"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "cover"},
      {R"({"a":{"dtype":"","shape":[2],"data_offsets":[0,8]}})", "dtype"},
      {R"({"a":{"dtype":"f32","shape":[2],"data_offsets":[0,8]}})", "dtype"},
      {R"({"a":{"dtype":"F32\n","shape":[2],"data_offsets":[0,8]}})", "dtype"},
      {R"({"a":{"dtype":"F123456789012345678901234567890123","shape":[2],"data_offsets":[0,8]}})", "dtype"},
      {R"({"a":{"dtype":"NEW7","shape":[3],"data_offsets":[0,8]}})", "whole number of bits"},
      {R"({"a":{"dtype":"NEW7","shape":[65],"data_offsets":[0,8]}})", "whole number of bits"},
      {R"({"a":{"dtype":"NEW7","shape":[0],"data_offsets":[0,8]}})", "whole number of bits"},
      {R"({"a":{"dtype":"C64","shape":[2],"data_offsets":[0,8]}})", "64 bits"},
      {R"({"a":{"dtype":"F4","shape":[15],"data_offsets":[0,8]}})", "4 bits"},
      {R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", "span"},
      {R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,2305843009213693952]}})", "span"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", "overflow"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[8,4]}})", "span"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "twice"},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "twice"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", "lacks"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", "two numbers"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}})", "more than two"},
      {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "negative"},
      {R"({"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})", "not whole"},
      {R"({"a":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})", "array"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", "unknown field"},
      {R"({"a":{"dtype":7,"shape":[2],"data_offsets":[0,8]}})", "number"},
      {R"({"a":5})", "number"},
      {R"({"a":{"dtype":{"b":1},"shape":[2],"data_offsets":[0,8]}})", "object"},
      {R"({"":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "without a name"},
      {R"({"__metadata__":{"k":1}})", "number"},
      {R"({"__metadata__":{"k":"v","k":"w"}})", "twice"},
      {R"({"a":{"dtype":"F32")", "not JSON"},
      {R"([1])", "begin with"},
      {"", "begin with"},
  };
  for (const Case& each : cases) {
    INFO(each.json);
    const std::string json = each.json;
    const auto model = loader::parse_safetensors_header(json, 8 + json.size() + 8);
    REQUIRE(model.status().code() == GPUSHARE_MALFORMED_INPUT);
    CHECK(model.status().message().find(each.says) != std::string::npos);
  }
}

TEST_CASE("every type that files have is taken, unknown ones by their size") {
  struct Case {
    const char* dtype;
    int elements;  // of 24 bytes
  };
  for (const Case& each : {Case{"F4", 48},
                           {"F6_E2M3", 32},
                           {"F6_E3M2", 32},
                           {"F8_E8M0", 24},
                           {"F8_E4M3FNUZ", 24},
                           {"BF16", 12},
                           {"C64", 3},
                           {"NEW_TYPE", 8},
                           {"I4", 48},
                           {"F48", 4}}) {
    INFO(each.dtype);
    const std::string json = std::string(R"({"a":{"dtype":")") + each.dtype + R"(","shape":[)" +
                             std::to_string(each.elements) + R"(],"data_offsets":[0,24]}})";
    const auto model = loader::parse_safetensors_header(json, 8 + json.size() + 24);
    REQUIRE(model.ok());
    CHECK(model->tensors.front().dtype == each.dtype);
    CHECK(model->bytes == 24);
  }
}

TEST_CASE("files of other formats are named for what they are") {
  const test::ModelFolder folder;
  const std::pair<std::string, const char*> cases[] = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"},
      {std::string("PK\x03\x04") + std::string(60, '\0'), "PyTorch checkpoint"},
      {std::string("\x80\x02") + std::string(60, '\0'), "pickle"},
      {"\x80", "pickle"},
      {"GGUF" + std::string(60, '\0'), "GGUF"},
  };
  for (const auto& [content, says] : cases)
    for (const char* name : {"other.safetensors", "other.safetensors.index.json"}) {
      const auto model = loader::read_model(folder.write(name, content));
      REQUIRE(model.status().code() == GPUSHARE_MALFORMED_INPUT);
      CHECK(model.status().message().find(says) != std::string::npos);
    }
  std::string header = R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}})";
  header.resize(128, ' ');  // its length is the first byte of a pickle
  CHECK(loader::read_model(folder.write("header.safetensors", file_of(header, 1))).ok());
}

TEST_CASE("a file cut anywhere is refused, never read beyond its end") {
  const test::ModelFolder folder;
  const std::string whole = file_of(kGood, 28);
  for (size_t length = 0; length < whole.size(); ++length) {
    const auto model = loader::read_model(folder.write("cut.safetensors", whole.substr(0, length)));
    INFO("length " << length);
    REQUIRE(model.status().code() == GPUSHARE_MALFORMED_INPUT);
  }
}

TEST_CASE("absurd header sizes allocate nothing") {
  const test::ModelFolder folder;
  for (const uint64_t size : {uint64_t{1} << 62, loader::kMaxSafetensorsHeaderBytes + 1, UINT64_MAX}) {
    std::string file = file_of("{}", 0);
    for (int i = 0; i < 8; ++i) file[static_cast<size_t>(i)] = static_cast<char>(size >> (8 * i));
    const auto model = loader::read_model(folder.write("absurd.safetensors", file));
    REQUIRE(model.status().code() == GPUSHARE_MALFORMED_INPUT);
    CHECK(model.status().message().find("header size") != std::string::npos);
  }
}

TEST_CASE("a file with any byte changed never breaks the reader") {
  const uint64_t seed = test::seed();
  INFO("seed " << seed);
  test::Random random(seed);
  size_t accepted = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string json = kGood;
    for (uint64_t changes = test::uniform(random, 1, 4); changes > 0; --changes)
      json[test::uniform(random, 0, json.size() - 1)] = static_cast<char>(test::uniform(random, 0, 255));
    const auto model = loader::parse_safetensors_header(json, 8 + json.size() + 28);
    if (!model.ok()) continue;
    ++accepted;
    uint64_t bytes = 0;
    for (const loader::Tensor& tensor : model->tensors) bytes += tensor.bytes();
    REQUIRE(bytes == 28);
  }
  CHECK(accepted > 0);
}

TEST_CASE("a sharded model must be exactly what its index says") {
  const test::ModelFolder folder;
  const std::string one = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  const std::string two = R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  folder.write("one.safetensors", file_of(one, 4));
  folder.write("two.safetensors", file_of(two, 4));
  const auto index = [&](const std::string& json) {
    return loader::read_model(folder.write("m.safetensors.index.json", json));
  };
  const auto model =
      index(R"({"metadata":{"total_size":8},"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})");
  REQUIRE(model.ok());
  CHECK(model->paths.size() == 2);
  CHECK(model->bytes == 8);
  CHECK(model->tensors[1].file == 1);
  CHECK(index(R"({"weight_map":{"a":"two.safetensors","b":"two.safetensors"}})").status().code() ==
        GPUSHARE_MALFORMED_INPUT);
  CHECK(index(R"({"weight_map":{"a":"one.safetensors","c":"one.safetensors"}})").status().code() ==
        GPUSHARE_MALFORMED_INPUT);
  CHECK(index(R"({"weight_map":{"a":"../one.safetensors"}})").status().code() == GPUSHARE_MALFORMED_INPUT);
  CHECK(index(R"({"weight_map":{"a":"one.safetensors","a":"one.safetensors"}})").status().code() ==
        GPUSHARE_MALFORMED_INPUT);
  CHECK(index(R"({"weight_map":{"a":3}})").status().code() == GPUSHARE_MALFORMED_INPUT);
  CHECK(index(R"({"weight_map":{}})").status().code() == GPUSHARE_MALFORMED_INPUT);
  CHECK(index("[").status().code() == GPUSHARE_MALFORMED_INPUT);
  const auto checkpoints = index(R"({"weight_map":{"a":"pytorch_model-00001-of-00001.bin"}})").status();
  CHECK(checkpoints.code() == GPUSHARE_MALFORMED_INPUT);
  CHECK(checkpoints.message().find("PyTorch checkpoints") != std::string::npos);
  // As transformers names an index of a variant.
  CHECK(loader::read_model(
            folder.write("m.safetensors.index.fp16.json", R"({"weight_map":{"a":"one.safetensors"}})"))
            .ok());
  CHECK(index(R"({"weight_map":{"a":"gone.safetensors"}})").status().code() == GPUSHARE_IO_ERROR);
  CHECK(loader::read_model((folder.path() / "none.safetensors").string()).status().code() ==
        GPUSHARE_IO_ERROR);
  CHECK(loader::read_model(folder.path().string()).status().code() == GPUSHARE_INVALID_ARGUMENT);
}
