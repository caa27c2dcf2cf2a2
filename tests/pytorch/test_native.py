"""Adaptors in C++, compiled with the headers of their frameworks and run on the host device. The headers are not among what pip installs:
GPUSHARE_ONNXRUNTIME_HEADERS names the folder of onnxruntime_c_api.h (Debian 13: libonnxruntime-dev; elsewhere ONNX Runtime's release archive), GPUSHARE_GGML a clone
of ggml."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = pathlib.Path(os.environ.get("GPUSHARE_LIBRARY", ""))
SETTINGS = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", f"-I{LIBRARY.parents[1]}/include"]


def done(*command, **options):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=1200, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.skipif("GPUSHARE_ONNXRUNTIME_HEADERS" not in os.environ or shutil.which("g++") is None,
                    reason="no g++, or GPUSHARE_ONNXRUNTIME_HEADERS does not name the folder of onnxruntime_c_api.h")
def test_onnx_runtimes_allocator(tmp_path):
    """The program of examples/onnxruntime with ONNX Runtime's library from PyPI: weights and temporary tensors count, and a limit holds."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    sys.path.insert(0, str(ROOT / "examples/python"))
    import serve_onnx

    serve_onnx.make_ring(str(tmp_path / "ring.onnx"))
    library = next(pathlib.Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)
    done(*SETTINGS, "-isystem", os.environ["GPUSHARE_ONNXRUNTIME_HEADERS"], ROOT / "examples/onnxruntime/serve_onnx.cpp", "-o", tmp_path / "serve", LIBRARY,
         tmp_path / "libonnxruntime.so.1")
    said = done(tmp_path / "serve", tmp_path / "ring.onnx", env={**os.environ, "LD_LIBRARY_PATH": f"{tmp_path}:{LIBRARY.parent}"})
    weights = int(re.search(r"weights are (\d+) bytes", said)[1])
    assert 16 <= weights < 4096 and "200 of 200 answers in time, 200 right" in said, said
    assert re.search(r"Mul node.*session 'model' asked for 32.00 MiB.*quota of 16.00 MiB", said), said


GGML = r"""
#include "buffer_type.hpp"
#include <ggml-alloc.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <gpushare/allocator.hpp>
#include <gpushare/gpushare.hpp>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define CHECK(what) do { if (!(what)) { std::printf("line %d: %s: %s\n", __LINE__, #what, gpushare_last_error_message()); std::exit(1); } } while (0)
namespace gs = gpushare;

int main() {
  gs::Runtime runtime = gs::Runtime::open({"host"});
  gs::SessionOptions limits;
  limits.name = "llm";
  limits.quota_bytes = 8 << 20;
  gs::Session session = runtime.open_session(limits);
  gs::Allocator allocator(runtime);
  gs::GgmlBufferType memory(allocator.get());
  ggml_backend_t cpu = ggml_backend_cpu_init();
  CHECK(ggml_backend_supports_buft(cpu, memory.get()));

  // Weights: a matrix of twos and a vector, in the session.
  ggml_init_params only_names = {ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true};
  ggml_context* held = ggml_init(only_names);
  ggml_tensor* matrix = ggml_new_tensor_2d(held, GGML_TYPE_F32, 256, 256);
  ggml_tensor* vector = ggml_new_tensor_1d(held, GGML_TYPE_F32, 256);
  allocator.bind_thread(&session);
  ggml_backend_buffer_t weights = ggml_backend_alloc_ctx_tensors_from_buft(held, memory.get());
  CHECK(weights != nullptr && session.info().persistent_bytes >= 257 * 256 * 4);
  const uint64_t persistent = session.info().persistent_bytes;
  const std::vector<float> twos(256 * 256, 2.0F), ones(256, 1.0F);
  ggml_backend_tensor_set(matrix, twos.data(), 0, twos.size() * 4);
  ggml_backend_tensor_set(vector, ones.data(), 0, ones.size() * 4);

  // A product, whose result is memory of an iteration.
  for (int step = 0; step < 3; ++step) {
    gs::Iteration iteration = session.begin_iteration();
    iteration.stream().synchronize();
    ggml_context* made = ggml_init(only_names);
    ggml_cgraph* graph = ggml_new_graph(made);
    ggml_tensor* product = ggml_mul_mat(made, matrix, vector);
    ggml_build_forward_expand(graph, product);
    ggml_gallocr_t compute = ggml_gallocr_new(memory.get());
    CHECK(ggml_gallocr_alloc_graph(compute, graph) && session.info().ephemeral_bytes >= 1024);
    CHECK(ggml_backend_graph_compute(cpu, graph) == GGML_STATUS_SUCCESS);
    std::vector<float> result(256);
    ggml_backend_tensor_get(product, result.data(), 0, 1024);
    for (const float each : result) CHECK(each == 512.0F);
    ggml_gallocr_free(compute);
    ggml_free(made);
  }
  CHECK(session.info().persistent_bytes == persistent);

  // The limit.
  ggml_context* large = ggml_init(only_names);
  (void)ggml_new_tensor_1d(large, GGML_TYPE_F32, 4 << 20);
  CHECK(ggml_backend_alloc_ctx_tensors_from_buft(large, memory.get()) == nullptr);
  std::printf("%s\n", gpushare_last_error_message());
  ggml_free(large);

  ggml_backend_buffer_free(weights);
  CHECK(session.info().persistent_bytes == 0);
  allocator.bind_thread(nullptr);
  ggml_free(held);
  ggml_backend_free(cpu);
}
"""


@pytest.mark.skipif("GPUSHARE_GGML" not in os.environ or shutil.which("cmake") is None, reason="no cmake, or GPUSHARE_GGML does not name a clone of ggml")
def test_ggmls_buffer_type(tmp_path):
    """With ggml built from the clone, without OpenMP. GPUSHARE_GGML_BUILD names a build that is there."""
    clone, build = pathlib.Path(os.environ["GPUSHARE_GGML"]), pathlib.Path(os.environ.get("GPUSHARE_GGML_BUILD", tmp_path / "build"))
    if not (build / "src/libggml-base.a").exists():
        done("cmake", "-S", clone, "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=OFF", "-DGGML_OPENMP=OFF",
             "-DGGML_BUILD_TESTS=OFF", "-DGGML_BUILD_EXAMPLES=OFF")
        done("cmake", "--build", build, "--target", "ggml", "--parallel", "2")
    (tmp_path / "test.cpp").write_text(GGML)
    done(*SETTINGS, f"-I{ROOT}/bindings/ggml", "-isystem", clone / "include", "-isystem", clone / "src", tmp_path / "test.cpp", "-o", tmp_path / "test",
         build / "src/libggml.a", build / "src/libggml-cpu.a", build / "src/libggml-base.a", LIBRARY, "-lpthread", "-ldl", "-lm")
    said = done(tmp_path / "test", env={**os.environ, "LD_LIBRARY_PATH": str(LIBRARY.parent)})
    assert "session 'llm' asked for 16.00 MiB" in said and "8.00 MiB" in said, said
