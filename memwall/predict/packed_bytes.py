"""The bytes of a saved tensor that a plan has packed on its way out: a byte an element, and what these are worth."""

from memwall.store.backend import ALIGNMENT_BYTES, round_up

PACKED_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by the dtypes that are packed."""
# Elements that share a unit, and its bytes (triton_kernels.pack).
_BLOCK_ELEMENTS, _UNIT_BYTES = 128, 4
_MOST_SCRATCH_BYTES = 512 << 10

_PASSED_BYTES_PER_ELEMENT = 10


def device_pack_seconds(bytes_per_second: float) -> float:
    """Returns what it takes a device to pack and unpack a number: to read 4 bytes and write 1, and the reverse."""
    return _PASSED_BYTES_PER_ELEMENT / bytes_per_second


def units_offset_bytes(num_elements: int) -> int:
    """Returns where units begin, behind the codes: at a boundary that suits any device."""
    return round_up(num_elements, 512)


def num_packed_bytes(num_elements: int) -> int:
    """Returns the bytes of codes and units, in whole blocks of the disk so that they can be written where they lie."""
    num_blocks = -(-num_elements // _BLOCK_ELEMENTS)
    return round_up(units_offset_bytes(num_elements) + num_blocks * _UNIT_BYTES, ALIGNMENT_BYTES)


def scratch_bytes(num_elements: int) -> int:
    """Returns the bytes that packing or unpacking on a CPU takes besides, for as long as it lasts."""
    return min(num_elements // _BLOCK_ELEMENTS * _BLOCK_ELEMENTS * 4, _MOST_SCRATCH_BYTES)
