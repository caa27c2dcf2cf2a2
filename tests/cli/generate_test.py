#!/usr/bin/env python3
"""gpushare generate: the manual page and completion have what --help has. See support.py. SPDX-License-Identifier: Apache-2.0"""

import shutil
import subprocess
import unittest

import support
from support import ToolTest, commands


class Generate(ToolTest):
    def test_the_manual_has_every_command_and_option(self):
        page = self.tool("generate", "man", code=0).out
        for command in commands():
            self.assertIn(f'.SH "gpushare {command}"', page)
        self.assertIn("\\-\\-metrics", page)
        self.assertFalse([line for line in page.splitlines() if line.startswith("'")])
        if shutil.which("man"):
            shown = subprocess.run(["man", "--warnings", "-l", self.file("gpushare.1", page)], capture_output=True, text=True,
                                   env={"MANWIDTH": "200", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"})
            self.assertEqual((shown.returncode, shown.stderr), (0, ""))
            self.assertIn("--pinned", shown.stdout)

    def test_bash_completes(self):
        script = self.file("completion", self.tool("generate", "bash", code=0).out)

        def complete(*words):
            line = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _gpushare; echo ${{COMPREPLY[@]}}"
            return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split()

        self.assertEqual(complete("gpushare", "da"), ["daemon"])
        self.assertEqual(complete("gpushare", "daemon", "--metr"), ["--metrics"])
        self.assertEqual(complete("gpushare", "cluster", "pl"), ["plan"])
        self.assertEqual(complete("gpushare", "exec", "--", "py"), [])
        self.assertEqual(complete("gpushare", "run", "--jobs", "x"), [])  # bash completes files

    @unittest.skipUnless(shutil.which("zsh"), "no zsh")
    def test_zsh_reads_the_script(self):
        script = self.file("_gpushare", self.tool("generate", "zsh", code=0).out)
        subprocess.run(["zsh", "-n", script], check=True)

    def test_bad_usage(self):
        self.refused(["generate", "fish"], "man, bash and zsh")
        self.refused(["generate"], "KIND")


if __name__ == "__main__":
    support.main()
