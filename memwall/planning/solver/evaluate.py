"""The judge: what any choice of options costs, in integer bytes and in seconds, written without a solver in sight.

Solvers propose, `evaluate` decides: only its peak and its seconds are ever shown, and a proposal it rejects is not
used.

How the link is timed; where the executor is free to do better, it is taken not to:

- Writing and reading are independent directions, each at its own constant speed. Not counted is what else passes the
  same link: parameters and gradients that are on disk.
- Forward: a block's tensors enter the out-queue as they are saved, and leave beside the forwards that go on. More than
  `window_bytes` are never under way: until there is room the executor waits, and that wait is a stall. What that makes
  of a queue says each option (`Leaving`).
- Between the last forward and the first backward the queue of a disk must run empty. All of that is a stall: the
  seconds of the loss are not known here and are not counted as time to drain in.
- Backward: the executor asks for a block's bytes when the backward of the block after it (in forward order) starts, and
  they are read in the order backward takes them, behind what that block itself still reads. The link is free for them
  in what it leaves of that block's backward seconds plus its option's extra seconds, because recomputation happens
  there. Of what is not back when the block's own backward starts, `hidden_bytes` are read beside it, and the rest is a
  stall. Nothing runs before the last block's backward. A block that is called several times counts as one call of all.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from memwall.planning.solver.instance import Instance, Link, Option


class Evaluation(Struct, frozen=True, kw_only=True):
    """Holds what one choice does, as the executor is expected to run it."""

    peak_bytes: int
    """The largest row; 0 for an instance without rows."""
    extra_seconds: float
    """Per step, beyond keeping everything: the options' own seconds and the stalls."""
    stall_seconds: float
    """The part of extra_seconds spent waiting for the link."""
    moved_bytes: int
    """Bytes that leave the device per step, and come back."""
    fits: bool
    """Every row is within the budget, and what is moved has a link and a place on the tier."""


class Price(NamedTuple):
    """Holds what a choice costs, in the order in which choices are preferred; see `Evaluation`."""

    extra_seconds: float
    moved_bytes: int
    stall_seconds: float


def evaluate(instance: Instance, options: Sequence[int]) -> Evaluation:
    """Returns what choosing `options` (one index per block, in block order) does."""
    price = price_of(instance, options)
    peak_bytes = 0
    if instance.rows:
        chosen = instance.offsets + np.asarray(options, dtype=np.intp)
        peak_bytes = int((instance.fixed_bytes + instance.held[:, chosen].sum(axis=1)).max())
    room_bytes = instance.link.capacity_bytes if instance.link else 0
    return Evaluation(
        peak_bytes=peak_bytes,
        extra_seconds=price.extra_seconds,
        stall_seconds=price.stall_seconds,
        moved_bytes=price.moved_bytes,
        fits=(not instance.rows or peak_bytes <= instance.budget_bytes) and price.moved_bytes <= room_bytes,
    )


def price_of(instance: Instance, options: Sequence[int]) -> Price:
    """Returns what choosing `options` costs: of an evaluation the part that takes no time."""
    chosen = [block.options[option] for block, option in zip(instance.blocks, options, strict=True)]
    moved_bytes = sum(option.moved_bytes for option in chosen)
    stall_seconds = 0.0
    if instance.link and moved_bytes:
        stall_seconds = _write_stalls(instance, chosen, instance.link) + _read_stalls(instance, chosen, instance.link)
    return Price(sum(option.extra_seconds for option in chosen) + stall_seconds, moved_bytes, stall_seconds)


def cheapest(instance: Instance, proposals: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Returns the cheapest proposal that fits; None for none.

    Equal costs go to the choice that moves fewer bytes, then to the one with the lower peak.
    """
    verdicts = [(evaluate(instance, options), options) for options in dict.fromkeys(proposals)]
    fitting = [(v.extra_seconds, v.moved_bytes, v.peak_bytes, options) for v, options in verdicts if v.fits]
    return min(fitting)[-1] if fitting else None


def _write_stalls(instance: Instance, chosen: list[Option], link: Link) -> float:
    """Returns the seconds that the forward pass waits for the out-queue, a disk's final emptying included."""
    queue_seconds = stall_seconds = 0.0
    for block, option in zip(instance.blocks, chosen, strict=True):
        leaving = option.leaving
        waited_seconds = max(leaving.wait_seconds, queue_seconds + leaving.wait_behind_seconds)
        done_seconds = max(leaving.done_seconds, queue_seconds + leaving.done_behind_seconds)
        queue_seconds = max(0.0, done_seconds - block.forward_seconds - waited_seconds)
        stall_seconds += waited_seconds
    return stall_seconds + (queue_seconds if link.piece_bytes else 0.0)


def _read_stalls(instance: Instance, chosen: list[Option], link: Link) -> float:
    """Returns the seconds that the backward pass waits for bytes on their way back."""
    stall_seconds = 0.0
    idle_seconds = 0.0
    for block, option in zip(reversed(instance.blocks), reversed(chosen), strict=True):
        read_seconds = option.moved_bytes / link.read_bytes_per_second
        ahead_seconds = min(read_seconds, idle_seconds)
        waited_seconds = max(
            0.0, (option.moved_bytes - option.hidden_bytes) / link.read_bytes_per_second - ahead_seconds
        )
        stall_seconds += waited_seconds
        own_seconds = block.backward_seconds + option.extra_seconds + waited_seconds
        idle_seconds = max(0.0, own_seconds - (read_seconds - ahead_seconds))
    return stall_seconds
