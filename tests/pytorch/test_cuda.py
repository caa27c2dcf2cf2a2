"""Tensors' whole life through libgpushare_torch.so, on the stand-ins for CUDA. Nothing computes there: what moves is memory.

The driver's stand-in is strict: it ends a process with status 99 after unordered accesses of two streams, use after free, and the like.
"""
# SPDX-License-Identifier: Apache-2.0
import json

import pytest

SESSION = """
import gpushare.torch as gt

class Copy(torch.autograd.Function):
    '''Memory copies alone, on PyTorch's threads for backward.'''
    threads = set()
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        Copy.threads.add(threading.get_ident())
        return g.clone()

def counted(s):
    return s.memory()["current_bytes"]
"""


def test_the_standin_computes_nothing_and_says_so(run):
    run("""
        x = torch.zeros(8, device="cuda")
        assert x.cpu().sum() == 0 and torch.cuda.get_device_name(0) == "CUDA stand-in 0"
        try:
            x + 1
            raise AssertionError
        except torch.AcceleratorError as error:
            assert "computes nothing" in str(error) and "kernel" in str(error), error
        """)


def test_the_standin_fills(run):
    """The one kernel that it knows: whether torch.zeros launches it depends on PyTorch's version."""
    run("""
        for dtype in (torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.float64):
            for value in (0, 1, 5):
                for count in (1, 7, 4096, 100003):
                    x = torch.empty(count + 16, dtype=dtype, device="cuda").copy_(torch.zeros(count + 16, dtype=dtype))
                    x[:count].fill_(value)
                    expected = torch.full((count,), value, dtype=dtype)
                    assert torch.equal(x[:count].cpu(), expected) and not x[count:].cpu().any(), (dtype, value, count)
        try:
            torch.empty(8, 8, device="cuda")[:, 3].fill_(1)      # memory with gaps is another kernel's
            raise AssertionError
        except torch.AcceleratorError as error:
            assert "computes nothing" in str(error), error
        """)


def test_a_tensors_life(run):
    run(SESSION + """
with gt.session("life", memory="256M") as s:
    host = torch.arange(1000.0)
    x = torch.empty(1000, device=s.device)
    assert counted(s) >= 4000
    x.copy_(host)
    view = x.view(10, 100)[2:4]
    del x
    assert counted(s) >= 4000 and torch.equal(view.cpu().flatten(), host[200:400])   # a view holds its storage
    del view
    assert counted(s) == 0
    pinned = torch.empty(1000).pin_memory()
    pinned.copy_(host)
    x = pinned.to(s.device, non_blocking=True)
    # Another stream reads; its memory may be used again only after that.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.clone()
        x.record_stream(side)
    address = x.data_ptr()
    del x
    z = torch.zeros(1000, device=s.device)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(y.cpu(), host)
    # A block is freed by a thread that never called gpushare.
    kept = [torch.zeros(1 << 20, device=s.device)]
    thread = threading.Thread(target=kept.clear)
    thread.start(); thread.join()
    del y, z
    gc.collect()
    torch.cuda.empty_cache()
    assert counted(s) == 0, s.memory()
    event = torch.cuda.Event(enable_timing=True)
    event.record(); event.synchronize(); event.query()
""")


def test_backwards_allocations_are_the_iterations(run):
    run(SESSION + """
with gt.session("other") as other, gt.session("train", memory="256M") as s:
    w = torch.zeros(1000, device=s.device, requires_grad=True)
    assert counted(s) >= 4000 and counted(other) == 0
    before = counted(s)
    for step in range(5):
        with s.iteration():
            y = Copy.apply(Copy.apply(w))
            scratch = [torch.empty(1 << 18, device=s.device) for _ in range(3)]
            y.backward(torch.zeros_like(y))
            assert s.info()["ephemeral_bytes"] > 0
            del y, scratch
        assert s.info()["ephemeral_bytes"] == 0 and counted(s) > before        # the gradient stays
        assert w.grad is not None and w.grad.cpu().sum() == 0
        w.grad = None
        assert counted(s) == before and counted(other) == 0
    assert Copy.threads and threading.get_ident() not in Copy.threads
    assert s.memory()["predicted"] >= 2, s.memory()
""")


def test_attached_optimizers(run):
    run(SESSION + """
class Step(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.copy_(p.grad)
with gt.session("loop", memory="256M") as s:
    w = torch.zeros(1000, device=s.device, requires_grad=True)
    optimizer = Step([w])
    gt.attach(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        Copy.apply(w).backward(torch.zeros_like(w))
        optimizer.step()
    assert s.info()["iterations_done"] >= 3
assert w.cpu().sum() == 0
""")


def test_out_of_memory_and_after(run):
    run(SESSION + """
with gt.session("other", memory="64M") as other:
    theirs = torch.zeros(1 << 20, device=other.device)
    try:
        with gt.session("small", memory="64M") as s:
            kept = torch.zeros(1 << 20, device=s.device)
            told = []
            s.allocator.add_observer(lambda session_id, nbytes, message: told.append((session_id, nbytes)))
            for again in range(2):                             # it goes on after the first
                try:
                    torch.empty(1 << 28, device=s.device)
                    raise AssertionError
                except RuntimeError as error:
                    assert gt.is_out_of_memory(error) and "small" in str(error) and "64.00 MiB" in str(error), error
                kept.copy_(torch.zeros(1 << 20))
            assert told == 2 * [(s.info()["session_id"], 1 << 30)]
            assert s.memory()["failures"] == 2 and other.memory()["failures"] == 0
            with s.iteration():
                torch.empty(1 << 28, device=s.device)
    except RuntimeError as error:
        assert gt.is_out_of_memory(error)
    assert s.closed
    with other.iteration():
        torch.empty(1 << 20, device=other.device)
    assert kept.cpu().sum() == 0 and theirs.cpu().sum() == 0    # its session has ended, its tensors have not
""")


def test_memory_fraction(run):
    run(SESSION + """
with gt.session("half", capacity_bytes="256M") as s:
    torch.cuda.set_per_process_memory_fraction(0.25)
    a = torch.empty(40 << 18, device=s.device)
    try:
        b = torch.empty(40 << 18, device=s.device)
        raise AssertionError
    except RuntimeError as error:
        assert gt.is_out_of_memory(error) and "limit" in str(error), error
    torch.cuda.set_per_process_memory_fraction(1.0)
    b = torch.empty(40 << 18, device=s.device)
    assert s.memory()["limit_bytes"] == 2**64 - 1 and s.memory()["reserved_bytes"] >= counted(s)
""")


def test_snapshots_open_in_memory_viz(run, tmp_path):
    run(SESSION + f"""
from torch.cuda import _memory_viz
with gt.session("snap", memory="256M") as s:
    kept = [torch.zeros(1 << 20, device=s.device) for _ in range(3)]
    s.runtime.write_snapshot("{tmp_path}/memory.pickle")
    s.runtime.write_snapshot("{tmp_path}/memory.json", json=True)
    with open("{tmp_path}/memory.pickle", "rb") as file:
        snapshot = pickle.load(file)
    assert sum(block["size"] for segment in snapshot["segments"] for block in segment["blocks"]
               if block["state"] == "active_allocated") >= 12 << 20
    assert "<html" in _memory_viz.segment_plot(snapshot).lower() or "<script" in _memory_viz.segment_plot(snapshot).lower()
    assert _memory_viz.segsum(snapshot)
    assert json.load(open("{tmp_path}/memory.json"))
    try:                                                       # PyTorch itself answers this for its own allocator alone
        torch.cuda.memory._snapshot()
        raise AssertionError
    except RuntimeError as error:
        assert "CUDAPluggableAllocator" in str(error)
""")


def test_workspaces_that_never_die_count_once(run):
    """As cuBLAS's: 32 MiB for each thread and stream that multiplies, taken inside an iteration and kept for the life of the process."""
    run(SESSION + """
workspaces = {}
def multiply(x):
    key = threading.get_ident(), torch.cuda.current_stream().cuda_stream
    if key not in workspaces:
        workspaces[key] = torch.empty(8 << 20, device=x.device)
    return x.clone()

class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return multiply(x)
    @staticmethod
    def backward(ctx, g):
        return multiply(g)                                     # on PyTorch's thread

with gt.session("s", memory="192M") as s:
    x = torch.zeros(1 << 20, device=s.device, requires_grad=True)
    held = []
    for _ in range(5):
        with s.iteration():
            scratch = torch.empty(8 << 20, device=s.device)    # E beside them
            Multiply.apply(x).backward(torch.zeros_like(x))
            x.grad = None
            del scratch
        held.append(counted(s))
    assert len(workspaces) == 2, workspaces.keys()
    assert held[1:] == held[1:2] * 4 and held[-1] <= (4 + 64) << 20, held
    try:
        torch.empty(48 << 20, device=s.device)
        raise AssertionError
    except torch.OutOfMemoryError:
        pass
    with s.iteration():
        Multiply.apply(x).backward(torch.zeros_like(x))
        x.grad = None
    workspaces.clear()
""")


def test_pytorchs_figures_are_the_sessions(run):
    run(SESSION + """
with gt.session("other", memory="64M") as other, gt.session("s", memory="256M") as s:
    theirs = torch.empty(1 << 20, device=s.device)
    told = [torch.cuda.memory_allocated(), torch.cuda.memory_allocated(s.device), torch.accelerator.memory_allocated()]
    assert told == [4 << 20] * 3, (told, s.memory())
    with s.iteration():
        scratch = torch.empty(4 << 20, device=s.device)
        assert torch.cuda.memory_allocated() == 20 << 20
        del scratch
    assert torch.cuda.max_memory_allocated() == 20 << 20 and torch.cuda.memory_allocated() == 4 << 20
    assert torch.cuda.max_memory_reserved() >= torch.cuda.memory_reserved() >= 4 << 20
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.max_memory_allocated() == 4 << 20, torch.cuda.max_memory_allocated()
    try:
        torch.empty(1 << 30, device=s.device)
        raise AssertionError
    except torch.OutOfMemoryError:
        pass
    figures = torch.cuda.memory_stats()
    assert figures["num_ooms"] == 1 and figures["allocation.all.allocated"] >= 2
    for abbreviated in (False, True):
        assert "4096 KiB" in torch.cuda.memory_summary(abbreviated=abbreviated), torch.cuda.memory_summary()
    def thread():
        asked.append(torch.cuda.memory_allocated())           # no session of its own: all of the device
    asked = []
    worker = threading.Thread(target=thread)
    worker.start(); worker.join()
    assert asked == [4 << 20], asked
    del theirs
    torch.cuda.empty_cache()
    torch.accelerator.empty_cache()
    assert torch.cuda.memory_allocated() == 0
assert torch.cuda.memory_allocated() == 0
""")


def test_cudnn_benchmark_is_switched_off_with_one_warning(run):
    run("""
import warnings
import gpushare.torch as gt
torch.backends.cudnn.benchmark = True
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with gt.session("s", memory="64M"):
        assert torch.backends.cudnn.benchmark is False
        torch.backends.cudnn.benchmark = True
        assert torch.backends.cudnn.benchmark is False
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            assert torch.backends.cudnn.benchmark is False
        torch.backends.cudnn.deterministic = True
        assert torch.backends.cudnn.deterministic is True
said = [str(warning.message) for warning in caught if "cudnn.benchmark" in str(warning.message)]
assert len(said) == 1, said
""")


def test_graphs_have_pools_of_their_own(run):
    run(SESSION + """
with gt.session("graph", memory="256M") as s:
    source = torch.zeros(1000, device=s.device)
    with s.iteration():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            middle = source.clone()
            result = middle.clone()
            address = middle.data_ptr()
            del middle
            gc.collect()
        others = [torch.empty(1000, device=s.device) for _ in range(64)]
        assert address not in [other.data_ptr() for other in others]   # the graph writes there
        del others
    for value in (1.0, 2.0):
        source.copy_(torch.full((1000,), value))
        with s.iteration():
            graph.replay()
        assert result.cpu().sum() == 1000 * value
    held = counted(s)
    del graph, result
    gc.collect()
    assert counted(s) < held, (counted(s), held)
""")


def test_memory_pools(run):
    run(SESSION + """
with gt.session("pool", memory="256M") as s:
    pool = gt.Pool()
    for again in range(2):
        with s.iteration(), pool.use():
            cache = torch.zeros(1 << 20, device=s.device)
            cache.copy_(torch.ones(1 << 20))
        assert counted(s) >= 4 << 20 and cache.cpu().sum() == 1 << 20
        address = cache.data_ptr()
        del cache
    with s.iteration():
        assert torch.empty(1 << 20, device=s.device).data_ptr() != address
        with pool.use():
            left = torch.zeros(1 << 20, device=s.device)
            assert left.data_ptr() == address                    # the pool's own bytes
    pool.close()
    assert counted(s) > 0 and left.cpu().sum() == 0          # a tensor of it lives
    del left
    assert counted(s) == 0, s.memory()
    # PyTorch's own pool cannot be made any more, as documented.
    try:
        torch.cuda.MemPool()
        raise AssertionError
    except RuntimeError as error:
        assert "does not yet support" in str(error)
try:
    gt.Pool()
    raise AssertionError
except gpushare.InvalidState:
    pass
""")


def test_pytorchs_pool_over_gpushare(run):
    """The other order: PyTorch's allocator stays the process's, and one of its pools takes segments from gpushare."""
    run("""
        import os
        plugged = torch.cuda.memory.CUDAPluggableAllocator(os.environ["GPUSHARE_TORCH_LIBRARY"], "gpushare_torch_alloc",
                                                           "gpushare_torch_free")
        pool = torch.cuda.MemPool(plugged.allocator())
        with torch.cuda.use_mem_pool(pool):
            cache = torch.zeros(1 << 20, device="cuda")
        other = torch.zeros(1 << 20, device="cuda")
        assert cache.cpu().sum() == 0 and torch.cuda.memory_allocated() >= 8 << 20
        import gpushare.torch as gt
        try:
            gt.session("late")
            raise AssertionError
        except gpushare.InvalidState as error:
            assert "before the first CUDA tensor" in str(error)
        """)


def test_the_allocator_alone(run):
    run("""
        import os
        allocator = torch.cuda.memory.CUDAPluggableAllocator(os.environ["GPUSHARE_TORCH_LIBRARY"], "gpushare_torch_alloc",
                                                             "gpushare_torch_free")
        torch.cuda.memory.change_current_allocator(allocator)
        x = torch.arange(100.0).to("cuda")
        assert x.cpu().sum() == 4950
        """)


def test_late_frees_at_exit(run):
    run(SESSION + """
s = gt.session("late").__enter__()
kept = torch.zeros(1000, device=s.device)
""")


def test_device_arrays_are_tensors(run):
    run("""
        with gpushare.Runtime("cuda:0", capacity_bytes="64M") as runtime:
            session = runtime.open_session("arrays")
            array = session.array((4, 5))
            assert array.__cuda_array_interface__["shape"] == (4, 5)
            for tensor in (torch.as_tensor(array, device="cuda"), torch.from_dlpack(array)):
                assert tensor.data_ptr() == array.address and tensor.shape == (4, 5) and tensor.dtype == torch.float32
                tensor.copy_(torch.arange(20.0).view(4, 5))
                torch.cuda.synchronize()
                assert tensor.cpu().sum() == 190
                del tensor
            session.close()
        """)


def test_serving_and_loading(run, tmp_path):
    """Layers that copy memory alone: what arrives from the file is what the forward pass hands on."""
    run(SESSION + f"""
import torch.nn as nn
from safetensors.torch import save_file
class Emit(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.kept = None
    def forward(self, x):
        if self.kept is None:
            self.kept = torch.zeros(1000, device=x.device)     # what a model keeps between batches, as workspaces
        return self.weight.clone()
size = 3000
file = {{f"{{layer}}.weight": torch.full((size,), float(layer)) for layer in range(4)}}
save_file(file, "{tmp_path}/layers.safetensors")
with gt.session("serving", memory="256M") as s:
    with torch.device("meta"):
        model = nn.Sequential(*(Emit(size) for _ in range(4)))
    weights = gt.load(model, "{tmp_path}/layers.safetensors")
    assert model[3].weight.is_cuda
    with s.iteration():
        assert model(torch.empty(1, device=s.device)).cpu().sum() == 3 * size
    weights.wait()
    def call(model, payloads):
        return [model[payload](torch.empty(1, device=s.device)) for payload in payloads]
    with gt.serve(model, call=call, batch_sizes=[1, 2, 4]) as server:
        server.measure(2)
        futures = [server.submit(request % 4, deadline=60) for request in range(12)]
        for request, future in enumerate(futures):
            assert future.result(timeout=600).result.sum() == request % 4 * size
    assert s.info()["ephemeral_bytes"] == 0
    for layer in model:
        assert layer.kept.cpu().sum() == 0                     # it has not vanished with its batch
assert s.runtime.info()["sessions_resident"] == 1
del model, weights, server, layer, call
gc.collect()
assert s.runtime.info()["sessions_resident"] == 0, s.runtime.info()
""")


def test_loads_of_a_file_pin_it_once(run, tmp_path):
    run(SESSION + f"""
import os
import torch.nn as nn
from safetensors.torch import save_file
calls = ctypes.CDLL(os.environ["GPUSHARE_CUDA_STANDIN"]).standin_calls
calls.restype = ctypes.c_uint64
save_file({{"weight": torch.full((1000, 3000), 7.0), "bias": torch.zeros(1000)}}, "{tmp_path}/linear.safetensors")
with gt.session("loads", memory="256M") as s:
    pinned, kept = calls(b"cuMemHostAlloc"), []
    for load in range(3):
        with torch.device("meta"):
            model = nn.Linear(3000, 1000)
        weights = gt.load(model, "{tmp_path}/linear.safetensors")
        weights.wait()
        assert model.weight.cpu().sum() == 7.0 * 3000 * 1000
        assert load == 0 or calls(b"cuMemHostAlloc") == first, (load, pinned, first, calls(b"cuMemHostAlloc"))
        first = calls(b"cuMemHostAlloc")
        kept.append((model, weights))
    assert first > pinned
    del model, weights, kept
gc.collect()
""")


def test_what_pytorch_answers_for_its_own_allocator_alone_says_so(run):
    """Graph trees of torch.compile(mode="reduce-overhead") ask for the state of pools; processes that share tensors ask for segments."""
    run(SESSION + """
with gt.session("refused", memory="64M") as s:
    x = torch.zeros(1000, device=s.device)
    for refused in (lambda: torch._C._cuda_getCheckpointState(0, (0, 1)), lambda: x.untyped_storage()._share_cuda_(),
                    lambda: torch.cuda.memory_snapshot(), lambda: torch.cuda.get_per_process_memory_fraction()):
        try:
            refused()
            raise AssertionError
        except RuntimeError as error:
            assert "CUDAPluggableAllocator" in str(error), error
    with s.iteration():
        assert x.cpu().sum() == 0
""")


def test_compiled_functions_are_the_iterations(run):
    """torch.compile with aot_eager captures memory copies alone. PyTorch itself refuses backends that record CUDA graphs."""
    run(SESSION + """
with gt.session("compiled", memory="256M") as s:
    compiled = torch.compile(lambda x: x.clone().clone(), backend="aot_eager")
    for step in range(4):
        with s.iteration():
            x = torch.full((1000,), float(step)).to(s.device)
            y = compiled(x)
            assert s.info()["ephemeral_bytes"] > 0 or s.memory()["predicted"] > 0
        assert y.cpu().sum() == 1000 * step
    torch._dynamo.reset()
    graphs = torch.compile(lambda x: x.clone(), backend="cudagraphs")
    try:
        for again in range(3):
            graphs(x)
        raise AssertionError
    except RuntimeError as error:
        assert "does not yet support" in str(error), error
""")
