// fake_backend.hpp: an ops table in which every mandatory op answers OK, for tests of the registry.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gpushare/backend.h"

namespace gpushare::test {

template <class... Arguments>
int32_t answer_ok(Arguments...) {
  return GPUSHARE_OK;
}

template <class... Arguments>
void set_ok(int32_t (*&op)(Arguments...)) {
  op = &answer_ok<Arguments...>;
}

// Mandatory ops only.
inline gpushare_backend_ops fake_backend(const char* name) {
  gpushare_backend_ops ops{};
  ops.struct_size = sizeof(ops);
  ops.abi_version = GPUSHARE_BACKEND_ABI_VERSION;
  ops.name = name;
  set_ok(ops.probe);
  set_ok(ops.device_open);
  set_ok(ops.device_close);
  set_ok(ops.device_info);
  set_ok(ops.clock_now);
  set_ok(ops.last_error);
  set_ok(ops.mem_alloc);
  set_ok(ops.mem_free);
  set_ok(ops.host_alloc);
  set_ok(ops.host_free);
  set_ok(ops.stream_create);
  set_ok(ops.stream_destroy);
  set_ok(ops.stream_query);
  set_ok(ops.stream_synchronize);
  set_ok(ops.stream_wait_event);
  set_ok(ops.stream_native);
  set_ok(ops.event_create);
  set_ok(ops.event_destroy);
  set_ok(ops.event_record);
  set_ok(ops.event_query);
  set_ok(ops.event_synchronize);
  set_ok(ops.event_elapsed);
  set_ok(ops.copy_async);
  set_ok(ops.fill_async);
  set_ok(ops.launch_host);
  return ops;
}

inline void add_virtual_memory(gpushare_backend_ops& ops) {
  set_ok(ops.va_reserve);
  set_ok(ops.va_free);
  set_ok(ops.phys_create);
  set_ok(ops.phys_release);
  set_ok(ops.va_map);
  set_ok(ops.va_unmap);
}

}  // namespace gpushare::test
