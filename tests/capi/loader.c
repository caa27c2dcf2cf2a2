/* Loading models through the C ABI: plans, images, loading into sessions, switching; every refusal. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "gpushare/gpushare.h"

enum { kLayers = 4, kLayerBytes = 300000 };
static unsigned char layer_data[kLayers][kLayerBytes];

static gpushare_loader make_loader(gpushare_runtime runtime) {
  gpushare_loader loader = NULL;
  gpushare_loader_params params = GPUSHARE_LOADER_PARAMS_INIT;
  params.chunk_bytes = 65536;
  params.limit_bytes = 16 * MIB;
  params.keep_ns = GPUSHARE_NO_TIMEOUT;
  CHECK_STATUS(gpushare_loader_create(runtime, &params, &loader), GPUSHARE_OK);
  return loader;
}

static gpushare_image make_image(gpushare_loader loader, const char* name, int seed) {
  gpushare_image image = NULL;
  gpushare_layer_source sources[kLayers];
  static const char* const names[kLayers] = {"a", "b", "c", "d"};
  int l, b;
  for (l = 0; l < kLayers; ++l) {
    for (b = 0; b < kLayerBytes; ++b) layer_data[l][b] = (unsigned char)(seed + l * 7 + b % 251);
    sources[l].name = names[l];
    sources[l].data = layer_data[l];
    sources[l].bytes = kLayerBytes;
  }
  CHECK_STATUS(gpushare_image_create(loader, name, kLayers, sources, &image), GPUSHARE_OK);
  return image;
}

static void plans(void) {
  gpushare_plan_params params = GPUSHARE_PLAN_PARAMS_INIT;
  gpushare_link_costs link = GPUSHARE_LINK_COSTS_INIT;
  const uint64_t bytes[3] = {1000000, 1000000, 1000000};
  const uint64_t execution_ns[3] = {1000000, 1000000, 1000000};
  uint32_t ends[3] = {9, 9, 9}, groups = 0;
  uint64_t makespan_ns = 0;
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 3, bytes, NULL, ends, &groups, NULL),
               GPUSHARE_INVALID_ARGUMENT); /* no bandwidth */
  link.bytes_per_s = 1000000000;
  CHECK_STATUS(gpushare_plan_solve(NULL, &link, 3, bytes, NULL, ends, &groups, NULL),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_plan_solve(&params, NULL, 3, bytes, NULL, ends, &groups, NULL),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 0, bytes, NULL, ends, &groups, NULL),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 3, NULL, NULL, ends, &groups, NULL),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 3, bytes, NULL, NULL, &groups, NULL),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 3, bytes, NULL, ends, NULL, NULL),
               GPUSHARE_INVALID_ARGUMENT);
  params.resident_layers = 4;
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 3, bytes, NULL, ends, &groups, NULL),
               GPUSHARE_INVALID_ARGUMENT);
  params.resident_layers = 0;
  CHECK(ends[0] == 9);
  /* Without overheads a layer a group: 1 ms each way, the last one done after 4 ms. */
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 3, bytes, execution_ns, ends, &groups, &makespan_ns),
               GPUSHARE_OK);
  CHECK(groups == 3 && ends[2] == 3 && makespan_ns == 4000000);
  /* Dear calls: one group. */
  link.call_overhead_ns = 100000000;
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 3, bytes, NULL, ends, &groups, &makespan_ns), GPUSHARE_OK);
  CHECK(groups == 1 && ends[0] == 3 && makespan_ns == 106000000);
  link.call_overhead_ns = 0;
  link.group_overhead_ns = 100000000; /* once a group: 3 ms on the link, then 100 and 3 */
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 3, bytes, NULL, ends, &groups, &makespan_ns), GPUSHARE_OK);
  CHECK(groups == 1 && makespan_ns == 106000000);
  link.group_overhead_ns = 0;
  /* The link is free in 10 ms, or the lane in 20; two layers are there; no group above 2 MB. */
  params.link_busy_ns = 10000000;
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 3, bytes, execution_ns, ends, &groups, &makespan_ns),
               GPUSHARE_OK);
  CHECK(makespan_ns == 14000000);
  params.link_busy_ns = 0;
  params.lane_busy_ns = 20000000;
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 3, bytes, execution_ns, ends, &groups, &makespan_ns),
               GPUSHARE_OK);
  CHECK(makespan_ns == 23000000);
  params.lane_busy_ns = 0;
  params.resident_layers = 2;
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 3, bytes, execution_ns, ends, &groups, &makespan_ns),
               GPUSHARE_OK);
  CHECK(makespan_ns == 3000000 && ends[groups - 1] == 3);
  params.resident_layers = 0;
  params.group_cap_bytes = 2000000;
  link.call_overhead_ns = 100000000;
  CHECK_STATUS(gpushare_plan_solve(&params, &link, 3, bytes, NULL, ends, &groups, &makespan_ns), GPUSHARE_OK);
  CHECK(groups == 2 && ends[1] == 3);
}

static void loaders(gpushare_runtime runtime) {
  gpushare_loader loader = NULL;
  gpushare_loader_params params = GPUSHARE_LOADER_PARAMS_INIT;
  gpushare_link_costs link = GPUSHARE_LINK_COSTS_INIT;
  const gpushare_link_costs unknown = GPUSHARE_LINK_COSTS_INIT;
  gpushare_runtime_info of_runtime = GPUSHARE_RUNTIME_INFO_INIT;
  gpushare_loader_info info = GPUSHARE_LOADER_INFO_INIT;
  CHECK_STATUS(gpushare_loader_create(NULL, &params, &loader), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_loader_create(runtime, NULL, &loader), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_loader_create(runtime, &params, NULL), GPUSHARE_INVALID_ARGUMENT);
  params.read_path = 4;
  CHECK_STATUS(gpushare_loader_create(runtime, &params, &loader), GPUSHARE_INVALID_ARGUMENT);
  params.read_path = GPUSHARE_READ_DIRECT;
  params.chunk_bytes = 3;
  CHECK_STATUS(gpushare_loader_create(runtime, &params, &loader), GPUSHARE_INVALID_ARGUMENT);
  params.chunk_bytes = 0;
  params.reads_in_flight = 65;
  CHECK_STATUS(gpushare_loader_create(runtime, &params, &loader), GPUSHARE_INVALID_ARGUMENT);
  params.reads_in_flight = 0;
  params.read_bytes = 1;
  CHECK_STATUS(gpushare_loader_create(runtime, &params, &loader), GPUSHARE_INVALID_ARGUMENT);
  params.read_bytes = 0;
  params.link = &link; /* of no bandwidth */
  CHECK_STATUS(gpushare_loader_create(runtime, &params, &loader), GPUSHARE_INVALID_ARGUMENT);
  link.bytes_per_s = 7000000000;
  link.call_overhead_ns = 1234;
  link.group_overhead_ns = 567;
  link.device_bytes_per_s = 90000000000;
  CHECK_STATUS(gpushare_loader_create(runtime, &params, &loader), GPUSHARE_OK);
  link = unknown;
  CHECK_STATUS(gpushare_loader_get_link(loader, &link), GPUSHARE_OK);
  CHECK(link.known == 1 && link.bytes_per_s == 7000000000 && link.call_overhead_ns == 1234);
  CHECK(link.group_overhead_ns == 567 && link.device_bytes_per_s == 90000000000);
  CHECK_STATUS(gpushare_runtime_get_info(runtime, &of_runtime), GPUSHARE_OK);
  CHECK(of_runtime.link_bytes_per_s == 7000000000);
  CHECK_STATUS(gpushare_loader_calibrate(loader), GPUSHARE_OK);
  CHECK_STATUS(gpushare_loader_get_link(loader, &link), GPUSHARE_OK);
  CHECK(link.bytes_per_s > 0);
  CHECK_STATUS(gpushare_loader_get_info(loader, &info), GPUSHARE_OK);
  CHECK(info.images == 0 && info.images_bytes == 0);
  CHECK(info.kept_bytes == 16 << 20); /* the chunk from which the calibration copied */
  CHECK(info.limit_bytes == UINT64_MAX && info.keep_ns == 10000000000);
  CHECK_STATUS(gpushare_loader_get_info(loader, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_loader_get_link(loader, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_loader_release(loader), GPUSHARE_OK);
  CHECK_STATUS(gpushare_loader_release(loader), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_loader_calibrate(loader), GPUSHARE_INVALID_HANDLE);
  /* No costs given: assumed ones. */
  params.link = NULL;
  params.keep_ns = 1;
  CHECK_STATUS(gpushare_loader_create(runtime, &params, &loader), GPUSHARE_OK);
  CHECK_STATUS(gpushare_loader_get_info(loader, &info), GPUSHARE_OK);
  CHECK(info.keep_ns == 1);
  CHECK_STATUS(gpushare_loader_get_link(loader, &link), GPUSHARE_OK);
  CHECK(link.known == 0 && link.bytes_per_s > 0);
  CHECK_STATUS(gpushare_loader_release(loader), GPUSHARE_OK);
}

static void write_file(const char* path, const char* json, const void* data, size_t bytes) {
  FILE* file = fopen(path, "wb");
  const uint64_t size = strlen(json);
  unsigned char header[8];
  int i;
  for (i = 0; i < 8; ++i) header[i] = (unsigned char)(size >> (8 * i));
  CHECK(file != NULL);
  if (file == NULL) return;
  CHECK(fwrite(header, 1, 8, file) == 8);
  CHECK(fwrite(json, 1, size, file) == size);
  CHECK(fwrite(data, 1, bytes, file) == bytes);
  CHECK(fclose(file) == 0);
}

static void images(gpushare_runtime runtime) {
  const gpushare_loader loader = make_loader(runtime);
  gpushare_image image = NULL, again = NULL, ordered = NULL;
  gpushare_image_params params = GPUSHARE_IMAGE_PARAMS_INIT;
  gpushare_image_info info = GPUSHARE_IMAGE_INFO_INIT;
  gpushare_layer_info layer = GPUSHARE_LAYER_INFO_INIT;
  gpushare_loader_info cache = GPUSHARE_LOADER_INFO_INIT;
  gpushare_layer_source source = {"x", NULL, 10};
  const char* order[2] = {"two", "one"};
  char path[64], sums[80];
  FILE* file = NULL;
  uint32_t index = 9;
  snprintf(path, sizeof path, "/tmp/gpushare-capi-%d.safetensors", (int)getpid());
  snprintf(sums, sizeof sums, "%s.crc32c", path);
  write_file(path,
             "{\"one\":{\"dtype\":\"U8\",\"shape\":[9],\"data_offsets\":[0,9]},"
             "\"two\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[9,12]}}",
             "123456789abc", 12);
  CHECK_STATUS(gpushare_image_open(NULL, path, NULL, &image), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_image_open(loader, NULL, NULL, &image), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_image_open(loader, path, NULL, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_image_open(loader, "/nowhere.safetensors", NULL, &image), GPUSHARE_IO_ERROR);
  CHECK_STATUS(gpushare_image_open(loader, path, NULL, &image), GPUSHARE_OK);
  CHECK_STATUS(gpushare_image_open(loader, path, &params, &again), GPUSHARE_OK);
  CHECK(image != again);
  CHECK_STATUS(gpushare_loader_get_info(loader, &cache), GPUSHARE_OK);
  CHECK(cache.images == 1 && cache.hits == 1 && cache.misses == 1 && cache.images_bytes == 65536);
  CHECK_STATUS(gpushare_image_get_info(image, &info), GPUSHARE_OK);
  CHECK(info.layers == 2 && info.bytes == 256 + 3 && info.held_bytes == 65536);
  CHECK(info.observations == 0 && info.replans == 0);
  CHECK_STATUS(gpushare_image_find_layer(image, "two", &index), GPUSHARE_OK);
  CHECK(index == 1);
  CHECK_STATUS(gpushare_image_find_layer(image, "three", &index), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_image_find_layer(image, NULL, &index), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_image_find_layer(image, "one", NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_image_get_layer(image, 1, &layer), GPUSHARE_OK);
  CHECK(strcmp(layer.name, "two") == 0 && layer.bytes == 3 && layer.offset_bytes == 256);
  CHECK(layer.address == 0 && layer.execution_ns == 0);
  CHECK_STATUS(gpushare_image_get_layer(image, 2, &layer), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_image_report_execution(image, 0, 1, 5000000), GPUSHARE_OK);
  CHECK_STATUS(gpushare_image_report_execution(image, 1, 1, 1), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_image_report_execution(image, 0, 3, 1), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_image_get_layer(again, 0, &layer), GPUSHARE_OK); /* one image, one profile */
  CHECK(layer.execution_ns == 5000000);
  CHECK_STATUS(gpushare_image_get_info(image, &info), GPUSHARE_OK);
  CHECK(info.observations == 1);
  /* An order of layers; one that does not fit. */
  params.order_count = 2;
  CHECK_STATUS(gpushare_image_open(loader, path, &params, &ordered), GPUSHARE_INVALID_ARGUMENT);
  params.order = order;
  CHECK_STATUS(gpushare_image_open(loader, path, &params, &ordered), GPUSHARE_OK);
  CHECK_STATUS(gpushare_image_find_layer(ordered, "two", &index), GPUSHARE_OK);
  CHECK(index == 0);
  CHECK_STATUS(gpushare_image_release(ordered), GPUSHARE_OK);
  order[0] = "one";
  CHECK_STATUS(gpushare_image_open(loader, path, &params, &ordered), GPUSHARE_INVALID_ARGUMENT);
  order[0] = NULL;
  CHECK_STATUS(gpushare_image_open(loader, path, &params, &ordered), GPUSHARE_INVALID_ARGUMENT);
  params.order_count = 0;
  /* The order that names tell: "two" as an input, by name, would come first; these tell nothing. */
  params.order_by = 2;
  CHECK_STATUS(gpushare_image_open(loader, path, &params, &ordered), GPUSHARE_INVALID_ARGUMENT);
  CHECK(strstr(gpushare_last_error_message(), "order_by is 2") != NULL);
  params.order_by = GPUSHARE_ORDER_BY_NAMES;
  CHECK_STATUS(gpushare_image_open(loader, path, &params, &ordered), GPUSHARE_OK);
  CHECK_STATUS(gpushare_image_release(ordered), GPUSHARE_OK);
  params.order_by = GPUSHARE_ORDER_BY_BYTES;
  /* Checksums: of "123456789" the CRC-32C is e3069283. */
  params.checksums = sums;
  CHECK_STATUS(gpushare_image_open(loader, path, &params, &ordered), GPUSHARE_IO_ERROR);
  file = fopen(sums, "w");
  fputs("e3069283 one\n", file);
  fclose(file);
  CHECK_STATUS(gpushare_image_open(loader, path, &params, &ordered), GPUSHARE_MALFORMED_INPUT);
  CHECK_STATUS(gpushare_loader_get_info(loader, &cache), GPUSHARE_OK);
  CHECK(cache.kept_bytes == 65536 && cache.keep_ns == GPUSHARE_NO_TIMEOUT); /* the failed read's chunk */
  CHECK(strstr(gpushare_last_error_message(), "'two' is not listed") != NULL);
  file = fopen(sums, "a");
  fputs("364B3FB7 two\n", file); /* of "abc" */
  fclose(file);
  CHECK_STATUS(gpushare_image_open(loader, path, &params, &ordered), GPUSHARE_OK);
  CHECK_STATUS(gpushare_image_release(ordered), GPUSHARE_OK);
  write_file(path,
             "{\"one\":{\"dtype\":\"U8\",\"shape\":[9],\"data_offsets\":[0,9]},"
             "\"two\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[9,12]}}",
             "123456780abc", 12);
  CHECK_STATUS(gpushare_image_open(loader, path, &params, &ordered), GPUSHARE_MALFORMED_INPUT);
  CHECK(strstr(gpushare_last_error_message(), "'one' has checksum") != NULL);
  /* From memory. */
  CHECK_STATUS(gpushare_image_create(loader, "m", 0, &source, &ordered), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_image_create(loader, "m", 1, NULL, &ordered), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_image_create(loader, "m", 1, &source, &ordered), GPUSHARE_INVALID_ARGUMENT);
  source.data = path;
  CHECK_STATUS(gpushare_image_create(loader, "m", 1, &source, NULL), GPUSHARE_INVALID_ARGUMENT);
  source.bytes = 17 * MIB;
  CHECK_STATUS(gpushare_image_create(loader, "m", 1, &source, &ordered), GPUSHARE_HOST_OUT_OF_MEMORY);
  source.bytes = UINT64_MAX;
  CHECK_STATUS(gpushare_image_create(loader, "m", 1, &source, &ordered), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_image_release(image), GPUSHARE_OK);
  CHECK_STATUS(gpushare_image_release(image), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_image_get_info(image, &info), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_loader_release(loader), GPUSHARE_OK);
  CHECK_STATUS(gpushare_image_get_info(again, &info), GPUSHARE_OK); /* images outlive their loader's handle */
  CHECK_STATUS(gpushare_image_release(again), GPUSHARE_OK);
  remove(path);
  remove(sums);
}

static void count_group(void* user_data, uint32_t group, uint32_t first, uint32_t end) {
  uint32_t* counts = (uint32_t*)user_data;
  if (group < kLayers) counts[group] = end - first;
}

static void loading(gpushare_runtime runtime) {
  const gpushare_loader loader = make_loader(runtime);
  const gpushare_image image = make_image(loader, "m", 5), unnamed = make_image(loader, NULL, 5);
  const gpushare_session session = open_session(runtime, "user", 2 * MIB, 1 * MIB);
  uint32_t layer_index = 0;
  gpushare_load_params params = GPUSHARE_LOAD_PARAMS_INIT;
  gpushare_model model = NULL;
  gpushare_iteration iteration = NULL;
  gpushare_stream stream = NULL;
  gpushare_model_info info = GPUSHARE_MODEL_INFO_INIT;
  gpushare_layer_info layer = GPUSHARE_LAYER_INFO_INIT;
  gpushare_session_info used = GPUSHARE_SESSION_INFO_INIT;
  const uint32_t ends[2] = {1, kLayers}, bad_ends[2] = {3, 2};
  uint32_t counts[kLayers] = {0, 0, 0, 0}, l;
  static unsigned char back[kLayerBytes];
  CHECK_STATUS(gpushare_image_find_layer(image, "none", &layer_index), GPUSHARE_NOT_FOUND);
  CHECK(strstr(gpushare_last_error_message(), "image 'm' has no layer 'none'") != NULL);
  CHECK_STATUS(gpushare_image_find_layer(unnamed, "none", &layer_index), GPUSHARE_NOT_FOUND);
  CHECK(strstr(gpushare_last_error_message(), "image 'image' has no layer") != NULL);
  CHECK_STATUS(gpushare_image_release(unnamed), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_load(NULL, image, NULL, &model), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_session_load(session, NULL, NULL, &model), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_session_load(session, image, NULL, NULL), GPUSHARE_INVALID_ARGUMENT);
  params.group_count = 2;
  CHECK_STATUS(gpushare_session_load(session, image, &params, &model), GPUSHARE_INVALID_ARGUMENT);
  params.group_ends = bad_ends;
  CHECK_STATUS(gpushare_session_load(session, image, &params, &model), GPUSHARE_INVALID_ARGUMENT);
  params.group_ends = ends;
  params.on_group = count_group;
  params.on_group_user_data = counts;
  CHECK_STATUS(gpushare_session_load(session, image, &params, &model), GPUSHARE_OK);
  CHECK_STATUS(gpushare_image_release(image), GPUSHARE_OK); /* the model keeps it */
  CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_get_stream(iteration, &stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_model_make_usable(model, 0, 1, NULL), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_model_make_usable(NULL, 0, 1, stream), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_model_make_usable(model, 1, 1, stream), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_model_make_usable(model, 0, kLayers + 1, stream), GPUSHARE_INVALID_ARGUMENT);
  for (l = 0; l < kLayers; ++l) {
    int wrong = 0, b;
    CHECK_STATUS(gpushare_model_get_layer(model, l, &layer), GPUSHARE_OK);
    CHECK(layer.layer == l && layer.bytes == kLayerBytes && layer.group == (l == 0 ? 0u : 1u));
    CHECK_STATUS(gpushare_model_make_usable(model, l, l + 1, stream), GPUSHARE_OK);
    CHECK_STATUS(gpushare_stream_copy(stream, (uint64_t)(uintptr_t)back, layer.address, kLayerBytes,
                                      GPUSHARE_COPY_DEVICE_TO_HOST),
                 GPUSHARE_OK);
    CHECK_STATUS(gpushare_stream_synchronize(stream), GPUSHARE_OK);
    for (b = 0; b < kLayerBytes; ++b) wrong += back[b] != (unsigned char)(5 + (int)l * 7 + b % 251);
    CHECK(wrong == 0);
  }
  CHECK_STATUS(gpushare_model_mark_end(model, stream), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_model_wait(model, kLayers - 1, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_model_wait(model, kLayers, 0), GPUSHARE_INVALID_ARGUMENT);
  CHECK(counts[0] == 1 && counts[1] == kLayers - 1);
  CHECK_STATUS(gpushare_model_get_info(model, &info), GPUSHARE_OK);
  CHECK(info.layers == kLayers && info.groups == 2 && info.layers_arrived == kLayers);
  CHECK(info.address != 0 && info.bytes >= (uint64_t)kLayers * kLayerBytes);
  CHECK_STATUS(gpushare_model_get_layer(model, kLayers, &layer), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_model_get_layer(model, 0, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_get_info(session, &used), GPUSHARE_OK);
  CHECK(used.persistent_bytes >= info.bytes);
  CHECK_STATUS(gpushare_model_release(model), GPUSHARE_OK);
  CHECK_STATUS(gpushare_model_release(model), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_session_get_info(session, &used), GPUSHARE_OK);
  CHECK(used.persistent_bytes == 0);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_loader_release(loader), GPUSHARE_OK);
}

/* The plan follows the times that a load is given; times are measured unless they are not wanted. */
static void planned(void) {
  const gpushare_runtime runtime = open_runtime("sim", "fair", 64 * MIB);
  const gpushare_session session = open_session(runtime, "user", 4 * MIB, 1 * MIB);
  gpushare_loader loader = NULL;
  gpushare_loader_params costs = GPUSHARE_LOADER_PARAMS_INIT;
  gpushare_link_costs link = GPUSHARE_LINK_COSTS_INIT;
  gpushare_image image;
  gpushare_load_params params = GPUSHARE_LOAD_PARAMS_INIT;
  gpushare_model_info info = GPUSHARE_MODEL_INFO_INIT;
  gpushare_image_info measured = GPUSHARE_IMAGE_INFO_INIT;
  uint64_t execution_ns[kLayers];
  int i, k, l;
  costs.chunk_bytes = 65536;
  link.bytes_per_s = 12000000000; /* 25 us a layer */
  link.call_overhead_ns = 100000;
  costs.link = &link;
  CHECK_STATUS(gpushare_loader_create(runtime, &costs, &loader), GPUSHARE_OK);
  image = make_image(loader, "m", 5);
  params.execution_ns = execution_ns;
  for (i = 0; i < 2; ++i) {
    gpushare_model model = NULL;
    gpushare_iteration iteration = NULL;
    gpushare_stream stream = NULL;
    /* Nothing to compute: calls cost most, one group. Much to compute in the first: it goes ahead. */
    for (l = 0; l < kLayers; ++l) execution_ns[l] = i == 0 ? 0 : 10000000;
    params.no_profile = i == 0;
    CHECK_STATUS(gpushare_session_load(session, image, &params, &model), GPUSHARE_OK);
    CHECK_STATUS(gpushare_model_wait(model, kLayers - 1, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
    CHECK_STATUS(gpushare_model_get_info(model, &info), GPUSHARE_OK);
    CHECK(info.layers_arrived == kLayers && info.load_ns >= 100000);
    CHECK(i == 0 ? info.groups == 1 : info.groups > 1);
    for (k = 0; k < 2; ++k) { /* a run is measured once the next one begins */
      CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
      CHECK_STATUS(gpushare_iteration_get_stream(iteration, &stream), GPUSHARE_OK);
      CHECK_STATUS(gpushare_model_make_usable(model, 0, kLayers, stream), GPUSHARE_OK);
      CHECK_STATUS(gpushare_stream_fill(stream, info.address, 0, 1000000), GPUSHARE_OK);
      CHECK_STATUS(gpushare_model_mark_end(model, stream), GPUSHARE_OK);
      CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
      CHECK_STATUS(gpushare_runtime_synchronize(runtime, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
    }
    CHECK_STATUS(gpushare_model_release(model), GPUSHARE_OK);
    CHECK_STATUS(gpushare_image_get_info(image, &measured), GPUSHARE_OK);
    CHECK((measured.observations > 0) == (i == 1));
  }
  CHECK_STATUS(gpushare_image_release(image), GPUSHARE_OK);
  CHECK_STATUS(gpushare_loader_release(loader), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
}

/* With a budget for first layers what switches deliver and report is the same; it holds no more than allowed. */
static void switching(gpushare_runtime runtime, uint64_t standby_bytes) {
  const gpushare_loader loader = make_loader(runtime);
  const gpushare_image images[2] = {make_image(loader, "m0", 1), make_image(loader, "m1", 2)};
  gpushare_switcher switcher = NULL;
  gpushare_switcher_params params = GPUSHARE_SWITCHER_PARAMS_INIT;
  gpushare_session_params session = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_switcher_info info = GPUSHARE_SWITCHER_INFO_INIT;
  gpushare_member_info member_info = GPUSHARE_MEMBER_INFO_INIT;
  gpushare_iteration iteration = NULL, second = NULL;
  gpushare_stream stream = NULL;
  gpushare_model model = NULL;
  gpushare_device_address block = 0;
  uint64_t members[2] = {0, 0};
  uint32_t loaded = 0, turn;
  CHECK_STATUS(gpushare_switcher_create(NULL, &params, &switcher), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_switcher_create(loader, NULL, &switcher), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_switcher_create(loader, &params, NULL), GPUSHARE_INVALID_ARGUMENT);
  params.residency = 2;
  CHECK_STATUS(gpushare_switcher_create(loader, &params, &switcher), GPUSHARE_INVALID_ARGUMENT);
  params.residency = GPUSHARE_RESIDENCY_WEIGHTED;
  params.keep_bytes = 0;
  params.standby_bytes = standby_bytes;
  CHECK_STATUS(gpushare_switcher_create(loader, &params, &switcher), GPUSHARE_OK);
  session.ephemeral_bytes = MIB;
  CHECK_STATUS(gpushare_switcher_add(NULL, &session, images[0], NULL, &members[0]), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_switcher_add(switcher, NULL, images[0], NULL, &members[0]),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_switcher_add(switcher, &session, NULL, NULL, &members[0]), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_switcher_add(switcher, &session, images[0], NULL, NULL), GPUSHARE_INVALID_ARGUMENT);
  session.persistent_bytes = UINT64_MAX;
  CHECK_STATUS(gpushare_switcher_add(switcher, &session, images[0], NULL, &members[0]),
               GPUSHARE_EXCEEDS_CAPACITY);
  session.persistent_bytes = 0;
  session.name = "first";
  CHECK_STATUS(gpushare_switcher_add(switcher, &session, images[0], NULL, &members[0]), GPUSHARE_OK);
  session.name = NULL;
  CHECK_STATUS(gpushare_switcher_add(switcher, &session, images[1], NULL, &members[1]), GPUSHARE_OK);
  CHECK(members[0] != members[1]);
  CHECK_STATUS(gpushare_switcher_begin(NULL, members[0], 0, &iteration, &model, &loaded),
               GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_switcher_begin(switcher, members[0], 0, NULL, &model, &loaded),
               GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_switcher_begin(switcher, 99, 0, &iteration, &model, &loaded), GPUSHARE_NOT_FOUND);
  for (turn = 0; turn < 6; ++turn) {
    const uint64_t member = members[turn / 2 % 2];
    CHECK_STATUS(gpushare_switcher_begin(switcher, member, GPUSHARE_NO_TIMEOUT, &iteration, &model, &loaded),
                 GPUSHARE_OK);
    CHECK(loaded == (turn % 2 == 0 ? 1u : 0u));
    CHECK_STATUS(gpushare_iteration_get_stream(iteration, &stream), GPUSHARE_OK);
    CHECK_STATUS(gpushare_model_make_usable(model, 0, kLayers, stream), GPUSHARE_OK);
    CHECK_STATUS(gpushare_iteration_alloc(iteration, 1000, 0, &block), GPUSHARE_OK);
    CHECK_STATUS(gpushare_model_release(model), GPUSHARE_INVALID_ARGUMENT); /* the switcher's */
    CHECK_STATUS(gpushare_switcher_begin(switcher, member, GPUSHARE_NO_TIMEOUT, &second, NULL, NULL),
                 GPUSHARE_INVALID_STATE); /* it would wait for itself */
    CHECK_STATUS(gpushare_switcher_release(switcher), GPUSHARE_INVALID_STATE);
    CHECK_STATUS(gpushare_switcher_get_member(switcher, member, &member_info), GPUSHARE_OK);
    CHECK(member_info.state == GPUSHARE_MEMBER_ACTIVE && member_info.device_bytes > 0);
    CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
    CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_INVALID_HANDLE);
    CHECK_STATUS(gpushare_model_make_usable(model, 0, 1, stream), GPUSHARE_INVALID_HANDLE);
  }
  CHECK_STATUS(gpushare_switcher_get_info(switcher, &info), GPUSHARE_OK);
  CHECK(info.members == 2 && info.active == members[0] && info.switches == 3 && info.kept == 0);
  CHECK(info.switch_ns > 0 && info.waiting == 0);
  CHECK(info.standby_bytes <= standby_bytes);
  CHECK_STATUS(gpushare_switcher_get_member(switcher, members[1], &member_info), GPUSHARE_OK);
  CHECK(member_info.state == GPUSHARE_MEMBER_STANDBY && member_info.device_bytes == 0);
  CHECK(member_info.standby_bytes <= info.standby_bytes);
  CHECK(member_info.loads == 1 && member_info.drops == 1 && member_info.iterations == 2);
  CHECK_STATUS(gpushare_switcher_get_member(switcher, 99, &member_info), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_switcher_get_info(switcher, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_switcher_remove(switcher, members[0]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_switcher_remove(switcher, members[0]), GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_switcher_begin(switcher, members[0], 0, &iteration, &model, NULL),
               GPUSHARE_NOT_FOUND);
  CHECK_STATUS(gpushare_switcher_release(switcher), GPUSHARE_OK);
  CHECK_STATUS(gpushare_switcher_release(switcher), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_image_release(images[0]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_image_release(images[1]), GPUSHARE_OK);
  CHECK_STATUS(gpushare_loader_release(loader), GPUSHARE_OK);
}

/* Everything that is left when its runtime closes answers, and is given back. */
static void late(void) {
  const gpushare_runtime runtime = open_runtime("host", "fair", 32 * MIB);
  const gpushare_loader loader = make_loader(runtime);
  const gpushare_image image = make_image(loader, "m", 3);
  const gpushare_session session = open_session(runtime, "user", 2 * MIB, MIB);
  gpushare_switcher switcher = NULL;
  gpushare_switcher_params params = GPUSHARE_SWITCHER_PARAMS_INIT;
  gpushare_session_params member_params = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_model model = NULL, other = NULL;
  gpushare_image second = NULL;
  gpushare_iteration iteration = NULL;
  gpushare_model_info info = GPUSHARE_MODEL_INFO_INIT;
  gpushare_layer_source source = {"x", "abc", 3};
  uint64_t member = 0;
  CHECK_STATUS(gpushare_session_load(session, image, NULL, &model), GPUSHARE_OK);
  CHECK_STATUS(gpushare_switcher_create(loader, &params, &switcher), GPUSHARE_OK);
  CHECK_STATUS(gpushare_switcher_add(switcher, &member_params, image, NULL, &member), GPUSHARE_OK);
  CHECK_STATUS(gpushare_switcher_begin(switcher, member, GPUSHARE_NO_TIMEOUT, &iteration, NULL, NULL),
               GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  CHECK_STATUS(gpushare_model_get_info(model, &info), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_model_wait(model, 0, 0), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_image_create(loader, "n", 1, &source, &second), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_loader_calibrate(loader), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_session_load(session, image, NULL, &other), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_switcher_begin(switcher, member, 0, &iteration, NULL, NULL), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_switcher_add(switcher, &member_params, image, NULL, &member), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_model_release(model), GPUSHARE_OK);
  CHECK_STATUS(gpushare_switcher_release(switcher), GPUSHARE_OK);
  CHECK_STATUS(gpushare_image_release(image), GPUSHARE_OK);
  CHECK_STATUS(gpushare_loader_release(loader), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_close(session), GPUSHARE_OK);
}

int main(void) {
  gpushare_runtime runtime = open_runtime("host", "fair", 64 * MIB);
  gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
  plans();
  loaders(runtime);
  images(runtime);
  loading(runtime);
  switching(runtime, 0);
  switching(runtime, 4 * MIB);
  CHECK_STATUS(gpushare_runtime_get_info(runtime, &info), GPUSHARE_OK);
  CHECK(info.promised_bytes == 0);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  planned();
  late();
  return capi_result();
}
