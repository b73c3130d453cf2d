"""A machine as planning knows it: the tiers below its device, and the speeds that planning weighs moving bytes by."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

_Rate = Annotated[float, Meta(gt=0)]


class Tier(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a place below the device's memory, to which bytes can move."""

    name: Literal["host", "disk"]
    directory: str = ""
    """Directory in which bytes lie on a disk; "" for host memory."""
    write_bytes_per_second: _Rate
    read_bytes_per_second: _Rate
    free_bytes: Annotated[int, Meta(ge=0)]
    """The bytes that this process may take: of several on one host, its equal part."""
    total_bytes: Annotated[int, Meta(ge=0)] = 0
    """The size of a disk; 0 for host memory."""


class Machine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds what was measured of the machine that a step runs on; 0.0 stands for what was not."""

    tiers: tuple[Tier, ...] = ()
    """Those that plans may use, the nearest one first."""
    cpu_step_bytes_per_second: float = 0.0
    """How fast torch's fused AdamW reads and writes memory on the CPU, all its threads together."""
    cpu_step_bfloat16_bytes_per_second: float = 0.0
    """The same of parameters, gradients and state in bfloat16, which the CPU converts."""
    copy_seconds_per_byte: float = 0.0
    """Computing time that moving a byte out and back costs."""
    fault_seconds_per_byte: float = 0.0
    """Time for a byte of memory to become resident anew, in pages as malloc gets them."""
    huge_fault_seconds_per_byte: float = 0.0
    """The same in huge pages."""
    pack_seconds_per_element: float = 0.0
    """Computing time to pack a floating-point number into a byte, and to unpack it into memory that is new."""

    @property
    def next_tier(self) -> Tier | None:
        """Returns the tier right below the device; None where nothing can leave it."""
        return self.tiers[0] if self.tiers else None

    @property
    def disk(self) -> str:
        """Returns the directory of the disk; "" where there is none."""
        return next((tier.directory for tier in self.tiers if tier.name == "disk"), "")

    @property
    def heap_fault_seconds_per_byte(self) -> float:
        """Returns the time of a fault where memory begins at the boundary of huge pages.

        That is so in the tensor heap, and of what arrives from a disk.
        """
        return self.huge_fault_seconds_per_byte or self.fault_seconds_per_byte
