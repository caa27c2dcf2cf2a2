"""ONNX Runtime in sessions of gpushare: models behind request queues, and CUDA's memory from a session.

    gpushare.onnxruntime.limit_arena("256M")            # of all models of the process, before the first
    model = gpushare.onnxruntime.Model(runtime, "resnet.onnx", arena="64M")
    queue.add_model(model.session, model.run)
    result = queue.submit(image, deadline=0.1).result().result

On CUDA: InferenceSession(path, providers=[("CUDAExecutionProvider", gpushare.onnxruntime.cuda_options(allocator))]).
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import logging
import os
from typing import Any, Optional, Sequence

import numpy
import onnxruntime

from ._allocator import Allocator
from ._native import Error
from ._runtime import Runtime
from ._values import Bytes, size_in_bytes

_log = logging.getLogger("gpushare")
_callbacks: list[Any] = []  # ONNX Runtime has their addresses until the process ends


def limit_arena(nbytes: Bytes) -> None:
    """The most that temporary tensors of all models of the process take on the CPU together; beyond, a run raises ONNX Runtime's error."""
    kind = onnxruntime.OrtMemoryInfo("Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT)
    same_as_requested = 1  # extend by what is asked for: the limit is reached by tensors, not by the arena's doubling
    onnxruntime.create_and_register_allocator(kind, onnxruntime.OrtArenaCfg(size_in_bytes(nbytes), same_as_requested, -1, -1))


class Model:
    """An ONNX model with a session: its weights count as persistent bytes, `arena` as ephemeral bytes of each batch.

    The weights are as large as the file, and PATH.data beside it if there is one; `weights` says otherwise.
    `arena` is what is counted. `limit_arena` holds ONNX Runtime to a limit, for the process; a model made after it takes its arena from there.
    """

    def __init__(self, runtime: Runtime, path: "str | os.PathLike[str]", *, arena: Bytes, weights: Bytes = 0, name: Optional[str] = None,
                 options: Optional[Any] = None, **session: Any) -> None:
        settings = options or onnxruntime.SessionOptions()
        settings.add_session_config_entry("session.use_env_allocators", "1")
        outside = os.fspath(path) + ".data"
        held = size_in_bytes(weights) or os.path.getsize(path) + (os.path.getsize(outside) if os.path.exists(outside) else 0)
        self._arena = size_in_bytes(arena)
        self.session = runtime.open_session(name or os.path.basename(path), persistent_bytes=held, ephemeral_bytes=self._arena, **session)
        try:
            self._weights = self.session.alloc(held)
            self.model = onnxruntime.InferenceSession(os.fspath(path), settings, providers=["CPUExecutionProvider"])
        except BaseException:
            self.session.close()
            raise
        self._inputs = [each.name for each in self.model.get_inputs()]

    def run(self, iteration: Any, batch: Any) -> Sequence[Any]:
        """For RequestQueue.add_model: a payload is an array, or a dictionary of arrays, without the batch's dimension. A result is the first output's
        row, or a tuple of rows if there are several."""
        iteration.alloc(self._arena)
        iteration.stream.synchronize()  # ONNX Runtime computes at once, not in stream order
        payloads = [payload if isinstance(payload, dict) else {self._inputs[0]: payload} for payload in batch.payloads]
        rows = self.model.run(None, {name: numpy.stack([payload[name] for payload in payloads]) for name in self._inputs})
        return list(rows[0]) if len(rows) == 1 else list(zip(*rows))

    def close(self) -> None:
        """Gives the model and the session back."""
        self.model = None
        self.session.close()


def cuda_options(allocator: Allocator) -> dict[str, str]:
    """Options of CUDAExecutionProvider with which weights and arena come from `allocator`: from the session that the calling thread is bound to
    (`allocator.use`), or its default session."""

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
    def allocate(nbytes: int) -> int:
        try:
            return allocator.allocate(nbytes)
        except Error as error:
            _log.error("ONNX Runtime gets no memory: %s", error)
            return 0

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def free(address: Optional[int]) -> None:
        try:
            allocator.free(address or 0)
        except Error:
            pass  # its session and the allocator may have been closed

    @ctypes.CFUNCTYPE(None)
    def empty_cache() -> None:
        allocator.trim()

    _callbacks.extend((allocate, free, empty_cache))
    names = ("gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache")
    return {name: str(ctypes.cast(function, ctypes.c_void_p).value) for name, function in zip(names, (allocate, free, empty_cache))}
