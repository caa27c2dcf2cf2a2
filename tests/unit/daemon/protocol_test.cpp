// Messages and tables: what is written is read back; what is broken is refused, cut at any byte or changed.
// SPDX-License-Identifier: Apache-2.0
#include "daemon/protocol.hpp"

#include <cstring>

#include "daemon/channel.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::daemon;

namespace {

template <class T>
std::vector<std::byte> bytes(const T& message) {
  const auto view = bytes_of(message);
  return {view.begin(), view.end()};
}

DaemonStatus some_status() {
  DaemonStatus status;
  status.device = "host";
  status.pid = 42;
  status.capacity_bytes = 1 << 30;
  status.cut_off = 7;
  status.refused = 9;
  status.workers.push_back({3, 44, "one", "turn", "/m", 5, 6, 7});
  status.models.push_back({"/m", "loading", 100, 10, 4, 1, 2});
  return status;
}

}  // namespace

TEST_CASE("requests are read as they were written") {
  const auto attach = parse_request(bytes(make_attach(7, "one", "/models/m.safetensors", 11, 12)));
  REQUIRE(attach.ok());
  CHECK(attach->type == MessageType::kAttach);
  CHECK(attach->sequence == 7);
  CHECK(attach->name == "one");
  CHECK(attach->path == "/models/m.safetensors");
  CHECK(attach->execute_ns == 11);
  CHECK(attach->scratch_bytes == 12);
  const auto begin = parse_request(bytes(make_begin(8, 99)));
  REQUIRE(begin.ok());
  CHECK(begin->type == MessageType::kBegin);
  CHECK(begin->timeout_ns == 99);
  CHECK(parse_request(bytes(make_end(9)))->type == MessageType::kEnd);
  CHECK(parse_request(bytes(make_status(9)))->type == MessageType::kStatus);
}

TEST_CASE("replies are read as they were written") {
  const auto reply = parse_reply(bytes(make_reply(3, {GPUSHARE_TIMED_OUT, "late"})));
  REQUIRE(reply.ok());
  CHECK(reply->code == GPUSHARE_TIMED_OUT);
  CHECK(std::string(reply->text) == "late");
  const auto cut = parse_reply(bytes(make_reply(3, {GPUSHARE_TIMED_OUT, std::string(2000, 'x')})));
  REQUIRE(cut.ok());
  CHECK(std::strlen(cut->text) == sizeof(cut->text) - 1);
}

TEST_CASE("a request of another size, mark, version or type is refused") {
  for (const auto& whole : {bytes(make_attach(1, "n", "/p", 0, 0)), bytes(make_begin(1, 0)),
                            bytes(make_end(1)), bytes(make_status(1))}) {
    REQUIRE(parse_request(whole).ok());
    for (size_t length = 0; length < whole.size(); length += length < 64 ? 1 : 97)
      CHECK(parse_request(std::span(whole).first(length)).status().code() == GPUSHARE_MALFORMED_INPUT);
    auto longer = whole;
    longer.push_back(std::byte{0});
    CHECK(parse_request(longer).status().code() == GPUSHARE_MALFORMED_INPUT);
    auto unmarked = whole;
    unmarked[0] ^= std::byte{1};
    CHECK(parse_request(unmarked).status().code() == GPUSHARE_MALFORMED_INPUT);
    auto newer = whole;
    newer[offsetof(Header, version)] = std::byte{2};
    const base::Status version = parse_request(newer).status();
    CHECK(version.code() == GPUSHARE_UNSUPPORTED);
    CHECK(version.message().find("version 2") != std::string::npos);
    for (const int type : {0, 5, 6, 255}) {
      auto other = whole;
      other[offsetof(Header, type)] = static_cast<std::byte>(type);
      CHECK(parse_request(other).status().code() == GPUSHARE_MALFORMED_INPUT);
    }
  }
  CHECK(parse_reply(bytes(make_end(1))).status().code() == GPUSHARE_MALFORMED_INPUT);
}

TEST_CASE("texts of an attach request are checked") {
  const AttachRequest good = make_attach(1, "n", "/p", 0, 0);
  AttachRequest bad = good;
  std::memset(bad.name, 'a', sizeof(bad.name));
  CHECK(parse_request(bytes(bad)).status().code() == GPUSHARE_MALFORMED_INPUT);
  bad = good;
  std::memset(bad.path, 'a', sizeof(bad.path));
  CHECK(parse_request(bytes(bad)).status().code() == GPUSHARE_MALFORMED_INPUT);
  bad = good;
  bad.path[100] = 'x';  // behind the end
  CHECK(parse_request(bytes(bad)).status().code() == GPUSHARE_MALFORMED_INPUT);
  for (const char* name : {"", "a\nb", "\x7f"})
    CHECK(parse_request(bytes(make_attach(1, name, "/p", 0, 0))).status().code() ==
          GPUSHARE_INVALID_ARGUMENT);
  for (const char* path : {"", "relative"})
    CHECK(parse_request(bytes(make_attach(1, "n", path, 0, 0))).status().code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("layer tables are read as they were written and refused when cut or outside the image") {
  const std::vector<TableLayer> layers = {{"a", 0, 100}, {"", 256, 0}, {"c", 256, 44}};
  const std::string table = encode_layers(layers);
  const auto read = parse_layers(table, 300);
  REQUIRE(read.ok());
  REQUIRE(read->size() == 3);
  CHECK((*read)[2].name == "c");
  CHECK((*read)[2].offset_bytes == 256);
  CHECK(parse_layers(table, 299).status().code() == GPUSHARE_MALFORMED_INPUT);
  for (size_t length = 0; length < table.size(); ++length)
    CHECK_FALSE(parse_layers(table.substr(0, length), 300).ok());
  CHECK_FALSE(parse_layers(table + "x", 300).ok());
  const std::vector<TableLayer> wrapping = {{"w", UINT64_MAX, 2}};
  CHECK_FALSE(parse_layers(encode_layers(wrapping), 300).ok());
}

TEST_CASE("status tables are read as they were written and refused when cut") {
  const std::string table = encode_status(some_status());
  const auto read = parse_status(table);
  REQUIRE(read.ok());
  CHECK(read->device == "host");
  CHECK(read->pid == 42);
  CHECK(read->cut_off == 7);
  CHECK(read->refused == 9);
  REQUIRE(read->workers.size() == 1);
  CHECK(read->workers[0].turn_ns == 6);
  REQUIRE(read->models.size() == 1);
  CHECK(read->models[0].arrived == 4);
  for (size_t length = 0; length < table.size(); ++length)
    CHECK_FALSE(parse_status(table.substr(0, length)).ok());
  CHECK_FALSE(parse_status(table + "x").ok());
}

TEST_CASE("random changes never read outside") {
  INFO("seed " << test::seed());
  test::Random random(test::seed());
  const std::vector<TableLayer> layers = {{"a", 0, 100}, {"c", 256, 44}};
  const std::string table = encode_layers(layers), status = encode_status(some_status());
  const auto attach = bytes(make_attach(1, "n", "/p", 0, 0));
  for (int i = 0; i < 3000; ++i) {
    std::string text = i % 2 == 0 ? table : status;
    for (int k = 0; k < 3; ++k) text[test::uniform(random, 0, text.size() - 1)] = static_cast<char>(random());
    if (const auto read = parse_layers(text, 300); read.ok())
      for (const TableLayer& layer : *read) CHECK(layer.offset_bytes + layer.bytes <= 300);
    (void)parse_status(text);
    auto message = attach;
    message[test::uniform(random, 0, message.size() - 1)] = static_cast<std::byte>(random());
    (void)parse_request(message);
  }
}
