"""What is brought into memory as one, and the runs of its forward that a backward may follow."""

import weakref
from collections.abc import Sequence

from memwall.apply.streaming.parameter_tier import StreamedParameter
from memwall.apply.streaming.stream_units import Unit

__all__ = ["Call", "Stream"]


class Stream:
    """A unit with its parameters of the tier."""

    def __init__(self, unit: Unit, members: Sequence[StreamedParameter]) -> None:
        self.unit, self.members = unit, members


class Call:
    """One run of a unit's forward that a backward may follow."""

    __slots__ = ("__weakref__", "begin", "end", "previous", "stream")

    def __init__(self, stream: Stream, begin: int, end: int, previous: "Call | None") -> None:
        self.stream = stream
        # Among the begins and ends of all calls: one may lie within another.
        self.begin, self.end = begin, end
        # Only the graph keeps calls alive: many may never have a backward.
        self.previous = weakref.ref(previous) if previous is not None else None
