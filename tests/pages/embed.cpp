// The snippets of docs/embed.md: an elastic range, and a launch through the gate of an opportunistic session.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <gpushare/gpushare.hpp>
#include <stdexcept>

namespace {

gpushare::Runtime small_runtime(const char* policy) {
  gpushare::RuntimeOptions options;
  options.device = "host";
  options.policy = policy;
  options.capacity_bytes = 64 << 20;
  return gpushare::Runtime::open(options);
}

void expect(bool fulfilled, const char* what) {
  if (!fulfilled) throw std::runtime_error(what);
}

void elastic_range() {
  gpushare::Runtime runtime = small_runtime("fair");
  const gpushare::Session session = runtime.open_session();
  struct {
    uint64_t evict(uint64_t) { return 0; }
  } cache;
  const uint64_t block = 3;
#include "embed_1.inc"
  expect(kv.info().reserved_bytes >= 64ull << 30, "reserved bytes");
  expect(kv.info().committed_bytes == 0, "committed bytes");
}

void gate_of_launches() {
  gpushare::Runtime runtime = small_runtime("pack");
  gpushare::SessionOptions options;
  options.cls = gpushare::opportunistic;
  gpushare::Session opened = runtime.open_session(options);
  const gpushare_session session = opened.get();
  const gpushare::Iteration step = opened.begin_iteration();
  gpushare_stream stream = nullptr;
  gpushare::check(gpushare_iteration_get_stream(step.get(), &stream));
  const uint64_t estimated_ns = 1000;
#include "embed_2.inc"
  expect(*flag == 0, "a gate without guaranteed sessions is open");
  gpushare::check(gpushare_gate_release(gate));
}

}  // namespace

int main() try {
  elastic_range();
  gate_of_launches();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
