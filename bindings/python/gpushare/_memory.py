"""Blocks of device memory and streams."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from typing import TYPE_CHECKING, Any, Callable, Optional

from . import _arrays
from ._cffi import ffi
from ._native import Closable, Exports, InvalidArgument, InvalidState, NotFound, as_dict, check, lib, struct
from ._values import calls

if TYPE_CHECKING:
    from ._runtime import Runtime
    from ._session import Session

_log = logging.getLogger("gpushare")


@ffi.callback("void(void*)")
def _on_host_function(data: Any) -> None:
    call = ffi.from_handle(data)
    calls.drop(data)
    call()


class Block:
    """Device memory that a session, or an iteration, holds.

    On the host device the bytes are the process's own, and the session is charged for a block of the device: what takes that block away
    (a free, the end of an iteration, a close, a page-out) leaves the bytes to the arrays that show them.
    """

    def __init__(self, owner: Any, runtime: "Runtime", address: int, nbytes: int, alignment: int = 0) -> None:
        self.owner = owner  # the session, the iteration or the runtime that it was allocated in
        self.runtime = runtime
        self.nbytes = nbytes
        self._token = address  # the library's name of it
        self._alignment = max(alignment, _arrays.ALIGNMENT)
        self._freed = False
        self._bytes: Any = None  # on the host device, once they are asked for
        self._exports = Exports()

    @property
    def on_host(self) -> bool:
        """True if the CPU can read and write it in place."""
        return self.runtime._on_host

    @property
    def device_index(self) -> int:
        """The number of the GPU; 0 on other devices."""
        return self.runtime._device_index

    @property
    def gone(self) -> bool:
        """True once it was freed, or its iteration has ended, or its session or runtime was closed."""
        return self._freed or bool(self.owner._gone)

    @property
    def address(self) -> int:
        """Where its bytes lie: an address of the device. Raises InvalidState when the block is gone."""
        if not self.on_host:
            self._check()
            return self._token
        if self._bytes is None:
            self._check()
            self._bytes = _arrays.host_bytes(self.nbytes + self._alignment)
        return _arrays.aligned(self._bytes, self._alignment)

    def array(self, shape: Any = None, dtype: Any = "<f4", offset: int = 0) -> Any:
        """The block as an array: numpy's on the host device, else a DeviceArray. By default all its bytes."""
        self._check()
        if shape is None:
            shape, dtype = self.nbytes, "|u1"
        return _arrays.view(self, shape, dtype, offset)

    def free(self) -> None:
        """Frees it in the order of its owner's stream; on a GPU when the last array over it that another library uses is gone."""
        if self.gone:
            raise self._not_found()
        if self.on_host or not self._exports:
            check(lib.gpushare_memory_free(self.runtime.handle, self._token))
            self._freed = True
        else:
            self._freed = True
            self._free_after_exports()

    def record_use(self, stream: "Stream") -> None:
        """Work enqueued on `stream` up to now uses the block: once freed it is reused only after that work."""
        self._check()
        check(lib.gpushare_memory_record_use(self.runtime.handle, self._token, stream.handle))

    def info(self) -> dict[str, Any]:
        """Session, kind and bytes, as gpushare_block_info."""
        if self.gone:
            raise self._not_found()
        info = struct("gpushare_block_info")
        check(lib.gpushare_memory_get_info(self.runtime.handle, self._token, info))
        return as_dict(info)

    def _check(self) -> None:
        if self.gone:
            raise InvalidState(f"the block of {self.nbytes} bytes is gone: it was freed, or its iteration has ended, or its session or runtime "
                               "was closed; iteration.keep(block) makes a block outlive its iteration", lib.GPUSHARE_INVALID_STATE)

    def _not_found(self) -> NotFound:
        return NotFound(f"the block of {self.nbytes} bytes is gone already", lib.GPUSHARE_NOT_FOUND)

    def _free_after_exports(self) -> None:
        runtime, token = self.runtime.handle, self._token
        self._exports.when_gone(lambda: lib.gpushare_memory_free(runtime, token))

    def _lend(self, array: Any) -> Any:
        """`array` may be used by another library. Returns what keeps its bytes."""
        self._check()
        if self.on_host:
            self.address  # the bytes are there from now on
            return self._bytes
        for exports in (self._exports, self.owner._exports, self.runtime._exports):
            exports.add(array)
        return self

    def __repr__(self) -> str:
        return f"Block(nbytes={self.nbytes}{', gone' if self.gone else ''})"


class RangeMemory:
    """The bytes of an elastic range, as arrays use them: a part of the process's own memory on the host device, as a Block's bytes are."""

    def __init__(self, session: "Session", address: int, nbytes: int, exports: Exports) -> None:
        self.nbytes = nbytes
        self._runtime, self._address, self._exports = session.runtime, address, exports
        self._all_exports = (exports, session._exports, session.runtime._exports)
        self._arrays: weakref.WeakSet[Any] = weakref.WeakSet()  # that other libraries use
        self._pages: Any = None  # on the host device, once an array is asked for

    @property
    def on_host(self) -> bool:
        return self._runtime._on_host

    @property
    def device_index(self) -> int:
        return self._runtime._device_index

    @property
    def address(self) -> int:
        if not self.on_host:
            return self._address
        if self._pages is None:
            # Addresses alone, until they are written: a range may be larger than the machine's memory.
            self._pages = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
        return int(ffi.cast("uintptr_t", ffi.from_buffer(self._pages)))

    def _lend(self, array: Any) -> Any:
        self._arrays.add(array)
        if self.on_host:
            self.address  # the bytes are there from now on
            return self._pages
        for exports in self._all_exports:
            exports.add(array)
        return self

    def _used(self, offset: int, nbytes: int) -> bool:
        return any(array.offset < offset + nbytes and offset < array.offset + array.nbytes for array in list(self._arrays))

    def check_decommit(self, offset: int, nbytes: int) -> None:
        """Raises InvalidState if another library uses the bytes on a GPU."""
        if not self.on_host and self._used(offset, nbytes):
            raise InvalidState(f"another library uses an array over bytes {offset} to {offset + nbytes} of the range: delete it first",
                               lib.GPUSHARE_INVALID_STATE)

    def drop(self, offset: int, nbytes: int) -> None:
        """The bytes were decommitted: on the host device the process gives its own back, unless an array shows them."""
        if self._pages is not None and not self._used(offset, nbytes):
            self._pages.madvise(mmap.MADV_DONTNEED, offset, nbytes)


class Stream:
    """An in-order queue of device work: a lane's, or a side stream made by `Runtime.create_stream`."""

    def __init__(self, runtime: "Runtime", handle: Any, failed: Optional[Callable[[BaseException], None]] = None) -> None:
        self.runtime = runtime
        self.handle = handle
        self._failed = failed

    @property
    def native(self) -> int:
        """The device's own handle, on cuda a CUstream, as an integer."""
        out = ffi.new("void**")
        check(lib.gpushare_stream_get_native(self.handle, out))
        return int(ffi.cast("uintptr_t", out[0]))

    def synchronize(self) -> None:
        """Blocks until the work enqueued so far has finished."""
        check(lib.gpushare_stream_synchronize(self.handle))

    def launch(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Enqueues `function(*arguments)`: on the host device this is how kernels run. It must not wait for the device.

        If it raises, its iteration has failed: the ticket of a submitted function, the answer of a request, or else the session's next
        call raises CallbackFailed with that exception as its cause. The session goes on, unless it was opened with
        `fail_on_error=True`. On a side stream the exception is logged.
        """
        failed = self._failed

        def call() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                if failed is None:
                    _log.exception("a function launched on a side stream raised")
                else:
                    failed(error)

        self._enqueue(call)

    def copy_from_host(self, destination: Block, source: Any, offset: int = 0) -> None:
        """Enqueues a copy of a buffer (bytes, numpy's array) to the block. The buffer is kept until it has finished."""
        buffer = ffi.from_buffer(source)
        _check_range(destination, offset, len(buffer))
        self._copy(destination.address + offset, int(ffi.cast("uintptr_t", buffer)), len(buffer), lib.GPUSHARE_COPY_HOST_TO_DEVICE, destination,
                   buffer)

    def copy_to_host(self, destination: Any, source: Block, offset: int = 0) -> None:
        """Enqueues a copy of the block to a writable buffer, which is kept until it has finished."""
        buffer = ffi.from_buffer(destination, require_writable=True)
        _check_range(source, offset, len(buffer))
        self._copy(int(ffi.cast("uintptr_t", buffer)), source.address + offset, len(buffer), lib.GPUSHARE_COPY_DEVICE_TO_HOST, source, buffer)

    def copy(self, destination: Block, source: Block, nbytes: Optional[int] = None) -> None:
        """Enqueues a copy from block to block, of the smaller one's size by default."""
        count = min(destination.nbytes, source.nbytes) if nbytes is None else nbytes
        _check_range(destination, 0, count)
        _check_range(source, 0, count)
        self._copy(destination.address, source.address, count, lib.GPUSHARE_COPY_DEVICE_TO_DEVICE, destination, source)

    def fill(self, block: Block, value: int, nbytes: Optional[int] = None) -> None:
        """Enqueues setting the block's bytes to `value`."""
        count = block.nbytes if nbytes is None else nbytes
        _check_range(block, 0, count)
        address = block.address
        if block.on_host:
            self._enqueue(lambda kept=block._bytes: ctypes.memset(address, value, count))
        else:
            check(lib.gpushare_stream_fill(self.handle, address, value, count))

    def work(self, duration: float, demand: float = 1.0, work_class: int = 0) -> None:
        """Enqueues work of a known cost, in seconds alone, on a simulating device."""
        check(lib.gpushare_stream_work(self.handle, struct("gpushare_backend_work", duration_ns=int(duration * 1e9), demand=demand,
                                                           work_class=work_class)))

    def _copy(self, to: int, source: int, nbytes: int, kind: int, block: Block, other: Any) -> None:
        """`block` and `other` are what the addresses lie in: kept until the copy has finished."""
        if block.on_host:
            kept = (block._bytes, other._bytes if isinstance(other, Block) else other)
            self._enqueue(lambda kept=kept: ctypes.memmove(to, source, nbytes))
            return
        check(lib.gpushare_stream_copy(self.handle, to, source, nbytes, kind))
        if isinstance(other, Block):
            return
        # A host function behind the copy lets the buffer go. During a graph's capture it is refused: the stream keeps it.
        handle = calls.hold(lambda: other)
        if lib.gpushare_stream_launch_host(self.handle, _on_host_function, handle) != 0:
            calls.drop(handle)
            check(lib.gpushare_stream_synchronize(self.handle))

    def _enqueue(self, function: Callable[[], Any]) -> None:
        handle = calls.hold(function)
        status = lib.gpushare_stream_launch_host(self.handle, _on_host_function, handle)
        if status != 0:
            calls.drop(handle)
        check(status)


class SideStream(Closable, Stream):
    """A stream outside all lanes; closing it waits for its work."""

    def __init__(self, runtime: "Runtime", handle: Any) -> None:
        self.runtime = runtime
        self._failed = None
        self._own(handle, lib.gpushare_stream_release, runtime)


def _check_range(block: Block, offset: int, nbytes: int) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > block.nbytes:
        raise InvalidArgument(f"bytes {offset} to {offset + nbytes} do not lie in a block of {block.nbytes} bytes",
                              lib.GPUSHARE_INVALID_ARGUMENT)
