"""Real trainings and inference on the CPU, as sessions of the host device: what comes out is bit by bit what PyTorch alone gives."""
# SPDX-License-Identifier: Apache-2.0
import pathlib
import shutil
import sysconfig

import pytest

NETWORK = """
import gpushare.torch as gt
import torch.nn as nn
torch.set_num_threads(1)

def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 10))

def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(16, 1, 8, 8, generator=generator), torch.randint(10, (16,), generator=generator)) for _ in range(count)]

def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item()

def alone(seed=1):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return [step(model, optimizer, batch) for batch in batches(8, seed)]
"""


@pytest.mark.parametrize("policy", ["fair", "fifo", "srtf", "priority"])
def test_losses_are_those_of_pytorch_alone(run, policy):
    run(NETWORK + f"""
expected = {{seed: alone(seed) for seed in (1, 2)}}
def train(seed):
    with gt.session(f"train{{seed}}", device="host", policy="{policy}", weight=seed) as s:
        model = network().to(s.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for batch in batches(8, seed):
            with s.iteration():
                losses.append(step(model, optimizer, batch))
        s.runtime.synchronize()
        assert s.info()["iterations_done"] == 8
        found[seed] = losses
found = {{}}
torch.manual_seed(0)
train(1); train(2)                          # one after the other: global random numbers are PyTorch's
assert found == expected, (found, expected)
""", cuda=False)


def test_two_trainings_at_once(run):
    """Networks made beforehand, since PyTorch's random generator is the process's."""
    run(NETWORK + """
expected = {seed: alone(seed) for seed in (1, 2)}
models = {seed: network() for seed in (1, 2)}
found = {}
def train(seed):
    with gt.session(f"train{seed}", device="host") as s:
        optimizer = torch.optim.Adam(models[seed].parameters(), lr=0.01)
        gt.attach(optimizer)
        found[seed] = [step(models[seed], optimizer, batch) for batch in batches(8, seed)]
threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert found == expected, (found, expected)
""", cuda=False)


def test_serving(run):
    run(NETWORK + """
import asyncio
model = network().eval()
inputs = [image for image, _ in batches(2)][0]
with torch.inference_mode():
    expected = [model(image[None])[0] for image in inputs]
with gt.session("serving", device="host") as s, gt.session("training", device="host") as t:
    with gt.serve(model, to=s, batch_sizes=[1, 4]) as server:
        assert server.measure(inputs[0]) > 0
        futures = [server.submit(image, deadline=60) for image in inputs]
        for future, result in zip(futures, expected):
            outcome = future.result(timeout=600)
            assert torch.allclose(outcome.result, result, atol=1e-5) and outcome.in_time
        assert torch.allclose(server(inputs[3]), expected[3], atol=1e-5)
        assert torch.allclose(asyncio.run(server.ask(inputs[4], deadline=60)), expected[4], atol=1e-5)
        try:
            server(torch.zeros(3))
            raise AssertionError
        except gpushare.CallbackFailed as error:
            assert isinstance(error.__cause__, RuntimeError)
    try:
        server.submit(inputs[0], deadline=1)
        raise AssertionError
    except gpushare.InvalidState:
        pass
    # Requests that cannot be in time, beside a batch that runs: the first is tried all the same, since the estimate may be wrong.
    begun, go = threading.Event(), threading.Event()
    def held(model, payloads):
        begun.set()
        assert go.wait(60)
        return payloads
    with gt.serve(model, to=s, call=held) as server:
        server.queue.observe(0, 9, 10.0)
        running = server.submit(inputs[0], deadline=600)
        assert begun.wait(60)
        server.submit(inputs[0], deadline=0.5, application=9)
        try:
            server.submit(inputs[0], deadline=0.5, application=9)
            raise AssertionError
        except gpushare.TimedOut:
            pass
        go.set()
        assert running.result(timeout=600).in_time
    with gt.serve(lambda x: x, to=s, call=lambda model, payloads: [model(p) + 1 for p in payloads]) as server:
        assert server(41) == 42
""", cuda=False)


def test_loading_behind_the_first_pass(run, tmp_path):
    run(NETWORK + f"""
from safetensors.torch import save_file
path = "{tmp_path}/weights.safetensors"
source = network().eval()
source[1].running_mean += 0.5
save_file(dict(source.state_dict()), path)
expected = source(batches(1)[0][0])
with gt.session("serving", device="host") as s:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 10)).eval()
    weights = gt.load(model, path)
    with s.iteration():
        assert torch.equal(model(batches(1)[0][0]), expected)
    assert not any(module._forward_pre_hooks for module in model.modules())
    weights.wait()
    assert s.info()["persistent_bytes"] >= sum(p.nbytes for p in model.state_dict().values())
    # trained on, in place
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    with s.iteration():
        step(model, optimizer, batches(1)[0])
    assert not torch.equal(model[4].weight, source[4].weight)
    # what does not fit is told, and nothing has changed
    for other, told in ((nn.Linear(2, 2), "do not match"), (nn.Sequential(nn.Conv2d(1, 5, 3), *list(network())[1:]), "[5]"),
                        (network().double(), "torch.float64")):
        before = dict(other.named_parameters())
        try:
            gt.load(other, path)
            raise AssertionError
        except gpushare.InvalidArgument as error:
            assert told in str(error), error
        assert all(parameter is before[name] for name, parameter in other.named_parameters())
runtime = s.runtime
assert s.closed and runtime.info()["sessions_resident"] == 1      # its weights live
del weights, model, optimizer
gc.collect()
assert runtime.info()["sessions_resident"] == 0
""", cuda=False)


def test_loads_share_what_was_pinned_and_keep_no_file(run, tmp_path):
    run(NETWORK + f"""
from safetensors.torch import save_file
path = "{tmp_path}/weights.safetensors"
source = network().eval()
save_file(dict(source.state_dict()), path)
kept = set()
with gt.session("serving", device="host") as s:
    loader = s._shared.loader()
    for number in range(3):
        with torch.device("meta"):
            model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 10)).eval()
        weights = gt.load(model, path)
        weights.wait()
        info = loader.info()
        assert info["images"] == 1 and info["misses"] == number + 1, info      # the file was read again
        del weights, model
        gc.collect()
        assert loader.info()["images"] == 0, loader.info()
        kept.add(loader.info()["kept_bytes"])
    assert len(kept) == 1 and kept.pop() > 0, kept      # the chunks of the first load, and no more
""", cuda=False)


def test_tied_weights_and_bfloat16(run, tmp_path):
    run(NETWORK + f"""
from safetensors.torch import save_file
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16, dtype=torch.bfloat16)
        self.head = nn.Linear(16, 32, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
    def forward(self, x):
        return self.head(self.embedding(x))
source, model = Tied(), Tied()
save_file({{"embedding.weight": source.embedding.weight.detach().clone()}}, "{tmp_path}/tied.safetensors")
with gt.session("tied", device="host") as s, s.iteration():
    gt.load(model, "{tmp_path}/tied.safetensors")
    tokens = torch.arange(32)
    assert torch.equal(model(tokens), source(tokens)) and model.head.weight is model.embedding.weight
""", cuda=False)


def test_files_of_all_kinds_are_loaded_or_named(run, tmp_path):
    run(NETWORK + f"""
import pathlib, struct
from safetensors.torch import save_file
folder = pathlib.Path("{tmp_path}")

def loads(model, path, **options):
    with gt.session("load", device="host") as s, s.iteration():
        weights = gt.load(model, path, **options)
        weights.wait()
        return weights

def refused(kind, said, *arguments, **options):
    try:
        loads(*arguments, **options)
    except kind as error:
        assert all(word in str(error) for word in said), error
        return
    raise AssertionError(arguments)

class One(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.register_buffer("t", tensor)

# Every type that safetensors writes, bit by bit.
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32,
              torch.uint16, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
              torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
    bits = torch.randint(0, 2 if dtype is torch.bool else 100, (64,), dtype=torch.uint8)
    value = bits.view(dtype)
    try:
        save_file({{"t": value}}, folder / "one.safetensors")
    except KeyError:                     # a type that this version of safetensors does not write
        continue
    model = One(torch.zeros_like(bits).view(dtype))
    loads(model, folder / "one.safetensors")
    assert torch.equal(model.t.view(torch.uint8), bits), dtype

# One that nobody knows: by its size.
def write(path, header, data=b""):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
write(folder / "later.safetensors", {{"t": {{"dtype": "F4_E1M2", "shape": [8], "data_offsets": [0, 8]}}}}, bytes(range(8)))
model = One(torch.zeros(8, dtype=torch.uint8))
loads(model, folder / "later.safetensors")
assert model.t.tolist() == list(range(8))
refused(gpushare.InvalidArgument, ["F4_E1M2"], One(torch.zeros(8)), folder / "later.safetensors")

# Another type than the model's: refused, or cast.
save_file({{"weight": torch.full((2, 2), 1.5, dtype=torch.float16), "bias": torch.zeros(2)}}, folder / "half.safetensors")
refused(gpushare.InvalidArgument, ["F16", "cast=True"], nn.Linear(2, 2), folder / "half.safetensors")
model = nn.Linear(2, 2)
loads(model, folder / "half.safetensors", cast=True)
assert model.weight.dtype is torch.float32 and (model.weight == 1.5).all() and model.weight.requires_grad

# File and model that do not match.
save_file({{"weight": torch.ones(2, 2), "more": torch.ones(3)}}, folder / "part.safetensors")
refused(gpushare.InvalidArgument, ["bias", "more", "strict=False"], nn.Linear(2, 2), folder / "part.safetensors")
model = nn.Linear(2, 2)
weights = loads(model, folder / "part.safetensors", strict=False)
assert weights.missing == ["bias"] and weights.unexpected == ["more"] and (model.weight == 1).all()

# Nothing is left without storage.
with torch.device("meta"):
    model = nn.Linear(2, 2)
refused(gpushare.InvalidArgument, ["bias", "allow_meta=True"], model, folder / "part.safetensors", strict=False)
loads(model, folder / "part.safetensors", strict=False, allow_meta=True)
class Rotary(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("frequencies", torch.ones(4), persistent=False)
save_file(dict(nn.Linear(2, 2).state_dict()), folder / "linear.safetensors")
with torch.device("meta"):
    model = Rotary()
refused(gpushare.InvalidArgument, ["frequencies", "buffers"], model, folder / "linear.safetensors")

# An index whose name has a variant, and shards.
save_file({{"weight": torch.full((2, 2), 2.0)}}, folder / "model.fp16-00001-of-00002.safetensors")
save_file({{"bias": torch.full((2,), 3.0)}}, folder / "model.fp16-00002-of-00002.safetensors")
for name in ("model.safetensors.index.json", "model.fp16.safetensors.index.json", "model.safetensors.index.fp16.json"):
    (folder / name).write_text(json.dumps({{"metadata": {{}}, "weight_map": {{"weight": "model.fp16-00001-of-00002.safetensors",
                                                                         "bias": "model.fp16-00002-of-00002.safetensors"}}}}))
    model = nn.Linear(2, 2)
    loads(model, folder / name)
    assert (model.weight == 2).all() and (model.bias == 3).all()

# What is no such file is named.
(folder / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\\noid sha256:00\\nsize 5\\n")
refused(gpushare.MalformedInput, ["Git LFS", "git lfs pull"], nn.Linear(2, 2), folder / "pointer.safetensors")
torch.save(nn.Linear(2, 2).state_dict(), folder / "pytorch_model.bin")
refused(gpushare.MalformedInput, ["PyTorch checkpoint", "save_file"], nn.Linear(2, 2), folder / "pytorch_model.bin")
(folder / "old.bin").write_bytes(pickle.dumps({{"weight": 1}}))
refused(gpushare.MalformedInput, ["pickle"], nn.Linear(2, 2), folder / "old.bin")
for content in (b"", b"1234", struct.pack("<Q", 1 << 40) + b"{{}}", struct.pack("<Q", 8) + b"{{}}", struct.pack("<Q", 2) + b"[]"):
    (folder / "bad.safetensors").write_bytes(content)
    refused(gpushare.MalformedInput, ["bad.safetensors"], nn.Linear(2, 2), folder / "bad.safetensors")
write(folder / "bad.safetensors", {{"weight": {{"dtype": "F32"}}}})
refused(gpushare.MalformedInput, ["'weight'"], nn.Linear(2, 2), folder / "bad.safetensors")
for shards, said in ((["a.bin", "a.bin"], ["PyTorch checkpoints", "'a.bin'"]), (["../part.safetensors"] * 2, ["plain file name"]), ([""] * 2, ["plain file name"])):
    (folder / "x.index.json").write_text(json.dumps({{"weight_map": dict(zip(("weight", "bias"), shards))}}))
    refused(gpushare.MalformedInput, said, nn.Linear(2, 2), folder / "x.index.json")
(folder / "x.index.json").write_text("{{}}")
refused(gpushare.MalformedInput, ["weight_map"], nn.Linear(2, 2), folder / "x.index.json")
""", cuda=False)


# Inductor builds C++ code that includes the interpreter's headers.
HEADERS = pathlib.Path(sysconfig.get_path("include"), "Python.h")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(
    not HEADERS.exists() or shutil.which("g++") is None, reason=f"no g++, or no {HEADERS}"))])
def test_compiled(run, backend):
    """torch.compile gives bit by bit what it gives without sessions."""
    run(NETWORK + f"""
def train(attached):
    torch._dynamo.reset()
    model = network()
    compiled = torch.compile(model, backend="{backend}")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if attached:
        gt.attach(optimizer)
    return [step(compiled, optimizer, batch) for batch in batches(8)]
expected = train(False)
with gt.session("compiled", device="host") as s:
    assert train(True) == expected
    assert s.info()["iterations_done"] >= 7
""", cuda=False)


def test_distributed(run, tmp_path):
    """Each rank of DistributedDataParallel is a process with a session of its own."""
    run(f"""
import os, sys, subprocess
rank = '''
import os, sys, torch, gpushare.torch as gt
import torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
torch.manual_seed(3)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gt.session(f"rank{{rank}}", device="host") as s:
    gt.attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((3, 4), float(rank))).sum().backward()
        optimizer.step()
print(model.module.weight.sum().item())
dist.destroy_process_group()
'''
ranks = [subprocess.Popen([sys.executable, "-c", rank, str(number)], stdout=subprocess.PIPE, text=True) for number in range(2)]
said = [process.communicate(timeout=120)[0] for process in ranks]
assert said[0] == said[1] != "" and all(process.returncode == 0 for process in ranks), said
""", cuda=False)


LOADERS = '''
import os
import gpushare.torch as gt

class Numbers(torch.utils.data.Dataset):
    """An item tells which process made it."""
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.tensor([index, os.getpid()])

def epoch(s, **options):
    seen, makers = [], set()
    for batch in torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork", **options):
        with s.iteration():
            back = batch.to(s.device, non_blocking=True).clone().cpu()
        seen += back[:, 0].tolist()
        makers |= set(back[:, 1].tolist())
    assert seen == list(range(32)), seen
    assert len(makers) == 2 and os.getpid() not in makers, makers
'''


@pytest.mark.parametrize("device", ["host", "cuda"])
def test_data_loaders_fork_workers(run, device):
    """While the session is open; on cuda through pinned memory. Workers that end take nothing of the session's with them."""
    run(LOADERS + f"""
with gt.session("training", device="{device}") as s:
    kept = torch.full((1000,), 7.0).to(s.device)
    for persistent in (False, True):
        epoch(s, persistent_workers=persistent, pin_memory=s.device.type == "cuda")
    gc.collect()
    assert kept.cpu().sum() == 7000
""", cuda=device == "cuda")
