import pathlib
import re
import threading

import pytest

import gpushare
from gpushare import cluster


def trials(*budgets):
    return {"version": 1, "kind": "trials", "devices": 5, "max_packed": 3, "max_workers": 5,
            "groups": [{"arrival_s": 0, "trials": [{"name": f"t{n}", "budget_s": budget} for n, budget in enumerate(budgets)]}]}


def test_a_plan_of_trials():
    fifo, fluid, ours = cluster.plan(trials(4, 4, 12, 30), "fifo,static-fluid,gpushare")["results"]
    assert (fifo["makespan_s"], fluid["makespan_s"], ours["makespan_s"]) == (30, 12, 10)  # Fluid's own example
    assert fluid["shares"]["t3"] == 3


def test_bad_documents_say_what_is_wrong():
    with pytest.raises(gpushare.MalformedInput, match="budget_s"):
        cluster.plan(trials(-1))
    with pytest.raises(gpushare.InvalidArgument, match="nonsense"):
        cluster.plan(trials(1), "nonsense")


def traced(ts, dur, grid, block, registers, shared=0, **more):
    """A kernel as torch.profiler exports it."""
    return {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": ts, "dur": dur,
            "args": {"queued": 0, "device": 0, "stream": 7, "registers per thread": registers, "shared memory": shared, "blocks per SM": grid[0] / 80,
                     "grid": grid, "block": block, "est. achieved occupancy %": 50, **more}}


V100 = {"id": 0, "name": "Tesla V100-SXM2-32GB", "computeMajor": 7, "computeMinor": 0, "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048,
        "regsPerBlock": 65536, "regsPerMultiprocessor": 65536, "warpSize": 32, "sharedMemPerBlock": 49152, "sharedMemPerMultiprocessor": 98304, "numSms": 80}


def test_metrics_from_a_trace_of_torch():
    # 400 blocks of 8 an SM: 50 of 80 SMs for 30 us. Then nothing for 10, then as many as the device holds for 60, of which 2 run on an SM at once.
    trace = {"deviceProperties": [V100], "traceEvents": [
        traced(1000.0, 30.0, [20, 20, 1], [16, 16, 1], 32),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5000},
        traced(1040.0, 60.0, [4000, 1, 1], [256, 1, 1], 40, occupancy={"activeBlocksPerMultiprocessor": 2})]}
    found = cluster.kernels_of(trace)
    service = {"name": "s", "rate_rps": 10, "slo_ms": 100, "configurations": [
        {"batch": 1, "latency_ms": 1, "throughput_rps": 100, "memory_percent": 5, "kernels": found["kernels"]}]}
    result = cluster.plan({"version": 1, "kind": "services", "devices": 1, "multiprocessors": found["multiprocessors"], "services": [service]}, "milp-wsm")["results"][0]
    measured = result["measured"][0]
    assert measured["wsm_percent"] == pytest.approx(0.3 * 62.5 + 60)
    assert measured["wao_percent"] == pytest.approx(0.3 * 62.5 + 0.6 * 25)  # 2 of 8 possible blocks
    assert result["placements"][0]["share_percent"] == pytest.approx(measured["wsm_percent"])
    with pytest.raises(gpushare.NotFound, match="device 1"):
        cluster.kernels_of(trace, device=1)


def test_the_schema():
    assert "trials" in str(cluster.schema())


TRAINING = {"version": 1, "kind": "training", "devices": 2, "jobs": [
    {"name": f"j{i}", "iterations": 10, "iteration_ms": 100 * (3 - i), "persistent_mb": 10, "ephemeral_mb": 10} for i in range(3)]}


def test_a_run_with_noise_and_rounds():
    one = cluster.run(TRAINING, "fifo,srtf", noise=0.2, seed=7)
    assert [row["scheduler"] for row in one["results"]] == ["fifo", "srtf"] and one["seed"] == 7
    assert one["results"][0]["makespan_s"] != cluster.run(TRAINING, "fifo", noise=0)["results"][0]["makespan_s"]
    with pytest.raises(gpushare.InvalidArgument, match="most"):
        cluster.run({"version": 1, "kind": "shares", "capacity": 4, "jobs": [
            {"name": "a", "load": 1, "slo": 0.9, "utility": "linear", "curve": [[0, 0], [2, 1]]}]}, objective="most")


class OneAtATime(cluster.Scheduler):
    name = "mine"

    def begin(self):
        self.waiting, self.running, self.ended = [], None, []

    def arrived(self, job, info, now_s):
        assert info["guaranteed"] and info["gang"] == 1 and info["work_s"] > 0 and len(info["demands"]) == 1
        self.waiting.append(job)

    def finished(self, job, now_s):
        self.running = None
        self.ended.append(job)

    def tick(self, now_s, actions):
        if self.running is None and self.waiting:
            self.running = self.waiting.pop()
            actions.place(self.running, [1])


def test_a_scheduler_of_ones_own():
    mine = OneAtATime()
    (row,) = cluster.run(TRAINING, "mine", schedulers=[mine])["results"]
    assert mine.ended == [2, 1, 0] and row["makespan_s"] == pytest.approx(6.0)

    class Broken(OneAtATime):
        def finished(self, job, now_s):
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        cluster.run(TRAINING, "mine", schedulers=[Broken()])

    class Wrong(OneAtATime):
        def tick(self, now_s, actions):
            actions.pause(0)

    with pytest.raises(gpushare.InvalidArgument, match="does not run"):
        cluster.run(TRAINING, "mine", schedulers=[Wrong()])


def test_reservations():
    with cluster.ReservationTable() as table:
        table.add_node("a", {"gpu": 4})
        table.add_node("b", {"gpu": 4})
        gang = table.submit({"owner": "x", "parts": [{"needs": {"gpu": 1}, "count": 8}]})
        assert sorted(table.wait(gang)["nodes"][0]) == ["a"] * 4 + ["b"] * 4
        later = table.submit({"owner": "y", "parts": [{"needs": {"gpu": 1}}]})
        with pytest.raises(gpushare.TimedOut):
            table.wait(later, 0.01)
        assert "x" in table.explain({"owner": "y", "parts": [{"needs": {"gpu": 1}}]}) and table.status()["waiting"] == 1
        timer = threading.Timer(0.05, lambda: table.release(gang))
        timer.start()
        assert table.wait(later)["alternative"] == 0
        timer.join()
        table.set("y", "cache", 1, {"node": "a"})
        table.end_owner("y")
        everything = {"owner": "z", "parts": [{"needs": {"gpu": 4}, "count": 2}]}
        held = table.submit({**everything, "lease_ms": 60000})
        table.wait(held)
        table.renew(held)
        timely = table.submit({**everything, "owner": "w", "deadline_ms": 150})
        with pytest.raises(gpushare.TimedOut):
            table.wait(timely)
        cancelled = table.submit({**everything, "owner": "w"})
        table.cancel(cancelled)
        with pytest.raises((gpushare.Cancelled, gpushare.NotFound)):
            table.wait(cancelled)
        table.lose_node("a")
        with pytest.raises(gpushare.DeviceLost):
            table.wait(held)
        with pytest.raises(gpushare.MalformedInput, match="parts"):
            table.submit({"owner": "z"})
    with pytest.raises(gpushare.InvalidState):
        table.status()


def test_every_function_is_wrapped():
    source = pathlib.Path(cluster.__file__).read_text(encoding="utf-8")
    exports = pathlib.Path(__file__).resolve().parents[3] / "c_api" / "cluster" / "exports.txt"
    for name in re.findall(r"gpushare_cluster_\w+", exports.read_text(encoding="utf-8")):
        assert name in source, name
