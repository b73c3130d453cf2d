"""Puts two files of one kind beside each other in figures: `memwall diff` shows them, and decides by them."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from memwall.trace.records import Tag
from memwall.units import format_bytes

Source = Literal["trace", "plan", "run", "snapshot"]
Group = Literal["peak", "quantity", "phase", "category", "module", "line"]
"""`peak`: what a limit on growth is about. The others say where it comes from."""

_GROUPS: tuple[Group, ...] = ("peak", "quantity", "phase", "category", "module", "line")
# Of these there may be thousands; the largest are shown, and of them those that changed most.
_LONG_GROUPS: tuple[Group, ...] = ("module", "line")
_MOST_ROWS = 10


class Quantity(Struct, frozen=True):
    """Holds the bytes of one file under a name that another file of its kind has, too."""

    group: Group
    name: str
    num_bytes: int


class Side(Struct, frozen=True, kw_only=True):
    """Holds one of the two files."""

    source: str
    """The file's name as it was given."""
    kind: Source
    tag: Tag
    """How its bytes were obtained."""
    quantities: tuple[Quantity, ...]
    step_seconds: float | None = None
    conditions: dict[str, str]
    """A fair comparison has these in common: device, batch, release of torch, budget."""


class Change(Struct, frozen=True, kw_only=True):
    """Holds one quantity in both files; 0 bytes where a file does not have it."""

    group: Group
    name: str
    before_bytes: int
    after_bytes: int
    change_bytes: int
    change_percent: float | None
    """None where there was nothing before."""


class Seconds(Struct, frozen=True, kw_only=True):
    """Holds the time of a step in both files; None where one does not say."""

    before_seconds: float | None
    after_seconds: float | None


class Difference(Struct, frozen=True, kw_only=True):
    """Says what changed from A to B."""

    schema: str = "memwall.diff/1"
    kind: Source
    before: str
    after: str
    before_tag: Tag
    after_tag: Tag
    changes: tuple[Change, ...]
    """Grouped, the peaks first."""
    step: Seconds
    fail_over_percent: float | None
    """How much the peak may grow; None for no limit."""
    exceeds: bool
    """Whether a peak grew by more than that."""
    notes: tuple[str, ...]
    """The files do not have these in common."""


def difference_of(before: Side, after: Side, *, fail_over_percent: float | None = None) -> Difference:
    """Returns what changed from one file to another of the same kind.

    Args:
        fail_over_percent: how much each peak may grow.
    """
    changes = tuple(change for group in _GROUPS for change in _changes(group, before, after))
    peaks = [change for change in changes if change.group == "peak"]
    return Difference(
        kind=before.kind,
        before=before.source,
        after=after.source,
        before_tag=before.tag,
        after_tag=after.tag,
        changes=changes,
        step=Seconds(before_seconds=before.step_seconds, after_seconds=after.step_seconds),
        fail_over_percent=fail_over_percent,
        exceeds=fail_over_percent is not None and any(_grew_by_more(peak, fail_over_percent) for peak in peaks),
        notes=tuple(_notes(before, after)),
    )


def exit_status(difference: Difference) -> int:
    """Returns 0, or 3 (does not fit) where a peak grew by more than it may."""
    return 3 if difference.exceeds else 0


def _grew_by_more(peak: Change, percent: float) -> bool:
    return peak.change_bytes > peak.before_bytes * percent / 100


def _changes(group: Group, before: Side, after: Side) -> list[Change]:
    """Returns the quantities of one group in the order in which the files have them."""
    sides = [
        {quantity.name: quantity.num_bytes for quantity in side.quantities if quantity.group == group}
        for side in (before, after)
    ]
    changes = [_change(group, name, *(side.get(name, 0) for side in sides)) for name in sides[0] | sides[1]]
    if group not in _LONG_GROUPS:
        return [change for change in changes if change.before_bytes or change.after_bytes]
    ranked = sorted(changes, key=lambda change: (-abs(change.change_bytes), change.name))
    return [change for change in ranked if change.change_bytes][:_MOST_ROWS]


def _change(group: Group, name: str, before_bytes: int, after_bytes: int) -> Change:
    change_bytes = after_bytes - before_bytes
    return Change(
        group=group,
        name=name,
        before_bytes=before_bytes,
        after_bytes=after_bytes,
        change_bytes=change_bytes,
        change_percent=round(100 * change_bytes / before_bytes, 2) if before_bytes else None,
    )


def _notes(before: Side, after: Side) -> Iterable[str]:
    if before.tag != after.tag:
        yield f"A is {before.tag}, B is {after.tag}"
    for name in before.conditions | after.conditions:
        found = [side.conditions.get(name, "unknown") for side in (before, after)]
        if found[0] != found[1]:
            yield f"{name}: A has {found[0]}, B has {found[1]}"
    for group in ("peak", "phase"):
        names = [[q.name for q in side.quantities if q.group == group] for side in (before, after)]
        for only, others, side in ((*names, "A"), (*reversed(names), "B")):
            missing = [name for name in only if name not in others]
            if missing:
                yield f"only {side} has {', '.join(missing)}; the other counts as {format_bytes(0)}"
