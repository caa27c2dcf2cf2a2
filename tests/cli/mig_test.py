#!/usr/bin/env python3
"""gpushare daemon --device all on GPUs that MIG divides, over the stand-in for driver and NVML. See support.py. SPDX-License-Identifier: Apache-2.0"""

import http.client
import json
import os
import pathlib
import signal
import subprocess
import unittest

import support
from support import OPTIONS, ToolTest


class Mig(ToolTest):
    def setUp(self):
        super().setUp()
        self.standin = pathlib.Path(OPTIONS.tool).resolve().parent.parent / "lib" / "libcuda_standin.so"
        if not self.standin.exists():
            self.skipTest("no stand-in for the driver")

    def serve(self, standin, *more, **environment):
        """A daemon for all of those GPUs, once the figures of all its devices can be read; returns it and its address for figures."""
        daemon = subprocess.Popen([OPTIONS.tool, "daemon", "--socket", "d.sock", "--device", "all", "--metrics=127.0.0.1:0", *more], cwd=self.folder,
                                  env={**os.environ, "GPUSHARE_CUDA_DRIVER": str(self.standin), "CUDA_STANDIN": standin, **environment}, stderr=subprocess.PIPE, text=True)
        self.addCleanup(daemon.stderr.close)
        self.addCleanup(daemon.wait)
        self.addCleanup(daemon.kill)
        for line in daemon.stderr:
            if "metrics at " in line:
                address = line.split("metrics at ")[1].strip()
                while self.figures(address)[0] != 200:
                    self.assertIsNone(daemon.poll())
                return daemon, address
        self.fail("the daemon ended")

    @staticmethod
    def figures(address):
        connection = http.client.HTTPConnection(address)
        connection.request("GET", "/metrics")
        reply = connection.getresponse()
        return reply.status, reply.read().decode()

    def device(self, socket):
        done = subprocess.run([OPTIONS.tool, "top", "--json", "-", "--socket", socket], cwd=self.folder, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)["devices"][0]

    def test_each_instance_has_a_daemon(self):
        daemon, address = self.serve("devices=1,mig_instances=2,memory_bytes=1073741824", "--capacity", "256MiB")
        first, second = self.device("d.sock"), self.device("d-mig-00000002.sock")
        self.assertEqual((first["uuid"], first["parent_uuid"], first["mig_profile"], first["product"], first["driver_version"], first["total_bytes"]),
                         ("MIG-00000001-0001-0000-0000-000000000000", "GPU-00000000-0001-0000-0000-000000000000", "1g.1gb", "CUDA stand-in", "535.104.05",
                          512 << 20))
        self.assertEqual((second["uuid"], second["capacity_bytes"]), ("MIG-00000002-0001-0000-0000-000000000000", 256 << 20))
        text = self.figures(address)[1]
        for uuid in (first["uuid"], second["uuid"]):  # as one daemon's, devices by their uuids
            self.assertIn(f'gpushare_device_capacity_bytes{{device="{uuid}"', text)
        daemon.send_signal(signal.SIGTERM)
        self.assertEqual(daemon.wait(), 0)
        self.assertEqual([path.name for path in self.folder.glob("*.sock")], [])  # both have ended

    def test_an_instance_s_daemon_whose_device_fails_is_started_again(self):
        second = "MIG-00000002-0001-0000-0000-000000000000"
        fails = self.library("fails", f"""
            #include <stdlib.h>
            #include <string.h>
            #include <unistd.h>
            __attribute__((constructor)) static void begin(void) {{
              const char* visible = getenv("CUDA_VISIBLE_DEVICES");
              if (visible != NULL && strcmp(visible, "{second}") == 0 && access("{self.folder}/fails", F_OK) == 0) _exit(3);
            }}""")
        (self.folder / "fails").touch()
        order = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
        daemon, address = self.serve("devices=1,mig_instances=2", "--capacity", "64MiB", LD_PRELOAD=str(fails), ASAN_OPTIONS=order)
        for line in daemon.stderr:
            if "started again in 1 s, and the others go on" in line:
                break
        self.assertNotIn(second, self.figures(address)[1])
        (self.folder / "fails").unlink()
        while second not in self.figures(address)[1]:
            self.assertIsNone(daemon.poll())
        daemon.send_signal(signal.SIGTERM)
        self.assertEqual(daemon.wait(), 0)

    def test_an_instance_s_daemon_that_ends_ends_all(self):
        daemon, _ = self.serve("devices=1,mig_instances=2", "--capacity", "64MiB")
        top = subprocess.run([OPTIONS.tool, "top", "--json", "-", "--socket", "d.sock"], cwd=self.folder, capture_output=True, text=True, check=True)
        os.kill(json.loads(top.stdout)["pid"], signal.SIGKILL)
        self.assertEqual(daemon.wait(), 1)
        self.assertIn("signal 9; the others are stopped", daemon.stderr.read())
        self.assertEqual([path.name for path in self.folder.glob("d-mig-*.sock")], [])

    def test_an_instance_s_daemon_that_is_stopped_is_killed_at_the_end(self):
        daemon, _ = self.serve("devices=1,mig_instances=2", "--capacity", "64MiB")
        top = subprocess.run([OPTIONS.tool, "top", "--json", "-", "--socket", "d.sock"], cwd=self.folder, capture_output=True, text=True, check=True)
        os.kill(json.loads(top.stdout)["pid"], signal.SIGSTOP)  # it takes SIGTERM only once it goes on
        daemon.send_signal(signal.SIGTERM)
        self.assertEqual(daemon.wait(), 0)
        self.assertIn("does not end, and is killed", daemon.stderr.read())

    def test_an_instance_s_daemon_knows_which_it_is(self):
        second = "MIG-00000002-0001-0000-0000-000000000000"
        for visible in (second, second + ",MIG-00000001-0001-0000-0000-000000000000", "MIG-00000002"):
            daemon, _ = self.serve("devices=1,mig_instances=2", "--capacity", "64MiB", CUDA_VISIBLE_DEVICES=visible)
            self.assertEqual(self.device("d.sock")["uuid"], second, visible)
            daemon.send_signal(signal.SIGTERM)
            self.assertEqual(daemon.wait(), 0)

    def test_whole_gpus_have_one_daemon(self):
        daemon, address = self.serve("devices=2", "--capacity", "64MiB")
        top = subprocess.run([OPTIONS.tool, "top", "--json", "-", "--socket", "d.sock"], cwd=self.folder, capture_output=True, text=True, check=True)
        self.assertEqual([(device["device"], device["uuid"][:4], device["mig_profile"]) for device in json.loads(top.stdout)["devices"]],
                         [("cuda:0", "GPU-", ""), ("cuda:1", "GPU-", "")])
        self.assertEqual(json.loads(top.stdout)["pid"], daemon.pid)


if __name__ == "__main__":
    support.main()
