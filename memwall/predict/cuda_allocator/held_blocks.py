"""Device memory as a snapshot shows it at one moment: what is held, and which blocks of it are in use."""

from msgspec import Struct


class Range(Struct, frozen=True, kw_only=True):
    """Describes device memory in one piece: a segment, or a mapped stretch of an expandable one."""

    address: int
    num_bytes: int
    stream: int
    is_small: bool
    is_expandable: bool

    @property
    def end(self) -> int:
        """Returns the address behind it."""
        return self.address + self.num_bytes


class UsedBlock(Struct, frozen=True, kw_only=True):
    """Describes a block that a tensor uses, or that waits for another stream."""

    address: int
    num_bytes: int
    """With rounding, and with a remainder too small to be split off."""
    requested_bytes: int
    stack: int
    category: str
    is_pending: bool
    is_exact: bool
    """Whether the size was read from the snapshot; otherwise it follows from the allocator's rules."""

    @property
    def end(self) -> int:
        """Returns the address behind it."""
        return self.address + self.num_bytes


class Held(Struct, frozen=True, kw_only=True):
    """Holds the memory of one device at one moment, in order of address.

    Events call the block at index k by the number -1 - k.
    """

    ranges: tuple[Range, ...]
    blocks: tuple[UsedBlock, ...]
    granule_bytes: int = 20 << 20
    """Unit of mapping of expandable segments in the large pool."""


class Standing(Struct, frozen=True, kw_only=True):
    """Holds what a device holds before a step, and which blocks of it the step before it has left."""

    held: Held
    of_step: tuple[int, ...]
    """Indices into `held.blocks`: what the next step begins with, or lets go of."""

    @property
    def others_bytes(self) -> int:
        """Returns the bytes of blocks that no step knows of: they stay."""
        return sum(b.num_bytes for b in self.held.blocks) - sum(self.held.blocks[i].num_bytes for i in self.of_step)
