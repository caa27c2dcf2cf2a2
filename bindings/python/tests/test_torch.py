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
fake._C = types.SimpleNamespace(_get_cudnn_benchmark=lambda: False, _set_cudnn_benchmark=lambda value: None)
fake.backends = types.SimpleNamespace(cudnn=types.SimpleNamespace())
sys.modules["torch"] = fake
class Tensor:
    def __init__(self, nbytes):
        self.nbytes, self.stream = nbytes, streams[-1]
        self.pointer = current[0].alloc(nbytes, 0, self.stream)
    def __del__(self): current[0].free(self.pointer, self.nbytes, 0, self.stream)
class Optimizer:
    def __init__(self): self.hooks, self.before = [], []
    def register_step_post_hook(self, hook, to=None):
        to = self.hooks if to is None else to
        to.append(hook)
        return types.SimpleNamespace(remove=lambda: to.remove(hook))
    def register_step_pre_hook(self, hook): return self.register_step_post_hook(hook, self.before)
    def step(self):
        for hook in list(self.before) + list(self.hooks): hook(self, (), {})
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
            a.runtime.synchronize()
            assert a.info()["iterations_done"] == 7
        assert a.closed and b.closed and not optimizer.hooks and not optimizer.before
        try:
            gt.attach(optimizer)
            raise AssertionError
        except gpushare.InvalidState:
            pass
        ''')


def test_an_exception_abandons_its_iteration():
    run('''
        import gpushare, gpushare.torch as gt
        with gt.session("good") as good, gt.session("strict", fail_on_error=True) as strict:
            for session in (good, strict):
                try:
                    with session.iteration():
                        raise KeyError("x")
                except KeyError:
                    pass
            with good.iteration():
                pass
            try:
                strict.iteration().__enter__()
                raise AssertionError
            except gpushare.InvalidState as error:
                assert "fail_on_error" in str(error)
        try:
            with gt.session("bad") as bad, bad.iteration():
                raise KeyError("x")
        except KeyError:
            pass
        assert bad.closed
        ''')


def test_sessions_without_a_with_block():
    run('''
        import threading, gpushare, gpushare.torch as gt
        s = gt.session("notebook").open()
        optimizer = Optimizer()
        gt.attach(optimizer)                        # finds it, as in a `with` block
        optimizer.step()
        try:
            s.open()
            raise AssertionError
        except gpushare.InvalidState:
            pass
        s.close()
        assert s.closed and not optimizer.hooks
        def elsewhere():
            with gt.session("thread") as t, t.iteration():
                done.append(1)
        done = []
        thread = threading.Thread(target=elsewhere)
        thread.start(); thread.join()
        assert done
        far = gt.session("far")
        thread = threading.Thread(target=far.open)
        thread.start(); thread.join()
        far.close()                                 # by another thread than the one that opened it
        assert far.closed
        ''')


def test_what_attach_takes():
    run('''
        import gpushare, gpushare.torch as gt
        wrapped = lambda of: types.SimpleNamespace(optimizer=of)
        with gt.session("a") as s:
            one, two, three = Optimizer(), Optimizer(), Optimizer()
            gt.attach(wrapped(wrapped(one)), [two, {"x": wrapped(three)}])
            for optimizer in (one, two, three, one):
                optimizer.step()
            s.runtime.synchronize()
            assert s.info()["iterations_done"] == 4
            for wrong in (None, object(), [3]):
                try:
                    gt.attach(wrong)
                    raise AssertionError
                except gpushare.InvalidArgument as error:
                    assert "optimizers of torch.optim" in str(error)
        ''')


def test_threads_attach_while_others_wait_for_data():
    run('''
        import threading
        import gpushare.torch as gt
        from gpushare import _torch_attach
        sys.setswitchinterval(1e-6)
        looked = threading.Event()
        with gt.session("a") as s:
            kept = [_torch_attach.Attached(s, Optimizer()) for _ in range(300)]
            def attach():
                while not looked.is_set():
                    _torch_attach.Attached(s, Optimizer()).detach()
            threads = [threading.Thread(target=attach) for _ in range(2)]
            for thread in threads: thread.start()
            try:
                for _ in range(2000): _torch_attach._of_this_thread()  # as each fetch of a DataLoader
            finally:
                looked.set()
                for thread in threads: thread.join()
        ''')


def test_an_index_that_names_indexes_is_refused(tmp_path):
    run(f'''
        import json, pathlib
        import gpushare
        from gpushare import _torch_weights
        folder = pathlib.Path({str(tmp_path)!r})
        for name, shard in (("own.index.json", "own.index.json"), ("one.index.json", "other.index.json"), ("other.index.json", "one.index.json")):
            (folder / name).write_text(json.dumps({{"weight_map": {{"weight": shard}}}}))
        for path in folder.iterdir():
            try:
                _torch_weights._safetensors(path)
                raise AssertionError
            except gpushare.MalformedInput as error:
                assert "index itself" in str(error), error
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
def test_tensors_of_a_failed_step_keep_their_memory():
    """Ways in which a step fails while tensors of it are alive, then others allocate. The stand-in ends a process that frees what another one has."""
    run('''
        import gc, gpushare, gpushare.torch as gt
        def failing(s, how):
            if how == "step":
                with s, s.iteration():
                    x = Tensor(1 << 16)
                    raise ValueError(x)
            elif how == "session":
                with s:
                    with s.iteration():
                        x = Tensor(1 << 16)
                    raise ValueError(x)
            elif how == "attach":
                with s:
                    s._begin()                    # as a module's call does
                    raise ValueError(Tensor(1 << 16))
            else:
                with s.open().iteration():
                    raise ValueError(Tensor(1 << 16))
        for how in ("step", "session", "attach", "open"):
            a = gt.session("a", device=DEVICE, capacity_bytes="128M", memory="64M")
            try:
                failing(a, how)
            except ValueError as error:
                kept = error.args[0]
            a.close()
            gc.collect()
            with gt.session("b", device=DEVICE, memory="64M") as b, b.iteration():
                other = [Tensor(1 << 16) for _ in range(20)]
                assert kept.pointer not in [each.pointer for each in other]
                del other
            runtime = a.runtime
            assert runtime.info()["sessions_resident"] == 1, how
            del kept
            gc.collect()
            assert runtime.info()["sessions_resident"] == 0, how
        '''.replace("DEVICE", "'cuda?driver=' + os.environ['GPUSHARE_CUDA_STANDIN']"))


@needs_standin
def test_a_failed_step_that_fills_the_device_is_cleared():
    """Its tensors find no room beside the session's promise: what the exception's functions held is let go, and the session goes on."""
    run('''
        import gc, gpushare, gpushare.torch as gt
        def forward(count):
            activations = [Tensor(8 << 20) for _ in range(count)]
            raise ValueError("full")
        with gt.session("full", device=DEVICE, capacity_bytes="64M", persistent_bytes="8M", ephemeral_bytes="56M") as s:
            for again in range(3):
                try:
                    with s.iteration():
                        forward(5)
                except ValueError as error:
                    kept = error                  # and its traceback
                with s.iteration():
                    big = Tensor(40 << 20)
                    del big
            assert s.memory()["current_bytes"] <= 8 << 20
        '''.replace("DEVICE", "'cuda?driver=' + os.environ['GPUSHARE_CUDA_STANDIN']"))


@needs_standin
def test_an_iteration_whose_tensors_find_no_room_has_its_turn_until_they_are_gone():
    run('''
        import gc, time, gpushare, gpushare.torch as gt
        for error in (None, ValueError):
            with gt.session("full", device=DEVICE, capacity_bytes="64M", persistent_bytes="8M", ephemeral_bytes="56M") as s:
                raised = None
                try:
                    with s.iteration():
                        kept = [Tensor(8 << 20) for _ in range(5)]
                        if error: raise error
                except Exception as e:
                    raised = type(e)
                assert raised is (error or gpushare.DeviceOutOfMemory), raised
                try:
                    with s.iteration(): raise AssertionError
                except gpushare.DeviceOutOfMemory as e:
                    assert "alive" in str(e)
                del kept[1:]
                with s.iteration():
                    pass
                assert s.memory()["current_bytes"] == 8 << 20
                with gt.session("late", device=DEVICE, memory="1M"):
                    pass
                del kept[:]
        try:
            with gt.session("leaves", device=DEVICE) as s, s.iteration():
                kept = [Tensor(8 << 20) for _ in range(7)]
            raise AssertionError
        except gpushare.DeviceOutOfMemory:
            pass
        assert not s.closed                           # closed with the iteration, which waits for its tensors
        runtime = s.runtime
        del kept[:]
        while not s.closed or runtime.info()["sessions_resident"]:
            time.sleep(0.01)
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
