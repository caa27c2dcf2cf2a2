"""Quantities as Kubernetes writes them: "512Mi", "1.5G", "100m", "2e9"."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import decimal
import math
import re
from typing import Union

_SUFFIXES = {"": 1, "n": "1e-9", "u": "1e-6", "m": "1e-3", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12", "P": "1e15", "E": "1e18",
             "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_FORM = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d{1,3})|([numkMGTPE]|[KMGTPE]i)?)")


def parse_quantity(text: Union[str, int]) -> int:
    """The quantity as a whole number, rounded up as Kubernetes does. Raises ValueError with the text."""
    found = _FORM.fullmatch(str(text).strip())
    if not found:
        raise ValueError(f"{text!r} is not a quantity of Kubernetes, such as 512Mi or 10G")
    number, exponent, suffix = found.groups()
    with decimal.localcontext() as context:
        context.prec = 400
        return math.ceil(decimal.Decimal(number + (exponent or "")) * decimal.Decimal(_SUFFIXES[suffix or ""]))
