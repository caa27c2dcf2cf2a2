"""Policies in Python."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from typing import Any, Optional, Union

from ._cffi import ffi
from ._native import CallbackFailed, lib, null_or, struct
from ._values import calls, on_release

_log = logging.getLogger("gpushare")


_NOT_NOW = 2**64 - 1


def _int32(answer: Any) -> int:
    return min(max(int(answer), -1), 2**31 - 1)


# None of these may let an exception out: cffi would only print it.


def _ask(data: Any, question: str, otherwise: Any, *arguments: Any) -> Any:
    try:
        return getattr(ffi.from_handle(data), question)(*arguments)
    except BaseException as error:
        asked = question.lstrip("_")
        for suffix in ("_ns", "_number"):
            asked = asked[:-len(suffix)] if asked.endswith(suffix) else asked
        ffi.from_handle(data)._failed(error, asked)
        return otherwise


# The answers become numbers in here too, so that a wrong type is told like an exception.


@ffi.callback("int32_t(void*, const gpushare_candidate*, const gpushare_candidate*)")
def _on_before(data: Any, a: Any, b: Any) -> int:
    return 1 if _ask(data, "before", False, a, b) else 0


@ffi.callback("uint64_t(void*, const gpushare_candidate*, uint64_t)")
def _on_may_run(data: Any, session: Any, now_ns: int) -> int:
    return _ask(data, "_may_run_ns", _NOT_NOW, session, now_ns)


@ffi.callback("int32_t(void*, const gpushare_candidate*, const gpushare_candidate*)")
def _on_gives_way(data: Any, victim: Any, other: Any) -> int:
    return _ask(data, "_gives_way_number", 0, victim, other)


@ffi.callback("double(void*, const gpushare_candidate*)")
def _on_share(data: Any, session: Any) -> float:
    return _ask(data, "_share_number", 0.0, session)


@ffi.callback("int32_t(void*, const gpushare_candidate*, uint32_t, uint32_t)")
def _on_may_join(data: Any, session: Any, residents: int, passes: int) -> int:
    return _ask(data, "_may_join_number", 0, session, residents, bool(passes))


class Policy:
    """A policy of your own: derive from it and override some of the five questions.

    The functions run with the scheduler's lock held: they must be quick and must not call gpushare. Sessions have the
    fields of gpushare_candidate (session_id, priority, weight, service_ns, remaining_ns, ...) and are valid during the call.
    If one raises, the waits of its runtimes' sessions (iteration, wait_admitted, result, drain, synchronize) end with CallbackFailed,
    whose cause is that exception, until another policy is set.
    """

    _error: Optional[BaseException] = None
    _where = ""

    name = "python"

    # Answers of gives_way.
    NEVER, AT_ONCE, AFTER_STAY, AFTER_LONG_STAY = 0, 1, 2, 3
    # Answers of share, besides weights.
    IN_LINE, WHOLE = 0.0, -1.0
    # Answers of may_join.
    NO, YES, NOBODY = 0, 1, 2

    def before(self, a: Any, b: Any) -> bool:
        """True if `a` ranks above `b`: while it has work, no session of lower rank begins an iteration."""
        return False

    def may_run(self, session: Any, now_ns: int) -> Union[bool, int]:
        """True or False, or the time in ns from which the session's next iteration may begin."""
        return True

    def gives_way(self, victim: Any, other: Any) -> Union[bool, int]:
        """True (AT_ONCE) if `victim` may be moved to host memory for `other`, or another of the answers above."""
        return False

    def share(self, session: Any) -> float:
        """The session's weight among those of its rank, or IN_LINE, or WHOLE (one lane, the whole device)."""
        return session.weight

    def may_join(self, session: Any, residents: int, passes: bool) -> Union[bool, int]:
        """True if the session may join the `residents` ones, False if not now, NOBODY if those behind it may not either."""
        return True

    def _may_run_ns(self, session: Any, now_ns: int) -> int:
        answer = self.may_run(session, now_ns)
        if isinstance(answer, bool):
            return now_ns if answer else _NOT_NOW
        return min(max(int(answer), 0), _NOT_NOW)

    def _gives_way_number(self, victim: Any, other: Any) -> int:
        return _int32(self.gives_way(victim, other))

    def _share_number(self, session: Any) -> float:
        return float(self.share(session))

    def _may_join_number(self, session: Any, residents: int, passes: bool) -> int:
        return _int32(self.may_join(session, residents, passes))

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
        ops = struct("gpushare_policy_ops", name=name, user_data=calls.hold(self), before=_on_before, may_run=_on_may_run,
                     gives_way=_on_gives_way, share=_on_share, may_join=_on_may_join, release=on_release)
        return ops, name


def policy_arguments(policy: Union[None, str, Policy]) -> tuple[Any, Any, Any]:
    """(name, ops, what must stay alive during the call)."""
    if isinstance(policy, Policy):
        ops, keep = policy._ops()
        return ffi.NULL, ops, keep
    return null_or(policy), ffi.NULL, None
