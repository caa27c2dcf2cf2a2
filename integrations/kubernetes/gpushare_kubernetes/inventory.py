"""The devices that the node's daemons share, as `gpushare top --json` tells them."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import re
import subprocess
from typing import Optional

_log = logging.getLogger("gpushare.kubernetes")


class DaemonUnavailable(Exception):
    """The node's daemon does not answer; the message says why."""


@dataclasses.dataclass(frozen=True)
class Device:
    """`name` is the device's name in Kubernetes (a DNS label), `spec` the daemon's, such as 'cuda:0'. Facts of a GPU are empty where NVML tells none."""

    name: str
    spec: str
    capacity_bytes: int
    socket: Optional[pathlib.Path] = None  # of its daemon; None: the node's one
    uuid: str = ""
    parent_uuid: str = ""  # of an instance of MIG: its GPU's
    mig_profile: str = ""  # likewise, such as 1g.10gb
    product: str = ""
    driver_version: str = ""
    total_bytes: int = 0  # of the device; the daemon may promise less

    @property
    def type(self) -> str:
        """'gpu', or 'host' for the devices that are there without one."""
        return "host" if self.spec.partition(":")[0] in ("host", "sim") else "gpu"

    @property
    def index(self) -> str:
        """The device's number for its vendor's tools: '1' of 'cuda:1', else '0'."""
        found = re.match(r"\w+:(\d+)", self.spec)
        return found.group(1) if found else "0"


    def cdi_id(self, pattern: str) -> str:
        """The CDI device of the device itself, from a pattern such as 'nvidia.com/gpu={index}'."""
        return pattern.format(index=self.index, device=self.spec, uuid=self.uuid)


def devices(tool: str, socket: pathlib.Path, timeout_s: float = 10) -> list[Device]:
    """Asks the daemon at `socket`, and those of further instances of MIG, whose sockets are beside it. Blocks for at most `timeout_s` a daemon.

    Raises DaemonUnavailable when the daemon at `socket` does not answer; an instance's that does not is left out.
    """
    found = _devices(tool, socket, timeout_s)
    for other in sorted(socket.parent.glob(f"{socket.stem}-mig-*{socket.suffix}")):
        try:
            found += _devices(tool, other, timeout_s)
        except DaemonUnavailable as error:
            _log.warning("%s; its instance of MIG is not offered", error)
    named: list[Device] = []
    for device in found:
        name = "mig-" + device.uuid[4:12].lower() if device.parent_uuid else device.spec.lower()
        name = re.sub(r"[^a-z0-9]+", "-", name).strip("-")[:58].rstrip("-") or "device"
        if any(other.name == name for other in named):
            name = f"{name}-{len(named)}"
        named.append(dataclasses.replace(device, name=name))
    return named


def _devices(tool: str, socket: pathlib.Path, timeout_s: float) -> list[Device]:
    try:
        done = subprocess.run([tool, "top", "--socket", str(socket), "--json", "-"], capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DaemonUnavailable(f"cannot ask the daemon at {socket}: {error}") from error
    if done.returncode != 0:
        raise DaemonUnavailable(done.stderr.strip() or f"{tool} top exited with {done.returncode}")
    facts = ("uuid", "parent_uuid", "mig_profile", "product", "driver_version", "total_bytes")
    return [Device("", device["device"], int(device["capacity_bytes"]), socket, **{fact: device[fact] for fact in facts if fact in device})
            for device in json.loads(done.stdout)["devices"]]
