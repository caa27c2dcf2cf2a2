#!/usr/bin/env python3
"""gpushare daemon and gpushare top. See support.py. SPDX-License-Identifier: Apache-2.0"""

import fcntl
import json
import os
import pathlib
import pty
import signal
import socket
import struct
import termios
import time

import support
from support import OPTIONS, ToolTest


class Daemon(ToolTest):
    def start(self, *more):
        """A daemon at ./socket, once it answers."""
        return self.start_daemon("socket", *more)

    def test_top_and_a_clean_stop(self):
        for stop in (signal.SIGTERM, signal.SIGINT):
            daemon = self.start("--policy", "priority")
            self.assertEqual((self.folder / "socket").stat().st_mode & 0o777, 0o600)
            status = json.loads(self.tool("top", "--socket", "socket", "--json", "-", code=0).out)
            self.assertEqual(sorted(status), ["devices", "images", "lost_processes", "pid", "processes", "refusals", "sessions", "socket", "uptime_s",
                                              "version"])
            self.assertEqual(status["pid"], daemon.pid)
            self.assertEqual(status["devices"][0]["policy"], "priority")
            self.assertEqual(status["devices"][0]["capacity_bytes"], 64 << 20)
            self.assertIn("0 B of 64.00 MiB promised", self.tool("top", "--socket", "socket", code=0).out)
            self.refused(["daemon", "--socket", "socket", "--device", "host"], "serves socket already", "SIGTERM")
            daemon.send_signal(stop)
            self.assertEqual(daemon.wait(timeout=support.LONG_S), 0)
            self.assertFalse((self.folder / "socket").exists())
            self.refused(["top", "--socket", "socket"], "no daemon answers", "gpushare daemon --socket", code=3)

    def test_top_on_a_terminal(self):
        self.start()
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.folder)
            os.execv(OPTIONS.tool, [OPTIONS.tool, "top", "--socket", "socket"])
        self.addCleanup(os.close, terminal)
        shown = b""

        def until(word):
            nonlocal shown
            while word not in shown:
                shown += os.read(terminal, 65536)
            shown = b""

        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
        until(b"sorted by share now")
        os.write(terminal, b"s")
        until(b"sorted by share ")
        os.write(terminal, "/abcé".encode() + b"\x7f")
        until(b"filter: abc_")
        os.write(terminal, b"\n")
        until(b"filter 'abc'")
        os.write(terminal, b"q")
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)

    def test_a_policy_of_the_operators_own(self):
        lottery = self.lottery()
        self.start("--policy", lottery)
        status = json.loads(self.tool("top", "--socket", "socket", "--json", "-", code=0).out)
        self.assertEqual(status["devices"][0]["policy"], "lottery")
        env = {**os.environ, "GPUSHARE_SOCKET": "socket"}
        run = ["run", "--jobs", "examples/jobs/small.csv", "--time-scale", "0.01", "--device", "shared", "--policy"]
        self.tool(*run, "fifo", code=0, env=env)
        self.assertIn("operator", self.tool(*run, lottery, code=2, env=env).err)  # nobody else names a policy
        for options, word in ((["mine.so"], "absolute path"), (["fifo,srtf"], "one policy"), (["/nowhere/mine.so"], "/nowhere/mine.so")):
            self.refused(["daemon", "--socket", "other", "--device", "host", "--policy", *options], word)

    def test_the_operator_sets_the_capacity(self):
        self.start()

        def capacity():
            status = json.loads(self.tool("top", "--socket", "socket", "--json", "-", code=0).out)
            return [status["devices"][0][key] for key in ("capacity_bytes", "effective_capacity_bytes")]

        self.tool("daemon", "--socket", "socket", "--set-capacity", "32MiB", code=0)
        self.assertEqual(capacity(), [32 << 20, 32 << 20])
        self.refused(["daemon", "--socket", "socket", "--set-capacity", "65MiB"], "--set-capacity", "at most 64.00 MiB")
        self.refused(["daemon", "--socket", "socket", "--set-capacity", "1MiB", "--device", "no"], "no device 'no'", code=None)
        self.tool("daemon", "--socket", "socket", "--set-capacity", "0", code=0)
        self.assertEqual(capacity(), [64 << 20, 64 << 20])
        self.refused(["daemon", "--socket", "none", "--set-capacity", "1MiB"], "none", code=3)

    def arrive(self, daemon):
        """A session with ephemeral memory arrives over that socket, which may be in a shared lane."""
        hello, arrive, may_share = 1, 4, 64

        def header(kind, size, sequence):
            return struct.pack("<IHHII", 0x47505353, 1, kind, size, sequence)

        daemon.settimeout(600)
        daemon.connect(str(self.folder / "socket"))
        daemon.send(header(hello, 360, 0) + struct.pack("<HHHHQ256s64sQ", 0, 0, 0, 0, 1, b"", b"test", 0))
        needs = struct.pack("<QQQQQdiIII64sQQdQd", 1, 0, 8 << 20, 0, 0, 1.0, 0, 0, may_share, 0, b"session", 0, 0, 0.0, 0, 0.0)
        daemon.send(header(arrive, 16 + len(needs), 1) + needs)

    def shares_lane(self):
        """Whether such a session has its memory together with others, as the daemon answers to its Arrive."""
        reply, shares = 3, 1 << 31
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
            self.arrive(daemon)
            while True:
                message = daemon.recv(8192)
                kind = struct.unpack_from("<IHH", message)[2]
                if kind == reply:
                    code, value = struct.unpack_from("<iI", message, 16)
                    self.assertEqual(code, 0)
                    return value & shares != 0

    def test_lanes_are_shared_unless_told_otherwise(self):
        for options, shared in (((), True), (("--private-lanes",), False), (("--lanes", "2"), False)):
            daemon = self.start(*options)
            self.assertEqual(self.shares_lane(), shared)
            daemon.terminate()
            daemon.wait()

    def test_a_killed_daemon_is_replaced(self):
        daemon = self.start()
        daemon.kill()
        daemon.wait()  # else it may still hold its lock
        self.start()

    def test_a_daemon_whose_driver_hangs_ends_and_is_replaced(self):
        hangs = self.library("hangs", """
            #define _GNU_SOURCE
            #include <string.h>
            #include <sys/syscall.h>
            #include <unistd.h>
            int memfd_create(const char* name, unsigned flags) {
              int hangs = strcmp(name, "gpushare-shared") == 0; /* memory of a shared lane, on the host device */
              if (hangs) fork(); /* has all files, and stays, as a process that the kernel cannot end */
              while (hangs) pause();
              return (int)syscall(SYS_memfd_create, name, flags);
            }""")
        order = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
        with open(self.folder / "log", "w") as log:
            daemon = self.start_daemon("socket", "--driver-patience", "5", stderr=log, env={**os.environ, "LD_PRELOAD": str(hangs), "ASAN_OPTIONS": order})
        others = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            self.arrive(connection)
            while not others:
                self.assertIsNone(daemon.poll())
                others = self.children(daemon.pid)
                time.sleep(0.02)
            self.addCleanup(os.kill, int(others[0]), signal.SIGKILL)
            self.assertEqual(daemon.wait(timeout=support.LONG_S), 1)
            try:
                while connection.recv(8192):
                    pass
            except ConnectionResetError:
                pass
        self.assertIn("work at device 'host' has lasted 5.00 s, as when its driver hangs", (self.folder / "log").read_text())
        self.start()

    @staticmethod
    def children(process):
        """Those that a thread of it has forked."""
        return [child for thread in pathlib.Path(f"/proc/{process}/task").glob("*/children") for child in thread.read_text().split()]

    def test_a_gpu_whose_driver_hangs_keeps_no_other_from_being_served(self):
        standin = pathlib.Path(OPTIONS.tool).resolve().parent.parent / "lib" / "libcuda_standin.so"
        if not standin.exists():
            self.skipTest("no stand-in for the driver")
        for number, device in enumerate(("all", "auto")):
            daemon = self.start_daemon(f"socket{number}", "--all-users", "--driver-patience", "10", devices=(device,), env={
                **os.environ, "GPUSHARE_CUDA_DRIVER": str(standin), "CUDA_STANDIN": "devices=3,hanging_device=1,leaks=0"})

            def served():
                return {each["device"] for each in json.loads(self.tool("top", "--socket", f"socket{number}", "--json", "-", code=0).out)["devices"]}
            while device == "all" and served() != {"cuda:1", "cuda:2"}:  # one may open late
                self.assertIsNone(daemon.poll())
                time.sleep(0.05)
            self.assertTrue(served() < {"cuda:1", "cuda:2"} or device == "all")
            daemon.kill()

    def test_default_socket(self):
        environment = dict(os.environ, XDG_RUNTIME_DIR=str(self.folder))
        environment.pop("GPUSHARE_SOCKET", None)
        named = dict(environment, GPUSHARE_SOCKET=str(self.folder / "named"))
        self.tool("daemon", "--device", "host", "--capacity", "64MiB", "--for", "0.1", code=0, env=named)
        self.assertTrue((self.folder / "named.lock").exists())
        if os.geteuid() != 0:
            self.tool("daemon", "--device", "host", "--capacity", "64MiB", "--for", "0.1", code=0, env=environment)
            self.assertEqual((self.folder / "gpushare").stat().st_mode & 0o777, 0o700)

    def test_a_missing_gpu_is_not_replaced_by_the_host_device(self):
        usable = [device["spec"] for device in json.loads(self.tool("devices", "--json", "-", code=0).out)["devices"] if device["usable"]]
        if set(usable) != {"host", "sim"}:
            self.skipTest("there is a GPU")
        base = ["daemon", "--socket", "s", "--for", "0.1", "--device"]
        self.refused([*base, "all"], "no GPU can be used", "--device host", code=3)
        self.refused([*base, "auto", "--all-users"], "no GPU can be used", "libcuda", "--device host", code=3)
        self.refused([*base[:-1], "--all-users"], "no GPU can be used", code=3)
        self.refused([*base, "all", "--device", "host"], "no device beside it")
        self.tool(*base, "host", "--all-users", "--capacity", "64MiB", code=0)
        self.tool(*base, "auto", "--capacity", "64MiB", code=0)

    def test_bad_usage(self):
        base = ["daemon", "--socket", "s", "--device", "host"]
        self.refused([*base, "--capacity", "1PiB"], "--capacity")
        self.refused([*base, "--policy", "nonsense"], "nonsense", "fair")
        self.refused([*base, "--lanes", "0"], "--lanes")
        self.refused([*base, "--lease", "0"], "--lease")
        self.refused([*base, "--stay", "0"], "--stay")
        self.refused(["daemon", "--socket", "s", "--device", "sim"], "virtual memory")
        self.refused(["daemon", "--socket", "s" * 200, "--device", "host"], "107")


if __name__ == "__main__":
    support.main()
