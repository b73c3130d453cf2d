"""Exact dynamic program for chains without a link: the oracle for the other solvers.

In a chain every peak depends on the blocks before it only through the bytes they left resident, so the state after a
block is that one number. `chain_instance` writes the same chain as rows, for the solvers that know nothing of chains.
"""

from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from memwall.planning.solver.instance import BlockOptions, Choice, Instance, Option, Row

__all__ = ["Chain", "ChainBlock", "ChainOption", "chain_instance", "solve_chain"]


class ChainOption(Struct, frozen=True, kw_only=True):
    """One way to treat a block of a chain."""

    name: str
    extra_seconds: float
    resident_bytes: int
    """Left on the device from the end of the block's forward to the start of its backward."""
    forward_bytes: int
    """All the block holds at its own forward peak, what it will leave resident included."""
    backward_bytes: int
    """All the block holds at its own backward peak: its saved set restored, what is recomputed, gradients."""


class ChainBlock(Struct, frozen=True, kw_only=True):
    """A block of a chain; options[0] is keep."""

    path: str
    options: tuple[ChainOption, ...]
    forward_seconds: float
    backward_seconds: float


class Chain(Struct, frozen=True, kw_only=True):
    """Blocks run one after the other, then the loss, then the blocks backwards."""

    blocks: tuple[ChainBlock, ...]
    base_bytes: int
    """There all the time: parameters, gradients, optimizer state, inputs."""
    loss_bytes: int
    """On top of the base and of everything resident while the loss is computed."""


def chain_instance(chain: Chain, budget_bytes: int) -> Instance:
    """The chain as rows, in the order of the step: every forward, the loss, every backward from the last block on."""
    nothing = tuple((0,) * len(block.options) for block in chain.blocks)
    resident = tuple(tuple(option.resident_bytes for option in block.options) for block in chain.blocks)

    def row(phase: str, index: int, own: tuple[int, ...]) -> Row:
        return Row(
            label=f"{phase} of {chain.blocks[index].path}",
            fixed_bytes=chain.base_bytes,
            held=(*resident[:index], own, *nothing[index + 1 :]),
        )

    forwards = [
        row("forward", i, tuple(o.forward_bytes for o in block.options)) for i, block in enumerate(chain.blocks)
    ]
    backwards = [
        row("backward", i, tuple(o.backward_bytes for o in block.options)) for i, block in enumerate(chain.blocks)
    ]
    loss = Row(label="loss", fixed_bytes=chain.base_bytes + chain.loss_bytes, held=resident)
    blocks = tuple(
        BlockOptions(
            path=block.path,
            options=tuple(Option(name=o.name, extra_seconds=o.extra_seconds, moved_bytes=0) for o in block.options),
            forward_seconds=block.forward_seconds,
            backward_seconds=block.backward_seconds,
        )
        for block in chain.blocks
    )
    return Instance(blocks=blocks, rows=(*forwards, loss, *reversed(backwards)), budget_bytes=budget_bytes, link=None)


class _Front(NamedTuple):
    """States after a block: none holds as little as another for as little. All [states]."""

    resident_quanta: NDArray[np.int64]
    seconds: NDArray[np.float64]
    parents: NDArray[np.int64]
    options: NDArray[np.int64]


def solve_chain(chain: Chain, budget_bytes: int, *, quantum_bytes: int = 1) -> Choice | None:
    """The cheapest choice within the budget, or None if there is none.

    With a quantum above 1 byte every size is rounded up to it and the room down: the answer still fits, but may be
    dearer than necessary, so nothing is proven and the lower bound is 0.
    """

    def quanta(size_bytes: int) -> int:
        return -(-size_bytes // quantum_bytes)

    room_quanta = (budget_bytes - chain.base_bytes) // quantum_bytes
    fronts = [_Front(np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))]
    for block in chain.blocks:
        before = fronts[-1]
        parts: list[_Front] = []
        for index, option in enumerate(block.options):
            working_quanta = quanta(max(option.forward_bytes, option.backward_bytes))
            (fitting,) = np.nonzero(before.resident_quanta + working_quanta <= room_quanta)
            parts.append(
                _Front(
                    before.resident_quanta[fitting] + quanta(option.resident_bytes),
                    before.seconds[fitting] + option.extra_seconds,
                    fitting,
                    np.full(len(fitting), index),
                )
            )
        fronts.append(_undominated(parts))
    (fitting,) = np.nonzero(fronts[-1].resident_quanta + quanta(chain.loss_bytes) <= room_quanta)
    if not len(fitting):
        return None
    state = int(fitting[fronts[-1].seconds[fitting].argmin()])
    extra_seconds = float(fronts[-1].seconds[state])
    options: list[int] = []
    for front in reversed(fronts[1:]):
        options.append(int(front.options[state]))
        state = int(front.parents[state])
    return Choice(tuple(reversed(options)), extra_seconds, extra_seconds if quantum_bytes == 1 else 0.0)


def _undominated(parts: list[_Front]) -> _Front:
    """Of all states those that no other beats in both bytes and seconds, by rising bytes."""
    resident_quanta = np.concatenate([part.resident_quanta for part in parts])
    seconds = np.concatenate([part.seconds for part in parts])
    order = np.lexsort((seconds, resident_quanta))
    ordered = seconds[order]
    cheapest_below = np.minimum.accumulate(np.concatenate(([np.inf], ordered)))[:-1]
    kept = order[ordered < cheapest_below]
    return _Front(
        resident_quanta[kept],
        seconds[kept],
        np.concatenate([part.parents for part in parts])[kept],
        np.concatenate([part.options for part in parts])[kept],
    )
