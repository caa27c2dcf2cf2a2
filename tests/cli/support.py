"""support.py: runs the built gpushare tool in a folder of its own and checks what it says. Python 3.9 and its standard library only.

A test file by hand:
  tests/cli/plan_test.py --tool build/release/bin/gpushare --source . [-v] [TestCase[.test]]
SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

OPTIONS = argparse.Namespace()
SKIPPED = 77  # tells ctest that no case ran
LONG_S = 1200  # longer than anything takes on a busy machine: what is not there by then never comes
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

    def tool(self, *arguments, code=None, timeout=LONG_S, **more):
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

    def library(self, name, source):
        """The path of a shared library of that C source, built with gpushare's headers."""
        compiler = shutil.which("cc") or self.skipTest("no C compiler")
        include = [f"-I{OPTIONS.source}/include", f"-I{pathlib.Path(OPTIONS.tool).resolve().parent.parent}/include"]
        path = self.folder / f"{name}.so"
        subprocess.run([compiler, "-shared", "-fPIC", *include, "-x", "c", "-", "-o", str(path)], input=source.encode(), check=True)
        return path

    def lottery(self):
        """The path of examples/lottery_policy.c as a library."""
        return self.library("mine", (OPTIONS.source / "examples" / "lottery_policy.c").read_text())

    def jobs(self, *rows, name="jobs.csv"):
        return self.file(name, "\n".join([JOB_HEADER, *rows]) + "\n")

    def run_json(self, *arguments, code=0):
        outcome = self.tool("run", *arguments, "--json", "-", code=code)
        return json.loads(outcome.out)

    def start_daemon(self, socket, *more, devices=("host",), capacity="64MiB", env=None, stderr=subprocess.DEVNULL):
        """A `gpushare daemon` at that socket until the test ends, once it answers."""
        options = [option for device in devices for option in ("--device", device)]
        daemon = subprocess.Popen([OPTIONS.tool, "daemon", "--socket", socket, *options, "--capacity", capacity, *more],
                                  cwd=self.folder, stdout=subprocess.DEVNULL, stderr=stderr, env=env)
        self.addCleanup(daemon.wait)
        self.addCleanup(daemon.kill)
        while self.tool("top", "--socket", socket, "--once").code != 0:
            self.assertIsNone(daemon.poll(), "the daemon ended")
            time.sleep(0.05)
        return daemon

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
    return re.findall(r"^  ([\w-]+)  ", listed, re.M)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", required=True, type=lambda p: str(pathlib.Path(p).resolve()))
    parser.add_argument("--source", required=True, type=lambda p: pathlib.Path(p).resolve())
    parser.add_argument("--data", default=pathlib.Path("nowhere"), type=pathlib.Path)
    _, rest = parser.parse_known_args(namespace=OPTIONS)
    result = unittest.main(module="__main__", argv=[sys.argv[0], *rest], exit=False).result
    if result.wasSuccessful() and 0 < result.testsRun <= len(result.skipped):
        sys.exit(SKIPPED)
    sys.exit(not result.wasSuccessful())
