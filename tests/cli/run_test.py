#!/usr/bin/env python3
"""gpushare run on the simulated device. See support.py. SPDX-License-Identifier: Apache-2.0"""

import csv
import json
import os
import pathlib
import pickle
import shutil
import subprocess
from decimal import Decimal

import support
from support import OPTIONS, ToolTest


class RunSimulated(ToolTest):
    KEYS = ["policy", "jobs", "makespan_s", "jct_mean_s", "jct_p95_s", "queue_mean_s", "utilization", "switches",
            "peak_bytes", "oom"]

    def test_table(self):
        outcome = self.tool("run", "--jobs", "examples/jobs/mixed.csv", code=0)
        self.assertEqual(outcome.err, "")
        lines = outcome.out.splitlines()
        self.assertIn("sim", lines[0])
        rows = [line.split()[0] for line in lines if line and line.split()[0] in ("fifo", "srtf", "pack", "fair", "priority")]
        self.assertEqual(rows, ["fifo", "srtf", "pack", "fair", "priority"])
        text = " ".join(outcome.out.split())
        self.assertIn("What sharing gains - Time: one job at a time (fifo), a job completes", text)
        self.assertIn("- Memory: under ", text)

    def test_json_has_the_promised_keys(self):
        result = self.run_json("--jobs", "examples/jobs/mixed.csv")
        self.assertEqual(result["device"], "sim")
        self.assertEqual(result["label"], "sim")
        self.assertEqual([p["policy"] for p in result["policies"]], ["fifo", "srtf", "pack", "fair", "priority"])
        for policy in result["policies"]:
            for key in self.KEYS:
                self.assertIn(key, policy)
            self.assertEqual(policy["jobs"], 16)
            self.assertEqual(policy["completed"], 16)
            self.assertEqual(policy["oom"], 0)
            self.assertLessEqual(policy["peak_bytes"], result["capacity_bytes"])
            self.assertGreater(policy["utilization"], 0)
            self.assertLessEqual(policy["utilization"], 1)

    def test_json_goes_to_a_file_beside_the_table(self):
        outcome = self.tool("run", "--jobs", "examples/jobs/small.csv", "--json", "out.json", code=0)
        self.assertIn("makespan", outcome.out)
        self.assertEqual(len(json.loads((self.folder / "out.json").read_text())["policies"]), 5)
        self.assertEqual([p.name for p in self.folder.iterdir() if ".tmp" in p.name], [])

    def test_one_lane_is_arithmetic(self):
        lengths = [(30, 100), (5, 200), (20, 50), (1, 1000), (12, 75)]
        path = self.jobs(*[f"j{i},guaranteed,0,{n},{ms},10,100,0" for i, (n, ms) in enumerate(lengths)])
        seconds = [n * ms / 1e3 for n, ms in lengths]

        def mean_completion(order):
            now, total = 0, 0
            for length in order:
                now += length
                total += now
            return total / len(order)

        result = self.run_json("--jobs", path, "--policy", "fifo,srtf", "--lanes", "1")
        fifo, srtf = result["policies"]
        self.assertAlmostEqual(fifo["makespan_s"], sum(seconds), places=6)
        self.assertAlmostEqual(fifo["jct_mean_s"], mean_completion(seconds), places=6)
        self.assertAlmostEqual(srtf["jct_mean_s"], mean_completion(sorted(seconds)), places=6)

    def test_fair_in_one_lane_is_processor_sharing(self):
        counts = [300, 600, 900]
        path = self.jobs(*[f"j{i},guaranteed,0,{n},10,1,1,0" for i, n in enumerate(counts)])
        fair = self.run_json("--jobs", path, "--policy", "fair", "--lanes", "1")["policies"][0]
        # Three share until the first ends at 3 * 3 s, two until the second at 9 + 2 * 3 s, the last is alone for 3 s.
        self.assertAlmostEqual(fair["jct_mean_s"], (9 + 15 + 18) / 3, delta=0.05)

    def test_same_seed_same_result(self):
        arguments = ["--jobs", "examples/jobs/mixed.csv", "--jitter", "0.2"]
        first = self.run_json(*arguments, "--seed", "3")
        self.assertEqual(first, self.run_json(*arguments, "--seed", "3"))
        self.assertNotEqual(first["policies"], self.run_json(*arguments, "--seed", "4")["policies"])

    def test_limit_capacity_lanes_and_time_scale(self):
        whole = self.run_json("--jobs", "examples/jobs/mixed.csv", "--policy", "fifo")
        few = self.run_json("--jobs", "examples/jobs/mixed.csv", "--policy", "fifo", "--limit", "3")
        self.assertEqual(few["policies"][0]["jobs"], 3)
        slow = self.run_json("--jobs", "examples/jobs/mixed.csv", "--policy", "fifo", "--time-scale", "2")
        self.assertAlmostEqual(slow["policies"][0]["makespan_s"], 2 * whole["policies"][0]["makespan_s"], places=3)
        self.assertTrue(any("time-scale" in note for note in slow["notes"]))
        self.assertEqual(self.run_json("--jobs", "examples/jobs/small.csv", "--capacity", "2GB")["capacity_bytes"],
                         2_000_000_000)

    def test_interference_can_be_left_out(self):
        rows = [f"j{i},guaranteed,0,100,10,10,100,0" for i in range(4)]
        free = self.run_json("--jobs", self.jobs(*rows), "--policy", "pack", "--interference", "none")
        self.assertAlmostEqual(free["policies"][0]["makespan_s"], 1.0, places=3)
        modelled = self.run_json("--jobs", self.jobs(*rows), "--policy", "pack")
        self.assertGreater(modelled["policies"][0]["makespan_s"], 2.0)

    def test_pack_measures_as_on_a_device(self):
        # Each pair takes 1.86 times as long together: nothing is gained but 7%, whoever says so.
        rows = [f"j{i},guaranteed,0,400,10,10,100,0" for i in range(3)]
        told = self.run_json("--jobs", self.jobs(*rows), "--policy", "pack")["policies"][0]
        measured = self.run_json("--jobs", self.jobs(*rows), "--policy", "pack", "--tell", "measured")["policies"][0]
        self.assertEqual(measured["completed"], 3)
        self.assertLess(measured["makespan_s"], told["makespan_s"] * 1.05)

    def test_lane_finders_by_name(self):
        rows = [f"j{i},guaranteed,0,100,10,10,100,0" for i in range(4)]
        apart, together = (self.run_json("--jobs", self.jobs(*rows), "--policy", "fair", "--interference", "none", "--lane-finder",
                                         name)["policies"][0] for name in ("salus", "compact"))
        self.assertAlmostEqual(apart["makespan_s"], 1.0, places=3)
        self.assertAlmostEqual(together["makespan_s"], 4.0, places=3)

    def test_a_job_larger_than_the_device_is_refused_and_the_others_run(self):
        path = self.jobs("small,guaranteed,0,10,10,10,100,0", "huge,guaranteed,0,10,10,10,90000,0")
        outcome = self.tool("run", "--jobs", path, "--policy", "fifo", "--json", "-", code=1)
        policy = json.loads(outcome.out)["policies"][0]
        self.assertEqual((policy["jobs"], policy["completed"], policy["refused"]), (2, 1, 1))
        self.assertEqual(policy["not_completed"][0]["name"], "huge")
        self.assertIn("GiB", policy["not_completed"][0]["reason"])
        self.assertIn("huge", outcome.err)
        table = self.tool("run", "--jobs", path, "--policy", "fifo", code=1)
        self.assertIn("refused", table.out)

    def test_per_job_csv(self):
        self.tool("run", "--jobs", "examples/jobs/mixed.csv", "--per-job", "jobs.out.csv", "--policy", "fifo,fair", code=0)
        with open(self.folder / "jobs.out.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(len(rows), 32)
        for row in rows:
            self.assertEqual(row["state"], "completed")
            self.assertAlmostEqual(float(row["completion_s"]), float(row["end_s"]) - float(row["arrival_s"]), places=5)
            self.assertGreaterEqual(float(row["start_s"]), float(row["arrival_s"]))

    def test_timeline_is_a_sound_trace(self):
        self.tool("run", "--jobs", "examples/jobs/mixed.csv", "--timeline", "t.json", code=0)
        trace = json.loads((self.folder / "t.json").read_text())
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        groups = {e["args"]["name"] for e in events if e.get("name") == "process_name"}
        for policy in ("fifo", "srtf", "pack", "fair"):
            self.assertIn(f"{policy}: lanes", groups)
            self.assertIn(f"{policy}: sessions", groups)
        tracks = {}
        for e in events:
            if e["ph"] == "X":
                tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
        self.assertTrue(tracks)
        for slices in tracks.values():
            slices.sort()
            for (_, end), (start, _) in zip(slices, slices[1:]):
                self.assertGreaterEqual(start, end - 0.002)
        self.assertTrue(any(e["ph"] == "C" for e in events))

    def test_slices_of_a_lane_do_not_overlap(self):
        rows = [f"j{i},guaranteed,{i * 0.0101},{7 + i},{1.0 / 3 + i / 7},10,{100 + i},0" for i in range(12)]
        self.tool("run", "--jobs", self.jobs(*rows), "--policy", "fair,pack", "--timeline", "t.json", code=0)
        events = json.loads((self.folder / "t.json").read_text(), parse_float=Decimal)["traceEvents"]
        end = {}
        for event in (e for e in events if e["ph"] == "X"):
            track = event["pid"], event["tid"]
            self.assertGreaterEqual(event["ts"], end.get(track, 0), event)
            end[track] = event["ts"] + event["dur"]

    def test_needs_that_jobs_do_not_declare(self):
        declared = self.run_json("--jobs", self.jobs("a,guaranteed,0,5,2,10,100,0", name="a.csv"), "--policy", "fair")
        unknown = self.run_json("--jobs", self.jobs("a,guaranteed,0,5,2,10?,100?,0", name="b.csv"), "--policy", "fair")
        self.assertEqual(declared["policies"], unknown["policies"])
        self.refused(["run", "--jobs", self.jobs("a,guaranteed,0,5,2,?,100,0")], "persistent_mb", "''")
        self.refused(["run", "--jobs", self.jobs("a,guaranteed,0?,5,2,1,100,0")], "arrival_s", "'0?'")

    def test_what_sharing_gains(self):
        # Two jobs of 1 s each at once: fifo completes them after 1 and 2 s.
        path = self.jobs("a,guaranteed,0,10,100,10,100,0", "b,guaranteed,0,10,100,10,200,0")
        result = self.run_json("--jobs", path, "--policy", "fifo,fair", "--lanes", "1", "--capacity", "320MB")
        fifo, fair = result["policies"]
        self.assertEqual((fifo["most_inside"], fifo["most_apart_bytes"]), (1, 210_000_000))
        self.assertEqual((fair["most_inside"], fair["most_apart_bytes"]), (2, 320_000_000))
        self.assertIsNone(fair["switch_s"])
        self.assertIn("1.500 s after its arrival", result["findings"][0])

    def test_snapshots(self):
        self.tool("run", "--jobs", "examples/jobs/mixed.csv", "--policy", "pack,fair", "--snapshot", "s.pickle", code=0)
        for name in ("s.pickle", "s.fair.pickle"):
            with open(self.folder / name, "rb") as file:
                snapshot = pickle.load(file)
            self.assertTrue(snapshot["segments"])
            spans = sorted((s["address"], s["address"] + s["total_size"]) for s in snapshot["segments"])
            for (_, end), (start, _) in zip(spans, spans[1:]):
                self.assertLessEqual(end, start)
        self.tool("run", "--jobs", "examples/jobs/mixed.csv", "--policy", "pack", "--snapshot", "s.json", code=0)
        with open(self.folder / "s.pickle", "rb") as file:
            self.assertEqual(len(json.loads((self.folder / "s.json").read_text())["segments"]),
                             len(pickle.load(file)["segments"]))

    def test_policies_of_ones_own(self):
        lottery, library = self.lottery(), self.library
        result = self.run_json("--jobs", "examples/jobs/mixed.csv", "--policy", f"fifo,{lottery}")
        fifo, mine = result["policies"]
        self.assertEqual((mine["policy"], mine["completed"]), ("lottery", 16))
        self.assertGreater(mine["switches"], fifo["switches"])
        again = self.run_json("--jobs", "examples/jobs/mixed.csv", "--policy", lottery)
        self.assertEqual(again["policies"], [mine])  # a new table each run, with the same draws
        run = ["run", "--jobs", "examples/jobs/small.csv", "--policy"]
        self.refused([*run, "mine.so"], "absolute path")
        self.refused([*run, f"{lottery},{lottery}"], "once")
        self.refused([*run, "/nowhere/mine.so"], "/nowhere/mine.so")
        entry = "#include <gpushare/gpushare.h>\nint32_t gpushare_policy_entry_v1(gpushare_policy_ops* o) { %s }"
        self.refused([*run, library("none", "int x;")], "gpushare_policy_entry_v1", "no gpushare policy")
        self.refused([*run, library("refuses", entry % "return GPUSHARE_UNSUPPORTED;")], "UNSUPPORTED")
        self.refused([*run, library("empty", entry % "return GPUSHARE_OK;")], "may_join")

    def test_running_out_of_host_memory_at_any_allocation_is_told(self):
        compiler = shutil.which("cc") or self.skipTest("no C compiler")
        if b"__asan_report_load8" in pathlib.Path(OPTIONS.tool).read_bytes():
            self.skipTest("a sanitizer has the allocator")
        source = """#define _GNU_SOURCE
            #include <dlfcn.h>
            #include <errno.h>
            #include <stdlib.h>
            void* malloc(size_t size) {
              static void* (*real)(size_t);
              static long left;
              if (!real) { real = (void* (*)(size_t))dlsym(RTLD_NEXT, "malloc"); left = atol(getenv("FAIL_MALLOC")); }
              if (left > 0 && --left == 0) { errno = ENOMEM; return 0; }
              return real(size);
            }"""
        path = self.folder / "fail.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), "-ldl"], input=source.encode(), check=True)
        jobs = self.jobs("a,guaranteed,0,5,2,10,100,0", "b,guaranteed,0,5,2,10,100000,0")
        failed = 0
        for number in range(1, 12_000, 149):
            done = self.tool("run", "--jobs", jobs, "--policy", "fair", "--json", "-",
                             env={**os.environ, "LD_PRELOAD": str(path), "FAIL_MALLOC": str(number)})
            self.assertIn(done.code, (0, 1, 2), f"allocation {number}: {done.err}")
            failed += "memory" in done.err and done.out == ""
        self.assertGreater(failed, 5)

    def test_published_traces(self):
        path = OPTIONS.data / "jobs" / "salus_workloads.csv"
        if not path.exists():
            self.skipTest(f"{path} is not there; the arithmetic is tested on a file of our own")
        fifo, srtf = self.run_json("--jobs", path, "--policy", "fifo,srtf", "--lanes", "1")["policies"]
        self.assertAlmostEqual(fifo["jct_mean_s"] / 60, 279.8, delta=279.8 * 0.005)
        self.assertAlmostEqual(srtf["jct_mean_s"] / 60, 185.0, delta=185.0 * 0.005)
        self.assertAlmostEqual(fifo["makespan_s"] / 60, 567.7, delta=567.7 * 0.005)


if __name__ == "__main__":
    support.main()
