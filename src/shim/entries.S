// entries.S: what programs call. One small function for each row of driver_table.inc, which keeps every argument as it is:
//   pass           jumps to the driver
//   gate           jumps to the driver while the gate is open, else to gpushare_gate_NAME, which waits for the turn
//   count, charge  jumps to the function of the shim, gpushare_hook_NAME
// x86-64, System V calling convention. No signature is needed: registers and stack arrive at the driver untouched.
// SPDX-License-Identifier: Apache-2.0
  .text

// Finds the driver's function of the slot in %r11, and jumps to it.
  .p2align 4
gpushare_resolve_and_jump:
  .cfi_startproc
  pushq %rbp
  .cfi_def_cfa_offset 16
  .cfi_offset %rbp, -16
  movq %rsp, %rbp
  .cfi_def_cfa_register %rbp
  pushq %rdi
  pushq %rsi
  pushq %rdx
  pushq %rcx
  pushq %r8
  pushq %r9
  subq $128, %rsp
  andq $-16, %rsp
  movups %xmm0, (%rsp)
  movups %xmm1, 16(%rsp)
  movups %xmm2, 32(%rsp)
  movups %xmm3, 48(%rsp)
  movups %xmm4, 64(%rsp)
  movups %xmm5, 80(%rsp)
  movups %xmm6, 96(%rsp)
  movups %xmm7, 112(%rsp)
  movq %r11, %rdi
  call gpushare_shim_resolve_slot
  movq %rax, %r11
  movups (%rsp), %xmm0
  movups 16(%rsp), %xmm1
  movups 32(%rsp), %xmm2
  movups 48(%rsp), %xmm3
  movups 64(%rsp), %xmm4
  movups 80(%rsp), %xmm5
  movups 96(%rsp), %xmm6
  movups 112(%rsp), %xmm7
  leaq -48(%rbp), %rsp
  popq %r9
  popq %r8
  popq %rcx
  popq %rdx
  popq %rsi
  popq %rdi
  popq %rbp
  .cfi_def_cfa %rsp, 8
  jmp *%r11
  .cfi_endproc

// Each macro ends one row: the function, its slot, its place in the list of entries.
.macro begin_entry name
  .p2align 4
  .globl \name
  .type \name, @function
\name:
gpushare_entry_\name:
  .cfi_startproc
.endm
.macro end_entry name
  .cfi_endproc
  .size \name, . - \name
  .pushsection .bss.gpushare_shim_real, "aw", @nobits
gpushare_slot_\name:
  .skip 8
  .popsection
  .pushsection .data.rel.ro.gpushare_shim_entries, "aw"
  .quad gpushare_entry_\name
  .popsection
.endm
.macro jump_to_driver name
  movq gpushare_slot_\name(%rip), %r11
  testq %r11, %r11
  jz 1f
  jmp *%r11
1:
  leaq gpushare_slot_\name(%rip), %r11
  jmp gpushare_resolve_and_jump
.endm
.macro entry_pass name
  begin_entry \name
  jump_to_driver \name
  end_entry \name
.endm
.macro entry_gate name
  begin_entry \name
  cmpl $1, gpushare_shim_gate(%rip)
  jne gpushare_gate_\name
  jump_to_driver \name
  end_entry \name
.endm
.macro entry_hook name
  begin_entry \name
  jmp gpushare_hook_\name
  end_entry \name
.endm

  .hidden gpushare_shim_gate
  .pushsection .bss.gpushare_shim_real, "aw", @nobits
  .p2align 6
  .globl gpushare_shim_real
  .hidden gpushare_shim_real
  .type gpushare_shim_real, @object
gpushare_shim_real:
  .popsection
  .pushsection .data.rel.ro.gpushare_shim_entries, "aw"
  .p2align 6
  .globl gpushare_shim_entries
  .type gpushare_shim_entries, @object
gpushare_shim_entries:
  .popsection

#define ENTRY_pass entry_pass
#define ENTRY_gate entry_gate
#define ENTRY_count entry_hook
#define ENTRY_charge entry_hook
#define GPUSHARE_ENTRY(cls, name, base, version, parameters, arguments) ENTRY_##cls name
#define GPUSHARE_NAME(cls, name) ENTRY_##cls name
#include "shim/driver_table.inc"
  .pushsection .bss.gpushare_shim_real, "aw", @nobits
  .size gpushare_shim_real, . - gpushare_shim_real
  .popsection
  .pushsection .data.rel.ro.gpushare_shim_entries, "aw"
  .size gpushare_shim_entries, . - gpushare_shim_entries
  .popsection

// dlsym, dlvsym, dlopen: the shim looks first. A call that is not its affair goes on to the C library with the caller's own return address,
// on which RTLD_NEXT and RTLD_DEFAULT depend.
.macro interposed name, look
  .p2align 4
  .globl \name
  .type \name, @function
\name:
  .cfi_startproc
  pushq %rdi
  .cfi_adjust_cfa_offset 8
  pushq %rsi
  .cfi_adjust_cfa_offset 8
  pushq %rdx
  .cfi_adjust_cfa_offset 8
  movq %rsp, %rdi
  pushq %rdx
  .cfi_adjust_cfa_offset 8
  pushq %rdx
  .cfi_adjust_cfa_offset 8
  call \look
  popq %rdx
  .cfi_adjust_cfa_offset -8
  popq %rdx
  .cfi_adjust_cfa_offset -8
  popq %rdx
  .cfi_adjust_cfa_offset -8
  popq %rsi
  .cfi_adjust_cfa_offset -8
  popq %rdi
  .cfi_adjust_cfa_offset -8
  testq %rax, %rax
  jz 1f
  ret
1:
  jmp *gpushare_shim_\name(%rip)
  .cfi_endproc
  .size \name, . - \name
.endm
  interposed dlsym, gpushare_shim_look_dlsym
  interposed dlvsym, gpushare_shim_look_dlvsym
  interposed dlopen, gpushare_shim_look_dlopen

  .section .note.GNU-stack, "", @progbits
