"""Real PyTorch in processes of their own: on the stand-ins for CUDA's runtime and driver, or on the CPU. scripts/test-pytorch runs this."""
# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
import textwrap

import pytest

HEAD = """
import ctypes, gc, json, pickle, threading
import torch
import gpushare
"""


def python(body, *, cuda=True, command=(), fails=False, **environment):
    """Runs a program and returns what it prints. `cuda`: on the stand-ins."""
    environment = {**os.environ, **environment}
    if cuda:
        runtime, driver = os.environ["GPUSHARE_CUDART_STANDIN"], os.environ["GPUSHARE_CUDA_STANDIN"]
        # The wheel's own runtime would be found by RPATH, before LD_LIBRARY_PATH.
        environment["LD_PRELOAD"] = runtime
        environment["LD_LIBRARY_PATH"] = os.path.dirname(driver)
        # PyTorch never gives its streams and its context back.
        environment.setdefault("CUDA_STANDIN", "memory_bytes=1598029824")  # 1 GiB beside the context
        # The runtime's stand-in loads 300 libraries, which are to leave tests their numbers.
        environment["CUDA_STANDIN"] += ",leaks=0,module_bytes=0"
    done = subprocess.run([*command, sys.executable, "-c", HEAD + textwrap.dedent(body)], env=environment, capture_output=True, text=True,
                          timeout=300)
    if fails:
        assert done.returncode != 0
        return done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def run():
    return python
