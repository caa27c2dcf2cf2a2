"""gpushare-ray: the daemon of a node by hand, and the cluster's reservations. `ray start` the node as ever; the first session would start the
daemon too."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Optional

import gpushare

from . import daemon


def _needs(text: str) -> dict[str, float]:
    """GPU=1,CPU=4"""
    needs = {}
    for entry in text.split(","):
        name, equals, amount = entry.partition("=")
        if not name or not equals or not float(amount) > 0:
            raise ValueError(text)
        needs[name] = float(amount)
    return needs


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _reserve(options: argparse.Namespace) -> int:
    """Runs the command while the gang is held. Its exit code."""
    import ray

    from .reservations import reserve

    ray.init(address="auto", log_to_driver=False)
    part = {"needs": options.needs, "count": options.count, "apart": options.apart}
    with reserve([part], owner=options.owner, timeout=options.timeout) as gang:
        nodes = ",".join(node for node, _ in gang.places)
        code = subprocess.run(options.program, env={**os.environ, "GPUSHARE_NODES": nodes}, check=False).returncode
        if gang.lost is not None:
            print(f"gpushare-ray: the reservation ended before the program: {gang.lost}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _show() -> int:
    import ray

    from .reservations import table

    ray.init(address="auto", log_to_driver=False)
    print(json.dumps(ray.get(table().status.remote()), indent=2))
    return 0


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="gpushare-ray", description="The gpushare daemon of this Ray node, and the reservations of its cluster.")
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start", help="start it unless it runs")
    start.add_argument("--device", choices=["cuda", "host"], help="[cuda where there is one]")
    start.add_argument("--gpus", type=int, default=1, help="the num_gpus that this node declares to Ray [1]")
    start.add_argument("--capacity", default="0", help="memory of each device, such as 8G [what is free]")
    start.add_argument("--lanes", type=int, default=1, help="turns at a time on a device [1]")
    commands.add_parser("status", help="what it does, as JSON")
    commands.add_parser("stop", help="stop it")
    commands.add_parser("reservations", help="what is reserved on the cluster's nodes, as JSON")
    hold = commands.add_parser("reserve", help="run a program while a gang over nodes is held: gpushare-ray reserve --needs GPU=1 --count 8 -- PROGRAM")
    hold.add_argument("--needs", type=_needs, required=True, metavar="NAME=N,...", help="what each task of the gang needs on one node, by Ray's names")
    hold.add_argument("--count", type=_count, default=1, help="tasks [1]")
    hold.add_argument("--apart", action="store_true", help="each on a node of its own")
    hold.add_argument("--owner", help="whose reservation it is [this process]")
    hold.add_argument("--timeout", type=float, help="seconds to wait for it [for ever]")
    hold.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help="its variable GPUSHARE_NODES has a node id for each task")
    options = parser.parse_args(arguments)
    if options.command == "reserve":
        options.program = options.program[1:] if options.program[:1] == ["--"] else options.program
        if not options.program:
            parser.error("reserve: give a program to run")
    try:
        if options.command == "reserve":
            return _reserve(options)
        if options.command == "reservations":
            return _show()
        if options.command == "stop":
            print("stopped" if daemon.stop_daemon() else "no daemon answers")
            return 0
        if options.command == "start":
            present = daemon.ensure_daemon(options.device, options.gpus, options.capacity, options.lanes,
                                           visible=daemon.gpu_list(os.environ.get("CUDA_VISIBLE_DEVICES")))
        else:
            present = daemon.status()
            if present is None:
                print(f"gpushare-ray: no daemon answers at {daemon.socket_path()}", file=sys.stderr)
                return 1
        print(json.dumps(present, indent=2))
        return 0
    except gpushare.Error as error:
        print(f"gpushare-ray: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
