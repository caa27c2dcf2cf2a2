/* SPDX-License-Identifier: Apache-2.0 */
#include <gpushare/gpushare.h>
#include <stdio.h>

int main(void) {
  gpushare_runtime runtime;
  gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
  params.device = "sim";
  if (gpushare_version() != GPUSHARE_VERSION) return 1;
  if (gpushare_runtime_open(&params, &runtime) != GPUSHARE_OK) {
    fprintf(stderr, "%s\n", gpushare_last_error_message());
    return 1;
  }
  return gpushare_runtime_close(runtime) == GPUSHARE_OK ? 0 : 1;
}
