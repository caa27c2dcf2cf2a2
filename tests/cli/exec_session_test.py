#!/usr/bin/env python3
"""gpushare exec with a daemon: unmodified programs as its sessions. See support.py. SPDX-License-Identifier: Apache-2.0"""

import os
import pathlib
import random
import select
import signal
import struct
import subprocess
import time

import support
from exec_support import Recorded


class Session(Recorded):
    """Programs as sessions of a daemon."""

    def test_a_program_is_a_session_with_its_limit_weight_class_and_priority(self):
        self.start_daemon("socket")
        self.start("--memory", "8MiB", "--weight", "2.5", "--priority", "3", "--class", "opportunistic")
        top = self.eventually(lambda top: top["sessions"] and top["sessions"][0]["service_s"] > 0)
        self.assertEqual(top["devices"][0]["promised_bytes"], 8 << 20)
        session = top["sessions"][0]
        self.assertEqual([session[key] for key in ("name", "persistent_bytes", "weight", "priority", "state")],
                         ["shim_load", 8 << 20, 2.5, 3, "turn"])
        self.assertGreater(session["iterations"], 0)
        self.assertIn("shim_load", self.tool("top", "--socket", "socket", code=0).out)

    def test_a_program_with_a_stripped_environment_is_a_session_and_one_of_no_group_is_left_alone(self):
        self.start_daemon("socket")
        device = {name: self.environment[name] for name in ("GPUSHARE_CUDA_DRIVER", "GPUSHARE_SOCKET", "RECORDER_DEVICE")}
        alone = self.preloading_all([self.load, "spin_200us", "20", "1"])
        subprocess.run(alone, cwd=self.folder, env={**os.environ, **device}, capture_output=True, check=True, timeout=support.LONG_S)
        self.assertEqual(self.top()["devices"][0]["turns"], 0)
        # Socket, weight and limit are on the group's page alone.
        del device["GPUSHARE_SOCKET"]
        program = ["env", "-i", *(f"{name}={value}" for name, value in device.items()), self.load, "spin_200us", "0", "0"]
        self.start("--memory", "8MiB", "--weight", "2.5", "--cap", "50%", program=program, preloaded_all=True)
        top = self.eventually(lambda top: top["sessions"] and top["sessions"][0]["service_s"] > 0)
        self.assertEqual([top["sessions"][0][key] for key in ("persistent_bytes", "weight", "cap")], [8 << 20, 2.5, 0.5])

    def test_a_program_without_a_context_is_no_session(self):
        self.start_daemon("socket")
        running = self.start("--memory", "8MiB", program=self.python("""
assert cuda.cuInit(0) == 0 and cuda.cuDeviceTotalMem_v2(ctypes.byref(ctypes.c_uint64()), 0) == 0
print('begun', flush=True)
sys.stdin.readline()
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
print('retained', flush=True)
sys.stdin.readline()"""), stdin=subprocess.PIPE)
        self.assertEqual(running.stdout.readline(), "begun\n")
        self.assertEqual(self.top()["sessions"], [])
        running.stdin.write("on\n")
        running.stdin.flush()
        self.assertEqual(running.stdout.readline(), "retained\n")
        self.assertEqual(len(self.top()["sessions"]), 1)

    def test_a_context_of_which_the_library_saw_no_beginning_is_a_session_at_its_first_use(self):
        # The recording driver's threads have a context that no call has made, as that of a graphics interface.
        self.start_daemon("socket")
        running = self.start("--memory", "8MiB", program=self.python("""
address = ctypes.c_uint64()
print(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_uint64(6 << 20)), flush=True)
sys.stdin.readline()"""), stdin=subprocess.PIPE)
        self.assertEqual(running.stdout.readline(), "0\n")
        self.assertEqual([session["persistent_bytes"] for session in self.top()["sessions"]], [8 << 20])
        # Where a program must not be without a daemon it gets no memory either.
        outcome = self.run_exec("--memory", "1GiB", "--fail-closed", "--", self.probe, "path", "10", GPUSHARE_SOCKET="nobody")
        self.assertEqual(outcome.out, "2\n")
        self.assertIn("is refused a context", outcome.err)

    def test_a_group_has_one_claim_and_a_child_of_fork_its_own_session(self):
        self.start_daemon("socket")
        program = self.python("cuda.cuInit(0)\nassert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0\n"
                              "if os.fork() == 0: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)\ntime.sleep(100)\n")
        running = self.start("--memory", "40MiB", program=program)
        top = self.eventually(lambda top: len(top["sessions"]) == 2)
        self.assertEqual(top["devices"][0]["promised_bytes"], 40 << 20)
        groups = {session["group"] for session in top["sessions"]}
        self.assertEqual(len(groups), 1)
        self.assertNotIn(0, groups)
        # The last of them keeps the claim.
        os.kill(min(session["pid"] for session in top["sessions"]), signal.SIGKILL)
        top = self.eventually(lambda top: len(top["sessions"]) == 1)
        self.assertEqual(top["devices"][0]["promised_bytes"], 40 << 20)
        os.killpg(running.pid, signal.SIGKILL)
        self.eventually(lambda top: top["devices"][0]["promised_bytes"] == 0)

    def test_memory_is_waited_for_and_what_never_fits_is_refused(self):
        self.start_daemon("socket")
        refused = self.run_exec("--memory", "65MiB", "--", self.load, "spin_10us", "1", "0", code=1)
        self.assertIn("cuDevicePrimaryCtxRetain returned 2", refused.err)
        self.assertIn("is refused a context", refused.err)
        self.assertIn("64.00 MiB", refused.err)
        first = self.start("--memory", "40MiB")
        self.eventually(lambda top: len(top["sessions"]) == 1)
        second = self.start("--memory", "30MiB", program=[self.load, "spin_10us", "100", "0"])
        self.eventually(lambda top: "queued" in [session["state"] for session in top["sessions"]])
        os.killpg(first.pid, signal.SIGKILL)
        self.assertEqual(second.wait(timeout=support.LONG_S), 0)

    def test_a_limit_that_changes_while_the_program_runs(self):
        self.start_daemon("socket")
        running = self.start("--memory", "40MiB")
        self.eventually(lambda top: len(top["sessions"]) == 1)
        self.tool("exec", "--change", running.pid, "--memory", "10MiB", code=0)
        self.eventually(lambda top: top["devices"][0]["promised_bytes"] == 10 << 20)
        # More than there is: the limit stays.
        self.tool("exec", "--change", running.pid, "--memory", "1GiB", code=0)
        self.assertIn("does not promise 1073741824 bytes, so the limit stays 10485760", running.stderr.readline())
        self.refused(["exec", "--change", os.getpid(), "--memory", "1GiB"], "is not gpushare exec")

    def test_a_share_that_changes_while_the_program_runs(self):
        daemon = self.start_daemon("socket")
        running = self.start("--memory", "8MiB", "--weight", "2", program=["sh", "-c", f"{self.load} spin_200us 0 10 & {self.load} spin_200us 0 10; wait"])
        other = self.start("--memory", "8MiB")

        def shares(top):
            return sorted((session["weight"], session["class"], session["priority"]) for session in top["sessions"])
        rest = (1, "guaranteed", 0)
        self.eventually(lambda top: shares(top) == [rest] + 2 * [(2, "guaranteed", 0)])
        self.tool("exec", "--change", running.pid, "--weight", "0.25", "--class", "opportunistic", "--priority=-3", code=0)
        changed = 2 * [(0.25, "opportunistic", -3)]
        self.eventually(lambda top: shares(top) == changed + [rest])
        # Values that are not named stay; a new daemon is told the same; other groups are not touched.
        self.tool("exec", "--change", running.pid, "--priority", "7", code=0)
        changed = 2 * [(0.25, "opportunistic", 7)]
        self.eventually(lambda top: shares(top) == changed + [rest])
        daemon.kill()
        daemon.wait()
        self.start_daemon("socket")
        self.eventually(lambda top: shares(top) == changed + [rest])
        # Back, with a turn under way: its work goes on.
        self.tool("exec", "--change", running.pid, "--class", "guaranteed", code=0)
        os.killpg(other.pid, signal.SIGKILL)
        top = self.eventually(lambda top: shares(top) == 2 * [(0.25, "guaranteed", 7)])
        before = sum(session["service_s"] for session in top["sessions"])
        self.eventually(lambda top: sum(session["service_s"] for session in top["sessions"]) > before)
        for option, bad in [("--weight", "0"), ("--class", "royal"), ("--priority", "1.5")]:
            self.refused(["exec", "--change", running.pid, option, bad], option)

    def test_the_daemon_is_killed_and_another_takes_its_place(self):
        daemon = self.start_daemon("socket")
        program = [self.load, "spin_200us", "0", "50"]
        first, second = self.start("--memory", "8MiB", program=program), self.start("--memory", "8MiB", program=program)
        self.eventually(lambda top: top["devices"][0]["turns"] > 20)
        chance = random.Random(int(os.environ.get("GPUSHARE_TEST_SEED", "1")))
        for _ in range(1 + int(os.environ.get("GPUSHARE_TEST_KILLS", "12")) // 12):
            time.sleep(chance.random() * 0.02)
            daemon.kill()
            daemon.wait()
            self.assertIn("has gone: it goes on without turns", first.stderr.readline())
            daemon = self.start_daemon("socket")
            self.eventually(lambda top: len(top["sessions"]) == 2 and top["devices"][0]["turns"] > 20)
        self.assertIsNone(first.poll())
        self.assertIsNone(second.poll())

    def test_kills_at_random_points_leave_the_ledger_right_and_others_going(self):
        self.start_daemon("socket")
        chance = random.Random(int(os.environ.get("GPUSHARE_TEST_SEED", "1")))
        bystander = self.start("--memory", "8MiB", program=[self.load, "spin_200us", "0", "20"])
        ways = ["launch", "ex", "ptsz", "streams", "graph", "copy", "threads"]
        for kill in range(int(os.environ.get("GPUSHARE_TEST_KILLS", "12"))):
            victim = self.start("--memory", "8MiB", program=[self.load, "spin_100us", "0", "7", chance.choice(ways)])
            time.sleep(chance.random() * 0.08)
            os.killpg(victim.pid, signal.SIGKILL)
        top = self.eventually(lambda top: len(top["processes"]) == 1)
        self.assertEqual(top["devices"][0]["promised_bytes"], 8 << 20)
        before = top["sessions"][0]["service_s"]
        self.eventually(lambda top: top["sessions"][0]["service_s"] > before)
        self.assertIsNone(bystander.poll())

    def test_others_go_on_when_the_holder_of_the_turn_is_killed(self):
        """Tells how long after the kill of the turn's holder the other program's next kernel begins: until the kernel says that the process is dead, and from then on."""
        self.start_daemon("socket")
        chance = random.Random(int(os.environ.get("GPUSHARE_TEST_SEED", "1")))
        log = self.folder / "log"
        other = self.start("--memory", "8MiB", RECORDER_LABEL="other", program=self.python(self.KERNEL.replace("spin_10us", "spin_200us") + f"""
log = os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT)
while True:
    launch(a)
    ask('cuStreamSynchronize', a)
    os.write(log, time.monotonic_ns().to_bytes(8, 'little'))"""))
        self.eventually(lambda top: top["sessions"] and top["sessions"][0]["service_s"] > 0)

        def kernels():
            """Those of the two programs that live, by label, and the numbers of the processes."""
            alive = [each for each in self.recorded()[1] if each.alive]
            return {each.label.decode(): each.kernels for each in alive}, {each.label.decode(): each.pid for each in alive}

        def holds_turn():
            before, _ = kernels()
            time.sleep(0.0005)
            after, _ = kernels()
            return after["victim"] > before.get("victim", 0) > 0 and after["other"] == before["other"]

        waits = []
        for kill in range(int(os.environ.get("GPUSHARE_TEST_KILLS", "12"))):
            victim = self.start("--memory", "8MiB", RECORDER_LABEL="victim", program=[self.load, "spin_200us", "0", "0"])
            self.assertEqual(victim.stdout.readline(), "ready\n")
            for _ in range(10000):
                time.sleep(chance.random() * 0.012)  # a turn of each
                if holds_turn():
                    break
            else:
                self.fail("the victim never had the turn")
            dead = select.poll()
            pidfd = os.pidfd_open(kernels()[1]["victim"])
            dead.register(pidfd, select.POLLIN)
            killed_ns = time.monotonic_ns()
            os.killpg(victim.pid, signal.SIGKILL)
            dead.poll()
            dead_ns = time.monotonic_ns()
            os.close(pidfd)
            next_ns = 0
            while next_ns < killed_ns:
                self.assertIsNone(other.poll())
                time.sleep(0.001)
                with log.open("rb") as ends:
                    ends.seek(max(0, log.stat().st_size // 8 - 1000) * 8)
                    content = ends.read()
                next_ns = next((each for each, in struct.iter_unpack("<q", content[:len(content) // 8 * 8]) if each > killed_ns), 0)
            waits.append(((next_ns - 200_000 - killed_ns) / 1e6, (dead_ns - killed_ns) / 1e6, (next_ns - 200_000 - dead_ns) / 1e6))
        top = self.eventually(lambda top: len(top["processes"]) == 1)
        self.assertEqual(top["devices"][0]["promised_bytes"], 8 << 20)
        told = [f"{sorted(column)[len(column) // 2]:.2f} ({max(column):.2f})" for column in zip(*waits)]
        print(f"{len(waits)} kills, median (most): next kernel after {told[0]} ms; dead after {told[1]} ms, then {told[2]} ms", flush=True)

    def test_a_green_context_is_a_session_and_takes_turns(self):
        self.start_daemon("socket")
        other = self.start("--memory", "8MiB", program=[self.load, "spin_200us", "0", "1"])
        self.assertEqual(other.stdout.readline(), "ready\n")
        # It is current to the program's thread all the time, so that no other may have it.
        green = self.KERNEL.replace("ask('cuDevicePrimaryCtxRetain', ctypes.byref(context), 0)", """
green = ctypes.c_void_p()
ask('cuGreenCtxCreate', ctypes.byref(green), None, 0, 1)
ask('cuCtxFromGreenCtx', ctypes.byref(context), green)""")
        running = self.start("--memory", "8MiB", program=self.python(green + """
say('made')
for _ in range(300):
    launch(a)
    launch(None)
ask('cuCtxSynchronize')
ask('cuGreenCtxDestroy', green)
say('done')
sys.stdin.readline()"""), stdin=subprocess.PIPE)
        self.assertEqual(running.stdout.readline(), "made\n")
        self.assertEqual(len(self.top()["sessions"]), 2)
        self.assertEqual(running.stdout.readline(), "done\n")
        top = self.eventually(lambda top: all(session["service_s"] > 0 for session in top["sessions"]))
        self.assertEqual(top["devices"][0]["cut_off"], 0)
        self.assertIsNone(other.poll())
        # More than the daemon has at all.
        refused = self.run_exec("--memory", "65MiB", "--", *self.python(green), code=1)
        self.assertIn("('cuGreenCtxCreate', 2)", refused.err)
        self.assertIn("is refused a context", refused.err)

    def test_without_its_daemon_a_closed_program_waits_but_captures(self):
        daemon = self.start_daemon("socket")
        running = self.start("--memory", "8MiB", "--fail-closed", program=self.python(self.KERNEL + """
launch(a)
say('first')
sys.stdin.readline()
ask('cuStreamBeginCapture_v2', a, 0)
launch(a)
ask('cuStreamEndCapture', a, ctypes.byref(graph))
say('captured')
launch(a)
say('second')"""), stdin=subprocess.PIPE)
        self.assertEqual(running.stdout.readline(), "first\n")
        daemon.kill()
        daemon.wait()
        self.assertIn("work for the device waits for another", running.stderr.readline())
        running.stdin.write("on\n")
        running.stdin.flush()
        self.assertEqual(running.stdout.readline(), "captured\n")
        self.assertEqual(select.select([running.stdout], [], [], 0.3)[0], [])
        self.start_daemon("socket")
        self.assertEqual(running.stdout.readline(), "second\n")
        self.assertEqual(running.wait(timeout=support.LONG_S), 0)

    def test_threads_that_launch_at_once_have_one_session(self):
        self.start_daemon("socket")
        other = self.start("--memory", "8MiB", program=[self.load, "spin_100us", "0", "0"])
        self.assertEqual(other.stdout.readline(), "ready\n")
        threads = self.start("--memory", "8MiB", program=self.python(self.KERNEL + """
import threading
def work():
    ask('cuCtxSetCurrent', context)
    stream = ctypes.c_void_p()
    ask('cuStreamCreate', ctypes.byref(stream), 1)
    for _ in range(200): launch(stream)
    ask('cuStreamSynchronize', stream)
all = [threading.Thread(target=work) for _ in range(16)]
for each in all: each.start()
for each in all: each.join()
sys.stdin.readline()
os._exit(0)"""), stdin=subprocess.PIPE)
        top = self.eventually(lambda top: len(top["sessions"]) >= 2)
        self.assertEqual(len(top["sessions"]), 2)
        threads.stdin.write("\n")
        threads.stdin.flush()
        self.assertEqual(threads.wait(timeout=support.LONG_S), 0, threads.stderr.read())
        self.assertIn(16 * 200, [each.kernels for each in self.recorded()[1]])

    def test_exit_with_threads_in_a_launch(self):
        self.start_daemon("socket")
        for _ in range(3):
            self.run_exec("--memory", "8MiB", "--", self.probe, "soname", "launch", code=7)
        self.eventually(lambda top: not top["sessions"])

    def test_nvml_lists_the_processes_of_the_group_alone(self):
        program = self.python(self.KERNEL + """
import struct
nvml = ctypes.CDLL('libnvidia-ml.so.1')
count, rows = ctypes.c_uint32(8), ctypes.create_string_buffer(8 * 24)
assert nvml.nvmlDeviceGetComputeRunningProcesses_v3(None, ctypes.byref(count), rows) == 0
print(count.value, [struct.unpack_from('I', rows, 24 * i)[0] for i in range(count.value)] == [os.getpid()])
count.value = 0
print(nvml.nvmlDeviceGetComputeRunningProcesses_v3(None, ctypes.byref(count), None), count.value, flush=True)
""")
        other = self.start("--memory", "8MiB")
        self.assertEqual(other.stdout.readline(), "ready\n")
        self.environment["LD_LIBRARY_PATH"] = str(pathlib.Path(self.driver).parent)
        self.assertEqual(self.run_exec("--memory", "8MiB", "--", *program).out, "1 True\n7 1\n")
        self.assertEqual(self.run_exec("--", *program).out.splitlines()[0], "2 False")

    def test_without_a_daemon(self):
        program = ["--", self.load, "spin_10us", "10", "0"]
        alone = self.run_exec(*program)
        self.assertIn("works alone on device 0000:3b:00.0 (preloaded by LD_PRELOAD)", alone.err)
        closed = self.run_exec("--fail-closed", *program, code=1)
        self.assertIn("is refused a context", closed.err)
        # Nobody is where programs look without a socket's name (CMakePresets.json).
        self.assertEqual(self.run_exec(*program, GPUSHARE_SOCKET="").err, "")
        # Without a daemon no cap holds, and the program is told so.
        uncapped = self.run_exec("--cap", "30%", *program, GPUSHARE_SOCKET="")
        self.assertIn("nobody is there, so no cap of the device's time holds", uncapped.err)
        self.assertEqual(self.run_exec("--cap", "100%", *program, GPUSHARE_SOCKET="").err, "")
        closed = self.run_exec("--cap", "30%", "--fail-closed", *program, code=1, GPUSHARE_SOCKET="")
        self.assertIn("is refused a context", closed.err)


if __name__ == "__main__":
    support.main()
