#!/usr/bin/env python3
"""gpushare run on the host device: what happened, never how long it took. See support.py. SPDX-License-Identifier: Apache-2.0"""

import csv
import json
import pickle
import signal
import subprocess

import support
from support import ToolTest


class RunMeasured(ToolTest):
    """On the host device: what happened, never how long it took."""

    JOBS = ["train,guaranteed,0,20,4,20,60,0", "tune-1,opportunistic,0.01,10,4,5,30,0",
            "tune-2,opportunistic,0.01,10,4,5,30,0", "serve,guaranteed,0.02,12,2,8,6,5"]

    def test_what_pack_measured_is_kept_in_a_file(self):
        def pack(jobs):
            return self.run_json("--jobs", self.jobs(*jobs), *arguments)["policies"][0]

        def alone(result):
            return {entry["name"] for entry in result["interference"] if entry["beside"] is None and entry["iteration_s"] > 0}

        arguments = ["--device", "host", "--capacity", "128MiB", "--policy", "pack", "--lane-finder", "balanced", "--interference", "table.txt"]
        # One job is always alone. Several may never be alone: that depends on the machine. The tool runs fewer, longer iterations where
        # the machine is too slow for a job's memory, and the first iteration is no sample: so the job has many, and little memory.
        self.assertEqual(alone(pack(["train,guaranteed,0,200,4,1,1,0"])), {"train"})
        text = (self.folder / "table.txt").read_text()
        self.assertTrue(text.startswith("gpushare interference 1\nalone\t"), text)
        together = pack(self.JOBS)
        self.assertEqual(together["completed"], 4)
        self.assertIn("train", alone(together))  # from the file
        (self.folder / "table.txt").write_text("other")
        self.refused(["run", "--jobs", self.jobs(*self.JOBS), *arguments], "table.txt:1")

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
            self.assertGreater(policy["simulated_jct_mean_s"], 0)
            self.assertGreaterEqual(policy["most_inside"], 1)
            self.assertGreater(policy["utilization"], 0)
            self.assertLessEqual(policy["utilization"], 1)
        events = json.loads((self.folder / "t.json").read_text())["traceEvents"]
        groups = {e["args"]["name"] for e in events if e["name"] == "process_name"}
        for policy in policies:
            self.assertTrue(any(group.startswith(policy + ": ") for group in groups), groups)
        self.assertTrue(any(e["ph"] == "X" for e in events))
        # The peak's blocks are there, each policy's in its own file; lanes are filled.
        for index, policy in enumerate(result["policies"]):
            with open(self.folder / ("s.pickle" if index == 0 else f"s.{policy['policy']}.pickle"), "rb") as file:
                segments = pickle.load(file)["segments"]
            blocks = [block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"]
            self.assertEqual(sum(block["requested_size"] for block in blocks), policy["peak_bytes"])
            self.assertTrue(any(segment["frames"][0]["name"].startswith("lane ") for segment in segments), segments)
            self.assertTrue(any(segment["frames"][0]["name"].startswith("session ") for segment in segments), segments)
            for one, next_one in zip(segments, segments[1:]):
                self.assertLessEqual(one["address"] + one["total_size"], next_one["address"])
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

    def test_bytes_in_use_are_those_of_the_work_on_the_device(self):
        # One job of 20 + 60 MB whose iterations fill the run: its memory is in use throughout, though the host side of an iteration ends at
        # once.
        self.tool("run", "--jobs", self.jobs("train,guaranteed,0,10,20,20,60,0"), "--device", "host", "--capacity", "128MiB", "--policy",
                  "fifo", "--report", "r.html", "--json", "r.json", code=0)
        policy = json.loads((self.folder / "r.json").read_text())["policies"][0]
        self.assertAlmostEqual(policy["peak_bytes"], 80_000_000, delta=5000)
        self.assertEqual((policy["most_inside"], policy["switches"]), (1, 0))
        self.assertIsNone(policy["switch_s"])

    def test_needs_that_jobs_do_not_declare_are_profiled(self):
        path = self.jobs("known,guaranteed,0,5,4,10,30,0", "unknown,guaranteed,0,5,4,10?,30?,0")
        result = self.run_json("--jobs", path, "--device", "host", "--capacity", "128MiB", "--policy", "fair")
        self.assertEqual((result["policies"][0]["completed"], result["policies"][0]["oom"]), (2, 0))

    def test_ctrl_c_prints_what_there_is(self):
        path = self.jobs("short,guaranteed,0,2,2,10,30,0", "long,guaranteed,0,100000,20,10,30,0", "late,guaranteed,9000,1,2,1,1,0")
        process = subprocess.Popen([support.OPTIONS.tool, "run", "--jobs", str(path), "--device", "host", "--capacity", "128MiB", "--policy",
                                    "fair,fifo", "--json", str(self.folder / "r.json")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        said = process.stderr.readline().decode()  # how long it takes, once it runs
        self.assertIn("2 policies in real time, about ", said)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=support.LONG_S)
        self.assertEqual(process.returncode, 1)
        self.assertIn("interrupted", err.decode())
        self.assertIn("Interrupted: figures are of what was done until then", " ".join(out.decode().split()))
        result = json.loads((self.folder / "r.json").read_text())
        self.assertTrue(result["interrupted"])
        self.assertEqual([policy["policy"] for policy in result["policies"]], ["fair"])
        fair = result["policies"][0]
        self.assertEqual(fair["failed"], 0)
        self.assertGreaterEqual(fair["makespan_s"], 0)
        self.assertEqual({job["state"] for job in fair["not_completed"]}, {"interrupted"})
        self.assertTrue({"long", "late"} <= {job["name"] for job in fair["not_completed"]})
        self.assertNotIn("the same simulated", out.decode())

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
