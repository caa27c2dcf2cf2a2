"""The daemon of a node: one for all programs of the user, started by `gpushare-ray start` or by the first session.

It outlives the worker that started it (Ray kills a worker's children with the worker), and is stopped by `gpushare-ray stop`.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Optional

import gpushare


def socket_path(mig: Optional[str] = None) -> pathlib.Path:
    """GPUSHARE_SOCKET if set, else one for this user and node; of a MIG instance's own daemon if one is named."""
    named = os.environ.get("GPUSHARE_SOCKET")
    if named:
        return pathlib.Path(named)
    return pathlib.Path(tempfile.gettempdir()) / f"gpushare-ray-{os.getuid()}" / (f"{mig.replace('/', '-')}.sock" if mig else "daemon.sock")


def own_instance(gpu: str) -> Optional[str]:
    """The MIG instance if `gpu` is one that needs a daemon of its own: CUDA shows a process only the first of several. A daemon that GPUSHARE_SOCKET
    names is its owner's business."""
    return gpu if gpu.startswith("MIG-") and not os.environ.get("GPUSHARE_SOCKET") and device_kind() == "cuda" else None


def device_kind() -> str:
    """'cuda' where there is a GPU that works, else 'host'."""
    return "cuda" if any(found["status"] == 0 and found["name"].startswith("cuda") for found in gpushare.devices()) else "host"


def _tool() -> str:
    packaged = pathlib.Path(gpushare.__file__).parent / "bin" / "gpushare"
    found = str(packaged) if packaged.exists() else os.environ.get("GPUSHARE_TOOL") or shutil.which("gpushare")
    if not found:
        raise gpushare.Unavailable("the gpushare tool is neither in the package nor on PATH, and GPUSHARE_TOOL does not name it", 0)
    return found


def status(timeout_s: float = 10, mig: Optional[str] = None) -> Optional[dict[str, Any]]:
    """What `gpushare top --json` tells, or None without a daemon."""
    return _status_at(socket_path(mig), timeout_s)


def _status_at(path: pathlib.Path, timeout_s: float = 10) -> Optional[dict[str, Any]]:
    try:
        done = subprocess.run([_tool(), "top", "--socket", str(path), "--json", "-"], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout) if done.returncode == 0 else None


def visible_gpus(pid: int) -> Optional[list[str]]:
    """CUDA_VISIBLE_DEVICES of the daemon, which gives its cuda:0, cuda:1, ... their order; None: all, by number."""
    try:
        began_with = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's daemon
        return None
    return next((gpu_list(entry.partition(b"=")[2].decode(errors="replace")) for entry in began_with if entry.startswith(b"CUDA_VISIBLE_DEVICES=")), None)


def gpu_list(text: Optional[str]) -> Optional[list[str]]:
    """The entries of CUDA_VISIBLE_DEVICES: numbers, UUIDs, MIG instances. None if it is not set or empty."""
    return [entry.strip() for entry in (text or "").split(",") if entry.strip()] or None


def device_names(device: str, gpus: int, capacity_bytes: int) -> list[str]:
    """The daemon's devices for Ray's GPUs 0 to gpus - 1. Host devices differ in their size, since a device is found by its name."""
    if device == "cuda":
        return [f"cuda:{number}" for number in range(gpus)]
    if device == "host":
        return [f"host?total_bytes={2 * capacity_bytes + (number << 21)}" for number in range(gpus)]
    return [device] * gpus


def ensure_daemon(device: Optional[str] = None, gpus: int = 1, capacity: gpushare.Bytes = 0, lanes: int = 1,
                  timeout_s: float = 60, visible: Optional[list[str]] = None, mig: Optional[str] = None) -> dict[str, Any]:
    """Returns the daemon's status, and starts one if none answers: with a device for each of the node's `gpus`.

    `visible`: the node's GPUs as the CUDA_VISIBLE_DEVICES of `ray start` named them; None: all, by number.
    `mig`: the daemon is that of this MIG instance alone; see own_instance.
    `device`: 'cuda', 'host', or None: cuda where there is one. `capacity`: memory of each device; 0: what is free (1 GiB on the host).
    Several programs may call it at once: one daemon serves the socket, the others find it. Raises gpushare.Unavailable.
    """
    if mig is not None:
        gpus, visible = 1, [mig]
    present = status(mig=mig)
    if present is not None:
        return present
    device = device or device_kind()
    capacity_bytes = gpushare.size_in_bytes(capacity)
    if device == "host" and capacity_bytes == 0:
        capacity_bytes = 1 << 30
    path = socket_path(mig)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [_tool(), "daemon", "--socket", str(path), "--lanes", str(lanes)]
    for name in device_names(device, gpus, capacity_bytes):
        command += ["--device", name]
    if capacity_bytes:
        command += ["--capacity", f"{capacity_bytes}B"]
    log = path.parent / "daemon.log"
    # A process between that ends at once: the daemon is then nobody's child, and Ray does not kill it with the worker.
    between = ("import subprocess, sys; log = open(sys.argv[1], 'ab');"
               "subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)")
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "LD_PRELOAD")}
    if visible:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    subprocess.run([sys.executable, "-c", between, str(log), *command], check=True, env=environment, cwd="/")
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        present = status(mig=mig)
        if present is not None:
            return present
        time.sleep(0.1)
    said = log.read_text(errors="replace").strip().splitlines()[-3:] if log.exists() else []
    raise gpushare.Unavailable(f"the daemon at {path} did not start within {timeout_s:g} s: {' '.join(said) or 'it said nothing'}", 0)


def stop_daemon(timeout_s: float = 30) -> bool:
    """Stops the node's daemon, and those of MIG instances; False if there is none. Sessions keep their memory and wait for another."""
    paths = [socket_path()]
    if not os.environ.get("GPUSHARE_SOCKET"):
        paths += paths[0].parent.glob("MIG-*.sock")
    running = {path: present for path in paths for present in [_status_at(path)] if present is not None}
    for present in running.values():
        os.kill(present["pid"], signal.SIGTERM)
    end = time.monotonic() + timeout_s
    for path, present in running.items():
        while _status_at(path) is not None:
            if time.monotonic() > end:
                raise gpushare.TimedOut(f"the daemon {present['pid']} still runs", 0)
            time.sleep(0.05)
    return bool(running)
