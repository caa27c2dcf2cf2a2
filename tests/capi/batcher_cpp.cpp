// gpushare::Batcher over the C ABI.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <gpushare/gpushare.hpp>

#include "check.hpp"

int main() {
  constexpr uint64_t kMs = 1'000'000;
  gpushare::Batcher batcher;
  const uint32_t model = batcher.add_model(10 * kMs, 0.5, {1, 2, 4});
  for (int i = 0; i < 64; ++i) batcher.observe(model, 0, 10 * kMs);
  gpushare_request request = GPUSHARE_REQUEST_INIT;
  request.deadline_ns = 200 * kMs;
  for (request.id = 1; request.id <= 6; ++request.id) CHECK(batcher.arrive(request, 0));
  request.id = 99;
  request.deadline_ns = 1 * kMs;
  CHECK(batcher.arrive(request,
                       0));  // 15 ms at the least: one such request runs, to see whether it is hopeless
  request.id = 98;
  CHECK(!batcher.arrive(request, 0));
  CHECK(batcher.cancel(99, 0));
  CHECK(batcher.cancel(6, 0));
  CHECK(!batcher.cancel(6, 0));
  CHECK(batcher.pending() == 5);
  uint64_t wake_ns = 0;
  auto batch = batcher.next(0, 0, &wake_ns);
  CHECK(batch.has_value() && batch->ids.size() == 4);
  CHECK(!batcher.next(0, 1, &wake_ns).has_value());
  if (batch) {
    batcher.started(batch->info.id, 0);
    batcher.observe_batch(model, 4, 10 * kMs, 30 * kMs);
    batcher.finished(batch->info.id, 30 * kMs, 30 * kMs);
  }
  const auto drops = batcher.take_drops();
  CHECK(drops.size() == 2 && drops[0].id == 99 && drops[1].id == 6 &&
        drops[1].reason == GPUSHARE_DROP_CANCELLED);
  try {
    gpushare::Batcher none("nope");
    CHECK(false);
  } catch (const gpushare::Error& error) {
    CHECK(error.status() == GPUSHARE_NOT_FOUND);
  }
  return failures == 0 ? 0 : 1;
}
