"""Requests with deadlines: the request queue in front of a runtime, and its parts alone. serving.h."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Sequence, TypedDict

from ._cffi import ffi
from ._native import NO_TIMEOUT, CallbackFailed, Closable, Error, InvalidState, as_dict, check, error_of, lib, nanoseconds, null_or, status_of, struct, wait
from ._runtime import Runtime
from ._session import Iteration, Session
from ._values import calls, on_release

if TYPE_CHECKING:
    from typing_extensions import Unpack


class BatcherOptions(TypedDict, total=False):
    """Settings of request queues and batchers: the fields of gpushare_batcher_params."""

    max_pending: int
    max_defer_ns: int
    window: int
    bins: int
    flags: int
    opportunity: float
    feasible_quantile: float
    delay_rate_per_ms: float
    estimate_quantile: float
    max_delay_ns: int
    clockwork_window_ns: int
    clockwork_slack_ns: int
    nexus_overhead_ns: int


_log = logging.getLogger("gpushare")
_DROPS = {lib.GPUSHARE_DROP_EXPIRED: "expired", lib.GPUSHARE_DROP_HOPELESS: "hopeless", lib.GPUSHARE_DROP_REJECTED: "rejected",
          lib.GPUSHARE_DROP_CANCELLED: "cancelled", lib.GPUSHARE_DROP_NONE: None}


def now_ns() -> int:
    """The clock of deadlines: nanoseconds, monotonic, of this machine."""
    return lib.gpushare_now_ns()


def _batcher_params(policy: Optional[str], settings: Mapping[str, Any]) -> tuple[Any, Any]:
    name = null_or(policy)
    return struct("gpushare_batcher_params", policy=name, **settings), name


def _batcher_model(batch_sizes: Optional[Sequence[int]], c0_ns: int, c1: float) -> tuple[Any, Any]:
    sizes = ffi.NULL if batch_sizes is None else ffi.new("uint32_t[]", list(batch_sizes))
    model = struct("gpushare_batcher_model", batch_size_count=0 if batch_sizes is None else len(batch_sizes), batch_sizes=sizes,
                   c0_ns=c0_ns, c1=c1)
    return model, sizes


def _request(model: int, request_id: int, application: int, arrival_ns: int, deadline_ns: int, cost: float,
             later_steps: Sequence[tuple[int, float]], features: Sequence[float] = ()) -> tuple[Any, Any]:
    steps = ffi.new("gpushare_cost_step[]", [{"after_ns": after, "cost": price} for after, price in later_steps] or 1)
    request = struct("gpushare_request", model=model, id=request_id, application=application, arrival_ns=arrival_ns,
                     deadline_ns=deadline_ns, cost=cost)
    if later_steps:
        request.later_steps, request.later_step_count = steps, len(later_steps)
    numbers = ffi.new("double[]", list(features) or 1)
    if len(features) != 0:
        request.features, request.feature_count = numbers, len(features)
    return request, (steps, numbers)


class Outcome:
    """How a request ended. `in_time` tells whether its deadline was met; `drop` says why it was dropped, if it was."""

    def __init__(self, outcome: Any, result: Any) -> None:
        self.id = outcome.id
        self.drop = _DROPS.get(outcome.drop, str(outcome.drop))
        self.batch_count = outcome.batch_count
        self.finished_ns = outcome.finished_ns
        self.deadline_ns = outcome.deadline_ns
        self.in_time = outcome.finished_ns <= outcome.deadline_ns
        self.result = result


class CancellableFuture(concurrent.futures.Future):
    """A future whose cancel() asks the library. The library's answer may come, on another thread, before cancel() returns: the future is
    cancelled all the same."""

    _given_up = False

    def _take_back(self) -> bool:
        """Asks the library. False: too late."""
        raise NotImplementedError

    def cancel(self) -> bool:
        if self.cancelled():
            return True
        self._given_up = True
        if not self._take_back():
            self._given_up = False
            return self.cancelled()
        return super().cancel()

    def _wants(self, status: int) -> bool:
        """The library's answer is there. False: the future is cancelled, and takes none."""
        if self._given_up and status == lib.GPUSHARE_CANCELLED:
            super().cancel()
        return self.set_running_or_notify_cancel()


class RequestFuture(CancellableFuture):
    """A future of an Outcome. cancel() takes the request out of the queue, and is True only if it will not run."""

    request_id: int

    def __init__(self) -> None:
        super().__init__()
        self._queue: Optional["RequestQueue"] = None

    def _take_back(self) -> bool:
        try:
            if self._queue is not None:
                self._queue.cancel(self.request_id)
            return self._queue is not None
        except Error:  # its batch runs, or it was answered at this moment, or the queue is closed
            return False


class _Request:
    """A submitted request until it is answered."""

    def __init__(self, payload: Any) -> None:
        self.payload = payload
        self.result: Any = None
        self.error: Optional[BaseException] = None
        self.future = RequestFuture()


class Batch:
    """A batch as its function sees it: `payloads` of its requests in order."""

    def __init__(self, batch: Any, requests: list[_Request]) -> None:
        self._batch = batch
        self._requests = requests
        self.expected_ns = batch.expected_ns
        self.ids = [batch.ids[index] for index in range(batch.count)]
        self.payloads = [request.payload for request in requests]

    def __len__(self) -> int:
        return len(self._requests)

    def set_execution(self, index: int, seconds: float) -> None:
        """Tells what request `index` took, or would take, alone, where that is known."""
        if not 0 <= index < len(self):
            raise IndexError(f"the batch has {len(self)} requests, none with index {index}")
        if self._batch is None:
            raise InvalidState("the batch is over: its function has returned", lib.GPUSHARE_INVALID_STATE)
        self._batch.execution_ns[index] = int(seconds * 1e9)


class _QueueModel:
    def __init__(self, session: Session, function: Callable[[Iteration, Batch], Any]) -> None:
        self.session = session
        self.function = function

    def run(self, handle: Any, batch: Any) -> int:
        requests = [ffi.from_handle(batch.user_data[index]) for index in range(batch.count)]

        def failed(error: BaseException) -> None:  # in a launched function
            for request in requests:
                request.error = request.error or error

        iteration = Iteration(self.session, handle, failed)
        seen = Batch(batch, requests)
        try:
            results = self.function(iteration, seen)
            if results is not None:
                results = list(results)
                if len(results) != len(requests):
                    raise ValueError(f"the batch function returned {len(results)} results for {len(requests)} requests")
                for index, (request, result) in enumerate(zip(requests, results)):
                    if isinstance(result, BaseException):
                        request.error = result
                        batch.statuses[index] = status_of(result)
                    else:
                        request.result = result
            return 0
        except BaseException as error:
            for request in requests:
                request.error = error
            return status_of(error)
        finally:
            seen._batch = None
            try:
                iteration._keep_exported()
            except Error:
                _log.exception("keeping the memory that a batch's arrays use")
            iteration._ended = True


@ffi.callback("int32_t(void*, gpushare_iteration, const gpushare_queued_batch*)")
def _on_batch(data: Any, iteration: Any, batch: Any) -> int:
    return ffi.from_handle(data).run(iteration, batch)


@ffi.callback("void(void*, const gpushare_request_outcome*)")
def _on_answer(data: Any, outcome: Any) -> None:
    request = ffi.from_handle(data)
    calls.drop(data)
    try:
        if not request.future._wants(outcome.status):
            return
        if outcome.status == 0 and request.error is None:
            request.future.set_result(Outcome(outcome, request.result))
        elif request.error is not None:
            failed = CallbackFailed(f"the batch function raised {request.error!r}", lib.GPUSHARE_CALLBACK_FAILED)
            failed.__cause__ = request.error
            request.future.set_exception(failed)
        else:
            drop = _DROPS.get(outcome.drop)
            request.future.set_exception(error_of(outcome.status, f"request {outcome.id} was dropped: {drop}" if drop else None))
    except BaseException:
        _log.exception("answering a request")


class RequestQueue(Closable):
    """Requests with deadlines in front of a runtime; batches run as iterations of the sessions of their models.

    `policy`: 'gpushare' (the default), 'fifo', 'edf', 'maxdelay', 'greedy', 'clipper', 'clipper-mean', 'clipper-aimd', 'nexus',
    'nexus-earliest', 'nexus-cycle', 'clockwork', 'clockwork-single', 'orloj', 'orloj-own'. Settings are the fields of
    gpushare_batcher_params, such as max_pending.
    """

    def __init__(self, runtime: Runtime, policy: Optional[str] = None, **settings: Unpack[BatcherOptions]) -> None:
        params, keep = _batcher_params(policy, settings)
        out = ffi.new("gpushare_request_queue*")
        check(lib.gpushare_request_queue_create(runtime.handle, params, out))
        del keep
        self._ids = itertools.count(1)
        self._sessions: list[Session] = []
        self._own(out[0], lib.gpushare_request_queue_close, runtime, self._sessions)

    def add_model(self, session: Session, function: Callable[[Iteration, Batch], Any], *, batch_sizes: Optional[Sequence[int]] = None,
                  c0_ns: int = 0, c1: float = 1.0) -> int:
        """Registers a model and returns its number: `function(iteration, batch)` runs its batches in `session`.

        The function returns None or a list of one result a request.
        """
        model, keep = _batcher_model(batch_sizes, c0_ns, c1)
        handle = calls.hold(_QueueModel(session, function))
        out = ffi.new("uint32_t*")
        status = lib.gpushare_request_queue_add_model(self.handle, session.handle, model, _on_batch, handle, on_release, out)
        if status != 0:
            calls.drop(handle)
        check(status)
        del keep
        self._sessions.append(session)
        return out[0]

    def submit(self, payload: Any = None, *, deadline: Optional[float], model: int = 0, application: int = 0, cost: float = 1.0,
               later_steps: Sequence[tuple[int, float]] = (), request_id: Optional[int] = None,
               features: Sequence[float] = ()) -> RequestFuture:
        """Hands a request in, to be served within `deadline` seconds from now (None or infinity: without a deadline), and
        returns a future of its Outcome.

        `features` are numbers that its execution time depends on and that are known now: tokens of the prompt, steps, pixels.
        As many and in the same order for all requests of an application.

        The future raises TimedOut for a request that was dropped, Cancelled, or CallbackFailed when its batch failed, or when
        the batch function returned an exception as its result. Its cancel() is True only if the request will not run. Raises
        QueueFull, or TimedOut at once if the request cannot finish in time. `asyncio.wrap_future` makes it awaitable.
        """
        number = next(self._ids) if request_id is None else request_id
        request, keep = _request(model, number, application, 0, min(now_ns() + nanoseconds(deadline), NO_TIMEOUT), cost,
                                 later_steps, features)
        held = _Request(payload)
        held.future.request_id = number
        handle = calls.hold(held)
        status = lib.gpushare_request_queue_submit(self.handle, request, _on_answer, handle)
        if status != 0:
            calls.drop(handle)
        check(status)
        del keep
        held.future._queue = self
        return held.future

    async def ask(self, payload: Any = None, **request: Any) -> Any:
        """Submits a request and awaits its result; arguments as submit(). A task that is cancelled meanwhile takes its request out of the queue."""
        future = self.submit(payload, **request)
        try:
            return (await asyncio.wrap_future(future)).result
        except asyncio.CancelledError:
            with contextlib.suppress(Error):  # its batch runs, or it was answered at this moment
                self.cancel(future.request_id)
            raise

    def cancel(self, request_id: int) -> None:
        """The caller gave up; the request is answered with Cancelled if it still waits."""
        check(lib.gpushare_request_queue_cancel(self.handle, request_id))

    def drain(self, timeout: Optional[float] = None) -> None:
        """Refuses new requests from now on and waits until all accepted ones are answered."""
        wait(lambda slice_ns: lib.gpushare_request_queue_drain(self.handle, slice_ns), timeout)

    def observe(self, model: int, application: int, seconds: float, features: Sequence[float] = ()) -> None:
        """Tells what a request of this application, with these features, takes alone."""
        if not features:
            check(lib.gpushare_request_queue_observe(self.handle, model, application, int(seconds * 1e9)))
            return
        request, keep = _request(model, 0, application, 0, 0, 1.0, (), features)
        check(lib.gpushare_request_queue_observe_request(self.handle, request, int(seconds * 1e9)))
        del keep

    def observe_batch(self, model: int, count: int, longest: float, device_time: float) -> None:
        """Tells what a batch of `count` took whose longest request takes `longest` seconds alone."""
        check(lib.gpushare_request_queue_observe_batch(self.handle, model, count, int(longest * 1e9), int(device_time * 1e9)))

    def profile(self, model: int, application: int) -> dict[str, Any]:
        """What has been learned of an application of a model."""
        info = struct("gpushare_profile")
        check(lib.gpushare_request_queue_get_profile(self.handle, model, application, info))
        return as_dict(info)

    def info(self) -> dict[str, Any]:
        """Counts of requests by how they ended, and what waits, as gpushare_request_queue_info."""
        info = struct("gpushare_request_queue_info")
        check(lib.gpushare_request_queue_get_info(self.handle, info))
        return as_dict(info)


class Batcher(Closable):
    """The decisions alone, for programs with threads of their own. The caller orders calls on one batcher."""

    def __init__(self, policy: Optional[str] = None, **settings: Unpack[BatcherOptions]) -> None:
        params, keep = _batcher_params(policy, settings)
        out = ffi.new("gpushare_batcher*")
        check(lib.gpushare_batcher_create(params, out))
        del keep
        self._largest = 16
        self._own(out[0], lib.gpushare_batcher_release)

    def add_model(self, *, batch_sizes: Optional[Sequence[int]] = None, c0_ns: int = 0, c1: float = 1.0) -> int:
        """Registers a model and returns its number; see RequestQueue.add_model."""
        model, keep = _batcher_model(batch_sizes, c0_ns, c1)
        out = ffi.new("uint32_t*")
        check(lib.gpushare_batcher_add_model(self.handle, model, out))
        del keep
        self._largest = max(self._largest, *(batch_sizes or [1]))
        return out[0]

    def arrive(self, request_id: int, *, now_ns: int, deadline_ns: int, model: int = 0, application: int = 0,
               arrival_ns: Optional[int] = None, cost: float = 1.0, later_steps: Sequence[tuple[int, float]] = (),
               features: Sequence[float] = ()) -> None:
        """A request arrives. Raises QueueFull, or TimedOut if it cannot finish in time. See RequestQueue.submit."""
        request, keep = _request(model, request_id, application, now_ns if arrival_ns is None else arrival_ns, deadline_ns, cost,
                                 later_steps, features)
        check(lib.gpushare_batcher_arrive(self.handle, request, now_ns))
        del keep

    def cancel(self, request_id: int, now_ns: int) -> None:
        """The caller gave up. Raises NotFound if the request is not held."""
        check(lib.gpushare_batcher_cancel(self.handle, request_id, now_ns))

    def next(self, now_ns: int, in_flight: int = 0) -> tuple[Optional[dict[str, Any]], int]:
        """(batch, wake_ns): what to run next, with the list `ids`, or None and the time at which to ask again."""
        batch = struct("gpushare_batch")
        ids = ffi.new("uint64_t[]", self._largest)
        status = lib.gpushare_batcher_next(self.handle, now_ns, in_flight, batch, ids, self._largest)
        if status == lib.GPUSHARE_NOT_READY:
            return None, batch.wake_ns
        check(status)
        result = as_dict(batch)
        result["ids"] = [ids[index] for index in range(batch.count)]
        return result, batch.wake_ns

    def started(self, batch_id: int, now_ns: int) -> None:
        """The batch that `next` returned has begun."""
        check(lib.gpushare_batcher_started(self.handle, batch_id, now_ns))

    def finished(self, batch_id: int, device_ns: int, now_ns: int) -> None:
        """The batch has ended; it had the device for `device_ns`."""
        check(lib.gpushare_batcher_finished(self.handle, batch_id, device_ns, now_ns))

    def finished_run(self, batch_id: int, device_ns: int, now_ns: int, execution_ns: Sequence[int] = ()) -> None:
        """In place of finished() and the observe functions: also what the members took alone, where that is known."""
        check(lib.gpushare_batcher_finished_run(self.handle, batch_id, ffi.new("uint64_t[]", list(execution_ns)),
                                                len(execution_ns), device_ns, now_ns))

    def rejected(self, batch_id: int, now_ns: int) -> None:
        """The batch was not started, for example after its latest_start_ns: its requests are dropped."""
        check(lib.gpushare_batcher_rejected(self.handle, batch_id, now_ns))

    def observe(self, model: int, application: int, execution_ns: int, features: Sequence[float] = ()) -> None:
        """Tells what a request of this application, with these features, takes alone."""
        if not features:
            check(lib.gpushare_batcher_observe(self.handle, model, application, execution_ns))
            return
        request, keep = _request(model, 0, application, 0, 0, 1.0, (), features)
        check(lib.gpushare_batcher_observe_request(self.handle, request, execution_ns))
        del keep

    def observe_batch(self, model: int, count: int, longest_ns: int, device_ns: int) -> None:
        """Tells what a batch of `count` took whose longest request takes `longest_ns` alone."""
        check(lib.gpushare_batcher_observe_batch(self.handle, model, count, longest_ns, device_ns))

    def observe_run(self, model: int, applications: Sequence[int], device_ns: int, execution_ns: Optional[Sequence[int]] = None) -> None:
        """Tells what a batch of one request an application took; see gpushare_batcher_observe_run."""
        execution = ffi.NULL if execution_ns is None else ffi.new("uint64_t[]", list(execution_ns))
        check(lib.gpushare_batcher_observe_run(self.handle, model, ffi.new("uint32_t[]", list(applications)), execution,
                                               len(applications), device_ns))

    def profile(self, model: int, application: int) -> dict[str, Any]:
        """What has been learned of an application of a model, as gpushare_profile."""
        info = struct("gpushare_profile")
        check(lib.gpushare_batcher_get_profile(self.handle, model, application, info))
        return as_dict(info)

    def take_drops(self) -> list[tuple[int, Optional[str]]]:
        """Requests dropped since the last call, each with the reason."""
        drops, count, taken = ffi.new("gpushare_drop[]", 256), ffi.new("uint64_t*"), []
        while True:
            check(lib.gpushare_batcher_take_drops(self.handle, drops, 256, count))
            taken += [(drops[index].id, _DROPS.get(drops[index].reason)) for index in range(count[0])]
            if count[0] < 256:
                return taken

    @property
    def pending(self) -> int:
        """Requests held, not yet in a batch."""
        out = ffi.new("uint64_t*")
        check(lib.gpushare_batcher_get_pending(self.handle, out))
        return out[0]


class Histogram(Closable):
    """The last `window` durations of something, within 1.6%, with detection of shifts."""

    def __init__(self, window: int = 0, drift_samples: int = 0, *, _handle: Any = None) -> None:
        if _handle is None:
            out = ffi.new("gpushare_histogram*")
            check(lib.gpushare_histogram_create(struct("gpushare_histogram_params", window=window, drift_samples=drift_samples), out))
            _handle = out[0]
        self._own(_handle, lib.gpushare_histogram_release)

    def record(self, duration_ns: int) -> None:
        """Adds one duration."""
        check(lib.gpushare_histogram_record(self.handle, duration_ns))

    def merge(self, other: "Histogram") -> None:
        """Adds the durations of another one."""
        check(lib.gpushare_histogram_merge(self.handle, other.handle))

    def reset(self) -> None:
        """Forgets all durations."""
        check(lib.gpushare_histogram_reset(self.handle))

    def info(self) -> dict[str, Any]:
        """Count, mean and shifts found, as gpushare_histogram_info."""
        info = struct("gpushare_histogram_info")
        check(lib.gpushare_histogram_get_info(self.handle, info))
        return as_dict(info)

    def quantile(self, q: float, k: int = 1) -> float:
        """The q-quantile, in nanoseconds, of the longest of k independent durations."""
        out = ffi.new("double*")
        check(lib.gpushare_histogram_get_quantile(self.handle, q, k, out))
        return out[0]

    def serialize(self) -> str:
        """A text from which parse() makes the same histogram."""
        size = ffi.new("uint64_t*")
        lib.gpushare_histogram_serialize(self.handle, ffi.NULL, 0, size)
        buffer = ffi.new("char[]", size[0])
        check(lib.gpushare_histogram_serialize(self.handle, buffer, size[0], size))
        return ffi.string(buffer).decode()

    @classmethod
    def parse(cls, text: str) -> "Histogram":
        """The histogram that serialize() wrote. Raises MalformedInput, naming the word that is wrong."""
        data = text.encode()
        out = ffi.new("gpushare_histogram*")
        check(lib.gpushare_histogram_parse(data, len(data), out))
        return cls(_handle=out[0])


class ScoreQueue(Closable):
    """Deadlines, asked for the one with the greatest score now (Orloj, eq. 4.2). The caller orders calls on one queue."""

    def __init__(self) -> None:
        out = ffi.new("gpushare_score_queue*")
        check(lib.gpushare_score_queue_create(out))
        self._own(out[0], lib.gpushare_score_queue_release)

    @staticmethod
    def _class(histogram: Histogram, k: int, bins: int, c0_ns: float, c1: float, delay_rate_per_ms: float,
               steps: Sequence[tuple[int, float]]) -> tuple[Any, Any]:
        keep = ffi.new("gpushare_cost_step[]", [{"after_ns": after, "cost": price} for after, price in steps] or 1)
        score_class = struct("gpushare_score_class", k=k, histogram=histogram.handle, bins=bins, step_count=len(steps), c0_ns=c0_ns,
                             c1=c1, delay_rate_per_ms=delay_rate_per_ms)
        if steps:
            score_class.steps = keep
        return score_class, keep

    def add_class(self, histogram: Histogram, *, k: int = 0, bins: int = 0, c0_ns: float = 0, c1: float = 0,
                  delay_rate_per_ms: float = 0, steps: Sequence[tuple[int, float]] = ()) -> int:
        """A class of requests with one score curve; returns its number."""
        score_class, keep = self._class(histogram, k, bins, c0_ns, c1, delay_rate_per_ms, steps)
        out = ffi.new("uint32_t*")
        check(lib.gpushare_score_queue_add_class(self.handle, score_class, out))
        del keep
        return out[0]

    def set_class(self, index: int, histogram: Histogram, *, k: int = 0, bins: int = 0, c0_ns: float = 0, c1: float = 0,
                  delay_rate_per_ms: float = 0, steps: Sequence[tuple[int, float]] = ()) -> None:
        """Gives a class another curve."""
        score_class, keep = self._class(histogram, k, bins, c0_ns, c1, delay_rate_per_ms, steps)
        check(lib.gpushare_score_queue_set_class(self.handle, index, score_class))
        del keep

    def insert(self, index: int, deadline_ns: int, request_id: int) -> int:
        """Inserts a request of class `index`; the result names it for erase()."""
        out = ffi.new("uint32_t*")
        check(lib.gpushare_score_queue_insert(self.handle, index, deadline_ns, request_id, out))
        return out[0]

    def erase(self, entry: int) -> None:
        """Takes the entry out that insert() returned."""
        check(lib.gpushare_score_queue_erase(self.handle, entry))

    def best(self, now_ns: int) -> tuple[int, float]:
        """Id and score of the best request now. Raises NotReady when the queue is empty."""
        request_id, score = ffi.new("uint64_t*"), ffi.new("double*")
        check(lib.gpushare_score_queue_best(self.handle, now_ns, request_id, score))
        return request_id[0], score[0]

    def pop(self, now_ns: int, count: int) -> list[int]:
        """Takes the best `count` out, best first."""
        ids, taken = ffi.new("uint64_t[]", max(1, count)), ffi.new("uint64_t*")
        check(lib.gpushare_score_queue_pop(self.handle, now_ns, count, ids, taken))
        return [ids[index] for index in range(taken[0])]

    def __len__(self) -> int:
        out = ffi.new("uint64_t*")
        check(lib.gpushare_score_queue_get_size(self.handle, out))
        return out[0]
