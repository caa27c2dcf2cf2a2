"""gpushare.torch: iterations for a training loop that is not changed."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional

import torch

from ._native import Error, InvalidArgument, lib

if TYPE_CHECKING:
    from ._torch_session import Session

_log = logging.getLogger("gpushare")
# By id. Threads attach while others look: valuerefs() is one step of the interpreter, where a WeakSet raises while it grows.
_attached: "weakref.WeakValueDictionary[int, Attached]" = weakref.WeakValueDictionary()


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

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)

    def __deepcopy__(self, _: Any) -> "_Hook":
        return self

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _graphs(output: Any, found: list[Any]) -> bool:
    """Adds the autograd nodes of the tensors in what a module returned. False: it returned something that is not looked into."""
    if isinstance(output, torch.Tensor):
        if output.grad_fn is not None:
            found.append(output.grad_fn)
        return True
    if isinstance(output, Mapping):
        output = list(output.values())
    elif dataclasses.is_dataclass(output):
        output = list(vars(output).values())
    if isinstance(output, (list, tuple)):
        return all([_graphs(each, found) for each in output])
    return isinstance(output, _PLAIN)


class _Graph:
    """The autograd graph of what a call returned, which holds this object. The last graph that goes before a backward pass has begun ends its
    iteration: no step comes of it."""

    def __init__(self, step: Any, attached: "Attached") -> None:
        self._step, self._attached = weakref.ref(step), weakref.ref(attached)
        step.graphs += 1

    def use(self, *_: Any) -> None:
        step = self._step()
        if step is not None:
            step.used = True

    def __del__(self) -> None:
        step, attached = self._step(), self._attached()
        if step is not None and attached is not None:
            step.graphs -= 1
            if step.graphs == 0 and not step.used:
                attached.give_up(step)


def _in_a_module() -> bool:
    """The calling thread is in a module's call. KeyboardInterrupt leaves one without its hooks."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Attached:
    """Optimizers of a session, and the hooks that begin and end its iterations.

    An iteration is begun by the call of a module, and ends where the loop is known to be done with it: the optimizer's step, the wait for data,
    the end of a notebook's cell. It also ends when no step can come of it: the call raised, what it returned needs no gradients, or is
    gone without a backward pass. So a program that does something else holds no turn.
    """

    def __init__(self, session: "Session", given: Any) -> None:
        self._session = session
        self._handles: list[Any] = []
        self._thread: Optional[int] = None  # of the loop: the first that calls a module. Backward, too, may call modules
        self._calls = 0  # of modules, inside each other
        self._handled: Any = None  # the exception that was being handled when the outermost call began
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
        _watch_cells()
        _attached[id(self)] = self

    def detach(self) -> None:
        """No hook of it does anything any more, of copies of modules neither."""
        self._thread = 0
        while self._handles:
            self._handles.pop().remove()
        _attached.pop(id(self), None)

    def _begin(self) -> None:
        self._session._begin()
        self._session._open.of_loop = True  # type: ignore[union-attr]

    def _before_step(self, *_: Any) -> None:
        if self._session._open is None:  # a loop that calls no module: at least the step is in an iteration
            self._begin()

    def _after_step(self, *_: Any) -> None:
        self._calls, self._alone = 0, False
        self._session._end(None)

    def _before_call(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._thread is None:
            self._thread = threading.get_ident()
        if threading.get_ident() != self._thread:
            return
        self._calls += 1
        if self._calls == 1:
            self._handled = sys.exc_info()[1]
            if self._session._open is None:
                self._begin()
                self._alone = not torch.is_grad_enabled()

    def _after_call(self, module: Any, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread or self._calls == 0:
            return
        self._calls -= 1
        step = self._session._open
        if self._calls > 0 or step is None:
            return
        error, handled, self._handled = sys.exc_info()[1], self._handled, None
        alone, self._alone = self._alone, False
        if error is not None and error is not handled:
            self.give_up(step, error)
        elif alone:
            self._session._end(None)
        else:
            self._watch_results(output, step)

    def _watch_results(self, output: Any, step: Any) -> None:
        nodes: list[Any] = []
        if not _graphs(output, nodes):
            step.used = True  # by whom is not known
        elif nodes:
            graph = _Graph(step, self)
            for node in nodes:
                node.register_prehook(graph.use)
        elif step.graphs == 0 and not step.used:
            self.give_up(step)

    def give_up(self, step: Any, error: Optional[BaseException] = None) -> None:
        """No step comes of this iteration, if it is the loop's and still open."""
        if step.of_loop and self._session._open is step and threading.get_ident() == self._thread and self._calls == 0:
            try:
                self._session._end(error)
            except Error:
                _log.exception("ending an iteration of session %r", self._session.name)

    def load_data(self) -> None:
        """The loop waits for data: others may run."""
        if self._calls == 0 or not _in_a_module():
            self._calls, self._alone = 0, False
            self._session._end(None)

    def end_cell(self) -> None:
        """A notebook's cell has ended, maybe by an exception: nobody knows when the next one runs."""
        self._calls, self._alone = 0, False
        if self._session._open is not None:
            self.give_up(self._session._open)


def _of_this_thread() -> "list[Attached]":
    every = [reference() for reference in _attached.valuerefs()]
    return [attached for attached in every if attached is not None and attached._thread == threading.get_ident()]


_cells: set[int] = set()


def _watch_cells() -> None:
    """In a notebook the turn goes to others between cells."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", _nothing)()
    if shell is None or id(shell) in _cells:
        return
    _cells.add(id(shell))

    def end(*_: Any) -> None:
        for attached in _of_this_thread():
            attached.end_cell()

    shell.events.register("post_run_cell", end)


_watched: set[Any] = set()


def _watch_data_loaders() -> None:
    """From now on the turn goes to others while a loop waits for a DataLoader."""
    kind: Any = getattr(getattr(getattr(getattr(torch, "utils", None), "data", None), "dataloader", None), "_BaseDataLoaderIter", None)
    if kind is None or kind in _watched:
        return
    _watched.add(kind)
    fetch: Callable[[Any], Any] = kind.__next__

    def next_batch(loader: Any) -> Any:
        for attached in _of_this_thread():
            attached.load_data()
        return fetch(loader)

    kind.__next__ = next_batch
