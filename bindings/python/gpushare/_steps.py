"""Continuous batching: requests that join and leave a batch between its iterations. steps.h."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional, TypedDict

from ._cffi import ffi
from ._native import NO_TIMEOUT, CallbackFailed, Closable, Error, InvalidState, as_dict, check, error_of, lib, nanoseconds, null_or, status_of, struct, wait
from ._serving import CancellableFuture, now_ns
from ._session import Iteration, Session
from ._values import Bytes, calls, on_release, size_in_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack


class StepQueueOptions(TypedDict, total=False):
    """Settings of a step queue: the fields of gpushare_step_queue_params."""

    max_members: int
    max_pending: int
    max_prefill_tokens: int
    step_ns: float
    decode_ns: float
    prefill_ns: float
    read_ns: float


_log = logging.getLogger("gpushare")


class _StreamFuture(CancellableFuture):
    """A stream's list of values. cancel() cancels the request; it is True only if the request generates nothing more."""

    def __init__(self, stream: "TokenStream") -> None:
        super().__init__()
        self._stream = stream

    def _take_back(self) -> bool:
        return self._stream.cancel()


class TokenStream:
    """What a request generates. Iterating waits for each value; result() waits for all of them and returns the list.

    Both raise TimedOut for a request that was dropped because its first value was not in time, Cancelled, or CallbackFailed when its
    step failed. `future` is the list as a concurrent.futures.Future (`asyncio.wrap_future` makes it awaitable), whose cancel() cancels
    the request. `late` says whether one of the values came after it was due.
    """

    def __init__(self, queue: "StepQueue", request_id: int, payload: Any) -> None:
        self.request_id = request_id
        self.future = _StreamFuture(self)
        self.late = False
        self._queue = queue
        self._payload = payload
        self._state: Any = None  # the step function's
        self._values: list[Any] = []  # generated; the first _ready are delivered
        self._ready = 0
        self._error: Optional[BaseException] = None
        self._ended = False
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[Any]:
        for index in itertools.count():
            with self._changed:
                self._changed.wait_for(lambda: self._ready > index or self._ended)
                if self._ready <= index:
                    break
            yield self._values[index]
        self.future.result()

    def result(self, timeout: Optional[float] = None) -> list[Any]:
        """All values, when the last one is there."""
        return self.future.result(timeout)

    def cancel(self) -> bool:
        """The caller gave up. True if the request was held: then it generates nothing more, and result() raises Cancelled."""
        try:
            self._queue.cancel(self.request_id)
        except Error:
            return False
        return True

    def _told(self, answer: Any) -> None:
        with self._changed:
            self._ready = answer.tokens
            self.late = bool(answer.late)
            self._ended = bool(answer.ended)
            self._changed.notify_all()
        # Functions that wait for the future run in these calls: no lock is held.
        if not answer.ended:
            return
        self._state = None
        if not self.future._wants(answer.status):
            return
        if answer.status == 0 and self._error is None:
            self.future.set_result(self._values[:answer.tokens])
        elif self._error is not None:
            failed = CallbackFailed(f"the step function raised {self._error!r}", lib.GPUSHARE_CALLBACK_FAILED)
            failed.__cause__ = self._error
            self.future.set_exception(failed)
        else:
            self.future.set_exception(error_of(answer.status, f"request {self.request_id} ended after {answer.tokens} tokens"))


class StepMember:
    """A member of a step. `state` is the step function's own, and stays with the request until it leaves.

    `prefill` tokens of its prompt, and of what it generated before it was returned to the queue, are to be processed, after the
    `before` ones of earlier steps; `prefill` is 0 where it decodes. Where `generates` is true the function calls emit(). When the
    function has returned, emit(), fail() and holds() raise InvalidState.
    """

    def __init__(self, stream: TokenStream, member: Any, step: Any, index: int) -> None:
        self._stream = stream
        self._step = step
        self._index = index
        self._emitted: Any = None
        self.id = member.id
        self.payload = stream._payload
        self.prefill = member.prefill_tokens
        self.before = member.before_tokens
        self.total = member.total_tokens
        self.values = stream._values[:member.tokens]
        self.generates = self.prefill == 0 or self.before + self.prefill == self.total

    @property
    def state(self) -> Any:
        return self._stream._state

    @state.setter
    def state(self, value: Any) -> None:
        self._stream._state = value

    def emit(self, value: Any, done: bool = False) -> None:
        """The value that the request generates in this step. It is delivered when the step has ended."""
        self._running().done[self._index] = bool(done)
        self._emitted = value

    def fail(self, error: BaseException) -> None:
        """This request fails, the others do not."""
        self._running().statuses[self._index] = status_of(error)
        self._stream._error = error

    def holds(self, size: Bytes) -> None:
        """The bytes that the request holds after the step, where they are not as planned."""
        self._running().bytes[self._index] = size_in_bytes(size)

    def _running(self) -> Any:
        if self._step is None:
            raise InvalidState(f"the step of request {self.id} is over: its function has returned", lib.GPUSHARE_INVALID_STATE)
        return self._step


class Step:
    """A step as its function sees it: its `members`; and in `left` the states of those that are members no more, whose memory is to be
    freed first."""

    def __init__(self, step: Any) -> None:
        self.expected_ns = step.expected_ns
        self.left: list[Any] = []
        for index in range(step.left_count):
            stream = ffi.from_handle(step.left[index].user_data)
            self.left.append(stream._state)
            stream._state = None
        self.members = [StepMember(ffi.from_handle(step.members[index].user_data), step.members[index], step, index)
                        for index in range(step.count)]

    def __len__(self) -> int:
        return len(self.members)


class _StepModel:
    def __init__(self, session: Session, function: Callable[[Iteration, Step], Any]) -> None:
        self.session = session
        self.function = function

    def run(self, handle: Any, native: Any) -> int:
        members: list[StepMember] = []

        def failed(error: BaseException) -> None:  # in a launched function
            for member in members:
                member._stream._error = member._stream._error or error

        iteration = Iteration(self.session, handle, failed)
        try:
            step = Step(native)
            members = step.members
            self.function(iteration, step)
            for member in members:
                if member.generates:
                    member._stream._values.append(member._emitted)
            return 0
        except BaseException as error:
            for member in members:
                member._stream._error = error
            return status_of(error)
        finally:
            for member in members:
                member._step = None
            try:
                iteration._keep_exported()
            except Error:
                _log.exception("keeping the memory that a step's arrays use")
            iteration._ended = True


@ffi.callback("int32_t(void*, gpushare_iteration, const gpushare_step*)")
def _on_step(data: Any, iteration: Any, step: Any) -> int:
    return ffi.from_handle(data).run(iteration, step)


@ffi.callback("void(void*, const gpushare_step_answer*)")
def _on_step_answer(data: Any, answer: Any) -> None:
    stream = ffi.from_handle(data)
    if answer.ended:
        calls.drop(data)
    try:
        stream._told(answer)
    except BaseException:
        _log.exception("answering a request")


class StepQueue(Closable):
    """Requests of a model that generates its answers piece by piece, served in a session. They join and leave between steps.

    `function(iteration, step)` runs each step as an iteration of `session`. `policy`: 'gpushare' (the default: as many requests in
    time as possible) or 'fifo' (in order of arrival). `memory` limits the members' bytes. Settings are the fields of
    gpushare_step_queue_params, such as max_members.
    """

    def __init__(self, session: Session, function: Callable[[Iteration, Step], Any], policy: Optional[str] = None, *,
                 memory: Bytes = 0, **settings: Unpack[StepQueueOptions]) -> None:
        name = null_or(policy)
        params = struct("gpushare_step_queue_params", policy=name, memory_bytes=size_in_bytes(memory), **settings)
        handle = calls.hold(_StepModel(session, function))
        out = ffi.new("gpushare_step_queue*")
        status = lib.gpushare_step_queue_create(session.handle, params, _on_step, handle, on_release, out)
        if status != 0:
            calls.drop(handle)
        check(status)
        del name
        self._ids = itertools.count(1)
        self._own(out[0], lib.gpushare_step_queue_close, session)

    def submit(self, payload: Any = None, *, prompt_tokens: int, first_deadline: Optional[float] = None,
               token_time: Optional[float] = None, expected_tokens: int = 0, start_bytes: Bytes = 0, step_bytes: Bytes = 0,
               cost: float = 1.0, request_id: Optional[int] = None) -> TokenStream:
        """Hands a request in, whose first value is due within `first_deadline` seconds, and each further one `token_time` after the one
        before (None: never due). It holds `start_bytes` from when it joins and `step_bytes` more for each value. Raises QueueFull,
        TimedOut, or ExceedsCapacity if its bytes are above the queue's memory."""
        number = next(self._ids) if request_id is None else request_id
        token_ns = NO_TIMEOUT if token_time is None else max(1, nanoseconds(token_time))
        request = struct("gpushare_step_request", id=number, prompt_tokens=prompt_tokens, expected_tokens=expected_tokens,
                         start_bytes=size_in_bytes(start_bytes), step_bytes=size_in_bytes(step_bytes),
                         first_deadline_ns=min(now_ns() + nanoseconds(first_deadline), NO_TIMEOUT), token_ns=token_ns, cost=cost)
        stream = TokenStream(self, number, payload)
        handle = calls.hold(stream)
        status = lib.gpushare_step_queue_submit(self.handle, request, _on_step_answer, handle)
        if status != 0:
            calls.drop(handle)
        check(status)
        return stream

    def cancel(self, request_id: int) -> None:
        """The caller gave up. Raises NotFound if the request is not held."""
        check(lib.gpushare_step_queue_cancel(self.handle, request_id))

    def set_memory(self, limit: Bytes) -> None:
        """The limit of the members' bytes from the next step on; members above it are returned to the queue."""
        check(lib.gpushare_step_queue_set_memory(self.handle, size_in_bytes(limit)))

    def drain(self, timeout: Optional[float] = None) -> None:
        """Refuses new requests from now on and waits until all accepted ones are answered."""
        wait(lambda slice_ns: lib.gpushare_step_queue_drain(self.handle, slice_ns), timeout)

    def info(self) -> dict[str, Any]:
        """Counts of requests and tokens, and the model of time as learned, as gpushare_step_queue_info."""
        info = struct("gpushare_step_queue_info")
        check(lib.gpushare_step_queue_get_info(self.handle, info))
        return as_dict(info)
