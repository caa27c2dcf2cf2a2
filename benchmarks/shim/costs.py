#!/usr/bin/env python3
"""All costs of the shim in one run, as a table: calls of the recording driver alone and through the shim, without a daemon, with the small heap, with the turn
of a daemon, and measured and bounded as while others wait.

  benchmarks/shim/costs.py BUILD_FOLDER [runs, default 9]

CPU time in ns, median of the interleaved runs. The spread is the standard deviation of the runs' ratios of both columns. On a busy host start it with a
real-time priority (chrt -f 5): the rows are ratios within one run, and other programs still share the caches. SPDX-License-Identifier: Apache-2.0"""
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

CALLS = "launch|copy|info|allocation|replacement"
WAYS = {"no daemon": (CALLS, {"GPUSHARE_SOCKET": "", "GPUSHARE_MEMORY": "64G"}),
        "small heap": ("allocation|replacement", {"GPUSHARE_SOCKET": "", "GPUSHARE_MEMORY": "64G", "GPUSHARE_SMALL_HEAP": "1"}),
        "with the turn": ("launch|copy", {"GPUSHARE_MEMORY": "8M"}),
        "measured and bounded": ("launch|copy", {"GPUSHARE_MEMORY": "8M", "GPUSHARE_CLASS": "opportunistic"})}


def main():
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    build, runs = pathlib.Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 9
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/socket"
        common = {**os.environ, "GPUSHARE_CUDA_DRIVER": str(build / "lib/doubles/libcuda_recorder.so"), "GPUSHARE_SOCKET": socket}
        daemon = subprocess.Popen([build / "bin/gpushare", "daemon", "--device", "host", "--capacity", "64MiB"], env=common, stderr=subprocess.DEVNULL)
        while not os.path.exists(socket):
            time.sleep(0.01)
        for _ in range(runs):
            for way, (calls, settings) in WAYS.items():
                done = subprocess.run([build / "bin/shim_benchmark", f"--benchmark_filter={calls}", "--benchmark_format=json", "--benchmark_min_time=0.1"],
                                      env={**common, **settings, "LD_PRELOAD": str(build / "lib/libgpushare_preload.so")}, capture_output=True, check=True)
                for row in json.loads(done.stdout)["benchmarks"]:
                    call, column, *live = row["name"].split("/")
                    times.setdefault((way, " ".join([call, *live])), {}).setdefault(column, []).append(row["cpu_time"])
        daemon.terminate()
        daemon.wait()
    print("| way | call | driver alone | with the shim | added | ratio | spread |\n|---|---|---|---|---|---|---|")
    for (way, call), columns in times.items():
        bare, shim = (statistics.median(columns[name]) for name in ("bare", "shim"))
        added = statistics.median(b - a for a, b in zip(columns["bare"], columns["shim"]))
        ratios = [b / a for a, b in zip(columns["bare"], columns["shim"])]
        print(f"| {way} | {call} | {bare:.1f} | {shim:.1f} | {added:.1f} | {statistics.median(ratios):.2f} | {100 * statistics.stdev(ratios) / statistics.mean(ratios):.0f}% |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
