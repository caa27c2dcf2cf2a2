"""What the tests of gpushare exec have in common: its programs, and the recorded device that they run on. SPDX-License-Identifier: Apache-2.0"""

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import support
from support import OPTIONS, ToolTest


# ThreadSanitizer's runtime (CMakeLists.txt). This program begins anew with it, and those in Python get it; shells do not run with it.
RUNTIME = os.environ.pop("GPUSHARE_TEST_RUNTIME", None)
if RUNTIME and os.environ.pop("LD_PRELOAD", None) is None:
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": RUNTIME, "GPUSHARE_TEST_RUNTIME": RUNTIME})


def build():
    return pathlib.Path(OPTIONS.tool).resolve().parent.parent


def has_shim():
    return (build() / "lib/libgpushare_preload.so").exists()


class Exec(ToolTest):
    def preloading_all(self, command):
        """The command, on a system whose /etc/ld.so.preload names the library, and whose /run has no daemon. A test without the right to mount is skipped."""
        unshare = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-rm"]
        etc = self.folder / "etc"
        mount = f"cp -a /etc {etc} 2>/dev/null; mount --bind {etc} /etc"
        if not etc.exists() and (shutil.which("unshare") is None or subprocess.run([*unshare, "sh", "-c", mount], capture_output=True).returncode != 0):
            self.skipTest("no right to mount here: unshare -m or mount --bind is refused")
        (etc / "ld.so.preload").write_text(f"{self.preload}\n")
        return [*unshare, "sh", "-c", f'mount --bind {etc} /etc && mount -t tmpfs -o mode=755 none /run && exec "$@"', "sh", *map(str, command)]

    def setUp(self):
        super().setUp()
        lib = build() / "lib"
        self.driver = str(lib / "doubles/libcuda_recorder.so")
        # Links, whose names hold no space: shells and the loader would split the paths of a build in any folder.
        self.probe, self.preload = str(self.folder / "shim_probe"), str(self.folder / "libgpushare_preload.so")
        self.folder.chmod(0o755)  # programs of other users read them
        os.symlink(build() / "bin/shim_probe", self.probe)
        os.symlink(build() / "lib/libgpushare_preload.so", self.preload)
        self.environment = {**os.environ, "GPUSHARE_CUDA_DRIVER": self.driver, "PROBE_DRIVER": self.driver,
                            "PROBE_DEEPBIND": str(lib / "doubles/libshim_deepbind.so"), "HOME": str(self.folder),
                            "XDG_CONFIG_HOME": str(self.folder / "config")}

    def run_exec(self, *arguments, code=0, **more):
        return self.tool("exec", *arguments, code=code, env={**self.environment, **more})

    def script(self, text, *options):
        """The lines that a shell script prints as the program."""
        return self.run_exec(*options, "--", "sh", "-c", text, PROBE=self.probe).out.split()

    def interpreter(self):
        """Python as a program, with ThreadSanitizer's runtime where the shim needs it."""
        before = ["env", f"LD_PRELOAD={build()}/lib/libgpushare_preload.so:{RUNTIME}"] if RUNTIME else []
        return [*before, sys.executable]

    def python(self, body):
        """A program that opens the driver by itself."""
        return [*self.interpreter(), "-c", "import ctypes, os, sys, time\ncuda = ctypes.CDLL('libcuda.so.1')\n"
                "context = ctypes.c_void_p()\n" + body]


class Device(ctypes.Structure):  # recorder.h
    _fields_ = [(name, ctypes.c_uint64) for name in ("now_ns", "busy_ns", "switches", "capacity_bytes", "used_bytes")]


class Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_int32), ("alive", ctypes.c_int32), ("label", ctypes.c_char * 24), ("memory_bytes", ctypes.c_uint64)] + [
        (name, ctypes.c_uint64) for name in ("compute_ns", "copy_ns", "kernels", "copies", "attached_ns", "ended_ns")]


class Recorded(Exec):
    """Programs under `gpushare exec` on a recorded device, with a daemon's socket in the test's folder."""

    # How programs in Python begin: they make a context, have a kernel of 10 us and the streams a and b.
    KERNEL = ("module, kernel, a, b, graph = (ctypes.c_void_p() for _ in range(5))\n"
              "def ask(name, *arguments):\n    result = getattr(cuda, name)(*arguments)\n    assert result == 0, (name, result)\n"
              "ask('cuInit', 0)\nask('cuDevicePrimaryCtxRetain', ctypes.byref(context), 0)\nask('cuCtxSetCurrent', context)\n"
              "ask('cuModuleLoadData', ctypes.byref(module), b'image')\n"
              "ask('cuModuleGetFunction', ctypes.byref(kernel), module, b'spin_10us')\n"
              "for stream in (a, b): ask('cuStreamCreate', ctypes.byref(stream), 1)\n"
              "def launch(stream): ask('cuLaunchKernel', kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)\n"
              "def say(what): os.write(1, f'{what}\\n'.encode())  # one write: lines of several processes do not mix\n")

    def setUp(self):
        super().setUp()
        self.load = str(build() / "bin/shim_load")
        if not has_shim():
            self.skipTest("no shim in this build")
        device = tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="gpushare-test-")
        self.addCleanup(device.close)
        self.environment.update(GPUSHARE_SOCKET=str(self.folder / "socket"), RECORDER_DEVICE=device.name)

    def start(self, *arguments, program=None, stdin=None, preloaded_all=False, **more):
        """`gpushare exec` in the background, until the test ends."""
        program = program or [self.load, "spin_200us", "0", "0"]
        command = [OPTIONS.tool, "exec", *map(str, arguments), "--", *program]
        command = self.preloading_all(command) if preloaded_all else command
        running = subprocess.Popen(command, cwd=self.folder, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env={**self.environment, **more}, start_new_session=True)

        def end():
            with contextlib.suppress(ProcessLookupError):  # children may outlive the program, with its pipes
                os.killpg(running.pid, signal.SIGKILL)
            self.assertNotIn("Sanitizer", running.communicate()[1])
        self.addCleanup(end)
        return running

    def top(self):
        return json.loads(self.tool("top", "--socket", "socket", "--json", "-", code=0).out)

    def eventually(self, condition):
        end = time.monotonic() + support.LONG_S
        while time.monotonic() < end:
            top = self.top()
            if condition(top):
                return top
            time.sleep(0.02)
        self.fail(f"it never came to that: {top}")

    def recorded(self, path=None):
        """The recorded device as it is now, and the processes that it has seen."""
        device, processes = Device(), (Process * 32)()
        path = path or self.environment["RECORDER_DEVICE"]
        count = ctypes.CDLL(self.driver).recorder_device_read(path.encode(), ctypes.byref(device), processes, 32)
        return device, processes[:max(count, 0)]
