// measure_reading FILE [rounds [way,..]]: a model file read into a pinned image each way, or those ways named, beside
// plain sequential reads of the same file into one buffer (what dd does), cold and warm, in turns within one run.
// Cold = dropped from the page cache with posix_fadvise. An "image" is read into chunks that an earlier image had, a "fresh" one
// into new memory, which it also gives back in the time that is measured.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "loader/file.hpp"
#include "loader/image.hpp"

namespace {

using namespace gpushare;
using loader::ReadOptions;

constexpr uint64_t kReadBytes = 8ull << 20;

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

base::Status plain_read(const std::string& path, loader::File::Mode mode) {
  GPUSHARE_ASSIGN_OR_RETURN(const loader::File file, loader::File::open(path, mode));
  const std::unique_ptr<void, FreeDeleter> buffer(std::aligned_alloc(4096, kReadBytes));
  if (buffer == nullptr) return {GPUSHARE_HOST_OUT_OF_MEMORY, "no buffer"};
  for (uint64_t at = 0; at < file.size();) {
    // Whole blocks, as direct I/O wants them; the file's end cuts the last one short.
    const ssize_t got = ::pread(file.descriptor(), buffer.get(), kReadBytes, static_cast<off_t>(at));
    if (got <= 0) return {GPUSHARE_IO_ERROR, "plain read failed"};
    at += static_cast<uint64_t>(got);
  }
  return {};
}

base::Status drop(const std::string& path) {
  GPUSHARE_ASSIGN_OR_RETURN(const loader::File file, loader::File::open(path));
  if (::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED) != 0)
    return {GPUSHARE_IO_ERROR, "posix_fadvise failed"};
  return {};
}

struct Way {
  std::string name;
  std::function<base::Status()> read;
  std::vector<double> seconds[2] = {};  // cold, warm
};

bool named(const std::string& list, const std::string& name) {
  return list.empty() || ("," + list + ",").find("," + name + ",") != std::string::npos;
}

base::Status measure(const std::string& path, int rounds, const std::string& only) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::unique_ptr<device::Device> device, device::Device::open("host"));
  loader::ChunkPool pool(*device, 16ull << 20, {.ns = UINT64_MAX});
  const auto image = [&](ReadOptions::Path how, uint32_t in_flight, bool fresh = false) {
    return [&pool, &path, how, in_flight, fresh]() -> base::Status {
      std::optional<loader::ChunkPool> new_pool;
      if (fresh) new_pool.emplace(pool.device(), pool.chunk_bytes());
      ReadOptions options;
      options.path = how;
      options.reads_in_flight = in_flight;
      options.read_bytes = kReadBytes;
      return loader::load_image(fresh ? *new_pool : pool, path, options).status();
    };
  };
  std::vector<Way> ways = {
      {"plain read", [&] { return plain_read(path, loader::File::Mode::kBuffered); }},
      {"plain direct read", [&] { return plain_read(path, loader::File::Mode::kDirect); }},
      {"image, buffered x1", image(ReadOptions::Path::kBuffered, 1)},
      {"image, buffered x4", image(ReadOptions::Path::kBuffered, 4)},
      {"image, direct x1", image(ReadOptions::Path::kDirect, 1)},
      {"image, direct x4", image(ReadOptions::Path::kDirect, 4)},
      {"image, buffered x8", image(ReadOptions::Path::kBuffered, 8)},
      {"image, direct x8", image(ReadOptions::Path::kDirect, 8)},
      {"image, mapped x4", image(ReadOptions::Path::kMapped, 4)},
      {"image, auto x4", image(ReadOptions::Path::kAuto, 4)},
      {"image, auto x8", image(ReadOptions::Path::kAuto, 8)},
      {"fresh, buffered x4", image(ReadOptions::Path::kBuffered, 4, true)},
      {"fresh, direct x4", image(ReadOptions::Path::kDirect, 4, true)},
  };
  ways.erase(
      std::remove_if(ways.begin() + 2, ways.end(), [&](const Way& way) { return !named(only, way.name); }),
      ways.end());
  // The chunks are kept once an image of theirs was released, so an image finds their pages touched.
  GPUSHARE_RETURN_IF_ERROR(image(ReadOptions::Path::kBuffered, 4)());
  std::vector<size_t> order(ways.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937_64 shuffler(1);
  for (int round = 0; round < rounds; ++round) {
    for (const bool warm : {false, true}) {
      // Each round in another order: what one way leaves behind is not always the same one's.
      std::shuffle(order.begin(), order.end(), shuffler);
      for (const size_t i : order) {
        Way& way = ways[i];
        if (warm)
          GPUSHARE_RETURN_IF_ERROR(plain_read(path, loader::File::Mode::kBuffered));
        else
          GPUSHARE_RETURN_IF_ERROR(drop(path));
        const uint64_t begin_ns = base::host_now_ns();
        const base::Status status = way.read();
        if (!status.ok()) return status.with_context(way.name);
        way.seconds[warm].push_back(static_cast<double>(base::host_now_ns() - begin_ns) / 1e9);
      }
    }
  }
  GPUSHARE_ASSIGN_OR_RETURN(const loader::File file, loader::File::open(path));
  const double gigabytes = static_cast<double>(file.size()) / 1e9;
  const auto median = [](std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  };
  // One disk's rates differ twofold from read to read of a file, so the faster of two plain reads of a round is a high mark:
  // medians over many rounds are compared first, and the rounds one by one beside them.
  std::printf(
      "%s, %.2f GB, %d rounds (host): median rate; /plain = of the faster plain way's median rate; "
      "/round = of the faster plain read of the same round, median (least)\n",
      path.c_str(), gigabytes, rounds);
  std::printf("%-20s %10s %7s %6s %8s %10s %7s %6s %8s\n", "", "cold GB/s", "/plain", "/round", "",
              "warm GB/s", "/plain", "/round", "");
  for (const Way& way : ways) {
    std::printf("%-20s", way.name.c_str());
    for (int warm = 0; warm < 2; ++warm) {
      const double plain = std::min(median(ways[0].seconds[warm]), median(ways[1].seconds[warm]));
      std::vector<double> ratios;
      for (size_t round = 0; round < way.seconds[warm].size(); ++round)
        ratios.push_back(std::min(ways[0].seconds[warm][round], ways[1].seconds[warm][round]) /
                         way.seconds[warm][round]);
      std::printf(" %10.2f %7.2f %6.2f %8s", gigabytes / median(way.seconds[warm]),
                  plain / median(way.seconds[warm]), median(ratios),
                  base::format("(%.2f)", *std::min_element(ratios.begin(), ratios.end())).c_str());
    }
    std::printf("\n");
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 3;
  if (argc < 2 || rounds < 1) {
    std::fprintf(stderr, "usage: measure_reading FILE.safetensors [rounds [way,..]]\n");
    return 2;
  }
  const base::Status status = measure(argv[1], rounds, argc > 3 ? argv[3] : "");
  if (!status.ok()) std::fprintf(stderr, "measure_reading: %s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}
