"""Lists what FSDP2 can be told of single units: how many stay gathered, and how far ahead others are gathered.

A unit that stays gathered from forward to backward saves its second gather, and holds its bytes from its forward on.
The last ones are kept, which hold them shortest. Gathers that begin further ahead hide behind more than one unit, where
units are unlike, and hold a flat buffer each.
"""

from msgspec.structs import replace

from memwall.planning.ranks.one_kind import OneKind
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.predict.sharding.units import ShardUnit

_DISTANCES = (2, 4)
_CLEARLY_LESS = 0.98


def some_kept(base: OneKind, units: tuple[ShardUnit, ...], *, at_most: float) -> OneKind | None:
    """Returns the fastest plan that was found with some units of a kind kept; None where no such plan can matter.

    The number is halved into: more are kept for as long as that makes a step shorter, which costs few searches.

    Args:
        base: the kind with none of them kept.
        units: of the step; the root stays gathered whatever is said.
        at_most: the seconds of a step that a plan must stay below.
    """
    if not isinstance(base.kind, Fsdp2) or base.kind.reshard == "no" or (base.is_searched and not base.fits):
        return None
    best, low, high = base if base.is_searched else None, 0, sum(not unit.is_root for unit in units)
    while high - low > 1:
        most = base.of(replace(base.kind, num_kept=high - 1))
        if most.least_seconds >= min(at_most, _CLEARLY_LESS * base.least_seconds):
            break
        middle = (low + high) // 2
        one = base.of(replace(base.kind, num_kept=middle))
        one.search()
        if one.fits and (best is None or one.seconds() < best.seconds()):
            best, low, at_most = one, middle, min(at_most, one.seconds())
        else:
            high = middle
    return None if best is base else best


def gathered_ahead(base: OneKind, units: tuple[ShardUnit, ...], *, at_most: float) -> OneKind | None:
    """Returns the fastest plan that was found with a kind's units gathered further ahead; None where none can matter.

    Args:
        units: of the step. Of one that runs several times the next is no matter of its own.
        at_most: the seconds of a step that a plan must stay below.
    """
    if not isinstance(base.kind, Fsdp2) or (base.is_searched and not base.fits):
        return None
    if any(len(unit.calls) != 1 for unit in units if not unit.is_root):
        return None
    best = None
    for num_ahead in _DISTANCES:
        one = base.of(replace(base.kind, num_ahead=num_ahead))
        # Of units that are alike it hides no more, whatever the plan beside it: most models need no search.
        if one.least_seconds < min(at_most, _CLEARLY_LESS * base.least_seconds):
            one.search()
            if one.fits and one.seconds() < at_most:
                best, at_most = one, one.seconds()
    return best
