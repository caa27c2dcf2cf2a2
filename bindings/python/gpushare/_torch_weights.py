"""gpushare.torch: weights from .safetensors files, behind the first forward pass; many models that do not fit together."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import weakref
from typing import Any, Callable, Iterator, Optional, Sequence

import torch

from ._cffi import ffi
from ._loader import Loader, Model
from ._native import DeviceOutOfMemory, InvalidArgument, InvalidState, MalformedInput, QuotaExceeded, check, lib
from ._torch_session import Allocator, Session, innermost, rebind

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
           "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64", "C128": "complex128", "F8_E4M3": "float8_e4m3fn",
           "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
_NO_STREAM = ffi.cast("void*", 2**64 - 1)
_uses = itertools.count(1)  # which use of weights came first


_LARGEST_HEADER = 100 << 20  # as the safetensors library has it
_OTHERS = ((b"version https://git-lfs", "a Git LFS pointer and not the file itself: fetch it with `git lfs pull`"),
           (b"PK\x03\x04", "a PyTorch checkpoint (.bin, .pt) and not a .safetensors file: convert it with safetensors.torch.save_file"),
           (b"\x80", "a pickle (.bin, .pt) and not a .safetensors file: convert it with safetensors.torch.save_file"),
           (b"GGUF", "a GGUF file and not a .safetensors file"))


def _malformed(path: pathlib.Path, why: str) -> MalformedInput:
    return MalformedInput(f"{path} {why}", lib.GPUSHARE_MALFORMED_INPUT)


def _json(path: pathlib.Path, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _malformed(path, f"has a header that is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise _malformed(path, "has a header that is no JSON object")
    return content


def _safetensors(path: pathlib.Path) -> dict[str, Any]:
    """Names, dtypes, shapes and offsets that a .safetensors file, or an index of shards, declares."""
    with open(path, "rb") as file:
        begin = file.read(32)
    for magic, what in _OTHERS:
        # A header of 128 bytes begins as some pickles do.
        if begin.startswith(magic) and begin[8:9] != b"{":
            raise _malformed(path, f"is {what}")
    if path.suffix == ".json":
        index = _json(path, path.read_bytes()).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise _malformed(path, "is no index of shards: it has no weight_map from names to files")
        for shard in sorted(set(index.values())):
            if shard in ("", ".", "..") or "/" in shard or "\0" in shard:
                raise _malformed(path, f"names the shard {shard!r}, which must be a plain file name beside the index")
            if shard.endswith(".json"):
                raise _malformed(path, f"names the shard {shard!r}, which is an index itself: shards are .safetensors files")
            if shard.endswith(".bin"):
                raise _malformed(path, f"is an index of PyTorch checkpoints, such as {shard!r}, and not of .safetensors files: convert them with "
                                 "safetensors.torch.save_file")
        found = {name: entry for file in sorted(set(index.values())) for name, entry in _safetensors(path.parent / file).items()}
        return {name: found[name] for name in index if name in found}
    with open(path, "rb") as file:
        length = int.from_bytes(begin[:8], "little")
        if len(begin) < 8 or length > _LARGEST_HEADER or 8 + length > path.stat().st_size:
            raise _malformed(path, "is no .safetensors file: its first 8 bytes do not tell the length of a header in it")
        file.seek(8)
        header = _json(path, file.read(length))
    for name, entry in header.items():
        if name != "__metadata__" and not (isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and isinstance(entry.get("shape"), list)
                                           and isinstance(entry.get("data_offsets"), list) and len(entry["data_offsets"]) == 2):
            raise _malformed(path, f"declares {name!r} without dtype, shape and data_offsets")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


class _Slot:
    """A tensor of the file, and where the model has it: several places for tied weights."""

    def __init__(self, tensor: Any) -> None:
        self.places: list[tuple[Any, str]] = []  # module, attribute
        self.dtype, self.shape, self.bytes = tensor.dtype, tensor.shape, tensor.numel() * tensor.element_size()
        self.file_dtype = tensor.dtype  # differs for a tensor that is to be cast
        self._is_parameter, self._requires_grad = isinstance(tensor, torch.nn.Parameter), tensor.requires_grad

    def put(self, tensor: Any) -> None:
        """Makes `tensor` what the model has."""
        if self._is_parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=self._requires_grad)
        for module, attribute in self.places:
            setattr(module, attribute, tensor)


def _owners(model: Any) -> dict[str, tuple[Any, str]]:
    """Module and attribute of each parameter and persistent buffer, by its name in the state_dict."""
    owners: dict[str, tuple[Any, str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in (*module._parameters, *(name for name in module._buffers if name not in module._non_persistent_buffers_set)):
            if getattr(module, name) is not None:
                owners[f"{prefix}.{name}" if prefix else name] = (module, name)
    return owners


def _fit(slot: _Slot, name: str, entry: dict[str, Any], path: pathlib.Path, cast: bool) -> None:
    """Raises InvalidArgument unless the file's tensor can be the model's."""
    dtype = getattr(torch, _DTYPES.get(entry["dtype"], ""), None)
    begin, end = entry["data_offsets"]
    if list(slot.shape) == entry["shape"]:
        if dtype == slot.dtype:
            return
        if dtype is None and end - begin == slot.bytes:
            return  # a type that this code or this PyTorch does not know: the bytes are taken as the model has them
        if dtype is not None and cast:
            slot.file_dtype = dtype
            return
    raise InvalidArgument(f"{name} is {entry['dtype']} {entry['shape']} in {path}, and {slot.dtype} {list(slot.shape)} in the model"
                          + ("" if dtype is None or cast or list(slot.shape) != entry["shape"] else "; cast=True converts it"),
                          lib.GPUSHARE_INVALID_ARGUMENT)


def _slots(model: Any, path: pathlib.Path, strict: bool, cast: bool) -> tuple[dict[str, _Slot], list[str], list[str]]:
    """The tensors of the file by name, in the order of the model's state_dict; names that only the model has; that only the file has."""
    declared = _safetensors(path)
    owners = _owners(model)
    wanted = {name: getattr(*owner) for name, owner in owners.items()}
    given = {id(tensor) for name, tensor in wanted.items() if name in declared}
    missing = [name for name, tensor in wanted.items() if id(tensor) not in given]
    unexpected = [name for name in declared if name not in wanted]
    if strict and (missing or unexpected):
        raise InvalidArgument(f"{path} and the model do not match: missing in the file {missing[:5]}, not in the model {unexpected[:5]} "
                              f"({len(missing)} and {len(unexpected)} in all); strict=False loads what both have", lib.GPUSHARE_INVALID_ARGUMENT)
    slots = {name: _Slot(tensor) for name, tensor in wanted.items() if name in declared}
    for name, entry in declared.items():
        if name in slots:
            _fit(slots[name], name, entry, path, cast)
    of_tensor = {id(wanted[name]): slot for name, slot in slots.items()}
    for name, owner in owners.items():
        if id(wanted[name]) in of_tensor:
            of_tensor[id(wanted[name])].places.append(owner)
    return slots, missing, unexpected


def _check_storage(model: Any, slots: dict[str, _Slot]) -> None:
    """Raises InvalidArgument if a parameter or buffer that is not loaded has no storage: a model with it would fail, or compute nonsense, later."""
    loaded = {(id(module), attribute) for slot in slots.values() for module, attribute in slot.places}
    left = [f"{prefix}.{name}" if prefix else name for prefix, module in model.named_modules() for name in (*module._parameters, *module._buffers)
            if getattr(module, name) is not None and getattr(module, name).is_meta and (id(module), name) not in loaded]
    if left:
        raise InvalidArgument(f"{left[:5]} ({len(left)} in all) are on the meta device and not in the file, as buffers that are not saved: make the "
                              "model's buffers outside torch.device('meta'), or pass allow_meta=True and set them yourself",
                              lib.GPUSHARE_INVALID_ARGUMENT)


def _unload(give_back: Callable[..., None], arguments: tuple, allocator: Allocator, anchor: int) -> None:
    give_back(*arguments)
    if not allocator.closed:
        lib.gpushare_allocator_free(allocator.handle, anchor, _NO_STREAM)


def _hold_session(model: Model, session: Session) -> None:
    """A session that is to be closed with its last block stays open until the model is gone."""
    allocator, anchor = session.allocator, ffi.new("gpushare_device_address*")
    check(lib.gpushare_allocator_bind_thread(allocator.handle, session.handle))
    try:
        check(lib.gpushare_allocator_alloc(allocator.handle, 1, 0, _NO_STREAM, anchor))
    finally:
        rebind(allocator)
    _, give_back, arguments, _ = model._finalizer.detach()
    model._finalizer = weakref.finalize(model, _unload, give_back, arguments, allocator, anchor[0])


class Weights:
    """Weights of a file that are in a model, or on their way there: `load` made it. The memory returns with the last tensor that uses it."""

    def __init__(self, model: Any, path: pathlib.Path, session: Session, loader: Loader, order: Optional[Sequence[str]], *, strict: bool = True,
                 cast: bool = False, allow_meta: bool = False, once: bool = False) -> None:
        self._session, self._path, self._loader, self._once = session, path, loader, once
        # Names that only the model has, and that only the file has: empty unless strict=False.
        self._slots, self.missing, self.unexpected = _slots(model, path, strict, cast)
        if not allow_meta:
            _check_storage(model, self._slots)
        self._order = list(order or (*self._slots, *self.unexpected))
        self._model: Optional[Model] = None
        self._first_passes: list[_FirstPass] = []

    def _send(self) -> None:
        """Enqueues the copies, and gives the model tensors over the memory that they go to."""
        image = self._loader.open(self._path, order=self._order, once=self._once)
        sent = self._loader.load(self._session, image)  # type: ignore[arg-type]
        _hold_session(sent, self._session)
        layers_of: dict[Any, list[int]] = {}
        for layer in range(sent.info()["layers"]):
            described = sent.layer(layer)
            slot = self._slots.get(described["name"])
            if slot is None:  # only the file has it
                continue
            if slot.bytes > 0:
                raw = torch.as_tensor(sent.array(layer, described["bytes"], "|u1"), device=self._session.device)
                tensor = raw.view(slot.file_dtype).view(slot.shape)
                if slot.file_dtype != slot.dtype:
                    sent.wait(layer)
                    tensor = tensor.to(slot.dtype)
                slot.put(tensor)
            else:
                slot.put(torch.empty(slot.shape, dtype=slot.dtype, device=self._session.device))
            for module, _ in slot.places:
                layers_of.setdefault(module, []).append(layer)
        self._model = sent
        self._first_passes = [_FirstPass(module, self, sorted(layers)) for module, layers in layers_of.items()]

    def _there(self) -> Model:
        if self._model is None:
            raise InvalidState(f"the weights of {self._path} are not on the device", lib.GPUSHARE_INVALID_STATE)
        return self._model

    def _arrive(self, layers: Sequence[int]) -> None:
        """Work that is enqueued from now on, on the current stream, comes after the arrival of the layers."""
        session, model = self._session, self._there()
        stream = session._lane or session._home
        ordered = stream is not None and session._shared.on_cuda and torch.cuda.current_stream().cuda_stream == stream.native
        for layer in layers:
            if ordered:
                model.make_usable(stream, layer, layer + 1)
            else:
                model.wait(layer)

    def wait(self, timeout: Optional[float] = None) -> None:
        """Blocks until the last layer has arrived."""
        self._there().wait(timeout=timeout)

    def info(self) -> dict[str, Any]:
        """How far it is; gpushare_model_info."""
        return self._there().info()


class _FirstPass:
    """A module's hook until its weights have arrived."""

    def __init__(self, module: Any, weights: Weights, layers: list[int]) -> None:
        self._weights, self._layers = weights, layers
        self.module = module
        self.handle = module.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        self.handle.remove()
        self._weights._arrive(self._layers)


class WeightsOnDemand(Weights):
    """Weights that come to the device with their model's next forward pass, and leave it when another model of their session needs the room:
    `load(..., on_demand=True)` made it. Between passes that used them the model may have tensors on the meta device."""

    def __init__(self, model: Any, path: pathlib.Path, session: Session, loader: Loader, order: Optional[Sequence[str]], **checks: bool) -> None:
        super().__init__(model, path, session, loader, order, **checks)
        self._absent = {name: torch.empty(slot.shape, dtype=slot.dtype, device="meta") for name, slot in self._slots.items()}
        self._passes = 0  # under way
        self.last_use = 0  # the larger, the later
        self.loads = 0  # how often they came
        self._take_away()
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)
        session._on_demand.add(self)

    @property
    def resident(self) -> bool:
        """They are on the device, or on their way there."""
        return self._model is not None

    @property
    def idle(self) -> bool:
        """They are on the device, and no forward pass or `use()` is under way."""
        return self._model is not None and self._passes == 0

    def _enter(self, model: Any, _: Any) -> None:
        session = self._session
        with session._switching:
            self._passes += 1  # _leave counts it down, also when this raises
            if model.training:
                raise InvalidState("weights on demand are those of the file, and what training changes would be lost: call eval() on the model, "
                                   "or load it without on_demand", lib.GPUSHARE_INVALID_STATE)
            if session._shared.on_cuda and torch.cuda.is_current_stream_capturing():
                raise InvalidState("weights on demand move, and a CUDA graph would keep their addresses: load the model without on_demand",
                                   lib.GPUSHARE_INVALID_STATE)
            self._come()
        for first in self._first_passes:
            if first.module is model and first.handle.id in model._forward_pre_hooks:  # the model's hooks of this pass are chosen already
                first()

    def _leave(self, *_: Any) -> None:
        with self._session._switching:
            self._passes -= 1

    def _come(self) -> None:
        self.last_use = next(_uses)
        if self._model is not None:
            return
        while True:
            try:
                self._send()
                break
            except (DeviceOutOfMemory, QuotaExceeded):
                if not self._session._reclaim():
                    raise
        self.loads += 1

    def _take_away(self) -> None:
        for first in self._first_passes:
            first.handle.remove()
        for name, slot in self._slots.items():
            slot.put(self._absent[name])
        self._first_passes, self._model = [], None

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """The weights are on the device and stay there: for code that reads them outside a forward pass of the model."""
        with self._session._switching:
            self._passes += 1
        try:
            with self._session._switching:
                self._come()
            self._arrive(range(self._there().info()["layers"]))
            yield
        finally:
            self._leave()

    def unload(self) -> None:
        """Takes them off the device now. Their memory returns with the last tensor that uses it."""
        with self._session._switching:
            if self._passes > 0:
                raise InvalidState("the weights are in use", lib.GPUSHARE_INVALID_STATE)
            self._take_away()


def load(model: Any, path: Any, *, to: Optional[Session] = None, loader: Optional[Loader] = None, order: Optional[Sequence[str]] = None,
         on_demand: bool = False, strict: bool = True, cast: bool = False, allow_meta: bool = False) -> Weights:
    """Loads a .safetensors file (or an index of shards) into `model`, whose parameters may be on the meta device, and returns at once.

    The weights go to memory of the session `to`, by default that of the innermost `with` block, in the order of the model's state_dict or
    `order`; each module's first forward pass waits for its own weights alone, so the first pass runs while later layers are under way.
    Code that reads parameters before a forward pass calls `wait()` first. Parameters and buffers are replaced: make optimizers afterwards.
    `loader`: keeps files in host memory for the next load. Without one a file's host memory goes with its weights; the loads of a device share
    it, since pinning memory costs more than reading.

    `strict=False` loads what file and model both have; the result's `missing` and `unexpected` name the rest. `cast=True` converts tensors whose
    type in the file is another one than in the model, and waits for them. Types that this PyTorch does not know are taken by their size. A parameter or
    buffer that has no storage afterwards is refused, unless `allow_meta=True`.

    `on_demand`: for many models that do not fit together. Nothing is loaded yet. The weights come when the model is called and are not
    there, and the models of the session that were called longest ago give up theirs if room is short. The models must be in eval mode. The
    files stay in host memory, within the limit of `loader`, by default one that the sessions of a device share.
    """
    session = innermost(to, "load()")
    kind = WeightsOnDemand if on_demand else Weights
    once = loader is None and not on_demand
    weights = kind(model, pathlib.Path(path), session, loader or session._shared.loader(), order, strict=strict, cast=cast, allow_meta=allow_meta,
                   once=once)
    if not on_demand:
        weights._send()
    return weights
