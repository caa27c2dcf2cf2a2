"""libgpushare_cluster by ctypes, for the experiments beside this file: plan(document, choices) -> results.
SPDX-License-Identifier: Apache-2.0"""
import ctypes
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class Cluster:
    def __init__(self, build: str):
        path = ROOT / build / "lib/libgpushare_cluster.so"
        if not path.exists():
            sys.exit(f"error: no {path}; build it with scripts/build, or give the build folder as the first argument")
        self.library = ctypes.CDLL(str(path))
        self.library.gpushare_cluster_last_error_message.restype = ctypes.c_char_p

    def plan(self, document: dict, choices: list) -> list:
        text = json.dumps(document).encode()
        out = ctypes.c_void_p()
        status = self.library.gpushare_cluster_plan(text, ctypes.c_uint64(len(text)), ",".join(choices).encode(), ctypes.byref(out))
        if status != 0:
            sys.exit("error: " + self.library.gpushare_cluster_last_error_message().decode())
        result = json.loads(ctypes.string_at(out.value).decode())
        self.library.gpushare_cluster_text_free(out)
        return result["results"]


def spread(values: list, digits: int = 2) -> str:
    """mean (least to greatest)"""
    mean = sum(values) / len(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
