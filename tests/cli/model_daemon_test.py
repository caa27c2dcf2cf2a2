#!/usr/bin/env python3
"""gpushare model-daemon. See support.py. SPDX-License-Identifier: Apache-2.0"""

import json
import signal
import subprocess
import time

import support
from support import OPTIONS, ToolTest


class Daemon(ToolTest):
    KEYS = ["socket", "device", "pid", "uptime_s", "capacity_bytes", "resident_bytes", "standby_bytes", "device_free_bytes",
            "device_total_bytes", "images_bytes", "images_limit_bytes", "turns", "loads", "drops", "reclaimed", "cut_off",
            "refused", "workers", "models"]

    def start(self, *more):
        """A daemon at ./socket, once it answers."""
        daemon = subprocess.Popen([OPTIONS.tool, "model-daemon", "--socket", "socket", "--device", "host", "--capacity", "64MiB",
                                   *more], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(daemon.stdout.close)
        self.addCleanup(daemon.stderr.close)
        self.addCleanup(daemon.wait)
        self.addCleanup(daemon.kill)
        for _ in range(600):
            if self.tool("model-daemon", "--socket", "socket", "--status").code == 0:
                return daemon
            self.assertIsNone(daemon.poll(), "the daemon ended")
            time.sleep(0.05)
        self.fail("the daemon does not answer")

    def test_status_and_a_clean_stop(self):
        for stop in (signal.SIGTERM, signal.SIGINT):
            daemon = self.start()
            self.assertEqual((self.folder / "socket").stat().st_mode & 0o777, 0o600)
            status = json.loads(self.tool("model-daemon", "--socket", "socket", "--status", "--json", "-", code=0).out)
            self.assertEqual(sorted(status), sorted(self.KEYS))
            self.assertEqual(status["device"], "host")
            self.assertEqual(status["pid"], daemon.pid)
            self.assertEqual(status["capacity_bytes"], 64 << 20)
            self.assertEqual(status["resident_bytes"], 0)
            self.assertEqual(status["standby_bytes"], 0)
            self.assertEqual(status["workers"], [])
            self.assertIn("of 64.00 MiB in use", self.tool("model-daemon", "--socket", "socket", "--status", code=0).out)
            daemon.send_signal(stop)
            self.assertEqual(daemon.wait(60), 0)
            self.assertEqual(daemon.stdout.read(), b"")
            self.assertFalse((self.folder / "socket").exists())

    def test_one_daemon_a_socket_and_stale_ones_are_replaced(self):
        daemon = self.start()
        self.refused(["model-daemon", "--socket", "socket"], "serves socket already", "SIGTERM")
        daemon.kill()
        daemon.wait()
        self.assertTrue((self.folder / "socket").exists())
        self.refused(["model-daemon", "--socket", "socket", "--status"], "no daemon answers", "gpushare model-daemon --socket", code=3)
        self.start()

    def test_json_when_it_stops(self):
        outcome = self.tool("model-daemon", "--socket", "s", "--device", "host", "--capacity", "64MiB", "--for", "0.1", "--json", "-",
                            code=0)
        self.assertEqual(sorted(json.loads(outcome.out)), sorted(self.KEYS))
        self.assertIn("serving s", outcome.err)

    def test_bad_usage(self):
        self.refused(["model-daemon"], "--socket")
        base = ["model-daemon", "--socket", "s", "--device", "host"]
        self.refused([*base, "--capacity", "1PiB"], "1.00 GiB free")
        for option, value in [("--capacity", "0"), ("--images", "many"), ("--lease", "-1"), ("--max-workers", "0"),
                              ("--residency", "random"), ("--for", "0")]:
            self.refused([*base, option, value], option, value)
        self.refused(["model-daemon", "--socket", "s", "--device", "sim"], "ipc", "gpushare devices")
        self.refused(["model-daemon", "--socket", "s" * 200, "--device", "host"], "107")
        self.refused(["model-daemon", "--socket", "s", "--status"], "no daemon answers", code=3)
        self.refused(["model-daemon", "--socket", "no/folder/s", "--status"], "no daemon answers", code=3)

    def test_a_socket_in_no_folder(self):
        self.refused(["model-daemon", "--socket", "no/folder/s", "--device", "host"], "--socket", "folder 'no/folder'")
        self.refused(["model-daemon", "--socket", ".", "--device", "host"], "--socket", "is a folder")
        self.refused(["model-daemon", "--socket", "s", "--device", "host", "--json", "s"], "--json", "--socket")

    def test_standby_is_a_part_of_the_capacity(self):
        base = ["model-daemon", "--socket", "s", "--device", "host", "--standby"]
        self.refused([*base, "65MiB", "--capacity", "64MiB"], "--standby: '65MiB'", "--capacity, 64MiB")
        self.refused([*base, "2GiB"], "--standby: '2GiB'", "capacity", "free on device 'host', 1.00 GiB")
        self.tool(*base, "64MiB", "--capacity", "64MiB", "--for", "0.1", code=0)


if __name__ == "__main__":
    support.main()
