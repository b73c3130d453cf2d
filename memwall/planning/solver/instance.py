"""The optimisation problem as data: blocks with options, memory rows, and the link to the next tier.

Built from a trace by `planning.block_problem`, solved by `milp` beside this file; all in integer bytes.
"""

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Leaving(Struct, frozen=True, kw_only=True):
    """Says how long a block's forward waits until what it moves has room on its way, and when the link is done with it.

    Both are in seconds, the second from the begin of the forward. With a queue of q seconds on the link before, each is
    the longer of the figure without one and of q and the figure behind one.
    """

    wait_seconds: float = 0.0
    wait_behind_seconds: float = -math.inf
    """At most `wait_seconds`."""
    done_seconds: float = 0.0
    done_behind_seconds: float = 0.0
    """At most `done_seconds`."""


class Option(Struct, frozen=True, kw_only=True):
    """Describes one executable way to treat a block's saved tensors."""

    name: str
    """keep, full, select-1.., offload, offload as int8, full+offload: unique within the block."""
    extra_seconds: float
    """Cost per step beyond keep: recomputation and copying, without waiting for the link."""
    moved_bytes: int
    """Bytes that leave the device in forward and come back in backward."""
    hidden_bytes: int = 0
    """The part of them that the link reads beside the block's own backward, before that asks for it: no more than it
    reads in those seconds."""
    leaving: Leaving = Leaving()
    """How the block's forward and the link wait for each other."""


class BlockOptions(Struct, frozen=True, kw_only=True):
    """Describes a sub-module treated as one. Blocks are listed in forward order."""

    path: str
    options: tuple[Option, ...]
    """options[0] is always keep: no extra seconds, nothing moved."""
    forward_seconds: float
    backward_seconds: float


class Row(Struct, frozen=True, kw_only=True):
    """Limits one program point: fixed_bytes + sum over blocks of held[block][chosen option] <= budget."""

    label: str
    """For people: 'forward of blocks.3', 'loss', 'backward of blocks.0', 'optimizer step'."""
    fixed_bytes: int
    held: tuple[tuple[int, ...], ...]
    """held[block][option] bytes at this point; may be negative for what an option frees of fixed_bytes."""


class Link(Struct, frozen=True, kw_only=True):
    """Describes the way to the next tier."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    window_bytes: int
    """Bytes that may be on their way out at once. Their memory is counted in Row.fixed_bytes."""
    capacity_bytes: int
    """Room on the tier for everything moved."""
    piece_bytes: int = 0
    """Tensors larger than the window leave in copies of such pieces, and backward reads all of them: a disk's way.
    0: each leaves as a whole, and what is still on its way when backward begins never leaves: a device's."""


class Instance(Struct, frozen=True, kw_only=True, dict=True):
    """Asks for one option per block, least seconds, every row within the budget."""

    blocks: tuple[BlockOptions, ...]
    rows: tuple[Row, ...]
    budget_bytes: int
    link: Link | None
    """None: options that move bytes must not be chosen."""

    def within(self, budget_bytes: int) -> "Instance":
        """Returns the same with another budget; what follows from the rows is not worked out again."""
        other = replace(self, budget_bytes=budget_bytes)
        other.__dict__.update(self.__dict__)
        return other

    @cached_property
    def offsets(self) -> NDArray[np.intp]:
        """Returns where each block's options begin among those of all blocks."""
        counts = [len(block.options) for block in self.blocks]
        return np.cumsum([0, *counts[:-1]], dtype=np.intp)[: len(counts)]

    @cached_property
    def held(self) -> Int64s:
        """Returns the bytes [rows, options of all blocks] of `Row.held`."""
        num_options = sum(len(block.options) for block in self.blocks)
        flat = [size for row in self.rows for sizes in row.held for size in sizes]
        return np.array(flat, dtype=np.int64).reshape(len(self.rows), num_options)

    @cached_property
    def fixed_bytes(self) -> Int64s:
        """Returns the fixed bytes of each row."""
        return np.array([row.fixed_bytes for row in self.rows], dtype=np.int64)


class Choice(NamedTuple):
    """Holds a solution: the option index per block, in block order, and what it costs."""

    options: tuple[int, ...]
    extra_seconds: float
    """Option costs plus stalls waiting for the link."""
    lower_bound_seconds: float
    """No choice can cost less; equals extra_seconds when proven optimal; 0.0 when the method proves nothing."""
