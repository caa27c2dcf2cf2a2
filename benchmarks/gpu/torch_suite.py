"""Measurement 9 of the GPU suite: PyTorch with gpushare.torch beside PyTorch alone. gpu_suite runs it with GPUSHARE_PYTHON.

    torch_suite.py [--device cuda|host] [--quick] [--modes eager,compiled] [--repeats N] [--steps N] [--load-bytes BYTES]

Two trainings and an inference in one process, eager and compiled, beside the same jobs in turns on PyTorch alone and beside a process each;
one training alone; loading of a .safetensors file; switching between two models of which one fits. Prints a line for each row, separated by
tabs: "row", what, by whom, unit, samples; or "skip", what, why. Each way runs in processes of its own, since an allocator is a process's.
Ends with status 3, saying why, when there is no PyTorch for the device.
"""
# SPDX-License-Identifier: Apache-2.0
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time


# ---- jobs: real networks on data made from a seed, so that each way computes the same


def make_job(name, device, quick):
    """Network, input and labels on the device."""
    import torch
    from torch import nn

    torch.manual_seed(sum(map(ord, name)))
    width, batch = (8, 8) if quick else (128, 64)

    class Block(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
                                      nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))

        def forward(self, x):
            return torch.relu(x + self.body(x))

    if name == "transformer":
        layer = nn.TransformerEncoderLayer(4 * width, 4, 8 * width, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.TransformerEncoder(layer, 2 if quick else 6, enable_nested_tensor=False), nn.Flatten(), nn.LazyLinear(10))
        x = torch.rand(batch, 16 if quick else 128, 4 * width)
    else:
        model = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *(Block(width) for _ in range(2 if quick else 8)), nn.AdaptiveAvgPool2d(4),
                              nn.Flatten(), nn.Linear(16 * width, 10))
        x = torch.rand(batch, 3, 16 if quick else 32, 16 if quick else 32)
    y = torch.randint(10, (batch,))
    model(x)  # gives lazy layers their shapes
    model, x, y = model.to(device), x.to(device), y.to(device)
    return model, x, y


def make_step(name, device, quick, mode):
    import torch

    model, x, y = make_job(name, device, quick)
    called = torch.compile(model) if mode == "compiled" else model
    if name == "inference":
        model.eval()

        def step():
            with torch.inference_mode():
                return called(x).sum().item()
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def step():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(called(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()
    return step


def settle(options):
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    if options.device == "host":
        torch.set_num_threads(1)
    return torch.device("cuda" if options.device == "cuda" else "cpu")


def timed(options, steps, run_round):
    """Runs rounds until the last is timed; the first two compile and learn."""
    for _ in range(3):
        run_round(1)
    begin = time.perf_counter()
    results = run_round(steps)
    return {"seconds": time.perf_counter() - begin, "results": results}


def play_turns(options):
    """PyTorch alone: one process, one step of each job after the other."""
    device = settle(options)
    steps = {name: make_step(name, device, options.quick, options.mode) for name in options.jobs}

    def round_of(count):
        results = {name: [] for name in steps}
        for _ in range(count):
            for name, step in steps.items():
                results[name].append(step())
        return results

    return timed(options, options.steps, round_of)


def play_gpushare(options):
    """A session and a thread for each job."""
    device = settle(options)
    import gpushare.torch as gt

    sessions = {name: gt.session(name, device=options.device) for name in options.jobs}
    steps, names = {}, list(sessions)
    results = {}
    rounds = threading.Barrier(len(names) + 1)
    count = [1]
    errors = []

    def job(name):
        try:
            with sessions[name] as session:
                while len(steps) < names.index(name):  # PyTorch's random numbers are the process's: one makes its network after the other
                    time.sleep(0.001)
                steps[name] = make_step(name, device, options.quick, options.mode)
                rounds.wait()
                while True:
                    rounds.wait()
                    if count[0] == 0:
                        return
                    results[name] = []
                    for _ in range(count[0]):
                        with session.iteration():
                            results[name].append(steps[name]())
                    rounds.wait()
        except BaseException as error:
            errors.append(error)
            rounds.abort()

    threads = [threading.Thread(target=job, args=(name,)) for name in names]
    for thread in threads:
        thread.start()

    def round_of(number):
        count[0] = number
        rounds.wait()
        rounds.wait()
        return dict(results)

    try:
        rounds.wait()
        found = timed(options, options.steps, round_of)
        count[0] = 0
        rounds.wait()
    except threading.BrokenBarrierError:
        raise errors[0] from None
    for thread in threads:
        thread.join()
    return found


def as_process(options, way, jobs, **changed):
    """Starts a way in a process; communicate() gives what it found."""
    arguments = [sys.executable, os.path.abspath(__file__), "--way", way, "--device", options.device, "--jobs", ",".join(jobs)]
    for name, value in {"mode": "eager", "steps": options.steps, **changed}.items():
        arguments += ["--" + name.replace("_", "-"), str(value)]
    if options.quick:
        arguments.append("--quick")
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def found_by(process):
    out, err = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(err.strip().splitlines()[-1] if err.strip() else f"status {process.returncode}")
    return json.loads(out.strip().splitlines()[-1])


def row(what, by, unit, samples):
    print("row", what, by, unit, " ".join(f"{sample:.6g}" for sample in samples), sep="\t", flush=True)


def skip(what, why):
    print("skip", what, str(why).replace("\t", " ").replace("\n", " "), sep="\t", flush=True)


def measure_training(options):
    jobs = ["resnet", "transformer", "inference"]
    for mode in options.modes.split(","):
        what = f"two trainings and an inference, {mode}, {options.steps} steps each"
        ways = {"gpushare, one process": [], "PyTorch in turns, one process": [], "PyTorch, a process each": []}
        results = {}
        try:
            for _ in range(options.repeats):
                for way, role in (("gpushare, one process", "gpushare"), ("PyTorch in turns, one process", "turns")):
                    found = found_by(as_process(options, role, jobs, mode=mode))
                    ways[way].append(1e3 * found["seconds"])
                    results[role] = found["results"]
                processes = [as_process(options, "turns", [job], mode=mode) for job in jobs]
                ways["PyTorch, a process each"].append(1e3 * max([found_by(process)["seconds"] for process in processes]))
        except RuntimeError as error:
            skip(what, error)
            continue
        for way, samples in ways.items():
            row(what, way, "ms", samples)
        differs = max(abs(a - b) for job in jobs for a, b in zip(results["gpushare"][job], results["turns"][job]))
        row(f"largest difference of losses and results, {mode}", "gpushare", "", [differs])
        overheads = []
        try:
            for _ in range(options.repeats):
                alone = {role: found_by(as_process(options, role, ["resnet"], mode=mode))["seconds"] for role in ("turns", "gpushare")}
                overheads.append(100 * (alone["gpushare"] / alone["turns"] - 1))
        except RuntimeError as error:
            skip(f"one training alone, {mode}", error)
            continue
        row(f"overhead of one training alone, {mode}", "gpushare", "%", overheads)


# ---- loading and switching


def make_stack(layers, size):
    import torch
    from torch import nn

    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(layers))).eval().requires_grad_(False)


def shape_of(options):
    size = 256 if options.quick else 4096
    return max(2, options.load_bytes // (2 * size * size)), size


def write_model(path, options, seed):
    """A safetensors file written layer by layer, so that it may be larger than memory."""
    import torch

    layers, size = shape_of(options)
    step = 2 * size * size
    header = json.dumps({f"{layer}.weight": {"dtype": "BF16", "shape": [size, size], "data_offsets": [layer * step, (layer + 1) * step]}
                         for layer in range(layers)}).encode()
    generator = torch.Generator().manual_seed(seed)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(layers):
            values = (torch.rand(size, size, generator=generator) / size).to(torch.bfloat16)
            file.write(values.view(torch.int16).numpy().tobytes())
    return step * layers


def play_load(options):
    """Seconds from nothing on the device to the first output, files in the page cache."""
    import torch

    device = settle(options)
    layers, size = shape_of(options)
    path = options.files.split(",")[0]
    x = torch.rand(1, size).to(torch.bfloat16)
    seconds = []
    if options.by == "gpushare":
        import gpushare.torch as gt

        with gt.session("load", device=options.device, **capacity(options, 1.5)) as session:
            for _ in range(2):
                model = make_stack(layers, size)
                begin = time.perf_counter()
                gt.load(model, path)
                with torch.inference_mode(), session.iteration():
                    out = model(x.to(device)).float().cpu()
                seconds.append(time.perf_counter() - begin)
                del model
    else:
        from safetensors.torch import load_file

        for _ in range(2):
            model = make_stack(layers, size)
            begin = time.perf_counter()
            model.load_state_dict(load_file(path, device=str(device)), assign=True)
            with torch.inference_mode():
                out = model(x.to(device)).float().cpu()
            seconds.append(time.perf_counter() - begin)
            del model
    return {"seconds": seconds[-1], "results": out.flatten().tolist()[:8]}


def capacity(options, models):
    layers, size = shape_of(options)
    return {"capacity_bytes": int(models * layers * 2 * size * size) + (64 << 20)} if options.device == "host" else {}


def play_switch(options):
    """Seconds from a request for the model that is not there to its output."""
    import torch

    device = settle(options)
    layers, size = shape_of(options)
    paths = options.files.split(",")
    x = torch.rand(1, size).to(torch.bfloat16).to(device)
    models = [make_stack(layers, size) for _ in paths]
    seconds, outputs = [], []
    if options.by == "gpushare":
        import gpushare.torch as gt

        # On the CPU activations are PyTorch's own.
        room = {"memory": int(1.5 * layers * 2 * size * size) + (32 << 20), "ephemeral_bytes": "16M"} if options.device == "cuda" else {
            "memory": int(1.5 * layers * 2 * size * size)}
        with gt.session("switch", device=options.device, **room, **capacity(options, 2)) as session:
            weights = [gt.load(model, path, on_demand=True) for model, path in zip(models, paths)]
            for number in range(2 + options.steps):
                begin = time.perf_counter()
                with torch.inference_mode(), session.iteration():
                    outputs.append(models[number % 2](x).float().cpu())
                seconds.append(time.perf_counter() - begin)
            if sum(of_model.loads for of_model in weights) != len(seconds):
                raise RuntimeError("both models fit: nothing was switched")
    else:  # weights in pinned memory, copied whole
        from safetensors.torch import load_file

        states = [load_file(path) for path in paths]
        if device.type == "cuda":
            states = [{name: tensor.pin_memory() for name, tensor in state.items()} for state in states]
        for number in range(2 + options.steps):
            begin = time.perf_counter()
            models[1 - number % 2].load_state_dict(make_stack(layers, size).state_dict(), assign=True)
            state = {name: tensor.to(device, non_blocking=True, copy=True) for name, tensor in states[number % 2].items()}
            models[number % 2].load_state_dict(state, assign=True)
            del state
            with torch.inference_mode():
                outputs.append(models[number % 2](x).float().cpu())
            seconds.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(seconds[2:]), "results": [out.flatten().tolist()[:8] for out in outputs[:2]]}


def measure_models(options):
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPUSHARE_SUITE_FOLDER")) as folder:
        paths = [os.path.join(folder, f"{name}.safetensors") for name in "ab"]
        try:
            nbytes = [write_model(path, options, seed) for seed, path in enumerate(paths)][0]
        except OSError as error:
            skip("loading and switching", error)
            return
        mib = nbytes >> 20
        for way, what, others in (("load", f"load {mib} MiB of safetensors to the first output, file in the page cache", "safetensors"),
                                  ("switch", f"switch between two models of {mib} MiB of which one fits, to the first output",
                                   "PyTorch, copied whole from pinned memory")):
            samples, results = {"gpushare": [], others: []}, {}
            try:
                for _ in range(options.repeats):
                    for by in samples:
                        found = found_by(as_process(options, way, ["-"], by="gpushare" if by == "gpushare" else "other", files=",".join(paths),
                                                    load_bytes=options.load_bytes, steps=4))
                        samples[by].append(1e3 * found["seconds"])
                        results[by] = found["results"]
            except RuntimeError as error:
                skip(what, error)
                continue
            if results["gpushare"] != results[others]:
                skip(what, "the outputs differ")
                continue
            for by, figures in samples.items():
                row(what, by, "ms", figures)
                if way == "load":  # as other loaders tell their speed
                    row(what + ", speed", by, "GB/s", [nbytes / 1e6 / figure for figure in figures])


WAYS = {"turns": play_turns, "gpushare": play_gpushare, "load": play_load, "switch": play_switch}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--load-bytes", type=int, default=13_476_839_424)  # 7B parameters of two bytes
    for hidden in ("--way", "--jobs", "--files", "--by"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="eager", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        options.jobs = options.jobs.split(",")
        print(json.dumps(WAYS[options.way](options)))
        return 0
    if options.quick:
        options.repeats, options.steps, options.load_bytes = 1, 5, 16 << 20
    try:
        import gpushare.torch  # noqa: F401
        import safetensors  # noqa: F401
        import torch
    except Exception as error:
        print(f"no PyTorch with gpushare and safetensors: {error}")
        return 3
    if options.device == "cuda" and not torch.cuda.is_available():
        print("PyTorch sees no GPU")
        return 3
    measure_training(options)
    measure_models(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
