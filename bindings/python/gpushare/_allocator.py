"""The allocator that frameworks plug in, without a framework: gpushare/allocator.h."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional

from ._cffi import ffi
from ._native import Closable, Error, as_dict, check, lib, struct, text
from ._session import Iteration, Session, begin_iteration
from ._values import Bytes, Handles, size_in_bytes

if TYPE_CHECKING:
    from ._runtime import Runtime

_log = logging.getLogger("gpushare")
_NO_STREAM = 2**64 - 1


@ffi.callback("void(void*, uint64_t, uint64_t, const char*)")
def _on_failure(data: Any, session_id: int, nbytes: int, message: Any) -> None:
    try:
        ffi.from_handle(data)(session_id, nbytes, text(message))
    except BaseException:
        _log.exception("an observer of failed allocations raised")


def _native(stream: Optional[int]) -> Any:
    return ffi.cast("void*", _NO_STREAM if stream is None else stream)


class Allocator(Closable):
    """Device memory for a framework that allocates array by array, and does not say which array outlives an iteration.

    An allocation belongs to the session whose lane or adopted stream it names, else to the calling thread's iteration, else to the session that
    the thread is bound to (`use`), else to the default session. In an iteration it is ephemeral; what is alive at the iteration's end is kept.
    Streams are the device's own handles as integers (a CUstream, cudaStream_t); None: no stream. All methods may be called from any thread.
    `gpushare.cupy` and `gpushare.numba` are adaptors; gpushare.torch has its own.
    """

    def __init__(self, runtime: "Runtime") -> None:
        self.runtime = runtime
        out = ffi.new("gpushare_allocator*")
        check(lib.gpushare_allocator_create(runtime.handle, struct("gpushare_allocator_params"), out))
        self._held = Handles()  # observers, until the allocator is released
        self._own(out[0], lib.gpushare_allocator_release, runtime, self._held)

    def allocate(self, nbytes: Bytes, stream: Optional[int] = None, alignment: int = 0) -> int:
        """The address of a new block; 0 for 0 bytes. Raises OutOfMemory, or NotFound where no session owns it."""
        out = ffi.new("gpushare_device_address*")
        check(lib.gpushare_allocator_alloc(self.handle, size_in_bytes(nbytes), alignment, _native(stream), out))
        return int(out[0])

    def free(self, address: int, stream: Optional[int] = None) -> None:
        """Frees a block in the order of `stream`, for which it was allocated."""
        check(lib.gpushare_allocator_free(self.handle, address, _native(stream)))

    def record_use(self, address: int, stream: int) -> None:
        """Work of another stream up to now uses the block: once freed it is used again after that work."""
        check(lib.gpushare_allocator_record_use(self.handle, address, _native(stream)))

    def adopt_stream(self, session: Session, stream: int) -> None:
        """Allocations that name the stream are the session's, until `forget_stream`."""
        check(lib.gpushare_allocator_adopt_stream(self.handle, session.handle, _native(stream)))

    def forget_stream(self, stream: int) -> None:
        """Before the framework destroys a stream, or to end its adoption."""
        check(lib.gpushare_allocator_forget_stream(self.handle, _native(stream)))

    def set_default_session(self, session: Optional[Session]) -> None:
        """Whose the allocations are that have no other owner."""
        check(lib.gpushare_allocator_set_default_session(self.handle, ffi.NULL if session is None else session.handle))

    @contextlib.contextmanager
    def use(self, session: Session) -> Iterator[Session]:
        """Allocations of the calling thread are the session's: persistent outside its iterations. Not nested."""
        check(lib.gpushare_allocator_bind_thread(self.handle, session.handle))
        try:
            yield session
        finally:
            lib.gpushare_allocator_bind_thread(self.handle, ffi.NULL)

    @contextlib.contextmanager
    def iteration(self, session: Session, timeout: Optional[float] = None) -> Iterator[Iteration]:
        """An iteration at whose end the blocks that are alive are kept, also when an exception leaves it.

        Raises DeviceOutOfMemory if there is no room to keep them: the turn then lasts until the session is closed, or a later try in
        `end(iteration)` succeeds.
        """
        session._raise()
        iteration = Iteration(session, begin_iteration(session.handle, timeout, session.runtime))
        try:
            yield iteration
        except BaseException:
            try:
                self.end(iteration)
            except Error:
                _log.exception("ending an iteration in which an exception was raised")  # that exception says more
            raise
        self.end(iteration)

    def end(self, iteration: Iteration) -> None:
        """Ends an iteration; its blocks that are alive are persistent then."""
        check(lib.gpushare_allocator_end_iteration(self.handle, iteration.handle))
        iteration._ended = True

    def add_observer(self, function: Callable[[int, int, str], Any]) -> None:
        """`function(session_id, bytes, message)` is told of each allocation that fails, on its thread, before the framework raises.

        For logs and snapshots: `runtime.write_snapshot(path)` then shows who holds what. To free something instead, so that the allocation is
        tried again: `runtime.set_out_of_memory_function`.
        """
        check(lib.gpushare_allocator_add_observer(self.handle, _on_failure, self._held.hold(function)))

    def info(self, session: Any = None) -> dict[str, Any]:
        """current_bytes, peak_bytes, reserved_bytes, allocations, failures, ...: of one session, or of all."""
        info = struct("gpushare_allocator_info")
        check(lib.gpushare_allocator_get_info(self.handle, ffi.NULL if session is None else session.handle, info))
        return as_dict(info)

    def reset_peaks(self, session: Any = None) -> None:
        """peak_bytes counts from now on."""
        check(lib.gpushare_allocator_reset_peaks(self.handle, ffi.NULL if session is None else session.handle))

    def trim(self) -> int:
        """Gives device memory that is kept for speed alone back to the driver, and tells how many bytes."""
        out = ffi.new("uint64_t*")
        check(lib.gpushare_allocator_trim(self.handle, out))
        return int(out[0])
