"""The package as a wheel has it: python -m gpushare exec holds a program with the shim that the package carries."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

BUILD = pathlib.Path(os.environ.get("GPUSHARE_TOOL_FOLDER", ".")).parent
SOURCES = pathlib.Path(__file__).resolve().parent.parent / "gpushare"
ROOT = SOURCES.parent.parent.parent


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
    return subprocess.run([sys.executable, "-m", "gpushare", *arguments], capture_output=True, text=True, cwd=package, timeout=600,
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


def check_contents(package):
    return subprocess.run([sys.executable, str(ROOT / "scripts/check-shim"), "--wheel", str(package)], capture_output=True, text=True)


def test_the_contents_run_on_old_systems(package):
    checked = check_contents(package)
    assert (checked.stderr, checked.returncode) == ("", 0)
    # The build's own library is for this system: it shows that the check fails.
    library = package / "gpushare/lib/libgpushare.so.1"
    library.unlink()
    shutil.copy(BUILD / "lib/libgpushare.so.1", library)
    checked = check_contents(package)
    assert checked.returncode == 1
    assert f"{library}: needs libstdc++.so.6\n" in checked.stderr
    assert re.search(rf"^{re.escape(str(library))}: needs GLIBC_2\.\d+: ", checked.stderr, re.M)


def test_the_contents_work(package):
    """Both libraries, with their waits, their threads and what they catch inside."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GPUSHARE_", "LD_"))}
    done = subprocess.run([sys.executable, "-c", """
import gpushare
from gpushare import cluster
with gpushare.Runtime("host", policy="fair") as runtime:
    session = runtime.open_session("one", memory="1M")
    values = session.array((256,))
    def work(iteration):
        values[:] = 2
        return float(values.sum())
    print(session.submit(work).result())
with cluster.ReservationTable() as table:
    table.add_node("node", {"gpu": 1})
    first, second = (table.submit({"owner": owner, "parts": [{"needs": {"gpu": 1}, "count": 1}]}) for owner in "ab")
    print(len(table.wait(first)["nodes"]))
    try:
        table.wait(second, timeout=0.05)
    except TimeoutError:
        print("waited")
try:
    cluster.plan("no document", "gpushare")
except gpushare.Error:
    print("refused")
"""], capture_output=True, text=True, cwd=package, timeout=600, env={**inherited, "PYTHONPATH": str(package)})
    assert (done.stdout.split(), done.stderr, done.returncode) == (["512.0", "1", "waited", "refused"], "", 0)


def test_a_timed_wait_without_the_function_of_newer_systems(tmp_path):
    """old_glibc.c in a program that finds no pthread_cond_clockwait."""
    if shutil.which("cc") is None or os.uname().machine != "x86_64":
        pytest.skip("no C compiler, or another processor")
    source = tmp_path / "wait.c"
    source.write_text(r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#define dlsym(library, name) ((void*)0)
#include "old_glibc.c"
#include <errno.h>
#include <stdio.h>
static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}
int main(void) {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < 20; ++i) {
    const int64_t begin_ns = now_ns(), wait_ns = i % 2 == 0 ? 77000000 : -1500000000, end_ns = begin_ns + wait_ns;
    struct timespec until = {end_ns / 1000000000, end_ns % 1000000000};
    const int result = pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &until);
    const int64_t waited_ns = now_ns() - begin_ns;
    if (result != ETIMEDOUT || waited_ns < (wait_ns < 0 ? 0 : wait_ns - 1000000) || waited_ns > 5000000000ll) {
      printf("%d after %lld ns\n", result, (long long)waited_ns);
      return 1;
    }
  }
  return 0;
}
""")
    subprocess.run(["cc", "-std=gnu11", "-O1", "-fPIC", "-fvisibility=hidden", f"-I{SOURCES.parent}", str(source), "-o", str(tmp_path / "wait"), "-l:libpthread.so.0", "-l:libdl.so.2", "-lm"],
                   check=True)
    done = subprocess.run([str(tmp_path / "wait")], capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.returncode) == ("", 0)


def test_the_preload_library_runs_on_old_systems(package):
    """It is loaded into programs of other systems and containers: glibc 2.17 or newer, and nothing else."""
    library = str(package / "gpushare/lib/libgpushare_preload.so")
    said = subprocess.run(["readelf", "-d", "-V", library], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"NEEDED.*\[(.*)\]", said) == ["libc.so.6", "ld-linux-x86-64.so.2"]
    assert max(tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([\d.]+)", said)) <= (2, 17)


def test_without_its_libraries_the_tool_says_so(package):
    (package / "gpushare/lib/libgpushare_preload.so").unlink()
    done = run(package, "exec", "--fail-closed", "--memory", "1GiB", "--", "true")
    assert done.returncode == 3
    assert "libgpushare_preload.so is missing" in done.stderr


def test_a_build_names_the_packages_that_are_missing(tmp_path):
    """build_backend.py, without what it derives from, where dpkg knows all packages but one."""
    query = tmp_path / "dpkg-query"
    query.write_text('#!/bin/sh\ncase "$*" in *libcli11*) exit 1;; esac\necho install ok installed\n')
    query.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCES.parent)}
    environment.pop("LD_PRELOAD", None)  # a sanitizer's library, under which bash ends: the test is of Python and bash alone
    done = subprocess.run([sys.executable, "-c", """
import sys, types
sys.modules["scikit_build_core"] = package = types.ModuleType("scikit_build_core")
sys.modules["scikit_build_core.build"] = package.build = types.ModuleType("scikit_build_core.build")
import build_backend
build_backend._check_packages()
"""], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 1 and done.stderr == "gpushare: packages are missing; install them first: sudo apt-get install libcli11-dev\n", done.stderr


BACKEND = """
import pathlib, sys, types
sys.modules["scikit_build_core"] = package = types.ModuleType("scikit_build_core")
sys.modules["scikit_build_core.build"] = package.build = types.ModuleType("scikit_build_core.build")
import build_backend
sys.path[:] = [path for path in sys.path if path != str(pathlib.Path(build_backend.__file__).parent)]  # with gpushare's sources
folder = pathlib.Path(sys.argv[1])
"""


def backend(program, folder):
    """Runs a program with build_backend.py, without what it derives from."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES.parent)}
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run([sys.executable, "-c", BACKEND + program, str(folder)], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_package_of_the_same_name_hides_nothing(tmp_path):
    """What a .pth file does: the package's own folder comes before site-packages, in which a stranger's gpushare lies."""
    for place, owner in (("gpushare", "stranger"), ("gpushare_runtime/gpushare", "ours")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "__init__.py").write_text(f"owner = {owner!r}\n")
    backend("""
import os, site
(folder / build_backend.PTH).write_text(build_backend.FOLDER + "\\n" + build_backend.FIRST.format(folder='os.path.join(sitedir, "gpushare_runtime")'))
site.addsitedir(str(folder))
import gpushare
assert gpushare.owner == "ours", gpushare.__file__
""", tmp_path)


def test_a_build_that_is_there_is_used_if_it_is_this_trees_release(tmp_path):
    backend("""
right = {"CMAKE_HOME_DIRECTORY:INTERNAL": build_backend.ROOT, "CMAKE_BUILD_TYPE:STRING": "Release", "GPUSHARE_SANITIZE:STRING": "", "GPUSHARE_BUILD_CLI:BOOL": "ON"}
def used(**changed):
    values = {name: changed.get(name.partition(":")[0], value) for name, value in right.items()}
    (folder / "CMakeCache.txt").write_text("# a comment\\n" + "".join(f"{name}={value}\\n" for name, value in values.items()))
    return build_backend._can_be_used(folder)
assert not build_backend._can_be_used(folder / "nowhere") and used()
assert not used(CMAKE_HOME_DIRECTORY="/elsewhere") and not used(CMAKE_BUILD_TYPE="Debug") and not used(GPUSHARE_SANITIZE="thread") and not used(GPUSHARE_BUILD_CLI="OFF")
assert build_backend._parts_list("1.0.0").count('"type": "library"') >= 4
""", tmp_path)
