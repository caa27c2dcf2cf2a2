"""Measurements 9 and 10 of the GPU suite, on the CPU: that they run, and that gpushare computes what PyTorch alone does."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/gpu"


def rows_of(script, *arguments):
    done = subprocess.run([sys.executable, SCRIPTS / script, "--device", "host", "--quick", *arguments], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert not [line for line in lines if line[0] != "row"], done.stdout
    return {(what, by): samples for _, what, by, _, samples in lines}


# torch.compile builds C++ code that includes the interpreter's headers.
HEADERS = pathlib.Path(sysconfig.get_path("include"), "Python.h")
COMPILER = pytest.mark.skipif(not HEADERS.exists() or shutil.which("g++") is None, reason=f"no g++, or no {HEADERS}")


@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=COMPILER)])
def test_measurement_9(mode):
    rows = rows_of("torch_suite.py", "--modes", mode)
    assert len(rows) == 11, rows
    assert float(rows[f"largest difference of losses and results, {mode}", "gpushare"]) == 0


def test_measurement_10():  # with a daemon for the host device; without a driver nothing holds the trainings
    rows = rows_of("torch_exec.py", "--sections", "oversubscribed")
    assert len(rows) == 2 and all(float(share) > 0 for share in rows.values()), rows


def test_frameworks(tmp_path):
    """The part `frameworks` with what is installed here: Numba's accounting on the recording driver, which runs no kernels."""
    recorder = pathlib.Path(os.environ["GPUSHARE_LIBRARY"]).parent / "doubles/libcuda_recorder.so"
    (tmp_path / "libcuda.so.1").symlink_to(recorder)
    done = subprocess.run([sys.executable, SCRIPTS / "frameworks.py", "--accounting"], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and re.fullmatch(r"numba.* [0-9.]+: ok, without kernels", lines[1]), lines
    assert lines[3] == "onnxruntime: not installed (onnxruntime is there, without CUDAExecutionProvider)", lines
