"""The device plugin API v1beta1, for clusters without consumable capacity.

A device is offered as `units` equal parts. A container that asks for k of them has k/units of one device's memory (in whole granules)
and weight. The kubelet keeps the books; the plugin has no state to lose.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import pathlib
import threading
import uuid
from typing import Any, Callable, Iterator, Optional

import grpc

from . import messages
from .inventory import DaemonUnavailable, Device
from .kubelet import SocketServer, method
from .shares import NoLibrary, Site, environment, make_page, mounts, page_mounts

_log = logging.getLogger("gpushare.kubernetes")


def _device_of(unit: str) -> str:
    return unit.rpartition(".")[0]


def _memory(capacity: int, units: int, of: int) -> int:
    """The bytes of so many units. Sessions get memory in granules (virtual_granule() in src/memory/layout_virtual.cpp), rounded up, so
    parts that were no whole number of them would be more than the device together, and the last container would miss some of its own."""
    granule = 1 << min(max((capacity // 4096 - 1).bit_length(), 21), 26)
    exact = capacity * units // of
    return exact // granule * granule or exact


class DevicePlugin:
    """Serves one resource, such as gpushare.dev/share, and registers it with every kubelet that appears."""

    def __init__(self, resource: str, units: int, inventory: Callable[[], list[Device]], site: Site, plugin_dir: pathlib.Path,
                 cdi_device: Optional[str] = None) -> None:
        self._resource = resource
        self._units = units
        self._inventory = inventory
        self._site = site
        self._cdi_device = cdi_device
        self._kubelet = plugin_dir / "kubelet.sock"
        self._socket = plugin_dir / (resource.replace("/", "-") + ".sock")
        self._server: Optional[SocketServer] = None
        self._registered_with: Optional[tuple[int, int]] = None
        self._changed = threading.Condition()
        self._devices: list[Device] = []  # as last known, so that their units can be told unhealthy
        self._healthy = False
        self._version = 0
        self._stopped = False

    # ---- what the agent's loop calls ----

    def ensure(self) -> None:
        """Looks at the daemon, and registers anew if the kubelet has started again. Raises grpc.RpcError if the kubelet refuses."""
        try:
            devices, healthy = self._inventory(), True
        except DaemonUnavailable as error:
            if self._healthy:
                _log.warning("%s; the devices are unhealthy", error)
            devices, healthy = self._devices, False
        with self._changed:
            if (devices, healthy) != (self._devices, self._healthy):
                self._devices, self._healthy = devices, healthy
                self._version += 1
                self._changed.notify_all()
        if self._server is None or not self._server.there():  # a kubelet that starts removes all sockets beside its own
            self._close()
            self._server = SocketServer(self._socket, self.services(), threads=16)
            self._registered_with = None
        try:
            stat = self._kubelet.stat()
        except FileNotFoundError:
            self._registered_with = None
            return
        if self._registered_with != (stat.st_ino, stat.st_ctime_ns):
            self._register()
            self._registered_with = (stat.st_ino, stat.st_ctime_ns)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._close()

    def _close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _register(self) -> None:
        plugin = messages.plugin
        with grpc.insecure_channel(f"unix:{self._kubelet}") as channel:
            register = channel.unary_unary(f"/{messages.PLUGIN_REGISTRATION_SERVICE}/Register",
                                           request_serializer=plugin.RegisterRequest.SerializeToString,
                                           response_deserializer=plugin.Empty.FromString)
            register(plugin.RegisterRequest(version="v1beta1", endpoint=self._socket.name, resource_name=self._resource,
                                            options=self._options()), timeout=10)
        _log.info("registered %s with the kubelet", self._resource)

    # ---- the service ----

    def services(self) -> dict[str, dict[str, Any]]:
        plugin = messages.plugin
        return {messages.PLUGIN_SERVICE: {
            "GetDevicePluginOptions": method(lambda request, context: self._options(), plugin.Empty, plugin.DevicePluginOptions),
            "ListAndWatch": method(self._watch, plugin.Empty, plugin.ListAndWatchResponse, stream=True),
            "GetPreferredAllocation": method(self._prefer, plugin.PreferredAllocationRequest, plugin.PreferredAllocationResponse),
            "Allocate": method(self._allocate, plugin.AllocateRequest, plugin.AllocateResponse),
            "PreStartContainer": method(lambda request, context: plugin.PreStartContainerResponse(), plugin.PreStartContainerRequest,
                                        plugin.PreStartContainerResponse)}}

    def _options(self) -> Any:
        return messages.plugin.DevicePluginOptions(get_preferred_allocation_available=True)

    def _watch(self, _request: Any, context: Any) -> Iterator[Any]:
        context.add_callback(self._wake)
        seen = -1
        while context.is_active():
            with self._changed:
                self._changed.wait_for(lambda: self._version != seen or self._stopped or not context.is_active())
                if self._stopped or not context.is_active():
                    return
                seen = self._version
                health = "Healthy" if self._healthy else "Unhealthy"
                response = messages.plugin.ListAndWatchResponse()
                for device in self._devices:
                    for unit in range(self._units):
                        response.devices.add(ID=f"{device.name}.{unit}", health=health)
            yield response

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _prefer(self, request: Any, _context: Any) -> Any:
        """All units of a container on one device: the fullest on which they fit, so that others stay whole."""
        response = messages.plugin.PreferredAllocationResponse()
        for container in request.container_requests:
            by_device: dict[str, list[str]] = {}
            for unit in container.available_deviceIDs:
                by_device.setdefault(_device_of(unit), []).append(unit)
            must = list(container.must_include_deviceIDs)
            fitting = [(len(units), device) for device, units in by_device.items()
                       if len(units) >= container.allocation_size and all(_device_of(unit) == device for unit in must)]
            chosen: list[str] = []
            if fitting:
                units = by_device[min(fitting)[1]]
                chosen = (must + [unit for unit in units if unit not in must])[:container.allocation_size]
            response.container_responses.add(deviceIDs=chosen)  # none: the kubelet chooses, and Allocate says why it cannot be
        return response

    def _allocate(self, request: Any, context: Any) -> Any:
        response = messages.plugin.AllocateResponse()
        try:
            self._site.check_library()
        except NoLibrary as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        with self._changed:
            devices = {device.name: device for device in self._devices}
        for container in request.container_requests:
            names = {_device_of(unit) for unit in container.devices_ids}
            if len(names) != 1:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED,
                              f"{len(container.devices_ids)} units of {self._resource} are free on different devices only "
                              f"({', '.join(sorted(names))}), and a container has its part on one")
            device = devices.get(names.pop())
            if device is None or len(container.devices_ids) > self._units:
                context.abort(grpc.StatusCode.NOT_FOUND, f"the daemon has no device with units {', '.join(container.devices_ids)}")
            part = len(container.devices_ids) / self._units
            memory = _memory(device.capacity_bytes, len(container.devices_ids), self._units)
            page = min(container.devices_ids)  # no other container has it meanwhile
            make_page(self._site, page, anew=True)
            number = uuid.uuid4().hex  # not the number of an earlier container, which may still end
            entry = response.container_responses.add(envs=environment(self._site, device.spec, memory, part, page, number,
                                                                                str(device.socket or "")))
            for host, inside, read_only in mounts(self._site) + page_mounts(self._site, page):
                entry.mounts.add(host_path=host, container_path=inside, read_only=read_only)
            if self._cdi_device:
                entry.cdi_devices.add(name=device.cdi_id(self._cdi_device))
        return response
