"""gpushare.torch: sessions, iterations and PyTorch's allocator."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import re
import threading
import traceback
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional

import torch

from ._allocator import Allocator
from ._cffi import ffi
from ._loader import Loader
from ._memory import Stream
from ._native import Closable, DeviceOutOfMemory, Error, InvalidState, Unavailable, Unsupported, as_dict, check, find_library, lib, struct
from ._runtime import Runtime
from ._session import SessionOptions, begin_iteration, session_params
from ._torch_attach import Attached
from ._torch_memory import answer_for_sessions, without_cudnn_benchmark
from ._values import Bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("gpushare")

FIRST_VERSION, LAST_VERSION = (2, 11), (2, 15)


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def supported() -> bool:
    return FIRST_VERSION <= _version() <= LAST_VERSION


def versions() -> str:
    return f"this is PyTorch {torch.__version__}; gpushare.torch is made for {FIRST_VERSION[0]}.{FIRST_VERSION[1]} to {LAST_VERSION[0]}.{LAST_VERSION[1]}"


class _Device:
    """A device that PyTorch and gpushare share in this process: made by the first session, gone with the process."""

    def __init__(self, spec: str, policy: Optional[str], capacity_bytes: Bytes) -> None:
        self.runtime = Runtime(spec, policy=policy, capacity_bytes=capacity_bytes)
        self.on_cuda = self.runtime.info()["device"].startswith("cuda")
        self.index = self.runtime._device_index
        self.allocator = Allocator(self.runtime)
        self.native: Any = None
        self._homes: list[Any] = []  # streams of sessions between iterations that no session has now
        self._all_homes: list[Any] = []
        self._streams: dict[int, Any] = {}
        self._loader: Optional[Loader] = None
        if self.on_cuda:
            try:
                self.native = _install(self)
            except BaseException:
                self.allocator.close()
                self.runtime.close()
                raise

    def take_home(self) -> Any:
        """A stream outside all lanes. Given back when its session's block ends, but never released before the device is closed: tensors
        that were made on it name it when they are freed."""
        with _mutex:
            if self._homes:
                return self._homes.pop()
        home = self.runtime.create_stream()
        self._all_homes.append(home)
        return home

    def loader(self) -> Loader:
        """For all loads on the device that name none: memory that one of them pinned serves the next. It keeps the files of models that are
        loaded on demand."""
        with _mutex:
            if self._loader is None:
                self._loader = Loader(self.runtime)
            return self._loader

    def give_home(self, home: Any) -> None:
        with _mutex:
            self._homes.append(home)

    def torch_stream(self, native: int) -> Any:
        """PyTorch's object for a native stream."""
        stream = self._streams.get(native)
        if stream is None:
            stream = self._streams[native] = torch.cuda.ExternalStream(native, device=torch.device("cuda", self.index))
        return stream

    def retire(self) -> None:
        """When the process ends. A GPU's streams stay: PyTorch still names them when it frees pinned memory that was copied on them."""
        if self.native is None:
            self.allocator.close()
            self.runtime.close()
            return
        self.native.gpushare_torch_set_reclaim(None)
        self.native.gpushare_torch_attach(self.index, None)
        for kept in (self.runtime, self.allocator, *self._all_homes):
            kept._finalizer.detach()


class _OnStream:
    """PyTorch's current stream of this thread is another one. It comes after the one before, and that one after it."""

    def __init__(self, device: _Device, native: int) -> None:
        self._outer = torch.cuda.current_stream(device.index)
        self._inner = device.torch_stream(native)
        self._inner.wait_stream(self._outer)
        self._current = torch.cuda.stream(self._inner)
        self._current.__enter__()

    def leave(self) -> None:
        self._current.__exit__(None, None, None)
        self._outer.wait_stream(self._inner)


_devices: dict[str, _Device] = {}
_mutex = threading.Lock()
_plugged: Any = None  # PyTorch's object for our allocator, once it is the current one


# PyTorch's setter, and our function for it.
_HOOKS = (("set_init_fn", "gpushare_torch_init"), ("set_reset_fn", "gpushare_torch_reset"),
          ("set_memory_fraction_fn", "gpushare_torch_memory_fraction"), ("set_base_alloc_fn", "gpushare_torch_get_base_address"),
          ("set_record_stream_fn", "gpushare_torch_record_stream"),
          ("set_begin_allocate_to_pool", "gpushare_torch_begin_allocate_to_pool"),
          ("set_end_allocate_to_pool_fn", "gpushare_torch_end_allocate_to_pool"),
          ("set_release_pool", "gpushare_torch_release_pool"))


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_uint64)
def _reclaim(index: int, nbytes: int) -> int:
    """An allocation finds no memory: weights on demand make room, those of the thread's session if it is known."""
    try:
        bound = [session for session in _bound()[-1:] if session.device.index == index]
        return int(any(session._reclaim() for session in bound or list(_sessions) if session.device.index == index))
    except Exception:
        _log.exception("weights on demand could not make room")
        return 0


def _asked(index: int) -> Optional[tuple[Allocator, Optional["Session"]]]:
    """Whose memory PyTorch's functions tell of: that of the calling thread's innermost session on the device, else of all."""
    bound = [session for session in _bound() if session._shared.index == index and session._shared.on_cuda and not session.closed]
    if bound:
        return bound[-1].allocator, bound[-1]
    with _mutex:
        found = [device.allocator for device in _devices.values() if device.on_cuda and device.index == index]
    return (found[0], None) if found else None


def _install(device: _Device) -> Any:
    """Makes gpushare PyTorch's CUDA allocator, and the device's memory that of `device`."""
    global _plugged
    if not supported():
        raise Unavailable(f"{versions()}; use device='host', or another PyTorch", lib.GPUSHARE_UNAVAILABLE)
    path = library()
    native = ctypes.CDLL(path)
    native.gpushare_torch_set_reclaim.restype = ctypes.c_void_p
    native.gpushare_torch_attach.restype = ctypes.c_void_p
    native.gpushare_torch_attach.argtypes = [ctypes.c_int, ctypes.c_void_p]
    if _plugged is None:
        plugged = torch.cuda.memory.CUDAPluggableAllocator(path, "gpushare_torch_alloc", "gpushare_torch_free")
        for setter, function in _HOOKS:
            getattr(plugged.allocator(), setter)(ctypes.cast(getattr(native, function), ctypes.c_void_p).value)
        try:
            torch.cuda.memory.change_current_allocator(plugged)
        except RuntimeError as error:
            raise InvalidState("PyTorch has allocated device memory already, so that its allocator cannot be changed: open the first "
                               f"session before the first CUDA tensor ({error})", lib.GPUSHARE_INVALID_STATE) from error
        _plugged = plugged
        answer_for_sessions(_asked)
        without_cudnn_benchmark()
    native.gpushare_torch_set_reclaim(_reclaim)
    native.gpushare_torch_attach(device.index, int(ffi.cast("uintptr_t", device.allocator.handle)))
    return native


def _device_of(spec: Optional[str], policy: Optional[str], capacity_bytes: Bytes) -> _Device:
    if spec is None:
        spec = "cuda:0" if torch.cuda.is_available() else "host"
    elif spec == "cpu":
        spec = "host"
    elif spec == "cuda":
        spec = "cuda:0"
    with _mutex:
        if spec not in _devices:
            _devices[spec] = _Device(spec, policy or "fair", capacity_bytes)
        elif policy is not None:
            _devices[spec].runtime.set_policy(policy)
        return _devices[spec]


@atexit.register
def _close_all() -> None:
    """Before PyTorch's own teardown: tensors that are freed later are answered by nobody, and ignored."""
    with _mutex:
        devices = list(_devices.values())
        _devices.clear()
    for session in list(_sessions):
        late = session._late
        if late is not None:
            late.stop()
        with contextlib.suppress(Error):
            session._shut()
    for device in devices:
        with contextlib.suppress(Error):
            device.retire()


_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()


class Session(Closable):
    """One job: its memory and its turns. Made by `session`. Tensors that the `with` block's thread makes are the session's."""

    def __init__(self, device: _Device, name: str, **options: Unpack[SessionOptions]) -> None:
        self.name = name
        self._fail_on_error = options.get("fail_on_error", False)
        self._shared = device
        self.runtime = device.runtime
        self.allocator = device.allocator
        params, keep = session_params(name=name, **options)
        out = ffi.new("gpushare_session*")
        check(lib.gpushare_session_open(device.runtime.handle, params, out))
        del keep
        self._open: Optional[_Step] = None
        self._late: Optional[_LateEnd] = None  # of an iteration whose tensors keep it open
        self._detach: list[Callable[[], None]] = []
        self._home: Any = None
        self._opened_by = 0  # the thread
        self._lane: Any = None  # the stream of the open iteration
        self._on_home: Any = None
        self._error: Optional[BaseException] = None
        self._switching = threading.RLock()  # of what follows
        self._on_demand: weakref.WeakSet[Any] = weakref.WeakSet()  # weights that take each other's room
        allocator = device.allocator
        # Closed with its last tensor: nothing that PyTorch still holds vanishes.
        self._own(out[0], lambda handle: lib.gpushare_allocator_close_session(allocator.handle, handle), allocator)
        _sessions.add(self)

    @property
    def device(self) -> Any:
        """The torch.device that the session's tensors belong on."""
        return torch.device("cuda", self._shared.index) if self._shared.on_cuda else torch.device("cpu")

    def iteration(self, timeout: Optional[float] = None) -> "_Step":
        """`with s.iteration(): step(batch)`: waits for the session's turn; its work goes to the session's stream."""
        return _Step(self, timeout)

    def attach(self, *optimizers: Any) -> None:
        """Iterations for a loop that stays as it is; see the module's `attach`."""
        self._detach.append(Attached(self, optimizers).detach)

    def info(self) -> dict[str, Any]:
        """State and statistics, as gpushare_session_info."""
        info = struct("gpushare_session_info")
        check(lib.gpushare_session_get_info(self.handle, info))
        return as_dict(info)

    def memory(self) -> dict[str, Any]:
        """current_bytes, peak_bytes, reserved_bytes of the session; what torch.cuda.memory_stats tells without gpushare."""
        return self.allocator.info(self)

    def _begin(self) -> None:
        _Step(self, None).__enter__()

    def _end(self, error: Optional[BaseException]) -> None:
        step = self._open
        if step is not None:
            step.__exit__(None if error is None else type(error), error, None)

    def _raise(self) -> None:
        if self._error is not None:
            raise InvalidState(f"session '{self.name}' has failed: an iteration raised {self._error!r}, and it was opened with fail_on_error",
                               lib.GPUSHARE_INVALID_STATE) from self._error

    def _reclaim(self) -> bool:
        """Weights on demand that nobody uses now leave the device, those first that were used longest ago. False: there are none."""
        if not self._switching.acquire(blocking=False):  # another thread switches, and may wait for this one
            return False
        try:
            idle = [weights for weights in self._on_demand if weights.idle]
            if idle:
                min(idle, key=lambda weights: weights.last_use).unload()
            return bool(idle)
        finally:
            self._switching.release()

    def _shut(self, error: Optional[BaseException] = None) -> None:
        """Detaches optimizers and ends an open iteration, then gives the session back."""
        while self._detach:
            self._detach.pop()()
        self._end(error)
        late = self._late
        if late is not None and late.then(self._give_back_handle):
            return  # when its tensors let the iteration end
        self._give_back_handle()

    def _give_back_handle(self) -> None:
        if not self.closed:
            Closable.close(self)

    def open(self) -> "Session":
        """What entering the `with` block does, for the calling thread, until `close()`: for notebooks and threads of a program's own."""
        if self in _bound() or self._home is not None:
            raise InvalidState(f"the 'with' block of session '{self.name}' is open already, or it was opened by open()", lib.GPUSHARE_INVALID_STATE)
        check(lib.gpushare_allocator_bind_thread(self.allocator.handle, self.handle))
        _bound().append(self)
        self._opened_by = threading.get_ident()
        if self._shared.on_cuda:
            # Threads that never called gpushare, as autograd's, find the session by this stream between iterations.
            self._home = self._shared.take_home()
            native = self._home.native
            check(lib.gpushare_allocator_adopt_stream(self.allocator.handle, self.handle, ffi.cast("void*", native)))
            self._on_home = _OnStream(self._shared, native)
        return self

    def close(self) -> None:
        """Ends the session: at once, or with its last tensor."""
        self._leave(None)

    def _leave(self, error: Optional[BaseException]) -> None:
        if self in _bound():
            _bound().remove(self)
            rebind(self.allocator)
        with contextlib.suppress(DeviceOutOfMemory):  # _late ends it, and has said so
            self._end(error)  # an iteration of attach(): on the stream that its `with` block was entered on
        home, self._home = self._home, None
        if home is not None:
            if self._opened_by == threading.get_ident():
                self._on_home.leave()
            self._on_home = None
            lib.gpushare_allocator_forget_stream(self.allocator.handle, ffi.cast("void*", home.native))
            self._shared.give_home(home)
        self._shut(error)

    def __enter__(self) -> "Session":
        return self.open()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._leave(error)


class _Step:
    """An iteration of a session, as a context manager. An exception in it abandons the iteration: tensors that are still alive are kept."""

    def __init__(self, session: Session, timeout: Optional[float]) -> None:
        self._session = session
        self._timeout = timeout
        self._handle: Any = None
        self._stream: Any = None
        self.of_loop = self.used = False  # begun by attach(); a backward pass has begun with what its calls returned, or may have: _torch_attach.py
        self.graphs = 0  # with which one may begin

    def __enter__(self) -> "_Step":
        session = self._session
        if session._open is not None:
            raise InvalidState(f"session '{session.name}' has an iteration open already", lib.GPUSHARE_INVALID_STATE)
        session._raise()
        late = session._late
        if late is not None and not late.try_now():
            raise DeviceOutOfMemory(f"session '{session.name}': tensors of its last iteration are alive, and the device has no room to keep them beside "
                                    "another iteration: delete them, or the exception that holds them", lib.GPUSHARE_DEVICE_OUT_OF_MEMORY)
        self._handle = begin_iteration(session.handle, self._timeout, session.runtime)
        session._open = self
        try:
            stream = ffi.new("gpushare_stream*")
            check(lib.gpushare_iteration_get_stream(self._handle, stream))
            lane = session._lane = Stream(session.runtime, stream[0])
            if session._shared.on_cuda:
                self._stream = _OnStream(session._shared, lane.native)
            else:
                lane.synchronize()  # PyTorch's CPU kernels run at once, not in stream order
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        session, handle = self._session, self._handle
        if handle is None:
            return
        self._handle = session._open = session._lane = None
        if self._stream is not None:
            self._stream.leave()
            self._stream = None
        if kind is GeneratorExit:  # a loop over a generator was left
            error = None
        if error is not None and session._fail_on_error:
            session._error = error

        def end() -> int:
            return int(lib.gpushare_allocator_end_iteration(session.allocator.handle, handle))

        try:
            if keep_tensors(end, session, error):
                return
        except Error as failure:
            lib.gpushare_iteration_fail(handle, failure.status, str(failure).encode())
            if error is None:
                raise
            _log.exception("ending an iteration in which an exception was raised")  # that exception says more
            return
        session._late = _LateEnd(end, session)
        if error is None:
            raise DeviceOutOfMemory(f"session '{session.name}': the iteration has ended, but the device has no room to keep the tensors of it that are "
                                    "alive: its turn lasts until they are deleted", lib.GPUSHARE_DEVICE_OUT_OF_MEMORY)


_NO_ROOM = (lib.GPUSHARE_DEVICE_OUT_OF_MEMORY, lib.GPUSHARE_QUOTA_EXCEEDED, lib.GPUSHARE_EXCEEDS_CAPACITY)


def keep_tensors(keep: Callable[[], int], session: "Session", error: Optional[BaseException]) -> bool:
    """Calls `keep`, which keeps the tensors of an iteration that are alive, and makes room for them if there is none. False: there is none.

    An exception holds the variables of all functions that it left, most of them in vain: they are cleared when there is no room for them.
    """
    status = keep()
    if status in _NO_ROOM:
        gc.collect()
        status = keep()
    if status in _NO_ROOM and error is not None:
        _log.warning("session %r: no room to keep the tensors that %s holds: the variables of the functions that it left are cleared",
                     session.name, type(error).__name__)
        _clear_frames(error)
        gc.collect()
        status = keep()
    while status in _NO_ROOM and session._reclaim():
        status = keep()
    if status in _NO_ROOM:
        return False
    check(status)
    return True


def _clear_frames(error: BaseException) -> None:
    left: list[Optional[BaseException]] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


class _LateEnd:
    """Ends an iteration as soon as the tensors that it cannot keep are gone. Until then it has its turn: their memory is nobody else's."""

    def __init__(self, end: Callable[[], int], session: "Session") -> None:
        self._end, self._session = end, session
        self._mutex = threading.Lock()
        self._over = False
        self._then: Optional[Callable[[], None]] = None
        self._gone = threading.Event()
        _log.error("session %r: tensors of its last iteration find no room: its turn lasts until they are deleted", session.name)
        threading.Thread(target=self._run, name="gpushare-late-end", daemon=True).start()

    def try_now(self) -> bool:
        """True if the iteration has ended."""
        with self._mutex:
            if not self._over:
                status = self._end()
                if status in _NO_ROOM:
                    return False
                self._over = True
                self._session._late = None
            then, self._then = self._then, None
        if then is not None:
            then()
        return True

    def then(self, act: Callable[[], None]) -> bool:
        """`act` is called when the iteration has ended. False: it has."""
        if self.try_now():
            return False
        with self._mutex:
            self._then = act
        return True

    def stop(self) -> None:
        self._gone.set()

    def _run(self) -> None:
        while not self._gone.wait(0.02) and not self.try_now():
            pass


_local = threading.local()


def _bound() -> list[Session]:
    """The sessions whose `with` blocks the calling thread is in, outermost first."""
    if not hasattr(_local, "sessions"):
        _local.sessions = []
    return _local.sessions


def rebind(allocator: Allocator) -> None:
    """Binds the calling thread to the session of its innermost `with` block."""
    outer = next((session for session in reversed(_bound()) if session.allocator is allocator and not session.closed), None)
    lib.gpushare_allocator_bind_thread(allocator.handle, ffi.NULL if outer is None else outer.handle)


def innermost(session: Optional[Session], what: str) -> Session:
    if session is None and not _bound():
        raise InvalidState(f"{what} needs a session: call it inside 'with gt.session(...)', or pass one", lib.GPUSHARE_INVALID_STATE)
    return session or _bound()[-1]


def session(name: str, *, device: Optional[str] = None, policy: Optional[str] = None, capacity_bytes: Bytes = 0,
            **options: Unpack[SessionOptions]) -> Session:
    """Opens a session: `with gt.session("resnet", memory="8G", weight=2) as s: ...`.

    `device`: 'cuda:0', 'host' or 'cpu'; by default the first GPU that PyTorch sees, else the host. `policy` and `capacity_bytes` are the
    device's: the first session of the process sets them, a later one may change the policy. `options`: as Runtime.open_session; `memory`
    is a hard limit.
    """
    return Session(_device_of(device, policy, capacity_bytes), name, **options)


def attach(*optimizers: Any, to: Optional[Session] = None) -> None:
    """Iterations for a loop that stays as it is.

    An iteration begins when a module with parameters of the optimizers is called, and ends when one of them has made its step, when the
    loop asks a DataLoader for its next batch, or, without gradients, with the call. So the turn goes on while data are loaded, a model is saved
    or other code runs; validation takes a turn for each batch.

    `optimizers`: what torch.optim makes, or what accelerate, Lightning or another wrapper made of it; lists and dictionaries of them. The
    session is that of the innermost `with` block of the calling thread, or `to`. Call it when the model has been made, and its wrappers.
    """
    innermost(to, "attach()").attach(*optimizers)


class Pool:
    """Device memory for one purpose, such as a KV cache: tensors that are made in `with pool.use():` by its thread lie side by side in
    memory of the thread's session, outlive iterations, and their bytes are used again by this pool alone until it is closed.

    In place of torch.cuda.MemPool, which cannot be made once the allocator has been changed, and keeps it from being changed.
    """

    def __init__(self, of: Optional[Session] = None) -> None:
        """`of`: a session of the device, by default that of the innermost `with` block of the calling thread."""
        session = innermost(of, "a pool")
        if not session._shared.on_cuda:
            raise Unsupported("pools are of CUDA memory; on the host device memory is PyTorch's", lib.GPUSHARE_UNSUPPORTED)
        self._allocator = session.allocator
        self.id = torch.cuda.graph_pool_handle()  # the next free number
        self._begin()
        self._end()

    def _begin(self) -> None:
        check(lib.gpushare_allocator_begin_pool(self._allocator.handle, *self.id, ffi.NULL, ffi.NULL, ffi.NULL))

    def _end(self) -> None:
        check(lib.gpushare_allocator_end_pool(self._allocator.handle, *self.id))

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Allocations of the calling thread come from the pool."""
        if self.id is None:
            raise InvalidState("this Pool is closed", lib.GPUSHARE_INVALID_STATE)
        self._begin()
        try:
            yield
        finally:
            self._end()
            check(lib.gpushare_allocator_release_pool(self._allocator.handle, *self.id))

    def close(self) -> None:
        """The pool's memory returns: at once where no tensor lies, the rest with its tensors."""
        number, self.id = self.id, None
        if number is not None and not self._allocator.closed:
            lib.gpushare_allocator_release_pool(self._allocator.handle, *number)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.close()


def library() -> str:
    """The path of libgpushare_torch.so, for programs that make a torch.cuda.memory.CUDAPluggableAllocator themselves."""
    return find_library("libgpushare_torch.so", "GPUSHARE_TORCH_LIBRARY")


def is_out_of_memory(error: BaseException) -> bool:
    """True for the exception that PyTorch raises when there is no memory for an allocation: torch.OutOfMemoryError."""
    kind = getattr(torch, "OutOfMemoryError", None)
    return (kind is not None and isinstance(error, kind)) or isinstance(error, MemoryError)
