"""The package as a wheel has it: python -m gpushare exec holds a program with the shim that the package carries."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

BUILD = pathlib.Path(os.environ.get("GPUSHARE_TOOL_FOLDER", ".")).parent
SOURCES = pathlib.Path(__file__).resolve().parent.parent / "gpushare"


@pytest.fixture
def package(tmp_path):
    """A folder with the package, of the files that the wheel's install component names."""
    if not (BUILD / "lib/libgpushare_preload.so").exists() or not (BUILD / "bin/shim_probe").exists():
        pytest.skip("no shim in this build")
    subprocess.run([shutil.which("cmake") or "cmake", "--install", str(BUILD), "--component", "python", "--prefix", str(tmp_path / "gpushare")],
                   check=True, capture_output=True)
    for module in SOURCES.glob("*.py"):
        shutil.copy(module, tmp_path / "gpushare")
    return tmp_path


def run(package, *arguments, **environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GPUSHARE_", "LD_"))}
    driver = str(BUILD / "lib/doubles/libcuda_recorder.so")
    return subprocess.run([sys.executable, "-m", "gpushare", *arguments], capture_output=True, text=True, cwd=package, timeout=60,
                          env={**inherited, "PYTHONPATH": str(package), "GPUSHARE_CUDA_DRIVER": driver, "PROBE_DRIVER": driver, **environment})


@pytest.mark.parametrize("way", ["soname", "path"])  # by the proxy's folder, by the preload library
def test_exec_holds_a_program(package, way):
    done = run(package, "exec", "--memory", "1GiB", "--", str(BUILD / "bin/shim_probe"), way, "info", "600", "600")
    assert (done.stdout.split(), done.stderr, done.returncode) == (["1024", "1024", "0", "2"], "", 0)


def test_the_libraries_are_the_packages_own(package):
    done = run(package, "exec", "--", "sh", "-c", "echo $LD_PRELOAD $LD_LIBRARY_PATH")
    assert done.stdout.split() == [str(package / "gpushare/lib/libgpushare_preload.so"), str(package / "gpushare/lib/gpushare")]
    # Nothing of the build is needed: the proxy finds the preload library beside it.
    needed = subprocess.run(["readelf", "-d", str(package / "gpushare/lib/gpushare/libcuda.so.1")], capture_output=True, text=True, check=True).stdout
    assert "[$ORIGIN/..]" in needed


def test_without_its_libraries_the_tool_says_so(package):
    (package / "gpushare/lib/libgpushare_preload.so").unlink()
    done = run(package, "exec", "--fail-closed", "--memory", "1GiB", "--", "true")
    assert done.returncode == 3
    assert "libgpushare_preload.so is not beside the tool" in done.stderr
