"""Ray for real, run by scripts/test-ray: see there. Exits with 75 if Ray does not start, with 1 if something does not hold."""
# SPDX-License-Identifier: Apache-2.0
import argparse
import collections
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import ray

import gpushare
import gpushare_ray
from gpushare_ray import daemon

RETRY = 75
NAMED = ["GPU-8f1c2ab9-4a6d-1111-2222-333344445555", "MIG-0d3f9a77-aaaa-bbbb-cccc-ddddeeeeffff"]
FAILURES = []


def check(what, holds, shown=""):
    print(f"{'ok    ' if holds else 'FAILED'} {what} {shown}", flush=True)
    if not holds:
        FAILURES.append(what)


def until(condition, timeout_s=120):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


# ---- two actors with 0.75 and 0.25 of one GPU ----


@ray.remote(num_cpus=0)
class Worker:
    def open(self, name, **options):
        self.session = gpushare_ray.open_session(name, ephemeral_bytes="4M", persistent_bytes="4M", **options)
        return self.session.memory_limit

    def pid(self):
        return os.getpid()

    def exceed(self):
        try:
            self.session.alloc(self.session.memory_limit - (8 << 20))  # an iteration has its 4 MiB beside it
            self.session.alloc("9M")
            return False
        except gpushare.QuotaExceeded:
            return True

    def train(self, seconds):
        """Always has iterations queued, also while a busy machine gives this thread no processor: a share is of the time that all want."""
        end, queued = time.monotonic() + seconds, collections.deque()
        while time.monotonic() < end:
            queued.append(self.session.submit(lambda step: burn(step, 0.004)))
            if len(queued) > 16:
                queued.popleft().result()
        used = self.session.info()["service_ns"]
        for ticket in queued:
            ticket.result()
        return used


def burn(step, seconds):
    """Enqueues device work of a length: multiplications on the lane's stream. The next iteration may queue behind it meanwhile."""
    array = step.alloc(48 * 48 * 4).array((48, 48), "<f4")

    def work():
        end = time.perf_counter() + seconds
        array[:] = 1
        while time.perf_counter() < end:
            np.multiply(array, 0.999, out=array)

    step.launch(work)


def shares(seconds):
    workers = [Worker.options(num_gpus=fraction).remote() for fraction in (0.75, 0.25)]
    limits = ray.get([worker.open.remote(f"actor-{number}") for number, worker in enumerate(workers)])
    check("memory limits are 0.75 and 0.25 of the device", limits == [192 << 20, 64 << 20], str(limits))
    service = ray.get([worker.train.remote(seconds) for worker in workers])
    part = service[0] / sum(service)
    check("two actors of 0.75 and 0.25 get these shares within 2 points", abs(part - 0.75) <= 0.02, f"{part:.4f}")
    check("neither exceeds its memory", all(ray.get([worker.exceed.remote() for worker in workers])))
    return {"part_of_0.75": part, "service_s": [value / 1e9 for value in service]}, workers


def kills(workers):
    names = lambda: [session["name"] for session in (daemon.status() or {"sessions": []})["sessions"]]
    ray.kill(workers[0])
    check("a killed actor leaves nothing", until(lambda: "actor-0" not in names()), str(names()))
    os.kill(ray.get(workers[1].pid.remote()), signal.SIGKILL)
    check("a killed worker leaves nothing", until(lambda: names() == []), str(names()))
    status = daemon.status()
    check("no bytes stay promised", all(device["promised_bytes"] == 0 for device in status["devices"]))
    worker = Worker.options(num_gpus=0.5).remote()
    ray.get(worker.open.remote("survivor"))
    os.kill(status["pid"], signal.SIGKILL)
    start_daemon()
    check("a session finds the daemon that replaced a killed one", until(lambda: names() == ["survivor"]), str(names()))
    ray.get(worker.train.remote(0.2))
    ray.kill(worker)
    check("and leaves nothing there", until(lambda: names() == []))


# ---- what with_session decorates, and parts of all sizes ----


@ray.remote(num_cpus=0, num_gpus=0.25)
@gpushare_ray.with_session()
def function(session, x):
    with session.iteration() as step:
        step.alloc("1M")
    return session.fraction, x


@ray.remote(num_cpus=0, num_gpus=0.25)
@gpushare_ray.with_session()
def generator(session, count):
    for number in range(count):
        with session.iteration():
            yield number


@ray.remote(num_cpus=0, num_gpus=0.5)
class Methods:
    @gpushare_ray.with_session()
    async def coroutine(self, session, x):
        with session.iteration():
            return session.fraction, x

    @gpushare_ray.with_session()
    async def numbers(self, session, count):
        for number in range(count):
            with session.iteration():
                yield number


@ray.remote(num_cpus=0, num_gpus=0.5)
@gpushare_ray.with_session()
class Owner:
    def __init__(self, session, size):
        self.session = session
        self.block = session.alloc(size)

    def step(self):
        with self.session.iteration():
            return self.session.fraction, self.session.info()["persistent_bytes"]


@ray.remote(num_cpus=0)
@gpushare_ray.with_session(name="part")
class Part:
    def __init__(self, session):
        self.session = session

    def fill(self):
        self.block = self.session.alloc(self.session.memory_limit)
        return self.block.nbytes

    def gpu(self):
        return self.session.gpu


def kinds():
    check("a function has a session", ray.get(function.remote(7)) == (0.25, 7))
    check("a generator has a session", [ray.get(each) for each in generator.options(num_returns="streaming").remote(3)] == [0, 1, 2])
    actor = Methods.remote()
    check("a coroutine has a session", ray.get(actor.coroutine.remote(7)) == (0.5, 7))
    check("an asynchronous generator has a session", [ray.get(each) for each in actor.numbers.options(num_returns="streaming").remote(3)] == [0, 1, 2])
    ray.kill(actor)
    owner = Owner.remote("1M")
    check("an actor's class has a session", ray.get(owner.step.remote()) == (0.5, 1 << 20))
    ray.kill(owner)
    capacity = daemon.status()["devices"][0]["capacity_bytes"]
    for count in (3, 4):
        workers = [Part.options(num_gpus=int(10000 / count) / 10000).remote() for _ in range(count)]
        filled = sum(ray.get([worker.fill.remote() for worker in workers]))
        check(f"{count} parts of a device are used in full at the same time", filled > capacity - count * (2 << 20), f"{filled >> 20} of {capacity >> 20} MiB")
        for worker in workers:
            ray.kill(worker)
        until(lambda: not daemon.status()["sessions"])


def named():
    """Under CUDA_VISIBLE_DEVICES with UUIDs, with --gpus 2: each actor on the device behind its GPU."""
    workers = [Part.options(num_gpus=1).remote() for _ in range(2)]
    gpus = ray.get([worker.gpu.remote() for worker in workers])
    check("Ray hands out the names of CUDA_VISIBLE_DEVICES", sorted(gpus) == sorted(NAMED), str(gpus))
    full = ray.get([worker.fill.remote() for worker in workers])
    check("each has a device of its own, whole", full == [256 << 20] * 2, str(full))
    used = sorted(entry["device"] for entry in daemon.status()["sessions"])
    check("the devices are the two of the daemon", used == sorted(device["device"] for device in daemon.status()["devices"]), str(used))
    for worker in workers:
        ray.kill(worker)


def page():
    """The Python of docs/ray.md as it is printed, in a process and a cluster of its own, with a daemon as the page says."""
    text = (pathlib.Path(__file__).resolve().parents[2] / "docs/ray.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    check("the page has three snippets", len(snippets) == 3, str(len(snippets)))
    after = "server = Server.remote()\nassert ray.get(server.__ray_ready__.remote())\nray.kill(server)\n"
    environment = {**os.environ, "GPUSHARE_SOCKET": str(OPTIONS.folder / "page" / "daemon.sock"), "RAY_TMPDIR": str(OPTIONS.folder / "page")}
    (OPTIONS.folder / "page").mkdir()
    by_hand = [sys.executable, "-m", "gpushare_ray"]
    subprocess.run([*by_hand, "start", "--device", "host", "--gpus", "1", "--capacity", "3G"], check=True, env=environment, stdout=subprocess.DEVNULL)
    try:
        done = subprocess.run([sys.executable, "-c", snippets[0] + after + snippets[1] + snippets[2]], env=environment, capture_output=True, text=True, timeout=600,
                              cwd=OPTIONS.folder / "page")
        check("the page's Python runs as it is printed", done.returncode == 0, "" if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-4000:])
    finally:
        subprocess.run([*by_hand, "stop"], env=environment, stdout=subprocess.DEVNULL)


# ---- Tune ----


@gpushare_ray.with_session(persistent_bytes="2M", ephemeral_bytes="2M")
def trainable(session, config):
    """A linear model by gradient descent. An iteration takes `work` milliseconds of the device, and on the host `config["host"]` times as
    long, as loading and reporting do: so one trial alone does not fill a device, however much of it the trial has."""
    from ray import tune

    with open(pathlib.Path(config["folder"]) / "starts", "a", encoding="utf-8") as starts:
        starts.write(tune.get_context().get_trial_id() + "\n")
    random = np.random.default_rng(0)
    points, wanted = random.normal(size=(64, 8)), random.normal(size=8)
    weights = np.zeros(8)
    for _ in range(config["iterations"]):
        with session.iteration() as step:
            burn(step, config["case"]["work"] / 1000)
        session.runtime.synchronize()  # the host needs the result
        time.sleep(config["case"]["work"] / 1000 * config["host"])
        weights -= config["case"]["rate"] * points.T @ (points @ weights - points @ wanted) / 64
        tune.report({"loss": float(((weights - wanted) ** 2).mean()), "weight": session.weight, "service_s": session.info()["service_ns"] / 1e9})


def tuned(run, repeat, folder, options):
    """One experiment: ALGORITHM.whole (one GPU a trial, Ray's default), .packed (1/c of one) or .fluid (the same under FluidScheduler). Each
    sees the same configurations."""
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler

    algorithm, _, way = run.partition(".")
    iterations, fluid = options.iterations, way == "fluid"
    base = {"grid": lambda: None, "asha": lambda: ASHAScheduler(max_t=iterations, grace_period=2, reduction_factor=2),
            "hyperband": lambda: HyperBandScheduler(max_t=iterations, reduction_factor=2)}[algorithm]()
    scheduler = gpushare_ray.FluidScheduler(base, max_packed=options.packed, total_iterations=iterations, interval_s=0.5) if fluid else base
    name = f"{run}-{repeat}"
    place = folder / name
    place.mkdir()
    # One long trial among short ones, as in Fluid's own example: that is where it matters who gets how much.
    cases = [{"rate": 0.02 * (number % 4 + 1), "work": options.work * (options.long if number == 4 else 1)} for number in range(8)]
    started = time.monotonic()
    results = tune.Tuner(
        tune.with_resources(trainable, {"cpu": 0.1, "gpu": 1 if way == "whole" else 1 / options.packed}),
        param_space={"case": tune.grid_search(cases), "iterations": iterations, "host": options.host, "folder": str(place)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler),
        run_config=tune.RunConfig(name=name, storage_path=str(folder / "results"), verbose=0)).fit()
    makespan = time.monotonic() - started
    service = sum(result.metrics.get("service_s", 0) for result in results if result.metrics)
    starts = (place / "starts").read_text().split()
    row = {"run": run, "makespan_s": round(makespan, 1), "utilisation": round(service / (makespan * options.gpus), 3), "trials": len(set(starts)),
           "restarts": len(starts) - len(set(starts)), "errors": results.num_errors, "loss": round(results.get_best_result().metrics["loss"], 4),
           "load": round(os.getloadavg()[0], 1)}
    if fluid:
        row.update(resizes=scheduler.resizes, decisions=scheduler.decisions)
    print(json.dumps(row), flush=True)
    check(f"{name}: no trial failed", results.num_errors == 0)
    if fluid and algorithm != "hyperband":
        check(f"{name}: resizes below one GPU restart nothing", row["restarts"] == 0 and scheduler.resizes > 0, f"{scheduler.resizes} resizes")
    return row


# ---- whole GPUs, through Ray ----


@gpushare_ray.with_session(persistent_bytes="2M", ephemeral_bytes="2M")
def resumable(session, config):
    """Goes on from its checkpoint, as a trainable must that ResourceChangingScheduler restarts."""
    from ray import tune

    # Neither reports before both run: the scheduler gives all GPUs to a trial that is alone.
    begun = pathlib.Path(config["begun"])
    (begun / str(config["case"]["iterations"])).touch()
    while len(list(begun.iterdir())) < 2:
        time.sleep(0.1)
    checkpoint, begin = tune.get_checkpoint(), 0
    if checkpoint:
        with checkpoint.as_directory() as place:
            begin = int(pathlib.Path(place, "done").read_text()) + 1
    for number in range(begin, config["case"]["iterations"]):
        with session.iteration() as step:
            burn(step, config["work"] / 1000)
        session.runtime.synchronize()
        with tempfile.TemporaryDirectory() as place:
            pathlib.Path(place, "done").write_text(str(number))
            tune.report({"loss": 1 / (number + 1), "number": number, "gpus": tune.get_context().get_trial_resources().required_resources["GPU"],
                         "begin": begin}, checkpoint=tune.Checkpoint.from_directory(place))


def whole(folder):
    """Two trials share two GPUs. When the short one has ended, the other gets both of them: one restart, from its checkpoint."""
    from ray import tune
    from ray.tune.schedulers import ResourceChangingScheduler

    fluid = gpushare_ray.FluidScheduler(max_packed=4, max_workers=2, interval_s=0.5, devices=2,
                                        remaining=lambda trial, result, told: trial.config["case"]["iterations"] - (result or {}).get("training_iteration", 0))
    cases = [{"iterations": 4}, {"iterations": 24}]
    (folder / "begun").mkdir()
    results = tune.Tuner(
        tune.with_resources(resumable, {"cpu": 0.1, "gpu": 1 / 4}),
        param_space={"case": tune.grid_search(cases), "work": OPTIONS.work, "begun": str(folder / "begun")},
        tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=False, scheduler=ResourceChangingScheduler(fluid, fluid.whole_gpus())),
        run_config=tune.RunConfig(name="whole", storage_path=str(folder / "results"), verbose=0)).fit()
    told = [[(row["number"], row["gpus"], row["begin"]) for _, row in result.metrics_dataframe.iterrows()] for result in results]
    check("whole GPUs: no trial failed", results.num_errors == 0)
    long = max(told, key=len)
    print(json.dumps({"whole": long}), flush=True)
    check("whole GPUs: every iteration of the long trial once", [number for number, _, _ in long] == list(range(24)))
    check("whole GPUs: a part of one at first, both at the end", long[0][1] == 0.25 and long[-1][1] == 2, f"{long[0][1]}, {long[-1][1]}")
    starts = sorted({begin for _, _, begin in long})
    check("whole GPUs: one restart, from the checkpoint", len(starts) == 2 and starts[1] > 0, str(starts))
    return {"gpus": [gpus for _, gpus, _ in long], "starts": starts}


def start_daemon():
    daemon.ensure_daemon("host", OPTIONS.gpus, "256M", timeout_s=120)


def main():
    if "named" in OPTIONS.parts:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(NAMED)
    if "page" in OPTIONS.parts:
        page()
        if OPTIONS.parts == "page":
            return 1 if FAILURES else 0
    start_daemon()
    try:
        ray.init(num_cpus=4, num_gpus=OPTIONS.gpus, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
                 _temp_dir=str(OPTIONS.folder / "ray"))
    except Exception as error:
        print(f"Ray did not start: {error}", file=sys.stderr)
        return RETRY
    results = {"ray": ray.__version__, "device": "host", "gpus": OPTIONS.gpus}
    try:
        if "shares" in OPTIONS.parts:
            results["shares"], workers = shares(OPTIONS.seconds)
            kills(workers)
        if "kinds" in OPTIONS.parts:
            kinds()
        if "named" in OPTIONS.parts:
            named()
        if "tune" in OPTIONS.parts:
            # Repeats are the outer loop: what else the machine does meets all runs alike.
            results["tune"] = []
            for repeat in range(OPTIONS.repeats):
                for run in OPTIONS.runs.split(","):
                    results["tune"].append(tuned(run, repeat, OPTIONS.folder, OPTIONS))
                    OPTIONS.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        if "whole" in OPTIONS.parts:
            results["whole"] = whole(OPTIONS.folder)
        check("no session is left", until(lambda: not daemon.status()["sessions"]))
    finally:
        ray.shutdown()
    results["failed"] = FAILURES
    OPTIONS.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--parts", default="page,shares,kinds,tune", help="what to run; `whole` and `named` (GPUs with UUIDs) need --gpus 2 [%(default)s]")
    parser.add_argument("--runs", default=",".join(f"{algorithm}.{way}" for algorithm in ("grid", "asha", "hyperband")
                                                   for way in ("whole", "packed", "fluid")), help="[%(default)s]")
    parser.add_argument("--repeats", type=int, default=1, help="of each run [%(default)s]")
    parser.add_argument("--packed", type=int, default=16, help="a trial holds 1/PACKED of a GPU [%(default)s]")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10, help="of the two actors' training [%(default)s]")
    parser.add_argument("--iterations", type=int, default=16, help="of a trial [%(default)s]")
    parser.add_argument("--work", type=float, default=200, help="milliseconds of device time of a short trial's iteration [%(default)s]")
    parser.add_argument("--long", type=float, default=5, help="how many times as long the long trial's iterations are [%(default)s]")
    parser.add_argument("--host", type=float, default=1.5, help="time of an iteration on the host, in device times [%(default)s]")
    OPTIONS = parser.parse_args()
    OPTIONS.output = OPTIONS.output.resolve()
    sys.exit(main())
