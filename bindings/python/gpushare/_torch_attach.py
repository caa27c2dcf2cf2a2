"""gpushare.torch: iterations for a training loop that is not changed."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch

from ._native import InvalidArgument, lib

if TYPE_CHECKING:
    from ._torch_session import Session

_local = threading.local()  # .attached: those whose iterations this thread may have open


def plain_optimizers(given: Any) -> Iterator[Any]:
    """The torch.optim optimizers in wrappers (accelerate, Lightning, Fabric: `.optimizer`), lists and dictionaries."""
    if isinstance(given, dict):
        given = list(given.values())
    if isinstance(given, (list, tuple)):
        for each in given:
            yield from plain_optimizers(each)
        return
    found, seen = given, set()
    while id(found) not in seen:
        seen.add(id(found))
        inner = getattr(found, "optimizer", None) or getattr(found, "_optimizer", None)
        if inner is None or isinstance(inner, str):
            break
        found = inner
    if isinstance(found, (list, tuple, dict)):
        yield from plain_optimizers(found)
        return
    if not hasattr(found, "register_step_post_hook"):
        raise InvalidArgument(f"attach() takes optimizers of torch.optim, or wrappers and lists of them: {type(given).__name__} has neither "
                              "register_step_post_hook() nor .optimizer", lib.GPUSHARE_INVALID_ARGUMENT)
    yield found


def _modules_of(optimizers: list[Any]) -> list[Any]:
    """All modules, and wrappers of them, with parameters of the optimizers."""
    wanted = {id(parameter) for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}
    kind = getattr(getattr(torch, "nn", None), "Module", None)
    if kind is None or not wanted:
        return []
    modules = [each for each in gc.get_objects() if issubclass(type(each), kind) and "_parameters" in each.__dict__]
    owners = {id(each) for each in modules if any(id(parameter) in wanted for parameter in each._parameters.values())}
    return [each for each in modules if any(id(child) in owners for child in each.modules())]


class _Hook:
    """A hook of a module. A deep copy of the module has the same; one that was saved and loaded has a hook that does nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *_: Any) -> None:
        self._function()

    def __deepcopy__(self, _: Any) -> "_Hook":
        return self

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing() -> None:
    pass


class Attached:
    """Optimizers of a session, and the hooks that begin and end its iterations."""

    def __init__(self, session: "Session", given: Any) -> None:
        self._session = session
        self._handles: list[Any] = []
        self._thread = threading.get_ident()  # of the loop: backward, too, may call modules
        self._calls = 0  # of modules, inside each other
        self._alone = False  # the iteration is that of one call
        optimizers = list(plain_optimizers(given))
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_pre_hook"):
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        before, after = _Hook(self._before_call), _Hook(self._after_call)
        for module in _modules_of(optimizers):
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after, always_call=True))
        _watch_data_loaders()
        if not hasattr(_local, "attached"):
            _local.attached = []
        _local.attached.append(self)

    def detach(self) -> None:
        """No hook of it does anything any more, of copies of modules neither."""
        self._thread = 0
        while self._handles:
            self._handles.pop().remove()
        if self in getattr(_local, "attached", []):
            _local.attached.remove(self)

    def _before_step(self, *_: Any) -> None:
        if self._session._open is None:  # a loop that calls no module: at least the step is in an iteration
            self._session._begin()

    def _after_step(self, *_: Any) -> None:
        self._alone = False
        self._session._end(None)

    def _before_call(self) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        self._calls += 1
        if self._calls == 1 and self._session._open is None:
            self._session._begin()
            self._alone = not torch.is_grad_enabled()

    def _after_call(self) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread or self._calls == 0:
            return
        self._calls -= 1
        if self._calls == 0 and self._alone:
            self._alone = False
            self._session._end(None)

    def load_data(self) -> None:
        """The loop waits for data: others may run."""
        if self._calls == 0:
            self._session._end(None)


_watched: set[Any] = set()


def _watch_data_loaders() -> None:
    """From now on the turn goes to others while a loop waits for a DataLoader."""
    kind: Any = getattr(getattr(getattr(getattr(torch, "utils", None), "data", None), "dataloader", None), "_BaseDataLoaderIter", None)
    if kind is None or kind in _watched:
        return
    _watched.add(kind)
    fetch: Callable[[Any], Any] = kind.__next__

    def next_batch(loader: Any) -> Any:
        for attached in list(getattr(_local, "attached", ())):
            attached.load_data()
        return fetch(loader)

    kind.__next__ = next_batch
