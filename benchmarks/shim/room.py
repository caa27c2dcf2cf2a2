#!/usr/bin/env python3
"""How long a program of higher rank waits for memory that a `--pageable` program holds, over the recording driver.

  benchmarks/shim/room.py BUILD_FOLDER [rounds, default 7] [MiB held, default 192] [MiB of a block, default 16]

The device is full of the idle program's blocks, all written. A program that needs 6 MiB, 64 MiB or all of them asks for its context, which waits until the
daemon has promised it the bytes; then it ends, and the other one comes back before the next round. Sizes take turns. Printed are ms, the median (least
to most), and of the same wait while nobody holds anything ("free"). SPDX-License-Identifier: Apache-2.0"""
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

BEGIN = """
import ctypes, sys, time
cuda = ctypes.CDLL('libcuda.so.1')
context = ctypes.c_void_p()
def ask(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
ask('cuInit', 0)
began = time.monotonic()
ask('cuDevicePrimaryCtxRetain', ctypes.byref(context), 0)
took = time.monotonic() - began
"""
HOLDER = BEGIN + """
ask('cuCtxSetCurrent', context)
block, size = ctypes.c_uint64(), int(sys.argv[2]) << 20
content = bytes(range(1, 256)) * (size // 255 + 1)
for _ in range(int(sys.argv[1])):
    ask('cuMemAlloc_v2', ctypes.byref(block), ctypes.c_uint64(size))
    ask('cuMemcpyHtoD_v2', block, content, ctypes.c_uint64(size))
word = ctypes.create_string_buffer(8)
print('holds', flush=True)
for line in sys.stdin:
    ask('cuMemcpyDtoH_v2', word, block, ctypes.c_uint64(8))  # in its turn, so it is in again
    print('in', flush=True)
"""
WAITER = BEGIN + "print(took * 1000)\n"


def main():
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    tool = pathlib.Path(sys.argv[1]).resolve() / "bin/gpushare"
    rounds, held, block = (int(sys.argv[at]) if len(sys.argv) > at else value for at, value in ((2, 7), (3, 192), (4, 16)))
    sizes = [size for size in (6, 64, held) if size <= held]
    waits = {size: [] for size in [*sizes, "free"]}
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir="/dev/shm") as device:
        environment = {**os.environ, "GPUSHARE_SOCKET": f"{folder}/socket", "RECORDER_DEVICE": device.name, "RECORDER_HOST_NODES": "1",
                       "GPUSHARE_CUDA_DRIVER": str(tool.parent.parent / "lib/doubles/libcuda_recorder.so")}
        daemon = subprocess.Popen([tool, "daemon", "--device", "host", "--capacity", f"{held}MiB", "--policy", "priority"], env=environment,
                                  stderr=subprocess.DEVNULL)
        while not os.path.exists(f"{folder}/socket"):
            time.sleep(0.01)

        def wait(size):
            done = subprocess.run([tool, "exec", "--memory", f"{size}MiB", "--priority", "1", "--", sys.executable, "-c", WAITER], env=environment,
                                  check=True, capture_output=True, text=True)
            return float(done.stdout)

        waits["free"] = [wait(6) for _ in range(rounds)]
        with subprocess.Popen([tool, "exec", "--memory", f"{held}MiB", "--class", "opportunistic", "--pageable", "--", sys.executable, "-c", HOLDER,
                               str(held // block), str(block)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout.readline() == "holds\n"
            for _ in range(rounds):
                for size in sizes:
                    time.sleep(0.05)  # it has given its turn back
                    waits[size].append(wait(size))
                    holder.stdin.write("in\n")
                    holder.stdin.flush()
                    assert holder.stdout.readline() == "in\n"
            holder.stdin.close()
        daemon.terminate()
        daemon.wait()
    print(f"a program holds {held} MiB in blocks of {block} MiB; {rounds} rounds: ms, median (least to most)")
    for size, times in waits.items():
        print(f"| {size} | {statistics.median(times):.3g} ({min(times):.3g} to {max(times):.3g}) |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
