"""From a solver's choice to the executor's orders: treatments for the replay, actions for the plan file."""

from collections.abc import Sequence

from memwall.planning.actions import Action, Offload, Rebuild, Recompute
from memwall.planning.menu import Menu
from memwall.planning.solver.instance import Choice
from memwall.predict.call_rules import Treatment

__all__ = ["MIN_MOVED_BYTES", "WINDOW_BYTES", "block_actions", "treatments_of_choice", "window_bytes_of"]

# Memory for bytes on their way out. Smaller makes the computing thread wait, larger costs memory.
WINDOW_BYTES = 32 << 20
MIN_MOVED_BYTES = 1 << 20


def window_bytes_of(menus: Sequence[Menu], choice: Choice) -> int:
    """Memory for bytes on their way out that a choice needs: none if it moves nothing."""
    moves = any(m.options[o].moved_bytes for m, o in zip(menus, choice.options, strict=True))
    return WINDOW_BYTES if moves else 0


def treatments_of_choice(menus: Sequence[Menu], choice: Choice) -> dict[str, Treatment]:
    found: dict[str, Treatment] = {}
    for menu, option in zip(menus, choice.options, strict=True):
        treatment = menu.treatments[option]
        if treatment is not None:
            found[menu.block.path] = treatment
    return found


def block_actions(menus: Sequence[Menu], choice: Choice, device: str) -> list[Action]:
    """The executor's orders for a choice: what runs again first, then offload, in block order."""
    again: list[Action] = []
    offload: list[Action] = []
    for menu, number in zip(menus, choice.options, strict=True):
        treatment, option = menu.treatments[number], menu.options[number]
        if treatment is None:
            continue
        if treatment.recompute:
            again.append(
                Recompute(
                    block=menu.block.path,
                    kept_ops=treatment.kept_ops,
                    kept_names=tuple(menu.op_names[op] for op in treatment.kept_ops),
                    num_ops=len(menu.op_names),
                    saved_bytes=menu.freed_bytes[number],
                    cost_seconds=option.extra_seconds,
                )
            )
        if treatment.rebuild:
            again.append(
                Rebuild(
                    block=menu.block.path,
                    saved_bytes=menu.freed_bytes[number],
                    cost_seconds=option.extra_seconds,
                )
            )
        if treatment.offload:
            runs_again = treatment.recompute or treatment.rebuild
            offload.append(
                Offload(
                    block=menu.block.path,
                    scope="inputs" if treatment.recompute else "saved",
                    tier="disk" if device == "cpu" else "host",
                    min_bytes=treatment.min_bytes,
                    window_bytes=WINDOW_BYTES,
                    # At as many bytes int8 loses less of what values of one size are (tests/kernels/test_pack.py).
                    form="int8" if treatment.is_packed else "exact",
                    exactness="changes-numerics" if treatment.is_packed else "bit-exact",
                    saved_bytes=option.moved_bytes if runs_again else menu.freed_bytes[number],
                    cost_seconds=0.0 if runs_again else option.extra_seconds,
                )
            )
    return again + offload
