"""The Python of docs/pytorch.md runs as it is printed. The test defines before it what the page leaves to its reader (networks, data)."""
# SPDX-License-Identifier: Apache-2.0
import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/pytorch.md").read_text(encoding="utf-8"), re.DOTALL)

READERS = """
import gpushare.torch as gt
from torch import nn
from safetensors.torch import save_file

class Copy(torch.autograd.Function):      # all that the stand-in can do: memory copies
    @staticmethod
    def forward(ctx, x, weight):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        return None, torch.zeros_like(g[0])

class Copies(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1000))
    def forward(self, x):
        return Copy.apply(x, self.weight)

class StepOfCopies(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {})
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.copy_(p.grad)

def make_model():
    return Copies() if torch.cuda.is_available() else nn.Sequential(nn.Linear(1000, 8), nn.ReLU(), nn.Linear(8, 1000))

def step(model, batch):
    model.zero_grad()
    out = model(batch.to(next(model.parameters()).device))
    out.backward(torch.zeros_like(out))

def decode(cache):
    return torch.empty(1000, device=cache.device).copy_(cache[0, :1000])

if torch.cuda.is_available():
    torch.optim.SGD = StepOfCopies
data = [torch.rand(16, 1000) for _ in range(4)]
example = torch.rand(1000)
paths = ["resnet.safetensors", "bert.safetensors", "vit.safetensors"]
for path in paths:
    save_file({name: torch.rand(tensor.shape) for name, tensor in make_model().state_dict().items()}, path)
requests = [(path, example[None]) for path in paths + paths[:1]]
"""


def test_the_page_has_snippets():
    assert len(SNIPPETS) == 9


@pytest.mark.parametrize("cuda", [True, False], ids=["cuda", "host"])
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run_as_printed(run, tmp_path, monkeypatch, number, cuda):
    snippet = SNIPPETS[number]
    if not cuda and re.search(r"Pool|CUDAPluggableAllocator", snippet):
        pytest.skip("of CUDA memory alone")
    for library in re.findall(r"^import (transformers|lightning)$", snippet, re.MULTILINE):
        if cuda or importlib.util.find_spec(library) is None:
            pytest.skip(f"{library}: on the host device, where it is installed")
        snippet = snippet.replace("gt.session(", 'gt.session(device="host", name=', 1)
    monkeypatch.chdir(tmp_path)
    run(READERS + snippet, cuda=cuda, CUDA_STANDIN=f"memory_bytes={12 << 30}")
