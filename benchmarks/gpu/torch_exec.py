"""Measurement 10 of the GPU suite: unmodified PyTorch trainings (torch_train.py) under `gpushare exec`. gpu_suite runs it with GPUSHARE_PYTHON.

    torch_exec.py [--device cuda|host] [--quick] [--sections alone,shares,oversubscribed] [--repeats N] [--seconds S]

alone: a training without gpushare, under `gpushare exec`, and that with a daemon. shares: two trainings side by side, under a daemon with limits and
weights, beside plain time slicing and CUDA MPS where there is nvidia-cuda-mps-control: its thread percentages, and for 30:70 its weighted time slices
and static SM partitions where the driver has them (r615 on). oversubscribed: a limit that leaves two thirds of a training's
memory on the device; two trainings that together are 1.5 times what the daemon promises. Each round starts all programs anew and then lets one way
after the other train, in another order each round; the others wait meanwhile. Prints a line for each row, separated by tabs: "row", what, by whom,
unit, samples; or "skip", what, why. The tool is GPUSHARE_TOOL, else gpushare in PATH. Ends with status 3, saying why, when there is no PyTorch for
the device, or no tool. With --device host the trainings run on the CPU: that tries this program out and says nothing about a GPU.
"""
# SPDX-License-Identifier: Apache-2.0
import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

OVERHEAD_BAR = 1.0  # percent, of one training alone
SHARE_BAR = 2.0  # percentage points
SPLITS = ((50, 50), (10, 90), (30, 70))
NETWORKS = ("conv", "transformer")
LARGE = "large"  # what cannot be paged (context, small blocks) is little of it
PATIENCE = 180  # seconds beyond what a program was asked for


class Unavailable(RuntimeError):
    """Nothing can be measured here."""


# ---- figures


def rates(runs):
    """Steps per second of each run in the time that all of them trained. A run is a list of [seconds, steps]."""
    begin, end = max(marks[0][0] for marks in runs), min(marks[-1][0] for marks in runs)
    if end <= begin:
        raise RuntimeError("the programs did not train at the same time")

    def steps_at(marks, when):
        for (before, steps), (after, more) in zip(marks, marks[1:]):
            if when <= after:
                return steps + (more - steps) * (when - before) / (after - before)
        return marks[-1][1]

    return [(steps_at(marks, end) - steps_at(marks, begin)) / (end - begin) for marks in runs]


def spread(samples):
    """From the 10th to the 90th percentile."""
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return deciles[-1] - deciles[0]


def verdict(distances, bar, *measured):
    """Whether the median of the distances is at most the bar. Too few samples, or a spread of what was measured above the bar, decide nothing."""
    if len(distances) < 3 or any(spread(samples) > bar for samples in measured):
        return "not decided"
    return "met" if statistics.median(distances) <= bar else "missed"


def row(what, by, unit, samples):
    print("row", what, by, unit, " ".join(f"{sample:.6g}" for sample in samples), sep="\t", flush=True)


def skip(what, why):
    print("skip", what, str(why).replace("\t", " ").replace("\n", " "), sep="\t", flush=True)


# ---- programs, the daemon, MPS


class Program:
    """A training of its own process. `before`: what stands before its command line."""

    def __init__(self, options, network, before=(), environment=None):
        command = [*before, options.python, options.program, "--network", network, "--device", "cuda" if options.device == "cuda" else "cpu"]
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command + ["--small"] * options.quick, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                                        text=True, env={**os.environ, **(environment or {})})

    def begin(self, seconds):
        with contextlib.suppress(BrokenPipeError):  # answer() says how it ended
            print(seconds, file=self.process.stdin, flush=True)

    def answer(self, seconds=0):
        timer = threading.Timer(seconds + PATIENCE, self.process.terminate)
        timer.daemon = True
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if line:
            return json.loads(line)
        status = self.process.wait()
        self.errors.seek(0)
        said = (self.errors.read().strip().splitlines() or [f"a training ended with status {status}"])[-1]
        raise (Unavailable if status == 3 else RuntimeError)(said)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        end(self.process)
        self.process.stdout.close()
        self.errors.close()


def end(process):
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(path, process, what):
    for _ in range(3000):
        if path.exists():
            return
        if process.poll() is not None:
            raise RuntimeError(f"{what} ended with status {process.returncode}")
        time.sleep(0.01)
    raise RuntimeError(f"{what} does not answer")


@contextlib.contextmanager
def daemon(options, policy, *more):
    """A daemon for the device; gives what `gpushare exec` needs to find it."""
    with tempfile.TemporaryDirectory() as folder:
        socket = pathlib.Path(folder) / "socket"
        process = subprocess.Popen([options.tool, "daemon", "--socket", socket, "--device", options.device, "--policy", policy, *more],
                                   stdout=subprocess.DEVNULL)
        try:
            wait_for(socket, process, "gpushare daemon")
            yield ["--socket", str(socket)]
        finally:
            end(process)


@contextlib.contextmanager
def mps(config=None):
    """A control daemon of MPS with pipes of its own; gives the environment of its clients. With the text of a configuration file it is one of MPS v3
    (drivers from r615 on), whose servers and namespaces clients choose by the pipes' folder."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in environment.values():
            os.mkdir(path)
        command, all_of_it = ["nvidia-cuda-mps-control"], {**os.environ, **environment}
        v3 = []
        if config is not None:
            pathlib.Path(folder, "config.toml").write_text(config)
            v3 = ["-p", "3", "-a", f"{folder}/config.toml"]
        process = subprocess.Popen([*command, "-f", *v3], env=all_of_it, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            wait_for(pathlib.Path(folder) / "pipe" / "control", process, command[0])
            yield environment
        finally:
            with contextlib.suppress(subprocess.SubprocessError):
                subprocess.run([*command, "-q"] if v3 else command, env=all_of_it, input="quit\n", text=True, timeout=30, stdout=subprocess.DEVNULL)
            end(process)


def weighted_slices(split):
    """MPS v3's weighted time slices: a server for each of the two, which have the device in turn. Gives the configuration, and the servers' folders."""
    names = ("first", "second")
    return 'schema_version = "1.0"\n' + "".join(f'[servers.{name}]\ntimeslice_pct = "{part}"\n' for name, part in zip(names, split)), names


def partitions(split):
    """MPS v3's static partitions of the SMs: one server, where each of the two has a partition. A Hopper GPU of 132 SMs has 16 chunks of 8."""
    uuid = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
    text = f'schema_version = "1.0"\n[servers.both]\n[[servers.both.devices]]\nuuid = "{uuid}"\n'
    for name, part in zip(("first", "second"), split):
        text += f'[[servers.both.devices.sm_partitions]]\nname = "{name}"\nchunks = {max(1, round(part * 16 / 100))}\n'
    for name in ("first", "second"):
        text += f'[servers.both.namespaces.{name}]\n[[servers.both.namespaces.{name}.devices]]\nuuid = "{uuid}"\nsm_partition = "{name}"\n'
    return text, ("both/first", "both/second")


MPS_V3 = {"CUDA MPS, weighted time slices": weighted_slices, "CUDA MPS, static SM partitions": partitions}


def under_mps_v3(options, stack, by, split):
    """The two programs under such a control daemon; None, with the reason as a line, where the driver has no MPS v3."""
    try:
        config, folders = MPS_V3[by](split)
        environment = stack.enter_context(mps(config))
        pipes = [{**environment, "CUDA_MPS_PIPE_DIRECTORY": f"{environment['CUDA_MPS_PIPE_DIRECTORY']}/{folder}"} for folder in folders]
        missing = [each["CUDA_MPS_PIPE_DIRECTORY"] for each in pipes if not os.path.exists(each["CUDA_MPS_PIPE_DIRECTORY"] + "/control")]
        if missing:
            raise RuntimeError(f"no {missing[0]}/control")
        with Program(options, NETWORKS[0], (), pipes[0]) as program:
            program.answer()
        return [(network, (), each) for network, each in zip(NETWORKS, pipes)]
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        skip(f"two side by side, {split[0]}:{split[1]}, under {by}", error)
        return None


def under_exec(options, memory, *more):
    return [options.tool, "exec", "--fail-closed", "--memory", f"{int(memory)}B", *more, "--"]


def rounds(options, ways):
    """For each way the steps per second of its programs, a list for each round. A way is a list of Program's arguments."""
    found = {way: [] for way in ways}
    for number in range(options.repeats):
        with contextlib.ExitStack() as stack:
            programs = {way: [stack.enter_context(Program(options, *arguments)) for arguments in each] for way, each in ways.items()}
            for program in sum(programs.values(), []):
                program.answer()
            order = list(ways)
            for way in order[number % len(order):] + order[:number % len(order)]:
                for program in programs[way]:
                    program.begin(options.seconds)
                found[way].append(rates([program.answer(options.seconds)["marks"] for program in programs[way]]))
    return found


def find_needs(options):
    """What each training takes of the device, as the shim's books have it: {"used_bytes", with its context, "reserved_bytes", PyTorch's own}."""
    needs = {}
    for network in (*NETWORKS, LARGE):
        with Program(options, network) as program:
            total = program.answer()["total_bytes"]
        with Program(options, network, under_exec(options, total or 1 << 34)) as program:
            needs[network] = program.answer()
            needs[network]["used_bytes"] = max(needs[network]["used_bytes"], 1 << 28)  # on the CPU
    return needs


def roomy(needs, network):
    return 1.25 * needs[network]["used_bytes"]


def against(base, rate):
    """Percent more time for a step."""
    return [100 * (of_base / of_rate - 1) for (of_base,), (of_rate,) in zip(base, rate)]


# ---- sections


def measure_alone(options, needs):
    with daemon(options, "fair") as to_daemon:
        ways = {}
        for network in NETWORKS:
            memory = roomy(needs, network)
            ways[network, "PyTorch"] = [(network,)]
            ways[network, "gpushare exec"] = [(network, under_exec(options, memory))]
            ways[network, "gpushare exec, daemon"] = [(network, under_exec(options, memory, *to_daemon))]
            ways[network, "PyTorch again"] = [(network,)]
        found = rounds(options, ways)
    for network in NETWORKS:
        base = found[network, "PyTorch"]
        row(f"training alone, {network}", "PyTorch", "steps/s", [rate for rate, in base])
        again = against(base, found[network, "PyTorch again"])
        row(f"alone against alone, {network}", "PyTorch again", "%", again)
        for by in ("gpushare exec", "gpushare exec, daemon"):
            overhead = against(base, found[network, by])
            row(f"overhead alone, {network}", by, "%", overhead)
            excess = [a - b for a, b in zip(overhead, again)]
            row(f"excess over alone against alone, {network}, at most {OVERHEAD_BAR:g}%: {verdict(excess, OVERHEAD_BAR, overhead, again)}", by, "%", excess)


def measure_shares(options, needs):
    with contextlib.ExitStack() as stack:
        to_daemon = stack.enter_context(daemon(options, "fair"))
        mps_environment = None
        if shutil.which("nvidia-cuda-mps-control") is None:
            skip("two side by side under CUDA MPS", "no nvidia-cuda-mps-control")
        else:
            try:
                mps_environment = stack.enter_context(mps())
                with Program(options, NETWORKS[0], (), mps_environment) as program:
                    program.answer()
            except RuntimeError as error:
                mps_environment = None
                skip("two side by side under CUDA MPS", error)
        ways = {("alone", network): [(network,)] for network in NETWORKS}
        ways["time slicing", None] = [(network,) for network in NETWORKS]
        if mps_environment:
            ways["CUDA MPS", None] = [(network, (), mps_environment) for network in NETWORKS]
        for split in SPLITS:
            ways["gpushare exec", split] = [(network, under_exec(options, roomy(needs, network), "--weight", str(part), *to_daemon))
                                            for network, part in zip(NETWORKS, split)]
            if mps_environment:
                ways["CUDA MPS", split] = [(network, (), {**mps_environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(part)})
                                           for network, part in zip(NETWORKS, split)]
                for by in MPS_V3 if split == SPLITS[-1] else ():
                    programs = under_mps_v3(options, stack, by, split)
                    if programs:
                        ways[by, split] = programs
        found = rounds(options, ways)
    for (by, split), of_pair in found.items():
        if by == "alone":
            continue
        parts = progress(of_pair, *(found["alone", network] for network in NETWORKS))
        shares = [100 * a / (a + b) for a, b in parts]
        name = "two side by side, " + (f"{split[0]}:{split[1]}" if split else "no weights")
        wanted = ""
        if by == "gpushare exec":
            off = [abs(share - split[0]) for share in shares]
            wanted = f", {split[0]}% within {SHARE_BAR:g} points: {verdict(off, SHARE_BAR, shares)}"
        row(f"{name}, share of the first{wanted}", by, "%", shares)
        row(f"{name}, together of what each makes alone", by, "%", [100 * (a + b) for a, b in parts])


def progress(of_pair, *alone):
    """Of each of two, in each round, the part of what it makes alone."""
    return [(a / first, b / second) for (a, b), (first,), (second,) in zip(of_pair, *alone)]


def measure_oversubscribed(options, needs):
    used, reserved, whole = needs[LARGE]["used_bytes"], needs[LARGE]["reserved_bytes"], roomy(needs, LARGE)
    with daemon(options, "srtf", "--capacity", f"{int(2 * whole / 1.5)}B") as to_daemon:
        found = rounds(options, {"alone": [(LARGE,)],
                                 "soft": [(LARGE, under_exec(options, whole, "--soft", f"{int(used - reserved / 3)}B"))],
                                 "pageable": 2 * [(LARGE, under_exec(options, whole, "--pageable", *to_daemon))]})
    row("training with two thirds of its memory on the device, of what it makes alone", "gpushare exec --soft", "%",
        [100 * rate / alone for (rate,), (alone,) in zip(found["soft"], found["alone"])])
    row("two side by side, together 1.5 times the capacity, together of what each makes alone", "gpushare exec --pageable", "%",
        [100 * (a + b) for a, b in progress(found["pageable"], found["alone"], found["alone"])])


SECTIONS = {"alone": measure_alone, "shares": measure_shares, "oversubscribed": measure_oversubscribed}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--program", default=str(pathlib.Path(__file__).resolve().parent / "torch_train.py"), help=argparse.SUPPRESS)
    parser.add_argument("--python", default=sys.executable, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.repeats = options.repeats or (1 if options.quick else 5)
    options.seconds = options.seconds or (1 if options.quick else 10)
    sections = options.sections.split(",")
    for section in sections:
        if section not in SECTIONS:
            parser.error(f"no section '{section}'; sections are {', '.join(SECTIONS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started
    try:
        options.tool = os.environ.get("GPUSHARE_TOOL") or shutil.which("gpushare")
        if options.tool is None or not os.access(options.tool, os.X_OK):
            raise Unavailable(f"no gpushare to run: {options.tool or 'neither GPUSHARE_TOOL nor PATH has it'}")
        needs = find_needs(options)
    except RuntimeError as error:
        print(error)
        return 3 if isinstance(error, Unavailable) else 1
    for section in sections:
        try:
            SECTIONS[section](options, needs)
        except RuntimeError as error:
            skip(section, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
