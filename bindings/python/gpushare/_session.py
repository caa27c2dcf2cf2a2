"""Sessions, iterations, tickets, elastic ranges, gates."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional, Sequence, TypedDict

from . import _arrays
from ._cffi import ffi
from ._memory import Block, RangeMemory, Stream
from ._native import FIRST_WAIT_NS, CallbackFailed, Cancelled, Closable, Error, Exports, InvalidState, as_dict, check, last_error, lib, nanoseconds, null_or, status_of, struct, text, wait
from ._values import KINDS, Bytes, Handles, calls, on_release, one_of, size_in_bytes

if TYPE_CHECKING:
    from ._runtime import Runtime


class SessionOptions(TypedDict, total=False):
    """Options of `Runtime.open_session` beside the name."""

    session_class: str  # 'guaranteed' or 'opportunistic'
    persistent_bytes: Bytes
    ephemeral_bytes: Bytes
    remaining: Optional[float]
    iterations_total: int
    memory: Bytes
    priority: int
    weight: float
    queue: bool
    spill: bool
    plan_iterations: bool
    compute_units: int
    least_bytes: Bytes
    may_upgrade: bool
    fail_on_error: bool


_log = logging.getLogger("gpushare")


GUARANTEED, OPPORTUNISTIC = "guaranteed", "opportunistic"
_CLASSES = {GUARANTEED: lib.GPUSHARE_CLASS_GUARANTEED, OPPORTUNISTIC: lib.GPUSHARE_CLASS_OPPORTUNISTIC}


# Functions of the user's that the library calls. None of them may let an exception out: cffi would only print it.


@ffi.callback("int32_t(void*, gpushare_iteration)")
def _on_iteration(data: Any, handle: Any) -> int:
    return int(ffi.from_handle(data).run(handle))


@ffi.callback("uint64_t(void*, uint64_t, uint64_t)")
def _on_give_back(data: Any, nbytes: int, within_ns: int) -> int:
    try:
        return int(ffi.from_handle(data)(nbytes, within_ns / 1e9))
    except BaseException:
        _log.exception("a range's give_back raised")
        return 2**64 - 1  # GPUSHARE_RANGE_NO_ANSWER


_new, _ITERATION, _ADDRESS = ffi.new, ffi.typeof("gpushare_iteration*"), ffi.typeof("gpushare_device_address*")


def begin_iteration(session: Any, timeout: Optional[float], runtime: "Runtime") -> Any:
    """Waits for a session's turn. Returns the library's iteration."""
    out = _new(_ITERATION)
    if timeout is None:  # a turn that comes soon costs one call
        status = lib.gpushare_iteration_begin(session, FIRST_WAIT_NS, out)
        if status == 0:
            return out[0]
        if status != lib.GPUSHARE_TIMED_OUT:
            raise last_error(status)
    wait(lambda slice_ns: lib.gpushare_iteration_begin(session, slice_ns, out), timeout, runtime._stop_waiting)
    return out[0]


class Iteration:
    """One mini-batch, from its turn to its end. A `with` block ends it, also when an exception leaves the block: the work so far was for
    nothing, and the session goes on. With `fail_on_error=True` the session has then failed."""

    # Most iterations need these alone. Begin and end are a few calls of the library, and Python must not cost more than they do.
    _stream: Optional[Stream] = None
    _ended = False
    _exports = Exports()
    _blocks: List[Block] = []  # on a GPU: other libraries may use them after the end

    def __init__(self, session: Any, handle: Any, failed: Optional[Callable[[BaseException], None]] = None) -> None:
        self.session = session
        self.handle = handle
        self._failed = failed  # told what a launched function raises; None: the session's next call tells it
        if not session.runtime._on_host:
            self._exports, self._blocks = Exports(), []

    @property
    def _gone(self) -> bool:
        return self._ended or bool(self.session._gone)

    @property
    def stream(self) -> Stream:
        """The lane's stream, valid until the iteration ends."""
        if self._stream is None:
            out = ffi.new("gpushare_stream*")
            check(lib.gpushare_iteration_get_stream(self.handle, out))
            session, failed = self.session, self._failed

            def tell(error: BaseException) -> None:
                if failed is None or session._fail_on_error:
                    session._fail(error)
                if failed is not None:
                    failed(error)

            self._stream = Stream(session.runtime, out[0], tell)
        return self._stream

    def alloc(self, nbytes: Bytes, alignment: int = 0) -> Block:
        """Ephemeral memory: gone when the iteration ends, at no cost."""
        count = size_in_bytes(nbytes)
        out = ffi.new("gpushare_device_address*")
        check(lib.gpushare_iteration_alloc(self.handle, count, alignment, out))
        return self._block(out[0], count, alignment)

    def _block(self, address: int, nbytes: int, alignment: int) -> Block:
        block = Block(self, self.session.runtime, address, nbytes, alignment)
        if not block.on_host:
            self._blocks.append(block)
        return block

    def alloc_many(self, sizes: Sequence[Bytes], alignment: int = 0) -> List[Block]:
        """Ephemeral memory for each of the sizes in one call, all or none."""
        counts = [size_in_bytes(each) for each in sizes]
        out = ffi.new("gpushare_device_address[]", max(len(counts), 1))
        check(lib.gpushare_iteration_alloc_many(self.handle, len(counts), counts, alignment, out))
        return [self._block(out[i], count, alignment) for i, count in enumerate(counts)]

    def array(self, shape: Any, dtype: Any = "<f4") -> Any:
        """An ephemeral array: numpy's on the host device, else a DeviceArray. Its contents are undefined at first.

        The session is charged for it until the iteration ends. On the host device the array may be read for as long as it lives; on a GPU
        it is gone, unless another library uses it: then it is kept, and counts as persistent until the last user is gone.
        """
        sizes, kind, nbytes = _arrays.layout(shape, dtype)
        out = _new(_ADDRESS)
        status = lib.gpushare_iteration_alloc(self.handle, nbytes or 1, 0, out)
        if status != 0:
            raise last_error(status)
        if self.session.runtime._on_host:
            return _arrays.host_array(sizes, kind, nbytes)
        return _arrays.DeviceArray(self._block(out[0], nbytes or 1, 0), sizes, kind)

    def launch(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Enqueues a function on the lane's stream; see Stream.launch."""
        self.stream.launch(function, *arguments)

    def keep(self, block: Block) -> Block:
        """Promotes an ephemeral block: it outlives the iteration and counts as persistent."""
        block._check()
        check(lib.gpushare_iteration_keep(self.handle, block._token))
        block.owner = self.session
        self.session._exports.add_all(block._exports)
        return block

    def end(self) -> None:
        """Ends it: the lane goes on with the next session.

        Raises DeviceOutOfMemory when other libraries still use its memory on a GPU and the device has no room to keep it: the turn then
        lasts until these arrays are gone.
        """
        self._end(lib.gpushare_iteration_end)

    def fail(self, error: BaseException) -> None:
        """Ends it and its session as failed; no other session is touched."""
        if self.session._exports:
            self.session._stop(error)
            self.end()
            return
        message = f"{type(error).__name__}: {error}".encode()
        self._end(lambda handle: lib.gpushare_iteration_fail(handle, status_of(error), message))

    def _end(self, end: Callable[[Any], int]) -> None:
        try:
            self._keep_exported()
        except Error:
            self._ended = True
            handle, session = self.handle, self.session
            session._exports.add_all(self._exports)
            self._exports.when_gone(lambda: (end(handle), session))
            raise
        check(end(self.handle))
        self._ended = True

    def _keep_exported(self) -> None:
        """Blocks that other libraries use, on a GPU, stay until these are done."""
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            if block._exports and block.owner is self and not block.gone:
                self.keep(block)
                block._freed = True
                block._free_after_exports()

    def __enter__(self) -> "Iteration":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._ended:  # by end() or fail() in the block
            return
        if error is None and not self._blocks:
            status = lib.gpushare_iteration_end(self.handle)
            if status != 0:
                raise last_error(status)
            self._ended = True
            return
        leaves_a_loop = kind is GeneratorExit  # over Session.iterations()
        try:
            if error is None or leaves_a_loop or not self.session._fail_on_error:
                self.end()
            else:
                self.fail(error)
        except Error:
            if error is None or leaves_a_loop:
                raise
            _log.exception("ending an iteration in which an exception was raised")  # that exception says more


class _TicketHandle(Closable):
    """The library's ticket."""

    def __init__(self, handle: Any, ticket: "Ticket") -> None:
        self._own(handle, lib.gpushare_ticket_release)


class Ticket(concurrent.futures.Future):  # type: ignore[type-arg]  # of what the function returns
    """The outcome of a submitted iteration: a concurrent.futures.Future that is also awaitable. It is done when the iteration's device
    work has finished. Its exception is Cancelled, DeviceLost, or CallbackFailed whose cause is what the function raised.

    `cancel()` before the function has begun has it never run. Callbacks run on threads of gpushare and must be quick.
    """

    def __init__(self, session: "Session", function: Callable[[Iteration], Any]) -> None:
        super().__init__()
        self._session = session
        self._function: Optional[Callable[[Iteration], Any]] = function
        self._raised: Optional[BaseException] = None
        self._value: Any = None
        self._ran = self._over = False
        self._ticket: Optional[_TicketHandle] = None
        self._submitting = threading.RLock()  # held until _ticket is there

    def _submit(self) -> None:
        handle = calls.hold(self)
        out = ffi.new("gpushare_ticket*")
        with self._submitting:
            status = lib.gpushare_session_submit(self._session.handle, _on_iteration, handle, on_release, out)
            if status != 0:
                calls.drop(handle)
            check(status)
            self._ticket = _TicketHandle(out[0], self)

    def run(self, handle: Any) -> int:
        """The library's call when it is the session's turn. Returns a status."""
        session, iteration = self._session, Iteration(self._session, handle, self._fail)
        function, self._function = self._function, None
        if function is None or not self.set_running_or_notify_cancel():
            return 0
        self._ran = True
        try:
            session._raise_if_stopped()
            self._value = function(iteration)
            iteration._keep_exported()
            iteration._ended = True
            return 0
        except BaseException as error:
            self._raised = error
            return session._status_after(iteration, error)

    def _fail(self, error: BaseException) -> None:
        """A function that it launched raised, on a thread of the device."""
        self._raised = self._raised or error

    def _released(self) -> None:
        """The function has run, or never will."""
        with self._submitting:
            self._function, self._over = None, True
        if not self.done():
            _waiter.add(self)

    def _ask(self, timeout_ns: int) -> int:
        """Waits for the device, and resolves the future unless that takes longer."""
        ticket = self._ticket
        if ticket is None or ticket.closed:  # nobody to ask: what the function did decides
            if not self._over:
                return lib.GPUSHARE_TIMED_OUT
            status = 0 if self._ran else lib.GPUSHARE_CANCELLED
        else:
            status = lib.gpushare_ticket_wait(ticket.handle, timeout_ns)
        if status == lib.GPUSHARE_TIMED_OUT:
            return status
        error: Optional[Error] = None
        if self._raised is not None:
            error = CallbackFailed(f"the submitted function raised {self._raised!r}", lib.GPUSHARE_CALLBACK_FAILED)
            error.__cause__ = self._raised
        elif status != 0:
            error = last_error(status)
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # resolved or cancelled meanwhile
            if error is None:
                self.set_result(self._value)
            else:
                self.set_exception(error)
        return 0

    def _await_device(self, timeout: Optional[float]) -> None:
        if not super().done() and self._ticket is not None and not self._ticket.closed:
            wait(self._ask, timeout, self._session.runtime._stop_waiting)

    def result(self, timeout: Optional[float] = None) -> Any:
        """Blocks until the iteration's device work has finished, and returns what the function returned. Raises TimedOut as well."""
        self._await_device(timeout)
        return super().result(timeout)

    def exception(self, timeout: Optional[float] = None) -> Optional[BaseException]:
        """As result(), but returns the exception; None: there was none."""
        self._await_device(timeout)
        return super().exception(timeout)

    def done(self) -> bool:
        """True if the outcome is there."""
        return super().done() or (self._ask(0) == 0 and super().done())

    def close(self) -> None:
        """Gives the ticket back. The iteration still runs."""
        if self._ticket is not None:
            self._ticket.close()

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __await__(self) -> Any:
        # No thread is taken for a function that waits for its turn.
        return asyncio.wrap_future(self).__await__()


class _Waiter:
    """Resolves tickets whose functions have run but whose device work has not finished. Its thread lives while there are any."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._tickets: List[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        with self._mutex:
            self._tickets.append(ticket)
            if len(self._tickets) == 1:
                threading.Thread(target=self._run, name="gpushare-tickets", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._mutex:
                tickets = list(self._tickets)
            try:
                tickets[0]._ask(5_000_000)
            except Error:
                _log.exception("waiting for a submitted iteration")
            over = {id(ticket) for ticket in tickets if ticket.done()}
            del tickets
            with self._mutex:
                self._tickets = [ticket for ticket in self._tickets if id(ticket) not in over]
                if not self._tickets:
                    return


_waiter = _Waiter()


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
        self._exports = Exports()
        self._own(out[0], lib.gpushare_range_close, session, exports=self._exports)
        info = self.info()
        self._granule = info["granule_bytes"]
        self._committed = bytearray(info["reserved_bytes"] // self._granule)  # granules, as the calls below leave them
        self._memory = RangeMemory(session, info["address"], info["reserved_bytes"], self._exports)

    def commit(self, offset: int, nbytes: Bytes, timeout: Optional[float] = 0.0) -> None:
        """Puts memory behind [offset, offset + nbytes). Waits for room as long as `timeout` says; None: without end."""
        count = size_in_bytes(nbytes)
        if timeout == 0:
            check(lib.gpushare_range_commit(self.handle, offset, count, 0))
        else:
            wait(lambda slice_ns: lib.gpushare_range_commit(self.handle, offset, count, slice_ns), timeout)
        self._mark(offset, count, 1)

    def decommit(self, offset: int, nbytes: Bytes) -> None:
        """Gives the memory behind [offset, offset + nbytes) back.

        On a GPU it raises InvalidState while an array over these bytes that another library uses is alive. On the host device such an array keeps
        its bytes, which are then the process's own.
        """
        count = size_in_bytes(nbytes)
        self._memory.check_decommit(offset, count)
        check(lib.gpushare_range_decommit(self.handle, offset, count))
        self._mark(offset, count, 0)
        self._memory.drop(offset, count)

    def array(self, shape: Any, dtype: Any = "<f4", offset: int = 0) -> Any:
        """Committed bytes from `offset` on as an array: numpy's on the host device, else a DeviceArray, for `torch.from_dlpack` and others.

        Raises InvalidState unless all its bytes are committed. Under a policy that pages sessions out, and on a shared device, use it inside
        iterations only.
        """
        end = offset + _arrays.bytes_of(shape, dtype)
        if offset < 0 or end > self._memory.nbytes or not all(self._committed[offset // self._granule:-(-end // self._granule)]):
            raise InvalidState(f"bytes {offset} to {end} of the range are not all committed", lib.GPUSHARE_INVALID_STATE)
        self.handle  # raises when closed
        return _arrays.view(self._memory, shape, dtype, offset)

    def close(self) -> None:
        """Gives memory and addresses back; on a GPU with the last array that another library uses."""
        if self.closed or not self._exports:
            super().close()
        else:
            self._close_after(self._exports)

    def _mark(self, offset: int, nbytes: int, committed: int) -> None:
        first, end = offset // self._granule, (offset + nbytes) // self._granule
        self._committed[first:end] = bytes([committed]) * (end - first)

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

    def __init__(self, runtime: "Runtime", handle: Any, name: str, fail_on_error: bool = False) -> None:
        self.runtime = runtime
        self.name = name
        self._error: Optional[BaseException] = None
        self._stopped = False
        self._fail_on_error = fail_on_error
        self._exports = Exports()
        self._own(handle, lib.gpushare_session_close, runtime, exports=self._exports)

    @property
    def _gone(self) -> bool:
        return self._handle is None or self.runtime._handle is None

    def iteration(self, timeout: Optional[float] = None) -> Iteration:
        """Blocks until it is this session's turn, and begins an iteration: `with session.iteration() as it: ...`."""
        if self._error is not None:
            self._raise()
        return Iteration(self, begin_iteration(self.handle, timeout, self.runtime))

    def iterations(self, count: Optional[int] = None) -> Iterator[Iteration]:
        """`for it in session.iterations(100): ...` runs the loop's body as that many iterations (None: without end).

        An exception that leaves the body does not reach the iterator, and the iteration ends as it is.
        """
        done = 0
        while count is None or done < count:
            with self.iteration() as iteration:
                yield iteration
            done += 1

    def submit(self, function: Callable[[Iteration], Any]) -> Ticket:
        """Queues `function(iteration)`; it runs on the lane's thread when it is the session's turn. Does not block."""
        self._raise()
        ticket = Ticket(self, function)
        ticket._submit()
        return ticket

    def alloc(self, nbytes: Bytes, kind: str = "model", alignment: int = 0) -> Block:
        """Persistent memory, freed with `Block.free` or with the session. Waits while the session is queued.

        Under a policy that pages sessions out (srtf, priority), and on a shared device, read and write it only inside iterations.
        """
        count = size_in_bytes(nbytes)
        out = ffi.new("gpushare_device_address*")
        check(lib.gpushare_session_alloc(self.handle, one_of("kind", kind, KINDS), count, alignment, out))
        return Block(self, self.runtime, out[0], count, alignment)

    def array(self, shape: Any, dtype: Any = "<f4", kind: str = "model") -> Any:
        """A persistent array: numpy's on the host device, else a DeviceArray. Its contents are undefined at first.

        On the host device it may be read at any time, also after the session was closed: then it is ordinary memory of the process.
        """
        sizes, typestr, nbytes = _arrays.layout(shape, dtype)
        block = self.alloc(nbytes or 1, kind)
        return _arrays.host_array(sizes, typestr, nbytes) if block.on_host else _arrays.DeviceArray(block, sizes, typestr)

    def range(self, reserved: Bytes, give_back: Optional[Callable[[int, float], int]] = None, name: str = "", answer: float = 0.0,
              price: float = 0.0) -> "Range":
        """Reserves addresses for an elastic range. See Range."""
        return Range(self, reserved, give_back, name, answer, price)

    def wait_admitted(self, timeout: Optional[float] = None) -> None:
        """Blocks until the session is resident."""
        wait(lambda slice_ns: lib.gpushare_session_wait_admitted(self.handle, slice_ns), timeout, self.runtime._stop_waiting)

    def cancel(self) -> None:
        """Stops the session at its next iteration boundary. Does not block. Its memory returns then, on a GPU as `close` says."""
        handle = self.handle
        if not self._exports:
            check(lib.gpushare_session_cancel(handle))
        else:
            self._stop(Cancelled(f"session {self.name!r} was cancelled", lib.GPUSHARE_CANCELLED))

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
        return as_dict(info)

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
        """Ends the session: queued work is cancelled, all its memory returns. Blocks for its running iteration.

        On a GPU the session is closed with the last array over its memory that another library still uses; models likewise on every device.
        """
        if self.closed or not self._exports:
            super().close()
        else:
            self._close_after(self._exports)

    def _status_after(self, iteration: "Iteration", error: BaseException) -> int:
        """What the library is told after a function of the iteration has raised: 0, and the session goes on, if its owner did not say otherwise."""
        try:
            iteration._keep_exported()
        except Error:
            _log.exception("keeping the memory that an iteration's arrays use")
        iteration._ended = True
        if not self._fail_on_error:
            return 0
        if not self._exports:
            return status_of(error)
        self._stop(error)
        return 0

    def _stop(self, error: BaseException) -> None:
        """The session runs nothing more. The library cancels it when no array uses its memory, which a cancelled session gives back."""
        self._error, self._stopped = self._error or error, True
        handle = self._handle
        if handle is not None:
            self._exports.when_gone(lambda: lib.gpushare_session_cancel(handle))

    def _fail(self, error: BaseException) -> None:
        """A launched function raised, on a thread of the device."""
        if self._fail_on_error:
            self._stop(error)
        else:
            self._error = self._error or error

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            self._raise()

    def _raise(self) -> None:
        """What a launched function raised: once, or at each call of a session that runs nothing more."""
        error = self._error
        if error is None:
            return
        if isinstance(error, Cancelled):
            raise error
        if not self._stopped:
            self._error = None
        raise CallbackFailed(f"a function of session {self.name!r} raised {error!r}", lib.GPUSHARE_CALLBACK_FAILED) from error


def session_params(*, name: Optional[str] = None, session_class: str = GUARANTEED, persistent_bytes: Bytes = 0, ephemeral_bytes: Bytes = 0,
                   remaining: Optional[float] = None, iterations_total: int = 0, memory: Bytes = 0, priority: int = 0,
                   weight: float = 1.0, queue: bool = True, spill: bool = False, plan_iterations: bool = False,
                   compute_units: int = 0, least_bytes: Bytes = 0, may_upgrade: bool = False,
                   fail_on_error: bool = False) -> tuple[Any, Any]:
    """gpushare_session_params, and what must stay alive while it is used. See Runtime.open_session."""
    c_name = null_or(name)
    flags = (lib.GPUSHARE_SESSION_ALLOW_QUEUEING if queue else 0) | (lib.GPUSHARE_SESSION_ALLOW_SPILL if spill else 0)
    flags |= lib.GPUSHARE_SESSION_MAY_UPGRADE if may_upgrade else 0
    flags |= lib.GPUSHARE_SESSION_FAIL_ON_ERROR if fail_on_error else 0
    params = struct("gpushare_session_params", session_class=one_of("session_class", session_class, _CLASSES), name=c_name,
                    persistent_bytes=size_in_bytes(persistent_bytes), ephemeral_bytes=size_in_bytes(ephemeral_bytes),
                    remaining_ns=0 if remaining is None else nanoseconds(remaining), iterations_total=iterations_total,
                    quota_bytes=size_in_bytes(memory), priority=priority, flags=flags, weight=weight,
                    plan_iterations=int(plan_iterations), compute_units=compute_units,
                    least_bytes=size_in_bytes(least_bytes))
    return params, c_name
