"""Gangs over nodes: pods that start together or not at all. `python -m gpushare_kubernetes.gangs`, one for a cluster; docs/kubernetes.md explains it.

A pod of a gang is made with the scheduling gate GATE, the label LABEL (the gang's name in its namespace) and two annotations: SIZE, and NEEDS of its
claim ("share=50,memory=8Gi"). When the whole gang is there and its needs fit on the devices at the same time, each pod gets its node as a
nodeSelector and loses the gate. Until then no pod of the gang holds anything.

Who fits is decided by the reservation table of libgpushare_cluster: gangs in order of arrival, small ones may pass a bounded number of
times. The table is made anew at a start: what pods hold is in their annotation PLACE.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from typing import Any, Optional

import gpushare
from gpushare.cluster import ReservationTable

from .api import Api, ApiError
from .quantity import parse_quantity

GATE = LABEL = "gpushare.dev/gang"
SIZE, NEEDS, PLACE = "gpushare.dev/gang-size", "gpushare.dev/gang-needs", "gpushare.dev/gang-place"
_log = logging.getLogger("gpushare.kubernetes.gangs")
_Key = tuple[str, str]  # namespace, gang


def needs_of(pod: dict[str, Any]) -> dict[str, float]:
    """What the pod's annotation asks for. Raises ValueError with the text."""
    text = pod["metadata"].get("annotations", {}).get(NEEDS, "")
    needs = {}
    for entry in text.split(","):
        name, equals, amount = entry.partition("=")
        try:
            needs[name] = float(parse_quantity(amount))
        except (ValueError, OverflowError):
            equals = ""
        if name not in ("share", "memory") or not equals or needs[name] <= 0:
            raise ValueError(f"{NEEDS}: {text!r} is not like share=50,memory=8Gi")
    return needs


def size_of(pod: dict[str, Any]) -> int:
    text = pod["metadata"].get("annotations", {}).get(SIZE, "")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{SIZE}: {text!r} is not a number of pods")
    return int(text)


def _place(pod: dict[str, Any]) -> Optional[str]:
    return pod["metadata"].get("annotations", {}).get(PLACE)


def _gated(pod: dict[str, Any]) -> bool:
    return any(gate["name"] == GATE for gate in pod["spec"].get("schedulingGates") or ())


def _starts(pod: dict[str, Any]) -> bool:
    """Whether it waits for its gang alone."""
    return _gated(pod) and not _place(pod) and not pod["metadata"].get("deletionTimestamp")


class _Gang:
    """A gang's requests at the table, and the places that it got: "NODE/DEVICE", needs, uid of the pod."""

    def __init__(self) -> None:
        self.waiting: dict[int, list[tuple[dict[str, float], Optional[str]]]] = {}  # by request: needs and, of a pod that has a place, its uid
        self.granted: list[int] = []
        self.places: list[list[Any]] = []
        self.reason = ""


class GangController:
    """Looks and acts once per step(). Use from one thread."""

    def __init__(self, api: Api, driver: str) -> None:
        self._api, self._driver = api, driver
        self._table = ReservationTable()
        self._nodes: dict[str, dict[str, float]] = {}
        self._gangs: dict[_Key, _Gang] = {}
        self._wrong: dict[_Key, str] = {}

    def step(self) -> None:
        """Raises ApiError; the next step goes on where this one stopped."""
        pods = [pod for pod in self._api.pods(LABEL) if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]
        groups: dict[_Key, list[dict[str, Any]]] = {}
        for pod in pods:
            groups.setdefault((pod["metadata"]["namespace"], pod["metadata"]["labels"][LABEL]), []).append(pod)
        self._look_at_devices({pod["metadata"]["uid"] for pod in pods if _place(pod)})
        for key, gang in list(self._gangs.items()):
            asked = sum(len(holders) for holders in gang.waiting.values())
            if key not in groups:
                self._drop(key)
            elif not gang.places and not any(map(_place, groups[key])) and sum(map(_starts, groups[key])) < asked:
                self._drop(key)  # a pod has gone while the whole waited
        for key, group in groups.items():  # what pods hold goes first, then what started gangs lack
            gang = self._gangs.get(key) or _Gang()
            held = {entry[2] for entry in gang.places} | {uid for holders in gang.waiting.values() for _, uid in holders}
            placed = [pod for pod in group if _place(pod) in self._nodes and pod["metadata"]["uid"] not in held]
            if not placed:
                continue
            try:
                self._ask(key, [(needs_of(pod), pod) for pod in placed])
            except (ValueError, gpushare.Error) as error:
                self._warn(key, str(error))
        for key in list(self._gangs):
            if self._granted(key) and self._release(self._gangs[key], groups[key]):
                self._ask_for_rest(key, groups[key])
        for key, group in groups.items():
            if key not in self._gangs and not any(_place(pod) for pod in group):
                self._ask_for_whole(key, group)
        for key in list(self._gangs):
            if self._granted(key):
                self._release(self._gangs[key], groups[key])

    def _look_at_devices(self, ours: set[str]) -> None:
        """Takes over the slices' capacities, less what claims of pods outside of gangs have."""
        nodes: dict[str, dict[str, float]] = {}
        for piece in self._api.slices():
            spec = piece["spec"]
            if spec["driver"] != self._driver or not spec.get("nodeName"):
                continue
            for device in spec.get("devices") or ():
                nodes[f"{spec['nodeName']}/{device['name']}"] = {name: float(parse_quantity(amount["value"]))
                                                                for name, amount in device.get("capacity", {}).items()}
        for claim in self._api.claims():
            status = claim.get("status") or {}
            if any(user.get("uid") in ours for user in status.get("reservedFor") or ()):
                continue
            for result in ((status.get("allocation") or {}).get("devices") or {}).get("results") or ():
                there = nodes.get(f"{result['pool']}/{result['device']}") if result["driver"] == self._driver else None
                for name, amount in (result.get("consumedCapacity") or {}).items():
                    if there and name in there:
                        there[name] = max(0.0, there[name] - parse_quantity(amount))
        for name in self._nodes.keys() - nodes.keys():
            # What is held there stays held: to end a grant would free its other places, where pods run.
            self._table.add_node(name, {})
        for name, resources in nodes.items():
            if self._nodes.get(name) != resources:
                self._table.add_node(name, resources)
        self._nodes = nodes

    def _drop(self, key: _Key) -> None:
        gang = self._gangs.pop(key)
        for number in gang.waiting:
            self._end(self._table.cancel, number)
            self._end(self._table.release, number)  # it was granted since it was last asked
        for number in gang.granted:
            self._end(self._table.release, number)

    @staticmethod
    def _end(call: Any, number: int) -> None:
        try:
            call(number)
        except gpushare.Error:  # it is over already
            pass

    def _ask(self, key: _Key, wanted: list[tuple[dict[str, float], dict[str, Any]]]) -> None:
        """One request for these pods. A pod that has a place asks for just that."""
        parts = [{"needs": needs, **({"node": _place(pod)} if _place(pod) else {})} for needs, pod in wanted]
        number = self._table.submit({"owner": "/".join(key), "parts": parts})
        holders = [(needs, pod["metadata"]["uid"] if _place(pod) else None) for needs, pod in wanted]
        self._gangs.setdefault(key, _Gang()).waiting[number] = holders

    def _ask_for_whole(self, key: _Key, pods: list[dict[str, Any]]) -> None:
        """Hands a gang in that has not started, if all its pods are there."""
        try:
            size = size_of(pods[0])
            whole = [pod for pod in pods if _starts(pod)][:size]
            if len(whole) == size:
                if any("kubernetes.io/hostname" in (pod["spec"].get("nodeSelector") or {}) for pod in whole):
                    raise ValueError("a pod of it chooses its node itself (nodeSelector kubernetes.io/hostname)")
                self._ask(key, [(needs_of(pod), pod) for pod in whole])
                self._wrong.pop(key, None)
        except (ValueError, gpushare.Error) as error:
            self._warn(key, str(error))

    def _ask_for_rest(self, key: _Key, pods: list[dict[str, Any]]) -> None:
        """Pods of a gang that has started and lost places, or that was found half started."""
        gang = self._gangs[key]
        try:
            missing = size_of(pods[0]) - sum(entry[0] in self._nodes for entry in gang.places)
            rest = [pod for pod in pods if _starts(pod)][:max(0, missing)]
            if rest and not gang.waiting:
                self._ask(key, [(needs_of(pod), pod) for pod in rest])
        except (ValueError, gpushare.Error) as error:
            self._warn(key, str(error))

    def _warn(self, key: _Key, reason: str) -> None:
        if self._wrong.get(key) != reason:
            _log.warning("gang %s waits: %s", "/".join(key), reason)
        self._wrong[key] = reason

    def _granted(self, key: _Key) -> bool:
        """Takes over what was granted. False if the gang has nothing yet, or no longer."""
        gang = self._gangs[key]
        try:
            for number in gang.granted:
                self._table.wait(number, 0)
            for number in list(gang.waiting):
                grant = self._table.wait(number, 0)
                for (needs, holder), (place,) in zip(gang.waiting.pop(number), grant["nodes"]):
                    gang.places.append([place, needs, holder])
                gang.granted.append(number)
                _log.info("gang %s has places: %s", "/".join(key), ", ".join(place for (place,) in grant["nodes"]))
        except gpushare.TimedOut as error:
            if str(error) != gang.reason:
                _log.info("gang %s waits: %s", "/".join(key), error)
            gang.reason = str(error)
        except gpushare.Error as error:  # the others of its places are held anew by the next step
            _log.warning("gang %s has lost places: %s", "/".join(key), error)
            self._drop(key)
            return False
        return bool(gang.places)

    def _release(self, gang: _Gang, pods: list[dict[str, Any]]) -> bool:
        """Each gated pod goes to a place that no pod has: the first ones, and those made in place of pods that have gone. True if a pod is left."""
        alive, left = {pod["metadata"]["uid"] for pod in pods}, False
        for pod in pods:
            if not _starts(pod):
                continue
            try:
                needs = needs_of(pod)
            except ValueError:
                continue
            there = [entry for entry in gang.places if entry[0] in self._nodes]
            mine = [entry for entry in there if entry[2] == pod["metadata"]["uid"]]
            free = mine or [entry for entry in there if entry[2] not in alive and entry[1] == needs]
            if not free:
                left = True
                continue
            free[0][2] = pod["metadata"]["uid"]
            gates = [gate for gate in pod["spec"]["schedulingGates"] if gate["name"] != GATE]
            try:
                self._api.patch_pod(pod["metadata"]["namespace"], pod["metadata"]["name"], {
                    "metadata": {"annotations": {PLACE: free[0][0]}, "uid": pod["metadata"]["uid"]},
                    "spec": {"nodeSelector": {"kubernetes.io/hostname": free[0][0].partition("/")[0]}, "schedulingGates": gates}})
            except ApiError as error:
                if error.code not in (400, 403, 422):
                    raise
                self._warn((pod["metadata"]["namespace"], pod["metadata"]["labels"][LABEL]), str(error))
                continue  # the others go on
            pod["metadata"].setdefault("annotations", {})[PLACE] = free[0][0]
        return left


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m gpushare_kubernetes.gangs", description="Starts gangs of pods when all of a gang fit.")
    result.add_argument("--driver", default="gpushare.dev", help="name of the DRA driver [%(default)s]")
    result.add_argument("--server", help="URL of the API server [the pod's service account]")
    result.add_argument("--interval", type=float, default=1, help="seconds between looks at the pods [%(default)s]")
    return result


def main(arguments: Optional[list[str]] = None) -> int:
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        api = Api(options.server) if options.server else Api.in_cluster()
    except KeyError:
        print("error: not in a cluster; give --server", file=sys.stderr)
        return 2
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    controller, away = GangController(api, options.driver), False
    while not stop.is_set():
        try:
            controller.step()
            away = False
        except ApiError as error:
            if not away:
                _log.warning("%s; trying again", error)
            away = True
        stop.wait(options.interval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
