"""RMM's device memory from sessions of gpushare, for cuDF, cuML and what else allocates through RMM.

    allocator = gpushare.Allocator(runtime)             # of the runtime of a GPU
    gpushare.rmm.install(allocator)                     # before the first allocation
    with allocator.use(session):
        frame = cudf.DataFrame(...)
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
from typing import Any, Optional

import rmm

from ._allocator import Allocator
from ._native import Error


def _native(stream: Any) -> Optional[int]:
    """The CUstream of RMM's stream objects, which name it in different ways; None: the default stream."""
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1])
    handle = getattr(stream, "value", None)
    return None if handle is None else int(handle() if callable(handle) else handle)


def install(allocator: Allocator) -> Any:
    """From now on RMM allocates from `allocator` on its device. Returns the resource, for pools and statistics on top of it."""

    def allocate(nbytes: int, stream: Any = None) -> int:
        return allocator.allocate(nbytes, _native(stream))

    def free(address: int, nbytes: int, stream: Any = None) -> None:
        with contextlib.suppress(Error):  # its session and the allocator may have been closed
            allocator.free(address, _native(stream))

    resource = rmm.mr.CallbackMemoryResource(allocate, free)
    rmm.mr.set_per_device_resource(allocator.runtime._device_index, resource)
    return resource
