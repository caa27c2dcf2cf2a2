"""A device's runtime, and what concerns the whole library."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import os
import types
import weakref
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence, Union

from ._cffi import ffi
from ._memory import Block, SideStream, Stream
from ._native import Closable, Exports, as_dict, check, lib, nanoseconds, null_or, struct, text, wait
from ._policy import Policy, policy_arguments
from ._session import Session, SessionOptions, session_params
from ._values import KINDS, Bytes, Handles, one_of, size_in_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("gpushare")


_LAYOUTS = {"auto": lib.GPUSHARE_LAYOUT_AUTO, "contiguous": lib.GPUSHARE_LAYOUT_CONTIGUOUS, "virtual": lib.GPUSHARE_LAYOUT_VIRTUAL}


@ffi.callback("void(void*, const gpushare_progress*)")
def _on_progress(data: Any, progress: Any) -> None:
    try:
        ffi.from_handle(data)(types.SimpleNamespace(**as_dict(progress)))
    except BaseException:
        _log.exception("a progress function raised")


@ffi.callback("int32_t(void*, uint64_t, uint64_t)")
def _on_out_of_memory(data: Any, session_id: int, nbytes: int) -> int:
    try:
        return 1 if ffi.from_handle(data)(session_id, nbytes) else 0
    except BaseException:
        _log.exception("an out-of-memory function raised")
        return 0


class Runtime(Closable):
    """One device's worth of gpushare.

    `device`: 'auto' (the first GPU, else the host), 'host', 'cuda:0', 'sim?total_gib=16'. `capacity_bytes`: device memory to
    use, 0 for nearly all that is free (1 GiB on the host). `policy`: a name of `policies()` or a Policy of your own.
    Sessions with spill=True may have `spill_limit` bytes of host memory in all (0: a quarter of the host's). Before an iteration at
    most `spill_move_bytes` of it (0: 256 MiB) move between host and device, for `spill_move` seconds at most (0: 10 ms).
    `lane_finder`: 'salus', 'balanced', 'compact'. `interference_file`: what was measured of sessions beside each other, read now and
    written when the runtime is closed.
    """

    def __init__(self, device: Optional[str] = None, *, policy: Union[None, str, Policy] = None, capacity_bytes: Bytes = 0,
                 layout: str = "auto", max_lanes: int = 0, enqueue_depth: int = 0, record_timeline: bool = False,
                 record_allocations: bool = False, on_progress: Optional[Callable[[Any], Any]] = None, spill_limit: Bytes = 0,
                 spill_move_bytes: Bytes = 0, spill_move: float = 0, lane_finder: Optional[str] = None,
                 interference_file: Union[None, str, os.PathLike] = None) -> None:
        c_device = null_or(device)
        name, ops, keep = policy_arguments(policy)
        c_lane_finder = null_or(lane_finder)
        c_file = null_or(None if interference_file is None else os.fspath(interference_file))
        record = (lib.GPUSHARE_RECORD_TIMELINE if record_timeline else 0) | (
            lib.GPUSHARE_RECORD_ALLOCATIONS if record_allocations else 0)
        params = struct("gpushare_runtime_params", layout=one_of("layout", layout, _LAYOUTS), device=c_device,
                        capacity_bytes=size_in_bytes(capacity_bytes), policy=name, policy_ops=ops, max_lanes=max_lanes,
                        enqueue_depth=enqueue_depth, record=record, spill_limit_bytes=size_in_bytes(spill_limit),
                        spill_move_bytes=size_in_bytes(spill_move_bytes), spill_move_ns=nanoseconds(spill_move),
                        lane_finder=c_lane_finder, interference_file=c_file)
        self._exports = Exports()
        self._policy = policy if isinstance(policy, Policy) else None
        self._sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()
        self._held = Handles()  # functions that may be called until the runtime is closed
        if on_progress is not None:
            params.on_progress = _on_progress
            params.on_progress_user_data = self._held.hold(on_progress)
        out = ffi.new("gpushare_runtime*")
        check(lib.gpushare_runtime_open(params, out))
        del keep
        self._own(out[0], lib.gpushare_runtime_close, self._held, exports=self._exports)
        spec = self.info()["device"]
        self._on_host = spec.split("?")[0] == "host"
        self._device_index = int(spec.split("?")[0].partition(":")[2] or 0)

    def open_session(self, name: Optional[str] = None, **options: Unpack[SessionOptions]) -> Session:
        """Opens a session; it waits for admission when its first iteration begins.

        Options: session_class ('guaranteed', 'opportunistic'), persistent_bytes and ephemeral_bytes (its need; 0 is measured
        in its first iterations), memory (a hard limit), weight, priority, remaining (seconds of device time),
        iterations_total, queue=False (raise DeviceOutOfMemory instead of waiting), spill, plan_iterations, compute_units,
        least_bytes and may_upgrade (for set_coordination), fail_on_error (an exception in an iteration ends the session).
        Sizes are bytes or texts such as '8G'.
        """
        params, keep = session_params(name=name, **options)
        out = ffi.new("gpushare_session*")
        check(lib.gpushare_session_open(self.handle, params, out))
        del keep
        session = Session(self, out[0], name or "session", options.get("fail_on_error", False))
        self._sessions.add(session)
        return session

    def alloc(self, nbytes: Bytes, kind: str = "ephemeral", stream: Optional[Stream] = None, alignment: int = 0) -> Block:
        """Allocates for the iteration that has the lane of `stream`, else for the calling thread's innermost iteration."""
        count = size_in_bytes(nbytes)
        out = ffi.new("gpushare_device_address*")
        check(lib.gpushare_memory_alloc(self.handle, ffi.NULL if stream is None else stream.handle, one_of("kind", kind, KINDS), count,
                                        alignment, out))
        return Block(self, self, out[0], count, alignment)

    @property
    def _gone(self) -> bool:
        return self._handle is None

    def free_many(self, blocks: Sequence[Block]) -> None:
        """Frees the blocks in one call, as Block.free does. Raises for the first that cannot be freed, when the others have been."""
        live = [block for block in blocks if not block.gone]
        for block in live:
            block._freed = True
            if block._exports and not block.on_host:
                block._free_after_exports()
        at_once = [block._token for block in live if block.on_host or not block._exports]
        check(lib.gpushare_memory_free_many(self.handle, len(at_once), at_once, ffi.NULL))
        for block in blocks:
            if block not in live:
                raise block._not_found()

    def close(self) -> None:
        """Closes every session and returns all memory. On a GPU memory that arrays of other libraries use stays until the last of them is gone."""
        if self.closed or not self._exports:
            super().close()
            return
        for session in list(self._sessions):
            session.close()
        self._close_after(self._exports)

    def create_stream(self, priority: int = 0) -> SideStream:
        """A stream outside all lanes."""
        out = ffi.new("gpushare_stream*")
        check(lib.gpushare_stream_create(self.handle, priority, out))
        return SideStream(self, out[0])

    def interference(self) -> list[dict[str, Any]]:
        """What was measured of sessions alone and beside each other: name, beside ('' alone), value, confidence, age_s.

        `value` is seconds of device time of an iteration alone, else how many times as long it takes beside the other. Measured under the
        policy 'pack', or with an `interference_file`.
        """
        out: list[dict[str, Any]] = []
        entry = struct("gpushare_interference")
        while True:
            status = lib.gpushare_runtime_get_interference(self.handle, len(out), entry)
            if status == lib.GPUSHARE_NOT_FOUND:
                return out
            check(status)
            beside = ffi.string(entry.beside).decode(errors="replace")
            out.append({"name": ffi.string(entry.name).decode(errors="replace"), "beside": beside,
                        "value": entry.value if beside else entry.value * 1e-9, "confidence": entry.confidence, "age_s": entry.age_s})

    def set_policy(self, policy: Union[str, Policy]) -> None:
        """Changes the policy at the next iteration boundary of each lane."""
        name, ops, keep = policy_arguments(policy)
        check(lib.gpushare_runtime_set_policy(self.handle, name, ops))
        del keep
        self._policy = policy if isinstance(policy, Policy) else None

    @property
    def _stop_waiting(self) -> Optional[Callable[[], None]]:
        """What raises when the policy has raised: nobody may get a turn again. None for policies of the library."""
        return None if self._policy is None else self._policy._raise

    def set_capacity(self, capacity_bytes: Bytes) -> None:
        """Changes how much device memory may be promised; 0: all that the runtime was opened with.

        Lowered, it is a target to which promises fall at iteration boundaries: `info()` has `capacity_bytes` and
        `effective_capacity_bytes`.
        """
        check(lib.gpushare_runtime_set_capacity(self.handle, size_in_bytes(capacity_bytes)))

    def set_coordination(self, max_guaranteed: int = 0, max_opportunistic: int = 0, long_wait: float = 0) -> None:
        """Has a coordinator decide which sessions run, in which class and with how many bytes; zeros are the defaults (1, 4, 600 s).

        `info()` of a session has `session_class` and `limit_bytes`.
        """
        params = struct("gpushare_coordination_params", max_guaranteed=max_guaranteed, max_opportunistic=max_opportunistic,
                        long_wait_ns=nanoseconds(long_wait))
        check(lib.gpushare_runtime_set_coordination(self.handle, params))

    def clear_coordination(self) -> None:
        """Ends that: no coordinator decides."""
        check(lib.gpushare_runtime_set_coordination(self.handle, ffi.NULL))

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
        wait(lambda slice_ns: lib.gpushare_runtime_synchronize(self.handle, slice_ns), timeout, self._stop_waiting)

    def drain(self, timeout: Optional[float] = None) -> None:
        """Blocks until every iteration submitted before has run or was given up, then as `synchronize`."""
        wait(lambda slice_ns: lib.gpushare_runtime_drain(self.handle, slice_ns), timeout, self._stop_waiting)

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

    def metrics(self) -> str:
        """The figures of the runtime and its open sessions in Prometheus' text format, for a server that adds them to its own."""
        size, capacity = ffi.new("uint64_t *"), 0
        while True:
            text = ffi.new("char[]", capacity) if capacity else ffi.NULL
            status = lib.gpushare_runtime_write_metrics(self.handle, text, capacity, size)
            if status == lib.GPUSHARE_INVALID_ARGUMENT and size[0] > capacity:
                capacity = size[0] + size[0] // 4  # sessions may come meanwhile
                continue
            check(status)
            return ffi.string(text).decode()


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
