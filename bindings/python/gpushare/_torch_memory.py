"""gpushare.torch: PyTorch's questions about memory, which it answers for its own allocator alone.

PyTorch's functions are replaced where all of them end, in torch._C: torch.cuda.memory_allocated, memory_reserved, memory_stats,
memory_summary and reset_peak_memory_stats, and their likes in torch.accelerator, then answer for the session of the calling thread.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import warnings
from typing import Any, Callable, Optional

import torch

_METRICS = ("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes",
            "requested_bytes")
_COUNTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free", "max_split_size")

Ask = Callable[[int], Optional[tuple[Any, Any]]]  # device -> (allocator, session or None for all of them); None: not a device of gpushare


def _figures(current: int = 0, peak: int = 0, allocated: int = 0) -> dict[str, int]:
    return {"current": current, "peak": peak, "allocated": allocated, "freed": 0}


def stats(info: dict[str, Any]) -> dict[str, Any]:
    """What torch.cuda.memory_stats_as_nested_dict returns. Figures that gpushare does not count are zero."""
    known = {"reserved_bytes": _figures(info["reserved_bytes"], max(info["reserved_bytes"], info["peak_bytes"])),
             "allocation": _figures(allocated=info["allocations"])}
    for metric in ("allocated_bytes", "active_bytes", "requested_bytes"):
        known[metric] = _figures(info["current_bytes"], info["peak_bytes"])
    result: dict[str, Any] = {metric: {"all": known.get(metric, _figures()), "large_pool": _figures(), "small_pool": _figures()} for metric in _METRICS}
    result.update({count: 0 for count in _COUNTS}, num_ooms=info["failures"])
    result.update(oversize_allocations=_figures(), oversize_segments=_figures(), reserved_bytes_by_private_pools={})
    return result


def _replace(name: str, answer: Callable[[Any, Any], Any], ask: Ask) -> None:
    original = getattr(torch._C, name, None)
    if original is None:  # another version of PyTorch
        return

    def replaced(device: int) -> Any:
        found = ask(device)
        return original(device) if found is None else answer(*found)

    setattr(torch._C, name, replaced)


def answer_for_sessions(ask: Ask) -> None:
    """Once for the process, when gpushare has become PyTorch's allocator."""
    for prefix, names in (("_cuda_", ("memoryStats", "resetPeakMemoryStats", "resetAccumulatedMemoryStats")),
                          ("_accelerator_", ("getDeviceStats", "resetPeakStats", "resetAccumulatedStats"))):
        answers: tuple[Callable[[Any, Any], Any], ...] = (lambda allocator, session: stats(allocator.info(session)),
                                                          lambda allocator, session: allocator.reset_peaks(session),
                                                          lambda allocator, session: None)  # totals count from the beginning, always
        for name, answer in zip(names, answers):
            _replace(prefix + name, answer, ask)
    if hasattr(torch._C, "_accelerator_isAllocatorInitialized"):  # torch.accelerator asks first; a pluggable allocator answers no
        torch._C._accelerator_isAllocatorInitialized = lambda: True


def without_cudnn_benchmark() -> None:
    """torch.backends.cudnn.benchmark stays False, with one warning where it is or becomes True.

    PyTorch's search for the fastest algorithm asks the allocator how large a free block it has, which PyTorch refuses for every allocator but
    its own: a convolution would raise.
    """
    original = torch._C._set_cudnn_benchmark
    told = False

    def replaced(value: bool) -> None:
        nonlocal told
        if value and not told:
            told = True
            warnings.warn("torch.backends.cudnn.benchmark stays False: its search asks PyTorch's own allocator for free memory, and gpushare has taken that "
                          "allocator's place. Convolutions use cuDNN's heuristics", RuntimeWarning, stacklevel=3)
        original(False)

    before = torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_benchmark = replaced
    kept = vars(type(torch.backends.cudnn)).get("benchmark")  # torch.backends.cudnn.benchmark = ...
    if hasattr(kept, "setter"):
        kept.setter = replaced
    replaced(before)
