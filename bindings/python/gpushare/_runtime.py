"""Runtime, session, iteration, stream, block, ticket: the core of gpushare.h."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import logging
import os
import types
import warnings
import weakref
from typing import Any, Callable, Iterator, List, Optional, Sequence, Union

from . import _arrays
from ._cffi import ffi
from ._native import (CallbackFailed, Closable, Error, InvalidArgument, as_dict, check, error_of, lib, nanoseconds, null_or, status_of,
                      struct, text, wait)

_log = logging.getLogger("gpushare")

GUARANTEED, OPPORTUNISTIC = "guaranteed", "opportunistic"
_CLASSES = {GUARANTEED: lib.GPUSHARE_CLASS_GUARANTEED, OPPORTUNISTIC: lib.GPUSHARE_CLASS_OPPORTUNISTIC}
_KINDS = {"model": lib.GPUSHARE_KIND_MODEL, "framework": lib.GPUSHARE_KIND_FRAMEWORK, "ephemeral": lib.GPUSHARE_KIND_EPHEMERAL}
_LAYOUTS = {"auto": lib.GPUSHARE_LAYOUT_AUTO, "contiguous": lib.GPUSHARE_LAYOUT_CONTIGUOUS, "virtual": lib.GPUSHARE_LAYOUT_VIRTUAL}
_STATES = {lib.GPUSHARE_SESSION_QUEUED: "queued", lib.GPUSHARE_SESSION_RESIDENT: "resident",
           lib.GPUSHARE_SESSION_PAGED_OUT: "paged_out", lib.GPUSHARE_SESSION_CANCELLED: "cancelled",
           lib.GPUSHARE_SESSION_FAILED: "failed"}
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
_calls = Handles()


# ---- functions of the user's that the library calls. None of them may let an exception out: cffi would only print it. ----


@ffi.callback("void(void*)")
def _on_host_function(data: Any) -> None:
    call = ffi.from_handle(data)
    _calls.drop(data)
    call()


@ffi.callback("int32_t(void*, gpushare_iteration)")
def _on_iteration(data: Any, handle: Any) -> int:
    pushed = ffi.from_handle(data)
    return pushed.run(handle)


@ffi.callback("void(void*)")
def _on_release(data: Any) -> None:
    _calls.drop(data)


@ffi.callback("void(void*, const gpushare_progress*)")
def _on_progress(data: Any, progress: Any) -> None:
    try:
        ffi.from_handle(data)(types.SimpleNamespace(**as_dict(progress)))
    except BaseException:
        _log.exception("a progress function raised")


@ffi.callback("uint64_t(void*, uint64_t, uint64_t)")
def _on_give_back(data: Any, nbytes: int, within_ns: int) -> int:
    try:
        return int(ffi.from_handle(data)(nbytes, within_ns / 1e9))
    except BaseException:
        _log.exception("a range's give_back raised")
        return 2**64 - 1  # GPUSHARE_RANGE_NO_ANSWER


@ffi.callback("int32_t(void*, uint64_t, uint64_t)")
def _on_out_of_memory(data: Any, session_id: int, nbytes: int) -> int:
    try:
        return 1 if ffi.from_handle(data)(session_id, nbytes) else 0
    except BaseException:
        _log.exception("an out-of-memory function raised")
        return 0


@ffi.callback("uint32_t(void*, uint32_t, const gpushare_candidate*, uint32_t, uint64_t)")
def _on_pick(data: Any, lane: int, candidates: Any, count: int, now_ns: int) -> int:
    try:
        choice = ffi.from_handle(data).pick(lane, [candidates[index] for index in range(count)], now_ns)
        return 2**32 - 1 if choice is None else choice
    except BaseException:
        _log.exception("a policy's pick raised; the lane stays idle")
        return 2**32 - 1


@ffi.callback("int32_t(void*, const gpushare_candidate*, const gpushare_candidate*)")
def _on_before(data: Any, a: Any, b: Any) -> int:
    try:
        return 1 if ffi.from_handle(data).before(a, b) else 0
    except BaseException:
        _log.exception("a policy's before raised")
        return 0


@ffi.callback("int32_t(void*, const gpushare_candidate*, const gpushare_candidate*)")
def _on_outranks(data: Any, waiting: Any, resident: Any) -> int:
    try:
        return 1 if ffi.from_handle(data).outranks(waiting, resident) else 0
    except BaseException:
        _log.exception("a policy's outranks raised")
        return 0


class Policy:
    """A policy of your own: derive from it and override `pick`, and `before` or `outranks` if you need them.

    The functions run with the scheduler's lock held: they must be quick and must not call gpushare. Candidates have the
    fields of gpushare_candidate (session_id, priority, weight, service_ns, remaining_ns, ...) and are valid during the call.
    """

    name = "python"
    max_lanes = 0
    max_residents = 0
    head_of_line = False

    def pick(self, lane: int, candidates: list[Any], now_ns: int) -> Optional[int]:
        """Index of the candidate whose iteration runs next in `lane`, or None to leave the lane idle."""
        raise NotImplementedError

    def before(self, a: Any, b: Any) -> bool:
        """True if `a` is to be admitted before `b`."""
        return a.session_id < b.session_id

    def outranks(self, waiting: Any, resident: Any) -> bool:
        """True if `waiting` may move `resident` to host memory to get in."""
        return False

    def _ops(self) -> tuple[Any, Any]:
        name = ffi.new("char[]", self.name.encode())
        ops = struct("gpushare_policy_ops", max_lanes=self.max_lanes, max_residents=self.max_residents,
                     head_of_line=int(self.head_of_line), name=name, user_data=_calls.hold(self), pick=_on_pick,
                     before=_on_before, outranks=_on_outranks, release=_on_release)
        return ops, name


def _policy_arguments(policy: Union[None, str, Policy]) -> tuple[Any, Any, Any]:
    """(name, ops, what must stay alive during the call)."""
    if isinstance(policy, Policy):
        ops, keep = policy._ops()
        return ffi.NULL, ops, keep
    return null_or(policy), ffi.NULL, None


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
        info = struct("gpushare_block_info")
        check(lib.gpushare_memory_get_info(self.runtime.handle, self.address, info))
        return as_dict(info)

    def _watch(self, array: Any) -> None:
        self.owner._views.add(array)

    def __repr__(self) -> str:
        return f"Block(address={self.address:#x}, nbytes={self.nbytes})"


def _warn_of_views(owner: Any, what: str) -> None:
    alive = len(owner._views)
    owner._views = weakref.WeakSet()
    if alive:
        warnings.warn(f"{alive} arrays still view memory of {what}; they must not be used any more", ResourceWarning, stacklevel=4)


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

        handle = _calls.hold(call)
        status = lib.gpushare_stream_launch_host(self.handle, _on_host_function, handle)
        if status != 0:
            _calls.drop(handle)
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
        handle = _calls.hold(lambda: buffer)
        if lib.gpushare_stream_launch_host(self.handle, _on_host_function, handle) != 0:
            _calls.drop(handle)
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
        _warn_of_views(self, "an iteration that has ended")
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

    def run(self, handle: Any) -> int:
        iteration = Iteration(self.session, handle)
        try:
            self.result = self.function(iteration)
            _warn_of_views(iteration, "an iteration that has ended")
            return 0
        except BaseException as error:
            self.error = error
            return status_of(error)


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
        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()


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
        while count is None or done < count:
            with self.iteration() as iteration:
                yield iteration
            done += 1

    def submit(self, function: Callable[[Iteration], Any]) -> Ticket:
        """Queues `function(iteration)`; it runs on the lane's thread when it is the session's turn. Does not block."""
        self._raise()
        pushed = _Pushed(self, function)
        handle = _calls.hold(pushed)
        out = ffi.new("gpushare_ticket*")
        status = lib.gpushare_session_submit(self.handle, _on_iteration, handle, _on_release, out)
        if status != 0:
            _calls.drop(handle)
        check(status)
        return Ticket(out[0], pushed)

    def alloc(self, nbytes: Bytes, kind: str = "model", alignment: int = 0) -> Block:
        """Persistent memory, freed with `Block.free` or with the session. Waits while the session is queued.

        Under a policy that pages sessions out (srtf, priority), and on a shared device, read and write it only inside iterations.
        """
        count = size_in_bytes(nbytes)
        out = ffi.new("gpushare_device_address*")
        check(lib.gpushare_session_alloc(self.handle, one_of("kind", kind, _KINDS), count, alignment, out))
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
        check(lib.gpushare_session_set_priority(self.handle, priority))

    def set_weight(self, weight: float) -> None:
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
            _warn_of_views(self, f"session {self.name!r}, which has been closed")
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
                   compute_units: int = 0) -> tuple[Any, Any]:
    """gpushare_session_params, and what must stay alive while it is used. See Runtime.open_session."""
    c_name = null_or(name)
    flags = (lib.GPUSHARE_SESSION_ALLOW_QUEUEING if queue else 0) | (lib.GPUSHARE_SESSION_ALLOW_SPILL if spill else 0)
    params = struct("gpushare_session_params", session_class=one_of("session_class", session_class, _CLASSES), name=c_name,
                    persistent_bytes=size_in_bytes(persistent_bytes), ephemeral_bytes=size_in_bytes(ephemeral_bytes),
                    remaining_ns=0 if remaining is None else nanoseconds(remaining), iterations_total=iterations_total,
                    quota_bytes=size_in_bytes(memory), priority=priority, flags=flags, weight=weight,
                    plan_iterations=int(plan_iterations), compute_units=compute_units)
    return params, c_name


class Runtime(Closable):
    """One device's worth of gpushare.

    `device`: 'auto' (the first GPU, else the host), 'host', 'cuda:0', 'sim?total_gib=16'. `capacity_bytes`: device memory to
    use, 0 for nearly all that is free (1 GiB on the host). `policy`: a name of `policies()` or a Policy of your own.
    """

    def __init__(self, device: Optional[str] = None, *, policy: Union[None, str, Policy] = None, capacity_bytes: Bytes = 0,
                 layout: str = "auto", max_lanes: int = 0, enqueue_depth: int = 0, record_timeline: bool = False,
                 record_allocations: bool = False, on_progress: Optional[Callable[[Any], Any]] = None) -> None:
        c_device = null_or(device)
        name, ops, keep = _policy_arguments(policy)
        record = (lib.GPUSHARE_RECORD_TIMELINE if record_timeline else 0) | (
            lib.GPUSHARE_RECORD_ALLOCATIONS if record_allocations else 0)
        params = struct("gpushare_runtime_params", layout=one_of("layout", layout, _LAYOUTS), device=c_device,
                        capacity_bytes=size_in_bytes(capacity_bytes), policy=name, policy_ops=ops, max_lanes=max_lanes,
                        enqueue_depth=enqueue_depth, record=record)
        self._views: weakref.WeakSet = weakref.WeakSet()
        self._held = Handles()  # functions that may be called until the runtime is closed
        if on_progress is not None:
            params.on_progress = _on_progress
            params.on_progress_user_data = self._held.hold(on_progress)
        out = ffi.new("gpushare_runtime*")
        check(lib.gpushare_runtime_open(params, out))
        del keep
        self._own(out[0], lib.gpushare_runtime_close, self._held)
        spec = self.info()["device"]
        self._on_host = spec.split("?")[0] == "host"
        self._device_index = int(spec.split("?")[0].partition(":")[2] or 0)

    def open_session(self, name: Optional[str] = None, **options: Any) -> Session:
        """Opens a session; it waits for admission when its first iteration begins.

        Options: session_class ('guaranteed', 'opportunistic'), persistent_bytes and ephemeral_bytes (its need; 0 is measured
        in its first iterations), memory (a hard limit), weight, priority, remaining (seconds of device time),
        iterations_total, queue=False (raise DeviceOutOfMemory instead of waiting), spill, plan_iterations, compute_units.
        Sizes are bytes or texts such as '8G'.
        """
        params, keep = session_params(name=name, **options)
        out = ffi.new("gpushare_session*")
        check(lib.gpushare_session_open(self.handle, params, out))
        del keep
        return Session(self, out[0], name or "session")

    def alloc(self, nbytes: Bytes, kind: str = "ephemeral", stream: Optional[Stream] = None, alignment: int = 0) -> Block:
        """Allocates for the iteration that has the lane of `stream`, else for the calling thread's innermost iteration."""
        count = size_in_bytes(nbytes)
        out = ffi.new("gpushare_device_address*")
        check(lib.gpushare_memory_alloc(self.handle, ffi.NULL if stream is None else stream.handle, one_of("kind", kind, _KINDS), count,
                                        alignment, out))
        return Block(self, self, out[0], count)

    def free_many(self, blocks: Sequence[Block]) -> None:
        """Frees the blocks in one call, as Block.free does. Raises for the first that cannot be freed, when the others have been."""
        check(lib.gpushare_memory_free_many(self.handle, len(blocks), [block.address for block in blocks], ffi.NULL))

    def create_stream(self, priority: int = 0) -> SideStream:
        """A stream outside all lanes."""
        out = ffi.new("gpushare_stream*")
        check(lib.gpushare_stream_create(self.handle, priority, out))
        return SideStream(self, out[0])

    def set_policy(self, policy: Union[str, Policy]) -> None:
        """Changes the policy at the next iteration boundary of each lane."""
        name, ops, keep = _policy_arguments(policy)
        check(lib.gpushare_runtime_set_policy(self.handle, name, ops))
        del keep

    def set_capacity(self, capacity_bytes: Bytes) -> None:
        """Changes how much device memory may be promised; 0: all that the runtime was opened with.

        Lowered, it is a target to which promises fall at iteration boundaries: `info()` has `capacity_bytes` and
        `effective_capacity_bytes`.
        """
        check(lib.gpushare_runtime_set_capacity(self.handle, size_in_bytes(capacity_bytes)))

    def set_target_slowdown(self, target: float) -> None:
        """The slowdown that guaranteed sessions without a target of their own accept from opportunistic ones; 0: 1%."""
        check(lib.gpushare_runtime_set_target_slowdown(self.handle, target))

    def set_out_of_memory_function(self, function: Optional[Callable[[int, int], bool]]) -> None:
        """`function(session_id, bytes)` is asked before an allocation fails: it frees something and returns True, or False."""
        if function is None:
            check(lib.gpushare_runtime_set_out_of_memory_callback(self.handle, ffi.NULL, ffi.NULL))
        else:
            check(lib.gpushare_runtime_set_out_of_memory_callback(self.handle, _on_out_of_memory, self._held.hold(function)))

    def synchronize(self, timeout: Optional[float] = None) -> None:
        """Blocks until every lane's enqueued work has finished."""
        wait(lambda slice_ns: lib.gpushare_runtime_synchronize(self.handle, slice_ns), timeout)

    def drain(self, timeout: Optional[float] = None) -> None:
        """Blocks until every iteration submitted before has run or was given up, then as `synchronize`."""
        wait(lambda slice_ns: lib.gpushare_runtime_drain(self.handle, slice_ns), timeout)

    def info(self) -> dict[str, Any]:
        """State and statistics, as gpushare_runtime_info."""
        info = struct("gpushare_runtime_info")
        check(lib.gpushare_runtime_get_info(self.handle, info))
        return as_dict(info)

    def write_timeline(self, path: Union[str, os.PathLike]) -> None:
        """Writes what happened so far as Chrome trace JSON, which Perfetto opens. Needs record_timeline."""
        check(lib.gpushare_runtime_write_timeline(self.handle, os.fsencode(path)))

    def write_snapshot(self, path: Union[str, os.PathLike], json: bool = False) -> None:
        """Writes the memory as it is now, for PyTorch's memory_viz (a pickle), or as JSON."""
        check(lib.gpushare_runtime_write_snapshot(self.handle, os.fsencode(path),
                                                  lib.GPUSHARE_SNAPSHOT_JSON if json else lib.GPUSHARE_SNAPSHOT_PICKLE))

    def write_allocation_log(self, path: Union[str, os.PathLike]) -> None:
        """Writes the allocation log as RMM's CSV. Needs record_allocations."""
        check(lib.gpushare_runtime_write_allocation_log(self.handle, os.fsencode(path)))


def devices() -> list[dict[str, Any]]:
    """The devices that this machine has, unusable ones included (`status` is not 0 and `reason` says why)."""
    count = ffi.new("uint32_t*")
    check(lib.gpushare_device_count(count))
    found = []
    for index in range(count[0]):
        info = struct("gpushare_device_info")
        check(lib.gpushare_device_get_info(index, info))
        found.append(as_dict(info))
    return found


def policies() -> list[str]:
    """Names of the built-in policies."""
    return [text(lib.gpushare_policy_name(index)) for index in range(lib.gpushare_policy_count())]


def load_backend(path: Union[str, os.PathLike]) -> None:
    """Loads a backend plug-in from an absolute path."""
    check(lib.gpushare_backend_load(os.fsencode(path)))


_LOG_LEVELS = {lib.GPUSHARE_LOG_ERROR: logging.ERROR, lib.GPUSHARE_LOG_WARNING: logging.WARNING, lib.GPUSHARE_LOG_INFO: logging.INFO,
               lib.GPUSHARE_LOG_DEBUG: logging.DEBUG}
_log_function: Any = None


@ffi.callback("void(void*, int32_t, const char*)")
def _on_log(data: Any, level: int, message: Any) -> None:
    function = _log_function
    if function is not None:
        try:
            function(_LOG_LEVELS.get(level, logging.WARNING), text(message))
        except BaseException:
            _log.exception("a log function raised")


def set_log(function: Optional[Callable[[int, str], Any]], level: int = logging.WARNING) -> None:
    """Sends the library's log lines to `function(level, message)`, such as `logging.getLogger("x").log`; None: to stderr.

    `level` is one of the logging module's. The function may be called from any thread and must not call gpushare.
    """
    global _log_function
    _log_function = function
    native = max((number for number, python in _LOG_LEVELS.items() if python >= level), default=lib.GPUSHARE_LOG_ERROR)
    check(lib.gpushare_log_set(ffi.NULL if function is None else _on_log, ffi.NULL, native))
