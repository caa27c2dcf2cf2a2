/* Workers of a memory daemon, through the C ABI, against `gpushare model-daemon` in a process of its own.
 * Arguments: the gpushare tool. SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static char folder[] = "/tmp/gpushare-worker-XXXXXX"; /* the X are mkdtemp's to fill in */
static char socket_path[128], model_path[128];

static void write_model(void) {
  static const char json[] =
      "{\"a\":{\"dtype\":\"U8\",\"shape\":[1000],\"data_offsets\":[0,1000]},"
      "\"b\":{\"dtype\":\"U8\",\"shape\":[5000],\"data_offsets\":[1000,6000]}}";
  FILE* file = fopen(model_path, "wb");
  uint64_t length = sizeof(json) - 1;
  int i;
  CHECK(file != NULL);
  for (i = 0; i < 8; ++i) fputc((int)(length >> (8 * i) & 0xff), file);
  fwrite(json, 1, sizeof(json) - 1, file);
  for (i = 0; i < 6000; ++i) fputc(i % 251, file);
  fclose(file);
}

static pid_t start_daemon(const char* tool) {
  pid_t child = fork();
  if (child == 0) {
    execl(tool, tool, "model-daemon", "--socket", socket_path, "--device", "host?total_gib=0.25",
          "--capacity", "64MiB", (char*)NULL);
    _exit(127);
  }
  return child;
}

/* Attaches once the daemon is up. */
static gpushare_worker attach(const char* name, uint64_t scratch_bytes) {
  gpushare_worker worker = NULL;
  gpushare_worker_params params = GPUSHARE_WORKER_PARAMS_INIT;
  int32_t status = GPUSHARE_UNAVAILABLE;
  int i;
  params.socket = socket_path;
  params.name = name;
  params.model = model_path;
  params.scratch_bytes = scratch_bytes;
  for (i = 0; i < 3000 && status == GPUSHARE_UNAVAILABLE; ++i) {
    status = gpushare_worker_attach(&params, &worker);
    if (status == GPUSHARE_UNAVAILABLE) usleep(10000);
  }
  CHECK_STATUS(status, GPUSHARE_OK);
  return worker;
}

static void check_bad_calls(void) {
  gpushare_worker worker = NULL;
  gpushare_worker_params params = GPUSHARE_WORKER_PARAMS_INIT;
  gpushare_worker_info info = GPUSHARE_WORKER_INFO_INIT;
  gpushare_worker_layer layer = GPUSHARE_WORKER_LAYER_INIT;
  uint32_t wanted = 7;
  CHECK_STATUS(gpushare_worker_attach(NULL, &worker), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_worker_attach(&params, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_worker_attach(&params, &worker), GPUSHARE_INVALID_ARGUMENT);
  params.socket = "/tmp/gpushare-nobody-is-here";
  params.name = "x";
  CHECK_STATUS(gpushare_worker_attach(&params, &worker), GPUSHARE_INVALID_ARGUMENT);
  params.model = "/tmp/gpushare-no-model";
  CHECK_STATUS(gpushare_worker_attach(&params, &worker), GPUSHARE_UNAVAILABLE);
  CHECK(strstr(gpushare_last_error_message(), "gpushare model-daemon --socket") != NULL);
  params.struct_size = 8;
  CHECK_STATUS(gpushare_worker_attach(&params, &worker), GPUSHARE_INVALID_ARGUMENT);
  CHECK(worker == NULL);
  CHECK_STATUS(gpushare_worker_detach(NULL), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_worker_begin(NULL, 0), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_worker_end(NULL), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_worker_wait_layers(NULL, 0, 1, 0), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_worker_get_wanted(NULL, &wanted), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_worker_get_info(NULL, &info), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_worker_get_layer(NULL, 0, &layer), GPUSHARE_INVALID_HANDLE);
  CHECK(wanted == 7);
}

int main(int argc, char** argv) {
  gpushare_worker a, b;
  gpushare_worker_info info = GPUSHARE_WORKER_INFO_INIT;
  gpushare_worker_layer layer = GPUSHARE_WORKER_LAYER_INIT;
  uint32_t wanted = 7;
  pid_t daemon;
  int status = 0, i, same = 1;
  if (argc != 2 || mkdtemp(folder) == NULL) return 2;
  snprintf(socket_path, sizeof(socket_path), "%s/socket", folder);
  snprintf(model_path, sizeof(model_path), "%s/m.safetensors", folder);
  write_model();
  check_bad_calls();

  daemon = start_daemon(argv[1]);
  a = attach("a", 100);
  b = attach("b", 0);
  CHECK_STATUS(gpushare_worker_get_info(a, &info), GPUSHARE_OK);
  CHECK(info.layers == 2 && info.in_turn == 0 && info.scratch_bytes >= 100 && info.scratch_address != 0);
  CHECK(strncmp(info.device, "host", 4) == 0);
  CHECK_STATUS(gpushare_worker_end(a), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_worker_wait_layers(a, 0, 1, 0), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_worker_get_layer(a, 2, &layer), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_worker_get_wanted(a, NULL), GPUSHARE_INVALID_ARGUMENT);

  CHECK_STATUS(gpushare_worker_begin(a, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_worker_begin(a, 0), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_worker_wait_layers(a, 0, 3, 0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_worker_wait_layers(a, 0, 2, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_worker_get_layer(a, 1, &layer), GPUSHARE_OK);
  CHECK(strcmp(layer.name, "b") == 0 && layer.bytes == 5000);
  for (i = 0; i < 5000; ++i)
    same = same && ((const unsigned char*)(uintptr_t)layer.address)[i] == (i + 1000) % 251;
  CHECK(same);
  memset((void*)(uintptr_t)info.scratch_address, 1, (size_t)info.scratch_bytes);
  CHECK_STATUS(gpushare_worker_get_wanted(a, &wanted), GPUSHARE_OK);
  CHECK(wanted == 0);
  CHECK_STATUS(gpushare_worker_begin(b, 1000000), GPUSHARE_TIMED_OUT);
  CHECK_STATUS(gpushare_worker_end(a), GPUSHARE_OK);
  CHECK_STATUS(gpushare_worker_begin(b, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_worker_get_info(b, &info), GPUSHARE_OK);
  CHECK(info.in_turn == 1 && info.arrived_at_begin == 2);
  CHECK_STATUS(gpushare_worker_detach(b), GPUSHARE_OK); /* with its turn */
  CHECK_STATUS(gpushare_worker_detach(b), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_worker_begin(a, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);

  kill(daemon, SIGKILL);
  waitpid(daemon, &status, 0);
  CHECK_STATUS(gpushare_worker_end(a), GPUSHARE_UNAVAILABLE);
  CHECK(strstr(gpushare_last_error_message(), "attach a new one") != NULL);
  CHECK_STATUS(gpushare_worker_begin(a, 0), GPUSHARE_UNAVAILABLE);
  CHECK_STATUS(gpushare_worker_detach(a), GPUSHARE_OK);

  daemon = start_daemon(argv[1]); /* over the stale socket */
  a = attach("again", 0);
  CHECK_STATUS(gpushare_worker_begin(a, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_worker_end(a), GPUSHARE_OK);
  CHECK_STATUS(gpushare_worker_detach(a), GPUSHARE_OK);
  kill(daemon, SIGTERM);
  waitpid(daemon, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(access(socket_path, F_OK) != 0);
  unlink(model_path);
  snprintf(model_path, sizeof(model_path), "%s/socket.lock", folder);
  unlink(model_path);
  CHECK(rmdir(folder) == 0);
  return capi_result();
}
