"""PyTorch on shared GPUs: sessions, iterations and turns around an unchanged training loop.

    import gpushare.torch as gt
    with gt.session("resnet", memory="8G", weight=2) as s:
        model = make_model().to(s.device)
        for batch in data:
            with s.iteration():
                step(model, batch)

On CUDA all of PyTorch's device memory comes from gpushare, so the first session of the process must be opened before PyTorch has allocated
device memory: PyTorch cannot change its allocator afterwards. Memory allocated inside an iteration is ephemeral; what is still alive at
its end is kept, and from the third iteration on expected. On the CPU (`device="host"`) sessions take turns, and their memory stays
PyTorch's.

Inside the `with` block of a session PyTorch's current stream is one of the session's own; inside an iteration it is the lane's. Each waits,
on the device, for the work of the one before.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import warnings

from ._torch_serving import Server, serve
from ._torch_session import FIRST_VERSION, LAST_VERSION, Allocator, Pool, Session, attach, is_out_of_memory, library, session, supported, versions
from ._torch_weights import Weights, WeightsOnDemand, load

__all__ = ["FIRST_VERSION", "LAST_VERSION", "Allocator", "Pool", "Server", "Session", "Weights", "WeightsOnDemand", "attach", "is_out_of_memory", "library", "load", "serve",
           "session"]

if not supported():
    warnings.warn(f"{versions()}: CUDA sessions are refused, sessions of the host device work", RuntimeWarning, stacklevel=2)
