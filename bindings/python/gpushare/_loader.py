"""Models in host memory, their way to the device, and switching between them: loader.h."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping, Optional, Sequence, Union

from . import _arrays
from ._cffi import ffi
from ._memory import Stream
from ._native import Closable, Exports, as_dict, check, lib, struct, wait
from ._runtime import Runtime
from ._session import Iteration, Session, SessionOptions, session_params
from ._values import Bytes, Handles, one_of, size_in_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("gpushare")
_READ_PATHS = {"auto": lib.GPUSHARE_READ_AUTO, "buffered": lib.GPUSHARE_READ_BUFFERED, "direct": lib.GPUSHARE_READ_DIRECT,
               "mapped": lib.GPUSHARE_READ_MAPPED}
_RESIDENCY = {"lru": lib.GPUSHARE_RESIDENCY_LRU, "weighted": lib.GPUSHARE_RESIDENCY_WEIGHTED}


@ffi.callback("void(void*, uint32_t, uint32_t, uint32_t)")
def _on_group(data: Any, group: int, first: int, end: int) -> None:
    try:
        ffi.from_handle(data)(group, first, end)
    except BaseException:
        _log.exception("a group function raised")


def _link(costs: Mapping[str, int]) -> Any:
    return struct("gpushare_link_costs", **costs)


def solve_plan(layer_bytes: Sequence[int], link: Mapping[str, int], execution_ns: Optional[Sequence[int]] = None, *,
               resident_layers: int = 0, link_busy_ns: int = 0, lane_busy_ns: int = 0,
               group_cap_bytes: int = 0) -> tuple[list[int], int]:
    """Which consecutive layers are sent, and executed, as one group so that the last one is done earliest. Exact.

    `link` has bytes_per_s, call_overhead_ns and group_overhead_ns. Returns the exclusive end of each group and the
    makespan in nanoseconds.
    """
    count = len(layer_bytes)
    params = struct("gpushare_plan_params", resident_layers=resident_layers, link_busy_ns=link_busy_ns, lane_busy_ns=lane_busy_ns,
                    group_cap_bytes=group_cap_bytes)
    ends, groups, makespan = ffi.new("uint32_t[]", max(count, 1)), ffi.new("uint32_t*"), ffi.new("uint64_t*")
    execute = ffi.NULL if execution_ns is None else ffi.new("uint64_t[]", list(execution_ns))
    check(lib.gpushare_plan_solve(params, _link(link), count, ffi.new("uint64_t[]", list(layer_bytes)), execute, ends, groups, makespan))
    return [ends[index] for index in range(groups[0])], makespan[0]


class Image(Closable):
    """A model's layers in host memory, in execution order."""

    def __init__(self, handle: Any, loader: "Loader") -> None:
        self._own(handle, lib.gpushare_image_release, loader)

    def info(self) -> dict[str, Any]:
        """Layers, bytes, and how often its plan was made anew, as gpushare_image_info."""
        info = struct("gpushare_image_info")
        check(lib.gpushare_image_get_info(self.handle, info))
        return as_dict(info)

    def layers(self) -> list[dict[str, Any]]:
        """Name, bytes, offset and estimated execution time of each layer."""
        return [self._layer(index) for index in range(self.info()["layers"])]

    def _layer(self, index: int) -> dict[str, Any]:
        info = struct("gpushare_layer_info")
        check(lib.gpushare_image_get_layer(self.handle, index, info))
        return as_dict(info)

    def find_layer(self, name: str) -> int:
        """The number of the layer with this name. Raises NotFound."""
        out = ffi.new("uint32_t*")
        check(lib.gpushare_image_find_layer(self.handle, name.encode(), out))
        return out[0]

    def report_execution(self, first: int, end: int, seconds: float) -> None:
        """Reports a measured execution time of layers [first, end) together, for later plans."""
        check(lib.gpushare_image_report_execution(self.handle, first, end, int(seconds * 1e9)))


class _Load:
    """gpushare_load_params and what it points to."""

    def __init__(self, group_ends: Optional[Sequence[int]], execution_ns: Optional[Sequence[int]],
                 on_group: Optional[Callable[[int, int, int], Any]], profile: bool) -> None:
        self.held = Handles()
        self.params = struct("gpushare_load_params", no_profile=int(not profile))
        if group_ends is not None:
            self.ends = ffi.new("uint32_t[]", list(group_ends))
            self.params.group_count, self.params.group_ends = len(group_ends), self.ends
        if execution_ns is not None:
            self.execute = ffi.new("uint64_t[]", list(execution_ns))
            self.params.execution_ns = self.execute
        if on_group is not None:
            self.params.on_group, self.params.on_group_user_data = _on_group, self.held.hold(on_group)


class Model(Closable):
    """An image's layers in a session's memory, usable group by group as they arrive."""

    def __init__(self, runtime: Runtime, handle: Any, owner: Any = None, load: Any = None) -> None:
        self.runtime = runtime
        self._exports = Exports()
        self._session_exports: Any = owner[0]._exports if owner is not None and hasattr(owner[0], "_exports") else Exports()
        if owner is None:  # a switcher's model belongs to the switcher
            self._handle = handle
            self._borrowed = True
        else:
            self._borrowed = False
            self._own(handle, lib.gpushare_model_release, owner, load, exports=self._exports)

    def make_usable(self, stream: Stream, first: int, end: int) -> None:
        """Orders work enqueued on `stream` from now on behind the arrival of layers [first, end). Does not wait."""
        check(lib.gpushare_model_make_usable(self.handle, first, end, stream.handle))

    def mark_end(self, stream: Stream) -> None:
        """The work of the layers made usable last has been enqueued: what is measured ends here. Optional."""
        check(lib.gpushare_model_mark_end(self.handle, stream.handle))

    def wait(self, layer: Optional[int] = None, timeout: Optional[float] = None) -> None:
        """Blocks until `layer` has arrived, by default the last one."""
        index = self.info()["layers"] - 1 if layer is None else layer
        wait(lambda slice_ns: lib.gpushare_model_wait(self.handle, index, slice_ns), timeout)

    def info(self) -> dict[str, Any]:
        """Layers, groups and how many have arrived, as gpushare_model_info."""
        info = struct("gpushare_model_info")
        check(lib.gpushare_model_get_info(self.handle, info))
        return as_dict(info)

    def layer(self, index: int) -> dict[str, Any]:
        """Name, bytes and device address of a layer, and whether it has arrived."""
        info = struct("gpushare_layer_info")
        check(lib.gpushare_model_get_layer(self.handle, index, info))
        return as_dict(info)

    def array(self, index: int, shape: Any, dtype: Any = "<f4") -> Any:
        """A layer as an array: numpy's on the host device, else a DeviceArray. Wait for the layer before reading it.

        The model stays loaded as long as an array that another library uses. A switcher's model gives numpy a copy that cannot be written,
        and is itself good inside its iteration.
        """
        layer = self.layer(index)
        if self._borrowed and self.runtime._on_host:
            import numpy

            # The switcher takes the memory for other members whenever it likes: numpy gets a copy.
            self.wait(index)
            copy: Any = numpy.frombuffer(ffi.buffer(ffi.cast("char*", layer["address"]), layer["bytes"])[:], "|u1")
            return copy[:_arrays.bytes_of(shape, dtype)].view(dtype).reshape(shape)
        return _arrays.view(_Layer(self, layer["address"], layer["bytes"]), shape, dtype)

    def close(self) -> None:
        """Unloads the model in stream order, with the last array over its layers. A switcher's model ends with its iteration."""
        if self._borrowed:
            self._handle = None
        elif self.closed or not self._exports:
            super().close()
        else:
            self._close_after(self._exports)


class SharedImage(Closable):
    """An image that the daemon shares with sessions of a runtime on the device "shared". Iterations of the session read it.

    The daemon reads the file once, brings it to the device once, and takes it away between iterations when others need the room.
    """

    def __init__(self, session: Session, path: Union[str, "os.PathLike[str]"], iteration_ns: int = 0,
                 timeout: Optional[float] = None) -> None:
        text = ffi.new("char[]", os.fsencode(path))
        self.runtime = session.runtime
        out = ffi.new("gpushare_shared_image*")
        params = struct("gpushare_shared_image_params", path=text, iteration_ns=iteration_ns)

        def open_within(slice_ns: int) -> int:
            params.timeout_ns = slice_ns
            return lib.gpushare_session_open_shared_image(session.handle, params, out)

        wait(open_within, timeout)
        self._own(out[0], lib.gpushare_shared_image_release, session)

    def wait(self, first: int = 0, end: Optional[int] = None, timeout: Optional[float] = None) -> None:
        """Blocks until layers [first, end) are on the device, by default all. Inside an iteration of the session."""
        last = self.info()["layers"] if end is None else end
        wait(lambda slice_ns: lib.gpushare_shared_image_wait(self.handle, first, last, slice_ns), timeout)

    def info(self) -> dict[str, Any]:
        """Layers, bytes, and how many layers can be read now, as gpushare_shared_image_info."""
        info = struct("gpushare_shared_image_info")
        check(lib.gpushare_shared_image_get_info(self.handle, info))
        return as_dict(info)

    def layer(self, index: int) -> dict[str, Any]:
        """Name, bytes and device address of a layer, and whether it has arrived."""
        info = struct("gpushare_layer_info")
        check(lib.gpushare_shared_image_get_layer(self.handle, index, info))
        return as_dict(info)


class _Layer:
    """A layer's memory, as an array needs to know it."""

    def __init__(self, model: Model, address: int, nbytes: int) -> None:
        self.model, self.address, self.nbytes = model, address, nbytes
        self.on_host, self.device_index = model.runtime._on_host, model.runtime._device_index

    def _lend(self, array: Any) -> Any:
        """`array` may be used by another library: model, session and runtime are closed after it. A switcher's model is the switcher's."""
        self.model.handle  # raises when it was closed
        if not self.model._borrowed:
            for exports in (self.model._exports, self.model._session_exports, self.model.runtime._exports):
                exports.add(array)
        return self


class Loader(Closable):
    """A cache of images with a byte limit, least recently used first out, and a stream for copies."""

    def __init__(self, runtime: Runtime, *, limit_bytes: Bytes = 0, reads_in_flight: int = 0, chunk_bytes: Bytes = 0,
                 read_bytes: Bytes = 0, read_path: str = "auto", drop_page_cache: bool = False,
                 link: Optional[Mapping[str, int]] = None, keep_ns: int = 0) -> None:
        costs = ffi.NULL if link is None else _link(link)
        params = struct("gpushare_loader_params", reads_in_flight=reads_in_flight, limit_bytes=size_in_bytes(limit_bytes),
                        chunk_bytes=size_in_bytes(chunk_bytes), read_bytes=size_in_bytes(read_bytes),
                        read_path=one_of("read_path", read_path, _READ_PATHS), drop_page_cache=int(drop_page_cache), link=costs,
                        keep_ns=keep_ns)
        out = ffi.new("gpushare_loader*")
        check(lib.gpushare_loader_create(runtime.handle, params, out))
        self.runtime = runtime
        self._own(out[0], lib.gpushare_loader_release, runtime)

    def open(self, path: Union[str, os.PathLike], order: Union[None, str, Iterable[str]] = None,
             checksums: Union[None, str, os.PathLike] = None, once: bool = False) -> Image:
        """Reads a .safetensors file or an index of shards, or finds it in the cache. Blocks on the disk.

        `order`: names of all tensors in execution order, or 'names' to derive it from the names; None: as the bytes lie.
        `once`: the image leaves the cache with its last user. Its pinned memory serves the next image.
        """
        params = struct("gpushare_image_params", once=int(once))
        if order == "names":
            params.order_by = lib.GPUSHARE_ORDER_BY_NAMES
        elif order is not None:
            texts = [ffi.new("char[]", name.encode()) for name in order]
            names = ffi.new("char*[]", texts)
            params.order_count, params.order = len(texts), names
        path_of_sums = ffi.NULL if checksums is None else ffi.new("char[]", os.fsencode(checksums))
        params.checksums = path_of_sums
        out = ffi.new("gpushare_image*")
        check(lib.gpushare_image_open(self.handle, os.fsencode(path), params, out))
        return Image(out[0], self)

    def create(self, name: str, layers: Mapping[str, Any]) -> Image:
        """Copies layers, a mapping from name to buffer (bytes, numpy's array) in execution order, into an image."""
        texts = [ffi.new("char[]", layer.encode()) for layer in layers]
        buffers = [ffi.from_buffer(content) for content in layers.values()]
        sources = ffi.new("gpushare_layer_source[]", max(1, len(buffers)))
        for source, layer, buffer in zip(sources, texts, buffers):
            source.name, source.data, source.bytes = layer, buffer, len(buffer)
        out = ffi.new("gpushare_image*")
        check(lib.gpushare_image_create(self.handle, name.encode(), len(buffers), sources, out))
        return Image(out[0], self)

    def load(self, session: Session, image: Image, *, group_ends: Optional[Sequence[int]] = None,
             execution_ns: Optional[Sequence[int]] = None, on_group: Optional[Callable[[int, int, int], Any]] = None,
             profile: bool = True) -> Model:
        """Allocates memory in `session` and enqueues the image's copies to it, group by group.

        `on_group(group, first, end)` is called on a thread of the device when the layers [first, end) have arrived; it must
        be quick and must not wait.
        """
        load = _Load(group_ends, execution_ns, on_group, profile)
        out = ffi.new("gpushare_model*")
        check(lib.gpushare_session_load(session.handle, image.handle, load.params, out))
        return Model(self.runtime, out[0], (session, image), load)

    def calibrate(self) -> None:
        """Measures the link with some copies. Blocks, tens of milliseconds on a fast link."""
        check(lib.gpushare_loader_calibrate(self.handle))

    def link(self) -> dict[str, Any]:
        """The link's costs as known now."""
        info = struct("gpushare_link_costs")
        check(lib.gpushare_loader_get_link(self.handle, info))
        return as_dict(info)

    def info(self) -> dict[str, Any]:
        """What the cache holds and what was read, as gpushare_loader_info."""
        info = struct("gpushare_loader_info")
        check(lib.gpushare_loader_get_info(self.handle, info))
        return as_dict(info)


class SwitcherIteration(Iteration):
    """An iteration of a switcher's member. `model` has its layers; `loaded` is True if earlier blocks are gone."""

    def __init__(self, session: Any, handle: Any, model: Model, loaded: bool) -> None:
        super().__init__(session, handle)
        self.model = model
        self.loaded = loaded


class _Member:
    """What an iteration needs of the session that a switcher opens for a member."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime, self.name = runtime, name
        self._fail_on_error = False
        self._exports = Exports()

    @property
    def _gone(self) -> bool:
        return self.runtime._handle is None

    def _fail(self, error: BaseException) -> None:
        _log.error("a function launched for member %r of a switcher raised %r", self.name, error)


class Switcher(Closable):
    """One active session and any number on standby, whose weights wait in host memory."""

    def __init__(self, loader: Loader, *, residency: str = "lru", keep_bytes: Optional[Bytes] = None,
                 standby_bytes: Bytes = 0) -> None:
        params = struct("gpushare_switcher_params", residency=one_of("residency", residency, _RESIDENCY),
                        keep_bytes=2**64 - 1 if keep_bytes is None else size_in_bytes(keep_bytes),
                        standby_bytes=size_in_bytes(standby_bytes))
        out = ffi.new("gpushare_switcher*")
        check(lib.gpushare_switcher_create(loader.handle, params, out))
        self.runtime = loader.runtime
        self._members: dict[int, tuple] = {}
        self._own(out[0], lib.gpushare_switcher_release, loader, self._members)

    def add(self, image: Image, name: Optional[str] = None, *, group_ends: Optional[Sequence[int]] = None,
            execution_ns: Optional[Sequence[int]] = None, profile: bool = True, **options: Unpack[SessionOptions]) -> int:
        """Adds a member, on standby, and returns its number. Options are those of Runtime.open_session, beside the image."""
        params, keep = session_params(name=name, **options)
        load = _Load(group_ends, execution_ns, None, profile)
        out = ffi.new("uint64_t*")
        check(lib.gpushare_switcher_add(self.handle, params, image.handle, load.params, out))
        self._members[out[0]] = (_Member(self.runtime, name or f"member {out[0]}"), image, load, keep)
        return out[0]

    def remove(self, member: int) -> None:
        """Removes a member; its iteration under way is waited for."""
        check(lib.gpushare_switcher_remove(self.handle, member))
        self._members.pop(member, None)

    def iteration(self, member: int, timeout: Optional[float] = None) -> SwitcherIteration:
        """Switches to `member` if another is active and begins an iteration of it: `with switcher.iteration(m) as it: ...`."""
        iteration, model, loaded = ffi.new("gpushare_iteration*"), ffi.new("gpushare_model*"), ffi.new("uint32_t*")
        wait(lambda slice_ns: lib.gpushare_switcher_begin(self.handle, member, slice_ns, iteration, model, loaded), timeout)
        return SwitcherIteration(self._members[member][0], iteration[0], Model(self.runtime, model[0]), bool(loaded[0]))

    def member(self, member: int) -> dict[str, Any]:
        """State ('standby', 'kept', 'active') and statistics of a member."""
        info = struct("gpushare_member_info")
        check(lib.gpushare_switcher_get_member(self.handle, member, info))
        return as_dict(info)

    def info(self) -> dict[str, Any]:
        """The active member, what is kept, how long the last switch took, as gpushare_switcher_info."""
        info = struct("gpushare_switcher_info")
        check(lib.gpushare_switcher_get_info(self.handle, info))
        return as_dict(info)
