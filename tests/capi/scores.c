/* Histograms and score queues through the C ABI. SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>
#include <stdlib.h>

#include "check.h"
#include "gpushare/gpushare.h"

static const uint64_t kMs = 1000000;

static void histograms(void) {
  gpushare_histogram histogram = NULL, other = NULL, copy = NULL;
  gpushare_histogram_params params = GPUSHARE_HISTOGRAM_PARAMS_INIT;
  gpushare_histogram_info info = GPUSHARE_HISTOGRAM_INFO_INIT;
  uint64_t i, size = 0;
  double value = 0, longest = 0;
  char* text;
  CHECK_STATUS(gpushare_histogram_create(NULL, &histogram), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_histogram_create(&params, NULL), GPUSHARE_INVALID_ARGUMENT);
  params.window = (1u << 20) + 1;
  CHECK_STATUS(gpushare_histogram_create(&params, &histogram), GPUSHARE_INVALID_ARGUMENT);
  params.window = 200;
  CHECK_STATUS(gpushare_histogram_create(&params, &histogram), GPUSHARE_OK);
  CHECK_STATUS(gpushare_histogram_get_info(histogram, &info), GPUSHARE_OK);
  CHECK(info.count == 0 && info.mean_ns == 0 && info.max_ns == 0);
  CHECK_STATUS(gpushare_histogram_get_quantile(histogram, 0.5, 1, &value), GPUSHARE_NOT_READY);
  for (i = 1; i <= 300; ++i)
    CHECK_STATUS(gpushare_histogram_record(histogram, i * 37 % 100 * kMs), GPUSHARE_OK);
  CHECK_STATUS(gpushare_histogram_get_info(histogram, &info), GPUSHARE_OK);
  CHECK(info.count == 200 && info.drifts == 0);
  CHECK(info.mean_ns > 48e6 && info.mean_ns < 51e6 && info.stddev_ns > 27e6 && info.stddev_ns < 31e6);
  CHECK_STATUS(gpushare_histogram_get_quantile(histogram, 0.5, 1, &value), GPUSHARE_OK);
  CHECK(value > 47e6 && value < 52e6);
  /* The median of the longest of four: the 0.84 quantile of one. */
  CHECK_STATUS(gpushare_histogram_get_quantile(histogram, 0.5, 4, &longest), GPUSHARE_OK);
  CHECK(longest > 81e6 && longest < 87e6);
  CHECK_STATUS(gpushare_histogram_get_quantile(histogram, 1.5, 1, &value), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_histogram_get_quantile(histogram, 0.5, 0, &value), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_histogram_get_quantile(histogram, 0.5, 1, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_histogram_serialize(histogram, NULL, 0, &size), GPUSHARE_INVALID_ARGUMENT);
  CHECK(size > 200);
  CHECK_STATUS(gpushare_histogram_serialize(histogram, NULL, size, &size), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_histogram_serialize(histogram, NULL, 0, NULL), GPUSHARE_INVALID_ARGUMENT);
  text = malloc(size);
  CHECK_STATUS(gpushare_histogram_serialize(histogram, text, size, &size), GPUSHARE_OK);
  CHECK(strlen(text) + 1 == size);
  CHECK_STATUS(gpushare_histogram_parse(text, size, &copy), GPUSHARE_OK);
  CHECK_STATUS(gpushare_histogram_get_info(copy, &info), GPUSHARE_OK);
  CHECK(info.count == 200 && info.mean_ns > 48e6 && info.mean_ns < 52e6);
  CHECK_STATUS(gpushare_histogram_parse(text, 10, &other), GPUSHARE_MALFORMED_INPUT);
  CHECK_STATUS(gpushare_histogram_parse(NULL, 0, &other), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_histogram_parse(text, size, NULL), GPUSHARE_INVALID_ARGUMENT);
  free(text);
  params.drift_samples = UINT32_MAX;
  CHECK_STATUS(gpushare_histogram_create(&params, &other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_histogram_record(other, 7 * kMs), GPUSHARE_OK);
  CHECK_STATUS(gpushare_histogram_merge(copy, other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_histogram_merge(copy, copy), GPUSHARE_OK);
  CHECK_STATUS(gpushare_histogram_merge(copy, NULL), GPUSHARE_INVALID_HANDLE);
  /* A shift of the distribution resets one, not the other that was told never to. */
  for (i = 0; i < 200; ++i) {
    CHECK_STATUS(gpushare_histogram_record(histogram, 1000 * kMs), GPUSHARE_OK);
    CHECK_STATUS(gpushare_histogram_record(other, (i < 100 ? 1 : 1000) * kMs), GPUSHARE_OK);
  }
  CHECK_STATUS(gpushare_histogram_get_info(histogram, &info), GPUSHARE_OK);
  CHECK(info.drifts >= 1 && info.min_ns > 900e6);
  CHECK_STATUS(gpushare_histogram_get_info(other, &info), GPUSHARE_OK);
  CHECK(info.drifts == 0 && info.min_ns < 2e6);
  CHECK_STATUS(gpushare_histogram_reset(other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_histogram_get_info(other, &info), GPUSHARE_OK);
  CHECK(info.count == 0);
  CHECK_STATUS(gpushare_histogram_release(histogram), GPUSHARE_OK);
  CHECK_STATUS(gpushare_histogram_release(histogram), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_histogram_record(histogram, 1), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_histogram_release(other), GPUSHARE_OK);
  CHECK_STATUS(gpushare_histogram_release(copy), GPUSHARE_OK);
}

static void scores(void) {
  gpushare_histogram fast = NULL, slow = NULL;
  gpushare_histogram_params params = GPUSHARE_HISTOGRAM_PARAMS_INIT;
  uint32_t index = 0;
  uint64_t i;
  CHECK_STATUS(gpushare_histogram_create(&params, &fast), GPUSHARE_OK);
  CHECK_STATUS(gpushare_histogram_create(&params, &slow), GPUSHARE_OK);
  {
    gpushare_score_queue queue = NULL;
    gpushare_score_class one = GPUSHARE_SCORE_CLASS_INIT;
    CHECK_STATUS(gpushare_score_queue_create(NULL), GPUSHARE_INVALID_ARGUMENT);
    CHECK_STATUS(gpushare_score_queue_create(&queue), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_add_class(queue, &one, &index), GPUSHARE_INVALID_HANDLE);
    one.histogram = fast;
    CHECK_STATUS(gpushare_score_queue_add_class(queue, &one, &index), GPUSHARE_INVALID_ARGUMENT); /* empty */
    for (i = 0; i < 64; ++i) {
      CHECK_STATUS(gpushare_histogram_record(fast, (10 + i % 4) * kMs), GPUSHARE_OK);
      CHECK_STATUS(gpushare_histogram_record(slow, (100 + i % 4) * kMs), GPUSHARE_OK);
    }
    one.k = 5000;
    CHECK_STATUS(gpushare_score_queue_add_class(queue, &one, &index), GPUSHARE_INVALID_ARGUMENT);
    one.k = 0;
    one.c1 = -1;
    CHECK_STATUS(gpushare_score_queue_add_class(queue, &one, &index), GPUSHARE_INVALID_ARGUMENT);
    one.c1 = 0;
    one.step_count = 1;
    CHECK_STATUS(gpushare_score_queue_add_class(queue, &one, &index), GPUSHARE_INVALID_ARGUMENT);
    one.step_count = 0;
    CHECK_STATUS(gpushare_score_queue_add_class(queue, &one, NULL), GPUSHARE_INVALID_ARGUMENT);
    CHECK_STATUS(gpushare_score_queue_set_class(queue, 3, &one), GPUSHARE_INVALID_ARGUMENT);
    CHECK_STATUS(gpushare_score_queue_release(queue), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_release(queue), GPUSHARE_INVALID_HANDLE);
  }
  {
    gpushare_score_queue queue = NULL;
    gpushare_score_class of_fast = GPUSHARE_SCORE_CLASS_INIT, of_slow = GPUSHARE_SCORE_CLASS_INIT;
    const gpushare_cost_step step = {0, 100.0};
    const uint64_t now = 1000000 * kMs;
    uint32_t entry = 0, a = 0, b = 0;
    uint64_t id = 0, size = 0, count = 0, ids[8];
    double score = 0;
    of_fast.histogram = fast;
    of_slow.histogram = slow;
    CHECK_STATUS(gpushare_score_queue_create(&queue), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_best(queue, now, &id, &score), GPUSHARE_NOT_READY);
    CHECK_STATUS(gpushare_score_queue_insert(queue, 0, now, 1, &entry), GPUSHARE_INVALID_ARGUMENT);
    CHECK_STATUS(gpushare_score_queue_add_class(queue, &of_fast, &a), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_add_class(queue, &of_slow, &b), GPUSHARE_OK);
    /* Per unit of device time a short one is worth more. */
    CHECK_STATUS(gpushare_score_queue_insert(queue, b, now + 200 * kMs, 20, &entry), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_insert(queue, a, now + 200 * kMs, 10, &entry), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_insert(queue, a, now + 50 * kMs, 11, &entry), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_insert(queue, a, now + 1 * kMs, 12, &entry),
                 GPUSHARE_OK); /* cannot finish */
    CHECK_STATUS(gpushare_score_queue_best(queue, now, &id, &score), GPUSHARE_OK);
    CHECK(id == 11 && score > 0);
    CHECK_STATUS(gpushare_score_queue_best(queue, now, NULL, NULL), GPUSHARE_INVALID_ARGUMENT);
    CHECK_STATUS(gpushare_score_queue_pop(queue, now, 2, NULL, &count), GPUSHARE_INVALID_ARGUMENT);
    CHECK_STATUS(gpushare_score_queue_pop(queue, now, 2, ids, &count), GPUSHARE_OK);
    CHECK(count == 2 && ids[0] == 11 && ids[1] == 10);
    CHECK_STATUS(gpushare_score_queue_erase(queue, entry), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_erase(queue, entry), GPUSHARE_NOT_FOUND);
    CHECK_STATUS(gpushare_score_queue_insert(queue, a, now + 300 * kMs, 13, &entry), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_best(queue, now, &id, NULL), GPUSHARE_OK);
    CHECK(id == 13);
    /* Missing the slow one costs a hundred times as much now: its score is the greater. */
    of_slow.steps = &step;
    of_slow.step_count = 1;
    CHECK_STATUS(gpushare_score_queue_set_class(queue, b, &of_slow), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_best(queue, now, &id, &score), GPUSHARE_OK);
    CHECK(id == 20 && score > 0);
    CHECK_STATUS(gpushare_score_queue_get_size(queue, &size), GPUSHARE_OK);
    CHECK(size == 2);
    CHECK_STATUS(gpushare_score_queue_get_size(queue, NULL), GPUSHARE_INVALID_ARGUMENT);
    of_fast.delay_rate_per_ms = 1e-3;
    CHECK_STATUS(gpushare_score_queue_set_class(queue, a, &of_fast),
                 GPUSHARE_OK); /* each class has a rate of its own */
    CHECK_STATUS(gpushare_score_queue_pop(queue, now, 8, ids, &count), GPUSHARE_OK);
    CHECK(count == 2);
    CHECK_STATUS(gpushare_score_queue_release(queue), GPUSHARE_OK);
  }
  CHECK_STATUS(gpushare_histogram_release(fast), GPUSHARE_OK);
  CHECK_STATUS(gpushare_histogram_release(slow), GPUSHARE_OK);
}

/* 0 in a class's fields means the default that the header names. */
static void class_defaults(void) {
  gpushare_histogram histogram = NULL;
  gpushare_histogram_params params = GPUSHARE_HISTOGRAM_PARAMS_INIT;
  const gpushare_score_class none = GPUSHARE_SCORE_CLASS_INIT;
  double expected = 0;
  uint64_t i, id = 0;
  int field;
  CHECK_STATUS(gpushare_histogram_create(&params, &histogram), GPUSHARE_OK);
  for (i = 0; i < 64; ++i)
    CHECK_STATUS(gpushare_histogram_record(histogram, (10 + i % 4) * kMs), GPUSHARE_OK);
  for (field = 0; field < 10;
       ++field) { /* none, then each as its default and as something else, then c0_ns */
    gpushare_score_class of = none;
    gpushare_score_queue queue = NULL;
    uint32_t index = 0, entry = 0;
    double score = 0;
    of.histogram = histogram;
    if (field == 1) of.k = 1;
    if (field == 2) of.k = 2;
    if (field == 3) of.c1 = 1;
    if (field == 4) of.c1 = 2;
    if (field == 5) of.delay_rate_per_ms = 1e-4;
    if (field == 6) of.delay_rate_per_ms = 1e-2;
    if (field == 7) of.bins = 32;
    if (field == 8) of.bins = 1;
    if (field == 9) of.c0_ns = 5e6;
    CHECK_STATUS(gpushare_score_queue_create(&queue), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_add_class(queue, &of, &index), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_insert(queue, index, 15 * kMs, 1, &entry), GPUSHARE_OK);
    CHECK_STATUS(gpushare_score_queue_best(queue, 0, &id, &score), GPUSHARE_OK);
    if (field == 0) expected = score;
    CHECK((score == expected) == (field % 2 == 1 && field < 9) || field == 0 || field == 8);
    CHECK_STATUS(gpushare_score_queue_release(queue), GPUSHARE_OK);
  }
  CHECK_STATUS(gpushare_histogram_release(histogram), GPUSHARE_OK);
}

int main(void) {
  class_defaults();
  histograms();
  scores();
  return capi_result();
}
