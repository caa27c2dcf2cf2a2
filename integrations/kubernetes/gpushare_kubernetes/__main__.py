"""The node agent's command: `python -m gpushare_kubernetes`, or gpushare-kubernetes-agent. docs/kubernetes.md explains it."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import functools
import logging
import os
import pathlib
import shutil
import signal
import sys
import threading
from typing import Any, Optional

import grpc

from . import inventory
from .api import Api, ApiError
from .device_plugin import DevicePlugin
from .dra import WHOLE_SHARE, DraPlugin, DraSockets, NoConsumableCapacity, SlicePublisher
from .quantity import parse_quantity
from .shares import PRELOAD, NoLibrary, ShareStore, Site

_log = logging.getLogger("gpushare.kubernetes")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="gpushare-kubernetes-agent", description="Offers this node's gpushare daemon to Kubernetes.")
    add = result.add_argument
    add("--node", default=os.environ.get("NODE_NAME"), help="this node's name [NODE_NAME]")
    add("--api", choices=["auto", "dra", "device-plugin"], default="auto", help="auto: dra where the cluster has consumable capacity")
    add("--socket", type=pathlib.Path, default=pathlib.Path("/run/gpushare/daemon.sock"), help="the daemon's, on the host [%(default)s]")
    add("--library-dir", type=pathlib.Path, help=f"folder on the host with {PRELOAD}, which containers then preload [none]")
    add("--share-dir", type=pathlib.Path, default=Site.share_dir, help="folder on the host for the pages of preloaded programs [%(default)s]")
    add("--driver", default="gpushare.dev", help="name of the DRA driver, and the resource's domain [%(default)s]")
    add("--kubelet-dir", type=pathlib.Path, default=pathlib.Path("/var/lib/kubelet"), help="[%(default)s]")
    add("--cdi-dir", type=pathlib.Path, default=pathlib.Path("/var/run/cdi"), help="[%(default)s]")
    add("--cdi-device", help="CDI device of the device itself, such as nvidia.com/gpu={index} or nvidia.com/gpu={uuid} [none]")
    add("--memory-step", type=_quantity, default="64Mi", help="memory is given in multiples of it [%(default)s]")
    add("--share-step", type=int, default=5, help=f"shares are given in multiples of it; a device has {WHOLE_SHARE} [%(default)s]")
    add("--default-share", type=int, default=10, help="share of a claim that names none [%(default)s]")
    add("--units", type=int, default=10, help="device plugin: parts that a device is offered as [%(default)s]")
    add("--tool", default=shutil.which("gpushare") or "gpushare", help="the gpushare tool [from PATH]")
    add("--server", help="URL of the API server [the pod's service account]")
    add("--interval", type=float, default=5, help="seconds between looks at the daemon and the kubelet [%(default)s]")
    add("--verbose", action="store_true")
    return result


def _quantity(text: str) -> int:
    try:
        return parse_quantity(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check(options: argparse.Namespace) -> Optional[str]:
    """What is wrong with the options, or None."""
    if not options.node:
        return "--node is not given and NODE_NAME is not set"
    if options.memory_step <= 0:
        return "--memory-step must be above 0"
    if not 0 < options.share_step <= WHOLE_SHARE or WHOLE_SHARE % options.share_step:
        return f"--share-step must divide {WHOLE_SHARE}"
    if not 0 < options.default_share <= WHOLE_SHARE or options.default_share % options.share_step:
        return f"--default-share must be a multiple of --share-step and at most {WHOLE_SHARE}"
    if not 0 < options.units <= 1000:
        return "--units must be from 1 to 1000"
    return None


class Agent:
    """Serves one of the two APIs until told to stop."""

    def __init__(self, options: argparse.Namespace, api: Api) -> None:
        self._options = options
        self._api = api
        self._inventory = functools.partial(inventory.devices, options.tool, options.socket)
        self._site = Site(options.socket, options.library_dir, options.share_dir)
        self.stop = threading.Event()

    def _share_store(self) -> ShareStore:
        return ShareStore(self._options.cdi_dir, self._options.driver, self._site)

    def _knows_dra(self) -> bool:
        """Whether the cluster has resource.k8s.io/v1. While the API server is away, claims that were prepared before say so. Raises ApiError."""
        try:
            return self._api.has_resource_v1()
        except ApiError as error:
            if error.code != 0 or not self._options.cdi_dir.is_dir() or not any(self._share_store().claims()):
                raise
            _log.warning("%s; serving the claims that are prepared", error)
            return True

    def run(self) -> None:
        """Serves until `stop` is set. Raises ApiError when the API server is away and no claim is prepared: the pod is then started again."""
        try:
            self._site.check_library()
        except NoLibrary as error:
            _log.error("%s; claims are refused until then", error)
        mode = self._options.api
        if mode == "auto":
            mode = "dra" if self._knows_dra() else "device-plugin"
        if mode == "dra":
            try:
                self._run_dra()
                return
            except NoConsumableCapacity as error:
                if self._options.api == "dra":
                    raise
                _log.warning("%s; serving the device plugin API", error)
        self._run_device_plugin()

    def _run_dra(self) -> None:
        options = self._options
        plugin = DraPlugin(self._api, options.node, options.driver, self._inventory, self._share_store(), options.cdi_device)
        publisher = SlicePublisher(self._api, options.node, options.driver, self._inventory, options.memory_step, options.share_step,
                                   options.default_share)
        sockets = DraSockets(plugin, options.driver, options.kubelet_dir)
        cleaned = False
        try:
            while not self.stop.is_set():
                try:
                    sockets.ensure()
                    publisher.publish()
                    plugin.note_held()
                    if not cleaned:
                        plugin.forget_deleted()
                        cleaned = True
                except (ApiError, OSError) as error:
                    _log.warning("%s; trying again in %g s", error, options.interval)
                self.stop.wait(options.interval)
        finally:
            sockets.stop()  # the slice stays: claims that were given parts keep them, and the kubelet removes slices of lost drivers

    def _run_device_plugin(self) -> None:
        options = self._options
        plugin = DevicePlugin(f"{options.driver}/share", options.units, self._inventory, self._site,
                              options.kubelet_dir / "device-plugins", options.cdi_device)
        try:
            while not self.stop.is_set():
                try:
                    plugin.ensure()
                except (grpc.RpcError, OSError) as error:
                    _log.warning("cannot register with the kubelet: %s; trying again in %g s", _why(error), options.interval)
                self.stop.wait(options.interval)
        finally:
            plugin.stop()


def _why(error: Any) -> str:
    return error.details() if hasattr(error, "details") else str(error)


def main(arguments: Optional[list[str]] = None) -> int:
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    wrong = check(options)
    if wrong:
        print(f"gpushare-kubernetes-agent: {wrong}", file=sys.stderr)
        return 2
    try:
        api = Api(options.server) if options.server else Api.in_cluster()
    except KeyError as error:
        print(f"gpushare-kubernetes-agent: {error.args[0]} is not set: run it in a pod, or give --server", file=sys.stderr)
        return 2
    agent = Agent(options, api)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop.set())
    try:
        agent.run()
    except (ApiError, NoConsumableCapacity) as error:
        print(f"gpushare-kubernetes-agent: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
