#!/usr/bin/env python3
"""gpushare run on the host device: what happened, never how long it took. See support.py. SPDX-License-Identifier: Apache-2.0"""

import csv
import json
import pickle

import support
from support import ToolTest


class RunMeasured(ToolTest):
    """On the host device: what happened, never how long it took."""

    JOBS = ["train,guaranteed,0,20,4,20,60,0", "tune-1,opportunistic,0.01,10,4,5,30,0",
            "tune-2,opportunistic,0.01,10,4,5,30,0", "serve,guaranteed,0.02,12,2,8,6,5"]

    def test_every_policy_completes_every_job(self):
        policies = ["fifo", "srtf", "pack", "fair", "priority"]
        result = self.run_json("--jobs", self.jobs(*self.JOBS), "--device", "host", "--capacity", "128MiB", "--policy",
                               ",".join(policies), "--timeline", "t.json", "--snapshot", "s.pickle", "--report", "r.html",
                               "--per-job", "jobs.out.csv")
        self.assertEqual((result["device"], result["label"]), ("host", "host"))
        self.assertTrue(any("real work" in note for note in result["notes"]))
        for policy in result["policies"]:
            self.assertEqual((policy["jobs"], policy["completed"], policy["oom"]), (4, 4, 0), policy)
            self.assertGreater(policy["makespan_s"], 0)
            self.assertGreaterEqual(policy["jct_p95_s"], policy["jct_mean_s"] / 2)
            self.assertLessEqual(policy["queue_mean_s"], policy["jct_mean_s"])
            self.assertGreater(policy["peak_bytes"], 60_000_000)
            self.assertLessEqual(policy["peak_bytes"], result["capacity_bytes"])
            self.assertGreater(policy["utilization"], 0)
            self.assertLessEqual(policy["utilization"], 1)
        events = json.loads((self.folder / "t.json").read_text())["traceEvents"]
        groups = {e["args"]["name"] for e in events if e["name"] == "process_name"}
        for policy in policies:
            self.assertTrue(any(group.startswith(policy + ": ") for group in groups), groups)
        self.assertTrue(any(e["ph"] == "X" for e in events))
        with open(self.folder / "s.pickle", "rb") as file:
            self.assertTrue(pickle.load(file)["segments"])
        self.assertIn("Measured", (self.folder / "r.html").read_text())
        with open(self.folder / "jobs.out.csv", newline="") as file:
            for row in csv.DictReader(file):
                self.assertEqual(row["state"], "completed")
                self.assertGreater(int(row["iterations"]), 0)
                self.assertGreater(float(row["end_s"]), float(row["start_s"]))
        self.assertEqual([p.name for p in self.folder.iterdir() if ".part" in p.name], [])

    def test_switches_mean_the_same_on_host_and_sim(self):
        for device in ("host", "sim"):
            result = self.run_json("--jobs", self.jobs(*self.JOBS), "--device", device, "--capacity", "128MiB", "--lanes", "1",
                                   "--policy", "fifo")
            self.assertEqual(result["policies"][0]["switches"], len(self.JOBS) - 1, device)

    def test_sizes_are_scaled_to_the_memory_there_is(self):
        path = self.jobs("large,guaranteed,0,2,4,100,8000,0", "small,guaranteed,0,2,4,10,500,0")
        result = self.run_json("--jobs", path, "--device", "host", "--capacity", "64MiB", "--policy", "fair")
        self.assertEqual(result["policies"][0]["completed"], 2)
        self.assertLessEqual(result["policies"][0]["peak_bytes"], 64 << 20)
        self.assertTrue(any("divided by" in note for note in result["notes"]), result["notes"])

    def test_auto_takes_what_is_there(self):
        path = self.jobs("a,guaranteed,0,2,2,1,1,0")
        result = self.run_json("--jobs", path, "--device", "auto", "--policy", "fifo")
        self.assertIn(result["label"], ("host", "device"))
        self.assertEqual(result["policies"][0]["completed"], 1)

    def test_devices_that_are_not_there(self):
        path = self.jobs("a,guaranteed,0,2,2,1,1,0")
        self.refused(["run", "--jobs", path, "--device", "abacus"], "abacus", code=3)
        self.refused(["run", "--jobs", path, "--device", "cuda:99"], "cuda:99", code=3)
        self.refused(["run", "--jobs", path, "--device", "sim?total_gib=4"], "--capacity")
        self.refused(["run", "--jobs", path, "--device", "host", "--capacity", "4096TiB"], "capacity", "host")
        self.refused(["run", "--jobs", path, "--device", "host?copy_gbps=fast"], "copy_gbps")

    def test_too_many_jobs_for_threads(self):
        path = self.jobs(*["a,guaranteed,0,2,2,1,1,0"] * 5000)
        self.refused(["run", "--jobs", path, "--device", "host"], "--limit 4096")


if __name__ == "__main__":
    support.main()
