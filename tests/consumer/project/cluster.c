/* The library for several devices, found by an outside project. SPDX-License-Identifier: Apache-2.0 */
#include <gpushare/cluster.h>
#include <stddef.h>

int main(void) {
  char* schema = NULL;
  const int failed = gpushare_cluster_schema(&schema) != 0 || schema == NULL || schema[0] != '{';
  gpushare_cluster_text_free(schema);
  return failed;
}
