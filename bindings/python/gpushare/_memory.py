"""Blocks of device memory and streams."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Callable, Optional

from . import _arrays
from ._cffi import ffi
from ._native import Closable, InvalidArgument, as_dict, check, lib, struct
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
    """Device memory that a session, or an iteration, holds. `address` is the device's."""

    def __init__(self, owner: Any, runtime: "Runtime", address: int, nbytes: int) -> None:
        self.owner = owner
        self.runtime = runtime
        self.address = address
        self.nbytes = nbytes

    @property
    def on_host(self) -> bool:
        """True if the CPU can read and write it in place."""
        return self.runtime._on_host

    @property
    def device_index(self) -> int:
        """The number of the GPU; 0 on other devices."""
        return self.runtime._device_index

    def array(self, shape: Any = None, dtype: Any = "<f4", offset: int = 0) -> Any:
        """The block as an array: numpy's on the host device, else a DeviceArray. By default all its bytes."""
        if shape is None:
            shape, dtype = self.nbytes, "|u1"
        return _arrays.view(self, shape, dtype, offset)

    def free(self) -> None:
        """Frees it in the order of its owner's stream. Views of it must not be used afterwards."""
        check(lib.gpushare_memory_free(self.runtime.handle, self.address))

    def record_use(self, stream: "Stream") -> None:
        """Work enqueued on `stream` up to now uses the block: once freed it is reused only after that work."""
        check(lib.gpushare_memory_record_use(self.runtime.handle, self.address, stream.handle))

    def info(self) -> dict[str, Any]:
        """Session, kind and bytes, as gpushare_block_info."""
        info = struct("gpushare_block_info")
        check(lib.gpushare_memory_get_info(self.runtime.handle, self.address, info))
        return as_dict(info)

    def _watch(self, array: Any) -> None:
        self.owner._views.add(array)

    def __repr__(self) -> str:
        return f"Block(address={self.address:#x}, nbytes={self.nbytes})"


def warn_of_views(owner: Any, what: str, stacklevel: int = 4) -> None:
    alive = len(owner._views)
    owner._views = weakref.WeakSet()
    if alive:
        warnings.warn(f"{alive} arrays still view memory of {what}; they must not be used any more", ResourceWarning, stacklevel=stacklevel)


class Stream:
    """An in-order queue of device work: a lane's, or a side stream made by `Runtime.create_stream`."""

    def __init__(self, runtime: "Runtime", handle: Any, session: Optional["Session"] = None) -> None:
        self.runtime = runtime
        self.handle = handle
        self._session = session

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

        If it raises, its session is cancelled, and the session's next call raises CallbackFailed with that exception as its
        cause; on a side stream the exception is logged.
        """
        session = self._session

        def call() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                if session is None:
                    _log.exception("a function launched on a side stream raised")
                else:
                    session._fail(error)

        handle = calls.hold(call)
        status = lib.gpushare_stream_launch_host(self.handle, _on_host_function, handle)
        if status != 0:
            calls.drop(handle)
        check(status)

    def copy_from_host(self, destination: Block, source: Any, offset: int = 0) -> None:
        """Enqueues a copy of a buffer (bytes, numpy's array) to the block. The buffer is kept until it has finished."""
        buffer = ffi.from_buffer(source)
        _check_range(destination, offset, len(buffer))
        check(lib.gpushare_stream_copy(self.handle, destination.address + offset, int(ffi.cast("uintptr_t", buffer)), len(buffer),
                                       lib.GPUSHARE_COPY_HOST_TO_DEVICE))
        self._keep(buffer)

    def copy_to_host(self, destination: Any, source: Block, offset: int = 0) -> None:
        """Enqueues a copy of the block to a writable buffer, which is kept until it has finished."""
        buffer = ffi.from_buffer(destination, require_writable=True)
        _check_range(source, offset, len(buffer))
        check(lib.gpushare_stream_copy(self.handle, int(ffi.cast("uintptr_t", buffer)), source.address + offset, len(buffer),
                                       lib.GPUSHARE_COPY_DEVICE_TO_HOST))
        self._keep(buffer)

    def copy(self, destination: Block, source: Block, nbytes: Optional[int] = None) -> None:
        """Enqueues a copy from block to block, of the smaller one's size by default."""
        count = min(destination.nbytes, source.nbytes) if nbytes is None else nbytes
        _check_range(destination, 0, count)
        _check_range(source, 0, count)
        check(lib.gpushare_stream_copy(self.handle, destination.address, source.address, count, lib.GPUSHARE_COPY_DEVICE_TO_DEVICE))

    def fill(self, block: Block, value: int, nbytes: Optional[int] = None) -> None:
        """Enqueues setting the block's bytes to `value`."""
        count = block.nbytes if nbytes is None else nbytes
        _check_range(block, 0, count)
        check(lib.gpushare_stream_fill(self.handle, block.address, value, count))

    def work(self, duration: float, demand: float = 1.0, work_class: int = 0) -> None:
        """Enqueues work of a known cost, in seconds alone, on a simulating device."""
        check(lib.gpushare_stream_work(self.handle, struct("gpushare_backend_work", duration_ns=int(duration * 1e9), demand=demand,
                                                           work_class=work_class)))

    def _keep(self, buffer: Any) -> None:
        # A host function behind the copy lets the buffer go. During a graph's capture it is refused: the stream keeps it.
        handle = calls.hold(lambda: buffer)
        if lib.gpushare_stream_launch_host(self.handle, _on_host_function, handle) != 0:
            calls.drop(handle)
            check(lib.gpushare_stream_synchronize(self.handle))


class SideStream(Closable, Stream):
    """A stream outside all lanes; closing it waits for its work."""

    def __init__(self, runtime: "Runtime", handle: Any) -> None:
        self.runtime = runtime
        self._session = None
        self._own(handle, lib.gpushare_stream_release, runtime)


def _check_range(block: Block, offset: int, nbytes: int) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > block.nbytes:
        raise InvalidArgument(f"bytes {offset} to {offset + nbytes} do not lie in a block of {block.nbytes} bytes",
                              lib.GPUSHARE_INVALID_ARGUMENT)
