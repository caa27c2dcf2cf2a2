"""What Ray assigned to an actor, a task or a trial becomes a session on the node's daemon."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import warnings
import weakref
from typing import Any, Callable, Optional

import gpushare

from . import board, daemon

_log = logging.getLogger("gpushare.ray")
_environment = threading.Lock()
_GRANULE_BYTES = 2 << 20


def _assigned(index: int) -> tuple[str, float]:
    """(the id of the GPU, the fraction of it) that Ray assigned to the calling worker. Raises gpushare.Unavailable."""
    import ray

    context = ray.get_runtime_context()
    gpus = float(context.get_assigned_resources().get("GPU", 0))
    ids = context.get_accelerator_ids().get("GPU", [])
    if gpus <= 0 or not ids:
        raise gpushare.Unavailable("Ray assigned no GPU to this worker: give its actor, task or trial num_gpus, such as num_gpus=0.25", 0)
    if not 0 <= index < len(ids):
        raise gpushare.InvalidArgument(f"index is {index}; Ray assigned {len(ids)} GPUs to this worker", gpushare.lib.GPUSHARE_INVALID_ARGUMENT)
    return str(ids[index]), min(1.0, gpus)


def _node_gpus() -> int:
    """The GPUs that this node declares to Ray."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return next((max(1, int(node["Resources"].get("GPU", 1))) for node in ray.nodes() if node["NodeID"] == here), 1)


def _node_ids() -> Optional[list[str]]:
    """The node's GPUs as the CUDA_VISIBLE_DEVICES of `ray start` named them, in Ray's order; None: all, by number."""
    import ray

    worker = getattr(getattr(getattr(ray, "_private", None), "worker", None), "global_worker", None)
    ids = (getattr(worker, "original_visible_accelerator_ids", None) or {}).get("GPU")
    return [str(each) for each in ids] if ids else None


def _position(gpu: str, ids: list[str]) -> Optional[int]:
    """Where a GPU stands in CUDA_VISIBLE_DEVICES, in which a UUID may be cut to its first digits."""
    named = [number for number, each in enumerate(ids)
             if each == gpu or (each.startswith(("GPU-", "MIG-")) and min(len(each), len(gpu)) > 4 and (gpu.startswith(each) or each.startswith(gpu)))]
    return named[0] if len(named) == 1 else None


def device_of(gpu: str, devices: list[dict[str, Any]], visible: Optional[list[str]] = None, node: Optional[list[str]] = None) -> dict[str, Any]:
    """The daemon's device behind Ray's GPU: a number, a UUID or a MIG instance. Raises gpushare.NotFound.

    `visible`: the GPUs that CUDA shows the daemon, as its cuda:0, cuda:1, ...; `node`: those that Ray sees on the node. None: all, by number.
    """
    named = {device["device"]: device for device in devices}
    if any(name.startswith("cuda:") for name in named):
        number = _position(gpu, visible) if visible else int(gpu) if gpu.isdigit() else None
        found = named.get(f"cuda:{number}")
        if found is not None:
            return found
        if visible is None and gpu.isdigit() and int(gpu) < len(devices):
            return devices[int(gpu)]
    else:  # host devices, one for each GPU that the node declares
        number = _position(gpu, node) if node else int(gpu) if gpu.isdigit() else None
        if number is not None and number < len(devices):
            return devices[number]
    shown = f", to which CUDA_VISIBLE_DEVICES shows {','.join(visible)}" if visible else ""
    raise gpushare.NotFound(f"Ray's GPU {gpu} has no device at the daemon, which has {', '.join(named)}{shown}: start the daemon with --gpus as many as the "
                            "node declares, and with the CUDA_VISIBLE_DEVICES of `ray start`", gpushare.lib.GPUSHARE_NOT_FOUND)


class RaySession:
    """A session with the part of a device that Ray assigned. Use it as a gpushare.Session; `close()` ends it and its runtime.

    `fraction` is Ray's, `gpu` the id of its GPU, `memory_limit` in bytes.
    """

    def __init__(self, gpu: str, fraction: float, memory: gpushare.Bytes, name: Optional[str], options: dict[str, Any]) -> None:
        mig = daemon.own_instance(gpu)
        node = [mig] if mig else _node_ids()
        status = daemon.status(mig=mig) or daemon.ensure_daemon(gpus=_node_gpus(), visible=node, mig=mig)
        visible = daemon.visible_gpus(status["pid"])
        device = device_of(gpu, status["devices"], visible, node)
        self.gpu, self.fraction = gpu, fraction
        allowed = int(device["capacity_bytes"] * fraction)
        if allowed > _GRANULE_BYTES:  # promises are made of whole granules: n parts rounded up would not all fit
            allowed -= allowed % _GRANULE_BYTES
        wanted = gpushare.size_in_bytes(memory)
        if wanted > allowed:
            raise gpushare.QuotaExceeded(f"memory={memory!r} is more than Ray assigned: {fraction:g} of GPU {gpu}, which is {allowed} of "
                                         f"{device['capacity_bytes']} bytes. Ask for less, or for a larger num_gpus",
                                         gpushare.lib.GPUSHARE_QUOTA_EXCEEDED)
        self.memory_limit = wanted or allowed
        weight = options.pop("weight", fraction)
        if not 0 < weight <= fraction:
            raise gpushare.QuotaExceeded(f"weight={weight:g} must be above 0 and at most what Ray assigned, {fraction:g} of GPU {gpu}",
                                         gpushare.lib.GPUSHARE_QUOTA_EXCEEDED)
        self.weight = weight
        changed = {"GPUSHARE_SOCKET": str(daemon.socket_path(mig)), "GPUSHARE_MEMORY": f"{self.memory_limit}B"}
        with _environment:  # the runtime reads its limits from there when it opens
            if device["device"].startswith("cuda:"):
                # Ray shows a worker its own GPUs only, numbered anew; here they have the daemon's numbers. In force where CUDA has not started.
                if visible:
                    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
                else:
                    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            before = {key: os.environ.get(key) for key in changed}
            os.environ.update(changed)
            try:
                self.runtime = gpushare.Runtime(f"shared:{device['device']}")
            finally:
                for key, value in before.items():
                    if value is None:
                        del os.environ[key]
                    else:
                        os.environ[key] = value
        try:
            self.session = self.runtime.open_session(name, memory=self.memory_limit, weight=weight, **options)
        except BaseException:
            self.runtime.close()
            raise
        self._closed = threading.Event()
        self._follower: Optional[threading.Thread] = None

    def __getattr__(self, name: str) -> Any:
        if name == "session":  # not there yet
            raise AttributeError(name)
        return getattr(self.session, name)

    def follow(self, trial: str, handle: Any) -> None:
        """Takes the trial's weights from the board `handle` until the session is closed."""
        self._follower = threading.Thread(target=self._follow, args=(trial, handle), daemon=True, name="gpushare-weights")
        self._follower.start()

    def _follow(self, trial: str, handle: Any) -> None:
        import ray

        version = 0
        node = ray.get_runtime_context().get_node_id()
        while not self._closed.is_set():
            try:
                info = self.session.info()
                told = {"device": f"{node}/{self.gpu}", "fraction": self.fraction, "weight": self.weight,
                        "service_s": info["service_ns"] / 1e9, "iterations": info["iterations_done"]}
                new_version, weight = ray.get(handle.next_weight.remote(trial, version, told))
                if new_version > version and weight is not None and not self._closed.is_set():
                    self.session.set_weight(weight)
                    self.weight = weight
                version = new_version
            except gpushare.Error:
                return  # the session has ended
            except Exception as error:  # the board has gone with its driver: the weight stays
                if not self._closed.is_set():
                    _log.debug("no more weights for trial %s: %s", trial, error)
                return
        try:
            handle.left.remote(trial)
        except Exception:
            pass

    def close(self) -> None:
        """Ends the session; its memory and turns go to others. Closing it again does nothing."""
        self._closed.set()
        try:
            self.session.close()
        finally:
            self.runtime.close()

    def __enter__(self) -> "RaySession":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _trial_id() -> Optional[str]:
    """The trial that this worker runs, or None."""
    try:
        from ray import tune

        with warnings.catch_warnings():  # Ray warns of the question outside of a trial
            warnings.simplefilter("ignore")
            return tune.get_context().get_trial_id()
    except Exception:
        return None


def open_session(name: Optional[str] = None, *, memory: gpushare.Bytes = 0, index: int = 0, **options: Any) -> RaySession:
    """Opens a session with what Ray assigned to the calling actor, task or trial: num_gpus=0.25 is weight 0.25 and a quarter of the
    device's memory.

    `memory` and `weight` may be smaller; more raises QuotaExceeded. `index` chooses among several assigned GPUs. Other options are those of
    gpushare.Runtime.open_session. In a trial under FluidScheduler the weight follows the scheduler. The caller closes it.
    """
    gpu, fraction = _assigned(index)
    trial = _trial_id()
    session = RaySession(gpu, fraction, memory, name or trial, options)
    if trial is not None:
        import ray

        try:
            handle = ray.get_actor(board.NAME, namespace=board.NAMESPACE)
        except ValueError:
            return session  # another scheduler's trial
        session.follow(trial, handle)
    return session


def with_session(**options: Any) -> Callable[[Any], Any]:
    """A decorator of functions, methods, generators, coroutines and actor classes: they are called without the session's parameter.

    That is the first one, or the one behind `self`. A function has a session during the call, a generator while it is iterated over, also when
    an exception ends it. Of a class `__init__(self, session, ...)` gets the session, which lives as long as the object. Options are those of
    `open_session`.
    """

    def decorate(function: Any) -> Any:
        return _class_with_session(function, options) if inspect.isclass(function) else _function_with_session(function, options)

    return decorate


def _function_with_session(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    parameters = list(inspect.signature(function).parameters.values())
    place = 1 if parameters and parameters[0].name == "self" else 0

    def given(session: RaySession, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*arguments[:place], session, *arguments[place:])

    run: Any
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run(*arguments: Any, **keywords: Any) -> Any:
            with open_session(**options) as session:
                return await function(*given(session, arguments), **keywords)

    elif inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def run(*arguments: Any, **keywords: Any) -> Any:
            with open_session(**options) as session:
                async for each in function(*given(session, arguments), **keywords):
                    yield each

    elif inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            with open_session(**options) as session:
                return (yield from function(*given(session, arguments), **keywords))

    else:

        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            with open_session(**options) as session:
                return function(*given(session, arguments), **keywords)

    # Ray and Tune look at the parameters of what they call.
    run.__signature__ = inspect.Signature(parameters[:place] + parameters[place + 1:])
    del run.__wrapped__
    return run


def _class_with_session(decorated: Any, options: dict[str, Any]) -> Any:
    @functools.wraps(decorated, updated=())
    class WithSession(decorated):  # type: ignore[misc]  # a class of the caller's
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            session = open_session(**options)
            weakref.finalize(self, session.close)
            try:
                super().__init__(session, *arguments, **keywords)
            except BaseException:
                session.close()
                raise

    parameters = list(inspect.signature(decorated.__init__).parameters.values())
    WithSession.__init__.__signature__ = inspect.Signature(parameters[:1] + parameters[2:])  # type: ignore[attr-defined]
    return WithSession
