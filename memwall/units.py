"""Sizes in and out: the one place that scales units. Bytes and seconds inside, GiB and ms only at the rim."""

import re

from memwall.errors import UsageError

__all__ = ["format_bytes", "format_seconds", "parse_size"]

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
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*")


def parse_size(text: str | int, *, whole_bytes: int | None = None) -> int:
    """Bytes of `10GiB`, `800MiB`, `24GB`, plain bytes, or `N%` of `whole_bytes`.

    Raises:
        UsageError: the text is no size, is zero, or is a percentage where nothing is known to take it of.

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
    if size_bytes <= 0:
        raise UsageError(f"'{text}' is zero bytes; a size must be positive")
    return size_bytes


def format_bytes(num_bytes: float) -> str:
    """Bytes for a person, in binary units.

    >>> format_bytes(1610612736), format_bytes(-2048), format_bytes(17)
    ('1.50 GiB', '-2.0 KiB', '17 B')
    """
    sign, size = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    if size >= 1 << 50:
        return f"{sign}{size / (1 << 50):.2f} PiB"
    if size >= 1 << 40:
        return f"{sign}{size / (1 << 40):.2f} TiB"
    if size >= 1 << 30:
        return f"{sign}{size / (1 << 30):.2f} GiB"
    if size >= 1 << 20:
        return f"{sign}{size / (1 << 20):.1f} MiB"
    if size >= 1 << 10:
        return f"{sign}{size / (1 << 10):.1f} KiB"
    return f"{sign}{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds for a person.

    >>> format_seconds(2.5), format_seconds(0.0123), format_seconds(0.000002)
    ('2.50 s', '12.3 ms', '2 us')
    """
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
