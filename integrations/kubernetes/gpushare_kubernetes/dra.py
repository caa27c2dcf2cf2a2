"""Dynamic resource allocation: ResourceSlices that offer each device's memory and share, and the kubelet's plugin service v1.

Both are consumable capacities: the scheduler gives a claim a part of each, rounded up to the step, and never promises more than there
is. It writes the parts into the claim's allocation (`consumedCapacity`), from where the limits of the claim's containers come.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import pathlib
import re
import threading
from typing import Any, Callable, Optional

from . import messages
from .api import Api, ApiError
from .inventory import DaemonUnavailable, Device
from .kubelet import SocketServer, method
from .quantity import parse_quantity
from .shares import NoLibrary, PreparedClaim, Share, ShareStore

_log = logging.getLogger("gpushare.kubernetes")

WHOLE_SHARE = 100  # a device has 100 shares, each 1/100 of its weight


class NoConsumableCapacity(Exception):
    """The cluster does not know consumable capacity."""


def slice_of(node: str, driver: str, devices: list[Device], generation: int, memory_step: int, share_step: int,
             default_share: int) -> dict[str, Any]:
    """The node's ResourceSlice. A request that says nothing gets all memory of a device and `default_share` of its time."""
    entries = []
    for device in devices:
        memory = device.capacity_bytes // memory_step * memory_step
        if memory == 0:
            _log.warning("device %s has less memory than one step of %d bytes; it is not offered", device.spec, memory_step)
            continue
        entries.append({
            "name": device.name,
            "allowMultipleAllocations": True,
            "attributes": attributes_of(device),
            "capacity": {
                "memory": {"value": str(memory), "requestPolicy": {"default": str(memory), "validRange": {
                    "min": str(memory_step), "max": str(memory), "step": str(memory_step)}}},
                "share": {"value": str(WHOLE_SHARE), "requestPolicy": {"default": str(default_share), "validRange": {
                    "min": str(share_step), "max": str(WHOLE_SHARE), "step": str(share_step)}}},
            },
        })
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{driver}"},
        "spec": {"driver": driver, "nodeName": node, "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
                 "devices": entries},
    }


def attributes_of(device: Device) -> dict[str, Any]:
    """What selectors of claims and classes can name. `type` is gpu also for an instance of MIG, which has `migProfile` besides."""
    result: dict[str, Any] = {"device": {"string": device.spec[:64]}, "type": {"string": device.type}}
    for name, value in (("uuid", device.uuid), ("parentUUID", device.parent_uuid), ("migProfile", device.mig_profile), ("productName", device.product)):
        if value:
            result[name] = {"string": value[:64]}
    # A semantic version, which has three numbers without zeros before them: 535.104.05 is 535.104.5.
    numbers = re.findall(r"\d+", device.driver_version)[:3]
    if numbers:
        result["driverVersion"] = {"version": ".".join(str(int(number)) for number in (*numbers, 0, 0)[:3])}
    if device.total_bytes:
        result["totalMemoryBytes"] = {"int": device.total_bytes}
    return result


def _same_devices(a: Any, b: Any) -> bool:
    """Compares devices of two slices: quantities by value, since the server may write them differently."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_devices(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same_devices, a, b))
    if a == b:
        return True
    try:
        return not isinstance(a, bool) and not isinstance(b, bool) and parse_quantity(a) == parse_quantity(b)
    except ValueError:
        return False


class SlicePublisher:
    """Keeps the node's ResourceSlice as the daemon's devices are."""

    def __init__(self, api: Api, node: str, driver: str, inventory: Callable[[], list[Device]], memory_step: int, share_step: int,
                 default_share: int) -> None:
        self._api = api
        self._node = node
        self._driver = driver
        self._inventory = inventory
        self._steps = (memory_step, share_step, default_share)

    def publish(self) -> None:
        """Creates or replaces the slice where it differs. Without a daemon the slice offers nothing; claims that have their part keep it.

        Raises ApiError, and NoConsumableCapacity after it has taken the slice back.
        """
        try:
            devices = self._inventory()
        except DaemonUnavailable as error:
            _log.warning("%s; the node offers no devices", error)
            devices = []
        name = f"{self._node}-{self._driver}"
        present = self._api.slice(name)
        generation = 1 if present is None else int(present["spec"]["pool"]["generation"])
        wanted = slice_of(self._node, self._driver, devices, generation, *self._steps)
        if present is not None and _same_devices(present["spec"].get("devices", []), wanted["spec"]["devices"]):
            stored = present
        else:
            owner = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": self._api.node_uid(self._node), "controller": True}
            wanted["metadata"]["ownerReferences"] = [owner]  # the slice goes with its node
            if present is None:
                stored = self._api.create_slice(wanted)
            else:
                wanted["spec"]["pool"]["generation"] = generation + 1
                wanted["metadata"]["resourceVersion"] = present["metadata"]["resourceVersion"]
                stored = self._api.replace_slice(wanted)
        if any(not device.get("allowMultipleAllocations") for device in stored["spec"].get("devices", [])):
            self._api.delete_slice(name)  # it would hand out whole devices without limits
            raise NoConsumableCapacity("the API server dropped allowMultipleAllocations: consumable capacity needs Kubernetes 1.36, or 1.34 "
                                       "or 1.35 with the feature gate DRAConsumableCapacity; --api device-plugin works without it")


def base_request(request: str) -> str:
    """The request that a pod names, of one that the scheduler fulfilled by an alternative: gpu of gpu/small (`firstAvailable`)."""
    return request.partition("/")[0]


class ClaimError(Exception):
    """A claim cannot be prepared; the kubelet shows the message in the pod's events and tries again."""


class DraPlugin:
    """The plugin service v1. The kubelet may call from several threads; claims are prepared one at a time."""

    def __init__(self, api: Api, node: str, driver: str, inventory: Callable[[], list[Device]], store: ShareStore,
                 cdi_device: Optional[str] = None) -> None:
        self._api = api
        self._node = node
        self._driver = driver
        self._inventory = inventory
        self._store = store
        self._cdi_device = cdi_device  # of the device itself, such as nvidia.com/gpu={index}
        self._mutex = threading.Lock()
        self._held: set[str] = set()  # claims of which the log says so

    # ---- the two calls ----

    def prepare(self, request: Any, _context: Any) -> Any:
        response = messages.dra.NodePrepareResourcesResponse()
        for claim in request.claims:
            entry = response.claims[claim.uid]
            try:
                with self._mutex:
                    prepared = self._prepare(claim.uid, claim.namespace, claim.name)
                for share in prepared.shares:
                    # A kubelet knows requests, and not the alternatives among which the scheduler chose: gpu, and not gpu/small.
                    entry.devices.add(request_names=[base_request(share.request)], pool_name=share.pool, device_name=share.device,
                                      cdi_device_ids=self._cdi_ids(share))
            except (ClaimError, ApiError, DaemonUnavailable, NoLibrary, OSError, ValueError) as error:
                _log.warning("claim %s/%s (%s) is not prepared: %s", claim.namespace, claim.name, claim.uid, error)
                entry.error = str(error) or type(error).__name__
        return response

    def unprepare(self, request: Any, _context: Any) -> Any:
        response = messages.dra.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            entry = response.claims[claim.uid]
            try:
                with self._mutex:
                    self._note_end(claim.uid)
                    self._store.remove(claim.uid)
            except (OSError, ValueError) as error:
                entry.error = str(error)
        return response

    def services(self) -> dict[str, dict[str, Any]]:
        dra = messages.dra
        return {messages.DRA_SERVICE: {
            "NodePrepareResources": method(self.prepare, dra.NodePrepareResourcesRequest, dra.NodePrepareResourcesResponse),
            "NodeUnprepareResources": method(self.unprepare, dra.NodeUnprepareResourcesRequest, dra.NodeUnprepareResourcesResponse)}}

    def note_held(self) -> None:
        """Logs each claim whose programs have reported since: from then on it is known that their containers load the preload library."""
        with self._mutex:
            for prepared in self._store.claims():
                self._note_held(prepared)

    def _note_held(self, prepared: PreparedClaim) -> None:
        if prepared.uid not in self._held and self._store.reported(prepared):
            self._held.add(prepared.uid)
            _log.info("claim %s/%s is held: its programs have loaded the preload library", prepared.namespace, prepared.name)

    def _note_end(self, uid: str) -> None:
        """A container that was started has run programs; if none has reported, nothing held them."""
        prepared = self._store.read(uid)
        if prepared is not None:
            self._note_held(prepared)
            if uid not in self._held and self._store.reported(prepared) is False:
                _log.warning("claim %s/%s was not held: no program of it, or of a part of it, has loaded the preload library. Its image "
                             "may have another C library than glibc, or clear LD_PRELOAD", prepared.namespace, prepared.name)
        self._held.discard(uid)

    def forget_deleted(self) -> None:
        """Removes claims that the API server no longer has: the kubelet lost them, or the node was set up anew. Raises ApiError."""
        with self._mutex:
            for prepared in list(self._store.claims()):
                claim = self._api.claim(prepared.namespace, prepared.name)
                if claim is None or claim["metadata"]["uid"] != prepared.uid:
                    _log.info("claim %s/%s (%s) is gone", prepared.namespace, prepared.name, prepared.uid)
                    self._store.remove(prepared.uid)

    # ---- how ----

    def _cdi_ids(self, share: Share) -> list[str]:
        return [self._store.device_id(share), *([share.cdi_device] if share.cdi_device else [])]

    def _prepare(self, uid: str, namespace: str, name: str) -> PreparedClaim:
        there = self._store.read(uid)
        self._store.check_library()
        try:
            claim = self._api.claim(namespace, name)
        except ApiError as error:
            if there is None or error.code != 0:
                raise
            return there  # a kubelet that starts again while the API server is away
        if claim is None or claim["metadata"]["uid"] != uid:
            raise ClaimError(f"there is no claim {namespace}/{name} with uid {uid}")
        devices = {device.name: device for device in self._inventory()}
        wanted = PreparedClaim(uid, namespace, name, tuple(self._share(result, devices) for result in self._results(claim)))
        if wanted != there:
            self._check_room(wanted, devices)
        self._store.make_pages(wanted)
        if wanted != there:
            self._store.write(wanted)
        return wanted

    def _results(self, claim: dict[str, Any]) -> list[dict[str, Any]]:
        """What the scheduler gave the claim of this driver and node."""
        allocation = (claim.get("status") or {}).get("allocation")
        if not allocation:
            raise ClaimError("the claim is not allocated")
        mine = [result for result in allocation.get("devices", {}).get("results", []) if result["driver"] == self._driver]
        other = [result["pool"] for result in mine if result["pool"] != self._node]
        if other:
            raise ClaimError(f"the claim was allocated on pool {other[0]}, this node's is {self._node}")
        if not mine:
            raise ClaimError(f"the claim has no device of driver {self._driver}")
        requests = [base_request(result["request"]) for result in mine]
        if len(set(requests)) != len(requests):
            raise ClaimError("a request of the claim has several devices, but a container has its limits for one: use one request a device, "
                             "and a container for each")
        return mine

    def _share(self, result: dict[str, Any], devices: dict[str, Device]) -> Share:
        consumed = {key.rpartition("/")[2]: value for key, value in (result.get("consumedCapacity") or {}).items()
                    if key.rpartition("/")[0] in ("", self._driver)}
        if not result.get("shareID") or not {"memory", "share"} <= consumed.keys():
            raise ClaimError(f"request {result['request']} was allocated without shareID or consumedCapacity of memory and share: the "
                             "scheduler does not know consumable capacity")
        device = devices.get(result["device"])
        if device is None:
            raise ClaimError(f"the daemon has no device {result['device']}; it has {', '.join(devices) or 'none'}")
        memory, share = parse_quantity(consumed["memory"]), parse_quantity(consumed["share"])
        if memory <= 0 or not 0 < share <= WHOLE_SHARE:
            raise ClaimError(f"request {result['request']} has memory {memory} and share {share}: both must be above 0, the share at most "
                             f"{WHOLE_SHARE}")
        return Share(result["shareID"], result["request"], result["pool"], device.name, device.spec, memory, share / WHOLE_SHARE,
                     str(device.socket or ""), device.cdi_id(self._cdi_device) if self._cdi_device else "")

    def _check_room(self, wanted: PreparedClaim, devices: dict[str, Device]) -> None:
        """The scheduler has seen to it. Should it not have, this node must not promise more than there is."""
        others = [share for claim in self._store.claims() if claim.uid != wanted.uid for share in claim.shares]
        for share in wanted.shares:
            beside = [other for other in (*others, *wanted.shares) if other.device == share.device and other.share_id != share.share_id]
            memory = sum(other.memory_bytes for other in beside)
            weight = sum(other.weight for other in beside)
            capacity = devices[share.device].capacity_bytes
            if memory + share.memory_bytes > capacity or weight + share.weight > 1 + 1e-9:
                raise ClaimError(f"device {share.device} has {capacity} bytes and {WHOLE_SHARE} shares, of which prepared claims have {memory} "
                                 f"and {weight * WHOLE_SHARE:g}: there is no room for {share.memory_bytes} and "
                                 f"{share.weight * WHOLE_SHARE:g}")


class DraSockets:
    """The plugin's socket, and the one by which the kubelet finds it. A kubelet that starts finds both; removed ones are made again."""

    def __init__(self, plugin: DraPlugin, driver: str, kubelet_dir: pathlib.Path) -> None:
        self._driver = driver
        self._plugin = plugin
        self._socket = kubelet_dir / "plugins" / driver / "dra.sock"
        self._registration = kubelet_dir / "plugins_registry" / f"{driver}-reg.sock"
        self._servers: list[SocketServer] = []
        self.registered = threading.Event()
        self.ensure()

    def ensure(self) -> None:
        if self._servers and all(server.there() for server in self._servers):
            return
        self.stop()
        registration = messages.registration
        services = {messages.REGISTRATION_SERVICE: {
            "GetInfo": method(self._info, registration.InfoRequest, registration.PluginInfo),
            "NotifyRegistrationStatus": method(self._told, registration.RegistrationStatus, registration.RegistrationStatusResponse)}}
        self._servers = [SocketServer(self._socket, self._plugin.services()), SocketServer(self._registration, services)]

    def stop(self) -> None:
        for server in reversed(self._servers):  # not to be found any more, then not to serve
            server.stop()
        self._servers = []

    def _info(self, _request: Any, _context: Any) -> Any:
        return messages.registration.PluginInfo(type="DRAPlugin", name=self._driver, endpoint=str(self._socket),
                                                supported_versions=[messages.DRA_VERSION])

    def _told(self, status: Any, _context: Any) -> Any:
        if status.plugin_registered:
            self.registered.set()
            _log.info("registered with the kubelet as %s", self._driver)
        else:
            self.registered.clear()
            _log.error("the kubelet does not take %s: %s", self._driver, status.error)
        return messages.registration.RegistrationStatusResponse()
