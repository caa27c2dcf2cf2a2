"""Measurement 9 of the GPU suite, on the CPU: that it runs, and that gpushare computes what PyTorch alone does."""
# SPDX-License-Identifier: Apache-2.0
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/gpu/torch_suite.py"


def test_measurement_9():
    done = subprocess.run([sys.executable, SCRIPT, "--device", "host", "--quick", "--modes", "eager"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert not [line for line in lines if line[0] != "row"], done.stdout
    rows = {(what, by): samples for _, what, by, _, samples in lines}
    assert len(rows) == 9, done.stdout
    assert float(rows["largest difference of losses and results, eager", "gpushare"]) == 0
