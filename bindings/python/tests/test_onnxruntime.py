"""ONNX Runtime's models in sessions, where onnxruntime and onnx are installed (scripts/test-pytorch has them)."""
# SPDX-License-Identifier: Apache-2.0
import ctypes
import pathlib
import re
import subprocess
import sys

import pytest

import gpushare

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_a_model_answers_in_time():
    done = subprocess.run([sys.executable, "-W", "error", str(ROOT / "examples/python/serve_onnx.py")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and re.search(r"^\d+ of 200 answers in time", done.stdout), done


def test_weights_and_arena_count_and_a_limit_holds(tmp_path):
    program = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "examples/python")!r})
import numpy, gpushare, gpushare.onnxruntime, serve_onnx
path = {str(tmp_path / "ring.onnx")!r}
serve_onnx.make_ring(path)
gpushare.onnxruntime.limit_arena("4M")
with gpushare.Runtime("host", capacity_bytes="64M") as runtime:
    try:
        gpushare.onnxruntime.Model(runtime, path, arena="16M", memory="8M")
        raise AssertionError
    except gpushare.InvalidArgument:
        pass
    model = gpushare.onnxruntime.Model(runtime, path, arena="4M", weights="1M")
    assert model.session.name == "ring.onnx" and model.session.info()["persistent_bytes"] == 1 << 20
    with gpushare.RequestQueue(runtime) as queue:
        queue.add_model(model.session, model.run)
        assert queue.submit({{"point": numpy.float32([0.7, 0])}}, deadline=60).result().result.tolist() == [True]
    assert model.session.info()["peak_bytes"] == 5 << 20
    try:
        model.model.run(None, {{"point": numpy.zeros((1 << 20, 2), numpy.float32)}})    # 8 MiB of squares
        raise AssertionError
    except Exception as error:
        assert "memory" in str(error).lower() or "alloc" in str(error).lower(), error
    model.close()
    assert model.session.closed
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_runs_as_it_is_printed(tmp_path):
    page = (ROOT / "docs/frameworks.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    readers = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples/python")!r})
import gpushare, numpy, serve_onnx
serve_onnx.make_ring("model.onnx")
runtime, point = gpushare.Runtime("host"), numpy.float32([0.7, 0])
"""
    done = subprocess.run([sys.executable, "-c", readers + snippet + "assert answer.in_time and answer.result[0]\nqueue.close()\n"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cudas_functions_are_the_allocators():
    import gpushare.onnxruntime

    with gpushare.Runtime("host", capacity_bytes="64M") as runtime, gpushare.Allocator(runtime) as allocator:
        session = runtime.open_session("onnx", memory="8M")
        options = gpushare.onnxruntime.cuda_options(allocator)
        allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(int(options["gpu_external_alloc"]))
        free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(options["gpu_external_free"]))
        with allocator.use(session):
            address = allocate(1 << 20)
            assert address and session.info()["persistent_bytes"] == 1 << 20
            assert allocate(1 << 30) is None
            free(address)
        ctypes.CFUNCTYPE(None)(int(options["gpu_external_empty_cache"]))()
        assert session.info()["persistent_bytes"] == 0
