"""gRPC servers on the Unix sockets where the kubelet looks for plugins."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
from typing import Any, Callable

import grpc

_LONGEST_SOCKET = 107  # bytes of sockaddr_un's path without its end


def method(function: Callable[[Any, Any], Any], request: Any, response: Any, stream: bool = False) -> Any:
    """A method `function(request, context)` of a service; with `stream` it yields responses."""
    make = grpc.unary_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
    return make(function, request_deserializer=request.FromString, response_serializer=response.SerializeToString)


class SocketServer:
    """Serves `services` ({service: {method: handler}}) at `path` until stopped. A socket that an earlier process left there is replaced."""

    def __init__(self, path: pathlib.Path, services: dict[str, dict[str, Any]], threads: int = 8) -> None:
        if len(os.fsencode(path)) > _LONGEST_SOCKET:
            raise ValueError(f"the path of the socket {path} is longer than {_LONGEST_SOCKET} bytes")
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(threads))
        self._server.add_generic_rpc_handlers(
            tuple(grpc.method_handlers_generic_handler(service, handlers) for service, handlers in services.items()))
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def there(self) -> bool:
        """False if somebody has removed the socket, as a kubelet that starts does with those of device plugins."""
        return self.path.exists()

    def stop(self) -> None:
        """Ends the server after the calls under way. Blocks for at most 5 seconds."""
        self._server.stop(grace=2).wait(5)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
