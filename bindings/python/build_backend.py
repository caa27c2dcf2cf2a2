"""PEP 517 build backend. scikit-build-core writes metadata, modules and sdist; the rest is here.

- CMake builds the libraries and the tool. A build of this source tree that is there already (GPUSHARE_BUILD, else build/release) is used, so that a
  wheel takes seconds beside it; else build/wheel. The steps are counted on the terminal, because pip hides what a build prints.
- Missing Debian packages are named before the build, since a compiler's error would not name them.
- The package `gpushare` lies in a folder of its own, gpushare_runtime, which a .pth file puts before site-packages. The project gpushare on PyPI, which
  is somebody else's, has a package of that name too: no file of the two is the same, so that neither loses one when the other is
  installed or removed.
- The wheel is tagged with the processor and the glibc that its binaries need, so that pip refuses it where it could not run. GPUSHARE_BUILD may name a
  build for another processor (scripts/wheel --arch).
"""
# SPDX-License-Identifier: Apache-2.0
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from scikit_build_core.build import *  # noqa: F401,F403: the hooks that stay as they are
from scikit_build_core import build as _build

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER, PTH = "gpushare_runtime", "gpushare_runtime.pth"
MACHINES = {62: "x86_64", 183: "aarch64"}  # ELF's numbers
# The first line is for type checkers, which read no others; the second moves the folder before site-packages.
FIRST = "import os, sys; d = {folder}; d in sys.path and (sys.path.remove(d), sys.path.insert(sys.path.index(sitedir) if sitedir in sys.path else 0, d))\n"


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


def _run(command, what):
    """Runs a step of the build. Its output is pip's; the terminal gets the numbers of the steps."""
    with contextlib.ExitStack() as stack:
        try:
            terminal = stack.enter_context(open("/dev/tty", "w", encoding="utf-8"))
        except OSError:
            terminal = None
        process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"))
        for line in process.stdout:
            sys.stdout.write(line)
            step = re.match(r"\[(\d+)/(\d+)\]", line)
            if terminal is not None and step:
                terminal.write(f"\rgpushare: {what}, step {step[1]} of {step[2]} \033[K")
                terminal.flush()
        if terminal is not None:
            terminal.write("\r\033[K")
    if process.returncode != 0:
        raise SystemExit(f"gpushare: {what} failed (status {process.returncode}); the reason stands above")


def _can_be_used(build):
    """A build of this tree, optimised and without sanitizers."""
    try:
        cache = (build / "CMakeCache.txt").read_text(encoding="utf-8")
    except OSError:
        return False
    values = dict(re.findall(r"^(\w+):\w+=(.*)$", cache, re.MULTILINE))
    return (values.get("CMAKE_HOME_DIRECTORY") == str(ROOT) and values.get("CMAKE_BUILD_TYPE") == "Release" and not values.get("GPUSHARE_SANITIZE")
            and values.get("GPUSHARE_BUILD_CLI") == "ON")


def _contents(folder):
    """Puts what is compiled into `folder`: lib, bin, _cffi.py, licences."""
    named = os.environ.get("GPUSHARE_BUILD")
    build = ROOT / (named or "build/release")
    if not _can_be_used(build):
        if named:
            raise SystemExit(f"gpushare: GPUSHARE_BUILD names {build}, which is no release build of {ROOT} with the tool")
        build = ROOT / "build/wheel"
        _check_packages()
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        _run(["cmake", "-S", str(ROOT), "-B", str(build), *generator, "-DCMAKE_BUILD_TYPE=Release", "-DSKBUILD=ON", f"-DPYTHON_EXECUTABLE={sys.executable}",
              "-DCMAKE_UNITY_BUILD=ON", "-DGPUSHARE_WARNINGS=OFF", "-DGPUSHARE_WERROR=OFF", "-DGPUSHARE_BUILD_TESTS=OFF", "-DGPUSHARE_BUILD_BENCHMARKS=OFF",
              "-DGPUSHARE_BUILD_EXAMPLES=OFF", "-DGPUSHARE_BUILD_CLI=ON", "-DCMAKE_SHARED_LINKER_FLAGS=-static-libstdc++",
              "-DCMAKE_EXE_LINKER_FLAGS=-static-libstdc++"], "configuring")
    print(f"gpushare: the libraries and the tool are built in {build}", flush=True)
    _run(["cmake", "--build", str(build), "--target", "gpushare_wheel_contents", "--parallel", str(os.cpu_count() or 1)], "building")
    _run(["cmake", "--install", str(build), "--component", "python", "--prefix", str(folder), "--strip"], "installing")
    if not (folder / "_cffi.py").exists():
        raise SystemExit(f"gpushare: {build} was configured for a Python without cffi; remove it, or set GPUSHARE_BUILD to another build")


def _parts_list(version):
    """What the binaries contain of others, as CycloneDX (PEP 770). THIRD_PARTY_NOTICES has the terms."""
    notices = (ROOT / "THIRD_PARTY_NOTICES").read_text(encoding="utf-8")
    parts = re.findall(r"^\d+\. (.+?)(?: \((https://\S+)\))?\n", notices, re.MULTILINE)
    components = [{"type": "library", "name": name, **({"externalReferences": [{"type": "website", "url": url}]} if url else {})} for name, url in parts]
    own = {"type": "library", "name": "gpushare-runtime", "version": version, "purl": f"pkg:pypi/gpushare-runtime@{version}",
           "licenses": [{"license": {"id": "Apache-2.0"}}]}
    return json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": own}, "components": components}, indent=2)


def _repack(directory, name, change):
    """Unpacks a wheel, calls `change(folder, dist_info)`, and packs it again with the platform's tag. Returns its name."""
    path = pathlib.Path(directory, name)
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, "-m", "wheel", "unpack", "--dest", place, str(path)], check=True, stdout=subprocess.DEVNULL)
        folder = next(pathlib.Path(place).iterdir())
        dist_info = next(folder.glob("*.dist-info"))
        platform = change(folder, dist_info)
        wheel = dist_info / "WHEEL"
        text = re.sub(r"^Root-Is-Purelib: .*$", "Root-Is-Purelib: false", wheel.read_text(encoding="utf-8"), flags=re.MULTILINE)
        wheel.write_text(re.sub(r"^Tag: .*$", f"Tag: py3-none-{platform}", text, flags=re.MULTILINE), encoding="utf-8")
        path.unlink()
        packed = subprocess.run([sys.executable, "-m", "wheel", "pack", "--dest-dir", str(directory), str(folder)], check=True, capture_output=True, text=True)
    return os.path.basename(re.search(r"(\S+\.whl)", packed.stdout)[1])


def _platform(folder):
    """The platform's tag: the processor of the binaries in the folder, and the newest glibc of which one of them needs a symbol."""
    newest, machine = (2, 17), os.uname().machine  # 2.17: the oldest that platform tags speak of
    for file in folder.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        if content.startswith(b"\x7fELF"):
            machine = MACHINES.get(int.from_bytes(content[18:20], "little"), machine)
            for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", content):
                newest = max(newest, (int(major), int(minor)))
    return f"manylinux_{newest[0]}_{newest[1]}_{machine}"


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    def change(folder, dist_info):
        _contents(folder / FOLDER / "gpushare")
        (folder / PTH).write_text(FOLDER + "\n" + FIRST.format(folder=f'os.path.join(sitedir, "{FOLDER}")'), encoding="utf-8")
        (dist_info / "sboms").mkdir()
        (dist_info / "sboms/gpushare.cdx.json").write_text(_parts_list(dist_info.name.removesuffix(".dist-info").rpartition("-")[2]), encoding="utf-8")
        return _platform(folder)

    return _repack(wheel_directory, _build.build_wheel(wheel_directory, config_settings, metadata_directory), change)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """The modules stay where they are: build/editable has links to them beside the libraries. After a change of C++ install again."""

    def change(folder, dist_info):
        package = ROOT / "build/editable/gpushare"
        shutil.rmtree(package, ignore_errors=True)
        _contents(package)
        for module in (ROOT / "bindings/python/gpushare").iterdir():
            if module.suffix in (".py", ".pyi", ".typed") and not (package / module.name).exists():
                (package / module.name).symlink_to(module)
        for other in folder.iterdir():
            if other != dist_info:
                shutil.rmtree(other)
        paths = [package.parent, ROOT / "integrations/ray", ROOT / "integrations/kubernetes"]
        (folder / PTH).write_text("".join(f"{path}\n" for path in paths) + FIRST.format(folder=repr(str(paths[0]))), encoding="utf-8")
        return f"linux_{os.uname().machine}"

    return _repack(wheel_directory, _build.build_wheel(wheel_directory, config_settings, None), change)


def get_requires_for_build_editable(config_settings=None):
    return _build.get_requires_for_build_wheel(config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    return _build.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
