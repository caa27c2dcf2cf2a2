"""Models of video-like streams are retrained while they serve: shares of one device by `gpushare.cluster`, accuracies really measured.

The data of each stream drift. A stream's serving session classifies the samples of a frame at every interval and counts those that are
right; a frame that is not answered soon enough counts as wrong. At the start of a window each retraining configuration is really trained for a few epochs
on a tenth of the data, and a learning curve says what it would reach. The scheduler divides the device; its shares become the weights
of the sessions. A retraining that ends replaces the served model at once, and the rest of the window is divided anew.

    python examples/python/retrain.py                  # Ekya's scheduler and ours; windows are as long as this machine needs
    python examples/python/retrain.py --scheduler none,uniform,fixed,thief,ekya,gpushare --windows 4 --json

SPDX-License-Identifier: Apache-2.0"""
import argparse
import copy
import json
import os
import threading
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")     # the device is one lane; numpy's own threads would take other cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy

import gpushare
from gpushare import cluster

CLASSES, FEATURES, HIDDEN, BATCH = 8, 48, 160, 64
SAMPLES, HELD_OUT, FRAME, STEPS = 2000, 400, 512, 4      # a frame's samples; batches in an iteration of training
EPOCHS, LAYERS = (3, 8, 16), ("last", "all")
PROFILE_EPOCHS, PROFILE_DATA = 3, 0.1
QUANTUM, LEAST_WEIGHT = 0.05, 1e-3
LEAST_PATIENCE_S = 1.0     # the machine's other programs may keep a thread waiting so long


class Network:
    """One hidden layer, stochastic gradient descent."""

    def __init__(self, rng):
        self.w1 = rng.normal(0, FEATURES ** -0.5, (FEATURES, HIDDEN))
        self.w2 = rng.normal(0, HIDDEN ** -0.5, (HIDDEN, CLASSES))

    def step(self, x, y, layers, rate=0.05):
        hidden = numpy.tanh(x @ self.w1)
        scores = hidden @ self.w2
        part = numpy.exp(scores - scores.max(axis=1, keepdims=True))
        part /= part.sum(axis=1, keepdims=True)
        part[numpy.arange(len(y)), y] -= 1
        part /= len(y)
        if layers == "all":
            self.w1 -= rate * x.T @ ((part @ self.w2.T) * (1 - hidden * hidden))
        self.w2 -= rate * hidden.T @ part

    def right(self, x, y) -> int:
        return int(numpy.sum(numpy.argmax(numpy.tanh(x @ self.w1) @ self.w2, axis=1) == y))


class Drift:
    """Each class has two clusters, which walk from window to window."""

    def __init__(self, rng):
        self.rng = rng
        self.centres = rng.normal(0, 0.45, (CLASSES, 2, FEATURES))

    def walk(self):
        self.centres += self.rng.normal(0, 0.25, self.centres.shape)
        self.centres *= 0.87

    def draw(self, count):
        y = self.rng.integers(0, CLASSES, count)
        return self.centres[y, self.rng.integers(0, 2, count)] + self.rng.normal(0, 1, (count, FEATURES)), y


def extrapolate(observed: list, epochs: int) -> float:
    """Ekya's curve, accuracy = 1 - 1/(b0 x + b1) - b2: for each b2 of a grid a least-squares line, the best one at `epochs`."""
    x = numpy.arange(1, len(observed) + 1)
    best = (numpy.inf, observed[-1])
    for b2 in numpy.linspace(0, 0.6, 25):
        gap = 1 - b2 - numpy.array(observed)
        if gap.min() <= 1e-3:
            continue
        b0, b1 = numpy.polyfit(x, 1 / gap, 1)
        if b0 < 0:
            b0, b1 = 0.0, float(numpy.mean(1 / gap))
        if (b0 * x + b1).min() <= 0:
            continue
        error = float(numpy.sum((1 - 1 / (b0 * x + b1) - b2 - observed) ** 2))
        if error < best[0]:
            best = (error, 1 - 1 / (b0 * epochs + b1) - b2)
    return float(min(1, max(0, best[1])))


class Retraining:
    """A copy of the model that trains on the device in iterations of a few batches."""

    def __init__(self, stream, layers, epochs, rows):
        self.stream, self.layers, self.epochs, self.rows = stream, layers, epochs, rows
        self.name = f"{layers}, {epochs} epochs"
        self.network = copy.deepcopy(stream.network)
        self.done, self.total = 0, epochs * -(-rows // BATCH)
        self.service_s = 0.0                       # device time of its iterations so far

    def iteration(self):
        """Some batches in one turn on the device."""
        x, y = self.stream.data
        with self.stream.training.iteration():
            started = time.perf_counter()
            for _ in range(min(STEPS, self.total - self.done)):
                begin = self.done * BATCH % (-(-self.rows // BATCH) * BATCH)
                self.network.step(x[begin:min(begin + BATCH, self.rows)], y[begin:min(begin + BATCH, self.rows)], self.layers)
                self.done += 1
            self.service_s += time.perf_counter() - started


class Stream:
    def __init__(self, runtime, seed: int, index: int, interval_s: float):
        self.name, self.interval_s = f"stream{index}", interval_s
        self.drift = Drift(numpy.random.default_rng([seed, index]))
        self.network = Network(self.drift.rng)
        x, y = self.drift.draw(SAMPLES)
        for _ in range(12):
            for begin in range(0, SAMPLES, BATCH):
                self.network.step(x[begin:begin + BATCH], y[begin:begin + BATCH], "all")
        self.serving = runtime.open_session(f"{self.name} serves", weight=1)
        self.training = runtime.open_session(f"{self.name} retrains", weight=1)
        self.frames = self.late = self.right = 0

    def walk(self):
        self.drift.walk()
        self.data, self.held_out = self.drift.draw(SAMPLES), self.drift.draw(HELD_OUT)
        self.fresh = [self.drift.draw(FRAME) for _ in range(16)]       # frames that come, again and again in this window
        self.frames = self.late = self.right = 0

    def accuracy(self, network) -> float:
        return network.right(*self.held_out) / HELD_OUT

    def serve(self, begin: float, frames: int):
        """A frame each interval; one that is not answered within eight intervals, and at least a second, counts as wrong."""
        patience_s = max(LEAST_PATIENCE_S, 8 * self.interval_s)
        for frame in range(frames):
            due = begin + frame * self.interval_s
            if (wait := due - time.perf_counter()) > 0:
                time.sleep(wait)
            self.frames += 1
            if time.perf_counter() < due + patience_s:
                with self.serving.iteration():
                    right = self.network.right(*self.fresh[frame % len(self.fresh)])
                if time.perf_counter() <= due + patience_s:
                    self.right += right
                    continue
            self.late += 1


class Window:
    """One window: profiles, decides, trains, decides again whenever a retraining ends."""

    def __init__(self, streams, scheduler: str, window_s: float, needed: float):
        self.streams, self.scheduler, self.window_s, self.needed = streams, scheduler, window_s, needed
        self.changed = threading.Condition()
        self.jobs = {}                             # by stream: the retraining that has a share
        self.over = False
        self.completed, self.told, self.predicted, self.decisions = {}, {}, 0.0, 0

    def profile(self, stream) -> list:
        """[(configuration, extrapolated accuracy, device seconds)]"""
        found = []
        for layers in LAYERS:
            trial, observed = Retraining(stream, layers, PROFILE_EPOCHS, int(SAMPLES * PROFILE_DATA)), []
            for epoch in range(1, PROFILE_EPOCHS + 1):
                while trial.done < trial.total * epoch // PROFILE_EPOCHS:
                    trial.iteration()
                observed.append(stream.accuracy(trial.network))
            for epochs in EPOCHS:
                job = Retraining(stream, layers, epochs, SAMPLES)
                found.append((job, extrapolate(observed, epochs), trial.service_s / trial.total * job.total))
        return found

    def decide(self, told: dict, left_s: float):
        """Asks the scheduler, sets the weights, and starts, continues or pauses retrainings."""
        document = {"version": 1, "kind": "retraining", "devices": 1, "window_s": left_s, "quantum": QUANTUM, "accuracy_floor": 0, "streams": []}
        for stream in self.streams:
            configurations = [{"name": job.name, "accuracy": 100 * reaches, "gpu_seconds": max(1e-6, seconds * (1 - job.done / job.total))}
                              for job, reaches, seconds in told[stream]]
            document["streams"].append({"name": stream.name, "accuracy": 100 * stream.accuracy(stream.network), "gpus_needed": self.needed,
                                        "windows": [{"configurations": configurations}]})
        result = cluster.plan(document, self.scheduler)["results"][0]
        window = result["windows"][0]
        self.decisions += 1
        with self.changed:
            for stream in self.streams:
                share = window["shares"][stream.name]
                chosen = [job for job, _, _ in told[stream] if job.name == share["configuration"]]
                self.jobs[stream] = chosen[0] if chosen else None
                stream.serving.set_weight(max(LEAST_WEIGHT, share["inference"]))
                stream.training.set_weight(max(LEAST_WEIGHT, share["retraining"]))
            self.changed.notify_all()
        return window["accuracy"]

    def train(self, stream):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.over or self.jobs.get(stream))
                if self.over:
                    return
                job = self.jobs[stream]
            job.iteration()
            if job.done == job.total:
                with self.changed:
                    stream.network = job.network       # served from the next frame on
                    self.completed[stream] = job.name
                    self.jobs[stream] = None
                    self.changed.notify_all()

    def run(self) -> dict:
        begin = time.perf_counter()
        end = begin + self.window_s
        for stream in self.streams:
            stream.serving.set_weight(1)
            stream.training.set_weight(1)
        frames = max(1, int(self.window_s / self.streams[0].interval_s))
        threads = [threading.Thread(target=stream.serve, args=(begin, frames)) for stream in self.streams]
        threads += [threading.Thread(target=self.train, args=(stream,)) for stream in self.streams]
        for thread in threads:
            thread.start()
        try:
            retrains = self.scheduler != "none"
            told = {stream: self.profile(stream) if retrains else [] for stream in self.streams}
            profiled_s = time.perf_counter() - begin
            seen = 0
            if retrains and (left := end - time.perf_counter()) > 0:
                self.predicted = self.decide(told, left)
            while (left := end - time.perf_counter()) > 0:
                with self.changed:
                    self.changed.wait_for(lambda: len(self.completed) > seen, timeout=left)
                    done, seen = dict(self.completed), len(self.completed)
                left = end - time.perf_counter()
                if not done or left < 0.05 or seen == len(self.streams):
                    continue
                for stream in self.streams:                # a retraining that has begun is continued or paused, never another one
                    begun = [entry for entry in told[stream] if entry[0].done > 0]
                    told[stream] = [] if stream in done else begun or told[stream]
                if self.scheduler in ("uniform", "fixed"):  # these divide once; the share goes to its stream's inference
                    for stream in done:
                        stream.serving.set_weight(1 / len(self.streams))
                else:
                    self.decide(told, left)
        finally:
            with self.changed:
                self.over = True
                self.changed.notify_all()
            for thread in threads:
                thread.join()
        return {"accuracy": [100 * stream.right / (stream.frames * FRAME) for stream in self.streams],
                "late": sum(stream.late for stream in self.streams) / sum(stream.frames for stream in self.streams),
                "completed": {stream.name: name for stream, name in self.completed.items()}, "predicted": self.predicted,
                "profiled_s": profiled_s, "decisions": self.decisions}


def play(scheduler: str, streams: int, windows: int, window_s: float, seed: int, load: float) -> dict:
    """`load` is the part of the device that serving all streams needs."""
    with gpushare.Runtime("host", policy="fair", max_lanes=1) as runtime:
        probe = Stream(runtime, seed, streams, 1.0)
        probe.walk()
        frame_s = step_s = 0.0                     # means, so that a busy machine counts as a slower one
        trial = Retraining(probe, "all", EPOCHS[-1], SAMPLES)
        for frame in probe.fresh * 4:
            started = time.perf_counter()
            with probe.serving.iteration():
                probe.network.right(*frame)
            frame_s += (time.perf_counter() - started) / (4 * len(probe.fresh))
            if trial.done < trial.total:
                trial.iteration()
        step_s = trial.service_s / trial.done
        interval_s = max(0.004, frame_s * streams / load)
        window_s = window_s or max(1.0, 2 * streams * step_s * trial.total)
        group = [Stream(runtime, seed, index, interval_s) for index in range(streams)]
        found = []
        for _ in range(windows):
            for stream in group:
                stream.walk()
            found.append(Window(group, scheduler, window_s, max(QUANTUM, frame_s / interval_s)).run())
    means = [sum(window["accuracy"]) / streams for window in found]
    return {"scheduler": scheduler, "mean_accuracy": sum(means) / windows, "windows": found, "frame_ms": 1e3 * frame_s, "interval_ms": 1e3 * interval_s, "window_s": window_s}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheduler", default="ekya,gpushare", help="names, separated by commas: none, uniform, fixed, thief, ekya, gpushare")
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--window-s", type=float, default=0, help="length of a window; 0: twice what the longest retrainings of all streams take")
    parser.add_argument("--load", type=float, default=0.4, help="part of the device that serving needs")
    parser.add_argument("--seed", type=int, default=1, help="of the data")
    parser.add_argument("--json", action="store_true", help="everything that was measured, a line each scheduler")
    options = parser.parse_args()
    for scheduler in options.scheduler.split(","):
        result = play(scheduler, options.streams, options.windows, options.window_s, options.seed, options.load)
        if options.json:
            print(json.dumps(result), flush=True)
            continue
        windows = result["windows"]
        print(f"{scheduler}: {result['mean_accuracy']:.1f} points; by window "
              + ", ".join(f"{sum(window['accuracy']) / options.streams:.1f}" for window in windows)
              + f"; {sum(len(window['completed']) for window in windows)} of {options.streams * options.windows} retrained, "
              + f"{max(window['late'] for window in windows):.1%} of the frames late at most", flush=True)


if __name__ == "__main__":
    main()
