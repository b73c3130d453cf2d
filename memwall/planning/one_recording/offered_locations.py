"""Lists where techniques offer to keep state and parameters between their uses, by when a search takes it."""

from typing import Any

from memwall.planning.location import IN_MEMORY, Location
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.technique import Choice, Technique, techniques

_WITHOUT_LOSS = ("shorter", "clearly-shorter")


class OfferedLocations:
    """Holds the locations that are legal for a trace, and write to the disk where that is allowed.

    Attributes:
        in_memory: ways to have all in memory, first as the loop has it, the one that frees most last.
        ordinary: ways to have state on the next tier that lose nothing, the one that frees most first.
        bound: ways that lose nothing, and leave a loop less freedom.
        lossy: ways that lose digits, each with the technique that offers it.
        leanest: the ordinary way to which last resorts are added.
        last_resorts: parts that are added to it where nothing else fits, ever more of them.
        stays: why there is no last resort; "" where there is one, or none was looked for.
        are_barred: whether there are others, which write to the disk that nothing may be written to.
    """

    def __init__(self, inputs: SearchInputs) -> None:
        self._inputs = inputs
        self.are_barred = False
        shorter, _ = self._chosen_if("shorter")
        self.in_memory = (IN_MEMORY, *shorter[::-1])
        found, reason = self._chosen_if("clearly-shorter")
        ordinary = found or reason
        self.ordinary = self._within_writes((*(one.plus(self.in_memory[-1]) for one in found[:1] if shorter), *found))
        self.bound: tuple[Location, ...] = ()
        self.lossy: list[tuple[Technique[Any], Location]] = []
        self.leanest = IN_MEMORY
        self.last_resorts: tuple[Location, ...] = ()
        self.stays = ""
        for technique in techniques():
            offered = technique.locations(inputs, ordinary) if technique.choice not in _WITHOUT_LOSS else ()
            if technique.choice == "worth-freedom":
                self.bound += () if isinstance(offered, str) else self._within_writes(offered)
            elif technique.choice == "worth-digits":
                self.lossy += [] if isinstance(offered, str) else [(technique, location) for location in offered]
            elif isinstance(offered, str):
                self.stays = self.stays or offered
            elif isinstance(ordinary, tuple) and ordinary and offered:
                added = tuple(location.plus(ordinary[0]) for location in offered)
                kept = self._within_writes(added)
                self.last_resorts += tuple(o for o, both in zip(offered, added, strict=True) if both in kept)
                self.leanest = ordinary[0]

    def _chosen_if(self, choice: Choice) -> tuple[tuple[Location, ...], str]:
        """Returns what techniques with that choice offer, the location that frees most first; or why it is nothing."""
        found: tuple[Location, ...] = ()
        reason = ""
        for technique in techniques():
            offered = technique.locations(self._inputs, ()) if technique.choice == choice else ()
            if isinstance(offered, str):
                reason = reason or offered
            else:
                found += offered
        return found, reason

    def _within_writes(self, locations: tuple[Location, ...]) -> tuple[Location, ...]:
        """Returns those that write nothing to the disk, where nothing may be written."""
        allowed = tuple(one for one in locations if self._inputs.allows(one))
        self.are_barred = self.are_barred or len(allowed) < len(locations)
        return allowed
