#!/usr/bin/env python3
"""Instructions an operation of every path to memory, on every recorded trace, as a table of Markdown: counted by callgrind, so that neither the
machine nor its load matters.

  benchmarks/memory/count_paths.py build/release/bin/count_paths FOLDER_OF_TRACES [PATH...]

Ratios are to the first path that was counted. SPDX-License-Identifier: Apache-2.0"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

PATHS = ("offset_allocator", "vma", "float_bins", "heap", "lane", "planned", "framework", "model", "bulk")


def count(program: str, path: str, trace: pathlib.Path):
    """Instructions an operation; None where the program does not have the path."""
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out", program, path,
                              str(trace), "10"], capture_output=True, text=True, check=False)
    if ran.returncode == 2:
        return None
    found, operations = re.search(r"Collected\s*:\s*(\d+)", ran.stderr), re.search(r"(\d+) operations", ran.stdout)
    if not found or not operations:
        sys.exit(f"{path} on {trace.stem} failed:\n{ran.stderr[-1000:]}")
    return int(found.group(1)) / 10 / int(operations.group(1))


def main() -> None:
    program, folder, paths = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:] or PATHS
    print("| trace | " + " | ".join(paths) + " |\n" + "|---" * (len(paths) + 1) + "|")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for trace in sorted(folder.glob("*.csv")):
            counts = list(pool.map(lambda path, of=trace: count(program, path, of), paths))
            first = next(each for each in counts if each is not None)
            cells = ["" if each is None else f"{each:.0f} ({each / first:.2f})" for each in counts]
            print(f"| {trace.stem} | " + " | ".join(cells) + " |", flush=True)


main()
