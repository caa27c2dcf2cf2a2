"""The adaptors for frameworks in Python with the frameworks themselves, on a GPU: what they allocate belongs to a session, what they compute is right, and
the session's limit reaches them as their own error.

  frameworks.py [--device cuda:0] [--only NAME] [--accounting]

Prints a line for each framework: ok, not installed, or FAILED with the reason (status 1). Each runs in a process of its own. --accounting leaves out
what needs a GPU's kernels, to try the script on a stand-in for the driver.
"""
# SPDX-License-Identifier: Apache-2.0
import argparse
import contextlib
import gc
import importlib.metadata
import subprocess
import sys

COUNT = 1 << 20  # of numbers of 4 bytes
TOO_MANY = 1 << 26


class NotInstalled(Exception):
    """The framework, or what it needs to use a GPU, is not there."""


@contextlib.contextmanager
def job(name):
    """An allocator and a session of 64 MiB to which the thread is bound."""
    import gpushare

    with gpushare.Runtime(OPTIONS.device, policy="fair") as runtime, gpushare.Allocator(runtime) as allocator:
        session = runtime.open_session(name, memory="64M")
        with allocator.use(session):
            yield allocator, session


def persistent(session):
    gc.collect()
    return session.info()["persistent_bytes"]


def expect(what, condition):
    if not condition:
        raise AssertionError(what)


def refused(error, function, *arguments):
    try:
        function(*arguments)
    except error:
        return
    raise AssertionError("an allocation above the session's limit was granted")


def cupy():
    import cupy

    import gpushare.cupy

    with job("cupy") as (allocator, session):
        gpushare.cupy.install(allocator)
        weights = cupy.arange(COUNT, dtype=cupy.float32)
        cupy.cuda.Stream.null.synchronize()
        held = persistent(session)
        expect("an array is the session's", held >= 4 * COUNT)
        for _ in range(4):
            with allocator.iteration(session) as iteration, cupy.cuda.ExternalStream(iteration.stream.native):
                doubled = weights * 2
                expect("temporary memory is ephemeral", session.info()["ephemeral_bytes"] >= 4 * COUNT)
                expect("the product", float(doubled[-1]) == 2.0 * (COUNT - 1))
                del doubled
        expect("temporary memory went back", persistent(session) == held)
        refused(cupy.cuda.memory.OutOfMemoryError, cupy.empty, TOO_MANY, cupy.float32)
        del weights
        expect("the array's memory went back", persistent(session) == 0)


def numba():
    import numpy
    from numba import cuda

    import gpushare.numba

    with job("numba") as (allocator, session):
        gpushare.numba.install(allocator)
        values = numpy.arange(COUNT, dtype=numpy.float32)
        weights = cuda.to_device(values)
        expect("an array is the session's", persistent(session) == values.nbytes)
        with allocator.iteration(session):
            scratch = cuda.device_array(COUNT, numpy.float32)
            expect("temporary memory is ephemeral", session.info()["ephemeral_bytes"] >= values.nbytes)
            if not OPTIONS.accounting:

                @cuda.jit
                def double(result, given):
                    i = cuda.grid(1)
                    if i < result.size:
                        result[i] = 2 * given[i]

                double[COUNT // 256, 256](scratch, weights)
                expect("the product", (scratch.copy_to_host() == 2 * values).all())
            del scratch
            gc.collect()
            cuda.current_context().deallocations.clear()
        expect("temporary memory went back", persistent(session) == values.nbytes)
        refused(MemoryError, cuda.device_array, TOO_MANY, numpy.float32)
        del weights
        gc.collect()
        cuda.current_context().deallocations.clear()
        expect("the array's memory went back", persistent(session) == 0)


def rmm():
    import rmm

    import gpushare.rmm

    with job("rmm") as (allocator, session):
        gpushare.rmm.install(allocator)
        data = bytes(range(256)) * 1024
        held = rmm.DeviceBuffer.to_device(data)
        expect("a buffer is the session's", persistent(session) >= len(data))
        expect("its bytes", bytes(held.tobytes()) == data)
        refused(MemoryError, lambda: rmm.DeviceBuffer(size=4 * TOO_MANY))
        del held
        expect("the buffer's memory went back", persistent(session) == 0)


def onnxruntime():
    import numpy
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    import gpushare.onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise NotInstalled("onnxruntime is there, without CUDAExecutionProvider")
    shape = [1, COUNT]
    weights = numpy.full(shape, 2, numpy.float32)
    graph = helper.make_graph([helper.make_node("Mul", ["x", "weights"], ["y"])], "product", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)], [numpy_helper.from_array(weights, "weights")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    with job("onnx") as (allocator, session):
        provider = ("CUDAExecutionProvider", gpushare.onnxruntime.cuda_options(allocator))
        loaded = onnxruntime.InferenceSession(model, providers=[provider])
        expect("the provider is CUDA's", loaded.get_providers()[0] == provider[0])
        expect("weights are the session's", persistent(session) >= weights.nbytes)
        (product,) = loaded.run(None, {"x": numpy.ones(shape, numpy.float32)})
        expect("the product", (product == 2).all())
        del loaded
        expect("the model's memory went back", persistent(session) == 0)


FRAMEWORKS = {"cupy": cupy, "numba": numba, "rmm": rmm, "onnxruntime": onnxruntime}


def version(name):
    """Of the package that has the module; a framework's packages have names of their own for each version of CUDA."""
    packages = importlib.metadata.packages_distributions() if hasattr(importlib.metadata, "packages_distributions") else {}
    return " ".join(f"{package} {importlib.metadata.version(package)}" for package in sorted(set(packages.get(name, [])))) or name


def alone(name):
    try:
        FRAMEWORKS[name]()
    except ImportError as error:
        if (error.name or "").startswith("gpushare"):
            raise
        print(f"{name}: not installed ({error})")
    except NotInstalled as error:
        print(f"{name}: not installed ({error})")
    else:
        print(f"{version(name)}: ok{', without kernels' if OPTIONS.accounting else ''}")


def main():
    if OPTIONS.only:
        return alone(OPTIONS.only)
    failed = False
    for name in FRAMEWORKS:
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name], capture_output=True, text=True)
        said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [f"status {done.returncode}"]
        print(said[-1] if done.returncode == 0 else f"{name}: FAILED: {said[-1]}", flush=True)
        sys.stderr.write(done.stderr if done.returncode != 0 else "")
        failed |= done.returncode != 0
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", choices=FRAMEWORKS)
    parser.add_argument("--accounting", action="store_true")
    OPTIONS = parser.parse_args()
    sys.exit(main())
