"""Writes gpushare/_cffi.py, cffi's description of the C ABI, from the public headers.

Usage: make_cffi.py INCLUDE_DIRECTORY VERSION_INCLUDE_DIRECTORY OUTPUT_FILE [COMPILER]

The headers are the only authority: the compiler preprocesses them, cffi parses what is left. The result is plain Python
for cffi's ABI mode, so that one wheel serves every Python version.
"""
# SPDX-License-Identifier: Apache-2.0
import os
import re
import subprocess
import sys
import tempfile

import cffi


def preprocess(include, version_include, compiler):
    """Returns the declarations of gpushare.h and cluster.h without system headers, attributes and line markers."""
    with tempfile.TemporaryDirectory() as empty:
        for name in ("stddef.h", "stdint.h", "stdbool.h"):  # cffi knows their types
            open(os.path.join(empty, name), "w").close()
        command = [compiler, "-E", "-P", "-nostdinc", "-x", "c", "-D__attribute__(x)=", "-I", empty, "-I", include,
                   "-I", version_include, "-include", "gpushare/cluster.h",
                   os.path.join(include, "gpushare", "gpushare.h")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def constants(include):
    """Names and values of the object-like macros that are plain integers: cffi does not see macros."""
    found = {}
    for header in sorted(os.listdir(os.path.join(include, "gpushare"))):
        if header.endswith(".h"):
            with open(os.path.join(include, "gpushare", header), encoding="utf-8") as file:
                for name, value in re.findall(r"^#define (GPUSHARE_\w+) (UINT64_MAX|UINT32_MAX|\d+u?)\b", file.read(), re.M):
                    found[name] = {"UINT64_MAX": 2**64 - 1, "UINT32_MAX": 2**32 - 1}.get(value) or int(value.rstrip("u"))
    return found


def main(include, version_include, output, compiler="cc"):
    text = preprocess(include, version_include, compiler)
    text += "".join(f"\n#define {name} {value}" for name, value in constants(include).items())
    builder = cffi.FFI()
    builder.set_source("gpushare._cffi", None)
    builder.cdef(text)
    builder.emit_python_code(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
