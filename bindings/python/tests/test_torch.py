"""gpushare.torch without PyTorch: a module that stands in for torch loads the allocator as PyTorch does and calls it as PyTorch does."""
import os
import subprocess
import sys
import textwrap

import pytest

# Stands in for the parts of PyTorch that gpushare.torch uses. It has torch.cuda only where STANDIN names the driver's stand-in.
FAKE = '''
import ctypes, os, sys, types, contextlib
fake = types.ModuleType("torch")
fake.__version__ = os.environ.get("FAKE_VERSION", "2.12.1+cu130")
fake.device = lambda kind, index=None: kind if index is None else f"{kind}:{index}"
class Inner:
    def __init__(self): self.set = {}
    def __getattr__(self, name):
        if not name.startswith("set_"): raise AttributeError(name)
        return lambda address: self.set.__setitem__(name, address)
class CUDAPluggableAllocator:
    def __init__(self, path, alloc, free):
        library = ctypes.CDLL(path)
        self.alloc, self.free = getattr(library, alloc), getattr(library, free)
        self.alloc.restype = ctypes.c_void_p
        self.alloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self.free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self.inner = Inner()
    def allocator(self): return self.inner
current = []
def change_current_allocator(plugged):
    if current: raise RuntimeError("Can't swap an already initialized allocator")
    current.append(plugged)
streams = [None]
waits = []
class ExternalStream:
    def __init__(self, native, device): self.native = native
    def wait_stream(self, other): waits.append((self.native, other.native))
@contextlib.contextmanager
def stream(of):
    streams.append(of.native)
    try: yield
    finally: streams.pop()
fake.cuda = types.SimpleNamespace(is_available=lambda: False, ExternalStream=ExternalStream, stream=stream,
    current_stream=lambda index: ExternalStream(streams[-1], index),
    memory=types.SimpleNamespace(CUDAPluggableAllocator=CUDAPluggableAllocator, change_current_allocator=change_current_allocator))
sys.modules["torch"] = fake
class Tensor:
    def __init__(self, nbytes):
        self.nbytes, self.stream = nbytes, streams[-1]
        self.pointer = current[0].alloc(nbytes, 0, self.stream)
    def __del__(self): current[0].free(self.pointer, self.nbytes, 0, self.stream)
class Optimizer:
    def __init__(self): self.hooks = []
    def register_step_post_hook(self, hook):
        self.hooks.append(hook)
        return types.SimpleNamespace(remove=lambda: self.hooks.remove(hook))
    def step(self):
        for hook in list(self.hooks): hook(self, (), {})
'''


def run(body, **environment):
    """Runs a program in a process of its own, as it changes the allocator of the process. Returns what it prints."""
    done = subprocess.run([sys.executable, "-c", FAKE + textwrap.dedent(body)], env={**os.environ, **environment}, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def test_turns_on_the_host_device():
    run('''
        import gpushare, gpushare.torch as gt
        with gt.session("a", weight=2) as a, gt.session("b", policy="fair") as b:
            assert a.device == "cpu" and a.runtime is b.runtime
            for _ in range(3):
                with a.iteration():
                    pass
                with b.iteration():
                    try:
                        with b.iteration():
                            raise AssertionError
                    except gpushare.InvalidState:
                        pass
            a.runtime.synchronize()
            assert a.info()["iterations_done"] == 3 and b.info()["iterations_done"] == 3
            optimizer = Optimizer()
            gt.attach(optimizer, to=a)
            for _ in range(4):
                optimizer.step()
        assert a.closed and b.closed and not optimizer.hooks
        try:
            gt.attach(optimizer)
            raise AssertionError
        except gpushare.InvalidState:
            pass
        ''')


def test_an_exception_ends_its_session_alone():
    run('''
        import gpushare.torch as gt
        with gt.session("good") as good:
            try:
                with gt.session("bad") as bad, bad.iteration():
                    raise KeyError("x")
            except KeyError:
                pass
            assert bad.closed
            with good.iteration():
                pass
        ''')


def test_other_versions_are_told():
    done = run('''
        import gpushare.torch as gt
        with gt.session("a") as a, a.iteration():
            pass
        ''', FAKE_VERSION="2.9.0")
    assert "PyTorch 2.9.0" in done.stderr and "2.11 to 2.15" in done.stderr


needs_standin = pytest.mark.skipif("GPUSHARE_CUDA_STANDIN" not in os.environ, reason="no stand-in for the CUDA driver")


@needs_standin
def test_cuda_tensors_are_the_sessions():
    run('''
        import gc, gpushare, gpushare.torch as gt
        with gt.session("train", device=DEVICE, capacity_bytes="128M", persistent_bytes="8M", ephemeral_bytes="16M") as s:
            assert s.device == "cuda:0" and len(current[0].inner.set) == 8
            weights = Tensor(1 << 20)
            for step in range(4):
                with s.iteration():
                    # The lane's stream, which waits for the session's own.
                    assert streams[-1] not in (None, streams[-2]) and waits[-1] == (streams[-1], streams[-2])
                    gradient = Tensor(1 << 20)
                    scratch = [Tensor(2 << 20) for _ in range(3)]
                    del scratch
            assert s.info()["ephemeral_bytes"] == 0 and s.memory()["current_bytes"] == 2 << 20, s.memory()
            assert s.memory()["predicted"] == 2
        runtime = s.runtime
        assert runtime.info()["sessions_resident"] == 1      # a tensor of it lives
        del gradient, weights
        assert runtime.info()["sessions_resident"] == 0
        late = gt.session("late", device=DEVICE)
        late.__enter__()
        kept = Tensor(4096)                                   # freed when the interpreter has gone
        '''.replace("DEVICE", "'cuda?driver=' + os.environ['GPUSHARE_CUDA_STANDIN']"))


@needs_standin
def test_holes_between_persistent_blocks_serve_iterations():
    run('''
        import gpushare, gpushare.torch as gt
        with gt.session("tight", device=DEVICE, capacity_bytes="128M", memory="32M", ephemeral_bytes="4M") as s:
            low, high = Tensor(12 << 20), Tensor(12 << 20)
            del low
            for step in range(4):
                with s.iteration():
                    scratch = [Tensor(4 << 20) for _ in range(4)]    # no promise of ephemeral bytes has room beside `high` for all
                    del scratch
                assert s.memory()["current_bytes"] == 12 << 20, s.memory()
            assert s.memory()["failures"] == 0
            del high
        '''.replace("DEVICE", "'cuda?driver=' + os.environ['GPUSHARE_CUDA_STANDIN']"))


@needs_standin
def test_observers_of_failed_allocations():
    run('''
        import json, os, tempfile, gpushare, gpushare.torch as gt
        with gt.session("small", device=DEVICE, capacity_bytes="128M", memory="32M") as s, tempfile.TemporaryDirectory() as folder:
            told = []
            def observe(session_id, nbytes, message):
                told.append((session_id, nbytes, message))
                s.runtime.write_snapshot(folder + "/full.json", json=True)
            s.allocator.add_observer(lambda *_: 1 / 0)          # is logged, and the next is told
            s.allocator.add_observer(observe)
            kept = Tensor(16 << 20)
            out = gpushare.ffi.new("gpushare_device_address*")
            status = gpushare.lib.gpushare_allocator_alloc(s.allocator.handle, 64 << 20, 0, gpushare.ffi.cast("void*", streams[-1]), out)
            assert status == gpushare.lib.GPUSHARE_QUOTA_EXCEEDED
            assert told[0][:2] == (s.info()["session_id"], 64 << 20) and "small" in told[0][2], told
            assert json.load(open(folder + "/full.json"))["segments"]
            del kept
        '''.replace("DEVICE", "'cuda?driver=' + os.environ['GPUSHARE_CUDA_STANDIN']"))


@needs_standin
def test_cuda_is_refused_for_other_versions():
    run('''
        import gpushare, gpushare.torch as gt
        try:
            gt.session("a", device="cuda?driver=" + os.environ["GPUSHARE_CUDA_STANDIN"])
            raise AssertionError
        except gpushare.Unavailable as error:
            assert "2.11 to 2.15" in str(error)
        ''', FAKE_VERSION="2.16.0")
