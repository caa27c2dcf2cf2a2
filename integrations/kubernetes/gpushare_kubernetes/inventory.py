"""The devices that the node's daemon shares, as `gpushare top --json` tells them."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess


class DaemonUnavailable(Exception):
    """The node's daemon does not answer; the message says why."""


@dataclasses.dataclass(frozen=True)
class Device:
    """`name` is the device's name in Kubernetes (a DNS label), `spec` the daemon's, such as 'cuda:0'."""

    name: str
    spec: str
    capacity_bytes: int

    @property
    def type(self) -> str:
        """'gpu', or 'host' for the devices that are there without one."""
        return "host" if self.spec.partition(":")[0] in ("host", "sim") else "gpu"

    @property
    def index(self) -> str:
        """The device's number for its vendor's tools: '1' of 'cuda:1', else '0'."""
        found = re.match(r"\w+:(\d+)", self.spec)
        return found.group(1) if found else "0"


def devices(tool: str, socket: pathlib.Path, timeout_s: float = 10) -> list[Device]:
    """Asks the daemon at `socket`. Blocks for at most `timeout_s`. Raises DaemonUnavailable."""
    try:
        done = subprocess.run([tool, "top", "--socket", str(socket), "--json", "-"], capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DaemonUnavailable(f"cannot ask the daemon at {socket}: {error}") from error
    if done.returncode != 0:
        raise DaemonUnavailable(done.stderr.strip() or f"{tool} top exited with {done.returncode}")
    found: list[Device] = []
    for device in json.loads(done.stdout)["devices"]:
        name = re.sub(r"[^a-z0-9]+", "-", device["device"].lower()).strip("-")[:58].rstrip("-") or "device"
        if any(other.name == name for other in found):
            name = f"{name}-{len(found)}"
        found.append(Device(name, device["device"], int(device["capacity_bytes"])))
    return found
