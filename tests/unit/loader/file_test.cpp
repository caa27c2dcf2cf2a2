// Files that behave badly: short reads, interruptions, errors, replacement and truncation while they are read, damage of
// every kind. Reads go through a stand-in for pread.
// SPDX-License-Identifier: Apache-2.0
#include "loader/file.hpp"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "loader/checksum.hpp"
#include "loader/image.hpp"
#include "support/catch.hpp"
#include "support/model_folder.hpp"
#include "support/random.hpp"

using namespace gpushare;
using loader::ReadOptions;

namespace {

// A safetensors file of two tensors of `bytes` bytes each.
std::string model_text(size_t bytes, char fill = 'x') {
  const std::string json = base::format(
      R"({"a":{"dtype":"U8","shape":[%zu],"data_offsets":[0,%zu]},"b":{"dtype":"U8","shape":[%zu],"data_offsets":[%zu,%zu]}})",
      bytes, bytes, bytes, bytes, 2 * bytes);
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>(json.size() >> (8 * i));
  out += json;
  for (size_t i = 0; i < 2 * bytes; ++i) out += static_cast<char>(fill + static_cast<char>(i % 90));
  return out;
}

std::atomic<uint64_t> calls{0};
std::atomic<uint64_t> act_at{0};
std::string act_path;

// Every third call is interrupted, every other reads seven bytes at most.
ssize_t fitful(int descriptor, void* out, size_t bytes, off_t offset) {
  const uint64_t call = ++calls;
  if (call % 3 == 0) {
    errno = EINTR;
    return -1;
  }
  return ::pread(descriptor, out, call % 2 == 0 ? std::min<size_t>(bytes, 7) : bytes, offset);
}

ssize_t broken(int descriptor, void* out, size_t bytes, off_t offset) {
  if (++calls == act_at) {
    errno = EIO;
    return -1;
  }
  return ::pread(descriptor, out, bytes, offset);
}

ssize_t replacing(int descriptor, void* out, size_t bytes, off_t offset) {
  if (++calls == act_at) {
    std::ofstream(act_path + ".new", std::ios::binary) << model_text(20'000, 'A');
    std::filesystem::rename(act_path + ".new", act_path);
  }
  return ::pread(descriptor, out, bytes, offset);
}

ssize_t truncating(int descriptor, void* out, size_t bytes, off_t offset) {
  if (++calls == act_at) std::filesystem::resize_file(act_path, 30'000);
  return ::pread(descriptor, out, bytes, offset);
}

// One of the two ways is slow. The bytes come from memory: a busy disk would make the other one slow, too.
bool slow_is_direct = false;
std::string uneven_content;
std::atomic<uint64_t> direct_calls{0}, buffered_calls{0};
ssize_t uneven(int descriptor, void* out, size_t bytes, off_t offset) {
  if (bytes < 1024) return ::pread(descriptor, out, bytes, offset);  // the header
  const bool direct = (::fcntl(descriptor, F_GETFL) & O_DIRECT) != 0;
  ++(direct ? direct_calls : buffered_calls);
  if (direct == slow_is_direct) ::usleep(20'000);  // far above what a busy machine adds to most reads
  return static_cast<ssize_t>(
      uneven_content.copy(static_cast<char*>(out), bytes, static_cast<size_t>(offset)));
}

struct Reading {
  Reading() : device(*device::Device::open("host")), pool(*device, 64 << 10) {
    options.read_bytes = 4096;
    options.reads_in_flight = 2;
  }
  ~Reading() { loader::set_read_function(nullptr); }
  base::Result<std::shared_ptr<const loader::Image>> load(const std::string& path) {
    calls = 0;
    return loader::load_image(pool, path, options);
  }
  std::unique_ptr<device::Device> device;
  loader::ChunkPool pool;
  ReadOptions options;
};

}  // namespace

TEST_CASE("short reads and interruptions change nothing") {
  const test::ModelFolder folder;
  const std::string path = folder.write("m.safetensors", model_text(500));
  Reading reading;
  for (const auto how :
       {ReadOptions::Path::kBuffered, ReadOptions::Path::kDirect, ReadOptions::Path::kAuto}) {
    reading.options.path = how;
    loader::set_read_function(fitful);
    const auto image = reading.load(path);
    loader::set_read_function(nullptr);
    INFO(image.status().to_string());
    REQUIRE(image.ok());
    CHECK(calls > 6);
    for (const auto& piece : (*image)->pieces(0, 500))
      for (size_t i = 0; i < piece.bytes; ++i)
        if (piece.host[i] != static_cast<char>('x' + static_cast<char>(i % 90))) FAIL("byte " << i);
  }
}

TEST_CASE("a cold file is read the way that its first reads found quicker") {
  const test::ModelFolder folder;
  uneven_content = model_text(300'000);
  const std::string path = folder.write("m.safetensors", uneven_content);
  const int descriptor = ::open(path.c_str(), O_RDONLY);
  REQUIRE(descriptor >= 0);
  REQUIRE(::fsync(descriptor) == 0);
  REQUIRE(::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED) == 0);
  ::close(descriptor);
  Reading reading;
  for (const bool direct_slow : {true, false}) {
    slow_is_direct = direct_slow;
    reading.options.path = ReadOptions::Path::kAuto;
    reading.options.drop_page_cache = true;
    direct_calls = buffered_calls = 0;
    loader::set_read_function(uneven);
    const auto image = reading.load(path);
    loader::set_read_function(nullptr);
    INFO(image.status().to_string());
    REQUIRE(image.ok());
    for (const auto& piece : (*image)->pieces(0, 300'000))
      for (size_t i = 0; i < piece.bytes; ++i)
        if (piece.host[i] != static_cast<char>('x' + static_cast<char>((piece.offset_bytes + i) % 90)))
          FAIL("byte " << piece.offset_bytes + i);
    if (direct_calls == 0) {
      WARN("no direct reads here: the file system has none, or does not let the cache go");
      return;
    }
    INFO(direct_calls << " direct, " << buffered_calls << " buffered");
    CHECK((direct_slow ? buffered_calls > 2 * direct_calls : direct_calls > 2 * buffered_calls));
  }
}

TEST_CASE("an error of the disk is told with its name, wherever it strikes") {
  const test::ModelFolder folder;
  const std::string path = folder.write("m.safetensors", model_text(20'000));
  Reading reading;
  loader::set_read_function(broken);
  for (act_at = 1; act_at <= 12; ++act_at) {
    const auto image = reading.load(path);
    REQUIRE_FALSE(image.ok());
    CHECK(image.status().code() == GPUSHARE_IO_ERROR);
    CHECK(image.status().native_code() == EIO);
    CHECK(image.status().message().find(path) != std::string::npos);
  }
  act_at = 0;
  CHECK(reading.load(path).ok());
}

TEST_CASE("a file replaced while it is read is noticed, and the next load has the new one") {
  const test::ModelFolder folder;
  Reading reading;
  // Calls 1 and 2 read the header: that of the old file says nothing of the new one.
  for (uint64_t at = 1; at <= 11; ++at) {
    act_path = folder.write("m.safetensors", model_text(20'000, 'a'));
    act_at = at;
    loader::set_read_function(replacing);
    const auto image = reading.load(act_path);
    loader::set_read_function(nullptr);
    REQUIRE_FALSE(image.ok());
    CHECK(image.status().code() == GPUSHARE_IO_ERROR);
    CHECK(image.status().message().find("replaced") != std::string::npos);
    const auto again = reading.load(act_path);
    REQUIRE(again.ok());
    CHECK((*again)->pieces(0, 1)[0].host[0] == 'A');
  }
}

TEST_CASE("a file truncated while it is read, or before, is refused") {
  const test::ModelFolder folder;
  Reading reading;
  for (uint64_t at = 3; at <= 6; ++at) {
    act_path = folder.write("m.safetensors", model_text(20'000));
    act_at = at;
    loader::set_read_function(truncating);
    const auto image = reading.load(act_path);
    loader::set_read_function(nullptr);
    REQUIRE_FALSE(image.ok());
    const int32_t code = image.status().code();
    CHECK((code == GPUSHARE_MALFORMED_INPUT || code == GPUSHARE_IO_ERROR));
  }
  const std::string whole = model_text(700);
  for (size_t length = 0; length < whole.size(); length += length < 200 ? 1 : 97) {
    const auto image = reading.load(folder.write("short.safetensors", whole.substr(0, length)));
    REQUIRE_FALSE(image.ok());
    CHECK(image.status().code() == GPUSHARE_MALFORMED_INPUT);
  }
  // A shard that is missing, or is not the one that the index means.
  const std::string index =
      folder.write("m.safetensors.index.json", R"({"weight_map":{"a":"s.safetensors","b":"s.safetensors"}})");
  CHECK(reading.load(index).status().code() == GPUSHARE_IO_ERROR);
  (void)folder.write("s.safetensors", "nonsense");
  CHECK(reading.load(index).status().code() == GPUSHARE_MALFORMED_INPUT);
  (void)folder.write("s.safetensors", model_text(100));
  CHECK(reading.load(index).ok());
  CHECK(reading.load(folder.path().string()).status().code() == GPUSHARE_INVALID_ARGUMENT);  // a folder
}

TEST_CASE("damaged headers are refused or harmless, whichever byte is hit") {
  test::Random random(test::seed());
  const test::ModelFolder folder;
  Reading reading;
  const std::string whole = model_text(50);
  for (int round = 0; round < 300; ++round) {
    std::string damaged = whole;
    for (uint64_t hits = test::uniform(random, 1, 3); hits > 0; --hits)
      damaged[test::uniform(random, 0, whole.size() - 101)] = static_cast<char>(random());
    const auto image = reading.load(folder.write("d.safetensors", damaged));
    if (image.ok()) continue;  // a name changed, say
    const int32_t code = image.status().code();
    CHECK((code == GPUSHARE_MALFORMED_INPUT || code == GPUSHARE_UNSUPPORTED));
    CHECK_FALSE(image.status().message().empty());
  }
}

TEST_CASE("checksums tell damage that the format cannot") {
  const test::ModelFolder folder;
  const std::string path = folder.write("m.safetensors", model_text(10'000));
  Reading reading;
  const auto sums = loader::checksums_of(path);
  REQUIRE(sums.ok());
  reading.options.checksums = folder.write("sums", *sums);
  REQUIRE(reading.load(path).ok());
  std::string damaged = model_text(10'000);
  damaged[damaged.size() - 5] = static_cast<char>(damaged[damaged.size() - 5] ^ 1);
  (void)folder.write("m.safetensors", damaged);
  for (const uint32_t threads : {1u, 2u}) {  // one: without helpers
    reading.options.reads_in_flight = threads;
    const auto image = reading.load(path);
    CHECK(image.status().code() == GPUSHARE_MALFORMED_INPUT);
    CHECK(image.status().message().find("'b' has checksum") != std::string::npos);
  }
  for (const char* bad : {"xyz", "0123456g a\n", "01234567\n", "01234567a\n", "00000000 a\n00000000 a\n"}) {
    INFO(bad);
    const auto parsed = loader::parse_checksums(bad, "sums");
    CHECK(parsed.status().code() == GPUSHARE_MALFORMED_INPUT);
  }
  CHECK(loader::parse_checksums("\r\nDEADbeef a b\r\n", "sums")->at("a b") == 0xdeadbeef);
  CHECK(loader::crc32c(0, "123456789", 9) == 0xe3069283);
  CHECK(loader::crc32c(loader::crc32c(0, "1234", 4), "56789", 5) == 0xe3069283);
  CHECK(loader::checksums_of("/nowhere.safetensors").status().code() == GPUSHARE_IO_ERROR);
}

TEST_CASE("how much of a file the page cache has") {
  const test::ModelFolder folder;
  const std::string path = folder.write("m.safetensors", model_text(300'000));
  auto file = loader::File::open(path);
  REQUIRE(file.ok());
  char byte = 0;
  iovec part{&byte, 1};
  // The page cache has the bytes just written, unless the file system does not tell.
  const bool tells = ::preadv2(file->descriptor(), &part, 1, 0, RWF_NOWAIT) == 1;
  CHECK(file->cached_share() == (tells ? 1.0 : 0.0));
  auto empty = loader::File::open(folder.write("empty", ""));
  REQUIRE(empty.ok());
  CHECK(empty->cached_share() == 0);
}

TEST_CASE("a list of checksums is read line by line, and what is wrong is named by its line") {
  const auto sums = loader::parse_checksums("01234567 a\r\n\n89abcdef b c\n89ABCDEF 3", "sums");
  REQUIRE(sums.ok());
  CHECK(sums->size() == 3);
  CHECK(sums->at("a") == 0x01234567);
  CHECK(sums->at("b c") == 0x89abcdef);
  CHECK(sums->at("3") == 0x89abcdef);
  for (const char* wrong : {"/1234567 a", ":1234567 a", "`1234567 a", "g1234567 a", "@1234567 a",
                            "G1234567 a", "01234567_a", "01234567 ", "0123456 ab"}) {
    INFO(wrong);
    const auto status = loader::parse_checksums(std::string("01234567 x\n") + wrong, "sums").status();
    CHECK(status.code() == GPUSHARE_MALFORMED_INPUT);
    CHECK(status.message().starts_with("sums:2: "));
  }
  CHECK(loader::parse_checksums("01234567 a\n01234567 a", "sums").status().message() ==
        "sums:2: a tensor is named a second time");
}
