"""Resharding: units of FSDP2 that the script keeps gathered free their parameters after forward, and gather again."""

from collections.abc import Iterator, Sequence

from memwall.planning.action import Action
from memwall.planning.location import Location
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.technique import Technique
from memwall.predict.sharding.gathering import Gathering
from memwall.trace.records import Step, Trace
from memwall.units import format_bytes

_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Parts of the units that are freed, the first ones to run: what runs last is gathered again soonest."""


class Reshard(Action, frozen=True, kw_only=True, tag="reshard"):
    """Has units free after forward what they have gathered, and gather it again for backward."""

    units: tuple[str, ...]
    """Paths of the modules that `fully_shard` was applied to, in the order of forward."""

    def __post_init__(self) -> None:
        if self.exactness != "bit-exact":
            raise ValueError(f"parameters that are gathered again are bit-exact, not {self.exactness}")


class _Reshard(Technique[Reshard]):
    record = Reshard
    order = 38
    choice = "shorter"

    def locations(self, inputs: SearchInputs, ordinary: tuple[Location, ...] | str) -> tuple[Location, ...] | str:
        gathering = Gathering(inputs.trace, inputs.steady)
        kept = gathering.kept
        if not kept:
            return ()
        paths = tuple(dict.fromkeys(unit.path for unit in kept))
        numbers = dict.fromkeys(max(1, round(share * len(paths))) for share in _SHARES)
        return tuple(_location(gathering, paths[:number]) for number in numbers)

    def step(self, trace: Trace, step: Step, action: Reshard) -> Step:
        return Gathering(trace, step).freed(action.units)

    def what(self, action: Reshard) -> str:
        return "free gathered parameters after forward"

    def where(self, actions: Sequence[Reshard]) -> str:
        units = actions[0].units
        return f"{len(units)} units, {units[0]} to {units[-1]}" if len(units) > 1 else units[0]

    def lever(self, action: Reshard) -> str:
        return "gathered parameters freed after forward"

    def binding(self, trace: Trace, actions: Sequence[Reshard]) -> Iterator[str]:
        for action in actions:
            yield (
                f"{len(action.units)} units that the script keeps gathered free "
                f"{format_bytes(action.saved_bytes or 0)} after forward, and gather them once more for backward"
            )


TECHNIQUE = _Reshard()


def _location(gathering: Gathering, paths: tuple[str, ...]) -> Location:
    freed = [unit for unit in gathering.kept if unit.path in paths]
    action = Reshard(
        units=paths,
        saved_bytes=sum({unit.path: unit.num_bytes for unit in freed}.values()),
        cost_seconds=sum(map(gathering.seconds, freed)),
    )
    return Location(actions=(action,))
