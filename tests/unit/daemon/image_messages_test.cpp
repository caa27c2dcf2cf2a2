// What a process and the daemon say to each other about images: the path that is asked for, and the table of layers.
// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "client/images.hpp"
#include "support/catch.hpp"
#include "support/status_checks.hpp"

using namespace gpushare;
using client::TableLayer;

TEST_CASE("an image's path that is too long is refused with its length and the most that is allowed") {
  client::Images images;
  constexpr size_t kRoom = sizeof(client::ImageOpen{}.path);
  const base::Status refused = images.open({}, 1, "/" + std::string(kRoom - 1, 'x'), 0).status();
  CHECK(refused.code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(refused.message().find("has " + std::to_string(kRoom) + " bytes; allowed are 1 to " +
                               std::to_string(kRoom - 1)) != std::string::npos);
  CHECK(images.open({}, 1, "", 0).status().code() == GPUSHARE_INVALID_ARGUMENT);
  // The longest path that is allowed gets as far as to the daemon, which is not there.
  CHECK(images.open({}, 1, "/" + std::string(kRoom - 2, 'x'), 0).status().code() == GPUSHARE_UNAVAILABLE);
}

TEST_CASE("a table of layers is read as it was written, and any other text is refused") {
  const TableLayer layers[] = {{"first", 0, 16}, {"", 16, 0}, {"the last", 16, 48}};
  const std::string table = client::encode_layers(layers);
  const auto read = client::parse_layers(table, 64);
  REQUIRE_OK(read.status());
  REQUIRE(read->size() == 3);
  for (size_t i = 0; i < 3; ++i) {
    CHECK((*read)[i].name == layers[i].name);
    CHECK((*read)[i].offset_bytes == layers[i].offset_bytes);
    CHECK((*read)[i].bytes == layers[i].bytes);
  }
  const auto refused = [](const std::string& text, uint64_t image_bytes) {
    return client::parse_layers(text, image_bytes).status().code() == GPUSHARE_MALFORMED_INPUT;
  };
  for (size_t bytes = 0; bytes < table.size(); ++bytes) CHECK(refused(table.substr(0, bytes), 64));
  CHECK(refused(table + "x", 64));
  CHECK(refused(table, 63));
  for (size_t i = 0; i < sizeof(uint32_t); ++i) {
    std::string other = table;
    other[i] = static_cast<char>(other[i] ^ 1);
    CHECK(refused(other, 64));
  }
  std::string many = table;
  many[sizeof(uint32_t) + sizeof(uint64_t) - 1] = '\x7f';  // the count's highest byte
  CHECK(refused(many, 64));
}
