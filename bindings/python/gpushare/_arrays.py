"""Blocks of device memory as arrays of other libraries: numpy, `__cuda_array_interface__` and DLPack.

An array never shows memory that belongs to somebody else. On the host device the bytes of a block are the process's own
(_memory.py): arrays keep them. On a GPU an array that another library has seen keeps its block: the block, the iteration's
end and the close of the session and the runtime wait for it. An array that nobody has seen raises InvalidState when its
block is gone.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import functools
import math
import operator
from typing import Any, Optional, Sequence, Union

from ._cffi import ffi
from ._native import InvalidArgument, Unsupported, lib

Shape = Union[int, Sequence[int]]

_DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_CPU, _CUDA = 1, 2


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _DLDevice), ("ndim", ctypes.c_int32), ("dtype", _DLDataType),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter)]
_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# c_void_p, not py_object: a capsule being destroyed has no references left to count.
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _CapsuleDestructor]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]

_exported: dict[int, tuple] = {}  # what consumers of DLPack still use, by the address of the managed tensor


@_Deleter
def _delete(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


@_CapsuleDestructor
def _destroy_capsule(capsule: int) -> None:
    if _is_valid(capsule, b"dltensor"):  # nobody took it
        _exported.pop(_get_pointer(capsule, b"dltensor"), None)


def typestr(dtype: Any) -> str:
    """A dtype as numpy's array interface writes it, such as '<f4'."""
    if isinstance(dtype, str) and len(dtype) >= 3 and dtype[0] in "<|>":
        return dtype
    import numpy

    return numpy.dtype(dtype).str


def item_bytes(kind: str) -> int:
    """What an element of a type takes, as numpy counts. Raises InvalidArgument for types whose elements are not plain bytes."""
    count = kind[2:]
    if kind[1] == "O" or not (count.isascii() and count.isdigit()) or int(count) == 0:
        raise InvalidArgument(f"an array's type is {kind!r}; allowed are types of a fixed number of bytes that hold no Python objects, such as "
                              "'<f4'", lib.GPUSHARE_INVALID_ARGUMENT)
    return int(count) * (4 if kind[1] == "U" else 1)  # of text it is the number of characters


def _type(dtype: Any) -> tuple[str, int]:
    kind = typestr(dtype)
    return kind, item_bytes(kind)


_MOST_BYTES = 2**63
_known_type = functools.lru_cache(maxsize=256)(_type)


def layout(shape: Shape, dtype: Any) -> tuple[tuple[int, ...], str, int]:
    """Sizes, type and bytes of an array. Raises InvalidArgument for a negative size, and for more than 8 EiB."""
    try:
        sizes = tuple(map(operator.index, shape))  # type: ignore[arg-type]
    except TypeError:
        sizes = (operator.index(shape),)  # type: ignore[arg-type]
    if sizes and min(sizes) < 0:
        raise InvalidArgument(f"an array's sizes are from 0: {sizes}", lib.GPUSHARE_INVALID_ARGUMENT)
    try:
        kind, item = _known_type(dtype)
    except TypeError:  # a list of fields: it has no hash
        kind, item = _type(dtype)
    nbytes = math.prod(sizes) * item
    if nbytes > _MOST_BYTES:
        raise InvalidArgument(f"an array of sizes {sizes} and type {kind} takes more than 8 EiB", lib.GPUSHARE_INVALID_ARGUMENT)
    return sizes, kind, nbytes


def bytes_of(shape: Shape, dtype: Any) -> int:
    """What an array takes."""
    return layout(shape, dtype)[2]


# The bytes of blocks of the host device. Uninitialised, as device memory is. A large buffer serves the next block of its size: pages of a new one
# would be faulted in.
_allocate = ffi.new_allocator(should_clear_after_alloc=False)
_chars, _number = ffi.typeof("char[]"), ffi.typeof("uintptr_t")
ALIGNMENT = 256
_LARGE, MOST_SPARE = 1 << 20, 256 << 20
spare: dict[int, list[Any]] = {}  # large buffers that nothing uses, by their size


def host_bytes(size: int) -> Any:
    """`size` bytes of the process, as cffi has them. They live as long as something refers to the result."""
    if size < _LARGE:
        return _allocate(_chars, size)
    try:
        buffer = spare[size].pop()
    except LookupError:
        buffer = _allocate(_chars, size)
    return ffi.gc(buffer, _take_back)


def _take_back(buffer: Any) -> None:
    if spare is None:  # the interpreter ends
        return
    size = len(buffer)
    if size + sum(each * len(buffers) for each, buffers in list(spare.items())) > MOST_SPARE:
        spare.clear()
    if size <= MOST_SPARE:
        spare.setdefault(size, []).append(buffer)


def aligned(buffer: Any, alignment: int = ALIGNMENT) -> int:
    """The first address in a buffer of host_bytes that is a multiple of `alignment`."""
    begin = int(ffi.cast(_number, buffer))
    return begin + -begin % alignment


_ndarray: Any = None  # numpy's, once it is needed


def host_array(sizes: tuple[int, ...], kind: str, nbytes: int) -> Any:
    """numpy's array over a new block of the host device, which nothing else refers to."""
    global _ndarray
    if _ndarray is None:
        import numpy

        _ndarray = numpy.ndarray
    buffer = host_bytes(nbytes + ALIGNMENT)
    return _ndarray(sizes, kind, ffi.buffer(buffer, nbytes + ALIGNMENT), -int(ffi.cast(_number, buffer)) % ALIGNMENT)


class DeviceArray:
    """A block, or a part of one, as an array in row-major order.

    Other libraries read it through `__cuda_array_interface__` (cuda), `__array_interface__` (host) and DLPack (both):
    `cupy.asarray(a)`, `torch.from_dlpack(a)`, `numpy.asarray(a)`. Nothing is copied. The other library does not wait for the stream
    on which the block is in use: use the array on that stream, or synchronise first.
    """

    def __init__(self, block: Any, shape: Shape, dtype: Any = "<f4", offset: int = 0) -> None:
        self.shape, self.typestr, self.nbytes = layout(shape, dtype)
        if offset < 0 or offset + self.nbytes > block.nbytes:
            raise InvalidArgument(f"an array of shape {self.shape}, type {self.typestr} from byte {offset} does not fit a block "
                                  f"of {block.nbytes} bytes", lib.GPUSHARE_INVALID_ARGUMENT)
        self.block = block
        self.offset = offset
        self._memory: Any = None  # what keeps the bytes, once another library may use them
        if block.on_host:
            self._lend()

    @property
    def address(self) -> int:
        """Where the array begins: an address of the device."""
        return int(self.block.address) + self.offset

    def _lend(self) -> None:
        """Another library gets the address: from now on the bytes stay as long as this array."""
        if self._memory is None:
            self._memory = self.block._lend(self)

    def _interface(self) -> dict[str, Any]:
        self._lend()
        return {"shape": self.shape, "typestr": self.typestr, "data": (self.address, False), "strides": None, "version": 3}

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if not self.block.on_host:
            raise AttributeError("__array_interface__")  # as hasattr() expects of memory that the CPU cannot read
        return self._interface()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.block.on_host:
            raise AttributeError("__cuda_array_interface__")
        return self._interface()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0) if self.block.on_host else (_CUDA, self.block.device_index)

    def __dlpack__(self, *, stream: Any = None, max_version: Optional[tuple[int, int]] = None,
                   dl_device: Optional[tuple[int, int]] = None, copy: Optional[bool] = None) -> Any:
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("the block can be shared in place only, without a copy")
        kind, size = self.typestr[1], int(self.typestr[2:])
        if kind not in _DLPACK_CODES:
            raise Unsupported(f"DLPack has no type for {self.typestr!r}", lib.GPUSHARE_UNSUPPORTED)
        self._lend()
        managed = _DLManagedTensor()
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        tensor = managed.dl_tensor
        tensor.data = self.address
        tensor.device = _DLDevice(*self.__dlpack_device__())
        tensor.ndim = len(self.shape)
        tensor.dtype = _DLDataType(_DLPACK_CODES[kind], 8 * size, 1)
        tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        managed.deleter = _delete
        address = ctypes.addressof(managed)
        _exported[address] = (managed, shape, self)
        return _new_capsule(address, b"dltensor", _destroy_capsule)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, typestr={self.typestr!r}, address={self.address:#x})"


def view(block: Any, shape: Shape, dtype: Any, offset: int = 0) -> Any:
    """numpy's array over a block in host memory, a DeviceArray over any other."""
    array = DeviceArray(block, shape, dtype, offset)
    if not block.on_host:
        return array
    import numpy

    return numpy.asarray(array)
