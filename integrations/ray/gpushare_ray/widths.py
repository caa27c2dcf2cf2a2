"""From trials to weights: widths are libgpushare_cluster's, and a device's weights follow from the widths of the trials on it, or from what they
still need."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

from gpushare import cluster

SCHEDULERS = ("static-fluid", "dynamic-fluid", "gpushare")


def widths(remaining_s: dict[str, float], devices: int, max_packed: int, max_workers: int, scheduler: str) -> dict[str, float]:
    """The devices' worth that each trial should have now. `remaining_s`: what each still needs, in seconds of a whole device."""
    if not remaining_s:
        return {}
    least = max(max(remaining_s.values()) * 1e-6, 1e-6)  # a trial about to end
    document: dict[str, Any] = {
        "version": 1, "kind": "trials", "devices": devices, "max_packed": max_packed, "max_workers": max_workers,
        "groups": [{"arrival_s": 0, "trials": [{"name": trial, "budget_s": max(left, least)} for trial, left in remaining_s.items()]}]}
    return dict(cluster.plan(document, scheduler)["results"][0]["shares"])


def by_remaining(remaining_s: dict[str, float], places: dict[str, tuple[str, float]]) -> dict[str, float]:
    """The parts of their devices with which all trials on one would end at the same time. A plan's widths do not say that: where packing neither gains
    nor costs, one trial after the other on the whole device ends as early, and Fluid's formula rounds down to 1/max_packed."""
    on: dict[str, float] = {}
    for trial, (device, _) in places.items():
        on[device] = on.get(device, 0.0) + remaining_s.get(trial, 0.0)
    return {trial: remaining_s.get(trial, 0.0) / on[device] if on[device] > 0 else 0.0 for trial, (device, _) in places.items()}


def weights(wanted: dict[str, float], places: dict[str, tuple[str, float]]) -> dict[str, float]:
    """The weight of each placed trial on its device. `places`: (device, the fraction that Ray assigned).

    A trial keeps its fraction, whatever other trials come or grow beside it. The rest of its device is divided among the trials whose width
    is more than their fraction, in proportion to the difference. Growth therefore shrinks by itself when Ray places a neighbour.
    """
    beside: dict[str, list[str]] = {}
    for trial, (device, _) in places.items():
        beside.setdefault(device, []).append(trial)
    result: dict[str, float] = {}
    for trials in beside.values():
        held = {trial: places[trial][1] for trial in trials}
        spare = max(0.0, 1 - sum(held.values()))
        growth = {trial: max(0.0, min(1.0, wanted.get(trial, 0.0)) - held[trial]) for trial in trials}
        scale = min(1.0, spare / sum(growth.values())) if sum(growth.values()) > 0 else 0.0
        for trial in trials:
            result[trial] = round(held[trial] + growth[trial] * scale, 6)
    return result
