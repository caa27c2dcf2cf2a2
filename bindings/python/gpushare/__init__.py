"""gpushare: many deep-learning jobs sharing one GPU.

    import gpushare
    with gpushare.Runtime("host", policy="fair") as runtime:
        session = runtime.open_session("resnet", weight=2)
        weights = session.array((1024, 1024))
        for iteration in session.iterations(100):     # each waits for its turn
            scratch = iteration.array((1024, 1024))   # gone when the iteration ends, at no cost
            ...

Everything here is a thin layer over the C ABI: `gpushare.lib` and `gpushare.ffi` are cffi's view of it. Calls that block
release the GIL and answer Ctrl-C in the main thread. Errors are exceptions derived from `gpushare.Error`.
"""
# SPDX-License-Identifier: Apache-2.0
import atexit as _atexit

from ._allocator import Allocator
from ._arrays import DeviceArray
from ._cffi import ffi
from ._enums import DeviceCapability, Kind, Layout, MemberState, SessionClass, SessionState, Status
from ._heap import Heap, solve_placement
from ._loader import Image, Loader, Model, SharedImage, Switcher, SwitcherIteration, solve_plan
from ._memory import Block, SideStream, Stream
from ._native import (AlreadyExists, CallbackFailed, Cancelled, DeviceLost, DeviceOutOfMemory, Error, ExceedsCapacity, HostOutOfMemory,
                      InvalidArgument, InvalidHandle, InvalidState, IoError, MalformedInput, NotFound, NotReady, OutOfMemory, QueueFull,
                      QuotaExceeded, TimedOut, Unavailable, Unsupported, lib, version)
from ._policy import Policy
from ._runtime import Runtime, devices, load_backend, policies, set_log
from ._serving import Batch, Batcher, BatcherOptions, Histogram, Outcome, RequestQueue, ScoreQueue, now_ns
from ._session import GUARANTEED, OPPORTUNISTIC, Gate, Iteration, Range, Session, SessionOptions, Ticket
from ._steps import Step, StepMember, StepQueue, StepQueueOptions, TokenStream
from ._values import Bytes, size_in_bytes

__version__ = version()
__all__ = [
    "Allocator", "AlreadyExists", "Batch", "Batcher", "BatcherOptions", "Block", "Bytes", "CallbackFailed", "Cancelled",
    "DeviceArray", "DeviceCapability", "DeviceLost", "DeviceOutOfMemory", "Error", "ExceedsCapacity", "GUARANTEED", "Gate", "Heap",
    "Histogram", "HostOutOfMemory", "Image", "InvalidArgument", "InvalidHandle", "InvalidState", "IoError", "Iteration", "Kind",
    "Layout", "Loader", "MalformedInput", "MemberState", "Model", "NotFound", "NotReady", "OPPORTUNISTIC", "OutOfMemory", "Outcome",
    "Policy", "QueueFull", "QuotaExceeded", "Range", "RequestQueue", "Runtime", "ScoreQueue", "Session", "SessionClass",
    "SessionOptions", "SessionState", "SharedImage", "SideStream", "Status", "Step", "StepMember", "StepQueue", "StepQueueOptions",
    "Stream", "Switcher", "SwitcherIteration", "Ticket", "TimedOut", "TokenStream", "Unavailable", "Unsupported", "devices", "ffi",
    "lib", "load_backend", "now_ns", "policies", "set_log", "size_in_bytes", "solve_placement", "solve_plan", "version",
]

# The library's threads must not call into an interpreter that is gone. weakref.finalize closes all that is still open.
_atexit.register(lambda: lib.gpushare_log_set(ffi.NULL, ffi.NULL, lib.GPUSHARE_LOG_WARNING))
