"""Sizes and names as users write them, and Python objects that C code holds."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any, Union

from ._cffi import ffi
from ._native import InvalidArgument, lib

KINDS = {"model": lib.GPUSHARE_KIND_MODEL, "framework": lib.GPUSHARE_KIND_FRAMEWORK, "ephemeral": lib.GPUSHARE_KIND_EPHEMERAL}
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

Bytes = Union[int, str]


def size_in_bytes(size: Bytes) -> int:
    """A number of bytes, or a text such as '512M' or '8G' (powers of 1024)."""
    if not isinstance(size, str):
        return int(size)
    body = size.strip().upper().removesuffix("IB").removesuffix("B")
    unit = body[-1:] if body[-1:] in _UNITS else ""
    try:
        return int(float(body.removesuffix(unit)) * _UNITS[unit])
    except ValueError:
        raise InvalidArgument(f"a size is a number of bytes or a text such as '512M' or '8G': {size!r}",
                              lib.GPUSHARE_INVALID_ARGUMENT) from None


def one_of(what: str, value: str, allowed: dict[str, int]) -> int:
    if value not in allowed:
        raise InvalidArgument(f"{what} is {value!r}, allowed are {', '.join(allowed)}", lib.GPUSHARE_INVALID_ARGUMENT)
    return allowed[value]


class Handles:
    """Python objects that C code holds by pointer, until they are dropped."""

    def __init__(self) -> None:
        self._held: dict[Any, Any] = {}

    def hold(self, value: Any) -> Any:
        handle = ffi.new_handle(value)
        self._held[handle] = handle
        return handle

    def drop(self, pointer: Any) -> None:
        self._held.pop(pointer, None)


# Outlives any runtime: what the library promises to call exactly once drops itself.
calls = Handles()


@ffi.callback("void(void*)")
def on_release(data: Any) -> None:
    """The library will not call the object again. It has a method `_released()` if it wants to know."""
    held = ffi.from_handle(data)
    calls.drop(data)
    released = getattr(held, "_released", None)
    if released is not None:
        released()
