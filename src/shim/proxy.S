// proxy.S: libcuda.so.1 in a private folder, for programs that open the driver by LD_LIBRARY_PATH: each function of the driver jumps to the entry
// of the same name in libgpushare_preload.so.
// SPDX-License-Identifier: Apache-2.0
  .text
.set entry_number, 0
.macro proxy_entry name
  .p2align 4
  .globl \name
  .type \name, @function
\name:
  movq gpushare_shim_entries@GOTPCREL(%rip), %r11
  jmp *8*entry_number(%r11)
  .size \name, . - \name
  .set entry_number, entry_number + 1
.endm
#define GPUSHARE_ENTRY(cls, name, base, version, parameters, arguments) proxy_entry name
#define GPUSHARE_NAME(cls, name) proxy_entry name
#include "shim/driver_table.inc"

// By this name the shim knows the proxy from a driver.
  .globl gpushare_shim_is_proxy
  .type gpushare_shim_is_proxy, @object
  .section .rodata
gpushare_shim_is_proxy:
  .quad 1
  .size gpushare_shim_is_proxy, 8
  .section .note.GNU-stack, "", @progbits
