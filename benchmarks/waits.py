#!/usr/bin/env python3
"""How long the device stands idle because somebody waits, on stand-ins for the driver: nothing of it was measured on a GPU.

  benchmarks/waits.py BUILD_FOLDER [seconds a row of programs, default 3] [rounds, default 3]

Two tables, each row with its bar. Sessions of one process, on the strict stand-in: an iteration of one fill beside a plain stream, and the device's idle
time at a switch between two sessions. Programs under `gpushare exec` and a daemon, on the recording driver's shared device: two programs that always have
kernels queued, or wait for each; the bar is for queued ones. Rows are medians over the rounds, with their range. A row says "not decided" when its rounds
lie further apart than the bar allows, or on both sides of it: the host was not quiet enough. Use a quiet host, or start it with `chrt -f 5`: a thread that
gets no core lets the device wait. The stand-in's events are work of a thread, which beside short fills is not little (a fill of 256 KiB takes 11 us), so
iterations are compared with a plain stream that records as many events, too. SPDX-License-Identifier: Apache-2.0"""
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time


class Device(ctypes.Structure):  # tests/doubles/cuda_recorder/recorder.h
    _fields_ = [(name, ctypes.c_uint64) for name in ("now_ns", "busy_ns", "switches", "capacity_bytes", "used_bytes")]


def verdict(values, bar, spread):
    """What the rounds say of the bar; `spread`: how far apart they may lie."""
    if max(values) - min(values) > spread or (min(values) <= bar) != (max(values) <= bar):
        return "not decided"
    return "met" if max(values) <= bar else "MISSED"


def told(what, values, unit, bar=None, spread=None):
    said = "" if bar is None else f"bar {bar:g}: {verdict(values, bar, bar if spread is None else spread)}"
    print(f"  {what:<64} {statistics.median(values):8.2f} {unit:<4} [{min(values):.2f}, {max(values):.2f}]  {said}", flush=True)


def suite(build, folder, number, fill_kib):
    """The rows of a measurement of gpu_suite on the strict stand-in: name and way, and the median."""
    result = pathlib.Path(folder) / "suite.json"
    environment = {**os.environ, "GPUSHARE_CUDA_DRIVER": str(build / "lib/libcuda_standin.so"), "CUDA_STANDIN": "hidden=0,doorbell_spin_ns=200000"}
    subprocess.run([build / "bin/gpu_suite", "--quick", "--repeats", "31", "--fill-kib", str(fill_kib), "--only", str(number), "--json", result],
                   env=environment, check=True, stdout=subprocess.DEVNULL)
    return {(row["what"], row["by"]): row["median"] for row in json.loads(result.read_text())["rows"]}


def sessions(build, rounds):
    print("sessions of one process, strict stand-in for the driver")
    with tempfile.TemporaryDirectory() as folder:
        for fill_kib in (256, 1024):
            over, over_events, same, idle = [], [], [], {1: [], 2: []}
            for _ in range(rounds):
                rows = suite(build, folder, 2, fill_kib)
                ways = {way: value for (name, way), value in rows.items() if name.startswith("1 fills")}
                over.append(ways["gpushare"] / ways["plain stream"])
                over_events.append(ways["gpushare"] / ways["plain stream with two events"])
                rows = suite(build, folder, 3, fill_kib)
                for depth in idle:
                    idle[depth].append(rows[f"device idle where another session goes on, enqueue depth {depth}", "gpushare"])
                if ("device idle where the same goes on, enqueue depth 1", "gpushare") in rows:
                    same.append(rows["device idle where the same goes on, enqueue depth 1", "gpushare"])
            told(f"iteration of one fill of {fill_kib} KiB, over a plain stream", over, "", 1.1, 0.1)
            told(f"iteration of one fill of {fill_kib} KiB, over one with two events", over_events, "", 1.1, 0.1)
            for depth, values in idle.items():
                told(f"idle at a switch, two fills of {fill_kib} KiB, depth {depth}", values, "us", 20)
            if same:  # no thread is woken
                told("idle at depth 1 where the same session goes on", same, "us")


def programs(build, seconds, rounds):
    print("programs under gpushare exec, recording driver's shared device")
    driver = str(build / "lib/doubles/libcuda_recorder.so")
    read = ctypes.CDLL(driver).recorder_device_read
    for kernel in ("50us", "200us", "1ms", "5ms"):
        for sync in ("0", "1"):
            idle = []
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
                    environment = {**os.environ, "GPUSHARE_SOCKET": f"{folder}/socket", "RECORDER_DEVICE": shared.name, "GPUSHARE_CUDA_DRIVER": driver,
                                   "GPUSHARE_MEMORY": "8MiB"}
                    running = [subprocess.Popen([build / "bin/gpushare", "daemon", "--device", "host", "--capacity", "64MiB", "--policy", "fair"],
                                                env=environment, stderr=subprocess.DEVNULL)]
                    while not os.path.exists(f"{folder}/socket"):
                        time.sleep(0.01)
                    for _ in range(2):
                        running.append(subprocess.Popen([build / "bin/gpushare", "exec", "--", build / "bin/shim_load", f"spin_{kernel}", "0", sync],
                                                        env=environment, stdout=subprocess.PIPE))
                    for each in running[1:]:
                        each.stdout.readline()
                    time.sleep(0.5)  # both have turns
                    first, last = Device(), Device()
                    read(shared.name.encode(), ctypes.byref(first), None, 0)
                    time.sleep(seconds)
                    read(shared.name.encode(), ctypes.byref(last), None, 0)
                    idle.append(100 - 100 * (last.busy_ns - first.busy_ns) / (last.now_ns - first.now_ns))
                    for each in reversed(running):
                        each.terminate()
                        each.wait()
            told(f"idle, two programs, kernels of {kernel}, " + ("each waited for" if sync == "1" else "queued"), idle, "%", 5 if sync == "0" else None)


def main():
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    build = pathlib.Path(sys.argv[1]).resolve()
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    sessions(build, rounds)
    programs(build, float(sys.argv[2]) if len(sys.argv) > 2 else 3, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
