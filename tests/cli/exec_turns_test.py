#!/usr/bin/env python3
"""gpushare exec with a daemon: turns and shares of device time. See support.py. SPDX-License-Identifier: Apache-2.0"""

import os
import signal
import subprocess
import time

import support
from exec_support import Recorded


class Turns(Recorded):
    """Programs as sessions of a daemon that share the time of its device."""

    def test_a_cap_holds_while_nobody_else_wants_the_device(self):
        self.start_daemon("socket")
        # Two processes of a group have one cap. The balance that they begin with, a turn of 5 ms and a kernel come on top, whatever the host does.
        program = ["sh", "-c", f"{self.load} spin_1ms 0 0 & {self.load} spin_1ms 0 3; wait"]
        running = self.start("--memory", "8MiB", "--cap", "20%", program=program)

        def used_and_now():
            used, now_ns = self.used_ns()
            return sum(used.values()), now_ns

        def check_bound(share, before):
            used_ns, now_ns = (after - at for after, at in zip(used_and_now(), before))
            self.assertLessEqual(used_ns, share * now_ns + 50e6 + 2 * 6e6)
        top = self.eventually(lambda top: len(top["sessions"]) == 2 and all(each["service_s"] > 0 for each in top["sessions"]))
        self.assertEqual([each["cap"] for each in top["sessions"]], [0.2, 0.2])
        start = (0, 0)
        for _ in range(10):
            time.sleep(0.1)
            check_bound(0.2, start)
        # It is told why it waits.
        self.eventually(lambda top: any(each["waits_for"] == "its cap, 20% of the device's time" for each in top["sessions"]))
        self.assertIn("20%", self.tool("top", "--socket", "socket", code=0).out)
        # Another cap, and none.
        self.tool("exec", "--change", running.pid, "--cap", "5%", code=0)
        self.eventually(lambda top: [each["cap"] for each in top["sessions"]] == [0.05, 0.05])
        before = used_and_now()
        for _ in range(5):
            time.sleep(0.1)
            check_bound(0.05, before)
        self.tool("exec", "--change", running.pid, "--cap", "100%", code=0)
        self.eventually(lambda top: [each["cap"] for each in top["sessions"]] == [None, None])
        self.eventually(lambda top: not any(each["waits_for"].startswith("its cap") for each in top["sessions"]))
        self.refused(["exec", "--change", running.pid, "--cap", "30"], "--cap")

    def test_a_cap_leaves_the_device_to_others_and_a_debt_does_not_outlive_its_group(self):
        daemon = self.start_daemon("socket")
        capped = self.start("--memory", "8MiB", "--cap", "1%", program=[self.load, "spin_5ms", "0", "1"], RECORDER_LABEL="capped")
        self.eventually(lambda top: any(each["waits_for"].startswith("its cap") for each in top["sessions"]))
        # The other has the device as if it were alone: its turn does not end while the capped one has a debt.
        other = self.start("--memory", "8MiB", program=[self.load, "spin_200us", "2000", "1"], RECORDER_LABEL="other")
        self.assertEqual(other.wait(timeout=support.LONG_S), 0, other.stderr.read())
        self.assertIsNone(capped.poll())
        # A new daemon is told of the cap; a kill while the session waits for it leaves nothing.
        daemon.kill()
        daemon.wait()
        self.start_daemon("socket")
        self.eventually(lambda top: any(each["waits_for"].startswith("its cap, 1%") for each in top["sessions"]))
        os.killpg(capped.pid, signal.SIGKILL)
        self.eventually(lambda top: not top["sessions"] and top["devices"][0]["promised_bytes"] == 0)
        self.assertEqual(self.start("--memory", "8MiB", program=[self.load, "spin_1ms", "5", "1"]).wait(timeout=support.LONG_S), 0)

    def test_threads_streams_and_graphs_take_turns_side_by_side(self):
        self.start_daemon("socket", "--policy", "fair")
        ways = (["spin_200us", "0", "3", "threads"], ["spin_100us", "0", "7", "streams"], ["spin_1ms", "0", "4", "graph"], ["spin_50us", "0", "0", "ptsz"])
        running = [self.start("--memory", "8MiB", program=[self.load, *way]) for way in ways]
        self.eventually(lambda top: len(top["sessions"]) == len(ways) and all(each["iterations"] > 10 for each in top["sessions"]))
        for each in running:
            self.assertIsNone(each.poll())
        self.assertEqual(self.top()["devices"][0]["cut_off"], 0)

    def test_a_program_alone_queues_little_and_a_newcomer_does_not_wait_for_a_full_queue(self):
        self.start_daemon("socket")
        program = self.KERNEL.replace("spin_10us", "spin_10ms") + "for launched in range(1, 10**9):\n    launch(a)\n    say(launched)\n"
        alone = self.start("--memory", "8MiB", program=self.python(program))
        for _ in range(60):
            launched = int(alone.stdout.readline())
            # Kernels that have ended by now are not in flight. Eight go to the device before one was measured.
            self.assertLessEqual(launched - self.recorded()[1][0].kernels, 9)

    def used_ns(self):
        """The device's time of each process so far, by label, and the clock."""
        device, processes = self.recorded()
        return {each.label.decode(): each.compute_ns + each.copy_ns for each in processes}, device.now_ns

    def run_programs(self, seconds, programs, has_begun):
        """Each program's device time over so many seconds of the device, from when each session has begun, and how long that was, in ns.
        `programs`: for each its options of exec, and what it runs."""
        os.truncate(self.environment["RECORDER_DEVICE"], 0)  # a new device: one has 32 processes in its time
        running = [self.start("--memory", "8MiB", *options, program=[self.load, *program], RECORDER_LABEL=str(number))
                   for number, (options, program) in enumerate(programs)]
        try:
            for each in running:
                self.assertEqual(each.stdout.readline(), "ready\n")
            # The first may have given the device seconds of work before the others were there, which it then repays.
            self.eventually(lambda top: len(top["sessions"]) == len(programs) and all(has_begun(session) for session in top["sessions"]))
            before, began_ns = self.used_ns()
            now_ns = began_ns
            while now_ns - began_ns < seconds * 1e9:
                time.sleep(0.1)
                after, now_ns = self.used_ns()
        finally:
            for each in running:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
            self.eventually(lambda top: not top["sessions"])
        return [after[str(number)] - before[str(number)] for number in range(len(programs))], now_ns - began_ns

    def shares_of(self, seconds, loads):
        """Of programs that always have work, over so many seconds of the device: each one's percentage of the time used and the one by weight; the percentage used."""
        used, passed_ns = self.run_programs(seconds, [(("--weight", str(weight)), program) for weight, *program in loads],
                                            lambda session: session["iterations"] > 3)
        weights = sum(weight for weight, *_ in loads)
        return [(100 * each / sum(used), 100 * weight / weights) for each, (weight, *_) in zip(used, loads)], 100 * sum(used) / passed_ns

    def parts_of(self, seconds, loads):
        """The same under caps: each one's percentage of all time, and its cap."""
        used, passed_ns = self.run_programs(seconds, [(("--weight", str(cap), "--cap", f"{cap}%"), program) for cap, *program in loads],
                                            lambda session: session["service_s"] > 0.1)  # the balance that they begin with is used up
        return [(100 * each / passed_ns, cap) for each, (cap, *_) in zip(used, loads)], 100 * sum(used) / passed_ns

    def check_mixes(self, mixes, measure, seconds):
        """Each program of each mix gets its percentage within 2 points. `scripts/soak shares` makes GPUSHARE_TEST_ROUNDS rounds of all mixes, tells what
        each round gave, and each must be within the bound. Else a mix that is not gets nine more tries, and a line says so: a busy host may be
        late with a program's next work, and then others rightly have the device."""
        soaks = seconds > 0
        told = {mix: [] for mix in mixes}
        for number in range(int(os.environ.get("GPUSHARE_TEST_ROUNDS", "3")) if soaks else 1):
            for mix in mixes:
                with self.subTest(mix=mix, round=number):
                    for tries_left in (0,) if soaks else range(9, -1, -1):
                        parts, busy = measure(seconds or 2.5, mix)
                        told[mix].append((parts, busy))
                        text = f"{mix}: {', '.join(f'{got:.2f}' for got, _ in parts)}%, device busy {busy:.0f}%"
                        missed = max(abs(got - wanted) for got, wanted in parts) > 2
                        if soaks or missed:
                            print(f"{text}{', missed' * missed}, {tries_left} tries left" if not soaks else f"round {number + 1}: {text}{', missed' * missed}", flush=True)
                        if not missed:
                            break
                    self.assertFalse(missed, text)
        for mix, rounds in told.items() if soaks else ():
            columns = [sorted(column) for column in zip(*([got for got, _ in parts] for parts, _ in rounds))]
            print(f"{mix}: {'; '.join(f'{column[len(column) // 2]:.2f} ({column[0]:.2f} to {column[-1]:.2f})' for column in columns)}%", flush=True)

    def test_caps_hold_over_seconds_of_the_device(self):
        # That they get no more is in every run, above; how much less they get depends on the host.
        seconds = float(os.environ.get("GPUSHARE_TEST_SHARES", "0"))
        if seconds == 0:
            self.skipTest("scripts/soak shares runs it")
        self.start_daemon("socket", "--policy", "fair")
        # Sums of caps that a busy host can give the device work for.
        mixes = [((20, "spin_5ms", "0", "1"),), ((10, "spin_20us", "0", "0"),), ((10, "spin_10ms", "0", "1"),), ((30, "spin_200us", "0", "16", "graph"),),
                 ((50, "spin_10ms", "0", "0"),), ((10, "spin_100us", "0", "0", "streams"),), ((10, "spin_50us", "0", "0", "ptsz"),), ((25, "copy", "0", "0", "copy"),),
                 ((20, "spin_5ms", "0", "1"), (10, "spin_3ms", "0", "1", "graph"), (10, "spin_2ms", "0", "1", "ptsz")),
                 ((5, "spin_5ms", "0", "1"), (45, "spin_3ms", "0", "0"))]
        self.check_mixes(mixes, self.parts_of, seconds)

    def test_shares_follow_weights(self):
        # All of them for ten seconds of the device: scripts/soak shares.
        self.start_daemon("socket", "--policy", "fair")
        seconds = float(os.environ.get("GPUSHARE_TEST_SHARES", "0"))
        mixes = [((2, "spin_5ms", "0", "1"), (1, "spin_3ms", "0", "1", "graph"), (1, "spin_2ms", "0", "1", "ptsz")),
                 ((1, "spin_5ms", "0", "1"), (9, "spin_3ms", "0", "0"))]
        if seconds > 0:
            mixes += [((2, "spin_20us", "0", "0"),) + 2 * ((1, "spin_20us", "0", "0"),),
                      ((2, "spin_10ms", "0", "0"),) + 2 * ((1, "spin_10ms", "0", "0"),),
                      ((2, "spin_200us", "0", "16", "graph"), (1, "spin_100us", "0", "0", "streams"), (1, "spin_50us", "0", "0", "ptsz")),
                      ((1, "spin_10ms", "0", "1"), (9, "spin_20us", "0", "0")), ((9, "spin_10ms", "0", "1"), (1, "spin_20us", "0", "0")),
                      ((1, "spin_200us", "0", "1", "ptsz"), (9, "spin_200us", "0", "1")), ((1, "copy", "0", "0", "copy"), (1, "spin_50us", "0", "0"))]
        self.check_mixes(mixes, self.shares_of, seconds)

    def test_a_turn_ends_between_two_iterations(self):
        self.start_daemon("socket", "--policy", "fair")
        # Iterations of 4 ms, of which the next is given to the device before the last has been waited for. A turn of 5 ms would end amid every second one.
        ways = {"cuEventSynchronize": "ask('cuEventSynchronize', ends[i % 2])", "cuEventQuery": "while cuda.cuEventQuery(ends[i % 2]) == 600: pass", "launches": ""}
        for way, wait in ways.items():
            with self.subTest(way=way):
                running = [self.start("--memory", "8MiB"), self.start("--memory", "8MiB", program=self.python(self.KERNEL + f"""
ends, kernels = [ctypes.c_void_p(), ctypes.c_void_p()], [ctypes.c_void_p() for _ in range(4)]
for end in ends: ask('cuEventCreate', ctypes.byref(end), 0)
for number, each in enumerate(kernels): ask('cuModuleGetFunction', ctypes.byref(each), module, b'spin_1ms_%d' % number)
i = 0
while True:
    for each in kernels: ask('cuLaunchKernel', each, 1, 1, 1, 1, 1, 1, 0, a, None, None)
    ask('cuEventRecord', ends[i % 2], a)
    i += 1
    {wait}"""))]

                def turns_of_it(top):
                    return next(((each["service_s"], each["iterations"]) for each in top["sessions"] if each["name"] != "shim_load"), (0, 0))
                after_s, after = turns_of_it(self.eventually(lambda top: turns_of_it(top)[1] > 5))
                for attempt in range(20):  # while a busy host is late with the other, turns have no end
                    before_s, before = after_s, after
                    after_s, after = turns_of_it(self.eventually(lambda top: turns_of_it(top)[1] > before + 20))
                    turn_s = (after_s - before_s) / (after - before)
                    if turn_s < 0.0045:
                        break
                self.assertLess(turn_s, 0.0045)
                for each in running:
                    os.killpg(each.pid, signal.SIGKILL)
                self.eventually(lambda top: not top["sessions"])

    def check_let_through(self, *others):
        """A program whose work in stream a waits for what it does after giving stream b more is let through, although its turn is over."""
        waits = self.start("--memory", "8MiB", program=self.python(self.KERNEL + """
import threading
go = threading.Event()
wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda unused: go.wait())
launch(a)
ask('cuLaunchHostFunc', a, wait, None)
launch(a)
say('given')
sys.stdin.readline()
launch(b)
go.set()
ask('cuCtxSynchronize')
say('done')"""), stdin=subprocess.PIPE)
        self.assertEqual(waits.stdout.readline(), "given\n")
        others = [*others, self.start("--memory", "8MiB", program=[self.load, "spin_200us", "0", "1"])]
        self.eventually(lambda top: len(top["sessions"]) == 1 + len(others))
        time.sleep(0.3)  # the turn is over, and its work does not finish
        waits.stdin.write("go\n")
        waits.stdin.flush()
        self.assertEqual(waits.wait(timeout=support.LONG_S), 0, waits.stderr.read())
        self.assertEqual(self.top()["devices"][0]["cut_off"], 0)
        for each in others:
            self.assertIsNone(each.poll())

    def test_measured_work_that_waits_for_other_work_of_the_process_is_let_through(self):
        self.start_daemon("socket", "--lease", "10")
        other = self.start("--memory", "8MiB", program=[self.load, "spin_200us", "0", "1"])
        self.assertEqual(other.stdout.readline(), "ready\n")
        self.check_let_through(other)

    def test_unmeasured_work_that_waits_for_other_work_of_the_process_is_let_through(self):
        self.start_daemon("socket", "--lease", "10")
        self.check_let_through()  # nobody else wants the device when it gives its work

    def test_a_kernel_longer_than_the_lease(self):
        self.start_daemon("socket", "--lease", "0.1")
        long = self.start("--memory", "8MiB", program=[self.load, "spin_400ms", "0", "1"])
        other = self.start("--memory", "8MiB", program=[self.load, "spin_1ms", "0", "1"])
        service = {}
        for more in range(3):
            top = self.eventually(lambda top: top["devices"][0]["cut_off"] > more and len(top["sessions"]) == 2 and
                                  all(each["service_s"] > service.get(each["pid"], 0) for each in top["sessions"]))
            service = {each["pid"]: each["service_s"] for each in top["sessions"]}
        self.assertIsNone(long.poll())
        self.assertIsNone(other.poll())


if __name__ == "__main__":
    support.main()
