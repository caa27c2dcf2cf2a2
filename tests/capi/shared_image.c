/* Images that the daemon shares, through the C ABI, against `gpushare daemon` in a process of its own.
 * Arguments: the gpushare tool. SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static char folder[] = "/tmp/gpushare-image-XXXXXX"; /* the X are mkdtemp's to fill in */
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
    execl(tool, tool, "daemon", "--socket", socket_path, "--device", "host?total_gib=0.25", "--capacity",
          "64MiB", (char*)NULL);
    _exit(127);
  }
  return child;
}

/* A runtime on the shared device, once the daemon is up. */
static gpushare_runtime open_shared(void) {
  gpushare_runtime runtime = NULL;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  int32_t status = GPUSHARE_UNAVAILABLE;
  int i;
  params.device = "shared";
  for (i = 0; i < 3000 && status == GPUSHARE_UNAVAILABLE; ++i) {
    status = gpushare_runtime_open(&params, &runtime);
    if (status == GPUSHARE_UNAVAILABLE) usleep(10000);
  }
  CHECK_STATUS(status, GPUSHARE_OK);
  return runtime;
}

static void check_bad_calls(gpushare_session session) {
  gpushare_shared_image image = NULL;
  gpushare_shared_image_params params = GPUSHARE_SHARED_IMAGE_PARAMS_INIT;
  gpushare_shared_image_info info = GPUSHARE_SHARED_IMAGE_INFO_INIT;
  gpushare_layer_info layer = GPUSHARE_LAYER_INFO_INIT;
  CHECK_STATUS(gpushare_session_open_shared_image(session, NULL, &image), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_open_shared_image(session, &params, NULL), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_session_open_shared_image(session, &params, &image), GPUSHARE_INVALID_ARGUMENT);
  params.path = "/tmp/gpushare-no-model.safetensors";
  CHECK_STATUS(gpushare_session_open_shared_image(NULL, &params, &image), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_session_open_shared_image(session, &params, &image), GPUSHARE_IO_ERROR);
  params.struct_size = 8;
  CHECK_STATUS(gpushare_session_open_shared_image(session, &params, &image), GPUSHARE_INVALID_ARGUMENT);
  CHECK(image == NULL);
  CHECK_STATUS(gpushare_shared_image_release(NULL), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_shared_image_wait(NULL, 0, 1, 0), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_shared_image_get_info(NULL, &info), GPUSHARE_INVALID_HANDLE);
  CHECK_STATUS(gpushare_shared_image_get_layer(NULL, 0, &layer), GPUSHARE_INVALID_HANDLE);
}

int main(int argc, char** argv) {
  gpushare_runtime runtime;
  gpushare_session session = NULL, own_session = NULL;
  gpushare_session_params session_params = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_shared_image image = NULL, second = NULL;
  gpushare_shared_image_params params = GPUSHARE_SHARED_IMAGE_PARAMS_INIT;
  gpushare_shared_image_info info = GPUSHARE_SHARED_IMAGE_INFO_INIT;
  gpushare_layer_info layer = GPUSHARE_LAYER_INFO_INIT;
  gpushare_iteration iteration = NULL;
  pid_t daemon;
  int status = 0, i, same = 1;
  if (argc != 2 || mkdtemp(folder) == NULL) return 2;
  snprintf(socket_path, sizeof(socket_path), "%s/socket", folder);
  snprintf(model_path, sizeof(model_path), "%s/m.safetensors", folder);
  setenv("GPUSHARE_SOCKET", socket_path, 1);
  write_model();
  params.path = model_path;
  session_params.name = "reader";
  session_params.ephemeral_bytes = 1 << 20;

  daemon = start_daemon(argv[1]);
  runtime = open_shared();
  CHECK_STATUS(gpushare_session_open(runtime, &session_params, &session), GPUSHARE_OK);
  check_bad_calls(session);
  CHECK_STATUS(gpushare_session_open_shared_image(session, &params, &image), GPUSHARE_OK);
  CHECK_STATUS(gpushare_shared_image_get_info(image, &info), GPUSHARE_OK);
  CHECK(info.layers == 2 && info.bytes >= 6000 && info.address != 0);
  CHECK_STATUS(gpushare_shared_image_get_layer(image, 2, &layer), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_shared_image_wait(image, 0, 1, 0), GPUSHARE_INVALID_STATE);

  CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_shared_image_wait(image, 0, 3, 0), GPUSHARE_INVALID_ARGUMENT);
  CHECK_STATUS(gpushare_shared_image_wait(image, 0, 2, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_shared_image_get_layer(image, 1, &layer), GPUSHARE_OK);
  CHECK(strcmp(layer.name, "b") == 0 && layer.bytes == 5000 && layer.arrived == 1);
  for (i = 0; i < 5000; ++i)
    same = same && ((const unsigned char*)(uintptr_t)layer.address)[i] == (i + 1000) % 251;
  CHECK(same);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_open_shared_image(session, &params, &second), GPUSHARE_OK);
  CHECK_STATUS(gpushare_shared_image_release(second), GPUSHARE_OK);
  CHECK_STATUS(gpushare_shared_image_release(second), GPUSHARE_INVALID_HANDLE);

  kill(daemon, SIGKILL);
  waitpid(daemon, &status, 0);
  CHECK_STATUS(gpushare_session_open_shared_image(session, &params, &second), GPUSHARE_UNAVAILABLE);
  CHECK_STATUS(gpushare_shared_image_release(image), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);

  daemon = start_daemon(argv[1]); /* over the stale socket */
  runtime = open_shared();
  CHECK_STATUS(gpushare_session_open(runtime, &session_params, &session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_open_shared_image(session, &params, &image), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_shared_image_wait(image, 0, 2, GPUSHARE_NO_TIMEOUT), GPUSHARE_OK);
  CHECK_STATUS(gpushare_iteration_end(iteration), GPUSHARE_OK);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK); /* with the image open */
  CHECK_STATUS(gpushare_shared_image_wait(image, 0, 1, 0), GPUSHARE_INVALID_STATE);
  CHECK_STATUS(gpushare_shared_image_release(image), GPUSHARE_OK);
  kill(daemon, SIGTERM);
  waitpid(daemon, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);

  runtime = open_runtime("host?total_gib=0.25", "fair", 64 << 20); /* of its own: nothing is shared */
  CHECK_STATUS(gpushare_session_open(runtime, &session_params, &own_session), GPUSHARE_OK);
  CHECK_STATUS(gpushare_session_open_shared_image(own_session, &params, &image), GPUSHARE_UNSUPPORTED);
  CHECK_STATUS(gpushare_runtime_close(runtime), GPUSHARE_OK);
  unlink(model_path);
  snprintf(model_path, sizeof(model_path), "%s/socket.lock", folder);
  unlink(model_path);
  CHECK(rmdir(folder) == 0);
  return capi_result();
}
