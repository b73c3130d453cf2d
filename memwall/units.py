"""Sizes in and out: the one place that scales units. Bytes and seconds inside, GiB and ms only at the rim."""

import math
import re
from typing import Literal

from memwall.errors import UsageError

Rounding = Literal["nearest", "up", "down"]

# IEC 80000-13: KiB, MiB, ... are powers of 1024; kB, MB, ... powers of 1000. Kubernetes writes Mi and Gi bare.
_SCALES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "pib": 1 << 50,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
    "pi": 1 << 50,
}
# How sizes are shown: the unit, its bytes, and the digits after the point.
_SHOWN = (
    ("PiB", 1 << 50, 2),
    ("TiB", 1 << 40, 2),
    ("GiB", 1 << 30, 2),
    ("MiB", 1 << 20, 1),
    ("KiB", 1 << 10, 1),
    ("B", 1, 0),
)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*")


def parse_size(text: str | int, *, whole_bytes: int | None = None, may_be_zero: bool = False) -> int:
    """Returns the bytes of `10GiB`, `800MiB`, `24GB`, plain bytes, or `N%` of `whole_bytes`.

    Raises:
        UsageError: the text is no size, is zero where that may not be, or is a percentage where nothing is known to
            take it of.

    >>> parse_size("1.5GiB")
    1610612736
    >>> parse_size("24GB")
    24000000000
    >>> parse_size("50%", whole_bytes=1000)
    500
    """
    found = _SIZE.fullmatch(str(text))
    unit = found.group(2).lower() if found else ""
    if found is None or (unit != "%" and unit not in _SCALES):
        raise UsageError(
            f"'{text}' is not a size; expected a number with a unit, such as 10GiB, 800MiB, 24GB, "
            "plain bytes, or a percentage such as 50%"
        )
    number = float(found.group(1))
    if unit == "%":
        if whole_bytes is None:
            raise UsageError(f"'{text}' is a percentage, but the size it is a part of is not known here; give bytes")
        size_bytes = int(whole_bytes * number / 100)
    else:
        size_bytes = int(number * _SCALES[unit])
    if size_bytes <= 0 and not may_be_zero:
        raise UsageError(f"'{text}' is zero bytes; a size must be positive")
    return size_bytes


def format_bytes(num_bytes: float, *, rounding: Rounding = "nearest") -> str:
    """Returns bytes for a person, in binary units.

    Args:
        rounding: of the last digit shown, away from zero ("up") or towards it ("down"). What is needed is shown "up",
            so that the text, read back by `parse_size`, is enough; what is there is shown "down".

    >>> format_bytes(1610612736), format_bytes(-2048), format_bytes(17)
    ('1.50 GiB', '-2.0 KiB', '17 B')
    >>> needed = 564_930_806
    >>> format_bytes(needed), format_bytes(needed, rounding="up"), format_bytes(needed, rounding="down")
    ('538.8 MiB', '538.8 MiB', '538.7 MiB')
    >>> parse_size(format_bytes(needed + 100_000, rounding="up")) >= needed + 100_000
    True
    """
    sign, size = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    name, scale, digits = next((shown for shown in _SHOWN if size >= shown[1]), _SHOWN[-1])
    if rounding == "nearest":
        return f"{sign}{size / scale:.{digits}f} {name}"
    # Whole numbers of the last digit: a fraction such as 0.1 has no exact float.
    whole = math.ceil(size) if rounding == "up" else math.floor(size)
    parts = whole * 10**digits
    last_digits = -(-parts // scale) if rounding == "up" else parts // scale
    return f"{sign}{last_digits / 10**digits:.{digits}f} {name}"


def format_seconds(seconds: float) -> str:
    """Returns seconds for a person.

    >>> format_seconds(2.5), format_seconds(0.0123), format_seconds(0.000002)
    ('2.50 s', '12.3 ms', '2 us')
    """
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
