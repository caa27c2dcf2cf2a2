"""PEP 517 build backend: scikit-build-core, with two additions.

Before the build it names the Debian packages that are missing, since a compiler's error would not. After it the wheel is
tagged with the glibc that its binaries need, so that pip refuses it where it could not run.
"""
# SPDX-License-Identifier: Apache-2.0
import os
import re
import shutil
import subprocess
import sys
import zipfile

from scikit_build_core.build import *  # noqa: F401,F403: the hooks that stay as they are
from scikit_build_core import build as _build


def _check_packages():
    """Raises SystemExit with the command that installs what is missing, and names Boost's folder to CMake. Systems without dpkg find out by themselves."""
    script = '. scripts/common.sh; missing_packages "${build_packages[@]}"; ! find_boost || echo "boost_root=$boost_root"'
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    if answer.returncode != 0 or not shutil.which("dpkg-query"):
        return
    *missing, last = answer.stdout.splitlines() or [""]
    if not last.startswith("boost_root="):
        raise SystemExit("gpushare: Boost 1.81 or newer is missing. `scripts/build` gets it without removing an older one; or set BOOST_ROOT to its folder")
    if missing:
        raise SystemExit(f"gpushare: packages are missing; install them first: sudo apt-get install {' '.join(missing)}")
    os.environ["BOOST_ROOT"] = last.partition("=")[2]


def _glibc_needed(wheel):
    """The newest glibc (major, minor) of which a binary in the wheel needs a symbol."""
    newest = (2, 17)  # the oldest that platform tags speak of
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            if content.startswith(b"\x7fELF"):
                for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", content):
                    newest = max(newest, (int(major), int(minor)))
    return newest


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _check_packages()
    name = _build.build_wheel(wheel_directory, config_settings, metadata_directory)
    path = os.path.join(wheel_directory, name)
    major, minor = _glibc_needed(path)
    platform = f"manylinux_{major}_{minor}_{os.uname().machine}"
    tagged = subprocess.run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform, path], check=True,
                            capture_output=True, text=True)
    return os.path.basename(tagged.stdout.split()[-1])
