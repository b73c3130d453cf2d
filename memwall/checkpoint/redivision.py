"""Makes what one of N ranks goes on from of a step that M ranks committed: tensors by their regions, the rest by rank.

Parameters and the optimizer's state are the same whatever their division. What each rank has of its own is given to the
rank of its number; a rank that is new takes the first ranks' once more, where all of them have the same.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memwall.checkpoint.committed import Committed
from memwall.checkpoint.restoration import Restoration
from memwall.checkpoint.training_state import decode_objects, encode_objects
from memwall.errors import UsageError

_log = logging.getLogger(__name__)


def redivided(sources: Sequence[Committed], rank: int, num_ranks: int) -> Restoration:
    """Returns the restoration of a rank from the step of another number of ranks.

    Args:
        sources: that step, by rank.

    Raises:
        UsageError: ranks trained other things than each other, or what goes on with a loop or beside the model, but
            random numbers, is not the same on all of them.
    """
    _check_alike(sources)
    place = rank % len(sources)
    ordered = [sources[place], *sources[:place], *sources[place + 1 :]]
    objects, fresh = _objects(sources, place, is_new=rank >= len(sources))
    if rank == 0:
        _log.warning(
            "step %d of %d %s is continued by %d: the model, its optimizer and its schedule are those of that step; "
            "divide the global batch by the number of ranks to keep it, and with it the samples of each step",
            *(sources[0].step, len(sources), "ranks" if len(sources) > 1 else "process", num_ranks),
        )
    if fresh:
        _log.warning(
            "rank %d is new and begins anew with %s, which the ranks of the run that it continues have each of "
            "their own",
            *(rank, ", ".join(sorted(fresh))),
        )
    return Restoration(ordered, objects)


def _check_alike(sources: Sequence[Committed]) -> None:
    first = sources[0]
    for rank, source in enumerate(sources):
        if _trained(source) != _trained(first):
            raise UsageError(
                f"rank {rank} of {len(sources)} trained other parameters than rank 0, as stages of a pipeline or under "
                "ZeroRedundancyOptimizer, so that no other number of ranks can go on; resume with as many"
            )
        low_bit = (moments for saved in source.optimizers for moments in saved.get("low_bit", {}).values())
        if any(low_bit) and source.objects.get("divided"):
            raise UsageError(
                "moments in 8 bits of a model that is divided are divided in blocks of their own, so that no other "
                f"number of ranks than {len(sources)} can go on; resume with as many"
            )


def _trained(source: Committed) -> list[list[str]]:
    return [group["parameters"] for saved in source.optimizers for group in saved["groups"]]


def _objects(sources: Sequence[Committed], place: int, *, is_new: bool) -> tuple[dict[str, Any], list[str]]:
    """Returns what of a step is no tensor for one rank, and what a new rank begins anew with."""
    objects, fresh = dict(sources[place].objects), []
    every = [source.objects for source in sources]
    if is_new:
        objects["random"] = _equal_states([found["random"] for found in every])
        fresh += [f"random numbers of {name}" for name in sources[place].objects["random"].keys() - objects["random"]]
    loops = [found["loop"] for found in every]
    for rank, loop in enumerate(loops):
        if _loop_text(loop) != _loop_text(loops[0]):
            raise UsageError(
                f"rank {rank} of {len(sources)} committed this step in {_loop_text(loop)}, and rank 0 in "
                f"{_loop_text(loops[0])}: no other number of ranks can go on; resume with as many"
            )
    if loops[place] is not None:
        for name in loops[place]["stateful"]:
            if not _all_equal([loop["stateful"][name] for loop in loops]):
                raise _unequal(f"memwall.steps(NUM_STEPS, {name}=...)", len(sources))
        at_top = _equal_states([loop["random"] for loop in loops]) if is_new else loops[place]["random"]
        objects["loop"] = dict(loops[place]) | {"random": at_top}
    if objects.get("beside") is not None:
        beside = [decode_objects(found["beside"]) for found in every]
        states = beside[place]
        for name in sorted({name for found in beside for name in found["stateful"]}):
            if not _all_equal([found["stateful"].get(name) for found in beside]):
                raise _unequal(f"'{name}'", len(sources))
        if is_new:
            generators = states["generators"]
            own = [name for name in generators if not _all_equal([f["generators"].get(name) for f in beside])]
            for name in own:
                del generators[name]
            states["fresh"] = [*states.get("fresh", ()), *own]
            fresh += [f"'{name}'" for name in own]
        objects["beside"] = encode_objects(states)
    objects["buckets"] = ()  # sums of another number of ranks round otherwise in any case
    return objects, fresh


def _loop_text(loop: Mapping[str, Any] | None) -> str:
    if loop is None:
        return "a loop of another form"
    return f"a loop over memwall.steps with {', '.join(sorted(loop['stateful'])) or 'nothing by name'}"


def _unequal(what: str, num_ranks: int) -> UsageError:
    return UsageError(
        f"{what} has another state on each of the {num_ranks} ranks that committed this step, which cannot be divided "
        "among another number of them; resume with as many, or draw the samples of a step from its number"
    )


def _equal_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns those that are the same on all ranks."""
    return {name: state for name, state in states[0].items() if _all_equal([found.get(name) for found in states])}


def _all_equal(values: Iterable[Any]) -> bool:
    first, *others = values
    return all(are_equal(first, other) for other in others)


def are_equal(one: Any, other: Any) -> bool:
    """Returns whether two states are equal, in all that they consist of."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)
