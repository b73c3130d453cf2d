"""Holds what a reporter computes before anything is drawn: rows of text, the same for a terminal and a page."""

from collections.abc import Sequence

from msgspec import Struct

from memwall.predict.curve import LineShare, Share
from memwall.units import Rounding, format_bytes, format_seconds

DASH = "-"
_MOST_ROWS = 10


class Grid(Struct, frozen=True, kw_only=True):
    """Holds a table as text; columns not named in `text_columns` hold figures and are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: tuple[int, ...] = (0,)


def share_grid(
    title: str, of_what: str, shares: Sequence[Share | LineShare], total_bytes: int, *, most_rows: int = _MOST_ROWS
) -> Grid:
    """Returns who holds how much of a peak, the largest first; those beyond `most_rows` are summed up in a last row.

    Args:
        of_what: heads the column of names, as in "module".
        shares: of lines, they say their categories, too.
    """
    held = [share for share in shares if share.num_bytes]
    rest_bytes = sum(share.num_bytes for share in held[most_rows:])
    rows = [(_holder_name(share.name), _categories(share), share.num_bytes) for share in held[:most_rows]]
    if rest_bytes:
        rows.append((f"{len(held) - most_rows} others", "", rest_bytes))
    has_categories = any(isinstance(share, LineShare) for share in held)
    return Grid(
        title=title,
        columns=(of_what, *(("category",) if has_categories else ()), "at peak", "share"),
        rows=tuple(
            (name, *((categories,) if has_categories else ()), format_bytes(size), share_percent(size, total_bytes))
            for name, categories, size in rows
        ),
        text_columns=(0, 1) if has_categories else (0,),
    )


def _holder_name(name: str) -> str:
    """Returns a path or a line as it is, and what existed before the step, whose category is in brackets, in words."""
    return name.replace("_", " ") if name.startswith("(") else name


def _categories(share: Share | LineShare) -> str:
    found = share.categories if isinstance(share, LineShare) else ()
    return ", ".join(category.replace("_", " ") for category in found)


def bytes_or_dash(num_bytes: int | None, *, rounding: Rounding = "nearest") -> str:
    """Returns bytes in binary units, or a dash where none are known."""
    return DASH if num_bytes is None else format_bytes(num_bytes, rounding=rounding)


def seconds_or_dash(seconds: float | None) -> str:
    """Returns seconds, or a dash where none are known."""
    return DASH if seconds is None else format_seconds(seconds)


def share_percent(part: float, whole: float) -> str:
    """Returns a part of a whole, with a dash for a whole of nothing.

    >>> share_percent(1, 8), share_percent(1, 0)
    ('12.5%', '-')
    """
    return f"{100 * part / whole:.1f}%" if whole else DASH


def ratio_text(value: float | None, reference: float | None) -> str:
    """Says how many times the reference a value is.

    >>> ratio_text(3.0, 2.0), ratio_text(3.0, None)
    ('1.50x', '-')
    """
    return DASH if value is None or not reference else f"{value / reference:.2f}x"


def error_percent(predicted: float | None, measured: float | None) -> str:
    """Returns the signed relative error, (predicted - measured) / measured: negative where too little was foreseen.

    >>> error_percent(98, 100), error_percent(0, 0), error_percent(1, 0), error_percent(None, 3)
    ('-2.0%', '0.0%', '-', '-')
    """
    if predicted is None or measured is None:
        return DASH
    if predicted == measured:
        return "0.0%"
    return f"{100 * (predicted - measured) / measured:+.1f}%" if measured else DASH
