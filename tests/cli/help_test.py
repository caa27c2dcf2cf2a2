#!/usr/bin/env python3
"""The tool's help: every command explains itself, and its examples work as printed. See support.py. SPDX-License-Identifier: Apache-2.0"""

import re
import shlex

import support
from support import ToolTest, commands


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


if __name__ == "__main__":
    support.main()
