#!/usr/bin/env python3
"""An entry point of the driver without a class fails the build, and generate-shim-table gives none to new ones.

  table_test.py COMPILER [unittest's options]

SPDX-License-Identifier: Apache-2.0"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COMPILER = "c++"
MESSAGES = ("'unclassified' is not a member of 'gpushare::shim::Class'",     # GCC
            "no member named 'unclassified' in 'gpushare::shim::Class'")     # Clang


class Table(unittest.TestCase):
    """Works on a copy of the table, its code and its script."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        for name in ("scripts/generate-shim-table", "src/shim/driver_table.inc", "src/shim/table.cpp", "src/shim/table.hpp", "src/shim/words.hpp"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        self.table = self.folder / "src/shim/driver_table.inc"

    def errors(self):
        """File, line and text of each error that the compiler finds in the table's code."""
        compiled = subprocess.run([COMPILER, "-std=c++20", "-fsyntax-only", f"-I{self.folder}/src", self.folder / "src/shim/table.cpp"],
                                  capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
        found = re.findall(r"^(\S+?):(\d+):\d+: error: (.*)$", compiled.stderr, re.M)
        self.assertEqual(compiled.returncode != 0, bool(found), compiled.stderr)
        return [(pathlib.Path(name).name, int(line), text) for name, line, text in found]

    def assert_fails_for(self, export):
        lines = self.table.read_text().splitlines()
        row, = (number for number, line in enumerate(lines, 1) if re.match(rf"GPUSHARE_(ENTRY|NAME)\(unclassified, {export}[,)]", line))
        errors = self.errors()
        self.assertEqual([(name, line) for name, line, _ in errors], [("driver_table.inc", row)], errors)
        self.assertIn(errors[0][2], MESSAGES)

    def generate(self, *arguments):
        return subprocess.run([sys.executable, self.folder / "scripts/generate-shim-table", *map(str, arguments)], capture_output=True, text=True)

    def test_each_row_needs_a_class(self):
        committed = self.table.read_text()
        self.assertEqual(self.errors(), [])
        for kind in ("pass", "count", "charge", "gate"):
            export = re.search(rf"^GPUSHARE_ENTRY\({kind}, (\w+)", committed, re.M)[1]
            self.table.write_text(committed.replace(f"({kind}, {export},", f"(unclassified, {export},"))
            self.assert_fails_for(export)
        kind, export = re.search(r"^GPUSHARE_NAME\((\w+), (\w+)", committed, re.M).groups()
        self.table.write_text(committed.replace(f"({kind}, {export})", f"(unclassified, {export})"))
        self.assert_fails_for(export)

    def test_a_new_export_has_no_class_until_somebody_gives_it_one(self):
        include = self.folder / "include"
        include.mkdir()
        (include / "cuda.h").write_text("#define CUDA_VERSION 13010\ntypedef int CUresult;\nextern \"C\" {\n"
                                        "CUresult cuInit(unsigned flags);\nCUresult cuNewThing(void* made, unsigned long long bytes);\n}\n")
        (include / "cudaTypedefs.h").write_text("typedef CUresult (*PFN_cuInit_v2000)(unsigned);\n"
                                                "typedef CUresult (*PFN_cuNewThing_v13010)(void*, unsigned long long);\n")
        done = self.generate(include)
        self.assertEqual((done.stdout, done.returncode), ("2 rows, 1 without a class\n", 0), done.stderr)
        rows = [line for line in self.table.read_text().splitlines() if line.startswith("GPUSHARE_")]
        self.assertEqual(rows, ["GPUSHARE_ENTRY(pass, cuInit, cuInit, 2000, (I a), (a))",
                                "GPUSHARE_ENTRY(unclassified, cuNewThing, cuNewThing, 13010, (P a, L b), (a, b))"])
        self.assert_fails_for("cuNewThing")
        self.table.write_text(self.table.read_text().replace("unclassified", "charge"))
        self.assertEqual(self.errors(), [])
        # The class stays when the table is written again.
        self.assertEqual(self.generate(include, "--check").returncode, 0)
        # Headers of a later release than the table's.
        header = (include / "cuda.h").read_text()
        self.assertEqual(self.generate(include, "--missing").returncode, 0)
        (include / "cuda.h").write_text(header.replace("CUresult cuNewThing", "CUresult cuLaterThing(int what);\nCUresult cuNewThing"))
        done = self.generate(include, "--missing")
        self.assertEqual((done.stderr, done.returncode), ("CUDA 13.1 declares 1 entry points without a row in the table: cuLaterThing\n", 1))
        (include / "cuda.h").write_text(header)
        # A symbol of the driver's library that no header declares.
        stub = self.folder / "libcuda.so"
        subprocess.run([COMPILER, "-shared", "-x", "c", "-o", stub, "-"], input="int cuInit, cuOther;", text=True, check=True)
        done = self.generate(include, "--stub", stub)
        self.assertEqual((done.stderr, done.returncode), ("no declaration found for cuOther\n", 1))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        COMPILER = sys.argv.pop(1)
    unittest.main()
