"""A PyTorch training that knows nothing of gpushare: the program of measurement 10, which torch_exec.py starts alone and under `gpushare exec`.

    torch_train.py [--device cuda|cpu] [--network conv|transformer|large] [--small]

`large` is conv with four times the batch. Trains a few steps, then says in one line of JSON on stdout what device memory it was told of and holds (zeros on the CPU). Each line on stdin is a
number of seconds to train for; the answer is a line with marks, [monotonic seconds, steps], and the last loss. Ends at stdin's end. Ends with
status 3, saying why, when there is no PyTorch for the device.
"""
# SPDX-License-Identifier: Apache-2.0
import argparse
import json
import sys
import time

STEPS = 4  # between two looks at the loss, which wait for the device


def make(network, device, small):
    import torch
    from torch import nn

    torch.manual_seed(0)
    width, batch, layers = (8, 8, 1) if small else (128, 64, 6)
    if network == "transformer":
        layer = nn.TransformerEncoderLayer(4 * width, 4, 8 * width, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Flatten(), nn.LazyLinear(10))
        x = torch.rand(batch, width, 4 * width)
    else:
        blocks = [part for _ in range(2 * layers) for part in (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())]
        model = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.LazyLinear(10))
        batch *= 4 if network == "large" else 1
        x = torch.rand(batch, 3, 32, 32)
    model, x, y = model.to(device), x.to(device), torch.randint(10, (batch,), device=device)
    model(x)  # gives lazy layers their shapes
    return model, x, y


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--network", choices=("conv", "transformer", "large"), default="conv")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    try:
        import torch
    except Exception as error:
        print(f"no PyTorch: {error}", file=sys.stderr)
        return 3
    if options.device == "cuda" and not torch.cuda.is_available():
        print("PyTorch sees no GPU", file=sys.stderr)
        return 3
    if options.device == "cpu":
        torch.set_num_threads(1)
    model, x, y = make(options.network, options.device, options.small)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train():
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return loss.item()

    for _ in range(3):
        train()
    free, total, reserved = 0, 0, 0
    if options.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
    print(json.dumps({"total_bytes": total, "used_bytes": total - free, "reserved_bytes": reserved}), flush=True)
    for line in sys.stdin:
        marks = [[time.monotonic(), 0]]
        while marks[-1][0] - marks[0][0] < float(line):
            loss = train()
            marks.append([time.monotonic(), marks[-1][1] + STEPS])
        print(json.dumps({"marks": marks, "loss": loss}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
