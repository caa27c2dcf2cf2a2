"""What the Python package adds to the calls of the library, on the host device.

    python benchmarks/python/binding_bench.py [rounds]

Each line is one of the package's calls beside its peer: the same calls of the library by cffi alone, or numpy's. All are measured in turns of 400 calls,
so that a load of the machine meets each alike. Printed: the median of the rounds in microseconds, the quarters around it, and the median of the ratios.
"""
# SPDX-License-Identifier: Apache-2.0
import gc
import statistics
import sys
import time

import numpy

import gpushare
from gpushare import ffi, lib

CALLS = 400
SHAPE = (32, 32)
WAIT = 2**64 - 1


def bare_iterations(session):
    begin, end, handle, out = lib.gpushare_iteration_begin, lib.gpushare_iteration_end, session.handle, ffi.new("gpushare_iteration*")
    for _ in range(CALLS):
        begin(handle, WAIT, out)
        end(out[0])


def iterations(session):
    for _ in range(CALLS):
        with session.iteration():
            pass


def loop(session):
    for _ in session.iterations(CALLS):
        pass


def bare_allocations(session):
    with session.iteration() as iteration:
        alloc, handle, out = lib.gpushare_iteration_alloc, iteration.handle, ffi.new("gpushare_device_address*")
        for _ in range(CALLS):
            alloc(handle, 4096, 0, out)


def numpys_arrays(session):
    for _ in range(CALLS):
        numpy.empty(SHAPE, numpy.float32)


def arrays(session):
    with session.iteration() as step:
        for _ in range(CALLS):
            step.array(SHAPE)


ROWS = (("with session.iteration()", iterations, "begin and end by cffi", bare_iterations),
        ("for step in session.iterations()", loop, "begin and end by cffi", bare_iterations),
        ("step.array((32, 32))", arrays, "gpushare_iteration_alloc by cffi", bare_allocations),
        ("step.array((32, 32))", arrays, "numpy.empty", numpys_arrays))


def main(rounds):
    functions = {function for _, mine, _, peer in ROWS for function in (mine, peer)}
    times = {function: [] for function in functions}
    with gpushare.Runtime("host", policy="fair", capacity_bytes="64M") as runtime:
        session = runtime.open_session("bench", persistent_bytes="8M", ephemeral_bytes="8M")
        gc.disable()
        for number in range(rounds + 1):  # the first warms up
            for function in functions:
                begin = time.perf_counter()
                function(session)
                if number > 0:
                    times[function].append((time.perf_counter() - begin) / CALLS * 1e6)
            gc.collect(0)
    print(f"{'':34} {'us':>6} {'quarters':>14}   {'peer':34} {'us':>6} {'ratio':>6}")
    for name, mine, peer_name, peer in ROWS:
        low, median, high = statistics.quantiles(times[mine], n=4)
        ratio = statistics.median(one / other for one, other in zip(times[mine], times[peer]))
        print(f"{name:34} {median:6.2f} {f'{low:.2f} to {high:.2f}':>14}   {peer_name:34} {statistics.median(times[peer]):6.2f} {ratio:6.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
