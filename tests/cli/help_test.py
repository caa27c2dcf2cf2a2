#!/usr/bin/env python3
"""The tool's help: every command explains itself, and its examples work as printed. See support.py. SPDX-License-Identifier: Apache-2.0"""

import json
import re
import shlex

import support
from support import OPTIONS, ToolTest, commands


class Help(ToolTest):
    def test_version(self):
        self.assertRegex(self.tool("--version", code=0).out, r"^gpushare \d+\.\d+\.\d+\n$")
        self.assertEqual(self.tool("version", code=0).out, self.tool("--version", code=0).out)
        self.assertIn("Commands:", self.tool("version", "--help", code=0).out)
        for word in ("version", "--version"):
            self.refused([word, "x"], "argument was not expected: x", "--help")

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
        for command in [None, *commands(), "cluster plan", "cluster run", "cluster schema"]:
            text = self.tool(*(command or "").split(), "--help", code=0).out
            examples = re.findall(r"^  gpushare (.*)$", text.split("Examples:")[1], re.M)
            self.assertTrue(examples, command)
            if command == "top":  # its examples ask a daemon
                self.start_daemon("shared.sock")
            for example in examples:
                with self.subTest(example=example):
                    self.tool(*shlex.split(example), code=0)

    # Arguments with which each command writes all of its keys.
    JSON = {
        "run": ["--jobs", "examples/jobs/mixed.csv", "--policy", "fifo", "--capacity", "1GiB"],  # some jobs are refused
        "replay": ["--alloc", "examples/traces/training.csv", "--time-ms", "0"],
        "serve": ["--synthetic", "modes:2", "--limit", "20", "--slo-x-p99", "2", "--policy", "edf"],
        "plan": ["--model", "examples/models/cnn.csv", "--bandwidth-gbs", "12", "--call-overhead-us", "10", "--group-overhead-us", "20"],
        "devices": [],
    }
    MEASURED = ["--jobs", "examples/jobs/small.csv", "--policy", "pack", "--device", "host"]

    def test_json_has_the_keys_that_help_promises(self):
        def keys(value):
            if isinstance(value, list):
                return set().union(*map(keys, value))
            if not isinstance(value, dict):
                return set()
            return set(value) | keys(list(value.values()))

        self.assertEqual(set(commands()) - set(self.JSON), {"cluster", "daemon", "exec", "generate", "top"})  # tests of their own look at their keys
        for command, arguments in self.JSON.items():
            with self.subTest(command=command):
                written = keys(json.loads(self.tool(command, *arguments, "--json", "-").out))
                if command == "run":  # only a device measures how jobs slow each other
                    # One job is always alone. On a slow machine it runs as fewer, longer iterations, of which the first tells nothing.
                    scale = 0.05
                    while "iteration_s" not in written:
                        arguments = [*self.MEASURED, "--time-scale", str(scale), "--limit", "1"]
                        written |= keys(json.loads(self.tool(command, *arguments, "--json", "-").out))
                        scale *= 4
                written = {key for key in written if not key.isdigit()}  # batch_sizes
                text = self.tool(command, "--help", code=0).out
                promised = re.search(r"^JSON: (.*?)\n\n", text, re.M | re.S).group(1)
                self.assertEqual(written - set(re.findall(r"\w+", promised)), set())
                self.assertEqual(set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", promised)) - written, set())

    def test_mistyped_commands_get_a_suggestion(self):
        self.refused(["rnu"], "no command 'rnu'", "did you mean 'run'?")
        self.refused(["frobnicate"], "no command 'frobnicate'", "there are:", "run")

    def test_mistyped_options(self):
        self.refused(["run", "--job", "x"], "gpushare run:", "no option '--job'; did you mean '--jobs'?", "--help")
        self.refused(["run", "--jobs", "x", "--lane=3"], "no option '--lane'; did you mean '--lanes'?")
        self.refused(["--job", "x", "run"], "gpushare", "no option '--job'")
        self.refused(["run", "--jobs", "x", "--frobnicate"], "no option '--frobnicate'\n")
        self.refused(["run"], "--jobs is required")
        self.refused(["--frobnicate"], "gpushare:")

    def test_help_is_shown_whatever_else_the_line_says(self):
        for line in (["--policy", "nonsense"], ["--lanes", "1", "--lanes", "2"], ["--frobnicate"], ["word"], ["--jobs", "no_such_file"]):
            for words in (["run", *line, "--help"], ["run", "--help", *line]):
                with self.subTest(words=words):
                    self.assertEqual(self.tool(*words, code=0).out, self.tool("run", "--help", code=0).out)

    def test_help_and_version_as_words(self):
        self.assertEqual(self.tool("version", code=0).out, self.tool("--version", code=0).out)
        self.assertEqual(self.tool("help", code=0).out, self.tool("--help", code=0).out)
        self.assertEqual(self.tool("help", "run", code=0).out, self.tool("run", "--help", code=0).out)
        self.refused(["help", "rnu"], "did you mean 'run'?")


class Page(ToolTest):
    """docs/cli-play.md shows what the tool prints."""

    # Measured figures of a page differ from run to run.
    MEASURED = {"serve": r" +[\d.]+$", "replay": r"(?<=576) +[\d.]+ +\d+ ", "plan": r"planned in \d+ us"}

    def test_the_page_shows_what_the_tool_prints(self):
        compared = set()
        for block in re.findall(r"^```\n(\$ gpushare .*?)^```$", (OPTIONS.source / "docs" / "cli-play.md").read_text(), re.M | re.S):
            line, _, printed = block.replace("\\\n", "").partition("\n")
            command, *arguments = shlex.split(line)[2:]
            if not printed or command not in ("run", "replay", "serve", "plan") or not any(a.startswith(("examples/", "modes:")) for a in arguments):
                continue
            with self.subTest(command=line):
                out = self.tool(command, *arguments, code=0).out
                unmeasured = re.compile(self.MEASURED.get(command, r"$^"), re.M)
                self.assertEqual(unmeasured.sub("", printed), unmeasured.sub("", out))
                compared.add(command)
        self.assertEqual(compared, {"run", "replay", "serve", "plan"})


if __name__ == "__main__":
    support.main()
