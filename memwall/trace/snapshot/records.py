"""Says what a CUDA memory snapshot is: frozen records beside those of a trace.

Written by `torch.cuda.memory._dump_snapshot()`; the format is described in the docstring of
`torch.cuda.memory._snapshot` and made by `THCPModule_memorySnapshot` (torch/csrc/cuda/Module.cpp). Indices point into
the tuples of the same record.
"""

from typing import Literal

from msgspec import Struct

Action = Literal[
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
]
BlockState = Literal["active_allocated", "active_pending_free", "inactive"]


class Frame(Struct, frozen=True, array_like=True):
    """Holds one line of a stack."""

    filename: str
    line: int
    name: str


class Event(Struct, frozen=True, array_like=True, gc=False):
    """Holds one thing the caching allocator did."""

    action: Action
    address: int
    """0 for `oom` and `snapshot`."""
    num_bytes: int
    """Bytes asked for (alloc, free_*), of the device memory (segment_*), rounded (oom), in use (snapshot)."""
    stream: int
    stack: int
    """Index into `Snapshot.stacks`; 0 is the empty one."""
    pool: tuple[int, int]
    """(0, 0) is the default pool; others belong to CUDA graphs and MemPools."""
    category: str
    """Says what it is for, where the writer said so (memwall, torch's profiler); "" otherwise."""
    device_free_bytes: int
    """Says what the device had left (oom only)."""


class SnapshotBlock(Struct, frozen=True, array_like=True, gc=False):
    """Holds a stretch of a segment, in one piece used or free."""

    address: int
    num_bytes: int
    requested_bytes: int
    """Meaningless for a free block."""
    state: BlockState
    """`active_pending_free`: freed by the program, still in use by another stream."""
    stack: int


class SnapshotSegment(Struct, frozen=True, kw_only=True):
    """Holds device memory in one piece, and how it is divided."""

    device: int
    address: int
    num_bytes: int
    stream: int
    kind: Literal["small", "large", "unknown"]
    """Which of the two free lists its blocks belong to."""
    pool: tuple[int, int]
    is_expandable: bool
    blocks: tuple[SnapshotBlock, ...]
    """Without gaps, in order of address."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """Holds the state of the allocator at one moment, and its history up to that moment."""

    segments: tuple[SnapshotSegment, ...]
    traces: tuple[tuple[Event, ...], ...]
    """Histories by device; empty where no history was recorded."""
    stacks: tuple[tuple[Frame, ...], ...]
    """Each stack once, innermost frame first; number 0 is empty."""
    settings: dict[str, str]
    """The allocator's settings as the snapshot names them."""
    unknown_actions: tuple[str, ...]
    """Kinds of events that this version of memwall does not know and left out."""
