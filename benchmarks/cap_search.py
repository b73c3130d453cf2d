"""The cap of a run: the smallest limit of memory under which its steps finish, the only ground truth for "it fits".

Near the limit an allocator frees its cache and retries, and a kernel gives up clean pages, so that a run fits into less
than it takes when nothing limits it. Found by bisection, each trial in a fresh process.
"""

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

__all__ = ["Cap", "Outcome", "Trial", "smallest_cap"]

RESOLUTION_BYTES = 32 << 20
RESOLUTION_SHARE = 0.01

Outcome = Literal["finished", "out of memory", "hung", "failed", "cut off"]
"""All but the first count as not fitting, except for the last: the search's own time was over, which ends it."""


class Trial(Struct, frozen=True, kw_only=True):
    """One run under a limit."""

    limit_bytes: int
    outcome: Outcome
    seconds: float
    """Of a steady step, the median; 0 where none was reached."""


class Cap(Struct, frozen=True, kw_only=True):
    """The interval in which the smallest limit lies."""

    cap_bytes: int
    """The smallest limit that was seen to do."""
    too_small_bytes: int
    """The largest that was seen not to do, or the floor."""
    is_resolved: bool
    """Whether the two are within 1 % of the cap and within 32 MiB; not if time ran out before."""
    step_seconds: float
    """At the cap: what it costs to run that close to the limit."""
    trials: tuple[Trial, ...]


def smallest_cap(
    attempt: Callable[[int], Trial],
    *,
    floor_bytes: int,
    ceiling_bytes: int,
    is_time_over: Callable[[], bool] = lambda: False,
) -> Cap | None:
    """Bisects between a limit that is too small and one that does.

    Args:
        attempt: runs once under a limit in bytes, in a fresh process.
        floor_bytes: known to be too small.
        ceiling_bytes: expected to do; it is tried first, and raised by a tenth, twice, where chance has it fail.
        is_time_over: asked before each trial but the first.

    Returns:
        None if the run does not finish under the raised ceiling either, or was cut off before it finished once.
    """
    trials: list[Trial] = []
    for limit_bytes in (ceiling_bytes, ceiling_bytes * 11 // 10, ceiling_bytes * 121 // 100):
        trials.append(best := attempt(limit_bytes))
        if best.outcome == "finished":
            break
        if best.outcome == "cut off":
            return None
        floor_bytes = limit_bytes
    else:
        return None
    while not (is_resolved := _is_resolved(floor_bytes, best.limit_bytes)) and not is_time_over():
        trial = attempt((floor_bytes + best.limit_bytes) // 2)
        trials.append(trial)
        if trial.outcome == "finished":
            best = trial
        elif trial.outcome == "cut off":
            break
        else:
            floor_bytes = trial.limit_bytes
    return Cap(
        cap_bytes=best.limit_bytes,
        too_small_bytes=floor_bytes,
        is_resolved=is_resolved,
        step_seconds=best.seconds,
        trials=tuple(trials),
    )


def _is_resolved(too_small_bytes: int, enough_bytes: int) -> bool:
    return enough_bytes - too_small_bytes <= min(RESOLUTION_BYTES, RESOLUTION_SHARE * enough_bytes)
