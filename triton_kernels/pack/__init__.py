"""`pack_into` and `unpack_into`: a tensor in a byte for each element, for what leaves the device until backward."""

from .packing import BLOCK_ELEMENTS, Packed, pack, pack_into, unpack_into

__all__ = ["BLOCK_ELEMENTS", "Packed", "pack", "pack_into", "unpack_into"]
