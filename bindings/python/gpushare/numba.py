"""Numba's device memory from sessions of gpushare: an external memory manager.

    allocator = gpushare.Allocator(runtime)             # of the runtime of a GPU
    gpushare.numba.install(allocator)                   # before numba.cuda is used
    with allocator.use(session):
        weights = numba.cuda.to_device(numpy.ones(1000))
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
from typing import Any

from numba import cuda

from ._allocator import Allocator
from ._native import Error


def install(allocator: Allocator) -> None:
    """From now on Numba allocates from `allocator`. Numba has one manager for a process, chosen before its first use of a device."""

    class Manager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]  # Numba has no types
        interface_version = 1

        def initialize(self) -> None:
            pass  # the allocator is there already

        def memalloc(self, size: int) -> Any:
            address = allocator.allocate(size)

            def free() -> None:
                with contextlib.suppress(Error):  # its session and the allocator may have been closed
                    allocator.free(address)

            return cuda.MemoryPointer(self.context, _pointer(address), size, finalizer=free)

        def get_memory_info(self) -> Any:
            info = allocator.runtime.info()
            used = info["persistent_bytes"] + info["ephemeral_bytes"]
            return cuda.MemoryInfo(free=max(0, info["effective_capacity_bytes"] - used), total=info["effective_capacity_bytes"])

        def get_ipc_handle(self, memory: Any) -> Any:
            raise NotImplementedError("memory of gpushare is not shared with other processes by Numba")

    cuda.set_memory_manager(Manager)


def _pointer(address: int) -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        import ctypes

        return ctypes.c_void_p(address)
    return driver.CUdeviceptr(address)
