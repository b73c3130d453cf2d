"""`pack` and `unpack`: a tensor in a byte for each element, for what leaves the device between forward and backward."""

from .packing import BLOCK_ELEMENTS, Packed, PackShape, cost, error_bound, pack, pack_into, unpack, unpack_into

__all__ = ["BLOCK_ELEMENTS", "PackShape", "Packed", "cost", "error_bound", "pack", "pack_into", "unpack", "unpack_into"]
