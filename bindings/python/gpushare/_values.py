"""Sizes and names as users write them, and Python objects that C code holds."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any, Union

from ._cffi import ffi
from ._native import InvalidArgument, lib

KINDS = {"model": lib.GPUSHARE_KIND_MODEL, "framework": lib.GPUSHARE_KIND_FRAMEWORK, "ephemeral": lib.GPUSHARE_KIND_EPHEMERAL}
# The same texts and numbers as base::parse_size, the tool's rule (src/base/units.cpp).
_UNITS = {"B": 1, "kB": 10**3}
for _power, _letter in enumerate("KMGTPE", 1):
    _UNITS.update({_letter: 2 ** (10 * _power), f"{_letter}iB": 2 ** (10 * _power), f"{_letter}B": 10 ** (3 * _power)})
_MOST_BYTES, _NO_LIMIT = 2**63, 2**64 - 1

Bytes = Union[int, str]


def size_in_bytes(size: Bytes) -> int:
    """A number of bytes, or a text with a unit as the tool takes it: '512M' and '512MiB' are powers of 1024, '512MB' of 1000.

    Raises InvalidArgument for a text without a unit, because '8' may mean 8 GiB. '0' needs none.
    """
    if not isinstance(size, str):
        count = int(size)
    else:
        match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) *([A-Za-z]*)", size)
        number, unit = match.groups() if match else ("", "")
        if match is None or (unit and unit not in _UNITS):
            raise _bad(f"a size is a number of bytes or a text with a unit such as '512M', '8G' or '1.5GiB': {size!r}")
        if not unit and float(number) != 0:
            raise _bad(f"the size {size!r} has no unit: '{number}GiB' or '{number}B'? A number that is no text is bytes")
        factor = _UNITS.get(unit, 1)
        count = int(number) * factor if number.isdigit() else round(float(number) * factor)
    if not 0 <= count <= _MOST_BYTES and count != _NO_LIMIT:
        raise _bad(f"a size is from 0 to 8 EiB: {size!r}")
    return count


def _bad(message: str) -> InvalidArgument:
    return InvalidArgument(message, lib.GPUSHARE_INVALID_ARGUMENT)


def one_of(what: str, value: str, allowed: dict[str, int]) -> int:
    if value not in allowed:
        raise _bad(f"{what} is {value!r}, allowed are {', '.join(allowed)}")
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
