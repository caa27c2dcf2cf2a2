"""libgpushare_cluster by ctypes, for the experiments beside this file: plan and run (document, choices) -> results.
SPDX-License-Identifier: Apache-2.0"""
import ctypes
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class RunOptions(ctypes.Structure):
    """gpushare_cluster_run_options of gpushare/cluster.h."""
    _fields_ = [("struct_size", ctypes.c_uint32), ("rounds", ctypes.c_uint32), ("seed", ctypes.c_uint64), ("noise", ctypes.c_double),
                ("objective", ctypes.c_char_p), ("schedulers", ctypes.c_void_p), ("scheduler_count", ctypes.c_uint64)]


class Cluster:
    def __init__(self, build: str):
        path = ROOT / build / "lib/libgpushare_cluster.so"
        if not path.exists():
            sys.exit(f"error: no {path}; build it with scripts/build, or give the build folder as the first argument")
        self.library = ctypes.CDLL(str(path))
        self.library.gpushare_cluster_last_error_message.restype = ctypes.c_char_p

    def _results(self, status: int, out) -> list:
        if status != 0:
            sys.exit("error: " + self.library.gpushare_cluster_last_error_message().decode())
        result = json.loads(ctypes.string_at(out.value).decode())
        self.library.gpushare_cluster_text_free(out)
        return result["results"]

    def plan(self, document: dict, choices: list) -> list:
        text, out = json.dumps(document).encode(), ctypes.c_void_p()
        return self._results(self.library.gpushare_cluster_plan(text, ctypes.c_uint64(len(text)), ",".join(choices).encode(), ctypes.byref(out)), out)

    def run(self, document: dict, choices: list, seed: int = 1, noise: float = -1, rounds: int = 0, objective: str = None) -> list:
        text, out = json.dumps(document).encode(), ctypes.c_void_p()
        options = RunOptions(ctypes.sizeof(RunOptions), rounds, seed, noise, objective.encode() if objective else None, None, 0)
        return self._results(self.library.gpushare_cluster_run(text, ctypes.c_uint64(len(text)), ",".join(choices).encode(), ctypes.byref(options),
                                                               ctypes.byref(out)), out)


def spread(values: list, digits: int = 2) -> str:
    """mean (least to greatest)"""
    mean = sum(values) / len(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
