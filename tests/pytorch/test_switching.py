"""Many models whose weights do not fit together: gt.load(..., on_demand=True), on the CPU and on the stand-ins for CUDA."""
# SPDX-License-Identifier: Apache-2.0

FILES = """
import gpushare.torch as gt
import torch.nn as nn
from safetensors.torch import save_file
SIZE = 1 << 20                                       # 4 MiB a layer, 12 a model

class Emit(nn.Module):
    '''Copies memory alone, as the stand-in computes nothing.'''
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE), requires_grad=False)
    def forward(self, x):
        return self.weight.clone()

def made():
    with torch.device("meta"):
        return nn.Sequential(Emit(), Emit(), Emit()).eval()

def on_disk(number, folder):
    path = f"{folder}/{number}.safetensors"
    save_file({f"{layer}.weight": torch.full((SIZE,), float(10 * number + layer)) for layer in range(3)}, path)
    return path
"""

SWITCHING = FILES + """
import random
with gt.session("zoo", device=DEVICE, memory="36M") as s:
    models, weights = [], []
    for number in range(5):
        models.append(made())
        weights.append(gt.load(models[number], on_disk(number, FOLDER), on_demand=True))
    x = torch.empty(1, device=s.device)
    assert not any(w.resident for w in weights) and models[0][0].weight.is_meta
    generator = random.Random(1)
    asked = [0, 1, 0, 2, 3, 4] + [generator.randrange(5) for _ in range(30)]
    kept = []
    for number in asked:
        with s.iteration():
            kept.append(models[number](x))
        assert weights[number].resident and s.info()["persistent_bytes"] <= 36 << 20
        assert sum(w.resident for w in weights) <= 2         # three are a little more than 36 MiB
        assert kept.pop().cpu().sum() == (10 * number + 2) * SIZE
    # Used last, there at the end; as often loaded as least recently used says.
    order, loads = [], 0
    assert weights[asked[-1]].resident
    assert len(asked) > sum(w.loads for w in weights) >= 5
    # A tensor that uses the weights keeps their memory: nothing vanishes.
    last = asked[-1]
    view = models[last][1].weight.view(4, -1)[0]
    others = [number for number in range(5) if number != last]
    for number in others[:2]:
        with s.iteration():
            models[number](x)
    assert not weights[last].resident and models[last][1].weight.is_meta and view.cpu()[0] == 10 * last + 1
    assert sum(w.resident for w in weights) == 1
    del view
    # Outside a forward pass.
    with weights[0].use(), weights[1].use():
        assert models[0][2].weight.cpu()[0] == 2 and models[1][0].weight.cpu()[0] == 10
        try:
            with weights[2].use():
                raise AssertionError
        except gpushare.QuotaExceeded:
            pass
        try:
            weights[0].unload()
            raise AssertionError
        except gpushare.InvalidState as error:
            assert "in use" in str(error)
    for w in weights:
        w.unload()
    del w
    gc.collect()
    assert s.info()["persistent_bytes"] < 1 << 20, s.info()
    with s.iteration():
        assert models[3](x).cpu().sum() == 32 * SIZE
"""


def test_models_take_turns_on_the_cpu(run, tmp_path):
    run(f"DEVICE, FOLDER = 'host', {str(tmp_path)!r}\n" + SWITCHING, cuda=False)


def test_models_take_turns_on_cuda(run, tmp_path):
    run(f"DEVICE, FOLDER = 'cuda', {str(tmp_path)!r}\n" + SWITCHING)


def test_what_cannot_be_is_said(run, tmp_path):
    run(FILES + f"""
with gt.session("zoo", device="host", memory="32M") as s:
    model = made()
    path = on_disk(0, {str(tmp_path)!r})
    weights = gt.load(model, path, on_demand=True)
    x = torch.empty(1)
    model.train()
    try:
        model(x)
        raise AssertionError
    except gpushare.InvalidState as error:
        assert "eval()" in str(error) and not weights.resident
    model.eval()
    # A forward pass that raises is over all the same.
    handle = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    for again in range(2):
        try:
            model(x)
            raise AssertionError
        except ZeroDivisionError:
            pass
    handle.remove()
    weights.unload()
    # The file has gone: the call says so, and works when it is back.
    os_error = None
    import os
    s._shared.loader().close(); s._shared._loader = None       # nothing in host memory
    weights._loader = s._shared.loader()
    os.rename(path, path + ".away")
    try:
        model(x)
        raise AssertionError
    except gpushare.Error as error:
        assert "0.safetensors" in str(error), error
    assert model[0].weight.is_meta
    os.rename(path + ".away", path)
    assert model(x).sum() == 2 * SIZE
    # A model that is larger than its session.
    large = nn.Sequential(*[module for _ in range(4) for module in made()]).eval()
    torch.manual_seed(0)
    save_file({{f"{{layer}}.weight": torch.zeros(SIZE) for layer in range(12)}}, {str(tmp_path)!r} + "/large.safetensors")
    gt.load(large, {str(tmp_path)!r} + "/large.safetensors", on_demand=True)
    try:
        large(x)
        raise AssertionError
    except gpushare.QuotaExceeded as error:
        assert "zoo" in str(error)
    assert not weights.resident and model(x).sum() == 2 * SIZE   # it had made room, and comes again
    # Training on weights of the file is for load() as it is.
    assert not model[0].weight.requires_grad
try:
    weights.unload()
    model(x)
    raise AssertionError
except gpushare.InvalidState:
    pass
""", cuda=False)


def test_captures_are_refused(run, tmp_path):
    run(FILES + f"""
with gt.session("zoo", memory="64M") as s:
    model = made()
    gt.load(model, on_disk(0, {str(tmp_path)!r}), on_demand=True)
    x = torch.empty(1, device=s.device)
    with s.iteration():
        model(x)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                model(x)
            raise AssertionError
        except gpushare.InvalidState as error:
            assert "CUDA graph" in str(error)
    with s.iteration():
        assert model(x).cpu().sum() == 2 * SIZE
""")


def test_threads_and_serving(run, tmp_path):
    """Two models that do not fit together, each behind a queue of its own, and asked directly at the same time."""
    run(FILES + f"""
with gt.session("zoo", device="host", memory="20M") as s:
    models = [made() for _ in range(2)]
    weights = [gt.load(model, on_disk(number, {str(tmp_path)!r}), on_demand=True) for number, model in enumerate(models)]
    def call(model, payloads):
        return [model(payload).sum().item() for payload in payloads]
    with gt.serve(models[0], call=call) as first, gt.serve(models[1], call=call) as second:
        futures = [(server.submit(torch.empty(1), deadline=60), expected) for _ in range(6)
                   for server, expected in ((first, 2 * SIZE), (second, 12 * SIZE))]
        for future, expected in futures:
            assert future.result(timeout=600).result == expected
    assert all(w.loads >= 1 for w in weights) and sum(w.resident for w in weights) == 1
""", cuda=False)


def test_the_example(run):
    import pathlib

    path = pathlib.Path(__file__).resolve().parents[2] / "examples/python/switch_torch.py"
    said = run(f"import runpy\nrunpy.run_path({str(path)!r})", cuda=False)
    assert said.splitlines()[-1] == "loads: 2, 2, 1"
