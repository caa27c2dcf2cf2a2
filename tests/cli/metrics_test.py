#!/usr/bin/env python3
"""gpushare daemon --metrics: what a reader gets, and what Prometheus makes of it. See support.py. SPDX-License-Identifier: Apache-2.0"""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import unittest
import urllib.parse
import urllib.request

import support
from support import OPTIONS, ToolTest


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost")
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


class Metrics(ToolTest):
    def serve(self, address):
        """A daemon that serves figures there; returns it and the address that it says."""
        daemon = subprocess.Popen([OPTIONS.tool, "daemon", "--socket", "socket", "--device", "host", "--capacity", "256MiB", "--metrics", address],
                                  cwd=self.folder, stderr=subprocess.PIPE, text=True)
        self.addCleanup(daemon.wait)
        self.addCleanup(daemon.kill)
        self.addCleanup(daemon.stderr.close)
        for line in daemon.stderr:
            if "metrics at " in line:
                return daemon, line.split("metrics at ")[1].strip()
        self.fail("the daemon ended")

    def job(self, name="train"):
        """A session at the daemon that runs until the test ends."""
        jobs = self.jobs(f"{name},guaranteed,0,1000000000,1,8,16,0")
        job = subprocess.Popen([OPTIONS.tool, "run", "--jobs", jobs, "--device", "shared", "--policy", "fifo"], cwd=self.folder,
                               env={**os.environ, "GPUSHARE_SOCKET": str(self.folder / "socket")}, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
        self.addCleanup(job.wait)
        self.addCleanup(job.kill)
        return job

    @staticmethod
    def read(address, path="/metrics"):
        connection = UnixConnection(address) if "/" in address else http.client.HTTPConnection(address)
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.getheader("Content-Type"), reply.read().decode()

    def sample(self, text, name, **labels):
        """The values of the family's samples that have these labels."""
        found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.M)
        return [float(value) for given, value in found if all(f'{key}="{label}"' in given for key, label in labels.items())]

    def until(self, address, condition):
        while not condition(text := self.read(address)[2]):
            time.sleep(0.05)
        return text

    def test_figures_of_a_session(self):
        _, address = self.serve("127.0.0.1:0")
        self.assertRegex(address, r"^127\.0\.0\.1:[1-9]\d*$")
        job = self.job('a"b')
        # The daemon is told that an iteration has ended before the process counts it in the histograms, the sum of slowdowns last.
        text = self.until(address, lambda text: any(self.sample(text, "gpushare_session_slowdown_ratio_sum")) and
                          any(self.sample(text, "gpushare_session_iterations_total")))
        self.assertEqual(self.sample(text, "gpushare_device_capacity_bytes", device="host"), [256 << 20])
        self.assertIn('name="a\\"b"', text)
        self.assertEqual(len(self.sample(text, "gpushare_session_busy_seconds_total", pid=job.pid, user=os.getuid())), 1)
        self.assertEqual(sum(self.sample(text, "gpushare_device_sessions", device="host")), 1)
        # What the process reports of its iterations, in buckets that only grow.
        buckets = self.sample(text, "gpushare_session_iteration_seconds_bucket", pid=job.pid)
        self.assertEqual(len(buckets), 16)
        self.assertEqual(buckets, sorted(buckets))
        for family in ("iteration_seconds", "slowdown_ratio"):
            count = self.sample(text, f"gpushare_session_{family}_count", pid=job.pid)[0]
            self.assertEqual(count, self.sample(text, f"gpushare_session_{family}_bucket", pid=job.pid, le="+Inf")[0])
            self.assertGreater(self.sample(text, f"gpushare_session_{family}_sum", pid=job.pid)[0], 0)
        self.assertGreaterEqual(self.sample(text, "gpushare_session_slowdown_ratio_sum")[0], self.sample(text, "gpushare_session_slowdown_ratio_count")[0])
        job.kill()
        job.wait()
        text = self.until(address, lambda text: self.sample(text, "gpushare_lost_processes_total") == [1])
        self.assertEqual(self.sample(text, "gpushare_session_iterations_total"), [])
        self.assertGreater(self.sample(text, "gpushare_device_busy_seconds_total", device="host")[0], 0)

    def test_a_unix_socket(self):
        path = str(self.folder / "figures")
        daemon, _ = self.serve(path)
        self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)
        self.assertEqual(self.read(path)[0], 200)
        daemon.kill()
        daemon.wait()
        daemon, _ = self.serve(path)  # the socket of the killed one is replaced
        self.assertEqual(self.read(path)[0], 200)
        daemon.send_signal(signal.SIGTERM)
        self.assertEqual(daemon.wait(), 0)
        self.assertFalse(os.path.exists(path))

    def test_what_is_no_request_for_figures(self):
        _, address = self.serve("127.0.0.1:0")
        self.assertEqual(self.read(address, "/")[0], 404)
        host, port = address.split(":")
        for request, answer in ((b"POST /metrics HTTP/1.1\r\n\r\n", b"405"), (b"GET\r\n\r\n", b"404"), (b"\0\xff\r\n\r\n", b"405"),
                                (b"x" * 20000, b"431")):
            with socket.create_connection((host, int(port))) as reader:
                reader.sendall(request)
                self.assertIn(answer, reader.recv(4096).split(b"\r\n")[0])
        # Readers that say nothing keep nobody out.
        silent = [socket.create_connection((host, int(port))) for _ in range(40)]
        self.assertEqual(self.read(address)[0], 200)
        for each in silent:
            each.close()

    def test_bad_addresses(self):
        base = ["daemon", "--socket", "s", "--device", "host", "--capacity", "64MiB", "--for", "0.1", "--metrics"]
        for address in ("9477", "localhost:9477", "127.0.0.1:99999", "[::1:9477", "/" + 200 * "x"):
            self.refused([*base, address], "--metrics", "127.0.0.1:9477")
        self.refused([*base, "/nowhere/at/all"], "--metrics", "/nowhere/at/all")
        self.file("taken", "content")
        self.refused([*base, "./taken"], "--metrics", "taken")
        self.assertEqual((self.folder / "taken").read_text(), "content")

    @unittest.skipUnless(shutil.which("promtool"), "no promtool (Debian: prometheus)")
    def test_promtool_finds_nothing(self):
        _, address = self.serve("127.0.0.1:0")
        self.job()
        text = self.until(address, lambda text: self.sample(text, "gpushare_session_iterations_total"))
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))
        rules = OPTIONS.source / "integrations" / "prometheus" / "alerts.yaml"
        subprocess.run(["promtool", "check", "rules", str(rules)], check=True, stdout=subprocess.DEVNULL)
        test = OPTIONS.source / "integrations" / "prometheus" / "alerts_test.yaml"
        subprocess.run(["promtool", "test", "rules", str(test)], check=True, stdout=subprocess.DEVNULL)

    @unittest.skipUnless(shutil.which("prometheus"), "no prometheus (Debian: prometheus)")
    def test_prometheus_scrapes(self):
        _, address = self.serve("127.0.0.1:0")
        self.job()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            own = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = self.file("prometheus.yml", json.dumps({
            "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
            "scrape_configs": [{"job_name": "gpushare", "scrape_timeout": "200ms", "static_configs": [{"targets": [address]}]}]}))
        server = subprocess.Popen(["prometheus", f"--config.file={settings}", f"--storage.tsdb.path={self.folder}/data", f"--web.listen-address={own}"],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(server.wait)
        self.addCleanup(server.terminate)
        # Every expression of the dashboard is one that Prometheus can answer, and the first figures arrive.
        board = json.loads((OPTIONS.source / "integrations" / "prometheus" / "grafana.json").read_text())
        expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
        self.assertGreater(len(expressions), 8)

        def query(expression):
            url = f"http://{own}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
            return json.load(urllib.request.urlopen(url))["data"]["result"]

        while True:
            try:
                if query("gpushare_session_iterations_total"):
                    break
            except OSError:
                self.assertIsNone(server.poll(), "prometheus ended")
            time.sleep(0.1)
        self.assertEqual(query("up")[0]["value"][1], "1")
        for expression in expressions:
            query(expression.replace("$__rate_interval", "1m").replace("$device", ".*"))


if __name__ == "__main__":
    support.main()
