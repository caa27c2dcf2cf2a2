"""CuPy's device memory from sessions of gpushare.

    allocator = gpushare.Allocator(runtime)             # of the runtime of a GPU
    gpushare.cupy.install(allocator)
    with allocator.use(session):
        weights = cupy.ones((1000, 1000))
        with allocator.iteration(session) as iteration, cupy.cuda.ExternalStream(iteration.stream.native):
            ...
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
from typing import Any

import cupy

from ._allocator import Allocator
from ._native import Error, OutOfMemory


class _Memory:
    """A block, freed with the last array over it."""

    def __init__(self, allocator: Allocator, nbytes: int) -> None:
        self._allocator, self._stream = allocator, cupy.cuda.get_current_stream().ptr
        self.address = 0
        self.address = allocator.allocate(nbytes, self._stream)

    def __del__(self) -> None:
        with contextlib.suppress(Error):  # its session and the allocator may have been closed
            self._allocator.free(self.address, self._stream)


def install(allocator: Allocator) -> None:
    """From now on CuPy allocates from `allocator`. Arrays made before stay as they are."""

    def allocate(nbytes: int) -> Any:
        try:
            memory = _Memory(allocator, nbytes)
        except OutOfMemory as error:
            raise cupy.cuda.memory.OutOfMemoryError(nbytes, allocator.info()["current_bytes"]) from error
        device = allocator.runtime._device_index
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.address, nbytes, memory, device), 0)

    cupy.cuda.set_allocator(allocate)
