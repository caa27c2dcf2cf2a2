#!/usr/bin/env python3
"""Latency of a foreground program beside an opportunistic one, both under `gpushare exec`, on the recording driver's device clock.

  benchmarks/shim/foreground.py BUILD_FOLDER [iterations, default 300]

The foreground gives the device a kernel of 200 us every 5 ms and waits for it; its latency is the device's time from an event before the launch, which
no gate holds, to one behind it. Alone, beside a program that always has kernels of 20 us, and beside one with kernels of 5 ms. The daemon's
policy is `priority`. SPDX-License-Identifier: Apache-2.0"""
import os
import pathlib
import subprocess
import sys
import tempfile
import time

PROGRAM = """
import ctypes, sys, time
cuda = ctypes.CDLL('libcuda.so.1')
context, module, kernel, stream, first, last = (ctypes.c_void_p() for _ in range(6))
def ask(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
ask('cuInit', 0)
ask('cuDevicePrimaryCtxRetain', ctypes.byref(context), 0)
ask('cuCtxSetCurrent', context)
ask('cuModuleLoadData', ctypes.byref(module), b'image')
ask('cuModuleGetFunction', ctypes.byref(kernel), module, b'spin_200us')
ask('cuStreamCreate', ctypes.byref(stream), 1)
for event in (first, last): ask('cuEventCreate', ctypes.byref(event), 0)
took, us = ctypes.c_float(), []
for _ in range(int(sys.argv[1])):
    time.sleep(0.005)
    ask('cuEventRecord', first, stream)
    ask('cuLaunchKernel', kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
    ask('cuEventRecord', last, stream)
    ask('cuStreamSynchronize', stream)
    ask('cuEventElapsedTime', ctypes.byref(took), first, last)
    us.append(took.value * 1000)
us.sort()
print(f'P50 {us[len(us) // 2]:.0f} us, P90 {us[len(us) * 9 // 10]:.0f} us, P99 {us[len(us) * 99 // 100]:.0f} us')
"""


def main():
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    build = pathlib.Path(sys.argv[1]).resolve()
    tool, iterations = build / "bin/gpushare", sys.argv[2] if len(sys.argv) > 2 else "300"
    for neighbour in ("", "spin_20us", "spin_5ms"):
        with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir="/dev/shm") as device:
            environment = {**os.environ, "GPUSHARE_SOCKET": f"{folder}/socket", "RECORDER_DEVICE": device.name,
                           "GPUSHARE_CUDA_DRIVER": str(build / "lib/doubles/libcuda_recorder.so"), "GPUSHARE_MEMORY": "8MiB"}
            daemon = subprocess.Popen([tool, "daemon", "--device", "host", "--capacity", "64MiB", "--policy", "priority"], env=environment,
                                      stderr=subprocess.DEVNULL)
            while not os.path.exists(f"{folder}/socket"):
                time.sleep(0.01)
            beside = neighbour and subprocess.Popen([tool, "exec", "--class", "opportunistic", "--", build / "bin/shim_load", neighbour, "0", "0"],
                                                    env=environment, stdout=subprocess.PIPE)
            if beside:
                beside.stdout.readline()
            done = subprocess.run([tool, "exec", "--priority", "1", "--", sys.executable, "-c", PROGRAM, iterations], env=environment,
                                  capture_output=True, text=True)
            print(f"beside {neighbour}:" if neighbour else "alone:", done.stdout.strip() or done.stderr)
            for process in filter(None, (beside, daemon)):
                process.terminate()
                process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
