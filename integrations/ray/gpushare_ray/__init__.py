"""gpushare in Ray: sessions for actors and tasks, and FluidScheduler for Tune. `pip install gpushare-runtime[ray]`.

    import ray, gpushare_ray

    @ray.remote(num_gpus=0.25)
    @gpushare_ray.with_session()          # weight 0.25, at most a quarter of the device's memory
    def train(session, steps):
        for step in session.iterations(steps):
            ...

Ray chooses the GPU and counts its parts; the node's daemon and the runtime hold the program to its part. Nothing here decides: Tune's
widths come from libgpushare_cluster.

    daemon   the node's daemon: found, or started by first use
    session  what Ray assigned becomes a session; with_session, open_session
    board    an actor that carries weights from the driver to trials
    fluid    FluidScheduler, a TrialScheduler
    reservations  gangs over nodes: reserve, and the actor that has the table

docs/ray.md is the page for users.
"""
# SPDX-License-Identifier: Apache-2.0
from typing import Any

from .daemon import ensure_daemon, stop_daemon
from .reservations import Gang, reserve
from .session import RaySession, open_session, with_session

__all__ = ["FluidScheduler", "Gang", "RaySession", "ensure_daemon", "open_session", "reserve", "stop_daemon", "with_session"]


def __getattr__(name: str) -> Any:
    if name == "FluidScheduler":  # the only one that needs Tune when it is imported
        from .fluid import FluidScheduler

        return FluidScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
