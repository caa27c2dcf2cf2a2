#!/usr/bin/env python3
"""Where output goes and what happens when it cannot; options and files that are wrong. See support.py. SPDX-License-Identifier: Apache-2.0"""

import json
import os
import pty
import resource
import subprocess

import support
from support import JOB_HEADER, OPTIONS, ToolTest


class Channels(ToolTest):
    def test_progress_shows_on_a_terminal_only(self):
        outcome = self.tool("run", "--jobs", "examples/jobs/mixed.csv", "--json", "-", code=0)
        self.assertEqual(outcome.err, "")
        ours, theirs = pty.openpty()
        done = subprocess.run([OPTIONS.tool, "run", "--jobs", "examples/jobs/mixed.csv", "--json", "-"], cwd=self.folder,
                              stdout=subprocess.PIPE, stderr=theirs, timeout=support.LONG_S, env={**os.environ, "TERM": "xterm"})
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 65536):  # the terminal may hand it on in parts
                shown += part
        except OSError:  # EIO: all is read, and nobody has the other end
            pass
        os.close(ours)
        shown = shown.decode()
        self.assertEqual(done.returncode, 0)
        json.loads(done.stdout)
        self.assertIn("\r", shown)
        self.assertIn("jobs done", shown)
        self.assertTrue(shown.endswith("\r\x1b[K"), repr(shown[-20:]))

    def test_full_disks_and_closed_pipes_are_failures(self):
        if os.path.exists("/dev/full"):
            self.refused(["run", "--jobs", "examples/jobs/small.csv", "--json", "/dev/full"], "/dev/full", code=1)
            for arguments in (["--help"], ["run", "--help"], ["--version"], ["devices"]):
                with self.subTest(arguments=arguments), open("/dev/full", "w") as full:
                    done = subprocess.run([OPTIONS.tool, *arguments], stdout=full, stderr=subprocess.PIPE, timeout=support.LONG_S)
                    self.assertEqual(done.returncode, 1)
                    self.assertIn(b"stdout", done.stderr)
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([OPTIONS.tool, "run", "--jobs", "examples/jobs/small.csv"], cwd=self.folder, stdout=writer,
                              stderr=subprocess.PIPE, timeout=support.LONG_S)
        os.close(writer)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"stdout", done.stderr)

    def test_outputs_that_cannot_be_written_are_found_before_the_work(self):
        for option in ("--json", "--timeline", "--snapshot", "--report", "--per-job"):
            with self.subTest(option=option):
                self.refused(["run", "--jobs", "examples/jobs/small.csv", option, "no/such/folder/file"], option,
                             "no/such/folder")
        self.refused(["run", "--jobs", "examples/jobs/small.csv", "--report", "."], "--report", "folder")
        self.refused(["run", "--jobs", "examples/jobs/small.csv", "--timeline", "-"], "--timeline", "only --json")

    def test_a_failed_write_leaves_what_was_there(self):
        for option in ("--json", "--timeline", "--snapshot", "--report", "--per-job"):
            with self.subTest(option=option):
                before = self.file("kept", "what was there")
                limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
                done = self.tool("run", "--jobs", "examples/jobs/small.csv", "--policy", "fifo", option, "kept", preexec_fn=limit)
                self.assertEqual(done.code, 1)
                self.assertIn("kept", done.err)
                self.assertEqual(before.read_text(), "what was there")
                self.assertEqual([p.name for p in self.folder.iterdir() if p.name.startswith("kept")], ["kept"])

    def test_no_output_replaces_an_input_or_another_output(self):
        jobs = self.jobs("a,guaranteed,0,10,10,10,100,0", name="in.csv")
        before = jobs.read_text()
        self.refused(["run", "--jobs", "in.csv", "--per-job", "in.csv"], "--per-job", "--jobs")
        self.refused(["run", "--jobs", "in.csv", "--per-job", "./in.csv"], "--per-job", "--jobs")
        (self.folder / "link.csv").symlink_to("in.csv")
        self.refused(["run", "--jobs", "in.csv", "--per-job", "link.csv"], "--per-job", "--jobs")
        self.refused(["run", "--jobs", "in.csv", "--json", "out", "--timeline", "out"], "--timeline", "--json")
        self.assertEqual(jobs.read_text(), before)
        self.refused(["replay", "--alloc", "in.csv", "--json", "in.csv"], "--json", "--alloc")
        self.tool("run", "--jobs", "in.csv", "--json", "/dev/null", "--timeline", "/dev/null", code=0)


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
            (["--capacity", "16"], ["--capacity: '16' has no unit: 16GiB or 16B?"]),
            (["--capacity", "16 bananas"], ["--capacity", "bananas"]),
            (["--limit", "1.5"], ["--limit"]),
            (["--time-scale", "0"], ["--time-scale", "above 0"]),
            (["--time-scale", "nan"], ["--time-scale"]),
            (["--load", "11"], ["--load", "at most 10"]),
            (["--jitter", "2"], ["--jitter"]),
            (["--seed", "-5"], ["--seed"]),
            (["--interference", "no-such-file.json"], ["no-such-file.json"]),
            (["--interference-device"], ["--interference-device", "a value must follow"]),
            (["--lanes", "1", "--lanes", "2"], ["--lanes", "once"]),
            (["--json", ""], ["--json", "''", "FILE|-"]),
            (["--load", "0.5"], ["--load", "gavel", "small.csv", "gpushare layout"]),
            (["--interference-device", "k80"], ["--interference-device", "--interference FILE"]),
            (["--interference", "none", "--interference-device", "k80"], ["--interference-device"]),
            (["--device", "host", "--jitter", "0.1"], ["--jitter", "sim"]),
            (["--device", "host", "--interference", "none"], ["--interference", "sim"]),
            (["--device", "host", "--tell", "measured"], ["--tell", "sim"]),
            (["--tell", "all"], ["--tell", "estimates, measured and nothing"]),
            (["--lane-finder", "first"], ["--lane-finder", "'first'", "salus, balanced, compact"]),
            (["surplus"], ["surplus"]),
        ]
        for arguments, words in cases:
            with self.subTest(arguments=arguments):
                self.refused([*base, *arguments], *words)

    def test_input_is_bounded(self):
        self.refused(["run", "--jobs", "/dev/zero"], "'/dev/zero'", "it is a device")
        self.refused(["run", "--jobs", self.file("commas.csv", "," * 60_000)], "commas.csv:1", "more than 64 fields")
        self.refused(["run", "--jobs", self.file("long.csv", "name\n" + "x" * 70_000)], "long.csv:2", "70000 bytes", "65536")

    def test_job_files_name_file_line_and_field(self):
        self.refused(["run", "--jobs", "missing.csv"], "missing.csv")
        self.refused(["run", "--jobs", "."], "'.'", "directory")
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
                self.assertNotIn("exception", self.tool("run", "--jobs", "examples/jobs/small.csv", "--interference", path).err)
                self.refused(["run", "--jobs", "examples/jobs/small.csv", "--interference", path], "pairs.json")


if __name__ == "__main__":
    support.main()
