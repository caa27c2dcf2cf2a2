"""bindings/rmm/memory_resource.hpp, compiled with CCCL's headers from PyPI and run on the stand-ins for CUDA. RMM itself is not there."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import shutil
import subprocess
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADERS = next(iter(sorted(pathlib.Path(sysconfig.get_path("platlib")).glob("nvidia/cu*/include"))), None)

PROGRAM = r"""
#include "memory_resource.hpp"
#include <cstdio>
#include <cstdlib>
#define CHECK(what) do { if (!(what)) { std::printf("line %d: %s: %s\n", __LINE__, #what, gpushare_last_error_message()); std::exit(1); } } while (0)

static uint64_t live(gpushare_session session) {
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  CHECK(gpushare_session_get_info(session, &info) == 0);
  return info.persistent_bytes + info.ephemeral_bytes;
}

int main() {
  gpushare_runtime_params opened = GPUSHARE_RUNTIME_PARAMS_INIT;
  gpushare_session_params job = GPUSHARE_SESSION_PARAMS_INIT;
  gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
  gpushare_runtime runtime;
  gpushare_session session;
  gpushare_allocator allocator;
  gpushare_iteration iteration;
  gpushare_stream lane;
  void* native;
  opened.device = "cuda:0";
  job.quota_bytes = 32u << 20;
  job.ephemeral_bytes = 8u << 20;
  CHECK(gpushare_runtime_open(&opened, &runtime) == 0 && gpushare_session_open(runtime, &job, &session) == 0);
  CHECK(gpushare_allocator_create(runtime, &params, &allocator) == 0);
  gpushare::MemoryResource resource(allocator), same(allocator);
  cuda::mr::any_resource<cuda::mr::device_accessible> held(resource);    // as RMM holds it
  CHECK(resource == same);
  try {
    (void)resource.allocate_sync(1 << 20);
    CHECK(!"an allocation without a session");
  } catch (const std::bad_alloc&) {
    CHECK(!"no session is no lack of memory");
  } catch (const std::runtime_error&) {
  }
  CHECK(gpushare_allocator_bind_thread(allocator, session) == 0);
  CHECK(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration) == 0);
  CHECK(gpushare_iteration_get_stream(iteration, &lane) == 0 && gpushare_stream_get_native(lane, &native) == 0);
  const cuda::stream_ref stream{static_cast<cudaStream_t>(native)};
  void* const kept = held.allocate(stream, 1 << 20, 256);
  void* const scratch = held.allocate(stream, 1 << 20, 256);
  CHECK(live(session) == 2u << 20);
  held.deallocate(stream, scratch, 1 << 20, 256);
  CHECK(gpushare_allocator_end_iteration(allocator, iteration) == 0 && live(session) == 1u << 20);
  void* const any = held.allocate_sync(1 << 20, 256);
  held.deallocate_sync(any, 1 << 20, 256);
  try {
    (void)held.allocate_sync(1 << 30, 256);
    CHECK(!"more than the quota");
  } catch (const gpushare::ResourceOutOfMemory& error) {
    std::printf("%s\n", error.what());
  }
  held.deallocate_sync(kept, 1 << 20, 256);
  CHECK(live(session) == 0);
  CHECK(gpushare_allocator_bind_thread(allocator, nullptr) == 0 && gpushare_allocator_release(allocator) == 0);
  CHECK(gpushare_session_close(session) == 0 && gpushare_runtime_close(runtime) == 0);
}
"""


@pytest.mark.skipif(HEADERS is None or not (HEADERS / "cccl/cuda/memory_resource").exists() or shutil.which("g++") is None,
                    reason="no g++, or no headers of CCCL and CUDA's runtime")
def test_a_resource_of_cccl(tmp_path):
    runtime, driver, library = (pathlib.Path(os.environ[name]) for name in ("GPUSHARE_CUDART_STANDIN", "GPUSHARE_CUDA_STANDIN", "GPUSHARE_LIBRARY"))
    (tmp_path / "test.cpp").write_text(PROGRAM)
    done = subprocess.run(["g++", "-std=c++20", "-O0", "-Wall", "-Wextra", f"-I{ROOT}/bindings/rmm", f"-I{ROOT}/include", f"-I{library.parents[1]}/include",
                           "-isystem", HEADERS, "-isystem", HEADERS / "cccl", tmp_path / "test.cpp", "-o", tmp_path / "test", library, runtime, "-ldl"],
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([tmp_path / "test"], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "LD_LIBRARY_PATH": f"{runtime.parent}:{library.parent}", "CUDA_STANDIN": "memory_bytes=1073741824,leaks=0"})
    assert done.returncode == 0 and "32.00 MiB" in done.stdout, done.stdout + done.stderr
