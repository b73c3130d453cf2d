"""Saved tensors that leave in a byte an element: `triton_kernels.pack` before a tier. Lossy, where a plan says so.

What is packed is a storage range of one dtype, whatever views of it were saved: 128 neighbours in memory share a unit.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memwall.errors import ApplyError
from memwall.predict.packed_bytes import PACKED_ITEMSIZES, num_packed_bytes, units_offset_bytes
from memwall.store.disk_tier import ByteRange, StorageTier
from memwall.triton_kernels.pack import BLOCK_ELEMENTS, Packed, pack, pack_into, unpack_into

_DTYPES = frozenset(getattr(torch, name) for name in PACKED_ITEMSIZES)


def can_leave_packed(tensor: Tensor, num_range_bytes: int) -> bool:
    """Returns whether a range may be packed for a saved tensor: floating-point numbers, and nothing beside them.

    What lies between the elements of a view may be anything, and a large number there would take its neighbours'
    digits.
    """
    return tensor.dtype in _DTYPES and tensor.numel() * tensor.itemsize == num_range_bytes


def check_can_pack(device: torch.device, block: str) -> None:
    """Raises ApplyError where saved tensors of a block on `device` cannot leave packed."""
    if device.type not in ("cpu", "cuda"):
        raise ApplyError(
            f"the plan packs what leaves the block '{block}', which is on {device}, and memwall packs CPU and CUDA "
            "tensors alone; make the plan without --allow low-bit-offload"
        )


def pack_seconds_per_element() -> float:
    """Measures packing and unpacking one number of float32, in memory that is there already."""
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    packed, best = pack(values), float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        pack_into(values, packed)
        unpack_into(packed, values)
        best = min(best, time.perf_counter() - begin)
    return best / values.numel()


@dataclass(slots=True, eq=False)
class PackedRange:
    """Holds a range on the tier behind; `num_elements` 0: as it was."""

    parked: Any
    num_elements: int

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that it takes there."""
        num_bytes: int = self.parked.num_bytes
        return num_bytes


@dataclass(slots=True, eq=False)
class PackedLoad:
    """Holds packed bytes on their way back, then the range in `buffer`."""

    of: PackedRange
    load: Any
    buffer: Tensor | None = None


class PackedTier:
    """Hands floating-point numbers to another tier packed.

    A block with a value that is not finite would come back as NaN in all of its elements. A range that has one goes as
    it is, for which the host waits for a device.

    Args:
        tier: where the bytes go.
        dtype: of the elements in all ranges.
    """

    def __init__(self, tier: StorageTier[Any, Any], dtype: torch.dtype) -> None:
        self._tier, self._dtype = tier, dtype

    def park(self, source: ByteRange, label: str) -> PackedRange:
        elements = source.tensor().view(self._dtype)
        memory = torch.empty(num_packed_bytes(elements.numel()), dtype=torch.uint8, device=elements.device)
        packed = self._packed_in(memory, elements.numel())
        pack_into(elements, packed)
        if not packed.is_finite:
            return PackedRange(self._tier.park(source, label), 0)
        return PackedRange(self._tier.park(ByteRange.of(memory), label), elements.numel())

    def load(self, parked: PackedRange, *, is_urgent: bool) -> PackedLoad:
        return PackedLoad(parked, self._tier.load(parked.parked, is_urgent=is_urgent))

    def collect(self, load: PackedLoad) -> Tensor:
        """Unpacks once, and lets go of the packed bytes then."""
        if load.buffer is None:
            memory = self._tier.collect(load.load)
            load.load = None
            load.buffer = self._unpacked(memory, load.of.num_elements) if load.of.num_elements else memory
        return load.buffer

    def discard(self, load: PackedLoad) -> None:
        if load.load is not None:
            self._tier.discard(load.load)

    def release(self, parked: PackedRange) -> None:
        self._tier.release(parked.parked)

    def close(self) -> None:
        """Does nothing: whoever opened the tier behind closes it."""

    def _unpacked(self, memory: Tensor, num_elements: int) -> Tensor:
        result = torch.empty(num_elements, dtype=self._dtype, device=memory.device)
        unpack_into(self._packed_in(memory, num_elements), result)
        return result.view(torch.uint8)

    def _packed_in(self, memory: Tensor, num_elements: int) -> Packed:
        num_blocks, offset = -(-num_elements // BLOCK_ELEMENTS), units_offset_bytes(num_elements)
        return Packed(
            codes=memory[:num_elements].view(torch.int8),
            units=memory[offset : offset + num_blocks * torch.float32.itemsize].view(torch.float32),
        )
