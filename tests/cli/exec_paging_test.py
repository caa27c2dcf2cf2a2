#!/usr/bin/env python3
"""gpushare exec with a daemon: programs that together want more memory than the device has. See support.py. SPDX-License-Identifier: Apache-2.0"""

import os
import random
import signal
import subprocess
import sys
import time

import support
from exec_support import RUNTIME, Recorded

# The device, a program's block on it, and a program's limit: small, since a stay in memory is nine times as long as the moves of a block.
DEVICE, BLOCK, LIMIT = (mebibytes << 20 for mebibytes in (8, 6, 7))


class Paging(Recorded):
    """Programs that each want the whole of a small device, or nearly. They end when they are told to, so that nothing depends on the host's speed."""

    # Has a block of bytes of its own, in which places know which they are; gives the device kernels, looks at a place again after each, and at all
    # bytes when it is told to end.
    HOLDER = f"""
import random, select, zlib
address, word, turn, bytes = ctypes.c_uint64(), ctypes.c_uint64(), 0, {BLOCK}
ask('cuModuleGetFunction', ctypes.byref(kernel), module, b'spin_5ms')
ask('cuMemAlloc_v2', ctypes.byref(address), ctypes.c_uint64(bytes))
content = random.Random(os.getpid()).randbytes(1 << 20) * (bytes >> 20)
ask('cuMemcpyHtoD_v2', address, content, ctypes.c_uint64(bytes))
places = range(0, bytes, bytes // 4)
for at in places:
    word.value = at + os.getpid()
    ask('cuMemcpyHtoD_v2', ctypes.c_uint64(address.value + at), ctypes.byref(word), ctypes.c_uint64(8))
say('holds')
while not select.select([sys.stdin], [], [], 0)[0]:
    launch(a)
    ask('cuStreamSynchronize', a)
    at, turn = places[turn % len(places)], turn + 1
    ask('cuMemcpyDtoH_v2', ctypes.byref(word), ctypes.c_uint64(address.value + at), ctypes.c_uint64(8))
    assert word.value == at + os.getpid(), (turn, at, word.value)
content = bytearray(content)
for at in places: content[at:at + 8] = (at + os.getpid()).to_bytes(8, 'little')
back = ctypes.create_string_buffer(bytes)
ask('cuMemcpyDtoH_v2', back, address, ctypes.c_uint64(bytes))
assert zlib.crc32(back.raw) == zlib.crc32(content)
ask('cuMemFree_v2', address)
"""

    def serve(self, *options):
        """A daemon of the small device."""
        return self.start_daemon("socket", "--stay", "0.02", *options, capacity=f"{DEVICE}B")

    def setUp(self):
        super().setUp()
        self.environment["RECORDER_DEVICE_SETTINGS"] = f"capacity_bytes={DEVICE}"
        self.holders = 0

    def hold(self, *options):
        """A holder that begins."""
        self.holders += 1
        running = self.start("--memory", f"{LIMIT}B", "--pageable", *options, program=self.python(self.KERNEL + self.HOLDER), stdin=subprocess.PIPE,
                             RECORDER_HOST_NODES="1", RECORDER_LABEL=str(self.holders))
        running.label = str(self.holders)
        return running

    def held(self, *options):
        """A holder that has its block, on the device."""
        running = self.hold(*options)
        self.assertEqual(running.stdout.readline(), "holds\n", running.poll() is not None and running.stderr.read())
        return running

    def finish(self, running):
        """It ends, and has found all of its bytes."""
        running.stdin.write("end\n")
        running.stdin.flush()
        self.assertEqual(running.wait(timeout=support.LONG_S), 0, running.stderr.read())

    def memory_of(self, running):
        """Its bytes on the device."""
        return sum(each.memory_bytes for each in self.recorded()[1] if each.alive and each.label.decode() == running.label)

    def until_memory_is(self, running, wanted_bytes):
        for _ in range(12000):
            if self.memory_of(running) == wanted_bytes:
                return
            self.assertIsNone(running.poll(), running.poll() is not None and running.stderr.read())
            time.sleep(0.005)
        self.fail(f"it has {self.memory_of(running)} bytes and never {wanted_bytes}: {self.top()}")

    def until_it_was_out(self, running):
        """It goes to the host, and comes back with its block."""
        self.until_memory_is(running, 0)
        self.until_memory_is(running, BLOCK)

    def test_the_program_that_is_out_is_told_so_and_its_room_is_the_others(self):
        # srtf: who has had less of the device, in doubling levels from one second, goes first.
        self.serve("--policy", "srtf")
        first = self.held()
        second = self.held()
        self.eventually(lambda top: "paged_out" in [each["state"] for each in top["sessions"]])
        for running in (first, second):
            self.until_it_was_out(running)
        for running in (second, first):
            self.finish(running)
        self.eventually(lambda top: not top["sessions"] and top["devices"][0]["promised_bytes"] == 0)

    def test_two_programs_take_turns_in_memory_under_every_policy(self):
        for policy in (None, "fifo", "pack", "srtf", "priority"):  # without a name: the default, fair
            with self.subTest(policy=policy):
                daemon = self.serve(*(["--policy", policy] if policy else []))
                first = self.held()
                second = self.held()
                self.until_it_was_out(first)
                self.until_it_was_out(second)
                self.finish(second)
                self.until_memory_is(first, BLOCK)
                os.killpg(first.pid, signal.SIGKILL)
                self.eventually(lambda top: not top["sessions"] and top["devices"][0]["promised_bytes"] == 0)
                daemon.kill()
                daemon.wait()

    def test_blocks_move_while_their_programs_take_turns(self):
        self.serve()
        pair = [self.start("--memory", f"{LIMIT}B", "--pageable", program=[self.load, "spin_1ms", "0", "0", "moves"], RECORDER_HOST_NODES="1",
                           RECORDER_LABEL=label) for label in ("a", "b")]
        for running, label in zip(pair, ("a", "b")):
            running.label = label
        for turn in range(6):  # each of them goes out three times, and compares its bytes all the while
            self.until_it_was_out(pair[turn % 2])

    def test_three_programs_take_turns_in_memory_and_one_is_killed_while_it_is_out(self):
        self.serve()
        running = [self.held() for _ in range(3)]
        for each in running:
            self.until_it_was_out(each)
        victim = running.pop(0)
        self.until_memory_is(victim, 0)
        os.killpg(victim.pid, signal.SIGKILL)
        self.eventually(lambda top: len(top["sessions"]) == 2 and top["devices"][0]["promised_bytes"] <= LIMIT)
        for each in running:
            self.until_it_was_out(each)
        os.killpg(running[0].pid, signal.SIGKILL)
        self.until_memory_is(running[1], BLOCK)
        self.eventually(lambda top: [each["state"] for each in top["sessions"]] == ["turn"])
        # Programs that end by themselves find all of their bytes.
        last = self.held()
        self.finish(last)
        self.finish(running[1])

    def test_a_program_that_cannot_move_keeps_the_device_from_nobody_but_by_its_memory(self):
        # srtf: the one that came later ranks higher after a second; the other is not stopped for a way out that it has not got.
        self.serve("--policy", "srtf")
        first = self.start("--memory", f"{LIMIT}B", program=[self.load, "spin_5ms", "400", "1"])
        self.assertEqual(first.stdout.readline(), "ready\n")
        second = self.start("--memory", f"{LIMIT}B", program=[self.load, "spin_5ms", "10", "1"])
        for each in (first, second):
            self.assertEqual(each.wait(timeout=support.LONG_S), 0, each.stderr.read())

    def test_a_program_of_higher_priority_has_the_device_while_another_waits_on_the_host(self):
        daemon = self.serve("--policy", "priority")
        low = self.held()
        chance = random.Random(int(os.environ.get("GPUSHARE_TEST_SEED", "1")))
        for kill in range(1 + int(os.environ.get("GPUSHARE_TEST_KILLS", "12")) // 12):
            # Killed at any moment, that in which blocks move included.
            high = self.hold("--priority", "1")
            time.sleep(chance.random() * 0.5)
            os.killpg(high.pid, signal.SIGKILL)
            self.eventually(lambda top: len(top["sessions"]) == 1 and top["sessions"][0]["state"] not in ("paging", "paged_out"))
        high = self.held("--priority", "1")
        self.assertEqual(self.memory_of(low), 0)
        self.finish(high)
        self.until_memory_is(low, BLOCK)
        # A program that is out when its daemon dies goes on from the host, and comes back with the next daemon.
        high = self.held("--priority", "1")
        daemon.kill()
        daemon.wait()
        self.assertIn("has gone", low.stderr.readline())
        os.killpg(high.pid, signal.SIGKILL)
        self.serve("--policy", "priority")
        self.until_memory_is(low, BLOCK)
        self.finish(low)

    def test_a_program_comes_back_to_the_device_when_it_has_room_in_fact(self):
        daemon = self.serve("--policy", "priority")
        low = self.held()
        high = self.held("--priority", "1")
        self.assertEqual(self.memory_of(low), 0)
        # A program that no daemon knows of takes the room before the one that is out is asked back.
        daemon.kill()
        daemon.wait()
        os.killpg(high.pid, signal.SIGKILL)
        high.wait()
        program = f"""
import ctypes, time
cuda, word = ctypes.CDLL({self.driver!r}), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(word), 0) == 0 and cuda.cuCtxSetCurrent(word) == 0
while cuda.cuMemAlloc_v2(ctypes.byref(word), ctypes.c_uint64({BLOCK})) != 0: time.sleep(0.01)
print("got", flush=True)
time.sleep(100)
"""
        alone = {**self.environment, "LD_PRELOAD": RUNTIME or ""}
        unknown = subprocess.Popen([sys.executable, "-c", program], env=alone, stdout=subprocess.PIPE, text=True)
        self.addCleanup(unknown.stdout.close)
        self.addCleanup(unknown.kill)
        self.assertEqual(unknown.stdout.readline(), "got\n")
        self.serve("--policy", "priority")
        self.eventually(lambda top: [each["state"] for each in top["sessions"]] == ["turn"])
        time.sleep(0.3)
        self.assertEqual(self.memory_of(low), 0)
        unknown.kill()
        unknown.wait()
        self.until_memory_is(low, BLOCK)
        self.finish(low)


class Parts(Recorded):
    """A program of seven blocks on a device of 16 MiB, whose copies go on when the test says so. Each is a part, since it takes as long as one may."""

    BLOCKS, MEBIBYTES = 7, 2

    # The program says "out N" when N copies have been made and the next one waits. It goes on, and sees that its bytes are right, until it is told to end.
    # Files in the folder of its argument tell a thread of it what to do.
    HOLDER = f"""
import pathlib, select, threading
recorder, folder = ctypes.CDLL(os.environ['GPUSHARE_CUDA_DRIVER']), pathlib.Path(sys.argv[1])
recorder.recorder_copies.restype = ctypes.c_uint64
blocks, word = [ctypes.c_uint64() for _ in range({BLOCKS})], ctypes.c_uint64()
for at, block in enumerate(blocks):
    ask('cuMemAlloc_v2', ctypes.byref(block), ctypes.c_uint64({MEBIBYTES} << 20))
    word.value = at + 1
    ask('cuMemcpyHtoD_v2', block, ctypes.byref(word), ctypes.c_uint64(8))
def obey():
    for which in range(int(os.environ.get('STOPS', '0')) + 1):
        while not (folder / f'go{{which}}').exists(): time.sleep(0.005)
        recorder.recorder_let_copies(ctypes.c_uint64(int((folder / f'go{{which}}').read_text())))
copies = os.environ.get('COPIES')
if copies: recorder.recorder_let_copies(ctypes.c_uint64(int(copies)))
if 'HOST' in os.environ: recorder.recorder_set_host_limit(ctypes.c_uint64(int(os.environ['HOST']) << 20))
threading.Thread(target=obey, daemon=True).start()
say('holds')
while not select.select([sys.stdin], [], [], 0)[0]:
    launch(a)
    ask('cuStreamSynchronize', a)
    for at, block in enumerate(blocks):
        ask('cuMemcpyDtoH_v2', ctypes.byref(word), block, ctypes.c_uint64(8))
        assert word.value == at + 1, (at, word.value)
say(f'copies {{recorder.recorder_copies()}}')
"""

    def setUp(self):
        super().setUp()
        self.environment["RECORDER_DEVICE_SETTINGS"] = f"capacity_bytes={16 << 20}"
        self.start_daemon("socket", "--stay", "0.02", "--policy", "priority", capacity="16MiB")

    def hold(self, *options, label, program=None, **more):
        running = self.start("--pageable", *options, program=[*(program or self.python(self.KERNEL + self.HOLDER)), str(self.folder)],
                             stdin=subprocess.PIPE, RECORDER_HOST_NODES="1", RECORDER_LABEL=label, **more)
        running.label = label
        return running

    def says(self, running, word):
        self.assertEqual(running.stdout.readline(), f"{word}\n", running.poll() is not None and running.stderr.read())

    def low(self, *options, **more):
        running = self.hold("--memory", "15MiB", *options, label="low", **more)
        self.says(running, "holds")
        return running

    def high(self, label="high"):
        """A program of higher rank that wants 4 MiB and so misses 3."""
        body = "say('in')\nsys.stdin.readline()\n"
        return self.hold("--memory", "4MiB", "--priority", "1", label=label, program=self.python(self.KERNEL + body))

    def finish(self, running):
        running.stdin.write("end\n")
        running.stdin.flush()
        out = running.stdout.read()
        self.assertEqual(running.wait(timeout=support.LONG_S), 0, running.stderr.read())
        return out

    def go(self, which, copies=2**64 - 1):
        path = self.folder / f"to{which}"
        path.write_text(str(copies))
        path.rename(self.folder / f"go{which}")

    memory_of = Paging.memory_of

    def until_memory_is(self, running, mebibytes):
        Paging.until_memory_is(self, running, mebibytes << 20)

    def test_a_program_that_waits_is_admitted_before_the_other_one_is_out_whole(self):
        low = self.low(COPIES="2")
        high = self.high()
        self.says(high, "in")  # the third block is not out and cannot go
        self.assertEqual(self.memory_of(low), (self.BLOCKS - 2) * self.MEBIBYTES << 20)
        self.assertEqual([each["state"] for each in self.top()["sessions"] if each["persistent_bytes"] > 4 << 20], ["paging"])
        self.go(0)
        self.until_memory_is(low, 0)
        self.finish(high)
        self.until_memory_is(low, self.BLOCKS * self.MEBIBYTES)
        self.finish(low)
        self.eventually(lambda top: not top["sessions"] and top["devices"][0]["promised_bytes"] == 0)

    def test_a_program_that_cannot_go_out_whole_uses_the_rest_from_the_host_until_there_is_room(self):
        low = self.low(COPIES=str(10**6), HOST=str(2 * self.MEBIBYTES))
        high = self.high()
        self.says(high, "in")
        self.until_memory_is(low, (self.BLOCKS - 2) * self.MEBIBYTES)
        kernels = self.kernels_of(low)
        self.eventually(lambda _: self.kernels_of(low) > kernels + 5)  # it has turns, and its blocks
        self.assertEqual(self.memory_of(low), (self.BLOCKS - 2) * self.MEBIBYTES << 20)
        self.assertEqual(self.top()["devices"][0]["promised_bytes"], (15 - 2 * self.MEBIBYTES + 4) << 20)
        self.finish(high)
        self.until_memory_is(low, self.BLOCKS * self.MEBIBYTES)
        self.eventually(lambda top: top["devices"][0]["promised_bytes"] == 15 << 20)
        self.finish(low)

    def kernels_of(self, running):
        return sum(each.kernels for each in self.recorded()[1] if each.label.decode() == running.label)

    def test_a_page_in_ends_when_a_program_that_ranks_higher_needs_the_room(self):
        low = self.low("--class", "opportunistic", STOPS="1", COPIES=str(self.BLOCKS + 2))
        high = self.started_high()
        self.until_memory_is(low, 0)
        self.finish(high)
        self.until_memory_is(low, 3 * self.MEBIBYTES)  # on its way in; the third block's copy waits, its room is there
        self.assertEqual([each["state"] for each in self.top()["sessions"]], ["paging"])
        high = self.high("again")
        self.eventually(lambda top: len(top["sessions"]) == 2)
        self.go(0)
        self.says(high, "in")
        self.finish(high)
        self.until_memory_is(low, self.BLOCKS * self.MEBIBYTES)
        # Out, in for 3 at most, these out again, and in.
        self.assertLessEqual(int(self.finish(low).split()[-1]), 2 * self.BLOCKS + 6)

    def started_high(self):
        high = self.high()
        self.says(high, "in")
        return high

    # A second process of the program, on a thread of the first.
    SECOND = """
import pathlib, subprocess, threading
def begin_second():
    while not (pathlib.Path(sys.argv[1]) / 'second').exists(): time.sleep(0.005)
    subprocess.run([sys.executable, '-c', os.environ['SECOND']], check=True)
    say('joined')
threading.Thread(target=begin_second, daemon=True).start()
"""

    def test_a_process_that_joins_a_program_which_is_out_comes_in_with_it(self):
        low = self.hold("--memory", "15MiB", label="low", program=self.python(self.KERNEL + self.SECOND + self.HOLDER),
                        SECOND="import ctypes, os, sys, time\ncuda = ctypes.CDLL('libcuda.so.1')\ncontext = ctypes.c_void_p()\n" + self.KERNEL)
        self.says(low, "holds")
        high = self.started_high()
        self.until_memory_is(low, 0)
        (self.folder / "second").touch()
        self.eventually(lambda top: len(top["sessions"]) == 3)
        self.finish(high)
        self.says(low, "joined")
        self.until_memory_is(low, self.BLOCKS * self.MEBIBYTES)
        self.finish(low)


if __name__ == "__main__":
    support.main()
