"""Numba's arrays in sessions, on the recording driver: its allocations are real, its copies and kernels do nothing."""
# SPDX-License-Identifier: Apache-2.0
import importlib.util
import os
import pathlib

import pytest

RECORDER = pathlib.Path(os.environ["GPUSHARE_LIBRARY"]).parent / "doubles/libcuda_recorder.so"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None or importlib.util.find_spec("numba_cuda") is None,
                                reason="not installed: numba, numba-cuda")


def test_arrays_are_the_sessions(run, tmp_path):
    (tmp_path / "libcuda.so.1").symlink_to(RECORDER)
    run("""
import numpy, gpushare.numba
from numba import cuda
runtime = gpushare.Runtime("cuda:0", policy="fair")
allocator = gpushare.Allocator(runtime)
gpushare.numba.install(allocator)
session = runtime.open_session("numba", memory="64M")
with allocator.use(session):
    values = numpy.arange(1 << 20, dtype=numpy.float32)
    weights = cuda.to_device(values)
    assert session.info()["persistent_bytes"] == values.nbytes
    for step in range(4):
        with allocator.iteration(session):
            scratch = cuda.device_array(1 << 18, numpy.float32)
            kept = cuda.to_device(values[:1024])
            del scratch
            gc.collect(); cuda.current_context().deallocations.clear()
    assert session.info()["persistent_bytes"] == values.nbytes + 4096 and allocator.info(session)["predicted"] >= 1
    try:
        cuda.device_array(1 << 26, numpy.float32)
        raise AssertionError
    except MemoryError as error:
        assert "numba" in str(error)
    free, total = cuda.current_context().get_memory_info()
    assert 0 < free < total
    del weights, kept
    gc.collect(); cuda.current_context().deallocations.clear()
    assert session.info()["persistent_bytes"] == 0
    array = session.array((16,))
    assert cuda.as_cuda_array(array).shape == (16,)
""", cuda=False, LD_LIBRARY_PATH=str(tmp_path))
