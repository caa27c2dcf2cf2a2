/* The allocator alone, without a device: place blocks in an arena of your own, online and by an offline plan.
 * SPDX-License-Identifier: Apache-2.0 */
#include <gpushare/gpushare.h>
#include <stdio.h>

#define TRY(call) \
  if ((call) != GPUSHARE_OK) return fprintf(stderr, "%s: %s\n", #call, gpushare_last_error_message()), 1

int main(void) {
  /* Online: allocate and free as the program goes. */
  gpushare_heap heap;
  gpushare_heap_params params = GPUSHARE_HEAP_PARAMS_INIT;
  params.capacity_bytes = 64u << 20;
  TRY(gpushare_heap_create(&params, &heap));
  uint64_t a, b, c, d;
  TRY(gpushare_heap_alloc(heap, 16u << 20, &a));
  TRY(gpushare_heap_alloc(heap, 16u << 20, &b));
  TRY(gpushare_heap_alloc(heap, 16u << 20, &c));
  TRY(gpushare_heap_free(heap, b));
  if (gpushare_heap_alloc(heap, 40u << 20, &d) != GPUSHARE_DEVICE_OUT_OF_MEMORY) return 1;
  printf("refused, as it should be: %s\n", gpushare_last_error_message());
  gpushare_heap_info info = GPUSHARE_HEAP_INFO_INIT;
  TRY(gpushare_heap_get_info(heap, &info));
  printf("%llu blocks live, %llu MiB of %llu MiB\n", (unsigned long long)info.live_blocks,
         (unsigned long long)(info.live_bytes >> 20), (unsigned long long)(info.capacity_bytes >> 20));
  TRY(gpushare_heap_release(heap));

  /* Planned: the lifetimes are known, as after recording one iteration. */
  const uint64_t lower[] = {0, 1, 2, 3}, upper[] = {2, 3, 4, 5}, size[] = {4096, 8192, 4096, 8192};
  uint64_t offset[4], arena;
  TRY(gpushare_placement_solve(4, lower, upper, size, 0, 0, offset, &arena));
  for (int i = 0; i < 4; ++i) printf("buffer %d at %llu\n", i, (unsigned long long)offset[i]);
  printf("arena %llu bytes\n", (unsigned long long)arena);
  return 0;
}
