"""Decisions above one device: `plan` hands a document to libgpushare_cluster. docs/cli.md says what the documents mean.

    from gpushare import cluster
    cluster.plan({"version": 1, "kind": "trials", "devices": 2, ...}, "gpushare")["results"][0]["shares"]
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import functools
import json
import os
import pathlib
from typing import Any, Optional

from ._native import error_of

__all__ = ["plan", "schema"]


@functools.lru_cache(maxsize=None)
def _library() -> Any:
    """libgpushare_cluster: GPUSHARE_CLUSTER_LIBRARY if set, else beside the package's own library, else what the system finds."""
    name = "libgpushare_cluster.so.1"
    beside = [pathlib.Path(__file__).parent / "lib" / name]
    if os.environ.get("GPUSHARE_LIBRARY"):
        beside.insert(0, pathlib.Path(os.environ["GPUSHARE_LIBRARY"]).parent / name)
    path = os.environ.get("GPUSHARE_CLUSTER_LIBRARY") or next((str(path) for path in beside if path.exists()), name)
    library = ctypes.CDLL(path)
    library.gpushare_cluster_plan.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)]
    library.gpushare_cluster_schema.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    library.gpushare_cluster_text_free.argtypes = [ctypes.c_void_p]
    library.gpushare_cluster_last_error_message.restype = ctypes.c_char_p
    return library


def _taken(status: int, text: Any) -> Any:
    """The JSON that a function gave, or its error as an exception."""
    library = _library()
    if status != 0:
        raise error_of(status, library.gpushare_cluster_last_error_message().decode(errors="replace"))
    try:
        return json.loads(ctypes.string_at(text))
    finally:
        library.gpushare_cluster_text_free(text)


def plan(document: dict[str, Any], choices: Optional[str] = None) -> dict[str, Any]:
    """Decides one document. `choices` names schedulers or objectives, separated by commas; None: the kind's default.

    Blocks for as long as the schedulers take. Raises MalformedInput (with the path and what is allowed) and InvalidArgument.
    """
    content = json.dumps(document).encode()
    out = ctypes.c_void_p()
    return _taken(_library().gpushare_cluster_plan(content, len(content), None if choices is None else choices.encode(), ctypes.byref(out)), out)


def schema() -> dict[str, Any]:
    """The JSON Schema of all documents."""
    out = ctypes.c_void_p()
    return _taken(_library().gpushare_cluster_schema(ctypes.byref(out)), out)
