#!/usr/bin/env python3
"""gpushare exec on a machine of several devices. See support.py. SPDX-License-Identifier: Apache-2.0"""

import os
import pathlib
import signal
import subprocess
import time

import support
from exec_support import Recorded, build


class Devices(Recorded):
    """Programs on a machine of two devices, both of which the daemon serves: over the strict stand-in, whose devices have the buses 1 and 2."""

    # A program with a context, a kernel and a stream for each device; use() is cudaSetDevice.
    BOTH = ("def ask(name, *arguments):\n    result = getattr(cuda, name)(*arguments)\n    assert result == 0, (name, result)\n"
            "def say(*what): os.write(1, (' '.join(map(str, what)) + '\\n').encode())  # one write: lines of several processes do not mix\n"
            "def retain(device):\n    made = ctypes.c_void_p()\n    ask('cuDevicePrimaryCtxRetain', ctypes.byref(made), device)\n    return made\n"
            "def use(device): ask('cuCtxSetCurrent', contexts[device])\n"
            "def launch(device): ask('cuLaunchKernel', kernel, 1, 1, 1, 1, 1, 1, 0, streams[device], None, None)\n"
            "ask('cuInit', 0)\nkernel, module, streams = ctypes.c_void_p(), ctypes.c_void_p(), [ctypes.c_void_p(), ctypes.c_void_p()]\n")
    ALL = (BOTH + "contexts = [retain(0), retain(1)]\nuse(0)\nask('cuModuleLoadData', ctypes.byref(module), b'image')\n"
           "ask('cuModuleGetFunction', ctypes.byref(kernel), module, b'spin_100us')\n"
           "for device in (0, 1):\n    use(device)\n    ask('cuStreamCreate', ctypes.byref(streams[device]), 1)\n")

    def setUp(self):
        super().setUp()
        self.environment["RECORDER_DEVICES"] = "01,02"
        for bus in ("01", "02", "09"):
            self.addCleanup(pathlib.Path(f"{self.environment['RECORDER_DEVICE']}.{bus}").unlink, missing_ok=True)

    def serve(self, *more):
        standin = str(build() / "lib/libcuda_standin.so")
        return self.start_daemon("socket", *more, devices=("cuda:0", "cuda:1"),
                                 env={**os.environ, "GPUSHARE_CUDA_DRIVER": standin, "CUDA_STANDIN": "devices=2"})

    def promised(self, top):
        return [device["promised_bytes"] >> 20 for device in top["devices"]]

    def used_on(self, bus):
        """The device's time of each process so far, by label."""
        processes = self.recorded(f"{self.environment['RECORDER_DEVICE']}.{bus}")[1]
        return {each.label.decode(): each.compute_ns + each.copy_ns for each in processes}

    def wait_until(self, condition):
        while not condition():  # the test's time limit ends it
            time.sleep(0.02)

    def test_a_process_is_a_session_of_each_device_that_it_uses(self):
        daemon = self.serve()
        running = self.start("--memory", "8MiB", program=self.python(self.ALL + """
say('ready')
while True:
    for device in (0, 1):
        use(device)
        launch(device)
        ask('cuCtxSynchronize')
"""))
        self.assertEqual(running.stdout.readline(), "ready\n")

        def both(top):
            return len(top["sessions"]) == 2 and all(session["service_s"] > 0 for session in top["sessions"])
        top = self.eventually(both)
        self.assertEqual(sorted(session["device"] for session in top["sessions"]), ["cuda:0", "cuda:1"])
        self.assertEqual(len({session["pid"] for session in top["sessions"]}), 1)
        self.assertEqual(self.promised(top), [8, 8])
        # Limits and shares change on all of them, and a new daemon hears of all.
        self.tool("exec", "--change", running.pid, "--memory", "10MiB", "--weight", "3", code=0)
        self.eventually(lambda top: self.promised(top) == [10, 10] and [session["weight"] for session in top["sessions"]] == [3, 3])
        daemon.kill()
        daemon.wait()
        self.serve()
        self.eventually(lambda top: both(top) and self.promised(top) == [10, 10])
        # One kill takes both.
        os.killpg(running.pid, signal.SIGKILL)
        self.eventually(lambda top: self.promised(top) == [0, 0] and not top["sessions"])

    def test_a_part_of_the_limit_that_is_lent_on_one_device_is_there_on_the_other(self):
        self.serve()
        running = self.start("--memory", "8MiB", stdin=subprocess.PIPE, program=self.python(self.ALL + """
free, total, address = (ctypes.c_uint64() for _ in range(3))
while True:
    for device in (0, 1):
        use(device)
        ask('cuMemGetInfo_v2', ctypes.byref(free), ctypes.byref(total))
        refused = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_uint64(6 << 20))
        if refused == 0: ask('cuMemFree_v2', address)
        print(total.value >> 20, refused, end=' ', flush=True)
    say('.')
    sys.stdin.readline()
"""))
        self.assertEqual(running.stdout.readline(), "8 0 8 0 .\n")
        self.assertEqual(self.promised(self.eventually(lambda top: len(top["sessions"]) == 2)), [8, 8])
        # As the second device's daemon writes it (group.hpp): the bytes lent of each device follow the mark and three limits.
        page = next(path for path in pathlib.Path(f"/proc/{running.pid}/fd").iterdir() if os.readlink(path).startswith("/memfd:gpushare-group"))
        with open(page, "r+b", buffering=0) as file:
            file.seek(32 + 8)
            file.write((3 << 20).to_bytes(8, "little"))
        running.stdin.write("\n")
        running.stdin.flush()
        self.assertEqual(running.stdout.readline(), "8 0 5 2 .\n")
        self.eventually(lambda top: self.promised(top) == [8, 5])

    def test_devices_are_found_by_their_address_and_not_by_their_number(self):
        # As with CUDA_VISIBLE_DEVICES=1, or another order of the devices.
        self.serve()
        only = self.start("--memory", "8MiB", RECORDER_DEVICES="02")
        self.assertEqual(only.stdout.readline(), "ready\n")
        self.assertEqual(self.promised(self.eventually(lambda top: len(top["sessions"]) == 1)), [0, 8])
        turned = self.start("--memory", "5MiB", RECORDER_DEVICES="02,01", program=self.python(self.BOTH + "contexts = [None, retain(1)]\nsay('ready')\ntime.sleep(100)"))
        self.assertEqual(turned.stdout.readline(), "ready\n")
        self.assertEqual(self.promised(self.eventually(lambda top: len(top["sessions"]) == 2)), [5, 8])

    def test_a_child_of_fork_joins_where_it_makes_a_context(self):
        self.serve()
        running = self.start("--memory", "8MiB", program=self.python(self.ALL + "if os.fork() == 0: retain(1)\nsay('ready')\ntime.sleep(100)"))
        self.assertEqual(running.stdout.readline(), "ready\n")
        top = self.eventually(lambda top: len(top["sessions"]) == 3)
        self.assertEqual(sorted(session["device"] for session in top["sessions"]), ["cuda:0", "cuda:1", "cuda:1"])
        self.assertEqual(self.promised(top), [8, 8])  # a group's memory is promised once
        os.kill(min(session["pid"] for session in top["sessions"]), signal.SIGKILL)
        self.eventually(lambda top: [session["device"] for session in top["sessions"]] == ["cuda:1"] and self.promised(top) == [0, 8])

    def test_a_device_that_the_daemon_does_not_serve(self):
        self.serve()
        self.environment["RECORDER_DEVICES"] = "01,09"
        program = self.ALL + "for device in (0, 1):\n    use(device)\n    launch(device)\n    ask('cuCtxSynchronize')\nsay('done')"
        opened = self.run_exec("--memory", "8MiB", "--", *self.python(program))
        self.assertEqual(opened.out, "done\n")
        lines = [line for line in opened.err.splitlines() if "0000:09:00.0" in line]
        self.assertEqual(len(lines), 1, opened.err)
        self.assertIn("works alone on device 0000:09:00.0", lines[0])
        self.assertIn("it has: cuda:0 at 0000:01:00.0, cuda:1 at 0000:02:00.0", lines[0])
        closed = self.run_exec("--fail-closed", "--memory", "8MiB", "--", *self.python(program), code=1)
        self.assertIn("('cuDevicePrimaryCtxRetain', 2)", closed.err)
        self.assertIn("is refused a context on device 0000:09:00.0", closed.err)

    def test_waiting_for_memory_of_one_device_does_not_stop_work_on_another(self):
        self.serve()
        holder = self.start("--memory", "60MiB", RECORDER_DEVICES="02")
        self.assertEqual(holder.stdout.readline(), "ready\n")
        running = self.start("--memory", "8MiB", program=self.python(self.BOTH + """
import threading
contexts = [retain(0), None]
def second():
    contexts[1] = retain(1)
    say('second')
use(0)
ask('cuModuleLoadData', ctypes.byref(module), b'image')
ask('cuModuleGetFunction', ctypes.byref(kernel), module, b'spin_100us')
ask('cuStreamCreate', ctypes.byref(streams[0]), 1)
waiter = threading.Thread(target=second)
waiter.start()
time.sleep(0.5)
for _ in range(100): launch(0)
ask('cuCtxSynchronize')
say('first')
waiter.join()
os._exit(0)
"""))
        self.assertEqual(running.stdout.readline(), "first\n", running.poll() is not None and running.stderr.read())
        os.killpg(holder.pid, signal.SIGKILL)
        self.assertEqual(running.stdout.readline(), "second\n")
        self.assertEqual(running.wait(timeout=support.LONG_S), 0)

    def test_turns_of_one_device_are_no_turns_of_another(self):
        self.serve("--policy", "fair", "--lease", "100")
        # Copies go to the stream of another device than the thread's; a launch there is the driver's to refuse.
        both = self.start("--memory", "8MiB", RECORDER_LABEL="both", program=self.python(self.ALL + """
import threading
def work(device):
    use(device)
    while True: launch(device)
for device in (0, 1): threading.Thread(target=work, args=(device,), daemon=True).start()
use(1)
block, here = ctypes.c_uint64(), ctypes.create_string_buffer(1 << 20)
ask('cuMemAlloc_v2', ctypes.byref(block), ctypes.c_uint64(1 << 20))
assert cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, streams[0], None, None) == 400
while True:
    for _ in range(20): ask('cuMemcpyHtoDAsync_v2', block, here, ctypes.c_uint64(1 << 20), streams[0])
    ask('cuStreamSynchronize', streams[0])
    say('copied')
"""))
        for _ in range(3):
            self.assertEqual(both.stdout.readline(), "copied\n", both.poll() is not None and both.stderr.read())
        # Another program has the turn of the first device for a kernel without an end.
        other = self.start("--memory", "8MiB", program=[self.load, "spin_1000000ms", "0", "0"], RECORDER_DEVICES="01", RECORDER_LABEL="other")
        self.wait_until(lambda: self.used_on("01").get("other", 0) > 0)
        turns = [device["turns"] for device in self.top()["devices"]]
        first, second = self.used_on("01")["both"], self.used_on("02")["both"]
        # The second device's turn goes on, and with it the work there.
        self.wait_until(lambda: self.used_on("02")["both"] > second + 100_000_000)
        self.assertEqual(self.used_on("01")["both"], first)
        self.assertEqual(set(self.used_on("02")), {"both"})
        top = self.top()
        self.assertEqual([device["turns"] for device in top["devices"]], turns)
        self.assertEqual([device["cut_off"] for device in top["devices"]], [0, 0])
        self.assertIsNone(other.poll())


if __name__ == "__main__":
    support.main()
