"""What a reporter computes before anything is drawn: rows of finished text, the same for a terminal and a page."""

from msgspec import Struct

from memwall.units import format_bytes, format_seconds

__all__ = ["Grid", "bytes_or_dash", "error_percent", "ratio_text", "seconds_or_dash", "share_percent"]

DASH = "-"


class Grid(Struct, frozen=True, kw_only=True):
    """A table as text; columns not named in `text_columns` hold figures and are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: tuple[int, ...] = (0,)


def bytes_or_dash(num_bytes: int | None) -> str:
    """Bytes in binary units, or a dash where none are known."""
    return DASH if num_bytes is None else format_bytes(num_bytes)


def seconds_or_dash(seconds: float | None) -> str:
    """Seconds, or a dash where none are known."""
    return DASH if seconds is None else format_seconds(seconds)


def share_percent(part: float, whole: float) -> str:
    """A part of a whole, with a dash for a whole of nothing.

    >>> share_percent(1, 8), share_percent(1, 0)
    ('12.5%', '-')
    """
    return f"{100 * part / whole:.1f}%" if whole else DASH


def ratio_text(value: float | None, reference: float | None) -> str:
    """How many times the reference a value is.

    >>> ratio_text(3.0, 2.0), ratio_text(3.0, None)
    ('1.50x', '-')
    """
    return DASH if value is None or not reference else f"{value / reference:.2f}x"


def error_percent(predicted: float | None, measured: float | None) -> str:
    """Signed relative error, (predicted - measured) / measured: negative where too little was foreseen.

    >>> error_percent(98, 100), error_percent(0, 0), error_percent(1, 0), error_percent(None, 3)
    ('-2.0%', '0.0%', '-', '-')
    """
    if predicted is None or measured is None:
        return DASH
    if predicted == measured:
        return "0.0%"
    return f"{100 * (predicted - measured) / measured:+.1f}%" if measured else DASH
