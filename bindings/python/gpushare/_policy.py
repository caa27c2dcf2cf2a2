"""Policies in Python."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from typing import Any, Optional, Union

from ._cffi import ffi
from ._native import CallbackFailed, lib, null_or, struct
from ._values import calls, on_release

_log = logging.getLogger("gpushare")


# None of these may let an exception out: cffi would only print it.


@ffi.callback("uint32_t(void*, uint32_t, const gpushare_candidate*, uint32_t, uint64_t)")
def _on_pick(data: Any, lane: int, candidates: Any, count: int, now_ns: int) -> int:
    try:
        choice = ffi.from_handle(data).pick(lane, [candidates[index] for index in range(count)], now_ns)
        return 2**32 - 1 if choice is None else choice
    except BaseException as error:
        ffi.from_handle(data)._failed(error, "pick")
        return 2**32 - 1  # the lane stays idle


@ffi.callback("int32_t(void*, const gpushare_candidate*, const gpushare_candidate*)")
def _on_before(data: Any, a: Any, b: Any) -> int:
    try:
        return 1 if ffi.from_handle(data).before(a, b) else 0
    except BaseException as error:
        ffi.from_handle(data)._failed(error, "before")
        return 0


@ffi.callback("int32_t(void*, const gpushare_candidate*, const gpushare_candidate*)")
def _on_outranks(data: Any, waiting: Any, resident: Any) -> int:
    try:
        return 1 if ffi.from_handle(data).outranks(waiting, resident) else 0
    except BaseException as error:
        ffi.from_handle(data)._failed(error, "outranks")
        return 0


class Policy:
    """A policy of your own: derive from it and override `pick`, and `before` or `outranks` if you need them.

    The functions run with the scheduler's lock held: they must be quick and must not call gpushare. Candidates have the
    fields of gpushare_candidate (session_id, priority, weight, service_ns, remaining_ns, ...) and are valid during the call.
    If one raises, the waits of its runtimes' sessions (iteration, wait_admitted, result, drain, synchronize) end with CallbackFailed,
    whose cause is that exception, until another policy is set.
    """

    _error: Optional[BaseException] = None
    _where = ""

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

    def _failed(self, error: BaseException, where: str) -> None:
        if self._error is None:
            self._error, self._where = error, where
            _log.error("policy %r: %s raised %r", self.name, where, error, exc_info=error)

    def _raise(self) -> None:
        if self._error is not None:
            raise CallbackFailed(f"policy {self.name!r}: {self._where} raised {self._error!r}; set another policy",
                                 lib.GPUSHARE_CALLBACK_FAILED) from self._error

    def _ops(self) -> tuple[Any, Any]:
        self._error = None
        name = ffi.new("char[]", self.name.encode())
        ops = struct("gpushare_policy_ops", max_lanes=self.max_lanes, max_residents=self.max_residents,
                     head_of_line=int(self.head_of_line), name=name, user_data=calls.hold(self), pick=_on_pick,
                     before=_on_before, outranks=_on_outranks, release=on_release)
        return ops, name


def policy_arguments(policy: Union[None, str, Policy]) -> tuple[Any, Any, Any]:
    """(name, ops, what must stay alive during the call)."""
    if isinstance(policy, Policy):
        ops, keep = policy._ops()
        return ffi.NULL, ops, keep
    return null_or(policy), ffi.NULL, None
