"""How many units of FSDP2 stay gathered from forward to backward, where some of them can and not all.

Each saves its second gather, and holds its bytes from its forward on. The last ones are kept, which hold them shortest.
"""

from msgspec.structs import replace

from memwall.planning.ranks.one_kind import OneKind
from memwall.predict.sharding.fsdp2 import Fsdp2


def some_kept(base: OneKind, num_units: int, *, at_most: float) -> OneKind | None:
    """Returns the fastest plan that was found with some units of a kind kept; None where no such plan can matter.

    The number is halved into: more are kept for as long as that makes a step shorter, which costs few searches.

    Args:
        base: the kind with none of them kept.
        num_units: all but the root, which stays whatever is said.
        at_most: the seconds of a step that a plan must stay below.
    """
    if not isinstance(base.kind, Fsdp2) or base.kind.reshard == "no" or (base.is_searched and not base.fits):
        return None
    best, low, high = base if base.is_searched else None, 0, num_units
    while high - low > 1:
        most = base.of(replace(base.kind, num_kept=high - 1))
        if most.least_seconds >= at_most:
            break
        middle = (low + high) // 2
        one = base.of(replace(base.kind, num_kept=middle))
        one.search()
        if one.fits and (best is None or one.seconds() < best.seconds()):
            best, low, at_most = one, middle, min(at_most, one.seconds())
        else:
            high = middle
    return None if best is base else best
