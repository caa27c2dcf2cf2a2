"""Three PyTorch models answer requests in turn, on a device with room for two: weights come with the call and leave when others need the room.

    pip install torch numpy safetensors && python examples/python/switch_torch.py
"""
# SPDX-License-Identifier: Apache-2.0
import pathlib
import tempfile
import time

import torch
from safetensors.torch import save_file
from torch import nn

import gpushare.torch as gt


def make_model():
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU()))).eval().requires_grad_(False)


with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), gt.session("models", device="host", memory="20M") as session:
    models, weights, expected = [], [], []
    request = torch.rand(1, 512)
    for number in range(3):
        trained = make_model()
        path = pathlib.Path(folder, f"{number}.safetensors")
        save_file(trained.state_dict(), path)
        expected.append(trained(request))
        with torch.device("meta"):  # no memory of its own
            models.append(make_model())
        weights.append(gt.load(models[number], path, on_demand=True))
    for number in (0, 1, 0, 2, 2, 1, 0):
        loads, begin = weights[number].loads, time.perf_counter()
        with session.iteration():
            answer = models[number](request)
        assert torch.equal(answer, expected[number])
        print(f"model {number}: {1e3 * (time.perf_counter() - begin):6.2f} ms, {'loaded' if weights[number].loads > loads else 'was there'}; "
              f"{session.info()['persistent_bytes'] / 2**20:.1f} MiB of weights on the device")
print("loads:", ", ".join(str(weight.loads) for weight in weights))
