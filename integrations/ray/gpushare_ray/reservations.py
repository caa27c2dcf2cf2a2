"""Reservations over a Ray cluster, after ESCHER: gangs over nodes, nodes apart from each other, locks, soft constraints.

    with gpushare_ray.reserve([{"needs": {"GPU": 1}, "count": 8}], timeout=600) as gang:       # eight GPUs at once, or none
        ray.get([train.options(**gang.options(i)).remote(i) for i in range(len(gang))])

One actor, the table, has Ray's nodes with their resources under Ray's names. It outlives the driver that made it. A grant has a lease which the
process that reserved renews: when that process ends, its grants end too. Reservations count each other. A task that reserved nothing is placed
by Ray as ever, so all tasks that want a reserved resource have to reserve it.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
import uuid
from typing import Any, Optional, Sequence

import gpushare
from gpushare.cluster import ReservationTable

NAME, NAMESPACE = "gpushare-reservations", "gpushare"
LEASE_S = 30.0
_LOOK_S = 1.0  # between looks at Ray's nodes, and at leases that may have ended
LEAST_LEASE_S = 4 * _LOOK_S
_WAIT_S = 5.0  # most that one message to the actor waits


class Table:
    """Runs as a Ray actor; all methods are coroutines of one event loop, and none of them blocks."""

    def __init__(self) -> None:
        self._table = ReservationTable()
        self._nodes: dict[str, dict[str, float]] = {}
        self._looked = -1e9
        self._changed = asyncio.Condition()

    def _look(self) -> None:
        """Takes over what Ray says of its nodes, at most once in _LOOK_S."""
        if time.monotonic() < self._looked + _LOOK_S:
            return
        self._looked = time.monotonic()
        import ray

        nodes = {}
        for node in ray.nodes():
            if node.get("Alive", True):
                nodes[node["NodeID"]] = {name: float(amount) for name, amount in node["Resources"].items() if not name.startswith("node:")}
        for name in self._nodes.keys() - nodes.keys():
            self._table.lose_node(name)
        for name, resources in nodes.items():
            if self._nodes.get(name) != resources:
                self._table.add_node(name, resources)
        self._nodes = nodes

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def submit(self, request: dict[str, Any]) -> int:
        self._look()
        return self._table.submit(request)

    async def wait(self, number: int, timeout_s: float) -> Optional[dict[str, Any]]:
        """The grant, or None if there is none after `timeout_s`. Raises what ReservationTable.wait does."""
        end = time.monotonic() + timeout_s
        while True:
            self._look()
            try:
                return self._table.wait(number, 0)
            except gpushare.TimedOut as error:
                if "own deadline" in str(error):
                    raise
            left = end - time.monotonic()
            if left <= 0:
                return None
            async with self._changed:  # a lease may end without a message, therefore never for long
                try:
                    await asyncio.wait_for(self._changed.wait(), min(left, _LOOK_S))
                except asyncio.TimeoutError:
                    pass

    async def give_back(self, number: int) -> None:
        """Releases a grant, or withdraws a request that waits."""
        for end in (self._table.release, self._table.cancel):
            try:
                end(number)
                break
            except (gpushare.InvalidState, gpushare.NotFound):  # it is not in that state, or has ended
                continue
        await self._tell()

    async def renew(self, number: int) -> None:
        self._table.renew(number)

    async def set(self, owner: str, name: str, capacity: float, where: dict[str, Any]) -> None:
        self._look()
        self._table.set(owner, name, capacity, where)
        await self._tell()

    async def end_owner(self, owner: str) -> None:
        self._table.end_owner(owner)
        await self._tell()

    async def status(self) -> dict[str, Any]:
        self._look()
        return self._table.status()

    async def explain(self, request: dict[str, Any]) -> str:
        self._look()
        return self._table.explain(request)


def table() -> Any:
    """The cluster's table: an actor, made by the first call. `ray.get(table().status.remote())` shows what is reserved."""
    import ray

    actor = ray.remote(num_cpus=0, max_concurrency=1000)(Table)
    return actor.options(name=NAME, namespace=NAMESPACE, get_if_exists=True, lifetime="detached").remote()


class Gang:
    """A grant. `places` has a node and the needs there for each task of the gang, in the order of the parts. Close it, or use `with`."""

    def __init__(self, actor: Any, number: int, grant: dict[str, Any], parts: Sequence[dict[str, Any]], lease_s: float) -> None:
        self._actor, self._number = actor, number
        self.alternative: int = grant["alternative"]
        self.places = [(node, dict(part["needs"])) for part, nodes in zip(parts, grant["nodes"]) for node in nodes]
        self.lost: Optional[BaseException] = None  # why the grant ended before its time: a node was lost, or the lease
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, args=(lease_s,), daemon=True, name="gpushare-lease")
        self._keeper.start()

    def __len__(self) -> int:
        return len(self.places)

    def options(self, index: int) -> dict[str, Any]:
        """What the task or actor `index` of the gang gives to `.options(**...)`: its node, and what it needs there of Ray's resources."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node, needs = self.places[index]
        options: dict[str, Any] = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)}
        options["num_gpus"], options["num_cpus"] = needs.pop("GPU", 0), needs.pop("CPU", 0)
        if "memory" in needs:
            options["memory"] = needs.pop("memory")
        import ray

        known = {name for other in ray.nodes() if other["NodeID"] == node for name in other["Resources"]}
        options["resources"] = {name: amount for name, amount in needs.items() if name in known}  # not those that an owner has set
        return options

    def _keep(self, lease_s: float) -> None:
        import ray

        while not self._over.wait(lease_s / 4):
            try:
                ray.get(self._actor.renew.remote(self._number))
            except Exception as error:
                self.lost = error
                return

    def close(self) -> None:
        """Gives everything back. A second call does nothing."""
        import ray

        if self._over.is_set():
            return
        self._over.set()
        self._keeper.join()
        ray.get(self._actor.give_back.remote(self._number))

    def __enter__(self) -> "Gang":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


_count = itertools.count()
_process = uuid.uuid4().hex[:8]


def reserve(parts: Optional[Sequence[dict[str, Any]]] = None, *, alternatives: Optional[Sequence[Sequence[dict[str, Any]]]] = None,
            owner: Optional[str] = None, timeout: Optional[float] = None, lease: float = LEASE_S) -> Gang:
    """Waits until all `parts` are granted at once, or those of the first of `alternatives` that fits.

    A part is {"needs": {"GPU": 1}, "count"?: tasks with these needs, "apart"?: each on a node of its own, "node"?: its name}. Requests of one
    `owner` (default: one of its own for each call) may wait for each other. Raises TimeoutError (gpushare.TimedOut) with the reason after
    `timeout` seconds, None waits for ever; InvalidState where the wait would never end or the cluster could not hold the gang when empty.
    `lease`: seconds after which a grant ends whose process is gone; 4 or more.
    """
    import ray

    if (parts is None) == (alternatives is None):
        raise ValueError("give parts, or alternatives")
    if lease < LEAST_LEASE_S:  # the table tells who waits only so often
        raise ValueError(f"lease: {lease} s; at least {LEAST_LEASE_S} s")
    choices = [list(parts)] if parts is not None else [list(choice) for choice in alternatives or ()]
    request: dict[str, Any] = {"owner": owner or f"{os.getpid()}-{_process}-{next(_count)}", "lease_ms": 1000 * lease}
    request["alternatives"] = [{"parts": choice} for choice in choices]
    actor = table()
    number = ray.get(actor.submit.remote(request))
    end = None if timeout is None else time.monotonic() + timeout
    try:
        while True:
            left = _WAIT_S if end is None else max(0.0, min(_WAIT_S, end - time.monotonic()))
            grant = ray.get(actor.wait.remote(number, left))
            if grant is not None:
                return Gang(actor, number, grant, choices[grant["alternative"]], lease)
            if end is not None and time.monotonic() >= end:
                raise gpushare.TimedOut(ray.get(actor.explain.remote(request)), gpushare.lib.GPUSHARE_TIMED_OUT)
    except BaseException:
        ray.get(actor.give_back.remote(number))
        raise
