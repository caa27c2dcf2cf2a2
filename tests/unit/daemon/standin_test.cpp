// The daemon on the cuda backend, over the stand-in for its driver: shareable handles instead of shared files, and
// memory that only copies reach.
// SPDX-License-Identifier: Apache-2.0
#include "daemon_fixture.hpp"

using namespace gpushare;
using namespace gpushare::test;

TEST_CASE("workers find their models on the cuda backend") {
  // Granules are the driver's, so sizes are too.
  Daemon daemon(8 << 20,
                [](auto& options) { options.device = std::string("cuda?driver=") + GPUSHARE_CUDA_STANDIN; });
  const uint64_t free_bytes = daemon.status().device_free_bytes;
  const std::vector<size_t> sizes = {1000, 3'000'000, 77, 2'000'000};
  std::vector<std::string> contents[2];
  const std::string paths[] = {daemon.model("a.safetensors", sizes, &contents[0]),
                               daemon.model("b.safetensors", sizes, &contents[1])};
  {
    const std::unique_ptr<daemon::Worker> workers[] = {daemon.attach("a", paths[0]),
                                                       daemon.attach("b", paths[1])};
    for (int turn = 0; turn < 6; ++turn) {
      daemon::Worker& worker = *workers[turn % 2];
      REQUIRE_OK(worker.begin(30'000'000'000));
      {
        const auto stream = worker.device().create_stream();
        REQUIRE(stream.ok());
        for (uint32_t i = 0; i < sizes.size(); ++i) {
          REQUIRE_OK(worker.wait_layers(i, i + 1, 30'000'000'000));
          std::string got(sizes[i], '\0');
          REQUIRE_OK(stream->copy(reinterpret_cast<uint64_t>(got.data()), worker.address(i), got.size(),
                                  GPUSHARE_COPY_DEVICE_TO_HOST));
          REQUIRE_OK(stream->synchronize());
          CHECK(got == contents[turn % 2][i]);
        }
      }
      REQUIRE_OK(worker.end());
    }
    CHECK(daemon.status().loads == 6);  // room for one of them
    CHECK(daemon.status().drops == 5);
  }
  daemon.wait_for([&](const auto& now) {
    return now.workers.empty() && now.resident_bytes == 0 && now.device_free_bytes == free_bytes;
  });
}
