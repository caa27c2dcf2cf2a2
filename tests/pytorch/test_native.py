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
