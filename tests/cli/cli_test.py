#!/usr/bin/env python3
"""Tests of the gpushare tool from outside: what a user types, sees, and scripts against.

Python 3.9 and its standard library only. Run by ctest; by hand:
  tests/cli/cli_test.py --tool build/release/bin/gpushare --source . [-v] [TestCase[.test]]
SPDX-License-Identifier: Apache-2.0
"""

import argparse
import csv
import html.parser
import json
import os
import pathlib
import pickle
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import unittest

OPTIONS = None
JOB_HEADER = "name,class,arrival_s,iterations,iteration_ms,persistent_mb,ephemeral_mb,priority"


class Outcome:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


class ToolTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        # Examples name files as from the root of the repository.
        (self.folder / "examples").symlink_to(OPTIONS.source / "examples")

    def tool(self, *arguments, code=None, timeout=120, **more):
        done = subprocess.run([OPTIONS.tool, *map(str, arguments)], cwd=self.folder, timeout=timeout,
                              capture_output=True, **more)
        outcome = Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())
        if code is not None:
            self.assertEqual(outcome.code, code, f"{arguments}\nstdout: {outcome.out}\nstderr: {outcome.err}")
        return outcome

    def file(self, name, text):
        path = self.folder / name
        path.write_text(text)
        return path

    def jobs(self, *rows, name="jobs.csv"):
        return self.file(name, "\n".join([JOB_HEADER, *rows]) + "\n")

    def run_json(self, *arguments, code=0):
        outcome = self.tool("run", *arguments, "--json", "-", code=code)
        return json.loads(outcome.out)

    def refused(self, arguments, *words, code=2):
        """The command fails with `code`, says nothing on stdout, and its message has all of `words`."""
        outcome = self.tool(*arguments, code=code)
        self.assertEqual(outcome.out, "")
        self.assertTrue(outcome.err.startswith("gpushare"), outcome.err)
        for word in words:
            self.assertIn(word, outcome.err)


def commands():
    text = subprocess.run([OPTIONS.tool, "--help"], capture_output=True, check=True).stdout.decode()
    listed = re.search(r"\nCommands:\n(.*?)\n\n", text, re.S).group(1)
    return re.findall(r"^  (\w+)  ", listed, re.M)


class Help(ToolTest):
    def test_version(self):
        self.assertRegex(self.tool("--version", code=0).out, r"^gpushare \d+\.\d+\.\d+\n$")

    def test_no_command_is_bad_usage_and_shows_help(self):
        outcome = self.tool(code=2)
        self.assertEqual(outcome.out, "")
        self.assertIn("Commands:", outcome.err)

    def test_every_command_explains_itself(self):
        self.assertIn("run", commands())
        for command in commands():
            with self.subTest(command=command):
                outcome = self.tool(command, "--help", code=0)
                self.assertEqual(outcome.err, "")
                self.assertIn(f"Usage: gpushare {command}", outcome.out)
                self.assertIn("Examples:", outcome.out)
                self.assertIn("Exit codes:", outcome.out)
                self.assertIn("--json", outcome.out)
                for line in outcome.out.splitlines():
                    self.assertLessEqual(len(line), 122, line)

    def test_examples_of_help_work_as_printed(self):
        for command in [None, *commands()]:
            text = self.tool(*([command] if command else []), "--help", code=0).out
            examples = re.findall(r"^  gpushare (.*)$", text.split("Examples:")[1], re.M)
            self.assertTrue(examples, command)
            for example in examples:
                with self.subTest(example=example):
                    self.tool(*shlex.split(example), code=0)

    def test_mistyped_commands_get_a_suggestion(self):
        self.refused(["rnu"], "no command 'rnu'", "did you mean 'run'?")
        self.refused(["frobnicate"], "no command 'frobnicate'", "there are:", "run")

    def test_mistyped_options(self):
        self.refused(["run", "--job", "x"], "gpushare run:", "--help")
        self.refused(["run"], "--jobs")
        self.refused(["--frobnicate"], "gpushare:")


class RunSimulated(ToolTest):
    KEYS = ["policy", "jobs", "makespan_s", "jct_mean_s", "jct_p95_s", "queue_mean_s", "utilization", "switches",
            "peak_bytes", "oom"]

    def test_table(self):
        outcome = self.tool("run", "--jobs", "examples/jobs/mixed.csv", code=0)
        self.assertEqual(outcome.err, "")
        lines = outcome.out.splitlines()
        self.assertIn("sim", lines[0])
        rows = [line.split()[0] for line in lines if line and line.split()[0] in ("fifo", "srtf", "pack", "fair")]
        self.assertEqual(rows, ["fifo", "srtf", "pack", "fair"])

    def test_json_has_the_promised_keys(self):
        result = self.run_json("--jobs", "examples/jobs/mixed.csv")
        self.assertEqual(result["device"], "sim")
        self.assertEqual(result["label"], "sim")
        self.assertEqual([p["policy"] for p in result["policies"]], ["fifo", "srtf", "pack", "fair"])
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
        self.assertEqual(len(json.loads((self.folder / "out.json").read_text())["policies"]), 4)
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

    def test_published_traces(self):
        path = OPTIONS.data / "jobs" / "salus_workloads.csv"
        if not path.exists():
            self.skipTest(f"{path} is not there; the arithmetic is tested on a file of our own")
        fifo, srtf = self.run_json("--jobs", path, "--policy", "fifo,srtf", "--lanes", "1")["policies"]
        self.assertAlmostEqual(fifo["jct_mean_s"] / 60, 279.8, delta=279.8 * 0.005)
        self.assertAlmostEqual(srtf["jct_mean_s"] / 60, 185.0, delta=185.0 * 0.005)
        self.assertAlmostEqual(fifo["makespan_s"] / 60, 567.7, delta=567.7 * 0.005)


class PageParser(html.parser.HTMLParser):
    VOID = {"meta", "br", "link", "img", "input", "hr"}

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.attributes, self.tags, self.problems = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            self.problems.append(f"</{tag}> closes {self.open[-3:]}")
        else:
            self.open.pop()


class Report(ToolTest):
    def test_page(self):
        self.tool("run", "--jobs", "examples/jobs/mixed.csv", "--report", "r.html", code=0)
        page = (self.folder / "r.html").read_text()
        parser = PageParser()
        parser.feed(page)
        self.assertEqual(parser.problems, [])
        self.assertEqual(parser.open, [])
        self.assertEqual(len(parser.ids), len(set(parser.ids)))
        for forbidden in ("script", "link", "img", "iframe", "object"):
            self.assertNotIn(forbidden, parser.tags)
        for _, key, value in parser.attributes:
            self.assertNotIn(key, ("src", "href", "xlink:href"))
            self.assertFalse(key.startswith("on"), key)
        for outside in ("http:", "https:", "url(", "@import"):
            self.assertNotIn(outside, page)
        self.assertEqual(parser.tags.count("svg"), sum(1 for t, k, v in parser.attributes
                                                       if t == "svg" and (k, v) in (("role", "img"), ("aria-hidden", "true"))))
        self.assertIn(("html", "lang", "en"), parser.attributes)
        self.assertIn("prefers-color-scheme:dark", page)
        self.assertNotIn("nan", re.sub(r"<style>.*?</style>", "", page, flags=re.S))


class Channels(ToolTest):
    def test_progress_shows_on_a_terminal_only(self):
        outcome = self.tool("run", "--jobs", "examples/jobs/mixed.csv", "--json", "-", code=0)
        self.assertEqual(outcome.err, "")
        ours, theirs = pty.openpty()
        done = subprocess.run([OPTIONS.tool, "run", "--jobs", "examples/jobs/mixed.csv", "--json", "-"], cwd=self.folder,
                              stdout=subprocess.PIPE, stderr=theirs, timeout=60, env={**os.environ, "TERM": "xterm"})
        os.close(theirs)
        shown = os.read(ours, 65536).decode()
        os.close(ours)
        self.assertEqual(done.returncode, 0)
        json.loads(done.stdout)
        self.assertIn("\r", shown)
        self.assertIn("jobs done", shown)
        self.assertTrue(shown.endswith("\r\x1b[K"), repr(shown[-20:]))

    def test_full_disks_and_closed_pipes_are_failures(self):
        if os.path.exists("/dev/full"):
            self.refused(["run", "--jobs", "examples/jobs/small.csv", "--json", "/dev/full"], "/dev/full", code=1)
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([OPTIONS.tool, "run", "--jobs", "examples/jobs/small.csv"], cwd=self.folder, stdout=writer,
                              stderr=subprocess.PIPE, timeout=60)
        os.close(writer)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"stdout", done.stderr)

    def test_outputs_that_cannot_be_written_are_found_before_the_work(self):
        for option in ("--json", "--timeline", "--snapshot", "--report", "--per-job"):
            with self.subTest(option=option):
                self.refused(["run", "--jobs", "examples/jobs/small.csv", option, "no/such/folder/file"], option,
                             "no/such/folder")
        self.refused(["run", "--jobs", "examples/jobs/small.csv", "--report", "."], "--report", "folder")


class BadInput(ToolTest):
    def test_options(self):
        base = ["run", "--jobs", "examples/jobs/small.csv"]
        cases = [
            (["--policy", "fifo,lifo"], ["--policy", "'lifo'", "fifo, srtf, pack, fair, priority"]),
            (["--policy", ""], ["--policy", "''"]),
            (["--policy", "fifo,fifo"], ["once"]),
            (["--lanes", "-1"], ["--lanes", "0 to 64"]),
            (["--lanes", "65"], ["--lanes", "0 to 64"]),
            (["--lanes", "two"], ["--lanes", "'two'"]),
            (["--capacity", "0"], ["--capacity", "16GiB"]),
            (["--capacity", "16 bananas"], ["--capacity", "bananas"]),
            (["--limit", "1.5"], ["--limit"]),
            (["--time-scale", "0"], ["--time-scale", "above 0"]),
            (["--time-scale", "nan"], ["--time-scale"]),
            (["--load", "11"], ["--load", "at most 10"]),
            (["--jitter", "2"], ["--jitter"]),
            (["--seed", "-5"], ["--seed"]),
            (["--interference", "no-such-file.json"], ["no-such-file.json"]),
            (["surplus"], ["surplus"]),
        ]
        for arguments, words in cases:
            with self.subTest(arguments=arguments):
                self.refused([*base, *arguments], *words)

    def test_job_files_name_file_line_and_field(self):
        self.refused(["run", "--jobs", "missing.csv"], "missing.csv")
        self.refused(["run", "--jobs", "."], ".", code=1)
        good = "a,guaranteed,0,10,10,10,100,0"
        cases = [
            ("a,guaranteed,0,ten,10,10,100,0", "iterations"),
            ("a,guaranteed,0,0,10,10,100,0", "iterations"),
            ("a,guaranteed,0,10,-1,10,100,0", "iteration_ms"),
            ("a,guaranteed,-1,10,10,10,100,0", "arrival_s"),
            ("a,first,0,10,10,10,100,0", "class"),
            ("a,guaranteed,0,10,10,10,1e30,0", "ephemeral_mb"),
            ("a,guaranteed,0,10,10,nan,100,0", "persistent_mb"),
            ("a,guaranteed,0,10,10,10,100,high", "priority"),
        ]
        for row, field in cases:
            with self.subTest(row=row):
                self.refused(["run", "--jobs", self.jobs(good, row, name="bad.csv")], "bad.csv", ":3", field)
        self.refused(["run", "--jobs", self.jobs(good, "a,guaranteed,0", name="bad.csv")], "bad.csv", ":3")
        for text in ("", "\n", "what,is,this\n1,2,3\n", JOB_HEADER + "\n", "\x00\x01\x02"):
            with self.subTest(text=text):
                self.refused(["run", "--jobs", self.file("bad.csv", text)], "bad.csv")

    def test_interference_files(self):
        for text in ("", "{", "[]", '{"p100": 3}', '{"k80": {}}'):
            with self.subTest(text=text):
                path = self.file("pairs.json", text)
                self.refused(["run", "--jobs", "examples/jobs/small.csv", "--interference", path], "pairs.json")


class Replay(ToolTest):
    KEYS = ["ns_per_op", "p99_ns", "peak_live_bytes", "min_arena_ratio"]
    TRACE = "examples/traces/training.csv"

    def replay(self, *arguments):
        return json.loads(self.tool("replay", *arguments, "--json", "-", code=0).out)["results"]

    def test_json_has_the_promised_keys(self):
        results = self.replay("--alloc", self.TRACE, "--time-ms", "20")
        self.assertEqual([row["allocator"] for row in results], ["heap", "lane", "planned"])
        live, most = 0, 0
        with open(self.folder / self.TRACE, newline="") as file:
            rows = [(int(r["lower"]), int(r["upper"]), int(r["size"])) for r in csv.DictReader(file)]
        for at in range(max(upper for _, upper, _ in rows)):
            live = sum(size for lower, upper, size in rows if lower <= at < upper)
            most = max(most, live)
        for row in results:
            for key in self.KEYS:
                self.assertGreater(row[key], 0)
            self.assertEqual(row["peak_live_bytes"], most)
            self.assertEqual(row["operations"], 2 * len(rows))
            self.assertGreaterEqual(row["min_arena_ratio"], 1)
            self.assertAlmostEqual(row["min_arena_ratio"], row["min_arena_bytes"] / most)
        self.assertLessEqual(results[2]["min_arena_ratio"], results[0]["min_arena_ratio"])

    def test_table_and_no_timing(self):
        outcome = self.tool("replay", "--alloc", self.TRACE, "--allocator", "planned", "--time-ms", "0", code=0)
        self.assertEqual(outcome.err, "")
        self.assertIn("training.csv", outcome.out)
        row = self.replay("--alloc", self.TRACE, "--allocator", "heap", "--time-ms", "0")[0]
        self.assertIsNone(row["ns_per_op"])
        self.assertIsNone(row["p99_ns"])
        self.assertGreaterEqual(row["min_arena_ratio"], 1)

    def test_formats_are_recognised_by_content(self):
        rmm = self.file("rmm.txt", "Thread,Time,Action,Pointer,Size,Stream\n"
                                   "1,10:00:00.000000,allocate,0x1000,512,0x0\n"
                                   "1,10:00:00.000001,allocate,0x2000,1024,0x0\n"
                                   "1,10:00:00.000002,free,0x1000,512,0x0\n")
        event = {"addr": 4096, "size": 2048, "stream": 0, "frames": [{"name": "f", "filename": "m.py", "line": 1}]}
        snapshot = {"segments": [], "device_traces": [[{**event, "action": "alloc"}, {**event, "action": "free_requested"},
                                                       {**event, "action": "free_completed"}]]}
        as_json = self.file("snapshot.bin", json.dumps(snapshot))
        pickles = []
        for protocol in (2, 3, 4, 5):
            pickles.append(self.folder / f"snapshot{protocol}.dat")
            pickles[-1].write_bytes(pickle.dumps(snapshot, protocol=protocol))
        results = self.replay("--alloc", rmm, as_json, *pickles, "--allocator", "heap", "--time-ms", "0")
        self.assertEqual([row["format"] for row in results], ["rmm"] + ["snapshot"] * 5)
        self.assertEqual([row["peak_live_bytes"] for row in results], [1536] + [2048] * 5)

    def test_bad_input(self):
        base = ["replay", "--alloc", self.TRACE]
        self.refused(["replay"], "--alloc")
        self.refused([*base, "--allocator", "stack"], "stack", "heap, lane")
        self.refused([*base, "--allocator", "heap,heap"], "once")
        for granule in ("0", "100", "4MiB", "x"):
            self.refused([*base, "--granule", granule], "--granule", "power of two")
        self.refused([*base, "--time-ms", "-1"], "--time-ms")
        self.refused(["replay", "--alloc", "missing.csv"], "missing.csv")
        for text in ("", "what,is,this\n", "id,lower,upper,size\n", "id,lower,upper,size\n1,5,3,10\n",
                     "id,lower,upper,size\n1,0,3,0\n", "id,lower,upper,size\n1,0,3,-5\n", '{"segments": 3}',
                     "Thread,Time,Action,Pointer,Size,Stream\n1,0,steal,0x1,5,0x0\n"):
            with self.subTest(text=text):
                self.refused(["replay", "--alloc", self.file("bad.csv", text)], "bad.csv")
        outcome = self.file("bad.pickle", "")
        outcome.write_bytes(b"\x80\x04cos\nsystem\n.")
        self.refused(["replay", "--alloc", outcome], "bad.pickle", "byte")


class PlanModel(ToolTest):
    KEYS = ["layers", "groups", "makespan_ms", "lower_bound_ms", "one_shot_ms", "per_layer_ms", "best_uniform_ms", "solve_us"]
    COSTS = ["--bandwidth-gbs", 12, "--call-overhead-us", 10, "--group-overhead-us", 20]
    MODEL = "examples/models/cnn.csv"

    def plan(self, *arguments, model=None):
        return json.loads(self.tool("plan", "--model", model or self.MODEL, *self.COSTS, *arguments, "--json", "-", code=0).out)

    def check_plan(self, plan, first=0):
        self.assertEqual(list(plan), self.KEYS)
        for group in plan["groups"]:
            self.assertEqual(list(group), ["first", "last", "bytes"])
            self.assertEqual(group["first"], first)
            self.assertGreaterEqual(group["last"], first)
            first = group["last"] + 1
        self.assertEqual(first, plan["layers"])
        for other in ("one_shot_ms", "per_layer_ms", "best_uniform_ms"):
            self.assertLessEqual(plan["makespan_ms"], plan[other] * (1 + 1e-12))
        self.assertLessEqual(plan["lower_bound_ms"], plan["makespan_ms"])

    def test_json_has_the_promised_keys(self):
        plan = self.plan()
        self.assertEqual(plan["layers"], 38)
        self.check_plan(plan)
        self.check_plan(self.plan("--exec-ms", "examples/models/cnn_exec.csv"))

    def test_the_arithmetic_of_two_layers(self):
        # 12 MB and 24 MB over 12 GB/s: 1 and 2 ms; execution 3 and 4 ms. In two groups: arrived 1.01 and 3.02, done 4.03, 8.05.
        model = self.file("two.csv", f"layer,type,megabytes\na,x,{12e6 / 2**20!r}\nb,x,{24e6 / 2**20!r}\n")
        times = self.file("exec.csv", "layer,exec_ms\nb,4\na,3\n")
        plan = self.plan("--exec-ms", times, model=model)
        self.assertEqual(plan["groups"], [{"first": 0, "last": 0, "bytes": 12000000}, {"first": 1, "last": 1, "bytes": 24000000}])
        self.assertAlmostEqual(plan["makespan_ms"], 1.01 + 3.02 + 4.02, places=9)
        self.assertAlmostEqual(plan["one_shot_ms"], 3.01 + 7.02, places=9)
        self.assertAlmostEqual(plan["per_layer_ms"], plan["makespan_ms"], places=9)

    def test_assumed_execution_times_are_said_so(self):
        arguments = ["plan", "--model", self.MODEL, *self.COSTS]
        table = self.tool(*arguments, code=0)
        self.assertIn("assumed, not measured", table.out)
        self.assertEqual(table.err, "")
        self.assertIn("assumed, not measured", self.tool(*arguments, "--json", "-", code=0).err)
        measured = self.tool(*arguments, "--exec-ms", "examples/models/cnn_exec.csv", code=0)
        self.assertNotIn("assumed", measured.out)
        self.assertIn("cnn_exec.csv", measured.out)

    def test_resident_layers_and_cap(self):
        plan = self.plan("--resident", 5)
        self.check_plan(plan, first=5)
        self.assertEqual(self.plan("--resident", 38)["groups"], [])
        capped = self.tool("plan", "--model", self.MODEL, *self.COSTS, "--group-cap", "1MiB", code=0)
        self.assertIn("ignore it", capped.out)
        for group in self.plan("--group-cap", "1MiB")["groups"]:
            self.assertTrue(group["bytes"] <= 2**20 or group["first"] == group["last"])

    def test_timeline_is_the_pipeline(self):
        plan = self.plan("--timeline", "t.json", "--resident", 3)
        trace = json.loads((self.folder / "t.json").read_text())
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        tracks = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        spans = {"link": [], "lane": []}
        for e in events:
            if e["ph"] == "X":
                spans[tracks[e["tid"]]].append((e["ts"], e["ts"] + e["dur"]))
        self.assertEqual(len(spans["link"]), len(plan["groups"]))
        self.assertEqual(len(spans["lane"]), len(plan["groups"]) + 1)
        for track in spans.values():
            for (_, end), (start, _) in zip(track, track[1:]):
                self.assertGreaterEqual(start, end - 0.002)
        for (_, arrived), (start, _) in zip(spans["link"], spans["lane"][1:]):
            self.assertGreaterEqual(start, arrived - 0.002)
        self.assertAlmostEqual(spans["lane"][-1][1] / 1e3, plan["makespan_ms"], places=4)

    def safetensors(self, name, sizes):
        header, at = {}, 0
        for tensor, size in sizes:
            header[tensor] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        path = self.folder / name
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
        return path

    def test_safetensors_files_and_sets(self):
        self.safetensors("one.safetensors", [("x", 1000), ("y", 2000)])
        plan = self.plan(model="one.safetensors")
        self.check_plan(plan)
        self.assertEqual(plan["layers"], 2)
        self.assertEqual(sum(g["bytes"] for g in plan["groups"]), 3000)
        self.safetensors("two.safetensors", [("z", 500)])
        self.file("m.safetensors.index.json", json.dumps({"weight_map": {
            "x": "one.safetensors", "y": "one.safetensors", "z": "two.safetensors"}}))
        self.assertEqual(self.plan(model="m.safetensors.index.json")["layers"], 3)
        (self.folder / "one.safetensors").write_bytes(b"\xff" * 20)
        self.refused(["plan", "--model", "one.safetensors", *self.COSTS], "one.safetensors")

    def test_order_and_checksums(self):
        self.safetensors("one.safetensors", [("x", 9), ("y", 2000)])
        order = self.file("order.txt", "# execution order\ny\n\nx\n")
        plan = self.plan("--order", order, "--checksums", "sums", "--group-cap", "1", model="one.safetensors")
        self.assertEqual([g["bytes"] for g in plan["groups"]], [2000, 9])
        sums = (self.folder / "sums").read_text().splitlines()
        self.assertEqual([line.split()[1] for line in sums], ["x", "y"])
        self.assertEqual(sums[0], "bbe568a3 x")  # CRC-32C of nine zeros
        base = ["plan", "--model", "one.safetensors", *self.COSTS]
        self.refused([*base, "--order", self.file("o.txt", "x\nz\n")], "o.txt:2", "'z'", "no layer")
        self.refused([*base, "--order", self.file("o.txt", "x\nx\n")], "o.txt:2", "once")
        self.refused([*base, "--order", self.file("o.txt", "x\n")], "o.txt", "'y'")
        self.refused([*base, "--order", "nowhere.txt"], "nowhere.txt")
        self.refused([*base, "--checksums", "no/such/folder/s"], "--checksums")
        self.refused(["plan", "--model", self.MODEL, *self.COSTS, "--checksums", "s"], "cnn.csv")

    def test_a_full_disk_is_told(self):
        for option in ("--json", "--timeline"):
            outcome = self.tool("plan", "--model", self.MODEL, *self.COSTS, option, "/dev/full")
            self.assertNotEqual(outcome.code, 0, option)
            self.assertIn("/dev/full", outcome.err)
        with open("/dev/full", "w") as full:
            command = [OPTIONS.tool, "plan", "--model", self.MODEL, *map(str, self.COSTS)]
            outcome = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=self.folder, check=False)
        self.assertEqual(outcome.returncode, 1)
        self.assertIn("No space left", outcome.stderr)

    def test_bad_input_names_what_is_allowed(self):
        base = ["plan", "--model", self.MODEL]
        self.refused(base, "--bandwidth-gbs")
        for option, value in (("--bandwidth-gbs", "0"), ("--call-overhead-us", "-1"), ("--group-overhead-us", "x")):
            costs = dict(zip(self.COSTS[::2], self.COSTS[1::2]))
            costs[option] = value
            self.refused([*base, *(f"{k}={v}" for k, v in costs.items())], option, "give a number")
        self.refused([*base, *self.COSTS, "--resident", "39"], "--resident", "from 0 to 38")
        self.refused([*base, *self.COSTS, "--group-cap", "0"], "--group-cap")
        self.refused(["plan", "--model", "nowhere.csv", *self.COSTS], "nowhere.csv")
        self.refused(["plan", "--model", self.file("m.csv", "layer,type,megabytes\n0,x,-3\n"), *self.COSTS],
                     "m.csv:2", "megabytes", "'-3'", "from 0")
        self.refused([*base, *self.COSTS, "--exec-ms", self.file("e.csv", "layer,exec_ms\nconv1,1\nconv9,1\n")],
                     "e.csv:3", "layer", "'conv9'")
        self.refused([*base, *self.COSTS, "--timeline", "no/such/folder/t.json"], "--timeline")

class Daemon(ToolTest):
    KEYS = ["socket", "device", "pid", "uptime_s", "capacity_bytes", "resident_bytes", "device_free_bytes",
            "device_total_bytes", "images_bytes", "images_limit_bytes", "turns", "loads", "drops", "reclaimed", "cut_off",
            "refused", "workers", "models"]

    def start(self, *more):
        """A daemon at ./socket, once it answers."""
        daemon = subprocess.Popen([OPTIONS.tool, "daemon", "--socket", "socket", "--device", "host", "--capacity", "64MiB",
                                   *more], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(daemon.stdout.close)
        self.addCleanup(daemon.stderr.close)
        self.addCleanup(daemon.wait)
        self.addCleanup(daemon.kill)
        for _ in range(600):
            if self.tool("daemon", "--socket", "socket", "--status").code == 0:
                return daemon
            self.assertIsNone(daemon.poll(), "the daemon ended")
            time.sleep(0.05)
        self.fail("the daemon does not answer")

    def test_status_and_a_clean_stop(self):
        for stop in (signal.SIGTERM, signal.SIGINT):
            daemon = self.start()
            self.assertEqual((self.folder / "socket").stat().st_mode & 0o777, 0o600)
            status = json.loads(self.tool("daemon", "--socket", "socket", "--status", "--json", "-", code=0).out)
            self.assertEqual(sorted(status), sorted(self.KEYS))
            self.assertEqual(status["device"], "host")
            self.assertEqual(status["pid"], daemon.pid)
            self.assertEqual(status["capacity_bytes"], 64 << 20)
            self.assertEqual(status["resident_bytes"], 0)
            self.assertEqual(status["workers"], [])
            self.assertIn("of 64.00 MiB in use", self.tool("daemon", "--socket", "socket", "--status", code=0).out)
            daemon.send_signal(stop)
            self.assertEqual(daemon.wait(60), 0)
            self.assertEqual(daemon.stdout.read(), b"")
            self.assertFalse((self.folder / "socket").exists())

    def test_one_daemon_a_socket_and_stale_ones_are_replaced(self):
        daemon = self.start()
        self.refused(["daemon", "--socket", "socket"], "serves socket already", "SIGTERM")
        daemon.kill()
        daemon.wait()
        self.assertTrue((self.folder / "socket").exists())
        self.refused(["daemon", "--socket", "socket", "--status"], "no daemon answers", "gpushare daemon --socket", code=3)
        self.start()

    def test_json_when_it_stops(self):
        outcome = self.tool("daemon", "--socket", "s", "--device", "host", "--capacity", "64MiB", "--for", "0.1", "--json", "-",
                            code=0)
        self.assertEqual(sorted(json.loads(outcome.out)), sorted(self.KEYS))
        self.assertIn("serving s", outcome.err)

    def test_bad_usage(self):
        self.refused(["daemon"], "--socket")
        base = ["daemon", "--socket", "s", "--device", "host"]
        self.refused([*base, "--capacity", "1PiB"], "1.00 GiB free")
        for option, value in [("--capacity", "0"), ("--images", "many"), ("--lease", "-1"), ("--max-workers", "0"),
                              ("--residency", "random"), ("--for", "0")]:
            self.refused([*base, option, value], option, value)
        self.refused(["daemon", "--socket", "s", "--device", "sim"], "ipc", "gpushare devices")
        self.refused(["daemon", "--socket", "s" * 200, "--device", "host"], "107")
        self.refused(["daemon", "--socket", "s", "--status"], "no daemon answers", code=3)


class Devices(ToolTest):
    def test_host_and_sim_are_always_there(self):
        rows = json.loads(self.tool("devices", "--json", "-", code=0).out)["devices"]
        usable = {row["spec"]: row for row in rows if row["usable"]}
        self.assertIn("host", usable)
        self.assertIn("sim", usable)
        for row in rows:
            self.assertEqual(row["usable"], row["status"] == "OK")
            if row["usable"]:
                self.assertGreater(row["total_bytes"], 0)
            else:
                self.assertTrue(row["reason"], row)
        self.assertIn("host", self.tool("devices", code=0).out)

    def test_bad_usage(self):
        self.refused(["devices", "surplus"], "surplus")


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


def main():
    global OPTIONS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", required=True, type=lambda p: str(pathlib.Path(p).resolve()))
    parser.add_argument("--source", required=True, type=lambda p: pathlib.Path(p).resolve())
    parser.add_argument("--data", default=pathlib.Path("nowhere"), type=pathlib.Path)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()
