"""The shared library, its errors, and the few conversions that every other module needs.

Only this module knows where the library lies and how a status becomes an exception. Every call into the library
releases the GIL (cffi does that), so other Python threads run while one waits for its turn.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import pathlib
import threading
import time
import weakref
from typing import Any, Callable, Optional, TypeVar

from ._cffi import ffi
from ._enums import member_of

NO_TIMEOUT = 2**64 - 1


def find_library(name: str, variable: str) -> str:
    """Path of a library: the environment variable if set, else the copy in this package, else what the system finds."""
    packaged = pathlib.Path(__file__).parent / "lib" / name
    return os.environ.get(variable) or (str(packaged) if packaged.exists() else name)


lib = ffi.dlopen(find_library("libgpushare.so.1", "GPUSHARE_LIBRARY"))


class Error(Exception):
    """A call failed. `status` is the number, `status_name` its name, `native_code` the device's or system's own code."""

    status = 0

    def __init__(self, message: str, status: int, native_code: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.native_code = native_code

    def __reduce__(self) -> Any:  # whole on its way to another process
        return type(self), (str(self.args[0]), self.status, self.native_code)

    @property
    def status_name(self) -> str:
        """The status's name, such as 'QUOTA_EXCEEDED'."""
        return text(lib.gpushare_status_name(self.status))


class NotReady(Error):
    """The answer is not there yet."""


class TimedOut(Error, TimeoutError):
    """The timeout passed first; the object is unchanged."""


class QueueFull(Error):
    """A bounded queue is full: try again later."""


class OutOfMemory(Error, MemoryError):
    """Host memory, device memory or the session's quota is exhausted, or the device is too small; the subclass says which."""


class HostOutOfMemory(OutOfMemory):
    """The process could not get host memory."""


class DeviceOutOfMemory(OutOfMemory):
    """The device's memory is taken; the message says by whom."""


class QuotaExceeded(OutOfMemory):
    """The session's own limit is reached, though the device has room."""


class InvalidArgument(Error, ValueError):
    """An argument is outside what is allowed; the message names it."""


class InvalidState(Error, RuntimeError):
    """The right call at the wrong moment, for example on a closed session."""


class InvalidHandle(Error):
    """The object was closed or released before."""


class NotFound(Error, LookupError):
    """No such name, device, policy or block."""


class AlreadyExists(Error):
    """The name is taken."""


class Unsupported(Error):
    """The device, the layout or the build lacks this."""


class ExceedsCapacity(OutOfMemory):
    """The request would not fit an empty device."""


class MalformedInput(Error, ValueError):
    """A file or buffer breaks its format; the message names the place."""


class Unavailable(Error):
    """There is no such device or driver on this machine."""


class Cancelled(Error):
    """The session was cancelled or closed while the call waited."""


class DeviceLost(Error):
    """The device's context is poisoned; every session of the runtime ends."""


class CallbackFailed(Error):
    """A function of yours failed or raised; its session ended alone."""


class IoError(Error, OSError):
    """The operating system refused a read or write; native_code is errno."""

    def __str__(self) -> str:  # OSError would print its arguments as a tuple
        return str(self.args[0])


_ERRORS: dict[int, type[Error]] = {
    lib.GPUSHARE_NOT_READY: NotReady,
    lib.GPUSHARE_TIMED_OUT: TimedOut,
    lib.GPUSHARE_QUEUE_FULL: QueueFull,
    lib.GPUSHARE_HOST_OUT_OF_MEMORY: HostOutOfMemory,
    lib.GPUSHARE_DEVICE_OUT_OF_MEMORY: DeviceOutOfMemory,
    lib.GPUSHARE_QUOTA_EXCEEDED: QuotaExceeded,
    lib.GPUSHARE_INVALID_ARGUMENT: InvalidArgument,
    lib.GPUSHARE_INVALID_STATE: InvalidState,
    lib.GPUSHARE_INVALID_HANDLE: InvalidHandle,
    lib.GPUSHARE_NOT_FOUND: NotFound,
    lib.GPUSHARE_ALREADY_EXISTS: AlreadyExists,
    lib.GPUSHARE_UNSUPPORTED: Unsupported,
    lib.GPUSHARE_EXCEEDS_CAPACITY: ExceedsCapacity,
    lib.GPUSHARE_MALFORMED_INPUT: MalformedInput,
    lib.GPUSHARE_UNAVAILABLE: Unavailable,
    lib.GPUSHARE_CANCELLED: Cancelled,
    lib.GPUSHARE_DEVICE_LOST: DeviceLost,
    lib.GPUSHARE_CALLBACK_FAILED: CallbackFailed,
    lib.GPUSHARE_IO_ERROR: IoError,
}
_STATUS_OF = {error: status for status, error in _ERRORS.items()}


def text(value: Any) -> str:
    """A C string as str; a null pointer as ''."""
    return ffi.string(value).decode(errors="replace") if value != ffi.NULL else ""


def error_of(status: int, message: Optional[str] = None, native_code: int = 0) -> Error:
    """The exception for a status code."""
    name = text(lib.gpushare_status_name(status))
    return _ERRORS.get(status, Error)(message or name, status, native_code)


def last_error(status: int) -> Error:
    """The exception for `status`, with the calling thread's error message."""
    info = struct("gpushare_error_info")
    lib.gpushare_last_error(info)
    return error_of(status, text(info.message), info.native_code) if info.status == status else error_of(status)


def check(status: int) -> None:
    """Raises the exception for `status` unless it is OK."""
    if status != 0:
        raise last_error(status)


def status_of(error: BaseException) -> int:
    """The status code under which the library is told of an exception of yours."""
    if isinstance(error, Error):
        return error.status
    if isinstance(error, MemoryError):
        return lib.GPUSHARE_HOST_OUT_OF_MEMORY
    return lib.GPUSHARE_CALLBACK_FAILED


def struct(name: str, /, **fields: Any) -> Any:
    """A zeroed struct with its struct_size and the given fields set."""
    value = ffi.new(name + "*")
    value.struct_size = ffi.sizeof(name)
    for field, content in fields.items():
        setattr(value, field, content)
    return value


def as_dict(value: Any) -> dict[str, Any]:
    """The fields of a struct as Python values, enumerators as members of _enums.py; struct_size and reserved fields are left out."""
    result: dict[str, Any] = {}
    kind = ffi.typeof(value[0])
    for name, _ in kind.fields:
        if name in ("struct_size", "reserved", "reserved_2"):
            continue
        content = getattr(value, name)
        if isinstance(content, ffi.CData):
            content = text(content)
        result[name] = member_of(kind.cname.removeprefix("struct "), name, content)
    return result


def nanoseconds(timeout: Optional[float]) -> int:
    """A timeout in seconds as the library wants it; None waits for ever."""
    if timeout is None or timeout == float("inf"):
        return NO_TIMEOUT
    if not timeout >= 0:
        raise InvalidArgument(f"a timeout is a number of seconds from 0, or None: {timeout!r}", lib.GPUSHARE_INVALID_ARGUMENT)
    return min(int(timeout * 1e9), NO_TIMEOUT - 1)


# A wait in the library cannot be interrupted, so the main thread waits in slices: Ctrl-C is then answered within one.
_SLICE_NS = FIRST_WAIT_NS = 100_000_000


def wait(call: Callable[[int], int], timeout: Optional[float], stop: Optional[Callable[[], None]] = None) -> None:
    """Calls `call(timeout_ns)`, which blocks, until it does not time out or `timeout` seconds have passed.

    `stop` raises when there is nothing to wait for any more; it is asked between the slices.
    """
    if threading.current_thread() is not threading.main_thread() and stop is None:
        check(call(nanoseconds(timeout)))
        return
    limit = nanoseconds(timeout)
    end = None if limit == NO_TIMEOUT else time.monotonic_ns() + limit
    while True:
        left = _SLICE_NS if end is None else max(0, min(_SLICE_NS, end - time.monotonic_ns()))
        status = call(left)
        if status != lib.GPUSHARE_TIMED_OUT:
            check(status)
            return
        if stop is not None:
            stop()
        if end is not None and time.monotonic_ns() >= end:
            check(status)


class Exports:
    """Counts the living arrays over device memory that other libraries may still use. A call that takes their memory away waits for them."""

    _arrays: Any = ()  # a WeakSet with the first of them: most owners have none

    def add(self, array: Any) -> None:
        vars(self).setdefault("_arrays", weakref.WeakSet()).add(array)

    def add_all(self, others: "Exports") -> None:
        for array in others._arrays:
            self.add(array)

    def __len__(self) -> int:
        return len(self._arrays)

    def when_gone(self, act: Callable[[], Any]) -> bool:
        """Calls `act` when the last of them is gone: now, which is told by True, or on the thread that drops it."""
        left = list(self._arrays)
        waiting = {id(array) for array in left}
        once = threading.Lock()

        def gone(number: int) -> None:
            waiting.discard(number)
            if not waiting and once.acquire(blocking=False):
                act()

        for array in left:
            # Not at exit: memory of arrays that are alive then goes with the process.
            weakref.finalize(array, gone, id(array)).atexit = False
        if not left:
            act()
        return not left


class Closable:
    """Something that is closed once: by `close()`, by leaving its `with` block, or when it is collected."""

    _handle: Any = None
    _finalizer: Any = None

    def _own(self, handle: Any, release: Callable[[Any], int], *keep: Any, exports: Optional[Exports] = None) -> None:
        """Takes `handle`, given back by `release`. `keep` is what the library uses until then, `exports` the arrays that use its memory."""
        self._handle = handle
        self._release = release
        self._finalizer = weakref.finalize(self, _give_back, release, handle, keep, exports)

    @property
    def handle(self) -> Any:
        """The C handle, for calls of your own through `gpushare.lib`."""
        if self._handle is None:
            raise InvalidState(f"this {type(self).__name__} is closed", lib.GPUSHARE_INVALID_STATE)
        return self._handle

    @property
    def closed(self) -> bool:
        """True once it has been given back."""
        return self._handle is None

    def close(self) -> None:
        """Gives the object back. Closing it again does nothing."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        status = self._release(handle)
        if status == lib.GPUSHARE_INVALID_STATE:  # not at this moment, for example inside an iteration: it stays open
            self._handle = handle
        else:
            self._finalizer.detach()
        check(status)

    def _close_after(self, exports: Exports) -> None:
        """Closed for the program at once, for the library when the last of the arrays is gone."""
        handle, self._handle = self._handle, None
        kept = self._finalizer.detach()  # what the library uses until then
        release = self._release
        exports.when_gone(lambda: (release(handle), kept))

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


_Self = TypeVar("_Self", bound=Closable)


def _give_back(release: Callable[[Any], int], handle: Any, keep: tuple[Any, ...], exports: Optional[Exports]) -> None:
    # Arrays keep their owner, so they are alive at the interpreter's exit alone: functions that run later there may still read them.
    if not exports:
        release(handle)  # a status here would have nobody to be told


def null_or(value: Optional[str]) -> Any:
    """A C string that lives as long as the result, or NULL."""
    return ffi.NULL if value is None else ffi.new("char[]", value.encode())


def version() -> str:
    """The library's version, such as '1.0.0'."""
    return text(lib.gpushare_version_string())
