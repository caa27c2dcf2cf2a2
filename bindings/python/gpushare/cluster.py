"""Decisions above one device, by libgpushare_cluster. Documents are dictionaries; docs/cli-cluster.md says what their fields mean.

    from gpushare import cluster
    cluster.plan({"version": 1, "kind": "trials", "devices": 2, ...}, "gpushare")["results"][0]["shares"]

`plan` decides once, `run` plays through on virtual time, also under a `Scheduler` of your own. `ReservationTable` gives named resources to
groups of requests.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import json
import math
import os
import pathlib
import time
from typing import Any, Iterable, Optional, Sequence

from ._native import Closable, Error, NotFound, TimedOut, error_of, ffi, find_library, lib, nanoseconds, struct, text

__all__ = ["Actions", "ReservationTable", "Scheduler", "kernels_of", "plan", "run", "schema"]

_ABI_VERSION = 1
_SLICE_S = 0.1  # a wait in the library cannot be interrupted: Ctrl-C is answered within so long


@functools.lru_cache(maxsize=None)
def _library() -> Any:
    """libgpushare_cluster: GPUSHARE_CLUSTER_LIBRARY if set, else beside the package's own library, else what the system finds."""
    name = "libgpushare_cluster.so.1"
    beside = pathlib.Path(os.environ.get("GPUSHARE_LIBRARY") or "nowhere").parent / name
    if beside.exists() and not os.environ.get("GPUSHARE_CLUSTER_LIBRARY"):
        return ffi.dlopen(str(beside))
    return ffi.dlopen(find_library(name, "GPUSHARE_CLUSTER_LIBRARY"))


def _check(status: int) -> None:
    """Raises the exception for `status` unless it is OK, with the calling thread's error message."""
    if status != 0:
        raise error_of(status, text(_library().gpushare_cluster_last_error_message()))


def _taken(call: Any, *arguments: Any) -> str:
    """The text that a function gives through its last argument."""
    out = ffi.new("char**")
    _check(call(*arguments, out))
    try:
        return text(out[0])
    finally:
        _library().gpushare_cluster_text_free(out[0])


def _bytes(value: Optional[str]) -> Any:
    return ffi.NULL if value is None else value.encode()


def plan(document: dict[str, Any], choices: Optional[str] = None) -> dict[str, Any]:
    """Decides one document. `choices` names schedulers or objectives, separated by commas; None: the kind's default.

    Blocks for as long as the schedulers take. Raises MalformedInput (with the path and what is allowed) and InvalidArgument.
    """
    content = json.dumps(document).encode()
    result: dict[str, Any] = json.loads(_taken(_library().gpushare_cluster_plan, content, len(content), _bytes(choices)))
    return result


_BLOCKS_OF_SM = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}  # by compute capability; others have 32


def kernels_of(trace: dict[str, Any], device: int = 0) -> dict[str, Any]:
    """What torch.profiler saw of the kernels of one batch, for a document of kind services: `multiprocessors` for the document and `kernels` for
    the batch's configuration. `trace` is what export_chrome_trace writes, read as JSON. Raises NotFound if it has no kernel of that device.

        with torch.profiler.profile() as profile:
            model(batch)
            torch.cuda.synchronize()
        profile.export_chrome_trace("batch.json")
        found = cluster.kernels_of(json.loads(pathlib.Path("batch.json").read_text()))
    """
    of_device = [own for own in trace.get("deviceProperties", []) if own.get("id") == device]
    events = [event for event in trace.get("traceEvents", [])
              if str(event.get("cat", "")).lower() == "kernel" and event.get("args", {}).get("device", 0) == device]
    if not of_device or not events:
        raise NotFound(f"the trace has no kernel of device {device}", lib.GPUSHARE_NOT_FOUND)
    own = of_device[0]
    first = min(event["ts"] for event in events)
    kernels = []
    for event in events:
        args = event["args"]
        kernel = {"blocks": math.prod(args["grid"]), "threads": math.prod(args["block"]), "registers": args["registers per thread"],
                  "shared_bytes": args["shared memory"], "time_us": max(event["dur"], 1e-3), "begin_us": event["ts"] - first}
        if (at_once := args.get("occupancy", {}).get("activeBlocksPerMultiprocessor", 0)) > 0:  # the driver's calculator
            kernel["blocks_per_sm"] = at_once
        kernels.append(kernel)
    return {"kernels": kernels, "multiprocessors": {
        "count": own["numSms"], "threads": own["maxThreadsPerMultiprocessor"], "registers": own["regsPerMultiprocessor"],
        "shared_bytes": own["sharedMemPerMultiprocessor"], "blocks": _BLOCKS_OF_SM.get((own["computeMajor"], own["computeMinor"]), 32)}}


def schema() -> dict[str, Any]:
    """The JSON Schema of all documents."""
    result: dict[str, Any] = json.loads(_taken(_library().gpushare_cluster_schema))
    return result


class Actions:
    """What a tick of a Scheduler decides. Valid during that tick alone."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def place(self, job: int, devices: Sequence[int], opportunistic: bool = False) -> None:
        """Starts a job, or goes on with it after a pause, on as many distinct devices as its gang."""
        _check(_library().gpushare_cluster_actions_place(self._handle, job, ffi.new("uint32_t[]", devices), len(devices), opportunistic))

    def pause(self, job: int) -> None:
        """Stops a job and takes its devices; the work done is kept."""
        _check(_library().gpushare_cluster_actions_pause(self._handle, job))

    def resize(self, job: int, opportunistic: bool) -> None:
        """Changes whether a running job gets only what guaranteed jobs leave."""
        _check(_library().gpushare_cluster_actions_resize(self._handle, job, opportunistic))

    def reject(self, job: int, reason: str) -> None:
        """A job that waits is never to run."""
        _check(_library().gpushare_cluster_actions_reject(self._handle, job, reason.encode()))


class Scheduler:
    """A scheduler of your own for documents of kind training: derive from it and give it to `run`.

    Its methods are called from the thread of `run`. Times are seconds of the run; job numbers ascend in the order of arrival. An exception
    ends the scheduler's decisions, and `run` raises it.
    """

    name = "python"

    def begin(self) -> None:
        """Before everything else of a run: forget what was."""

    def device_changed(self, device: int, memory_bytes: int, speed: float, up: bool, now_s: float) -> None:
        """Every device once at the beginning; later when one comes up, or goes (its jobs wait again)."""

    def arrived(self, job: int, info: dict[str, Any], now_s: float) -> None:
        """A job has arrived: name, config, arrival_s, work_s, memory_bytes, guaranteed, priority, gang, demands."""

    def observed(self, job: int, attained_s: float, remaining_s: float, slowdown: float, now_s: float) -> None:
        """A running job: device time it has had, work left, how many times slower than alone it runs."""

    def finished(self, job: int, now_s: float) -> None:
        """A job has ended."""

    def tick(self, now_s: float, actions: Actions) -> Optional[float]:
        """Appends actions. Returns when it wants to be asked again though nothing happens; None: only then."""
        raise NotImplementedError

    def _ops(self, failures: list[BaseException], keep: list[Any]) -> Any:
        """The C table. An exception is kept for `run`, and nothing is asked of the scheduler after it."""

        def guarded(method: Any, otherwise: Any = None) -> Any:
            def call(_: Any, *arguments: Any) -> Any:
                if failures:
                    return otherwise
                try:
                    return method(*arguments)
                except BaseException as error:
                    failures.append(error)
                    return otherwise
            return call

        def arrived(job: int, info: Any, now_s: float) -> None:
            demands = [info.demands[i] for i in range(info.demand_count)]
            self.arrived(job, {"name": text(info.name), "config": text(info.config), "arrival_s": info.arrival_s, "work_s": info.work_s,
                               "memory_bytes": info.memory_bytes, "guaranteed": bool(info.guaranteed), "priority": info.priority,
                               "gang": info.gang, "demands": demands, "weight": info.weight}, now_s)

        def tick(now_s: float, actions: Any) -> float:
            again = self.tick(now_s, Actions(actions))
            return -1.0 if again is None else again

        functions = {
            "begin": ("void(void*)", guarded(self.begin)),
            "device_changed": ("void(void*, uint32_t, uint64_t, double, int32_t, double)",
                               guarded(lambda device, memory, speed, up, now_s: self.device_changed(device, memory, speed, bool(up), now_s))),
            "arrived": ("void(void*, uint32_t, const gpushare_cluster_job_info*, double)", guarded(arrived)),
            "observed": ("void(void*, uint32_t, double, double, double, double)", guarded(self.observed)),
            "finished": ("void(void*, uint32_t, double)", guarded(self.finished)),
            "tick": ("double(void*, double, gpushare_cluster_actions*)", guarded(tick, -1.0)),
        }
        callbacks = {name: ffi.callback(signature, function) for name, (signature, function) in functions.items()}
        title = ffi.new("char[]", self.name.encode())
        keep += [callbacks, title]
        return struct("gpushare_cluster_scheduler_ops", abi_version=_ABI_VERSION, name=title, **callbacks)


def run(document: dict[str, Any], choices: Optional[str] = None, *, seed: int = 1, noise: Optional[float] = None, rounds: int = 0,
        objective: Optional[str] = None, schedulers: Iterable[Scheduler] = ()) -> dict[str, Any]:
    """Plays one document through on virtual time, with noise, once by each scheduler that `choices` names.

    `noise` and `rounds` stand in place of the document's. `objective` is for kind shares: "sw", "ew" or "njc" (default). `schedulers` are
    your own, which `choices` may name. Blocks until all are played. Raises as `plan`, ExceedsCapacity for what is too long to play, and what
    a scheduler of your own raised.
    """
    failures: list[BaseException] = []
    keep: list[Any] = []
    tables = [scheduler._ops(failures, keep) for scheduler in schedulers]
    pointers = ffi.new("const gpushare_cluster_scheduler_ops*[]", tables) if tables else ffi.NULL
    goal = ffi.NULL if objective is None else ffi.new("char[]", objective.encode())
    options = struct("gpushare_cluster_run_options", seed=seed, noise=-1.0 if noise is None else noise, rounds=rounds, objective=goal,
                     schedulers=pointers, scheduler_count=len(tables))
    content = json.dumps(document).encode()
    try:
        result: dict[str, Any] = json.loads(_taken(_library().gpushare_cluster_run, content, len(content), _bytes(choices), options))
    except Error:
        if not failures:
            raise
    if failures:
        raise failures[0]
    return result


class ReservationTable(Closable):
    """Named, counted resources on nodes, taken several at once or not at all. May be used from any thread.

    A request is {"owner", "parts": [{"needs": {"gpu": 4}, "count"?, "apart"?, "node"?}, ...], "deadline_ms"?, "lease_ms"?}, or with
    "alternatives": [{"parts": [...]}, ...] in order of preference. Close it, or use it in a `with` block; nobody may use it then.
    """

    def __init__(self) -> None:
        out = ffi.new("gpushare_cluster_table**")
        _check(_library().gpushare_cluster_table_create(out))
        self._own(out[0], _released)

    def add_node(self, node: str, resources: dict[str, float]) -> None:
        """Adds a node, or changes the capacities of its own resources."""
        _check(_library().gpushare_cluster_table_add_node(self.handle, node.encode(), json.dumps(resources).encode()))

    def lose_node(self, node: str) -> None:
        """Takes a node away. Grants that have a part on it end whole: who waits on them gets DeviceLost."""
        _check(_library().gpushare_cluster_table_lose_node(self.handle, node.encode()))

    def set(self, owner: str, name: str, capacity: float, where: dict[str, Any]) -> None:
        """Sets the capacity of an owner's resource; 0 removes it. `where`: {"node"}, or {"any_of": [{"needs"}, ...], "count"?}."""
        _check(_library().gpushare_cluster_table_set(self.handle, owner.encode(), name.encode(), capacity, json.dumps(where).encode()))

    def end_owner(self, owner: str) -> None:
        """The owner is gone: its grants are released, its waits cancelled, what it set is removed."""
        _check(_library().gpushare_cluster_table_end_owner(self.handle, owner.encode()))

    def status(self) -> dict[str, Any]:
        """{"waiting", "resources": [{"node", "name", "capacity", "used"}]}."""
        result: dict[str, Any] = json.loads(_taken(_library().gpushare_cluster_table_status, self.handle))
        return result

    def explain(self, request: dict[str, Any]) -> str:
        """Why a request would not be granted now: resources that no node has, and resources that are held, with their holders."""
        return _taken(_library().gpushare_cluster_table_explain, self.handle, json.dumps(request).encode())

    def submit(self, request: dict[str, Any]) -> int:
        """Hands a request in; it is granted at once or waits. Its number. Raises InvalidState if the wait would never end."""
        out = ffi.new("uint64_t*")
        _check(_library().gpushare_cluster_reservation_submit(self.handle, json.dumps(request).encode(), out))
        return int(out[0])

    def wait(self, reservation: int, timeout: Optional[float] = None) -> dict[str, Any]:
        """Waits until a request is granted: {"alternative", "nodes"}. Raises TimedOut, Cancelled, DeviceLost, InvalidState (its lease ended)."""
        nanoseconds(timeout)  # refuses what is none
        end = None if timeout is None else time.monotonic() + timeout
        asked = False
        while True:
            left = _SLICE_S if end is None else max(0.0, min(_SLICE_S, end - time.monotonic()))
            try:
                grant: dict[str, Any] = json.loads(_taken(_library().gpushare_cluster_reservation_wait, self.handle, reservation, nanoseconds(left)))
                return grant
            except TimedOut:
                if end is not None and time.monotonic() >= end:
                    raise
            except NotFound as error:
                if not asked:
                    raise
                raise TimedOut("the request's own deadline passed", lib.GPUSHARE_TIMED_OUT) from error
            asked = True

    def cancel(self, reservation: int) -> None:
        """Withdraws a request that waits; who waits on it gets Cancelled."""
        _check(_library().gpushare_cluster_reservation_cancel(self.handle, reservation))

    def release(self, reservation: int) -> None:
        """Gives a grant back."""
        _check(_library().gpushare_cluster_reservation_release(self.handle, reservation))

    def renew(self, reservation: int) -> None:
        """Starts the lease of a grant anew."""
        _check(_library().gpushare_cluster_reservation_renew(self.handle, reservation))


def _released(handle: Any) -> int:
    _library().gpushare_cluster_table_release(handle)
    return 0
