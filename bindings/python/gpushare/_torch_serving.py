"""gpushare.torch: models behind request queues."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

import torch

from ._native import lib
from ._serving import BatcherOptions, RequestQueue
from ._torch_session import Session, innermost, keep_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Server:
    """A model behind a request queue: requests with deadlines are answered in batches, each an iteration of the session. Made by `serve`."""

    def __init__(self, model: Any, session: Session, policy: Optional[str], batch_sizes: Optional[Sequence[int]],
                 call: Callable[[Any, list[Any]], Sequence[Any]], settings: BatcherOptions) -> None:
        self.model = model
        self.session = session
        self._call = call
        if session._shared.on_cuda:
            torch.cuda.current_stream(session._shared.index).synchronize()  # batches run on other threads: the weights are there
        self.queue = RequestQueue(session.runtime, policy, **settings)
        self.queue.add_model(session, self._run, batch_sizes=batch_sizes)  # type: ignore[arg-type]

    def _run(self, iteration: Any, batch: Any) -> Sequence[Any]:
        session, shared = self.session, self.session._shared
        lane = session._lane = iteration.stream
        if not shared.on_cuda:
            lane.synchronize()  # PyTorch's CPU kernels run at once, not in stream order
        error: Optional[BaseException] = None
        try:
            with torch.inference_mode(), torch.cuda.stream(shared.torch_stream(lane.native)) if shared.on_cuda else contextlib.nullcontext():
                return [_to_host(result) if shared.on_cuda else result for result in self._call(self.model, batch.payloads)]
        except BaseException as raised:
            error = raised
            raise
        finally:
            session._lane = None
            # Tensors that the network, PyTorch or an exception still holds outlive the batch. The batch's turn lasts until there is room for them.
            while shared.on_cuda and not keep_tensors(lambda: int(lib.gpushare_allocator_keep_blocks(shared.allocator.handle, iteration.handle)),
                                                      session, error):
                time.sleep(0.02)

    def measure(self, payload: Any, repeats: int = 3) -> float:
        """Runs one request `repeats` times as iterations of the session, tells the queue what the last took, and returns that in seconds.

        The queue then refuses requests that cannot be in time. Call it before the first request.
        """
        seconds = 0.0
        for _ in range(repeats):
            with self.session.iteration(), torch.inference_mode():
                begin = time.perf_counter()
                for result in self._call(self.model, [payload]):
                    _to_host(result)
                seconds = time.perf_counter() - begin
        self.queue.observe(0, 0, seconds)
        return seconds

    def submit(self, payload: Any, *, deadline: Optional[float], **request: Any) -> Any:
        """Hands a request in, to be answered within `deadline` seconds: a future of its Outcome; see RequestQueue.submit."""
        return self.queue.submit(payload, deadline=deadline, **request)

    def __call__(self, payload: Any, *, deadline: float = 60.0) -> Any:
        """Submits a request and waits for its result."""
        return self.submit(payload, deadline=deadline).result().result

    async def ask(self, payload: Any, *, deadline: float, **request: Any) -> Any:
        """Submits a request and awaits its result."""
        return await self.queue.ask(payload, deadline=deadline, **request)

    def close(self) -> None:
        """Refuses new requests; those that still wait are answered as cancelled. The session stays open."""
        self.queue.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _to_host(result: Any) -> Any:
    return result.cpu() if isinstance(result, torch.Tensor) else result


def _call_stacked(model: Any, payloads: list[Any]) -> Sequence[Any]:
    device = next((tensor.device for tensor in model.parameters()), None)
    return model(torch.stack(payloads).to(device)).unbind(0)


def serve(model: Any, *, to: Optional[Session] = None, policy: Optional[str] = None, batch_sizes: Optional[Sequence[int]] = None,
          call: Callable[[Any, list[Any]], Sequence[Any]] = _call_stacked, **settings: Unpack[BatcherOptions]) -> Server:
    """Serves a model from the session `to`, by default that of the innermost `with` block: `with gt.serve(model) as server: server(x)`.

    A request is one input tensor without the batch's dimension; its result is the row of the output, on the CPU. `call(model, payloads)`
    does otherwise: it gets the requests of a batch and returns one result for each. Batches run on threads of gpushare. `policy`,
    `batch_sizes` and `settings`: as RequestQueue and RequestQueue.add_model.
    """
    return Server(model, innermost(to, "serve()"), policy, batch_sizes, call, settings)
