"""What a plan could pull: ways to treat blocks, what each frees and costs if all of them had it, and where it is used.

The exchange rate between memory and time that the solver saw, so that a person can see it too: what another GiB would
cost, and why the plan took one lever and left another.
"""

from collections.abc import Iterator, Sequence

from memwall.planning.action import Action
from memwall.planning.forecast import Lever
from memwall.planning.menu_records import Menu
from memwall.planning.solver.instance import Choice
from memwall.planning.technique import technique_of, techniques

__all__ = ["levers_of"]


def levers_of(menus: Sequence[Menu], choice: Choice, fixed: Sequence[Action]) -> tuple[Lever, ...]:
    """Returns the levers of a choice, the cheapest per byte first.

    Args:
        fixed: the plan's other actions; of these, those that say what they free and cost.
    """
    found = [
        lever
        for technique in techniques()
        for name, text in technique.block_levers.items()
        if (lever := _block_lever(name, text, menus, choice)) is not None
    ]
    for action in fixed:
        text = technique_of(action).lever(action)
        if text and action.saved_bytes and action.saved_bytes > 0 and action.cost_seconds is not None:
            found.append(Lever(name=text, freed_bytes=action.saved_bytes, cost_seconds=action.cost_seconds))
    return tuple(sorted(found, key=lambda lever: lever.seconds_per_gib))


def _block_lever(name: str, text: str, menus: Sequence[Menu], choice: Choice) -> Lever | None:
    """Returns one way to treat blocks, in all that have it: the point that is used, or else the cheapest per byte."""
    num_blocks = num_used = freed_bytes = 0
    cost_seconds = 0.0
    for menu, chosen in zip(menus, choice.options, strict=True):
        points = list(_points(name, menu))
        if not points:
            continue
        point = chosen if chosen in points else min(points, key=lambda p: _rate(menu, p))
        num_blocks += 1
        num_used += chosen in points
        freed_bytes += menu.freed_bytes[point]
        cost_seconds += menu.options[point].extra_seconds
    if not num_blocks:
        return None
    return Lever(
        name=text,
        freed_bytes=freed_bytes,
        cost_seconds=cost_seconds,
        num_blocks=num_blocks,
        num_blocks_used=num_used,
    )


def _points(name: str, menu: Menu) -> Iterator[int]:
    """Yields a block's options of that name that free anything; selective recomputation has several."""
    for number, option in enumerate(menu.options):
        if option.name.partition("-")[0] == name and menu.freed_bytes[number] > 0:
            yield number


def _rate(menu: Menu, point: int) -> float:
    return menu.options[point].extra_seconds / menu.freed_bytes[point]
