"""`python -m gpushare ...` runs the gpushare tool that this package carries."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import shutil
import sys


def main() -> int:
    packaged = pathlib.Path(__file__).parent / "bin" / "gpushare"
    tool = str(packaged) if packaged.exists() else shutil.which("gpushare")
    if tool is None:
        print("gpushare: the tool is neither in this package nor on PATH; install the package with `pip install .`", file=sys.stderr)
        return 1
    os.execv(tool, ["gpushare", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
