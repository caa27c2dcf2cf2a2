"""Enumerations for the numbers of the C ABI. Enumerations whose values have names are strings, too: `info["state"] == "resident"`."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import enum
from typing import Any


class _Name(str, enum.Enum):
    def __str__(self) -> str:
        return str(self.value)

    __hash__ = str.__hash__  # equal to a string: found in dictionaries as it


class SessionState(_Name):
    """gpushare_session_info.state."""

    QUEUED = "queued"
    RESIDENT = "resident"
    PAGED_OUT = "paged_out"
    CANCELLED = "cancelled"
    FAILED = "failed"


class SessionClass(_Name):
    """Guaranteed sessions get what they were admitted with; opportunistic ones use spare capacity."""

    GUARANTEED = "guaranteed"
    OPPORTUNISTIC = "opportunistic"


class Layout(_Name):
    """How a runtime places memory."""

    AUTO = "auto"
    CONTIGUOUS = "contiguous"
    VIRTUAL = "virtual"


class Kind(_Name):
    """Of a block."""

    MODEL = "model"
    FRAMEWORK = "framework"
    EPHEMERAL = "ephemeral"


class MemberState(_Name):
    """Of a switcher's member."""

    STANDBY = "standby"
    KEPT = "kept"
    ACTIVE = "active"


class Status(enum.IntEnum):
    """Status codes of the library: of a device that cannot be used, of a session that has failed."""

    OK = 0
    NOT_READY = 100
    TIMED_OUT = 101
    QUEUE_FULL = 102
    HOST_OUT_OF_MEMORY = 200
    DEVICE_OUT_OF_MEMORY = 201
    QUOTA_EXCEEDED = 202
    INVALID_ARGUMENT = 300
    INVALID_STATE = 301
    INVALID_HANDLE = 302
    NOT_FOUND = 303
    ALREADY_EXISTS = 304
    UNSUPPORTED = 305
    EXCEEDS_CAPACITY = 306
    MALFORMED_INPUT = 307
    UNAVAILABLE = 400
    CANCELLED = 401
    DEVICE_LOST = 402
    CALLBACK_FAILED = 403
    IO_ERROR = 404
    INTERNAL = 405
    UNKNOWN = 406


class DeviceCapability(enum.IntFlag):
    """What a device can do: backend.h says more."""

    HOST_ADDRESSABLE = 1 << 0
    VIRTUAL_MEMORY = 1 << 1
    PRIORITIES = 1 << 2
    VIRTUAL_TIME = 1 << 3
    MODELED_WORK = 1 << 4
    FAULTS = 1 << 5
    PARTITIONS = 1 << 6
    IPC = 1 << 7
    HOST_PHYSICAL = 1 << 8


_MEMBERS: dict[tuple[str, str], Any] = {
    ("gpushare_session_info", "state"): SessionState,
    ("gpushare_session_info", "session_class"): SessionClass,
    ("gpushare_runtime_info", "layout"): Layout,
    ("gpushare_block_info", "kind"): Kind,
    ("gpushare_member_info", "state"): MemberState,
    ("gpushare_session_info", "status"): Status,
    ("gpushare_device_info", "status"): Status,
    ("gpushare_runtime_info", "capabilities"): DeviceCapability,
    ("gpushare_device_info", "capabilities"): DeviceCapability,
}


def member_of(struct: str, field: str, value: Any) -> Any:
    """The enumeration's member for a field of a struct; the value itself where there is none, as in a newer library."""
    members = _MEMBERS.get((struct, field))
    if members is None:
        return value
    if issubclass(members, _Name):
        order = list(members)  # the C ABI counts from 0, in this order
        return order[value] if 0 <= value < len(order) else value
    try:
        return members(value)
    except ValueError:
        return value
