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
        return self.start_daemon("socket", "--stay", "0.02", *options, capacity=str(DEVICE))

    def setUp(self):
        super().setUp()
        self.environment["RECORDER_DEVICE_SETTINGS"] = f"capacity_bytes={DEVICE}"
        self.holders = 0

    def hold(self, *options):
        """A holder that begins."""
        self.holders += 1
        running = self.start("--memory", LIMIT, "--pageable", *options, program=self.python(self.KERNEL + self.HOLDER), stdin=subprocess.PIPE,
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
        self.assertEqual(running.wait(timeout=120), 0, running.stderr.read())

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
        pair = [self.start("--memory", LIMIT, "--pageable", program=[self.load, "spin_1ms", "0", "0", "moves"], RECORDER_HOST_NODES="1",
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
        first = self.start("--memory", LIMIT, program=[self.load, "spin_5ms", "400", "1"])
        self.assertEqual(first.stdout.readline(), "ready\n")
        second = self.start("--memory", LIMIT, program=[self.load, "spin_5ms", "10", "1"])
        for each in (first, second):
            self.assertEqual(each.wait(timeout=120), 0, each.stderr.read())

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


if __name__ == "__main__":
    support.main()
