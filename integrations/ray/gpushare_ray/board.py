"""The board: an actor that carries weights from the driver's FluidScheduler to the trials, and back where trials are.

A trial asks for its next weight and waits for the answer; so a change reaches it within a message and holds from its next iteration on.
Nothing is restarted. Without a board trials keep the weight that Ray assigned them.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
from typing import Any, Optional

NAME, NAMESPACE = "gpushare-board", "gpushare"


class Board:
    """Runs as a Ray actor; all methods are coroutines of one event loop, so nothing needs a lock."""

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._trials: dict[str, dict[str, Any]] = {}
        self._versions: dict[str, int] = {}
        self._changed = asyncio.Condition()

    async def set_weights(self, weights: dict[str, float]) -> None:
        """Replaces the weights of the trials named."""
        async with self._changed:
            for trial, weight in weights.items():
                if self._weights.get(trial) != weight:
                    self._weights[trial] = weight
                    self._versions[trial] = self._versions.get(trial, 0) + 1
            self._changed.notify_all()

    async def next_weight(self, trial: str, version: int, told: dict[str, Any], timeout_s: float = 1) -> tuple[int, Optional[float]]:
        """The trial's weight as soon as it is newer than `version`, at the latest after `timeout_s`. `told` is where the trial is and what it
        has used."""
        self._trials[trial] = told
        async with self._changed:
            if self._versions.get(trial, 0) <= version:
                try:
                    await asyncio.wait_for(self._changed.wait_for(lambda: self._versions.get(trial, 0) > version), timeout_s)
                except asyncio.TimeoutError:
                    pass
            return self._versions.get(trial, 0), self._weights.get(trial)

    async def left(self, trial: str) -> None:
        self._trials.pop(trial, None)

    async def trials(self) -> dict[str, dict[str, Any]]:
        """What the trials that have a session told last: device, fraction, weight, service_s, iterations."""
        return dict(self._trials)
