// Paths without a good model: other kinds of file, links, files without read permission, models without
// bytes and very large ones, sets whose parts change.
// SPDX-License-Identifier: Apache-2.0
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "loader/checksum.hpp"
#include "loader/file.hpp"
#include "loader/image.hpp"
#include "support/catch.hpp"
#include "support/model_folder.hpp"

using namespace gpushare;

namespace {

std::string with_header(const std::string& json, const std::string& data) {
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>(json.size() >> (8 * i));
  return out + json + data;
}

std::string one_tensor(const std::string& name, const std::string& data) {
  return with_header("{\"" + name + R"(":{"dtype":"U8","shape":[)" + std::to_string(data.size()) +
                         R"(],"data_offsets":[0,)" + std::to_string(data.size()) + "]}}",
                     data);
}

struct OddReading {
  base::Result<std::shared_ptr<const loader::Image>> load(const std::string& path) {
    return loader::load_image(pool, path, {});
  }
  std::unique_ptr<device::Device> device = *device::Device::open("host");
  loader::ChunkPool pool{*device, 64 << 10};
};

void refused(const base::Status& status, int32_t code, const std::string& path, const char* says) {
  INFO(status.to_string());
  CHECK(status.code() == code);
  CHECK(status.message().find(path) != std::string::npos);
  CHECK(status.message().find(says) != std::string::npos);
}

}  // namespace

TEST_CASE("what is no regular file is refused by its kind, and nothing waits for it") {
  const test::ModelFolder folder;
  OddReading reading;
  const std::string pipe = folder.file("pipe.safetensors");
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  refused(reading.load(pipe).status(), GPUSHARE_INVALID_ARGUMENT, pipe, "a pipe");
  refused(loader::read_checksums(pipe).status(), GPUSHARE_INVALID_ARGUMENT, pipe, "a pipe");
  refused(reading.load("/dev/zero").status(), GPUSHARE_INVALID_ARGUMENT, "/dev/zero", "a device");
  const std::string inner = folder.file("folder.safetensors");
  std::filesystem::create_directory(inner);
  refused(reading.load(inner).status(), GPUSHARE_INVALID_ARGUMENT, inner, "a folder");
  // As a shard too.
  const std::string index =
      folder.write("m.safetensors.index.json", R"({"weight_map":{"a":"pipe.safetensors"}})");
  refused(reading.load(index).status(), GPUSHARE_INVALID_ARGUMENT, pipe, "a pipe");
  // Nobody listens at a socket's path.
  const int bound = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string socket = folder.file("s.sock");
  REQUIRE(socket.size() < sizeof(address.sun_path));
  std::memcpy(address.sun_path, socket.c_str(), socket.size());
  REQUIRE(::bind(bound, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  refused(reading.load(socket).status(), GPUSHARE_IO_ERROR, socket, "cannot open");
  ::close(bound);
}

TEST_CASE("links are followed; one that leads nowhere, or in a circle, is told") {
  const test::ModelFolder folder;
  OddReading reading;
  const std::string model = folder.write("blob", one_tensor("a", "0123456789"));
  const std::string link = folder.file("m.safetensors");
  std::filesystem::create_symlink(model, link);
  REQUIRE(reading.load(link).ok());
  // As model hubs keep sets: links beside the index.
  const std::string index =
      folder.write("m.safetensors.index.json", R"({"weight_map":{"a":"m.safetensors"}})");
  REQUIRE(reading.load(index).ok());
  const std::string dangling = folder.file("d.safetensors");
  std::filesystem::create_symlink(folder.file("gone"), dangling);
  refused(reading.load(dangling).status(), GPUSHARE_IO_ERROR, dangling, "where a link leads");
  const std::string circle = folder.file("c.safetensors");
  std::filesystem::create_symlink(circle, circle);
  refused(reading.load(circle).status(), GPUSHARE_IO_ERROR, circle, "cannot open");
}

TEST_CASE("a file that one may not read, and no room for open files, are told with what to do") {
  const test::ModelFolder folder;
  OddReading reading;
  const std::string path = folder.write("m.safetensors", one_tensor("a", "0123456789"));
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const rlimit none{0, limit.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  const base::Status full = reading.load(path).status();
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
  refused(full, GPUSHARE_IO_ERROR, path, "ulimit -n");
  CHECK(full.native_code() == EMFILE);
  REQUIRE(::chmod(path.c_str(), 0) == 0);
  const bool root = ::geteuid() == 0;  // who may read everything
  if (root && ::seteuid(65534) != 0) {
    WARN("no other user to be here: what one may not read is not tried");
    return;
  }
  const base::Status denied = reading.load(path).status();
  if (root) REQUIRE(::seteuid(0) == 0);
  // As another user the folder may be closed already: the same refusal.
  refused(denied, GPUSHARE_IO_ERROR, path, "let this process's user read it");
  CHECK(denied.native_code() == EACCES);
}

TEST_CASE("a model without tensors, or with empty ones, is an image without bytes") {
  const test::ModelFolder folder;
  OddReading reading;
  const auto none = reading.load(folder.write("none.safetensors", with_header("{}", "")));
  REQUIRE(none.ok());
  CHECK((*none)->layers().empty());
  CHECK((*none)->bytes() == 0);
  const auto empty = reading.load(folder.write(
      "empty.safetensors", with_header(R"({"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]}})", "")));
  REQUIRE(empty.ok());
  CHECK((*empty)->layers().size() == 1);
  CHECK((*empty)->bytes() == 0);
}

TEST_CASE("tensors beyond 4 GiB are where the header says") {
  const test::ModelFolder folder;
  const uint64_t large = (1ull << 32) + (1ull << 31) + 12345;
  const std::string json = R"({"a":{"dtype":"U8","shape":[)" + std::to_string(large) +
                           R"(],"data_offsets":[0,)" + std::to_string(large) +
                           R"(]},"b":{"dtype":"U8","shape":[4],"data_offsets":[)" + std::to_string(large) +
                           "," + std::to_string(large + 4) + "]}}";
  const std::string path = folder.write("large.safetensors", with_header(json, ""));
  const uint64_t data = 8 + json.size();
  std::filesystem::resize_file(path, data + large);  // a hole
  std::ofstream(path, std::ios::binary | std::ios::app) << "wxyz";
  const auto model = loader::read_model(path);
  INFO(model.status().to_string());
  REQUIRE(model.ok());
  CHECK(model->bytes == large + 4);
  CHECK(model->tensors[1].file_begin == data + large);
  const auto file = loader::File::open(path);
  REQUIRE(file.ok());
  char last[4] = {};
  REQUIRE(file->read_at(model->tensors[1].file_begin, last, 4).ok());
  CHECK(std::string(last, 4) == "wxyz");
  // No host memory for it: its name and its size are told, and nothing is left behind.
  OddReading reading;
  loader::ImageCache cache(reading.pool, 1 << 20, {});
  const base::Status status = cache.get(path).status();
  refused(status, GPUSHARE_HOST_OUT_OF_MEMORY, path, "raise the limit");
  CHECK(cache.images() == 0);
}

TEST_CASE("a set of shards is one model: a shard that changed makes it another") {
  const test::ModelFolder folder;
  OddReading reading;
  loader::ImageCache cache(reading.pool, 1 << 20, {});
  folder.write("one.safetensors", one_tensor("a", std::string(5000, 'a')));
  folder.write("two.safetensors", one_tensor("b", std::string(5000, 'b')));
  const std::string index = folder.write("m.safetensors.index.json",
                                         R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})");
  const auto first = cache.get(index);
  REQUIRE(first.ok());
  CHECK(cache.get(index)->get() == first->get());
  folder.write("new", one_tensor("b", std::string(5000, 'B')));
  std::filesystem::rename(folder.file("new"), folder.file("two.safetensors"));
  const auto second = cache.get(index);
  REQUIRE(second.ok());
  CHECK(second->get() != first->get());
  CHECK((*second)->pieces((*second)->begin_of(1), 1)[0].host[0] == 'B');
  CHECK((*first)->pieces((*first)->begin_of(1), 1)[0].host[0] == 'b');
  // A file that has gone is named in the error, although the image is cached.
  std::filesystem::remove(folder.file("two.safetensors"));
  refused(cache.get(index).status(), GPUSHARE_IO_ERROR, folder.file("two.safetensors"), "cannot open");
}
