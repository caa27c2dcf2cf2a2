"""Allocations of training iterations through PyTorch's own allocator and through gpushare's, each in a process of its own, in turns.

    scripts/test-pytorch --replay [--operations N] [--instructions] TRACE.csv...

A trace has a line for each buffer of an iteration: id, lower, upper (the times of its allocation and free), size; at equal times frees come
first. It is played again and again until so many operations are done. Printed: CPU time an operation, of all iterations and of the later
half, and the most memory reserved. The device is the driver's stand-in: memory calls cost what they cost there, so that the later half,
in which neither allocator calls the driver, is the comparison.

--instructions counts instead of timing, which other programs on the machine do not disturb: instructions an operation of eight passes after the
first eight, in callgrind, with all that an iteration's begin and end cost, Python's part included. Needs Debian's valgrind; takes minutes.
"""
# SPDX-License-Identifier: Apache-2.0
import argparse
import csv
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time


def operations(path):
    rows = [{key.strip(): value for key, value in row.items()} for row in csv.DictReader(open(path))]
    events = []
    for index, row in enumerate(rows):
        events += [(int(row["lower"]), 1, index), (int(row["upper"]), 0, ~index)]
    events.sort(key=lambda event: event[:2])
    return [event[2] for event in events], [int(row["size"]) for row in rows]


def live_peak(order, sizes):
    live = peak = 0
    for operation in order:
        live += sizes[operation] if operation >= 0 else -sizes[~operation]
        peak = max(peak, live)
    return peak


def play(options):
    import torch

    order, sizes = operations(options.traces[0])
    native = ctypes.CDLL(options.library)
    arguments = ((ctypes.c_int64 * len(order))(*order), ctypes.c_size_t(len(order)), (ctypes.c_uint64 * len(sizes))(*sizes),
                 (ctypes.c_void_p * len(sizes))())
    passes = 16 if options.instructions else max(4, options.operations // len(order))
    times = []

    def count_the_later_half(done):
        if options.instructions and done == passes // 2:
            native.count(1)
    if options.play == "gpushare":
        import gpushare.torch as gt

        with gt.session("replay") as session:
            torch.empty(1, device="cuda")
            reserved = 0
            for number in range(passes):
                count_the_later_half(number)
                begin = time.process_time_ns()
                with session.iteration():
                    native.replay(*arguments)
                times.append(time.process_time_ns() - begin)
                reserved = max(reserved, session.memory()["reserved_bytes"])
    else:
        torch.empty(1, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in range(passes):
                count_the_later_half(number)
                begin = time.process_time_ns()
                native.replay(*arguments)
                times.append(time.process_time_ns() - begin)
        reserved = torch.cuda.max_memory_reserved()
    native.count(0)
    later = times[len(times) // 2:]
    print(json.dumps({"all_ns": sum(times) / len(times) / len(order), "later_ns": sum(later) / len(later) / len(order), "reserved": reserved,
                      "operations": passes * len(order)}))


def instructions(command, environment):
    """Of the later half of the passes, an operation."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counted", *command],
                              env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        totals = [int(line.split()[1]) for line in open(f"{folder}/counted") if line.startswith(("totals:", "summary:"))]
    return max(totals) / (json.loads(done.stdout)["operations"] / 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--instructions", action="store_true", help="count instructions in callgrind instead of timing")
    parser.add_argument("--play", choices=("gpushare", "pytorch"), help=argparse.SUPPRESS)
    parser.add_argument("--library", default=os.environ.get("GPUSHARE_REPLAY_LIBRARY"), help=argparse.SUPPRESS)
    parser.add_argument("traces", nargs="+")
    options = parser.parse_args()
    if options.play:
        return play(options)
    if not options.instructions:
        print(f"{'trace':16} {'allocator':9} {'ns/op':>8} {'later half':>11} {'reserved':>12} {'x live peak':>12}   (medians of {options.runs})")
    for trace in options.traces:
        order, sizes = operations(trace)
        peak = live_peak(order, sizes)
        environment = {**os.environ, "LD_PRELOAD": os.environ["GPUSHARE_CUDART_STANDIN"],
                       "LD_LIBRARY_PATH": os.path.dirname(os.environ["GPUSHARE_CUDA_STANDIN"]),
                       "CUDA_STANDIN": f"memory_bytes={max(4 * peak, 1 << 30)},leaks=0"}
        command = [sys.executable, __file__, "--library", options.library, "--operations", str(options.operations), trace]
        if options.instructions:
            for which in ("pytorch", "gpushare"):
                counted = instructions([*command, "--instructions", "--play", which], environment)
                print(f"{pathlib.Path(trace).stem:16} {which:9} {counted:8.0f} instructions an operation", flush=True)
            continue
        found = {"pytorch": [], "gpushare": []}
        for _ in range(options.runs):
            for which, runs in found.items():
                done = subprocess.run([*command, "--play", which], env=environment, stdout=subprocess.PIPE, text=True)
                if done.returncode != 0:
                    sys.exit(f"{which} on {trace} ended with status {done.returncode}")
                runs.append(json.loads(done.stdout))
        for which, runs in found.items():
            middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            print(f"{pathlib.Path(trace).stem:16} {which:9} {middle['all_ns']:8.0f} {middle['later_ns']:11.0f} "
                  f"{middle['reserved'] / 2**20:8.0f} MiB {middle['reserved'] / peak:12.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
