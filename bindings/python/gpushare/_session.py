"""Sessions, iterations, tickets, elastic ranges, gates."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional, Sequence

from . import _arrays
from ._cffi import ffi
from ._memory import Block, Stream, warn_of_views
from ._native import CallbackFailed, Closable, Error, as_dict, check, lib, nanoseconds, null_or, status_of, struct, text, wait
from ._values import KINDS, Bytes, Handles, calls, on_release, one_of, size_in_bytes

if TYPE_CHECKING:
    from ._runtime import Runtime

_log = logging.getLogger("gpushare")


GUARANTEED, OPPORTUNISTIC = "guaranteed", "opportunistic"
_CLASSES = {GUARANTEED: lib.GPUSHARE_CLASS_GUARANTEED, OPPORTUNISTIC: lib.GPUSHARE_CLASS_OPPORTUNISTIC}
_STATES = {lib.GPUSHARE_SESSION_QUEUED: "queued", lib.GPUSHARE_SESSION_RESIDENT: "resident",
           lib.GPUSHARE_SESSION_PAGED_OUT: "paged_out", lib.GPUSHARE_SESSION_CANCELLED: "cancelled",
           lib.GPUSHARE_SESSION_FAILED: "failed"}


# Functions of the user's that the library calls. None of them may let an exception out: cffi would only print it.


@ffi.callback("int32_t(void*, gpushare_iteration)")
def _on_iteration(data: Any, handle: Any) -> int:
    pushed = ffi.from_handle(data)
    return pushed.run(handle)


@ffi.callback("uint64_t(void*, uint64_t, uint64_t)")
def _on_give_back(data: Any, nbytes: int, within_ns: int) -> int:
    try:
        return int(ffi.from_handle(data)(nbytes, within_ns / 1e9))
    except BaseException:
        _log.exception("a range's give_back raised")
        return 2**64 - 1  # GPUSHARE_RANGE_NO_ANSWER


class Iteration:
    """One mini-batch, from its turn to its end. A `with` block ends it; an exception in it ends its session as failed."""

    def __init__(self, session: "Session", handle: Any) -> None:
        self.session = session
        self.handle = handle
        self._stream: Optional[Stream] = None
        self._quiet = False
        self._views: weakref.WeakSet = weakref.WeakSet()

    @property
    def stream(self) -> Stream:
        """The lane's stream, valid until the iteration ends."""
        if self._stream is None:
            out = ffi.new("gpushare_stream*")
            check(lib.gpushare_iteration_get_stream(self.handle, out))
            self._stream = Stream(self.session.runtime, out[0], self.session)
        return self._stream

    def alloc(self, nbytes: Bytes, alignment: int = 0) -> Block:
        """Ephemeral memory: gone when the iteration ends, at no cost."""
        count = size_in_bytes(nbytes)
        out = ffi.new("gpushare_device_address*")
        check(lib.gpushare_iteration_alloc(self.handle, count, alignment, out))
        return Block(self, self.session.runtime, out[0], count)

    def alloc_many(self, sizes: Sequence[Bytes], alignment: int = 0) -> List[Block]:
        """Ephemeral memory for each of the sizes in one call, all or none."""
        counts = [size_in_bytes(each) for each in sizes]
        out = ffi.new("gpushare_device_address[]", max(len(counts), 1))
        check(lib.gpushare_iteration_alloc_many(self.handle, len(counts), counts, alignment, out))
        return [Block(self, self.session.runtime, out[i], count) for i, count in enumerate(counts)]

    def array(self, shape: Any, dtype: Any = "<f4") -> Any:
        """An ephemeral array: numpy's on the host device, else a DeviceArray. Its contents are undefined at first.

        numpy computes at once and not in stream order, so on the host device the first array of an iteration waits until
        earlier work of the lane, which may use the same memory, has finished. To enqueue instead, use `alloc` and `launch`.
        """
        block = self.alloc(_array_bytes(shape, dtype))
        if block.on_host and not self._quiet:
            self.stream.synchronize()
            self._quiet = True
        return block.array(shape, dtype)

    def launch(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Enqueues a function on the lane's stream; see Stream.launch."""
        self.stream.launch(function, *arguments)

    def keep(self, block: Block) -> Block:
        """Promotes an ephemeral block: it outlives the iteration and counts as persistent."""
        check(lib.gpushare_iteration_keep(self.handle, block.address))
        block.owner = self.session
        return block

    def end(self) -> None:
        """Ends it: the lane goes on with the next session."""
        warn_of_views(self, "an iteration that has ended")
        check(lib.gpushare_iteration_end(self.handle))

    def fail(self, error: BaseException) -> None:
        """Ends it and its session as failed; no other session is touched."""
        message = f"{type(error).__name__}: {error}"
        self._views = weakref.WeakSet()
        check(lib.gpushare_iteration_fail(self.handle, status_of(error), message.encode()))

    def __enter__(self) -> "Iteration":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None or kind is GeneratorExit:  # a loop over Session.iterations() was left
            self.end()
            return
        try:
            self.fail(error)
        except Error:
            _log.exception("ending a failed iteration")  # the exception on its way says more


def _array_bytes(shape: Any, dtype: Any) -> int:
    count = 1
    for size in (shape,) if isinstance(shape, int) else shape:
        count *= int(size)
    return max(1, count * int(_arrays.typestr(dtype)[2:]))


class _Pushed:
    """A submitted function until it has run or never will."""

    def __init__(self, session: "Session", function: Callable[[Iteration], Any]) -> None:
        self.session = session
        self.function = function
        self.error: Optional[BaseException] = None
        self.result: Any = None
        self._mutex = threading.Lock()  # of what follows
        self._over = False
        self._waiters: list[Callable[[], None]] = []

    def run(self, handle: Any) -> int:
        iteration = Iteration(self.session, handle)
        try:
            self.result = self.function(iteration)
            warn_of_views(iteration, "an iteration that has ended")
            return 0
        except BaseException as error:
            self.error = error
            return status_of(error)

    def _released(self) -> None:
        with self._mutex:
            self._over, waiters = True, self._waiters
            self._waiters = []
        for waiter in waiters:
            try:
                waiter()
            except BaseException:
                _log.exception("telling that a submitted iteration is over")

    def when_over(self, waiter: Callable[[], None]) -> None:
        """Calls `waiter` as soon as the function has run or never will: at once, or on a thread of the library."""
        with self._mutex:
            if not self._over:
                self._waiters.append(waiter)
                return
        waiter()


class Ticket(Closable):
    """The outcome of a submitted iteration. Awaitable."""

    def __init__(self, handle: Any, pushed: _Pushed) -> None:
        self._pushed = pushed
        self._own(handle, lib.gpushare_ticket_release, pushed)

    def result(self, timeout: Optional[float] = None) -> Any:
        """Blocks until the iteration's device work has finished, and returns what the function returned.

        Raises TimedOut, Cancelled, DeviceLost, or CallbackFailed whose cause is the exception of the function.
        """
        try:
            wait(lambda slice_ns: lib.gpushare_ticket_wait(self.handle, slice_ns), timeout)
        except Error as error:
            if self._pushed.error is not None and error.status != lib.GPUSHARE_TIMED_OUT:
                raise CallbackFailed(f"the submitted function raised {self._pushed.error!r}",
                                     lib.GPUSHARE_CALLBACK_FAILED) from self._pushed.error
            raise
        return self._pushed.result

    def done(self) -> bool:
        """True if the outcome is there."""
        return lib.gpushare_ticket_wait(self.handle, 0) != lib.GPUSHARE_TIMED_OUT

    def __await__(self) -> Any:
        return self._outcome().__await__()

    async def _outcome(self) -> Any:
        # No thread is taken for a function that waits for its turn: asyncio has few of them, and the turn may depend on what other tasks do.
        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed, and nobody awaits
                loop.call_soon_threadsafe(answer)

        def answer() -> None:
            if not over.done():  # who awaited may have been cancelled
                over.set_result(None)

        self._pushed.when_over(tell)
        await over
        return await loop.run_in_executor(None, self.result)  # at most for the iteration's device work


class Range(Closable):
    """An elastic range: addresses of a session that memory is committed behind and decommitted from, in granules, by any thread.

    `give_back(nbytes, seconds)` is called on a thread of the range when another range waits for memory. It returns how many bytes it
    gives by then, and 0 declines. A range that does not answer in time keeps its bytes, and its session counts as opportunistic."""

    def __init__(self, session: "Session", reserved: Bytes, give_back: Optional[Callable[[int, float], int]], name: str, answer: float,
                 price: float) -> None:
        self._handles = Handles()
        params = struct("gpushare_range_params", reserved_bytes=size_in_bytes(reserved), answer_ns=int(answer * 1e9),
                        price_ns_per_byte=price)
        if name:
            encoded = ffi.new("char[]", name.encode())
            params.name = encoded
        if give_back is not None:
            params.give_back = _on_give_back
            params.user_data = self._handles.hold(give_back)
        out = ffi.new("gpushare_range*")
        check(lib.gpushare_range_open(session.handle, params, out))
        self._own(out[0], lib.gpushare_range_close, session)

    def commit(self, offset: int, nbytes: Bytes, timeout: Optional[float] = 0.0) -> None:
        """Puts memory behind [offset, offset + nbytes). Waits for room as long as `timeout` says; None: without end."""
        count = size_in_bytes(nbytes)
        if timeout == 0:
            check(lib.gpushare_range_commit(self.handle, offset, count, 0))
        else:
            wait(lambda slice_ns: lib.gpushare_range_commit(self.handle, offset, count, slice_ns), timeout)

    def decommit(self, offset: int, nbytes: Bytes) -> None:
        """Gives the memory behind [offset, offset + nbytes) back."""
        check(lib.gpushare_range_decommit(self.handle, offset, size_in_bytes(nbytes)))

    def info(self) -> dict[str, Any]:
        """Address, bytes and counts, as gpushare_range_info."""
        info = struct("gpushare_range_info")
        check(lib.gpushare_range_get_info(self.handle, info))
        return as_dict(info)


class Gate(Closable):
    """Holds the launches of an opportunistic session to what guaranteed sessions leave. Made by `Session.gate`."""

    def __init__(self, session: "Session", handle: Any) -> None:
        self._own(handle, lib.gpushare_gate_release, session)
        out = ffi.new("const uint32_t**")
        check(lib.gpushare_gate_get_flag(handle, out))
        self._flag = out[0]

    def enter(self, seconds: float, stream: Any = None, timeout: Optional[float] = None) -> None:
        """Returns when work that takes about `seconds` alone may be launched on `stream` (a `Stream`; None: `done` says when it is done)."""
        gate = self.handle  # raises when closed: then there is no flag either
        if self._flag[0] == 0:
            return
        native = ffi.NULL if stream is None else stream.handle
        wait(lambda slice_ns: lib.gpushare_gate_enter(gate, native, nanoseconds(seconds), slice_ns), timeout)

    def done(self, seconds: float) -> None:
        """Work that was let in without a stream is done."""
        check(lib.gpushare_gate_done(self.handle, nanoseconds(seconds)))

    def info(self) -> dict[str, Any]:
        """What is allowed now, and what is known of the guaranteed session that limits most, as gpushare_gate_info."""
        info = struct("gpushare_gate_info")
        check(lib.gpushare_gate_get_info(self.handle, info))
        return as_dict(info)


class Session(Closable):
    """One job: its memory and its turns. Made by `Runtime.open_session`."""

    def __init__(self, runtime: "Runtime", handle: Any, name: str) -> None:
        self.runtime = runtime
        self.name = name
        self._error: Optional[BaseException] = None
        self._views: weakref.WeakSet = weakref.WeakSet()
        self._own(handle, lib.gpushare_session_close, runtime)

    def iteration(self, timeout: Optional[float] = None) -> Iteration:
        """Blocks until it is this session's turn, and begins an iteration: `with session.iteration() as it: ...`."""
        self._raise()
        out = ffi.new("gpushare_iteration*")
        wait(lambda slice_ns: lib.gpushare_iteration_begin(self.handle, slice_ns, out), timeout)
        return Iteration(self, out[0])

    def iterations(self, count: Optional[int] = None) -> Iterator[Iteration]:
        """`for it in session.iterations(100): ...` runs the loop's body as that many iterations (None: without end).

        An exception that leaves the body does not reach the iterator: the iteration then ends as it is, and the session
        does not fail. Use `with session.iteration()` where it should.
        """
        done = 0
        before: Optional[Iteration] = None
        while count is None or done < count:
            with self.iteration() as iteration:
                yield iteration
                # The names of the loop's body hold their arrays until the next round assigns them: only then is an array kept too long.
                if before is not None:
                    warn_of_views(before, "an iteration that has ended", stacklevel=3)
                views, iteration._views = iteration._views, weakref.WeakSet()
            before = iteration
            before._views = views
            done += 1

    def submit(self, function: Callable[[Iteration], Any]) -> Ticket:
        """Queues `function(iteration)`; it runs on the lane's thread when it is the session's turn. Does not block."""
        self._raise()
        pushed = _Pushed(self, function)
        handle = calls.hold(pushed)
        out = ffi.new("gpushare_ticket*")
        status = lib.gpushare_session_submit(self.handle, _on_iteration, handle, on_release, out)
        if status != 0:
            calls.drop(handle)
        check(status)
        return Ticket(out[0], pushed)

    def alloc(self, nbytes: Bytes, kind: str = "model", alignment: int = 0) -> Block:
        """Persistent memory, freed with `Block.free` or with the session. Waits while the session is queued.

        Under a policy that pages sessions out (srtf, priority), and on a shared device, read and write it only inside iterations.
        """
        count = size_in_bytes(nbytes)
        out = ffi.new("gpushare_device_address*")
        check(lib.gpushare_session_alloc(self.handle, one_of("kind", kind, KINDS), count, alignment, out))
        return Block(self, self.runtime, out[0], count)

    def array(self, shape: Any, dtype: Any = "<f4", kind: str = "model") -> Any:
        """A persistent array: numpy's on the host device, else a DeviceArray. Its contents are undefined at first."""
        return self.alloc(_array_bytes(shape, dtype), kind).array(shape, dtype)

    def range(self, reserved: Bytes, give_back: Optional[Callable[[int, float], int]] = None, name: str = "", answer: float = 0.0,
              price: float = 0.0) -> "Range":
        """Reserves addresses for an elastic range. See Range."""
        return Range(self, reserved, give_back, name, answer, price)

    def wait_admitted(self, timeout: Optional[float] = None) -> None:
        """Blocks until the session is resident."""
        wait(lambda slice_ns: lib.gpushare_session_wait_admitted(self.handle, slice_ns), timeout)

    def cancel(self) -> None:
        """Stops the session at its next iteration boundary. Does not block."""
        check(lib.gpushare_session_cancel(self.handle))

    def set_priority(self, priority: int) -> None:
        """For the policy 'priority': the larger runs first."""
        check(lib.gpushare_session_set_priority(self.handle, priority))

    def set_weight(self, weight: float) -> None:
        """For the policy 'fair': its share of the device's time among those that want it, from its next iteration on."""
        check(lib.gpushare_session_set_weight(self.handle, weight))

    def set_quota(self, memory: Bytes) -> None:
        """Changes the hard limit on its memory; 0: none. Lowered, it is a target to which its promises fall."""
        check(lib.gpushare_session_set_quota(self.handle, size_in_bytes(memory)))

    def set_remaining(self, seconds: float) -> None:
        """Declares the device time still needed, which orders sessions under srtf."""
        check(lib.gpushare_session_set_remaining(self.handle, nanoseconds(seconds)))

    def info(self) -> dict[str, Any]:
        """State and statistics, as gpushare_session_info; `state` is a name."""
        info = struct("gpushare_session_info")
        check(lib.gpushare_session_get_info(self.handle, info))
        result = as_dict(info)
        result["state"] = _STATES.get(result["state"], result["state"])
        return result

    def set_target_slowdown(self, target: float) -> None:
        """The slowdown that a guaranteed session accepts from opportunistic ones that launch through gates; 0: the runtime's."""
        check(lib.gpushare_session_set_target_slowdown(self.handle, target))

    def gate(self) -> "Gate":
        """What the launches of this session go through; see `Gate`."""
        out = ffi.new("gpushare_gate*")
        check(lib.gpushare_gate_open(self.handle, out))
        return Gate(self, out[0])

    def explain_wait(self) -> str:
        """One sentence, for people: what the session's next iteration waits for, or that it waits for nothing."""
        out = ffi.new("char[]", 1024)
        check(lib.gpushare_session_explain_wait(self.handle, out, 1024))
        return text(out)

    def close(self) -> None:
        """Ends the session: queued work is cancelled, all its memory returns. Blocks for its running iteration."""
        if not self.closed:
            warn_of_views(self, f"session {self.name!r}, which has been closed")
        super().close()

    def _fail(self, error: BaseException) -> None:
        """A launched function raised, on a thread of the device."""
        self._error = self._error or error
        if self._handle is not None:
            lib.gpushare_session_cancel(self._handle)

    def _raise(self) -> None:
        if self._error is not None:
            raise CallbackFailed(f"a function launched by session {self.name!r} raised {self._error!r}",
                                 lib.GPUSHARE_CALLBACK_FAILED) from self._error


def session_params(*, name: Optional[str] = None, session_class: str = GUARANTEED, persistent_bytes: Bytes = 0, ephemeral_bytes: Bytes = 0,
                   remaining: Optional[float] = None, iterations_total: int = 0, memory: Bytes = 0, priority: int = 0,
                   weight: float = 1.0, queue: bool = True, spill: bool = False, plan_iterations: bool = False,
                   compute_units: int = 0, least_bytes: Bytes = 0, may_upgrade: bool = False) -> tuple[Any, Any]:
    """gpushare_session_params, and what must stay alive while it is used. See Runtime.open_session."""
    c_name = null_or(name)
    flags = (lib.GPUSHARE_SESSION_ALLOW_QUEUEING if queue else 0) | (lib.GPUSHARE_SESSION_ALLOW_SPILL if spill else 0)
    flags |= lib.GPUSHARE_SESSION_MAY_UPGRADE if may_upgrade else 0
    params = struct("gpushare_session_params", session_class=one_of("session_class", session_class, _CLASSES), name=c_name,
                    persistent_bytes=size_in_bytes(persistent_bytes), ephemeral_bytes=size_in_bytes(ephemeral_bytes),
                    remaining_ns=0 if remaining is None else nanoseconds(remaining), iterations_total=iterations_total,
                    quota_bytes=size_in_bytes(memory), priority=priority, flags=flags, weight=weight,
                    plan_iterations=int(plan_iterations), compute_units=compute_units,
                    least_bytes=size_in_bytes(least_bytes))
    return params, c_name
