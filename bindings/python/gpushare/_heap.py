"""The block heap alone, and packing of buffers whose lifetimes are known: no device is needed."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any, Iterable, Optional

from ._cffi import ffi
from ._native import Closable, as_dict, check, lib, nanoseconds, struct
from ._values import Bytes, size_in_bytes


class Heap(Closable):
    """Places blocks in [0, capacity) of anything; touches no memory of it. The caller orders calls on one heap."""

    def __init__(self, capacity_bytes: Bytes, alignment_bytes: int = 0) -> None:
        params = struct("gpushare_heap_params", capacity_bytes=size_in_bytes(capacity_bytes), alignment_bytes=alignment_bytes)
        out = ffi.new("gpushare_heap*")
        check(lib.gpushare_heap_create(params, out))
        self._own(out[0], lib.gpushare_heap_release)

    def alloc(self, nbytes: Bytes) -> int:
        """Offset of a new block. O(1)."""
        out = ffi.new("uint64_t*")
        check(lib.gpushare_heap_alloc(self.handle, size_in_bytes(nbytes), out))
        return out[0]

    def free(self, offset: int) -> None:
        """Frees the block that starts at `offset`. O(1)."""
        check(lib.gpushare_heap_free(self.handle, offset))

    def info(self) -> dict[str, Any]:
        """Capacity, live bytes and blocks, the largest hole, as gpushare_heap_info."""
        info = struct("gpushare_heap_info")
        check(lib.gpushare_heap_get_info(self.handle, info))
        return as_dict(info)


def solve_placement(buffers: Iterable[tuple[int, int, int]], alignment_bytes: int = 0, *,
                    time_limit: Optional[float] = None) -> tuple[list[int], int]:
    """Offsets for buffers (lower, upper, bytes), each alive in [lower, upper), and the arena size that they need.

    time_limit: seconds; the best placement by then. None: a bounded effort of some seconds, the same result on any machine.
    """
    rows = list(buffers)
    count = len(rows)
    offsets, arena = ffi.new("uint64_t[]", max(count, 1)), ffi.new("uint64_t*")
    columns = [ffi.new("uint64_t[]", [row[column] for row in rows] or [0]) for column in range(3)]
    check(lib.gpushare_placement_solve(count, columns[0], columns[1], columns[2], alignment_bytes,
                                       0 if time_limit is None else max(1, nanoseconds(time_limit)), offsets, arena))
    return [offsets[index] for index in range(count)], arena[0]
