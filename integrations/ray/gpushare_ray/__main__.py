"""gpushare-ray: the daemon of a node by hand. `ray start` the node as ever; the first session would start the daemon too."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Optional

import gpushare

from . import daemon


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="gpushare-ray", description="The gpushare daemon of this Ray node.")
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start", help="start it unless it runs")
    start.add_argument("--device", choices=["cuda", "host"], help="[cuda where there is one]")
    start.add_argument("--gpus", type=int, default=1, help="the num_gpus that this node declares to Ray [1]")
    start.add_argument("--capacity", default="0", help="memory of each device, such as 8G [what is free]")
    start.add_argument("--lanes", type=int, default=1, help="turns at a time on a device [1]")
    commands.add_parser("status", help="what it does, as JSON")
    commands.add_parser("stop", help="stop it")
    options = parser.parse_args(arguments)
    try:
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
