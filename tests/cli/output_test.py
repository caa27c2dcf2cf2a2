#!/usr/bin/env python3
"""Where output goes and what happens when it cannot; options and files that are wrong. See support.py. SPDX-License-Identifier: Apache-2.0"""

import json
import os
import pty
import subprocess

import support
from support import JOB_HEADER, OPTIONS, ToolTest


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


if __name__ == "__main__":
    support.main()
